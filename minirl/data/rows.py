"""Rows, each read when it is asked for, and what others call their columns."""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from minirl.base.errors import UserError, require
from minirl.config.shared import RowsConfig
from minirl.data.chat import to_messages
from minirl.data.images import BadImage, attach
from minirl.data.messages import (
    RowPrompt,
    for_template,
    from_sharegpt,
    has_calls,
    read_template_kwargs,
    read_tools,
    without_none,
)
from minirl.data.sources import Source, open_source
from minirl.parallel.machines import check_same
from minirl.parallel.mesh import Mesh

# What TRL, OpenRLHF and others call a column. These names are tried where a row has none of the
# default name; a setting that asks for another name has no alternatives.
OTHER_NAMES = {
    "prompt": ("instruction", "input", "context_messages", "messages", "conversations"),
    "messages": ("conversations",),
    "completion": ("output",),
    "answer": ("solution", "label"),
    "data_source": ("datasource",),
}

BLOCK_ROWS = 128  # Rows that are read from a source at once.


class Place(NamedTuple):
    """Where a row is from; as a text it is what an error message begins with."""

    source: Source
    number: int  # Of the row, in the source.

    def __str__(self) -> str:
        return self.source.where(self.number)


# make_row(raw, place): a row of what its source holds.
MakeRow = Callable[[dict, Place], dict]


@dataclass(eq=False)
class Rows(Sequence[dict]):
    """Rows of some sources, each made when it is asked for; memory holds only their numbers."""

    sources: list[Source]  # What the rows are read from, end to end.
    make_row: MakeRow  # Makes a row of what its source holds.
    distinct: bool  # Of equal rows only the first is to be used.
    numbers: np.ndarray  # int [N]: of each row its number in the sources, end to end.
    marks: np.ndarray  # uint8 [N]: what `read_rows` noted of each row; 0 before.
    # Columns that the user has named, and that no row has been seen with so far: setting -> name.
    missing: dict[str, str] = field(default_factory=dict)
    # Whether prompts may be made of rows by an environment, so that all may have one prompt.
    own_prompts: bool = False
    num_doubles: int = 0  # Rows that `read_rows` left out, because they equal others.
    nested: tuple[str, ...] = ()  # Columns that the user has named with dots in their names.
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
        """Return some of the rows, by their places here or by a mask; nothing is read for it."""
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
        for key in self.nested:
            if (value := _value_inside(raw, key)) is not None:
                raw = {**raw, key: value}
        if self.missing:
            for setting in [name for name, key in self.missing.items() if key in raw]:
                del self.missing[setting]
        return self.make_row(from_sharegpt(raw), place)


def open_rows(
    source: str | list[str],
    setting: str,
    make_row: MakeRow,
    cfg: RowsConfig,
    mesh: Mesh,
    *,
    distinct: bool = False,
    own_prompts: bool = False,
) -> Rows:
    """Return the rows of one or several sources, end to end. Collective. `read_rows` checks them.

    Args:
        source: one source, or several, as sources.py describes them.
        setting: what asks for them, `data.train` or `data.eval`, for error messages.
        make_row: makes a row of what its source holds.
        cfg: has data.max_samples (only so many rows of each source, its first; 0: all) and the
            names of the columns.
        mesh: the ranks.
        distinct: of equal rows only the first is to be used.
        own_prompts: an environment may make the prompts of the rows.

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
        last = first_number + min(size, cfg.max_samples or size)
        numbers.append(np.arange(first_number, last, dtype=dtype))
        first_number += size
    all_numbers = np.concatenate(numbers)
    marks = np.zeros(len(all_numbers), np.uint8)
    named = named_columns(cfg)
    nested = tuple(key for key in named.values() if "." in key)
    return Rows(sources, make_row, distinct, all_numbers, marks, named, own_prompts, nested=nested)


def named_columns(cfg: RowsConfig) -> dict[str, str]:
    """Return the settings that name a column by another name than the default: setting -> name."""
    values = dataclasses.asdict(cfg)
    named = {}
    for option in dataclasses.fields(cfg):
        if option.name.endswith("_key") and values[option.name] != option.default:
            named[f"data.{option.name}"] = values[option.name]
    return named


def _value_inside(row: dict, key: str) -> Any:
    """Return what a key with dots leads to: row["a"]["b"] for a.b; None if there is nothing.

    A column that has the dots in its name counts before that.
    """
    if key in row:
        return row[key]
    value: Any = row
    for name in key.split("."):
        if not isinstance(value, dict):
            return None
        value = value.get(name)
    return value


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


def with_images(prompt: RowPrompt, row: dict, place: Place, cfg: RowsConfig) -> RowPrompt:
    """Return the prompt with the images of its row: data.images_key, or the one in `image`.

    A text with images becomes messages, and messages get the form that chat templates want.

    Raises:
        UserError: an image cannot be read, or images and places for them do not match.
    """
    row_images = row.get(cfg.images_key)
    if not row_images and row.get("image") is not None:
        row_images = [row["image"]]
    if isinstance(prompt, str) and not row_images:
        return prompt
    messages = to_messages(prompt, "")
    if has_calls(messages):
        messages = for_template(without_none(messages) if place.source.is_arrow else messages)
    try:
        return attach(messages, row_images or [])
    except BadImage as error:
        raise UserError(f"{place}: {error}") from error


def template_inputs(raw: dict, place: Place, cfg: RowsConfig) -> dict:
    """Return what a chat template gets of a row beside messages, to be added to the row.

    Returns:
        {"template_inputs": arguments of `chat.render`, `tools` and `chat_template_kwargs`, each if
        the row has it}; {} if it has neither.

    Raises:
        UserError: one is not what it should be.
    """
    inputs: dict[str, list[dict] | dict] = {}
    tools = raw.get(cfg.tools_key) if cfg.tools_key else None
    if tools is not None:
        found = read_tools(tools, f"{place}: data.tools_key = {cfg.tools_key!r}")
        if found:
            inputs["tools"] = found
    kwargs = raw.get("chat_template_kwargs")
    if kwargs is not None:
        read = read_template_kwargs(kwargs, f"{place}: chat_template_kwargs")
        if read:
            inputs["chat_template_kwargs"] = read
    return {"template_inputs": inputs} if inputs else {}


def refuse_chats(place: Place, cfg: RowsConfig, *values: object) -> None:
    """Refuse messages where no chat template is to be applied. Raises UserError."""
    if not cfg.apply_chat_template and any(isinstance(value, list) for value in values):
        raise UserError(
            f"{place}: data.apply_chat_template = False takes texts, and the row has messages, "
            "which only a chat template makes a text of; set it to True"
        )
