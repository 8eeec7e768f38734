"""Images as data URLs on the host, and in the messages of chats.

Data URLs are equal where the images are, and stand in JSON as they are. How a model reads them is
in vision.py.
"""

import base64
import contextlib
import io
import itertools
import os
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import cachetools
import numpy as np
from PIL import Image, ImageOps

from minirl.base.errors import UserError
from minirl.data.chat import Messages, parts_of

# Others are rare, and some of their readers start programs (EPS) or hold further formats (ICO).
# JPEG's opens MPO, too.
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000")
PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA")
MAX_FILE_BYTES = 64 * 2**20
DECODED_BYTES = 2**28  # Of the images that are kept decoded.


class BadImage(UserError):
    """An image that cannot be read, or that has no place in its chat."""


def to_url(image: object) -> str:
    """Return an image as a data URL.

    Args:
        image: a data URL, a path, the bytes of a file, a PIL image, or what `datasets` makes of an
            image that it did not decode: {"bytes": bytes or None, "path": path}. It is turned as
            its file says (EXIF).

    Raises:
        BadImage: it is none of these, or cannot be read.
    """
    if isinstance(image, dict):
        image = image.get("bytes") or image.get("path")
    if isinstance(image, Image.Image):
        image = _png(image)
    if isinstance(image, os.PathLike):
        image = os.fspath(image)
    if isinstance(image, str) and not image.startswith("data:"):
        path = Path(image)
        try:
            if path.exists() and not path.is_file():  # A device or a pipe may have no end,
                raise ValueError("it is no regular file")
            with path.open("rb") as opened:
                content = opened.read(MAX_FILE_BYTES + 1)  # and some files of /proc have none.
            if len(content) > MAX_FILE_BYTES:
                raise ValueError(f"it has more than {MAX_FILE_BYTES // 2**20} MiB")
        except (OSError, ValueError) as error:  # ValueError: a name that no file can have, too
            raise BadImage(
                f"image {os.path.abspath(image)[:200]!r} cannot be read ({error}); give a path, "
                "bytes, a PIL image or a data URL"
            ) from error
        image = content
    if isinstance(image, bytes):
        image = f"data:image;base64,{base64.b64encode(image).decode()}"
    if not isinstance(image, str):
        raise BadImage(
            f"an image is a path, bytes, a PIL image or a data URL, not a {type(image).__name__}"
        )
    rgb(image)
    return image


def _png(image: Image.Image) -> bytes:
    """Return the file of a PIL image. Raises BadImage for one that has no colours to convert."""
    file = io.BytesIO()
    try:
        upright = _upright(image)
        if upright.mode not in PNG_MODES:
            upright = upright.convert("RGBA" if upright.has_transparency_data else "RGB")
        upright.save(file, "PNG")
    except (OSError, ValueError) as error:
        raise BadImage(f"an image of mode {image.mode} cannot be read ({error})") from error
    return file.getvalue()


def _upright(image: Image.Image) -> Image.Image:
    """Return an image with 8 bits a colour, turned as its file says.

    Of 16 bits it takes the upper 8. Raises ValueError for numbers that have no such scale.
    """
    upright = ImageOps.exif_transpose(image)
    if upright.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(upright) >> 8).astype(np.uint8))
    if upright.mode in ("I", "F"):
        values = np.asarray(upright)
        is_share = upright.mode == "F" and 0 < values.max() <= 1
        if values.min() < 0 or values.max() > 255 or is_share:
            raise ValueError(
                f"its values are {values.min()} to {values.max()}; scale them to 0 to 255"
            )
    return upright


# The samples of a prompt read the same image. Environments show images from their threads.
@cachetools.cached(
    cachetools.LRUCache(DECODED_BYTES, lambda picture: 3 * picture.width * picture.height),
    lock=threading.Lock(),
)
def rgb(url: str) -> Image.Image:
    """Return the pixels of a data URL, which nobody may change. Those read last are kept.

    What is transparent is put on white, as vLLM's server does it.

    Raises:
        BadImage: it holds no image, or one that is too large.
    """
    with _open(url) as image:
        upright = _upright(image)
        if upright.has_transparency_data:
            upright = upright.convert("RGBA")
            on_white = Image.new("RGB", upright.size, "white")
            on_white.paste(upright, mask=upright.getchannel("A"))
            return on_white
        return upright.convert("RGB")


def size(url: str) -> tuple[int, int]:
    """Return (width, height) of the image in a data URL by its head: no pixel is decoded.

    Raises:
        BadImage: it holds no image.
    """
    with _open(url) as image:
        return image.size


def blank(side: int) -> Image.Image:
    """Return a black square of `side` pixels."""
    return Image.new("RGB", (side, side))


@contextlib.contextmanager
def _open(url: str) -> Iterator[Image.Image]:
    """Open the image of a data URL; what goes wrong in it while it is open is a BadImage."""
    try:
        data = base64.b64decode(url.partition(",")[2], validate=True)
        with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
            yield image
    except Exception as error:  # Pillow's readers raise many kinds for a damaged file
        raise BadImage(f"an image cannot be read ({error}): {url[:60]!r}") from error


def attach(messages: Messages, images: Iterable[object], *, last: bool = False) -> Messages:
    """Return the chat with these images in their places.

    An image's place is a part {"type": "image"} of a message's content that has no image yet. If
    there is none, the images come before the text of the user's first message, or with `last` of
    the user's last (of the last message, if none is the user's). OpenAI's `image_url` becomes such
    a part, too.

    Raises:
        BadImage: there are more or fewer images than places, or one cannot be read.
    """
    urls = [to_url(image) for image in images]
    num_places = sum(map(_is_place, itertools.chain(*map(parts_of, messages))))
    if urls and not num_places:
        roles = [message["role"] for message in messages]
        of_user = [i for i, role in enumerate(roles) if role == "user"] or [-1]
        place = of_user[-1 if last else 0]
        message = messages[place]
        content = message["content"]
        parts = parts_of(message) or ([{"type": "text", "text": content}] if content else [])
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
        for part in parts_of(message):
            image = part.get("image")
            if part["type"] == "image_url":
                image = part["image_url"]["url"]
            elif _is_place(part):
                image = next(waiting)
            parts.append({"type": "image", "image": to_url(image)} if image else part)
        out.append(message | {"content": parts} if parts else message)
    return out


def _is_place(part: dict) -> bool:
    return part["type"] == "image" and part.get("image") is None
