"""How the shards of all ranks lie in a weight, without a list for each rank and weight."""

import itertools
import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor

from minirl.parallel.regions import Region, intersect


class Block(NamedTuple):
    """A region that a rank's shard is, and all ranks that hold it, ascending."""

    region: Region
    ranks: tuple[int, ...]

    def sender(self, receiver: int, world_size: int) -> int:
        """Return which rank a receiver gets it from: itself, or the nearest copy.

        Copies and receivers are divided alike, in the order of ranks. So each copy serves as many
        receivers as the others, and with replicated shards a rank asks one of its own replica.
        """
        i = bisect_left(self.ranks, receiver)
        if i < len(self.ranks) and self.ranks[i] == receiver:
            return receiver
        return self.ranks[receiver * len(self.ranks) // world_size]


class Grid:
    """The shards of all ranks of a weight: blocks of a grid, each on one rank or more."""

    def __init__(self, regions: list[Region]):
        """Find the blocks.

        Args:
            regions: the shard of each rank. Some may be empty.

        Raises:
            NotImplementedError: the shards are no grid.
        """
        self.regions = regions
        ranks = defaultdict(list)
        for rank, region in enumerate(regions):
            if all(region.size):
                ranks[region].append(rank)
        self.blocks = {}
        for region, holders in ranks.items():
            self.blocks[region.offset] = Block(region, tuple(holders))
        # Where the blocks begin along each dimension.
        self.starts = [sorted(set(starts)) for starts in zip(*self.blocks, strict=True)]
        if not len(self.blocks) == len(ranks) == math.prod(map(len, self.starts)):
            raise NotImplementedError("the shards of a weight are not the blocks of a grid")
        last = self.blocks[tuple(starts[-1] for starts in self.starts)].region
        size = tuple(start + length for start, length in zip(*last, strict=True))
        self.whole = Region((0,) * len(size), size)

    def overlaps(self, region: Region) -> Iterator[tuple[Region, Block]]:
        """Yield what a region has in common with each block that it meets, and the block."""
        ranges = []
        for starts, first, size in zip(self.starts, *region, strict=True):
            begin = bisect_right(starts, first) - 1
            end = bisect_left(starts, first + size)
            ranges.append(starts[begin:end])
        for corner in itertools.product(*ranges):
            block = self.blocks[corner]
            common = intersect(region, block.region)
            if common:
                yield common, block


def one_of_each_layout(shards: dict[str, Tensor]) -> dict[str, str]:
    """Return for each weight the name of the first one whose shards lie in the same way.

    Weights of one shape and placement lie alike on every rank, so that a grid is needed only once
    for, say, the same matrix of all layers.
    """
    first_of: dict[tuple, str] = {}
    layout_of = {}
    for name, shard in shards.items():
        layout: tuple = (tuple(shard.shape),)
        if isinstance(shard, DTensor):
            mesh = shard.device_mesh
            layout += (tuple(shard.placements), mesh.mesh_dim_names, tuple(mesh.shape))
        layout_of[name] = first_of.setdefault(layout, name)
    return layout_of
