"""Advantages of single tokens: the estimators by token, their rewards, and their whitening.

An estimator is called with a micro-batch that has old and reference log-probs, the reward of each
token (float64 [T], this rank's rows; `normalize.over_sequences` brings them into order) and the
config, and returns the advantages [T].
"""

from collections.abc import Callable

import torch
from torch import Tensor

from minirl.algo.normalize import over_sequences, sequence_sums, to_rows
from minirl.config.rl import AlgoConfig
from minirl.types.packed import Packed

Reduce = Callable[[Tensor], Tensor]  # A CPU tensor of each rank to their sum or maximum.


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
