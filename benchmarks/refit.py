r"""A refit and the obvious way, a full gather.

    torchrun --nproc-per-node 2 benchmarks/refit.py --policy.model scratch \
        --policy.scratch.hidden-size 768 \
        --policy.scratch.num-layers 8 --policy.scratch.num-heads 24 \
        --policy.scratch.num-kv-heads 8

Model and engine by the flags of minirl.rl. Prints for each the wall and CPU milliseconds of a refit
(medians of 10), the MiB that a rank receives and the memory that it takes beside the weights.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from minirl.config.rl import RefitConfig
from minirl.config.shared import EngineConfig, TrainingConfig
from minirl.engine.engine import RolloutEngine
from minirl.model import build, scratch
from minirl.parallel.mesh import Mesh
from minirl.refit.record import full_gather
from minirl.refit.refit import Refit
from minirl.supervise import cli
from minirl.train.policy import Policy

REPEATS = 10
MASTER_BYTES = 4  # of a weight in the trainer, float32
MIB = 2**20


@dataclass(kw_only=True)
class Load(TrainingConfig):
    """Time refits: `torchrun --nproc-per-node N -m benchmarks.refit --policy.model M`."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    refit: RefitConfig = field(default_factory=RefitConfig)


def timed(function: Callable[[], None], mesh: Mesh) -> tuple[float, float]:
    """Return the median wall and CPU milliseconds of a call; the first does not count."""
    wall, cpu = [], []
    for _ in range(REPEATS + 1):
        mesh.barrier()
        wall_start = time.perf_counter()
        cpu_start = time.process_time()
        function()
        mesh.barrier()
        wall.append(1e3 * (time.perf_counter() - wall_start))
        cpu.append(1e3 * (time.process_time() - cpu_start))
    return statistics.median(wall[1:]), statistics.median(cpu[1:])


def measure(cfg: Load, mesh: Mesh, folder: Path) -> None:
    """Build policy and engine, refit in both ways and print the table."""
    policy = Policy(cfg.policy, folder, mesh)
    engine = RolloutEngine(cfg.engine, folder, mesh, dtype=cfg.policy.dtype)
    shards, parts = policy.shards(), policy.parts()
    refit = Refit(cfg.refit, shards, parts, engine)
    times = timed(refit, mesh)
    rows = [("refit", *times, refit.bytes_received / MIB, refit.peak_bytes / MIB)]

    times = timed(lambda: full_gather(refit), mesh)
    num_elements = sum(p.numel() for p in shards.values())
    received = num_elements * MASTER_BYTES * (mesh.world_size - 1) / mesh.world_size
    # One weight at a time is whole, as the trainer has it and as the engine wants it.
    whole = [p.numel() * (MASTER_BYTES + refit.dtypes[n].itemsize) for n, p in shards.items()]
    rows.append(("full gather", *times, received / MIB, max(whole) / MIB))

    if mesh.rank == 0:
        wire = ", ".join(sorted({str(dtype) for dtype in refit.dtypes.values()}))
        ranks = f"{mesh.world_size} ranks, engine TP {cfg.engine.tensor_parallel_size}"
        print(f"\n{num_elements / 1e6:.1f}M parameters, {ranks}, wire {wire}")
        print(f"{'':12} {'ms':>9} {'CPU-ms':>9} {'MiB received':>13} {'MiB extra':>10}")
        for name, wall, cpu, received, extra in rows:
            print(f"{name:12} {wall:9.1f} {cpu:9.1f} {received:13.1f} {extra:10.1f}")
    engine.close()


def main(cfg: Load, mesh: Mesh) -> None:
    cfg.engine.max_model_len = cfg.engine.max_model_len or 256
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(mesh.gather(temporary)[0])
        if cfg.policy.model != "scratch":
            folder = build.find_folder(cfg.policy.model, "policy.model")
        elif mesh.rank == 0:
            scratch.make_model(cfg.policy.scratch, folder, max_len=256, seed=0)
        mesh.barrier()
        measure(cfg, mesh, folder)


if __name__ == "__main__":
    cli.run(Load, main)
