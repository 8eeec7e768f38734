"""Boxes: blocks of a whole tensor, the common tongue of loading, export and refit."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

Region = tuple[
    tuple[int, ...], tuple[int, ...]
]  # (offset, size) in the coordinates of a whole tensor.


@dataclass(frozen=True)
class CheckpointSlice:
    """One weight of a checkpoint's files as a block of a parameter: all of it, or one expert's
    matrix of a fused one.
    """

    name: str  # In the files.
    box: Region  # Of the parameter.
    fused: bool = (
        False  # The block is one of many along dimension 0, which the file's weight does not have.
    )

    def of(self, whole: Tensor) -> Tensor:
        """The view of it in a whole parameter, in the file's shape."""
        part = view_of(whole, self.box)
        return part[0] if self.fused else part

    def inside(self, box: Region) -> Region:
        """A block of the parameter that lies in this part, in the coordinates of the file's
        weight.
        """
        offset = tuple(o - start for o, start in zip(box[0], self.box[0], strict=True))
        return offset[self.fused :], box[1][self.fused :]


def intersect(a: Region, b: Region) -> Region | None:
    low = tuple(map(max, a[0], b[0]))
    high = tuple(min(x + n, y + m) for x, n, y, m in zip(*a, *b, strict=True))
    size = tuple(h - l for l, h in zip(low, high, strict=True))
    return (low, size) if all(n > 0 for n in size) else None


def view_of(t: Any, box: Region, corner: tuple[int, ...] | None = None) -> Tensor:
    """The view of `box` in a tensor whose first element is at `corner`, or a whole one; of a weight
    in a file what is read of it.
    """
    return t[
        tuple(
            slice(start - origin, start - origin + n)
            for start, n, origin in zip(*box, corner or (0,) * len(box[0]), strict=True)
        )
    ]


def split_by_size(items: Iterable, size: Callable[[object], int], limit: float) -> Iterator[list]:
    """Cut a row of things into split_by_size whose sizes add up to `limit` at most, but for a thing
    that alone has more.
    """
    run, total = [], 0
    for item in items:
        if run and total + size(item) > limit:
            yield run
            run, total = [], 0
        run.append(item)
        total += size(item)
    yield run
