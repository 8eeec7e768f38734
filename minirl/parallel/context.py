"""Context parallelism: which rows of a sequence each rank holds, and how keys and values travel.

A sequence is cut into 2R chunks for R ranks, and rank r holds the chunks r and 2R - 1 - r (a
zigzag; Llama 3, arXiv 2407.21783, sec. 3.3.2), so that causal attention costs every rank the same.
Only attention looks beyond a rank's rows; everything else in a model works token by token. Losses
are sums over a rank's rows. FSDP's shards run over the context ranks too, so FSDP adds their
gradients.
"""

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard

from minirl.parallel.placements import move
from minirl.types.packed import Context


def padded(num_rows: int, context: Context | None) -> int:
    """Return the number of rows of a sequence after padding to whole chunks."""
    if context is None:
        return num_rows
    return num_rows + -num_rows % (2 * context.size)


def chunks(num_rows: int, context: Context | None, rank: int | None = None) -> list[np.ndarray]:
    """Return the rows of a sequence that a rank holds, as one array or two.

    Args:
        num_rows: rows of the sequence, before padding.
        context: the ranks that share it; None: all rows are on this rank.
        rank: the rank that holds them; None: this one.
    """
    if context is None:
        return [np.arange(num_rows)]
    if rank is None:
        rank = context.rank
    rows = np.split(np.arange(padded(num_rows, context)), 2 * context.size)
    return [rows[rank], rows[-1 - rank]]


def gathered_positions(
    num_rows: int, start: int, rows_per_rank: int, context: Context | None
) -> np.ndarray:
    """Return where each row of a sequence is in the gathered rows of all ranks.

    Args:
        num_rows: rows of the sequence, before padding.
        start: the row of a rank at which the sequence begins, the same on every rank.
        rows_per_rank: rows of all sequences on a rank.
        context: the ranks that share the sequence.

    Returns:
        int64 [rows after padding].
    """
    out = np.empty(padded(num_rows, context), np.int64)
    for rank in range(context.size if context else 1):
        rows = np.concatenate(chunks(num_rows, context, rank))
        out[rows] = rank * rows_per_rank + start + np.arange(len(rows))
    return out


def gather_keys(k: Tensor, v: Tensor, context: Context) -> tuple[Tensor, Tensor]:
    """Return keys and values of all ranks, [T, Hkv, D] -> [R T, Hkv, D], by one collective.

    Its backward is a reduce-scatter.
    """
    both = torch.stack([k, v], dim=1)
    keys, values = move(both, context.group, Shard(0), Replicate(), grad=Partial()).unbind(1)
    return keys, values


class RingTransfer:
    """Tensors on their way to the next rank of the ring, while the previous rank's arrive."""

    def __init__(self, tensors: list[Tensor], context: Context):
        """Begin to send `tensors`, and to receive as many of the same shapes."""
        self._sent = [t.contiguous() for t in tensors]  # kept until they have arrived
        self._received = []
        self._works = []
        for sent in self._sent:
            received = torch.empty_like(sent)
            self._received.append(received)
            num_received = [0] * context.size
            num_received[context.rank - 1] = len(sent)  # rank 0 receives from the last one
            num_sent = [0] * context.size
            num_sent[(context.rank + 1) % context.size] = len(sent)
            self._works.append(
                dist.all_to_all_single(
                    received, sent, num_received, num_sent, context.group, async_op=True
                )
            )

    def wait(self) -> list[Tensor]:
        """Wait for the previous rank's tensors, and return them."""
        for work in self._works:
            work.wait()
        return self._received
