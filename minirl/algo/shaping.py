"""Reward shaping between rollout and advantages: pure functions of this rank's rewards."""

import torch
from torch import Tensor

from minirl.algo.advantages import Reduce
from minirl.config.shared import RewardConfig


def normalize(
    rewards: Tensor, stats: list[float], sum_over_ranks: Reduce
) -> tuple[Tensor, list[float]]:
    """Return (r - mean) / (deviation + 1e-8) over all rewards so far, these included.

    Statistics are updated as in Chan et al. 1979, "Updating formulae for computing sample
    variances", with two passes over the batch so that large means cost no digits.

    Args:
        rewards: float64 [N], of this rank.
        stats: [count, mean, sum of squares about the mean] before this step.
        sum_over_ranks: adds a CPU tensor over all ranks.

    Returns:
        Normalised rewards float64 [N], and the new statistics.
    """
    counted = torch.tensor([len(rewards), rewards.sum()], dtype=torch.float64)
    count, total = sum_over_ranks(counted).tolist()
    if not count:
        return rewards, stats
    batch_mean = total / count
    (batch_squares,) = sum_over_ranks(((rewards - batch_mean) ** 2).sum()[None]).tolist()

    old_count, mean, squares = stats
    new_count = old_count + count
    delta = batch_mean - mean
    mean += delta * count / new_count
    squares = squares + batch_squares + delta**2 * old_count * count / new_count
    deviation = (squares / new_count) ** 0.5
    return (rewards - mean) / (deviation + 1e-8), [new_count, mean, squares]


def shape(
    rewards: Tensor,
    lengths: Tensor,
    stopped: Tensor,
    cfg: RewardConfig,
    max_tokens: int,
    stats: list[float],
    sum_over_ranks: Reduce,
) -> tuple[Tensor, list[float]]:
    """Apply the shaping that the config asks for. Collective if it normalises.

    In this order: answers that did not stop by themselves have their rewards multiplied by
    `unstopped_value` (scale) or replaced by it (set); an answer of L tokens pays
    penalty * clip((L - (max_tokens - cache)) / cache, 0, 1) with cache = `overlong_tokens` (DAPO,
    arXiv 2503.14476, eq. 13, where the penalty is 1); normalisation; clipping.

    Args:
        rewards: float64 [N], one for each episode of this rank.
        lengths: float64 [N], sampled tokens of each episode.
        stopped: bool [N], whether it ended by itself.
        cfg: the section `reward` of the config.
        max_tokens: limit of sampled tokens of an episode (env.max_tokens).
        stats: running statistics, see `normalize`.
        sum_over_ranks: adds a CPU tensor over all ranks.

    Returns:
        Shaped rewards float64 [N], and the new running statistics.
    """
    if cfg.unstopped == "scale":
        rewards = torch.where(stopped, rewards, rewards * cfg.unstopped_value)
    elif cfg.unstopped == "set":
        rewards = torch.where(stopped, rewards, cfg.unstopped_value)
    if cfg.overlong_tokens:
        excess = lengths - (max_tokens - cfg.overlong_tokens)
        rewards = rewards - cfg.overlong_penalty * (excess / cfg.overlong_tokens).clamp(0, 1)
    if cfg.normalize:
        rewards, stats = normalize(rewards, stats, sum_over_ranks)
    if cfg.clip:
        rewards = rewards.clamp(-cfg.clip, cfg.clip)
    return rewards, stats
