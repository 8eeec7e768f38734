"""How a model reads images: runs of one token in a sequence, and pixels for its tower.

A text has one token for each image, its place. Before the model reads it, that token is replaced by
what stands for the image, which is mostly one token again and again. The engine does that itself,
so it gets the text with the places.
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer, PretrainedConfig

from minirl.base.errors import require
from minirl.base.reading import library_reads
from minirl.data.images import BadImage, blank, rgb
from minirl.types.packed import ImageBatch, ImageSpan

# Which rows of a sequence a rank has: the images of its trajectory, and int64 [rows], which of the
# trajectory's tokens they are.
SequenceRows = tuple[Sequence[ImageSpan], np.ndarray]


class Expanded(NamedTuple):
    """A text with what stands for its images."""

    tokens: list[int]
    spans: list[ImageSpan]
    sources: list[int]  # The number of each token in the text before; -1: it is of an image.


class Vision(ABC):
    """How a model reads images, by its folder's image processor.

    Attributes:
        token: the token that an image is a run of.
        place: the token that is an image's place in a text.
        before, after: the tokens that enclose the run of an image and are not in a text.
        stop_ids: the policy must not sample them: the engine would take them for an image.
        sees_ahead: in which layers' attention the tokens of an image see the later ones of the same
            image.
        max_images: how many the engine takes in a context.
        left_out: beginnings of the names of weights for which an engine that gets images, but no
            sounds or videos, has no place.
    """

    token: int
    place: int
    before: Sequence[int] = ()
    after: Sequence[int] = ()
    stop_ids: tuple[int, ...]
    sees_ahead: Literal["never", "windowed", "always"] = "never"
    left_out: tuple[str, ...] = ()

    def __init__(self, folder: Path, max_images: int = 0):
        """Load the processor of the model in `folder`."""
        self.max_images = max_images
        with library_reads(f"the image processor of {folder} (*processor_config.json)"):
            self.processor = AutoImageProcessor.from_pretrained(folder)

    def num_tokens(self, url: str) -> int:
        """Return how many tokens an image has.

        Raises:
            BadImage: it cannot be read, or is too narrow.
        """
        width, height = rgb(url).size
        try:
            return self.tokens_of_size(height, width)
        except ValueError as error:
            raise BadImage(
                f"an image of {width} x {height} pixels cannot be read ({error}); cut or pad it, "
                "or leave it out"
            ) from error

    @abstractmethod
    def tokens_of_size(self, height: int, width: int) -> int:
        """Return how many tokens an image of this size has; ValueError: it is too narrow."""

    @abstractmethod
    def side(self, num_tokens: int) -> int:
        """Return the side in pixels of a square image of about so many tokens, or fewer."""

    @abstractmethod
    def count_tokens(self, inputs: Any) -> np.ndarray:
        """Return how many tokens each image has in the processor's output, int64 [I]."""

    def place_patches(
        self, inputs: Any, sequences: Sequence[SequenceRows], numbers: dict[str, int]
    ) -> dict[str, Tensor]:
        """Return the fields of ImageBatch that say where patches lie, if the model needs any."""
        return {}

    def read_pixels(self, urls: Sequence[str]) -> Any:
        """Return the processor's output for some images, or for a blank one if there are none."""
        pictures = [rgb(url) for url in urls] or [blank(self.side(1))]
        return self.processor(pictures, return_tensors="pt")

    def expand(self, ids: list[int], urls: Sequence[str], begin: int = 0) -> Expanded:
        """Put what stands for each image in its place.

        Args:
            ids: token ids with one token for each image.
            urls: the images, in their order.
            begin: number of the first of `ids` in its sequence, from which the spans count.

        Raises:
            BadImage: there are more or fewer images than places for them.
        """
        num_places = ids.count(self.place)
        if num_places != len(urls):
            raise BadImage(
                f"a text with {num_places} tokens for images came with {len(urls)} images; a text "
                "must not hold other such tokens"
            )
        waiting = iter(urls)
        out = Expanded([], [], [])
        for number, token in enumerate(ids):
            if token != self.place:
                out.tokens.append(token)
                out.sources.append(number)
                continue
            url = next(waiting)
            image = [self.token] * self.num_tokens(url)
            start = begin + len(out.tokens) + len(self.before)
            out.spans.append(ImageSpan(start, len(image), url))
            shown = [*self.before, *image, *self.after]
            out.tokens.extend(shown)
            out.sources.extend([-1] * len(shown))
        return out

    def unexpanded(self, tokens: list[int], spans: Sequence[ImageSpan]) -> list[int]:
        """Return the tokens with one token for each image, as the engine takes them.

        Raises:
            BadImage: the engine would make other tokens of it.
        """
        out = list(tokens)
        for span in reversed(spans):
            first = span.start - len(self.before)
            out[first : span.start + span.num_tokens + len(self.after)] = [self.place]
        return out

    def batch(self, sequences: Sequence[SequenceRows], device: torch.device) -> ImageBatch:
        """Return the images of a micro-batch, each once.

        Without any image there is a blank one that no row reads, because the tower's shards are
        gathered by all ranks or by none.

        Args:
            sequences: the sequences of the micro-batch, end to end.
            device: where the tensors are to be, but for the pixels.
        """
        # 1. The images that are needed, each with a number. One that begins after the last row of
        # a sequence is not.
        numbers: dict[str, int] = {}
        for spans, tokens in sequences:
            for span in spans:
                if span.start <= tokens.max():
                    numbers.setdefault(span.url, len(numbers))
        inputs = self.read_pixels(list(numbers))
        # The first row of each image in the output of the tower.
        first_features = np.cumsum([0, *self.count_tokens(inputs)])

        # 2. The row of that output for each row of the sequences; -1: it is no part of an image.
        parts = []
        for spans, tokens in sequences:
            features = np.full(_length(spans, tokens), -1)
            for start, num_tokens, url in spans:
                if url in numbers:
                    first = first_features[numbers[url]]
                    features[start : start + num_tokens] = first + np.arange(num_tokens)
            parts.append(features[tokens])
        all_features = np.concatenate(parts)
        rows = np.flatnonzero(all_features >= 0)
        places = self.place_patches(inputs, sequences, numbers)
        return ImageBatch(
            pixels=inputs["pixel_values"],
            rows=torch.from_numpy(rows).to(device),
            features=torch.from_numpy(all_features[rows]).to(device),
            **{name: tensor.to(device) for name, tensor in places.items()},
        )

    def check_ring(self, is_ring: bool) -> None:
        """Raise UserError if attention is on a ring of ranks and images do not allow that."""
        require(
            not is_ring or self.sees_ahead == "never",
            "the tokens of an image see later ones, which may be those of another rank with "
            "parallel.context_engine = 'ring'; take all_gather",
        )


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

    def tokens_of_size(self, height: int, width: int) -> int:
        """Return how many tokens an image of this size has; ValueError: it is too narrow."""
        return self.processor.get_number_of_image_patches(height, width) // self.merge_size**2

    def side(self, num_tokens: int) -> int:
        """Return the side in pixels of a square image of at most so many tokens."""
        return int(num_tokens**0.5) * self.merge_size * self.processor.patch_size

    def count_tokens(self, inputs: Any) -> np.ndarray:
        """Return how many tokens each image has."""
        return self._grids(inputs).prod(axis=1)

    def _grids(self, inputs: Any) -> np.ndarray:
        """Return how many tokens each image has in time, height and width, int64 [I, 3]."""
        return inputs["image_grid_thw"].numpy() // (1, self.merge_size, self.merge_size)

    def place_patches(
        self, inputs: Any, sequences: Sequence[SequenceRows], numbers: dict[str, int]
    ) -> dict[str, Tensor]:
        """Return the grids of the images, and the positions of all rows."""
        grids = self._grids(inputs)
        positions = []
        for spans, tokens in sequences:
            # Of the sequence's tokens, in time, height and width.
            found = np.tile(np.arange(_length(spans, tokens)), (3, 1))
            for start, num_tokens, url in spans:
                if url not in numbers:
                    continue
                end = start + num_tokens
                grid = grids[numbers[url]]
                # What follows continues after the longer side.
                found[:, end:] += grid[1:].max() - num_tokens
                found[:, start:end] = found[0, start] + np.indices(grid).reshape(3, -1)
            positions.append(found[:, tokens])
        return {
            "grids": inputs["image_grid_thw"],
            "positions": torch.from_numpy(np.concatenate(positions, axis=1)),
        }


class GemmaVision(Vision):
    """Every image is made a square of one size, and has the same number of tokens.

    Before them stand two newlines and the token that is an image's place in a text, after them
    one that ends it and two newlines: Gemma 3, arXiv 2503.19786, sec. 2.1. Newlines side by side
    are one token, which the tokenizer would have made of them.
    """

    sees_ahead = "always"

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
        where = f"{folder}/config.json: mm_tokens_per_image"
        _check_window(where, config.mm_tokens_per_image, config.text_config)
        vocabulary = AutoTokenizer.from_pretrained(folder).get_vocab()
        one, two, three, four = (vocabulary["\n" * n] for n in (1, 2, 3, 4))
        self.newline = one
        # Two tokens -> the one that is both, in the order in which the engine joins them.
        self.joined = {(one, two): three, (two, one): three, (two, two): four}
        self.newlines = two
        self.token = config.image_token_index
        self.place = config.boi_token_index
        self.end = config.eoi_token_index
        self.before = (self.newlines, self.place)
        self.after = (self.end, self.newlines)
        self.stop_ids = (self.token, self.place)
        self.tokens_per_image = config.mm_tokens_per_image

    def tokens_of_size(self, height: int, width: int) -> int:
        """Return how many tokens an image of any size has."""
        return self.tokens_per_image

    def side(self, num_tokens: int) -> int:
        """Return the side in pixels of an image: any is made as large as the tower wants it."""
        return self.processor.size["height"]

    def count_tokens(self, inputs: Any) -> np.ndarray:
        """Return how many tokens each image has."""
        return np.full(len(inputs["pixel_values"]), self.tokens_per_image)

    def expand(self, ids: list[int], urls: Sequence[str], begin: int = 0) -> Expanded:
        """Put what stands for each image in its place, and join the newlines next to it."""
        tokens, _, sources = super().expand(ids, urls)
        for pair, both in self.joined.items():
            self.join(tokens, sources, pair, both)
        places = [i for i, token in enumerate(tokens) if token == self.place]
        spans = [
            ImageSpan(begin + place + 1, self.tokens_per_image, url)
            for place, url in zip(places, urls, strict=True)
        ]
        return Expanded(tokens, spans, sources)

    def join(self, tokens: list[int], sources: list[int], pair: tuple[int, int], both: int) -> None:
        """Put one token in the place of two, in place, wherever these are next to an image."""
        for i in reversed(range(len(tokens) - 1)):
            is_before = tokens[i + 2 : i + 3] == [self.place]
            is_after = i > 0 and tokens[i - 1] == self.end
            if (tokens[i], tokens[i + 1]) == pair and (is_before or is_after):
                tokens[i : i + 2] = [both]
                sources[i : i + 2] = [-1]

    def split_behind_images(self, tokens: list[int]) -> tuple[list[int], list[int]]:
        """Return the tokens with three newlines behind an image as its two and the text's one.

        And of each the number of the token that it was.
        """
        both = self.joined[(self.newlines, self.newline)]
        split: list[int] = []
        origins: list[int] = []
        for i, token in enumerate(tokens):
            parts = [token]
            if token == both and i > 0 and tokens[i - 1] == self.end:
                parts = [self.newlines, self.newline]
            split += parts
            origins += [i] * len(parts)
        return split, origins

    def unexpanded(self, tokens: list[int], spans: Sequence[ImageSpan]) -> list[int]:
        """Return the tokens with one token for each image, as the engine takes them.

        Raises:
            BadImage: the engine would make other tokens of it.
        """
        # What is left of joined newlines without those of an image.
        left = {both: pair[pair[0] == self.newlines] for pair, both in self.joined.items()}
        out = list(tokens)
        for span in reversed(spans):
            after = span.start + span.num_tokens + 1
            out[after : after + 1] = [left[out[after]]] if out[after] in left else []
            place = span.start - 1
            del out[place + 1 : after]
            before = out[place - 1]
            out[place - 1 : place] = [left[before]] if before in left else []
        urls = [span.url for span in spans]
        if self.expand(out, urls).tokens != tokens:
            raise BadImage(
                "newlines next to an image are tokens that the engine would join; let a text with "
                "an image begin with other characters"
            )
        return out


class Gemma4Vision(Vision):
    """Images keep their shape: pooling_kernel_size squared of their h x w patches are one token.

    Each is made as large as its most tokens allow. Before its tokens stands one that begins it,
    after them one that ends it: the library's Gemma4Processor.replace_image_token. Large models
    see ahead in layers with a window, small ones never: its create_masks_for_vision_model.
    """

    left_out = ("model.audio_tower.", "model.embed_audio.")

    def __init__(self, folder: Path, max_images: int = 0):
        """Load the processor of the model in `folder`.

        Raises:
            UserError: there is no tower, or an image does not fit into a window, or has other
                tokens in vLLM.
        """
        config = AutoConfig.from_pretrained(folder)
        require(
            config.vision_config is not None,
            f"{folder}/config.json: vision_config is null, and family gemma4 has a tower for "
            "images; take a checkpoint with one, or of the language model alone (gemma4_text)",
        )
        super().__init__(folder, max_images)
        text = config.text_config
        self.most_tokens = self.processor.max_soft_tokens
        if text.use_bidirectional_attention == "vision":
            self.sees_ahead = "windowed"
            where = f"{folder}: max_soft_tokens of its image processor"
            _check_window(where, self.most_tokens, text)
        in_engine = config.vision_config.to_dict().get("default_output_length", self.most_tokens)
        require(
            in_engine == self.most_tokens,
            f"{folder}: max_soft_tokens = {self.most_tokens} of its image processor is not the "
            f"default_output_length = {in_engine} of vision_config, by which vLLM counts the "
            "tokens of an image; make them equal",
        )
        self.token = config.image_token_id
        self.place = self.token
        self.before = (config.boi_token_id,)
        self.after = (config.eoi_token_id,)
        self.stop_ids = (self.token, config.video_token_id, config.audio_token_id)

    def tokens_of_size(self, height: int, width: int) -> int:
        """Return how many tokens an image of this size has; ValueError: it is too narrow."""
        pool = self.processor.pooling_kernel_size
        patch = self.processor.patch_size
        library: Any = sys.modules[type(self.processor).__module__]
        new_height, new_width = library.get_aspect_ratio_preserving_size(
            height, width, patch, self.most_tokens * pool**2, pool
        )
        return new_height * new_width // (patch * pool) ** 2

    def side(self, num_tokens: int) -> int:
        """Return the side in pixels of a square image, which is made as large as any."""
        side = self.processor.pooling_kernel_size * self.processor.patch_size
        return int(self.most_tokens**0.5) * side

    def read_pixels(self, urls: Sequence[str]) -> Any:
        """Return the processor's output; it makes no image of one token, which is blank here."""
        if urls:
            return super().read_pixels(urls)
        pool = self.processor.pooling_kernel_size
        pixels = torch.zeros(1, pool**2, 3 * self.processor.patch_size**2)
        places = torch.cartesian_prod(torch.arange(pool), torch.arange(pool))
        return {"pixel_values": pixels, "image_position_ids": places[None]}

    def count_tokens(self, inputs: Any) -> np.ndarray:
        """Return how many tokens each image has, without the patches that pad it."""
        is_patch = (inputs["image_position_ids"] >= 0).all(-1)
        return is_patch.sum(1).numpy() // self.processor.pooling_kernel_size**2

    def place_patches(
        self, inputs: Any, sequences: Sequence[SequenceRows], numbers: dict[str, int]
    ) -> dict[str, Tensor]:
        """Return the column and the row of each patch."""
        return {"places": inputs["image_position_ids"]}


def _check_window(where: str, num_tokens: int, text: PretrainedConfig) -> None:
    """Refuse a model with images that are larger than a window: each token should see all others.

    Args:
        where: the setting that says how many tokens an image has.
        num_tokens: its value.
        text: the config of the language model.

    Raises:
        UserError: they do not fit.
    """
    require(
        num_tokens <= text.sliding_window,
        f"{where} = {num_tokens} is above sliding_window = {text.sliding_window}, and the library "
        "and vLLM hide other tokens of an image then; lower it, or take a model whose images fit "
        "into its window",
    )


def read_vision(folder: Path, max_images: int = 0) -> Vision:
    """Return how the model in `folder` reads images, of which the engine takes `max_images`."""
    kinds: dict[str, type[Vision]] = {"gemma3": GemmaVision, "gemma4": Gemma4Vision}
    model_type = AutoConfig.from_pretrained(folder).model_type
    return kinds.get(model_type, QwenVision)(folder, max_images)


def sampling_stops(stop_ids: list[int], vision: Vision | None) -> tuple[int, ...]:
    """Return what ends an answer.

    A policy that samples the token of an image has ended, too: the engine would take it for the
    place of the next one.
    """
    return (*stop_ids, *vision.stop_ids) if vision else tuple(stop_ids)
