"""What is made of rewards before advantages: pure functions of the rewards of this rank's answers,
float64 [N], in the order of `shape`.
"""

import torch
from torch import Tensor

from minirl.algo.advantages import Sums
from minirl.config.shared import RewardConfig


def normalize(rewards: Tensor, stats: list[float], sums: Sums) -> tuple[Tensor, list[float]]:
    """(r - mean) / (deviation + 1e-8) with those of all rewards so far, these included, and the new
    [count, mean, squares about it].

    Chan et al. 1979, updating formulae for the variance; twice over the batch, so that large means
    cost no digits.
    """
    count, total = sums(torch.tensor([len(rewards), rewards.sum()], dtype=torch.float64)).tolist()
    if not count:
        return rewards, stats
    (squares,) = sums(((rewards - total / count) ** 2).sum()[None]).tolist()
    old, mean, old_squares = stats
    new, delta = old + count, total / count - mean
    stats = [new, mean + delta * count / new, old_squares + squares + delta**2 * old * count / new]
    return (rewards - stats[1]) / ((stats[2] / new) ** 0.5 + 1e-8), stats


def shape(
    rewards: Tensor,
    lengths: Tensor,
    stopped: Tensor,
    cfg: RewardConfig,
    max_tokens: int,
    stats: list[float],
    sums: Sums,
) -> tuple[Tensor, list[float]]:
    """All that the config asks for. Returns rewards and the running statistics. Collective if it
    normalises.

    Of answers that did not stop by themselves (`stopped`, bool [N]) rewards are multiplied by
    cfg.unstopped_value (scale) or replaced by it (set). L generated tokens cost penalty clip((L -
    (max_tokens - cache)) / cache, 0, 1), where cache is cfg.overlong_tokens; DAPO (arXiv
    2503.14476), eq. 13, with penalty 1.
    """
    if cfg.unstopped != "keep":
        rewards = torch.where(
            stopped,
            rewards,
            rewards * cfg.unstopped_value if cfg.unstopped == "scale" else cfg.unstopped_value,
        )
    if cfg.overlong_tokens:
        rewards = rewards - cfg.overlong_penalty * (
            (lengths - (max_tokens - cfg.overlong_tokens)) / cfg.overlong_tokens
        ).clamp(0, 1)
    if cfg.normalize:
        rewards, stats = normalize(rewards, stats, sums)
    return rewards.clamp(-cfg.clip, cfg.clip) if cfg.clip else rewards, stats
