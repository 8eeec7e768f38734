"""A law of growth: how a cost follows the work and the number of ranks, and how fast it may."""

import math
import time
from collections.abc import Callable
from typing import NamedTuple

# Costs below these count as these: a clock and an allocator tell nothing of them.
SHORT_SECONDS = 0.002
FEW_BYTES = 2**16
# What a measured power may be above its bound, on a busy machine whose caches are small. What grows
# with one power too many is twice as far away.
SIZE_SLACK = 0.5
RANKS_SLACK = 0.35
LONG_SECONDS = 0.5  # A call of more is made once.


class Point(NamedTuple):
    """What one rank's work cost, measured."""

    law: str
    ranks: int
    size: int  # Of the work, in the unit of its part.
    cpu_seconds: float
    num_bytes: int
    num_pieces: int = 0  # What the host handles one by one, where that is counted.


class Bound(NamedTuple):
    """How fast a cost may grow at most: as these powers of the size and of the ranks."""

    size: float
    ranks: float


class Powers(NamedTuple):
    """How fast a cost grew: as these powers of the size and of the ranks."""

    seconds_by_size: float
    seconds_by_ranks: float
    bytes_by_size: float
    bytes_by_ranks: float
    pieces_by_size: float
    pieces_by_ranks: float

    def keep(self, bound: Bound) -> bool:
        """Return whether no cost grew faster than it may."""
        by_size = max(self.seconds_by_size, self.bytes_by_size, self.pieces_by_size)
        by_ranks = max(self.seconds_by_ranks, self.bytes_by_ranks, self.pieces_by_ranks)
        return by_size <= bound.size + SIZE_SLACK and by_ranks <= bound.ranks + RANKS_SLACK


class Part(NamedTuple):
    """Laws that are measured together."""

    unit: str  # Of the sizes.
    sizes: list[int]
    worlds: list[int]  # Numbers of ranks.
    bounds: dict[str, Bound]  # Of the laws, by name.
    # measure(size, ranks): the points of all its laws there. A law may lack points where it would
    # ask for more memory than a laptop has.
    measure: Callable[[int, int], list[Point]]


def least_seconds(work: Callable[[], object]) -> float:
    """Return the CPU-seconds of a call: the least of seven, or of one that is long."""
    seconds = []
    for _ in range(7):
        began = time.process_time()
        work()
        seconds.append(time.process_time() - began)
        if seconds[0] > LONG_SECONDS:
            break
    return min(seconds)


def powers(points: list[Point]) -> Powers:
    """Return how fast a law grew: by size in its largest world, by ranks at its largest size."""
    largest_world = max(point.ranks for point in points)
    by_size = [point for point in points if point.ranks == largest_world]
    small = min(by_size, key=lambda point: point.size)
    large = max(by_size, key=lambda point: point.size)
    by_ranks = [point for point in points if point.size == large.size]
    few = min(by_ranks, key=lambda point: point.ranks)
    size_ratio = large.size / small.size
    ranks_ratio = large.ranks / few.ranks
    return Powers(
        _power(small.cpu_seconds, large.cpu_seconds, SHORT_SECONDS, size_ratio),
        _power(few.cpu_seconds, large.cpu_seconds, SHORT_SECONDS, ranks_ratio),
        _power(small.num_bytes, large.num_bytes, FEW_BYTES, size_ratio),
        _power(few.num_bytes, large.num_bytes, FEW_BYTES, ranks_ratio),
        _power(small.num_pieces, large.num_pieces, 1, size_ratio),
        _power(few.num_pieces, large.num_pieces, 1, ranks_ratio),
    )


def _power(little: float, much: float, least: float, ratio: float) -> float:
    """Return p where the cost grew as ratio**p; 0 if there is nothing to compare."""
    if ratio == 1:
        return 0.0
    return math.log(max(much, least) / max(little, least)) / math.log(ratio)
