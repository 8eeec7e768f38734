"""FSDP2 as minirl uses it: gradients are summed, masters are float32."""

import math
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard

from minirl.parallel.fsdp import local


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
    # Between micro-batches torch looks for gathered gradients of whatever has a dtype to reduce
    # them in; of what never runs, nothing is ever gathered.
    frozen_policy = replace(policy, reduce_dtype=None)
    for module, module_mesh in modules:
        is_trained = any(p.requires_grad for p in module.parameters())
        fully_shard(
            module,
            mesh=module_mesh,
            mp_policy=policy if is_trained else frozen_policy,
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
