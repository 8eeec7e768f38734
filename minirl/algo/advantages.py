"""Advantage estimators without a critic. Each is one function of rewards and groups; add one with `@register("name")`.

An estimator gets every trajectory that this rank sampled; groups are never split over ranks:
    rewards  float64 [N]
    groups   int64 [N]   0 .. G-1; siblings of one prompt share a number
    sums     adds a float64 tensor over all ranks, for estimators that whiten over the global batch
and returns float64 [N]. A group of equal rewards gets exactly 0, whatever the reward.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from minirl.flags import find_function
from minirl.types import Trajectory

Sums = Callable[[Tensor], Tensor]
Estimator = Callable[[Tensor, Tensor, Sums], Tensor]
ESTIMATORS: dict[str, Estimator] = {}


def register(name: str) -> Callable[[Estimator], Estimator]:
    def add(function: Estimator) -> Estimator:
        if name in ESTIMATORS:
            raise ValueError(f"advantage {name!r} is registered twice")
        ESTIMATORS[name] = function
        return function

    return add


def center(rewards: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
    """Rewards minus the mean of their group, and the size of the group; float64 [N] both.

    Equal rewards are set to 0 explicitly: their mean can be off by rounding, and a division by a tiny deviation would
    blow that up to an advantage of order 1.
    """
    num = len(groups)  # at least the number of groups, also when this rank sampled nothing
    size = torch.zeros(num, dtype=rewards.dtype).index_add_(0, groups, torch.ones_like(rewards))
    mean = torch.zeros(num, dtype=rewards.dtype).index_add_(0, groups, rewards) / size.clamp(min=1)
    low = torch.full((num,), torch.inf, dtype=rewards.dtype).scatter_reduce_(0, groups, rewards, "amin")
    high = torch.full((num,), -torch.inf, dtype=rewards.dtype).scatter_reduce_(0, groups, rewards, "amax")
    equal = (low == high)[groups]
    return (rewards - mean[groups]).masked_fill(equal, 0.0), size[groups]


@register("grpo")
def grpo(rewards: Tensor, groups: Tensor, sums: Sums) -> Tensor:
    """A_i = (r_i - mean(r)) / (std(r) + 1e-6), std unbiased. Shao et al. 2024, DeepSeekMath (arXiv 2402.03300), sec. 4.1."""
    centered, size = center(rewards, groups)
    squares = torch.zeros_like(rewards).index_add_(0, groups, centered**2)[groups]
    return centered / ((squares / (size - 1).clamp(min=1)).sqrt() + 1e-6)


@register("dr_grpo")
def dr_grpo(rewards: Tensor, groups: Tensor, sums: Sums) -> Tensor:
    """A_i = r_i - mean(r). Liu et al. 2025, Understanding R1-Zero-like training (arXiv 2503.20783); pair with aggregation fixed."""
    return center(rewards, groups)[0]


@register("rloo")
def rloo(rewards: Tensor, groups: Tensor, sums: Sums) -> Tensor:
    """A_i = r_i - mean of the others = (r_i - mean(r)) n/(n-1). Ahmadian et al. 2024, Back to basics (arXiv 2402.14740), eq. 6."""
    centered, size = center(rewards, groups)
    return centered * size / (size - 1).clamp(min=1)


@register("reinforce_pp_baseline")
def reinforce_pp_baseline(rewards: Tensor, groups: Tensor, sums: Sums) -> Tensor:
    """A_i = (r_i - mean(r)) / std over the global batch. Hu et al. 2025, REINFORCE++ (arXiv 2501.03262), sec. 3.2.

    The paper also subtracts the batch mean, which is 0 after the group means are gone; leaving that out keeps equal groups at
    exactly 0.
    """
    centered, _ = center(rewards, groups)
    squares, count = sums(torch.stack([(centered**2).sum(), torch.tensor(float(len(centered)), dtype=torch.float64)]))
    return centered / ((squares / count).sqrt() + 1e-8)


def find(name: str) -> Estimator:
    """The estimator that `algo.advantage` names. Raises UserError if there is none."""
    return find_function("algo.advantage", name, ESTIMATORS)


def assign(trajectories: list[Trajectory], estimator: Estimator, sums: Sums) -> None:
    """Set `advantages` of every trajectory: the estimate at sampled tokens, 0 elsewhere. Collective if the estimator is."""
    rewards = torch.tensor([t.reward for t in trajectories], dtype=torch.float64)
    _, groups = torch.tensor([t.group for t in trajectories], dtype=torch.int64).unique(return_inverse=True)
    for trajectory, value in zip(trajectories, estimator(rewards, groups, sums).tolist(), strict=True):
        trajectory.advantages = trajectory.sampled.astype("float32") * value
