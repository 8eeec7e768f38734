"""Gated delta nets in vLLM's CPU build, by formulas (model/delta_net.py) that take any weights.

Its own kernels demand bfloat16 and convolutions that are packed once, after loading, where no refit
reaches them.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from minirl.batch.recurrence import span_of
from minirl.model import delta_net


def patch_delta_nets() -> None:
    """Give vLLM's layers the recurrence below; call it before the first of them is made."""
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
    from vllm.utils.torch_utils import LayerNameType

    # vLLM looks the function up by this name when it makes an operator of it, by its annotations.
    compute.__annotations__["layer_name"] = LayerNameType
    gdn_attention.cpu_gdn_attention_core = compute


def compute(
    mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor, layer_name: str
) -> None:
    """Write the output of a layer's recurrence, and its states after all requests of the batch.

    The names of the arguments are those of vLLM's operator. `Hv` is the number of this rank's
    heads.

    Args:
        mixed_qkv: queries, keys and values in one row, before the convolution [T, C].
        b: logits of the learning rates [T, Hv].
        a: arguments of the decays [T, Hv].
        core_attn_out: the output, which is written, [T, Hv, Dv].
        layer_name: vLLM's name of the layer.
    """
    from vllm.forward_context import get_forward_context
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
    from vllm.utils.torch_utils import _resolve_layer_name

    context = get_forward_context()
    if context.attn_metadata is None:  # vLLM measures memory.
        return
    layer = context.no_compile_layers[_resolve_layer_name(layer_name)]
    requests = _Requests.of(context.attn_metadata[layer.prefix])
    here = slice(0, requests.num_rows)
    # Views of its caches: [slots, K - 1, C] of its rows, [slots, Hv, Dk, Dv].
    convolutions, states = layer.kv_cache[0], layer.kv_cache[1].mT
    if is_conv_state_dim_first():
        convolutions = convolutions.mT

    weight = layer.conv1d.weight.squeeze(1)
    mixed = _convolve(mixed_qkv[here], weight, convolutions, requests)
    q, k, v = delta_net.in_heads(layer, mixed)
    log_decay = delta_net.decay_formula(a[here], layer.A_log, layer.dt_bias)
    rate = b[here].sigmoid()
    before = requests.read(states)

    # The first requests have one row each, and need no chunk of many. A prompt of one row may come
    # after longer ones, and is then computed as they are.
    num_single = int(np.argmax(np.append(requests.lengths, 2) > 1))
    single, longer = slice(num_single), slice(num_single, None)
    out, after = delta_net.delta_step(
        q[single], k[single], v[single], log_decay[single], rate[single], before[single]
    )
    if num_single < len(requests.lengths):
        span = span_of(requests.lengths[longer], num_single, None, q.device)
        out_longer, after_longer = delta_net.delta_rule_formula(
            q[longer], k[longer], v[longer], log_decay[longer], rate[longer], before[longer], span
        )
        out = torch.cat([out, out_longer])
        after = torch.cat([after, after_longer])
    core_attn_out[here] = out
    states[requests.slots] = after.to(states.dtype)


class _Requests(NamedTuple):
    """Which rows of a batch are a request's, and where its states are."""

    lengths: np.ndarray  # [S]: their rows, which lie end to end.
    slots: Tensor  # int64 [S], of the caches.
    is_begun: Tensor  # bool [S]: there are rows before these.
    num_rows: int

    @classmethod
    def of(cls, metadata: Any) -> "_Requests":
        """Read vLLM's description of a batch: requests with one new token come first."""
        num = metadata.num_decodes + metadata.num_prefills
        starts = metadata.non_spec_query_start_loc[: num + 1]
        slots = metadata.non_spec_state_indices_tensor[:num].long()
        if metadata.has_initial_state is None:  # All have one new token.
            is_begun = torch.ones(num, dtype=torch.bool)
        else:
            is_begun = metadata.has_initial_state[:num]
        return cls(starts.diff().numpy(), slots, is_begun, int(starts[-1]))

    def read(self, cache: Tensor) -> Tensor:
        """Return what a cache [slots, ...] has of the requests; zeros of those that begin here."""
        found = cache[self.slots]
        found[~self.is_begun] = 0
        return found


def _convolve(x: Tensor, weight: Tensor, cache: Tensor, requests: _Requests) -> Tensor:
    """Return the convolution [T, C] of the rows of all requests, and keep the last of each.

    Args:
        x: [T, C].
        weight: [C, K].
        cache: [slots, K - 1, C], the rows before those; written.
        requests: the requests of the batch.
    """
    num_before = weight.shape[1] - 1
    before = requests.read(cache).to(x.dtype)
    parts: list[Tensor] = []  # The rows before each request's, and its rows.
    for pair in zip(before, x.split(requests.lengths.tolist()), strict=True):
        parts.extend(pair)
    rows = torch.cat(parts)
    out = delta_net.convolution_formula(rows, weight)

    stops = np.cumsum(requests.lengths + num_before)
    last = stops[:, None] - num_before + np.arange(num_before)
    cache[requests.slots] = rows[torch.from_numpy(last)].to(cache.dtype)
    skipped = np.arange(len(requests.lengths)) * num_before
    places = np.arange(len(x)) + np.repeat(skipped, requests.lengths)
    return out[torch.from_numpy(places)]
