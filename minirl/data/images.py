"""Images: data URLs on the host, runs of one token in a sequence, patches of pixels for the model.

Data URLs are equal where the images are, and stand in JSON as they are. As in Qwen2-VL (arXiv
2409.12191, sec. 2.1), merge_size squared of an image's h x w patches are one token, and every token
has three rotary positions, in time, height and width.
"""

import base64
import contextlib
import io
import itertools
import struct
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoConfig, AutoImageProcessor

from minirl.data.messages import Messages, RowPrompt
from minirl.errors import UserError

# Others are rare, and some of their readers start programs (EPS) or hold further formats (ICO).
# JPEG's opens MPO, too.
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000")
_UNREADABLE = (
    OSError,
    ValueError,
    SyntaxError,
    EOFError,
    IndexError,
    KeyError,
    TypeError,
    OverflowError,
    struct.error,
    Image.DecompressionBombError,
)  # as Pillow's readers raise for files that are damaged


class ImageSpan(NamedTuple):
    """An image among the tokens of a sequence."""

    start: int  # Number of its first token in the sequence.
    num_tokens: int
    url: str  # A data URL: the image itself.


@dataclass(kw_only=True)
class ImageBatch:
    """The images of a micro-batch, each once, and the rows that they are in."""

    pixels: Tensor  # float32 [P, D]: the patches of all images, end to end.
    grids: Tensor  # int64 [I, 3]: how many patches an image has in time, height and width.
    # The N rows whose input token is a part of an image, and for each the row of the vision tower's
    # output that stands in its place.
    rows: Tensor  # int64 [N]
    features: Tensor  # int64 [N]
    positions: Tensor  # int64 [3, T]: rotary positions of every row in time, height and width.


class BadImage(UserError):
    """An image that cannot be read, or that has no place in its chat."""


def to_url(image: object) -> str:
    """Return an image as a data URL.

    Args:
        image: a data URL, a path, the bytes of a file, a PIL image, or what `datasets` makes of an
            image that it did not decode: {"bytes": bytes or None, "path": path}.

    Raises:
        BadImage: it is none of these, or cannot be read.
    """
    if isinstance(image, dict):
        image = image.get("bytes") or image.get("path")
    if isinstance(image, Image.Image):
        file = io.BytesIO()
        image.save(file, "PNG")
        image = file.getvalue()
    if isinstance(image, str) and not image.startswith("data:"):
        try:
            image = Path(image).read_bytes()
        except (OSError, ValueError) as error:  # ValueError: a name that no file can have
            raise BadImage(
                f"image {image[:200]!r} cannot be read ({error}); give a path, bytes, a PIL image "
                "or a data URL"
            ) from error
    if isinstance(image, bytes):
        image = f"data:image;base64,{base64.b64encode(image).decode()}"
    if not isinstance(image, str):
        raise BadImage(
            f"an image is a path, bytes, a PIL image or a data URL, not a {type(image).__name__}"
        )
    rgb(image)
    return image


def rgb(url: str) -> Image.Image:
    """Return the pixels of a data URL, which nobody may change.

    Raises:
        BadImage: it holds no image, or one that is too large.
    """
    picture = _decoded.get(url)
    if picture is None:
        with _open(url) as image:
            picture = image.convert("RGB")
        _decoded.put(url, picture)
    return picture


def size(url: str) -> tuple[int, int]:
    """Return (width, height) of the image in a data URL by its head: no pixel is decoded.

    Raises:
        BadImage: it holds no image.
    """
    with _open(url) as image:
        return image.size


@contextlib.contextmanager
def _open(url: str) -> Iterator[Image.Image]:
    """Open the image of a data URL; what goes wrong in it while it is open is a BadImage."""
    try:
        data = base64.b64decode(url.partition(",")[2], validate=True)
        with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
            yield image
    except _UNREADABLE as error:
        raise BadImage(f"an image cannot be read ({error}): {url[:60]!r}") from error


class _Decoded:
    """The images that were decoded last: the samples of a prompt read the same one."""

    def __init__(self, max_bytes: int):
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._images: OrderedDict[str, Image.Image] = OrderedDict()
        self._lock = threading.Lock()  # environments show images from threads of their own

    def get(self, url: str) -> Image.Image | None:
        """Return the image if it is here."""
        with self._lock:
            if url in self._images:
                self._images.move_to_end(url)
            return self._images.get(url)

    def put(self, url: str, image: Image.Image) -> None:
        """Keep the image, and drop those that were read longest ago. One that is too large goes."""
        with self._lock:
            if url not in self._images:
                self._images[url] = image
                self.num_bytes += self._size(url, image)
            while self.num_bytes > self.max_bytes:
                self.num_bytes -= self._size(*self._images.popitem(last=False))

    @staticmethod
    def _size(url: str, image: Image.Image) -> int:
        return len(url) + 3 * image.width * image.height


_decoded = _Decoded(256 * 2**20)


def attach(messages: Messages, images: Iterable[object]) -> Messages:
    """Return the chat with these images in their places.

    An image's place is a part {"type": "image"} of a message's content that has no image yet. If
    there is none, the images come before the text of the user's first message (of the last message,
    if none is the user's). OpenAI's `image_url` becomes such a part, too.

    Raises:
        BadImage: there are more or fewer images than places, or one cannot be read.
    """
    urls = [to_url(image) for image in images]
    num_places = sum(map(_is_place, _all_parts(messages)))
    if urls and not num_places:
        roles = [message["role"] for message in messages]
        place = roles.index("user") if "user" in roles else -1
        message = messages[place]
        content = message["content"]
        parts = _parts(message) or ([{"type": "text", "text": content}] if content else [])
        messages = list(messages)
        messages[place] = message | {"content": [{"type": "image"}] * len(urls) + parts}
    elif num_places != len(urls):
        raise BadImage(
            f"a chat with places for {num_places} images came with {len(urls)} of them: "
            f"{str(messages)[:200]}"
        )
    waiting = iter(urls)
    out = []
    for message in messages:
        parts = []
        for part in _parts(message):
            image = part.get("image")
            if part["type"] == "image_url":
                image = part["image_url"]["url"]
            elif _is_place(part):
                image = next(waiting)
            parts.append({"type": "image", "image": to_url(image)} if image else part)
        out.append(message | {"content": parts} if parts else message)
    return out


def of_chat(messages: Messages) -> list[str]:
    """Return the data URLs of the images that `attach` put into a chat, in their order."""
    return [part["image"] for part in _all_parts(messages) if part["type"] == "image"]


def plain(prompt: RowPrompt) -> RowPrompt:
    """Return a prompt for people: a message's content is a text, "[image]" stands for an image."""
    if isinstance(prompt, str):
        return prompt
    out = []
    for message in prompt:
        texts = ["[image]" if part["type"] == "image" else part["text"] for part in _parts(message)]
        out.append(message | {"content": "".join(texts)} if texts else message)
    return out


def _parts(message: dict) -> list[dict]:
    return message["content"] if isinstance(message.get("content"), list) else []


def _all_parts(messages: Messages) -> Iterator[dict]:
    return itertools.chain(*map(_parts, messages))


def _is_place(part: dict) -> bool:
    return part["type"] == "image" and part.get("image") is None


class Vision:
    """How a model reads images, by its folder's image processor."""

    def __init__(self, folder: Path, max_images: int = 0):
        """Load the processor of the model in `folder`.

        `max_images`: how many the engine takes in a context.
        """
        self.max_images = max_images
        self.processor = AutoImageProcessor.from_pretrained(folder)
        self.token = AutoConfig.from_pretrained(folder).image_token_id  # stands for an image
        self.merge_size = self.processor.merge_size

    def num_tokens(self, url: str) -> int:
        """Return how many tokens an image has.

        Raises:
            BadImage: it is too narrow.
        """
        width, height = rgb(url).size
        try:
            num_patches = self.processor.get_number_of_image_patches(height, width)
        except ValueError as error:
            raise BadImage(
                f"an image of {width} x {height} pixels cannot be read ({error}): {url[:60]!r}"
            ) from error
        return num_patches // self.merge_size**2

    def expand(
        self, ids: list[int], urls: Sequence[str], begin: int = 0
    ) -> tuple[list[int], list[ImageSpan]]:
        """Repeat the token of each image as often as the image has tokens.

        Args:
            ids: token ids with one token for each image.
            urls: the images, in their order.
            begin: number of the first of `ids` in its sequence, from which the spans count.

        Returns:
            (token ids, where the images are among them).

        Raises:
            BadImage: there are more or fewer images than tokens for them.
        """
        num_places = ids.count(self.token)
        if num_places != len(urls):
            raise BadImage(
                f"a text with {num_places} tokens for images came with {len(urls)} images; a text "
                "must not hold such tokens of its own"
            )
        out = list(ids)
        spans = []
        end = 0  # behind the image before
        for url in urls:
            start = out.index(self.token, end)
            num_tokens = self.num_tokens(url)
            spans.append(ImageSpan(begin + start, num_tokens, url))
            end = start + num_tokens
            out[start : start + 1] = [self.token] * num_tokens
        return out, spans

    def batch(
        self, sequences: list[tuple[list[ImageSpan], np.ndarray]], device: torch.device
    ) -> ImageBatch:
        """Return the images of a micro-batch, each once.

        Without any image there is a blank one that no row reads, because the tower's shards are
        gathered by all ranks or by none.

        Args:
            sequences: of each sequence, the images of its trajectory, and int64 [rows], which of
                the trajectory's tokens are its rows here.
            device: where the tensors are to be.
        """
        # 1. Each image once. One that begins behind the last row of a sequence is not needed.
        numbers: dict[str, int] = {}
        for spans, tokens in sequences:
            for span in spans:
                if span.start <= tokens.max():
                    numbers.setdefault(span.url, len(numbers))

        # 2. Pixels, and how many tokens each image has in time, height and width.
        blank = Image.new("RGB", (self.merge_size * self.processor.patch_size,) * 2)
        pictures = [rgb(url) for url in numbers] or [blank]
        patches = self.processor(pictures, return_tensors="pt")
        grids = patches["image_grid_thw"].numpy() // (1, self.merge_size, self.merge_size)
        first_features = np.cumsum([0, *grids.prod(axis=1)])

        # 3. The rows of all sequences, end to end: the feature of each (-1 if it is no part of an
        # image), and its positions in time, height and width.
        features_of = []
        positions_of = []
        for spans, tokens in sequences:
            length = max([tokens.max() + 1, *(span.start + span.num_tokens for span in spans)])
            features = np.full(length, -1)
            positions = np.tile(np.arange(length), (3, 1))
            for start, num_tokens, url in spans:
                if url not in numbers:
                    continue
                end = start + num_tokens
                number = numbers[url]
                features[start:end] = first_features[number] + np.arange(num_tokens)
                # What follows goes on behind the longer side.
                positions[:, end:] += grids[number, 1:].max() - num_tokens
                of_image = np.indices(grids[number]).reshape(3, -1)
                positions[:, start:end] = positions[0, start] + of_image
            features_of.append(features[tokens])
            positions_of.append(positions[:, tokens])
        all_features = np.concatenate(features_of)
        rows = np.flatnonzero(all_features >= 0)
        return ImageBatch(
            pixels=patches["pixel_values"].to(device),
            grids=patches["image_grid_thw"].to(device),
            rows=torch.from_numpy(rows).to(device),
            features=torch.from_numpy(all_features[rows]).to(device),
            positions=torch.from_numpy(np.concatenate(positions_of, axis=1)).to(device),
        )


def sampling_stops(stop_ids: list[int], vision: Vision | None) -> tuple[int, ...]:
    """Return what ends an answer.

    A policy that samples the token of an image has ended, too: the engine would take it for the
    place of the next one.
    """
    return (*stop_ids, vision.token) if vision else tuple(stop_ids)
