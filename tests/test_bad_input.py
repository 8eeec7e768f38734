"""What users get wrong ends at once, by one message that names the setting, the value and the mend,
and leaves nothing behind."""

import hashlib
import json
from pathlib import Path

import pytest
import torch

import tiny
from harness import RankFailed, ranks
from minirl.base.errors import UserError
from minirl.config.parse import parse_flags
from minirl.config.rl import RLConfig
from minirl.config.shared import RewardConfig
from minirl.rewards.loading import make_rewards
from minirl.rl import Trainer
from nodes import Job, Node
from programs import QUICKSTART, ROOT, Ended, fork, torchrun

PACKAGE = f"{ROOT}/minirl/"
"""In a line of a traceback; torchrun prints one of its own."""
SMALL = [
    "--data.held-out",
    "8",
    "--rollout.prompts-per-step",
    "4",
    "--rollout.samples-per-prompt",
    "2",
    "--sft.num-steps",
    "0",
]


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """A folder with everything that the cases below name."""
    folder = tmp_path_factory.mktemp("bad_input")
    (folder / "rows.jsonl").write_text(
        "".join(json.dumps({"prompt": f"word {i}", "answer": str(i)}) + "\n" for i in range(40))
    )
    (folder / "empty.jsonl").write_text("\n")
    (folder / "question.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n')
    (folder / "broken.jsonl").write_text('{"prompt": "a", "answer": "b"}\n{"prompt": \n')
    (folder / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    (folder / "bare.jsonl").write_text(
        "".join(json.dumps({"prompt": f"word {i}"}) + "\n" for i in range(40))
    )
    (folder / "long.jsonl").write_text(
        (folder / "rows.jsonl").read_text()
        + json.dumps({"prompt": "x" * 500, "answer": "y"})
        + "\n"
    )
    (folder / "typo.yaml").write_text("rollout:\n  max_tokenz: 8\n")
    (folder / "kind.yaml").write_text("num_steps: many\n")
    (folder / "pair.yaml").write_text("policy:\n  betas: [0.9]\n")
    (folder / "reward.py").write_text("def grade(prompt, completion, row):\n    return 1.0\n")
    (folder / "no_import.py").write_text("import no_such_module\n")
    (folder / "a_file").write_text("not a folder")
    (folder / "hollow").mkdir()
    gpt2 = folder / "gpt2"
    gpt2.mkdir()
    (gpt2 / "config.json").write_text('{"model_type": "gpt2"}')
    for name in ("model.safetensors", "tokenizer.json"):
        (gpt2 / name).write_bytes(b"")
    return folder


def rl(world: Path, output: Path, *flags: object) -> Ended:
    """minirl.rl on one rank, with good flags unless given otherwise."""
    given = [flag.format(world=world) if isinstance(flag, str) else flag for flag in flags]
    config = [] if "--config" in given else ["--config", QUICKSTART]
    return fork(
        "minirl.rl",
        [*config, *SMALL, "--data.train", world / "rows.jsonl", "--output", output, *given],
        world / "log" / output.name,
    )


# name -> flags, and what the message must say: the setting, the value, the mend
CASES = {
    "missing model": (
        ["--policy.model", "{world}/nowhere"],
        ["policy.model", "nowhere", "neither a folder nor a hub id"],
    ),
    "model folder without weights": (
        ["--policy.model", "{world}/hollow"],
        ["policy.model", "hollow", "config.json"],
    ),
    "unsupported family": (
        ["--policy.model", "{world}/gpt2"],
        ["policy.model", "'gpt2' is not supported", "llama", "qwen3"],
    ),
    "missing data": (
        ["--data.train", "{world}/none.jsonl"],
        [
            "data.train",
            "none.jsonl",
            "no such file",
            "JSONL, JSON, Parquet or CSV file",
            "reasoning_gym:NAME",
        ],
    ),
    "missing eval data": (
        ["--data.eval", "{world}/none.jsonl"],
        ["data.eval", "none.jsonl", "no such file"],
    ),
    "no data": (["--data.train", ""], ["data.train = ''", "JSONL file"]),
    "empty data": (
        ["--data.train", "{world}/empty.jsonl"],
        ["data.train", "empty.jsonl", "no rows"],
    ),
    "row without prompt": (
        ["--data.train", "{world}/question.jsonl"],
        ["data.train", "line 1", "'prompt'", "question, answer", "data.prompt_key"],
    ),
    "row that is not JSON": (
        ["--data.train", "{world}/broken.jsonl"],
        ["data.train", "line 2 is not JSON"],
    ),
    "data that is not text": (
        ["--data.train", "{world}/binary.jsonl"],
        ["data.train", "not UTF-8"],
    ),
    "row without answer": (
        ["--data.train", "{world}/bare.jsonl"],
        ["reward.function = exact", "data.answer_key"],
    ),
    "no answers for SFT": (
        [
            "--data.train",
            "{world}/bare.jsonl",
            "--sft.num-steps",
            "3",
            "--reward.function",
            "{world}/reward.py:grade",
        ],
        ["sft.num_steps = 3", "data.answer_key"],
    ),
    "unknown generator": (
        ["--data.train", "reasoning_gym:spell_bakward"],
        ["data.train", "spell_bakward", "did you mean spell_backward?"],
    ),
    "long prompt": (
        ["--data.train", "{world}/long.jsonl", "--data.held-out", "1"],
        ["50", "data.max_prompt_tokens = 16", "raise it", "xxxxx"],
    ),
    "nothing left to train on": (
        ["--data.held-out", "40"],
        ["data.held_out = 40", "40 distinct prompts", "lower it"],
    ),
    "nothing held out": (["--data.held-out", "0"], ["data.held_out = 0", "at least 1"]),
    "one sample": (
        ["--rollout.samples-per-prompt", "1"],
        ["rollout.samples_per_prompt = 1", "at least 2"],
    ),
    "updates do not divide": (
        ["--algo.updates-per-step", "3"],
        ["algo.updates_per_step = 3", "rollout.prompts_per_step = 4"],
    ),
    "TP does not divide ranks": (
        ["--engine.tensor-parallel-size", "2"],
        ["engine.tensor_parallel_size = 2", "1 ranks"],
    ),
    "mesh that does not multiply": (
        ["--parallel.context", "2", "--parallel.tensor", "2"],
        ["parallel.context = 2, parallel.tensor = 2: their product, 4", "1 ranks"],
    ),
    "no tensor ranks": (["--parallel.tensor", "0"], ["parallel.tensor = 0", "greater than 0"]),
    "heads do not divide": (
        ["--policy.scratch.num-heads", "3"],
        ["num_attention_heads = 3", "num_key_value_heads = 2"],
    ),
    "no layers": (
        ["--policy.scratch.num-layers", "0"],
        ["policy.scratch.num_layers = 0", "greater than 0"],
    ),
    "sequence does not fit": (
        ["--tokens-per-rank", "20"],
        ["tokens_per_rank = 20", "engine.max_model_len = 26", "raise tokens_per_rank"],
    ),
    "model length too small": (
        ["--engine.max-model-len", "20"],
        ["engine.max_model_len = 20", "less than the sum, 26", "set it to 0"],
    ),
    "truncated sampling": (["--rollout.top-p", "0.9"], ["rollout.top_p = 0.9", "top_p 1.0"]),
    "dual clip of 1": (["--algo.dual-clip", "1"], ["algo.dual_clip = 1.0", "above 1"]),
    "dppo with another loss": (
        ["--algo.correction.preset", "dppo-tv", "--algo.loss", "gspo"],
        ["algo.correction.preset = 'dppo-tv'", "algo.loss = 'gspo'", "set loss to ppo"],
    ),
    "dppo with a dual clip": (
        ["--algo.correction.preset", "dppo-kl", "--algo.dual-clip", "3"],
        ["algo.dual_clip = 3.0", "clips nothing", "set dual_clip to 0"],
    ),
    "negative seed": (["--seed", "-1"], ["seed = -1", "greater than or equal to 0"]),
    "SFT on nothing": (["--sft.batch-size", "0"], ["sft.batch_size = 0", "greater than 0"]),
    "unknown reward": (
        ["--reward.function", "exakt"],
        ["reward.function = 'exakt'", "exact, final_answer", "file.py:function"],
    ),
    "missing reward file": (
        ["--reward.function", "{world}/none.py:grade"],
        ["reward.function", "no file", "none.py"],
    ),
    "missing reward function": (
        ["--reward.function", "{world}/reward.py:judge"],
        ["reward.function", "has no function judge"],
    ),
    "reward that does not import": (
        ["--reward.function", "{world}/no_import.py:grade"],
        ["reward.function", "ModuleNotFoundError", "no_such_module"],
    ),
    "missing config": (
        ["--config", "{world}/none.yaml"],
        ["--config", "none.yaml", "no such file"],
    ),
    "unknown key": (
        ["--config", "{world}/typo.yaml"],
        ["typo.yaml", "rollout.max_tokenz", "did you mean rollout.max_tokens?"],
    ),
    "value of another type": (
        ["--config", "{world}/kind.yaml"],
        ["num_steps = 'many'", "valid integer"],
    ),
    "one value of two": (
        ["--config", "{world}/pair.yaml"],
        ["policy.betas = [0.9]", "too few values"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_one_message_and_nothing_left(world, name):
    flags, says = CASES[name]
    ended = rl(world, world / name, *flags)
    assert ended.code == 2, ended.err
    assert len(ended.errors()) == 1 and "Traceback" not in ended.err, ended.err
    for text in says:
        assert text in ended.errors()[0]
    assert not (world / name).exists() and not ended.out


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (
            ["--data.eval", "{world}/rows.jsonl", "--model", "{world}/nowhere"],
            ["model = ", "nowhere", "neither a folder nor a hub id"],
        ),
        (
            ["--data.eval", "{world}/rows.jsonl", "--model", "{world}/gpt2"],
            ["model = ", "'gpt2' is not supported"],
        ),
        (["--model", "{world}/gpt2"], ["data.eval = ''", "JSONL file"]),
        (
            ["--data.eval", "{world}/rows.jsonl", "--model", "{world}/gpt2"]
            + ["--engine.tensor-parallel-size", "2"],
            ["engine.tensor_parallel_size = 2: it does not divide the 1 ranks that generate"],
        ),
    ],
)
def test_evaluate_tells_too(world, flags, says):
    ended = fork(
        "minirl.evaluate", [flag.format(world=world) for flag in flags], world / "log" / "evaluate"
    )
    assert ended.code == 2 and len(ended.errors()) == 1 and "Traceback" not in ended.err, ended.err
    for text in says:
        assert text in ended.errors()[0]


def test_heads_that_engine_ranks_cannot_share(world):
    flags = [
        "--config",
        str(QUICKSTART),
        *map(str, SMALL),
        "--data.train",
        str(world / "rows.jsonl"),
        "--output",
        str(world / "heads"),
        "--policy.scratch.num-heads",
        "3",
        "--policy.scratch.num-kv-heads",
        "3",
        "--engine.tensor-parallel-size",
        "2",
    ]
    with pytest.raises(RankFailed) as failed:
        ranks(2, lookup, flags)
    assert failed.value.kind == "UserError"
    for text in (
        "engine.tensor_parallel_size = 2",
        "num_attention_heads = 3",
        "num_key_value_heads = 3",
        "use one of 1, 3",
    ):
        assert text in failed.value.text
    assert not (world / "heads").exists()


def lookup(mesh, flags):
    Trainer(parse_flags(RLConfig, flags), mesh)


def contents(folder: Path) -> dict[str, str]:
    return {
        str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest()
        if p.is_file()
        else "folder"
        for p in sorted(folder.rglob("*"))
    }


@pytest.fixture
def old_run(world, tmp_path) -> Path:
    """The folder of a run of another model than the fixture's: what a checkpoint says of itself,
    and a few files."""
    step = tmp_path / "old" / "checkpoints" / "step-3"
    step.mkdir(parents=True)
    saved = {
        "step": 3,
        "num_updates": 3,
        "model": "llama, 9 layers of 512, vocabulary 1000",
        "progress": {},
    }
    (step / "progress.json").write_text(json.dumps(saved))
    (tmp_path / "old" / "metrics.jsonl").write_text('{"phase": "rl", "step": 2, "reward": 1.0}\n')
    (tmp_path / "old" / "config.yaml").write_text("num_steps: 3\npolicy: {model: scratch}\n")
    return tmp_path / "old"


def test_folder_of_another_run_is_left_alone(world, old_run):
    before = contents(old_run)
    ended = rl(world, old_run)
    assert ended.code == 2 and len(ended.errors()) == 1 and "Traceback" not in ended.err, ended.err
    for text in (f"output = {old_run}", "another run", "--output", "--resume"):
        assert text in ended.errors()[0]
    assert contents(old_run) == before


def test_checkpoint_of_another_model_is_not_resumed(world, old_run):
    model, before = tiny.make(world / "model", "qwen3"), contents(old_run)
    ended = rl(world, old_run, "--resume", "--policy.model", model)
    assert ended.code == 2 and len(ended.errors()) == 1 and "Traceback" not in ended.err, ended.err
    for text in ("resume: policy.model =", str(model), "'scratch'", "another output folder"):
        assert text in ended.errors()[0]
    assert contents(old_run) == before


def test_output_that_is_a_file(world):
    for flags in ([], ["--resume"]):
        ended = rl(world, world / "a_file", *flags)
        assert ended.code == 2 and "Traceback" not in ended.err, ended.err
        assert f"output = {world}/a_file is no folder" in ended.errors()[0]
    assert (world / "a_file").read_text() == "not a folder"


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (
            "def f(prompt, completion, row):\n    return row['colour']\n",
            "raised KeyError: 'colour'",
        ),
        ("def f(prompt, completion, row):\n    pass\n", "returned None"),
        ("def f(prompt, completion, row):\n    return float('nan')\n", "returned nan"),
        ("def f(prompt, completion, row):\n    return float('-inf')\n", "returned -inf"),
        ("def f(prompt, completion, row):\n    return [1.0]\n", "returned [1.0]"),
        ("def f(prompt, completion):\n    return 1.0\n", "raised TypeError"),
    ],
)
def test_reward_must_be_a_number(tmp_path, function, says):
    (tmp_path / "reward.py").write_text(function)
    rewards = make_rewards(RewardConfig(function=f"{tmp_path}/reward.py:f"))
    with pytest.raises(UserError) as failed:
        rewards({"prompt": "two and two", "answer": "4"}, "five")
    for text in (
        f"reward.function = {tmp_path}/reward.py:f {says}",
        "prompt 'two and two', completion 'five'",
    ):
        assert text in str(failed.value)
    # The function's line; a call with wrong arguments enters none.
    assert ("raised KeyError" in says) == str(failed.value).endswith("(reward.py, line 2)")


def test_wrong_value_of_a_flag(world):
    ended = rl(world, world / "value", "--num-steps", "ten")
    assert (
        ended.code == 2
        and "--num-steps" in ended.err
        and "'ten'" in ended.err
        and "Traceback" not in ended.err
    ), ended.err
    assert not (world / "value").exists()


@pytest.fixture(scope="module")
def under_torchrun(world):
    """Two programs at once, as one of them mostly imports while the other waits: under torchrun,
    and under an agent of it whose ranks are forks."""
    (world / "late").mkdir()
    (world / "late" / "sitecustomize.py").write_text(
        "import os, time\ntime.sleep(2 * (os.environ.get('RANK') == '0'))\n"
    )
    flags = ["--config", QUICKSTART, "--output", world / "flag", "--rollout.max-tokenz", "8"]
    late = {"PYTHONPATH": str(world / "late")}
    wrong_flag = torchrun("minirl.rl", flags, world / "log" / "flag", env=late)

    (world / "one_rank.py").write_text(
        "import os, time\n\ndef grade(prompt, completion, row):\n    if os.environ['RANK'] == "
        "'1':\n"
        "        time.sleep(1)\n        raise RuntimeError('no judge')\n    return 1.0\n"
    )
    flags = [
        "--config",
        QUICKSTART,
        *SMALL,
        "--data.train",
        world / "rows.jsonl",
        "--output",
        world / "one_rank",
        "--reward.function",
        f"{world}/one_rank.py:grade",
    ]
    nodes = [Node("127.0.0.1", ROOT)]
    failing_reward = Job(nodes, "minirl.rl", [flags], world / "log" / "one_rank")
    yield {"wrong flag": wrong_flag, "failing reward": failing_reward}
    for running in (wrong_flag, failing_reward):
        running.end(0)


def test_wrong_flag_is_told_though_rank_0_is_late(world, under_torchrun):
    """torchrun ends all ranks when the first one leaves; here rank 1 finds the mistake two seconds
    before rank 0, who is to tell it."""
    ended = under_torchrun["wrong flag"].end(90)
    assert ended.code != 0
    told, _, report = ended.err.partition("Root Cause")
    for part in (told, report):  # said by a rank, and last by torchrun
        assert part.count("Unrecognized options: --rollout.max-tokenz, 8") == 1, ended.err
    assert "exitcode  : 2" in ended.err and PACKAGE not in ended.err
    assert not (world / "flag").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="two ranks with a CPU engine each")
def test_reward_that_fails_on_one_rank_ends_all(world, under_torchrun):
    """Rank 0 is waiting for rank 1 when that fails; its own loss of rank 1 is not worth a word."""
    ended = under_torchrun["failing reward"].end(180)
    assert (world / "one_rank" / "metrics.jsonl").exists()  # it was under way
    assert ended.code == 1  # torchrun's own; the rank's is 2
    assert len(ended.errors()) == 1, ended.err
    assert (
        f"reward.function = {world}/one_rank.py:grade raised RuntimeError: no judge for prompt "
        f"'word" in ended.errors()[0]
    )
    assert (
        "exitcode  : 2" in ended.err and "crashed" not in ended.err and PACKAGE not in ended.err
    ), ended.err
