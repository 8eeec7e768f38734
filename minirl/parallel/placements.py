"""How tensors lie on an axis of ranks, and how they move between placements.

A placement is what a rank's tensor is of the whole: equal on all ranks (`Replicate()`), a part
along a dimension (`Shard(dim)`), or one of the terms of a sum (`Partial()`). Moves have gradients.
`shard_all` places the parameters of a module on an axis that splits modules: tensor or expert
parallelism.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

from minirl.base.errors import UserError
from minirl.parallel.fsdp import local
from minirl.parallel.mesh import all_gather_single, reduce_scatter_single
from minirl.types.packed import Context

# Axes, and the settings of their sizes.
_SETTINGS = {"tp": "parallel.tensor", "ep": "parallel.experts"}
Forward = Callable[..., Any]  # Of a module.


# --------------------------------------------------------------------------------------------------
# moves


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


def local_parts(t: Tensor, parts: tuple[int, ...], rank: int, size: int, dim: int) -> Tensor:
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
    """Give each rank of a group its rows of this rank's tensor, and get rows from each."""

    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        group: dist.ProcessGroup,
        sent: list[int] | None = None,
        received: list[int] | None = None,
    ) -> Tensor:
        """Return what the ranks have given, in their order.

        Args:
            ctx: for backward.
            x: [N, ...], rows in the order of the ranks that they go to.
            group: the ranks.
            sent: how many rows go to each of them; None: as many to each.
            received: how many come from each; None: as many as go to it.
        """
        ctx.arguments = group, received, sent
        num_rows = len(x) if received is None else sum(received)
        out = x.new_empty(num_rows, *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None, None]:
        """Give the gradients back the same way."""
        return AllToAll.apply(grad, *ctx.arguments), None, None, None


def gather_keys(k: Tensor, v: Tensor, context: Context) -> tuple[Tensor, Tensor]:
    """Return keys and values of all ranks, [T, Hkv, D] -> [R T, Hkv, D], by one collective.

    Its backward is a reduce-scatter.
    """
    both = torch.stack([k, v], dim=1)
    keys, values = move(both, context.group, Shard(0), Replicate(), grad=Partial()).unbind(1)
    return keys, values


class RingTransfer:
    """Tensors on their way to the next rank of the ring, while the previous rank's arrive."""

    def __init__(self, tensors: list[Tensor], context: Context):
        """Begin to send `tensors`, and to receive as many of the same shapes."""
        self._sent = [t.contiguous() for t in tensors]  # kept until they have arrived
        self._received = []
        self._works = []
        for sent in self._sent:
            received = torch.empty_like(sent)
            self._received.append(received)
            num_received = [0] * context.size
            num_received[context.rank - 1] = len(sent)  # rank 0 receives from the last one
            num_sent = [0] * context.size
            num_sent[(context.rank + 1) % context.size] = len(sent)
            self._works.append(
                dist.all_to_all_single(
                    received, sent, num_received, num_sent, context.group, async_op=True
                )
            )

    def wait(self) -> list[Tensor]:
        """Wait for the previous rank's tensors, and return them."""
        for work in self._works:
            work.wait()
        return self._received


# --------------------------------------------------------------------------------------------------
# layouts of parameters


class Layout(NamedTuple):
    """How a parameter lies on an axis, and what the forward uses of it."""

    placement: Placement
    view: Callable[[Tensor], Tensor | None] = local


# Every rank has all of it, and sees a part of the contributions to its gradient.
WHOLE = Layout(Replicate(), partial(local, partial=True))


def shard_all(
    module: nn.Module,
    mesh: DeviceMesh,
    layout: Layout,
    *,
    others: dict[str, Layout] | None = None,
) -> Forward:
    """Shard a module's parameters, and return its forward on this rank's local tensors.

    Args:
        module: a module with parameters.
        mesh: the axis, 1-D.
        layout: the layout of its parameters.
        others: other layouts of single parameters, by name.

    Raises:
        UserError: the axis does not divide a parameter.
    """
    layouts = dict.fromkeys(module._parameters, layout) | (others or {})
    for name, parameter in module._parameters.items():
        placement = layouts[name].placement
        if parameter is None or isinstance(parameter, DTensor):
            continue
        if isinstance(placement, Shard) and parameter.shape[placement.dim] % mesh.size():
            assert mesh.mesh_dim_names
            raise UserError(
                f"{_SETTINGS[mesh.mesh_dim_names[0]]} = {mesh.size()} does not divide dimension "
                f"{placement.dim} of {type(module).__name__}.{name}, {tuple(parameter.shape)}; "
                "take a smaller one"
            )
        # No broadcast from a source rank: all have the same values, or meta tensors.
        sharded = distribute_tensor(parameter.data, mesh, [placement], src_data_rank=None)
        module._parameters[name] = nn.Parameter(sharded, parameter.requires_grad)
    plain = module.forward

    def forward(*args: object, **kwargs: object) -> Any:
        parameters: dict = module._parameters
        dtensors = {name: p for name, p in parameters.items() if p is not None}
        for name, p in dtensors.items():
            parameters[name] = layouts[name].view(p)
        try:
            return plain(*args, **kwargs)
        finally:
            parameters.update(dtensors)

    return forward
