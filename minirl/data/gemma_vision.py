"""How models of Gemma read images."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig

from minirl.base.errors import require
from minirl.data.images import BadImage, blank, rgb
from minirl.data.vision_base import Expanded, Rows, Vision, number_features, number_images
from minirl.types.images import ImageBatch, ImageSpan


class GemmaVision(Vision):
    """Every image is made a square of one size, and has the same number of tokens.

    Before them stand two newlines and the token that is an image's place in a text, behind them
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
        numbers = number_images(sequences)
        pictures = [rgb(url) for url in numbers] or [blank(self.side(1))]
        pixels = self.processor(pictures, return_tensors="pt")["pixel_values"]
        first_features = self.tokens_per_image * np.arange(len(pictures))
        features = number_features(sequences, numbers, first_features)
        rows = np.flatnonzero(features >= 0)
        return ImageBatch(
            pixels=pixels.to(device),
            rows=torch.from_numpy(rows).to(device),
            features=torch.from_numpy(features[rows]).to(device),
        )


class Gemma4Vision(Vision):
    """Images keep their shape: pooling_kernel_size squared of their h x w patches are one token.

    Each is made as large as its most tokens allow. Before its tokens stands one that begins it,
    behind them one that ends it: the library's Gemma4Processor.replace_image_token. Large models
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
        self.begin = config.boi_token_id
        self.end = config.eoi_token_id
        self.stop_ids = (self.token, config.video_token_id, config.audio_token_id)

    def num_tokens(self, url: str) -> int:
        """Return how many tokens an image has. Raises BadImage if it is too narrow."""
        width, height = rgb(url).size
        pool = self.processor.pooling_kernel_size
        patch = self.processor.patch_size
        library: Any = sys.modules[type(self.processor).__module__]
        try:
            new_height, new_width = library.get_aspect_ratio_preserving_size(
                height, width, patch, self.most_tokens * pool**2, pool
            )
        except ValueError as error:
            raise BadImage(
                f"an image of {width} x {height} pixels cannot be read ({error}): {url[:60]!r}"
            ) from error
        return new_height * new_width // (patch * pool) ** 2

    def side(self, num_tokens: int) -> int:
        """Return the side in pixels of a square image, which is made as large as any."""
        side = self.processor.pooling_kernel_size * self.processor.patch_size
        return int(self.most_tokens**0.5) * side

    def expand(self, ids: list[int], urls: Sequence[str], begin: int = 0) -> Expanded:
        """Put what stands for each image in its place."""
        return self.replace_places(ids, urls, begin, before=[self.begin], behind=[self.end])

    def unexpanded(self, tokens: list[int], spans: Sequence[ImageSpan]) -> list[int]:
        """Return the tokens with one token for each image, as the engine takes them."""
        out = list(tokens)
        for span in reversed(spans):
            out[span.start - 1 : span.start + span.num_tokens + 1] = [self.place]
        return out

    def batch(self, sequences: Sequence[Rows], device: torch.device) -> ImageBatch:
        """Return the images of a micro-batch, each once."""
        numbers = number_images(sequences)
        patches = self._one_token()
        if numbers:
            patches = self.processor([rgb(url) for url in numbers], return_tensors="pt")
        places = patches["image_position_ids"]
        is_patch = (places >= 0).all(-1)
        num_tokens = is_patch.sum(1).numpy() // self.processor.pooling_kernel_size**2
        first_features = np.cumsum([0, *num_tokens])
        features = number_features(sequences, numbers, first_features)
        rows = np.flatnonzero(features >= 0)
        return ImageBatch(
            pixels=patches["pixel_values"].to(device),
            places=places.to(device),
            rows=torch.from_numpy(rows).to(device),
            features=torch.from_numpy(features[rows]).to(device),
        )

    def _one_token(self) -> dict[str, Tensor]:
        """Return a blank image of one token: its processor makes no image that small."""
        pool = self.processor.pooling_kernel_size
        pixels = torch.zeros(1, pool**2, 3 * self.processor.patch_size**2)
        places = torch.cartesian_prod(torch.arange(pool), torch.arange(pool))
        return {"pixel_values": pixels, "image_position_ids": places[None]}


def _check_window(where: str, num_tokens: int, text: PretrainedConfig) -> None:
    """Refuse a model with larger images than a window, of whose tokens each should see all others.

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
