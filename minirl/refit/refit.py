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
from minirl.parallel.fsdp import local
from minirl.parallel.regions import CheckpointSlice, Region, local_region
from minirl.refit.plan import Bucket, Grid, Planner, one_of_each_layout, wire_dtypes
from minirl.refit.record import EnginePart, Recorder, Wanted, join, wanted_by_name


class _InFlight(NamedTuple):
    """A bucket on the wire."""

    bucket: Bucket
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
        self.bytes_received = 0  # This rank's, in the last call.
        self.peak_bytes = 0  # Size of the buffers of the last call.
        parts, self.zeros = self._record()
        self._check_coverage(parts)
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
        self._check_nothing_lost(wanted)
        dtypes = wire_dtypes(wanted)
        # On the wire, by name, in the same order on all ranks.
        self.dtypes = {name: dtypes[name] for name in shards if name in dtypes}
        bucket_bytes = cfg.bucket_mb * 2**20
        grids = self._make_grids()
        planner = Planner(self.mesh.rank, grids, wanted, class_of, bucket_bytes)
        self.buckets = planner.plan()

    # ----------------------------------------------------------------------------------------------
    # record

    def _record(self) -> tuple[list[EnginePart], list[Tensor]]:
        """Return the parts of this engine that weights fill, and those that are 0.

        A part is 0 if another rank of the engine has the values. The loader gets the weights of the
        checkpoint's files, each a view of one of the trainer's: one expert's matrix is a region of
        the fused tensor.
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
        return join(recorder.parts), recorder.zeros

    def _in_files(self, weights: NamedTensors) -> NamedTensors:
        """Yield the weights of a checkpoint's files: names there, and views of whole weights."""
        for name, weight in weights:
            for part in self.slices[name]:
                yield part.name, part.of(weight)

    def _check_coverage(self, parts: list[EnginePart]) -> None:
        """Raise UserError unless a refit writes every element of every engine parameter.

        One that it does not write would keep its random start. Rows that only make the vocabulary
        divisible are set to 0 here.
        """
        covered: Counter[int] = Counter()
        for part in parts:
            covered[part.target.untyped_storage()._cdata] += part.numel()
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

    def _check_nothing_lost(self, wanted: list[dict[str, list[Wanted]]]) -> None:
        """Raise UserError, on all ranks, if elements of a weight go to no engine.

        The engine would sample from another model than the one that is trained: some of vLLM's
        loaders skip weights for which their model has no parameter. (A tied head is no weight of
        its own, and an engine that is sent no sound has no tower for it.) `wanted`: what the
        engines of each class want; the classes together are all ranks.
        """
        regions: dict[str, set[Region]] = defaultdict(set)
        for wanted_of_class in wanted:
            for name, parts in wanted_of_class.items():
                regions[name].update(part.region for part in parts)
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
        """Return the grid of each weight; weights that are sharded alike share one. Collective."""
        first_by_name = one_of_each_layout(self.shards)
        firsts = dict.fromkeys(first_by_name.values())
        by_rank = self.mesh.gather({name: local_region(self.shards[name]) for name in firsts})
        grids = {first: Grid([regions[first] for regions in by_rank]) for first in firsts}
        return {name: grids[first] for name, first in first_by_name.items()}

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
        for bucket in self.buckets:
            shards = [local(weights[name]).contiguous() for name in bucket.names]
            started = None
            if self.mesh.world_size > 1:
                started = self._start(bucket, shards)
                num_bytes = started.num_bytes + (before.num_bytes if before else 0)
                self.peak_bytes = max(self.peak_bytes, num_bytes)
            copies = []  # Need no wire.
            for name, shard in zip(bucket.names, shards, strict=True):
                for copy in bucket.local:
                    target = copy.in_tensor(self.targets[name][copy.part])
                    copies.append((target, copy.in_buffer(shard)))
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
                copies.append((copy.in_buffer(send_buffer, i), copy.in_tensor(shard)))
        _copy_all(copies)
        work = dist.all_to_all_single(receive_buffer, send_buffer, num_in, num_out, async_op=True)
        self.bytes_received += receive_buffer.nbytes
        return _InFlight(bucket, send_buffer, receive_buffer, work)

    def _finish(self, flight: _InFlight) -> None:
        """Unpack a bucket when it has arrived."""
        flight.work.wait()  # On CUDA the stream waits, not the host.
        copies = []
        for i, name in enumerate(flight.bucket.names):
            for copy in flight.bucket.unpack:
                target = copy.in_tensor(self.targets[name][copy.part])
                copies.append((target, copy.in_buffer(flight.receive_buffer, i)))
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
            f"policy's weights in {len(named)} parameters, {', '.join(named[:5])}: they would "
            "sample from another model than the one that is trained. This is a fault of the refit "
            f"for {self.engine.model_class}; please report it",
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

        self.engine.load_weights(self._in_files(whole_weights()))


def _copy_all(copies: list[tuple[Tensor, Tensor]]) -> None:
    """Copy the second tensor of each pair to the first; CUDA needs few kernels for it."""
    if copies:
        targets, sources = zip(*copies, strict=True)
        torch._foreach_copy_(targets, sources)
