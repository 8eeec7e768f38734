"""What all ways to read images have in common: data/vision.py says what they are."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from transformers import AutoImageProcessor

from minirl.base.errors import require
from minirl.data.images import BadImage
from minirl.types.images import ImageBatch, ImageSpan

# Which rows a sequence has here: the images of its trajectory, and int64 [rows], which of the
# trajectory's tokens they are.
Rows = tuple[Sequence[ImageSpan], np.ndarray]


class Expanded(NamedTuple):
    """A text with what stands for its images."""

    tokens: list[int]
    spans: list[ImageSpan]
    sources: list[int]  # Of each token, its number in the text before; -1: it is of an image.


class Vision(ABC):
    """How a model reads images, by its folder's image processor.

    Attributes:
        token: the token that an image is a run of.
        place: the token that is an image's place in a text.
        stop_ids: the policy must not sample them: the engine would take them for an image.
        sees_ahead: in which layers' attention the tokens of an image see the later ones of the same
            image.
        max_images: how many the engine takes in a context.
        left_out: beginnings of the names of weights for which an engine that is sent images, and
            nothing else beside text, has no place.
    """

    token: int
    place: int
    stop_ids: tuple[int, ...]
    sees_ahead: Literal["never", "windowed", "always"] = "never"
    left_out: tuple[str, ...] = ()

    def __init__(self, folder: Path, max_images: int = 0):
        """Load the processor of the model in `folder`."""
        self.max_images = max_images
        self.processor = AutoImageProcessor.from_pretrained(folder)

    @abstractmethod
    def num_tokens(self, url: str) -> int:
        """Return how many tokens an image has.

        Raises:
            BadImage: it is too narrow.
        """

    @abstractmethod
    def side(self, num_tokens: int) -> int:
        """Return the side in pixels of a square image of about so many tokens, or fewer."""

    @abstractmethod
    def expand(self, ids: list[int], urls: Sequence[str], begin: int = 0) -> Expanded:
        """Put what stands for each image in its place.

        Args:
            ids: token ids with one token for each image.
            urls: the images, in their order.
            begin: number of the first of `ids` in its sequence, from which the spans count.

        Raises:
            BadImage: there are more or fewer images than places for them.
        """

    @abstractmethod
    def unexpanded(self, tokens: list[int], spans: Sequence[ImageSpan]) -> list[int]:
        """Return the tokens with one token for each image, as the engine takes them.

        Raises:
            BadImage: the engine would make other tokens of it.
        """

    @abstractmethod
    def batch(self, sequences: Sequence[Rows], device: torch.device) -> ImageBatch:
        """Return the images of a micro-batch, each once.

        Without any image there is a blank one that no row reads, because the tower's shards are
        gathered by all ranks or by none.

        Args:
            sequences: of the micro-batch, end to end.
            device: where the tensors are to be.
        """

    def replace_places(
        self,
        ids: list[int],
        urls: Sequence[str],
        begin: int,
        *,
        before: list[int],
        behind: list[int],
    ) -> Expanded:
        """Put the token of each image in its place, as often as it has tokens, between others.

        Arguments and errors are those of `expand`, and what stands before each image and behind it.
        """
        self.check_places(ids, urls)
        waiting = iter(urls)
        out = Expanded([], [], [])
        for number, token in enumerate(ids):
            if token != self.place:
                out.tokens.append(token)
                out.sources.append(number)
                continue
            url = next(waiting)
            image = [self.token] * self.num_tokens(url)
            start = begin + len(out.tokens) + len(before)
            out.spans.append(ImageSpan(start, len(image), url))
            shown = [*before, *image, *behind]
            out.tokens.extend(shown)
            out.sources.extend([-1] * len(shown))
        return out

    def check_ring(self, is_ring: bool) -> None:
        """Raise UserError if attention is on a ring of ranks and images do not allow that."""
        require(
            not is_ring or self.sees_ahead == "never",
            "the tokens of an image see later ones, which may be those of another rank with "
            "parallel.context_engine = 'ring'; take all_gather",
        )

    def check_places(self, ids: list[int], urls: Sequence[str]) -> None:
        """Raise BadImage if there are more or fewer images than places for them."""
        num_places = ids.count(self.place)
        if num_places != len(urls):
            raise BadImage(
                f"a text with {num_places} tokens for images came with {len(urls)} images; a text "
                "must not hold such tokens of its own"
            )


def number_images(sequences: Sequence[Rows]) -> dict[str, int]:
    """Return the images that are needed, by their URLs, each with a number.

    One that begins behind the last row of a sequence is not.
    """
    numbers: dict[str, int] = {}
    for spans, tokens in sequences:
        for span in spans:
            if span.start <= tokens.max():
                numbers.setdefault(span.url, len(numbers))
    return numbers


def number_features(
    sequences: Sequence[Rows], numbers: dict[str, int], first_features: np.ndarray
) -> np.ndarray:
    """Return the feature of each row of all sequences, end to end; -1: it is no part of an image.

    Args:
        sequences: of the micro-batch.
        numbers: of the images.
        first_features: of each image, its first row of the tower's output.
    """
    parts = []
    for spans, tokens in sequences:
        features = np.full(length_of(spans, tokens), -1)
        for start, num_tokens, url in spans:
            if url in numbers:
                first = first_features[numbers[url]]
                features[start : start + num_tokens] = first + np.arange(num_tokens)
        parts.append(features[tokens])
    return np.concatenate(parts)


def length_of(spans: Sequence[ImageSpan], tokens: np.ndarray) -> int:
    """Return a length that has room for the rows and the images of a sequence."""
    return max([tokens.max() + 1, *(span.start + span.num_tokens for span in spans)])
