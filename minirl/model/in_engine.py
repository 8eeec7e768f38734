"""Where vLLM's classes compute another model than the library's, by what a config says."""

from typing import Any

from transformers import PretrainedConfig


def gpt_oss_values(config: PretrainedConfig) -> dict[str, Any]:
    """Return what vLLM's class has as constants."""
    kinds = ["sliding_attention", "full_attention"] * config.num_hidden_layers
    layer_types = kinds[: config.num_hidden_layers]
    return {"layer_types": layer_types, "swiglu_alpha": 1.702, "swiglu_limit": 7.0}


def cohere2_length(config: PretrainedConfig) -> dict[str, int | None]:
    """Return the sliding window, which is one token wider in vLLM's class."""
    return {"sliding_window": config.sliding_window}


def ministral3_length(config: PretrainedConfig) -> dict[str, int | None]:
    """Return up to where queries are not scaled by their position, which vLLM's class leaves out.

    The scale is 1 + beta * log(1 + position // original_max_position_embeddings), of Llama 4.
    """
    name = "original_max_position_embeddings"
    return {name: config.rope_parameters[name]}
