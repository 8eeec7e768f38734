"""The formulas of gated delta nets (delta_net.py): Yang et al. 2024 (arXiv 2412.06464).

Trainer and engine share them: vLLM's CPU build has no others for any dtype.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PretrainedConfig

from minirl.types.packed import Span

EPSILON = 1e-6  # Under the root of the norms of queries and keys.


def convolution(config: PretrainedConfig) -> int:
    """Return over how many rows layers with a state convolve; 0: there are no such layers."""
    values = config.get_text_config().to_dict()
    if "linear_attention" not in (values.get("layer_types") or []):
        return 0
    return values["linear_conv_kernel_dim"]


def in_heads(module: Any, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys [T, Hv, Dk] and values [T, Hv, Dv]; value heads share key heads.

    Args:
        module: the layer, the library's or vLLM's.
        mixed: the three side by side [T, C], of all heads or of some.
    """
    value_dim = mixed.shape[-1] * module.value_dim // (2 * module.key_dim + module.value_dim)
    key_dim = (mixed.shape[-1] - value_dim) // 2
    q, k, v = mixed.split([key_dim, key_dim, value_dim], dim=-1)
    repeats = module.num_v_heads // module.num_k_heads
    q = q.unflatten(-1, (-1, module.head_k_dim)).repeat_interleave(repeats, dim=1)
    k = k.unflatten(-1, (-1, module.head_k_dim)).repeat_interleave(repeats, dim=1)
    return q, k, v.unflatten(-1, (-1, module.head_v_dim))


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
        out = out + wide_rows[i : i + num_out] * weight[:, i]
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
        q: as in `delta_net.delta_rule`, of the span's rows, like the others.
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
        initial = solved.values.new_zeros(len(chunks.order), *k.shape[1:], v.shape[-1])
    state = initial.index_select(0, chunks.order)
    outputs = []
    ended = []  # States after the sequences that end with a step.
    first = 0
    for count in chunks.counts:
        step = slice(first, first + count)
        first += count
        ended.append(state[count:])
        state = state[:count]
        corrections = solved.values[step] - solved.of_state[step] @ state
        outputs.append(solved.queries[step] @ state + solved.scores[step] @ corrections)
        state = solved.kept[step] * state + solved.keys[step].mT @ corrections
    ended.append(state)

    out = torch.cat(outputs).transpose(1, 2).flatten(0, 1)
    states = torch.cat(ended[::-1]).index_select(0, chunks.ranks)
    return out.index_select(0, chunks.places).to(q.dtype), states


def delta_step(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, rate: Tensor, states: Tensor
) -> tuple[Tensor, Tensor]:
    """Go one row further in each of S sequences.

    Args:
        q: as in `delta_net.delta_rule`, the rows of different sequences, like the others.
        k: [S, H, Dk].
        v: [S, H, Dv].
        log_decay: [S, H].
        rate: [S, H].
        states: before those rows [S, H, Dk, Dv].

    Returns:
        The output [S, H, Dv], and the states after the rows, in float32 at least.
    """
    queries = _normed(q) * q.shape[-1] ** -0.5
    keys = _normed(k)[..., None]
    states = wide(log_decay).exp()[..., None, None] * wide(states)
    corrections = wide(rate)[..., None, None] * (wide(v)[..., None, :] - keys.mT @ states)
    states = states + keys @ corrections
    out = queries[..., None, :] @ states
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

    queries = cut(_normed(q)) * q.shape[-1] ** -0.5
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
    values, of_state = solution.split([v.shape[-1], k.shape[-1]], dim=-1)
    return _Solved(
        values=values,
        of_state=of_state,
        queries=since_start * queries,
        scores=queries @ keys.mT * between,
        kept=since_start[:, :, -1:],
        keys=until_end * keys,
    )


def _normed(x: Tensor) -> Tensor:
    x = wide(x)
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPSILON)


def wide(x: Tensor) -> Tensor:
    """Return a tensor in float32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def with_zeros(x: Tensor) -> Tensor:
    """Add a row of zeros, which the number T of a row means."""
    return torch.cat([x, x.new_zeros(1, *x.shape[1:])])
