"""How a model reads images: runs of one token in a sequence, and pixels for its tower.

A text has one token for each image, its place. Before the model reads it, that token is replaced by
what stands for the image, which is mostly one token again and again. The engine does that itself,
so it gets the text with the places.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer, PretrainedConfig

from minirl.data.images import BadImage, ImageSpan, rgb
from minirl.errors import require

# Which rows a sequence has here: the images of its trajectory, and int64 [rows], which of the
# trajectory's tokens they are.
Rows = tuple[Sequence[ImageSpan], np.ndarray]


@dataclass(kw_only=True)
class ImageBatch:
    """The images of a micro-batch, each once, and the rows that they are in."""

    pixels: Tensor  # float32 [P, D], the patches of all images end to end; or [I, 3, H, W].
    # The N rows whose input token is a part of an image, and for each the row of the vision tower's
    # output that stands in its place.
    rows: Tensor  # int64 [N]
    features: Tensor  # int64 [N]
    # Of Qwen's: int64 [I, 3], how many patches an image has in time, height and width; and
    # int64 [3, T], the rotary positions of every row in these.
    grids: Tensor | None = None
    positions: Tensor | None = None


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
        sees_ahead: in attention the tokens of an image see the later ones of the same image.
        max_images: how many the engine takes in a context.
    """

    token: int
    place: int
    stop_ids: tuple[int, ...]
    sees_ahead = False

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

    def check_ring(self, is_ring: bool) -> None:
        """Raise UserError if attention is on a ring of ranks and images do not allow that."""
        require(
            not (is_ring and self.sees_ahead),
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


def _number(sequences: Sequence[Rows]) -> dict[str, int]:
    """Return the images that are needed, by their URLs, each with a number.

    One that begins behind the last row of a sequence is not.
    """
    numbers: dict[str, int] = {}
    for spans, tokens in sequences:
        for span in spans:
            if span.start <= tokens.max():
                numbers.setdefault(span.url, len(numbers))
    return numbers


def _features(
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
        features = np.full(_length(spans, tokens), -1)
        for start, num_tokens, url in spans:
            if url in numbers:
                first = first_features[numbers[url]]
                features[start : start + num_tokens] = first + np.arange(num_tokens)
        parts.append(features[tokens])
    return np.concatenate(parts)


def _length(spans: Sequence[ImageSpan], tokens: np.ndarray) -> int:
    """Return a length that has room for the rows and the images of a sequence."""
    return max([tokens.max() + 1, *(span.start + span.num_tokens for span in spans)])


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
        self.check_places(ids, urls)
        waiting = iter(urls)
        out = Expanded([], [], [])
        for number, token in enumerate(ids):
            if token != self.place:
                out.tokens.append(token)
                out.sources.append(number)
                continue
            url = next(waiting)
            num_tokens = self.num_tokens(url)
            out.spans.append(ImageSpan(begin + len(out.tokens), num_tokens, url))
            out.tokens.extend([token] * num_tokens)
            out.sources.extend([-1] * num_tokens)
        return out

    def unexpanded(self, tokens: list[int], spans: Sequence[ImageSpan]) -> list[int]:
        """Return the tokens with one token for each image, as the engine takes them."""
        out = list(tokens)
        for span in reversed(spans):
            del out[span.start + 1 : span.start + span.num_tokens]
        return out

    def batch(self, sequences: Sequence[Rows], device: torch.device) -> ImageBatch:
        """Return the images of a micro-batch, each once."""
        numbers = _number(sequences)
        blank = Image.new("RGB", (self.merge_size * self.processor.patch_size,) * 2)
        patches = self.processor([rgb(url) for url in numbers] or [blank], return_tensors="pt")
        # How many tokens each image has in time, height and width.
        grids = patches["image_grid_thw"].numpy() // (1, self.merge_size, self.merge_size)
        first_features = np.cumsum([0, *grids.prod(axis=1)])
        features = _features(sequences, numbers, first_features)
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
        positions = np.tile(np.arange(_length(spans, tokens)), (3, 1))
        for start, num_tokens, url in spans:
            if url not in numbers:
                continue
            end = start + num_tokens
            grid = grids[numbers[url]]
            # What follows goes on behind the longer side.
            positions[:, end:] += grid[1:].max() - num_tokens
            positions[:, start:end] = positions[0, start] + np.indices(grid).reshape(3, -1)
        return positions[:, tokens]


class GemmaVision(Vision):
    """Every image is made a square of one size, and has the same number of tokens.

    Before them stand two newlines and the token that is an image's place in a text, behind them
    one that ends it and two newlines: Gemma 3, arXiv 2503.19786, sec. 2.1. Newlines side by side
    are one token, which the tokenizer would have made of them.
    """

    sees_ahead = True

    def __init__(self, folder: Path, max_images: int = 0):
        """Load the processor of the model in `folder`, and what its tokenizer calls newlines.

        Raises:
            UserError: the processor cuts images into several.
        """
        super().__init__(folder, max_images)
        require(
            not self.processor.do_pan_and_scan,
            f"{folder}/preprocessor_config.json: do_pan_and_scan is set, which makes several "
            "images of one; set it to false",
        )
        config = AutoConfig.from_pretrained(folder)
        window = config.text_config.sliding_window
        require(
            config.mm_tokens_per_image <= window,
            f"{folder}/config.json: mm_tokens_per_image = {config.mm_tokens_per_image} is above "
            f"sliding_window = {window}, and the library and vLLM hide other tokens of an image "
            "then; take a model whose images fit into its window",
        )
        self.token = config.image_token_index
        self.place = config.boi_token_index
        self.end = config.eoi_token_index
        self.stop_ids = (self.token, self.place)
        self.tokens_per_image = config.mm_tokens_per_image
        vocabulary = AutoTokenizer.from_pretrained(folder).get_vocab()
        one, two, three, four = (vocabulary["\n" * n] for n in (1, 2, 3, 4))
        self.newlines = two
        # Two tokens -> the one that is both, in the order in which the engine joins them.
        self.joined = {(one, two): three, (two, one): three, (two, two): four}

    def num_tokens(self, url: str) -> int:
        """Return how many tokens an image has. Raises BadImage if it cannot be read."""
        rgb(url)
        return self.tokens_per_image

    def side(self, num_tokens: int) -> int:
        """Return the side in pixels of an image: any is made as large as the tower wants it."""
        return self.processor.size["height"]

    def expand(self, ids: list[int], urls: Sequence[str], begin: int = 0) -> Expanded:
        """Put what stands for each image in its place, and join newlines beside it."""
        self.check_places(ids, urls)
        image = [self.newlines, self.place, *[self.token] * self.tokens_per_image]
        image += [self.end, self.newlines]
        tokens: list[int] = []
        sources: list[int] = []
        for number, token in enumerate(ids):
            if token == self.place:
                tokens += image
                sources += [-1] * len(image)
            else:
                tokens.append(token)
                sources.append(number)
        for pair, both in self.joined.items():
            self.join(tokens, sources, pair, both)

        places = [i for i, token in enumerate(tokens) if token == self.place]
        spans = [
            ImageSpan(begin + place + 1, self.tokens_per_image, url)
            for place, url in zip(places, urls, strict=True)
        ]
        return Expanded(tokens, spans, sources)

    def join(self, tokens: list[int], sources: list[int], pair: tuple[int, int], both: int) -> None:
        """Put one token in the place of two, in place, wherever these are beside an image."""
        for i in reversed(range(len(tokens) - 1)):
            is_before = tokens[i + 2 : i + 3] == [self.place]
            is_behind = i > 0 and tokens[i - 1] == self.end
            if (tokens[i], tokens[i + 1]) == pair and (is_before or is_behind):
                tokens[i : i + 2] = [both]
                sources[i : i + 2] = [-1]

    def unexpanded(self, tokens: list[int], spans: Sequence[ImageSpan]) -> list[int]:
        """Return the tokens with one token for each image, as the engine takes them.

        Raises:
            BadImage: the engine would make other tokens of it.
        """
        # What is left of joined newlines without those of an image.
        left = {both: pair[pair[0] == self.newlines] for pair, both in self.joined.items()}
        out = list(tokens)
        for span in reversed(spans):
            behind = span.start + span.num_tokens + 1
            out[behind : behind + 1] = [left[out[behind]]] if out[behind] in left else []
            place = span.start - 1
            del out[place + 1 : behind]
            before = out[place - 1]
            out[place - 1 : place] = [left[before]] if before in left else []
        urls = [span.url for span in spans]
        if self.expand(out, urls).tokens != tokens:
            raise BadImage(
                "newlines beside an image are tokens that the engine would join; let a text with "
                "an image begin with other characters"
            )
        return out

    def batch(self, sequences: Sequence[Rows], device: torch.device) -> ImageBatch:
        """Return the images of a micro-batch, each once."""
        numbers = _number(sequences)
        blank = Image.new("RGB", (8, 8))
        pictures = [rgb(url) for url in numbers] or [blank]
        pixels = self.processor(pictures, return_tensors="pt")["pixel_values"]
        first_features = self.tokens_per_image * np.arange(len(pictures))
        features = _features(sequences, numbers, first_features)
        rows = np.flatnonzero(features >= 0)
        return ImageBatch(
            pixels=pixels.to(device),
            rows=torch.from_numpy(rows).to(device),
            features=torch.from_numpy(features[rows]).to(device),
        )


def read_vision(folder: Path, max_images: int = 0) -> Vision:
    """Return how the model in `folder` reads images, of which the engine takes `max_images`."""
    config: PretrainedConfig = AutoConfig.from_pretrained(folder)
    kind = GemmaVision if config.model_type == "gemma3" else QwenVision
    return kind(folder, max_images)


def sampling_stops(stop_ids: list[int], vision: Vision | None) -> tuple[int, ...]:
    """Return what ends an answer.

    A policy that samples the token of an image has ended, too: the engine would take it for the
    place of the next one.
    """
    return (*stop_ids, *vision.stop_ids) if vision else tuple(stop_ids)
