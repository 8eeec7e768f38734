"""Attention of one `Block`, forward and backward. Any kernel gives the log-sum-exp of the scores
beside its output, and in backward takes both of the *whole* attention: so what a query sees may
come block by block, from wherever its keys are (`attention.py`).

    forward(q, k, v, block, options) -> out [N, H, D], lse [N, H]     q [T, H, D], k and v [M, Hkv,
    D]; N queries of the block backward(gradients, dout, q, k, v, out, lse, block, options)
    adds to gradients = (dq [T, H, D], dk, dv [M, Hkv, D])

With p = exp(s - lse):  dv = p' do;  dp = do v';  ds = p (dp - sum(do out));  dq = ds k;  dk = ds'
q.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from minirl.model.attention_blocks import Block, Rectangle, RowIndex


@dataclass(frozen=True)
class Options:
    scale: float
    window: int | None = (
        None  # Keys that a query sees, itself included; of a causal block with all of them.
    )
    softcap: float | None = None  # Scores s become cap tanh(s / cap); Gemma 2, arXiv 2408.00118.


def forward(
    q: Tensor, k: Tensor, v: Tensor, block: Block, options: Options
) -> tuple[Tensor, Tensor]:
    if _flash_can(q, options):
        return _flash_forward(q, k, v, block, options)
    function = _cpu_forward if _cpu_can(q, options) else eager_forward
    parts = [
        function(
            _cut(q, r.queries),
            _cut(k, r.keys),
            _cut(v, r.keys),
            _bias(r, block, options, q),
            block.causal,
            options,
        )
        for r in block.rectangles
    ]
    rows = (
        [x.transpose(1, 2).flatten(0, 1) for x in of_all] for of_all in zip(*parts, strict=True)
    )
    out, lse = (x[0] if len(x) == 1 else torch.cat(x) for x in rows)
    return (
        (out, lse)
        if block.places is None
        else (out.index_select(0, block.places), lse.index_select(0, block.places))
    )


def backward(
    gradients: tuple[Tensor, Tensor, Tensor],
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    block: Block,
    options: Options,
) -> None:
    if _flash_can(q, options):
        return _flash_backward(gradients, dout, q, k, v, out, lse, block, options)  # None
    function = _cpu_backward if _cpu_can(q, options) else eager_backward
    for r in block.rectangles:
        do = _cut(dout, r.queries)
        if r.filling is not None:  # these repeat a row, whose gradient then would count twice
            do = do.masked_fill(r.filling[:, None, :, None], 0)
        inputs = (
            _cut(q, r.queries),
            _cut(k, r.keys),
            _cut(v, r.keys),
            _cut(out, r.queries),
            _cut(lse, r.queries),
            _bias(r, block, options, q),
        )
        for into, run, grad in zip(
            gradients,
            (r.queries, r.keys, r.keys),
            function(do, *inputs, block.causal, options),
            strict=True,
        ):
            _add(
                into,
                grad.transpose(1, 2).flatten(0, 1),
                run.rows.flatten() if run.first is None else None,
                run.first,
            )


# --------------------------------------------------------------------------------------------------
# rectangles: CPU, and any device


def _cut(x: Tensor, run: RowIndex) -> Tensor:
    """[T, H, ...] -> [B, H, L, ...]"""
    if run.first is None:
        flat = x.index_select(0, run.rows.flatten())
    else:
        flat = x.narrow(0, run.first, run.rows.numel())
        flat = (
            flat if flat.stride(-1) == 1 else flat.contiguous()
        )  # the CPU kernel takes it for granted
    return flat.unflatten(0, run.rows.shape).transpose(1, 2)


def _add(into: Tensor, values: Tensor, rows: Tensor | None, first: int | None) -> None:
    """To the rows of these numbers, or if there are none to those from `first` on."""
    if rows is None:
        into.narrow(0, first, len(values)).add_(values)
    else:
        into.index_add_(0, rows, values.to(into.dtype))


def _bias(r: Rectangle, block: Block, options: Options, like: Tensor) -> Tensor | None:
    """[B or 1, 1, Lq or 1, Lk]: 0 where a query sees a key, else -inf; None where plain causal, or
    all, says it.
    """
    num_keys = r.keys.rows.shape[1]
    if r.last is None and (
        not block.causal or options.window is None or options.window >= num_keys
    ):
        return None
    last = torch.arange(num_keys, device=like.device)[None] if r.last is None else r.last
    ahead = last[:, :, None] - torch.arange(num_keys, device=like.device)
    hidden = ((ahead < 0) | (ahead >= (options.window or num_keys)))[:, None]
    return torch.zeros(hidden.shape, dtype=like.dtype, device=like.device).masked_fill_(
        hidden, -torch.inf
    )


def _cpu_can(q: Tensor, options: Options) -> bool:
    return q.device.type == "cpu" and options.softcap is None


def _cpu_forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, options: Options
) -> tuple[Tensor, Tensor]:
    """torch's flash attention for CPU: grouped heads, any float dtype."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal and bias is None, attn_mask=bias, scale=options.scale
    )


def _cpu_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    causal: bool,
    options: Options,
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, q, k, v, out, lse, 0.0, causal and bias is None, attn_mask=bias, scale=options.scale
    )


def _scores(
    q: Tensor, k: Tensor, bias: Tensor | None, causal: bool, options: Options
) -> tuple[Tensor, Tensor | float]:
    """[B, Hkv, H / Hkv, Lq, Lk] in float32 (float64), and the derivative of the softcap."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    scores = _grouped(q, k).to(wide) @ k[:, :, None].to(wide).mT * options.scale
    slope = 1.0
    if options.softcap is not None:
        slope = (scores / options.softcap).tanh()
        scores, slope = options.softcap * slope, 1 - slope**2
    if bias is not None:
        scores = scores + bias[:, :, None].to(wide)
    elif causal:
        scores = scores.masked_fill(
            torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1), -torch.inf
        )
    return scores, slope


def _grouped(x: Tensor, k: Tensor) -> Tensor:
    """Heads [B, H, ...] by the key-value head that they share, [B, Hkv, H / Hkv, ...]."""
    return x.unflatten(1, (k.shape[1], -1))


def eager_forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, options: Options
) -> tuple[Tensor, Tensor]:
    """The formula, for what no kernel can: a softcap, float32 on CUDA, heads above 256. Scores are
    whole, Lq x Lk.
    """
    scores, _ = _scores(q, k, bias, causal, options)
    lse = scores.logsumexp(-1)
    out = (scores - lse[..., None]).exp_() @ v[:, :, None].to(scores.dtype)
    return out.flatten(1, 2).to(q.dtype), lse.flatten(1, 2)


def eager_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    causal: bool,
    options: Options,
) -> tuple[Tensor, Tensor, Tensor]:
    scores, slope = _scores(q, k, bias, causal, options)
    p = (scores - _grouped(lse, k)[..., None]).exp_()
    do, wide_q = _grouped(dout, k).to(p.dtype), _grouped(q, k).to(p.dtype)
    dp = do @ v[:, :, None].to(p.dtype).mT
    ds = (
        p * (dp - (do * _grouped(out, k).to(p.dtype)).sum(-1, keepdim=True)) * slope * options.scale
    )
    dq, dk, dv = (
        (ds @ k[:, :, None].to(p.dtype)).flatten(1, 2),
        (ds.mT @ wide_q).sum(2),
        (p.mT @ do).sum(2),
    )
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


# --------------------------------------------------------------------------------------------------
# running lengths: CUDA


def _flash_can(q: Tensor, options: Options) -> bool:
    return (
        q.is_cuda
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.shape[-1] <= 256
        and options.softcap is None
    )


def _flash_inputs(q: Tensor, k: Tensor, v: Tensor, block: Block, options: Options) -> tuple:
    """Queries, keys and values pair by pair, the lengths of the pairs, and what the kernels call
    the options.
    """
    q = q if block.rows is None else q.index_select(0, block.rows)
    k, v = (x if block.key_rows is None else x.index_select(0, block.key_rows) for x in (k, v))
    named = {
        "scale": options.scale,
        "window_size_left": (options.window or 0) - 1,
        "window_size_right": 0 if block.causal else -1,
    }
    return (
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        (block.cu_queries, block.cu_keys, *block.longest),
        named,
    )


def _flash_forward(
    q: Tensor, k: Tensor, v: Tensor, block: Block, options: Options
) -> tuple[Tensor, Tensor]:
    """FlashAttention-2 over running lengths, the kernels inside torch (they need no package). With
    more keys than queries its causal mask lies at the bottom right, which is what `Block.causal`
    says.
    """
    q, k, v, lengths, named = _flash_inputs(q, k, v, block, options)
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, *lengths, 0.0, block.causal, False, **named
    )
    return out, lse.t()


def _flash_backward(
    gradients: tuple[Tensor, Tensor, Tensor],
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    block: Block,
    options: Options,
) -> None:
    dout, out, lse = (
        x if block.rows is None else x.index_select(0, block.rows) for x in (dout, out, lse)
    )
    q, k, v, lengths, named = _flash_inputs(q, k, v, block, options)
    no_dropout = (
        torch.zeros(2, dtype=torch.uint64, device=q.device),
        torch.empty(0, device=q.device),
    )
    grads = torch.ops.aten._flash_attention_backward(
        dout.contiguous(),
        q,
        k,
        v,
        out.contiguous(),
        lse.t().contiguous(),
        *lengths,
        0.0,
        block.causal,
        *no_dropout,
        **named,
    )
    for into, rows, grad in zip(
        gradients, (block.rows, block.key_rows, block.key_rows), grads, strict=True
    ):
        _add(into, grad, rows, 0)
