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
from torch.distributed.tensor import DTensor

from minirl.base.errors import require
from minirl.config.rl import RefitConfig
from minirl.engine.engine import NamedTensors, RolloutEngine
from minirl.parallel.fsdp import local
from minirl.parallel.regions import CheckpointSlice
from minirl.refit.plan import Bucket, Copy, Planner, check_nothing_lost, make_grids
from minirl.refit.record import in_files, record_loader, wanted_by_name


class _InFlight(NamedTuple):
    """A bucket on the wire."""

    bucket: Bucket
    send_buffer: Tensor  # Held until it has been sent.
    receive_buffer: Tensor
    work: dist.Work


class Refit:
    """Moves the policy's weights into the engine, at each call the current ones.

    Made once per policy and engine. Building and calling are collective.

    Attributes:
        bytes_received: what this rank receives in a call.
        peak_bytes: size of the buffers that are there at once, at most.
    """

    def __init__(
        self,
        cfg: RefitConfig,
        shards: dict[str, Tensor],
        slices: dict[str, list[CheckpointSlice]],
        engine: RolloutEngine,
        *,
        read: Callable[[], Mapping[str, Tensor]] | None = None,
        check: bool = False,
    ):
        """Record what the engine's loader does, and plan who sends what to whom.

        Args:
            cfg: size of the buckets.
            shards: the trainer's weights by its names.
            slices: what each of them is in a checkpoint's files, which is what the engine's loader
                knows.
            engine: the engine to fill; its mesh has all ranks.
            read: returns what to move, laid out as `shards`; a collective, called once a refit.
                None: `shards` themselves, as they are then.
            check: compare with a full gather after each call.

        Raises:
            UserError: the engine has no place for a weight, or a part that none would fill.
            NotImplementedError: the loader does something that cannot be planned.
        """
        self.shards = shards
        self.slices = slices
        self.engine = engine
        self.mesh = engine.mesh
        self.read = read or (lambda: shards)
        self.check = check
        parts, self.zeros = record_loader(engine, shards, slices)
        self.targets: dict[str, list[Tensor]] = defaultdict(list)  # What each weight fills.
        for part in parts:
            self.targets[part.name].append(part.target)
        # Engines of one class, such as the first ranks of tensor-parallel engines, want the same:
        # its first rank sends it to all others.
        wanted = [wanted_by_name(parts)]
        digests = self.mesh.gather(hashlib.sha256(repr(wanted).encode()).hexdigest())
        classes = list(dict.fromkeys(digests))
        class_of = [classes.index(digest) for digest in digests]
        if len(classes) > 1:
            firsts = [digests.index(digest) for digest in classes]
            wanted = [self.mesh.broadcast(wanted[0], rank) for rank in firsts]
        check_nothing_lost(shards, wanted, engine)
        grids = make_grids(shards, self.mesh)
        planner = Planner(self.mesh.rank, grids, wanted, class_of, cfg.bucket_mb * 2**20)
        # On the wire, by name, in the same order on all ranks.
        self.dtypes = {name: kind.dtype for kind in planner.kinds for name in kind.names}
        self.buckets = planner.plan()
        received = [sum(bucket.num_in) * bucket.dtype.itemsize for bucket in self.buckets]
        sent = [sum(bucket.num_out) * bucket.dtype.itemsize for bucket in self.buckets]
        buffers = [0, *map(sum, zip(received, sent, strict=True))]
        self.bytes_received = sum(received)
        self.peak_bytes = max(map(sum, itertools.pairwise(buffers)), default=0)

    @torch.no_grad()
    def __call__(self) -> None:
        """Move the current weights. Collective.

        Raises:
            UserError: with `check`, if an engine differs from a full gather; on all ranks.
        """
        weights = self.read()
        for target in self.zeros:
            target.zero_()
        before: _InFlight | None = None
        for bucket in self.buckets:
            shards = [local(weights[name]).contiguous() for name in bucket.names]
            started = self._start(bucket, shards) if self.mesh.world_size > 1 else None
            copies = []  # Need no wire.
            for name, shard in zip(bucket.names, shards, strict=True):
                for copy in bucket.local:
                    target = in_tensor(copy, self.targets[name][copy.part])
                    copies.append((target, in_buffer(copy, shard)))
            _copy_all(copies)
            del shards, copies  # Merged weights are copies: only one bucket's are there at a time.
            if before:
                self._finish(before)
            before = started
        if before:
            self._finish(before)
        if self.check:
            self._compare_with_oracle()

    def _start(self, bucket: Bucket, shards: list[Tensor]) -> _InFlight:
        """Pack a bucket, in the dtype of the wire, and begin its collective."""
        num_out, num_in = bucket.num_out, bucket.num_in
        send_buffer = torch.empty(sum(num_out), dtype=bucket.dtype, device=self.mesh.device)
        receive_buffer = send_buffer.new_empty(sum(num_in))
        copies = []
        for i, shard in enumerate(shards):
            for copy in bucket.pack:
                copies.append((in_buffer(copy, send_buffer, i), in_tensor(copy, shard)))
        _copy_all(copies)
        work = dist.all_to_all_single(receive_buffer, send_buffer, num_in, num_out, async_op=True)
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

    # ----------------------------------------------------------------------------------------------
    # the obvious way, as an oracle

    def _compare_with_oracle(self) -> None:
        """Raise UserError, on all ranks, if engine parameters differ from a full gather."""
        engine = self.engine.parameters()
        padding = self.engine.padding()
        refitted = {name: p.clone() for name, p in engine.items()}
        for p in engine.values():
            p.fill_(torch.nan)
        self.full_gather()
        wrong = []
        for name, p in engine.items():
            filled = p.numel() - padding.get(name, 0)
            if not torch.equal(p.flatten()[:filled], refitted[name].flatten()[:filled]):
                wrong.append(name)
            p.copy_(refitted[name])
        by_rank = self.mesh.gather(wrong)
        bad_ranks = [rank for rank, names in enumerate(by_rank) if names]
        named = sorted(set(itertools.chain(*by_rank)))
        require(
            not bad_ranks,
            f"debug.check_refit: the engines of ranks {bad_ranks} differ from a full gather of the "
            f"policy's weights in {len(named)} parameters, {', '.join(named[:5])}. This is a fault "
            f"of the refit for {self.engine.model_class}; please report it",
        )

    def full_gather(self) -> None:
        """Refit the obvious way: gather each weight whole on every rank, for the engine's loader.

        It is the oracle of a refit. Collective.
        """
        weights = self.read()

        def whole_weights() -> NamedTensors:
            for name, dtype in self.dtypes.items():
                shard = weights[name]
                whole = shard.full_tensor() if isinstance(shard, DTensor) else shard
                yield name, whole.to(dtype)

        self.engine.load_weights(in_files(self.slices, whole_weights()))


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
