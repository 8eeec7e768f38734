"""Model folders, rollouts and output paths that cannot be used end by one message."""

import asyncio
import contextlib
import json
import shutil
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import tiny
from harness import ranks
from in_memory import ALONE
from minirl.base.errors import UserError
from minirl.base.oversight import Oversight
from minirl.checkpoint import run_folder
from minirl.checkpoint.exporting import plan_folder, write_companions
from minirl.config.policy import PolicyConfig
from minirl.config.rl import RLConfig
from minirl.config.shared import DataConfig, EnvConfig, EvaluateConfig
from minirl.config.supervised import SFTConfig
from minirl.engine.engine import Sampling
from minirl.engine.loop import Completion
from minirl.envs import Env, Result
from minirl.envs.registry import make_env
from minirl.model import build, loading
from minirl.model.scratch import make_tokenizer
from minirl.parallel.machines import check_can_write
from minirl.parallel.mesh import World
from minirl.rollout import records
from minirl.rollout.conversation import Conversation
from minirl.rollout.episode import Episode, EpisodeRunner
from minirl.rollout.sampler import GroupScheduler
from minirl.run import evaluation, results
from minirl.run.evaluation import evaluate
from minirl.run.inputs import check_output, check_replay, find_model
from minirl.supervise.watch import Watch
from minirl.types.packed import Trajectory
from run_folders import save_config


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny.make(tmp_path_factory.mktemp("model"), "qwen3")


def changed(folder: Path, file: str, **values: object) -> None:
    text = json.loads((folder / file).read_text()) if (folder / file).exists() else {}
    (folder / file).write_text(json.dumps(text | values))


def write(file: str, text: str | bytes):
    data = text if isinstance(text, bytes) else text.encode()
    return lambda folder: (folder / file).write_bytes(data)


def config(**values: object):
    return lambda folder: changed(folder, "config.json", **values)


def generation(**values: object):
    return lambda folder: changed(folder, "generation_config.json", **values)


def add_token(folder: Path) -> None:
    """A word with a token beyond the embedding."""
    text = json.loads((folder / "tokenizer.json").read_text())
    text["model"]["vocab"]["minirl"] = 5000
    (folder / "tokenizer.json").write_text(json.dumps(text))


def remove(file: str):
    return lambda folder: (folder / file).unlink()


# name -> what is done to a good folder, and what the message must say
SINGLE_TURN = make_env("single_turn")
FOLDERS = {
    "heads 0": (config(num_attention_heads=0), "num_attention_heads = 0"),
    "kv heads 0": (config(num_key_value_heads=0), "num_key_value_heads = 0"),
    "heads -4": (config(num_attention_heads=-4), "num_attention_heads = -4"),
    "heads that do not divide": (config(num_key_value_heads=3), "num_key_value_heads = 3"),
    "hidden size is a text": (config(hidden_size="big"), "hidden_size"),
    "hidden size is null": (config(hidden_size=None), "hidden_size"),
    "hidden size is 0": (config(hidden_size=0), "hidden_size = 0"),
    "hidden size is a fraction": (config(hidden_size=12.5), "hidden_size"),
    "hidden size is a list": (config(hidden_size=[128]), "hidden_size"),
    "vocabulary 0": (config(vocab_size=0), "vocab_size"),
    "vocabulary -1": (config(vocab_size=-1), "vocab_size"),
    "vocabulary is a text": (config(vocab_size="many"), "vocab_size"),
    "layers 0": (config(num_hidden_layers=0, layer_types=[]), "num_hidden_layers = 0"),
    "layer types too few": (config(layer_types=["full_attention"]), "layer_types"),
    "layer types of none": (config(layer_types=["a", "b"]), "layer_types"),
    "layer types too many": (config(layer_types=["full_attention"] * 9), "layer_types"),
    "head_dim 31": (config(head_dim=31), "head_dim.*31"),
    "head_dim 0": (config(head_dim=0), "head_dim"),
    "head_dim -32": (config(head_dim=-32), "head_dim = -32"),
    "positions 0": (config(max_position_embeddings=0), "max_position_embeddings"),
    "intermediate 0": (config(intermediate_size=0), "intermediate_size = 0"),
    "layers without an end": (config(num_hidden_layers=10**9), "num_hidden_layers = 1000000000 is"),
    "heads without an end": (config(num_attention_heads=2**30), "num_attention_heads = 1073741824"),
    "a tower without an end": (config(vision_config={"depth": 10**6}), "depth = 1000000 is more"),
    "vocabulary too small": (config(vocab_size=100), "beyond vocab_size = 100"),
    "head_dim 2": (config(head_dim=2), "head_dim = 2, and vLLM's CPU build"),
    "head_dim 34": (config(head_dim=34), "head_dim = 34, and vLLM's CPU build"),
    "positions too few": (
        config(max_position_embeddings=10),
        r"engine.max_model_len = 40 .* lower data.max_prompt_tokens \+ rollout.max_tokens",
    ),
    "another family": (config(model_type="gpt2"), "gpt2"),
    "no family": (config(model_type="none"), "config.json"),
    "family is a number": (config(model_type=3), "config.json"),
    "dtype of nothing": (config(dtype="float7"), "config.json"),
    "quantised": (config(quantization_config={"quant_method": "fp8"}), "quantised"),
    "rope of nothing": (config(rope_parameters="fast"), "config.json"),
    "config cut": (write("config.json", '{"model_type": "qw'), "config.json cannot be read"),
    "config empty": (write("config.json", ""), "config.json cannot be read"),
    "config a list": (write("config.json", "[]"), "config.json cannot be read"),
    "config bytes": (write("config.json", b"\xff\xfe\x00"), "config.json cannot be read"),
    "config deep": (write("config.json", "[" * 100_000), "config.json cannot be read"),
    "config without anything": (write("config.json", "{}"), "config.json cannot be read"),
    "tokenizer empty": (write("tokenizer.json", "{}"), "its tokenizer cannot be read"),
    "tokenizer cut": (write("tokenizer.json", '{"version": '), "its tokenizer cannot be read"),
    "tokenizer bytes": (write("tokenizer.json", b"\x00\xff"), "its tokenizer cannot be read"),
    "tokenizer a list": (write("tokenizer.json", "[]"), "its tokenizer cannot be read"),
    "tokenizer config cut": (write("tokenizer_config.json", "{"), "tokenizer"),
    "tokenizer config a list": (write("tokenizer_config.json", "[]"), "tokenizer"),
    "no tokenizer.json": (remove("tokenizer.json"), "tokenizer"),
    "token beyond": (add_token, "1 tokens beyond vocab_size"),
    "template": (write("chat_template.jinja", "hello"), "leaves out the prompt"),
    "generation cut": (write("generation_config.json", "{"), "generation_config.json cannot"),
    "generation a list": (write("generation_config.json", "[1]"), "generation_config.json cannot"),
    "generation bytes": (write("generation_config.json", b"\xff"), "generation_config.json cannot"),
    "eos beyond": (generation(eos_token_id=1_000_000), "1000000.* lie beyond vocab_size"),
    "one eos beyond": (generation(eos_token_id=[1, 1_000_000]), "1000000.* lie beyond"),
    "eos negative": (generation(eos_token_id=-1), "eos_token_id = -1; give the number"),
    "eos a text": (generation(eos_token_id="</s>"), "eos_token_id = '</s>'; give the number"),
    "eos a fraction": (generation(eos_token_id=1.5), "eos_token_id = 1.5; give the number"),
    "eos a bool": (generation(eos_token_id=True), "eos_token_id = True; give the number"),
    "eos lists": (generation(eos_token_id=[[1]]), "eos_token_id = .* give the number"),
    "eos texts": (generation(eos_token_id=["a"]), "eos_token_id = .* give the number"),
    "weights missing": (remove("model.safetensors"), "has no weights"),
    "config missing": (remove("config.json"), "has no config.json"),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_that_is_no_model(tmp_path, model, name):
    change, message = FOLDERS[name]
    folder = tmp_path / "m"
    shutil.copytree(model, folder)
    change(folder)
    cfg = RLConfig(policy=PolicyConfig(model=str(folder)))
    cfg.engine.max_model_len = 40
    with pytest.raises(UserError, match=message) as error:
        find_model(cfg, HERE)
    assert str(folder) in str(error.value) and len(str(error.value)) < 1500


def test_a_path_in_which_the_engine_sees_a_pattern(tmp_path, model):
    folder = tmp_path / "run [1]"
    shutil.copytree(model, folder)
    cfg = EvaluateConfig(model=str(folder))
    cfg.engine.max_model_len = 40
    with pytest.raises(UserError, match=r"give a path without them"):
        find_model(cfg, HERE)
    (tmp_path / "m").symlink_to(folder)
    cfg.model = str(tmp_path / "m")
    assert find_model(cfg, HERE).config.vocab_size


def test_a_replay_needs_no_head_size_of_an_engine(tmp_path, model):
    folder = tmp_path / "m"
    shutil.copytree(model, folder)
    config(head_dim=34)(folder)
    cfg = RLConfig(policy=PolicyConfig(model=str(folder)))
    cfg.engine.max_model_len = 40
    cfg.rollout.replay = "runs/before/rollouts"
    assert find_model(cfg, HERE).config.head_dim == 34


HERE = SimpleNamespace(watch=Watch(), device=torch.device("cpu"))
INDEXES = {
    "cut": "{",
    "empty": "",
    "a list": "[]",
    "without a map": "{}",
    "a map that is a list": '{"weight_map": []}',
    "a map of numbers": '{"weight_map": {"a": 1}}',
    "a file that is not there": '{"weight_map": {"a": "none.safetensors"}}',
    "a file with a zero byte": '{"weight_map": {"a": "\\u0000"}}',
    "deep": "[" * 100_000,
    "bytes": b"\xff\xfe",
}


@pytest.mark.parametrize("name", INDEXES)
def test_an_index_that_names_no_weights(tmp_path, model, name):
    shutil.copytree(model, tmp_path / "m")
    write("model.safetensors.index.json", INDEXES[name])(tmp_path / "m")
    with pytest.raises(UserError, match="^policy.model: "):
        loading.open_weights(tmp_path / "m")


@pytest.mark.parametrize("text", [b"", b"\x00" * 8, b"\xff" * 100, b"{}"])
def test_weights_that_are_none(tmp_path, model, text):
    shutil.copytree(model, tmp_path / "m")
    write("model.safetensors", text)(tmp_path / "m")
    with pytest.raises(UserError, match="^policy.model: cannot read"):
        loading.open_weights(tmp_path / "m")


@pytest.mark.parametrize("place", ["/nowhere", "x" * 300, "/dev/null", "a b", "../..//", ""])
def test_a_place_without_a_model(place):
    with pytest.raises(UserError, match="policy.model = "):
        build.find_folder(place, "policy.model")


def test_a_generation_config_that_the_library_would_not_write(tmp_path, model):
    """Real models have such: a temperature without do_sample."""
    shutil.copytree(model, tmp_path / "m")
    generation(eos_token_id=1, temperature=0.6, top_p=0.9)(tmp_path / "m")
    (tmp_path / "out").mkdir()
    shapes = {"model.norm.weight": build.torch.Size([4])}
    plan = plan_folder(tmp_path / "m", shapes, build.torch.float32, 1)
    write_companions(plan, tmp_path / "out")
    copied = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert copied["temperature"] == 0.6


def test_text_that_is_only_learned_needs_no_end(tmp_path, model):
    shutil.copytree(model, tmp_path / "m")
    generation(eos_token_id=1_000_000)(tmp_path / "m")
    cfg = SFTConfig(policy=PolicyConfig(model=str(tmp_path / "m")))
    cfg.data.max_tokens = 40
    find_model(cfg, HERE, chats=False)
    with pytest.raises(UserError, match="lie beyond"):
        find_model(cfg, HERE)


# --------------------------------------------------------------------------------------------------
# where things are written


ONE = SimpleNamespace(
    **vars(ALONE), barrier=lambda: None, broadcast=lambda value, rank: value, device="cpu"
)


@pytest.mark.parametrize(
    "place", ["/proc/run", "/proc/self/run", "{0}/file/run", "{0}/" + "x" * 300]
)
@pytest.mark.parametrize("resume", [False, True])
def test_an_output_that_nobody_can_write(tmp_path, place, resume):
    """It is told at the latest when the run makes its folder, before it loads anything."""
    (tmp_path / "file").write_text("")
    output = place.format(tmp_path)
    with pytest.raises(UserError, match="output = .*(choose|cannot)"):
        check_output(RLConfig(output=output, resume=resume), ONE)
        run_folder.hold(Path(output))


def test_the_folder_of_another_run(tmp_path, monkeypatch):
    (tmp_path / "metrics.jsonl").write_text("")
    cfg = RLConfig(output=str(tmp_path))
    with pytest.raises(UserError, match="metrics.jsonl of another run; choose another folder"):
        check_output(cfg, ONE)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with pytest.raises(UserError, match="ranks that torchrun starts again need --resume"):
        check_output(cfg, ONE)


@pytest.mark.parametrize(
    "place", ["{0}", "/", "/proc/a.json", "{0}/file/a.json", "{0}/" + "x" * 300, "{0}/a\0b"]
)
def test_a_file_that_nobody_can_write(tmp_path, place):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="output = .* cannot be written: .*; name another file"):
        check_can_write(Path(place.format(tmp_path)), "output", ONE)


def test_a_file_in_a_new_folder_can_be_written(tmp_path):
    check_can_write(tmp_path / "a" / "b" / "c.json", "output", ONE)
    (tmp_path / "a" / "b" / "c.json").write_text("")
    check_can_write(tmp_path / "a" / "b" / "c.json", "output", ONE)


def ask_often(mesh, files):
    for file in files:
        check_can_write(file, "output", mesh)


def test_every_rank_asks_whether_a_file_can_be_written(tmp_path):
    """All of them at once; the attempt of one is not another's mistake."""
    ranks(2, ask_often, [tmp_path / str(i) for i in range(100)])
    assert not list(tmp_path.iterdir())


# --------------------------------------------------------------------------------------------------
# rollouts

RECORD = {
    "group": 0,
    "episode": 0,
    "segment": 0,
    "version": 0,
    "reward": 1.0,
    "images": [],
    "info": {},
    "tokens": [1, 2],
    "sampled": [False, True],
    "logprobs": [0.0, -1.0],
    "rewards": [0.0, 1.0],
    "versions": [-1, 0],
}
LINES = {
    "no JSON": "{",
    "a list": "[]",
    "no keys": "{}",
    "deep": "[" * 100_000,
    "blank inside": "\x0c",
    "lists of other lengths": RECORD | {"tokens": [1, 2, 3]},
    "tokens in tokens": RECORD | {"tokens": [[1], [2]]},
    "tokens are texts": RECORD | {"tokens": ["a", "b"]},
    "tokens are a number": RECORD | {"tokens": 3},
    "token too large": RECORD | {"tokens": [1, 2**40]},
    "log-prob of nan": RECORD | {"logprobs": [0.0, float("nan")]},
    "reward of inf": RECORD | {"reward": float("inf")},
    "reward of a text": RECORD | {"reward": "much"},
    "reward of null": RECORD | {"reward": None},
    "images of numbers": RECORD | {"images": [3]},
}


def test_a_replay_of_other_tokens_or_of_another_temperature_is_refused(tmp_path):
    cfg = RLConfig()
    cfg.rollout.replay = str(tmp_path / "rollouts")
    (tmp_path / "rollouts").mkdir()
    check_replay(cfg, make_tokenizer([]))  # nothing is known of them
    dumped = make_tokenizer(["one token"]).backend_tokenizer
    (tmp_path / "rollouts" / "tokenizer.json").write_text(dumped.to_str())
    save_config(cfg, tmp_path / "config.yaml")
    check_replay(cfg, make_tokenizer(["one token"]))
    with pytest.raises(UserError, match="take a model with the same tokenizer"):
        check_replay(cfg, make_tokenizer([]))
    cfg.rollout.temperature = 0.5
    with pytest.raises(UserError, match=r"temperature = 0.5: .* are of temperature 1.0; set that"):
        check_replay(cfg, make_tokenizer(["one token"]))


@pytest.mark.parametrize("name", LINES)
def test_a_line_that_is_no_trajectory(tmp_path, name):
    line = LINES[name]
    text = line if isinstance(line, str) else json.dumps(line)
    (tmp_path / "step-0-rank-0.jsonl").write_text(f"{json.dumps(RECORD)}\n{text}\n")
    with pytest.raises(UserError, match="line 2 is not a trajectory"):
        list(records.read_file(tmp_path / "step-0-rank-0.jsonl"))


def test_replay_of_nothing_is_told_before_anything_is_loaded(tmp_path):
    (tmp_path / "step-0-rank-0.jsonl").write_text(json.dumps(RECORD) + "\n")
    assert len(list(records.read_file(tmp_path / "step-0-rank-0.jsonl"))) == 1
    records.check_steps(tmp_path, 1, resume=False)
    for folder, num_steps, resume in (
        (tmp_path / "none", 1, False),
        (tmp_path / "step-0-rank-0.jsonl", 1, False),
        (tmp_path, 2, False),
        (tmp_path, 2, True),
    ):
        with pytest.raises(UserError, match=f"rollout.replay = {folder} has no step-"):
            records.check_steps(folder, num_steps, resume=resume)
    (tmp_path / "step-0-rank-0.jsonl").write_bytes(b"\xff")
    with pytest.raises(UserError, match="rollout.replay: .* is not UTF-8 text"):
        list(records.read_file(tmp_path / "step-0-rank-0.jsonl"))


# --------------------------------------------------------------------------------------------------
# environments


class Answers:
    """An engine loop that answers every prompt by the same token."""

    def __init__(self):
        self.engine = SimpleNamespace(cfg=SimpleNamespace(max_model_len=60))
        self.at_work = contextlib.nullcontext
        self.watch = Oversight()
        self.version = 0

    async def generate_for_episode(self, request):
        return Completion([10], [-0.5], stopped=True, versions=[0])


class Scripted(Env):
    """Says what it was given."""

    def __init__(self, first: object, reply: Result):
        self.first = first
        self.reply = reply

    async def reset(self, row):
        return self.first

    async def step(self, state):
        return self.reply


DONE = Result(done=True)
# name -> first observation, reply, and why the episode fails
ENVS = {
    "tokens beyond the vocabulary": ([5, 10**6], DONE, "1000000 is no token"),
    "negative tokens": ([-1], DONE, "-1 is no token"),
    "fractions": ([1.5], DONE, "1.5 is no token"),
    "bools": ([True], DONE, "True is no token"),
    "texts": (["a"], DONE, "'a' is no token"),
    "null": (None, DONE, "said None"),
    "no messages": ([], DONE, r"said \[\]"),
    "a number": (3, DONE, "said 3"),
    "bytes": (b"a", DONE, "said b'a'"),
    "an object": ({"role": "user", "content": "a"}, DONE, "said {'role'"),
    "a surrogate": ("a\ud800", DONE, "half of a surrogate pair"),
    "a surrogate in a message": ([{"role": "user", "content": "\udc00"}], DONE, "surrogate"),
    "a message without content": ([{"role": "user"}], DONE, "message 1 is"),
    "a message without role": ([{"content": "a"}], DONE, "message 1 is"),
    "a content of a number": ([{"role": "user", "content": 3}], DONE, "message 1 is"),
    "a content of texts": ([{"role": "user", "content": ["a"]}], DONE, "message 1 is"),
    "a message that is a text": ([{"role": "user", "content": "a"}, "b"], DONE, "message 2"),
    "max_tokens 0": ("a", Result(observation="b", sampling={"max_tokens": 0}), "max_tokens = 0;"),
    "max_tokens -1": ("a", Result(observation="b", sampling={"max_tokens": -1}), "max_tokens = -1"),
    "max_tokens a text": ("a", Result(observation="b", sampling={"max_tokens": "9"}), "= '9'"),
    "max_tokens null": ("a", Result(observation="b", sampling={"max_tokens": None}), "= None"),
    "max_tokens 1.5": ("a", Result(observation="b", sampling={"max_tokens": 1.5}), "= 1.5"),
    "stop tokens": ("a", Result(observation="b", sampling={"stop_token_ids": 3}), "a list of tok"),
    "stop tokens beyond": (
        "a",
        Result(observation="b", sampling={"stop_token_ids": [10**6]}),
        "1000000 is no token",
    ),
    "temperature": ("a", Result(observation="b", sampling={"temperature": 0}), "may set max_tok"),
    "a reward of nan": ("a", Result(reward=float("nan")), "finite reward"),
    "a reward of a text": ("a", Result(reward="1"), "finite reward"),  # type: ignore[arg-type]
    "an info of a text": ("a", Result(info={"a": "b"}), "a = 'b', not a Result"),  # type: ignore[dict-item]
    "no reply": ("a", Result(), "it is not done and said None"),
    "tokens in the reply": ("a", Result(observation=[10**6]), "is no token"),
    "a surrogate in the reply": ("a", Result(observation="\ud800"), "surrogate"),
    "messages in the reply": ("a", Result(messages=[{"role": "user"}]), "message 1 is"),
}


@pytest.mark.parametrize("name", ENVS)
def test_an_environment_whose_episode_fails(name):
    first, reply, message = ENVS[name]
    e = played(Scripted(first, reply))
    assert message.replace("\\", "") in e.error, e.error


def test_an_environment_may_show_an_empty_text():
    e = played(Scripted("", DONE))
    assert not e.error and e.turn == 1


def test_the_last_turn_is_kept_for_people():
    """It is what they are shown: the whole begins with what the policy read."""
    runner = make_runner(name="mine.py:Scripted")
    e = played(Scripted("what the policy read", DONE), runner)
    (t,) = runner.finish([e], [runner.score(e)])
    assert t.info["last_turn"] == e.answer and "policy read" in t.info["completion"]
    entry = {"prompt": "", "answer": t.info["completion"], "last_turn": "4", "reward": 0.0}
    assert results.describe([entry]) == "  [0.00]  -> 4"
    assert results.full_text([entry]).endswith(f"<|assistant|>{e.answer}\nlast turn: 4")


def test_of_a_row_with_megabytes_of_tests_only_the_beginning_is_shown():
    """A text of all of it would take 20 ms for each episode, in which the engine may wait."""
    runner = make_runner(name="mine.py:Scripted")
    e = played(Scripted("q", DONE), runner)
    tests = [{"input": "x" * 1000, "output": [1, 2.5, None]} for _ in range(3000)]
    e.row = {**e.row, "tests": tests, "level": 3, "text": "y" * 1000}
    began = time.process_time()
    (t,) = runner.finish([e], [None])
    assert time.process_time() - began < 0.1
    shown = t.info["row"]
    assert shown["level"] == "3" and shown["text"] == "y" * 500
    assert shown["tests"].startswith("[{'input': 'xxx") and len(shown["tests"]) == 500
    e.row["tests"] = tests = [{"a": [1, "b", (2.5, None)]}] * 3
    (t,) = runner.finish([e], [None])
    assert t.info["row"]["tests"] == str(tests)


def test_rewritten_history_stands_once_in_the_text_of_an_episode():
    """The texts of segments that drop the thoughts of earlier turns: T turns, T times as long."""
    turns = [f"<think>{n}</think>{n}" for n in range(100)]
    texts = ["q" + "".join(str(n) for n in range(last)) + turns[last] for last in range(100)]
    assert records.joined([]) == "" and records.joined(texts[:1]) == "q<think>0</think>0"
    assert records.joined(["ab", "abc", "xbc"]) == "ab\nc\nxbc"
    later = [f"{n - 1}{turns[n]}" for n in range(1, 100)]
    assert records.joined(texts) == "\n".join(["q" + turns[0], *later])


def make_runner(**env: object) -> EpisodeRunner:
    cfg = EvaluateConfig(env=EnvConfig(max_turns=4, max_tokens=40, **env), data=DataConfig())
    return EpisodeRunner(Answers(), None, cfg, SINGLE_TURN)  # type: ignore[arg-type]


def played(env: Env, runner: EpisodeRunner | None = None) -> Episode:
    runner = runner or make_runner()
    runner.make_env = lambda: env
    e = Episode(
        ticket=0,
        number=0,
        row={"prompt": "a"},
        conversation=Conversation(make_tokenizer([])),
        sampling=Sampling(max_tokens=8, stop_token_ids=()),
    )
    asyncio.run(runner.run(e))
    return e


@pytest.mark.parametrize(
    ("troubles", "why"),
    [
        ([], "sampled no token in any; give the prompts more room by engine.max_model_len$"),
        (["reset raised OSError", "reset"], "OSError; fix env.name$"),
    ],
)
def test_an_evaluation_without_answers_says_why(troubles, why):
    runner = EpisodeRunner(None, None, EvaluateConfig(), SINGLE_TURN)  # type: ignore[arg-type]
    runner.troubles = troubles
    ran = GroupScheduler(runner)
    sampler = SimpleNamespace(mesh=ALONE, evaluation=ran, collect=lambda *arguments: [])
    prompts = SimpleNamespace(rows=[1, 2, 3])
    with pytest.raises(UserError, match=f"none of the 3 held-out prompts got an answer.*{why}"):
        evaluate(sampler, prompts, EvaluateConfig().eval, None, None)  # type: ignore[arg-type]


def test_scores_without_dropped_episodes_say_so(capsys):
    info = {"answer_tokens": 1, "error": "", "stopped": True, "prompt": "a", "completion": "b"}
    shown = {"source": ""}
    t = Trajectory(
        tokens=np.array([1, 2], np.int32),
        sampled=np.array([False, True]),
        logprobs=np.zeros(2, np.float32),
        info=info | shown,
    )
    cfg = EvaluateConfig().eval
    alone = SimpleNamespace(**vars(ALONE), gather_named=partial(World.gather_named, ALONE))
    for num_prompts, said in ((1, ""), (3, "held-out scores are of 1 of 3 episodes; the others")):
        result = evaluation.score([t], [], num_prompts, cfg, None, alone)
        assert result["scores"]["accuracy"] == 0
        assert (said in capsys.readouterr().err) if said else not capsys.readouterr().err


@pytest.mark.parametrize("rank", [0, 1])
def test_a_long_evaluation_says_how_far_it_is(rank, monkeypatch, capsys):
    monkeypatch.setattr(evaluation, "SECONDS_BETWEEN_WORDS", 0.01)
    groups = {n: SimpleNamespace(finished=n < 2) for n in range(5)}
    ran = SimpleNamespace(groups=groups)
    sampler = SimpleNamespace(mesh=SimpleNamespace(rank=rank), evaluation=ran)
    with evaluation.telling_progress(sampler, 9):  # type: ignore[arg-type]
        time.sleep(0.2)
    said = "evaluation: 2 prompts answered on rank 0, of 9 in all"
    assert (said in capsys.readouterr().err) == (rank == 0)


def test_a_prompt_longer_than_the_context_is_cut_short_without_a_crash():
    e = played(Scripted("x" * 500, DONE))
    assert e.truncated and not e.error and not e.conversation.num_sampled()
