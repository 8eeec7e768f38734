"""Packed copies of the engine's weights, by which it multiplies on CPU.

oneDNN lays a matrix out in the blocks that its kernels read. By such a copy a product of a few rows
takes half the time of `linear`, and one of 256 rows five sixths. The plain weights stay, because
refits write them and `debug.check_refit` compares them, so the engine's matrices are in memory
twice. Weights in bfloat16 have no copies, except the head, which gives logits in float32: to
convert it in each step would take several times as long as the product.

A copy is made at the first product after `forget`, which follows each refit. So tied embeddings
share one copy, and an expert that gets no token has none.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

# For each number of rows oneDNN compiles a kernel (0.7 ms, 0.4 MB), so numbers are rounded up.
# More rows than the last are those of prompts, where copies are worth little.
MOST_ROWS = 256
ROW_STEPS = {64: 4, MOST_ROWS: 16}  # Up to so many rows: round up to a multiple.
NUM_KERNELS = 64  # For each shape of weights; more than the numbers of rows there are.


class _Packed(NamedTuple):
    """A weight and its copy."""

    weight: Tensor  # Held, so that its address stays its own.
    handler: Any  # vLLM's; it frees the copy with itself.


_copies: dict[tuple[int, torch.Size], _Packed] = {}  # By address and shape.
_plain = False  # Whether no copies are used at the moment.


def packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `x @ weight.T + bias`, as `torch.nn.functional.linear` does.

    Args:
        x: [..., H]. Copies are for float32, which CPU runs use.
        weight: [N, H]; a copy of it in float32 is kept until `forget`.
        bias: [N].
    """
    # vLLM's parameters ask Python about each call on them, which took a fifth of a small product.
    with torch._C.DisableTorchFunctionSubclass():
        num_rows = x.numel() // x.shape[-1]
        if _plain or x.dtype != torch.float32 or not 0 < num_rows <= MOST_ROWS:
            return linear(x, weight, bias)
        from vllm import _custom_ops as ops

        key = weight.data_ptr(), weight.shape
        if key not in _copies:
            _copies[key] = _Packed(weight, ops.create_onednn_mm(weight.float().t(), NUM_KERNELS))
        step = next(step for most, step in ROW_STEPS.items() if num_rows <= most)
        rows = x.reshape(num_rows, -1)
        padding = -num_rows % step
        if padding:
            rows = pad(rows, (0, 0, 0, padding))
        result = ops.onednn_mm(_copies[key].handler, rows, bias)
        return result[:num_rows].view(*x.shape[:-1], weight.shape[0])


@contextlib.contextmanager
def plain_products() -> Iterator[None]:
    """Multiply by the plain weights inside the block, however few rows there are."""
    global _plain
    _plain = True
    try:
        yield
    finally:
        _plain = False


def forget() -> None:
    """Free all copies, because weights have changed."""
    _copies.clear()
