"""A causal language model on packed batches: what it computes, and its tensors by name."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from minirl.model import routing
from minirl.model.adapters import lora, nf4
from minirl.model.logprob import logprob_entropy
from minirl.parallel import fsdp
from minirl.parallel.tensor import LORA_A, LORA_B, TensorParallel
from minirl.types.packed import LayerBatch, Packed

SCORE = "score.weight"  # Of the score head, in files, too.


class ScoreHead(nn.Linear):
    """The head of `AutoModelForSequenceClassification` with one label, in float32 at least."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Return one number for each hidden state: [..., H] -> [...]."""
        wide = torch.promote_types(hidden.dtype, torch.float32)
        return hidden.to(wide) @ self.weight[0].to(wide)


class CausalModel(PreTrainedModel):
    """What `build_model` makes of the library's models, for type checkers; never instantiated."""

    model: Any  # Its layers; for a model that reads images, a tower and `language_model`.
    lm_head: nn.Linear
    score: ScoreHead  # Instead of `lm_head`.
    adapters: lora.Adapters | None  # None: it has none.
    routing: routing.Routing | None  # None: it is no mixture of experts.
    shared: set[str]  # Names of parameters that are another model's, too, which holds them.
    set_requires_gradient_sync: Callable[[bool], None]  # Of FSDPModule, as the next.
    set_requires_all_reduce: Callable[[bool], None]


# --------------------------------------------------------------------------------------------------
# what it computes


def last_hidden(model: CausalModel, batch: Packed, tp: TensorParallel | None) -> Tensor:
    """Return the last hidden states, [1, T, H] or this rank's part of the rows.

    The tower's outputs for images stand in place of the embeddings of their tokens. Qwen3-VL adds
    more of them after the first layers.
    """
    if model.routing:
        model.routing.begin(batch)
    images = batch.images
    if images is None:
        return model.model(
            input_ids=batch.inputs[None],
            position_ids=batch.positions[None],
            use_cache=False,
            pack=LayerBatch(batch),
        ).last_hidden_state

    tower = _look(model, batch)
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
    return language_model(
        inputs_embeds=embedded[None],
        position_ids=batch.positions[None]
        if images.positions is None
        else images.positions[:, None],
        use_cache=False,
        pack=LayerBatch(batch),
        **more,
    ).last_hidden_state


def _look(model: CausalModel, batch: Packed) -> Any:
    """Return what a tower makes of the images of a batch; `pooler_output` is [..., features, H]."""
    images = batch.images
    assert images is not None
    if images.places is not None:
        # Not by `get_image_features`, where the host waits for numbers of tokens to split them by.
        tower = model.model.vision_tower(images.pixels, images.places)
        tower.pooler_output = model.model.embed_vision(tower.last_hidden_state)
        return tower
    if images.grids is None:
        return model.model.get_image_features(images.pixels)
    return model.model.visual(images.pixels, grid_thw=images.grids)


def packed_forward(
    self: CausalModel,
    batch: Packed,
    entropy_gradient: bool = False,
    *,
    tp: TensorParallel | None,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """Return the log-prob of each target and the entropy of its distribution.

    Stands in for the model's own `forward`, so that the head's weight is used while FSDP has the
    root gathered.

    Args:
        self: the model.
        batch: T packed rows.
        entropy_gradient: the entropy has a gradient.
        tp: tensor parallelism of the model.
        scale: the family multiplies logits by it.
        softcap: bound of the logits; None: they have none.

    Returns:
        Both [T], 0 where the target is not in the loss.
    """
    hidden = last_hidden(self, batch, tp)
    if tp:
        hidden = tp.gather_tokens(hidden)
    logprobs, entropy = logprob_entropy(
        hidden.squeeze(0).index_select(0, batch.loss_rows),
        fsdp.local(self.lm_head.weight),
        batch.targets[batch.loss_rows],
        batch.temperature / scale,
        softcap=softcap,
        entropy_gradient=entropy_gradient,
        group=tp.group if tp else None,
    )
    zeros = logprobs.new_zeros(len(batch.inputs))
    return (
        zeros.index_copy(0, batch.loss_rows, logprobs),
        zeros.index_copy(0, batch.loss_rows, entropy),
    )


def score_forward(
    self: CausalModel,
    batch: Packed,
    entropy_gradient: bool = False,
    *,
    tp: TensorParallel | None,
) -> tuple[Tensor, None]:
    """Return the score of what has been read up to each row, in place of `packed_forward`.

    Returns:
        [T], 0 where the target is not in the loss; and no entropy.
    """
    scores = self.score(last_hidden(self, batch, tp))
    if tp:
        scores = tp.gather_tokens(scores)
    return scores.squeeze(0).masked_fill(~batch.loss_mask, 0), None


# --------------------------------------------------------------------------------------------------
# its tensors


def buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the few buffers that are no function of the config: a router's correction."""
    persistent = {}
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                persistent[f"{prefix}.{name}"] = buffer
    return persistent


def parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of a model, and the buffers that its files hold, by name."""
    return dict(model.named_parameters()) | buffers(model)


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that are trained, by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return all that a model's files hold. A tied head appears once, under the embedding's name.

    Adapters are not among it. A weight that is held in four bits is on the meta device.
    """
    packed = packed_weights(model)
    weights = {}
    for name, t in parameters(model).items():
        if name in packed:
            weights[name] = nf4.layout(packed[name], t)
        elif not name.endswith((LORA_A, LORA_B, nf4.SCALES)):
            weights[name] = t
    return weights


def packed_weights(model: Any) -> dict[str, nf4.FourBits]:
    """Return what is known of the weights that are held in four bits, by name."""
    return model.adapters.packed if model.adapters else {}
