"""The one attention function of all Hugging Face models here: causal within each packed sequence.

Registered as "minirl". Transformers builds no mask for a name that its mask registry does not know,
so nothing T x T exists, and the packed batch comes through the model's keyword arguments as `pack`,
never through a global (activation checkpointing would recompute with whichever batch came last).

Everything here is one primitive: attention to blocks of keys, merged by the log-sum-exp of their
scores. A sequence's own rows are a block, the prompt that siblings share is one, and with context
parallelism so is what other ranks hold.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from minirl.model import flash, selective
from minirl.parallel.placements import RingTransfer, gather_keys
from minirl.types.packed import Block, Context, LayerBatch, Options, Packed, Rectangle, RowIndex

NAME = "minirl"
# Of a model and its parts; the patches of an image see each other.
NAMES = {"": NAME, "text_config": NAME, "vision_config": "sdpa"}
# Arguments that change the result and that no kernel here honours. Ignoring them would train on
# wrong numbers.
UNSUPPORTED = ("sinks", "head_mask", "position_bias", "attention_mask", "dropout")

NOT_PASSED = -1  # A window that a layer says nothing of.

# Blocks, each with keys and values [M, Hkv, D].
Steps = Iterator[tuple[Block, Tensor, Tensor]]


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    pack: Packed,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = NOT_PASSED,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Attend within each sequence of a packed batch.

    Args:
        module: the layer. If it has a window, it has to say whether this call is for it.
        query: [1, H, T, D].
        key: [1, Hkv, T, D].
        value: [1, Hkv, T, D], or fewer features.
        attention_mask: must be None, as `pack` says who sees whom.
        pack: the batch.
        scaling: factor of the scores; None: 1 / sqrt(D).
        dropout: must be 0.
        sliding_window: number of keys that a query sees, itself included; None or 0: all.
        softcap: c of scores c tanh(s / c).
        s_aux: sinks [H]: the score of one more key of each head, with the value 0; of gpt-oss
            (arXiv 2508.10925, sec. 2.3). None: there are none.
        **kwargs: other arguments of the interface.

    Returns:
        The output [1, T, H, D], and None for the attention weights.

    Raises:
        NotImplementedError: the layer asks for something that no kernel here honours.
    """
    asked = {**kwargs, "attention_mask": attention_mask, "dropout": dropout or None}
    _refuse(module, asked, sliding_window)
    if sliding_window == NOT_PASSED:
        sliding_window = None
    # Squeezed, not indexed: the backward of an index copies the whole.
    q = query.squeeze(0).transpose(0, 1)
    k = key.squeeze(0).transpose(0, 1)
    v = value.squeeze(0).transpose(0, 1)
    num_values = v.shape[-1]
    if num_values < q.shape[-1]:  # latent attention; kernels want heads of one size
        v = F.pad(v, (0, q.shape[-1] - num_values))
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    blocks, window = _visible(pack, sliding_window)
    options = Options(scale, window, softcap)
    context = pack.context
    ring = context if context and context.ring and not window else None
    if context and not ring:
        k, v = gather_keys(k, v, context)
    plain = softcap is None and s_aux is None
    if ring and plain and can_flash(q, options) and flash.ring_kernel():
        out = flash.ring_attention(q, k, v, blocks[0], scale, ring)
    else:
        out = Attention.apply(q, k, v, s_aux, blocks, options, ring)
    return out[None, ..., :num_values], None


def _refuse(module: torch.nn.Module, asked: dict[str, object], window: int | None) -> None:
    """Raise NotImplementedError if a layer asks for something that no kernel here honours."""
    refused = [name for name in UNSUPPORTED if asked.get(name) is not None]
    if asked.get("is_causal") is False:
        refused.append("is_causal=False")
    if refused:
        raise NotImplementedError(
            f"{type(module).__name__} asks packed attention for {', '.join(refused)}, which it "
            "does not support"
        )
    # A window that is in the layer's mask alone, which is None. Layers without one pass None.
    own_window = vars(module).get("sliding_window")
    if window == NOT_PASSED and own_window:
        raise NotImplementedError(
            f"{type(module).__name__} has a sliding window of {own_window}, and does not pass it "
            "to packed attention"
        )


def _visible(pack: Packed, window: int | None) -> tuple[tuple[Block, ...], int | None]:
    """Return the blocks of a layer, and its window, None if that hides no key."""
    plan = pack.attention
    if not window:
        return plan.blocks + ((plan.images,) if plan.images else ()), None
    of_images = (plan.windowed_images,) if plan.windowed_images else ()
    if plan.windowed is None:
        raise NotImplementedError(
            f"a layer has a sliding window of {window}; pack with RowLayout(windowed=True)"
        )
    if pack.context is None and window >= plan.windowed.longest[1]:
        return plan.blocks + of_images, None
    return (plan.windowed, *of_images), window


def attend(
    q: Tensor, steps: Steps, options: Options, *, wide: bool = True
) -> tuple[Tensor, Tensor]:
    """Attend to blocks one after the other, and merge what rows see in several.

    Merged in float32 at least: Rabe and Staats 2021 (arXiv 2112.05682), sec. 2.

    Args:
        q: queries [T, H, D].
        steps: blocks, each with keys and values [M, Hkv, D]. The first has all T rows as queries.
        options: of the layer.
        wide: keep what is merged in float32 at least. Where a row is merged once only, that changes
            nothing but the bytes that are moved.

    Returns:
        The output [T, H, D], and the log-sum-exp [T, H] of the scores.
    """
    block, k, v = next(steps)
    first_out, first_lse = block_forward(q, k, v, block, options)
    out = first_out
    lse = first_lse
    for block, k, v in steps:
        rows = block.rows
        assert rows is not None  # only the first block has all rows
        part, part_lse = block_forward(q, k, v, block, options)
        if out is first_out:  # which selective checkpointing keeps, so it must not change
            dtype = torch.promote_types(out.dtype, torch.float32) if wide else out.dtype
            out = out.to(dtype, copy=True)
            lse = lse.clone()
        before = lse.index_select(0, rows)
        total = torch.logaddexp(before, part_lse)
        kept_share = (before - total).exp_()[..., None]
        part_share = (part_lse - total).exp_()[..., None]
        # In the dtype of the shares, whichever that of the outputs is.
        merged = (out.index_select(0, rows) * kept_share).addcmul_(part, part_share)
        out.index_copy_(0, rows, merged.to(out.dtype))
        lse.index_copy_(0, rows, total)
    return out.to(q.dtype), lse


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Let every row attend to one more key, with the value 0.

    It only enters the log-sum-exp, so it is added once, after all blocks. What kernels compute in
    backward from the new output and log-sum-exp is then right as it is.

    Args:
        out: [T, H, D].
        lse: log-sum-exp [T, H] of the scores.
        sinks: the scores of that key, [H].

    Returns:
        Both with the key.
    """
    total = torch.logaddexp(lse, sinks.to(lse.dtype))
    share = (lse - total).exp_()[..., None]
    return (out * share).to(out.dtype), total


class Attention(torch.autograd.Function):
    """Attention of queries [T, H, D] to keys and values [M, Hkv, D], block by block.

    The first block has all rows as queries. With `ring`, the blocks are those of this rank's keys,
    of an earlier rank's and of a later one's. Keys and values go around the ranks of the context,
    one hop a step, while the ones at hand are used: Liu et al. 2023 (arXiv 2310.01889). In backward
    their gradients travel with them, and are home after R hops. A rank never has the keys of all R
    ranks at once: for sequences with keys that do not fit.
    """

    @staticmethod
    def forward(
        ctx,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        blocks: tuple[Block, ...],
        options: Options,
        ring: Context | None,
    ) -> Tensor:
        """Return the output [T, H, D]."""

        def compute() -> tuple[Tensor, Tensor]:
            wide = ring is not None or len(blocks) > 2
            out, lse = attend(q, _steps(k, v, blocks, ring), options, wide=wide)
            return (out, lse) if sinks is None else add_sinks(out, lse, sinks)

        out, lse = selective.keep(compute)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.blocks = blocks
        ctx.options = options
        ctx.ring = ring
        return out

    @staticmethod
    def backward(ctx, dout: Tensor) -> tuple:
        """Return the gradients of queries, keys, values and sinks."""
        q, k, v, sinks, out, lse = ctx.saved_tensors
        gradients: list[Tensor] = []
        if ctx.ring:
            wide = torch.promote_types(q.dtype, torch.float32)
            gradients = [_zeros(x, wide) for x in (q, k, v)]
        for block, k_here, v_here in _steps(k, v, ctx.blocks, ctx.ring):
            block_backward(gradients, dout, q, k_here, v_here, out, lse, block, ctx.options)
            if ctx.ring:  # the gradients of keys and values follow them
                gradients[1:] = RingTransfer(gradients[1:], ctx.ring).wait()
        dq, dk, dv = gradients
        dsinks = None
        if sinks is not None:  # ds = p (dp - sum(do out)) of a key with value 0, so dp = 0
            p = (sinks.to(lse.dtype) - lse).exp_()
            do_out = (dout.to(lse.dtype) * out).sum(-1)
            dsinks = -(p * do_out).sum(0).to(sinks.dtype)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(k.dtype), dsinks, None, None, None


def _steps(k: Tensor, v: Tensor, blocks: tuple[Block, ...], ring: Context | None) -> Steps:
    """Yield blocks with the keys and values at hand.

    On a ring they are another rank's at each hop, and are sent on while they are used.
    """
    if ring is None:
        for block in blocks:
            yield block, k, v
        return
    local, earlier, later = blocks
    for hop in range(ring.size):
        transfer = RingTransfer([k, v], ring) if hop + 1 < ring.size else None
        # The keys at hand are those of rank `ring.rank - hop`, modulo the size.
        block = local
        if hop:
            block = earlier if hop <= ring.rank else later
        yield block, k, v
        if transfer:
            k, v = transfer.wait()


# --------------------------------------------------------------------------------------------------
# one block, by the best kernel for device and dtype
#
# Every kernel returns the log-sum-exp of the scores with its output, and in backward takes both of
# the *whole* attention. So what a query sees may come block by block, from wherever its keys are.
# With p = exp(s - lse):
#
#     dv = p' do;  dp = do v';  ds = p (dp - sum(do out)) scale;  dq = ds k;  dk = ds' q.


def can_flash(q: Tensor, options: Options) -> bool:
    """Return whether FlashAttention computes what a layer asks for such queries."""
    head_dim = q.shape[-1]
    return (
        q.is_cuda
        and q.dtype in (torch.bfloat16, torch.float16)
        and head_dim <= 256
        and head_dim % 8 == 0
        and (options.softcap is None or flash.choose(q, options.softcap) is not None)
    )


def block_forward(
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


def _zeros(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return a gradient of `x` to which blocks add theirs."""
    return torch.zeros_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def block_backward(
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
        gradients: dq [T, H, D], dk and dv [M, Hkv, D], which are added to in place; or nothing,
            before the first block, which fills the list.
        dout: gradient of the whole attention's output [T, H, D].
        q: as in `block_forward`, like k, v, block and options.
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
    if not gradients:
        gradients.extend(map(_zeros, (q, k, v)))
    for r in block.padded.rectangles:
        do = _heads(dout, r.queries)
        if r.filling is not None:  # these repeat a row; its gradient would count twice
            do = do.masked_fill(r.filling[:, None, :, None], 0)
        inputs = _heads(q, r.queries), _heads(k, r.keys), _heads(v, r.keys)
        tensors = (do, *inputs, _heads(out, r.queries), _heads(lse, r.queries))
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


def attention_of_layer(*tensors: Any, pack: LayerBatch, **options: Any) -> tuple[Tensor, None]:
    """Do as `packed_attention`, in a layer."""
    return packed_attention(*tensors, pack=pack.batch, **options)


ALL_ATTENTION_FUNCTIONS.register(NAME, attention_of_layer)
