"""Read what the user gives: whatever is wrong with a file or a text becomes one message.

Files that a run writes and reads again itself are not meant here.
"""

import contextlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from minirl.base.errors import UserError, require

MOST_LEVELS = 100  # Of values inside one another. Python's own functions recurse.
_TOO_DEEP = f"it is nested more than {MOST_LEVELS} levels deep"
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # In JSON; two of them are a character.


# Tokens of a character at most: its bytes, and some to spare.
LONGEST_CHARACTER = 8


def is_file(path: str | Path) -> bool:
    """Return whether there is a file; no for a name that cannot be one."""
    return os.path.isfile(path)  # pathlib's raises for a name that is too long


def read_text(path: str | Path, setting: str) -> str:
    """Return the text of a file.

    Args:
        path: the file.
        setting: what names it, for messages.

    Raises:
        UserError: there is none, it cannot be read, or it is not UTF-8.
    """
    require(is_file(path), f"{setting} {str(path)!r}: no such file; give the path of a text file")
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UserError(f"{setting} {path} cannot be read: {error}; give another file") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{setting} {path} is not UTF-8 text: {error}; save it as UTF-8") from error


def read_json(path: Path, setting: str) -> Any:
    """Return the value that a JSON file holds.

    Raises:
        UserError: as `read_text` does, and if it is not JSON.
    """
    text = read_text(path, setting)
    try:
        return parse_json(text)
    except ValueError as error:
        raise UserError(f"{setting} {path} is not JSON: {error}; fix or replace it") from error


def parse_json(text: str) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: it is not JSON; or its value is nested too deep or has half of a character,
            which nothing else can take.
    """
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError(_TOO_DEEP) from error
    # Few texts have what such values need, so most are not looked through.
    may_be_deep = text.count("[") + text.count("{") > MOST_LEVELS
    if not may_be_deep and not _SURROGATE.search(text):
        return value
    waiting: list[tuple[object, int]] = [(value, 0)]
    while waiting:
        inner, level = waiting.pop()
        if level > MOST_LEVELS:
            raise ValueError(_TOO_DEEP)
        if isinstance(inner, dict):
            waiting += [(key, level + 1) for key in inner]
            waiting += [(child, level + 1) for child in inner.values()]
        elif isinstance(inner, list):
            waiting += [(child, level + 1) for child in inner]
        elif isinstance(inner, str) and not is_unicode(inner):
            raise ValueError(f"{inner[:80]!r} has half of a surrogate pair, which is no character")
    return value


def parsed(value: object) -> Any:
    """Return what a JSON text says; anything else, and a text that is no JSON, as it is."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    try:
        return parse_json(value)
    except ValueError:
        return value


def is_unicode(text: str) -> bool:
    """Return whether a text has no lone surrogates, which no encoding and no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


@contextlib.contextmanager
def library_reads(what: str) -> Iterator[None]:
    """Raise whatever a library raises in the block as a UserError.

    The parsers of model folders and images raise whatever comes when a file is broken.

    Args:
        what: the setting and the file, which begin the message.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        problem = " ".join(str(error).split())[:500]
        raise UserError(
            f"{what} cannot be read: {type(error).__name__}: {problem}; fix or replace it"
        ) from error


def key_of_environment(setting: str, name: str) -> str:
    """Return the key of a server in the environment variable `name`; "" if `name` is empty.

    Keys are no settings, because settings are printed, logged and saved.

    Raises:
        UserError: the variable is not set or empty, or no header of a request can have the key.
    """
    key = os.environ.get(name, "").strip() if name else ""
    require(
        key or not name,
        f"{setting} = {name}: this environment variable is not set or empty; put the key into it",
    )
    require(
        key.isascii() and key.isprintable(),
        f"{setting} = {name}: the key in this environment variable has characters that no key has "
        "(line breaks, or letters that are not ASCII's); put the key alone into it",
    )
    return key
