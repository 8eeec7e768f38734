"""What a mesh costs: tokens per second, memory and bytes on the wire of one optimizer step, for
each way to divide a model over ranks.

    python benchmarks/mesh.py --ranks 4 --length 4096
    python benchmarks/mesh.py --ranks 8 --model FOLDER --length 32768 --dtype bfloat16 --meshes "cp
    8" "cp 4 x tp 2"

Starts torchrun once for each mesh. tokens/s: median of `steps` optimizer steps. Memory: the most
that a rank had above what it had before the model was made (device memory on CUDA, resident memory
on CPU). Bytes: what a rank receives in a step, counted at every collective under the algorithms
that send least, next to what these formulas say, for M micro-batches of T rows on a rank:

    fsdp   n = shard x cp ranks, P parameters on a tensor rank of which L lie in layers, b bytes
    each in forward and 4 (8) in gradients
           all-gather   M b (P + L) (n - 1) / n          layers are gathered again in backward, unless they stay (then M b P (n - 1) / n)
           reduce-scatter   4 P (n - 1) / n              once a step, behind the last micro-batch
    hsdp   r replicas: all-reduce of a shard's gradient  2 (4 P / n) (r - 1) / r
    tp     t ranks, hidden size h, l layers: all-reduces of T x h, two in each layer's forward and
    two in its backward, one behind the
           embedding and one for the head's input: M (4 l + 2) 2 b T h (t - 1) / t. Sequence
           parallelism: all-gather and reduce-scatter in their place, half the bytes each; of these
           the head's gather has no twin. Checkpointing: forward again, but for a layer's last one.
    cp     R ranks, k = 2 x key-value heads x head size / t numbers a row: M l (R - 1) T k b for the
    all-gather in forward, the same for the
           reduce-scatter in backward (and for the gather again under checkpointing). On a ring (R -
           1) T k b in each direction for the keys, and R T k 4 (8) for their gradients on the way
           home.
"""

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import tyro
from torch.utils._python_dispatch import TorchDispatchMode

from minirl.algo import losses
from minirl.config.shared import ParallelConfig, PolicyConfig, ScratchConfig
from minirl.data.packing import exchange, pack
from minirl.model import scratch
from minirl.parallel import fsdp
from minirl.parallel.mesh import Mesh, join_world
from minirl.policy import Policy
from minirl.types import Trajectory

AXES = {
    "dp": None,
    "cp": "context",
    "ring": "context",
    "tp": "tensor",
    "sp": "tensor",
    "hsdp": "replicate",
}


@dataclass(kw_only=True)
class Load:
    ranks: int = 4
    meshes: tuple[str, ...] = ()
    """Such as `cp 2 x tp 2`; ring: cp on a ring, sp: tp with sequence parallelism, hsdp: replicas;
    dp is what is left. Empty: each axis alone, and pairs."""
    model: str = ""
    """Folder; empty: random weights of the shape below."""
    scratch: ScratchConfig = field(
        default_factory=lambda: ScratchConfig(
            hidden_size=256, num_layers=6, num_heads=8, num_kv_heads=4, head_dim=32
        )
    )
    dtype: str = "float32"
    length: int = 2048
    sequences: int = 4
    """In a step, over all ranks."""
    tokens: int = 8192
    """Budget of a micro-batch, over the ranks that share a sequence."""
    activation_checkpointing: bool = False
    reshard_after_forward: bool = True
    steps: int = 3


class Wire(TorchDispatchMode):
    """Counts the bytes that this rank receives, by axis of the mesh."""

    def __init__(self, axis_of: dict[str, str]):
        super().__init__()
        self.axis_of, self.bytes = axis_of, defaultdict(float)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204 - torch's signature
        name = func.__name__.split(".")[0]
        if func.namespace == "c10d" and name in (
            "_allgather_base_",
            "_reduce_scatter_base_",
            "allreduce_",
            "alltoall_base_",
        ):
            group = dist.ProcessGroup.unbox(
                next(a for a in args if isinstance(a, torch.ScriptObject))
            )
            size = {
                "_allgather_base_": lambda: args[0].nbytes - args[1].nbytes,
                "_reduce_scatter_base_": lambda: args[1].nbytes - args[0].nbytes,
                "allreduce_": lambda: 2 * args[0][0].nbytes * (group.size() - 1) / group.size(),
                "alltoall_base_": lambda: args[0].nbytes,
            }[name]()
            if group.group_name in self.axis_of:
                self.bytes[self.axis_of[group.group_name]] += size
        return func(*args, **(kwargs or {}))


def formulas(
    load: Load, policy: Policy, mesh: Mesh, rows: list[int], loss_rows: list[int], sequence: bool
) -> dict[str, float]:
    """Bytes that a rank receives in a step; `rows` and `loss_rows` of its micro-batches."""
    config, t, n = policy.model.config, mesh.tensor.size(), mesh.fsdp.size(-1)
    replicas = mesh.fsdp.size() // n
    b = getattr(torch, load.dtype).itemsize
    wide = 8 if load.dtype == "float64" else 4

    def parameters(prefix: str) -> float:
        return sum(
            p.numel() / (t if n_copies == 1 else 1)
            for name, p in policy.shards().items()
            if name.startswith(prefix)
            for n_copies in [fsdp.num_copies(p) // replicas]
        )

    whole, layers = parameters(""), parameters("model.layers.")
    again = 1 if load.reshard_after_forward else 0
    num_layers, head_dim = config.num_hidden_layers, config.head_dim
    out = {
        "fsdp": (len(rows) * b * (whole + again * layers) + wide * whole) * (n - 1) / n,
        "hsdp": 2 * wide * whole / n * (replicas - 1) / replicas,
    }
    repeated = (
        num_layers if load.activation_checkpointing else 0
    )  # attention's way out; the MLP's is a layer's last
    whole_rows = (
        (4 * num_layers + 1 + repeated) * sum(rows)
        + (sum(rows) if sequence else 0) / 2
        + sum(loss_rows)
    )
    if sequence and load.activation_checkpointing:
        whole_rows += (
            num_layers * sum(rows) / 2
        )  # ways in: the attention's and the MLP's gather again, the MLP's way out does not
    out["tp"] = 2 * b * config.hidden_size * (t - 1) / t * whole_rows
    keys = 2 * max(1, config.num_key_value_heads // t) * head_dim * num_layers * sum(rows)
    hops = mesh.context_size - 1
    if mesh.context and mesh.context.ring:
        out["cp"] = keys * (hops * b * (2 + load.activation_checkpointing) + (hops + 1) * wide)
    else:
        out["cp"] = keys * hops * b * (2 + load.activation_checkpointing)
    return {axis: value for axis, value in out.items() if value}


def memory(device: torch.device) -> int:
    """Most bytes so far."""
    return (
        torch.cuda.max_memory_allocated(device)
        if device.type == "cuda"
        else 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    )


def run(load: Load, parallel: ParallelConfig) -> None:
    """On every rank; rank 0 writes the figures as JSON to the file that the parent named."""
    mesh = join_world(parallel=parallel)
    folder = Path(load.model)
    if not load.model:
        folder = Path(os.environ["MESH_FOLDER"]) / "model"
        if mesh.rank == 0:
            scratch.make_model(load.scratch, folder, max_len=load.length, seed=0)
        mesh.barrier()
    before = memory(mesh.device)
    cfg = PolicyConfig(
        dtype=load.dtype,
        activation_checkpointing=load.activation_checkpointing,
        reshard_after_forward=load.reshard_after_forward,
    )
    policy = Policy(cfg, folder, mesh, sequence_parallel=parallel.sequence)
    rng = np.random.default_rng(0)
    sequences = [
        Trajectory(
            tokens=rng.integers(5, 200, load.length).astype(np.int32),
            sampled=np.arange(load.length) > 0,
            group=i,
            logprobs=np.zeros(load.length, np.float32),
        )
        for i in range(load.sequences)
    ]
    axis_of = {
        mesh.tensor.get_group().group_name: "tp",
        mesh.fsdp.get_group(mesh.fsdp.ndim - 1).group_name: "fsdp",
    }
    if mesh.fsdp.ndim == 2:
        axis_of[mesh.fsdp.get_group(0).group_name] = "hsdp"
    if mesh.context:
        axis_of[mesh.context.group.group_name] = "cp"
    seconds = []
    for _ in range(load.steps + 1):
        (micros,) = exchange(
            sequences[mesh.rank :: mesh.world_size], mesh, load.tokens // mesh.context_size
        )
        batches = [pack(m, mesh.device, layout=policy.layout) for m in micros]
        mesh.barrier()
        start = time.perf_counter()
        with Wire(axis_of) as wire:
            policy.update(batches, losses.sft(), lr=1e-4)
        seconds.append(time.perf_counter() - start)
    expected = formulas(
        load,
        policy,
        mesh,
        [len(x.inputs) for x in batches],
        [len(x.loss_rows) for x in batches],
        parallel.sequence,
    )
    peak = max(mesh.gather(memory(mesh.device) - before))
    if mesh.rank == 0:
        figures = {
            "tokens_per_second": load.sequences
            * (load.length - 1)
            / statistics.median(seconds[1:]),
            "peak": peak,
            "bytes": dict(wire.bytes),
            "expected": expected,
            "micro_batches": len(batches),
        }
        (Path(os.environ["MESH_FOLDER"]) / "figures.json").write_text(json.dumps(figures))
    dist.destroy_process_group()


def parse(mesh: str) -> ParallelConfig:
    parallel = ParallelConfig()
    for part in mesh.split(" x "):
        axis, size = part.split()
        if AXES[axis]:
            setattr(parallel, AXES[axis], int(size))
        parallel.context_engine = "ring" if axis == "ring" else parallel.context_engine
        parallel.sequence |= axis == "sp"
    return parallel


def main(load: Load) -> None:
    if "RANK" in os.environ:
        return run(load, parse(os.environ["MESH"]))
    half = load.ranks // 2
    pairs = (
        (f"dp {half} x tp 2", f"dp {half} x cp 2", "cp 2 x tp 2", f"hsdp 2 x dp {half}")
        if load.ranks >= 4
        else ()
    )
    meshes = load.meshes or (
        f"dp {load.ranks}",
        f"cp {load.ranks}",
        f"ring {load.ranks}",
        f"tp {load.ranks}",
        f"sp {load.ranks}",
        *pairs,
    )
    print(
        f"{load.sequences} sequences of {load.length} tokens, {load.dtype}, {load.ranks} ranks"
        f"{', activation checkpointing' * load.activation_checkpointing}{', parameters stay gathered' * (not load.reshard_after_forward)}"
    )
    print(
        f"{'mesh':<16} {'micro':>5} {'tokens/s':>9} {'peak MiB':>9}   MiB received by a rank in a step (formula)"
    )
    for mesh in meshes:
        with tempfile.TemporaryDirectory() as folder:
            command = [
                str(Path(sys.executable).with_name("torchrun")),
                "--standalone",
                "--nproc-per-node",
                str(load.ranks),
                __file__,
                *sys.argv[1:],
            ]
            subprocess.run(
                command,
                check=True,
                env={**os.environ, "MESH": mesh, "MESH_FOLDER": folder},
                stderr=subprocess.DEVNULL,
            )
            f = json.loads((Path(folder) / "figures.json").read_text())
        wire = ", ".join(
            f"{axis} {f['bytes'].get(axis, 0) / 2**20:.2f} ({value / 2**20:.2f})"
            for axis, value in f["expected"].items()
        )
        print(
            f"{mesh:<16} {f['micro_batches']:>5} {f['tokens_per_second']:>9.0f} {f['peak'] / 2**20:>9.0f}   {wire}",
            flush=True,
        )
        wrong = [
            axis
            for axis in f["expected"] | f["bytes"]
            if abs(f["bytes"].get(axis, 0) - f["expected"].get(axis, 0))
            > 0.05 * f["expected"].get(axis, 0)
        ]
        if wrong:
            sys.exit(f"{mesh}: more than 5 % from the formula: {', '.join(wrong)}")
    return None


if __name__ == "__main__":
    main(tyro.cli(Load, description=__doc__))
