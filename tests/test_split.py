"""Trainers and generators on ranks of their own: each overlap against what it must equal.

Lockstep is compared with a sequential program that samples one step behind, stream with the
colocated step, and inflight with the trainer's own log-probs at the version of each token."""

import json
import shutil
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

import tiny
from harness import ranks
from minirl import split
from minirl.config.parse import parse_flags
from minirl.config.rl import RLConfig
from minirl.engine.loop import EngineLoop
from minirl.rl import Trainer
from minirl.rollout import records
from minirl.run.trainer import TrainingRun
from reweighted import differences, differences_of_prompts_again
from test_program import EARNED_UNTRAINED, read, repeatable

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="several ranks with an engine")

NUM_STEPS = 6


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    (folder / "reward.py").write_text(EARNED_UNTRAINED)
    rows = [json.dumps({"prompt": f"{a} and {b}"}) for a in "abcdefg" for b in "hijklmn"]
    (folder / "held_out.jsonl").write_text("\n".join(rows[:5]))
    (folder / "train.jsonl").write_text("\n".join(rows[5:]))
    return folder


SLEEPS = """
import asyncio
from minirl.envs import Env, Result

class Sleeps(Env):
    graded = True
    async def reset(self, row):
        return row["prompt"]
    async def step(self, state):
        await asyncio.sleep(0.2)
        return Result(observation="more", done=state.turn == 5)
"""


def settings(data: Path, output: Path, **changes: object) -> list[str]:
    given = {
        "policy.model": "scratch",
        "policy.scratch.phrases": '[" and "]',
        "policy.scratch.num-layers": 2,
        "policy.dtype": "float32",
        "policy.lr": 1e-3,
        "data.train": data / "train.jsonl",
        "data.eval": data / "held_out.jsonl",
        "data.max_prompt_tokens": 16,
        "reward.function": f"{data}/reward.py:vowels",
        "rollout.prompts_per_step": 4,
        "rollout.samples_per_prompt": 4,
        "rollout.max_tokens": 8,
        "engine.kv_cache_gb": 0.02,
        "eval.every": 2,
        "num_steps": NUM_STEPS,
        "output": output,
    }
    flags = []
    for name, value in (given | changes).items():
        flags.append(f"--{name}")
        flags += map(str, value) if isinstance(value, tuple) else [str(value)]
    return flags


class Behind(Trainer):
    """The sequential program that lockstep must equal: it draws a batch one step behind."""

    next_batch = None

    def draw(self, step):
        batches = []
        with self.generation.awake():
            if step == 0:
                batches.append(self.draw_batch(0))
            if step % self.cfg.eval.every == 0:
                self.evaluate(self.generation, step, "before_rl" if step == 0 else None)
            if step + 1 < self.num_steps:
                batches.append(self.draw_batch(step + 1))
        return batches

    def draw_batch(self, step):
        return self.generation.sampler.collect_step(
            step * self.cfg.rollout.prompts_per_step,
            self.generation.sampling,
            version=self.policy.num_updates,
        )

    def collect(self, step):
        batches = [*([self.next_batch] if self.next_batch else []), *self.draw(step)]
        self.next_batch = batches[1] if len(batches) > 1 else None
        return self.take(step, batches[0])


def colocated_main(cfg, mesh):
    Trainer.main(cfg, mesh)


def behind_main(cfg, mesh):
    Behind.main(cfg, mesh)


def whole(t):
    t = t.detach()
    return (t.full_tensor() if isinstance(t, DTensor) else t).numpy().copy()


def exact_norm(norm, hidden):
    """In float64; Transformers' is in float32, whose rounding depends on the scale of gradients."""
    scale = (hidden.square().mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt()
    return norm.weight * (hidden * scale)


def program(mesh, main, flags):
    """Run it, and return the weights at its end, whole, on ranks that train."""
    if "float64" in flags:
        Qwen3RMSNorm.forward = exact_norm
    weights = {}
    finish = TrainingRun.finish

    def keep(run, *args):
        merged = run.policy.merged()
        for name in merged:
            weights[name] = whole(merged[name])
        finish(run, *args)

    with mock.patch.object(TrainingRun, "finish", keep):
        main(parse_flags(RLConfig, flags), mesh)
    return weights


class Done(NamedTuple):
    folder: Path
    weights: dict[str, np.ndarray]


def train(main, world: int, flags: list[str], generators: int = 0) -> Done:
    """Run a program on so many ranks."""
    flags = [*flags, "--parallel.generators", str(generators)]
    cfg = parse_flags(RLConfig, flags)
    by_rank = ranks(world, program, main, flags, parallel=cfg.parallel, timeout=300)
    return Done(Path(cfg.output), by_rank[0])


def difference(a: Done, b: Done) -> float:
    """The largest difference of two models' weights."""
    assert a.weights.keys() == b.weights.keys()
    return max(np.abs(w - b.weights[name]).max() for name, w in a.weights.items())


def rows_of(run: Done, *, without: tuple[str, ...] = ()) -> list[dict]:
    """The rows of a run's metrics that do not say where or when."""
    rows = repeatable(read(run.folder / "metrics.jsonl"))
    left_out = ("rollout/versions", "rollout/token_staleness", "rollout/token_staleness_max")
    left_out += ("refit_bytes", "kv_cache_tokens", "rollout/steps", "rollout/waiting", *without)
    rows = [{name: x for name, x in row.items() if name not in left_out} for row in rows]
    return sorted(rows, key=lambda row: (row["phase"], row["step"]))


# --------------------------------------------------------------------------------------------------
# lockstep


def test_lockstep_is_a_sequential_program_that_samples_one_step_behind(data, tmp_path):
    expected = train(behind_main, 1, settings(data, tmp_path / "behind"))
    run = train(split.main, 2, settings(data, tmp_path / "split"), generators=1)
    assert difference(run, expected) == 0.0
    assert rows_of(run) == rows_of(expected)
    staleness = [
        row["staleness"] for row in read(run.folder / "metrics.jsonl") if row["phase"] == "rl"
    ]
    assert staleness == [0] + [1] * (NUM_STEPS - 1)


# Updates that grow with the gradient, so that its last digits stay last digits. (Adam's are about
# as large for any gradient.) Log-probs of the engine, in float32, are left out of the loss.
EXACT = {
    "policy.dtype": "float64",
    "policy.adam_eps": 1.0,
    "policy.lr": 1.0,
    "algo.correction.preset": "off",
}


def test_lockstep_on_more_ranks(data, tmp_path):
    expected = train(behind_main, 1, settings(data, tmp_path / "behind", **EXACT))
    flags = settings(data, tmp_path / "split", **EXACT | {"engine.tensor_parallel_size": 2})
    run = train(split.main, 4, flags, generators=2)
    assert difference(run, expected) < 1e-12


def test_lockstep_begins_what_an_earlier_run_has_not_finished(data, tmp_path):
    """However often it is resumed."""
    run = tmp_path / "run"
    changes = {"rollout.dump": True, "checkpoint.every": 1, "checkpoint.keep": 9, "resume": True}
    ahead = {"rollout.ahead": 12, "rollout.max_staleness": 8, "num_steps": 1}
    train(colocated_main, 1, settings(data, run, **changes, **ahead))
    progress = json.loads((run / "checkpoints" / "step-1" / "progress.json").read_text())
    assert len(progress["progress"]["unfinished_tickets"]) > 8
    flags = settings(data, run, **changes, num_steps=5)
    train(split.main, 2, flags, generators=1)
    for step in (3, 4, 5):
        shutil.rmtree(run / "checkpoints" / f"step-{step}")
    train(split.main, 2, flags, generators=1)
    trained = []
    for step in range(5):
        for t in records.read_file(run / "rollouts" / f"step-{step}-rank-0.jsonl"):
            trained += [t.group] * (t.group not in trained)
    assert trained == list(range(20))


def noting(mesh, flags):
    """Run it with engines that are slow to take weights; return when steps begin and end so."""
    times: dict[str, list[float]] = {"prepared": [], "trained": [], "received": []}

    def note(owner, name, what, seconds=0.0):
        known = getattr(owner, name)

        def noted(*args, **options):
            time.sleep(seconds)
            result = known(*args, **options)
            times[what].append(time.monotonic())
            return result

        return mock.patch.object(owner, name, noted)

    with (
        note(Trainer, "to_minibatches", "prepared"),
        note(Trainer, "update", "trained"),
        note(EngineLoop, "change_weights", "received", seconds=0.5),
    ):
        split.main(parse_flags(RLConfig, flags), mesh)
    return times


def test_weights_travel_while_the_next_batch_is_prepared(data, tmp_path):
    flags = settings(data, tmp_path / "run", **{"parallel.generators": 1, "num_steps": 4})
    parallel = parse_flags(RLConfig, flags).parallel
    trainer, generator = ranks(2, noting, flags, parallel=parallel, timeout=300)
    received = generator["received"][:4]  # The last ones are for the final evaluation.
    waits = np.array(received) - trainer["prepared"]
    assert (waits[1:] > 0.2).all(), "the trainers have waited for the engine"
    assert waits[0] < 0, "the first batch is drawn with the first weights"
    assert (np.array(received) < trainer["trained"]).all(), "weights have changed on their way"


# --------------------------------------------------------------------------------------------------
# stream

METHODS = {
    "rloo": {"algo.advantage": "rloo", "algo.aggregation": "sequence"},
    "dr_grpo": {"algo.advantage": "dr_grpo", "algo.aggregation": "fixed"},
    "dapo": {
        "algo.clip_high": 0.28,
        "rollout.extra_prompts": 8,
        "rollout.keep_inside": (0.05, 0.12),
        "reward.overlong_tokens": 4,
    },
}


@pytest.mark.parametrize("method", METHODS)
def test_stream_has_the_gradients_of_the_colocated_step(data, tmp_path, method):
    changes = EXACT | METHODS[method] | {"num_steps": 2, "tokens_per_rank": 64, "eval.every": 0}
    changes |= {"rollout.prompts_per_step": 9}
    expected = train(colocated_main, 1, settings(data, tmp_path / "colocated", **changes))
    changes |= {"rollout.overlap": "stream"}
    run = train(split.main, 3, settings(data, tmp_path / "split", **changes), generators=1)
    assert difference(run, expected) < 1e-12
    for row, other in zip(rows_of(run), rows_of(expected), strict=True):
        for name in ("reward", "loss", "grad_norm", "extra_prompts", "rollout/discarded_tokens"):
            if name in other:
                assert row[name] == pytest.approx(other[name], rel=1e-9, abs=1e-12), name


# --------------------------------------------------------------------------------------------------
# inflight


@pytest.mark.parametrize(("tickets", "ahead"), [("pull", 0), ("round_robin", 2)])
def test_inflight_loses_nothing_and_keeps_the_bound(data, tmp_path, tickets, ahead):
    bound = 2
    num_steps = 6
    # An answer takes longer than a training step, on any machine.
    (tmp_path / "env.py").write_text(SLEEPS)
    changes = {
        "env.name": f"{tmp_path}/env.py:Sleeps",
        "env.max_turns": 6,
        "rollout.overlap": "inflight",
        "rollout.max_staleness": bound,
        "rollout.dump": True,
        "rollout.max_tokens": 8,
        "rollout.tickets": tickets,
        "rollout.ahead": ahead,
        "rollout.prompts_per_step": 2,
        "num_steps": num_steps,
    }
    run = train(split.main, 3, settings(data, tmp_path / "run", **changes), generators=2)
    rows = [row for row in read(run.folder / "metrics.jsonl") if row["phase"] == "rl"]
    assert sum(row["rollout/discarded_tokens"] for row in rows) == 0
    summary = json.loads((run.folder / "summary.json").read_text())
    assert not summary["discarded_tokens"]
    tickets_trained: Counter[int] = Counter()
    within: set[int] = set()  # Numbers of versions within an answer.
    for step in range(num_steps):
        trajectories = []
        for file in (run.folder / "rollouts").glob(f"step-{step}-rank-*.jsonl"):
            trajectories += records.read_file(file)
        assert len(trajectories) == 2 * 4
        tickets_trained.update({t.group for t in trajectories})
        for t in trajectories:
            versions = t.versions[t.sampled]
            assert (np.diff(versions) >= 0).all()
            assert step - bound <= versions.min() and versions.max() <= step
            within.add(len(set(versions.tolist())))
    assert set(tickets_trained.values()) == {1}
    assert set(tickets_trained) == set(range(2 * num_steps))
    assert max(within) > 1, "no weights have changed under an answer"


@pytest.mark.parametrize("clock", [1, 5])
def test_tokens_are_of_the_weights_of_their_version(tmp_path, clock):
    folders = [tiny.make(tmp_path / str(n), "qwen3", tied=False, seed=n) for n in range(2)]
    (found,) = ranks(1, differences, folders, clock, False)
    assert found.max() < 3e-5


def test_kept_keys_are_those_of_the_weights_before(tmp_path):
    folders = [tiny.make(tmp_path / str(n), "qwen3", tied=False, seed=n) for n in range(2)]
    (found,) = ranks(1, differences, folders, 5, True)
    assert found.max() > 1e-2
    (found,) = ranks(1, differences_of_prompts_again, folders)
    assert max(found) < 3e-5


# --------------------------------------------------------------------------------------------------
# what it is for


def timed(main, world, flags, generators) -> float:
    """Seconds of the steps of a run after the first three."""
    rows = read(train(main, world, flags, generators).folder / "metrics.jsonl")
    return sum(row["time/step"] for row in rows if row["phase"] == "rl" and row["step"] >= 3)


def test_waiting_environments_and_training_overlap(data, tmp_path):
    """Sleep is no work of a CPU, so that two cores suffice."""
    (tmp_path / "env.py").write_text(SLEEPS)
    changes = {
        "env.name": f"{tmp_path}/env.py:Sleeps",
        "env.max_turns": 6,
        "eval.every": 0,
        "rollout.max_tokens": 4,
        "rollout.tickets": "pull",
        "num_steps": 8,
    }
    colocated = timed(colocated_main, 2, settings(data, tmp_path / "colocated", **changes), 0)
    changes |= {"rollout.overlap": "inflight"}
    alone = timed(split.main, 2, settings(data, tmp_path / "split", **changes), 1)
    assert alone <= 0.75 * colocated, (alone, colocated)
