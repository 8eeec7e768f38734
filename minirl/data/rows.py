"""Rows of all sources, each made when it is asked for, and the order in which they are used."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from minirl.base.errors import UserError

if TYPE_CHECKING:
    from minirl.data.sources import Source

BLOCK_ROWS = 128  # Rows that are read from a source at once.


class Place(NamedTuple):
    """Where a row is from; as a text it is what an error message begins with."""

    source: "Source"
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
MakeRow = Callable[[dict, "Source"], dict]


@dataclass(eq=False)
class Rows(Sequence[dict]):
    """Rows of some sources, each made when it is asked for; memory holds only their numbers."""

    sources: list["Source"]  # What the rows are read from, end to end.
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

    def _make(self, raw: object, source: "Source", number: int) -> dict:
        """Make a row of what its source holds. Raises UserError with its place."""
        try:
            if not isinstance(raw, dict):
                kind = type(raw).__name__
                raise UserError(f"a row must be an object of named values, not a {kind}")
            for setting, key in self.named.items():
                value: Any = raw  # What dots lead to: row["a"]["b"] for a.b.
                for name in key.split("."):
                    value = value.get(name) if isinstance(value, dict) else None
                if value is not None and key not in raw:
                    raw = {**raw, key: value}
                if key in raw:
                    self.missing.discard(setting)
            return self.make_row(raw, source)
        except UserError as error:
            raise UserError(f"{source.where(number)}: {error}") from error


class Order:
    """The row that each example is.

    The examples 0, 1, 2, ... run through a new permutation of the rows in every epoch (through the
    rows as they are, without `shuffle`). It is a function of the seed alone.
    """

    def __init__(self, num_rows: int, *, seed: int | list[int], shuffle: bool):
        self.num_rows = num_rows
        self.seed = seed
        self.shuffle = shuffle
        self._epoch = -1  # the epoch that `_rows` are of
        self._rows = np.arange(0 if shuffle else num_rows)

    def __getitem__(self, number: int) -> int:
        return int(self.rows(number, number + 1)[0])

    def rows(self, first: int, last: int) -> np.ndarray:
        """Return the rows of the examples from `first` to before `last`, int64."""
        parts = [np.zeros(0, np.int64)]
        while first < last:
            epoch, index = divmod(first, self.num_rows)
            parts.append(self._epoch_rows(epoch)[index : index + last - first])
            first += len(parts[-1])
        return np.concatenate(parts)

    def _epoch_rows(self, epoch: int) -> np.ndarray:
        """Return the rows of an epoch in their order, [num_rows]."""
        if self.shuffle and epoch != self._epoch:
            rng = np.random.default_rng([self.seed, epoch])
            self._rows = rng.permutation(self._rows_of(epoch))
            self._epoch = epoch
        return self._rows

    def _rows_of(self, epoch: int) -> np.ndarray:
        """Return the rows that an epoch uses, [num_rows], before they are shuffled."""
        return np.arange(self.num_rows)
