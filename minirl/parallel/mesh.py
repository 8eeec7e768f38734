"""The process group, the one DeviceMesh, and the small host-side collectives."""

import ctypes
import functools
import logging
import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from minirl.config.shared import ParallelConfig
from minirl.config.validate import validate_parallel

# Their names from torch 2.13 on; 2.11 has only the older ones.
all_gather_single = vars(dist).get("all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single = vars(dist).get("reduce_scatter_single", dist.reduce_scatter_tensor)
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's malloc.h


@dataclass(frozen=True)
class Context:
    """The ranks that hold parts of the same sequences (context parallelism), and how their
    attention meets the others' keys.
    """

    group: ProcessGroup
    rank: int
    size: int
    ring: bool = (
        False  # Keys travel from rank to rank; False: every rank gathers them all, layer by layer.
    )


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Who I am among the ranks, and how to talk to them. Axes from the outside in: dp_replicate,
    dp_shard, cp, tp; the last one counts fastest, so that the ranks that talk most are
    neighbours.
    """

    rank: int
    world_size: int
    device: torch.device
    # 1-D (dp_shard x cp) or 2-D (dp_replicate, dp_shard x cp): FSDP shards over the last axis and
    # replicates over the first.
    fsdp: DeviceMesh
    context: (
        Context | None
    )  # The ranks that hold parts of the same sequences; None if each sequence is on one.
    # 1-D (tp): consecutive ranks that hold parts of each matrix and work on the same data.
    tensor: DeviceMesh
    # gloo twin of the world for numpy arrays and counters, so that they never pass the accelerator.
    host_group: dist.ProcessGroup
    store: dist.Store

    @property
    def context_size(self) -> int:
        return self.context.size if self.context else 1

    @property
    def num_copies(self) -> int:
        """Ranks that work on the same sequences; consecutive."""
        return self.context_size * self.tensor.size()

    @property
    def data_size(self) -> int:
        """Parts into which sequences are divided."""
        return self.world_size // self.num_copies

    def sums(self, values: torch.Tensor, op: dist.ReduceOp = dist.ReduceOp.SUM) -> torch.Tensor:
        """Add a CPU tensor over all ranks."""
        dist.all_reduce(values, op=op, group=self.host_group)
        return values

    maxima = functools.partialmethod(sums, op=dist.ReduceOp.MAX)

    def data_sums(self, values: torch.Tensor) -> torch.Tensor:
        """Add a CPU tensor of counts of this rank's tokens, each token once: tensor-parallel ranks
        have the same.
        """
        return self.sums(values) / self.tensor.size()

    def gather(self, value: object) -> list:
        """A small picklable value of every rank, in rank order."""
        out = [None] * self.world_size
        dist.all_gather_object(out, value, group=self.host_group)
        return out

    def all_to_all(self, boxes: list[bytes]) -> list[bytes]:
        """One for each rank -> one of each rank."""
        sizes = self.gather([len(box) for box in boxes])
        arriving = [of_one[self.rank] for of_one in sizes]
        out, into = (
            torch.frombuffer(bytearray(b"".join(boxes)), dtype=torch.uint8),
            torch.empty(sum(arriving), dtype=torch.uint8),
        )
        dist.all_to_all_single(into, out, arriving, sizes[self.rank], group=self.host_group)
        return [part.numpy().tobytes() for part in into.split(arriving)]

    def barrier(self) -> None:
        dist.barrier(group=self.host_group)


def join_world(timeout_minutes: float = 30.0, parallel: ParallelConfig | None = None) -> Mesh:
    """Join the ranks that torchrun started; without torchrun, be a world of one.

    CUDA ranks get NCCL for device tensors and gloo for host ones. vLLM reuses this default group.
    """
    if "RANK" not in os.environ:
        os.environ.update(
            RANK="0",
            WORLD_SIZE="1",
            LOCAL_RANK="0",
            LOCAL_WORLD_SIZE="1",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT="0",
        )  # a free one
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        # Keep freed memory: by default glibc returns buffers of this size to the system, and page
        # faults cost a tenth of a step.
        for option, value in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, 2**31 - 1)):
            ctypes.CDLL(None).mallopt(option, value)
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_ranks))
    timeout = timedelta(minutes=timeout_minutes)
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timeout)
    return make_mesh(device, parallel, timeout)


def make_mesh(
    device: torch.device, parallel: ParallelConfig | None = None, timeout: timedelta | None = None
) -> Mesh:
    """The mesh over an initialised default process group. Raises UserError if its axes do not
    multiply to the world's size.
    """
    parallel = parallel or ParallelConfig()
    world, rank = dist.get_world_size(), dist.get_rank()
    validate_parallel(parallel, world)
    replicate, context, tensor = parallel.replicate, parallel.context, parallel.tensor
    # FSDP over tensor parallelism gathers in an order that torch's redistribution finds worth a
    # warning per rank and shape.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    # To parameters the context axis is more of dp_shard. One axis for both, because torch
    # deprecates slices with a flattened axis in them.
    whole = init_device_mesh(
        device.type,
        (replicate, world // (replicate * tensor), tensor),
        mesh_dim_names=("dp_replicate", "dp_shard_cp", "tp"),
    )
    fsdp = whole["dp_replicate", "dp_shard_cp"] if replicate > 1 else whole["dp_shard_cp"]
    host_group = (
        dist.new_group(backend="gloo", timeout=timeout)
        if device.type == "cuda"
        else dist.group.WORLD
    )
    cp = None
    if context > 1:
        parts = [
            [first + i * tensor for i in range(context)]
            for start in range(0, world, context * tensor)
            for first in range(start, start + tensor)
        ]
        members, _ = dist.new_subgroups_by_enumeration(parts, timeout=timeout)
        cp = Context(
            members, dist.get_rank(members), context, ring=parallel.context_engine == "ring"
        )
    return Mesh(
        rank=rank,
        world_size=world,
        device=device,
        fsdp=fsdp,
        context=cp,
        tensor=whole["tp"],
        host_group=host_group,
        store=dist.distributed_c10d._get_default_store(),
    )
