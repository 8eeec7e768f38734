"""Weights with their adapters merged: W + scale B A, and products with them."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minirl.model.adapters import nf4
from minirl.model.adapters.nf4 import Multiply, Packed

RANKS = 8  # The grouped kernel of CUDA takes rows of a multiple of 16 bytes.


def merge(weight: Tensor, b: Tensor, a: Tensor, scale: float) -> Tensor:
    """Return weight + scale B A, rounded once, in the dtype of the weight.

    The factors are rounded to that dtype first, as FSDP gathers them.

    Args:
        weight: [.., out, in].
        b: [.., out, rank].
        a: [.., rank, in].
        scale: `Adapters.scale`.
    """
    stacked = weight.view(-1, *weight.shape[-2:])
    b = b.to(weight.dtype).view(len(stacked), *b.shape[-2:])
    a = a.to(weight.dtype).view(len(stacked), *a.shape[-2:])
    # Not `@`, whose results selective checkpointing keeps (model/build.py): a second model.
    if weight.dtype in (torch.bfloat16, torch.float16):
        return torch.baddbmm(stacked, b, a, alpha=scale).view(weight.shape)
    return (stacked + torch.baddbmm(stacked, b, a, beta=0) * scale).view(weight.shape)


class _Product(torch.autograd.Function):
    """x times a merged weight, of which the factors have gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        a: Tensor,
        b: Tensor,
        bias: Tensor | None,
        scale: float,
        multiply: Multiply,
        packed: Packed | None,
        *base: Tensor,
    ) -> Tensor:
        """Multiply by the merged weight, and keep what it was made of."""
        ctx.save_for_backward(x, a, b, *base)
        ctx.scale = scale
        ctx.multiply = multiply
        ctx.packed = packed
        weight = _merged_weight(packed, base, b, a, scale)
        return multiply(x, weight) if bias is None else F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        """Merge again for the gradient of x. The gradients of A and B are those of B A x."""
        x, a, b, *base = ctx.saved_tensors
        grad_x = None
        if ctx.needs_input_grad[0]:
            weight = _merged_weight(ctx.packed, tuple(base), b, a, ctx.scale)
            grad_x = ctx.multiply(grad, weight.mT)
        with torch.enable_grad():
            factors = [a.detach().requires_grad_(), b.detach().requires_grad_()]
            padded_a, padded_b = _padded(*factors)
            low = ctx.multiply(x.detach(), padded_a) * ctx.scale  # here it has the fewest columns
            added = ctx.multiply(low, padded_b)
            grad_a, grad_b = torch.autograd.grad(added, factors, grad)
        grad_bias = None
        if ctx.needs_input_grad[3]:
            grad_bias = grad.flatten(0, -2).sum(0)
        without = [None] * (len(base) + 3)
        return grad_x, grad_a, grad_b, grad_bias, *without


def _padded(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return factors of experts with a rank that the grouped kernel of CUDA takes."""
    missing = -b.shape[-1] % RANKS if b.ndim == 3 else 0
    if not missing:
        return a, b
    return F.pad(a, (0, 0, 0, missing)), F.pad(b, (0, missing))


def product(
    x: Tensor,
    a: Tensor,
    b: Tensor,
    scale: float,
    multiply: Multiply,
    packed: Packed | None,
    *base: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """Return multiply(x, W + scale B A), and the bias.

    The weight is merged before it is multiplied by, and rounded as `Merged` rounds it, so that the
    engine computes with the same weights bit by bit. A sum of two products, W x and B A x, would
    differ from them by a rounding of bfloat16 for each weight, which is as large as what adapters
    change: the log-probs of engine and trainer would be twice as far apart as in full training.

    Args:
        x: [.., in].
        a: [.., rank, in].
        b: [.., out, rank].
        scale: `Adapters.scale`.
        multiply: its gradient for x must be multiply(gradient, weight.mT).
        packed: of a base that is held in four bits; None: it is not.
        base: the frozen weight [.., out, in]; or, in four bits, its bytes and its scales.
        bias: [out], of a linear.
    """
    return _Product.apply(x, a, b, bias, scale, multiply, packed, *base)


def _merged_weight(
    packed: Packed | None, base: tuple[Tensor, ...], b: Tensor, a: Tensor, scale: float
) -> Tensor:
    weight = nf4.dequantise(packed, *base) if packed else base[0]
    return merge(weight, b, a, scale)
