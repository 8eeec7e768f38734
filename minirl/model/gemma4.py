"""What Gemma 4's modules do in another way here, so that they fit tokens split over ranks."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Modules that no run uses, and that are not trained: the tower for sound.
NEVER_RUN = ("model.audio_tower", "model.embed_audio")


def install(model: nn.Module) -> None:
    """Give a model's inputs of layers and routers their functions; call it before it is split."""
    for module in model.modules():
        own: Any = module
        if "embed_tokens_per_layer" in module._modules:
            own.get_per_layer_inputs = partial(embed, module)
        if type(module).__name__ == "Gemma4TextRouter":
            own.top_k = own.config.top_k_experts
            own.num_experts = own.config.num_experts
            own.forward = partial(route, module)


def embed(text_model: Any, input_ids: Tensor, _: Tensor) -> Tensor:
    """Return the embeddings of tokens that each layer has of its own.

    The library's method counts rows as there are tokens. With sequence parallelism a rank gets its
    part of them only (parallel/tensor.py).

    Args:
        text_model: the library's Gemma4TextModel.
        input_ids: [1, T].

    Returns:
        [1, T, layers, D], or this rank's part of the rows.
    """
    embedded = text_model.embed_tokens_per_layer(input_ids)
    num_layers = text_model.config.num_hidden_layers
    return embedded.unflatten(-1, (num_layers, text_model.hidden_size_per_layer_input))


def inputs_of_layers(text_model: Any, input_ids: Tensor, rows: Tensor) -> Tensor:
    """Return the embeddings that each layer has of its own, of rows with images among them.

    Those of images are the padding token's, as in the library's Gemma4Model.forward.

    Args:
        text_model: the library's Gemma4TextModel.
        input_ids: [T].
        rows: [N], those of images.

    Returns:
        [1, T, layers, D], or this rank's part of the rows.
    """
    ids = input_ids.index_fill(0, rows, text_model.config.pad_token_id)
    return text_model.get_per_layer_inputs(ids[None], None)


def route(router: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Choose experts as the library's router does, which returns probabilities instead of logits.

    Args:
        router: the library's Gemma4TextRouter.
        hidden: [T, H].

    Returns:
        Logits [T, E], weights [T, k] and experts int64 [T, k].
    """
    normed = router.norm(hidden) * router.scale * router.scalar_root_size
    logits = router.proj(normed)
    probabilities = F.softmax(logits, dim=-1, dtype=torch.float32)
    weights, experts = torch.topk(probabilities, router.top_k, dim=-1)
    weights = weights / weights.sum(-1, keepdim=True)
    return logits, weights * router.per_expert_scale[experts], experts
