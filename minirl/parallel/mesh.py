"""The process group, the one DeviceMesh, and the small collectives between hosts."""

import ctypes
import logging
import math
import os
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from minirl.base.errors import require
from minirl.base.oversight import Oversight
from minirl.config.policy import Dtype, ParallelConfig
from minirl.config.validate import validate_parallel
from minirl.types.packed import Context

try:
    all_gather_single = dist.all_gather_single
    reduce_scatter_single = dist.reduce_scatter_single
except AttributeError:  # torch 2.11 has only their older names
    all_gather_single = dist.all_gather_into_tensor
    reduce_scatter_single = dist.reduce_scatter_tensor

# FSDP over tensor parallelism gathers in an order that torch's redistribution finds worth a warning
# per rank and shape.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)

GATHERED_BYTES = 2**24  # Of all ranks together, that `gather_array` moves at once.

# Options of mallopt, from glibc's malloc.h.
M_TRIM_THRESHOLD = -1
M_MMAP_MAX = -4


@dataclass(frozen=True)
class ExpertMesh:
    """The same ranks arranged for the experts of mixtures, for expert parallelism."""

    # 1-D (efsdp) or 2-D (dp_replicate, efsdp): the ranks that hold parts of the same experts.
    fsdp: DeviceMesh
    # 1-D (ep): consecutive ranks that divide the experts.
    experts: DeviceMesh


@dataclass(frozen=True, kw_only=True)
class World:
    """All ranks of a run, and how they exchange small values between hosts."""

    rank: int
    world_size: int
    device: torch.device
    # A gloo twin of the world for numpy arrays and counters, which then never pass the accelerator.
    host_group: ProcessGroup
    store: dist.Store
    watch: Oversight = field(default_factory=Oversight)  # Of this process.

    def sums(self, values: Tensor) -> Tensor:
        """Add a CPU tensor over all ranks, in place, and return it."""
        dist.all_reduce(values, group=self.host_group)
        return values

    def maxima(self, values: Tensor) -> Tensor:
        """Take the elementwise maximum of a CPU tensor over all ranks, in place, and return it."""
        dist.all_reduce(values, dist.ReduceOp.MAX, self.host_group)
        return values

    def gather(self, value: object) -> list:
        """Return a small picklable value of every rank, in rank order."""
        out = [None] * self.world_size
        dist.all_gather_object(out, value, group=self.host_group)
        return out

    def gather_rows(self, rows: np.ndarray) -> list[np.ndarray]:
        """Return the arrays of all ranks, in rank order. Nothing is pickled. Collective.

        Args:
            rows: of the same dtype and shape on all ranks, but for its length.
        """
        lengths = self._lengths(rows)
        return np.split(self._gather(rows, lengths), np.cumsum(lengths)[:-1])

    def gather_array(self, part: np.ndarray) -> np.ndarray:
        """Return the arrays of all ranks end to end, along the first axis. Collective.

        Nothing is pickled, so an array may be large: besides the result a rank needs memory for
        twice GATHERED_BYTES.
        """
        return self._gather(part, self._lengths(part)) if self.world_size > 1 else part

    def _lengths(self, part: np.ndarray) -> list[int]:
        """Return how long the arrays of all ranks are. Collective."""
        lengths = torch.empty(self.world_size, dtype=torch.int64)
        all_gather_single(lengths, torch.tensor([len(part)]), group=self.host_group)
        return lengths.tolist()

    def _gather(self, part: np.ndarray, lengths: list[int]) -> np.ndarray:
        """Return the arrays of all ranks end to end. `lengths`: of them. Collective."""
        gathered = np.empty((sum(lengths), *part.shape[1:]), part.dtype)
        firsts = np.cumsum([0, *lengths]).tolist()
        row_bytes = part.dtype.itemsize * math.prod(part.shape[1:])
        block_rows = max(1, GATHERED_BYTES // max(1, self.world_size * row_bytes))
        for done in range(0, max(lengths), block_rows):
            # A block of every rank at once; after the end of a shorter array are zeros.
            num_rows = min(block_rows, max(lengths) - done)
            block = np.zeros((num_rows, *part.shape[1:]), part.dtype)
            rest = part[done : done + num_rows]
            block[: len(rest)] = rest
            blocks = np.empty((self.world_size, *block.shape), part.dtype)
            all_gather_single(
                torch.from_numpy(blocks.reshape(-1).view(np.uint8)),
                torch.from_numpy(block.reshape(-1).view(np.uint8)),
                group=self.host_group,
            )
            for first, length, rows in zip(firsts[:-1], lengths, blocks, strict=True):
                num = max(0, min(num_rows, length - done))
                gathered[first + done :][:num] = rows[:num]
        return gathered

    def broadcast(self, value: object, source: int) -> Any:
        """Return a small picklable value of one rank on all ranks."""
        values = [value]
        dist.broadcast_object_list(values, source, self.host_group)
        return values[0]

    def gather_named(self, values: Iterable[tuple[str, float]]) -> list[dict[str, np.ndarray]]:
        """Return the named numbers of every rank, in rank order: name -> float64 [N].

        Args:
            values: this rank's numbers; a name may occur several times.
        """
        by_name = defaultdict(list)
        for name, value in values:
            by_name[name].append(value)
        return self.gather({name: np.array(found, float) for name, found in by_name.items()})

    def all_to_all(self, messages: list[bytes]) -> list[bytes]:
        """Send a message to each rank, and return the messages to this rank. Both in rank order."""
        num_sent = torch.tensor([len(message) for message in messages])
        num_received = torch.empty_like(num_sent)
        dist.all_to_all_single(num_received, num_sent, group=self.host_group)
        sizes = num_received.tolist()
        sent = torch.from_numpy(np.frombuffer(bytearray().join(messages), np.uint8))
        received = torch.empty(sum(sizes), dtype=torch.uint8)
        dist.all_to_all_single(received, sent, sizes, num_sent.tolist(), group=self.host_group)
        return [part.numpy().tobytes() for part in received.split(sizes)]

    def default_dtype(self) -> Dtype:
        """Return what `policy.dtype` = auto stands for, on all ranks the same. Collective."""
        if self.device.type != "cpu":
            return "bfloat16"
        has = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        lacks_somewhere = self.maxima(torch.tensor(not has, dtype=torch.int64))
        return "float32" if lacks_somewhere else "bfloat16"

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        dist.barrier(group=self.host_group)

    def agree_to_stop(self) -> bool:
        """Return whether a signal has asked any rank to save and leave. Collective."""
        return bool(self.maxima(torch.tensor(self.watch.requested, dtype=torch.int64)))


@dataclass(frozen=True, kw_only=True)
class Mesh(World):
    """This rank's place among all ranks.

    The axes, from the outermost in: dp_replicate, dp_shard, cp, tp. The last one counts fastest, so
    the ranks that talk most are neighbours.
    """

    # 1-D (dp_shard x cp) or 2-D (dp_replicate, dp_shard x cp). FSDP shards over the last axis and
    # replicates over the first.
    fsdp: DeviceMesh
    # The ranks that hold parts of the same sequences; None if each sequence is on one rank.
    context: Context | None
    # 1-D (tp): consecutive ranks that hold parts of each matrix and work on the same data.
    tensor: DeviceMesh
    # None if experts are sharded like all other parameters.
    experts: ExpertMesh | None = None

    @property
    def context_size(self) -> int:
        """Return the number of ranks that share a sequence."""
        return self.context.size if self.context else 1

    @property
    def num_copies(self) -> int:
        """Return the number of ranks, all consecutive, that work on the same sequences."""
        return self.context_size * self.tensor.size()

    @property
    def data_size(self) -> int:
        """Return the number of parts that a batch's sequences are divided into."""
        return self.world_size // self.num_copies

    def data_sums(self, values: Tensor) -> Tensor:
        """Add a CPU tensor of counts of this rank's tokens over all ranks, each token once.

        Tensor-parallel ranks count the same tokens; context-parallel ones do not.
        """
        return self.sums(values) / self.tensor.size()


def join_world(timeout_minutes: float = 30.0, parallel: ParallelConfig | None = None) -> Mesh:
    """Join the ranks that torchrun started, and arrange them in a mesh.

    Args:
        timeout_minutes: how long a collective may wait for the other ranks.
        parallel: sizes of the mesh's axes; None: all ranks are data-parallel.

    Raises:
        UserError: the axes do not multiply to the size of the world, or GPUs are missing.
    """
    world = open_world(timeout_minutes)
    check_gpus()
    return arrange(world, parallel, timedelta(minutes=timeout_minutes))


def open_world(
    timeout_minutes: float = 30.0,
    watch: Oversight | None = None,
    store: dist.Store | None = None,
) -> World:
    """Join the ranks that torchrun started; without torchrun, be a world of one.

    CUDA ranks get NCCL for device tensors and gloo for host ones. vLLM reuses this default group.

    Args:
        timeout_minutes: how long a collective may wait for the other ranks.
        watch: of this process; None: nobody watches.
        store: of these ranks; None: the one that torchrun names in the environment.
    """
    if "RANK" not in os.environ:
        os.environ.update(
            RANK="0",
            WORLD_SIZE="1",
            LOCAL_RANK="0",
            LOCAL_WORLD_SIZE="1",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT="0",  # any free one
        )
    timeout = timedelta(minutes=timeout_minutes)
    if torch.cuda.is_available():
        # A rank without a GPU of its own joins the others all the same, to be refused with them by
        # `check_gpus`: alone it would leave those of other machines waiting.
        local_rank = int(os.environ["LOCAL_RANK"])
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        # Convolutions of float32 by float32, as matrix products are; torch would take TF32.
        torch.backends.cudnn.allow_tf32 = False
        backend = "cpu:gloo,cuda:nccl"
    else:
        device = torch.device("cpu")
        keep_freed_memory()
        # Share the cores among the ranks of this machine.
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks_of_node()))
        backend = "gloo"
    dist.init_process_group(
        backend,
        store=store,
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timeout,
    )
    return make_world(device, timeout, watch)


def check_gpus() -> None:
    """Refuse more ranks on this machine than it has GPUs.

    Raises:
        UserError: so it is.
    """
    if not torch.cuda.is_available():
        return
    num_ranks = ranks_of_node()
    num_gpus = torch.cuda.device_count()
    require(
        num_ranks <= num_gpus,
        f"{num_ranks} ranks on a machine with {num_gpus} GPU{'s' * (num_gpus > 1)}, and each rank "
        f"needs one: start it by torchrun --nproc-per-node {num_gpus}",
    )


def keep_freed_memory() -> None:
    """Let this process keep the memory that it frees, for what it allocates next.

    By default glibc returns large buffers to the system, and page faults cost a tenth of a step.
    """
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_MAX, 0)
    libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def ranks_of_node() -> int:
    """Return how many ranks the launcher has started on this node."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))


def make_world(
    device: torch.device, timeout: timedelta | None = None, watch: Oversight | None = None
) -> World:
    """Return the world of an initialised default process group. Collective."""
    if device.type == "cuda":
        host_group = dist.new_group(backend="gloo", timeout=timeout)
    else:
        host_group = dist.distributed_c10d._get_default_group()
    return World(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        device=device,
        host_group=host_group,
        store=dist.distributed_c10d._get_default_store(),
        watch=watch or Oversight(),
    )


def make_mesh(
    device: torch.device, parallel: ParallelConfig | None = None, timeout: timedelta | None = None
) -> Mesh:
    """Make the mesh over an initialised default process group.

    Raises:
        UserError: the axes do not multiply to the size of the world.
    """
    return arrange(make_world(device, timeout), parallel, timeout)


def arrange(
    world: World, parallel: ParallelConfig | None = None, timeout: timedelta | None = None
) -> Mesh:
    """Arrange the ranks of a world in a mesh. Collective.

    Raises:
        UserError: the axes do not multiply to the size of the world.
    """
    parallel = parallel or ParallelConfig()
    world_size = world.world_size
    validate_parallel(parallel, world_size)
    # To parameters the context axis is more of dp_shard. One axis for both, because torch
    # deprecates slices with a flattened axis in them.
    num_shards = world_size // (parallel.replicate * parallel.tensor)
    whole = init_device_mesh(
        world.device.type,
        (parallel.replicate, num_shards, parallel.tensor),
        mesh_dim_names=("dp_replicate", "dp_shard_cp", "tp"),
    )
    experts = None
    if parallel.experts > 1:
        expert_axes = init_device_mesh(
            world.device.type,
            (
                parallel.replicate,
                num_shards * parallel.tensor // parallel.experts,
                parallel.experts,
            ),
            mesh_dim_names=("dp_replicate", "efsdp", "ep"),
        )
        experts = ExpertMesh(_fsdp_axes(expert_axes, "efsdp"), expert_axes["ep"])
    context = None
    if parallel.context > 1:
        # Ranks are numbered [others, context, tensor]: those of a context are `tensor` apart.
        ranks = torch.arange(world_size).view(-1, parallel.context, parallel.tensor)
        group, _ = dist.new_subgroups_by_enumeration(
            ranks.mT.flatten(0, 1).tolist(), timeout=timeout
        )
        context = Context(
            group, dist.get_rank(group), parallel.context, ring=parallel.context_engine == "ring"
        )
    return Mesh(
        rank=world.rank,
        world_size=world_size,
        device=world.device,
        host_group=world.host_group,
        store=world.store,
        watch=world.watch,
        fsdp=_fsdp_axes(whole, "dp_shard_cp"),
        context=context,
        tensor=whole["tp"],
        experts=experts,
    )


def _fsdp_axes(mesh: DeviceMesh, shard: str) -> DeviceMesh:
    """Return the axes that FSDP uses: those of replicas, if there are any, and of shards."""
    return mesh[("dp_replicate", shard)] if mesh["dp_replicate"].size() > 1 else mesh[shard]
