"""Context parallelism: which rows of a sequence each rank holds, and how keys and values get from
one to another.

A sequence is cut into 2R chunks for R ranks, and rank r holds the chunks r and 2R - 1 - r (in
zigzag; Llama 3, arXiv 2407.21783, sec. 3.3.2), so that causal attention costs every rank the same.
Only attention looks beyond a rank's rows; everything else in a model works token by token. Losses
are sums over a rank's own rows, and FSDP, whose shards run over the context ranks too, adds their
gradients.
"""

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard

from minirl.parallel.mesh import Context
from minirl.parallel.tensor import move


def padded(num_rows: int, context: Context | None) -> int:
    """Rows of a sequence after padding to whole chunks."""
    return num_rows if context is None else -(-num_rows // (2 * context.size)) * 2 * context.size


def chunks(num_rows: int, context: Context | None, rank: int | None = None) -> list[np.ndarray]:
    """The rows of a sequence that this rank (or another) holds, as one piece or two."""
    if context is None:
        return [np.arange(num_rows)]
    rank, rows = (
        context.rank if rank is None else rank,
        np.split(np.arange(padded(num_rows, context)), 2 * context.size),
    )
    return [rows[rank], rows[-1 - rank]]


def gathered_positions(
    num_rows: int, start: int, rows_per_rank: int, context: Context | None
) -> np.ndarray:
    """Where the rows of a sequence are in the gathered rows of all ranks; on a rank it begins at
    row `start` of `rows_per_rank`.
    """
    out = np.empty(padded(num_rows, context), np.int64)
    for rank in range(context.size if context else 1):
        rows = np.concatenate(chunks(num_rows, context, rank))
        out[rows] = rank * rows_per_rank + start + np.arange(len(rows))
    return out


def gather_keys(k: Tensor, v: Tensor, context: Context) -> tuple[Tensor, Tensor]:
    """[T, Hkv, D] -> [R T, Hkv, D]: those of all ranks by one collective, whose backward is a
    reduce-scatter.
    """
    return move(
        torch.stack([k, v], dim=1), context.group, Shard(0), Replicate(), grad=Partial()
    ).unbind(1)


class RingTransfer:
    """Send tensors to the next rank of the ring and get the previous one's; `wait` returns them."""

    def __init__(self, tensors: list[Tensor], context: Context):
        self._sent = [t.contiguous() for t in tensors]  # kept until they are there
        self._received = [torch.empty_like(t) for t in self._sent]

        def only(rank: int, rows: int) -> list[int]:
            return [rows if r == rank % context.size else 0 for r in range(context.size)]

        self._works = [
            dist.all_to_all_single(
                into,
                out,
                only(context.rank - 1, len(out)),
                only(context.rank + 1, len(out)),
                group=context.group,
                async_op=True,
            )
            for out, into in zip(self._sent, self._received, strict=True)
        ]

    def wait(self) -> list[Tensor]:
        for work in self._works:
            work.wait()
        return self._received
