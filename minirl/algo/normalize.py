"""Means as sums over one global denominator: the only normalisation rule in minirl.

A loss is `sum(token_loss * weight) / denominator`. The weights are local to a sequence. The
denominator counts the whole optimizer step over all ranks and micro-batches. So the gradient does
not depend on how sequences are packed, split into micro-batches or spread over ranks, and no factor
of any of these appears anywhere.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.nn.functional import all_gather, all_reduce

from minirl.types.packed import Packed

# Of a token, or of a sequence in the correction: OpenRLHF's and verl's. Only a policy that has gone
# wrong meets the bound: a token must have become e^20 times as likely.
MAX_LOG_RATIO = 20.0


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """Return e^x with x clamped to [-20, 20]; beyond these bounds the gradient is 0.

    In float32 e^89 is infinite, and one such token would make the whole gradient NaN.
    """
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def sequence_sums(values: Tensor, batch: Packed) -> Tensor:
    """Return the sum of [T] values over each sequence, [S]; differentiable.

    Rows that other context ranks hold are included.
    """
    sums = values.new_zeros(len(batch.sequences.lengths)).index_add(
        0, _sequence_of_row(batch), values
    )
    if batch.context is None:
        return sums
    # The loss is the sum of all ranks' losses, so the gradient of each of them by this sum counts,
    # and the backward of the all-reduce adds them.
    return all_reduce(sums, group=batch.context.group)


def to_rows(per_sequence: Tensor, batch: Packed) -> Tensor:
    """Return each sequence's value at each of its rows: [S] -> [T]."""
    lengths = torch.tensor(batch.sequences.lengths).to(per_sequence.device, non_blocking=True)
    return torch.repeat_interleave(per_sequence, lengths, output_size=len(batch.inputs))


def _sequence_of_row(batch: Packed) -> Tensor:
    """Return the number of each row's sequence, int64 [T]."""
    return to_rows(torch.arange(len(batch.sequences.lengths), device=batch.inputs.device), batch)


def over_sequences(function: Callable[..., Tensor], batch: Packed, *values: Tensor) -> Tensor:
    """Apply a function that needs all loss tokens of each sequence in order, without gradient.

    Args:
        function: called as function(sequence [N], *values [N]) -> [N] with the N tokens in the
            loss, sequence by sequence; `sequence` is the number of each token's sequence.
        batch: a micro-batch. Under context parallelism the rows of all ranks are gathered.
        values: tensors [T] over this rank's rows.

    Returns:
        The function's result at this rank's rows, [T]; 0 outside the loss.
    """

    def all_rows(x: Tensor) -> Tensor:
        return torch.cat(all_gather(x, group=batch.context.group)) if batch.context else x

    sequence = all_rows(_sequence_of_row(batch))
    position = all_rows(batch.positions)
    in_loss = all_rows(batch.loss_mask.byte()).bool()  # gloo gathers no bools

    # Context ranks hold zigzag chunks, so gathered rows are out of order. Sort by (sequence,
    # position), rows outside the loss last.
    sort_key = sequence * (1 << 32) + position
    order = sort_key.masked_fill(~in_loss, torch.iinfo(torch.int64).max).argsort()
    loss_rows = order[: int(batch.sequences.loss_tokens.sum())]

    result = function(sequence[loss_rows], *(all_rows(x)[loss_rows] for x in values))
    everywhere = result.new_zeros(len(sequence)).index_copy_(0, loss_rows, result)
    if batch.context is None:
        return everywhere
    return everywhere.chunk(batch.context.size)[batch.context.rank]


def weights(batch: Packed, aggregation: str, fixed_length: int = 1) -> Tensor:
    """Return the weight of each token's loss, float64 [T] (of each pair's, [P]).

    Args:
        batch: a micro-batch.
        aggregation: token: 1 (DAPO, arXiv 2503.14476, eq. 8). sequence: 1 / tokens of the sequence
            (GRPO, arXiv 2402.03300, eq. 3). fixed: 1 / fixed_length (Dr.GRPO, arXiv 2503.20783).
            prompt: 1 / tokens of all answers to the prompt, so that prompts count alike. pair: one
            weight a pair, shared by the context ranks, all of which compute its loss from
            `sequence_sums`.
        fixed_length: the constant length of aggregation `fixed`.
    """
    if aggregation == "pair":
        num_ranks = batch.context.size if batch.context else 1
        device = batch.inputs.device
        return torch.full(
            (len(batch.preference.answers),), 1 / num_ranks, dtype=torch.float64, device=device
        )
    mask = batch.loss_mask.double()
    if aggregation == "token":
        return mask
    if aggregation == "fixed":
        return mask / fixed_length
    num_tokens = (
        batch.sequences.group_tokens if aggregation == "prompt" else batch.sequences.loss_tokens
    )
    return mask / to_rows(num_tokens.double().clamp(min=1), batch)


def count(batch: Packed, aggregation: str) -> Tensor:
    """Return this rank's share of the denominator, a float64 scalar.

    It counts tokens in the loss, pairs, or the sequences or prompts with any token, these by the
    share of their tokens that is on this rank.
    """
    return weights(batch, "sequence" if aggregation == "fixed" else aggregation).sum()
