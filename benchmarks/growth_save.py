"""How the cost of a checkpoint's plan and of an export grows with layers and ranks.

    python benchmarks/growth_save.py
    python benchmarks/growth_save.py --layers 48 --worlds 256

One process, no weights: plans are stubs of those that ranks send, and the exported model is on the
meta device. The model is a mixture like Qwen3-30B-A3B, which has 48 layers; a checkpoint has its
weights, two moments of each and the count of steps.

Prints seconds of CPU, and for the checkpoint the bytes that rank 0 receives of all ranks (and those
that it keeps for the next save), for the export those that a rank receives at most.
"""

import gc
import math
import pickle
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
import tyro
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
from minirl.checkpoint.folder import plan_folder

Result = TypeVar("Result")
STATES = ("weight", "exp_avg", "exp_avg_sq")
WEIGHTS_OF_A_LAYER = 11
ROWS = 4  # Of a rank's part of a weight.


@dataclass
class Load:
    """What to measure."""

    layers: list[int] = field(default_factory=lambda: [6, 12])
    worlds: list[int] = field(default_factory=lambda: [8, 64])  # Numbers of ranks.


class Law(NamedTuple):
    """A measured point of a law."""

    name: str
    world: int  # Ranks.
    size: int  # Layers.
    cpu_seconds: float
    num_bytes: int


def measure(work: Callable[[], Result]) -> tuple[float, Result]:
    """Return its seconds of CPU and its result."""
    began = time.process_time()
    result = work()
    return time.process_time() - began, result


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


def planned(plans: list[bytes], *, caching: bool = True) -> tuple[list[SavePlan], Metadata]:
    """Return what rank 0 makes of the plans that it received."""
    planner = DefaultSavePlanner(enable_plan_caching=caching)
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


def checkpoint_laws(layers: int, world: int) -> Iterator[Law]:
    """Measure rank 0: planning without caching, at first, later, and the end of a save."""
    plans = [pickle.dumps(plan_of_rank(rank, world, layers)) for rank in range(world)]
    unchanged = [pickle.dumps(SavePlan([], usable=False))] * world
    forget_plans()
    for name, received, caching in (
        ("checkpoint plan, every save without caching", plans, False),
        ("checkpoint plan, first save", plans, True),
        ("checkpoint plan, later saves", unchanged, True),
    ):
        seconds, (_, metadata) = measure(partial(planned, received, caching=caching))
        yield Law(name, world, layers, seconds, sum(map(len, received)))
    forget_plans()
    yield Law("checkpoint plan, kept by rank 0", world, layers, 0.0, kept_bytes(plans))

    # What ranks say of the parts that they wrote, and the file that says where all of it is.
    results = []
    for rank in range(world):
        items = plan_of_rank(rank, world, layers).items
        where = _StorageInfo(f"__{rank}_0.distcp", 0, 1024)
        written = [WriteResult(item.index, 1024, where) for item in items]
        results.append(pickle.dumps(written))
    with tempfile.TemporaryDirectory() as folder:
        writer = FileSystemWriter(folder)
        seconds, _ = measure(
            lambda: writer.finish(metadata, [pickle.loads(part) for part in results])
        )
    num_bytes = sum(map(len, results))
    yield Law("checkpoint, what was written where", world, layers, seconds, num_bytes)


def export_laws(layers: int, worlds: list[int]) -> Iterator[Law]:
    """Measure the plan of an export in bfloat16, and the bytes that a rank receives at most."""
    config = fits.mixture(2048, 768, layers, 32)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shapes = {name: p.shape for name, p in model.named_parameters()}
    num_elements = sum(map(math.prod, shapes.values()))
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        for world in worlds:
            yield Law("export, all gathered to all", world, layers, 0.0, 4 * num_elements)
            seconds, plan = measure(
                partial(plan_folder, Path(folder), shapes, torch.bfloat16, world)
            )
            received = [0] * world
            for file, rank in plan.writers.items():
                received[rank] += 2 * sum(math.prod(shapes[name]) for name in plan.files[file])
            yield Law("export, gathered to writers", world, layers, seconds, max(received))


def laws(sizes: list[int], worlds: list[int]) -> list[Law]:
    """Return the laws at these numbers of layers and ranks, those of one law side by side."""
    found: list[Law] = []
    for size in sizes:
        for world in worlds:
            found += checkpoint_laws(size, world)
        found += export_laws(size, worlds)
    names = [law.name for law in found]
    return sorted(found, key=lambda law: (names.index(law.name), law.size, law.world))


def main(load: Load) -> None:
    """Print a line for each law, number of layers and number of ranks."""
    for law in laws(load.layers, load.worlds):
        print(
            f"{law.name:44} {law.size:>3} layers {law.world:>5} ranks "
            f"{law.cpu_seconds:8.3f} CPU-s {law.num_bytes / 1e6:10.2f} MB"
        )


if __name__ == "__main__":
    main(tyro.cli(Load))
