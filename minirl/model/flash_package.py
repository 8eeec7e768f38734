"""The door to flash-attn, for what FlashAttention inside torch cannot do, or not as fast.

FlashAttention-3 (Shah et al. 2024, arXiv 2407.08608; package `flash_attn_3`, built from the folder
hopper/ of its repository) is the faster one on Hopper GPUs. flash-attn 2.8 (extra `flash`) knows
softcaps, which the one inside torch does not: Gemma 2.

Both are operators of torch here, with the arguments of torch's own one but for `softcap` in the
place of dropout, so that checkpointing and tensors without values know them.
"""

import functools
import importlib
import importlib.util
from typing import Any

import torch
from torch import Tensor

from minirl.base.errors import require

OLDEST = (2, 8)  # Of flash-attn 2, whose internal functions are called here.


@functools.cache
def flash2() -> Any:
    """Return flash-attn 2's functions, None without the package.

    Raises:
        UserError: the package is too old.
    """
    if importlib.util.find_spec("flash_attn") is None:
        return None
    # FlashAttention-4 has a folder of the same name, without these.
    if importlib.util.find_spec("flash_attn.flash_attn_interface") is None:
        return None
    version: str = importlib.import_module("flash_attn").__version__
    require(
        tuple(map(int, version.split(".")[:2])) >= OLDEST,
        f"flash-attn {version} is installed, and minirl calls functions of 2.8: "
        "pip install 'flash-attn>=2.8', or uninstall it",
    )
    return importlib.import_module("flash_attn.flash_attn_interface")


@functools.cache
def flash3() -> Any:
    """Return FlashAttention-3's operators, None without the package."""
    if importlib.util.find_spec("flash_attn_3") is None:
        return None
    importlib.import_module("flash_attn_3._C")  # It registers them.
    return torch.ops.flash_attn_3


def choose(q: Tensor, softcap: float | None) -> int | None:
    """Return which FlashAttention of a package is best for such queries: 3, 2, or None.

    None with a softcap: no FlashAttention can.
    """
    if softcap is not None:
        return 2 if flash2() else None
    if flash3() and torch.cuda.get_device_capability(q.device)[0] == 9:
        # Its backward for such wide heads is not deterministic.
        if torch.are_deterministic_algorithms_enabled() and q.shape[-1] > 192:
            return None
        return 3
    return None


@torch.library.custom_op("minirl::flash_attention_forward", mutates_args=())
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_queries: Tensor,
    cu_keys: Tensor,
    max_queries: int,
    max_keys: int,
    softcap: float,
    causal: bool,
    *,
    version: int,
    scale: float,
    window_size_left: int,
    window_size_right: int,
) -> tuple[Tensor, Tensor]:
    """Return the output [N, H, D], and the log-sum-exp [H, N] of the scores, float32.

    Args:
        q: queries [N, H, D], pair by pair, bfloat16 or float16.
        k: keys [M, Hkv, D].
        v: values [M, Hkv, D].
        cu_queries: as in `Block`, like cu_keys.
        cu_keys: int32 [pairs + 1].
        max_queries: a bound of the queries of a pair.
        max_keys: a bound of its keys.
        softcap: c of scores c tanh(s / c); 0: none.
        causal: the last query of a pair sees its last key, and each one before it one key less.
        version: 2 or 3, of FlashAttention.
        scale: factor of the scores.
        window_size_left: keys that a query sees before its last one; -1: all.
        window_size_right: keys that a query sees after its own; -1: all.
    """
    if version == 3:
        results = flash3().fwd(
            *(q, k, v),
            cu_seqlens_q=cu_queries,
            cu_seqlens_k=cu_keys,
            max_seqlen_q=max_queries,
            max_seqlen_k=max_keys,
            softmax_scale=scale,
            is_causal=causal,
            window_size_left=window_size_left,
            window_size_right=window_size_right,
            softcap=softcap,
            num_splits=1,
        )
    else:
        results = flash2()._flash_attn_varlen_forward(
            *(q, k, v),
            *(cu_queries, cu_keys, max_queries, max_keys),
            0.0,
            scale,
            causal,
            window_size_left,
            window_size_right,
            softcap,
        )
    return results[0], results[1]


@forward.register_fake
def _(q: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty((q.shape[1], len(q)), dtype=torch.float32)


@torch.library.custom_op("minirl::flash_attention_backward", mutates_args=())
def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_queries: Tensor,
    cu_keys: Tensor,
    max_queries: int,
    max_keys: int,
    softcap: float,
    causal: bool,
    *,
    version: int,
    scale: float,
    window_size_left: int,
    window_size_right: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v; in the same order of sums each time if torch asks for it.

    The gradient `dout` of the output, the output and its log-sum-exp [H, N] may be of an attention
    of which this is a part. The rest is as in `forward`.
    """
    dq = torch.empty_like(q)
    dk = torch.empty_like(k)
    dv = torch.empty_like(v)
    given = dout, q, k, v, out, lse, dq, dk, dv
    deterministic = torch.are_deterministic_algorithms_enabled()
    if version == 3:
        flash3().bwd(
            *given,
            cu_seqlens_q=cu_queries,
            cu_seqlens_k=cu_keys,
            max_seqlen_q=max_queries,
            max_seqlen_k=max_keys,
            softmax_scale=scale,
            is_causal=causal,
            window_size_left=window_size_left,
            window_size_right=window_size_right,
            softcap=softcap,
            deterministic=deterministic,
        )
        return dq, dk, dv
    flash2()._flash_attn_varlen_backward(
        *given,
        cu_queries,
        cu_keys,
        max_queries,
        max_keys,
        0.0,
        scale,
        causal,
        window_size_left,
        window_size_right,
        softcap,
        None,
        deterministic,
    )
    return dq, dk, dv


@backward.register_fake
def _(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *args: object, **kwargs: object
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
