"""FSDP2 as minirl uses it: gradients are summed, masters are float32, a rank keeps its shards."""

import math
from collections import defaultdict
from collections.abc import Iterable
from functools import partial

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


def shard(
    model: nn.Module,
    layers: list[nn.Module],
    mesh: DeviceMesh,
    *,
    compute_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    reshard_after_forward: bool,
    cpu_offload: bool = False,
    experts: list[nn.Module] | None = None,
    experts_mesh: DeviceMesh | None = None,
) -> None:
    """Shard each layer, then the root with what remains.

    What remains are the embedding, the last norm and the head: tied weights are in one group.
    Gradients are summed, not averaged: losses are divided by global counts (algo/normalize.py), so
    averaging would put the number of ranks into the result. A world of one is sharded too, so that
    there is one code path.

    Args:
        model: the whole model.
        layers: its modules that are gathered one at a time.
        mesh: 1-D or 2-D; shards over the last axis, replicates over the first of two.
        compute_dtype: dtype of the gathered parameters and of activations.
        reduce_dtype: dtype in which gradients are reduced over ranks.
        reshard_after_forward: free a layer's gathered parameters until its backward.
        cpu_offload: shards and their gradients live on the host, and a layer is on the device only
            while it computes.
        experts: modules inside layers that are gathered by themselves, over `experts_mesh`: under
            expert parallelism they are on fewer ranks.
        experts_mesh: 1-D or 2-D, as `mesh`.
    """
    # Inputs stay as they are: some families keep rotary embeddings in float32, and torch 2.11 would
    # cast them in forward, not in the recomputation.
    policy = MixedPrecisionPolicy(
        param_dtype=compute_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False
    )
    offload = OffloadPolicy()
    if cpu_offload:
        offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    modules = [(module, mesh) for module in (*layers, model)]
    if experts_mesh:
        modules = [*((module, experts_mesh) for module in experts or []), *modules]
    for module, module_mesh in modules:
        fully_shard(
            module,
            mesh=module_mesh,
            mp_policy=policy,
            offload_policy=offload,
            # The root is used at both ends of the forward.
            reshard_after_forward=reshard_after_forward and module is not model,
            shard_placement_fn=partial(_placement, ranks=module_mesh.size(-1)),
        )
    if experts_mesh:
        # A layer begins to gather its experts, and the next layer, when it begins to compute. FSDP
        # gathers ahead because the host runs ahead of the device, and expert parallelism makes the
        # host wait in each layer.
        sharded = [layer for layer in layers if isinstance(layer, FSDPModule)]
        for number, layer in enumerate(sharded):
            inside = set(layer.modules())
            within = [x for x in experts or [] if isinstance(x, FSDPModule) and x in inside]
            layer.set_modules_to_forward_prefetch([*within, *sharded[number + 1 : number + 2]])
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _placement(p: nn.Parameter, ranks: int) -> Shard | None:
    """Shard fused experts [E, rows, columns] by rows if there are more ranks than experts.

    Sharding them by experts, the default, would leave ranks without any. Gemma 4's embeddings of
    the places of patches, [2, places, H], are as few.
    """
    by_rows = p.ndim == 3 and local(p).shape[0] < ranks and p.shape[1] % ranks == 0
    return Shard(1) if by_rows else None


def gathered_bytes(t: Tensor) -> int:
    """Return the bytes of what a layer computes with of a parameter, once FSDP has gathered it."""
    if not isinstance(t, DTensor):
        return t.nbytes
    mesh = t.device_mesh
    assert mesh.mesh_dim_names
    parts = [
        mesh.size(i)
        for i, (axis, placement) in enumerate(zip(mesh.mesh_dim_names, t.placements, strict=True))
        if axis in ("tp", "ep") and placement.is_shard()
    ]
    return t.nbytes // math.prod(parts)


def reshard(model: nn.Module) -> None:
    """Free what is gathered, so that the model's parameters are its shards again.

    After a forward without a backward the root is still gathered. Its parameters are then other
    objects than those that the optimizer knows, in memory that the next step frees. Without
    anything gathered this does nothing.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def local(t: Tensor, *, partial: bool = False) -> Tensor:
    """Return this rank's tensor, which is `t` itself if that is no DTensor.

    Args:
        t: a parameter, gradient or state.
        partial: this rank sees only a part of the contributions to the gradient of `t`. FSDP then
            sums them once, after the last micro-batch (a hook on `.grad` would sum again at each).
    """
    if not isinstance(t, DTensor):
        return t
    return t.to_local(grad_placements=[Partial()] if partial else None)


def num_copies(t: Tensor) -> int:
    """Return the number of ranks that hold the same block of a tensor."""
    if not isinstance(t, DTensor):
        return 1
    return math.prod(
        t.device_mesh.size(axis)
        for axis, placement in enumerate(t.placements)
        if placement.is_replicate()
    )


@torch.no_grad()
def grad_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Return the global 2-norm of the sharded gradients, a scalar on their device. Collective.

    It takes one all-reduce of a scalar. torch's own works only while all parameters live on one
    mesh, and reduces once per parameter group.

    Args:
        parameters: on any meshes; those without a gradient are left out.
    """
    whole = [p.grad for p in parameters if p.grad is not None]
    grads = [local(grad) for grad in whole]
    wide = torch.float32 if grads[0].is_cuda else torch.float64
    norms = defaultdict(list)  # By the number of ranks that hold the same.
    for dtensor, grad, local_norm in zip(whole, grads, torch._foreach_norm(grads), strict=True):
        if grad.numel():
            norms[num_copies(dtensor)].append(local_norm)
    total = grads[0].new_zeros((), dtype=wide)
    for copies, local_norms in norms.items():
        total += torch.stack(local_norms).to(wide).square().sum() / copies
    dist.all_reduce(total)
    return total.sqrt()


@torch.no_grad()
def scale_gradients(parameters: Iterable[nn.Parameter], factor: float) -> None:
    """Multiply all gradients by a number."""
    torch._foreach_mul_([local(p.grad) for p in parameters if p.grad is not None], factor)
