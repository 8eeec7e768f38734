"""Gated delta nets on packed sequences: Yang et al. 2024 (arXiv 2412.06464), in Qwen3-Next and 3.5.

A head's state S is a matrix that each row t decays, corrects and reads:

    S_t = a_t S_{t-1} + b_t k_t (v_t - a_t S_{t-1}' k_t)',    o_t = S_t' q_t.

It begins with zeros at each sequence of a packed batch, and an answer whose prompt siblings share
begins with the state behind the prompt. So does the short convolution before it. The library's
layers know neither, so `install` gives them the forward below.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from minirl.base.errors import require
from minirl.model.hybrid import fla_package
from minirl.model.hybrid.delta_rule import (
    convolution,
    convolution_formula,
    decay_formula,
    delta_rule_formula,
    in_heads,
    with_zeros,
)
from minirl.parallel.redistribute import AllToAll, own_parts
from minirl.types.blocks import Recurrence
from minirl.types.packed import Context, Packed


def check_heads(config: PretrainedConfig, tensor: int, context: int) -> None:
    """Refuse a mesh over which a model's gated delta nets cannot be divided, which is by heads.

    Args:
        config: of the model.
        tensor: parallel.tensor.
        context: parallel.context.

    Raises:
        UserError: it does not divide their number.
    """
    num_heads = config.get_text_config().linear_num_key_heads if convolution(config) else 0
    require(
        num_heads % (tensor * context) == 0,
        f"parallel.tensor * parallel.context = {tensor} * {context} = {tensor * context} does not "
        f"divide linear_num_key_heads = {num_heads} of family {config.model_type!r}, whose layers "
        "with a state are divided by heads; lower one of the two",
    )


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


def forward(module: Any, hidden_states: Tensor, *, pack: Packed, **kwargs: object) -> Tensor:
    """Stand in for the forward of the library's layer.

    Args:
        module: the layer.
        hidden_states: [1, T, H].
        pack: the batch.
        **kwargs: other arguments of the library, for caches and padding.

    Returns:
        [1, T, H].
    """
    recurrence = pack.recurrence
    if recurrence is None:
        raise NotImplementedError("a layer has a state; pack with RowLayout(convolution=...)")
    if kwargs.get("attention_mask") is not None or kwargs.get("cache_params") is not None:
        raise NotImplementedError("a packed batch has no padding, and no cache")

    mixed, gate, b, a = _project(module, hidden_states)
    heads = _Heads(module, pack.context)
    rows = heads.gather(torch.cat([mixed, b, a], dim=-1), recurrence)
    key_dim, value_dim, num_heads = heads.sizes
    mixed, b, a = rows.split([2 * key_dim + value_dim, num_heads, num_heads], dim=-1)
    q, k, v = in_heads(module, module.conv1d(mixed, recurrence, heads))
    log_decay = decay_formula(a, heads.own(module.A_log), heads.own(module.dt_bias))
    out = delta_rule(q, k, v, log_decay, b.sigmoid(), recurrence)

    out = heads.scatter(out.flatten(1), recurrence).view(-1, module.head_v_dim)
    out = module.norm(out, gate.reshape(-1, module.head_v_dim))
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

    def own(self, t: Tensor, parts: tuple[int, ...] | None = None) -> Tensor:
        """Return what belongs to the heads of a weight [C, ...], in parts that lie end to end."""
        if self.context is None:
            return t
        return own_parts(t, parts or (len(t),), self.context.rank, self.size, dim=0)

    def gather(self, x: Tensor, recurrence: Recurrence) -> Tensor:
        """Move from own rows [T, C] for all heads to all rows [N, C / R] for own heads."""
        if self.context is None or recurrence.gathered is None:
            return x
        ranks = range(self.size)
        given = [own_parts(x, self._all_parts, rank, self.size, dim=1) for rank in ranks]
        rows = AllToAll.apply(torch.stack(given), self.context.group).flatten(0, 1)
        return rows.index_select(0, recurrence.gathered)

    def scatter(self, x: Tensor, recurrence: Recurrence) -> Tensor:
        """Move back from all rows [N, C / R] to own rows [T, C]."""
        if self.context is None or recurrence.back is None:
            return x
        rows = with_zeros(x).index_select(0, recurrence.back)
        by_heads = AllToAll.apply(rows.unflatten(0, (self.size, -1)), self.context.group)
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
    weight = heads.own(module.weight, heads.parts).squeeze(1)
    rows = with_zeros(x).index_select(0, recurrence.history)
    kernel = fla_package.convolution(x)
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
    kernel = fla_package.delta_rule(q)
    outputs = []
    states = None  # Behind the last rows of the span before.
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
