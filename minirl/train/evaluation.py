"""Accuracy, pass@k and mean reward on held-out prompts, and means over the episodes of a step."""

import itertools
from collections import defaultdict
from collections.abc import Iterable

import numpy as np

from minirl.base.errors import UserError
from minirl.config.lengths import eval_extra_tokens
from minirl.config.shared import EvalConfig, SamplingConfig
from minirl.data.prompts import Prompts
from minirl.engine.engine import Sampling
from minirl.parallel.mesh import Mesh
from minirl.rollout.sampler import Sampler
from minirl.train.reward_model import RewardModel
from minirl.types.packed import Trajectory

# Metrics of an episode: what their names begin with, and where they are in its info.
INFO_METRICS = (
    ("reward", "rewards"),
    ("reward", "reward_metrics"),
    ("graders", "graders"),
    ("env", "env"),
    ("endpoint", "endpoint"),
)
NUM_SHOWN = 5  # Prompts whose answers are kept for people to read.


def breakdown(
    episodes: list[Trajectory],
    threshold: float,
    mesh: Mesh,
    more: Iterable[tuple[str, float]] = (),
) -> dict[str, float]:
    """Return means over the episodes of all ranks, sorted by name. Collective.

    However the episodes are spread over the ranks, the means are the same to the bit.

    Args:
        episodes: of this rank, one trajectory of each.
        threshold: the score at which an answer counts as correct.
        mesh: the ranks.
        more: further names and values to take means of.

    Returns:
        `source/NAME/accuracy` and `source/NAME/reward` of each data source, where rows have one;
        `reward/NAME` of each of several reward functions, over the answers that it applies to, and
        of what functions of TRL and OpenRLHF log; `graders/stopped`, the share of answers
        that a grader of another package could not grade within its limits; `env/turns`,
        `env/truncated`, `env/failed` and all other `env/NAME` that the environment reports;
        `endpoint/refused`, requests of an agent that the endpoint refused, `endpoint/unguided`,
        those whose answers it could not hold to what they demand, and `endpoint/outside_loss`, the
        share of tokens that guided decoding put outside the loss; the means of `more`.
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
        parts = [of_rank[name] for of_rank in by_rank if name in of_rank]
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

    Beside what `breakdown` returns: `answer_tokens`, and `longest_answer`, their maximum;
    `stopped`, the share of answers that ended by themselves; `staleness`, optimizer steps since the
    oldest token was sampled; `reward`, the score; `shaped_reward`, and its deviation over all
    episodes (`reward_deviation/all`) and the mean of those within the groups
    (`reward_deviation/group`); and `equal_groups`, the share of groups whose rewards are all equal.
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
    """Return how an evaluation samples: by `eval`, and where that leaves it open, by `rollout`."""
    extra = eval_extra_tokens(cfg)
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


def _require_answers(sampler: Sampler, num_prompts: int, num_answers: int) -> None:
    """Refuse an evaluation without any answer, and say why there is none. Collective.

    Args:
        sampler: knows why episodes have failed on this rank.
        num_prompts: held out.
        num_answers: with tokens, on this rank.

    Raises:
        UserError: on all ranks.
    """
    runner = sampler.runner
    of_ranks = sampler.mesh.gather((num_answers, runner.failures[:1], runner.refusals[-1:]))
    if any(num for num, _, _ in of_ranks):
        return
    failures = itertools.chain.from_iterable(each for _, each, _ in of_ranks)
    refusals = itertools.chain.from_iterable(each for _, _, each in of_ranks)
    why = [*failures, *refusals, "the policy sampled no token in any"][0]
    raise UserError(
        f"none of the {num_prompts} held-out prompts got an answer to evaluate: {why}; mend "
        "env.name, or give its prompts more room by engine.max_model_len"
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
        None: a signal asks to stop, on any rank, and has interrupted it. Else
        `scores`: accuracy (= pass@1), pass@k for k = cfg.samples (Chen et al. 2021, arXiv
        2107.03374, eq. 1, which is 1 for a prompt with a correct one among k samples, else 0),
        reward, answer_tokens, stopped (share of answers that ended by themselves), and what
        `breakdown` adds. `answers`: prompt, answer and reward of the first sample of the first
        `num_shown` prompts, and `last_turn` where an environment has several: of its answers the
        last one, which is what reward functions grade.

    Raises:
        UserError: no prompt got an answer.
    """
    trajectories = sampler.collect(prompts, range(len(prompts.rows)), cfg.samples, sampling)
    if trajectories is None:
        return None
    # Tokens of a grammar are outside the loss, and an answer all the same.
    num_answers = sum(t.info["answer_tokens"] > 0 for t in trajectories)
    _require_answers(sampler, len(prompts.rows), num_answers)
    if reward_model:
        reward_model.grade(trajectories)
    episodes = [t for t in trajectories if t.segment == 0]

    # 1. The means over the answers to each prompt, and whether one of them is correct.
    values = []
    for _, group in itertools.groupby(episodes, lambda t: t.group):
        samples = list(group)
        correct = [float(t.reward >= cfg.threshold) for t in samples]
        values_of = {
            "accuracy": correct,
            "reward": [t.reward for t in samples],
            "answer_tokens": [t.info["answer_tokens"] for t in samples],
            "stopped": [t.info["stopped"] for t in samples],
        }
        for name, of_samples in values_of.items():
            values.append((name, sum(of_samples) / len(samples)))
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
    for of_rank in sampler.mesh.gather(answers):
        answers |= of_rank
    return {
        "scores": breakdown(episodes, cfg.threshold, sampler.mesh, values),
        "answers": [answers[group] for group in sorted(answers)],
    }
