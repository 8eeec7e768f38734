"""Means as sums over one global denominator.

A loss is `sum(token_loss * weight) / denominator`. The weights are local to a sequence; the denominator counts the whole
optimizer step over all ranks and micro-batches. So the gradient does not depend on how sequences are packed, split into
micro-batches or spread over ranks, and no factor of any of these appears anywhere.
"""

import torch
from torch import Tensor

from minirl.types import Packed


def sequence_sums(values: Tensor, batch: Packed) -> Tensor:
    """[T] -> [S]: sums over each sequence."""
    lengths = torch.tensor(batch.lengths, device=values.device)
    index = torch.repeat_interleave(torch.arange(len(batch.lengths), device=values.device), lengths, output_size=len(values))
    return values.new_zeros(len(batch.lengths)).index_add(0, index, values)


def weights(batch: Packed, aggregation: str, fixed_length: int = 1) -> Tensor:
    """float64 [T]: what one token's loss counts.

    token: 1 (DAPO, arXiv 2503.14476, eq. 8). sequence: 1 / tokens of its sequence (GRPO, arXiv 2402.03300, eq. 3).
    fixed: 1 / fixed_length (Dr.GRPO, arXiv 2503.20783).
    """
    mask = batch.mask.double()
    if aggregation == "token":
        return mask
    if aggregation == "fixed":
        return mask / fixed_length
    per_sequence = 1.0 / sequence_sums(mask, batch).clamp(min=1)
    lengths = torch.tensor(batch.lengths, device=mask.device)
    return mask * torch.repeat_interleave(per_sequence, lengths, output_size=len(mask))


def count(batch: Packed, aggregation: str) -> Tensor:
    """This micro-batch's share of the denominator: tokens in the loss, or sequences with any; float64 scalar."""
    if aggregation == "token":
        return batch.mask.sum(dtype=torch.float64)
    return (sequence_sums(batch.mask.double(), batch) > 0).sum(dtype=torch.float64)
