"""The two transports of a refit and the full gather: seconds, bytes on the wire, extra memory. The
reason for the default.

    torchrun --nproc-per-node 2 benchmarks/refit.py --policy.scratch.hidden-size 768
    --policy.scratch.num-layers 8 \
        --policy.scratch.num-heads 24 --policy.scratch.num-kv-heads 8 --engine.tensor-parallel-size
        2

Model and engine by the flags of minirl.rl. Medians of 10 refits; bytes are what one rank receives.
"""

import statistics
import tempfile
import time
from pathlib import Path

from minirl import cli
from minirl.config.rl import RLConfig
from minirl.model import build, scratch
from minirl.parallel.mesh import Mesh
from minirl.policy import Policy
from minirl.rollout.engine import RolloutEngine
from minirl.rollout.refit import Refit, full_gather


def timed(function, mesh: Mesh, repeats: int = 10) -> tuple[float, float]:
    """Median wall and CPU milliseconds."""
    wall, cpu = [], []
    for _ in range(repeats + 1):
        mesh.barrier()
        start = time.perf_counter(), time.process_time()
        function()
        mesh.barrier()
        wall.append(1e3 * (time.perf_counter() - start[0]))
        cpu.append(1e3 * (time.process_time() - start[1]))
    return statistics.median(wall[1:]), statistics.median(cpu[1:])


def main(cfg: RLConfig, mesh: Mesh) -> None:
    folder = Path(mesh.gather(tempfile.mkdtemp() if mesh.rank == 0 else "")[0])
    if cfg.policy.model != "scratch":
        folder = build.find_folder(cfg.policy.model, "policy.model")
    elif mesh.rank == 0:
        scratch.make_model(cfg.policy.scratch, folder, max_len=256, seed=0)
    mesh.barrier()
    cfg.engine.max_model_len = cfg.engine.max_model_len or 256
    policy = Policy(cfg.policy, folder, mesh)
    engine = RolloutEngine(cfg.engine, folder, mesh, dtype=cfg.policy.dtype)
    rows = []
    for transport in ("all_to_all", "all_gather"):
        cfg.refit.transport = transport
        refit = Refit(cfg.refit, policy.shards(), policy.parts(), engine, mesh)
        wall, cpu = timed(refit, mesh)
        rows.append((transport, wall, cpu, refit.bytes_received / 2**20, refit.peak_bytes / 2**20))
    wall, cpu = timed(
        lambda: full_gather(policy.shards(), policy.parts(), engine, refit.dtypes), mesh
    )
    itemsize, world = refit.dtype.itemsize, mesh.world_size
    sizes = [p.numel() for p in policy.shards().values()]
    rows.append(
        (
            "full gather",
            wall,
            cpu,
            sum(sizes) * 4 * (world - 1) / world / 2**20,
            max(sizes) * (4 + itemsize) / 2**20,
        )
    )
    if mesh.rank == 0:
        print(
            f"\n{sum(sizes) / 1e6:.1f}M parameters, {world} ranks, engine TP {cfg.engine.tensor_parallel_size}, wire {refit.dtype}"
        )
        print(f"{'':12} {'ms':>9} {'CPU-ms':>9} {'MiB received':>13} {'MiB extra':>10}")
        for name, *values in rows:
            print(
                f"{name:12} {values[0]:9.1f} {values[1]:9.1f} {values[2]:13.1f} {values[3]:10.1f}"
            )
    engine.close()


if __name__ == "__main__":
    cli.run(RLConfig, main)
