"""FSDP2 as this house uses it: plain SUM of gradients, fp32 masters, storages that can leave the
device and come back.
"""

import functools
import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from minirl.parallel.regions import Region


def shard(
    model: nn.Module,
    layers: list[nn.Module],
    mesh: DeviceMesh,
    *,
    compute_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    reshard_after_forward: bool,
    cpu_offload: bool = False,
) -> None:
    """Shard each layer, then the root with what remains (embedding, last norm and head: tied
    weights are in one group).

    Gradients are summed, not averaged: losses are divided by global counts (algo/normalize.py), so
    averaging would put the number of ranks into the result. A world of one is sharded too: one code
    path.
    cpu_offload: shards and their gradients live on the host; a layer visits the device while it
    computes.
    """
    # Inputs stay as they are: some families keep rotary embeddings in float32, and torch 2.11 would
    # cast them in forward, not in the recomputation.
    policy = MixedPrecisionPolicy(
        param_dtype=compute_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False
    )
    offload = (
        CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if cpu_offload else OffloadPolicy()
    )
    ranks = mesh.size(-1)

    def placement(p: nn.Parameter) -> Shard | None:
        """Fused experts [E, rows, columns] by rows where there are more ranks than experts, which
        would leave ranks without any.
        """
        by_rows = p.ndim == 3 and local(p).shape[0] < ranks and p.shape[1] % ranks == 0
        return Shard(1) if by_rows else None

    for layer in layers:
        fully_shard(
            layer,
            mesh=mesh,
            mp_policy=policy,
            offload_policy=offload,
            reshard_after_forward=reshard_after_forward,
            shard_placement_fn=placement,
        )
    fully_shard(
        model, mesh=mesh, mp_policy=policy, offload_policy=offload, reshard_after_forward=False
    )  # used at both ends of the forward
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def local(t: Tensor | None, *, partial: bool = False) -> Tensor | None:
    """This rank's tensor. `partial`: this rank sees only part of the contributions to its gradient,
    which FSDP then sums once, after the last micro-batch (a hook on `.grad` would sum again at
    each).
    """
    return (
        t.to_local(grad_placements=[Partial()] if partial else None)
        if isinstance(t, DTensor)
        else t
    )


def local_region(t: Tensor) -> Region:
    """(offset, shape) of this rank's block in the coordinates of the whole tensor."""
    if not isinstance(t, DTensor):
        return Region((0,) * t.ndim, tuple(t.shape))
    shape, offset = compute_local_shape_and_global_offset(t.shape, t.device_mesh, t.placements)
    return Region(tuple(offset), tuple(shape))


def num_copies(t: Tensor) -> int:
    """Ranks that hold the same block of a tensor."""
    if not isinstance(t, DTensor):
        return 1
    return math.prod(
        t.device_mesh.size(axis)
        for axis, placement in enumerate(t.placements)
        if placement.is_replicate()
    )


@torch.no_grad()
def clip_grad_norm(parameters: list[nn.Parameter], max_norm: float) -> float:
    """Global 2-norm of the sharded gradients by one scalar all-reduce; scales them down to
    `max_norm` if it is not 0.

    torch's own works only while all parameters live on one mesh, and reduces once per parameter
    group.
    """
    grads = [local(p.grad) for p in parameters if p.grad is not None]
    copies = [num_copies(p) for p in parameters if p.grad is not None]
    wide = torch.float64 if grads[0].device.type == "cpu" else torch.float32
    norms = [
        n.to(wide).square() / c
        for n, c, g in zip(torch._foreach_norm(grads), copies, grads, strict=True)
        if g.numel()
    ]
    total = (
        torch.stack(norms).sum() if norms else torch.zeros((), dtype=wide, device=grads[0].device)
    )
    dist.all_reduce(total)
    norm = total.sqrt().item()
    if max_norm and norm > max_norm:
        torch._foreach_mul_(grads, max_norm / norm)
    return norm


class Sleeper:
    """Moves storages to host memory and back without changing any tensor object, so FSDP, optimizer
    and views stay valid.

    `active` is off without CUDA, where there is no other memory to move to; then all its verbs do
    nothing.
    """

    def __init__(self, model: nn.Module, optimizer_state: Callable[[], list[Tensor]]):
        self.model, self.optimizer_state, self.active = (
            model,
            optimizer_state,
            torch.cuda.is_available(),
        )
        self._away: dict[str, list[tuple[torch.UntypedStorage, Tensor]]] = {
            "optimizer": [],
            "parameters": [],
        }

    @torch.no_grad()
    def _offload(self, kind: str, tensors: list[Tensor]) -> int:
        # With CPU offload shards are on the host already.
        on_device = [
            t.untyped_storage()
            for t in tensors
            if self.active and (t.is_cuda or not torch.cuda.is_available())
        ]
        storages = {
            storage.data_ptr(): storage for storage in on_device if storage.nbytes()
        }.values()
        leaving = [
            (storage, torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=storage.is_cuda))
            for storage in storages
        ]
        for storage, host in leaving:
            host.copy_(_bytes(storage), non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        for storage, _ in leaving:
            storage.resize_(0)
        torch.cuda.empty_cache()  # which does nothing without CUDA
        self._away[kind] += leaving
        return sum(host.numel() for _, host in leaving)

    def sleep_optimizer(self) -> int:
        """Returns the bytes moved, like the next one."""
        return self._offload("optimizer", self.optimizer_state())

    def sleep_parameters(self) -> int:
        for module in self.model.modules():
            if self.active and isinstance(module, FSDPModule):
                module.reshard()  # the root stays gathered after a forward
        return self._offload("parameters", [local(p) for p in self.model.parameters()])

    def sleep(self) -> None:
        self.sleep_optimizer()
        self.sleep_parameters()

    @torch.no_grad()
    def _reload(self, kind: str) -> None:
        for storage, host in self._away[kind]:
            storage.resize_(host.numel())
            _bytes(storage).copy_(host, non_blocking=True)
        if self._away[kind] and torch.cuda.is_available():
            torch.cuda.synchronize()
        self._away[kind].clear()

    wake_optimizer, wake_parameters = (
        functools.partialmethod(_reload, "optimizer"),
        functools.partialmethod(_reload, "parameters"),
    )


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
