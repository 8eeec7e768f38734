"""Every method's recipe as the whole program on one rank; what only a run shows: prompts replaced, a reference refreshed, both resumed."""

import json
import math
from pathlib import Path

import pytest
import tiny
import torch
from harness import ranks
from programs import ROOT

from minirl import checkpoint, rl
from minirl.config import RLConfig, RolloutConfig
from minirl.flags import parse
from minirl.rollout.sampler import Group, Round, Sampler
from minirl.run import find_teacher
from minirl.types import Trajectory, UserError

RECIPES = ("rloo", "dr_grpo", "gspo", "cispo", "dapo", "reinforce_pp", "reinforce_pp_baseline")
EARNED = """
def vowels(prompt, completion, row):
    return sum(letter in "aeiou" for letter in completion) / 10
"""
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="CPU engines: bitwise repeatable there only")


def flags(folder: Path, name: str, *more: object, config: str = "rloo") -> list[str]:
    given = ["--config", ROOT / "configs" / f"{config}.yaml", "--output", folder / name, "--num-steps", 2, "--sft.num-steps", 0, "--eval.every", 0, "--data.held-out", 2,
             "--data.train", "reasoning_gym:spell_backward?min_word_len=3&max_word_len=6&size=100&seed=1", "--reward.function", f"{folder}/reward.py:vowels",
             "--policy.scratch.num-layers", 1, "--policy.scratch.hidden-size", 32, "--policy.lr-warmup-steps", 0, "--policy.lr-schedule", "constant",
             "--rollout.prompts-per-step", 8, "--checkpoint.every", 0, *more]
    return [str(flag) for flag in given]


STATES = ["--num-steps", 5, "--checkpoint.every", 2, "--rollout.extra-prompts", 3, "--rollout.keep-inside", 0.06, 1.0, "--reward.normalize", "--algo.kl-coef", 0.1,
          "--algo.kl-target", 0.001, "--ref.every", 3, "--rollout.samples-per-prompt", 4, "--algo.entropy-share", 0.3, "--algo.entropy-coef", 0.01]
TEACH = ["--num-steps", 8, "--algo.advantage", "on_policy_distill", "--policy.lr", 5e-3, "--algo.kl-estimator", "k1", "--rollout.samples-per-prompt", 1, "--rollout.prompts-per-step", 32]


def train(mesh, cases: list[list[str]]) -> None:
    """Runs one after the other, with one engine, whose start would be most of the time."""
    make, engines = rl.RolloutEngine, []

    def shared(cfg, folder, mesh, *, dtype, timer):
        if not engines:
            engines.append(make(cfg, folder, mesh, dtype=dtype, timer=timer))
            engines[0].close = lambda: None
        engines[0].timer = timer
        return engines[0]

    rl.RolloutEngine = shared
    for given in cases:
        rl.main(parse(RLConfig, given), mesh)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """The folder with a folder of each run."""
    folder = tmp_path_factory.mktemp("recipes")
    (folder / "reward.py").write_text(EARNED)
    cases = [flags(folder, name, config=name) for name in RECIPES]
    cases += [flags(folder, "whole", *STATES), flags(folder, "parts", *STATES, "--num-steps", 4), flags(folder, "parts", *STATES, "--resume")]
    cases += [flags(folder, "teacher", "--num-steps", 0, "--sft.num-steps", 25, "--sft.batch-size", 32), flags(folder, "student", *TEACH, "--ref.model", folder / "teacher" / "model")]
    ranks(1, train, cases)
    return folder


def rows(folder: Path) -> list[dict]:
    return [row for row in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()) if row["phase"] == "rl"]


def repeatable(rows: list[dict]) -> list[dict]:
    return [{name: value for name, value in row.items() if not name.startswith(("time/", "tokens_per_second/"))} for row in rows]


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_trains_two_steps(runs, name):
    found = rows(runs / name)
    assert [row["step"] for row in found] == [0, 1]
    for row in found:
        assert all(math.isfinite(v) for v in row.values() if not isinstance(v, str)), row
        assert row["grad_norm"] > 0 and row["skipped_updates"] == 0
    if name == "reinforce_pp":
        assert found[0]["ref_kl"] == pytest.approx(0, abs=1e-4) and found[1]["ref_kl"] != found[0]["ref_kl"]


def test_resumed_run_with_every_state_is_the_uninterrupted_one(runs):
    """Extra tickets, the adapted KL weight, running reward statistics and the refreshed reference all come back."""
    whole, resumed = rows(runs / "whole"), rows(runs / "parts")
    assert any(row["extra_prompts"] > 0 for row in whole) and all(row["extra_prompts"] <= 3 for row in whole)
    assert whole[1]["kl_coef"] != whole[0]["kl_coef"] and any(row["shaped_reward"] != row["reward"] for row in whole)
    assert [row["ref_kl"] > 1e-6 for row in whole] == [False, True, True, False, True]  # refreshed after 3 steps
    assert repeatable(resumed) == repeatable(whole) and len(whole) == 5
    weights = [(runs / name / "model" / "model.safetensors").read_bytes() for name in ("parts", "whole")]
    assert weights[0] == weights[1]
    assert [p.name for p in (runs / "whole" / "references").iterdir()] == ["step-3"]


def test_references_that_no_checkpoint_needs_are_dropped(tmp_path):
    for name in ("checkpoints/step-20", "checkpoints/step-30", *(f"references/step-{n}" for n in (5, 15, 25, 35))):
        (tmp_path / name).mkdir(parents=True)
    checkpoint.drop_references(tmp_path, 35)
    assert sorted(p.name for p in (tmp_path / "references").iterdir()) == ["step-15", "step-25", "step-35"]
    for old in ("checkpoints/step-20", "checkpoints/step-30"):
        (tmp_path / old).rmdir()
    checkpoint.drop_references(tmp_path, 35)
    assert sorted(p.name for p in (tmp_path / "references").iterdir()) == ["step-35"]


def test_a_teacher_teaches(runs):
    """An untrained student's KL to a teacher that has seen words falls by more than a third, though no reward is ever earned."""
    kl = [row["ref_kl"] for row in rows(runs / "student")]
    assert kl[0] > 0.1 and kl[-1] < 0.67 * kl[0], kl


def test_a_teacher_of_another_vocabulary_is_refused(tmp_path):
    tiny.make(tmp_path / "model")
    with pytest.raises(UserError, match=r"ref.model = .*model has a vocabulary of \d+, and the policy's is of 99"):
        find_teacher(str(tmp_path / "model"), 99, 1)
    with pytest.raises(UserError, match="ref.model = .*nowhere"):
        find_teacher(str(tmp_path / "nowhere"), 99, 1)


# ---------------------------------------------------------------------------------------------------- dynamic sampling


class Recorded(Sampler):
    """Two ranks whose answers to ticket n earn means[n], one rank at a time."""

    def __init__(self, means: dict[int, float], rank: int, extra: int):
        self.means, self.rank, self.asked, self.mesh = means, rank, [], self
        self.cfg = RLConfig(rollout=RolloutConfig(prompts_per_step=4, extra_prompts=extra))
        self.training = Round(self)

    def _play(self, round, prompts, tickets, num_samples, sampling, version, enough):
        self.asked.append(tickets)
        assert enough == len(tickets)
        return [Answered(n, 0, [self.means[n] + (-1) ** e for e in range(2)]) for n in tickets if n % 2 == self.rank]

    def gather(self, own):
        if isinstance(own, int):
            return [own, own]
        other = {n: 0 < self.means[n] < 1 for n in self.asked[-1] if n % 2 != self.rank}
        return [own, other] if self.rank == 0 else [other, own]


class Answered(Group):
    def trajectories(self):
        return [Trajectory(tokens=None, sampled=None, logprobs=None, reward=reward, group=self.ticket, episode=e) for e, reward in enumerate(self.episodes)]


@pytest.mark.parametrize(("means", "extra", "kept", "end", "rounds"), [
    ([0.5] * 4, 8, [0, 1, 2, 3], 4, 1),
    ([0.0, 0.5, 1.0, 0.5, 0.5, 0.5], 8, [1, 3, 4, 5], 6, 2),
    ([0.0, 0.5, 1.0, 0.5, 1.0, 0.5, 0.0, 0.5], 8, [1, 3, 5, 7], 8, 4),  # one of two is missing again, twice
    ([0.0, 0.5, 1.0, 0.5, 1.0, 0.5], 2, [0, 1, 3, 5], 6, 2),  # no more: the earliest of the others
    ([0.0] * 4, 0, [0, 1, 2, 3], 4, 1),
])
def test_groups_outside_the_range_are_replaced(means, extra, kept, end, rounds):
    given = dict(enumerate(means, start=10))
    got = []
    for rank in (0, 1):
        sampler = Recorded(given, rank, extra)
        trajectories, stop = sampler.collect_step(None, 10, None, version=0)
        assert stop == 10 + end and len(sampler.asked) == rounds
        assert [n for tickets in sampler.asked for n in tickets] == list(range(10, stop))  # none twice, none left out
        got += [(t.group - 10, t.episode) for t in trajectories]
    assert sorted(got) == [(n, e) for n in kept for e in (0, 1)]
