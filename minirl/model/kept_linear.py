"""The linear maps of a layer in selective checkpointing, which keep their results."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minirl.model import selective


class Linear(torch.autograd.Function):
    """F.linear, of which the result is kept."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return x weight' + bias: [..., in] -> [..., out]."""
        of_x, of_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if of_weight else None, weight if of_x else None)
        return selective.keep(lambda: (F.linear(x, weight, bias),))[0]

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients of all three, as torch computes them."""
        x, weight = ctx.saved_tensors
        rows = grad.flatten(0, -2)
        grad_x = None if weight is None else (rows @ weight).view(*grad.shape[:-1], -1)
        grad_weight = None if x is None else rows.t() @ x.flatten(0, -2)
        grad_bias = rows.sum(0) if ctx.needs_input_grad[2] else None
        return grad_x, grad_weight, grad_bias


def install(layers: list[nn.Module]) -> None:
    """Let the linear maps of layers keep their results.

    Args:
        layers: before parameters are split. Linears with a forward of their own are left out, such
            as those with an adapter, which calls `selective.keep` itself.
    """
    for layer in layers:
        for module in layer.modules():
            if type(module) is nn.Linear and "forward" not in vars(module):
                module.forward = _forward(module)  # type: ignore


def _forward(module: nn.Linear) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        if selective.is_on():
            return Linear.apply(x, module.weight, module.bias)
        return F.linear(x, module.weight, module.bias)

    return forward
