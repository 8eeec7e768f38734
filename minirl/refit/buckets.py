"""Which weights travel together in a refit, in an order that all ranks derive alike."""

import itertools
import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from minirl.parallel.regions import Region, split_by_size
from minirl.refit.shards import Grid


class Wanted(NamedTuple):
    """A region of a weight that an engine wants, in a dtype."""

    name: str
    region: Region
    dtype: torch.dtype


@dataclass(eq=False)
class Kind:
    """Weights that have the same shape, lie alike on the ranks and go alike into the engines."""

    grid: Grid
    dtype: torch.dtype  # In the engines, and on the wire.
    wanted: list[list[Region]]  # Of one weight, by each class of engines.
    names: list[str] = field(default_factory=list)

    def most_wanted(self) -> int:
        """Return how many elements of one weight an engine wants, at most."""
        return max(sum(math.prod(region.size) for region in regions) for regions in self.wanted)


class Window(NamedTuple):
    """A part of a weight that travels in one bucket."""

    name: str
    kind: Kind
    region: Region
    is_first: bool  # Of the weight's windows.


def indices_by_name(wanted: list[Wanted]) -> dict[str, list[int]]:
    """Return the indices of what is wanted of each weight."""
    indices: dict[str, list[int]] = {}
    for i, item in enumerate(wanted):
        indices.setdefault(item.name, []).append(i)
    return indices


def wire_dtypes(grids: dict[str, Grid], wanted: list[list[Wanted]]) -> dict[str, torch.dtype]:
    """Return the dtype that each weight has in the engine, which is also that on the wire.

    A router's correction may be wider than the other weights.
    """
    dtype_of: dict[str, torch.dtype] = {}
    for item in itertools.chain(*wanted):
        if dtype_of.setdefault(item.name, item.dtype) != item.dtype:
            raise NotImplementedError(
                f"the engine keeps parts of {item.name} in more than one dtype"
            )
    return {name: dtype_of[name] for name in grids if name in dtype_of}


def find_kinds(grids: dict[str, Grid], wanted: list[list[Wanted]]) -> list[Kind]:
    """Return the kinds of weights, in the order of their first ones.

    Args:
        grids: of each weight. Weights whose shards lie alike share one.
        wanted: what the engines of each class want.

    Raises:
        NotImplementedError: parts of one weight are wanted in more than one dtype.
    """
    indices = [indices_by_name(of_class) for of_class in wanted]
    kinds: dict[tuple, Kind] = {}
    for name, dtype in wire_dtypes(grids, wanted).items():
        regions = []
        for of_class, of_name in zip(wanted, indices, strict=True):
            regions.append([of_class[i].region for i in of_name.get(name, ())])
        key = id(grids[name]), dtype, tuple(map(tuple, regions))
        kind = kinds.setdefault(key, Kind(grids[name], dtype, regions))
        kind.names.append(name)
    return list(kinds.values())


def fill_buckets(kinds: list[Kind], bucket_bytes: int, *, whole_shards: bool) -> list[list[Window]]:
    """Return the windows of each bucket, which is of one dtype.

    Weights of one kind follow each other: their pieces have the same sizes and peers, so that
    pieces from different peers are equally far apart in a buffer, and one copy moves them all.

    Args:
        kinds: of all weights.
        bucket_bytes: what an engine receives at once, at most.
        whole_shards: every rank gets whole weights, not only what its engine wants.
    """
    windows: dict[torch.dtype, list[tuple[Window, int]]] = defaultdict(list)
    for kind in kinds:
        num_elements = math.prod(kind.grid.whole.size) if whole_shards else kind.most_wanted()
        regions = _cut(kind, num_elements, bucket_bytes // kind.dtype.itemsize)
        numel = math.ceil(num_elements / len(regions))
        for name in kind.names:
            for i, region in enumerate(regions):
                windows[kind.dtype].append((Window(name, kind, region, i == 0), numel))
    buckets = []
    for dtype, of_dtype in windows.items():
        limit = bucket_bytes // dtype.itemsize
        for part in split_by_size(of_dtype, lambda item: item[1], limit):
            buckets.append([window for window, _ in part])
    return buckets


def _cut(kind: Kind, num_elements: int, limit: int) -> list[Region]:
    """Cut weights into windows of which at most `limit` elements travel to an engine.

    They are cut along a dimension that no shard and no engine divides, so that every rank has the
    same to do for each window. If there is none, a weight travels at once.

    Args:
        kind: of the weights.
        num_elements: of one of them that travel to an engine.
        limit: elements of a bucket.
    """
    whole = kind.grid.whole
    if num_elements <= limit:
        return [whole]
    for axis, length in enumerate(whole.size):
        most = limit * length // num_elements  # Of its indices in a window.
        if most and len(kind.grid.starts[axis]) == 1 and _is_undivided(kind, axis):
            num_windows = math.ceil(length / most)
            cuts = [length * i // num_windows for i in range(num_windows + 1)]
            return [_slab(whole, axis, *cut) for cut in itertools.pairwise(cuts)]
    return [whole]


def _is_undivided(kind: Kind, axis: int) -> bool:
    """Return whether all engines want weights in their whole length along an axis."""
    length = kind.grid.whole.size[axis]
    return all(region.size[axis] == length for region in itertools.chain(*kind.wanted))


def _slab(region: Region, axis: int, start: int, stop: int) -> Region:
    """Return the part of a region from `start` to before `stop` along an axis."""
    offset, size = list(region.offset), list(region.size)
    offset[axis], size[axis] = start, stop - start
    return Region(tuple(offset), tuple(size))
