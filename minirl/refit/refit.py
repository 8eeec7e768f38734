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
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from minirl.base.errors import UserError, require
from minirl.config.rl import RefitConfig
from minirl.engine.engine import NamedTensors, RolloutEngine
from minirl.parallel.fsdp import local, local_region
from minirl.parallel.mesh import all_gather_single
from minirl.parallel.regions import CheckpointSlice, Region
from minirl.refit.buckets import Wanted, wire_dtypes
from minirl.refit.copies import Place
from minirl.refit.plan import Bucket, Planner
from minirl.refit.record import Arrival, Recorder, join
from minirl.refit.shards import Grid, one_of_each_layout


class _Step(NamedTuple):
    """A bucket, with the parts of this rank's engine that its copies fill."""

    bucket: Bucket
    own_targets: list[Tensor]  # From this rank's shards.
    targets: list[Tensor]  # From the buffer.


class _InFlight(NamedTuple):
    """A bucket on the wire."""

    step: _Step
    send_buffer: Tensor
    receive_buffer: Tensor
    work: dist.Work

    @property
    def num_bytes(self) -> int:
        return self.send_buffer.nbytes + self.receive_buffer.nbytes


class Refit:
    """Moves the policy's weights into the engine, at each call the current ones.

    Made once per policy and engine. Building and calling are collective.
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
            cfg: transport and size of the buckets.
            shards: the trainer's weights by its names.
            slices: what each of them is in a checkpoint's files, which is what the engine's loader
                knows.
            engine: to fill; its mesh has all ranks.
            read: returns what to move, laid out as `shards`; a collective, called once a refit.
                None: `shards` themselves, as they are then.
            check: compare with a full gather after each call.

        Raises:
            UserError: the engine has no place for a weight, or a part that none would fill.
            NotImplementedError: the loader does something that cannot be planned.
        """
        self.cfg = cfg
        self.shards = shards
        self.slices = slices
        self.engine = engine
        self.mesh = engine.mesh
        self.read = read or (lambda: shards)
        self.check = check
        self.bytes_received = 0  # By this rank in the last call.
        self.peak_bytes = 0  # Of the buffers of the last call.
        self.arrivals, self.zeros = self._record()
        self._check_coverage()
        wanted, class_of = self._share_wanted()
        self._check_nothing_lost(wanted)
        grids = self._make_grids()
        # On the wire, by name, in the same order on all ranks.
        self.dtypes = wire_dtypes(grids, wanted)
        planner = Planner(
            self.mesh.rank,
            grids,
            wanted,
            class_of,
            cfg.bucket_mb * 2**20,
            whole_shards=cfg.transport == "all_gather",
        )
        buckets = planner.plan(
            {name: local(shard).stride() for name, shard in shards.items()},
            [arrival.target for arrival in self.arrivals],
        )
        self._steps = [self._prepare(bucket) for bucket in buckets]

    # ----------------------------------------------------------------------------------------------
    # record

    def _record(self) -> tuple[list[Arrival], list[Tensor]]:
        """Return each region that the engine's loader copies, with where it goes in this engine.

        And the parts of this engine that it fills with 0 instead, as another rank has the values.

        The loader is offered the weights of the checkpoint's files, each a view of one of the
        trainer's: one expert's matrix is a region of the fused tensor.
        """
        weights = {name: torch.empty(p.shape, device="meta") for name, p in self.shards.items()}
        in_files = list(self._in_files(weights.items()))
        recorder = Recorder(weights)
        try:
            with recorder:
                self.engine.load_weights(in_files)
        except (KeyError, ValueError) as error:  # what vLLM's loaders raise for an unknown name
            raise UserError(
                f"policy.model: the loader of the engine, {self.engine.model_class}, refuses the "
                f"trained weights: {error}; take a model that vLLM knows, or another version of it"
            ) from error
        return join(recorder.arrivals), recorder.zeros

    def _in_files(self, weights: NamedTensors) -> NamedTensors:
        """Yield the weights of a checkpoint's files: names there, and views of whole weights."""
        for name, weight in weights:
            for part in self.slices[name]:
                yield part.name, part.of(weight)

    def _check_coverage(self) -> None:
        """Raise UserError unless a refit writes every element of every engine parameter.

        One that it does not write would keep its random start. Rows that only make the vocabulary
        divisible are set to 0 here.
        """
        covered: Counter[int] = Counter()
        for arrival in self.arrivals:
            covered[arrival.target.untyped_storage()._cdata] += arrival.numel()
        for target in self.zeros:
            covered[target.untyped_storage()._cdata] += target.numel()
        padding = self.engine.padding()
        for name, parameter in self.engine.parameters().items():
            filled = covered[parameter.untyped_storage()._cdata]
            num_padding = padding.get(name, 0)
            require(
                filled == parameter.numel() - num_padding,
                f"policy.model: a refit would fill {filled} of the {parameter.numel()} elements of "
                f"the engine's {name} ({num_padding} are padding), and leave the others as they "
                f"are: {self.engine.model_class} has weights that the trained model has not; take "
                "another model or version of vLLM",
            )
            if num_padding:
                parameter[-num_padding // parameter.shape[1] :].zero_()

    # ----------------------------------------------------------------------------------------------
    # what the plan needs of other ranks

    def _share_wanted(self) -> tuple[list[list[Wanted]], list[int]]:
        """Return what the engines of each class want, and the class of each rank. Collective.

        Engines of one class, such as the first ranks of tensor-parallel engines, want the same: its
        first rank tells it to all others.
        """
        own = []
        for arrival in self.arrivals:
            own.append(Wanted(arrival.name, arrival.region, arrival.target.dtype))
        digests = self.mesh.gather(hashlib.sha256(repr(own).encode()).hexdigest())
        first_of = {digest: digests.index(digest) for digest in dict.fromkeys(digests)}
        if len(first_of) == 1:
            return [own], [0] * len(digests)
        wanted = [self.mesh.broadcast(own, first) for first in first_of.values()]
        class_of = {digest: i for i, digest in enumerate(first_of)}
        return wanted, [class_of[digest] for digest in digests]

    def _check_nothing_lost(self, wanted: list[list[Wanted]]) -> None:
        """Raise UserError, on all ranks, if elements of a weight go to no engine.

        The engine would sample from another model than the one that is trained: some of vLLM's
        loaders skip weights for which their model has no parameter. (A tied head is no weight of
        its own, and an engine that is sent no sound has no tower for it.) `wanted`: of the engines
        of each class, which together are all ranks.
        """
        regions: dict[str, set[Region]] = defaultdict(set)
        for of_class in wanted:
            for want in of_class:
                regions[want.name].add(want.region)
        left_out = self.engine.vision.left_out if self.engine.vision else ()
        lost = []
        for name, shard in self.shards.items():
            arriving = sum(math.prod(region.size) for region in regions[name])
            if arriving < shard.numel() and not name.startswith(left_out):
                lost.append(f"{name} ({shard.numel() - arriving} of {shard.numel()} elements)")
        require(
            not lost,
            f"policy.model: the engine, {self.engine.model_class}, has no place for "
            f"{len(lost)} trained weights, {', '.join(lost[:4])}{', ...' * (len(lost) > 4)}: it "
            "would sample from another model than the one that is trained; take a model without "
            "them (config.json decides, as by attention_bias), or a version of vLLM that has them",
        )

    def _make_grids(self) -> dict[str, Grid]:
        """Return the grid of each weight's shards; weights of one layout share one. Collective."""
        layout_of = one_of_each_layout(self.shards)
        firsts = dict.fromkeys(layout_of.values())
        regions = self.mesh.gather({name: local_region(self.shards[name]) for name in firsts})
        grids = {first: Grid([of_rank[first] for of_rank in regions]) for first in firsts}
        return {name: grids[first] for name, first in layout_of.items()}

    def _prepare(self, bucket: Bucket) -> _Step:
        parts = [self.arrivals[i].target for i in bucket.parts]
        own_targets = [_view(parts[own.part], own.size, own.target) for own in bucket.copies.own]
        targets = [_view(parts[c.tensor], c.size, c.place) for c in bucket.copies.unpack]
        return _Step(bucket, own_targets, targets)

    # ----------------------------------------------------------------------------------------------
    # run

    @torch.no_grad()
    def __call__(self) -> None:
        """Move the current weights. Collective.

        Raises:
            UserError: with `check`, if an engine differs from a full gather; on all ranks.
        """
        self.bytes_received = 0
        self.peak_bytes = 0
        before: _InFlight | None = None
        weights = self.read()
        for target in self.zeros:
            target.zero_()
        for step in self._steps:
            shards = [local(weights[name]) for name in step.bucket.shards]
            started = None
            if self.mesh.world_size > 1:
                started = self._start(step, shards)
                num_bytes = started.num_bytes + (before.num_bytes if before else 0)
                self.peak_bytes = max(self.peak_bytes, num_bytes)
            own = step.bucket.copies.own  # Needs no wire.
            _copy_all(step.own_targets, [_view(shards[o.shard], o.size, o.source) for o in own])
            del shards  # merged ones are copies, which need not be there beside the next bucket's
            if before:
                self._finish(before)
            before = started
        if before:
            self._finish(before)
        if self.check:
            self._compare_with_oracle()

    def _start(self, step: _Step, shards: list[Tensor]) -> _InFlight:
        """Pack a bucket, in the dtype of the wire, and begin its collective."""
        copies = step.bucket.copies
        send_buffer = torch.empty(
            sum(copies.num_out), dtype=step.bucket.dtype, device=self.mesh.device
        )
        receive_buffer = send_buffer.new_empty(sum(copies.num_in))
        _copy_all(
            [_view(send_buffer, copy.size, copy.slot) for copy in copies.pack],
            [_view(shards[copy.tensor], copy.size, copy.place) for copy in copies.pack],
        )
        if self.cfg.transport == "all_gather":
            work = all_gather_single(receive_buffer, send_buffer, async_op=True)
            self.bytes_received += receive_buffer.nbytes - send_buffer.nbytes
        else:
            work = dist.all_to_all_single(
                receive_buffer, send_buffer, copies.num_in, copies.num_out, async_op=True
            )
            self.bytes_received += receive_buffer.nbytes
        return _InFlight(step, send_buffer, receive_buffer, work)

    def _finish(self, flight: _InFlight) -> None:
        """Unpack a bucket when it has arrived."""
        flight.work.wait()  # On CUDA the stream waits, not the host.
        copies = flight.step.bucket.copies.unpack
        slots = [_view(flight.receive_buffer, copy.size, copy.slot) for copy in copies]
        _copy_all(flight.step.targets, slots)

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
        of_ranks = self.mesh.gather(wrong)
        bad_ranks = [rank for rank, names in enumerate(of_ranks) if names]
        named = sorted({name for names in of_ranks for name in names})
        require(
            not bad_ranks,
            f"debug.check_refit: the engines of ranks {bad_ranks} differ from a full gather of the "
            f"policy's weights in {len(named)} parameters, {', '.join(named[:5])}: they would "
            "sample from another model than the one that is trained. This is a fault of the refit "
            f"for {self.engine.model_class}; try refit.transport = all_gather",
        )

    def full_gather(self) -> None:
        """Refit the obvious way: gather each weight whole on every rank, for the engine's loader.

        It is the oracle of a refit. Collective.
        """
        self.engine.load_weights(self._in_files(self._whole_weights()))

    def _whole_weights(self) -> NamedTensors:
        """Yield the weights, gathered one at a time."""
        weights = self.read()
        for name, dtype in self.dtypes.items():
            shard = weights[name]
            whole = shard.full_tensor() if isinstance(shard, DTensor) else shard
            yield name, whole.to(dtype)


def _view(t: Tensor, size: tuple[int, ...], place: Place) -> Tensor:
    """Return the elements of a place, which is relative to the first element of a tensor."""
    return t.as_strided(size, place.strides, int(t.storage_offset()) + place.offset)


def _copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy tensors of equal shapes; CUDA does it in as few kernels as it can."""
    if targets:
        torch._foreach_copy_(targets, sources)
