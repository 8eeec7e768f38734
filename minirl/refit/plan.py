"""The plan of a refit: which rank sends which part of which weight to whom, and where it lies.

Every rank derives its part of the plan from facts that all ranks know: how the shards of each
weight lie on the ranks (`Grid`), what the engines want of it (`Wanted`; engines that want the same
are one class), and the class of each rank's engine. Weights that are alike in all this, such as the
same matrix of all layers, are one `Kind`. They are planned once and travel together.
"""

import itertools
import math
import operator
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from minirl.base.errors import require
from minirl.engine.engine import RolloutEngine
from minirl.parallel.regions import Region, intersect
from minirl.refit.record import Wanted, runs

# --------------------------------------------------------------------------------------------------
# how shards lie on the ranks


class Grid:
    """The shards of a weight: the cells of a grid, each held by one rank or more."""

    def __init__(self, regions: Sequence[Region]):
        """Find the cells.

        Args:
            regions: the region that the shard of each rank is, of the first ranks; the others,
                which only generate, have none. Some may be empty.

        Raises:
            NotImplementedError: the shards do not form a grid.
        """
        self.regions = regions
        holders = defaultdict(list)
        for rank, region in enumerate(regions):
            if all(region.size):
                holders[region].append(rank)
        self.holders = {region: tuple(ranks) for region, ranks in holders.items()}  # Ascending.
        self.cells = {region.offset: region for region in holders}
        # Where the cells begin along each dimension.
        self.starts = [sorted(set(starts)) for starts in zip(*self.cells, strict=True)]
        if not len(self.cells) == len(holders) == math.prod(map(len, self.starts)):
            raise NotImplementedError("the shards of a weight do not form a grid")
        last = self.cells[tuple(starts[-1] for starts in self.starts)]
        size = tuple(start + length for start, length in zip(*last, strict=True))
        self.whole = Region((0,) * len(size), size)

    def overlaps(self, region: Region) -> Iterator[tuple[Region, tuple[int, ...]]]:
        """Yield what a region has in common with each cell that it meets, and the cell's ranks."""
        ranges = []
        for starts, first, size in zip(self.starts, *region, strict=True):
            begin = bisect_right(starts, first) - 1
            end = bisect_left(starts, first + size)
            ranges.append(starts[begin:end])
        for corner in itertools.product(*ranges):
            cell = self.cells[corner]
            common = intersect(region, cell)
            if common:
                yield common, self.holders[cell]


def find_sender(
    holders: tuple[int, ...], receiver: int, world_size: int, first_receiver: int = 0
) -> int:
    """Return which of the ranks that hold a cell a receiver gets it from.

    It is the receiver itself, or else the nearest: holders and receivers are divided alike, in the
    order of ranks. So each holder serves as many receivers as the others, and with replicated
    shards a rank asks one of its own replica.

    Args:
        holders: the ranks that hold the cell, ascending.
        receiver: the rank that needs it.
        world_size: number of ranks.
        first_receiver: this rank and those after it have engines.
    """
    if receiver in holders:
        return receiver
    num_receivers = world_size - first_receiver
    return holders[(receiver - first_receiver) * len(holders) // num_receivers]


# --------------------------------------------------------------------------------------------------
# which weights travel together


class Kind(NamedTuple):
    """Weights that lie alike on the ranks and go alike into the engines."""

    grid: Grid
    wanted: tuple[tuple[Wanted, ...], ...]  # What each class of engines wants of one weight.
    dtype: torch.dtype  # Dtype in the engines, and on the wire.
    names: list[str]


def cut(kind: Kind, limit: int) -> tuple[list[Region], int]:
    """Cut weights into windows of which at most `limit` elements travel to an engine.

    They are cut along a dimension that no shard and no engine divides, so that every rank has the
    same to do for each window. If there is none, a weight travels at once.

    Args:
        kind: the weights.
        limit: elements that an engine receives at once.

    Returns:
        The windows of a weight, and how many elements of one an engine wants, at most.
    """
    whole = kind.grid.whole
    numel = 0
    for parts in kind.wanted:
        numel = max(numel, sum(math.prod(part.region.size) for part in parts))
    if numel <= limit:
        return [whole], numel
    for axis, length in enumerate(whole.size):
        rows = limit * length // numel  # Along the axis, in one window.
        wanted = itertools.chain(*kind.wanted)
        is_undivided = all(part.region.size[axis] == length for part in wanted)
        if not rows or len(kind.grid.starts[axis]) > 1 or not is_undivided:
            continue
        num_windows = math.ceil(length / rows)
        windows = []
        for i in range(num_windows):
            offset, size = list(whole.offset), list(whole.size)
            offset[axis] = length * i // num_windows
            size[axis] = length * (i + 1) // num_windows - offset[axis]
            windows.append(Region(tuple(offset), tuple(size)))
        return windows, math.ceil(numel / num_windows)
    return [whole], numel


# --------------------------------------------------------------------------------------------------
# what a rank copies


class Copy(NamedTuple):
    """A block of elements in a tensor, and in a buffer. Offsets and strides are in elements.

    The tensor is this rank's shard of a weight, or a part of its engine. `Refit` carries it out.
    """

    part: int  # Which of the parts of the engine that the weight fills; 0 for a shard.
    size: tuple[int, ...]
    offset: int  # In the tensor.
    strides: tuple[int, ...]
    slot: int  # In the buffer, for the first weight of a bucket.
    slot_strides: tuple[int, ...]
    step: int = 0  # From there to the slot of the bucket's next weight.


class Bucket(NamedTuple):
    """Weights of one kind, whole or a window of each, that travel at once."""

    names: list[str]
    dtype: torch.dtype
    num_out: list[int]  # Elements to each rank.
    num_in: list[int]  # Elements from each rank.
    local: list[Copy]  # This rank's shard, as the buffer, to this rank's engine.
    pack: list[Copy]  # The shard to the buffer that is sent.
    unpack: list[Copy]  # The buffer that arrives to the engine.


class Piece(NamedTuple):
    """A region of a weight that travels to or from another rank."""

    peer: int
    part: int  # Which of the parts of this rank's engine that the weight fills; 0 for its shard.
    region: Region


class Planner:
    """Plans what one rank does in a refit."""

    def __init__(
        self,
        rank: int,
        grids: dict[str, Grid],
        wanted: list[dict[str, list[Wanted]]],
        class_of: list[int],
        bucket_bytes: int,
        first_receiver: int = 0,
    ):
        """Sort the weights into kinds, alike on all ranks.

        Args:
            rank: this rank.
            grids: the grid of each weight, in an order that is the same on all ranks. Weights
                that are sharded alike share one.
            wanted: what the engines of each class want, by the name of the weight.
            class_of: the class of each rank's engine.
            bucket_bytes: what an engine receives at once, at most.
            first_receiver: this rank and those after it have engines.

        Raises:
            NotImplementedError: parts of one weight are wanted in more than one dtype.
        """
        self.rank = rank
        self.class_of = class_of
        self.world_size = len(class_of)
        self.first_receiver = first_receiver
        self.bucket_bytes = bucket_bytes
        kinds: dict[tuple, Kind] = {}
        for name, grid in grids.items():
            by_class = tuple(tuple(wanted_by_name.get(name, ())) for wanted_by_name in wanted)
            # A router's correction may be wider than the other weights.
            dtypes = {part.dtype for part in itertools.chain(*by_class)}
            if not dtypes:
                continue  # The engines have no place for it, and need none.
            if len(dtypes) > 1:
                message = f"the engine keeps parts of {name} in more than one dtype"
                raise NotImplementedError(message)
            kind = kinds.setdefault((id(grid), by_class), Kind(grid, by_class, dtypes.pop(), []))
            kind.names.append(name)
        self.kinds = list(kinds.values())

    def plan(self) -> list[Bucket]:
        """Return what to do, bucket by bucket."""
        buckets = []
        for kind in self.kinds:
            limit = self.bucket_bytes // kind.dtype.itemsize
            windows, numel = cut(kind, limit)
            num_weights = max(1, limit // numel)
            for number, window in enumerate(windows):
                bucket = None
                for start in range(0, len(kind.names), num_weights):
                    names = kind.names[start : start + num_weights]
                    if bucket is None or len(bucket.names) != len(names):
                        bucket = self._plan_bucket(kind, names, window, is_first=number == 0)
                    buckets.append(bucket._replace(names=names))
        return buckets

    def received(self, kind: Kind, window: Region) -> Iterator[Piece]:
        """Yield the pieces of a weight's window that come from other ranks."""
        for i, wanted in enumerate(kind.wanted[self.class_of[self.rank]]):
            region = intersect(wanted.region, window)
            if not region:
                continue
            for common, holders in kind.grid.overlaps(region):
                sender = find_sender(holders, self.rank, self.world_size, self.first_receiver)
                if sender != self.rank:
                    yield Piece(sender, i, common)

    def sent(self, kind: Kind, window: Region) -> Iterator[Piece]:
        """Yield the pieces of a weight's window that go to other ranks.

        For each of them the order is that in which the other rank goes through what it receives.
        """
        shard = self._shard(kind)
        held = intersect(shard, window)
        if not held:
            return
        holders = kind.grid.holders[shard]
        for receiver in range(self.first_receiver, self.world_size):
            sender = find_sender(holders, receiver, self.world_size, self.first_receiver)
            if receiver == self.rank or sender != self.rank:
                continue
            for wanted in kind.wanted[self.class_of[receiver]]:
                common = intersect(wanted.region, held)
                if common:
                    yield Piece(receiver, 0, common)

    def _shard(self, kind: Kind) -> Region:
        """Return the region of a weight that this rank's shard is."""
        regions = kind.grid.regions
        if self.rank < len(regions):
            return regions[self.rank]
        return Region(kind.grid.whole.offset, (0,) * len(kind.grid.whole.size))

    def _plan_bucket(
        self, kind: Kind, names: list[str], window: Region, *, is_first: bool
    ) -> Bucket:
        """Plan a window of some weights of a kind; `is_first`: it is the first of each weight."""
        wanted = kind.wanted[self.class_of[self.rank]]
        shard = self._shard(kind)
        shard_strides = _contiguous_strides(shard.size)
        local = []
        for i, part in enumerate(wanted if is_first else ()):
            common = intersect(part.region, shard)
            if common:
                offset = _offset_in(part.region, part.strides, common.offset)
                source = _offset_in(shard, shard_strides, common.offset)
                local.append(Copy(i, common.size, offset, part.strides, source, shard_strides))

        sent = list(self.sent(kind, window))
        num_out, pack = self._travel(sent, [(shard, shard_strides)], len(names))
        received = list(self.received(kind, window))
        parts = [(part.region, part.strides) for part in wanted]
        num_in, unpack = self._travel(received, parts, len(names))
        return Bucket(names, kind.dtype, num_out, num_in, local, pack, unpack)

    def _travel(
        self,
        pieces: list[Piece],
        parts: list[tuple[Region, tuple[int, ...]]],
        num_weights: int,
    ) -> tuple[list[int], list[Copy]]:
        """Plan the copies between a buffer and what it is packed from, or unpacked to.

        A buffer holds what is for one rank after the other, for each rank weight by weight, and of
        each weight its pieces in the order that both ends derive.

        Args:
            pieces: the pieces of one weight.
            parts: what the tensor of each part holds, and its strides.
            num_weights: number of weights in the bucket.

        Returns:
            The elements of all weights for each rank, and the copies of the first weight.
        """
        numel = [0] * self.world_size  # Of one weight.
        for piece in pieces:
            numel[piece.peer] += math.prod(piece.region.size)
        num_elements = [num * num_weights for num in numel]
        slots = list(itertools.accumulate(num_elements, initial=0))
        copies = []
        for peer, part, (offset, size) in pieces:
            outer, strides = parts[part]
            place = _offset_in(outer, strides, offset)
            packed = _contiguous_strides(size)
            copies.append(Copy(part, size, place, strides, slots[peer], packed, numel[peer]))
            slots[peer] += math.prod(size)
        return num_elements, merge(copies)


def _contiguous_strides(size: tuple[int, ...]) -> tuple[int, ...]:
    return torch.empty(size, device="meta").stride()


def _offset_in(outer: Region, strides: tuple[int, ...], place: tuple[int, ...]) -> int:
    """Return where a place of a weight lies in a tensor that holds the region `outer` of it."""
    distance = map(operator.sub, place, outer.offset)
    return sum(map(operator.mul, strides, distance))


def merge(copies: list[Copy]) -> list[Copy]:
    """Merge copies of equal size that are equally far apart, in the tensor and in the buffer.

    A run of n becomes one copy with n as its first dimension. Pieces from or to the ranks of a
    trainer's 2-D mesh are runs of runs, so it repeats until nothing is merged any more. So the
    number of copies does not grow with the number of ranks.
    """
    while True:
        merged: list[Copy] = []
        for run in runs(
            copies,
            alike=lambda copy: (copy.part, copy.size, copy.strides, copy.slot_strides, copy.step),
            place=lambda copy: (copy.slot, copy.offset),
            may_begin=lambda _, distance: distance[1] >= 0,  # A tensor has no negative strides.
        ):
            first = run[0]
            if len(run) > 1:
                first = first._replace(
                    size=(len(run), *first.size),
                    strides=(run[1].offset - first.offset, *first.strides),
                    slot_strides=(run[1].slot - first.slot, *first.slot_strides),
                )
            merged.append(first)
        if len(merged) == len(copies):
            return merged
        copies = merged


def check_nothing_lost(
    shapes: dict[str, torch.Size], wanted: list[dict[str, list[Wanted]]], engine: RolloutEngine
) -> None:
    """Refuse a plan by which elements of a weight go to no engine.

    The engine would sample from another model than the one that is trained: some of vLLM's
    loaders skip weights for which their model has no parameter. (A tied head is no weight of
    its own, and an engine that is sent no sound has no tower for it.)

    Args:
        shapes: of the trainer's weights, by name.
        wanted: what the engines of each class want; the classes together are all ranks.
        engine: this rank's engine.

    Raises:
        UserError: on all ranks.
    """
    regions: dict[str, set[Region]] = defaultdict(set)
    for wanted_of_class in wanted:
        for name, parts in wanted_of_class.items():
            regions[name].update(part.region for part in parts)
    left_out = engine.vision.left_out if engine.vision else ()
    lost = []
    for name, shape in shapes.items():
        arriving = sum(math.prod(region.size) for region in regions[name])
        if arriving < shape.numel() and not name.startswith(left_out):
            lost.append(f"{name} ({shape.numel() - arriving} of {shape.numel()} elements)")
    require(
        not lost,
        f"policy.model: the engine, {engine.model_class}, has no place for {len(lost)} trained "
        f"weights, {', '.join(lost[:4])}{', ...' * (len(lost) > 4)}: it would sample from another "
        "model; take one without them (config.json decides, as by attention_bias), or a version of "
        "vLLM that has them",
    )
