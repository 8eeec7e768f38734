"""Rows, each read when it is asked for, and what others call their columns."""

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import numpy as np

from minirl.config.shared import RowsConfig
from minirl.data.chat import Messages, RowPrompt, to_messages
from minirl.data.images import BadImage, attach
from minirl.data.sources import Source, open_source
from minirl.errors import UserError, require

# What TRL, OpenRLHF and others call a column. These names are tried where a row has none of the
# default name; a setting that asks for another name has no alternatives.
OTHER_NAMES = {
    "prompt": ("instruction", "input", "context_messages", "messages"),
    "completion": ("output",),
    "answer": ("solution", "label"),
    "data_source": ("datasource",),
}

# make_row(raw, source, where): a row of what its source holds; `where` is its place for an error.
MakeRow = Callable[[dict, Source, str], dict]


@dataclass(eq=False)
class Rows(Sequence[dict]):
    """Rows of some sources, each made when it is asked for; memory holds only where they are."""

    sources: list[Source]  # What the rows are read from.
    make_row: MakeRow  # Makes a row of what its source holds.
    # int64 [N, 2]: the number of each row's source and its number in that source.
    locations: np.ndarray

    def __len__(self) -> int:
        return len(self.locations)

    def __getitem__(self, number: int) -> dict:  # type: ignore[override]  # takes no slices
        source_number, number_there = self.locations[number].tolist()
        source = self.sources[source_number]
        raw = source.rows[number_there]
        where = source.where(number_there)
        require(
            isinstance(raw, dict),
            f"{where}: a row must be an object of named values, not a {type(raw).__name__}",
        )
        return self.make_row(raw, source, where)


def take(rows: Sequence[dict], numbers: Iterable[int]) -> Sequence[dict]:
    """Return the rows with these numbers; `Rows` are not read for it."""
    if isinstance(rows, Rows):
        return replace(rows, locations=rows.locations[np.fromiter(numbers, np.int64)])
    return [rows[number] for number in numbers]


def open_rows(
    source: str | list[str],
    setting: str,
    make_row: MakeRow,
    max_samples: int,
    *,
    distinct_prompts: bool = False,
) -> Sequence[dict]:
    """Return the rows of one or several sources, end to end.

    Every row is read once here, so that a bad one ends the program now.

    Args:
        source: one source, or several, as sources.py describes them.
        setting: what asks for them, `data.train` or `data.eval`, for error messages.
        make_row: makes a row of what its source holds.
        max_samples: only so many rows of each source, its first; 0: all.
        distinct_prompts: keep only the first of the rows with the same prompt.

    Raises:
        UserError: a source cannot be read or has no rows, a row is not as it should be, or only
            some of the sources have weights.
    """
    texts = [source] if isinstance(source, str) else source
    sources = [open_source(text, setting) for text in texts]
    weighted = [opened for opened in sources if opened.weight is not None]
    if weighted and (setting == "data.eval" or len(weighted) < len(sources)):
        raise UserError(
            f"{weighted[0].label}: give a weight to every source of data.train or to none "
            "(held-out rows are all used once, without weights)"
        )
    locations = []
    for i, opened in enumerate(sources):
        numbers = np.arange(len(opened.rows))[: max_samples or None]
        require(len(numbers), f"{opened.label}: no rows")
        locations.append(np.stack([np.full_like(numbers, i), numbers], axis=1))
    rows = Rows(sources, make_row, np.concatenate(locations))
    first: dict[object, int] = {}  # the first row of each name
    for number, row in enumerate(rows):
        name: object = number
        if distinct_prompts:
            name = hashlib.sha256(json.dumps(row["prompt"]).encode()).digest()
        first.setdefault(name, number)
    return take(rows, first.values())


def split(rows: Sequence[dict], held_out: int, seed: int) -> tuple[Sequence[dict], Sequence[dict]]:
    """Split rows into those to train on and `held_out` others.

    A hash of seed and prompt (of the whole row if it has none) chooses the held-out rows, so that
    the choice does not depend on the order of the rows. Of rows with the same prompt, either
    all are trained on, or the last is held out and the others are dropped.

    Returns:
        (rows to train on, held-out rows).

    Raises:
        UserError: nothing would be left to train on.
    """
    hashes = []
    for row in rows:
        text = f"{seed} {json.dumps(row.get('prompt', row))}"
        hashes.append(hashlib.sha256(text.encode()).digest())
    last = {name: number for number, name in enumerate(hashes)}
    require(
        held_out < len(last),
        f"data.held_out = {held_out} leaves nothing of the {len(last)} distinct prompts in "
        "data.train; lower it or set data.eval",
    )
    chosen = dict.fromkeys(sorted(last)[:held_out])
    train = [number for number, name in enumerate(hashes) if name not in chosen]
    return take(rows, train), take(rows, [last[name] for name in chosen])


def column(row: dict, key: str) -> Any:
    """Return a row's value under `key` or under what others call it; None if there is none.

    Alpaca's `instruction` comes together with its `input`, if the row has that too.
    """
    for name in (key, *OTHER_NAMES.get(key, ())):
        value = row.get(name)
        if value is None:
            continue
        context = row.get("input")
        if name == "instruction" != key and isinstance(value, str) and isinstance(context, str):
            return "\n\n".join(text for text in (value, context) if text)
        return value
    return None


def is_messages(value: object) -> TypeGuard[Messages]:
    """Return whether this is a list of messages with role and content, and not empty."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in value)
    )


def is_prompt(value: object) -> TypeGuard[RowPrompt]:
    """Return whether this is a text or a list of messages, and not empty."""
    return is_messages(value) or (isinstance(value, str) and bool(value))


def with_images(prompt: RowPrompt, row: dict, where: str, cfg: RowsConfig) -> RowPrompt:
    """Return the prompt with the images of its row: data.images_key, or the one in `image`.

    A text with images becomes messages.

    Raises:
        UserError: an image cannot be read, or images and places for them do not match.
    """
    row_images = row.get(cfg.images_key)
    if not row_images and row.get("image") is not None:
        row_images = [row["image"]]
    if isinstance(prompt, str) and not row_images:
        return prompt
    try:
        return attach(to_messages(prompt, ""), row_images or [])
    except BadImage as error:
        raise UserError(f"{where}: {error}") from error
