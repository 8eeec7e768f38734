r"""What a mesh costs: tokens per second, memory and bytes on the wire of one optimizer step.

    python benchmarks/mesh.py --ranks 4 --length 4096
    python benchmarks/mesh.py --ranks 8 --model FOLDER --length 32768 --dtype bfloat16 \
        --meshes "cp 8" "cp 4 x tp 2"

Starts torchrun once for each way to divide a model over ranks, and prints a line for each.
tokens/s: median of `steps` optimizer steps. Memory: the most that a rank had above what it had
before the model was made (device memory on CUDA, resident memory on CPU). Bytes: what a rank
receives in a step, counted at every collective under the algorithms that send least, next to what
these formulas say, for M micro-batches of T rows on a rank; more than 5 % between them is an error.

fsdp   n = shard x cp ranks, P parameters on a tensor rank of which L lie in layers, b bytes each in
       forward and 4 (8) in gradients.
       all-gather: M b (P + L) (n - 1) / n. Layers are gathered again in backward, unless they
       stay (then M b P (n - 1) / n).
       reduce-scatter: 4 P (n - 1) / n, once a step, behind the last micro-batch.
hsdp   r replicas. All-reduce of a shard's gradient: 2 (4 P / n) (r - 1) / r.
tp     t ranks, hidden size h, l layers. All-reduces of T x h: two in each layer's forward and two
       in its backward, one behind the embedding and one for the head's input:
       M (4 l + 2) 2 b T h (t - 1) / t. Sequence parallelism: all-gather and reduce-scatter in their
       place, half the bytes each; of these the head's gather has no twin. Checkpointing: forward
       again, but for a layer's last one.
cp     R ranks, k = 2 x key-value heads x head size / t numbers a row.
       all-gather in forward: M l (R - 1) T k b, the same for the reduce-scatter in backward (and
       for the gather again under checkpointing).
       On a ring: (R - 1) T k b in each direction for the keys, and R T k 4 (8) for their gradients
       on the way home.
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
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
import tyro
from torch.utils._python_dispatch import TorchDispatchMode

from minirl.algo import losses
from minirl.batch.exchange import exchange
from minirl.batch.packing import pack
from minirl.config.policy import ParallelConfig, PolicyConfig, ScratchConfig
from minirl.model import scratch
from minirl.parallel import fsdp
from minirl.parallel.machines import join_world
from minirl.parallel.mesh import Mesh
from minirl.train.policy import Policy
from minirl.types.packed import Packed, Trajectory

MIB = 2**20


def make_scratch_config() -> ScratchConfig:
    return ScratchConfig(hidden_size=256, num_layers=6, num_heads=8, num_kv_heads=4, head_dim=32)


@dataclass(kw_only=True)
class Load:
    ranks: int = 4
    meshes: tuple[str, ...] = ()
    """Such as `cp 2 x tp 2`; ring: cp on a ring, sp: tp with sequence parallelism, hsdp: replicas;
    dp is what is left. Empty: each axis alone, and pairs."""
    model: str = ""
    """Folder; empty: random weights of the shape below."""
    scratch: ScratchConfig = field(default_factory=make_scratch_config)
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    length: int = 2048
    sequences: int = 4
    """In a step, over all ranks."""
    tokens: int = 8192
    """Budget of a micro-batch, over the ranks that share a sequence."""
    activation_checkpointing: Literal["off", "selective", "full"] = "off"
    reshard_after_forward: bool = True
    steps: int = 3
    folder: str = ""
    """Set by the program itself for the ranks that it starts: where rank 0 writes its figures."""


class Wire(TorchDispatchMode):
    """Counts the bytes that this rank receives, by axis of the mesh."""

    def __init__(self, axis_of: dict[str, str]):
        super().__init__()
        self.axis_of = axis_of
        self.bytes: dict[str, float] = defaultdict(float)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        name = func.__name__.split(".")[0]
        if func.namespace == "c10d" and name in RECEIVED:
            boxed = next(a for a in args if isinstance(a, torch.ScriptObject))
            group = dist.ProcessGroup.unbox(boxed)
            axis = self.axis_of.get(group.group_name)
            if axis:
                self.bytes[axis] += RECEIVED[name](args, group.size())
        return func(*args, **(kwargs or {}))


def _all_reduced(args: tuple, size: int) -> float:
    return 2 * args[0][0].nbytes * (size - 1) / size


# Collective -> bytes that a rank receives, from its arguments (output first) and number of ranks.
RECEIVED: dict[str, Callable[[tuple, int], float]] = {
    "_allgather_base_": lambda args, size: args[0].nbytes - args[1].nbytes,
    "_reduce_scatter_base_": lambda args, size: args[1].nbytes - args[0].nbytes,
    "allreduce_": _all_reduced,
    "alltoall_base_": lambda args, size: args[0].nbytes,
}


def count_parameters(policy: Policy, mesh: Mesh, prefix: str) -> float:
    """Return the parameters of a tensor rank whose names begin so."""
    num_replicas = mesh.fsdp.size() // mesh.fsdp.size(-1)
    total = 0.0
    for name, p in policy.shards().items():
        if name.startswith(prefix):
            is_divided = fsdp.num_copies(p) == num_replicas
            total += p.numel() / (mesh.tensor.size() if is_divided else 1)
    return total


def formulas(
    load: Load, policy: Policy, mesh: Mesh, batches: list[Packed], *, sequence: bool
) -> dict[str, float]:
    """Return the bytes that a rank receives in a step, by axis."""
    config: Any = policy.model.config
    num_layers = config.num_hidden_layers
    again = load.activation_checkpointing != "off"
    rows = sum(len(batch.inputs) for batch in batches)
    loss_rows = sum(len(batch.loss_rows) for batch in batches)
    b = {"bfloat16": 2, "float32": 4, "float64": 8}[load.dtype]
    wide = max(4, b)
    t = mesh.tensor.size()
    n = mesh.fsdp.size(-1)
    replicas = mesh.fsdp.size() // n

    whole = count_parameters(policy, mesh, "")
    gathered = whole
    if load.reshard_after_forward:
        gathered += count_parameters(policy, mesh, "model.layers.")
    fsdp_bytes = (len(batches) * b * gathered + wide * whole) * (n - 1) / n
    hsdp_bytes = 2 * wide * whole / n * (replicas - 1) / replicas

    # All-reduces of all rows. Checkpointing repeats attention's way out; the MLP's is a layer's
    # last.
    num_reduces = 4 * num_layers + 1 + (num_layers if again else 0)
    if sequence:
        num_reduces += 0.5
    if sequence and again:
        # Ways in: attention and MLP gather again, the MLP's way out does not.
        num_reduces += num_layers / 2
    tp_bytes = 2 * b * config.hidden_size * (t - 1) / t * (num_reduces * rows + loss_rows)

    heads = max(1, config.num_key_value_heads // t)
    keys = 2 * heads * config.head_dim * num_layers * rows
    hops = mesh.context_size - 1
    cp_bytes = keys * hops * b * (2 + again)
    if mesh.context and mesh.context.ring:
        cp_bytes += keys * (hops + 1) * wide
    out = {"fsdp": fsdp_bytes, "hsdp": hsdp_bytes, "tp": tp_bytes, "cp": cp_bytes}
    return {axis: value for axis, value in out.items() if value}


def memory(device: torch.device) -> int:
    """Return the most bytes so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def name_groups(mesh: Mesh) -> dict[str, str]:
    """Return the axis of each process group, by the group's name."""
    axis_of: dict[str, str] = {
        mesh.tensor.get_group().group_name: "tp",
        mesh.fsdp.get_group(mesh.fsdp.ndim - 1).group_name: "fsdp",
    }
    if mesh.fsdp.ndim == 2:
        axis_of[mesh.fsdp.get_group(0).group_name] = "hsdp"
    if mesh.context:
        axis_of[mesh.context.group.group_name] = "cp"
    return axis_of


def make_sequences(load: Load) -> list[Trajectory]:
    rng = np.random.default_rng(0)
    sequences = []
    for i in range(load.sequences):
        sequence = Trajectory(
            tokens=rng.integers(5, 200, load.length).astype(np.int32),
            sampled=np.arange(load.length) > 0,
            logprobs=np.zeros(load.length, np.float32),
            group=i,
        )
        sequences.append(sequence)
    return sequences


def make_policy(load: Load, parallel: ParallelConfig, mesh: Mesh) -> Policy:
    folder = Path(load.model or f"{load.folder}/model")
    if not load.model:
        if mesh.rank == 0:
            scratch.make_model(load.scratch, folder, max_len=load.length, seed=0)
        mesh.barrier()
    cfg = PolicyConfig(
        dtype=load.dtype,
        activation_checkpointing=load.activation_checkpointing,
        reshard_after_forward=load.reshard_after_forward,
    )
    return Policy(cfg, folder, mesh, sequence_parallel=parallel.sequence)


def run_rank(load: Load, parallel: ParallelConfig) -> None:
    """Train on this rank; rank 0 writes the figures as JSON."""
    mesh = join_world(parallel=parallel)
    before = memory(mesh.device)
    policy = make_policy(load, parallel, mesh)
    sequences = make_sequences(load)[mesh.rank :: mesh.world_size]
    seconds = []
    for _ in range(load.steps + 1):
        (micros,) = exchange(sequences, mesh, load.tokens // mesh.context_size)
        batches = [pack(m, mesh.device, layout=policy.layout) for m in micros]
        mesh.barrier()
        start = time.perf_counter()
        with Wire(name_groups(mesh)) as wire:
            policy.update(batches, losses.sft(), lr=1e-4)
        seconds.append(time.perf_counter() - start)
    num_tokens = load.sequences * (load.length - 1)
    figures = {
        "tokens_per_second": num_tokens / statistics.median(seconds[1:]),
        "peak": max(mesh.gather(memory(mesh.device) - before)),
        "bytes": dict(wire.bytes),
        "expected": formulas(load, policy, mesh, batches, sequence=parallel.sequence),
        "micro_batches": len(batches),
    }
    if mesh.rank == 0:
        (Path(load.folder) / "figures.json").write_text(json.dumps(figures))
    dist.destroy_process_group()


def parse(mesh: str) -> ParallelConfig:
    """Return what `cp 2 x tp 2` says."""
    parallel = ParallelConfig()
    for part in mesh.split(" x "):
        axis, text = part.split()
        size = int(text)
        if axis in ("cp", "ring"):
            parallel.context = size
        elif axis in ("tp", "sp"):
            parallel.tensor = size
        elif axis == "hsdp":
            parallel.replicate = size
        elif axis != "dp":
            sys.exit(f"--meshes {mesh!r}: no axis {axis}; use dp, hsdp, cp, ring, tp or sp")
        if axis == "ring":
            parallel.context_engine = "ring"
        parallel.sequence |= axis == "sp"
    return parallel


def start_ranks(load: Load, mesh: str) -> dict[str, Any]:
    """Run the step on all ranks; return the figures of rank 0."""
    torchrun = [str(Path(sys.executable).with_name("torchrun")), "--standalone"]
    with tempfile.TemporaryDirectory() as folder:
        command = [*torchrun, "--nproc-per-node", str(load.ranks), __file__, *sys.argv[1:]]
        command += ["--meshes", mesh, "--folder", folder]
        ended = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
        if ended.returncode:
            sys.exit(f"{mesh}\n{ended.stderr[-3000:]}")
        return json.loads((Path(folder) / "figures.json").read_text())


def default_meshes(num_ranks: int) -> tuple[str, ...]:
    """Return each axis alone, and pairs where there are ranks for them."""
    alone = tuple(f"{axis} {num_ranks}" for axis in ("dp", "cp", "ring", "tp", "sp"))
    if num_ranks < 4:
        return alone
    half = num_ranks // 2
    pairs = (f"dp {half} x tp 2", f"dp {half} x cp 2", "cp 2 x tp 2", f"hsdp 2 x dp {half}")
    return alone + pairs


def print_mesh(mesh: str, figures: dict[str, Any]) -> None:
    """Print a line; leave with an error if formulas and bytes are far apart."""
    received: dict[str, float] = figures["bytes"]
    expected: dict[str, float] = figures["expected"]
    wire, wrong = [], []
    for axis in expected | received:
        measured, formula = received.get(axis, 0.0), expected.get(axis, 0.0)
        wire.append(f"{axis} {measured / MIB:.2f} ({formula / MIB:.2f})")
        if abs(measured - formula) > 0.05 * formula:
            wrong.append(axis)
    speed = f"{figures['tokens_per_second']:>9.0f} {figures['peak'] / MIB:>9.0f}"
    print(f"{mesh:<16} {figures['micro_batches']:>5} {speed}   {', '.join(wire)}", flush=True)
    if wrong:
        sys.exit(f"{mesh}: more than 5 % from the formula: {', '.join(wrong)}")


def main(load: Load) -> None:
    if "RANK" in os.environ:
        run_rank(load, parse(load.meshes[0]))
        return
    how = f"{load.sequences} sequences of {load.length} tokens, {load.dtype}, {load.ranks} ranks"
    how += f", activation checkpointing {load.activation_checkpointing}"
    how += ", parameters stay gathered" * (not load.reshard_after_forward)
    print(how)
    head = f"{'mesh':<16} {'micro':>5} {'tokens/s':>9} {'peak MiB':>9}"
    print(f"{head}   MiB received by a rank in a step (formula)")
    for mesh in load.meshes or default_meshes(load.ranks):
        print_mesh(mesh, start_ranks(load, mesh))


if __name__ == "__main__":
    main(tyro.cli(Load, description=__doc__))
