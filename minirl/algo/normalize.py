"""Means as sums over one global denominator.

A loss is `sum(token_loss * weight) / denominator`. The weights are local to a sequence; the
denominator counts the whole optimizer step over all ranks and micro-batches. So the gradient does
not depend on how sequences are packed, split into micro-batches or spread over ranks, and no factor
of any of these appears anywhere.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.nn.functional import all_gather, all_reduce

from minirl.types import Packed


def sequence_sums(values: Tensor, batch: Packed) -> Tensor:
    """[T] -> [S]: sums over each sequence, with its rows on other context ranks; differentiable."""
    sums = values.new_zeros(len(batch.lengths)).index_add(
        0, to_rows(torch.arange(len(batch.lengths), device=values.device), batch), values
    )
    # The loss is the sum of all ranks' losses, so the gradient of each of them by this sum counts,
    # and its backward adds those up.
    return sums if batch.context is None else all_reduce(sums, group=batch.context.group)


def to_rows(per_sequence: Tensor, batch: Packed) -> Tensor:
    """[S] -> [T]: each sequence's value at its rows."""
    lengths = torch.tensor(batch.lengths, device=per_sequence.device)
    return torch.repeat_interleave(per_sequence, lengths, output_size=len(batch.inputs))


def over_sequences(function: Callable[..., Tensor], batch: Packed, *values: Tensor) -> Tensor:
    """Apply what depends on the order of tokens, without gradient: function(sequence, *values) ->
    [N] gets the N tokens in the loss, sequence by sequence in their order, also where context ranks
    hold parts of them: int64 [N], the number of each one's sequence, and the `values` [T] of each.
    What it returns comes back to this rank's rows [T]; 0 elsewhere.
    """

    def whole(x: Tensor) -> Tensor:
        return torch.cat(all_gather(x, group=batch.context.group)) if batch.context else x

    sequence = whole(to_rows(torch.arange(len(batch.lengths), device=batch.inputs.device), batch))
    place = sequence * (1 << 32) + whole(batch.positions)
    order = place.masked_fill(
        ~whole(batch.loss_mask.byte()).bool(), torch.iinfo(torch.int64).max
    ).argsort()[: int(batch.loss_tokens.sum())]
    out = function(sequence[order], *(whole(v)[order] for v in values))
    num, rank = len(batch.inputs), batch.context.rank if batch.context else 0
    return out.new_zeros(len(sequence)).index_copy_(0, order, out)[rank * num : (rank + 1) * num]


def weights(batch: Packed, aggregation: str, fixed_length: int = 1) -> Tensor:
    """float64 [T]: what one token's loss counts.

    token: 1 (DAPO, arXiv 2503.14476, eq. 8). sequence: 1 / tokens of its sequence (GRPO, arXiv
    2402.03300, eq. 3).
    fixed: 1 / fixed_length (Dr.GRPO, arXiv 2503.20783). prompt: 1 / tokens of all answers to its
    prompt, so that prompts count alike. pair, float64 [P]: a pair's loss counts once over the ranks
    that share its sequences, all of which compute it from `sequence_sums`.
    """
    if aggregation == "pair":
        return torch.full(
            (len(batch.pairs),),
            1 / (batch.context.size if batch.context else 1),
            dtype=torch.float64,
            device=batch.inputs.device,
        )
    mask = batch.loss_mask.double()
    if aggregation == "token":
        return mask
    if aggregation == "fixed":
        return mask / fixed_length
    return mask / to_rows(
        (batch.group_tokens if aggregation == "prompt" else batch.loss_tokens)
        .double()
        .clamp(min=1),
        batch,
    )


def count(batch: Packed, aggregation: str) -> Tensor:
    """This rank's share of the denominator: tokens in the loss, pairs, or sequences or prompts with
    any token, by the share of their tokens that is here; float64 scalar.
    """
    return weights(
        batch, aggregation if aggregation in ("token", "prompt", "pair") else "sequence"
    ).sum()
