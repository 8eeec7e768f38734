"""What minirl refuses before anything is loaded: it would compute it wrongly, or not at all.

Each function raises UserError for the first thing that cannot work.
"""

from transformers import PretrainedConfig

from minirl.base.errors import require
from minirl.config.policy import ParallelConfig, PolicyConfig
from minirl.config.rl import section_of
from minirl.model.families import (
    FAMILIES,
    REFUSED,
    convolution,
    has_experts,
    layer_values,
    number_of_experts,
)

# What the kernels of vLLM's CPU build take.
_HEAD_DIMS_ON_CPU = (32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
_LATENT_ON_CPU = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
# What every config has, and where the trainer or the engine would divide by it.
_SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "intermediate_size",
    "head_dim",
    "max_position_embeddings",
    "vocab_size_per_layer_input",
    "n_shared_experts",
)
_OF_EXPERTS = ("num_experts", "top_k_experts", "moe_intermediate_size")  # Gemma 4's.
# Of layers and heads, which are built or counted one after the other. Models have some hundreds.
_MOST = 10_000
_COUNTS = ("num_hidden_layers", "num_layers", "depth", "num_attention_heads", "num_heads")
# Kinds of rotary positions where `max_position_embeddings` includes their factor already.
_FACTOR_INCLUDED = ("default", "llama3", "longrope", "su", "yarn")


def check_counts(values: dict, where: str) -> None:
    """Refuse a config with so many layers or heads that building them would not end.

    Args:
        values: a config.json, or a part of it.
        where: the file, for messages.

    Raises:
        UserError: a number of layers or heads is too large.
    """
    for name, value in values.items():
        if isinstance(value, dict):
            check_counts(value, where)
        is_too_large = name in _COUNTS and isinstance(value, int) and value > _MOST
        require(
            not is_too_large,
            f"{where}: {name} = {value} is more than {_MOST}; take the config.json that belongs to "
            "the weights",
        )


def _check_sizes(values: dict, where: str) -> None:
    """Refuse sizes that are no numbers above 0, or that do not fit one another."""
    needed = ["hidden_size", "num_hidden_layers", "vocab_size"]
    if values.get("enable_moe_block"):
        needed += _OF_EXPERTS
    for name in (*_SIZES, *_OF_EXPERTS):
        size = values.get(name)
        if size is None and name not in needed:
            continue  # some families have no such size
        by_layer = name == "moe_intermediate_size" and isinstance(size, list) and size
        require(
            all(type(each) is int and 0 < each < 2**31 for each in (by_layer or [size])),
            f"{where}: {name} = {size!r} in its config.json must be a whole number above 0; take "
            "the config.json that belongs to the weights",
        )

    layers = values["num_hidden_layers"]
    kinds = values.get("layer_types")
    require(
        kinds is None or len(kinds) == layers,
        f"{where}: layer_types in its config.json has {len(kinds or [])} layers, and "
        f"num_hidden_layers = {layers}; make them equal",
    )
    for size in layer_values(values, "head_dim"):
        require(
            size > 0 and size % 2 == 0,
            f"{where}: head_dim = {size} must be even: rotary positions turn pairs of features; "
            "use 32, 64 or 128",
        )
    value_dim = values.get("v_head_dim") or 0
    query_dim = sum(values.get(f"qk_{part}_head_dim") or 0 for part in ("nope", "rope"))
    require(
        not query_dim or value_dim <= query_dim,
        f"{where}: v_head_dim = {value_dim} in its config.json is above qk_nope_head_dim + "
        f"qk_rope_head_dim = {query_dim}, and no kernel has values larger than queries; take "
        "another model",
    )
    heads = values["num_attention_heads"]
    for kv_heads in layer_values(values, "num_key_value_heads"):
        require(
            heads % kv_heads == 0,
            f"{where}: num_attention_heads = {heads} is not a multiple of "
            f"num_key_value_heads = {kv_heads}",
        )


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
    # 1. What the trainer cannot compute, packed, as the library does it unpacked.
    why = f": {REFUSED[config.model_type]}" if config.model_type in REFUSED else ""
    require(
        config.model_type in FAMILIES,
        f"{where}: family {config.model_type!r} is not supported{why}; "
        f"supported are {', '.join(FAMILIES)}",
    )
    family = FAMILIES[config.model_type]
    values = config.get_text_config().to_dict()
    _check_sizes(values, where)
    require(
        "quantization_config" not in values,
        f"{where} is quantised; train the unquantised checkpoint",
    )
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
    require(
        values.get("use_bidirectional_attention") in (None, False, "vision"),
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
            # With alpha, as Hunyuan has it, they are those of `max_position_embeddings`.
            is_static = rope.get("rope_type") == "dynamic" and rope.get("alpha")
            require(
                is_static or rope.get("rope_type") not in ("dynamic", "longrope"),
                f"{where}: rope_type = {rope.get('rope_type')!r} takes its frequencies from the "
                "longest position of a batch, so a sequence's log-probs would depend on what it is "
                "packed with; use a checkpoint with another rope_type",
            )

    # 2. What the engine does not run, or computes in another way than the trainer.
    for name, size in _LATENT_ON_CPU.items():
        require(
            device != "cpu" or values.get(name, size) == size,
            f"{where}: {name} = {values.get(name)}, and vLLM's CPU build has latent attention for "
            f"{size} alone; take another model, or a CUDA device, or train this one without an "
            "engine (minirl.sft, dpo, kto, rm)",
        )
    for head_dim in layer_values(values, "head_dim"):
        require(
            device != "cpu" or head_dim in _HEAD_DIMS_ON_CPU,
            f"{where}: head_dim = {head_dim}, and vLLM's CPU build has attention for "
            f"{', '.join(map(str, _HEAD_DIMS_ON_CPU))} alone; take another model, or another "
            "policy.scratch.head_dim",
        )
    engine_values = family.engine_values(config) if device else {}
    for name, wanted in engine_values.items():
        value = values.get(name, wanted)  # some versions of the library have the constant, too
        require(
            value == wanted,
            f"{where}: with {name} = {value} vLLM computes another {config.model_type} than the "
            f"trainer; both agree with {wanted}: train a model that has it",
        )
    for name, num_tokens in family.engine_agrees_to(config).items():
        require(
            not num_tokens or max_model_len <= num_tokens,
            f"{where}: engine.max_model_len = {max_model_len} is above {name} = {num_tokens}, "
            f"beyond which vLLM computes another {config.model_type} than the trainer; lower the "
            "lengths",
        )
    # vLLM gives each rank whole heads. Key-value heads are split or, where there are fewer of them
    # than ranks, replicated.
    heads = values["num_attention_heads"]
    all_kv_heads = layer_values(values, "num_key_value_heads")
    works = [
        n
        for n in range(1, heads + 1)
        if heads % n == 0 and all(kv % n == 0 or n % kv == 0 for kv in all_kv_heads)
    ]
    require(
        tensor_parallel in works,
        f"engine.tensor_parallel_size = {tensor_parallel} does not divide "
        f"num_attention_heads = {heads} and num_key_value_heads = "
        f"{', '.join(map(str, all_kv_heads))} of {where}; use one of {', '.join(map(str, works))}",
    )


def num_positions(config: PretrainedConfig) -> int:
    """Return how many positions a model has, as vLLM counts them; 0: its config does not say."""
    values = config.get_text_config().to_dict()
    positions = values.get("max_position_embeddings") or 0
    if "gemma3" in config.model_type:
        return positions
    parameters = values.get("rope_parameters") or {}
    factor = 1.0
    for rope in [parameters, *parameters.values()]:  # one for each type of layer, in some models
        if isinstance(rope, dict) and rope.get("rope_type", "default") not in _FACTOR_INCLUDED:
            factor = rope.get("factor") or factor
    return int(positions * factor)


def check_positions(
    config: PretrainedConfig, where: str, setting: str, num_tokens: int, cure: str
) -> None:
    """Refuse sequences longer than what the model was made for, as the engine does later.

    Args:
        config: the model's config.
        where: the setting that names the model and its value.
        setting: what says how long sequences are.
        num_tokens: its value.
        cure: the settings to lower.

    Raises:
        UserError: there are fewer positions.
    """
    positions = num_positions(config)
    require(
        not positions or num_tokens <= positions,
        f"{setting} = {num_tokens} is above the {positions} positions of {where} "
        f"(max_position_embeddings); lower {cure} to {positions} or less",
    )


# --------------------------------------------------------------------------------------------------
# divided over ranks


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
        f"divide linear_num_key_heads = {num_heads} of family {config.model_type!r}, which has "
        "layers with a state that are divided by heads; lower one of the two",
    )


def check_experts(
    models: dict[str, PretrainedConfig], parallel: ParallelConfig, ranks_of_node: int
) -> None:
    """Refuse expert parallelism that cannot work, or that does not pay.

    Args:
        models: configs of the run's models, by their roles, such as policy.
        parallel: the axes.
        ranks_of_node: ranks on a node.

    Raises:
        UserError: no model has experts, they cannot be divided, or their ranks are on more than
            one node.
    """
    num_ranks = parallel.experts
    if num_ranks == 1:
        return
    families = [f"{role} {config.model_type}" for role, config in models.items()]
    require(
        any(map(has_experts, models.values())),
        f"parallel.experts = {num_ranks} divides the experts of mixtures, and no model here has "
        f"any ({', '.join(families)}); set it to 1",
    )
    for role, config in models.items():
        if has_experts(config):
            name, experts = number_of_experts(config)
            works = [str(n) for n in range(1, experts + 1) if experts % n == 0]
            require(
                experts % num_ranks == 0,
                f"parallel.experts = {num_ranks} does not divide {name} = {experts} of the {role}; "
                f"use {', '.join(works)}",
            )
    works = [str(n) for n in range(1, num_ranks) if ranks_of_node % n == num_ranks % n == 0]
    require(
        ranks_of_node % num_ranks == 0 or parallel.experts_across_nodes,
        f"parallel.experts = {num_ranks} does not fit into nodes of {ranks_of_node} ranks, so that "
        "tokens would travel between nodes in every layer, and computation would wait for them; "
        f"use {', '.join(works)}, or add --parallel.experts-across-nodes",
    )


# --------------------------------------------------------------------------------------------------
# routers


def check_routers(config: PretrainedConfig, cfg: PolicyConfig) -> None:
    """Refuse settings of routers that a model does not have.

    Args:
        config: of the model.
        cfg: its settings.

    Raises:
        UserError: the model is no mixture, or has no bias to move.
    """
    router = cfg.router
    section = section_of(cfg)
    values = {
        f"{section}.router.aux_loss_coef": router.aux_loss_coef,
        f"{section}.router.z_loss_coef": router.z_loss_coef,
        f"{section}.router.bias_update_rate": router.bias_update_rate,
    }
    for name, value in values.items():
        require(
            not value or has_experts(config),
            f"{name} = {value} is about the routers of a mixture of experts, and the model is of "
            f"family {config.model_type}, which has none; set it to 0",
        )
    with_bias = [name for name, family in FAMILIES.items() if family.sigmoid_router]
    require(
        not router.bias_update_rate or FAMILIES[config.model_type].sigmoid_router,
        f"{section}.router.bias_update_rate = {router.bias_update_rate} moves the bias of routers, "
        f"and family {config.model_type} has none (there is one in {', '.join(with_bias)}); use "
        f"{section}.router.aux_loss_coef",
    )
