"""Accuracy, pass@k and mean reward on held-out prompts, and means over the episodes of a step."""

import itertools
from collections import defaultdict
from collections.abc import Iterable

import numpy as np

from minirl.base.errors import UserError
from minirl.config.shared import EvalConfig, SamplingConfig
from minirl.data.prompts import Prompts
from minirl.engine.engine import Sampling
from minirl.parallel.mesh import Mesh
from minirl.rollout.sampler import Sampler
from minirl.train.reward_model import RewardModel
from minirl.types.packed import Trajectory

# Metrics of an episode: the prefix of their names, and their key in its info.
INFO_METRICS = (
    ("reward", "rewards"),
    ("reward", "reward_metrics"),
    ("graders", "graders"),
    ("env", "env"),
    ("endpoint", "endpoint"),
)
NUM_SHOWN = 5  # Prompts with answers that people may read.


def breakdown(
    episodes: list[Trajectory],
    threshold: float,
    mesh: Mesh,
    more: Iterable[tuple[str, float]] = (),
) -> dict[str, float]:
    """Return means over the episodes of all ranks, sorted by name. Collective.

    The means are the same to the bit for every way to spread the episodes over the ranks.

    Args:
        episodes: one trajectory of each episode of this rank.
        threshold: the score at which an answer counts as correct.
        mesh: the ranks.
        more: further names and values to take means of.

    Returns:
        The means of `more`, and those that METRICS.md explains: `source/NAME/*` of each data
        source, `reward/NAME` of each reward function, `graders/*` and `env/*`. For agents also
        `endpoint/refused`, requests that the endpoint refused; `endpoint/unguided`, answers that it
        could not hold to a format; `endpoint/outside_loss`, the share of tokens that guided
        decoding put outside the loss.
    """
    gathered = _gather_sorted([*more, *_of_episodes(episodes, threshold)], mesh)
    return {name: _mean(in_order) for name, in_order in gathered.items()}


def _of_episodes(episodes: list[Trajectory], threshold: float) -> list[tuple[str, float]]:
    """Return the names and values that `breakdown` takes the means of."""
    values = []
    for t in episodes:
        for kind, key in INFO_METRICS:
            for name, value in t.info.get(key, {}).items():
                values.append((f"{kind}/{name}", float(value)))
        source = t.info["source"]
        if source:
            score = t.info.get("score", t.reward)  # in training, the reward before it was shaped
            values += [
                (f"source/{source}/accuracy", score >= threshold),
                (f"source/{source}/reward", score),
            ]
    return values


def _gather_sorted(values: list[tuple[str, float]], mesh: Mesh) -> dict[str, list[float]]:
    """Return the values of all ranks by name, sorted, names and values. Collective."""
    by_rank = mesh.gather_named(values)
    gathered = {}
    for name in sorted(set().union(*by_rank)):
        parts = [on_rank[name] for on_rank in by_rank if name in on_rank]
        gathered[name] = np.sort(np.concatenate(parts)).tolist()
    return gathered


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values)


def _deviation(values: Iterable[float]) -> float:
    """Return the root of the mean square about the mean, 0 if all values are equal."""
    values = list(values)
    mean = _mean(values)
    if min(values) == max(values):
        return 0.0
    return _mean((value - mean) ** 2 for value in values) ** 0.5


def means_of_step(trajectories: list[Trajectory], threshold: float, mesh: Mesh) -> dict[str, float]:
    """Return means over the episodes of a training step on all ranks. Collective.

    In addition to the means of `breakdown`: `answer_tokens`, and `longest_answer`, their maximum;
    `stopped`, the share of answers that ended by themselves; `staleness`, optimizer steps since the
    oldest token was sampled; `reward`, the score; `shaped_reward`, and its deviation over all
    episodes (`reward_deviation/all`) and the mean of those within the groups
    (`reward_deviation/group`); and `equal_groups`, the share of groups with equal rewards.
    """
    episodes = [t for t in trajectories if t.segment == 0]
    values = _of_episodes(episodes, threshold)
    rewards_of_group: dict[int, list[float]] = defaultdict(list)
    for t in episodes:
        rewards_of_group[t.group].append(t.reward)
        for name in ("answer_tokens", "stopped", "staleness"):
            values.append((name, t.info[name]))
        values += [("reward", t.info["score"]), ("shaped_reward", t.reward)]
    for rewards in rewards_of_group.values():
        values.append(("equal_groups", min(rewards) == max(rewards)))
        values.append(("reward_deviation/group", _deviation(sorted(rewards))))
    gathered = _gather_sorted(values, mesh)
    means = {name: _mean(in_order) for name, in_order in gathered.items()}
    means["longest_answer"] = gathered["answer_tokens"][-1]
    means["reward_deviation/all"] = _deviation(gathered["shaped_reward"])
    return means


def eval_sampling(cfg: SamplingConfig, stop_token_ids: tuple[int, ...]) -> Sampling:
    """Return how an evaluation samples: as `eval` says, else as `rollout` says."""
    extra = cfg.eval_extra_tokens
    return Sampling(
        max_tokens=cfg.eval.max_tokens or cfg.rollout.max_tokens,
        stop_token_ids=stop_token_ids,
        temperature=cfg.eval.temperature,
        top_p=cfg.rollout.top_p if cfg.eval.top_p is None else cfg.eval.top_p,
        top_k=cfg.rollout.top_k if cfg.eval.top_k is None else cfg.eval.top_k,
        min_p=cfg.rollout.min_p,
        episode_tokens=cfg.env.max_tokens + extra,
        context_tokens=cfg.engine.max_model_len + extra,
    )


def evaluate(
    sampler: Sampler,
    prompts: Prompts,
    cfg: EvalConfig,
    sampling: Sampling,
    reward_model: RewardModel | None,
    num_shown: int = NUM_SHOWN,
) -> dict | None:
    """Sample `cfg.samples` answers to every prompt and score them. Collective.

    The engine must be awake. The seeds are the same at each call.

    Returns:
        None: a signal to any rank has interrupted it. Else
        `scores`: accuracy (= pass@1), pass@k for k = cfg.samples (Chen et al. 2021, arXiv
        2107.03374, eq. 1, which is 1 for a prompt with a correct one among k samples, else 0),
        reward, answer_tokens, stopped (share of answers that ended by themselves), and what
        `breakdown` adds. `answers`: prompt, answer and reward of the first sample of the first
        `num_shown` prompts, and `last_turn` if an environment has several: the last of its answers,
        which reward functions grade.

    Raises:
        UserError: no prompt got an answer.
    """
    trajectories = sampler.collect(prompts, range(len(prompts.rows)), cfg.samples, sampling)
    if trajectories is None:
        return None
    # Tokens of a grammar are outside the loss; they are still an answer.
    num_answers = sum(t.info["answer_tokens"] > 0 for t in trajectories)
    reasons = [*sampler.runner.failures[:1], *sampler.runner.refusals[-1:]]
    by_rank = sampler.mesh.gather((num_answers, reasons))
    if not any(num for num, _ in by_rank):
        found = itertools.chain.from_iterable(reasons for _, reasons in by_rank)
        why = next(found, "the policy sampled no token in any")
        raise UserError(
            f"none of the {len(prompts.rows)} held-out prompts got an answer to evaluate: {why}; "
            "fix env.name, or give its prompts more room by engine.max_model_len"
        )
    if reward_model:
        reward_model.grade(trajectories)
    episodes = [t for t in trajectories if t.segment == 0]

    # 1. The means over the answers to each prompt, and whether one of them is correct.
    values = []
    for _, group in itertools.groupby(episodes, lambda t: t.group):
        samples = list(group)
        correct = [float(t.reward >= cfg.threshold) for t in samples]
        values_by_name = {
            "accuracy": correct,
            "reward": [t.reward for t in samples],
            "answer_tokens": [t.info["answer_tokens"] for t in samples],
            "stopped": [t.info["stopped"] for t in samples],
        }
        for name, sampled in values_by_name.items():
            values.append((name, sum(sampled) / len(samples)))
        values.append((f"pass@{cfg.samples}", max(correct)))

    # 2. Answers to read, in the order of their prompts.
    answers = {}
    for t in episodes:
        if t.group < num_shown and t.episode == 0:
            answers[t.group] = {
                "prompt": t.info["prompt"],
                "answer": t.info["completion"],
                "reward": t.reward,
            }
            if "last_turn" in t.info:
                answers[t.group]["last_turn"] = t.info["last_turn"]
    for others in sampler.mesh.gather(answers):
        answers |= others
    return {
        "scores": breakdown(episodes, cfg.threshold, sampler.mesh, values),
        "answers": [answers[group] for group in sorted(answers)],
    }
