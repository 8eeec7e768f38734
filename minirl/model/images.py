"""A model that reads images: a tower looks at them, a language model reads what it saw."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from minirl.parallel.tensor import TensorParallel
from minirl.types.packed import ImageBatch, LayerBatch, Packed

if TYPE_CHECKING:
    from minirl.model.causal import CausalModel


def last_hidden(
    model: "CausalModel", batch: Packed, images: ImageBatch, tp: TensorParallel | None
) -> Tensor:
    """Return the last hidden states, [1, T, H] or this rank's part of the rows.

    The tower's outputs for images stand in place of the embeddings of their tokens. Qwen3-VL adds
    more of them after the first layers.
    """
    tower = _look(model, images)
    language_model = model.model.language_model
    embedded = language_model.embed_tokens(batch.inputs[None]).squeeze(0)
    rows = images.rows
    features = images.features
    if tp and tp.sequence:  # this rank has a part of the rows only
        rows = rows - tp.group.rank() * len(embedded)
        is_here = (rows >= 0) & (rows < len(embedded))
        rows = rows[is_here]
        features = features[is_here]
    seen = tower.pooler_output.flatten(0, -2)
    values = seen.index_select(0, features).to(embedded.dtype)
    embedded = embedded.index_copy(0, rows, values)

    more: dict = {}
    if "deepstack_features" in tower:
        is_image = embedded.new_zeros(len(embedded), dtype=torch.bool).index_fill(0, rows, True)
        more["visual_pos_masks"] = is_image[None]
        more["deepstack_visual_embeds"] = [
            outputs.index_select(0, features) for outputs in tower.deepstack_features
        ]
    if "embed_tokens_per_layer" in language_model._modules:
        # Those of images are the padding token's, as in the library's Gemma4Model.forward.
        padding = language_model.config.pad_token_id
        ids = batch.inputs.index_fill(0, images.rows, padding)
        more["per_layer_inputs"] = language_model.get_per_layer_inputs(ids[None], None)
    if images.positions is None:
        positions = batch.positions[None]
    else:
        positions = images.positions[:, None]
    return language_model(
        inputs_embeds=embedded[None],
        position_ids=positions,
        use_cache=False,
        pack=LayerBatch(batch),
        **more,
    ).last_hidden_state


def _look(model: "CausalModel", images: ImageBatch) -> Any:
    """Return what a tower makes of images; `pooler_output` is [..., features, H]."""
    pixels = images.pixels.to(images.rows.device)
    if images.places is not None:
        # Not by `get_image_features`, where the host waits for numbers of tokens to split them by.
        tower = model.model.vision_tower(pixels, images.places)
        tower.pooler_output = model.model.embed_vision(tower.last_hidden_state)
        return tower
    if images.grids is None:
        return model.model.get_image_features(pixels)
    return model.model.visual(pixels, grid_thw=images.grids)
