"""Rows of all sources, each read and made when it is asked for."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from minirl.base.errors import UserError, require
from minirl.config.shared import RowsConfig
from minirl.data.messages import from_sharegpt
from minirl.data.sources import Source, open_source
from minirl.parallel.machines import check_same
from minirl.parallel.mesh import Mesh

BLOCK_ROWS = 128  # Rows that are read from a source at once.


class Place(NamedTuple):
    """Where a row is from; as a text it is what an error message begins with."""

    source: Source
    number: int  # The number of the row in the source.

    def __str__(self) -> str:
        return self.source.where(self.number)


@contextlib.contextmanager
def errors_at(place: Place) -> Iterator[None]:
    """Begin the message of a UserError in the block by the place of the row that it is about."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{place}: {error}") from error


# make_row(raw, source): a row of what its source holds.
MakeRow = Callable[[dict, Source], dict]


@dataclass(eq=False)
class Rows(Sequence[dict]):
    """Rows of some sources, each made when it is asked for; memory holds only their numbers."""

    sources: list[Source]  # What the rows are read from, end to end.
    make_row: MakeRow  # Makes a row of what its source holds.
    distinct: bool  # Of equal rows only the first is to be used.
    numbers: np.ndarray  # int [N]: the number of each row in the sources, end to end.
    marks: np.ndarray  # uint8 [N]: what `read_rows` noted of each row; 0 before.
    # Columns that the user has named by another name than the default: setting -> name,
    named: dict[str, str] = field(default_factory=dict)
    # and the settings of those that no row has been seen with so far.
    missing: set[str] = field(default_factory=set)
    # Whether an environment may make the prompts, so that all rows may have the empty one.
    env_prompts: bool = False
    num_doubles: int = 0  # Rows that `read_rows` left out, because they equal others.
    # int64 [S]: the number of each source's first row.
    first_numbers: np.ndarray = field(init=False)

    def __post_init__(self):
        sizes = [len(source.rows) for source in self.sources]
        self.first_numbers = np.cumsum([0, *sizes[:-1]])

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, i: int) -> dict:  # type: ignore[override]  # takes no slices
        place = self.place(i)
        return self._make(place.source.rows[place.number], *place)

    def place(self, i: int) -> Place:
        """Return where a row is from."""
        number = int(self.numbers[i])
        source = int(np.searchsorted(self.first_numbers, number, side="right")) - 1
        return Place(self.sources[source], number - int(self.first_numbers[source]))

    def source_numbers(self) -> np.ndarray:
        """Return the number of each row's source, int64."""
        return np.searchsorted(self.first_numbers, self.numbers, side="right") - 1

    def first_marked(self, bit: int) -> int | None:
        """Return which row is the first with this mark; None: no row has it."""
        marked = np.flatnonzero(self.marks & bit)
        return int(marked[0]) if len(marked) else None

    def take(self, chosen: np.ndarray) -> "Rows":
        """Return some of the rows, by their places here or by a mask; nothing is read for it."""
        return replace(self, numbers=self.numbers[chosen], marks=self.marks[chosen])

    def read(self, first: int, last: int) -> Iterator[dict]:
        """Make the rows from `first` to before `last`; many are read from a source at once.

        Args:
            first: the place of a row here. Rows must be all of their sources, as `open_rows`
                returns them.
            last: the place after the last row.
        """
        while first < last:
            source, number = self.place(first)
            # Where a source ends, the numbers of the next one need not follow (data.max_samples).
            most = min(BLOCK_ROWS, last - first, len(source.rows) - number)
            numbers = self.numbers[first : first + most].astype(np.int64)
            size = int(np.count_nonzero(numbers - numbers[0] == np.arange(most)))
            for raw in source.read(number, number + size):
                yield self._make(raw, source, number)
                number += 1
            first += size

    def _make(self, raw: object, source: Source, number: int) -> dict:
        """Make a row of what its source holds. Raises UserError with its place."""
        if not isinstance(raw, dict):
            raise UserError(
                f"{source.where(number)}: a row must be an object of named values, not a "
                f"{type(raw).__name__}"
            )
        for setting, key in self.named.items():
            if "." in key and (value := _value_inside(raw, key)) is not None:
                raw = {**raw, key: value}
            if key in raw:
                self.missing.discard(setting)
        try:
            return self.make_row(from_sharegpt(raw), source)
        except UserError as error:
            raise UserError(f"{source.where(number)}: {error}") from error


def open_rows(
    source: str | list[str],
    setting: str,
    make_row: MakeRow,
    cfg: RowsConfig,
    mesh: Mesh,
    *,
    distinct: bool = False,
    env_prompts: bool = False,
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
        env_prompts: an environment may make the prompts of the rows.

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

    values = dataclasses.asdict(cfg)
    named = {}
    for option in dataclasses.fields(cfg):
        if option.name.endswith("_key") and values[option.name] != option.default:
            named[f"data.{option.name}"] = values[option.name]
    return Rows(
        sources,
        make_row,
        distinct,
        all_numbers,
        marks=np.zeros(len(all_numbers), np.uint8),
        named=named,
        missing=set(named),
        env_prompts=env_prompts,
    )


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
