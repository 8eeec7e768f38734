"""What of a model decides how much memory and work it takes."""

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from minirl.config.policy import PolicyConfig
from minirl.config.rl import section_of
from minirl.model import build
from minirl.model.families import experts_of_token, head_dim
from minirl.model.freeze import frozen_names, patterns_of
from minirl.plan.adapted import PACKED_BYTES, AdapterCounts, Adapters, names_layers
from minirl.plan.delta_nets import DeltaNets, read_delta_nets


@dataclass(frozen=True, kw_only=True)
class Frozen:
    """What `policy.freeze`, or everything that is beside adapters, leaves untrained."""

    parameters: int = 0
    root_parameters: int = 0  # Those of embedding, head and last norm among them.
    head: bool = False


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a model. Numbers of parameters are exact; "of a layer" is of the last one.

    That one has attention, also where other layers have gated delta nets.
    """

    num_layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    # Width of what latent attention keeps of a token, for all heads; 0: it is another attention.
    latent: int
    feed_forward: int  # Width of the gated product that every token passes.
    experts: int  # 0: no mixture.
    experts_of_token: int
    expert: int  # Width of the gated product of an expert.
    vocabulary: int
    head_norms: bool  # Queries and keys are normed.
    output_gate: bool  # What attention returns is multiplied by a gate, as wide as the queries.
    delta_nets: DeltaNets | None = None
    parameters: int
    root_parameters: int  # Of embedding, head and last norm.
    layer_parameters: int
    expert_parameters: int  # Of a layer, in all its experts.
    frozen: Frozen = Frozen()
    adapters: Adapters | None = None  # Their own parameters are none of those above.

    @property
    def trained_parameters(self) -> int:
        """Return how many parameters have gradients and optimizer state."""
        of_adapters = self.adapters.parameters if self.adapters else 0
        return self.parameters - self.frozen.parameters + of_adapters

    @property
    def root_trained_parameters(self) -> int:
        """Return how many of them are of embedding, head and last norm."""
        return self.root_parameters - self.frozen.root_parameters

    def trained_on_rank(self, tensor: int) -> float:
        """Return how many of them a tensor-parallel rank has a part of, or a whole copy."""
        of_adapters = self.adapters.on_rank(tensor) if self.adapters else 0.0
        return (self.parameters - self.frozen.parameters) / tensor + of_adapters

    def frozen_bytes(self, *, element: int, master: int) -> float:
        """Return the bytes of all that is not trained, on all ranks together.

        Args:
            element: of an element in `policy.dtype`, which the base of adapters is held in.
            master: of one that is or could be trained.
        """
        if self.adapters is None:
            return float(self.frozen.parameters * master)
        packed = self.adapters.packed
        return (self.frozen.parameters - packed) * element + packed * PACKED_BYTES

    @property
    def queries(self) -> int:
        """Return the width of all queries of a token."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Return the width of all keys of a token."""
        return self.kv_heads * self.head_dim

    @property
    def attention_layers(self) -> int:
        """Return how many layers have attention, of which work and memory grow with length."""
        return self.num_layers - (self.delta_nets.num_layers if self.delta_nets else 0)

    @property
    def active_in_layers(self) -> float:
        """Return how many parameters of the layers a token passes."""
        share = self.experts_of_token / self.experts if self.experts else 0.0
        active = self.layer_parameters - self.expert_parameters * (1 - share)
        of_layers = self.num_layers * active
        if self.delta_nets:
            more = self.delta_nets.layer_parameters - self.layer_parameters
            of_layers += self.delta_nets.num_layers * more
        return of_layers

    @property
    def active_parameters(self) -> float:
        """Return how many parameters of the layers and the head a token passes."""
        return self.active_in_layers + self.hidden * self.vocabulary

    @property
    def rule_flops(self) -> int:
        """Return the forward work of all gated delta rules for a token, beside parameters."""
        nets = self.delta_nets
        return nets.num_layers * nets.rule_flops if nets else 0


def read_shape(
    config: PretrainedConfig,
    *,
    score: bool = False,
    policy: PolicyConfig | None = None,
) -> Shape:
    """Return the sizes of a model, from its config alone.

    Args:
        config: of a family that minirl supports.
        score: with a score head in place of the language model's.
        policy: what is set for it, if it is trained; None: nothing is frozen.

    Raises:
        UserError: `policy.freeze` or `policy.lora` does not fit the model.
    """
    text = config.get_text_config()
    values = text.to_dict()
    few, more = layer_counts(config)
    smaller = _Counts(cut(config, few), score=score)
    larger = _Counts(cut(config, more), score=score)
    parameters = _extrapolate(smaller.total, larger.total, config)
    frozen = Frozen()
    adapters = None
    if policy and policy.lora.rank:
        frozen, adapters = _count_adapters(config, policy, parameters, larger.root, score=score)
    elif policy:
        frozen = count_frozen(config, policy, score=score)
    expert_width = values.get("moe_intermediate_size") or values["intermediate_size"]
    num_experts = larger.num_experts
    latent = "kv_lora_rank" in values
    delta_nets = read_delta_nets(config, larger.layers)
    queries = text.num_attention_heads * head_dim(values)
    return Shape(
        num_layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        heads=text.num_attention_heads,
        kv_heads=values["num_key_value_heads"],
        head_dim=head_dim(values),
        latent=values["kv_lora_rank"] + values["qk_rope_head_dim"] if latent else 0,
        feed_forward=_feed_forward(text.model_type, values, expert_width if num_experts else 0),
        experts=num_experts,
        experts_of_token=experts_of_token(text) if num_experts else 0,
        expert=expert_width if num_experts else 0,
        vocabulary=text.vocab_size,
        head_norms=larger.head_norms,
        output_gate=delta_nets is not None and larger.query_rows == 2 * queries,
        delta_nets=delta_nets,
        parameters=parameters,
        root_parameters=larger.root,
        layer_parameters=larger.of_layer,
        expert_parameters=larger.of_experts,
        frozen=frozen,
        adapters=adapters,
    )


def _feed_forward(family: str, values: dict[str, Any], expert_width: int) -> int:
    """Return the width of what every token passes, in most layers.

    Args:
        family: of the language model.
        values: of its config.
        expert_width: of one expert; 0: it is no mixture.
    """
    # Of Gemma 4's layers that share keys and values, the last ones.
    times = 2 if values.get("use_double_wide_mlp") and values.get("num_kv_shared_layers") else 1
    if not expert_width or family == "gemma4_text":  # of gemma4, too
        return values["intermediate_size"] * times
    if family == "hunyuan_v1_moe":
        return expert_width  # no value of its config says that there is a shared one
    shared = values.get("shared_expert_intermediate_size") or 0
    return shared + (values.get("n_shared_experts") or 0) * expert_width


def _extrapolate(smaller: int, larger: int, config: PretrainedConfig) -> int:
    """Return a number of the whole model from those of the two of `layer_counts`."""
    few, more = layer_counts(config)
    if few == more:
        return larger
    rest = config.get_text_config().num_hidden_layers - more
    return larger + (larger - smaller) * rest // (more - few)


def _count_adapters(
    config: PretrainedConfig, policy: PolicyConfig, parameters: int, root: int, *, score: bool
) -> tuple[Frozen, Adapters]:
    """Return what is not trained beside adapters, and the adapters.

    Args:
        config: of the model.
        policy: what is set for it.
        parameters: of the base, in all.
        root: those of embedding, head and last norm among them.
        score: with a score head.

    Raises:
        UserError: patterns match nothing, or matrices cannot be in four bits.
    """
    few, more = layer_counts(config)
    if names_layers(policy.lora):
        few = more = config.get_text_config().num_hidden_layers
    larger = AdapterCounts(cut(config, more), policy, score=score)
    smaller = larger if few == more else AdapterCounts(cut(config, few), policy, score=score)

    def whole(of_smaller: int, of_larger: int) -> int:
        if smaller is larger:
            return of_larger
        return _extrapolate(of_smaller, of_larger, config)

    frozen = Frozen(
        parameters=parameters - whole(smaller.trained, larger.trained),
        root_parameters=root - larger.trained_of_root,
        head=not larger.trains_head,
    )
    adapters = Adapters(
        rank=policy.lora.rank,
        linears=larger.linears,
        parameters=whole(smaller.parameters, larger.parameters),
        packed=whole(smaller.packed, larger.packed),
        layer_packed=larger.layer_packed,
        largest=larger.largest,
    )
    return frozen, adapters


def count_frozen(config: PretrainedConfig, policy: PolicyConfig, *, score: bool = False) -> Frozen:
    """Return what `policy.freeze` leaves untrained, in all layers: it may name some of them.

    Raises:
        UserError: it matches nothing or everything.
    """
    if not policy.freeze:
        return Frozen()
    model = build.make_meta_model(config, torch.float32, score=score)
    frozen = frozen_names(model, policy.freeze, f"{section_of(policy)}.freeze")
    in_layers = set(nn.ModuleList(build.layers(model)).parameters())
    head = model.get_output_embeddings()
    of_head = set(head.parameters()) if head is not None else set()
    untrained = [p for name, p in model.named_parameters() if name in frozen]
    return Frozen(
        parameters=sum(p.numel() for p in untrained),
        root_parameters=sum(p.numel() for p in untrained if p not in in_layers),
        head=any(p in of_head for p in untrained),
    )


def patterns_of_cut(config: PretrainedConfig, score: bool, freeze: list[str]) -> list[str]:
    """Return those of the patterns that match a weight of a model with fewer layers."""
    if not freeze:
        return []
    return patterns_of(build.make_meta_model(config, torch.float32, score=score), freeze)


def layer_counts(config: PretrainedConfig) -> tuple[int, int]:
    """Return two numbers of layers, from which that of the whole model can be extrapolated.

    The layers between the two are as the rest of the model's: its first layers may be dense where
    the others are mixtures, and every sixth may see no window. One layer is too few, because FSDP
    gathers the next one while one computes. A model that is as small as that is taken whole: then
    both are its number of layers. So is one with inputs of each layer, for which its embedding has
    columns, or with layers that share keys and values, which are its last ones.
    """
    values = config.get_text_config().to_dict()
    num_layers = values["num_hidden_layers"]
    if values.get("hidden_size_per_layer_input") or values.get("num_kv_shared_layers"):
        return num_layers, num_layers
    first = values.get("first_k_dense_replace") or 0
    period = math.lcm(values.get("decoder_sparse_step") or 1, _period(values.get("layer_types")))
    few = first + max(2, period)
    few += (num_layers - few) % period  # so that whole periods are left
    more = few + max(2, period)
    if more > num_layers:
        return num_layers, num_layers
    return few, more


def cut(config: PretrainedConfig, num_layers: int) -> PretrainedConfig:
    """Return the config of the same model with fewer layers."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    text.num_hidden_layers = num_layers
    values = text.to_dict()
    if values.get("layer_types"):
        text.layer_types = values["layer_types"][:num_layers]
    if values.get("per_layer_config"):
        of_layers = {int(layer): own for layer, own in values["per_layer_config"].items()}
        text.per_layer_config = {i: own for i, own in of_layers.items() if i < num_layers}
    return config


def _period(kinds: list[str] | None) -> int:
    """Return after how many layers their kinds repeat."""
    kinds = kinds or [""]
    for period in range(1, len(kinds)):
        if all(kinds[i] == kinds[i - period] for i in range(period, len(kinds))):
            return period
    return len(kinds)


class _Counts:
    """Numbers of parameters of a model."""

    def __init__(self, config: PretrainedConfig, *, score: bool):
        model = build.make_meta_model(config, torch.float32, score=score)
        self.layers = build.layers(model)
        last = self.layers[-1]
        in_layers = sum(_count(layer) for layer in self.layers)
        self.total = _count(model)
        self.root = self.total - in_layers
        self.of_layer = _count(last)
        self.of_experts = 0
        self.num_experts = 0
        self.head_norms = False
        self.query_rows = 0  # Of the matrix that makes queries.
        for name, p in last.named_parameters():
            if ".experts." in f".{name}" and p.ndim == 3:  # fused
                self.of_experts += p.numel()
                self.num_experts = len(p)
            if name.endswith("q_norm.weight"):
                self.head_norms = True
            if name.endswith("q_proj.weight"):
                self.query_rows = len(p)


def _count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
