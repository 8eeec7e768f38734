"""Gated delta nets on packed sequences: Yang et al. 2024 (arXiv 2412.06464), in Qwen3-Next and 3.5.

A head's state S is a matrix that each row t decays, corrects and reads:

    S_t = a_t S_{t-1} + b_t k_t (v_t - a_t S_{t-1}' k_t)',    o_t = S_t' q_t.

It begins with zeros at each sequence of a packed batch, and an answer to a shared prompt begins
with the state after the prompt. So does the short convolution before it. The library's
layers know neither, so `install` gives them the forward below.
"""

import importlib
import importlib.util
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minirl.parallel.placements import AllToAll, local_parts
from minirl.types.packed import Context, LayerBatch, Recurrence, Span

EPSILON = 1e-6  # Under the root of the norms of queries and keys.


def install(model: nn.Module) -> None:
    """Give a model's gated delta nets the forward of packed batches; call it before it is split."""
    for module in model.modules():
        if not type(module).__name__.endswith("GatedDeltaNet"):
            continue
        net: Any = module
        # Features of queries, keys and values, of which a tensor-parallel rank has some heads each.
        parts = (net.key_dim, net.key_dim, net.value_dim)
        net.conv1d.parts = parts
        net.conv1d.forward = partial(convolve, net.conv1d)
        if "in_proj_qkv" in net._modules:
            net.in_proj_qkv.parts = parts
        net.forward = partial(forward, net)


def forward(module: Any, hidden_states: Tensor, *, pack: LayerBatch, **kwargs: object) -> Tensor:
    """Stand in for the forward of the library's layer.

    Args:
        module: the layer.
        hidden_states: [1, T, H].
        pack: the batch.
        **kwargs: other arguments of the library, for caches and padding.

    Returns:
        [1, T, H].
    """
    recurrence = pack.batch.recurrence
    if recurrence is None:
        raise NotImplementedError("a layer has a state; pack with RowLayout(convolution=...)")
    if kwargs.get("attention_mask") is not None or kwargs.get("cache_params") is not None:
        raise NotImplementedError("a packed batch has no padding, and no cache")

    mixed, gate, b, a = _project(module, hidden_states)
    heads = _Heads(module, pack.batch.context)
    rows = torch.cat([mixed, b, a], dim=-1)
    rows = heads.gather(rows, recurrence)
    key_dim, value_dim, num_heads = heads.sizes
    widths = [2 * key_dim + value_dim, num_heads, num_heads]
    mixed, b, a = rows.split(widths, dim=-1)
    q, k, v = in_heads(module, module.conv1d(mixed, recurrence, heads))
    log_decay = decay_formula(a, heads.local(module.A_log), heads.local(module.dt_bias))
    out = delta_rule(q, k, v, log_decay, b.sigmoid(), recurrence)

    out = heads.scatter(out.flatten(1), recurrence)
    head_dim = module.head_v_dim
    out = module.norm(out.view(-1, head_dim), gate.reshape(-1, head_dim))
    return module.out_proj(out.view(*hidden_states.shape[:2], -1))


class _Heads:
    """The heads that this rank goes through sequences for: of R context ranks, each has 1 / R.

    Before the recurrence ranks have their rows for all heads, inside it all rows for their heads:
    DeepSpeed-Ulysses, arXiv 2309.14509.
    """

    def __init__(self, module: Any, context: Context | None):
        self.context = context
        self.size = context.size if context else 1
        # Of this tensor-parallel rank: features of queries (as of keys) and of values, and heads.
        key_dim: int = module.key_dim
        value_dim: int = module.value_dim
        num_heads: int = module.num_v_heads
        self.parts = (key_dim, key_dim, value_dim)
        self._all_parts = (*self.parts, num_heads, num_heads)
        self.sizes = (key_dim // self.size, value_dim // self.size, num_heads // self.size)

    def local(self, t: Tensor, parts: tuple[int, ...] | None = None) -> Tensor:
        """Return what belongs to the heads of a weight [C, ...], in parts that lie end to end."""
        if self.context is None:
            return t
        return local_parts(t, parts or (len(t),), self.context.rank, self.size, dim=0)

    def gather(self, x: Tensor, recurrence: Recurrence) -> Tensor:
        """Move from this rank's rows [T, C] for all heads to all rows [N, C / R] for its heads."""
        if self.context is None or recurrence.gathered is None:
            return x
        ranks = range(self.size)
        given = [local_parts(x, self._all_parts, rank, self.size, dim=1) for rank in ranks]
        rows = AllToAll.apply(torch.stack(given), self.context.group).flatten(0, 1)
        return rows.index_select(0, recurrence.gathered)

    def scatter(self, x: Tensor, recurrence: Recurrence) -> Tensor:
        """Move back from all rows [N, C / R] to this rank's rows [T, C]."""
        if self.context is None or recurrence.back is None:
            return x
        rows = with_zeros(x).index_select(0, recurrence.back)
        by_rank = rows.unflatten(0, (self.size, -1))
        by_heads = AllToAll.apply(by_rank, self.context.group)
        return by_heads.transpose(0, 1).flatten(1)


def _project(module: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return what a layer makes of its input, row by row.

    Returns:
        Queries, keys and values side by side [T, C]; the output's gate [T, Hv, Dv]; and of each
        head the logit of the learning rate and the argument of the decay, [T, Hv].
    """
    if "in_proj_qkvz" in module._modules:  # Qwen3-Next's, in which all that a head has is together
        qkvz = module.in_proj_qkvz(hidden_states)
        ba = module.in_proj_ba(hidden_states)
        q, k, v, gate, b, a = module.fix_query_key_value_ordering(qkvz, ba)
        mixed = torch.cat([x.flatten(2) for x in (q, k, v)], dim=-1)
    else:
        mixed = module.in_proj_qkv(hidden_states)
        gate = module.in_proj_z(hidden_states)
        b = module.in_proj_b(hidden_states)
        a = module.in_proj_a(hidden_states)
    return mixed.squeeze(0), gate.squeeze(0), b.squeeze(0), a.squeeze(0)


def convolve(module: nn.Conv1d, x: Tensor, recurrence: Recurrence, heads: _Heads) -> Tensor:
    """Return silu of each feature's convolution with its own weights, over the K rows up to a row.

    Args:
        module: with weights [C, 1, K]; the forward that this stands in for.
        x: [T, C].
        recurrence: of the batch.
        heads: those that the features are of.
    """
    weight = heads.local(module.weight, heads.parts).squeeze(1)
    rows = with_zeros(x).index_select(0, recurrence.history)
    kernel = convolution_kernel(x)
    if kernel:
        out = kernel(rows.T[None], weight, activation="silu")[0].T
        return out.index_select(0, recurrence.places)
    out = convolution_formula(rows, weight)
    return out.index_select(0, recurrence.places - (weight.shape[1] - 1))


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, rate: Tensor, recurrence: Recurrence
) -> Tensor:
    """Go through each sequence of a packed batch by the gated delta rule.

    Args:
        q: queries [T, H, Dk], which are normed here, as are keys.
        k: keys [T, H, Dk].
        v: values [T, H, Dv].
        log_decay: [T, H], 0 or less: the log of what a row leaves of the state.
        rate: [T, H], of 0 .. 1: how far a row corrects what the state says of its key.
        recurrence: of the batch.

    Returns:
        The output [T, H, Dv].
    """
    kernel = delta_rule_kernel(q)
    outputs = []
    states = None  # After the last rows of the span before.
    for span in recurrence.spans:
        here = slice(span.start, span.stop)
        initial = None
        if span.continued is not None and states is not None:
            initial = with_zeros(states).index_select(0, span.continued)
        inputs = q[here], k[here], v[here], log_decay[here], rate[here]
        if kernel:
            out, states = kernel(*inputs, initial, span.cu_rows)
        else:
            out, states = delta_rule_formula(*inputs, initial, span)
        outputs.append(out)
    return torch.cat(outputs) if len(outputs) > 1 else outputs[0]


# --------------------------------------------------------------------------------------------------
# the door to kernels on CUDA: flash-linear-attention, causal-conv1d (extra `hybrids`)
#
# Without them, and in dtypes that they do not know, the formulas below compute the same.

_DTYPES = (torch.bfloat16, torch.float16)


@cache
def _function(module: str, name: str) -> Any:
    """Return a package's function, None without the package."""
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        return None
    return vars(importlib.import_module(module))[name]


def convolution_kernel(x: Tensor) -> Callable[..., Tensor] | None:
    """Return causal-conv1d's function if it can take such features, else None.

    It is called with features [1, C, T], weights [C, K] and `activation`.
    """
    if not x.is_cuda or x.dtype not in (*_DTYPES, torch.float32):
        return None
    return _function("causal_conv1d", "causal_conv1d_fn")


def delta_rule_kernel(q: Tensor) -> Callable[..., tuple[Tensor, Tensor]] | None:
    """Return flash-linear-attention's gated delta rule if it can take such queries, else None.

    It is called with queries, keys, values, decays and rates as `delta_rule` has them,
    initial states [S, H, Dk, Dv] or None, and the running sum [S + 1] of the sequences' rows.
    """
    if not q.is_cuda or q.dtype not in _DTYPES:
        return None
    kernel = _function("fla.ops.gated_delta_rule", "chunk_gated_delta_rule")
    if kernel is None:
        return None

    def call(*arguments: Tensor | None) -> tuple[Tensor, Tensor]:
        *inputs, initial, cu_rows = arguments
        out, states = kernel(
            *(x[None].contiguous() for x in inputs if x is not None),
            initial_state=initial,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=cu_rows,
        )
        return out[0], states

    return call


# --------------------------------------------------------------------------------------------------
# formulas, which the engine shares: vLLM's CPU build has no others for any dtype


def in_heads(module: Any, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys [T, Hv, Dk] and values [T, Hv, Dv]; value heads share key heads.

    Args:
        module: the layer, the library's or vLLM's.
        mixed: the three side by side [T, C], of all heads or of some.
    """
    width = mixed.shape[-1]
    whole_width = 2 * module.key_dim + module.value_dim
    value_dim = width * module.value_dim // whole_width
    key_dim = (width - value_dim) // 2
    q, k, v = mixed.split([key_dim, key_dim, value_dim], dim=-1)
    repeats = module.num_v_heads // module.num_k_heads
    q = q.unflatten(-1, (-1, module.head_k_dim))
    k = k.unflatten(-1, (-1, module.head_k_dim))
    v = v.unflatten(-1, (-1, module.head_v_dim))
    return q.repeat_interleave(repeats, dim=1), k.repeat_interleave(repeats, dim=1), v


def decay_formula(a: Tensor, A_log: Tensor, dt_bias: Tensor) -> Tensor:  # noqa: N803
    """Return the log of what a row leaves of the state of each head, [T, Hv], in float32 at least.

    Args:
        a: [T, Hv], of the row.
        A_log: weights [Hv].
        dt_bias: weights [Hv].
    """
    return -wide(A_log).exp() * F.softplus(wide(a) + dt_bias)


def convolution_formula(rows: Tensor, weight: Tensor) -> Tensor:
    """Return silu of the convolution at all rows but the first K - 1, [N, C] -> [N - K + 1, C].

    Args:
        rows: [N, C].
        weight: [C, K].
    """
    width = weight.shape[1]
    num_out = len(rows) - width + 1
    wide_rows = wide(rows)
    out = torch.zeros_like(wide_rows[:num_out])
    for i in range(width):
        earlier = wide_rows[i : i + num_out]
        out = out + earlier * weight[:, i]
    return F.silu(out.to(rows.dtype))


def delta_rule_formula(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    rate: Tensor,
    initial: Tensor | None,
    span: Span,
) -> tuple[Tensor, Tensor]:
    """Go through the sequences of a span, chunk by chunk; sec. 3.3 of the paper.

    Args:
        q: as in `delta_rule`, of the span's rows, like the others.
        k: [T, H, Dk].
        v: [T, H, Dv].
        log_decay: [T, H].
        rate: [T, H].
        initial: states [S, H, Dk, Dv] that the sequences begin with; None: zeros.
        span: which rows are a sequence's.

    Returns:
        The output [T, H, Dv], and the states after the sequences [S, H, Dk, Dv], in float32 at
        least.
    """
    chunks = span.chunks
    solved = _solve(q, k, v, log_decay, rate, chunks.rows)
    if initial is None:
        _, num_heads, key_dim = k.shape
        size = (len(chunks.order), num_heads, key_dim, v.shape[-1])
        initial = solved.values.new_zeros(size)
    state = initial.index_select(0, chunks.order)
    outputs = []
    ended = []  # States after the sequences that end with a step.
    first = 0
    for count in chunks.counts:
        here = _Solved._make(x[first : first + count] for x in solved)
        first += count
        ended.append(state[count:])
        state = state[:count]
        corrections = here.values - here.of_state @ state
        outputs.append(here.queries @ state + here.scores @ corrections)
        state = here.kept * state + here.keys.mT @ corrections
    ended.append(state)

    out = torch.cat(outputs).transpose(1, 2).flatten(0, 1)
    states = torch.cat(ended[::-1]).index_select(0, chunks.ranks)
    return out.index_select(0, chunks.places).to(q.dtype), states


def delta_step(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, rate: Tensor, states: Tensor
) -> tuple[Tensor, Tensor]:
    """Go one row further in each of S sequences.

    Args:
        q: as in `delta_rule`, the rows of different sequences, like the others.
        k: [S, H, Dk].
        v: [S, H, Dv].
        log_decay: [S, H].
        rate: [S, H].
        states: before those rows [S, H, Dk, Dv].

    Returns:
        The output [S, H, Dv], and the states after the rows, in float32 at least.
    """
    queries = _scaled(q)[..., None, :]
    keys = _normed(k)[..., None]
    values = wide(v)[..., None, :]
    rates = wide(rate)[..., None, None]
    decay = wide(log_decay).exp()[..., None, None]
    states = decay * wide(states)
    expected = keys.mT @ states
    states = states + keys @ (rates * (values - expected))
    out = queries @ states
    return out.squeeze(-2).to(q.dtype), states


class _Solved(NamedTuple):
    """What C chunks, of CHUNK = N rows, make of the states before them."""

    # The corrections u are `values - of_state @ S`.
    values: Tensor  # [C, H, N, Dv]
    of_state: Tensor  # [C, H, N, Dk]
    # The output is `queries @ S + scores @ u`.
    queries: Tensor  # [C, H, N, Dk]
    scores: Tensor  # [C, H, N, N]
    # The state after a chunk is `kept * S + keys' @ u`.
    kept: Tensor  # [C, H, 1, 1]
    keys: Tensor  # [C, H, N, Dk]


def _solve(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, rate: Tensor, rows: Tensor
) -> _Solved:
    """Do all that is parallel over chunks.

    Inside one, the corrections u_t = b_t (v_t - a_t S_{t-1}' k_t) depend on each other by a
    triangular system.
    """

    def cut(x: Tensor) -> Tensor:
        """Lay rows in chunks: [T, H, D] -> [C, H, CHUNK, D], in float32 at least."""
        chunks = with_zeros(wide(x)).index_select(0, rows.flatten())
        return chunks.unflatten(0, rows.shape).transpose(1, 2)

    queries = cut(_scaled(q))
    keys = cut(_normed(k))
    rates = cut(rate[..., None])
    decay = cut(log_decay[..., None]).cumsum(2)  # From the chunk's start, as a logarithm.
    # What row i has left of row j, of the state before the chunk, and the chunk's end of a row.
    between = decay - decay.mT
    later = torch.ones_like(between[0, 0], dtype=torch.bool).triu(1)
    between = between.masked_fill(later, -torch.inf).exp()
    since_start = decay.exp()
    until_end = (decay[:, :, -1:] - decay).exp()

    system = (rates * keys) @ keys.mT * between  # Below its diagonal, which counts as ones.
    given = rates * torch.cat([cut(v), since_start * keys], dim=-1)
    solution = torch.linalg.solve_triangular(system, given, upper=False, unitriangular=True)
    value_dim, key_dim = v.shape[-1], k.shape[-1]
    values, of_state = solution.split([value_dim, key_dim], dim=-1)
    return _Solved(
        values=values,
        of_state=of_state,
        queries=since_start * queries,
        scores=queries @ keys.mT * between,
        kept=since_start[:, :, -1:],
        keys=until_end * keys,
    )


def _scaled(q: Tensor) -> Tensor:
    """Return queries of norm 1 / sqrt(Dk), [..., Dk]."""
    return _normed(q) * q.shape[-1] ** -0.5


def _normed(x: Tensor) -> Tensor:
    """Return vectors of norm 1, [..., D]."""
    x = wide(x)
    squares = x.square().sum(-1, keepdim=True)
    return x * torch.rsqrt(squares + EPSILON)


def wide(x: Tensor) -> Tensor:
    """Return a tensor in float32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def with_zeros(x: Tensor) -> Tensor:
    """Add a row of zeros, which the number T of a row means."""
    return torch.cat([x, x.new_zeros(1, *x.shape[1:])])
