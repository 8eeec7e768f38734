"""The allow-list of model families; all that differs between them is data in its rows.

A family is here if its packed forward was shown to equal its plain one: alone, under tensor
parallelism and under sequence parallelism. Anything else is refused by name, because a family that
reads its arguments differently (linear attention, attention sinks) would train on silently wrong
numbers.

To add one: a row here and a small instance in `tests/tiny.py`. `tests/test_families.py` runs it
packed against unpacked, on two ranks, and through load and export; `tests/test_rollout.py` runs it
through the engine.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers import PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from minirl.base.errors import require
from minirl.parallel.regions import CheckpointSlice, Region

HEADS = ("num_attention_heads", "num_key_value_heads")
# Norms of all heads at once split the features, and attention itself is whole on every rank.
FEATURES = ("num_attention_heads * head_dim", "num_key_value_heads * head_dim")
DENSE = (*HEADS, "intermediate_size")


class ExpertNames(NamedTuple):
    """How checkpoint files name experts: `{block}.experts.{number}.{gate, up or down}.weight`."""

    block: str  # What files call the model's `mlp`.
    gate: str
    up: str
    down: str


class FusedExperts(NamedTuple):
    """Checkpoint files have the two fused tensors of a layer's experts, by the model's names."""

    transposed: bool  # As [experts, columns, rows].


class Fused(NamedTuple):
    """What model/fused.py may replace; see `install` there."""

    # RMSNorm: what is added to the weight, and whether the product is rounded, not its factor.
    norm_offset: float = 0.0
    norm_wide: bool = False
    rotary: bool = True  # `apply_rotary_pos_emb` turns halves, and all of them.


class Family(NamedTuple):
    """What minirl has to know of a model family beyond its config."""

    # Config values, or products of them, that parallel.tensor splits.
    divided: tuple[str, ...] = DENSE
    # Tensor-parallel styles that the library's own plan lacks.
    plan: dict[str, str] = {}
    # Config -> (factor of the head's logits besides 1 / temperature, c where logits are
    # c * tanh(logits / c) or else None).
    head: Callable[[PretrainedConfig], tuple[float, float | None]] = lambda config: (1.0, None)
    # How files hold experts, which the model keeps as two fused tensors; None: there are none.
    experts: ExpertNames | FusedExperts | None = None
    # Its routers score by sigmoid, and a bias moves their choice; else they score by softmax.
    sigmoid_router: bool = False
    # Config -> the value, by its name, up to which many tokens vLLM's class computes the library's
    # model; None or 0: any number.
    engine_agrees_to: Callable[[PretrainedConfig], dict[str, int | None]] = lambda config: {}
    # Config -> the values without which vLLM's class computes another model than the library's.
    engine_values: Callable[[PretrainedConfig], dict[str, Any]] = lambda config: {}
    # Why a config with a sliding window is refused, and what to do; empty: it is not.
    refuses_windows: str = ""
    # Parts of the model's names -> what files have instead; and parts of the files' names -> what
    # files that the library's newer versions write have instead.
    files: dict[str, str] = {}
    newer_files: dict[str, str] = {}
    fused: Fused = Fused()


# --------------------------------------------------------------------------------------------------
# tensor-parallel styles that the library's own plans lack, by names of modules

TEXT = "model.layers.*."
TEXT_WITH_IMAGES = "model.language_model.layers.*."  # In a model that reads images.


def _plan(prefix: str, *parts: dict[str, str]) -> dict[str, str]:
    """Return the styles of modules by their whole names, which begin with the prefix."""
    plan = {}
    for part in parts:
        for name, style in part.items():
            plan[prefix + name] = style
    return plan


def _split(block: str, columns: tuple[str, ...], row: str) -> dict[str, str]:
    """Return the styles of a block's first matrices, split by columns, and of its last one."""
    styles = {f"{block}.{name}": "colwise" for name in columns}
    return styles | {f"{block}.{row}": "rowwise"}


def _mlp(block: str) -> dict[str, str]:
    return _split(block, ("gate_proj", "up_proj"), "down_proj")


_ATTENTION = _split("self_attn", ("q_proj", "k_proj", "v_proj"), "o_proj")
_MOE = {"mlp.experts": "moe_tp_experts"}
# Latent attention by heads; what all of them share is whole on every rank.
_LATENT_ATTENTION = {
    "self_attn.q_a_proj": "whole",
    "self_attn.kv_a_proj_with_mqa": "whole",
    **_split("self_attn", ("q_proj", "q_b_proj", "kv_b_proj"), "o_proj"),
}
# Gated delta nets by heads. The library computes all of them on every rank.
_DELTA_INPUTS = ("in_proj_qkvz", "in_proj_ba", "in_proj_z", "in_proj_b", "in_proj_a")
_DELTA_NET = {
    "linear_attn": "delta_net",
    "linear_attn.conv1d": "parts",
    "linear_attn.in_proj_qkv": "colwise_parts",
    **_split("linear_attn", _DELTA_INPUTS, "out_proj"),
}
_GEMMA4_MOE = {"router": "router_alone", "router.proj": "whole", "experts": "experts_alone"}
# The library's plan splits the tower, too. As other towers here it is whole on every rank.
_GEMMA4_TOWER = dict.fromkeys(
    ("self_attn.q_norm", "self_attn.k_norm", *_ATTENTION, *_mlp("mlp")), ""
)

DENSE_PLAN = _plan(TEXT, _ATTENTION, _mlp("mlp"))
_QWEN3_VL_PLAN = _plan(TEXT_WITH_IMAGES, _ATTENTION, _mlp("mlp"))


# --------------------------------------------------------------------------------------------------
# rows

FUSED = ("gate_up_proj", "down_proj")  # Tensors of all experts of a layer.
_MIXTRAL = ExpertNames("block_sparse_moe", "w1", "w3", "w2")
_EXPERTS = ExpertNames("mlp", "gate_proj", "up_proj", "down_proj")
_QWEN2_MOE = ("num_experts", "shared_expert_intermediate_size")
_DENSE = Family()
_PARTIAL = Fused(rotary=False)  # Turns a part of each head, or other pairs than halves.
_GEMMA = Family(
    head=lambda config: (1.0, config.get_text_config().final_logit_softcapping),
    fused=Fused(norm_offset=1.0, norm_wide=True),
)
_GEMMA4 = Family(
    divided=(*DENSE, "num_global_key_value_heads", "vocab_size_per_layer_input", "num_experts"),
    plan={"model.embed_tokens_per_layer": "embedding"} | _plan(TEXT, _GEMMA4_MOE),
    head=_GEMMA.head,
    experts=FusedExperts(transposed=False),
    fused=Fused(norm_wide=True, rotary=False),
)
_COHERE = Family(head=lambda config: (config.logit_scale, None), fused=_PARTIAL)
_BY_FEATURES = Family(divided=(*FEATURES, "intermediate_size"))
_GRANITE = Family(head=lambda config: (1 / config.logits_scaling, None))
_OLMO = _BY_FEATURES._replace(fused=Fused(norm_wide=True))
_DEEPSEEK = Family(
    divided=(*DENSE, "n_routed_experts", "n_shared_experts * moe_intermediate_size"),
    experts=_EXPERTS,
    sigmoid_router=True,
)
# Gated delta nets (model/delta_net.py) in most layers. Value heads are a multiple of key heads.
_HYBRID = Family(
    divided=(*DENSE, "linear_num_key_heads"),
    plan=_plan(TEXT, _DELTA_NET),
    fused=_GEMMA.fused._replace(rotary=False),
)
_HYBRID_MOE = _HYBRID._replace(
    divided=(*HEADS, "linear_num_key_heads", *_QWEN2_MOE),
    experts=_EXPERTS,
)
_QWEN2_VL = Family(files={"model.visual.": "visual.", "model.language_model.": "model."})


def _qwen_values(config: PretrainedConfig) -> dict[str, Any]:
    """Return that all layers of vLLM's class have the window, or none."""
    num_layers = config.num_hidden_layers
    is_mixed = config.use_sliding_window and 0 < config.max_window_layers < num_layers
    return {"max_window_layers": num_layers} if is_mixed else {}


def _gpt_oss_values(config: PretrainedConfig) -> dict[str, Any]:
    """Return what vLLM's class has as constants."""
    kinds = ["sliding_attention", "full_attention"] * config.num_hidden_layers
    layer_types = kinds[: config.num_hidden_layers]
    return {"layer_types": layer_types, "swiglu_alpha": 1.702, "swiglu_limit": 7.0}


def _ministral3_length(config: PretrainedConfig) -> dict[str, int | None]:
    """Return up to where queries are not scaled by their position, which vLLM's class leaves out.

    The scale is 1 + beta * log(1 + position // original_max_position_embeddings), of Llama 4.
    """
    name = "original_max_position_embeddings"
    return {name: config.rope_parameters[name]}


FAMILIES = {
    # The library ignores a window in its config (of a Qwen in Llama's form), and vLLM does not.
    "llama": _DENSE._replace(
        engine_agrees_to=lambda config: {"sliding_window": config.to_dict().get("sliding_window")}
    ),
    "mistral": _DENSE,
    **dict.fromkeys(("qwen2", "qwen3"), _DENSE._replace(engine_values=_qwen_values)),
    **dict.fromkeys(("smollm3", "arcee"), _DENSE),
    "gemma": _DENSE._replace(fused=_GEMMA.fused),
    **dict.fromkeys(("glm", "glm4", "ernie4_5", "helium"), _DENSE._replace(fused=_PARTIAL)),
    **dict.fromkeys(("seed_oss", "exaone4", "apertus", "jais2", "ministral"), _DENSE),
    **dict.fromkeys(("olmo", "starcoder2"), _DENSE),
    "ministral3": Family(engine_agrees_to=_ministral3_length),
    "hunyuan_v1_dense": Family(plan=DENSE_PLAN),
    "hyperclovax": Family(head=lambda config: (config.logits_scaling, None)),
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
    "gemma4_text": _GEMMA4,
    "gemma4": _GEMMA4._replace(
        plan={
            "model.language_model.embed_tokens_per_layer": "embedding",
            **_plan(TEXT_WITH_IMAGES, _GEMMA4_MOE),
            **_plan("model.vision_tower.encoder.layers.*.", _GEMMA4_TOWER),
        },
        # vLLM takes the inputs of layers of the tokens of images from token 0.
        engine_values=lambda config: {"pad_token_id": 0},
    ),
    "gemma3": Family(
        files={
            "model.language_model.": "language_model.model.",
            "model.vision_tower.": "vision_tower.vision_model.",
            "model.multi_modal_projector.": "multi_modal_projector.",
            "lm_head.": "language_model.lm_head.",
        },
        newer_files={"vision_tower.vision_model.": "vision_tower."},
        engine_values=lambda config: {"final_logit_softcapping": None},
        fused=_GEMMA.fused,
    ),
    "phi3": _BY_FEATURES._replace(fused=_PARTIAL),
    "olmo2": _OLMO,
    "olmo3": _OLMO,
    "granite": _GRANITE,
    "cohere": _COHERE,
    # vLLM's window is one token wider.
    "cohere2": _COHERE._replace(
        engine_agrees_to=lambda config: {"sliding_window": config.sliding_window}
    ),
    "mixtral": Family(divided=(*HEADS, "num_local_experts"), experts=_MIXTRAL),
    "qwen2_moe": Family(
        divided=(*HEADS, *_QWEN2_MOE),
        plan=_plan(TEXT, _MOE, _mlp("mlp.shared_expert")),
        experts=_EXPERTS,
        refuses_windows="the library's layers do not say which of them see a window; take a model "
        "with use_sliding_window false",
    ),
    "qwen3_moe": Family(divided=(*HEADS, "num_experts"), experts=_EXPERTS),
    "mellum": Family(divided=(*HEADS, "num_experts"), experts=_EXPERTS),
    "olmoe": Family(
        divided=(*FEATURES, "num_experts"),
        experts=_EXPERTS,
        refuses_windows="the library's mask ignores it, and packed attention would not; take it "
        "out of config.json",
    ),
    "flex_olmo": Family(divided=(*FEATURES, "num_experts"), experts=_EXPERTS),
    "granitemoe": _GRANITE._replace(
        divided=(*HEADS, "num_local_experts"),
        plan=_plan(TEXT, _ATTENTION, {"block_sparse_moe.experts": "moe_tp_experts"}),
        experts=FusedExperts(transposed=False),
        files={
            "moe.experts.gate_up_proj": "moe.input_linear.weight",
            "moe.experts.down_proj": "moe.output_linear.weight",
            "moe.router.": "moe.router.layer.",
        },
    ),
    "hunyuan_v1_moe": Family(
        divided=(*HEADS, "num_experts", "intermediate_size"),
        plan=_plan(TEXT, _ATTENTION, _MOE, _mlp("mlp.shared_mlp")),
        experts=_EXPERTS,
    ),
    "glm4_moe": _DEEPSEEK._replace(fused=_PARTIAL),
    "dots1": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK._replace(
        plan=_plan(TEXT, _LATENT_ATTENTION),
        fused=_PARTIAL,
        engine_values=lambda config: {"rope_interleave": True},
    ),
    "qwen2_vl": _QWEN2_VL,
    "qwen2_5_vl": _QWEN2_VL,
    "qwen3_vl": Family(plan=_QWEN3_VL_PLAN),
    "qwen3_vl_moe": Family(
        divided=(*HEADS, "num_experts"),
        plan=_QWEN3_VL_PLAN | _plan(TEXT_WITH_IMAGES, _MOE),
        experts=FusedExperts(transposed=True),
        # The library always normalises, and vLLM as this says.
        engine_values=lambda config: {"norm_topk_prob": True},
    ),
    "minimax_m2": Family(
        divided=(*FEATURES, "num_local_experts"),
        experts=_MIXTRAL,
        sigmoid_router=True,
        fused=_PARTIAL,
    ),
    "gpt_oss": Family(
        divided=(*HEADS, "num_local_experts"),
        plan=_plan(TEXT, {"self_attn": "heads"}, _ATTENTION, _MOE),  # Its sinks have heads.
        experts=FusedExperts(transposed=False),
        engine_values=_gpt_oss_values,
        fused=Fused(norm_wide=True, rotary=False),
    ),
    "qwen3_next": _HYBRID_MOE,
    "qwen3_5_text": _HYBRID,
    "qwen3_5_moe_text": _HYBRID_MOE,
    "qwen3_5": _HYBRID._replace(plan=_plan(TEXT_WITH_IMAGES, _DELTA_NET)),
    "qwen3_5_moe": _HYBRID_MOE._replace(plan=_plan(TEXT_WITH_IMAGES, _DELTA_NET)),
}

_SPARSE = "its indexer chooses the keys of each query, which packed attention does not take"

# Families that users ask for and that minirl refuses, each with the reason.
REFUSED = {
    "nemotron": "it does not call the attention interface",
    "deepseek_v32": _SPARSE,
    "glm_moe_dsa": _SPARSE,
    "kimi_k25": "its attention is compared as deepseek_v3 only, not with its tower for images",
    "kimi_linear": "its delta attention leaks from one packed sequence into the next",
    "llama4_text": "its experts have a layout of their own",
}


# --------------------------------------------------------------------------------------------------
# what a config says


def head_dim(values: dict) -> int:
    """Return the size of a head, by the values of a config."""
    return values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]


def layer_values(values: dict, name: str) -> list[int]:
    """Return the values that a size has in the layers of a model, each once.

    The library keeps what differs from the config's own value, which comes first, by layers.

    Args:
        values: of the config of the language model.
        name: head_dim or num_key_value_heads.
    """
    usual = head_dim(values) if name == "head_dim" else values[name]
    layers = (values.get("per_layer_config") or {}).values()
    return list(dict.fromkeys([usual, *(layer[name] for layer in layers if name in layer)]))


def divided(config: PretrainedConfig) -> dict[str, int]:
    """Return what parallel.tensor splits: config values, or products of them, by their names."""
    text = config.get_text_config()
    values = text.to_dict()
    kv_heads = layer_values(values, "num_key_value_heads")
    known = {
        "head_dim": head_dim(values),
        "num_key_value_heads": kv_heads[0],
        "num_global_key_value_heads": kv_heads[-1],  # of layers without a window
    }
    found = {}
    for product in ("vocab_size", *FAMILIES[config.model_type].divided):
        factors = [known.get(name) or getattr(text, name) for name in product.split(" * ")]
        if None not in factors:  # a dense model of a family that has mixtures, too
            found[product] = math.prod(factors)
    return found


def checkpoint_slices(
    config: PretrainedConfig, name: str, shape: torch.Size
) -> list[CheckpointSlice]:
    """Return the weights of checkpoint files that a parameter or buffer of the model is made of.

    Args:
        config: the model's config.
        name: of the parameter in the model.
        shape: of the whole parameter, not of a shard.
    """
    family = FAMILIES[config.model_type]
    experts = family.experts
    layer, _, fused = name.partition(".mlp.experts.")
    whole = Region((0,) * len(shape), tuple(shape))
    if isinstance(experts, ExpertNames) and fused:  # [experts, rows, columns]: gate and up, or down
        matrices = (experts.gate, experts.up) if fused == "gate_up_proj" else (experts.down,)
        rows = shape[1] // len(matrices)
        slices = []
        for number in range(shape[0]):
            for i, matrix in enumerate(matrices):
                in_files = f"{layer}.{experts.block}.experts.{number}.{matrix}.weight"
                region = Region((number, i * rows, 0), (1, rows, shape[2]))
                slices.append(CheckpointSlice(in_files, region, fused=True))
        return slices

    if isinstance(experts, ExpertNames):
        name = name.replace(".mlp.", f".{experts.block}.")
    for in_model, in_files in family.files.items():
        name = name.replace(in_model, in_files)
    transposed = isinstance(experts, FusedExperts) and experts.transposed and bool(fused)
    return [CheckpointSlice(name, whole, transposed=transposed)]


def score_class(config: PretrainedConfig, where: str) -> str:
    """Return the name of the library's class that loads an export with a score head.

    Args:
        config: the model's config.
        where: the setting that names the model and its value, for messages.

    Raises:
        UserError: the library has no such class for this family.
    """
    require(
        config.model_type in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
        f"{where}: transformers has no sequence classification model of family "
        f"{config.model_type!r}, so nothing could load the reward model",
    )
    return MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES[config.model_type]


def without_dropout(config: PretrainedConfig) -> PretrainedConfig:
    """Set dropout and a router's noise to 0, in place, and return the config.

    They would make the trainer's log-probs differ from the engine's, and a resumed run from an
    uninterrupted one.
    """
    parts = [getattr(config, name) for name in config.sub_configs]
    for part in [config, *(part for part in parts if part)]:  # some models have no tower for sound
        for name, value in vars(part).items():
            if ("drop" in name or "jitter" in name) and isinstance(value, float):
                setattr(part, name, 0.0)
    return config


def has_experts(config: PretrainedConfig) -> bool:
    """Return whether layers have experts, as some models of Gemma 4 have and others have not."""
    is_on = config.get_text_config().to_dict().get("enable_moe_block", True)
    return is_on and FAMILIES[config.model_type].experts is not None


def windowed(config: PretrainedConfig) -> bool:
    """Return whether some layer sees a sliding window only."""
    return bool(config.get_text_config().to_dict().get("sliding_window"))


def reads_images(config: PretrainedConfig) -> bool:
    """Return whether the model has a tower for images."""
    return "vision_config" in config.sub_configs


def convolution(config: PretrainedConfig) -> int:
    """Return over how many rows layers with a state convolve; 0: there are no such layers."""
    values = config.get_text_config().to_dict()
    if "linear_attention" not in (values.get("layer_types") or []):
        return 0
    return values["linear_conv_kernel_dim"]


# What configs call the number of experts of a layer.
NUMBERS = ("num_experts", "num_local_experts", "n_routed_experts")


def experts_of_token(text: Any) -> int:
    """Return how many experts a token gets in each layer, by the config of a mixture's text part.

    Raises:
        UserError: not the same number in each layer.
    """
    number = text.to_dict().get("top_k_experts") or text.num_experts_per_tok
    if isinstance(number, int):
        return number
    require(
        len(set(number)) == 1,
        f"the config's number of experts a token, {number}, differs between layers; routers are "
        "replayed and planned with one number for all: give a model that has one",
    )
    return number[0]


def number_of_experts(config: PretrainedConfig) -> tuple[str, int]:
    """Return what the config of a mixture calls the number of experts of a layer, and that number.

    Some configs keep it under another name.
    """
    name = next(name for name in NUMBERS if name in FAMILIES[config.model_type].divided)
    return name, getattr(config.get_text_config(), name)
