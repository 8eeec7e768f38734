"""Regions: blocks of a whole tensor, the common language of loading, export and refit."""

import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

Item = TypeVar("Item")


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


def split_by_size(
    items: Iterable[Item], size: Callable[[Item], float], limit: float
) -> Iterator[list[Item]]:
    """Split a sequence into consecutive parts whose sizes add up to at most `limit`.

    An item that is larger than the limit is a part of its own.
    """
    part: list[Item] = []
    total = 0.0
    for item in items:
        if part and total + size(item) > limit:
            yield part
            part, total = [], 0.0
        part.append(item)
        total += size(item)
    yield part
