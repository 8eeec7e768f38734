"""Images in sequences: where one lies in the tokens, and those of a micro-batch on the device."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class ImageSpan(NamedTuple):
    """An image among the tokens of a sequence."""

    start: int  # Number of its first token in the sequence.
    num_tokens: int
    url: str  # A data URL: the image itself.


@dataclass(kw_only=True)
class ImageBatch:
    """The images of a micro-batch, each once, and the rows that they are in."""

    # float32 [P, D], the patches of all images end to end; or [I, 3, H, W]; or for Gemma 4
    # [I, P, D], where images with fewer patches are padded.
    pixels: Tensor
    # The N rows with an input token that is part of an image, and for each of them the row of the
    # vision tower's output that replaces it.
    rows: Tensor  # int64 [N]
    features: Tensor  # int64 [N]
    # For Qwen's models: int64 [I, 3], how many patches an image has in time, height and width; and
    # int64 [3, T], the rotary positions of every row in these.
    grids: Tensor | None = None
    positions: Tensor | None = None
    # For Gemma 4: int64 [I, P, 2], the column and the row of each patch; -1: it is padding.
    places: Tensor | None = None
