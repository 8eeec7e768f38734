"""How a refit's plan and its call grow with the number of ranks, in one process without a GPU.

A world is imagined from the view of one rank in its middle: FSDP over all ranks (or replicas of
it), engines of 8 ranks whose loader slices as vLLM's does. Record, plan and call are
minirl's own. What the other ranks would say is computed, collectives do nothing, and for the call
matrices are shrunk: as many copies, of hardly any bytes, so that what remains is the host's work.
"""

import gc
import re
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.growth_law import Bound, Part, Point, least_seconds
from minirl.config.rl import RefitConfig
from minirl.model import families
from minirl.parallel.mesh import Mesh
from minirl.parallel.regions import CheckpointSlice, Region
from minirl.refit.plan import Bucket, Grid, Planner
from minirl.refit.record import EnginePart, Recorder, Wanted, join, wanted_by_name
from minirl.refit.refit import Refit

MIB = 2**20
CALL_WIDTH = 64  # Hidden size of the shrunk model of a call.
ENGINE_RANKS = 8


class Shape(NamedTuple):
    """A mixture's sizes."""

    hidden: int
    expert: int  # Inner size of an expert.
    heads: int
    kv_heads: int
    num_experts: int
    vocabulary: int


MODELS = {
    "30B-A3B": Shape(2048, 768, 32, 4, 128, 151936),
    "235B-A22B": Shape(4096, 1536, 64, 4, 128, 151936),
}


@dataclass
class Row:
    """What was measured of one law."""

    name: str
    model: str
    world: int
    cpu_seconds: float
    num_bytes: int
    num_copies: int = 0


# --------------------------------------------------------------------------------------------------
# an imagined world


def make_shapes(
    model: str, num_layers: int, shrink: int = 1
) -> tuple[dict[str, torch.Size], dict[str, list[CheckpointSlice]]]:
    """Return the shapes of a model's weights, and what they are in a checkpoint's files.

    Args:
        model: one of MODELS.
        num_layers: of the model.
        shrink: divides the width of all matrices, not the number of experts.
    """
    hidden, expert, heads, kv_heads, num_experts, vocabulary = MODELS[model]
    config = AutoConfig.for_model(
        "qwen3_moe",
        hidden_size=hidden // shrink,
        moe_intermediate_size=expert // shrink,
        num_hidden_layers=num_layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=max(1, 128 // shrink),
        num_experts=num_experts,
        vocab_size=vocabulary // shrink,
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(config)
    shapes = {name: p.shape for name, p in whole.named_parameters()}
    slices = {
        name: families.checkpoint_slices(config, name, shape) for name, shape in shapes.items()
    }
    return shapes, slices


def fsdp_axis(shape: torch.Size, num_shards: int) -> int:
    """Return the dimension that FSDP shards, as parallel/sharding.py chooses it."""
    by_rows = len(shape) == 3 and shape[0] < num_shards and shape[1] % num_shards == 0
    return 1 if by_rows else 0


def fsdp_region(shape: torch.Size, num_shards: int, shard: int) -> Region:
    """Return the region of a weight that one of FSDP's shards is."""
    axis = fsdp_axis(shape, num_shards)
    rows = -(-shape[axis] // num_shards)
    offset = [0] * len(shape)
    size = list(shape)
    offset[axis] = min(shard * rows, shape[axis])
    size[axis] = min(rows, shape[axis] - offset[axis])
    return Region(tuple(offset), tuple(size))


class Engine:
    """One rank of a tensor-parallel engine: parameters, and a loader that slices as vLLM's does."""

    def __init__(
        self,
        shapes: dict[str, torch.Size],
        slices: dict[str, list[CheckpointSlice]],
        tp: int,
        tp_rank: int,
        *,
        device: str = "meta",
        mesh: Any = None,
    ):
        """Make the parameters.

        Args:
            shapes: of the trainer's weights.
            slices: what they are in files.
            tp: ranks of the engine.
            tp_rank: which of them this is.
            device: of the parameters.
            mesh: for a `Refit`.
        """
        self.mesh = mesh
        self.vision = None
        self.tp = tp
        self.tp_rank = tp_rank
        self.model_class = type(self).__name__
        self._parameters: dict[str, Tensor] = {}
        self._targets: dict[str, tuple[Tensor, int | None]] = {}
        for name, shape in shapes.items():
            kind = "" if len(shape) == 1 else name
            if ".experts.gate_up" in kind:
                cut = shape[1] // tp
                part = self._add(name, (shape[0], cut, shape[2]), device)
                for i, s in enumerate(slices[name]):
                    half = part[i // 2].chunk(2)[i % 2]
                    self._targets[s.name] = half, 0
            elif ".experts.down" in kind:
                part = self._add(name, (*shape[:2], shape[2] // tp), device)
                for i, s in enumerate(slices[name]):
                    self._targets[s.name] = part[i], 1
            elif re.search("(q|k|v)_proj|embed_tokens|lm_head", kind):
                begin, end = shape[0] * tp_rank // tp, shape[0] * (tp_rank + 1) // tp
                part = self._add(name, (max(1, end - begin), shape[1]), device)
                self._targets[slices[name][0].name] = part, 0
            elif "o_proj" in kind:
                part = self._add(name, (shape[0], shape[1] // tp), device)
                self._targets[slices[name][0].name] = part, 1
            else:
                part = self._add(name, tuple(shape), device)
                self._targets[slices[name][0].name] = part, None

    def _add(self, name: str, size: tuple[int, ...], device: str) -> Tensor:
        self._parameters[name] = torch.empty(size, dtype=torch.bfloat16, device=device)
        return self._parameters[name]

    def parameters(self) -> dict[str, Tensor]:
        return self._parameters

    def padding(self) -> dict[str, int]:
        return {}

    def load_weights(self, named: Any) -> None:
        """Copy this rank's part of each weight; heads of keys repeat if there are fewer."""
        for name, weight in named:
            target, axis = self._targets[name]
            if axis is not None:
                length = target.shape[axis]
                start = self.tp_rank * weight.shape[axis] // self.tp
                weight = weight.narrow(axis, start, length)
            target.copy_(weight)


def record(
    shapes: dict[str, torch.Size], slices: dict[str, list[CheckpointSlice]], engine: Engine
) -> list[EnginePart]:
    """Return what an engine's loader copies, as `Refit` does it."""
    weights = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    offered = list(in_files(weights, slices))
    recorder = Recorder(weights)
    with recorder:
        engine.load_weights(offered)
    return join(recorder.parts)


def in_files(
    weights: dict[str, Tensor], slices: dict[str, list[CheckpointSlice]]
) -> Iterator[tuple[str, Tensor]]:
    for name, weight in weights.items():
        for part in slices[name]:
            yield part.name, part.of(weight)


@cache
def wanted_of_engines(
    model: str, num_layers: int, tp: int, shrink: int = 1
) -> tuple[dict[str, list[Wanted]], ...]:
    """Return what each rank of an engine wants, whatever world it is in."""
    shapes, slices = make_shapes(model, num_layers, shrink)
    wanted = []
    for tp_rank in range(tp):
        parts = record(shapes, slices, Engine(shapes, slices, tp, tp_rank))
        wanted.append(wanted_by_name(parts))
    return tuple(wanted)


def count_copies(buckets: list[Bucket]) -> int:
    """Return how many copies a call makes: packed, unpacked and within the rank."""
    num_copies = 0
    for bucket in buckets:
        num = len(bucket.pack) + len(bucket.unpack) + len(bucket.local)
        num_copies += num * len(bucket.names)
    return num_copies


@dataclass(frozen=True, kw_only=True)
class ImaginedMesh(Mesh):
    """A mesh whose other ranks say what they would."""

    shapes: dict[str, torch.Size]
    num_shards: int
    wanted: list[dict[str, list[Wanted]]]  # By rank of an engine.

    def gather(self, value: Any) -> list:
        """Return regions of all ranks, or digests, of which only it counts whether they differ.

        There is a region for each layout, of which each shape has one.
        """
        tp = len(self.wanted)
        if isinstance(value, str):
            own = self.rank % tp
            return [value if r % tp == own else str(r % tp) for r in range(self.world_size)]
        of_shard = []
        for shard in range(self.num_shards):
            layouts = dict.fromkeys(self.shapes.values())
            of_shard.append([fsdp_region(shape, self.num_shards, shard) for shape in layouts])
        found = [of_shard[rank % self.num_shards] for rank in range(self.world_size)]
        assert found[self.rank] == value
        return found

    def broadcast(self, value: object, source: int) -> Any:
        """Return what the engines of a class want."""
        return self.wanted[source % len(self.wanted)]


# --------------------------------------------------------------------------------------------------
# the laws


def measure_plan(
    model: str, num_layers: int, world: int, replicas: int, tp: int, generators: int = 0
) -> list[Row]:
    """Return the cost of the record and of the plan, on the rank in the middle.

    With `generators`, the last so many ranks have the engines and the others the shards; the rank
    is the first that trains.
    """
    num_trainers = world - generators
    first_receiver = num_trainers if generators else 0
    own_rank = 0 if generators else world // 2
    shapes, slices = make_shapes(model, num_layers)
    own = Engine(shapes, slices, tp, own_rank % tp)
    parts = record(shapes, slices, own)
    cpu_seconds = least_seconds(lambda: record(shapes, slices, own))
    recorded = Row("record", model, world, cpu_seconds, 0, len(parts))
    wanted: list[dict[str, list[Wanted]]] = [*wanted_of_engines(model, num_layers, tp), {}]
    class_of = [tp] * first_receiver  # Without an engine.
    class_of += [rank % tp for rank in range(world - first_receiver)]

    def plan() -> int:
        """Plan as `Refit` does when it knows what others say; return the number of copies."""
        num_shards = num_trainers // replicas
        grids = {}
        for shape in dict.fromkeys(shapes.values()):
            regions = [fsdp_region(shape, num_shards, i) for i in range(num_shards)]
            grids[shape] = Grid(regions * replicas)
        planner = Planner(
            own_rank,
            {name: grids[shape] for name, shape in shapes.items()},
            wanted,
            class_of,
            RefitConfig().bucket_mb * MIB,
            first_receiver,
        )
        buckets = planner.plan()
        kept.append(buckets)
        return count_copies(buckets)

    kept: list[Any] = []
    num_copies = plan()
    cpu_seconds = least_seconds(plan)
    tracemalloc.start()
    kept.clear()
    plan()
    gc.collect()  # what waits for it is not the plan's
    num_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return [recorded, Row("plan", model, world, cpu_seconds, num_bytes, num_copies)]


def measure_call(model: str, num_layers: int, world: int, tp: int, shrink: int) -> Row:
    """Return the host's cost of a call, on the rank in the middle."""
    rank = world // 2
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        return _measure_call_of(rank, model, num_layers, world, tp, shrink)
    finally:  # Who comes later is not this rank.
        dist.destroy_process_group()


def _measure_call_of(
    rank: int, model: str, num_layers: int, world: int, tp: int, shrink: int
) -> Row:
    """Return the cost of a call of a rank, as which this process has joined."""
    axis = init_device_mesh("cpu", (world,), mesh_dim_names=("dp_shard_cp",))
    shapes, slices = make_shapes(model, num_layers, shrink)
    wanted = list(wanted_of_engines(model, num_layers, tp, shrink))
    mesh = ImaginedMesh(
        rank=rank,
        world_size=world,
        device=torch.device("cpu"),
        fsdp=axis,
        context=None,
        tensor=axis,
        device_group=dist.distributed_c10d._get_default_group(),
        host_group=dist.distributed_c10d._get_default_group(),
        store=dist.distributed_c10d._get_default_store(),
        shapes=shapes,
        num_shards=world,
        wanted=wanted,
    )
    shards: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        local = torch.zeros(fsdp_region(shape, world, rank).size)
        placement = Shard(fsdp_axis(shape, world))
        stride = torch.empty(shape, device="meta").stride()
        shards[name] = DTensor.from_local(
            local, axis, [placement], run_check=False, shape=shape, stride=stride
        )
    engine: Any = Engine(shapes, slices, tp, rank % tp, device="cpu", mesh=mesh)
    refit = Refit(RefitConfig(), shards, slices, engine)
    # A pretended group does not take what a rank without shards of a weight sends: nothing.
    done = SimpleNamespace(wait=lambda: None)
    with mock.patch.object(dist, "all_to_all_single", lambda *_, **__: done):
        refit()
        seconds = []
        for _ in range(5):
            start = time.process_time()
            refit()
            seconds.append(time.process_time() - start)
    num_copies = count_copies(refit.buckets)
    return Row("call", model, world, min(seconds), refit.bytes_received, num_copies)


def measure(num_layers: int, num_ranks: int) -> list[Point]:
    """Measure both models with so many layers, and the call of up to 64 ranks.

    A call of more ranks would have all their regions in this one process.
    """
    points = []
    for model in MODELS:
        rows = measure_plan(model, num_layers, num_ranks, 1, ENGINE_RANKS)
        if num_ranks <= 64:
            shrink = MODELS[model].hidden // CALL_WIDTH
            rows.append(measure_call(model, num_layers, num_ranks, ENGINE_RANKS, shrink))
        for row in rows:
            name = f"{row.name} of {model}"
            seconds = row.cpu_seconds
            points.append(
                Point(name, num_ranks, num_layers, seconds, row.num_bytes, row.num_copies)
            )
    return points


def bounds() -> dict[str, Bound]:
    """Return the bounds of each model's laws."""
    found = {}
    for model in MODELS:
        found[f"record of {model}"] = Bound(size=1, ranks=0)
        found[f"plan of {model}"] = Bound(size=1, ranks=1)
        found[f"call of {model}"] = Bound(size=1, ranks=0)
    return found


PART = Part(
    unit="layers (30B-A3B has 48, 235B-A22B 94)",
    sizes=[12, 48, 94],
    worlds=[8, 64, 1024],
    bounds=bounds(),
    measure=measure,
)
