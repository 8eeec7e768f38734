"""Attention of one `Block`, forward and backward, by the best kernel for device and dtype.

Every kernel returns the log-sum-exp of the scores with its output, and in backward takes both of
the *whole* attention. So what a query sees may come block by block, from wherever its keys are
(`attention.py`).

With p = exp(s - lse):

    dv = p' do;  dp = do v';  ds = p (dp - sum(do out));  dq = ds k;  dk = ds' q.
"""

import torch
from torch import Tensor

from minirl.model import flash
from minirl.types.packed import Block, Options, Rectangle, RowIndex


def can_flash(q: Tensor, options: Options) -> bool:
    """Return whether FlashAttention computes what a layer asks for such queries."""
    head_dim = q.shape[-1]
    return (
        q.is_cuda
        and q.dtype in (torch.bfloat16, torch.float16)
        and head_dim <= 256
        and head_dim % 8 == 0
        and options.softcap is None
    )


def forward(
    q: Tensor, k: Tensor, v: Tensor, block: Block, options: Options
) -> tuple[Tensor, Tensor]:
    """Attend from the queries of a block to its keys.

    Args:
        q: queries [T, H, D].
        k: keys [M, Hkv, D].
        v: values [M, Hkv, D].
        block: which of the T rows see which of the M.
        options: of the layer.

    Returns:
        The output [N, H, D] of the block's N queries, and the log-sum-exp [N, H] of their scores.
    """
    if can_flash(q, options):
        return flash.forward(q, k, v, block, options)
    outs = []
    lses = []
    for r in block.padded.rectangles:
        inputs = _heads(q, r.queries), _heads(k, r.keys), _heads(v, r.keys)
        bias = _bias(r, block, options, q)
        if _cpu_can(q, options):
            out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                *inputs, 0.0, block.causal and bias is None, attn_mask=bias, scale=options.scale
            )
        else:
            out, lse = flash.eager_forward(*inputs, bias, options)
        outs.append(_rows(out))
        lses.append(_rows(lse))
    return _in_order(outs, block), _in_order(lses, block)


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
    """Add the gradients of one block.

    Args:
        gradients: dq [T, H, D], dk and dv [M, Hkv, D], which are added to in place.
        dout: gradient of the whole attention's output [T, H, D].
        q: as in `forward`, like k, v, block and options.
        k: keys.
        v: values.
        out: output [T, H, D] of the whole attention.
        lse: log-sum-exp [T, H] of the whole attention's scores.
        block: which rows see which.
        options: of the layer.
    """
    if can_flash(q, options):
        flash.backward(gradients, dout, q, k, v, out, lse, block, options)
        return
    for r in block.padded.rectangles:
        do = _heads(dout, r.queries)
        if r.filling is not None:  # these repeat a row; its gradient would count twice
            do = do.masked_fill(r.filling[:, None, :, None], 0)
        tensors = (
            do,
            _heads(q, r.queries),
            _heads(k, r.keys),
            _heads(v, r.keys),
            _heads(out, r.queries),
            _heads(lse, r.queries),
        )
        bias = _bias(r, block, options, q)
        if _cpu_can(q, options):
            parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *tensors, 0.0, block.causal and bias is None, attn_mask=bias, scale=options.scale
            )
        else:
            parts = flash.eager_backward(*tensors, bias, options)
        for total, part, index in zip(gradients, parts, (r.queries, r.keys, r.keys), strict=True):
            rows = _rows(part)
            if index.first is None:
                total.index_add_(0, index.rows.flatten(), rows.to(total.dtype))
            else:
                total.narrow(0, index.first, index.rows.numel()).add_(rows)


# --------------------------------------------------------------------------------------------------
# rectangles: CPU, and any device


def _heads(x: Tensor, index: RowIndex) -> Tensor:
    """Return the rows of a rectangle, [T, H, ...] -> [B, H, L, ...]."""
    if index.first is None:
        rows = x.index_select(0, index.rows.flatten())
    else:
        rows = x.narrow(0, index.first, index.rows.numel())
        if rows.stride(-1) != 1:
            rows = rows.contiguous()  # the CPU kernel takes it for granted
    return rows.unflatten(0, index.rows.shape).transpose(1, 2)


def _rows(x: Tensor) -> Tensor:
    """[B, H, L, ...] -> [B L, H, ...]."""
    return x.transpose(1, 2).flatten(0, 1)


def _in_order(parts: list[Tensor], block: Block) -> Tensor:
    """Return the rows of all rectangles in the order of the block's queries."""
    rows = parts[0] if len(parts) == 1 else torch.cat(parts)
    places = block.padded.places
    return rows if places is None else rows.index_select(0, places)


def _bias(r: Rectangle, block: Block, options: Options, like: Tensor) -> Tensor | None:
    """Return 0 where a query sees a key, else -inf, [B or 1, 1, Lq or 1, Lk].

    None: every query sees all keys, or torch's kernel for CPU hides the later ones itself.
    """
    num_keys = r.keys.rows.shape[1]
    window = options.window or num_keys
    hides_later = window >= num_keys and _cpu_can(like, options)
    if r.last is None and (hides_later or not block.causal):
        return None
    keys = torch.arange(num_keys, device=like.device)
    last = keys[None] if r.last is None else r.last
    ahead = last[:, :, None] - keys
    hidden = (ahead < 0) | (ahead >= window)
    return like.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)[:, None]


def _cpu_can(q: Tensor, options: Options) -> bool:
    return q.device.type == "cpu" and options.softcap is None
