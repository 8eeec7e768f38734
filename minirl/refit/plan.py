"""The plan of a refit: who sends which part of which weight to whom, and where it lies meanwhile.

Every rank derives its own part of the plan, in time that follows the pieces that it sends and
receives, from three things: the grids that the shards of the weights form (`Grid`), what each class
of engines wants (`Wanted`; engines of one class want the same), and the class of each rank. What is
alike, such as the same matrix of all layers, is planned once (buckets.py).
"""

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from minirl.parallel.regions import Region, intersect
from minirl.refit.buckets import Wanted, Window, fill_buckets, find_kinds, indices_by_name
from minirl.refit.copies import Copy, Place, contiguous_strides, merge, place_of, repeat
from minirl.refit.shards import Block, Grid


class Piece(NamedTuple):
    """A piece of a window that travels to or from a peer."""

    peer: int
    part: int  # Of what the receiver's class wants of the weight: which one.
    region: Region


class OwnCopy(NamedTuple):
    """A piece that this rank holds and its own engine wants."""

    shard: int
    part: int
    size: tuple[int, ...]
    source: Place  # In the shard.
    target: Place  # In the engine.


@dataclass
class Copies:
    """What one rank does for a bucket. Buckets of the same kinds share it.

    Shards and parts of the engine are numbered as in `Bucket`.
    """

    num_out: list[int]  # Elements to each rank.
    num_in: list[int]  # Elements from each rank.
    own: list[OwnCopy] = field(default_factory=list)  # Shards to this rank's engine.
    pack: list[Copy] = field(default_factory=list)  # Shards to the buffer that is sent.
    unpack: list[Copy] = field(default_factory=list)  # The buffer that arrives to the engine.


class Bucket(NamedTuple):
    """What travels at once."""

    dtype: torch.dtype
    shards: list[str]  # The name of each window's weight.
    parts: list[int]  # What this rank's engine wants of them, as indices of its list.
    copies: Copies


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
        """Put the weights into buckets, alike on all ranks.

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
        self.whole_shards = whole_shards
        self.own_class = class_of[rank]
        self.members: list[list[int]] = [[] for _ in wanted]
        for member, its_class in enumerate(class_of):
            self.members[its_class].append(member)
        # What this rank's engine wants of each weight, as indices of its list.
        self.indices = indices_by_name(wanted[self.own_class])
        kinds = find_kinds(grids, wanted)
        self.buckets = fill_buckets(kinds, bucket_bytes, whole_shards=whole_shards)
        self._receivers: dict[tuple[Block, int], list[int]] = {}

    # ----------------------------------------------------------------------------------------------
    # pieces

    def received(self, window: Window) -> Iterator[Piece]:
        """Yield the pieces of a window that come from other ranks."""
        for part, wanted in enumerate(window.kind.wanted[self.own_class]):
            region = intersect(wanted, window.region)
            if not region:
                continue
            for common, block in window.kind.grid.overlaps(region):
                sender = block.sender(self.rank, self.world_size)
                if sender != self.rank:
                    yield Piece(sender, part, common)

    def sent(self, window: Window) -> Iterator[Piece]:
        """Yield the pieces of a window that go to other ranks."""
        grid = window.kind.grid
        shard = intersect(grid.regions[self.rank], window.region)
        if not shard:
            return
        block = grid.blocks[grid.regions[self.rank].offset]
        for its_class, wanted_by_class in enumerate(window.kind.wanted):
            receivers = self._receivers_of(block, its_class)
            for part, wanted in enumerate(wanted_by_class):
                common = intersect(wanted, shard)
                if common:
                    for receiver in receivers:
                        yield Piece(receiver, part, common)

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
        planned: dict[tuple, Copies] = {}
        buckets = []
        for windows in self.buckets:
            groups: list[_Group] = []
            parts: list[int] = []
            for shard, window in enumerate(windows):
                indices = self.indices.get(window.name, [])
                target_strides = tuple(targets[i].stride() for i in indices)
                last = groups[-1] if groups else None
                if last and last.has(window, strides[window.name], target_strides):
                    last.num_weights += 1
                else:
                    group = _Group(window, strides[window.name], target_strides, shard, len(parts))
                    groups.append(group)
                parts += indices
            key = tuple(group.key() for group in groups)
            if key not in planned:
                planned[key] = self._plan_copies(groups)
            names = [window.name for window in windows]
            buckets.append(Bucket(windows[0].kind.dtype, names, parts, planned[key]))
        return buckets

    def _plan_copies(self, groups: "list[_Group]") -> Copies:
        """Plan a bucket."""
        copies = Copies([0] * self.world_size, [0] * self.world_size)
        for group in groups:
            if group.window.is_first:
                copies.own += self._own_copies(group)
        if self.whole_shards:
            self._plan_all_gather(groups, copies)
        else:
            self._plan_all_to_all(groups, copies)
        return copies

    def _own_copies(self, group: "_Group") -> Iterator[OwnCopy]:
        """Yield the copies of weights that need no wire."""
        own = group.window.kind.grid.regions[self.rank]
        for part, wanted in enumerate(group.window.kind.wanted[self.own_class]):
            common = intersect(wanted, own)
            if not common:
                continue
            target = place_of(group.target_strides[part], common, wanted.offset)
            source = place_of(group.strides, common, own.offset)
            for i in range(group.num_weights):
                number = group.first_part + i * group.num_parts + part
                yield OwnCopy(group.first_shard + i, number, common.size, source, target)

    def _plan_all_to_all(self, groups: "list[_Group]", copies: Copies) -> None:
        """Give each piece its place in a buffer: by peer, then in the order that both ends derive.

        Both go through the windows of the bucket, and for each through what is wanted.
        """
        received = []
        sent = []
        for group in groups:
            received += [(group, piece) for piece in self.received(group.window)]
            sent += [(group, piece) for piece in self.sent(group.window)]
        unpack = []
        for group, piece, slot, step in _slots(received, copies.num_in):
            unpack.append(self._to_engine(group, piece, slot, step))
        pack = []
        for group, piece, slot, step in _slots(sent, copies.num_out):
            own = group.window.kind.grid.regions[self.rank]
            place = place_of(group.strides, piece.region, own.offset)
            pack.append(Copy(group.first_shard, piece.region.size, place, slot, step))
        copies.pack = _for_all_weights(groups, merge(pack), by_part=False)
        copies.unpack = _for_all_weights(groups, merge(unpack), by_part=True)

    def _plan_all_gather(self, groups: "list[_Group]", copies: Copies) -> None:
        """Let each rank send its shards end to end, in a row as long as the longest rank's."""
        starts: list[list[int]] = []  # Of each group's shards in each rank's row.
        ends = [0] * self.world_size
        for group in groups:
            starts.append(list(ends))
            for rank in range(self.world_size):
                held = group.held(rank)
                ends[rank] += group.num_weights * math.prod(held.size) if held else 0
        longest = max(ends)
        copies.num_out = [longest]
        copies.num_in = [longest] * self.world_size

        pack = []
        unpack = []
        for group, start in zip(groups, starts, strict=True):
            regions = group.window.kind.grid.regions
            held = group.held(self.rank)
            if held:
                place = place_of(group.strides, held, regions[self.rank].offset)
                slot = Place(start[self.rank], contiguous_strides(held.size))
                step = math.prod(held.size)
                pack.append(Copy(group.first_shard, held.size, place, slot, step))
            for piece in self.received(group.window):
                held = group.held(piece.peer)
                assert held, "a piece is in its sender's shard"
                inside = place_of(contiguous_strides(held.size), piece.region, held.offset)
                row = piece.peer * longest + start[piece.peer]
                slot = Place(row + inside.offset, inside.strides)
                unpack.append(self._to_engine(group, piece, slot, math.prod(held.size)))
        copies.pack = _for_all_weights(groups, pack, by_part=False)
        copies.unpack = _for_all_weights(groups, merge(unpack), by_part=True)

    def _to_engine(self, group: "_Group", piece: Piece, slot: Place, step: int) -> Copy:
        wanted = group.window.kind.wanted[self.own_class][piece.part]
        place = place_of(group.target_strides[piece.part], piece.region, wanted.offset)
        return Copy(group.first_part + piece.part, piece.region.size, place, slot, step)


@dataclass(eq=False)
class _Group:
    """Consecutive windows of a bucket that are alike, so that only the first one is planned."""

    window: Window
    strides: tuple[int, ...]  # Of the weight's shard.
    target_strides: tuple[tuple[int, ...], ...]  # Of the parts of the engine that it fills.
    first_shard: int  # Its number in the bucket.
    first_part: int  # The number of the first of those parts.
    num_weights: int = 1

    @property
    def num_parts(self) -> int:
        """Return the number of parts that each weight fills."""
        return len(self.target_strides)

    def has(self, window: Window, strides: tuple, target_strides: tuple) -> bool:
        """Return whether a window is alike."""
        found = window.kind is self.window.kind and window[2:] == self.window[2:]
        return found and (strides, target_strides) == (self.strides, self.target_strides)

    def key(self) -> tuple:
        """Return what is equal for groups whose copies are equal."""
        kind = id(self.window.kind)
        return kind, *self.window[2:], self.strides, self.target_strides, self.num_weights

    def held(self, rank: int) -> Region | None:
        """Return which part of the window is a rank's."""
        return intersect(self.window.kind.grid.regions[rank], self.window.region)


def _for_all_weights(groups: list[_Group], copies: list[Copy], *, by_part: bool) -> list[Copy]:
    """Return the copies of all weights of the groups.

    Args:
        groups: of a bucket.
        copies: of the first weight of each group.
        by_part: their tensors are parts of the engine, or else shards.
    """
    firsts = [group.first_part if by_part else group.first_shard for group in groups]
    found: list[Copy] = []
    for copy in copies:
        group = groups[bisect_right(firsts, copy.tensor) - 1]
        found += repeat(copy, group.num_weights, group.num_parts if by_part else 1)
    return found


def _slots(
    pieces: list[tuple[_Group, Piece]], numel: list[int]
) -> Iterator[tuple[_Group, Piece, Place, int]]:
    """Yield each piece with its place in a buffer, and how far it is from the next weight's.

    Args:
        pieces: of the first weight of each group. Those of a peer keep their order.
        numel: for each peer; the elements of all weights are added.
    """
    start = 0
    by_peer = sorted(pieces, key=lambda item: item[1].peer)
    for (peer, _), items in itertools.groupby(by_peer, lambda item: (item[1].peer, id(item[0]))):
        of_group = list(items)
        group = of_group[0][0]
        step = sum(math.prod(piece.region.size) for _, piece in of_group)
        offset = start
        for _, piece in of_group:
            yield group, piece, Place(offset, contiguous_strides(piece.region.size)), step
            offset += math.prod(piece.region.size)
        start += step * group.num_weights
        numel[peer] += step * group.num_weights
