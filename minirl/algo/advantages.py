"""Advantage estimators. Each is one function, with one row in ESTIMATORS.

Most give every token of an answer the same advantage. Such an estimator is called with all episodes
of a step, those of all ranks:
    rewards  float64 [N]
    groups   int64 [N]   0 .. G - 1; siblings of one prompt share a number
and returns float64 [N]. A group of equal rewards gets exactly 0, whatever the reward.

A token estimator is called with a micro-batch that has old and reference log-probs, the reward of
each token (float64 [T], this rank's rows; `normalize.over_sequences` brings them into order) and
the config, and returns the advantages [T].

A function in a user's file is f(rewards, groups) and compares the answers to a prompt, unless the
decorator `estimator` declares something else.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from minirl.algo.losses import kl, kl_estimator
from minirl.algo.normalize import over_sequences, sequence_sums, to_rows
from minirl.config.lookup import find_function
from minirl.config.rl import AlgoConfig
from minirl.types.packed import Packed, Trajectory

Reduce = Callable[[Tensor], Tensor]  # A CPU tensor of each rank to their sum or maximum.
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


# --------------------------------------------------------------------- estimators of whole answers


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


# --------------------------------------------------------------------- estimators of single tokens


def discounted(sequence: Tensor, rewards: Tensor, factor: float) -> Tensor:
    """Return sum_l factor^l r_{t + l} over the later tokens of the same sequence, [N].

    It takes log2(longest) passes, each of which doubles the number of tokens that are summed.

    Args:
        sequence: int64 [N], number of each token's sequence, ascending.
        rewards: float64 [N].
        factor: of one step.
    """
    sums = rewards.clone()
    step = 1
    while step < len(sums):
        same = sequence[step:] == sequence[:-step]
        if not same.any():
            break
        sums[:-step] += torch.where(same, factor**step * sums[step:], 0.0)
        step *= 2
    return sums


def reinforce_pp(batch: Packed, rewards: Tensor, cfg: AlgoConfig) -> Tensor:
    """Return A_t = sum_{k >= t} gamma^(k - t) r_k, to be whitened over the global batch.

    With algo.kl_in reward the KL is part of r. Hu et al. 2025, REINFORCE++ (arXiv 2501.03262), sec.
    3.1.
    """
    return over_sequences(lambda sequence, r: discounted(sequence, r, cfg.gamma), batch, rewards)


def gae(batch: Packed, rewards: Tensor, cfg: AlgoConfig) -> Tensor:
    """Return A_t = sum_l (gamma lambda)^l d_{t + l} with d_t = r_t + gamma V_{t+1} - V_t.

    To be whitened over the global batch. Sets `batch.returns`, A_t + V_t, before the whitening. V
    is the value of what stands before the token (`batch.values`), known at sampled tokens only. So
    the successor of a token is the next sampled one, over what an environment said in between;
    after the last one V is 0. Schulman et al. 2016 (arXiv 1506.02438), eq. 16.
    """

    def estimate(sequence: Tensor, r: Tensor, v: Tensor) -> Tensor:
        next_v = v.roll(-1).masked_fill(_is_last_token(sequence), 0.0)
        delta = r + cfg.gamma * next_v - v
        return discounted(sequence, delta, cfg.gamma * cfg.gae_lambda)

    advantages = over_sequences(estimate, batch, rewards, batch.values.double())
    returns = torch.where(batch.loss_mask, advantages + batch.values, 0.0)
    batch.returns = returns.to(batch.values.dtype)
    return advantages


def on_policy_distill(batch: Packed, rewards: Tensor, cfg: AlgoConfig) -> Tensor:
    """Return A_t = log teacher - log policy: minus the reverse KL at the sampled token.

    Rewards play no part. Agarwal et al. 2023 (arXiv 2306.13649); as an advantage: Lu 2025,
    "On-policy distillation".
    """
    return batch.ref_logprobs - batch.old_logprobs


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
    return found if isinstance(found, Estimator) else Estimator(found)


# ------------------------------------------------------------------------- the advantages of a step


def need_old_logprobs(cfg: AlgoConfig, estimator: Estimator) -> bool:
    """Return whether advantages are made of the policy's log-probs before the step."""
    kl_in_reward = bool(cfg.kl_coef) and cfg.kl_in == "reward"
    return kl_in_reward or (estimator.by_token and estimator.reads_old_logprobs)


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


def token_rewards(batch: Packed, penalty: Tensor) -> Tensor:
    """Return the reward of each token, float64 [T].

    It is minus the token's penalty, plus what an answer earned at its last token, plus the rest of
    the sequence's reward at its last sampled token. Ouyang et al. 2022 (arXiv 2203.02155), eq. 2.
    """
    is_last = over_sequences(_is_last_token, batch)
    if batch.turn_rewards is None:
        turns = torch.zeros_like(penalty)
    else:
        turns = torch.where(batch.loss_mask, batch.turn_rewards, 0.0).double()
    remaining = to_rows(batch.sequences.rewards - sequence_sums(turns, batch), batch)
    return torch.where(is_last, remaining, 0.0) + turns - penalty


def _is_last_token(sequence: Tensor) -> Tensor:
    """Return where an ascending int64 [N] of sequence numbers ends each sequence, bool [N]."""
    return sequence.diff(append=sequence.new_full((1,), -1)) != 0


def whiten(
    values: list[Tensor], batches: list[Packed], sum_over_ranks: Reduce, max_over_ranks: Reduce
) -> list[Tensor]:
    """Return (A - mean) / (deviation + 1e-8) over all tokens in the loss, on all ranks.

    Where all are equal, the result is exactly 0.
    """
    in_loss = [v[batch.loss_mask].double() for v, batch in zip(values, batches, strict=True)]
    tokens = torch.cat(in_loss).cpu()

    bounds = [tokens.max(), (-tokens).max()] if len(tokens) else [-torch.inf, -torch.inf]
    highest, minus_lowest = max_over_ranks(torch.tensor(bounds, dtype=torch.float64)).tolist()
    if highest == -minus_lowest:
        return [torch.zeros_like(value) for value in values]

    counted = torch.tensor([tokens.sum(), len(tokens)], dtype=torch.float64)
    total, count = sum_over_ranks(counted).tolist()
    count = max(1.0, count)
    mean = total / count
    squares = sum_over_ranks(((tokens - mean) ** 2).sum()[None]).item()
    deviation = (squares / count) ** 0.5
    return [(value - mean) / (deviation + 1e-8) for value in values]


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
