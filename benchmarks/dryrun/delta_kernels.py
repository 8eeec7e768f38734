"""What the kernels of gated delta nets do, on tensors that have no values.

Those of flash-linear-attention and causal-conv1d need a device. The functions here allocate what
they do, in their order, and keep the same for backward. Each kernel is an operator, of which the
meter sees what it reads, writes and multiplies. So a plan needs neither package. The kernels are
those of fla/ops/gated_delta_rule/chunk.py in flash-linear-attention 0.6.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from minirl.model import delta_net
from minirl.plan.costs import delta_rule_flops
from minirl.types.packed import CHUNK

KERNEL = "dryrun::delta_kernel"
# Multiplications and additions of backward for each one of forward: its products' gradients, and
# the states, which are computed again.
BACKWARD = 2.6


@torch.library.custom_op(KERNEL, mutates_args=("written",))
def _launch(read: Sequence[Tensor], written: Sequence[Tensor], flops: float) -> None:
    """Stand for a kernel that reads tensors and writes others."""
    raise NotImplementedError("there are no values on a pretended device")


@_launch.register_fake
def _(read: Sequence[Tensor], written: Sequence[Tensor], flops: float) -> None:
    return None


def pretend() -> None:
    """Let the gated delta nets of this process compute as if both packages were installed."""
    net: Any = delta_net
    net.convolution_kernel = lambda x: _convolve
    net.delta_rule_kernel = lambda q: _delta_rule


def _convolve(features: Tensor, weight: Tensor, *, activation: str) -> Tensor:
    return _Convolution.apply(features, weight)


def _delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    rate: Tensor,
    initial: Tensor | None,
    cu_rows: Tensor,
) -> tuple[Tensor, Tensor]:
    inputs = (x.contiguous() for x in (q, k, v, log_decay, rate))
    return _DeltaRule.apply(*inputs, initial, len(cu_rows) - 1)


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        (out,) = _made([x, weight], x)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple:
        x, weight = ctx.saved_tensors
        return tuple(_made([x, weight, grad], x, weight))


class _DeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor,
        rate: Tensor,
        initial: Tensor | None,
        num_sequences: int,
    ) -> tuple[Tensor, Tensor]:
        (q,) = _made([q], q)  # Normed.
        (k,) = _made([k], k)
        (decay,) = _made([log_decay], log_decay)  # From the chunk's start.
        solved = k.new_empty(*k.shape[:2], CHUNK)  # The inverses of the chunks' systems.
        _launch([k, decay, rate], [solved], 0.0)
        of_state, values = _made([k, v, decay, rate, solved], k, v)
        final = k.new_empty(num_sequences, *k.shape[1:], v.shape[2], dtype=torch.float32)
        states, corrections = _through_chunks([k, of_state, values, decay, initial], [final])
        flops = float(k.shape[0] * k.shape[1] * delta_rule_flops(k.shape[2], v.shape[2]))
        (out,) = _made([q, k, corrections, states, decay], v, flops=flops)
        ctx.save_for_backward(q, k, v, decay, rate, solved, initial)
        ctx.flops = flops
        return out, final

    @staticmethod
    def backward(ctx, grad: Tensor, grad_final: Tensor | None) -> tuple:
        q, k, v, decay, rate, solved, initial = ctx.saved_tensors
        of_state, values = _made([k, v, decay, rate, solved], k, v)
        states, corrections = _through_chunks([k, of_state, values, decay, initial], [])
        (in_chunk,) = _made([q, k, decay, grad], v)
        given = [q, k, of_state, decay, grad, in_chunk]
        grad_states, grad_values = _made(given, states, v)
        grad_initial = None if initial is None else _made([grad_states], initial)[0]
        given = [q, k, corrections, of_state, decay, states, grad_values, grad, grad_states]
        grad_q, grad_k, grad_of_state, grad_decay = _made(given, q, k, k, decay)
        given = [k, v, rate, decay, solved, grad_of_state, grad_values]
        more_k, grad_v, grad_rate = _made(given, k, v, rate, flops=BACKWARD * ctx.flops)
        grad_k.add_(more_k)
        (grad_q,) = _made([q, grad_q], q)
        (grad_k,) = _made([k, grad_k], k)
        return grad_q, grad_k, grad_v, grad_decay, grad_rate, grad_initial, None


def _through_chunks(given: list[Tensor | None], more: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Launch the kernel that goes through sequences.

    Args:
        given: keys [T, H, Dk], what they read of the state, values [T, H, Dv], and more.
        more: what it writes beside its results.

    Returns:
        The states before chunks [C, H, Dk, Dv], and what rows correct in them [T, H, Dv].
    """
    read = [x for x in given if x is not None]
    k, _, values = read[:3]
    num_chunks = -(-k.shape[0] // CHUNK)  # As if all were full.
    states = k.new_empty(num_chunks, *k.shape[1:], values.shape[2])
    corrections = torch.empty_like(values)
    _launch(read, [states, corrections, *more], 0.0)
    return states, corrections


def _made(given: list[Tensor], *like: Tensor, flops: float = 0.0) -> list[Tensor]:
    """Launch a kernel that reads some tensors and returns others, which are like these."""
    made = [torch.empty_like(x) for x in like]
    _launch(given, made, flops)
    return made
