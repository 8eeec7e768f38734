"""The process group, the one DeviceMesh, and the small host-side collectives."""

import ctypes
import os
import socket
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

all_gather_single = vars(dist).get("all_gather_single", dist.all_gather_into_tensor)  # its name from torch 2.13 on
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's malloc.h


@dataclass(frozen=True)
class Mesh:
    """Who I am among the ranks, and how to talk to them."""

    rank: int
    world_size: int
    device: torch.device
    shard: DeviceMesh
    """1-D, over all ranks: FSDP shards parameters and data over it."""
    host_group: dist.ProcessGroup
    """gloo twin of the world for numpy arrays and counters, so that they never pass the accelerator."""
    store: dist.Store

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        """Add a CPU tensor over all ranks."""
        dist.all_reduce(values, group=self.host_group)
        return values

    def maxima(self, values: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.host_group)
        return values

    def gather(self, value: object) -> list:
        """A small picklable value of every rank, in rank order."""
        out = [None] * self.world_size
        dist.all_gather_object(out, value, group=self.host_group)
        return out

    def barrier(self) -> None:
        dist.barrier(group=self.host_group)


def join_world(timeout_minutes: float = 30.0) -> Mesh:
    """Join the ranks that torchrun started; without torchrun, be a world of one.

    CUDA ranks get NCCL for device tensors and gloo for host ones. vLLM reuses this default group.
    """
    if "RANK" not in os.environ:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        # Keep freed memory: by default glibc returns buffers of this size to the system, and page faults cost a tenth of a step.
        for option, value in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, 2**31 - 1)):
            ctypes.CDLL(None).mallopt(option, value)
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_ranks))
    timeout = timedelta(minutes=timeout_minutes)
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timeout)
    return make_mesh(device, timeout)


def make_mesh(device: torch.device, timeout: timedelta | None = None) -> Mesh:
    """The mesh over an initialised default process group."""
    world = dist.get_world_size()
    host_group = dist.new_group(backend="gloo", timeout=timeout) if device.type == "cuda" else dist.group.WORLD
    shard = init_device_mesh(device.type, (world,), mesh_dim_names=("dp_shard",))
    return Mesh(dist.get_rank(), world, device, shard, host_group, dist.distributed_c10d._get_default_store())
