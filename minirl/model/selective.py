"""Selective checkpointing: backward computes a layer again, all but its products and attention.

In forward a layer keeps its input and the results of what takes time, in the order in which they
are computed. In backward its second forward takes those instead of computing them, and computes
norms, gates and rotary positions: Korthikanti et al. 2022 (arXiv 2205.05198), sec. 5, with another
choice of what is kept.

torch's own (`create_selective_checkpoint_contexts`) does the same for any operator. It sees each of
them through a mode that costs the host 4 ms a layer; here, the functions whose results are kept say
so.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Tensors = tuple[Tensor, ...]


class _Results:
    """What a layer has kept, first in, first out."""

    def __init__(self) -> None:
        self.kept: deque[Tensors] = deque()
        self.is_second = False  # The layer is computed again.


_current: _Results | None = None  # Of the layer that is being computed.


def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return what surrounds the two forwards of a layer: `context_fn` of torch's `checkpoint`."""
    results = _Results()
    return _surround(results, is_second=False), _surround(results, is_second=True)


@contextmanager
def _surround(results: _Results, *, is_second: bool) -> Iterator[None]:
    global _current
    before = _current
    _current = results
    results.is_second = is_second
    try:
        yield
    finally:
        _current = before


def is_on() -> bool:
    """Return whether the layer that is being computed keeps results."""
    return _current is not None


def keep(compute: Callable[[], Tensors]) -> Tensors:
    """Return what a function computes, or has computed in the layer's first forward.

    To be called in the forward of an autograd function. Nothing may write into the results of the
    first forward, and what the function itself keeps is not kept twice.
    """
    global _current
    results = _current
    if results is None:
        return compute()
    if results.is_second:
        return results.kept.popleft()
    _current = None
    try:
        tensors = compute()
    finally:
        _current = results
    results.kept.append(tuple(t.detach() for t in tensors))
    return tensors


class Linear(torch.autograd.Function):
    """F.linear, of which the result is kept."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return x weight' + bias: [..., in] -> [..., out]."""
        of_x, of_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if of_weight else None, weight if of_x else None)
        return keep(lambda: (F.linear(x, weight, bias),))[0]

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
            as those with an adapter, which calls `keep` itself.
    """
    for layer in layers:
        for module in layer.modules():
            if type(module) is nn.Linear and "forward" not in vars(module):
                module.forward = partial(_forward, module)  # type: ignore[method-assign]


def _forward(module: nn.Linear, x: Tensor) -> Tensor:
    if is_on():
        return Linear.apply(x, module.weight, module.bias)
    return F.linear(x, module.weight, module.bias)
