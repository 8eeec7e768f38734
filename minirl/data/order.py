"""Orders of rows that are no plain permutation: by the weights of sources, and by success."""

import base64
import io
from collections.abc import Sequence

import numpy as np

from minirl.base.errors import require
from minirl.data.rows import Order, Rows


class WeightedOrder(Order):
    """The order of rows from sources with weights.

    An epoch is as long as there are rows. Each source has its share of it, spread at random. The
    rows of a source come from its permutations, which continue from epoch to epoch, so that after
    each epoch all its rows have come equally often (or once more).
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
    """Return the order of rows in training (`shuffle`), or in evaluation, as they are."""
    if shuffle and isinstance(rows, Rows) and rows.sources[0].weight is not None:
        return WeightedOrder(rows, seed=seed)
    return Order(len(rows), seed=seed, shuffle=shuffle)


class Curriculum(Order):
    """The row that each ticket is, drawn by p(1 - p), the variance of a success of probability p.

    What is always or never right teaches nothing. Rows are drawn without repetition, with weights
    max(4 p (1 - p), floor). p = (right + 1) / (tries + 2), Laplace's rule, is 1/2 for a prompt that
    was never tried, which makes it the most uncertain; the floor lets what was once hopeless or
    easy be tried again. Foster and Foerster 2025 (arXiv 2502.12272).
    """

    def __init__(self, order: Order, floor: float, saved: str = ""):
        """Draw for the tickets from 0 on.

        Args:
            order: the order of the rows without a curriculum, which has their number and the seed.
            floor: the least weight of a row (rollout.curriculum_floor).
            saved: what `save` returned in the run that this one resumes; empty: a new run.

        Raises:
            UserError: the sources of the rows have weights, or `saved` is of other rows.
        """
        require(
            not isinstance(order, WeightedOrder),
            f"rollout.curriculum_floor = {floor} draws prompts by their success, and the `weight` "
            "of sources in data.train by their source; set it to 0 or give no weights",
        )
        super().__init__(order.num_rows, seed=order.seed, shuffle=True)
        self.floor = floor
        # int32 [2, N]: how often each row was answered, and how often rightly.
        self.outcomes = np.zeros((2, self.num_rows), np.int32)
        if saved:
            with np.load(io.BytesIO(base64.b64decode(saved))) as arrays:
                rows = arrays["rows"]
                last = rows.max(initial=-1)
                require(
                    last < self.num_rows,
                    f"the checkpoint has the outcomes of prompt {last}, and data.train has "
                    f"{self.num_rows} prompts now; resume with the same data",
                )
                self.outcomes[:, rows] = arrays["outcomes"]
        self.weights = self._weights(self.outcomes)  # float64 [N]
        self.first = 0  # The ticket that gets the first of `_rows`.
        self.start(0)

    def start(self, ticket: int) -> None:
        """Draw for the tickets from this one on.

        The draw is a function of seed, ticket and outcomes, and of no rank. Until the next call, a
        ticket's row stays. The order of E_i / w_i, with E_i exponential, draws without repetition
        by weight: Efraimidis and Spirakis 2006.
        """
        rng = np.random.default_rng([self.seed, ticket])
        keys = rng.exponential(size=self.num_rows) / self.weights
        self.first = ticket
        self._rows = np.argsort(keys, kind="stable")

    def __getitem__(self, number: int) -> int:
        return int(self._rows[(number - self.first) % self.num_rows])

    def record(self, results: np.ndarray) -> None:
        """Add the results of a step, on whatever rank: int [N, 2], a row and 1 if it was right."""
        rows, is_right = results.T
        tries, right = self.outcomes
        np.add.at(tries, rows, 1)
        np.add.at(right, rows, is_right)
        self.weights[rows] = self._weights(self.outcomes[:, rows])

    def save(self) -> str:
        """Return the outcomes as a text for a checkpoint: about 10 bytes for each row with some."""
        tries, _ = self.outcomes
        rows = np.flatnonzero(tries)
        file = io.BytesIO()
        np.savez_compressed(file, rows=rows, outcomes=self.outcomes[:, rows])
        return base64.b64encode(file.getvalue()).decode()

    def _weights(self, outcomes: np.ndarray) -> np.ndarray:
        """Return the weights of rows with these outcomes, int [2, M]."""
        tries, right = outcomes
        p = (right + 1) / (tries + 2)
        return np.maximum(4 * p * (1 - p), self.floor)
