"""ImageBatch: on the host data URLs (equal where the image is, and in JSON as they stand), among
the tokens runs of one token, for the model patches of pixels.

As in Qwen2-VL (arXiv 2409.12191, sec. 2.1): of h x w patches, merge_size squared of them are a
token, and every token has three rotary positions, in time, height and width.
"""

import base64
import functools
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoConfig, AutoImageProcessor

from minirl.errors import UserError


class ImageSpan(NamedTuple):
    """An image among the tokens of a sequence."""

    place: int  # of its first token
    num: int  # of its tokens
    url: str  # A data URL: the image itself.


@dataclass(kw_only=True)
class ImageBatch:
    """Those of a micro-batch, each once, and the rows that they are in."""

    pixels: Tensor  # float32 [P, D]: patches.
    grids: Tensor  # int64 [I, 3]: how many patches an image has in time, height and width.
    rows: Tensor  # int64 [N]: whose input token stands for a part of an image,
    features: Tensor  # int64 [N]: and for which of the tower's outputs.
    positions: Tensor  # int64 [3, T]: of every row, in time, height and width.


class BadImage(UserError):
    """An image that cannot be read, or that has no place in its chat."""


def to_url(image: object) -> str:
    """Of a data URL, a path, the bytes of a file, a PIL image, or what `datasets` makes of one that
    it did not decode. Raises BadImage.
    """
    image = (image.get("bytes") or image.get("path")) if isinstance(image, dict) else image
    if isinstance(image, Image.Image):
        image.save(file := io.BytesIO(), "PNG")
        image = file.getvalue()
    if isinstance(image, str) and not image.startswith("data:"):
        try:
            image = Path(image).read_bytes()
        except OSError as error:
            raise BadImage(
                f"image {image[:200]!r} cannot be read ({error}); give a path, bytes, a PIL image or a data URL"
            ) from error
    if not isinstance(image, bytes | str):
        raise BadImage(
            f"an image is a path, bytes, a PIL image or a data URL, not a {type(image).__name__}"
        )
    url = (
        image if isinstance(image, str) else f"data:image;base64,{base64.b64encode(image).decode()}"
    )
    rgb(url)
    return url


@functools.lru_cache(maxsize=64)  # the samples of a prompt read the same one
def rgb(url: str) -> Image.Image:
    """Its pixels. Raises BadImage if it is no image, or too large a one."""
    try:
        return Image.open(
            io.BytesIO(base64.b64decode(url.partition(",")[2], validate=True))
        ).convert("RGB")
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise BadImage(f"an image cannot be read ({error}): {url[:60]!r}") from error


def attach(messages: list[dict], images: Iterable[object]) -> list[dict]:
    """The chat with these images where parts {"type": "image"} wait for one; if none does, before
    the text of the user's first message (or the last one, if none is the user's). OpenAI's
    `image_url` becomes such a part. Raises BadImage if there are more or fewer images than wait.
    """
    urls, parts = (
        [to_url(image) for image in images],
        [part for m in messages for part in _parts(m)],
    )
    if urls and not any(map(_waits, parts)):
        at = next((i for i, m in enumerate(messages) if m["role"] == "user"), len(messages) - 1)
        content = [{"type": "image", "image": url} for url in urls] + (
            _parts(messages[at]) or [{"type": "text", "text": messages[at]["content"]}]
        )
        return attach(
            [*messages[:at], messages[at] | {"content": content}, *messages[at + 1 :]], ()
        )
    if sum(map(_waits, parts)) != len(urls):
        raise BadImage(
            f"a chat with places for {sum(map(_waits, parts))} images came with {len(urls)} of them: {str(messages)[:200]}"
        )
    rest = iter(urls)

    def settle(part: dict) -> dict:
        found = (
            part["image_url"]["url"]
            if part["type"] == "image_url"
            else next(rest)
            if _waits(part)
            else part.get("image")
        )
        return {"type": "image", "image": to_url(found)} if found else part

    return [
        m | {"content": [settle(part) for part in _parts(m)]} if _parts(m) else m for m in messages
    ]


def of_chat(messages: list[dict]) -> list[str]:
    """The images that `attach` put there, in their order."""
    return [part["image"] for m in messages for part in _parts(m) if part["type"] == "image"]


def plain(prompt: str | list[dict]) -> str | list[dict]:
    """For people: messages whose content is a text, with "[image]" where one is."""
    if isinstance(prompt, str):
        return prompt
    return [
        m
        | {
            "content": "".join(
                "[image]" if part["type"] == "image" else part["text"] for part in _parts(m)
            )
        }
        if _parts(m)
        else m
        for m in prompt
    ]


def _parts(message: dict) -> list[dict]:
    return message["content"] if isinstance(message.get("content"), list) else []


def _waits(part: dict) -> bool:
    return part["type"] == "image" and part.get("image") is None


class Vision:
    """How a model reads images, by its folder's image processor."""

    def __init__(self, folder: Path, max_images: int = 0):
        """`max_images`: that the engine takes in a context."""
        self.max_images = max_images
        self.processor = AutoImageProcessor.from_pretrained(folder)
        self.token = AutoConfig.from_pretrained(folder).image_token_id
        self.merge = self.processor.merge_size

    def num_tokens(self, url: str) -> int:
        """Raises BadImage if it is too narrow."""
        width, height = rgb(url).size
        try:
            return self.processor.get_number_of_image_patches(height, width) // self.merge**2
        except ValueError as error:
            raise BadImage(
                f"an image of {width} x {height} pixels cannot be read ({error}): {url[:60]!r}"
            ) from error

    def expand(
        self, ids: list[int], urls: Sequence[str], begin: int = 0
    ) -> tuple[list[int], list[ImageSpan]]:
        """Tokens with one for each image -> with as many as the image has, and where they are,
        counted from `begin`. Raises BadImage if there are more or fewer images than tokens for
        them.
        """
        if ids.count(self.token) != len(urls):
            raise BadImage(
                f"a text with {ids.count(self.token)} tokens for images came with {len(urls)} images; a text must not hold such tokens of its own"
            )
        out, placed, rest = [], [], iter(urls)
        for token in ids:
            if token == self.token:
                placed.append(ImageSpan(begin + len(out), self.num_tokens(url := next(rest)), url))
            out += [token] * (placed[-1].num if token == self.token else 1)
        return out, placed

    def batch(
        self, sequences: list[tuple[list[ImageSpan], np.ndarray]], device: torch.device
    ) -> ImageBatch:
        """`sequences`: the images of a trajectory, and which of its tokens are rows here. Each
        image is there once. Without any there is a blank one that no row reads, because the tower's
        shards are gathered by all ranks or by none.
        """
        used = [
            ([p for p in placed if p.place <= tokens.max()], tokens) for placed, tokens in sequences
        ]
        urls = list(dict.fromkeys(p.url for placed, _ in used for p in placed))
        blank = Image.new("RGB", (self.merge * self.processor.patch_size,) * 2)
        patches = self.processor(list(map(rgb, urls)) or [blank], return_tensors="pt")
        grids = (
            patches["image_grid_thw"].numpy() // (1, self.merge, self.merge)
        ).tolist()  # in tokens
        grid, first = (
            dict(zip(urls, grids, strict=False)),
            dict(zip(urls, np.cumsum([0, *map(np.prod, grids)]).tolist(), strict=False)),
        )
        features, positions = [], []
        for placed, tokens in used:
            length = max([tokens.max() + 1, *(p.place + p.num for p in placed)])
            which, where = np.full(length, -1), np.tile(np.arange(length), (3, 1))
            for p in placed:
                own = slice(p.place, p.place + p.num)
                which[own] = first[p.url] + np.arange(p.num)
                where[:, own.stop :] += (
                    max(grid[p.url][1:]) - p.num
                )  # what follows goes on behind the longer side
                where[:, own] = where[0, p.place] + np.indices(grid[p.url]).reshape(3, -1)
            features.append(which[tokens])
            positions.append(where[:, tokens])
        features = np.concatenate(features)
        rows = np.flatnonzero(features >= 0)
        return ImageBatch(
            pixels=patches["pixel_values"].to(device),
            grids=patches["image_grid_thw"].to(device),
            rows=torch.from_numpy(rows).to(device),
            features=torch.from_numpy(features[rows]).to(device),
            positions=torch.from_numpy(np.concatenate(positions, axis=1)).to(device),
        )


def sampling_stops(stop_ids: list[int], vision: Vision | None) -> tuple[int, ...]:
    """What ends an answer. A policy that says the token of an image has ended, too: the engine
    would take it for the place of the next one.
    """
    return (*stop_ids, vision.token) if vision else tuple(stop_ids)
