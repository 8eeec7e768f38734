"""How a model reads images: runs of one token in a sequence, and pixels for its tower.

A text has one token for each image, its place. Before the model reads it, that token is replaced by
what stands for the image, which is mostly one token again and again. The engine does that itself,
so it gets the text with the places.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer, PretrainedConfig

from minirl.data.gemma_vision import Gemma4Vision, GemmaVision
from minirl.data.images import BadImage, blank, rgb
from minirl.data.vision_base import (
    Expanded,
    Rows,
    Vision,
    length_of,
    number_features,
    number_images,
)
from minirl.types.images import ImageBatch, ImageSpan


class QwenVision(Vision):
    """Images of any size: merge_size squared of their h x w patches are one token.

    Every token has three rotary positions, in time, height and width: Qwen2-VL, arXiv 2409.12191,
    sec. 2.1.
    """

    def __init__(self, folder: Path, max_images: int = 0):
        """Load the processor of the model in `folder`."""
        super().__init__(folder, max_images)
        self.token = AutoConfig.from_pretrained(folder).image_token_id
        self.place = self.token
        self.stop_ids = (self.token,)
        self.merge_size = self.processor.merge_size

    def num_tokens(self, url: str) -> int:
        """Return how many tokens an image has. Raises BadImage if it is too narrow."""
        width, height = rgb(url).size
        try:
            num_patches = self.processor.get_number_of_image_patches(height, width)
        except ValueError as error:
            raise BadImage(
                f"an image of {width} x {height} pixels cannot be read ({error}): {url[:60]!r}"
            ) from error
        return num_patches // self.merge_size**2

    def side(self, num_tokens: int) -> int:
        """Return the side in pixels of a square image of at most so many tokens."""
        return int(num_tokens**0.5) * self.merge_size * self.processor.patch_size

    def expand(self, ids: list[int], urls: Sequence[str], begin: int = 0) -> Expanded:
        """Repeat the token of each image as often as the image has tokens."""
        return self.replace_places(ids, urls, begin, before=[], behind=[])

    def unexpanded(self, tokens: list[int], spans: Sequence[ImageSpan]) -> list[int]:
        """Return the tokens with one token for each image, as the engine takes them."""
        out = list(tokens)
        for span in reversed(spans):
            del out[span.start + 1 : span.start + span.num_tokens]
        return out

    def batch(self, sequences: Sequence[Rows], device: torch.device) -> ImageBatch:
        """Return the images of a micro-batch, each once."""
        numbers = number_images(sequences)
        pictures = [rgb(url) for url in numbers] or [blank(self.side(1))]
        patches = self.processor(pictures, return_tensors="pt")
        # How many tokens each image has in time, height and width.
        grids = patches["image_grid_thw"].numpy() // (1, self.merge_size, self.merge_size)
        first_features = np.cumsum([0, *grids.prod(axis=1)])
        features = number_features(sequences, numbers, first_features)
        rows = np.flatnonzero(features >= 0)
        positions = [self._positions(*sequence, numbers, grids) for sequence in sequences]
        return ImageBatch(
            pixels=patches["pixel_values"].to(device),
            grids=patches["image_grid_thw"].to(device),
            rows=torch.from_numpy(rows).to(device),
            features=torch.from_numpy(features[rows]).to(device),
            positions=torch.from_numpy(np.concatenate(positions, axis=1)).to(device),
        )

    @staticmethod
    def _positions(
        spans: Sequence[ImageSpan], tokens: np.ndarray, numbers: dict[str, int], grids: np.ndarray
    ) -> np.ndarray:
        """Return the positions of a sequence's rows in time, height and width; int64 [3, rows]."""
        positions = np.tile(np.arange(length_of(spans, tokens)), (3, 1))
        for start, num_tokens, url in spans:
            if url not in numbers:
                continue
            end = start + num_tokens
            grid = grids[numbers[url]]
            # What follows goes on behind the longer side.
            positions[:, end:] += grid[1:].max() - num_tokens
            positions[:, start:end] = positions[0, start] + np.indices(grid).reshape(3, -1)
        return positions[:, tokens]


def read_vision(folder: Path, max_images: int = 0) -> Vision:
    """Return how the model in `folder` reads images, of which the engine takes `max_images`."""
    config: PretrainedConfig = AutoConfig.from_pretrained(folder)
    kinds: dict[str, Callable[[Path, int], Vision]] = {
        "gemma3": GemmaVision,
        "gemma4": Gemma4Vision,
    }
    return kinds.get(config.model_type, QwenVision)(folder, max_images)


def save_processor(model: str, folder: Path) -> None:
    """Write to `folder` what reads the images of a model: its image processor and its tokenizer.

    Args:
        model: a folder or a hub id.
        folder: gets the files; its config.json is another's.
    """
    AutoImageProcessor.from_pretrained(model).save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)


def sampling_stops(stop_ids: list[int], vision: Vision | None) -> tuple[int, ...]:
    """Return what ends an answer.

    A policy that samples the token of an image has ended, too: the engine would take it for the
    place of the next one.
    """
    return (*stop_ids, *vision.stop_ids) if vision else tuple(stop_ids)
