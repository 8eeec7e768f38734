"""What FSDP2 leaves on a rank: its shards of weights and gradients, and the norm of the whole."""

import math
from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial


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
