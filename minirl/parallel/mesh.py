"""The ranks: the one DeviceMesh, and the small collectives between hosts."""

import logging
import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from minirl.base.oversight import Oversight
from minirl.config.policy import Dtype
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
    device_group: ProcessGroup  # For tensors on the device.
    # A gloo twin of it for numpy arrays and counters, which then never pass the accelerator.
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
        gathered, lengths = self._gather(rows)
        return np.split(gathered, np.cumsum(lengths)[:-1])

    def gather_array(self, part: np.ndarray) -> np.ndarray:
        """Return the arrays of all ranks end to end, along the first axis. Collective.

        Nothing is pickled, so an array may be large: besides the result a rank needs memory for
        twice GATHERED_BYTES.
        """
        return self._gather(part)[0] if self.world_size > 1 else part

    def _gather(self, part: np.ndarray) -> tuple[np.ndarray, list[int]]:
        """Return the arrays of all ranks end to end, and how long each of them is. Collective."""
        sizes = torch.empty(self.world_size, dtype=torch.int64)
        all_gather_single(sizes, torch.tensor([len(part)]), group=self.host_group)
        lengths = sizes.tolist()
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
        return gathered, lengths

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
    # What all of its ranks do. With parallel.generators each side has a mesh of its own, and
    # `whole` has the ranks of both.
    side: Literal["both", "trainers", "generators"] = "both"
    whole: World | None = None

    @property
    def everyone(self) -> World:
        """Return all ranks of the run, also those of the other side."""
        return self.whole or self

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
        return self.sums(values.clone()) / self.tensor.size()
