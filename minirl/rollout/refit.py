"""Refit: the trainer's shards into the engine's parameters, in place.

1. Record, once: vLLM's own loader runs on meta tensors, and only its `copy_` calls are intercepted.
   Each copies from a view that says which region of which checkpoint weight lands in which part of
   which engine parameter, so that no table per architecture is needed.
2. Plan, once: intersect those regions with the shards of all ranks. A rank prefers its own shard,
   then that of the nearest replica.
3. Run, each step: bucket by bucket, cast to the engine's dtype before the wire, one collective,
   scatter.
"""

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from minirl.config.rl import RefitConfig
from minirl.parallel.fsdp import local, local_region
from minirl.parallel.mesh import all_gather_single
from minirl.parallel.regions import CheckpointSlice, Region, intersect, split_by_size, view_of
from minirl.rollout.engine import NamedTensors, RolloutEngine


@dataclass(frozen=True)
class _Piece:
    """A region of a weight that one rank's shard holds and one rank's engine wants."""

    name: str
    region: Region

    def numel(self) -> int:
        return math.prod(self.region.size)


@dataclass(frozen=True)
class _Arrival(_Piece):
    """A piece on the rank that wants it."""

    target: Tensor  # The part of the engine that it fills, with the dimensions of the weight.


AnyPiece = TypeVar("AnyPiece", bound=_Piece)
# A list of pieces for each weight and peer.
Pieces = dict[tuple[str, int], list[AnyPiece]]


class _Recorder(TorchDispatchMode):
    """Records every copy from a meta tensor instead of carrying it out."""

    def __init__(self, weights: dict[str, Tensor]):
        """`weights`: the meta tensors, by name."""
        super().__init__()
        self.weights = weights
        self.name_of = {t.untyped_storage()._cdata: name for name, t in weights.items()}
        self.arrivals: list[_Arrival] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is not torch.ops.aten.copy_.default or args[1].device.type != "meta":
            return func(*args, **(kwargs or {}))
        target = args[0]
        source = args[1]
        name = self.name_of.get(source.untyped_storage()._cdata)
        if name is None or source.shape != target.shape:
            raise NotImplementedError(
                "the engine's loader computes with a weight instead of slicing it, "
                "which a refit cannot plan"
            )
        self.arrivals.append(_to_arrival(name, self.weights[name], source, target.detach()))
        return target


def _to_arrival(name: str, weight: Tensor, view: Tensor, target: Tensor) -> _Arrival:
    """Read a strided view of a contiguous weight as a region of it.

    Args:
        name: of the weight.
        weight: any tensor of its shape.
        view: without the dimensions that the loader indexed away (one expert of many), in any
            order.
        target: what the view is copied to, of the same shape.
    """
    size = [1] * weight.ndim
    target_strides = [0] * weight.ndim
    # A dimension of size 1 fits whatever the stride is, so that these come last.
    free = sorted(range(weight.ndim), key=lambda d: weight.shape[d] == 1)
    for i, length in enumerate(view.shape):
        stride = view.stride(i)
        fitting = [d for d in free if weight.stride(d) == stride or length == weight.shape[d] == 1]
        if not fitting:
            raise NotImplementedError(
                f"{name}: the engine's loader takes a view that is not a region of the weight"
            )
        axis = fitting[0]
        free.remove(axis)
        size[axis] = length
        target_strides[axis] = target.stride(i)
    offset = np.unravel_index(int(view.storage_offset()), weight.shape)
    region = Region(tuple(map(int, offset)), tuple(size))
    return _Arrival(name, region, target.as_strided(size, target_strides))


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
        check: bool = False,
    ):
        """Record what the engine's loader does, and plan who sends what to whom.

        Args:
            cfg: transport and size of the buckets.
            shards: the trainer's weights by its names.
            slices: what each of them is in a checkpoint's files, which is what the engine's loader
                knows.
            engine: to fill; its mesh has all ranks.
            check: compare with a full gather after each call.

        Raises:
            RuntimeError: an element of the engine would stay unfilled.
            NotImplementedError: the loader does something that cannot be planned.
        """
        self.cfg = cfg
        self.shards = shards
        self.slices = slices
        self.engine = engine
        self.mesh = engine.mesh
        self.check = check
        self.bytes_received = 0  # By this rank in the last call.
        self.peak_bytes = 0  # Of the buffers of the last call.
        recorded = self._record()
        self._check_coverage(recorded)
        self.dtypes = self._wire_dtypes(recorded)
        self._buckets = self._split_into_buckets()
        # The region of each weight that each rank's shard is.
        self._regions = self.mesh.gather({name: local_region(p) for name, p in shards.items()})
        self._send: Pieces[_Piece] = defaultdict(list)
        self._receive: Pieces[_Arrival] = defaultdict(list)
        self._plan(recorded)

    # ----------------------------------------------------------------------------------------------
    # record

    def _record(self) -> list[_Arrival]:
        """Return each region that the engine's loader copies, with where it goes in this engine.

        The loader is offered the weights of the checkpoint's files, each a view of one of the
        trainer's: one expert's matrix is a region of the fused tensor.
        """
        weights = {name: torch.empty(p.shape, device="meta") for name, p in self.shards.items()}
        recorder = _Recorder(weights)
        with recorder:
            self.engine.load_weights(self._in_files(weights.items()))
        return recorder.arrivals

    def _in_files(self, weights: NamedTensors) -> NamedTensors:
        """Yield the weights of a checkpoint's files: names there, and views of whole weights."""
        for name, weight in weights:
            for part in self.slices[name]:
                yield part.name, part.of(weight)

    # ----------------------------------------------------------------------------------------------
    # plan

    def _check_coverage(self, recorded: list[_Arrival]) -> None:
        """Raise RuntimeError unless a refit writes every element of every engine parameter.

        One that it does not write would keep its random start. Rows that only make the vocabulary
        divisible are set to 0 here.
        """
        covered: Counter[int] = Counter()
        for arrival in recorded:
            covered[arrival.target.untyped_storage()._cdata] += arrival.numel()
        padding = self.engine.padding()
        for name, parameter in self.engine.parameters().items():
            filled = covered[parameter.untyped_storage()._cdata]
            num_padding = padding.get(name, 0)
            if filled != parameter.numel() - num_padding:
                raise RuntimeError(
                    f"refit would fill {filled} of the {parameter.numel()} elements of the "
                    f"engine's {name} ({num_padding} are padding)"
                )
            if num_padding:
                parameter[-num_padding // parameter.shape[1] :].zero_()

    def _wire_dtypes(self, recorded: list[_Arrival]) -> dict[str, torch.dtype]:
        """Return the dtype that each weight has in the engine, which is also that on the wire.

        By the trainer's names, in the same order on all ranks. A router's correction may be wider
        than the other weights.
        """
        wanted = {(arrival.name, arrival.target.dtype) for arrival in recorded}
        wanted = wanted.union(*self.mesh.gather(wanted))  # What any rank's engine wants.
        dtype_of = dict(wanted)
        if len(wanted) != len(dtype_of):
            raise NotImplementedError("the engine keeps parts of one weight in more than one dtype")
        return {name: dtype_of[name] for name in self.shards if name in dtype_of}

    def _split_into_buckets(self) -> list[list[str]]:
        """Return the weights in buckets of one dtype each and at most refit.bucket_mb."""
        buckets: list[list[str]] = []
        for dtype in dict.fromkeys(self.dtypes.values()):
            names = [name for name in self.dtypes if self.dtypes[name] == dtype]
            max_numel = self.cfg.bucket_mb * 2**20 / dtype.itemsize
            buckets += split_by_size(names, lambda name: self.shards[name].numel(), max_numel)
        return buckets

    def _plan(self, recorded: list[_Arrival]) -> None:
        """Note what this rank sends and receives, in an order that both ends derive alike."""
        rank = self.mesh.rank
        wanted = [_Piece(arrival.name, arrival.region) for arrival in recorded]
        for receiver, pieces in enumerate(self.mesh.gather(wanted)):
            for i, piece in enumerate(pieces):
                for held, sender in self._nearest_holders(piece.name, receiver).items():
                    region = intersect(piece.region, held)
                    if region and sender == rank:
                        self._send[piece.name, receiver].append(_Piece(piece.name, region))
                    if region and receiver == rank:
                        target = view_of(recorded[i].target, region, piece.region.offset)
                        arrival = _Arrival(piece.name, region, target)
                        self._receive[piece.name, sender].append(arrival)

    def _nearest_holders(self, name: str, receiver: int) -> dict[Region, int]:
        """Return the nearest rank that holds each region of a weight; the receiver is nearest."""
        world_size = self.mesh.world_size
        holders = {}
        for distance in reversed(range(world_size)):  # A nearer replica replaces one farther away.
            rank = (receiver + distance) % world_size
            holders[self._regions[rank][name]] = rank
        return holders

    # ----------------------------------------------------------------------------------------------
    # run

    @torch.no_grad()
    def __call__(self) -> None:
        """Move the current weights. Collective.

        Raises:
            RuntimeError: with `check`, if the engine differs from a full gather.
        """
        self.bytes_received = 0
        self.peak_bytes = 0
        exchange = self._all_to_all if self.cfg.transport == "all_to_all" else self._all_gather
        for bucket in self._buckets:
            for name in bucket:
                for arrival in self._receive[name, self.mesh.rank]:
                    arrival.target.copy_(self._view(arrival))  # What this rank has needs no wire.
            if self.mesh.world_size > 1:
                exchange(bucket)
        if self.check:
            self._compare_with_oracle()

    def _view(self, piece: _Piece) -> Tensor:
        """Return the view of a piece in this rank's shard."""
        held = self._regions[self.mesh.rank][piece.name]
        return view_of(local(self.shards[piece.name]), piece.region, held.offset)

    def _buffers(
        self, bucket: list[str], pieces: Iterable[_Piece], num_out: int, num_in: int
    ) -> tuple[Tensor, Tensor]:
        """Return a flat buffer that begins with pieces of a bucket, and one to receive others.

        num_out, num_in: their elements.
        """
        dtype = self.dtypes[bucket[0]]
        send_buffer = torch.empty(num_out, dtype=dtype, device=self.mesh.device)
        receive_buffer = send_buffer.new_empty(num_in)
        self.peak_bytes = max(self.peak_bytes, send_buffer.nbytes + receive_buffer.nbytes)
        for piece, slot in _slots(send_buffer, pieces):
            slot.copy_(self._view(piece))  # Casts to the dtype of the wire.
        return send_buffer, receive_buffer

    def _all_to_all(self, bucket: list[str]) -> None:
        """Send each rank just what its engine lacks."""
        outgoing = self._by_peer(self._send, bucket)
        incoming = self._by_peer(self._receive, bucket)
        num_out = [_numel(pieces) for pieces in outgoing]
        num_in = [_numel(pieces) for pieces in incoming]
        send_buffer, receive_buffer = self._buffers(
            bucket, itertools.chain(*outgoing), sum(num_out), sum(num_in)
        )
        dist.all_to_all_single(receive_buffer, send_buffer, num_in, num_out)
        for arrival, slot in _slots(receive_buffer, itertools.chain(*incoming)):
            arrival.target.copy_(slot)
        self.bytes_received += receive_buffer.nbytes

    def _by_peer(self, pieces: Pieces[AnyPiece], bucket: list[str]) -> list[list[AnyPiece]]:
        """Return the pieces of a bucket for each peer; none for this rank, which needs no wire."""
        by_peer: list[list[AnyPiece]] = [[] for _ in range(self.mesh.world_size)]
        for peer, part in enumerate(by_peer):
            if peer != self.mesh.rank:
                for name in bucket:
                    part += pieces[name, peer]
        return by_peer

    def _all_gather(self, bucket: list[str]) -> None:
        """Send every rank every shard; each takes what its engine wants."""
        held = []  # The shards of the bucket's weights, whole, for each rank.
        for regions in self._regions:
            held.append([_Piece(name, regions[name]) for name in bucket])
        longest = max(map(_numel, held))
        send_buffer, receive_buffer = self._buffers(
            bucket, held[self.mesh.rank], longest, longest * len(held)
        )
        all_gather_single(receive_buffer, send_buffer)
        for sender, row in enumerate(receive_buffer.split(longest)):
            if sender != self.mesh.rank:
                for shard, slot in _slots(row, held[sender]):
                    for arrival in self._receive[shard.name, sender]:
                        arrival.target.copy_(view_of(slot, arrival.region, shard.region.offset))
        self.bytes_received += receive_buffer.nbytes - send_buffer.nbytes

    def _compare_with_oracle(self) -> None:
        """Raise RuntimeError naming the engine parameters that differ from a full gather."""
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
        if wrong:
            raise RuntimeError(
                f"refit differs from the full gather in {len(wrong)} engine parameters: "
                f"{', '.join(wrong[:5])}"
            )

    def full_gather(self) -> None:
        """Refit the obvious way: gather each weight whole on every rank, for the engine's loader.

        It is the oracle of a refit. Collective.
        """
        self.engine.load_weights(self._in_files(self._whole_weights()))

    def _whole_weights(self) -> NamedTensors:
        """Yield the weights, gathered one at a time."""
        for name, dtype in self.dtypes.items():
            shard = self.shards[name]
            whole = shard.full_tensor() if isinstance(shard, DTensor) else shard
            yield name, whole.to(dtype)


def _numel(pieces: Iterable[_Piece]) -> int:
    return sum(piece.numel() for piece in pieces)


def _slots(buffer: Tensor, pieces: Iterable[AnyPiece]) -> Iterator[tuple[AnyPiece, Tensor]]:
    """Yield each piece with its place in a flat buffer, where one follows the other."""
    start = 0
    for piece in pieces:
        stop = start + piece.numel()
        yield piece, buffer[start:stop].view(piece.region.size)
        start = stop
