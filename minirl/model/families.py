"""The allow-list: model families whose packed forward was shown to equal their plain one, alone,
under tensor and under sequence parallelism. Anything else is refused by name, because a family that
reads its arguments differently (linear attention, attention sinks) would train on silently wrong
numbers. All that differs between families is data in these rows.

To add one: a row here and a small instance in `tests/tiny.py`; `tests/test_families.py` runs it
packed against unpacked, on two ranks, and through load and export; `tests/test_rollout.py` through
the engine.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from transformers import PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from minirl.errors import UserError, require
from minirl.parallel.regions import CheckpointSlice, Region

HEADS = ("num_attention_heads", "num_key_value_heads")
FEATURES = (
    "num_attention_heads * head_dim",
    "num_key_value_heads * head_dim",
)  # attention itself is whole on every rank
DENSE = (*HEADS, "intermediate_size")


@dataclass(frozen=True, kw_only=True)
class Family:
    divided: tuple[str, ...] = (
        DENSE  # Config values, or products of them, that parallel.tensor splits.
    )
    plan: dict[str, str] = field(
        default_factory=dict
    )  # Tensor-parallel styles that the library's own plan lacks.
    # (what the head's logits are multiplied by over and above 1 / temperature, c or None of logits
    # that are c * tanh(logits / c))
    head: Callable[[PretrainedConfig], tuple[float, float | None]] = lambda config: (1.0, None)
    # Names in the files of what the model keeps as two fused tensors: (block, gate, up, down) of
    # `{block}.experts.{number}.{gate, up or
    # down}.weight`; the block stands for the model's `mlp`.
    experts: tuple[str, str, str, str] | None = None
    engine_length: str | None = (
        # Config value: of longer sequences the engine computes something else than the library.
        None
    )
    engine_on_cpu: bool = True
    files: dict[str, str] = field(
        default_factory=dict
    )  # Beginnings of the model's names -> what is in the files instead.


_MIXTRAL = ("block_sparse_moe", "w1", "w3", "w2")
_EXPERTS = ("mlp", "gate_proj", "up_proj", "down_proj")
_QWEN2_MOE = {
    "model.layers.*.mlp.experts": "moe_tp_experts",
    "model.layers.*.mlp.shared_expert.gate_proj": "colwise",
    "model.layers.*.mlp.shared_expert.up_proj": "colwise",
    "model.layers.*.mlp.shared_expert.down_proj": "rowwise",
}
_QWEN3_VL = {
    f"model.language_model.layers.*.{block}.{name}": style
    for style, names in {
        "colwise": {"self_attn": ("q_proj", "k_proj", "v_proj"), "mlp": ("gate_proj", "up_proj")},
        "rowwise": {"self_attn": ("o_proj",), "mlp": ("down_proj",)},
    }.items()
    for block, of_block in names.items()
    for name in of_block
}
_DEEPSEEK = Family(
    divided=(
        *HEADS,
        "intermediate_size",
        "n_routed_experts",
        "n_shared_experts * moe_intermediate_size",
    ),
    experts=_EXPERTS,
)

FAMILIES: dict[str, Family] = {
    **dict.fromkeys(
        (
            "llama",
            "mistral",
            "qwen2",
            "qwen3",
            "smollm3",
            "gemma",
            "glm",
            "glm4",
            "seed_oss",
            "exaone4",
            "ernie4_5",
        ),
        Family(),
    ),
    **dict.fromkeys(
        ("gemma2", "gemma3_text"), Family(head=lambda config: (1.0, config.final_logit_softcapping))
    ),
    **dict.fromkeys(("phi3", "olmo2", "olmo3"), Family(divided=(*FEATURES, "intermediate_size"))),
    "granite": Family(head=lambda config: (1 / config.logits_scaling, None)),
    "cohere": Family(head=lambda config: (config.logit_scale, None)),
    "cohere2": Family(
        head=lambda config: (config.logit_scale, None), engine_length="sliding_window"
    ),  # vLLM's windows are one token wider
    "mixtral": Family(divided=(*HEADS, "num_local_experts"), experts=_MIXTRAL),
    "qwen2_moe": Family(
        divided=(*HEADS, "num_experts", "shared_expert_intermediate_size"),
        plan=_QWEN2_MOE,
        experts=_EXPERTS,
    ),
    "qwen3_moe": Family(divided=(*HEADS, "num_experts"), experts=_EXPERTS),
    "olmoe": Family(divided=(*FEATURES, "num_experts"), experts=_EXPERTS),
    **dict.fromkeys(("glm4_moe", "dots1"), _DEEPSEEK),
    **dict.fromkeys(
        ("qwen2_vl", "qwen2_5_vl"),
        Family(files={"model.visual.": "visual.", "model.language_model.": "model."}),
    ),
    "qwen3_vl": Family(plan=_QWEN3_VL),
    "minimax_m2": Family(
        divided=(*FEATURES, "num_local_experts"), experts=_MIXTRAL, engine_on_cpu=False
    ),
}

# Families that users ask for, and what was found wrong with them.
REFUSED = {
    "gpt_oss": "its attention sinks are an argument that packed attention does not take",
    **dict.fromkeys(
        ("qwen3_next", "qwen3_5_text"),
        "its linear attention leaks from one packed sequence into the next",
    ),
    "nemotron": "it does not call the attention interface",
    **dict.fromkeys(
        ("starcoder2", "hunyuan_v1_dense", "granitemoe", "deepseek_v3"),
        "it fails under sequence parallelism",
    ),
    "llama4_text": "its experts have a layout of their own",
}


def check_supported(
    config: PretrainedConfig,
    where: str,
    tensor_parallel: int = 1,
    max_model_len: int = 0,
    device: str | None = None,
) -> None:
    """Refuse a model that would not work. Raises UserError.

    Of the engine: `tensor_parallel`; `max_model_len` where its log-probs are trained on; `device`,
    its type.
    """
    why = f": {REFUSED[config.model_type]}" if config.model_type in REFUSED else ""
    require(
        config.model_type in FAMILIES,
        f"{where}: family {config.model_type!r} is not supported{why}; supported are {', '.join(FAMILIES)}",
    )
    values = config.get_text_config().to_dict()
    require(
        "quantization_config" not in values,
        f"{where} is quantised; train the unquantised checkpoint",
    )
    require(
        not values.get("use_bidirectional_attention"),
        f"{where}: use_bidirectional_attention is set, and tokens would see the future; packed attention is causal",
    )
    parameters = values.get("rope_parameters") or {}
    for rope in [p for p in parameters.values() if isinstance(p, dict)] or [
        parameters
    ]:  # those of each layer type, or one
        require(
            rope.get("rope_type") not in ("dynamic", "longrope"),
            f"{where}: rope_type = {rope.get('rope_type')!r} takes its frequencies from the longest "
            "position of a batch, so a sequence's log-probs would depend on what it is packed with; use a checkpoint with another rope_type",
        )
    require(
        device != "cpu" or FAMILIES[config.model_type].engine_on_cpu,
        f"{where}: vLLM's CPU build does not run family {config.model_type!r} (its router scores); use a CUDA device",
    )
    length = FAMILIES[config.model_type].engine_length
    if length and getattr(config, length) and max_model_len > getattr(config, length):
        raise UserError(
            f"{where}: engine.max_model_len = {max_model_len} is above {length} = {getattr(config, length)}, beyond which the engine's "
            f"{config.model_type} attends to other tokens than the trainer's; lower the lengths"
        )
    text = config.get_text_config()
    heads, kv_heads = text.num_attention_heads, text.num_key_value_heads
    require(
        heads % kv_heads == 0,
        f"{where}: num_attention_heads = {heads} is not a multiple of num_key_value_heads = {kv_heads}",
    )
    # vLLM gives each rank whole heads; key-value heads are split or, when there are fewer than
    # ranks, replicated.
    kv_ok = kv_heads % tensor_parallel == 0 or tensor_parallel % kv_heads == 0
    if heads % tensor_parallel or not kv_ok:
        works = [
            n
            for n in range(1, heads + 1)
            if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)
        ]
        raise UserError(
            f"engine.tensor_parallel_size = {tensor_parallel} does not divide num_attention_heads = {heads} and "
            f"num_key_value_heads = {kv_heads} of {where}; use one of {', '.join(map(str, works))}"
        )


def divided(config: PretrainedConfig) -> dict[str, int]:
    """What parallel.tensor splits: names of config values (or products of them) -> their
    numbers.
    """
    text = config.get_text_config()
    head_dim = text.to_dict().get("head_dim") or text.hidden_size // text.num_attention_heads
    return {
        product: math.prod(
            head_dim if name == "head_dim" else getattr(text, name) for name in product.split(" * ")
        )
        for product in ("vocab_size", *FAMILIES[config.model_type].divided)
    }


def parts(config: PretrainedConfig, name: str, shape: torch.Size) -> list[CheckpointSlice]:
    """The weights of the files that a parameter (or buffer) of the model is made of."""
    family = FAMILIES[config.model_type]
    block, *matrices = family.experts or ("mlp",)
    layer, fused, which = name.partition(".mlp.experts.")
    if not fused:
        begin = next((begin for begin in family.files if name.startswith(begin)), "")
        return [
            CheckpointSlice(
                family.files.get(begin, "")
                + name.removeprefix(begin).replace(".mlp.", f".{block}."),
                Region((0,) * len(shape), tuple(shape)),
            )
        ]
    names = matrices[:2] if which == "gate_up_proj" else matrices[2:]
    rows = shape[1] // len(names)
    return [
        CheckpointSlice(
            f"{layer}.{block}.experts.{number}.{matrix}.weight",
            Region((number, i * rows, 0), (1, rows, shape[2])),
            fused=True,
        )
        for number in range(shape[0])
        for i, matrix in enumerate(names)
    ]


def keeps_precision(name: str) -> bool:
    """Of a tensor that is float32 in files of any dtype: a router's correction, which in bfloat16
    would choose other experts.
    """
    return name.endswith("e_score_correction_bias")


def score_class(config: PretrainedConfig, where: str) -> str:
    """Of the library: what loads an export with a score head. Raises UserError for a family that
    has none.
    """
    if config.model_type not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES:
        raise UserError(
            f"{where}: transformers has no sequence classification model of family {config.model_type!r}, so nothing could load the reward model"
        )
    return MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES[config.model_type]


def without_dropout(config: PretrainedConfig) -> PretrainedConfig:
    """Dropout makes the trainer's log-probs differ from the engine's, and a resumed run from an
    uninterrupted one. A router's noise, too.
    """
    for part in (config, *(vars(config)[name] for name in config.sub_configs)):
        for name, value in vars(part).items():
            if ("drop" in name or "jitter" in name) and isinstance(value, float):
                setattr(part, name, 0.0)
    return config


def windowed(config: PretrainedConfig) -> bool:
    """Some layer sees a sliding window only."""
    return bool(config.get_text_config().to_dict().get("sliding_window"))


def reads_images(config: PretrainedConfig) -> bool:
    return "vision_config" in config.sub_configs
