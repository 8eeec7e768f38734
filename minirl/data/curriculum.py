"""A curriculum: prompts drawn by the variance of their past success."""

import base64
import io

import numpy as np

from minirl.base.errors import require
from minirl.data.order import Mixture, Order
from minirl.data.prompts import Prompts

FIRST_DRAWN = 4096  # Rows that are sorted at once; of millions a step needs few.


class Curriculum(Order):
    """The row that each ticket is, drawn by p(1 - p), the variance of a success of probability p.

    What is always or never right teaches nothing. Rows are drawn without repetition, with weights
    max(4 p (1 - p), floor). p = (right + 1) / (tries + 2), Laplace's rule, is 1/2 for a prompt that
    was never tried, which makes it the most uncertain; the floor lets what was once hopeless or
    easy be tried again. Foster and Foerster 2025 (arXiv 2502.12272).
    """

    def __init__(self, prompts: Prompts, floor: float, saved: str = ""):
        """Draw for the tickets from 0 on.

        Args:
            prompts: whose rows are drawn.
            floor: the least weight of a row (rollout.curriculum_floor).
            saved: what `save` returned in the run that this one goes on with; empty: a new run.

        Raises:
            UserError: the sources of the rows have weights, or `saved` is of other rows.
        """
        require(
            not isinstance(prompts.order, Mixture),
            f"rollout.curriculum_floor = {floor} draws prompts by their success, and the `weight` "
            "of sources in data.train by their source; set it to 0 or give no weights",
        )
        super().__init__(len(prompts.rows), seed=prompts.seed, shuffle=True)
        self.floor = floor
        # int32 [2, N]: how often each row was answered, and how often rightly.
        self.outcomes = np.zeros((2, self.num_rows), np.int32)
        if saved:
            self._load(saved)
        self.weights = self._weights(self.outcomes)  # float64 [N]
        self.first = 0  # The ticket whose row is the first of `_rows`.
        self._keys = np.zeros(0)  # float64 [N]: the rows come in the order of their keys.
        self.start(0)

    def start(self, ticket: int) -> None:
        """Draw for the tickets from this one on.

        The draw is a function of seed, ticket and outcomes, and of no rank. Until the next call, a
        ticket's row stays. The order of E_i / w_i, with E_i exponential, draws without repetition
        by weight: Efraimidis and Spirakis 2006.
        """
        rng = np.random.default_rng([self.seed, ticket])
        self._keys = rng.exponential(size=self.num_rows) / self.weights
        self.first = ticket
        self._rows = first_of(self._keys, FIRST_DRAWN)

    def __getitem__(self, number: int) -> int:
        index = (number - self.first) % self.num_rows
        while index >= len(self._rows):
            self._rows = first_of(self._keys, 4 * len(self._rows))
        return int(self._rows[index])

    def record(self, results: np.ndarray) -> None:
        """Add the results of a step, on whatever rank: int [N, 2], a row and 1 if it was right."""
        rows, right = results.T
        np.add.at(self.outcomes[0], rows, 1)
        np.add.at(self.outcomes[1], rows, right)
        self.weights[rows] = self._weights(self.outcomes[:, rows])

    def save(self) -> str:
        """Return the outcomes as a text for a checkpoint: about 10 bytes for each row with some."""
        rows = np.flatnonzero(self.outcomes[0])
        file = io.BytesIO()
        np.savez_compressed(file, rows=rows, outcomes=self.outcomes[:, rows])
        return base64.b64encode(file.getvalue()).decode()

    def _load(self, saved: str) -> None:
        require(
            isinstance(saved, str),
            "the checkpoint has the curriculum of minirl 0.3.0 or older, which this one cannot "
            "read; resume with that version, or without rollout.curriculum_floor",
        )
        with np.load(io.BytesIO(base64.b64decode(saved))) as arrays:
            rows = arrays["rows"]
            last = rows.max(initial=-1)
            require(
                last < self.num_rows,
                f"the checkpoint has the outcomes of prompt {last}, and data.train has "
                f"{self.num_rows} prompts now; resume with the same data",
            )
            self.outcomes[:, rows] = arrays["outcomes"]

    def _weights(self, outcomes: np.ndarray) -> np.ndarray:
        """Return the weights of rows with these outcomes, int [2, M]."""
        tries, right = outcomes
        p = (right + 1) / (tries + 2)
        return np.maximum(4 * p * (1 - p), self.floor)


def first_of(keys: np.ndarray, num: int) -> np.ndarray:
    """Return the first numbers of `np.argsort(keys, kind="stable")`; the others are not sorted."""
    if num >= len(keys):
        return np.argsort(keys, kind="stable")
    largest = np.partition(keys, num - 1)[num - 1]
    candidates = np.flatnonzero(keys <= largest)
    return candidates[np.argsort(keys[candidates], kind="stable")][:num]
