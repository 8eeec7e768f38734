"""How the cost of a checkpoint's plan and of an export grows with layers and ranks.

A part of `benchmarks/growth.py`. There are no weights: plans are stubs of those that ranks send,
and the exported model is on the meta device. The model is a mixture like Qwen3-30B-A3B; a
checkpoint has its weights, two moments of each and the count of steps.

Bytes of a checkpoint are those that rank 0 receives of all ranks or keeps, those of an export what
a rank receives at most.
"""

import gc
import math
import pickle
import tempfile
import tracemalloc
from functools import partial
from pathlib import Path

import torch
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from transformers import AutoModelForCausalLM

from benchmarks import fits
from benchmarks.growth_law import Bound, Part, Point, least_seconds
from minirl.checkpoint.exporting import plan_folder

STATES = ("weight", "exp_avg", "exp_avg_sq")
WEIGHTS_OF_A_LAYER = 11
ROWS = 4  # Of a rank's part of a weight.
FIRST = "checkpoint plan, first save"
LATER = "checkpoint plan, later saves"
KEPT = "checkpoint plan, kept by rank 0"
WRITTEN = "checkpoint, what was written where"
EXPORT = "export"


def write_item(name: str, offset: list[int], part: list[int], whole: list[int]) -> WriteItem:
    """Return a part of a tensor that a rank would save."""
    chunk = ChunkStorageMetadata(offsets=torch.Size(offset), sizes=torch.Size(part))
    properties = TensorProperties(dtype=torch.float32)
    return WriteItem(
        index=MetadataIndex(name, torch.Size(offset)),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=torch.Size(whole)),
    )


def plan_of_rank(rank: int, world: int, layers: int) -> SavePlan:
    """Return what a rank would save: its part of every weight and moment, and whole counts."""
    items = []
    for n in range(layers * WEIGHTS_OF_A_LAYER):
        for state in STATES:
            name = f"model.layers.{n}.{state}"
            items.append(write_item(name, [rank * ROWS, 0], [ROWS, 64], [world * ROWS, 64]))
        items.append(write_item(f"model.layers.{n}.step", [], [], []))
    return SavePlan(items, planner_data={})


def forget_plans() -> None:
    """Make torch as if nothing had been saved yet."""
    for cache in (
        SavePlanner._cached_all_plans,
        SavePlanner._cached_global_plan,
        SavePlanner._cached_metadata,
    ):
        cache.clear()


def planned(plans: list[bytes]) -> tuple[list[SavePlan], Metadata]:
    """Return what rank 0 makes of the plans that it received."""
    planner = DefaultSavePlanner(enable_plan_caching=True)
    planner.set_up_planner({}, is_coordinator=True)
    return planner.create_global_plan([pickle.loads(plan) for plan in plans])


def kept_bytes(plans: list[bytes]) -> int:
    """Return the bytes that rank 0 keeps from one save to the next, by caching."""
    tracemalloc.start()
    planned(plans)
    gc.collect()
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    forget_plans()
    return kept


def checkpoint_points(layers: int, world: int) -> list[Point]:
    """Measure rank 0: planning at first and later, and the end of a save."""
    points = []
    plans = [pickle.dumps(plan_of_rank(rank, world, layers)) for rank in range(world)]
    unchanged = [pickle.dumps(SavePlan([], usable=False))] * world

    def plan_anew() -> None:
        forget_plans()
        planned(plans)

    for name, received, plan in (
        (FIRST, plans, plan_anew),
        (LATER, unchanged, partial(planned, unchanged)),
    ):
        seconds = least_seconds(plan)
        points.append(Point(name, world, layers, seconds, sum(map(len, received))))
    _, metadata = planned(unchanged)
    forget_plans()
    points.append(Point(KEPT, world, layers, 0.0, kept_bytes(plans)))

    # What ranks say of the parts that they wrote, and the file that says where all of it is.
    results = []
    for rank in range(world):
        items = plan_of_rank(rank, world, layers).items
        where = _StorageInfo(f"__{rank}_0.distcp", 0, 1024)
        written = [WriteResult(item.index, 1024, where) for item in items]
        results.append(pickle.dumps(written))
    with tempfile.TemporaryDirectory() as folder:
        writer = FileSystemWriter(folder)
        seconds = least_seconds(
            lambda: writer.finish(metadata, [pickle.loads(part) for part in results])
        )
    points.append(Point(WRITTEN, world, layers, seconds, sum(map(len, results))))
    return points


def export_point(layers: int, world: int) -> Point:
    """Measure the plan of an export in bfloat16, and the bytes that a rank receives at most."""
    config = fits.mixture(2048, 768, layers, 32)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shapes = {name: p.shape for name, p in model.named_parameters()}
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        make_plan = partial(plan_folder, Path(folder), shapes, torch.bfloat16, world)
        plan = make_plan()
        seconds = least_seconds(make_plan)
    received = [0] * world
    for file, rank in plan.writers.items():
        received[rank] += 2 * sum(math.prod(shapes[name]) for name in plan.files[file])
    return Point(EXPORT, world, layers, seconds, max(received))


def measure(layers: int, world: int) -> list[Point]:
    """Measure the saves of a model with so many layers."""
    return [*checkpoint_points(layers, world), export_point(layers, world)]


PART = Part(
    unit="layers (30B-A3B has 48)",
    sizes=[1, 2, 4],
    worlds=[8, 64, 1024],
    bounds={
        # Rank 0 plans for all: torch's own way, of so many objects that Python's garbage collector
        # takes more than its share. Only the first save pays for the plan.
        FIRST: Bound(size=1.5, ranks=1.5),
        LATER: Bound(size=0, ranks=1),
        KEPT: Bound(size=1, ranks=1),
        WRITTEN: Bound(size=1.5, ranks=1.5),
        EXPORT: Bound(size=1, ranks=0),
    },
    measure=measure,
)
