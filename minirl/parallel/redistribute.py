"""Differentiable moves of a tensor between placements over a group of ranks.

A placement is what a rank's tensor is of the whole: equal on all ranks (`Replicate()`), a part
along a dimension (`Shard(dim)`), or one of the terms of a sum (`Partial()`).
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Placement, Replicate, Shard

from minirl.parallel.mesh import all_gather_single, reduce_scatter_single


def move(
    x: Tensor,
    group: dist.ProcessGroup,
    source: Placement,
    target: Placement,
    *,
    grad: Placement | None = None,
) -> Tensor:
    """Move this rank's tensor from placement `source` to `target`, with a gradient.

    DTensors could do the same, at three times the cost on the host.

    Args:
        x: this rank's tensor.
        group: the ranks that hold the others.
        source: what `x` is of the whole. The gradient of `x` is returned in this placement, but
            `Replicate()` where it is `Partial()`.
        target: what the result is to be of the whole.
        grad: the placement of the gradient that backward receives; None: `target`.
    """
    return _Move.apply(x, group, source, target, grad or target)


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, source, target, grad):
        ctx.group = group
        ctx.grad = grad
        ctx.source = Replicate() if source.is_partial() else source
        return _redistribute(x, group, source, target)

    @staticmethod
    def backward(ctx, grad):
        return _redistribute(grad, ctx.group, ctx.grad, ctx.source), None, None, None, None


def _redistribute(
    x: Tensor, group: dist.ProcessGroup, source: Placement, target: Placement
) -> Tensor:
    if source == target:
        return x.view_as(x)
    if isinstance(target, Shard):
        if source.is_replicate():
            return x.chunk(group.size(), target.dim)[group.rank()].contiguous()
        x = x.movedim(target.dim, 0).contiguous()
        out = x.new_empty(len(x) // group.size(), *x.shape[1:])
        reduce_scatter_single(out, x, group=group)
        return out.movedim(0, target.dim)
    if isinstance(source, Shard):
        x = x.movedim(source.dim, 0).contiguous()
        out = x.new_empty(len(x) * group.size(), *x.shape[1:])
        all_gather_single(out, x, group=group)
        return out.movedim(0, source.dim)
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, group=group)
    return x


def own_parts(t: Tensor, parts: tuple[int, ...], rank: int, size: int, dim: int) -> Tensor:
    """Return one of `size` equal parts of each of several tensors that lie side by side.

    Args:
        t: the tensors, end to end along a dimension.
        parts: their sizes there.
        rank: which of their parts.
        size: how many each has.
        dim: the dimension.
    """
    return torch.cat([part.chunk(size, dim)[rank] for part in t.split(parts, dim)], dim)


class AllToAll(torch.autograd.Function):
    """Give each rank of a group its row of this rank's [R, ...], and get one from each."""

    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Return what the ranks have given, in their order."""
        ctx.group = group
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        """Give the gradients back."""
        return AllToAll.apply(grad, ctx.group), None
