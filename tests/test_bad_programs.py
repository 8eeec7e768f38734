"""A sample of bad inputs through the programs themselves: one message, exit code 2, no traceback.

What each check refuses is in tests/test_bad_values.py, test_bad_rows.py and test_bad_models.py."""

import json
import shutil
import struct
from pathlib import Path

import pytest
import torch

import tiny
from programs import QUICKSTART, fork, torchrun


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """A folder with everything that the cases below name."""
    folder = tmp_path_factory.mktemp("bad_programs")
    rows = [{"prompt": f"word {i}", "answer": str(i)} for i in range(20)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lists = [row | {"answer": [row["answer"]]} for row in rows]
    (folder / "lists.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lists))
    (folder / "deep.jsonl").write_text('{"prompt": ' + "[" * 100_000 + "\n")
    (folder / "half.jsonl").write_text('{"prompt": "a\\ud800", "answer": "b"}\n')
    chats = [{"prompt": f"word {i}", "completion": ["a"]} for i in range(20)]
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats))
    pairs = [{"prompt": f"word {i}", "chosen": "a", "rejected": "b"} for i in range(20)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    labelled = [{"prompt": f"word {i}", "completion": "a", "label": i % 2 == 0} for i in range(20)]
    (folder / "labelled.jsonl").write_text("".join(json.dumps(row) + "\n" for row in labelled))
    examples = [{"prompt": f"word {i}", "completion": "a"} for i in range(20)]
    (folder / "examples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in examples))
    (folder / "twice.yaml").write_text("seed: 1\nseed: 2\n")
    (folder / "utf16.yaml").write_bytes("seed: 1".encode("utf-16"))
    (folder / "loop.yaml").write_text("policy: &a [*a]\n")
    (folder / "nothing.jinja").write_text("hello")
    rounds = "{% for i in range(99999) %}{% for i in range(99999) %}{% endfor %}{% endfor %}"
    (folder / "endless.jinja").write_text(rounds + "{{ messages[0].content }}")
    (folder / "zero.jinja").write_text("{{ messages[0].content }}{{ 1 / 0 }}")
    (folder / "file").write_text("")
    model = tiny.make(folder / "model")
    for name, file, values in (
        ("eos", "generation_config.json", {"eos_token_id": 1_000_000}),
        ("tokens", "config.json", {"vocab_size": 100}),
    ):
        shutil.copytree(model, folder / name)
        text = json.loads((folder / name / file).read_text())
        (folder / name / file).write_text(json.dumps(text | values))
    weights = (model / "model.safetensors").read_bytes()
    for name, content in (("cut", weights[:-100]), ("head", struct.pack("<Q", 2**62) + weights)):
        shutil.copytree(model, folder / name)
        (folder / name / "model.safetensors").write_bytes(content)
    shutil.copytree(model, folder / "tokenizer")
    (folder / "tokenizer" / "tokenizer.json").write_text("{}")
    return folder


RL = "--config {quickstart} --data.train {world}/rows.jsonl --data.held-out 4 --output {world}/out "
EVALUATE = "--model {world}/model --data.eval {world}/rows.jsonl "
DPO = "--policy.model {world}/model --data.train {world}/pairs.jsonl --output {world}/out "
DPO += "--data.held-out 4 --data.max-tokens 128 "
SFT = "--policy.model {world}/model --data.train {world}/examples.jsonl --output {world}/out "
SFT += "--data.max-tokens 128 "
ENDLESS = "--data.chat-template {world}/endless.jinja --timeout-minutes 0.04"
# name -> program, flags, and what the message must say
CASES = {
    "a key twice": ("rl", "--config {world}/twice.yaml", "'seed' is there twice"),
    "UTF-16": ("rl", "--config {world}/utf16.yaml", "is not UTF-8 text"),
    "a list in itself": ("sft", "--config {world}/loop.yaml", "without aliases"),
    "infinite weight decay": ("rl", RL + "--policy.weight-decay inf", "policy.weight_decay = inf"),
    "a large seed": ("rl", RL + "--seed 18446744073709551616", "seed = 18446744073709551616"),
    "head_dim 2": ("rl", RL + "--policy.scratch.head-dim 2", "head_dim = 2"),
    "an odd head_dim": ("rl", RL + "--policy.scratch.head-dim 31", "head_dim = 31"),
    "answers are lists": ("rl", RL + "--data.train {world}/lists.jsonl", "compares with the ans"),
    "a wrong answer key": ("rl", RL + "--data.answer-key gold", "data.answer_key = 'gold'"),
    "deep rows": ("rl", RL + "--data.train {world}/deep.jsonl", "line 1 is not JSON"),
    "a surrogate": ("rl", RL + "--data.train {world}/half.jsonl", "surrogate"),
    "a template without prompt": (
        "rl",
        RL + "--data.chat-template {world}/nothing.jinja",
        "leaves out the prompt",
    ),
    "a template that divides": (
        "rl",
        RL + "--data.chat-template {world}/zero.jinja",
        "ZeroDivisionError",
    ),
    "a template without an end": ("rl", RL + ENDLESS, "timeout_minutes = 0.04"),
    "a template without an end, in sft": ("sft", SFT + ENDLESS, "timeout_minutes = 0.04"),
    "a template without an end, in evaluate": ("evaluate", EVALUATE + ENDLESS, "to render a first"),
    "output in /proc": ("rl", RL + "--output /proc/run", "output = /proc/run"),
    "output below a file": ("rl", RL + "--output {world}/file/run", "file/run"),
    "a long output": ("rl", RL + "--output {world}/" + "x" * 300, "output = "),
    "replay of nothing": ("rl", RL + "--rollout.replay {world}", "rollout.replay = "),
    "tokens beyond": ("rl", RL + "--policy.model {world}/tokens", "beyond vocab_size = 100"),
    "chats": (
        "sft",
        "--policy.model scratch --data.train {world}/chats.jsonl --output {world}/out",
        "line 1",
    ),
    "tokenizer": ("dpo", DPO + "--policy.model {world}/tokenizer", "its tokenizer cannot be"),
    "infinite nll": ("dpo", DPO + "--algo.nll-coef inf", "algo.nll_coef = inf"),
    "top_p 0": ("evaluate", EVALUATE + "--rollout.top-p 0", "rollout.top_p = 0"),
    "eos beyond": ("evaluate", EVALUATE + "--model {world}/eos", "1000000] lie beyond"),
    "weights cut": ("evaluate", EVALUATE + "--model {world}/cut", "model.safetensors: Error while"),
    "a head of 4 EiB": ("evaluate", EVALUATE + "--model {world}/head", "header too large"),
    "an output in /proc": ("evaluate", EVALUATE + "--output /proc/a.json", "output = /proc/a.json"),
    "an output that is a folder": ("evaluate", EVALUATE + "--output {world}", "Is a directory"),
}


@pytest.mark.parametrize("name", CASES)
def test_one_message_and_exit_code_2(world, name):
    program, flags, message = CASES[name]
    words = flags.format(world=world, quickstart=QUICKSTART).split()
    ended = fork(f"minirl.{program}", words, world / "log" / name, seconds=900)
    assert ended.code == 2 and len(ended.errors()) == 1, ended.err
    assert "Traceback" not in ended.err and not ended.out
    assert message in ended.err
    assert not (world / "out").exists()


# program -> flags of a run of one step
SUPERVISED = "--policy.model {world}/model --data.held-out 4 --data.max-tokens 128 --batch-size 16 "
SHORTER = {
    "rl": RL + "--num-steps 1",
    "rl by passes": RL + "--num-steps 0 --num-epochs 1 --rollout.prompts-per-step 16",
    "sft": SUPERVISED + "--data.train {world}/examples.jsonl --num-steps 1",
    "sft by passes": SUPERVISED + "--data.train {world}/examples.jsonl --num-epochs 1",
    "dpo": SUPERVISED + "--data.train {world}/pairs.jsonl --num-steps 1",
    "kto": SUPERVISED + "--data.train {world}/labelled.jsonl --num-steps 1",
    "rm": SUPERVISED + "--data.train {world}/pairs.jsonl --num-steps 1",
}


@pytest.mark.parametrize("name", SHORTER)
def test_a_run_does_not_resume_shorter_than_it_is(world, tmp_path, name):
    (tmp_path / "run/checkpoints/step-4").mkdir(parents=True)
    flags = SHORTER[name].format(world=world, quickstart=QUICKSTART).split()
    flags += ["--output", str(tmp_path / "run"), "--resume"]
    ended = fork(f"minirl.{name.split()[0]}", flags, tmp_path / "log")
    assert ended.code == 2 and len(ended.errors()) == 1, ended.err
    assert "is of step 4, and num_steps (or num_epochs) ends the run at step 1;" in ended.err
    assert (
        "raise it, or remove the checkpoints after step 1" in ended.err
        and "M parameters" not in ended.err
    )
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["checkpoints"]


def test_more_ranks_than_gpus_are_refused_once(world, tmp_path):
    """With the flag of torchrun that is right, before anything is loaded."""
    flags = RL.format(world=world, quickstart=QUICKSTART).split()
    if torch.cuda.device_count() > 1:
        pytest.skip("two ranks have two GPUs here")
    if torch.cuda.is_available():
        ended = torchrun("minirl.rl", flags, tmp_path / "log").end(300)
        assert ended.code == 1  # torchrun's
    else:
        ended = fork("one_gpu", ["minirl.rl", *flags], tmp_path / "log", world=2)
        assert ended.code == 2
    assert len(ended.errors()) == 1, ended.err
    assert "2 ranks on a machine with 1 GPU" in ended.err
    assert "torchrun --nproc-per-node 1" in ended.err and "CUDA error" not in ended.err
