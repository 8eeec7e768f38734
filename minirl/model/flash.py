"""Attention of one `Block` on CUDA: FlashAttention in half precision, and the formula elsewhere.

FlashAttention-2 (Dao 2023, arXiv 2307.08691) is inside torch, and works on running lengths. On
Hopper GPUs torch takes FlashAttention-3 (Shah et al. 2024, arXiv 2407.08608) in its place where
that is installed, built from the folder hopper/ of its repository. Both add up the gradients of
queries in any order, but in a fixed one under `torch.use_deterministic_algorithms(True)`.
"""

import functools
import importlib.util

import torch
from torch import Tensor

from minirl.types.packed import Block, Options


@functools.cache
def use_flash3() -> None:
    """Let torch's operators be those of FlashAttention-3, where they can be."""
    is_installed = importlib.util.find_spec("flash_attn_interface") is not None
    # Its backward of wide heads is not deterministic.
    is_free = not torch.are_deterministic_algorithms_enabled()
    if is_installed and is_free and torch.cuda.get_device_capability()[0] == 9:
        torch.nn.attention.activate_flash_attention_impl("FA3")


def forward(
    q: Tensor, k: Tensor, v: Tensor, block: Block, options: Options
) -> tuple[Tensor, Tensor]:
    """Attend from the queries of a block to its keys; see `attention.block_forward`."""
    inputs = (
        _pairs(q, block.rows),
        _pairs(k, block.key_rows),
        _pairs(v, block.key_rows),
        block.cu_queries,
        block.cu_keys,
        *_longest(block),
    )
    use_flash3()
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
    """Add the gradients of one block; see `attention.block_backward`."""
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
    # The random state of a dropout of 0.
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


# --------------------------------------------------------------------------------------------------
# the formula, on any device


def _scores(q: Tensor, k: Tensor, bias: Tensor | None, options: Options) -> tuple[Tensor, Tensor]:
    """Return scores [B, Hkv, H / Hkv, Lq, Lk], and the derivative of the softcap.

    In float32, or float64 for float64 queries.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = _grouped(q, k).to(wide) @ k.unsqueeze(2).to(wide).mT * options.scale
    slope = scores.new_ones(())
    if options.softcap is not None:
        tanh = (scores / options.softcap).tanh()
        scores = options.softcap * tanh
        slope = 1 - tanh**2
    if bias is not None:
        scores = scores + bias.unsqueeze(2)
    return scores, slope


def _grouped(x: Tensor, k: Tensor) -> Tensor:
    """Group heads by the key-value head that they share, [B, H, ...] -> [B, Hkv, H / Hkv, ...]."""
    return x.unflatten(1, (k.shape[1], -1))


def eager_forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, options: Options
) -> tuple[Tensor, Tensor]:
    """Compute the formula, where no kernel can: a softcap, float32 on CUDA, heads above 256.

    All Lq x Lk scores are in memory at once.

    Args:
        q: queries [B, H, Lq, D].
        k: keys [B, Hkv, Lk, D].
        v: values [B, Hkv, Lk, D].
        bias: [B or 1, 1, Lq or 1, Lk], added to the scores; None: every query sees all keys.
        options: of the layer.

    Returns:
        The output [B, H, Lq, D], and the log-sum-exp [B, H, Lq] of the scores.
    """
    scores, _ = _scores(q, k, bias, options)
    lse = scores.logsumexp(-1)
    out = (scores - lse[..., None]).exp_() @ v.unsqueeze(2).to(scores.dtype)
    return out.flatten(1, 2).to(q.dtype), lse.flatten(1, 2)


def eager_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    options: Options,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv, the gradients of `eager_forward`.

    dout, out and lse are of the whole attention, of which this may be a part.
    """
    scores, slope = _scores(q, k, bias, options)
    p = (scores - _grouped(lse, k)[..., None]).exp_()
    do = _grouped(dout, k).to(p.dtype)
    dp = do @ v.unsqueeze(2).to(p.dtype).mT
    do_out = (do * _grouped(out, k)).sum(-1, keepdim=True)
    ds = p * (dp - do_out) * slope * options.scale
    dq = (ds @ k.unsqueeze(2).to(p.dtype)).flatten(1, 2)
    dk = (ds.mT @ _grouped(q, k).to(p.dtype)).sum(2)
    dv = (p.mT @ do).sum(2)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
