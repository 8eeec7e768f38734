"""Gather sharded tensors to one rank each, where `full_tensor` would gather all to every rank."""

import math
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from minirl.parallel.fsdp import local_region
from minirl.parallel.mesh import Mesh
from minirl.parallel.regions import Region, view_of


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
    own: dict[Hashable, Region] = {}
    for t in tensors:
        if _layout(t) not in own:
            own[_layout(t)] = local_region(t)
    of_ranks = mesh.gather(list(own.values()))  # [rank][layout]
    regions = dict(zip(own, zip(*of_ranks, strict=True), strict=True))
    return [regions[_layout(t)] for t in tensors]


def _layout(t: Tensor) -> Hashable:
    """Return what decides which region each rank holds."""
    if isinstance(t, DTensor):
        return t.shape, t.placements, t.device_mesh
    return t.shape


def collect(wanted: dict[int, ShardedTensor], mesh: Mesh) -> Tensor | None:
    """Gather one tensor on each rank that wants one, and return this rank's. Collective.

    Of the ranks that hold copies of a shard the first one sends it.

    Args:
        wanted: by rank what it gets, the same on all ranks and not empty.
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

    own = wanted[mesh.rank]
    shapes: list[tuple[int, ...]] = []
    for source, region in enumerate(own.regions):
        is_first = own.regions.index(region) == source
        shapes.append(region.size if is_first else (0,))
    whole = nothing.new_empty(own.shape)
    for part, region in zip(exchange_parts(sent, shapes, mesh), own.regions, strict=True):
        if part.numel():
            view_of(whole, region).copy_(part)
    return whole


def exchange_parts(
    sent: list[Tensor], shapes: Sequence[tuple[int, ...]], mesh: Mesh
) -> list[Tensor]:
    """Send `sent[r]` to rank r, and return a tensor of `shapes[r]` from each rank r. Collective.

    Ranks behind the end of a list get nothing, or send nothing. All tensors have one dtype.
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
