"""The order in which rows are used: a function of the seed and the number of the example alone."""

from collections.abc import Sequence

import numpy as np

from minirl.base.errors import require
from minirl.data.rows import Rows


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
        epoch, index = divmod(number, self.num_rows)
        return int(self._epoch_rows(epoch)[index])

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


class Mixture(Order):
    """The order of rows whose sources have weights.

    An epoch is as long as there are rows. Each source has its share of it, spread at random. The
    rows of a source come from permutations of its own that run on from epoch to epoch, so that
    after each epoch all its rows have come equally often (or once more).
    """

    def __init__(self, rows: Rows, *, seed: int):
        """Divide an epoch among the sources.

        Raises:
            UserError: a source has no rows left, or its weight is too small for one example.
        """
        super().__init__(len(rows), seed=seed, shuffle=True)
        weights = np.array([source.weight for source in rows.sources])
        exact = weights / sum(weights) * len(rows)
        counts = np.floor(exact).astype(int)  # examples of each source in an epoch
        largest_remainders = np.argsort(counts - exact, kind="stable")
        counts[largest_remainders[: len(rows) - counts.sum()]] += 1
        self.shares = []  # of each source: its rows, the order among them, examples in an epoch
        source_numbers = rows.source_numbers()
        for i, source in enumerate(rows.sources):
            numbers = np.flatnonzero(source_numbers == i)
            count = int(counts[i])
            require(
                len(numbers) and count,
                f"{source.label}: {count} of {len(rows)} examples by its weight, from "
                f"{len(numbers)} rows; raise its weight or leave it out",
            )
            order = Order(len(numbers), seed=[seed, i], shuffle=True)
            self.shares.append((numbers, order, count))

    def _rows_of(self, epoch: int) -> np.ndarray:
        parts = []
        for numbers, order, count in self.shares:
            parts.append(numbers[order.rows(epoch * count, (epoch + 1) * count)])
        return np.concatenate(parts)


def make_order(rows: Sequence[dict], *, seed: int, shuffle: bool) -> Order:
    """Return the order of rows in training (`shuffle`), or in evaluation, where it is their own."""
    if shuffle and isinstance(rows, Rows) and rows.sources[0].weight is not None:
        return Mixture(rows, seed=seed)
    return Order(len(rows), seed=seed, shuffle=shuffle)
