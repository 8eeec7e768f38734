"""Refit: the trainer's shards into the engine's parameters, in place.

1. Record, once: which region of which weight the engine's own loader copies where
   (record.py).
2. Plan, once: intersect those regions with the shards of all ranks (plan.py). A rank takes
   its own shard, or else that of the nearest replica.
3. Run, each step, bucket by bucket: pack the shards into a buffer, in the engine's dtype; one
   collective; unpack. While one bucket is on the wire, the one before it is unpacked and the next
   one is packed.
"""

import hashlib
import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from minirl.config.rl import MOST_IN_FLIGHT, RefitConfig
from minirl.engine.engine import RolloutEngine
from minirl.parallel.fsdp import local
from minirl.parallel.mesh import Mesh
from minirl.parallel.regions import CheckpointSlice, Region, regions_of_ranks
from minirl.refit.plan import Bucket, Copy, Grid, Planner, check_nothing_lost
from minirl.refit.record import (
    EnginePart,
    compare_with_oracle,
    full_gather,
    record_loader,
    wanted_by_name,
)


class _Weights(NamedTuple):
    """What all ranks know of the trainer's weights, by name."""

    shapes: dict[str, torch.Size]
    regions: dict[str, tuple[Region, ...]]  # Of each rank that has a shard.
    slices: dict[str, list[CheckpointSlice]]  # What it is in a checkpoint's files.


class _InFlight(NamedTuple):
    """A bucket on the wire."""

    bucket: Bucket
    send_buffer: Tensor  # Held until it has been sent.
    receive_buffer: Tensor
    work: dist.Work


class Refit:
    """Moves the policy's weights into the engine, at each call the current ones.

    Made once per policy and engine. Building and calling are collective, over all ranks of the run:
    with parallel.generators the trainers have the shards, and the generators the engines.

    Attributes:
        bytes_received: what this rank receives in a call.
        peak_bytes: size of the buffers that are there at once, at most.
    """

    def __init__(
        self,
        cfg: RefitConfig,
        shards: dict[str, Tensor],
        slices: dict[str, list[CheckpointSlice]],
        engine: RolloutEngine | None,
        *,
        mesh: Mesh | None = None,
        read: Callable[[], Mapping[str, Tensor]] | None = None,
        check: bool = False,
    ):
        """Record what the engine's loader does, and plan who sends what to whom.

        Args:
            cfg: size of the buckets.
            shards: the trainer's weights by its names; empty on a generator.
            slices: what each of them is in a checkpoint's files, which is what the engine's loader
                knows.
            engine: the engine to fill; None on a rank that only trains.
            mesh: the ranks of this side; None: those of the engine.
            read: returns what to move, laid out as `shards`; a collective, called once a refit.
                None: `shards` themselves, as they are then.
            check: compare with a full gather after each call.

        Raises:
            UserError: the engine has no place for a weight, or a part that none would fill.
            NotImplementedError: the loader does something that cannot be planned.
        """
        if mesh is None:
            assert engine
            mesh = engine.mesh
        self.engine = engine
        self.world = mesh.everyone
        self.read = read or (lambda: shards)
        self.check = check
        about = None
        if mesh.side != "generators":
            regions = regions_of_ranks(list(shards.values()), mesh)
            about = _Weights(
                {name: t.shape for name, t in shards.items()},
                dict(zip(shards, regions, strict=True)),
                slices,
            )
        if mesh.side != "both":
            about = self.world.broadcast(about, 0)
        assert about
        self.weights = about
        parts: list[EnginePart] = []
        self.zeros: list[Tensor] = []
        if engine:
            parts, self.zeros = record_loader(engine, about.shapes, about.slices)
        self.targets: dict[str, list[Tensor]] = defaultdict(list)  # What each weight fills.
        for part in parts:
            self.targets[part.name].append(part.target)
        # Engines of one class, such as the first ranks of tensor-parallel engines, want the same:
        # its first rank sends it to all others. Ranks without an engine are a class, too.
        wanted = [wanted_by_name(parts)]
        digests = self.world.gather(hashlib.sha256(repr(wanted).encode()).hexdigest())
        classes = list(dict.fromkeys(digests))
        class_of = [classes.index(digest) for digest in digests]
        if len(classes) > 1:
            firsts = [digests.index(digest) for digest in classes]
            wanted = [self.world.broadcast(wanted[0], rank) for rank in firsts]
        if engine:
            check_nothing_lost(about.shapes, wanted, engine)
        self.first_receiver = 0
        if mesh.side != "both":  # The first ranks only send.
            self.first_receiver = len(next(iter(about.regions.values())))
        # Weights that are sharded alike share a grid.
        grids = {of_ranks: Grid(of_ranks) for of_ranks in dict.fromkeys(about.regions.values())}
        planner = Planner(
            self.world.rank,
            {name: grids[of_ranks] for name, of_ranks in about.regions.items()},
            wanted,
            class_of,
            cfg.bucket_mb * 2**20,
            self.first_receiver,
        )
        # On the wire, by name, in the same order on all ranks.
        self.dtypes = {name: kind.dtype for kind in planner.kinds for name in kind.names}
        self.buckets = planner.plan()
        received = [sum(bucket.num_in) * bucket.dtype.itemsize for bucket in self.buckets]
        sent = [sum(bucket.num_out) * bucket.dtype.itemsize for bucket in self.buckets]
        self.bytes_received = sum(received)
        buffers = [0, *map(sum, zip(received, sent, strict=True))]
        self.peak_bytes = max(map(sum, itertools.pairwise(buffers)), default=0)
        if not engine:
            self.peak_bytes = min(sum(sent), MOST_IN_FLIGHT + max(sent, default=0))
        self._sending: list[_InFlight] = []  # Of a rank that only sends.

    @torch.no_grad()
    def __call__(self) -> None:
        """Move the current weights. Collective.

        A rank that only sends returns when all is packed, and up to `MOST_IN_FLIGHT` of it is
        still on the wire: its weights may change from then on.

        Raises:
            UserError: with `check`, if an engine differs from a full gather; on all ranks.
        """
        self.wait()
        weights = self.read()
        for target in self.zeros:
            target.zero_()
        before: _InFlight | None = None
        for bucket in self.buckets:
            names = [name for name in bucket.names if name in weights]
            shards = [local(weights[name]).contiguous() for name in names]
            started = self._start(bucket, shards) if self.world.world_size > 1 else None
            copies = []  # Need no wire.
            for name, shard in zip(names, shards, strict=True):
                for copy in bucket.local:
                    target = in_tensor(copy, self.targets[name][copy.part])
                    copies.append((target, in_buffer(copy, shard)))
            _copy_all(copies)
            del shards, copies  # Merged weights are copies: only one bucket's are there at a time.
            if started and not self.engine:
                self._sending.append(started)
                self.wait(MOST_IN_FLIGHT)
                continue
            if before:
                self._finish(before)
            before = started
        if before:
            self._finish(before)
        if self.check:
            compare_with_oracle(self)

    def wait(self, most: int = 0) -> None:
        """Wait until the engines have what this rank has sent, but for up to so many bytes."""
        num_bytes = sum(flight.send_buffer.nbytes for flight in self._sending)
        while self._sending and num_bytes >= most:
            flight = self._sending.pop(0)
            flight.work.wait()
            num_bytes -= flight.send_buffer.nbytes

    def full_gather(self) -> None:
        """Move the current weights the obvious way, by `record.full_gather`. Collective."""
        full_gather(self)

    def _start(self, bucket: Bucket, shards: list[Tensor]) -> _InFlight:
        """Pack a bucket, in the dtype of the wire, and begin its collective."""
        num_out, num_in = bucket.num_out, bucket.num_in
        send_buffer = torch.empty(sum(num_out), dtype=bucket.dtype, device=self.world.device)
        receive_buffer = send_buffer.new_empty(sum(num_in))
        copies = []
        for i, shard in enumerate(shards):
            for copy in bucket.pack:
                copies.append((in_buffer(copy, send_buffer, i), in_tensor(copy, shard)))
        _copy_all(copies)
        work = dist.all_to_all_single(
            receive_buffer,
            send_buffer,
            num_in,
            num_out,
            group=self.world.device_group,
            async_op=True,
        )
        return _InFlight(bucket, send_buffer, receive_buffer, work)

    def _finish(self, flight: _InFlight) -> None:
        """Unpack a bucket when it has arrived."""
        flight.work.wait()  # On CUDA the stream waits, not the host.
        copies = []
        for i, name in enumerate(flight.bucket.names):
            for copy in flight.bucket.unpack:
                target = in_tensor(copy, self.targets[name][copy.part])
                copies.append((target, in_buffer(copy, flight.receive_buffer, i)))
        _copy_all(copies)


def in_tensor(copy: Copy, t: Tensor) -> Tensor:
    """Return the block of a copy in the tensor, a shard or a part of the engine."""
    return t.as_strided(copy.size, copy.strides, int(t.storage_offset()) + copy.offset)


def in_buffer(copy: Copy, buffer: Tensor, weight: int = 0) -> Tensor:
    """Return the block of a copy in the buffer; `weight` is its number in the bucket."""
    slot = int(buffer.storage_offset()) + copy.slot + weight * copy.step
    return buffer.as_strided(copy.size, copy.slot_strides, slot)


def _copy_all(copies: list[tuple[Tensor, Tensor]]) -> None:
    """Copy the second tensor of each pair to the first; CUDA needs few kernels for it."""
    if copies:
        targets, sources = zip(*copies, strict=True)
        torch._foreach_copy_(targets, sources)
