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

import torch
from transformers import PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from minirl.base.errors import require
from minirl.model import in_engine, plans, sizes
from minirl.model.family import DENSE, FEATURES, HEADS, ExpertNames, Family, Fused, FusedExperts
from minirl.model.hybrid.delta_rule import convolution
from minirl.model.refused import REFUSED
from minirl.parallel.regions import CheckpointSlice, Region

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
    plan=plans.GEMMA4,
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
# Gated delta nets (model/hybrid/) in most layers. Value heads are a multiple of key heads.
_HYBRID = Family(
    divided=(*DENSE, "linear_num_key_heads"),
    plan=plans.HYBRID,
    fused=_GEMMA.fused._replace(rotary=False),
)
_HYBRID_MOE = _HYBRID._replace(
    divided=(*HEADS, "linear_num_key_heads", *_QWEN2_MOE),
    experts=_EXPERTS,
)
_QWEN2_VL = Family(files={"model.visual.": "visual.", "model.language_model.": "model."})

FAMILIES = {
    "llama": _DENSE,
    "mistral": _DENSE,
    "qwen2": _DENSE,
    "qwen3": _DENSE,
    "smollm3": _DENSE,
    "arcee": _DENSE,
    "gemma": _DENSE._replace(fused=_GEMMA.fused),
    "glm": _DENSE._replace(fused=_PARTIAL),
    "glm4": _DENSE._replace(fused=_PARTIAL),
    "seed_oss": _DENSE,
    "exaone4": _DENSE,
    "ernie4_5": _DENSE._replace(fused=_PARTIAL),
    "apertus": _DENSE,
    "jais2": _DENSE,
    "ministral": _DENSE,
    "ministral3": Family(engine_agrees_to=in_engine.ministral3_length),
    "olmo": _DENSE,
    "starcoder2": _DENSE,
    "helium": _DENSE._replace(fused=_PARTIAL),
    "hunyuan_v1_dense": Family(plan=plans.DENSE),
    "hyperclovax": Family(head=lambda config: (config.logits_scaling, None)),
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
    "gemma4_text": _GEMMA4,
    "gemma4": _GEMMA4._replace(
        plan=plans.GEMMA4_VL,
        # Of the tokens of images, whose inputs of layers vLLM takes from token 0.
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
    "cohere2": _COHERE._replace(engine_agrees_to=in_engine.cohere2_length),
    "mixtral": Family(divided=(*HEADS, "num_local_experts"), experts=_MIXTRAL),
    "qwen2_moe": Family(
        divided=(*HEADS, *_QWEN2_MOE),
        plan=plans.QWEN2_MOE,
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
        plan=plans.GRANITE_MOE,
        experts=FusedExperts(transposed=False),
        files={
            "moe.experts.gate_up_proj": "moe.input_linear.weight",
            "moe.experts.down_proj": "moe.output_linear.weight",
            "moe.router.": "moe.router.layer.",
        },
    ),
    "hunyuan_v1_moe": Family(
        divided=(*HEADS, "num_experts", "intermediate_size"),
        plan=plans.HUNYUAN_MOE,
        experts=_EXPERTS,
    ),
    "glm4_moe": _DEEPSEEK._replace(fused=_PARTIAL),
    "dots1": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK._replace(
        plan=plans.MLA,
        fused=_PARTIAL,
    ),
    "qwen2_vl": _QWEN2_VL,
    "qwen2_5_vl": _QWEN2_VL,
    "qwen3_vl": Family(plan=plans.QWEN3_VL),
    "qwen3_vl_moe": Family(
        divided=(*HEADS, "num_experts"),
        plan=plans.QWEN3_VL | {"model.language_model.layers.*.mlp.experts": "moe_tp_experts"},
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
        plan=plans.GPT_OSS,
        experts=FusedExperts(transposed=False),
        engine_values=in_engine.gpt_oss_values,
        fused=Fused(norm_wide=True, rotary=False),
    ),
    "qwen3_next": _HYBRID_MOE,
    "qwen3_5_text": _HYBRID,
    "qwen3_5_moe_text": _HYBRID_MOE,
    "qwen3_5": _HYBRID._replace(plan=plans.HYBRID_VL),
    "qwen3_5_moe": _HYBRID_MOE._replace(plan=plans.HYBRID_VL),
}

# Of vLLM's kernels of attention, and of latent attention.
_HEAD_DIMS_ON_CPU = (32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
_LATENT_ON_CPU = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}


def check_supported(
    config: PretrainedConfig,
    where: str,
    tensor_parallel: int = 1,
    max_model_len: int = 0,
    device: str | None = None,
) -> None:
    """Refuse a model that would not work.

    Args:
        config: the model's config.
        where: the setting that names the model and its value, for messages.
        tensor_parallel: ranks of one engine.
        max_model_len: of the engine, where its log-probs are trained on; else 0.
        device: type of the engine's device; None where there is no engine.

    Raises:
        UserError: the config breaks one of the rules below.
    """
    _check_config(config, where)

    # What the engine does not run, or computes in another way than the trainer.
    family = FAMILIES[config.model_type]
    if device == "cpu":
        _check_engine_on_cpu(config, where)
    if device:
        _check_engine_values(config, where)

    for name, num_tokens in family.engine_agrees_to(config).items():
        require(
            not num_tokens or max_model_len <= num_tokens,
            f"{where}: engine.max_model_len = {max_model_len} is above {name} = {num_tokens}, "
            f"beyond which vLLM computes another {config.model_type} than the trainer; lower the "
            "lengths",
        )

    _check_heads(config, where, tensor_parallel)


def _check_engine_on_cpu(config: PretrainedConfig, where: str) -> None:
    """Refuse what vLLM's CPU build does not run."""
    values = config.get_text_config().to_dict()
    for name, size in _LATENT_ON_CPU.items():
        require(
            values.get(name, size) == size,
            f"{where}: {name} = {values.get(name)}, and vLLM's CPU build has latent attention for "
            f"{size} alone; take another model, or a CUDA device, or train this one without an "
            "engine (minirl.sft, dpo, kto, rm)",
        )
    for head_dim in sizes.of_layers(values, "head_dim"):
        require(
            head_dim in _HEAD_DIMS_ON_CPU,
            f"{where}: head_dim = {head_dim}, and vLLM's CPU build has attention for "
            f"{', '.join(map(str, _HEAD_DIMS_ON_CPU))} alone; take another model, or another "
            "policy.scratch.head_dim",
        )


def _check_engine_values(config: PretrainedConfig, where: str) -> None:
    """Refuse config values that vLLM's class reads in another way than the library's."""
    values = config.get_text_config().to_dict()
    for name, wanted in FAMILIES[config.model_type].engine_values(config).items():
        value = values.get(name, wanted)  # some versions of the library have the constant, too
        require(
            value == wanted,
            f"{where}: with {name} = {value} vLLM computes another {config.model_type} than the "
            f"trainer; both agree with {wanted}: train a model that has it",
        )


def _check_heads(config: PretrainedConfig, where: str, tensor_parallel: int) -> None:
    """Refuse numbers of heads that do not fit one another or the ranks of an engine."""
    values = config.get_text_config().to_dict()
    heads = values["num_attention_heads"]
    all_kv_heads = sizes.of_layers(values, "num_key_value_heads")
    named = ", ".join(map(str, all_kv_heads))
    for kv_heads in all_kv_heads:
        require(
            heads % kv_heads == 0,
            f"{where}: num_attention_heads = {heads} is not a multiple of "
            f"num_key_value_heads = {kv_heads}",
        )

    # vLLM gives each rank whole heads. Key-value heads are split or, where there are fewer of them
    # than ranks, replicated.
    works = [
        n
        for n in range(1, heads + 1)
        if heads % n == 0 and all(kv % n == 0 or n % kv == 0 for kv in all_kv_heads)
    ]
    require(
        tensor_parallel in works,
        f"engine.tensor_parallel_size = {tensor_parallel} does not divide "
        f"num_attention_heads = {heads} and num_key_value_heads = {named} of {where}; "
        f"use one of {', '.join(map(str, works))}",
    )


def check_positions(config: PretrainedConfig, where: str, setting: str, num_tokens: int) -> None:
    """Refuse sequences longer than what the model was made for, as the engine does later.

    Args:
        config: the model's config.
        where: the setting that names the model and its value.
        setting: what says how long sequences are.
        num_tokens: its value.

    Raises:
        UserError: there are fewer positions.
    """
    positions = sizes.num_positions(config)
    require(
        not positions or num_tokens <= positions,
        f"{setting} = {num_tokens} is above the {positions} positions of {where} "
        f"(max_position_embeddings); lower it to {positions} or less",
    )


def _check_config(config: PretrainedConfig, where: str) -> None:
    """Refuse what the trainer cannot compute, packed, as the library does it unpacked."""
    why = f": {REFUSED[config.model_type]}" if config.model_type in REFUSED else ""
    require(
        config.model_type in FAMILIES,
        f"{where}: family {config.model_type!r} is not supported{why}; "
        f"supported are {', '.join(FAMILIES)}",
    )

    values = config.get_text_config().to_dict()
    sizes.check(values, where)

    require(
        "quantization_config" not in values,
        f"{where} is quantised; train the unquantised checkpoint",
    )

    family = FAMILIES[config.model_type]
    window = values.get("sliding_window")
    require(
        not window or not family.refuses_windows,
        f"{where}: sliding_window = {window} with family {config.model_type!r}: "
        f"{family.refuses_windows}",
    )

    activation = values.get("hidden_act")
    require(
        not convolution(config) or activation in ("silu", "swish"),
        f"{where}: hidden_act = {activation!r}, and gated delta nets are computed with silu alone; "
        "take a model that has it",
    )

    bidirectional = values.get("use_bidirectional_attention")
    require(
        not bidirectional or bidirectional == "vision",
        f"{where}: use_bidirectional_attention is set, and tokens would see the future; "
        "packed attention is causal",
    )

    require(
        values.get("clip_qkv") is None,
        f"{where}: clip_qkv = {values.get('clip_qkv')} cuts queries and keys in place, so that "
        "gradients are wrong where activations are recomputed; take a model without it",
    )

    parameters = values.get("rope_parameters") or {}
    for rope in [parameters, *parameters.values()]:  # one for each type of layer, in some models
        if isinstance(rope, dict):
            require(
                rope.get("rope_type") not in ("dynamic", "longrope"),
                f"{where}: rope_type = {rope.get('rope_type')!r} takes its frequencies from the "
                "longest position of a batch, so a sequence's log-probs would depend on what it is "
                "packed with; use a checkpoint with another rope_type",
            )


def divided(config: PretrainedConfig) -> dict[str, int]:
    """Return what parallel.tensor splits: config values, or products of them, by their names."""
    text = config.get_text_config()
    values = text.to_dict()
    kv_heads = sizes.of_layers(values, "num_key_value_heads")
    known = {
        "head_dim": sizes.head_dim(values),
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
