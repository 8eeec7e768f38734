"""What the functions of `fused.liger` do, on tensors that have no values.

They allocate what those do, and keep the same for backward, so that a plan needs no package.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from minirl.model import fused, selective

KERNEL = "dryrun::liger_kernel"


@torch.library.custom_op(KERNEL, mutates_args=("written",))
def _launch(read: Sequence[Tensor], written: Sequence[Tensor]) -> None:
    """Stand for a kernel that reads tensors and writes others."""
    raise NotImplementedError("there are no values on a pretended device")


@_launch.register_fake
def _(read: Sequence[Tensor], written: Sequence[Tensor]) -> None:
    return None


def pretend() -> None:
    """Let models of this process compute as if liger-kernel were installed."""
    module: Any = fused
    module.has_liger = lambda: True
    module.liger = lambda: fused.Kernels(_norm, _gated, _Rotate.apply)


def _norm(x: Tensor, weight: Tensor, eps: float, offset: float, wide: bool) -> Tensor:
    return _RMSNorm.apply(x, weight)


def _gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    return _Gated.apply(gate.contiguous(), up.contiguous())


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        scale = rows.new_empty(len(rows), dtype=torch.promote_types(x.dtype, torch.float32))
        out = torch.empty_like(rows)
        _launch([rows, weight], [out, scale])
        ctx.save_for_backward(rows, weight, scale)
        return out.view(x.shape)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple:
        rows, weight, scale = ctx.saved_tensors
        grad_x = torch.empty_like(rows)
        grad_weight = torch.empty_like(weight)
        given = [grad.reshape(rows.shape).contiguous(), rows, weight, scale]
        _launch(given, [grad_x, grad_weight])
        return grad_x.view(grad.shape), grad_weight


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        out = torch.empty_like(gate)
        _launch([gate, up], [out])
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple:
        gate, up = ctx.saved_tensors
        _launch([grad.contiguous(), gate, up], [gate, up])  # The gradients are in their place.
        return gate, up


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        if selective.is_on():  # as `fused.liger` does
            query, key = query.clone(), key.clone()
        _launch([query, key, cos, sin], [query, key])
        ctx.save_for_backward(cos, sin)
        return query.view_as(query), key.view_as(key)

    @staticmethod
    def backward(ctx, grad_q: Tensor, grad_k: Tensor) -> tuple:
        q = grad_q.transpose(1, 2).contiguous()
        k = grad_k.transpose(1, 2).contiguous()
        _launch([q, k, *ctx.saved_tensors], [q, k])
        return q.transpose(1, 2), k.transpose(1, 2), None, None
