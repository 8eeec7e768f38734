"""Sharded tensors made whole on every rank, all of them in one exchange.

`DTensor.full_tensor`, which does the same for one tensor, lets the ranks wait for each other once
or twice, and tests compare hundreds of weights and gradients. A test holds the two to each other.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

Block = tuple[tuple[int, ...], tuple[int, ...]]  # where it begins in the whole, and its shape


def whole(tree: Any) -> Any:
    """Return nested dicts with every sharded tensor whole and every other one copied. Collective:
    the ranks have the same names in the same order."""
    sharded = list(_sharded(tree))
    return _rebuilt(tree, iter(_gather(sharded)))


def _sharded(tree: Any) -> Iterator[DTensor]:
    if isinstance(tree, dict):
        for value in tree.values():
            yield from _sharded(value)
    elif isinstance(tree, DTensor):
        yield tree


def _rebuilt(tree: Any, gathered: Iterator[Tensor]) -> Any:
    if isinstance(tree, dict):
        return {name: _rebuilt(value, gathered) for name, value in tree.items()}
    if isinstance(tree, DTensor):
        return next(gathered)
    return tree.detach().clone() if torch.is_tensor(tree) else tree


def _gather(tensors: list[DTensor]) -> list[Tensor]:
    if not tensors:
        return []
    blocks, contents = [], []
    for t in tensors:
        assert not any(p.is_partial() for p in t.placements), t.placements
        shape, offset = compute_local_shape_and_global_offset(t.shape, t.device_mesh, t.placements)
        blocks.append((tuple(offset), tuple(shape)))
        contents.append(t.detach().to_local().contiguous().flatten().view(torch.uint8))
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, (blocks, torch.cat(contents).numpy()))

    parts = [_cut(tensors, *of_rank) for of_rank in of_ranks]
    return [_assemble(t, number, parts) for number, t in enumerate(tensors)]


def _cut(tensors: list[DTensor], blocks: list[Block], content: Any) -> list[tuple[Block, Tensor]]:
    """Return the blocks of a rank, with what is in them."""
    cut = []
    rest = torch.from_numpy(content)
    for t, (offset, shape) in zip(tensors, blocks, strict=True):
        num_bytes = math.prod(shape) * t.dtype.itemsize
        own, rest = rest[:num_bytes], rest[num_bytes:]
        # A copy begins at an address that is a multiple of its items.
        cut.append(((offset, shape), own.clone().view(t.dtype).view(shape)))
    return cut


def _assemble(t: DTensor, number: int, parts: list[list[tuple[Block, Tensor]]]) -> Tensor:
    """Put the blocks of a tensor together: of its copies, those of this rank's own."""
    place = t.device_mesh.get_coordinate()
    assert place is not None
    own_copy = tuple(
        at if placement.is_replicate() else slice(None)
        for at, placement in zip(place, t.placements, strict=True)
    )
    assembled = torch.empty(t.shape, dtype=t.dtype)
    for rank in t.device_mesh.mesh[own_copy].flatten().tolist():
        (offset, shape), values = parts[rank][number]
        region = tuple(slice(o, o + s) for o, s in zip(offset, shape, strict=True))
        assembled[region] = values
    return assembled
