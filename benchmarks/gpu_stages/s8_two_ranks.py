"""Two ranks on one device train as one rank does: FSDP2, HSDP, tensor, context, experts, Muon.

Collectives go by gloo, because NCCL refuses to have two ranks on one GPU. The program starts
itself, with --side, as one rank and as two.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import tyro

from benchmarks.dryrun.jobs import trajectories
from benchmarks.gpu_stages import lib
from benchmarks.gpu_stages.lib import DEVICE, ON_GPU, SMALL, check
from minirl.algo import losses
from minirl.batch.exchange import exchange
from minirl.batch.packing import pack
from minirl.config.parse import fill_config
from minirl.config.policy import ParallelConfig, PolicyConfig
from minirl.parallel.machines import arrange, make_world
from minirl.parallel.mesh import World
from minirl.plan.costs import Load
from minirl.train.policy import Policy


class Case(NamedTuple):
    family: str = "qwen3"
    policy: dict[str, Any] = {}
    parallel: dict[str, Any] = {}  # Of two ranks.


CASES = {
    "fsdp": Case(),
    "sharded accumulation": Case(policy={"accumulate": "sharded"}),
    "muon": Case(policy={"optimizer": "muon"}),
    "hsdp": Case(parallel={"replicate": 2}),
    "tensor": Case(parallel={"tensor": 2}),
    "context": Case(parallel={"context": 2}),
    "ring": Case(parallel={"context": 2, "context_engine": "ring"}),
    "experts": Case(family="qwen3_moe", parallel={"experts": 2}),
}
SMALL_CASES = ("fsdp", "tensor", "experts")
LIMIT = 2e-3
NUM_STEPS = 3
TIMEOUT = timedelta(seconds=60)  # Of a collective.


@dataclass(kw_only=True)
class Arguments:
    side: Path | None = None
    """Train here as a rank of a world, and write the figures to this file."""
    models: Path | None = None
    """Of --side: has a folder for each family."""
    cases: tuple[str, ...] = SMALL_CASES if SMALL else tuple(CASES)


def train(case: Case, models: Path, world: World) -> list[list[float]]:
    """Return the figures of each step."""
    parallel = case.parallel if world.world_size > 1 else {}
    mesh = arrange(world, fill_config(ParallelConfig, parallel))
    cfg = fill_config(PolicyConfig, {"dtype": "float32"} | case.policy)
    policy = Policy(cfg, models / case.family, mesh)
    everything = trajectories(Load(tokens=320, num_micro=1, sequence=48, prompt=16, samples=2))[:8]
    rows = []
    for _ in range(NUM_STEPS):
        (micro,) = exchange(everything if world.rank == 0 else [], mesh, 400, 1)
        minibatch = [pack(part, DEVICE, layout=policy.layout) for part in micro]
        metrics = policy.update(minibatch, losses.sft(), lr=1e-3)
        rows.append([metrics["loss"], metrics["grad_norm"]])
    return rows


def run_side(args: Arguments) -> None:
    """Train all cases in this process, a rank of the world that its environment names."""
    assert args.side and args.models
    if ON_GPU:
        torch.cuda.set_device(DEVICE)
        torch.backends.cudnn.allow_tf32 = False
    dist.init_process_group("cpu:gloo,cuda:gloo" if ON_GPU else "gloo", timeout=TIMEOUT)
    world = make_world(DEVICE)
    results: dict[str, list[list[float]]] = {}
    for name in args.cases:
        with lib.part(f"{name} on rank {world.rank}"):
            results[name] = train(CASES[name], args.models, world)
        if world.rank == 0:
            args.side.write_text(json.dumps(results))
    lib.leave()


def start_world(command: list[str], size: int) -> list[subprocess.Popen]:
    """Start the ranks of a world, all on the one device."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = []
    for rank in range(size):
        environment = lib.side_environment(
            STAGE_JSON="",
            RANK=str(rank),
            WORLD_SIZE=str(size),
            LOCAL_RANK="0",
            LOCAL_WORLD_SIZE=str(size),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=port,
        )
        ranks.append(subprocess.Popen(command, env=environment))
    return ranks


def wait_for(ranks: list[subprocess.Popen], end: float) -> None:
    """Wait until a time of the monotonic clock; what runs longer is killed."""
    for process in ranks:
        try:
            process.wait(max(1.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()


def main(args: Arguments) -> None:
    if args.side:
        run_side(args)
    sys.path.insert(0, str(Path.cwd() / "tests"))
    import tiny

    end = time.monotonic() + float(os.environ.get("STAGE_LIMIT", "120")) - 8
    with tempfile.TemporaryDirectory() as folder:
        models = Path(folder)
        for family in {CASES[name].family for name in args.cases}:
            tiny.make(models / family, family)
        command = [sys.executable, "-m", "benchmarks.gpu_stages.s8_two_ranks", "--models", folder]
        command += ["--cases", *args.cases, "--side"]
        ranks = []
        for size in (1, 2):
            ranks += start_world([*command, str(models / f"{size}.json")], size)
        wait_for(ranks, end)
        alone = lib.read_results(models / "1.json")
        together = lib.read_results(models / "2.json")
    for name in args.cases:
        if name not in alone or name not in together:
            check(f"two ranks: {name}", False, "it did not finish")
            continue
        worst = lib.largest_difference(together[name], alone[name])
        shown = [round(row[0], 4) for row in together[name]]
        note = f"worst relative difference {worst:.2g}; losses {shown}"
        check(f"two ranks: {name}", worst < LIMIT, note)
    lib.leave()


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
