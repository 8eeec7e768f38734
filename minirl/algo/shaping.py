"""What a config may ask for between rollout and update: other rewards, fewer tokens.

Pure functions of this rank's rewards and entropies, and of sums over all ranks.
"""

import math

import numpy as np
import torch
from torch import Tensor

from minirl.algo.token_advantages import Reduce
from minirl.config.shared import RewardConfig
from minirl.types.packed import Packed

TIE = 1e-5  # Of an entropy: as much as rounding makes.


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
    stats = [new_count, mean, squares]
    return (rewards - mean) / divisor(stats), stats


def divisor(stats: list[float]) -> float:
    """Return what `normalize` divides by: the deviation of all rewards so far + 1e-8."""
    count, _, squares = stats
    return (squares / max(1.0, count)) ** 0.5 + 1e-8


def shape(
    rewards: Tensor,
    lengths: Tensor,
    stopped: Tensor,
    cfg: RewardConfig,
    max_tokens: int,
    stats: list[float],
    sum_over_ranks: Reduce,
) -> tuple[Tensor, Tensor, list[float]]:
    """Apply the shaping that the config asks for. Collective if it normalises.

    In this order: answers that did not stop by themselves have their rewards multiplied by
    `unstopped_value` (scale) or replaced by it (set); an answer of L tokens pays
    penalty * clip((L - (max_tokens - cache)) / cache, 0, 1) with cache = `overlong_tokens` (DAPO,
    arXiv 2503.14476, eq. 13, where the penalty is 1); normalisation; clipping.

    What single turns have earned is scaled alike, so that it stays a part of the reward; what is
    subtracted belongs to the end of the episode.

    Args:
        rewards: float64 [N], one for each episode of this rank.
        lengths: float64 [N], sampled tokens of each episode.
        stopped: bool [N], whether it ended by itself.
        cfg: the section `reward` of the config.
        max_tokens: limit of sampled tokens of an episode (env.max_tokens).
        stats: running statistics, see `normalize`.
        sum_over_ranks: adds a CPU tensor over all ranks.

    Returns:
        Shaped rewards float64 [N]; what turn rewards are to be multiplied by, float64 [N]; and the
        new running statistics.
    """
    scales = torch.ones_like(rewards)
    if cfg.unstopped == "scale":
        rewards = torch.where(stopped, rewards, rewards * cfg.unstopped_value)
        scales = torch.where(stopped, scales, cfg.unstopped_value)
    elif cfg.unstopped == "set":
        rewards = torch.where(stopped, rewards, cfg.unstopped_value)
        scales = torch.where(stopped, scales, 0.0)
    if cfg.overlong_tokens:
        excess = lengths - (max_tokens - cfg.overlong_tokens)
        rewards = rewards - cfg.overlong_penalty * (excess / cfg.overlong_tokens).clamp(0, 1)
    if cfg.normalize:
        rewards, stats = normalize(rewards, stats, sum_over_ranks)
        # Where all rewards so far are equal but for rounding, turns count as little as they do.
        scales = scales / divisor(stats) if divisor(stats) > 1e-6 else torch.zeros_like(scales)
    if cfg.clip:
        scales = scales * (cfg.clip / rewards.abs()).clamp(max=1.0)
        rewards = rewards.clamp(-cfg.clip, cfg.clip)
    return rewards, scales, stats


def mark_high_entropy(batches: list[Packed], share: float, sum_over_ranks: Reduce) -> None:
    """Set `high_entropy_mask` at that share of the tokens with the highest `old_entropy`.

    Wang et al. 2025 (arXiv 2506.01939), eq. 6. Collective. What differs by rounding alone, as the
    first tokens of siblings do, is marked alike.

    Args:
        batches: this rank's micro-batches of an optimizer step.
        share: of the tokens in the loss on all ranks, rounded up to whole tokens.
        sum_over_ranks: adds an int64 CPU tensor over all ranks.
    """
    entropies = torch.cat([b.old_entropy[b.loss_mask].double().cpu() for b in batches])
    num_tokens = sum_over_ranks(torch.tensor([len(entropies)])).item()
    num_marked = math.ceil(share * num_tokens - 1e-9)  # 0.07 * 100 is more than 7
    lowest = kth_largest(entropies.numpy(), num_marked, sum_over_ranks)
    for batch in batches:
        batch.high_entropy_mask = batch.old_entropy >= lowest - TIE * abs(lowest)


def kth_largest(values: np.ndarray, k: int, sum_over_ranks: Reduce) -> float:
    """Return the k-th largest value of all ranks; 1 is the largest. Collective.

    Its bits are found from the highest to the lowest: a bit is set if at least k values are as
    large as with it. So each of 64 rounds adds one count over the ranks, however many values there
    are.

    Args:
        values: this rank's numbers, float64 [N], not NaN; N may differ from rank to rank.
        k: 1 .. number of values on all ranks.
        sum_over_ranks: adds an int64 CPU tensor over the ranks.
    """
    # Keys in the order of the values: bits of positive numbers are ordered as the numbers are, and
    # those of negative ones the other way round. A negative zero counts as zero.
    bits = (values + 0.0).view(np.uint64)
    sign = 1 << 63
    keys = np.where(bits & np.uint64(sign), ~bits, bits | np.uint64(sign))
    found = 0  # The key's bits so far.
    for bit in reversed(range(64)):
        with_bit = found | 1 << bit
        count = int((keys >= np.uint64(with_bit)).sum())
        if sum_over_ranks(torch.tensor([count])).item() >= k:
            found = with_bit
    found_bits = found ^ sign if found & sign else found ^ (2**64 - 1)
    return np.array([found_bits], np.uint64).view(np.float64)[0].item()
