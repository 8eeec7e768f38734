"""The ranks of a run on their machines: how they join, and what must be the same everywhere.

What a machine lacks is said before anything is loaded: a file that only one of them has would end
some ranks while the others wait for them.
"""

import contextlib
import ctypes
import math
import os
import socket
import uuid
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from minirl.base.errors import UserError, require
from minirl.base.oversight import Oversight
from minirl.config.policy import ParallelConfig
from minirl.config.validate import validate_parallel
from minirl.parallel.mesh import ExpertMesh, Mesh, World
from minirl.parallel.sides import enter_side
from minirl.types.packed import Context

# Options of mallopt, from glibc's malloc.h.
M_TRIM_THRESHOLD = -1
M_MMAP_MAX = -4

# A container's quota of CPU time, as Linux's cgroups of version 2 have it: microseconds ("max" if
# there is none) of a period of so many microseconds.
CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def num_cores() -> int:
    """Return how many cores this process may keep busy.

    They are those that it may run on, or fewer where its container has a quota (docker run --cpus,
    limits.cpu of Kubernetes). Threads beyond a quota use it up while they wait for each other.
    """
    cores = len(os.sched_getaffinity(0))
    if not CPU_QUOTA.exists():
        return cores
    quota, period = CPU_QUOTA.read_text().split()
    if quota == "max":
        return cores
    return min(cores, math.ceil(int(quota) / int(period)))


def join_world(parallel: ParallelConfig | None = None) -> Mesh:
    """Join the ranks that torchrun started, and arrange them in a mesh.

    Args:
        parallel: sizes of the mesh's axes; None: all ranks are data-parallel.

    Raises:
        UserError: the axes do not multiply to the size of the world, or GPUs are missing.
    """
    world = open_world()
    check_gpus()
    return arrange(world, parallel)


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
        torch.set_num_threads(max(1, num_cores() // ranks_of_node()))
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
    device_group = host_group = dist.distributed_c10d._get_default_group()
    if device.type == "cuda":
        host_group = dist.new_group(backend="gloo", timeout=timeout)
    return World(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        device=device,
        device_group=device_group,
        host_group=host_group,
        store=dist.distributed_c10d._get_default_store(),
        watch=watch or Oversight(),
    )


def arrange(
    world: World, parallel: ParallelConfig | None = None, timeout: timedelta | None = None
) -> Mesh:
    """Arrange the ranks of a world in a mesh, or those of each side in one of its own. Collective.

    Raises:
        UserError: the axes do not multiply to the size of the world.
    """
    parallel = parallel or ParallelConfig()
    num_trainers = world.world_size - parallel.generators
    validate_parallel(parallel, num_trainers)
    whole: World | None = None
    side: Literal["both", "trainers", "generators"] = "both"
    if parallel.generators:
        side = enter_side(world, num_trainers, timeout)
        whole = world
        world = make_world(world.device, timeout, world.watch)
    if side == "generators":
        parallel = ParallelConfig()
    world_size = world.world_size
    # To parameters the context axis is more of dp_shard. One axis for both, because torch
    # deprecates slices with a flattened axis in them.
    num_shards = world_size // (parallel.replicate * parallel.tensor)
    axes = init_device_mesh(
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
        **vars(world),
        fsdp=_fsdp_axes(axes, "dp_shard_cp"),
        context=context,
        tensor=axes["tp"],
        experts=experts,
        side=side,
        whole=whole,
    )


def _fsdp_axes(mesh: DeviceMesh, shard: str) -> DeviceMesh:
    """Return the axes that FSDP uses: those of replicas, if there are any, and of shards."""
    return mesh[("dp_replicate", shard)] if mesh["dp_replicate"].size() > 1 else mesh[shard]


# --------------------------------------------------------------------------------------------------
# what must be the same


@contextlib.contextmanager
def errors_of_all(world: World, *, same_everywhere: bool = False) -> Iterator[None]:
    """Raise the UserError of a rank in the block on every rank: that of the lowest. Collective.

    Args:
        world: the ranks.
        same_everywhere: the block does the same on every rank, so that an error that not all of
            them have is one of a machine, which the message names.
    """
    message = None
    try:
        yield
    except UserError as error:
        message = str(error)
    by_rank = world.gather(message)
    failed = [rank for rank, text in enumerate(by_rank) if text is not None]
    if not failed:
        return
    text = by_rank[failed[0]]
    if same_everywhere and len(failed) < world.world_size:
        hosts = world.gather(socket.gethostname())
        good = [rank for rank in range(world.world_size) if rank not in failed]
        text = (
            f"{text} (so on {_places(failed, hosts)}, and not on {_places(good, hosts)}; every "
            "machine of a run needs the same files at the same place)"
        )
    raise UserError(text)


def check_same(values: Mapping[str, object], world: World) -> None:
    """Refuse values that differ between the ranks. Collective.

    Args:
        values: name for errors -> value, compared by its text.
        world: the ranks.

    Raises:
        UserError: for the first that differs.
    """
    by_rank = world.gather({name: str(value) for name, value in values.items()})
    names = dict.fromkeys(name for seen in by_rank for name in seen)
    for name in names:
        texts = [seen.get(name, "missing") for seen in by_rank]
        if len(set(texts)) == 1:
            continue
        hosts = world.gather(socket.gethostname())
        other = next(text for text in texts if text != texts[0])
        places = []
        for text in (texts[0], other):
            ranks = [rank for rank, found in enumerate(texts) if found == text]
            places.append(f"{text} on {_places(ranks, hosts)}")
        raise UserError(
            f"{name} is {' and '.join(places)}; every machine of a run needs the same settings and "
            "files"
        )


def check_shared(folder: Path, setting: str, world: World) -> None:
    """Refuse a folder that not all ranks can write to, or that is not the same one. Collective.

    Rank 0 writes a small file, for which the others look; what was made for it is removed again.
    Nobody but rank 0 may have looked for the folder before: a network file system may remember for
    a minute that there was none.

    Args:
        folder: it may not exist yet.
        setting: the setting that names it, for errors.
        world: the ranks.

    Raises:
        UserError: on all ranks.
    """
    # 1. Rank 0 writes.
    name = world.broadcast(f".seen-by-all-{uuid.uuid4().hex[:8]}", 0)
    made: list[Path] = []
    with errors_of_all(world):
        if world.rank == 0:
            try:
                made = [path for path in (folder, *folder.parents) if not path.exists()]
                folder.mkdir(parents=True, exist_ok=True)
                (folder / name).touch()
            except OSError as error:
                raise UserError(
                    f"{setting} = {folder} cannot be written to: {error}; choose another folder"
                ) from error

    # 2. All look. (pathlib would raise for a folder that this user may not enter.)
    hosts = world.gather(socket.gethostname())
    seen = world.gather(os.path.exists(folder / name))
    writable = world.gather(os.access(folder, os.W_OK))
    if world.rank == 0:
        (folder / name).unlink()
        with contextlib.suppress(OSError):  # another run has put something there meanwhile
            for path in made:
                path.rmdir()
    blind = [rank for rank in range(world.world_size) if not seen[rank]]
    require(
        not blind,
        f"{setting} = {folder} is not one folder for all machines: what rank 0 writes there on "
        f"{hosts[0]} is not seen on {_places(blind, hosts)}; name a folder of a file system that "
        "all machines of the run mount at the same place",
    )
    mute = [rank for rank in range(world.world_size) if not writable[rank]]
    require(
        not mute,
        f"{setting} = {folder} cannot be written to on {_places(mute, hosts)}; every rank writes "
        "its part of a checkpoint there, so mount it for writing on all machines",
    )


def check_on_one_machine(num_ranks: int, setting: str, world: World, first: int = 0) -> None:
    """Refuse groups of consecutive ranks that span machines. Collective.

    Args:
        num_ranks: size of a group.
        setting: the setting that has it, for errors.
        world: the ranks.
        first: the first rank that is in a group.

    Raises:
        UserError: on all ranks.
    """
    hosts = world.gather(socket.gethostname())
    for begin in range(first, world.world_size, num_ranks):
        group = list(range(begin, begin + num_ranks))
        require(
            len({hosts[rank] for rank in group}) == 1,
            f"{setting} = {num_ranks} puts ranks of {_places(group, hosts)} together, which must "
            "be on one machine; lower it, or start more ranks on each",
        )


def _places(ranks: list[int], hosts: list[str]) -> str:
    """Return the machines of some ranks with those ranks: `node-1 (ranks 2, 3)`."""
    by_host: dict[str, list[str]] = {}
    for rank in ranks:
        by_host.setdefault(hosts[rank], []).append(str(rank))
    named = [
        f"{host} (rank{'s' * (len(numbers) > 1)} {', '.join(numbers)})"
        for host, numbers in by_host.items()
    ]
    if len(named) > 3:
        named = [*named[:3], f"{len(named) - 3} more"]
    return ", ".join(named)


def check_can_write(path: Path, setting: str, world: World) -> None:
    """Refuse a file that could not be written later; its folder is made. Collective.

    Rank 0, which will write it, tries; others that tried meanwhile would see its attempt, or remove
    it.

    Raises:
        UserError: on all ranks, if it is a folder, or its folder cannot be made or written to.
    """
    with errors_of_all(world):
        if world.rank != 0:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            is_new = not os.path.lexists(path)
            with path.open("ab"):  # /proc says that it can be written to, and cannot
                pass
            if is_new:
                path.unlink()
        except (OSError, ValueError) as error:
            raise UserError(
                f"{setting} = {path} cannot be written: {error}; name another file"
            ) from error
