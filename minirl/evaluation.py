"""Accuracy, pass@k and mean reward on held-out prompts."""

import itertools
from collections.abc import Iterable

from minirl.config.shared import EvalConfig
from minirl.data.prompts import Prompts
from minirl.parallel.mesh import Mesh
from minirl.rewards.model import RewardModel
from minirl.rollout.engine import Sampling
from minirl.rollout.sampler import Sampler
from minirl.types import Trajectory


def breakdown(
    trajectories: list[Trajectory],
    threshold: float,
    mesh: Mesh,
    more: Iterable[tuple[str, float]] = (),
) -> dict[str, float]:
    """Means over all ranks: `source/NAME/accuracy` and `/reward` of each data source where rows
    have one, `reward/NAME` of each of several reward functions, `env/turns`, `/truncated`,
    `/failed` and what else an environment tells, and of `more` values by their names.
    `trajectories`: one of each episode. The same however they are spread over ranks. Collective.
    """
    own = [*more]
    for t in trajectories:
        own += [
            (f"{of}/{name}", float(value))
            for of, told in (("reward", "rewards"), ("env", "env"))
            for name, value in t.info.get(told, {}).items()
        ]
        if source := t.info["source"]:
            score = t.info.get("score", t.reward)  # in training, the reward before it was shaped
            own += [
                (f"source/{source}/accuracy", float(score >= threshold)),
                (f"source/{source}/reward", score),
            ]
    pairs = sorted(itertools.chain(*mesh.gather(own)))
    found = {
        name: [value for _, value in of]
        for name, of in itertools.groupby(pairs, lambda pair: pair[0])
    }
    return {name: sum(values) / len(values) for name, values in found.items()}


def evaluate(
    sampler: Sampler,
    prompts: Prompts,
    cfg: EvalConfig,
    sampling: Sampling,
    mesh: Mesh,
    reward_model: RewardModel | None = None,
) -> dict:
    """Sample `cfg.samples` answers to every prompt. Collective; the engine must be awake. The seeds
    are the same at each call.

    Returns `scores`: accuracy (= pass@1), pass@k for k = cfg.samples (Chen et al. 2021, arXiv
    2107.03374, eq. 1, which is 1 for a prompt with a correct one among k samples, else 0), reward,
    answer_tokens, stopped (share of answers that ended by themselves), and what `breakdown` adds;
    and `answers`: prompt, answer and reward of the first sample of the first five prompts.
    """
    trajectories = sampler.collect(prompts, range(len(prompts.rows)), cfg.samples, sampling)
    if reward_model:
        reward_model.grade(trajectories)
    once = [t for t in trajectories if t.segment == 0]
    own: list[tuple[str, float]] = []
    for _, group in itertools.groupby(once, lambda t: t.group):
        told = [
            {
                "accuracy": float(t.reward >= cfg.threshold),
                "reward": t.reward,
                **{name: t.info[name] for name in ("answer_tokens", "stopped")},
            }
            for t in group
        ]
        own += [(name, sum(t[name] for t in told) / len(told)) for name in told[0]] + [
            (f"pass@{cfg.samples}", max(t["accuracy"] for t in told))
        ]
    shown = [
        (t.group, {"prompt": t.info["prompt"], "answer": t.info["completion"], "reward": t.reward})
        for t in trajectories
        if t.group < 5 and t.episode == 0
    ]
    answers = sorted(itertools.chain(*mesh.gather(shown)), key=lambda a: a[0])
    return {"scores": breakdown(once, cfg.threshold, mesh, own), "answers": [a for _, a in answers]}
