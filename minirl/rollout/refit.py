"""Refit: the trainer's shards into the engine's parameters, in place.

Record once: vLLM's own loader runs on meta tensors and only `copy_` is intercepted. A view already
says which box of which checkpoint weight lands in which piece of which engine parameter, so no
table per architecture is needed. Plan once: intersect those boxes with the shards of all ranks;
prefer one's own shard, then the nearest replica. Run each step: bucket by bucket, cast to the
engine's dtype before the wire, one collective, scatter.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from minirl.config.rl import RefitConfig
from minirl.parallel.fsdp import local, local_region
from minirl.parallel.mesh import Mesh, all_gather_single
from minirl.parallel.regions import CheckpointSlice, Region, intersect, split_by_size, view_of
from minirl.rollout.engine import RolloutEngine


@dataclass(frozen=True)
class Copy:
    """The engine wants `box` of the trainer's weight `name`; dimension d of its target reads
    dimension axes[d] of the weight.
    """

    name: str
    box: Region
    axes: tuple[int, ...]


class _Recorder(TorchDispatchMode):
    """Notes every copy from a meta tensor and does not carry it out."""

    def __init__(self, name_of: dict[int, str]):
        super().__init__()
        self.name_of, self.copies = name_of, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204 - torch's signature
        if func is torch.ops.aten.copy_.default and args[1].device.type == "meta":
            target, source = args[0], args[1]
            name = self.name_of.get(source.untyped_storage()._cdata)
            if name is None or source.shape != target.shape:
                raise NotImplementedError(
                    "the engine's loader computes with a weight instead of slicing it, which a refit cannot plan"
                )
            self.copies.append(
                (
                    name,
                    source.storage_offset(),
                    tuple(source.shape),
                    source.stride(),
                    target.detach(),
                )
            )
            return target
        return func(*args, **(kwargs or {}))


def record(
    engine: RolloutEngine, shapes: dict[str, torch.Size], parts: dict[str, list[CheckpointSlice]]
) -> list[tuple[Copy, Tensor]]:
    """What the engine's loader does with whole weights: [(copy, view of the engine parameter it
    fills)].

    It is offered the files' weights, each a view of the trainer's: one expert's matrix is already a
    box of the fused tensor.
    """
    whole = {n: torch.empty(s, device="meta") for n, s in shapes.items()}
    recorder = _Recorder({t.untyped_storage()._cdata: n for n, t in whole.items()})
    probes = [(part.name, part.of(whole[n])) for n, of_one in parts.items() for part in of_one]
    with recorder:
        engine.load_weights(iter(probes))
    return [
        (_to_copy(name, shapes[name], *view), target) for name, *view, target in recorder.copies
    ]


def _to_copy(
    name: str, shape: torch.Size, offset: int, size: tuple[int, ...], stride: tuple[int, ...]
) -> Copy:
    """Read a strided view of a contiguous tensor as a box of it."""
    full = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    start = tuple(int(i) for i in torch.unravel_index(torch.tensor(offset), shape))
    box, axes = [1] * len(shape), []
    free = set(range(len(shape)))
    for n, s in zip(size, stride, strict=True):
        axis = next(
            (
                d
                for d in sorted(free, key=lambda d: shape[d] == 1)
                if full[d] == s or n == shape[d] == 1
            ),
            None,
        )
        if axis is None:
            raise NotImplementedError(
                f"{name}: the engine's loader takes a view that is not a box of the weight"
            )
        free.remove(axis)
        axes.append(axis)
        box[axis] = n
    return Copy(name, Region(start, tuple(box)), tuple(axes))


@dataclass(frozen=True)
class _Piece:
    """Part of a copy that one rank's shard holds."""

    copy: Copy
    target: Tensor | None  # on the rank that wants it
    box: Region

    def numel(self) -> int:
        return math.prod(self.box[1])

    def scatter(self, source: Tensor) -> None:
        """Write `source` (the values of the box, in the weight's axes) to where the engine wants
        them.
        """
        axes = self.copy.axes
        dropped = tuple(
            d for d in range(source.ndim) if d not in axes
        )  # indexed away by the loader: one expert of many
        part = self.target
        for d, axis in enumerate(axes):
            part = part.narrow(d, self.box[0][axis] - self.copy.box[0][axis], self.box[1][axis])
        part.copy_(source.permute(*axes, *dropped).reshape(part.shape))


class Refit:
    """Made once per policy and engine; each call moves the current weights. Building and calling
    are collective.
    """

    def __init__(
        self,
        cfg: RefitConfig,
        shards: dict[str, Tensor],
        parts: dict[str, list[CheckpointSlice]],
        engine: RolloutEngine,
        mesh: Mesh,
        *,
        check: bool = False,
    ):
        """`shards`: the trainer's weights by its names. `parts`: what each is in a checkpoint's
        files, which is what the engine's loader knows.
        """
        self.cfg, self.shards, self.parts, self.engine, self.mesh, self.check = (
            cfg,
            shards,
            parts,
            engine,
            mesh,
            check,
        )
        self.bytes_received, self.peak_bytes = 0, 0
        recorded = record(engine, {n: p.shape for n, p in shards.items()}, parts)
        self._check_coverage(recorded)
        wanted = set().union(*mesh.gather({(copy.name, target.dtype) for copy, target in recorded}))
        dtype_of = dict(wanted)
        # Of the engine's parameter, by the trainer's name: what goes over the wire. A router's
        # correction may be wider than the rest.
        self.dtypes = {n: dtype_of[n] for n in shards if n in dtype_of}  # in one order on all ranks
        if len(wanted) != len(self.dtypes):
            raise NotImplementedError("the engine keeps parts of one weight in more than one dtype")
        self.boxes = mesh.gather({n: local_region(p) for n, p in shards.items()})
        self._send, self._receive = self._plan(
            mesh.gather([copy for copy, _ in recorded]), [target for _, target in recorded]
        )
        self._buckets = [
            bucket
            for dtype in dict.fromkeys(self.dtypes.values())  # of one dtype each, up to a size
            for bucket in split_by_size(
                [n for n, own in self.dtypes.items() if own == dtype],
                lambda n, size=dtype.itemsize: shards[n].numel() * size,
                cfg.bucket_mb * 2**20,
            )
        ]

    def _check_coverage(self, recorded: list[tuple[Copy, Tensor]]) -> None:
        """Every element of every engine parameter must be written, or it would keep its random
        start. Raises RuntimeError.
        """
        covered: dict[int, int] = defaultdict(int)
        for _, target in recorded:
            covered[target.untyped_storage().data_ptr()] += target.numel()
        padding = self.engine.padding()
        for name, parameter in self.engine.parameters().items():
            filled = covered[parameter.untyped_storage().data_ptr()]
            if filled != parameter.numel() - padding.get(name, 0):
                raise RuntimeError(
                    f"refit would fill {filled} of the {parameter.numel()} elements of the engine's {name} "
                    f"({padding.get(name, 0)} are padding)"
                )
            if padding.get(name):
                parameter[-padding[name] // parameter.shape[1] :].zero_()

    def _plan(
        self, wants: list[list[Copy]], targets: list[Tensor]
    ) -> tuple[dict[tuple[str, int], list[_Piece]], ...]:
        """Pieces by weight name and peer, in an order that both ends derive alike."""
        send, receive = defaultdict(list), defaultdict(list)
        me, world = self.mesh.rank, self.mesh.world_size
        for to, copies in enumerate(wants):
            for i, copy in enumerate(copies):
                # Of the ranks that hold replicas of a box the nearest, which is noted last.
                holders = {
                    self.boxes[r][copy.name]: r
                    for r in sorted(range(world), key=lambda r: (r - to) % world, reverse=True)
                }
                for box, source in holders.items():
                    part = intersect(copy.box, box)
                    if part and source == me:
                        send[copy.name, to].append(_Piece(copy, None, part))
                    if part and to == me:
                        receive[copy.name, source].append(_Piece(copy, targets[i], part))
        return send, receive

    @torch.no_grad()
    def __call__(self) -> None:
        self.bytes_received, self.peak_bytes = 0, 0
        run = self._all_to_all if self.cfg.transport == "all_to_all" else self._all_gather
        for bucket in self._buckets:
            for name in bucket:  # what is here already needs no wire
                for piece in self._receive[name, self.mesh.rank]:
                    piece.scatter(self._own(name, piece.box))
            if self.mesh.world_size > 1:
                received, buffers = run(bucket)
                self.bytes_received += received
                self.peak_bytes = max(self.peak_bytes, buffers)
        if self.check:
            self._compare_with_oracle()

    def _own(self, name: str, box: Region) -> Tensor:
        return view_of(local(self.shards[name]), box, self.boxes[self.mesh.rank][name][0])

    def _all_to_all(self, bucket: list[str]) -> tuple[int, int]:
        """Each rank gets just what its engine lacks. Returns bytes: received, and of the
        buffers.
        """
        sending, receiving = (
            [
                [piece for name in bucket if peer != self.mesh.rank for piece in side[name, peer]]
                for peer in range(self.mesh.world_size)
            ]
            for side in (self._send, self._receive)
        )
        num_out, num_in = (
            [sum(map(_Piece.numel, pieces)) for pieces in side] for side in (sending, receiving)
        )
        out, into = (
            torch.empty(sum(num), dtype=self.dtypes[bucket[0]], device=self.mesh.device)
            for num in (num_out, num_in)
        )
        for piece, wire in _on(out, sending):
            wire.copy_(self._own(piece.copy.name, piece.box))  # casts to the wire's dtype
        dist.all_to_all_single(into, out, num_in, num_out)
        for piece, wire in _on(into, receiving):
            piece.scatter(wire)
        return into.nbytes, out.nbytes + into.nbytes

    def _all_gather(self, bucket: list[str]) -> tuple[int, int]:
        """Every rank gets every shard, and takes what its engine wants from them. Returns the
        same.
        """
        sizes = [[math.prod(boxes[name][1]) for name in bucket] for boxes in self.boxes]
        longest = max(map(sum, sizes))
        out = torch.zeros(longest, dtype=self.dtypes[bucket[0]], device=self.mesh.device)
        for name, wire in zip(
            bucket,
            out.split([*sizes[self.mesh.rank], longest - sum(sizes[self.mesh.rank])]),
            strict=False,
        ):
            wire.view(self.boxes[self.mesh.rank][name][1]).copy_(local(self.shards[name]))
        into = out.new_empty(longest * self.mesh.world_size)
        all_gather_single(into, out)
        for source, rows in enumerate(into.split(longest)):
            for name, wire in zip(
                bucket, rows.split([*sizes[source], longest - sum(sizes[source])]), strict=False
            ):
                corner, shape = self.boxes[source][name]
                for piece in self._receive[name, source] if source != self.mesh.rank else ():
                    piece.scatter(view_of(wire.view(shape), piece.box, corner))
        return into.nbytes - out.nbytes, into.nbytes + out.nbytes

    def _compare_with_oracle(self) -> None:
        """Raises RuntimeError naming the engine parameters that differ from a full gather."""
        engine, padding = self.engine.parameters(), self.engine.padding()
        mine = {n: p.clone() for n, p in engine.items()}
        for p in engine.values():
            p.fill_(torch.nan)
        full_gather(self.shards, self.parts, self.engine, self.dtypes)
        wrong = [
            n
            for n, p in engine.items()
            if not torch.equal(
                *(t.flatten()[: t.numel() - padding.get(n, 0)] for t in (p, mine[n]))
            )
        ]
        for n, p in engine.items():
            p.copy_(mine[n])
        if wrong:
            raise RuntimeError(
                f"refit differs from the full gather in {len(wrong)} engine parameters: {', '.join(wrong[:5])}"
            )


def _on(buffer: Tensor, pieces: list[list[_Piece]]) -> Iterator[tuple[_Piece, Tensor]]:
    """Pieces with their places in a buffer that holds those of all peers, one after the other."""
    flat = list(itertools.chain.from_iterable(pieces))
    return (
        (piece, part.view(piece.box[1]))
        for piece, part in zip(flat, buffer.split([piece.numel() for piece in flat]), strict=True)
    )


@torch.no_grad()
def full_gather(
    shards: dict[str, Tensor],
    parts: dict[str, list[CheckpointSlice]],
    engine: RolloutEngine,
    dtypes: dict[str, torch.dtype],
) -> None:
    """The obvious refit, kept as oracle: gather each weight whole on every rank and give it to the
    engine's own loader.
    """

    def whole() -> Iterator[tuple[str, Tensor]]:
        for name, dtype in dtypes.items():
            t = (
                shards[name].full_tensor() if isinstance(shards[name], DTensor) else shards[name]
            ).to(dtype)
            yield from ((part.name, part.of(t)) for part in parts[name])

    engine.load_weights(whole())
