"""Every method's recipe as the whole program on one rank; what only a run shows: prompts replaced, a reference refreshed, both resumed."""

import json
import math
from pathlib import Path

import pytest
import torch
from programs import ROOT, fork

from minirl.rollout.sampler import Sampler
from minirl.types import Trajectory

RECIPES = ("rloo", "dr_grpo", "gspo", "cispo", "dapo", "reinforce_pp", "reinforce_pp_baseline")
EARNED = """
def vowels(prompt, completion, row):
    return sum(letter in "aeiou" for letter in completion) / 10
"""
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="CPU engines: bitwise repeatable there only")


@pytest.fixture(scope="module")
def reward(tmp_path_factory) -> Path:
    """Earned by an untrained model now and then."""
    path = tmp_path_factory.mktemp("reward") / "reward.py"
    path.write_text(EARNED)
    return path


def flags(reward: Path, output: Path, *more: object, config: str = "rloo") -> list:
    return ["--config", ROOT / "configs" / f"{config}.yaml", "--output", output, "--num-steps", 2, "--sft.num-steps", 0, "--eval.every", 0, "--data.held-out", 4,
            "--data.train", "reasoning_gym:spell_backward?min_word_len=3&max_word_len=6&size=100&seed=1", "--reward.function", f"{reward}:vowels",
            "--policy.scratch.num-layers", 1, "--policy.scratch.hidden-size", 32, "--policy.lr-warmup-steps", 0, "--rollout.prompts-per-step", 8,
            "--checkpoint.every", 0, *more]


def run(reward: Path, output: Path, *more: object, config: str = "rloo") -> list[dict]:
    ended = fork("minirl.rl", flags(reward, output, *more, config=config), output.with_name(output.name + "_log"))
    assert ended.code == 0, ended.err
    return [row for row in map(json.loads, (output / "metrics.jsonl").read_text().splitlines()) if row["phase"] == "rl"]


def repeatable(rows: list[dict]) -> list[dict]:
    return [{name: value for name, value in row.items() if not name.startswith(("time/", "tokens_per_second/"))} for row in rows]


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_trains_two_steps(reward, tmp_path, name):
    rows = run(reward, tmp_path / "out", config=name)
    assert [row["step"] for row in rows] == [0, 1]
    for row in rows:
        assert all(math.isfinite(v) for v in row.values() if not isinstance(v, str)), row
        assert row["grad_norm"] > 0 and row["skipped_updates"] == 0
    if name == "reinforce_pp":
        assert rows[0]["ref_kl"] == pytest.approx(0, abs=1e-4) and rows[1]["ref_kl"] != rows[0]["ref_kl"]


def test_resumed_dynamic_sampling_with_every_state_is_the_uninterrupted_run(reward, tmp_path):
    """Extra tickets, the adapted KL weight, running reward statistics and the refreshed reference all come back."""
    given = ["--num-steps", 5, "--checkpoint.every", 2, "--rollout.extra-prompts", 3, "--rollout.keep-inside", 0.09, 1.0, "--reward.normalize",
             "--algo.kl-coef", 0.1, "--algo.kl-target", 0.001, "--ref.every", 1, "--rollout.samples-per-prompt", 4, "--algo.entropy-share", 0.3, "--algo.entropy-coef", 0.01]
    rows = run(reward, tmp_path / "whole", *given)
    assert any(0 < row["extra_prompts"] <= 3 for row in rows)
    assert rows[1]["kl_coef"] != rows[0]["kl_coef"] and any(row["shaped_reward"] != row["reward"] for row in rows)
    # The reference follows at one step's distance, so its KL does not grow; to the first policy it would.
    run(reward, tmp_path / "parts", *given[2:], "--num-steps", 2)
    resumed = run(reward, tmp_path / "parts", *given, "--resume")
    assert repeatable(resumed) == repeatable(rows)
    assert (tmp_path / "parts" / "model" / "model.safetensors").read_bytes() == (tmp_path / "whole" / "model" / "model.safetensors").read_bytes()
    assert [p.name for p in sorted((tmp_path / "whole" / "references").iterdir())] == ["step-2", "step-3", "step-4", "step-5"]  # from the oldest checkpoint on


def test_a_teacher_teaches(reward, tmp_path):
    """The student's KL to another model falls. The teacher is the model of another seed, which has the same tokenizer."""
    run(reward, tmp_path / "teacher", "--seed", 5, "--num-steps", 0)
    rows = run(reward, tmp_path / "student", "--num-steps", 6, "--algo.advantage", "on_policy_distill", "--ref.model", tmp_path / "teacher" / "model",
               "--policy.lr", 5e-3, "--rollout.samples-per-prompt", 1, "--rollout.prompts-per-step", 32, "--policy.lr-schedule", "constant")
    kl = [row["ref_kl"] for row in rows]
    assert kl[0] > 0.05 and kl[-1] < 0.7 * kl[0], kl


def test_a_teacher_of_another_vocabulary_is_refused(reward, tmp_path):
    run(reward, tmp_path / "teacher", "--num-steps", 0, "--policy.scratch.phrases", "abc", "def", "ghi", "--data.max-prompt-tokens", 100)
    ended = fork("minirl.rl", flags(reward, tmp_path / "out", "--algo.advantage", "on_policy_distill", "--ref.model", tmp_path / "teacher" / "model"), tmp_path / "log")
    assert ended.code == 2 and "ref.model" in ended.errors()[0] and "vocabulary" in ended.errors()[0] and "Traceback" not in ended.err, ended.err


# ---------------------------------------------------------------------------------------------------- dynamic sampling


class Recorded(Sampler):
    """Two ranks whose answers to ticket n earn means[n], one rank at a time."""

    def __init__(self, means: dict[int, float], rank: int):
        self.means, self.rank, self.asked, self.mesh = means, rank, [], self

    def collect(self, prompts, tickets, num_samples, sampling, *, version=0):
        self.asked.append(tickets)
        return [Trajectory(tokens=None, sampled=None, logprobs=None, reward=self.means[n] + (-1) ** e, group=n, episode=e)
                for n in tickets if n % 2 == self.rank for e in range(num_samples)]

    def gather(self, own):
        other = {n: 0 < self.means[n] < 1 for n in self.asked[-1] if n % 2 != self.rank}
        return [own, other] if self.rank == 0 else [other, own]


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
        sampler = Recorded(given, rank)
        trajectories, stop = sampler.collect_varied(None, 10, 4, extra, (0.0, 1.0), 2, None)
        assert stop == 10 + end and len(sampler.asked) == rounds
        assert [n for tickets in sampler.asked for n in tickets] == list(range(10, stop))  # none twice, none left out
        got += [(t.group - 10, t.episode) for t in trajectories]
    assert sorted(got) == [(n, e) for n in kept for e in (0, 1)]
