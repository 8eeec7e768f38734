"""Context parallelism: which rows of a sequence each rank holds, and how keys and values get from one to another.

A sequence is cut into 2R chunks for R ranks, and rank r holds the chunks r and 2R - 1 - r (in zigzag; Llama 3, arXiv 2407.21783,
sec. 3.3.2), so that causal attention costs every rank the same. Only attention looks beyond a rank's
rows; everything else in a model works token by token. Losses are sums over a rank's own rows, and FSDP, whose shards run over the
context ranks too, adds their gradients.
"""

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from minirl.parallel.tensor import gather_in
from minirl.types import Context


def padded(num_rows: int, context: Context | None) -> int:
    """Rows of a sequence after padding to whole chunks."""
    return num_rows if context is None else -(-num_rows // (2 * context.size)) * 2 * context.size


def chunks(num_rows: int, context: Context | None) -> list[np.ndarray]:
    """The rows of a sequence that this rank holds, as one piece or two."""
    if context is None:
        return [np.arange(num_rows)]
    n = padded(num_rows, context) // (2 * context.size)
    return [np.arange(c * n, (c + 1) * n) for c in (context.rank, 2 * context.size - 1 - context.rank)]


def homes(num_rows: int, start: int, rows_per_rank: int, context: Context | None) -> np.ndarray:
    """Where the rows of a sequence are in the gathered rows of all ranks; on a rank it begins at row `start` of `rows_per_rank`."""
    row = np.arange(padded(num_rows, context))
    if context is None:
        return start + row
    n = len(row) // (2 * context.size)
    chunk = row // n
    late = chunk >= context.size  # the second one that its rank holds
    return np.where(late, 2 * context.size - 1 - chunk, chunk) * rows_per_rank + start + row % n + late * n


def gather_keys(k: Tensor, v: Tensor, context: Context) -> tuple[Tensor, Tensor]:
    """[T, Hkv, D] -> [R T, Hkv, D]: those of all ranks by one collective, whose backward is a reduce-scatter."""
    both = gather_in(torch.stack([k, v], dim=1)[None], context.group)[0]
    return both[:, 0], both[:, 1]


class Visit:
    """Send tensors to the next rank of the ring and get the previous one's; `wait` returns them."""

    def __init__(self, tensors: list[Tensor], context: Context):
        next_rank, previous = (dist.get_global_rank(context.group, (context.rank + d) % context.size) for d in (1, -1))
        self._sent, self._received = [t.contiguous() for t in tensors], [torch.empty_like(t, memory_format=torch.contiguous_format) for t in tensors]
        operations = []
        for out, into in zip(self._sent, self._received, strict=True):
            pair = [dist.P2POp(dist.isend, out, next_rank, context.group), dist.P2POp(dist.irecv, into, previous, context.group)]
            operations += pair if context.rank % 2 == 0 else pair[::-1]  # or all would send before any receives
        self._works = dist.batch_isend_irecv(operations)

    def wait(self) -> list[Tensor]:
        for work in self._works:
            work.wait()
        return self._received
