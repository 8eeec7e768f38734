"""Export models in training, in the background, and checkpoints of runs."""

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minirl.base.files import partial_of, publish_folder, remove, sync_file, sync_files
from minirl.checkpoint.failures import attempt, describe, require_written
from minirl.checkpoint.folder import (
    FolderPlan,
    Reader,
    plan_folder,
    write_companions,
    write_files,
)
from minirl.model.adapters import files
from minirl.parallel.collect import ShardedTensor, collect, regions_of_ranks
from minirl.parallel.fsdp import local
from minirl.parallel.mesh import Mesh
from minirl.train.policy import Policy


def export(
    policy: Policy,
    folder: Path,
    *,
    weights: Mapping[str, Tensor] | None = None,
    max_file_gb: float = 4.0,
) -> None:
    """Write a Hugging Face folder that `transformers` and vLLM load. Collective.

    Args and errors are those of `Exporter.start`.
    """
    exporter = Exporter(policy.mesh)
    exporter.start(policy, folder, weights=weights, max_file_gb=max_file_gb)
    exporter.wait()


class Exporter:
    """The writer of Hugging Face folders: training goes on while threads write.

    All ranks call its methods alike. Each rank writes files of its own, from a copy in host memory.
    The folder is written beside its final name, and `wait` renames it when all ranks are done.
    """

    def __init__(self, mesh: Mesh):
        self.mesh = mesh
        self.thread = ThreadPoolExecutor(1, "export")
        self.folder = Path()  # Of the export under way.
        self.pending: Future[float] | None = None  # Seconds of this rank's write.
        # How long the slowest ranks have written, in exports that were waited for.
        self.background_seconds = 0.0

    def start(
        self,
        policy: Policy,
        folder: Path,
        *,
        weights: Mapping[str, Tensor] | None = None,
        max_file_gb: float = 4.0,
    ) -> None:
        """Copy a model to its writers and begin to write it, after any export under way.

        On return the weights may change, and in host memory each rank has those of its own files.

        Args:
            policy: the model; weights are written in the dtype of its forward.
            folder: replaced if it exists.
            weights: others than the policy's, by the same names.
            max_file_gb: size of a safetensors file, in GiB.

        Raises:
            UserError: this or the last folder could not be written.
        """
        self.wait()
        plan, read = copy_model(policy, weights=weights, max_file_gb=max_file_gb)
        self.write(plan, folder, read)

    def write(self, plan: FolderPlan, folder: Path, read: Reader) -> None:
        """Begin to write a folder, after any export under way.

        Args:
            plan: of the folder.
            folder: replaced if it exists.
            read: returns the tensors of one of this rank's files; a thread calls it.

        Raises:
            UserError: this or the last folder could not be written.
        """
        self.wait()
        self.folder = folder
        partial = partial_of(folder)

        def make_folder() -> None:
            remove(partial)
            partial.mkdir(parents=True)

        self._on_rank_0(make_folder)
        self.pending = self.thread.submit(self._write, plan, partial, read)

    def _write(self, plan: FolderPlan, partial: Path, read: Reader) -> float:
        """Write what falls to this rank, in the thread. Return the seconds that it took."""
        began = time.perf_counter()
        write_own(plan, partial, self.mesh.rank, read)
        return time.perf_counter() - began

    def wait(self) -> None:
        """Wait for the export under way, and give its folder its name. Collective.

        Raises:
            UserError: a rank could not write.
        """
        pending = self.pending
        self.pending = None
        if pending is None:
            return
        error = pending.exception()  # when the thread has ended
        seconds = 0.0 if error else pending.result()
        of_ranks = self.mesh.gather((describe(error, self.mesh.rank), seconds))
        self._require_written([failure for failure, _ in of_ranks])
        self.background_seconds += max(seconds for _, seconds in of_ranks)
        self._on_rank_0(lambda: publish_folder(self.folder))

    def _on_rank_0(self, change: Callable[[], None]) -> None:
        """Change folders on rank 0 while the others wait. UserError everywhere if it fails."""
        failure = attempt(change, 0) if self.mesh.rank == 0 else ""
        self._require_written(self.mesh.gather(failure))

    def _require_written(self, failures: list[str]) -> None:
        require_written(self.folder, partial_of(self.folder), failures)


def export_adapter(policy: Policy, folder: Path) -> None:
    """Write the adapters of a policy in PEFT's format. Collective.

    Args:
        policy: has adapters.
        folder: is there whole or not at all; one that is there is replaced.

    Raises:
        UserError: it cannot be written.
    """
    policy.shards()  # which reshards the model
    tensors = files.gather_adapter(policy.model, is_writer=policy.mesh.rank == 0)
    described = files.describe(policy.model, policy.cfg.lora, policy.folder)
    publish_adapter(tensors, described, folder, policy.mesh)


def publish_adapter(
    tensors: dict[str, Tensor], described: dict[str, Any], folder: Path, mesh: Mesh
) -> None:
    """Write an adapter beside its folder, and rename it. Collective; rank 0 writes.

    Args:
        tensors: of PEFT's file.
        described: of PEFT's config.
        folder: is there whole or not at all; one that is there is replaced.
        mesh: the ranks.

    Raises:
        UserError: it cannot be written.
    """
    partial = partial_of(folder)

    def write() -> None:
        remove(partial)
        partial.mkdir(parents=True)
        files.write_adapter(tensors, described, partial)
        publish_folder(folder)

    failure = mesh.broadcast(attempt(write, 0) if mesh.rank == 0 else "", 0)
    require_written(folder, partial, [failure])


def copy_model(
    policy: Policy, *, weights: Mapping[str, Tensor] | None = None, max_file_gb: float = 4.0
) -> tuple[FolderPlan, Reader]:
    """Copy to host memory what each rank will write of a model's folder. Collective.

    On return the weights may change. Args as of `Exporter.start`.

    Returns:
        The plan of the folder, and what returns the tensors of this rank's files, each once.
    """
    mesh = policy.mesh
    tensors = weights or policy.merged()
    shards = policy.shards()
    shapes = {name: t.shape for name, t in shards.items()}
    dtype = getattr(torch, policy.cfg.dtype)
    plan = plan_folder(policy.folder, shapes, dtype, mesh.world_size, max_file_gb)
    own = collect_own(plan, shards, tensors, mesh)

    def read(names: list[str]) -> dict[str, Tensor]:
        return {name: own.pop(name) for name in names}  # freed when its file is written

    return plan, read


def write_own(plan: FolderPlan, folder: Path, rank: int, read: Reader) -> None:
    """Write what falls to a rank of a folder, and bring it to the disk.

    Args:
        plan: of the folder.
        folder: where to; it exists.
        rank: which one.
        read: returns the tensors of one of this rank's files.
    """
    write_files(plan, folder, rank, read)
    for file in plan.files_of(rank):
        sync_file(folder / file)
    if rank == 0:
        write_companions(plan, folder)
        sync_files(folder)


def collect_own(
    plan: FolderPlan, shards: dict[str, Tensor], values: Mapping[str, Tensor], mesh: Mesh
) -> dict[str, Tensor]:
    """Return a copy of the tensors that this rank writes, whole and in host memory. Collective.

    A rank receives these and no others. On the device one of them is whole at a time.

    Args:
        plan: which rank writes which tensor.
        shards: this rank's parts of all of them, by name, for their shapes and dtypes.
        values: the same with the values that are written.
        mesh: the ranks.
    """
    regions = dict(zip(shards, regions_of_ranks(list(shards.values()), mesh), strict=True))
    own = {}
    for names in _rounds(plan, shards, mesh.world_size):
        wanted = {}
        for rank, name in names.items():
            t = values[name]
            shard = local(t.detach()).to(mesh.device, plan.dtype_in_file(name, t.dtype))
            wanted[rank] = ShardedTensor(t.shape, shard, regions[name])
        whole = collect(wanted, mesh)
        if whole is not None:
            own[names[mesh.rank]] = whole.to("cpu")
    return own


def _rounds(plan: FolderPlan, tensors: dict[str, Tensor], world_size: int) -> list[dict[int, str]]:
    """Return who receives which tensor in each round, by rank: the largest first, of one dtype."""
    queues: dict[torch.dtype, dict[int, list[str]]] = {}
    for rank in range(world_size):
        for file in plan.files_of(rank):
            for name in plan.files[file]:
                dtype = plan.dtype_in_file(name, tensors[name].dtype)
                queues.setdefault(dtype, {}).setdefault(rank, []).append(name)
    rounds = []
    for queue_of_rank in queues.values():
        for names in queue_of_rank.values():
            names.sort(key=lambda name: tensors[name].numel())
        while queue_of_rank:
            rounds.append({rank: names.pop() for rank, names in queue_of_rank.items()})
            queue_of_rank = {rank: names for rank, names in queue_of_rank.items() if names}
    return rounds
