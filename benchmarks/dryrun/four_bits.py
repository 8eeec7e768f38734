"""What bitsandbytes does with weights in four bits, on tensors that have no values.

bitsandbytes cannot be imported where the device is pretended, and a plan does not need it to be
installed. minirl's own arithmetic with the scales is what runs in training.
"""

from typing import Any

import torch
from torch import Tensor

from minirl.model import causal
from minirl.model.adapters import nf4
from minirl.model.adapters.nf4 import BLOCK, NESTED


@torch.library.custom_op("dryrun::dequantize_4bit", mutates_args=())
def dequantize(bits: Tensor, absmax: Tensor, shape: list[int], dtype: torch.dtype) -> Tensor:
    """Stand for the kernel, which reads packed bytes and scales and writes a weight."""
    raise NotImplementedError("there are no values on a pretended device")


@dequantize.register_fake
def _(bits: Tensor, absmax: Tensor, shape: list[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=bits.device)


class _State:
    """The library's QuantState, as `nf4.dequantise` makes it."""

    def __init__(self, absmax: Tensor, *, shape: torch.Size, dtype: torch.dtype, **_: object):
        self.absmax = absmax
        self.shape = shape
        self.dtype = dtype


class _Library:
    """The functions that `nf4.dequantise` calls."""

    QuantState = _State

    @staticmethod
    def get_4bit_type(name: str, device: torch.device) -> Tensor:
        """Return the 16 values."""
        return torch.empty(16, device=device)

    @staticmethod
    def dequantize_4bit(bits: Tensor, state: _State) -> Tensor:
        """Return a weight."""
        return dequantize(bits, state.absmax, list(state.shape), state.dtype)


def pretend() -> None:
    """Let the weights of this process be dequantised without bitsandbytes."""
    library: Any = nf4
    library._library = lambda: _Library


def allocate(model: Any, device: torch.device) -> None:
    """Give what `nf4.fill` computes beside the parameters its memory.

    Args:
        model: with memory for its parameters.
        device: where it computes.
    """
    for name, packed in causal.packed_weights(model).items():
        if name in model.shared:
            continue
        num_scales = packed.shape.numel() // BLOCK
        packed.nested = torch.empty(-(-num_scales // NESTED), device=device)
        packed.code = torch.empty(256, device=device)
        packed.offset = torch.empty((), device=device)
