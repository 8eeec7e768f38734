"""The one attention function that all Hugging Face models here call: causal attention within each packed sequence.

Registered as "minirl". Transformers builds no mask for a name that its mask registry does not know, so nothing T x T exists, and
the packed batch comes through the model's keyword arguments as `pack`, never through a global (activation checkpointing would
recompute with whichever batch came last).
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from minirl.types import Bucket, Packed

NAME = "minirl"
# Arguments that change the result and that neither kernel below honours. Ignoring them would train on wrong numbers.
UNSUPPORTED = ("s_aux", "sinks", "head_mask", "position_bias")


def packed_attention(module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *,
                     pack: Packed, scaling: float | None = None, dropout: float = 0.0, sliding_window: int | None = None,
                     softcap: float | None = None, **kwargs: object) -> tuple[Tensor, None]:
    """query [1, H, T, D], key and value [1, Hkv, T, D] -> [1, T, H, D]. `sliding_window` counts the keys that a query sees."""
    refused = [k for k in UNSUPPORTED if kwargs.get(k) is not None]
    if kwargs.get("is_causal") is False:
        refused.append("is_causal=False")
    if refused or dropout or attention_mask is not None:
        raise NotImplementedError(f"{type(module).__name__} asks packed attention for {refused or 'dropout or a mask'}")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, H, D]
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    window = sliding_window if sliding_window and sliding_window < max(pack.key_lengths) else None
    if softcap is not None:
        return eager_softcap(q, k, v, pack, scale, window, softcap)[None], None
    if not (q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] <= 256):
        return bucketed(q, k, v, pack, scale, window)[None], None
    if pack.key_rows is not None:
        k, v = k.index_select(0, pack.key_rows), v.index_select(0, pack.key_rows)
    return VarlenFlash.apply(q, k, v, pack, scale, window)[None], None


def bucketed(q: Tensor, k: Tensor, v: Tensor, pack: Packed, scale: float, window: int | None) -> Tensor:
    """[T, H, D] by rectangles: sequences of like length share one call, padded at their ends. Any device, any dtype.

    Under a causal mask no real row sees the padding behind it, so the result is exact, and a batch of many short sequences costs a
    few kernel calls instead of one each.
    """
    outs = []
    for bucket in pack.buckets:
        def rectangle(x: Tensor, rows: Tensor) -> Tensor:
            return x.index_select(0, rows.flatten()).view(*rows.shape, *x.shape[1:]).transpose(1, 2)
        mask = _mask(bucket, window)
        out = F.scaled_dot_product_attention(rectangle(q, bucket.queries), rectangle(k, bucket.keys), rectangle(v, bucket.keys), attn_mask=mask,
                                             is_causal=mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
        outs.append(out.transpose(1, 2).reshape(-1, *q.shape[1:]))
    return torch.cat(outs).index_select(0, pack.unbucket)


def eager_softcap(q: Tensor, k: Tensor, v: Tensor, pack: Packed, scale: float, window: int | None, softcap: float) -> Tensor:
    outs, groups = [], q.shape[1] // k.shape[1]
    for bucket in pack.buckets:
        def rectangle(x: Tensor, rows: Tensor) -> Tensor:
            return x.index_select(0, rows.flatten()).view(*rows.shape, *x.shape[1:]).transpose(1, 2)
        length = bucket.keys.shape[1]
        mask = _mask(bucket, window)
        mask = torch.ones(bucket.queries.shape[1], length, dtype=torch.bool, device=q.device).tril() if mask is None else mask
        keys, values = (rectangle(x, bucket.keys).repeat_interleave(groups, 1) for x in (k, v))
        scores = (rectangle(q, bucket.queries) @ keys.transpose(2, 3) * (scale / softcap)).tanh() * softcap
        out = scores.masked_fill(~mask, -torch.inf).softmax(-1) @ values
        outs.append(out.transpose(1, 2).reshape(-1, *q.shape[1:]))
    return torch.cat(outs).index_select(0, pack.unbucket)


def _mask(bucket: Bucket, window: int | None) -> Tensor | None:
    """bool [B or 1, 1, Lq, Lk], True where a query sees a key; None if plain causal says it all."""
    if bucket.prefix is None and (window is None or window >= bucket.keys.shape[1]):
        return None
    prefix = bucket.queries.new_zeros(1) if bucket.prefix is None else bucket.prefix
    last_key = prefix[:, None] + torch.arange(bucket.queries.shape[1], device=prefix.device)
    ahead = last_key[:, :, None] - torch.arange(bucket.keys.shape[1], device=prefix.device)
    seen = (ahead >= 0) & (ahead < (window or bucket.keys.shape[1]))
    return seen[:, None]


class VarlenFlash(torch.autograd.Function):
    """FlashAttention-2 over running lengths, the kernels inside torch (they need no package): fp16/bf16 on CUDA. With more keys than
    queries its causal mask lies at the bottom right, which is how an answer sees a shared prompt."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, pack: Packed, scale: float, window: int | None) -> Tensor:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        ctx.lengths = (pack.cu_seqlens, pack.cu_key_seqlens, max(pack.lengths), max(pack.key_lengths))
        ctx.options = {"scale": scale, "window_size_left": -1 if window is None else window - 1, "window_size_right": 0}
        out, lse, *_ = torch.ops.aten._flash_attention_forward(q, k, v, *ctx.lengths, 0.0, True, False, **ctx.options)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
        grads = torch.ops.aten._flash_attention_backward(grad.contiguous(), q, k, v, out, lse, *ctx.lengths, 0.0, True, *no_dropout, **ctx.options)
        return *grads, None, None, None


ALL_ATTENTION_FUNCTIONS.register(NAME, packed_attention)
