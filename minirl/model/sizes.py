"""Sizes that a model's config has: whether they can be, and what they mean."""

from transformers import PretrainedConfig

from minirl.base.errors import require

# Kinds of rotary positions with whose factor `max_position_embeddings` has been multiplied already.
_FACTOR_INCLUDED = ("default", "llama3", "longrope", "su", "yarn")


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


def check_counts(values: dict, where: str) -> None:
    """Refuse a config with so many layers or heads that counting them would not end.

    Args:
        values: of a config.json, or of a part of it.
        where: the file, for messages.

    Raises:
        UserError: for the first.
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


def check(values: dict, where: str) -> None:
    """Refuse sizes that are no numbers above 0, or that do not fit one another.

    Args:
        values: of the config of the language model.
        where: the setting that names the model and its value, for messages.

    Raises:
        UserError: for the first.
    """
    needed = ["hidden_size", "num_hidden_layers", "vocab_size"]
    if values.get("enable_moe_block"):
        needed += _OF_EXPERTS
    for name in (*_SIZES, *_OF_EXPERTS):
        size = values.get(name)
        if size is None and name not in needed:
            continue  # some families have no such size
        require(
            type(size) is int and 0 < size < 2**31,
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

    for size in of_layers(values, "head_dim"):
        require(
            size > 0 and size % 2 == 0,
            f"{where}: head_dim = {size} must be even: rotary positions turn pairs of features; "
            "use 32, 64 or 128",
        )

    of_values = values.get("v_head_dim") or 0
    of_queries = sum(values.get(f"qk_{part}_head_dim") or 0 for part in ("nope", "rope"))
    require(
        not of_queries or of_values <= of_queries,
        f"{where}: v_head_dim = {of_values} in its config.json is above qk_nope_head_dim + "
        f"qk_rope_head_dim = {of_queries}, and no kernel has values larger than queries; take "
        "another model",
    )

    _check_gemma4(values, where)


def _check_gemma4(values: dict, where: str) -> None:
    """Refuse what Gemma 4's layers cannot share with others; arguments are those of `check`."""
    shared = values.get("num_kv_shared_layers") or 0
    kinds = values.get("layer_types") or []
    own = kinds[: max(0, len(kinds) - shared)]
    require(
        set(own) == set(kinds),
        f"{where}: num_kv_shared_layers = {shared} in its config.json: the first {len(own)} layers "
        f"have keys and values, and not all kinds of layers ({', '.join(sorted(set(kinds)))}) are "
        "among them; take the config.json that belongs to the weights",
    )

    rows = values.get("vocab_size_per_layer_input")
    require(
        not values.get("hidden_size_per_layer_input") or rows >= values["vocab_size"],
        f"{where}: vocab_size_per_layer_input = {rows} in its config.json is below vocab_size = "
        f"{values['vocab_size']}, and some tokens would have no inputs of layers; take the "
        "config.json that belongs to the weights",
    )


def head_dim(values: dict) -> int:
    """Return the size of a head, by the values of a config."""
    return values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]


def of_layers(values: dict, name: str) -> list[int]:
    """Return the values that a size has in the layers of a model, each once.

    The library keeps what differs from the config's own value, which comes first, by layers.

    Args:
        values: of the config of the language model.
        name: head_dim or num_key_value_heads.
    """
    own = head_dim(values) if name == "head_dim" else values[name]
    layers = (values.get("per_layer_config") or {}).values()
    return list(dict.fromkeys([own, *(layer[name] for layer in layers if name in layer)]))
