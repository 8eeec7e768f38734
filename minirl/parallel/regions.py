"""Regions: blocks of a whole tensor, the common language of loading, export and refit.

And how sharded tensors are gathered to one rank each, where `full_tensor` would gather all of them
to every rank.
"""

import math
import operator
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from minirl.parallel.mesh import Mesh


class Region(NamedTuple):
    """A block of a whole tensor, in the coordinates of the whole."""

    offset: tuple[int, ...]
    size: tuple[int, ...]


@dataclass(frozen=True)
class CheckpointSlice:
    """One weight of a checkpoint's files as a region of a parameter.

    It is the whole parameter, or one expert's matrix of a fused one.
    """

    name: str  # In the files.
    region: Region  # Of the parameter.
    fused: bool = False  # One of many along dimension 0, which the file's weight does not have.
    transposed: bool = False  # In the file, the last two dimensions are the other way round.

    def of(self, whole: Tensor) -> Tensor:
        """Return the view of this slice in a whole parameter, in the file's shape."""
        view = view_of(whole, self.region)
        view = view[0] if self.fused else view
        return view.mT if self.transposed else view

    def to_file(self, region: Region) -> Region:
        """Return a region of the parameter inside this slice in the file weight's coordinates."""
        offset = tuple(map(operator.sub, region.offset, self.region.offset))[self.fused :]
        size = region.size[self.fused :]
        if self.transposed:
            offset = (*offset[:-2], offset[-1], offset[-2])
            size = (*size[:-2], size[-1], size[-2])
        return Region(offset, size)

    def from_file(self, values: Tensor) -> Tensor:
        """Return values of the file's weight in the shape of the parameter's region."""
        values = values.mT if self.transposed else values
        return values[None] if self.fused else values


def local_region(t: Tensor) -> Region:
    """Return the region of this rank's block in the whole tensor."""
    if not isinstance(t, DTensor):
        return Region((0,) * t.ndim, tuple(t.shape))
    shape, offset = compute_local_shape_and_global_offset(t.shape, t.device_mesh, t.placements)
    return Region(offset, shape)


def intersect(a: Region, b: Region) -> Region | None:
    """Return what two regions of one tensor have in common, None if that is nothing."""
    offset, size = [], []
    for a_start, a_size, b_start, b_size in zip(*a, *b, strict=True):
        start = max(a_start, b_start)
        stop = min(a_start + a_size, b_start + b_size)
        if stop <= start:
            return None
        offset.append(start)
        size.append(stop - start)
    return Region(tuple(offset), tuple(size))


def view_of(t: Any, region: Region, origin: tuple[int, ...] | None = None) -> Tensor:
    """Return the view of a region in a tensor.

    Args:
        t: a tensor, or anything that slices like one (a lazy weight in a file).
        region: the block, in the coordinates of the whole tensor.
        origin: where the first element of `t` lies in the whole tensor; None: `t` is the whole.
    """
    origin = origin or (0,) * len(region.offset)
    slices = tuple(
        slice(start - first, start - first + size)
        for start, size, first in zip(*region, origin, strict=True)
    )
    return t[slices]


# --------------------------------------------------------------------------------------------------
# gathering


class ShardedTensor(NamedTuple):
    """A tensor of which each rank holds a region."""

    shape: torch.Size  # Of the whole.
    shard: Tensor  # This rank's region, on the mesh's device.
    regions: tuple[Region, ...]  # Of each rank. Ranks with equal ones hold copies.


def regions_of_ranks(tensors: list[Tensor], mesh: Mesh) -> list[tuple[Region, ...]]:
    """Return, for each tensor, the region that each rank holds, in rank order. Collective.

    Only layouts travel, of which a model has a dozen.

    Args:
        tensors: tensors or DTensors of any placements without partial sums, the same on all ranks.
        mesh: the ranks.
    """
    layouts: list[Hashable] = []  # What decides which region each rank holds.
    local_regions: dict[Hashable, Region] = {}
    for t in tensors:
        layout = (t.shape, t.placements, t.device_mesh) if isinstance(t, DTensor) else t.shape
        layouts.append(layout)
        if layout not in local_regions:
            local_regions[layout] = local_region(t)
    by_rank = mesh.gather(list(local_regions.values()))  # [rank][layout]
    regions = dict(zip(local_regions, zip(*by_rank, strict=True), strict=True))
    return [regions[layout] for layout in layouts]


def collect(wanted: dict[int, ShardedTensor], mesh: Mesh) -> Tensor | None:
    """Gather one tensor on each rank that wants one, and return this rank's. Collective.

    Of the ranks that hold copies of a shard the first one sends it.

    Args:
        wanted: what each rank gets, by rank; the same on all ranks and not empty.
        mesh: the ranks.

    Returns:
        The whole tensor, None if this rank gets none.
    """
    nothing = next(iter(wanted.values())).shard.new_empty(0)
    sent = [nothing] * mesh.world_size
    for receiver, t in wanted.items():
        if t.regions.index(t.regions[mesh.rank]) == mesh.rank:
            sent[receiver] = t.shard
    if mesh.rank not in wanted:
        exchange_parts(sent, [], mesh)
        return None

    mine = wanted[mesh.rank]
    shapes: list[tuple[int, ...]] = []
    for source, region in enumerate(mine.regions):
        is_first = mine.regions.index(region) == source
        shapes.append(region.size if is_first else (0,))
    whole = nothing.new_empty(mine.shape)
    for part, region in zip(exchange_parts(sent, shapes, mesh), mine.regions, strict=True):
        if part.numel():
            view_of(whole, region).copy_(part)
    return whole


def exchange_parts(
    sent: list[Tensor], shapes: Sequence[tuple[int, ...]], mesh: Mesh
) -> list[Tensor]:
    """Send `sent[r]` to rank r, and return a tensor of `shapes[r]` from each rank r. Collective.

    Ranks after the end of a list get nothing, or send nothing. All tensors have one dtype.
    """
    num_sent = [0] * mesh.world_size
    num_sent[: len(sent)] = [t.numel() for t in sent]
    num_received = [0] * mesh.world_size
    num_received[: len(shapes)] = map(math.prod, shapes)
    received = sent[0].new_empty(sum(num_received))
    flat = torch.cat([t.flatten() for t in sent])
    dist.all_to_all_single(received, flat, num_received, num_sent)
    parts = received.split(num_received)
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=False)]
