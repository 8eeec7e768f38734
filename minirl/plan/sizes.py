"""Sizes of a model, counted from the numbers of its config.json, without torch.

No family is known by its name: where a model differs, a number of its config says so. Matrices are
counted, norms and biases are not: they are less than a thousandth of a model.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

from minirl.base.errors import require
from minirl.base.reading import is_file, library_reads, read_json
from minirl.config.policy import PolicyConfig
from minirl.config.validate import check_model

NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
EXPERTS_OF_TOKEN = ("top_k_experts", "num_experts_per_tok", "moe_topk")
# Numbers for which a config may have a list, with one for each layer.
BY_LAYER = ("intermediate_size", "moe_intermediate_size", *EXPERTS_OF_TOKEN)
# What tensor parallelism divides; of an engine, the heads. Key-value heads may be fewer than ranks,
# which then hold the same.
HEADS = ("num_attention_heads", "num_key_value_heads")
# Without these nothing can be counted. A config.json may leave them out where they are the defaults
# of its class, which only transformers knows.
NEEDED = ("hidden_size", "num_hidden_layers", *HEADS, "vocab_size", "tie_word_embeddings")
DIVIDED = (*HEADS, "linear_num_key_heads", "intermediate_size", *NUM_EXPERTS)
# Activations of an MLP that has no gate; configs have no other sign of it.
WITHOUT_GATE = ("relu2", "xielu")
# Bytes of a weight in four bits, with the 8-bit scale of its block of 64 (QLoRA, sec. 3).
PACKED_BYTES = 0.5 + 1 / 64
# Groups of `lora.targets`: blocks of a layer, without routers and gates of few outputs.
TARGETS = {"all-linear": ("self_attn", "mlp"), "attention": ("self_attn",), "mlp": ("mlp",)}
ROUTERS = ("gate", "shared_expert_gate", "in_proj_ba")


@dataclass(frozen=True)
class Matrix:
    """A matrix, or those of all experts of a layer."""

    inputs: int
    outputs: int
    experts: int = 0  # 0: every token passes it.
    trained: bool = True
    rank: int = 0  # Of its adapter; 0: it has none.
    packed: bool = False  # Held in four bits.

    @cached_property
    def numel(self) -> int:
        """Return the number of its elements."""
        return self.inputs * self.outputs * max(1, self.experts)

    @cached_property
    def adapter(self) -> int:
        """Return the number of elements of its adapter, A and B."""
        return self.rank * (self.inputs + self.outputs) * max(1, self.experts)


@dataclass(frozen=True)
class DeltaNet:
    """The widths of a gated delta net, which has a state in place of keys and values."""

    mixed: int  # Of what is convolved: queries, keys and values.
    values: int
    heads: int  # Of values, each of which has a state [key_dim, value_dim].
    key_dim: int
    value_dim: int


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Widths and matrices of a layer. Layers that are alike are equal."""

    matrices: tuple[Matrix, ...]
    queries: int = 0  # Width of a token's queries; 0: a delta net is in place of attention.
    keys: int = 0  # Width of a token's keys, and of its values.
    cached: int = 0  # Elements that an engine caches for a token; of one head, if they are split.
    kv_heads: int = 1  # Heads that tensor-parallel engines split; 1: none.
    feed_forward: int = 0  # Width of the product that every token passes.
    experts: int = 0
    experts_of_token: int = 0
    expert: int = 0  # Width of the product of an expert.
    delta_net: DeltaNet | None = None

    @property
    def share_of_token(self) -> float:
        """Return the share of its experts that a token passes."""
        return self.experts_of_token / max(1, self.experts)

    @property
    def active(self) -> float:
        """Return the number of its weights that a token passes."""
        return sum(m.numel * (self.share_of_token if m.experts else 1) for m in self.matrices)


class ModelSizes:
    """Sizes of a model.

    Args:
        config: values of the language model's config.
        layers: and how many of each kind there are.
        root: the matrices from the embedding to the head, which may be the same.
        tower: what a model that reads images has for them.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        layers: dict[Layer, int],
        root: tuple[Matrix, ...],
        tower: tuple[Matrix, ...],
    ):
        self.config = config
        self.hidden: int = config["hidden_size"]
        self.vocabulary: int = config["vocab_size"]
        self.layers = layers
        self.root = root
        self.tower = tower
        # Each matrix, and how many layers have such a one.
        self.matrices = [(m, 1) for m in (*root, *tower)]
        for layer, num in layers.items():
            self.matrices += [(m, num) for m in layer.matrices]
        self.num_layers = sum(layers.values())
        self.queries = sum(num * layer.queries for layer, num in layers.items())
        # Weights: all but adapters, those of experts, those of layers that a token passes, those of
        # adapters, and those that have gradients and optimizer state.
        self.parameters = sum(num * m.numel for m, num in self.matrices)
        self.in_experts = sum(num * m.numel for m, num in self.matrices if m.experts)
        self.active_in_layers = sum(num * layer.active for layer, num in layers.items())
        self.adapters = sum(num * m.adapter for m, num in self.matrices)
        self.trained = self.adapters + sum(num * m.numel * m.trained for m, num in self.matrices)

    def undivided(self, ranks: int, names: Iterable[str] = DIVIDED) -> str:
        """Return the first number of the config that ranks cannot divide; empty: none."""
        for name in names:
            size = self.config.get(name) or 0
            if isinstance(size, int) and size % ranks and (name != HEADS[1] or ranks % size):
                return f"{name} = {size}"
        return ""


def read_config(model: str, setting: str) -> dict[str, Any]:
    """Return the values of a model's config.json, in a folder or by its id on the hub.

    Args:
        model: a folder or a hub id.
        setting: what names the model, for messages.

    Raises:
        UserError: there is no such config, or it lacks what has to be counted.
    """
    check_model(model, setting)
    path = Path(model) / "config.json"
    values = read_json(path, setting) if is_file(path) else {}
    text = values.get("text_config") or values
    is_hybrid = "linear_num_value_heads" in text
    needed = (*NEEDED, "layer_types") if is_hybrid else NEEDED
    if any(name not in text and name not in values for name in needed):
        from transformers import AutoConfig  # here, because this takes seconds

        with library_reads(f"{model}/config.json"):
            values = AutoConfig.from_pretrained(model).to_dict()
        text = values.get("text_config") or values
    for name in NEEDED[:-1]:
        size = text.get(name)
        require(
            isinstance(size, int) and size > 0,
            f"{setting} = {model}: {name} = {size!r} in its config.json must be a whole number "
            "above 0: the planner counts it",
        )
    return values


# (inputs, outputs) of matrices by their names, and the number of experts that have one; widths of a
# layer as `Layer` has them.
Shapes = dict[str, tuple[int, ...]]
Block = tuple[dict[str, Any], Shapes]


def read_sizes(
    values: Mapping[str, Any], policy: PolicyConfig | None = None, *, score: bool = False
) -> ModelSizes:
    """Return the sizes of a model.

    Args:
        values: of its config.
        policy: what is set for it, if it is trained; None: nothing is frozen, nor adapted.
        score: it has a score head in place of the language model's.
    """
    text: Mapping[str, Any] = values.get("text_config") or values
    hidden = text["hidden_size"]
    vocabulary = text["vocab_size"]
    policy = policy or PolicyConfig()
    root: Shapes = {"model.embed_tokens": (vocabulary, hidden)}
    inputs = text.get("hidden_size_per_layer_input") or 0  # That each layer has of its own.
    if inputs:
        width = inputs * text["num_hidden_layers"]
        root["model.embed_tokens_per_layer"] = (text["vocab_size_per_layer_input"], width)
        root["model.per_layer_model_projection"] = (hidden, width)
    if score:
        root["score"] = (hidden, 1)
    elif not text.get("tie_word_embeddings", values.get("tie_word_embeddings", True)):
        root["lm_head"] = (hidden, vocabulary)
    tower: Shapes = {}
    vision = values.get("vision_config")
    if vision:  # As one matrix: four of attention and two of an MLP a layer.
        width = vision.get("embed_dim") or vision.get("hidden_size") or 0
        depth = vision.get("depth") or vision.get("num_hidden_layers") or 0
        middle = vision.get("intermediate_size") or int(width * (vision.get("mlp_ratio") or 4))
        tower["model.visual.vision_tower"] = (width, depth * (4 * width + 2 * middle))

    layers: Counter[Layer] = Counter()
    for number in range(text["num_hidden_layers"]):
        # The library keeps the sizes of layers that are not as the others by their numbers.
        of_layer = dict(text)
        for key in BY_LAYER:
            if isinstance(text.get(key), list):
                of_layer[key] = text[key][number]
        for key, special in (text.get("per_layer_config") or {}).items():
            of_layer |= special if int(key) == number else {}
        kinds: list[str] = text.get("layer_types") or []
        if kinds and kinds[number] == "linear_attention":
            widths, shapes = _delta_net(of_layer)
        elif text.get("kv_lora_rank"):
            widths, shapes = _latent_attention(of_layer)
        else:
            has_window = bool(kinds) and kinds[number] != "full_attention"
            widths, shapes = _attention(of_layer, number, has_window=has_window)
        more_widths, more_shapes = _feed_forward(of_layer, number)
        shapes |= more_shapes
        if inputs:
            shapes["per_layer_input_gate"] = (hidden, inputs)
            shapes["per_layer_projection"] = (inputs, hidden)
        matrices = _matrices(shapes, f"model.layers.{number}.", policy)
        layers[Layer(matrices=matrices, **widths, **more_widths)] += 1
    in_tower = _matrices(tower, "", policy)
    return ModelSizes(text, dict(layers), _matrices(root, "", policy), in_tower)


def _matrices(shapes: Shapes, prefix: str, policy: PolicyConfig) -> tuple[Matrix, ...]:
    """Return matrices as `policy.freeze` and `policy.lora` have them.

    Args:
        shapes: of the matrices.
        prefix: with their names these are the names in the model's folder.
        policy: what is set for the model.
    """
    lora = policy.lora
    patterns = lora.modules_to_save if lora.rank else policy.freeze
    matrices = []
    for short, shape in shapes.items():
        name = prefix + short
        block, _, last = short.rpartition(".")
        is_named = any(fnmatchcase(f"{name}.weight", pattern) for pattern in patterns)
        trained = is_named or name == "score" if lora.rank else not is_named
        in_group = block.partition(".")[0] if prefix and last not in ROUTERS else ""
        means = [
            in_group in TARGETS[target]
            if target in TARGETS
            else last == target or fnmatchcase(name, target)
            for target in lora.targets
        ]
        matrix = replace(
            Matrix(*shape),  # type: ignore[arg-type]  # (inputs, outputs, experts)
            trained=trained,
            rank=lora.rank * (any(means) and not trained),
            packed=lora.quantization != "none" and in_group != "" and not trained,
        )
        matrices.append(matrix)
    return tuple(matrices)


def _feed_forward(text: Mapping[str, Any], number: int) -> Block:
    """Return an MLP, experts, or experts next to an MLP that every token passes."""
    hidden = text["hidden_size"]
    num_experts = next((text[name] for name in NUM_EXPERTS if text.get(name)), 0)
    kinds = text.get("mlp_layer_types")
    is_dense = number < (text.get("first_k_dense_replace") or 0)
    is_dense |= number in (text.get("mlp_only_layers") or [])
    is_dense |= (number + 1) % (text.get("decoder_sparse_step") or 1) > 0
    is_mixture = kinds[number] == "sparse" if kinds else num_experts > 0 and not is_dense
    expert = text.get("moe_intermediate_size") or text["intermediate_size"]
    feed_forward = text.get("intermediate_size") or expert
    # Those with `moe_topk` have both, alike; those with `enable_moe_block`, side by side.
    if is_mixture and not text.get("moe_topk") and not text.get("enable_moe_block"):
        shared = text.get("shared_expert_intermediate_size") or 0
        feed_forward = shared + (text.get("n_shared_experts") or 0) * expert
    num_shared = text.get("num_kv_shared_layers") or 0
    if text.get("use_double_wide_mlp") and number >= text["num_hidden_layers"] - num_shared:
        feed_forward *= 2
    widths = {"feed_forward": feed_forward}
    shapes: Shapes = {}
    if feed_forward:
        block = "mlp.shared_expert" if is_mixture else "mlp"
        shapes[f"{block}.up_proj"] = (hidden, feed_forward)
        shapes[f"{block}.down_proj"] = (feed_forward, hidden)
        # Models as GPT-2, which begin with a dropout, have no gate either.
        if text.get("hidden_act") not in WITHOUT_GATE and "embedding_dropout" not in text:
            shapes[f"{block}.gate_proj"] = (hidden, feed_forward)
    if is_mixture:
        shapes["mlp.gate"] = (hidden, num_experts)
        shapes["mlp.experts.gate_up_proj"] = (hidden, 2 * expert, num_experts)
        shapes["mlp.experts.down_proj"] = (expert, hidden, num_experts)
        of_token = next(text[name] for name in EXPERTS_OF_TOKEN if text.get(name))
        widths |= {"experts": num_experts, "experts_of_token": of_token, "expert": expert}
    return widths, shapes


def _attention(text: Mapping[str, Any], number: int, *, has_window: bool) -> Block:
    hidden = text["hidden_size"]
    heads = text["num_attention_heads"]
    kv_heads = text["num_key_value_heads"]
    head_dim = text.get("head_dim") or hidden // heads
    one_for_both = not has_window and text.get("attention_k_eq_v")  # Keys are the values, too.
    if not has_window:
        head_dim = text.get("global_head_dim") or head_dim
    if one_for_both:
        kv_heads = text.get("num_global_key_value_heads") or kv_heads
    # The attention of models with gated delta nets has a gate of its own.
    gates = bool(text.get("attn_output_gate") or text.get("linear_num_value_heads"))
    queries = heads * head_dim
    keys = kv_heads * head_dim
    widths = {"queries": queries, "keys": keys, "kv_heads": kv_heads}
    shapes: Shapes = {
        "self_attn.q_proj": (hidden, queries * (1 + gates)),
        "self_attn.o_proj": (queries, hidden),
    }
    num_shared = text.get("num_kv_shared_layers") or 0
    if number < text["num_hidden_layers"] - num_shared:  # else these are another layer's
        widths["cached"] = 2 * head_dim
        for name in ("k_proj",) if one_for_both else ("k_proj", "v_proj"):
            shapes[f"self_attn.{name}"] = (hidden, keys)
    return widths, shapes


def _latent_attention(text: Mapping[str, Any]) -> Block:
    """Return attention whose keys and values are made of one latent vector (DeepSeek-V2)."""
    hidden = text["hidden_size"]
    heads = text["num_attention_heads"]
    latent = text["kv_lora_rank"]
    rotary = text["qk_rope_head_dim"]
    plain = text["qk_nope_head_dim"]
    queries = heads * (plain + rotary)
    values = heads * text["v_head_dim"]
    shapes: Shapes = {
        "self_attn.kv_a_proj_with_mqa": (hidden, latent + rotary),
        "self_attn.kv_b_proj": (latent, heads * plain + values),
        "self_attn.o_proj": (values, hidden),
    }
    of_queries = text.get("q_lora_rank")
    if of_queries:
        shapes["self_attn.q_a_proj"] = (hidden, of_queries)
        shapes["self_attn.q_b_proj"] = (of_queries, queries)
    else:
        shapes["self_attn.q_proj"] = (hidden, queries)
    # The engine caches the latent vector, on every rank.
    return {"queries": queries, "keys": queries, "cached": latent + rotary}, shapes


def _delta_net(text: Mapping[str, Any]) -> Block:
    """Return a gated delta net (Yang et al. 2024)."""
    hidden = text["hidden_size"]
    heads = text["linear_num_value_heads"]
    key_dim = text["linear_key_head_dim"]
    value_dim = text["linear_value_head_dim"]
    values = heads * value_dim
    mixed = 2 * text["linear_num_key_heads"] * key_dim + values
    shapes: Shapes = {
        "self_attn.in_proj_qkvz": (hidden, mixed + values),
        "self_attn.in_proj_ba": (hidden, 2 * heads),
        "self_attn.out_proj": (values, hidden),
    }
    return {"delta_net": DeltaNet(mixed, values, heads, key_dim, value_dim)}, shapes
