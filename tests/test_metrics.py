"""The glossary minirl/METRICS.md and what runs of every kind write, both ways."""

import json
import re
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import tiny
from minirl.base.log import Timer
from minirl.plan import cards
from minirl.plan.sizes import read_sizes
from minirl.run.metrics import Progress, StepWork, _deviation, flops
from minirl.run.results import summarise
from programs import ROOT, fork

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="small runs on CPU")
PHASES = ("rl", "sft", "train", "eval")
ENV = """
from minirl.envs import Env, Result

class Twice(Env):
    graded = True

    def reset(self, row):
        return f"say {row['answer']}"

    def step(self, state):
        right = float(state.answer[:1] == str(state.row["answer"])[:1])
        info = {"right": right}
        return Result(reward=right, observation="again", done=state.turn == 1, info=info)
"""
REWARD = "def length(prompt, completion, row):\n    return len(completion) / 10\n"


class Entry(NamedTuple):
    """A metric of the glossary."""

    name: str
    pattern: re.Pattern
    phases: list[str]
    needs_cuda: bool


def glossary() -> list[Entry]:
    entries = []
    for line in (ROOT / "minirl" / "METRICS.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) != 5 or not cells[1].startswith("`"):
            continue
        phases = [word.strip() for word in cells[2].split(",")]
        for name in re.findall(r"`([^`]+)`", cells[1]):
            pattern = re.compile(re.sub(r"[A-Z]+", ".+", name.replace(".", r"\.")))
            of_phases = [phase for phase in phases if phase != "CUDA"]
            assert set(of_phases) <= set(PHASES), line
            entries.append(Entry(name, pattern, of_phases, "CUDA" in phases))
    return entries


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> dict[str, list[dict]]:
    """Rows of small runs of every program, by the name of the run."""
    folder = tmp_path_factory.mktemp("metrics")
    tiny.make(folder / "model", "qwen3_moe")
    (folder / "env.py").write_text(ENV)
    (folder / "reward.py").write_text(REWARD)
    prompts = [
        {"prompt": f"say {n}", "answer": str(n), "data_source": "odd" if n % 2 else "even"}
        for n in range(24)
    ]
    pairs = [
        {"prompt": f"say {n}", "chosen": str(n) * 3, "rejected": "no" * (n % 5 + 1)}
        for n in range(24)
    ]
    chats = [{"text": f"say {n}: {n}"} for n in range(24)]
    for name, rows in (("rl", prompts), ("rm", pairs), ("dpo", pairs), ("sft", chats)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shared = {
        "--policy.model": folder / "model",
        "--policy.dtype": "float32",
        "--num-steps": 2,
        "--eval.every": 1,
        "--checkpoint.every": 1,
        "--data.held-out": 4,
        "--tokens-per-rank": 256,
        "--policy.router.aux-loss-coef": 0.01,
        "--policy.router.z-loss-coef": 0.001,
    }
    sampled = {
        "--reward.function": ["math_verify", f"{folder}/reward.py:length"],
        "--data.max-prompt-tokens": 64,
        "--rollout.max-tokens": 6,
        "--rollout.prompts-per-step": 2,
        "--rollout.samples-per-prompt": 2,
        "--engine.kv-cache-gb": 0.05,
        "--algo.kl-coef": 0.1,
        "--algo.correction.preset": "tis",
        "--sft.num-steps": 1,
        "--sft.batch-size": 4,
        "--rollout.dump": [],
        "--algo.router-replay": [],
    }
    critic = {
        "--algo.advantage": "gae",
        "--algo.kl-in": "reward",
        "--critic.router.aux-loss-coef": 0.01,
        "--critic.router.z-loss-coef": 0.001,
    }
    env = {"--env.name": f"{folder}/env.py:Twice", "--env.max-turns": 2}
    env |= {"--engine.max-model-len": 200}
    supervised = {"--data.max-tokens": 48, "--batch-size": 4}
    runs = {
        "rl": ("rl", shared | sampled | critic | env),
        "split": ("rl", shared | sampled | {"--parallel.generators": 1}),
        "rm": ("rm", shared | supervised),
        "dpo": ("dpo", shared | supervised),
        "sft": ("sft", shared | supervised),
    }
    found = {}
    for name, (program, given) in runs.items():
        given = {"--output": folder / name, "--data.train": folder / f"{program}.jsonl"} | given
        flags = []
        for flag, value in given.items():
            flags += [flag, *(value if isinstance(value, list) else [value])]
        ended = fork(
            f"minirl.{program}", flags, folder / "log", 300, world=2 if program == "rl" else 0
        )
        assert ended.code == 0, ended.err
        lines = (folder / name / "metrics.jsonl").read_text().splitlines()
        found[name] = [json.loads(line) for line in lines]
    return found


def names(rows: list[dict]) -> set[tuple[str, str]]:
    return {(row["phase"], name) for row in rows for name in row if name not in ("phase", "step")}


def test_every_metric_that_runs_write_is_explained(written):
    entries = glossary()
    seen = set().union(*(names(rows) for rows in written.values()))
    unexplained = [
        (phase, name)
        for phase, name in sorted(seen)
        if not any(phase in e.phases and e.pattern.fullmatch(name) for e in entries)
    ]
    assert not unexplained


def test_every_metric_that_is_explained_is_written(written):
    seen = set().union(*(names(rows) for rows in written.values()))
    missing = [
        (phase, entry.name)
        for entry in glossary()
        for phase in entry.phases
        if not entry.needs_cuda
        and not any(phase == p and entry.pattern.fullmatch(name) for p, name in seen)
    ]
    assert not missing


def test_no_metric_has_a_name_for_each_rank(written):
    """A pattern of the glossary would hide one."""
    for phase, name in set().union(*(names(rows) for rows in written.values())):
        assert not re.search(r"rank_?\d|\d_?rank", name), (phase, name)


def test_totals_add_up_and_a_step_takes_the_time_of_its_phases(written):
    for name, rows in written.items():
        steps = [row for row in rows if row["phase"] in ("rl", "train")]
        trained = [row["total/trained"] for row in steps]
        assert trained == sorted(trained) and 0 < trained[0] < trained[-1], name
        for row in steps:
            inside = row["time/forward"] + row["time/backward"]
            assert 0 < inside < row["time/step"], name
            assert 0 < row["host_gib/rank"] < row["host_gib/machine"] < 10_000
    rl = [row for row in written["rl"] if row["phase"] == "rl"]
    for row in rl:
        assert row["router_replayed"] == 1 and row["router_changed"] <= 0.02  # in float32
        assert 1 <= row["expert_load_max"] <= 2  # of 4 experts, each token gets 2
        assert row["longest_answer"] >= row["answer_tokens"] > 0
        assert row["reward_deviation/all"] >= 0 and row["reward_deviation/group"] >= 0
    assert rl[1]["total/generated"] > rl[0]["total/generated"]


def test_all_that_computes_in_an_evaluation_is_its_time():
    timer = Timer(torch.device("cpu"))
    with timer.phase("evaluate"), timer.phase("forward"):
        time.sleep(0.02)
    with timer.phase("forward"):
        pass
    seconds = timer.take()
    assert seconds["evaluate"] >= 0.02 > seconds["forward"]


def test_tokens_a_second_of_sides_are_by_the_time_of_one():
    """Generators and trainers work at the same time."""
    progress = Progress(tokens={"generated": 600})
    trainers = {"idle_trainers": 1.0, "forward": 2.0, "evaluate": 9.0}
    generators = {"rollout": 2.5, "idle_generators": 0.5}
    assert summarise(progress, trainers | generators)["tokens_per_second"] == 200
    assert summarise(progress, {"rollout": 1.0, "forward": 2.0})["tokens_per_second"] == 200


def test_deviations():
    assert _deviation([1.0, 3.0]) == 1.0
    assert _deviation([0.1] * 7) == 0.0  # exactly, though their sum is rounded
    assert _deviation([2.0]) == 0.0


def test_the_work_of_a_model(tmp_path):
    """By the matrices one by one: rows of two sequences of 3 and 5 tokens, one target each."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = tiny.make(tmp_path / "model")
    config = AutoConfig.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    work = StepWork(rows=8, loss_rows=2, pairs=6 + 15)
    expected = 0.0
    for name, p in model.named_parameters():
        if "lm_head" in name:
            expected += 6 * p.numel() * work.loss_rows
        elif "layers" in name and p.ndim == 2:
            expected += 6 * p.numel() * work.rows
    features = config.num_attention_heads * config.head_dim
    expected += 12 * work.pairs * features * config.num_hidden_layers
    assert flops(read_sizes(config.to_dict()), work) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("driver_name", "card"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA T4", None),
    ],
)
def test_peaks_by_the_drivers_names(driver_name, card):
    assert cards.named(driver_name) == (cards.CARDS[card] if card else None)


def test_the_glossary_names_nothing_twice():
    found = [(phase, entry.name) for entry in glossary() for phase in entry.phases]
    assert len(found) == len(set(found)) > 80
    assert Path(ROOT / "minirl" / "METRICS.md").exists()
