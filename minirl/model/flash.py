"""Attention of one `Block` by FlashAttention, over running lengths: CUDA, in half precision.

FlashAttention-2 (Dao 2023, arXiv 2307.08691) is inside torch; flash_package.py has others, for what
they do better. Their backward adds up the gradients of queries in any order, but under
`torch.use_deterministic_algorithms(True)` always in the same.
"""

import torch
from torch import Tensor

from minirl.model import flash_package
from minirl.types.blocks import Block, Options


def can(q: Tensor, options: Options) -> bool:
    """Return whether FlashAttention computes what a layer asks for such queries."""
    head_dim = q.shape[-1]
    return (
        q.is_cuda
        and q.dtype in (torch.bfloat16, torch.float16)
        and head_dim <= 256
        and head_dim % 8 == 0
        and (options.softcap is None or flash_package.choose(q, options.softcap) is not None)
    )


def forward(
    q: Tensor, k: Tensor, v: Tensor, block: Block, options: Options
) -> tuple[Tensor, Tensor]:
    """Attend from the queries of a block to its keys; see `kernels.forward`."""
    inputs = (
        _pairs(q, block.rows),
        _pairs(k, block.key_rows),
        _pairs(v, block.key_rows),
        block.cu_queries,
        block.cu_keys,
        *_longest(block),
    )
    version = flash_package.choose(q, options.softcap)
    if version:
        out, lse = flash_package.forward(
            *inputs,
            options.softcap or 0.0,
            block.causal,
            version=version,
            **_arguments(block, options),
        )
    else:
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            *inputs, 0.0, block.causal, False, **_arguments(block, options)
        )
    return out, lse.t()


def backward(
    gradients: list[Tensor],
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    block: Block,
    options: Options,
) -> None:
    """Add the gradients of one block; see `kernels.backward`."""
    inputs = (
        _pairs(dout, block.rows),
        _pairs(q, block.rows),
        _pairs(k, block.key_rows),
        _pairs(v, block.key_rows),
        _pairs(out, block.rows),
        _pairs(lse.t(), block.rows, 1),
        block.cu_queries,
        block.cu_keys,
        *_longest(block),
    )
    version = flash_package.choose(q, options.softcap)
    if version:
        block_gradients = flash_package.backward(
            *inputs,
            options.softcap or 0.0,
            block.causal,
            version=version,
            **_arguments(block, options),
        )
    else:
        # The random state of a dropout that there is not.
        random_state = torch.zeros(2, dtype=torch.uint64, device=q.device)
        unused = torch.empty(0, device=q.device)
        block_gradients = torch.ops.aten._flash_attention_backward(
            *inputs, 0.0, block.causal, random_state, unused, **_arguments(block, options)
        )
    for total, rows, gradient in zip(
        gradients, (block.rows, block.key_rows, block.key_rows), block_gradients, strict=True
    ):
        if rows is None:
            total.add_(gradient)
        else:
            total.index_add_(0, rows, gradient.to(total.dtype))


def _pairs(x: Tensor, rows: Tensor | None, dim: int = 0) -> Tensor:
    """Lay the rows of a block end to end, pair by pair."""
    return (x if rows is None else x.index_select(dim, rows)).contiguous()


def _longest(block: Block) -> tuple[int, int]:
    """Return bounds of the queries and of the keys of a pair; of queries two at least.

    If a pair has one query at most, where all heads see all keys, FlashAttention-2 makes queries of
    the heads that share a key (`seqlenq_ngroups_swapped` in its flash_api.cpp), and then ignores
    the running sum of queries. It is for decoding; a bound of two computes the same without it.
    """
    num_queries, num_keys = block.longest
    return max(num_queries, 2), num_keys


def _arguments(block: Block, options: Options) -> dict[str, float]:
    # With more keys than queries its causal mask lies at the bottom right, as `Block.causal` says.
    return {
        "scale": options.scale,
        "window_size_left": (options.window or 0) - 1,
        "window_size_right": 0 if block.causal else -1,
    }
