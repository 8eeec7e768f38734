"""The plan of a refit: which rank sends which part of which weight to whom, and where it lies.

Every rank derives its part of the plan from facts that all ranks know: how the shards of each
weight lie on the ranks (`Grid`), what the engines want of it (`Wanted`; engines that want the same
are one class), and the class of each rank's engine. Weights that are alike in all this, such as the
same matrix of all layers, are one `Kind`. They are planned once and travel together.
"""

import itertools
import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from minirl.parallel.regions import Region, intersect
from minirl.refit.record import Wanted

# --------------------------------------------------------------------------------------------------
# how shards lie on the ranks


class Grid:
    """The shards of a weight: the cells of a grid, each held by one rank or more."""

    def __init__(self, regions: list[Region]):
        """Find the cells.

        Args:
            regions: the region that each rank's shard is. Some may be empty.

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


def find_sender(holders: tuple[int, ...], receiver: int, world_size: int) -> int:
    """Return which of the ranks that hold a cell a receiver gets it from.

    It is the receiver itself, or else the nearest: holders and receivers are divided alike, in the
    order of ranks. So each holder serves as many receivers as the others, and with replicated
    shards a rank asks one of its own replica.

    Args:
        holders: the ranks that hold the cell, ascending.
        receiver: the rank that needs it.
        world_size: number of ranks.
    """
    if receiver in holders:
        return receiver
    return holders[receiver * len(holders) // world_size]


def one_of_each_layout(shards: dict[str, Tensor]) -> dict[str, str]:
    """Return for each weight the name of the first one that is sharded in the same way.

    Weights of one shape and placement lie alike on every rank, so that a grid is needed only once
    for, say, the same matrix of all layers.
    """
    first_by_layout: dict[tuple, str] = {}
    first_by_name = {}
    for name, shard in shards.items():
        layout: tuple = (tuple(shard.shape),)
        if isinstance(shard, DTensor):
            mesh = shard.device_mesh
            layout += (tuple(shard.placements), mesh.mesh_dim_names, tuple(mesh.shape))
        first_by_name[name] = first_by_layout.setdefault(layout, name)
    return first_by_name


# --------------------------------------------------------------------------------------------------
# which weights travel together


class Kind(NamedTuple):
    """Weights that lie alike on the ranks and go alike into the engines."""

    grid: Grid
    wanted: tuple[tuple[Wanted, ...], ...]  # What each class of engines wants of one weight.
    dtype: torch.dtype  # Dtype in the engines, and on the wire.
    names: list[str]


def wire_dtypes(wanted: list[dict[str, list[Wanted]]]) -> dict[str, torch.dtype]:
    """Return the dtype that each weight has in the engine, which is also that on the wire.

    A router's correction may be wider than the other weights.

    Args:
        wanted: what the engines of each class want, by the name of the weight.

    Raises:
        NotImplementedError: parts of one weight are wanted in more than one dtype.
    """
    dtypes: dict[str, torch.dtype] = {}
    for wanted_by_name in wanted:
        for name, parts in wanted_by_name.items():
            for part in parts:
                if dtypes.setdefault(name, part.dtype) != part.dtype:
                    raise NotImplementedError(
                        f"the engine keeps parts of {name} in more than one dtype"
                    )
    return dtypes


def find_kinds(grids: dict[str, Grid], wanted: list[dict[str, list[Wanted]]]) -> list[Kind]:
    """Return the kinds of weights, in an order that is the same on all ranks.

    Args:
        grids: the grid of each weight. Weights that are sharded alike share one.
        wanted: what the engines of each class want, by the name of the weight.
    """
    dtypes = wire_dtypes(wanted)
    kinds: dict[tuple, Kind] = {}
    for name, grid in grids.items():
        if name not in dtypes:
            continue  # The engines have no place for it, and need none.
        by_class = tuple(tuple(wanted_by_name.get(name, ())) for wanted_by_name in wanted)
        kind = kinds.setdefault((id(grid), by_class), Kind(grid, by_class, dtypes[name], []))
        kind.names.append(name)
    return list(kinds.values())


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

    The tensor is this rank's shard of a weight, or a part of its engine.
    """

    part: int  # Which of the parts of the engine that the weight fills; 0 for a shard.
    size: tuple[int, ...]
    offset: int  # In the tensor.
    strides: tuple[int, ...]
    slot: int  # In the buffer, for the first weight of a bucket.
    slot_strides: tuple[int, ...]
    step: int = 0  # From there to the slot of the bucket's next weight.

    def in_tensor(self, t: Tensor) -> Tensor:
        """Return the block in the tensor."""
        return t.as_strided(self.size, self.strides, int(t.storage_offset()) + self.offset)

    def in_buffer(self, buffer: Tensor, weight: int = 0) -> Tensor:
        """Return the block in the buffer; `weight` is its number in the bucket."""
        slot = int(buffer.storage_offset()) + self.slot + weight * self.step
        return buffer.as_strided(self.size, self.slot_strides, slot)


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
    part: int  # Which of the parts that the receiver's engine wants of the weight.
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
    ):
        """Sort the weights into kinds, alike on all ranks.

        Args:
            rank: this rank.
            grids: the grid of each weight, in an order that is the same on all ranks. Weights
                that are sharded alike share one.
            wanted: what the engines of each class want, by the name of the weight.
            class_of: the class of each rank's engine.
            bucket_bytes: what an engine receives at once, at most.

        Raises:
            NotImplementedError: parts of one weight are wanted in more than one dtype.
        """
        self.rank = rank
        self.class_of = class_of
        self.world_size = len(class_of)
        self.bucket_bytes = bucket_bytes
        self.kinds = find_kinds(grids, wanted)

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
                sender = find_sender(holders, self.rank, self.world_size)
                if sender != self.rank:
                    yield Piece(sender, i, common)

    def sent(self, kind: Kind, window: Region) -> Iterator[Piece]:
        """Yield the pieces of a weight's window that go to other ranks.

        For each of them the order is that in which the other rank goes through what it receives.
        """
        shard = kind.grid.regions[self.rank]
        held = intersect(shard, window)
        if not held:
            return
        holders = kind.grid.holders[shard]
        for receiver, engine_class in enumerate(self.class_of):
            sender = find_sender(holders, receiver, self.world_size)
            if receiver == self.rank or sender != self.rank:
                continue
            for i, wanted in enumerate(kind.wanted[engine_class]):
                common = intersect(wanted.region, held)
                if common:
                    yield Piece(receiver, i, common)

    def _plan_bucket(
        self, kind: Kind, names: list[str], window: Region, *, is_first: bool
    ) -> Bucket:
        """Plan a window of some weights of a kind; `is_first`: it is the first of each weight."""
        wanted = kind.wanted[self.class_of[self.rank]]
        shard = kind.grid.regions[self.rank]
        shard_strides = contiguous_strides(shard.size)
        local = []
        for i, part in enumerate(wanted if is_first else ()):
            common = intersect(part.region, shard)
            if common:
                offset = _offset_in(part.region, part.strides, common)
                source = _offset_in(shard, shard_strides, common)
                local.append(Copy(i, common.size, offset, part.strides, source, shard_strides))

        pack = []
        sent = list(self.sent(kind, window))
        num_out = self._numel_by_rank(sent)
        for piece, slot in _slots(sent, num_out, len(names)):
            offset = _offset_in(shard, shard_strides, piece.region)
            size = piece.region.size
            strides = contiguous_strides(size)
            step = num_out[piece.peer]
            pack.append(Copy(0, size, offset, shard_strides, slot, strides, step))

        unpack = []
        received = list(self.received(kind, window))
        num_in = self._numel_by_rank(received)
        for piece, slot in _slots(received, num_in, len(names)):
            part = wanted[piece.part]
            offset = _offset_in(part.region, part.strides, piece.region)
            size = piece.region.size
            strides = contiguous_strides(size)
            step = num_in[piece.peer]
            unpack.append(Copy(piece.part, size, offset, part.strides, slot, strides, step))

        return Bucket(
            names,
            kind.dtype,
            num_out=[num * len(names) for num in num_out],
            num_in=[num * len(names) for num in num_in],
            local=local,
            pack=merge(pack),
            unpack=merge(unpack),
        )

    def _numel_by_rank(self, pieces: list[Piece]) -> list[int]:
        numel = [0] * self.world_size
        for piece in pieces:
            numel[piece.peer] += math.prod(piece.region.size)
        return numel


def contiguous_strides(size: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    strides = []
    stride = 1
    for length in reversed(size):
        strides.append(stride)
        stride *= length
    return tuple(reversed(strides))


def _offset_in(outer: Region, strides: tuple[int, ...], inner: Region) -> int:
    """Return where a region begins in a tensor that holds the region `outer` with such strides."""
    offset = 0
    for stride, start, first in zip(strides, inner.offset, outer.offset, strict=True):
        offset += stride * (start - first)
    return offset


def _slots(pieces: list[Piece], numel: list[int], num_weights: int) -> Iterator[tuple[Piece, int]]:
    """Yield each piece of a bucket's first weight with its place in the buffer.

    A buffer holds what is for one rank after the other, for each rank weight by weight, and of each
    weight its pieces in the order that both ends derive.

    Args:
        pieces: the pieces of one weight.
        numel: elements of one weight to or from each rank.
        num_weights: number of weights in the bucket.
    """
    slots = list(itertools.accumulate((num * num_weights for num in numel), initial=0))
    for piece in pieces:
        yield piece, slots[piece.peer]
        slots[piece.peer] += math.prod(piece.region.size)


def merge(copies: list[Copy]) -> list[Copy]:
    """Merge copies of equal size that are equally far apart, in the tensor and in the buffer.

    A run of n becomes one copy with n as its first dimension. Pieces from or to the ranks of a
    trainer's 2-D mesh are runs of runs, so it repeats until nothing is merged any more. So the
    number of copies does not grow with the number of ranks.
    """
    while True:
        groups: dict[tuple, list[Copy]] = defaultdict(list)
        for copy in copies:
            alike = copy.part, copy.size, copy.strides, copy.slot_strides, copy.step
            groups[alike].append(copy)
        merged: list[Copy] = []
        for group in groups.values():
            group.sort(key=lambda copy: copy.slot)
            while group:
                length = _run_length(group)
                merged.append(_as_one(group[:length]))
                group = group[length:]
        if len(merged) == len(copies):
            return merged
        copies = merged


def _run_length(copies: Sequence[Copy]) -> int:
    """Return how many of the first copies are equally far apart."""
    if len(copies) < 2 or copies[1].offset < copies[0].offset:
        return 1  # A tensor has no negative strides.
    distances = []
    for a, b in itertools.pairwise(copies):
        distances.append((b.offset - a.offset, b.slot - a.slot))
        if distances[-1] != distances[0]:
            return len(distances)
    return len(copies)


def _as_one(run: list[Copy]) -> Copy:
    first = run[0]
    if len(run) == 1:
        return first
    return first._replace(
        size=(len(run), *first.size),
        strides=(run[1].offset - first.offset, *first.strides),
        slot_strides=(run[1].slot - first.slot, *first.slot_strides),
    )
