"""The door to FlashAttention: attention of one `Block` over running lengths, in half precision.

FlashAttention-2 (Dao 2023, arXiv 2307.08691) is inside torch. Three packages are better in places:
FlashAttention-3 (Shah et al. 2024, arXiv 2407.08608; package `flash_attn_3`, built from the folder
hopper/ of its repository) is faster on Hopper GPUs, FlashAttention-4 (package flash-attn-4) on
these and on Blackwell's, and flash-attn 2.8 (extra `flash`) knows softcaps: Gemma 2.
ring-flash-attn (extra `ring`), which has the zigzag layout of batch/attention_plan.py, goes around
a ring of ranks.

All add up the gradients of queries in any order, but in a fixed one under
`torch.use_deterministic_algorithms(True)`.
"""

import functools
import importlib
import importlib.metadata
import importlib.util
import sys
import types
from typing import Any

import torch
from torch import Tensor

from minirl.base.errors import require
from minirl.types.packed import Block, Context, Options

OLDEST = (2, 8)  # The oldest flash-attn 2: its internal functions are called here.


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


@functools.cache
def flash4() -> Any:
    """Return FlashAttention-4's functions, None without the package."""
    try:  # By the name of the package: flash-attn 2.8 has a first draft in the same folder.
        importlib.metadata.version("flash-attn-4")
    except importlib.metadata.PackageNotFoundError:
        return None
    return importlib.import_module("flash_attn.cute.interface")


def choose(q: Tensor, softcap: float | None) -> int | None:
    """Return which FlashAttention of a package is best for such queries: 4, 3, 2, or None.

    None with a softcap: no FlashAttention can.
    """
    if softcap is not None:
        return 2 if flash2() else None
    if not (flash3() or flash4()):
        return None
    generation = torch.cuda.get_device_capability(q.device)[0]
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    if flash3() and generation == 9:
        # Its backward for such wide heads is not deterministic.
        return None if is_deterministic and q.shape[-1] > 192 else 3
    if flash4() and generation in (9, 10) and q.shape[-1] <= 128 and not is_deterministic:
        return 4
    return None


def forward(
    q: Tensor, k: Tensor, v: Tensor, block: Block, options: Options
) -> tuple[Tensor, Tensor]:
    """Attend from the queries of a block to its keys; see `attention.block_forward`."""
    rows, keys = block.rows, block.key_rows
    inputs = (_pairs(q, rows), _pairs(k, keys), _pairs(v, keys), *_lengths(block))
    arguments = _arguments(block, options)
    version = choose(q, options.softcap)
    if version:
        out, lse = package_forward(
            *inputs, options.softcap or 0.0, block.causal, version=version, **arguments
        )
    else:
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            *inputs, 0.0, block.causal, False, **arguments
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
    rows, keys = block.rows, block.key_rows
    whole = _pairs(out, rows), _pairs(lse.t(), rows, 1)
    here = _pairs(q, rows), _pairs(k, keys), _pairs(v, keys)
    inputs = (_pairs(dout, rows), *here, *whole, *_lengths(block))
    arguments = _arguments(block, options)
    version = choose(q, options.softcap)
    if version:
        block_gradients = package_backward(
            *inputs, options.softcap or 0.0, block.causal, version=version, **arguments
        )
    else:
        # The random state of a dropout of 0, whose values nothing uses.
        random_state = torch.empty(2, dtype=torch.uint64, device=q.device)
        unused = torch.empty(0, device=q.device)
        block_gradients = torch.ops.aten._flash_attention_backward(
            *inputs, 0.0, block.causal, random_state, unused, **arguments
        )
    indices = rows, keys, keys
    is_first = not gradients
    for number, gradient in enumerate(block_gradients):
        index = indices[number]
        if is_first and index is None:
            gradients.append(gradient)  # the sum so far
            continue
        if is_first:
            x = (q, k, v)[number]
            gradients.append(torch.zeros_like(x, memory_format=torch.contiguous_format))
        if index is None:
            gradients[number].add_(gradient)
        else:
            gradients[number].index_add_(0, index, gradient.to(gradients[number].dtype))


def _pairs(x: Tensor, rows: Tensor | None, dim: int = 0) -> Tensor:
    """Lay the rows of a block end to end, pair by pair."""
    return (x if rows is None else x.index_select(dim, rows)).contiguous()


def _lengths(block: Block) -> tuple[Tensor, Tensor, int, int]:
    """Return the running sums of queries and of keys, and bounds of both of a pair.

    The bound of queries is two at least. If a pair has one query at most, where all heads see all
    keys, FlashAttention-2 makes queries of the heads that share a key (`seqlenq_ngroups_swapped` in
    its flash_api.cpp), and then ignores the running sum of queries. It is for decoding; a bound of
    two computes the same without it.
    """
    num_queries, num_keys = block.longest
    return block.cu_queries, block.cu_keys, max(num_queries, 2), num_keys


def _arguments(block: Block, options: Options) -> dict[str, float]:
    # With more keys than queries its causal mask lies at the bottom right, as `Block.causal` says.
    return {
        "scale": options.scale,
        "window_size_left": (options.window or 0) - 1,
        "window_size_right": 0 if block.causal else -1,
    }


# --------------------------------------------------------------------------------------------------
# flash-attn's functions as operators of torch, with the arguments of torch's operator but for
# `softcap` in the place of dropout. So tensors without values know them.

_ARGUMENTS = (
    "Tensor cu_queries, Tensor cu_keys, SymInt max_queries, SymInt max_keys, float softcap, "
    "bool causal, *, int version, float scale, int window_size_left, int window_size_right"
)


def _keywords(version: int, arguments: tuple, scale: float, **window: int) -> dict[str, Any]:
    """Return the arguments that are no rows, by the names that a package has for them.

    Args:
        version: of FlashAttention.
        arguments: those of `_ARGUMENTS` before the star.
        scale: factor of the scores.
        window: both sizes of the window.
    """
    cu_queries, cu_keys, max_queries, max_keys, softcap, causal = arguments
    keywords: dict[str, Any] = {
        "cu_seqlens_q": cu_queries,
        "cu_seqlens_k": cu_keys,
        "max_seqlen_q": max_queries,
        "max_seqlen_k": max_keys,
        "softmax_scale": scale,
        "is_causal" if version == 3 else "causal": causal,
    }
    if version == 4:  # It has no softcaps, and None for all keys.
        return keywords | {name: None if size < 0 else size for name, size in window.items()}
    if version == 2:
        keywords["dropout_p"] = 0.0
    return keywords | window | {"softcap": softcap}


@torch.library.custom_op(
    "minirl::flash_attention_forward",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {_ARGUMENTS}) -> (Tensor, Tensor)",
)
def package_forward(
    q: Tensor, k: Tensor, v: Tensor, *arguments: Any, version: int, **options: Any
) -> tuple[Tensor, Tensor]:
    """Return the output [N, H, D], and the log-sum-exp [H, N] of the scores, float32.

    Args:
        q: queries [N, H, D], pair by pair, bfloat16 or float16.
        k: keys [M, Hkv, D].
        v: values [M, Hkv, D].
        arguments: the others of the operator, in its order. `cu_queries` and `cu_keys` are as in
            `Block`, int32 [pairs + 1]; `max_queries` and `max_keys` bounds of a pair's queries and
            keys; `softcap` c of scores c tanh(s / c), 0 for none; `causal` whether the last query
            of a pair sees its last key, and each one before it one key less.
        version: 2, 3 or 4, of FlashAttention.
        options: `scale`, the factor of the scores; `window_size_left` and `window_size_right`, how
            many keys a query sees before its last one and after its own, -1 for all.
    """
    keywords = _keywords(version, arguments, **options)
    if version == 3:
        results = flash3().fwd(q, k, v, **keywords, num_splits=1)
    elif version == 4:
        results = flash4()._flash_attn_fwd(q, k, v, **keywords, return_lse=True)
    else:
        results = flash2()._flash_attn_varlen_forward(q, k, v, **keywords)
    return results[0], results[1]


@package_forward.register_fake
def _(q: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty((q.shape[1], len(q)), dtype=torch.float32)


@torch.library.custom_op(
    "minirl::flash_attention_backward",
    mutates_args=(),
    schema="(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{_ARGUMENTS}) -> (Tensor, Tensor, Tensor)",
)
def package_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any, version: int, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v; in the same order of sums each time if torch asks for it.

    The gradient `dout` of the output, and with `rest` begin the output and its log-sum-exp [H, N],
    may be of an attention of which this is a part. The others are as in `package_forward`.
    """
    out, lse, *arguments = rest
    keywords = _keywords(version, tuple(arguments), **options)
    if version == 4:
        return flash4()._flash_attn_bwd(q, k, v, out, dout, lse, **keywords)
    gradients = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    given = (dout, q, k, v, out, lse, *gradients)
    keywords["deterministic"] = torch.are_deterministic_algorithms_enabled()
    if version == 3:
        flash3().bwd(*given, **keywords)
    else:
        flash2()._flash_attn_varlen_backward(*given, **keywords, alibi_slopes=None)
    return gradients


@package_backward.register_fake
def _(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *args: object, **kwargs: object
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


# --------------------------------------------------------------------------------------------------
# around a ring


@functools.cache
def ring_kernel() -> Any:
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


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, block: Block, scale: float, context: Context
) -> Tensor:
    """Attend around a ring of ranks by `ring_kernel`; not in float32: its backward is wrong there.

    Args:
        q: queries [T, H, D].
        k: keys [T, Hkv, D].
        v: values [T, Hkv, D].
        block: this rank's rows with themselves; the package takes only their lengths.
        scale: factor of the scores.
        context: the ring of ranks.

    Returns:
        The output [T, H, D].
    """
    return ring_kernel()(
        *(x.contiguous() for x in (q, k, v)),
        block.cu_queries,
        block.longest[0],
        softmax_scale=scale,
        causal=True,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        group=context.group,
    )


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
