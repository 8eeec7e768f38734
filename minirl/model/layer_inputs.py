"""Embeddings of tokens that each layer has of its own, as Gemma 4's small models have them."""

from functools import partial
from typing import Any

from torch import Tensor, nn


def install(model: nn.Module) -> None:
    """Let a model look up the inputs of its layers for the tokens that a rank has."""
    for module in model.modules():
        if "embed_tokens_per_layer" in module._modules:
            text_model: Any = module
            text_model.get_per_layer_inputs = partial(embed, module)


def embed(text_model: Any, input_ids: Tensor, _: Tensor) -> Tensor:
    """Stand in for the library's method, which counts rows as there are tokens.

    With sequence parallelism a rank gets its part of the rows only (parallel/tensor.py).

    Args:
        text_model: the library's Gemma4TextModel.
        input_ids: [1, T].

    Returns:
        [1, T, layers, D], or this rank's part of the rows.
    """
    embedded = text_model.embed_tokens_per_layer(input_ids)
    num_layers = text_model.config.num_hidden_layers
    return embedded.unflatten(-1, (num_layers, text_model.hidden_size_per_layer_input))
