"""The plan of a refit: who sends which part of which weight to whom, and where it lies meanwhile.

Every rank derives its own part of the plan, in time that follows the pieces that it sends and
receives, from three things: the grids that the shards of the weights form (`Grid`), what each class
of engines wants (`Wanted`; engines of one class want the same), and the class of each rank.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from minirl.parallel.regions import Region, intersect, split_by_size
from minirl.rollout.refit_copies import Copy, Place, contiguous_strides, merge, place_of
from minirl.rollout.refit_shards import Block, Grid


class Wanted(NamedTuple):
    """A region of a weight that an engine wants, in a dtype."""

    name: str
    region: Region
    dtype: torch.dtype


class OwnCopy(NamedTuple):
    """A piece that this rank holds and its own engine wants."""

    name: str
    index: int  # Of the arrival.
    size: tuple[int, ...]
    place: Place  # In the shard.
    target: Place  # In the arrival's part of the engine.


class Piece(NamedTuple):
    """A piece that travels to or from a peer."""

    peer: int
    name: str
    index: int  # Of what is wanted, in the list of the receiver's class.
    region: Region


class Window(NamedTuple):
    """A part of a weight that travels in one bucket."""

    name: str
    region: Region
    is_first: bool  # Of the weight's windows.


@dataclass
class Bucket:
    """What travels at once, and what is copied within this rank meanwhile."""

    dtype: torch.dtype
    windows: list[Window]
    num_out: list[int] = field(default_factory=list)  # Elements to each rank.
    num_in: list[int] = field(default_factory=list)  # Elements from each rank.
    pack: list[Copy[str]] = field(default_factory=list)  # Shards to the buffer that is sent.
    unpack: list[Copy[str]] = field(
        default_factory=list
    )  # The buffer that is received to the engine.
    own: list[OwnCopy] = field(default_factory=list)  # Shards to the engine of the same rank.


class Planner:
    """Plans what one rank does in a refit."""

    def __init__(
        self,
        rank: int,
        grids: dict[str, Grid],
        wanted: list[list[Wanted]],
        class_of: list[int],
        bucket_bytes: int,
        *,
        whole_shards: bool,
    ):
        """Put the weights into buckets.

        Args:
            rank: this one.
            grids: of each weight, in an order that is the same on all ranks. Weights whose shards
                lie alike share one.
            wanted: what the engines of each class want.
            class_of: the class of each rank's engine.
            bucket_bytes: what an engine receives at once, at most.
            whole_shards: every rank sends its whole shards to all ranks.

        Raises:
            NotImplementedError: parts of one weight are wanted in more than one dtype.
        """
        self.rank = rank
        self.world_size = len(class_of)
        self.grids = grids
        self.wanted = wanted
        self.own_class = class_of[rank]
        self.whole_shards = whole_shards
        self.members: list[list[int]] = [[] for _ in wanted]
        for member, its_class in enumerate(class_of):
            self.members[its_class].append(member)
        # For each class the indices of what is wanted of a weight.
        self.indices = [_indices_by_name(of_class) for of_class in wanted]
        self.dtypes = self._wire_dtypes()
        self._receivers: dict[tuple[Block, int], list[int]] = {}
        self.windows = self._split_into_windows(bucket_bytes)

    def _wire_dtypes(self) -> dict[str, torch.dtype]:
        """Return the dtype that each weight has in the engine, which is also that on the wire.

        A router's correction may be wider than the other weights.
        """
        dtype_of: dict[str, torch.dtype] = {}
        for item in itertools.chain(*self.wanted):
            if dtype_of.setdefault(item.name, item.dtype) != item.dtype:
                raise NotImplementedError(
                    f"the engine keeps parts of {item.name} in more than one dtype"
                )
        return {name: dtype_of[name] for name in self.grids if name in dtype_of}

    # ----------------------------------------------------------------------------------------------
    # buckets

    def _split_into_windows(self, bucket_bytes: int) -> list[list[Window]]:
        """Return the windows of each bucket, which is of one dtype.

        Weights of one kind follow each other: their pieces have the same sizes and peers, so that
        pieces from different peers are equally far apart in a buffer, and one copy moves them all.
        """
        kinds: dict[tuple, list[str]] = defaultdict(list)
        for name in self.dtypes:
            kinds[self._kind(name)].append(name)
        windows: dict[torch.dtype, list[tuple[Window, int]]] = defaultdict(list)
        for names in kinds.values():
            dtype = self.dtypes[names[0]]
            num_elements = self._num_elements(names[0])
            regions = self._cut(names[0], num_elements, bucket_bytes // dtype.itemsize)
            numel = math.ceil(num_elements / len(regions))
            for name in names:
                for i, region in enumerate(regions):
                    windows[dtype].append((Window(name, region, i == 0), numel))
        buckets = []
        for dtype, of_dtype in windows.items():
            limit = bucket_bytes // dtype.itemsize
            for part in split_by_size(of_dtype, lambda item: item[1], limit):
                buckets.append([window for window, _ in part])
        return buckets

    def _kind(self, name: str) -> tuple:
        """Return a key that is equal for weights whose pieces are alike."""
        regions = []
        for of_class, indices in zip(self.wanted, self.indices, strict=True):
            regions.append(tuple(of_class[i].region for i in indices.get(name, ())))
        return id(self.grids[name]), self.dtypes[name], tuple(regions)

    def _num_elements(self, name: str) -> int:
        """Return how many elements of a weight travel to an engine, at most."""
        if self.whole_shards:
            return math.prod(self.grids[name].whole.size)
        received = []
        for of_class, indices in zip(self.wanted, self.indices, strict=True):
            regions = [of_class[i].region for i in indices.get(name, ())]
            received.append(sum(math.prod(region.size) for region in regions))
        return max(received)

    def _cut(self, name: str, num_elements: int, limit: int) -> list[Region]:
        """Cut a weight into windows of which at most `limit` elements travel to an engine.

        It is cut along a dimension that no shard and no engine divides, so that every rank has the
        same to do for each window. If there is none, the weight travels at once.

        Args:
            name: of the weight.
            num_elements: of it that travel to an engine.
            limit: elements of a bucket.
        """
        grid = self.grids[name]
        whole = grid.whole
        if num_elements <= limit:
            return [whole]
        for axis, length in enumerate(whole.size):
            most = limit * length // num_elements  # Of its indices in a window.
            if most and len(grid.starts[axis]) == 1 and self._is_undivided(name, axis, length):
                num_windows = math.ceil(length / most)
                cuts = [length * i // num_windows for i in range(num_windows + 1)]
                return [_slab(whole, axis, *cut) for cut in itertools.pairwise(cuts)]
        return [whole]

    def _is_undivided(self, name: str, axis: int, length: int) -> bool:
        """Return whether all engines want a weight in its whole length along an axis."""
        for of_class, indices in zip(self.wanted, self.indices, strict=True):
            for i in indices.get(name, ()):
                if of_class[i].region.size[axis] != length:
                    return False
        return True

    # ----------------------------------------------------------------------------------------------
    # pieces

    def received(self, window: Window) -> Iterator[Piece]:
        """Yield the pieces of a window that come from other ranks."""
        for index, region in self._wanted_in(self.own_class, window):
            for common, block in self.grids[window.name].overlaps(region):
                sender = block.sender(self.rank, self.world_size)
                if sender != self.rank:
                    yield Piece(sender, window.name, index, common)

    def sent(self, window: Window) -> Iterator[Piece]:
        """Yield the pieces of a window that go to other ranks."""
        grid = self.grids[window.name]
        own = grid.regions[self.rank]
        if not all(own.size):
            return
        block = grid.blocks[own.offset]
        for its_class in range(len(self.wanted)):
            receivers = self._receivers_of(block, its_class)
            if not receivers:
                continue
            for index, region in self._wanted_in(its_class, window):
                common = intersect(region, own)
                if common:
                    for receiver in receivers:
                        yield Piece(receiver, window.name, index, common)

    def _wanted_in(self, its_class: int, window: Window) -> Iterator[tuple[int, Region]]:
        """Yield what a class of engines wants of a window, with its index."""
        for index in self.indices[its_class].get(window.name, ()):
            common = intersect(self.wanted[its_class][index].region, window.region)
            if common:
                yield index, common

    def _receivers_of(self, block: Block, its_class: int) -> list[int]:
        """Return the other ranks of a class that get this rank's block from it."""
        key = block, its_class
        if key not in self._receivers:
            receivers = []
            for member in self.members[its_class]:
                if member != self.rank and block.sender(member, self.world_size) == self.rank:
                    receivers.append(member)
            self._receivers[key] = receivers
        return self._receivers[key]

    # ----------------------------------------------------------------------------------------------
    # copies

    def plan(self, strides: dict[str, tuple[int, ...]], targets: list[Tensor]) -> list[Bucket]:
        """Return what to do, bucket by bucket.

        Args:
            strides: of this rank's shards.
            targets: the parts of the engine that are wanted, with the dimensions of the weights.
        """
        buckets = []
        for windows in self.windows:
            bucket = Bucket(self.dtypes[windows[0].name], windows)
            for window in windows:
                if window.is_first:
                    bucket.own += self._own_copies(window.name, strides, targets)
            if self.world_size > 1:
                if self.whole_shards:
                    self._plan_all_gather(bucket, strides, targets)
                else:
                    self._plan_all_to_all(bucket, strides, targets)
            buckets.append(bucket)
        return buckets

    def _own_copies(
        self, name: str, strides: dict[str, tuple[int, ...]], targets: list[Tensor]
    ) -> Iterator[OwnCopy]:
        """Yield the copies of a weight that need no wire."""
        own = self.grids[name].regions[self.rank]
        for index in self.indices[self.own_class].get(name, ()):
            region = self.wanted[self.own_class][index].region
            common = intersect(region, own)
            if common:
                place = place_of(strides[name], common, own.offset)
                target = place_of(targets[index].stride(), common, region.offset)
                yield OwnCopy(name, index, common.size, place, target)

    def _plan_all_to_all(
        self, bucket: Bucket, strides: dict[str, tuple[int, ...]], targets: list[Tensor]
    ) -> None:
        """Give each piece its place in a buffer: by peer, then in the order that both ends derive.

        Both go through the windows of the bucket, and for each through what is wanted.
        """
        bucket.num_in = [0] * self.world_size
        bucket.num_out = [0] * self.world_size
        received: list[Piece] = []
        sent: list[Piece] = []
        for window in bucket.windows:
            received += self.received(window)
            sent += self.sent(window)
        unpack = []
        for piece, slot in _slots(received, bucket.num_in):
            unpack.append(self._to_engine(piece, slot, targets))
        pack = []
        for piece, slot in _slots(sent, bucket.num_out):
            origin = self.grids[piece.name].regions[self.rank].offset
            place = place_of(strides[piece.name], piece.region, origin)
            pack.append(Copy(piece.name, piece.region.size, place, slot))
        bucket.pack = merge(pack)
        bucket.unpack = merge(unpack)

    def _plan_all_gather(
        self, bucket: Bucket, strides: dict[str, tuple[int, ...]], targets: list[Tensor]
    ) -> None:
        """Let each rank send its shards end to end, in a row as long as the longest rank's."""
        starts: dict[Window, list[int]] = {}  # Of a window's shard in each rank's row.
        ends = [0] * self.world_size
        for window in bucket.windows:
            starts[window] = list(ends)
            for rank, region in enumerate(self.grids[window.name].regions):
                held = intersect(region, window.region)
                ends[rank] += math.prod(held.size) if held else 0
        longest = max(ends)
        bucket.num_out = [longest]
        bucket.num_in = [longest] * self.world_size

        unpack = []
        for window in bucket.windows:
            regions = self.grids[window.name].regions
            held = intersect(regions[self.rank], window.region)
            if held:
                place = place_of(strides[window.name], held, regions[self.rank].offset)
                slot = Place(starts[window][self.rank], contiguous_strides(held.size))
                bucket.pack.append(Copy(window.name, held.size, place, slot))
            for piece in self.received(window):
                row = intersect(regions[piece.peer], window.region)
                assert row, "a piece is in its sender's shard"
                slot = place_of(contiguous_strides(row.size), piece.region, row.offset)
                start = piece.peer * longest + starts[window][piece.peer]
                slot = Place(start + slot.offset, slot.strides)
                unpack.append(self._to_engine(piece, slot, targets))
        bucket.unpack = merge(unpack)

    def _to_engine(self, piece: Piece, slot: Place, targets: list[Tensor]) -> Copy[int]:
        origin = self.wanted[self.own_class][piece.index].region.offset
        place = place_of(targets[piece.index].stride(), piece.region, origin)
        return Copy(piece.index, piece.region.size, place, slot)


def _indices_by_name(wanted: list[Wanted]) -> dict[str, list[int]]:
    indices: dict[str, list[int]] = {}
    for i, item in enumerate(wanted):
        indices.setdefault(item.name, []).append(i)
    return indices


def _slab(region: Region, axis: int, start: int, stop: int) -> Region:
    """Return the part of a region from `start` to before `stop` along an axis."""
    offset, size = list(region.offset), list(region.size)
    offset[axis], size[axis] = start, stop - start
    return Region(tuple(offset), tuple(size))


def _slots(pieces: list[Piece], numel: list[int]) -> Iterator[tuple[Piece, Place]]:
    """Yield each piece with its place in a buffer, by peer; add its elements to the peer's."""
    start = 0
    for piece in sorted(pieces, key=lambda piece: piece.peer):  # keeps the order for each peer
        size = piece.region.size
        yield piece, Place(start, contiguous_strides(size))
        start += math.prod(size)
        numel[piece.peer] += math.prod(size)
