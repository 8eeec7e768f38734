"""Strided copies between tensors and a flat buffer, and how many of them become one."""

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from minirl.parallel.regions import Region


class Place(NamedTuple):
    """Where the elements of a piece lie in a tensor's memory, in elements."""

    offset: int
    strides: tuple[int, ...]


class Copy(NamedTuple):
    """A piece in a bucket's buffer and in a tensor."""

    tensor: int  # Its number.
    size: tuple[int, ...]
    place: Place
    slot: Place  # In the buffer.
    # From there to the same piece of the next of several weights that are alike.
    step: int = 0


def contiguous_strides(size: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    strides = []
    stride = 1
    for length in reversed(size):
        strides.append(stride)
        stride *= length
    return tuple(reversed(strides))


def place_of(strides: tuple[int, ...], region: Region, origin: tuple[int, ...]) -> Place:
    """Return where a region lies in a tensor whose first element is at `origin`."""
    offset = 0
    for stride, start, first in zip(strides, region.offset, origin, strict=True):
        offset += stride * (start - first)
    return Place(offset, strides)


def merge(copies: list[Copy]) -> list[Copy]:
    """Merge copies of equal size that are equally far apart, in the tensor and in the buffer.

    A run of n becomes one copy with n as its first dimension. Pieces from or to the ranks of a
    trainer's 2-D mesh are runs of runs, so it goes on until nothing is merged any more.
    """
    while True:
        groups: dict[tuple, list[Copy]] = defaultdict(list)
        for copy in copies:
            alike = copy.tensor, copy.size, copy.place.strides, copy.slot.strides, copy.step
            groups[alike].append(copy)
        merged: list[Copy] = []
        for group in groups.values():
            merged += _merge_group(sorted(group, key=lambda copy: copy.slot.offset))
        if len(merged) == len(copies):
            return merged
        copies = merged


def repeat(copy: Copy, num_weights: int, num_tensors: int) -> Iterator[Copy]:
    """Yield a copy of the first of several weights that are alike, and that of each other.

    Args:
        copy: of the first one.
        num_weights: how many they are.
        num_tensors: how many numbers of tensors each of them has.
    """
    for i in range(num_weights):
        slot = Place(copy.slot.offset + i * copy.step, copy.slot.strides)
        yield Copy(copy.tensor + i * num_tensors, copy.size, copy.place, slot)


def _merge_group(group: list[Copy]) -> Iterator[Copy]:
    """Yield a copy for each run of equal distances."""
    start = 0
    while start < len(group):
        stop = start + 1
        step = _distance(group[start], group[stop]) if stop < len(group) else (-1, 0)
        if step[0] >= 0:  # A tensor has no negative strides.
            while stop < len(group) and _distance(group[stop - 1], group[stop]) == step:
                stop += 1
        yield _as_one(group[start:stop])
        start = stop


def _distance(a: Copy, b: Copy) -> tuple[int, int]:
    return b.place.offset - a.place.offset, b.slot.offset - a.slot.offset


def _as_one(run: list[Copy]) -> Copy:
    first = run[0]
    if len(run) == 1:
        return first
    place_step, slot_step = _distance(first, run[1])
    return Copy(
        first.tensor,
        (len(run), *first.size),
        Place(first.place.offset, (place_step, *first.place.strides)),
        Place(first.slot.offset, (slot_step, *first.slot.strides)),
        first.step,
    )
