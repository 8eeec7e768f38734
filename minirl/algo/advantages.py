"""Advantage estimators. Each is one function, with one row in ESTIMATORS.

Most give every token of an answer the same advantage. Such an estimator is called with all episodes
of a step, those of all ranks:
    rewards  float64 [N]
    groups   int64 [N]   0 .. G - 1; siblings of one prompt share a number
and returns float64 [N]. A group of equal rewards gets exactly 0, whatever the reward.

`token_advantages.py` has the estimators of single tokens. A function in a user's file is
f(rewards, groups) and compares the answers to a prompt, unless the decorator `estimator` declares
something else.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from minirl.algo.losses import kl, kl_estimator
from minirl.algo.normalize import sequence_sums, to_rows
from minirl.algo.token_advantages import (
    Reduce,
    gae,
    on_policy_distill,
    reinforce_pp,
    token_rewards,
    whiten,
)
from minirl.config.lookup import find_function
from minirl.config.rl import AlgoConfig
from minirl.types.packed import Packed, Trajectory

# An array of each rank, of dtype `SEQUENCE`, to the arrays of all ranks in rank order.
GatherRows = Callable[[np.ndarray], list[np.ndarray]]

# What all ranks know of a sequence. The penalty is the sum over its tokens.
SEQUENCE = np.dtype(
    [
        ("group", np.int64),
        ("episode", np.int64),
        ("segment", np.int64),
        ("reward", np.float64),
        ("penalty", np.float64),
    ]
)


@dataclass(frozen=True)
class Estimator:
    """A function that estimates advantages, and how it is used."""

    function: Callable[..., Tensor]
    by_token: bool = False  # It is called as f(batch, rewards, cfg); else as f(rewards, groups).
    # Its advantages get mean 0 and deviation 1 over the tokens of the global batch.
    whitened: bool = False
    compares_nothing: bool = False  # One answer to a prompt is enough, as it is by token.
    # By token, it reads the policy's log-probs before the step.
    reads_old_logprobs: bool = True

    def __call__(self, *arguments: object) -> Tensor:
        """Call the function."""
        return self.function(*arguments)

    @property
    def compares_answers(self) -> bool:
        """Return whether it needs several answers to a prompt."""
        return not (self.by_token or self.compares_nothing)


def estimator(
    *, by_token: bool = False, whitened: bool = False, compares_nothing: bool = False
) -> Callable[[Callable[..., Tensor]], Estimator]:
    """Declare, as the decorator of a function in a user's file, the fields of its `Estimator`."""
    return partial(
        Estimator, by_token=by_token, whitened=whitened, compares_nothing=compares_nothing
    )


def center(rewards: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
    """Return rewards minus the mean of their group, and the size of the group; float64 [N] both.

    Equal rewards are set to 0 explicitly: their mean can be off by rounding, and a division by a
    tiny deviation would blow that up to an advantage of order 1.
    """

    def over_group(how: str) -> Tensor:
        per_group = torch.zeros_like(rewards)
        return per_group.scatter_reduce_(0, groups, rewards, how, include_self=False)[groups]

    all_equal = over_group("amin") == over_group("amax")
    centered = (rewards - over_group("mean")).masked_fill(all_equal, 0.0)
    return centered, groups.bincount()[groups].to(rewards.dtype)


def grpo(rewards: Tensor, groups: Tensor) -> Tensor:
    """Return A_i = (r_i - mean(r)) / (std(r) + 1e-6), std unbiased.

    Shao et al. 2024, DeepSeekMath (arXiv 2402.03300), sec. 4.1.
    """
    centered, size = center(rewards, groups)
    squares = torch.zeros_like(rewards).index_add_(0, groups, centered**2)[groups]
    return centered / ((squares / (size - 1).clamp(min=1)).sqrt() + 1e-6)


def dr_grpo(rewards: Tensor, groups: Tensor) -> Tensor:
    """Return A_i = r_i - mean(r); to be combined with aggregation `fixed`.

    Liu et al. 2025, Understanding R1-Zero-like training (arXiv 2503.20783).
    """
    return center(rewards, groups)[0]


def rloo(rewards: Tensor, groups: Tensor) -> Tensor:
    """Return A_i = r_i - mean of the others = (r_i - mean(r)) n / (n - 1).

    Ahmadian et al. 2024, Back to basics (arXiv 2402.14740), eq. 6.
    """
    centered, size = center(rewards, groups)
    return centered * size / (size - 1).clamp(min=1)


def reinforce_pp_baseline(rewards: Tensor, groups: Tensor) -> Tensor:
    """Return A_i = (r_i - mean(r)) / std over the global batch.

    Hu et al. 2025, REINFORCE++ (arXiv 2501.03262), sec. 3.2. The paper also subtracts the batch
    mean, which over answers is 0 after the group means are gone; leaving that out keeps equal
    groups at exactly 0.

    The authors' code (OpenRLHF) and verl normalise over tokens: long answers count more, the mean
    over tokens is not 0 and is subtracted, and equal groups do not stay at 0. On random groups the
    two differ by up to 0.6. `algo.whiten_tokens` takes theirs: `assign` then whitens the result,
    and its scale does not matter.
    """
    centered, _ = center(rewards, groups)
    return centered / (centered.square().mean().sqrt() + 1e-8)


ESTIMATORS = {
    "grpo": Estimator(grpo),
    "dr_grpo": Estimator(dr_grpo),
    "rloo": Estimator(rloo),
    "reinforce_pp_baseline": Estimator(reinforce_pp_baseline),
    "reinforce_pp": Estimator(reinforce_pp, by_token=True, whitened=True, reads_old_logprobs=False),
    "gae": Estimator(gae, by_token=True, whitened=True, reads_old_logprobs=False),
    "on_policy_distill": Estimator(on_policy_distill, by_token=True),
}


def find(name: str) -> Estimator:
    """Return the estimator that `algo.advantage` names.

    Raises:
        UserError: there is none of that name.
    """
    found = find_function("algo.advantage", name, dict(ESTIMATORS))
    if isinstance(found, partial) and isinstance(found.func, Estimator):
        return replace(found.func, function=partial(found.func.function, **found.keywords))
    return found if isinstance(found, Estimator) else Estimator(found)


# ------------------------------------------------------------------------- the advantages of a step


def need_old_logprobs(cfg: AlgoConfig, estimator: Estimator) -> bool:
    """Return whether a step needs the policy's log-probs and entropy before its first update."""
    are_read = cfg.entropy_share > 0 or (estimator.by_token and estimator.reads_old_logprobs)
    kl_in_reward = bool(cfg.kl_coef) and cfg.kl_in == "reward"
    return cfg.num_epochs * cfg.updates_per_step > 1 or are_read or kl_in_reward


def assign(
    batches: list[Packed],
    estimator: Estimator,
    cfg: AlgoConfig,
    *,
    dtype: torch.dtype,
    without_tokens: Sequence[Trajectory] = (),
    sum_over_ranks: Reduce,
    max_over_ranks: Reduce,
    gather_rows: GatherRows,
) -> None:
    """Set `advantages` [T] of every micro-batch of a step, 0 outside the loss. Collective.

    Args:
        batches: micro-batches with what the estimator needs: old and reference log-probs
            (`need_old_logprobs`), values.
        estimator: what `find` returned for cfg.advantage.
        cfg: the section `algo` of the config, with the present weight of the KL.
        dtype: dtype of the advantages, the policy's log-probs'. They are computed in float64.
        without_tokens: episodes that this rank ran and that have no token. Their rewards are
            outcomes of the policy like others, so they count where siblings are compared. That no
            token of theirs is trained on biases nothing: what an episode is compared with does not
            depend on its own actions.
        sum_over_ranks: adds a CPU tensor over the ranks that hold different tokens.
        max_over_ranks: takes its maximum over all ranks.
        gather_rows: returns the arrays of all ranks.
    """
    penalties = [_kl_penalty(batch, cfg) for batch in batches]
    if estimator.by_token:
        values = [
            estimator(batch, token_rewards(batch, penalty), cfg)
            for batch, penalty in zip(batches, penalties, strict=True)
        ]
    else:
        empty = [(t.group, t.episode, t.segment, t.reward, 0.0) for t in without_tokens]
        tables = [*map(_sequences_in_loss, batches, penalties), np.array(empty, SEQUENCE)]
        values = _by_group(batches, gather_rows(np.concatenate(tables)), estimator)
    if estimator.whitened or (cfg.whiten_tokens and not estimator.by_token):
        values = whiten(values, batches, sum_over_ranks, max_over_ranks)

    for batch, value in zip(batches, values, strict=True):
        batch.advantages = torch.where(batch.loss_mask, value, 0.0).to(dtype)


def _kl_penalty(batch: Packed, cfg: AlgoConfig) -> Tensor:
    """Return what each token pays for its KL to the reference, float64 [T]; 0 if in the loss."""
    if cfg.kl_in != "reward" or not cfg.kl_coef:
        return torch.zeros_like(batch.engine_logprobs, dtype=torch.float64)
    penalty = cfg.kl_coef * kl(batch.old_logprobs, batch.ref_logprobs, kl_estimator(cfg))
    return torch.where(batch.loss_mask, penalty, 0.0).double()


def _sequences_in_loss(batch: Packed, penalty: Tensor) -> np.ndarray:
    """Return the sequences of a micro-batch that have tokens in the loss.

    Shared prompts and padding have none.

    Args:
        batch: the micro-batch.
        penalty: the penalty of each token, float64 [T].
    """
    table = np.empty(len(batch.sequences.ids), SEQUENCE)
    ids = np.array(batch.sequences.ids, np.int64).reshape(-1, 3)
    table["group"], table["episode"], table["segment"] = ids.T
    table["reward"] = batch.sequences.rewards.cpu().numpy()
    table["penalty"] = sequence_sums(penalty, batch).cpu().numpy()
    return table[(batch.sequences.loss_tokens > 0).cpu().numpy()]


def _is_new(table: np.ndarray, *names: str) -> np.ndarray:
    """Return where rows differ from the row before in one of these columns, bool [N]."""
    changes = [np.diff(table[name], prepend=-1) != 0 for name in names]
    return np.logical_or.reduce(changes)


def _by_group(
    batches: list[Packed], tables: list[np.ndarray], estimator: Estimator
) -> list[Tensor]:
    """Return the advantages [T] of each micro-batch from an estimator of whole answers.

    Siblings may be on any rank, so every rank estimates the whole step.

    Args:
        batches: this rank's micro-batches.
        tables: the sequences of each rank, as `SEQUENCE` describes them.
        estimator: the estimator.
    """
    # 1. All sequences. Tensor- and context-parallel ranks have copies: the first rank's count.
    table = np.concatenate(tables)
    # Stable: by rank, where equal.
    table = table[np.lexsort((table["segment"], table["episode"], table["group"]))]
    table = table[_is_new(table, "group", "episode", "segment")]

    # 2. An episode counts once in its group. Its segments share the reward, and each pays.
    begins = _is_new(table, "group", "episode")
    episodes = table[begins]
    earned = episodes["reward"].copy()
    np.subtract.at(earned, begins.cumsum() - 1, table["penalty"])  # One after the other.

    # 3. Estimate, with groups numbered 0 .. G - 1.
    _, groups = np.unique(episodes["group"], return_inverse=True)
    estimates = estimator(torch.from_numpy(earned), torch.from_numpy(groups).long())

    # 4. Every row of a sequence gets the advantage of its episode.
    local_groups = [group for batch in batches for group, _, _ in batch.sequences.ids]
    is_local = np.isin(episodes["group"], local_groups)
    local_episodes = episodes[["group", "episode"]][is_local].tolist()
    advantage_of = dict(zip(local_episodes, estimates.numpy()[is_local].tolist(), strict=True))
    values = []
    for batch in batches:
        per_sequence = [advantage_of.get(ids[:2], 0.0) for ids in batch.sequences.ids]
        as_tensor = torch.tensor(per_sequence, dtype=torch.float64, device=batch.inputs.device)
        values.append(to_rows(as_tensor, batch))
    return values
