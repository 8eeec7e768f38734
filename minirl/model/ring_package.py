"""The door to ring-flash-attn, whose zigzag layout is this house's own: its kernels take the place
of those of `attention.Attention` around a ring on CUDA if the package is installed (extra
`ring`).
"""

import functools
import importlib.util
import sys
import types
from collections.abc import Callable

import torch
from torch import Tensor

from minirl.model.attention_blocks import Block
from minirl.parallel.mesh import Context


@functools.cache
def _function() -> Callable | None:
    """Its `zigzag_ring_flash_attn_varlen_func`, or None without the package or flash-attn."""
    found = importlib.util.find_spec("ring_flash_attn")
    if found is None or importlib.util.find_spec("flash_attn") is None:
        return None
    if (
        "ring_flash_attn" not in sys.modules
    ):  # its __init__ patches names of transformers that are gone, and only the adapter needs them
        package = types.ModuleType("ring_flash_attn")
        package.__path__ = found.submodule_search_locations
        sys.modules["ring_flash_attn"] = package
    return importlib.import_module(
        "ring_flash_attn.zigzag_ring_flash_attn_varlen"
    ).zigzag_ring_flash_attn_varlen_func


def available(q: Tensor) -> bool:
    return q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and _function() is not None


def ring(q: Tensor, k: Tensor, v: Tensor, own: Block, scale: float, context: Context) -> Tensor:
    """`own`: the block of a rank's own rows, whose lengths are all that the package wants. bfloat16
    only: its float32 backward is wrong.
    """
    return _function()(
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        own.cu_queries,
        own.longest[0],
        softmax_scale=scale,
        causal=True,
        group=context.group,
    )
