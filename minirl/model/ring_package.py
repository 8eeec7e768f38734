"""The door to ring-flash-attn, whose zigzag layout is the one of `parallel/context.py`.

If the package is installed (extra `ring`), its kernels take the place of those of
`attention.Attention` around a ring on CUDA.
"""

import functools
import importlib.util
import sys
import types
from typing import Any

import torch
from torch import Tensor

from minirl.types.blocks import Block
from minirl.types.packed import Context


@functools.cache
def kernel() -> Any:
    """Return its `zigzag_ring_flash_attn_varlen_func`, None without the package or flash-attn."""
    spec = importlib.util.find_spec("ring_flash_attn")
    if spec is None or importlib.util.find_spec("flash_attn") is None:
        return None
    # Its __init__ patches names of transformers that are gone, and only its adapter needs them. So
    # an empty package stands in for it.
    package = types.ModuleType("ring_flash_attn")
    package.__path__ = spec.submodule_search_locations or []
    sys.modules.setdefault("ring_flash_attn", package)
    module = importlib.import_module("ring_flash_attn.zigzag_ring_flash_attn_varlen")
    return module.zigzag_ring_flash_attn_varlen_func


def ring(q: Tensor, k: Tensor, v: Tensor, block: Block, scale: float, context: Context) -> Tensor:
    """Attend around a ring of ranks by the `kernel`; not in float32, where its backward is wrong.

    Args:
        q: queries [T, H, D].
        k: keys [T, Hkv, D].
        v: values [T, Hkv, D].
        block: of this rank's own rows, whose lengths are all that the package wants.
        scale: factor of the scores.
        context: the ring.

    Returns:
        The output [T, H, D].
    """
    return kernel()(
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        block.cu_queries,
        block.longest[0],
        softmax_scale=scale,
        causal=True,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        group=context.group,
    )
