"""A causal language model on packed batches: what it computes, and its tensors by name."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from minirl.model import images, routing
from minirl.model.adapters import lora, nf4
from minirl.model.logprob import logprob_entropy
from minirl.parallel import fsdp
from minirl.parallel.tensor import LORA_A, LORA_B, TensorParallel
from minirl.types.packed import LayerBatch, Packed

SCORE = "score.weight"  # Of the score head, in files, too.


class CausalModel(PreTrainedModel):
    """What `build_model` makes of the library's models, for type checkers; never instantiated."""

    model: Any  # Its layers; for a model that reads images, a tower and `language_model`.
    lm_head: nn.Linear
    score: nn.Linear  # A `ScoreHead`, instead of `lm_head`: of a reward model or a critic.
    adapters: lora.Adapters | None  # None: it has none.
    routing: routing.Routing | None  # None: it is no mixture of experts.
    shared: set[str]  # Names of parameters that are another model's, too, which holds them.
    set_requires_gradient_sync: Callable[[bool], None]  # Of FSDPModule, as the next.
    set_requires_all_reduce: Callable[[bool], None]


# --------------------------------------------------------------------------------------------------
# what it computes


def last_hidden(model: CausalModel, batch: Packed, tp: TensorParallel | None) -> Tensor:
    """Return the last hidden states, [1, T, H] or this rank's part of the rows."""
    if model.routing:
        model.routing.begin(batch)
    if batch.images is not None:
        return images.last_hidden(model, batch, batch.images, tp)
    return model.model(
        input_ids=batch.inputs[None],
        position_ids=batch.positions[None],
        use_cache=False,
        pack=LayerBatch(batch),
    ).last_hidden_state


def packed_forward(
    self: CausalModel,
    batch: Packed,
    entropy_gradient: bool = False,
    *,
    tp: TensorParallel | None,
    scale: float,
    softcap: float | None,
    kernels: type[torch.autograd.Function] | None,
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
        kernels: of the head, as in `logprob_entropy`.

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
        kernels=kernels,
    )
    zeros = logprobs.new_zeros(len(batch.inputs))
    return (
        zeros.index_copy(0, batch.loss_rows, logprobs),
        zeros.index_copy(0, batch.loss_rows, entropy),
    )


class ScoreHead(nn.Linear):
    """The head of `AutoModelForSequenceClassification` with one label, in float32 at least."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Return one number for each hidden state: [..., H] -> [...]."""
        wide = torch.promote_types(hidden.dtype, torch.float32)
        return hidden.to(wide) @ self.weight[0].to(wide)


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
