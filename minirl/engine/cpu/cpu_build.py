"""What is changed in vLLM's CPU build, and why: each patch is a function.

vLLM is imported late, after the engine has set its environment.
"""

import functools
import inspect
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from minirl.base.errors import require
from minirl.batch.recurrence import span_of
from minirl.config.shared import EngineConfig
from minirl.data.vision import Vision
from minirl.engine import compat
from minirl.engine.cpu import packed
from minirl.model import delta_net
from minirl.model.families import convolution
from minirl.parallel.machines import num_cores
from minirl.parallel.mesh import Mesh

# Families that the CPU build cannot run, and that nobody would run there: what it lacks.
NOT_ON_CPU = {"minimax_m2": "routers by sigmoids without groups of experts"}
# Functions of experts' gates by vLLM's names.
GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu_tanh": functools.partial(gelu, approximate="tanh"),
}


def patch_cpu(mesh: Mesh) -> None:
    """Make the CPU build fit for refits and for several jobs on one host. Collective."""
    patch_linear()
    patch_experts()
    patch_delta_nets()
    patch_shared_memory(mesh)

    from vllm.model_executor.models import registry

    # To look at a model's class, vLLM starts another Python on every rank, so that no import
    # initializes CUDA in this one. There is no CUDA here, and those imports take ten seconds.
    registry._run_in_subprocess = lambda inspect: inspect()
    # vLLM looks for kernels in the `__dict__` of everything loaded; of llvmlite's library that
    # would be a function.
    if ffi := sys.modules.get("llvmlite.binding.ffi"):
        ffi.lib._fntab["__dict__"] = {}


def arguments(cfg: EngineConfig, folder: Path, dtype: str) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM` for its CPU build, patched for this model.

    Args:
        cfg: the engine's settings.
        folder: folder of the model.
        dtype: dtype of the weights.

    Raises:
        UserError: the CPU build cannot run the model.
    """
    found: dict[str, Any] = {
        "enforce_eager": True,
        # A prompt prefilled in parts makes the CPU runner rewind the request's random generator,
        # which CPU generators cannot do.
        "enable_chunked_prefill": False,
        "async_scheduling": False,
        "block_size": 32,
        "max_num_batched_tokens": max(8192, cfg.max_model_len),
    }
    from vllm.transformers_utils.config import get_config

    config = get_config(str(folder), trust_remote_code=False)
    require(
        config.model_type not in NOT_ON_CPU,
        f"policy.model: vLLM's CPU build cannot run {config.model_type}: it has no "
        f"{NOT_ON_CPU.get(config.model_type)}; use a GPU",
    )
    if convolution(config):
        # Prompts are not prefilled in parts, so there are no states of prefixes to keep.
        found["enable_prefix_caching"] = False
        # As in the trainer. By default vLLM takes the model's dtype, unless the CPU multiplies
        # bfloat16.
        found["mamba_ssm_cache_dtype"] = "float32"
    if dtype == "bfloat16":
        patch_head()
    if "kv_lora_rank" in config.get_text_config().to_dict():
        # On a CPU with AMX the default backend packs a weight once, and drops it.
        found["attention_backend"] = "CPU_MLA"
        patch_rotary()
    return found


def patch_linear() -> None:
    """Keep linear layers' weights plain parameters, and multiply by packed copies of them.

    The CPU build itself packs every matrix once, after loading, and drops the parameter, so that a
    later write to it changes nothing (silently, for tied embeddings).
    """
    import vllm.model_executor.layers.utils as layers

    def use_packed_copy(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = packed.packed_linear

    layers.dispatch_cpu_unquantized_gemm = use_packed_copy


def patch_head() -> None:
    """Compute logits in float32 of weights in bfloat16 by a copy that is converted once a refit.

    The CPU build would convert the whole head in every step.
    """
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    apply = inspect.unwrap(LogitsProcessor._apply_head)

    @functools.wraps(apply)
    def apply_wide(
        processor: Any, lm_head: Any, hidden_states: Tensor, embedding_bias: Tensor | None
    ) -> Tensor:
        if processor.head_dtype != torch.float32 or hidden_states.dtype == torch.float32:
            return apply(processor, lm_head, hidden_states, embedding_bias)
        return wide_logits(hidden_states, lm_head.weight, embedding_bias)

    LogitsProcessor._apply_head = apply_wide


def wide_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return `hidden @ weight.T + bias` in float32.

    Args:
        hidden: [N, H], bfloat16.
        weight: [V, H], bfloat16.
        bias: [V], bfloat16.
    """
    wide_bias = None if bias is None else bias.float()
    if not len(hidden):
        return hidden.new_empty((0, len(weight)), dtype=torch.float32)
    parts = hidden.float().split(packed.MOST_ROWS)
    return torch.cat([packed.packed_linear(part, weight, wide_bias) for part in parts])


def patch_rotary() -> None:
    """Rotate queries in separate heads, as latent attention has them, by vLLM's formula.

    The CPU build's kernel expects all of a row's heads in one vector, and is wrong for separate
    ones.
    """
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    kernel = inspect.unwrap(RotaryEmbedding.forward_cpu)

    @functools.wraps(kernel)
    def forward(self: Any, positions: Tensor, query: Tensor, key: Tensor | None = None) -> Any:
        if query.ndim == 3:
            return self.forward_native(positions, query, key)
        return kernel(self, positions, query, key)

    RotaryEmbedding.forward_cpu = forward


def patch_images(vision: Vision) -> None:
    """Let tokens of an image see the later ones of it in models that ask for it, as Gemma 3 does.

    The CPU build knows where the images of a batch are, and computes causal attention all the same.

    Args:
        vision: knows in which layers. A batch is described once for all layers with one window.
    """
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder

    dtype = compat.causal_dtype()
    # Without the patch of an earlier engine.
    build = inspect.unwrap(CPUAttentionMetadataBuilder.build)

    @functools.wraps(build)
    def build_cut(
        builder: Any, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Any:
        batch = common_attn_metadata
        if vision.sees_ahead == "always" or builder.window_size > 0:
            batch = cut_at_images(batch, dtype)
        return build(builder, common_prefix_len, batch, fast_build)

    CPUAttentionMetadataBuilder.build = build_cut


def cut_at_images(batch: Any, dtype: torch.dtype) -> Any:
    """Return a batch in which the queries of an image are a request by themselves, not causal.

    The kernel has a flag for each request whether its queries see all its keys, and requests may
    have the same keys. So a prompt is cut into the part before an image, the image, which ends with
    its last token, and the part after it.

    Args:
        batch: vLLM's metadata. Where images are: request -> (first, last) token of each.
        dtype: dtype of the kernel's flags.
    """
    images = batch.mm_req_doc_ranges
    if not images or not any(images.values()):
        return batch
    owners = []  # For each new request, the old one.
    lengths = []  # Its queries and, with all that is before them, its keys.
    ends = []
    is_causal = []
    num_queries = batch.query_start_loc_cpu.diff().tolist()
    for request, end in enumerate(batch.seq_lens[: batch.num_reqs].tolist()):
        place = end - num_queries[request]
        for first, last in [*sorted(images.get(request, [])), (end, end - 1)]:
            for stop, causal in ((min(first, end), True), (min(last + 1, end), False)):
                if stop > place:
                    owners.append(request)
                    lengths.append(stop - place)
                    ends.append(stop)
                    is_causal.append(causal)
                    place = stop
    starts = torch.tensor([0, *lengths]).cumsum(0).to(batch.query_start_loc.dtype)
    return batch.replace(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor(ends, dtype=batch.seq_lens.dtype),
        num_reqs=len(owners),
        max_query_len=max(lengths),
        block_table_tensor=batch.block_table_tensor[owners],
        causal=torch.tensor(is_causal, dtype=dtype),
        mm_req_doc_ranges=None,
    )


def patch_shared_memory(mesh: Mesh) -> None:
    """Make the CPU build's shared memory private to this job, and remove it in any case.

    Under torchrun the segment's name is the same for all jobs of a host, so that a second job, or
    one after a kill, fails.

    In it ranks wait for each other by spinning. If there are more ranks than cores, those that spin
    take the cores from those that work; such ranks exchange by gloo.
    """
    from vllm.distributed.device_communicators import cpu_communicator

    shared_memory = cpu_communicator._CPUSHMDistributed
    host = socket.gethostname()
    by_rank = mesh.gather((host, f"{os.getpid()}-{time.time_ns()}"))
    job = by_rank[0][1]
    num_ranks_here = [other for other, _ in by_rank].count(host)
    # vLLM 0.26 does not ask whether its ranks agree.
    declines = not compat.is_old() and num_ranks_here > num_cores()

    def make_group_name(communicator: Any) -> str:
        ranks = "-".join(map(str, communicator.ranks))
        name = f"minirl-{job}-{communicator.unique_name}-{ranks}".replace(":", "_")
        # If the names of a group's ranks differ, vLLM lets none of them use it.
        return f"{name}-{communicator.rank}" if declines else name

    init_shared_memory = shared_memory._init_cpu_shm

    def init_and_unlink(self: Any) -> int:
        handle = init_shared_memory(self)
        # All ranks have mapped it (there is a barrier inside), so that nothing remains however the
        # job ends.
        Path(f"/dev/shm/{self.group_name}_{self.communicator.rank}").unlink(missing_ok=True)
        return handle

    shared_memory.make_group_name = staticmethod(make_group_name)
    shared_memory._init_cpu_shm = init_and_unlink


def patch_experts() -> None:
    """Keep fused experts' weights plain parameters, as `patch_linear` does for matrices."""
    if compat.is_old():
        compat.refuse_cpu_experts()
        return
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    experts = CPUUnquantizedExperts
    experts.process_weights_after_loading = lambda self, layer: None
    experts._padded_intermediate_size = classmethod(
        lambda cls, config: config.intermediate_size_per_partition
    )
    experts.is_supported_config = staticmethod(lambda *args, **kwargs: (True, None))
    experts.apply = _apply_plain_experts


def _apply_plain_experts(
    self: Any,
    *,
    output: Tensor,
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: Any,
    **_: object,
) -> None:
    """Write the experts' output, by the weights as they were loaded.

    Args:
        self: vLLM's experts.
        output: [T, H], written.
        hidden_states: [T, H].
        w1: [E, 2I, H], gate and up, which alternate in gpt-oss.
        w2: [E, H, I], down.
        topk_weights: [T, k].
        topk_ids: [T, k].
        activation: vLLM's name of the function between the two.
    """
    total = torch.zeros_like(hidden_states, dtype=torch.float32)
    for expert in topk_ids.unique().tolist():
        rows, slot = (topk_ids == expert).nonzero(as_tuple=True)
        b1 = None if self.w1_bias is None else self.w1_bias[expert]
        b2 = None if self.w2_bias is None else self.w2_bias[expert]
        inner = packed.packed_linear(hidden_states[rows], w1[expert], b1)
        if activation.value == "swigluoai":  # with the constants of vLLM's own kernel
            gate = inner[..., ::2].clamp(max=7.0)
            up = inner[..., 1::2].clamp(-7.0, 7.0)
            inner = gate * torch.sigmoid(1.702 * gate) * (up + 1)
        else:
            gate, up = inner.chunk(2, dim=-1)
            inner = GATES[activation.value](gate) * up
        down = packed.packed_linear(inner, w2[expert], b2)
        total.index_add_(0, rows, down.float() * topk_weights[rows, slot, None].float())
    output.copy_(total)


# --------------------------------------------------------------------------------------------------
# gated delta nets


def patch_delta_nets() -> None:
    """Give vLLM's layers the recurrence below; call it before the first of them is made.

    It is computed by the formulas of model/delta_net.py, which take any weights. The build's own
    kernels demand bfloat16 and convolutions that are packed once, after loading, where no refit
    reaches them.
    """
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
    from vllm.utils.torch_utils import LayerNameType

    # vLLM looks the function up by this name when it makes an operator of it, by its annotations.
    _compute_delta_net.__annotations__["layer_name"] = LayerNameType
    gdn_attention.cpu_gdn_attention_core = _compute_delta_net


def _compute_delta_net(
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
