"""The one attention function that all Hugging Face models here call: causal attention within each
packed sequence.

Registered as "minirl". Transformers builds no mask for a name that its mask registry does not know,
so nothing T x T exists, and the packed batch comes through the model's keyword arguments as `pack`,
never through a global (activation checkpointing would recompute with whichever batch came last).

Everything here is one primitive: attention to blocks of keys, merged by the log-sum-exp of their
scores. A sequence's own rows are a block, the prompt that siblings share is one, and with context
parallelism so is what other ranks hold.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from minirl.model import kernels, ring_package
from minirl.model.attention_blocks import Block
from minirl.model.kernels import Options
from minirl.parallel.context import RingTransfer, gather_keys
from minirl.parallel.mesh import Context
from minirl.types import Packed

NAME = "minirl"
NAMES = {
    "": NAME,
    "text_config": NAME,
    "vision_config": "sdpa",
}  # of a model and its parts; patches of an image see each other
# Arguments that change the result and that no kernel here honours. Ignoring them would train on
# wrong numbers.
UNSUPPORTED = ("s_aux", "sinks", "head_mask", "position_bias")


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
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """query [1, H, T, D], key and value [1, Hkv, T, D] -> [1, T, H, D]. `sliding_window` counts the
    keys that a query sees.
    """
    refused = [k for k in UNSUPPORTED if kwargs.get(k) is not None] + ["is_causal=False"] * (
        kwargs.get("is_causal") is False
    )
    if refused or dropout or attention_mask is not None:
        raise NotImplementedError(
            f"{type(module).__name__} asks packed attention for {refused or 'dropout or a mask'}"
        )
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, H, D]
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    context, options = pack.context, Options(scale, sliding_window, softcap)
    if (
        not sliding_window
        or context is None
        and pack.windowed_block is not None
        and sliding_window >= pack.windowed_block.longest[1]
    ):
        blocks, options = pack.blocks, Options(scale, None, softcap)
        if context and context.ring:
            alike = softcap is None and ring_package.available(q)
            return (
                ring_package.ring(q, k, v, blocks[0], scale, context)
                if alike
                else Attention.apply(q, k, v, blocks, options, context)
            )[None], None
    elif pack.windowed_block is None:
        raise NotImplementedError(
            f"{type(module).__name__} has a sliding window; pack with Layout(windowed=True)"
        )
    else:
        blocks = (pack.windowed_block,)
    keys = gather_keys(k, v, context) if context else (k, v)
    return Attention.apply(q, *keys, blocks, options, None)[None], None


def attend(
    q: Tensor, steps: Iterable[tuple[Block, Tensor, Tensor]], options: Options
) -> tuple[Tensor, Tensor]:
    """Output [T, H, D] and log-sum-exp of the scores [T, H] of blocks, each with keys and values,
    one after the other; the first has all rows as queries. What rows see in several is merged, in
    float32 at least: Rabe and Staats 2021 (arXiv 2112.05682), sec. 2.
    """
    out = lse = None
    for block, k, v in steps:
        part, part_lse = kernels.forward(q, k, v, block, options)
        if out is None:
            out, lse = part, part_lse
            continue
        out, before = (
            out.to(torch.promote_types(out.dtype, torch.float32)),
            lse.index_select(0, block.rows),
        )
        total = torch.logaddexp(before, part_lse)
        kept = out.index_select(0, block.rows) * (before - total).exp_()[..., None]
        out.index_copy_(
            0,
            block.rows,
            kept.addcmul_(part.to(kept.dtype), (part_lse - total).exp_()[..., None].to(kept.dtype)),
        )
        lse.index_copy_(0, block.rows, total)
    return out.to(q.dtype), lse


class Attention(torch.autograd.Function):
    """q [T, H, D] to keys and values [M, Hkv, D]. The first block has all rows as queries.

    With `ring`, whose blocks are a rank's own, of an earlier one, of a later one: over the ranks of
    a context, whose keys and values go around, one hop a step, while the ones at hand are used. Liu
    et al. 2023 (arXiv 2310.01889). In backward their gradients travel with them, and are home after
    R hops. A rank has the keys of R ranks one after the other only, never at once: for sequences
    whose keys do not fit.
    """

    @staticmethod
    def forward(
        ctx,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        blocks: tuple[Block, ...],
        options: Options,
        ring: Context | None,
    ) -> Tensor:
        out, lse = attend(q, _steps(k, v, blocks, ring), options)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.blocks, ctx.options, ctx.ring = blocks, options, ring
        return out

    @staticmethod
    def backward(ctx, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        wide = torch.promote_types(q.dtype, torch.float32) if ctx.ring else q.dtype
        dq, *traveling = (
            torch.zeros_like(x, dtype=wide, memory_format=torch.contiguous_format)
            for x in (q, k, v)
        )
        for block, *at_hand in _steps(k, v, ctx.blocks, ctx.ring):
            kernels.backward((dq, *traveling), dout, q, *at_hand, out, lse, block, ctx.options)
            traveling = (
                RingTransfer(traveling, ctx.ring).wait() if ctx.ring else traveling
            )  # behind their keys
        return dq.to(q.dtype), *(g.to(k.dtype) for g in traveling), None, None, None


def _steps(
    k: Tensor, v: Tensor, blocks: tuple[Block, ...], ring: Context | None
) -> Iterator[tuple[Block, Tensor, Tensor]]:
    """Blocks with the keys and values at hand; on a ring each hop's, while they are on their way to
    the next rank.
    """
    if ring is None:
        yield from ((block, k, v) for block in blocks)
        return
    for hop in range(ring.size):
        visit = RingTransfer([k, v], ring) if hop + 1 < ring.size else None
        # After `hop` hops the keys at hand are of rank `ring.rank - hop`: one's own, an earlier
        # one's, or (from behind zero) a later one's.
        yield blocks[0 if hop == 0 else 1 if hop <= ring.rank else 2], k, v
        k, v = visit.wait() if visit else (k, v)


ALL_ATTENTION_FUNCTIONS.register(NAME, packed_attention)
