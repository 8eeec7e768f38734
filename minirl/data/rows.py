"""Rows, each read when it is asked for, and what others call their columns."""

import contextlib
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeGuard

import numpy as np

from minirl.config.shared import RowsConfig
from minirl.data.chat import Messages, RowPrompt, to_messages
from minirl.data.images import BadImage, attach
from minirl.data.sources import Source, open_source
from minirl.errors import UserError, require
from minirl.parallel.machines import check_same, errors_of_all
from minirl.parallel.mesh import Mesh

# What TRL, OpenRLHF and others call a column. These names are tried where a row has none of the
# default name; a setting that asks for another name has no alternatives.
OTHER_NAMES = {
    "prompt": ("instruction", "input", "context_messages", "messages"),
    "completion": ("output",),
    "answer": ("solution", "label"),
    "data_source": ("datasource",),
}

BLOCK_ROWS = 128  # Rows that are read from a source at once.
DIGEST_BYTES = 16
NUM_PARTS = 16  # Digests are sorted in so many parts; a power of 2.
ENCODER = json.JSONEncoder()  # as json.dumps has it


class Place(NamedTuple):
    """Where a row is from; as a text it is what an error message begins with."""

    source: Source
    number: int  # Of the row, in the source.

    def __str__(self) -> str:
        return self.source.where(self.number)


# make_row(raw, place): a row of what its source holds.
MakeRow = Callable[[dict, Place], dict]
# mark(row): bits that say what a program wants to know of a row, 0 to 255.
Mark = Callable[[dict], int]


@dataclass(eq=False)
class Rows(Sequence[dict]):
    """Rows of some sources, each made when it is asked for; memory holds only their numbers."""

    sources: list[Source]  # What the rows are read from, end to end.
    make_row: MakeRow  # Makes a row of what its source holds.
    distinct: bool  # Of the rows with the same prompt only the first is to be used.
    numbers: np.ndarray  # int [N]: of each row its number in the sources, end to end.
    marks: np.ndarray  # uint8 [N]: what `read_rows` noted of each row; 0 before.
    # int64 [S]: the number of each source's first row.
    first_numbers: np.ndarray = field(init=False)

    def __post_init__(self):
        sizes = [len(source.rows) for source in self.sources]
        self.first_numbers = np.cumsum([0, *sizes[:-1]])

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, i: int) -> dict:  # type: ignore[override]  # takes no slices
        place = self.place(i)
        return self._make(place.source.rows[place.number], place)

    def place(self, i: int) -> Place:
        """Return where a row is from."""
        number = int(self.numbers[i])
        source = int(np.searchsorted(self.first_numbers, number, side="right")) - 1
        return Place(self.sources[source], number - int(self.first_numbers[source]))

    def source_numbers(self, first: int = 0, last: int | None = None) -> np.ndarray:
        """Return the number of each row's source, int64."""
        return np.searchsorted(self.first_numbers, self.numbers[first:last], side="right") - 1

    def first_marked(self, bit: int) -> int | None:
        """Return which row is the first with this mark; None: no row has it."""
        marked = np.flatnonzero(self.marks & bit)
        return int(marked[0]) if len(marked) else None

    def take(self, chosen: np.ndarray) -> "Rows":
        """Return some of the rows, by their places here; nothing is read for it."""
        return replace(self, numbers=self.numbers[chosen], marks=self.marks[chosen])

    def read(self, first: int, last: int) -> Iterator[dict]:
        """Make the rows from `first` to before `last`; many are read from a source at once."""
        for start in range(first, last, BLOCK_ROWS):
            stop = min(start + BLOCK_ROWS, last)
            # A block ends where the next row is not the one behind, or is of another source.
            is_gap = np.diff(self.numbers[start:stop].astype(np.int64)) != 1
            is_gap |= np.diff(self.source_numbers(start, stop)) != 0
            borders = (np.flatnonzero(is_gap) + start + 1).tolist()
            for block in itertools.pairwise([start, *borders, stop]):
                yield from self._read_block(*block)

    def _read_block(self, first: int, last: int) -> Iterator[dict]:
        """Make rows that stand one behind the other in one source."""
        source, number = self.place(first)
        for raw in source.read(number, number + last - first):
            yield self._make(raw, Place(source, number))
            number += 1

    def _make(self, raw: object, place: Place) -> dict:
        if not isinstance(raw, dict):
            kind = type(raw).__name__
            raise UserError(f"{place}: a row must be an object of named values, not a {kind}")
        return self.make_row(raw, place)


def open_rows(
    source: str | list[str],
    setting: str,
    make_row: MakeRow,
    max_samples: int,
    mesh: Mesh,
    *,
    distinct: bool = False,
) -> Rows:
    """Return the rows of one or several sources, end to end. Collective. `read_rows` checks them.

    Args:
        source: one source, or several, as sources.py describes them.
        setting: what asks for them, `data.train` or `data.eval`, for error messages.
        make_row: makes a row of what its source holds.
        max_samples: only so many rows of each source, its first; 0: all.
        mesh: the ranks.
        distinct: of the rows with the same prompt only the first is to be used.

    Raises:
        UserError: a source cannot be read or has no rows, or only some of the sources have weights.
    """
    texts = [source] if isinstance(source, str) else source
    sources = [open_source(text, setting, mesh) for text in texts]
    weighted = [opened for opened in sources if opened.weight is not None]
    if weighted and (setting == "data.eval" or len(weighted) < len(sources)):
        raise UserError(
            f"{weighted[0].label}: give a weight to every source of data.train or to none "
            "(held-out rows are all used once, without weights)"
        )
    sizes = [len(opened.rows) for opened in sources]
    labels = [f"the number of rows of {opened.label}" for opened in sources]
    check_same(dict(zip(labels, sizes, strict=True)), mesh)
    dtype = np.min_scalar_type(sum(sizes))  # 4 bytes a row, up to four thousand million of them
    numbers = []
    first_number = 0
    for opened, size in zip(sources, sizes, strict=True):
        require(size, f"{opened.label}: no rows")
        last = first_number + min(size, max_samples or size)
        numbers.append(np.arange(first_number, last, dtype=dtype))
        first_number += size
    all_numbers = np.concatenate(numbers)
    marks = np.zeros(len(all_numbers), np.uint8)
    return Rows(sources, make_row, distinct, all_numbers, marks)


def no_marks(row: dict) -> int:
    """Return that nothing is to be known of a row."""
    return 0


def read_rows(
    rows: Rows, mesh: Mesh, seed: int, held_out: int = 0, mark: Mark = no_marks
) -> tuple[Rows, Rows]:
    """Read every row once, and divide them into those to train on and `held_out` others.

    Each rank reads its share, so that a bad row ends the program now, on every rank. Collective.

    A hash of seed and prompt (of the whole row if it has none) chooses the held-out rows, so that
    the choice does not depend on the order of the rows. Of rows with the same prompt, only the
    first is used if `rows.distinct`. Else they are all trained on, or the last is held out and the
    others are dropped.

    Args:
        rows: as `open_rows` returns them.
        mesh: the ranks.
        seed: of the choice.
        held_out: how many rows, with different prompts, are held out.
        mark: what to note of each row; the rows that are returned have it in `marks`.

    Returns:
        (rows to train on, held-out rows).

    Raises:
        UserError: a row is not as it should be, or nothing would be left to train on.
    """
    has_choice = rows.distinct or held_out > 0
    digests, marks = _read_share(rows, mesh, seed if has_choice else None, mark)
    marked = replace(rows, marks=mesh.gather_array(marks))
    if not has_choice:
        return marked, marked.take(np.arange(0))
    digests = mesh.gather_array(digests)
    train, chosen = choose(digests, held_out, distinct=rows.distinct)
    return marked.take(train), marked.take(chosen)


def _read_share(
    rows: Rows, mesh: Mesh, seed: int | None, mark: Mark
) -> tuple[np.ndarray, np.ndarray]:
    """Read this rank's share of the rows. Collective.

    Returns:
        (digests, uint8 [share, 16], zeros without a seed; marks, uint8 [share]). The shares follow
        one another.
    """
    size = -(-len(rows) // mesh.world_size)
    first = min(mesh.rank * size, len(rows))
    last = min(first + size, len(rows))
    num = last - first
    digests = bytearray(DIGEST_BYTES * num)
    marks = bytearray(num)
    with errors_of_all(mesh):
        for i, row in enumerate(rows.read(first, last)):
            marks[i] = mark(row)
            if seed is not None:
                digests[DIGEST_BYTES * i : DIGEST_BYTES * (i + 1)] = _digest(row, seed)
    table = np.frombuffer(digests, np.uint8).reshape(-1, DIGEST_BYTES)
    return table, np.frombuffer(marks, np.uint8)


def _digest(row: dict, seed: int) -> bytes:
    text = f"{seed} {ENCODER.encode(row.get('prompt', row))}"
    return hashlib.sha256(text.encode()).digest()[:DIGEST_BYTES]


def choose(digests: np.ndarray, held_out: int, *, distinct: bool) -> tuple[np.ndarray, np.ndarray]:
    """Choose the rows to train on and those to hold out, as `read_rows` describes it.

    Args:
        digests: uint8 [N, 16]; rows with the same digest have the same prompt.
        held_out: how many rows are held out: those with the smallest digests.
        distinct: of rows with the same digest only the first is used.

    Returns:
        (numbers of the rows to train on, ascending; those of the held-out rows), int64.

    Raises:
        UserError: nothing would be left to train on.
    """
    is_trained = np.zeros(len(digests), bool)
    chosen = [np.zeros(0, np.int64)]
    num_missing = held_out
    num_distinct = 0
    # A part of the digests at a time, in ascending order: sorting all would take three times the
    # memory that they have.
    part_of = digests[:, 0] // (256 // NUM_PARTS)
    for part in range(NUM_PARTS):
        # 1. Sort. Rows with the same digest are neighbours then, in the order of their numbers.
        numbers = np.flatnonzero(part_of == part)
        if not len(numbers):
            continue
        words = digests[numbers].view(">u8")  # [M, 2]: as numbers they compare as the bytes do
        order = np.lexsort((words[:, 1], words[:, 0]))
        numbers = numbers[order]
        words = words[order]
        is_first = np.ones(len(words), bool)
        is_first[1:] = (words[1:] != words[:-1]).any(axis=1)
        firsts = np.flatnonzero(is_first)
        lasts = np.append(firsts[1:], len(words)) - 1

        # 2. The first digests of all are held out.
        num_chosen = min(num_missing, len(firsts))
        kept = (firsts if distinct else lasts)[:num_chosen]
        chosen.append(numbers[kept])
        num_missing -= num_chosen
        num_distinct += len(firsts)
        if distinct:
            is_trained[numbers[firsts[num_chosen:]]] = True
        elif num_chosen < len(firsts):
            is_trained[numbers[firsts[num_chosen] :]] = True
    require(
        held_out < num_distinct,
        f"data.held_out = {held_out} leaves nothing of the {num_distinct} distinct prompts in "
        "data.train; lower it or set data.eval",
    )
    return np.flatnonzero(is_trained), np.concatenate(chosen)


@contextlib.contextmanager
def errors_at(place: Place) -> Iterator[None]:
    """Begin the message of a UserError in the block by the place of the row that it is about."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{place}: {error}") from error


def column(row: dict, key: str) -> Any:
    """Return a row's value under `key` or under what others call it; None if there is none.

    Alpaca's `instruction` comes together with its `input`, if the row has that too.
    """
    value = row.get(key)
    if value is not None:
        return value
    for name in OTHER_NAMES.get(key, ()):
        value = row.get(name)
        if value is None:
            continue
        context = row.get("input")
        if name == "instruction" and isinstance(value, str) and isinstance(context, str):
            return "\n\n".join(text for text in (value, context) if text)
        return value
    return None


def why_no_messages(value: object) -> str:
    """Return what is wrong with a list of messages with role and content; empty: nothing."""
    if not isinstance(value, list) or not value:
        return "there is no list of messages"
    for number, message in enumerate(value, start=1):
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            return f"message {number} has no role and content"
        role = message["role"]
        if not isinstance(role, str) or not role:
            return f"the role of message {number} is {role!r}; it must be a text"
        content = message["content"]
        is_call = content is None and bool(message.get("tool_calls"))
        if not (isinstance(content, str) or is_call or _are_parts(content)):
            return (
                f"the content of message {number} is {str(content)[:80]!r}; it must be a text or a "
                'list of {"type": "text", "text": ...} and {"type": "image"}'
            )
    return ""


def _are_parts(content: object) -> bool:
    """Return whether a message's content is a list of texts and images."""
    return isinstance(content, list) and bool(content) and all(map(_is_part, content))


def _is_part(part: object) -> bool:
    if not isinstance(part, dict):
        return False
    if part.get("type") == "text":
        return isinstance(part.get("text"), str)
    if part.get("type") == "image_url":
        place = part.get("image_url")
        return isinstance(place, dict) and isinstance(place.get("url"), str)
    return part.get("type") == "image"


def is_messages(value: object) -> TypeGuard[Messages]:
    """Return whether this is a list of messages with role and content, and not empty."""
    return not why_no_messages(value)


def fault_of(value: object) -> str:
    """Return what is wrong with a value that is a list but no messages, to end a sentence."""
    return f", as {why_no_messages(value)}" if isinstance(value, list) and value else ""


def require_column(raw: dict, setting: str, key: str, default: str, place: Place) -> None:
    """Refuse a row without the named column that has the default one. Raises UserError.

    Rows may lack it. But one that has the default's column instead was meant otherwise.
    """
    if key in raw or key == default or raw.get(default) is None:
        return  # Nearly every row: a message is made for a bad one only.
    raise UserError(
        f"{place}: {setting} = {key!r} names no column, and the row has {default!r} (its keys: "
        f"{', '.join(map(str, raw))}); set {setting} to one of them"
    )


def is_prompt(value: object) -> TypeGuard[RowPrompt]:
    """Return whether this is a text or a list of messages, and not empty."""
    return is_messages(value) or (isinstance(value, str) and bool(value))


def with_images(prompt: RowPrompt, row: dict, place: Place, cfg: RowsConfig) -> RowPrompt:
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
        raise UserError(f"{place}: {error}") from error
