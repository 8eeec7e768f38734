"""How many tokens a tower makes of images that are pretended."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from benchmarks.dryrun.values import KnownValues

POOLER = "Gemma4VisionPooler"


def tell(model: nn.Module, values: KnownValues) -> None:
    """Let a Gemma 4 tower know which of its tokens are padding.

    It finds out by the weights of patches in tokens, floats that are not followed. The positions of
    patches say the same: padding has none, and the patches of an image fill its first tokens.

    Args:
        model: of any family; others are left as they are.
        values: knows the positions, and gets to know the mask.
    """

    def note_mask(pooler: nn.Module, args: tuple, inputs: dict, outputs: Any) -> None:
        _, is_token = outputs
        positions = values.of(inputs["pixel_position_ids"])
        assert positions is not None, "nobody knows the positions of patches"
        with _disable_current_modes():
            real = _first_tokens(positions, is_token.shape)
        values.note(is_token, real)

    for module in model.modules():
        if type(module).__name__ == POOLER:
            module.register_forward_hook(note_mask, with_kwargs=True)


def _first_tokens(positions: Tensor, shape: torch.Size) -> Tensor:
    """Return which tokens of images are no padding, bool [images, tokens].

    Args:
        positions: of patches, [images, patches, 2]; those of padding are -1.
        shape: of the result.
    """
    _, most_tokens = shape
    patches_of_token = positions.shape[1] // most_tokens
    num_tokens = (positions >= 0).all(-1).sum(1) // patches_of_token
    return torch.arange(most_tokens) < num_tokens[:, None]
