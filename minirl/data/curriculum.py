"""A curriculum: prompts drawn by the variance of their past success."""

import numpy as np

from minirl.data.order import Mixture, Order
from minirl.data.prompts import Prompts
from minirl.errors import require


class Curriculum(Order):
    """The row that each ticket is, drawn by p(1 - p), the variance of a success of probability p.

    What is always or never right teaches nothing. Rows are drawn without repetition, with weights
    max(4 p (1 - p), floor). p = (right + 1) / (tries + 2), Laplace's rule, is 1/2 for a prompt that
    was never tried, which makes it the most uncertain; the floor lets what was once hopeless or
    easy be tried again. Foster and Foerster 2025 (arXiv 2502.12272).
    """

    def __init__(self, prompts: Prompts, floor: float, outcomes: dict[str, list[int]]):
        """Draw for the tickets from 0 on.

        Args:
            prompts: whose rows are drawn.
            floor: the least weight of a row (rollout.curriculum_floor).
            outcomes: row -> [tries, right], which `record` adds to; checkpoints hold it, so the
                rows are texts, as the keys of JSON are.

        Raises:
            UserError: the sources of the rows have weights.
        """
        require(
            not isinstance(prompts.order, Mixture),
            f"rollout.curriculum_floor = {floor} draws prompts by their success, and the `weight` "
            "of sources in data.train by their source; set it to 0 or give no weights",
        )
        super().__init__(len(prompts.rows), seed=prompts.seed, shuffle=True)
        self.floor = floor
        self.outcomes = outcomes
        self.first = 0  # The ticket whose row is the first of `_rows`.
        self.start(0)

    def start(self, ticket: int) -> None:
        """Draw for the tickets from this one on.

        The draw is a function of seed, ticket and outcomes, and of no rank. Until the next call, a
        ticket's row stays. The order of E_i / w_i, with E_i exponential, draws without repetition
        by weight: Efraimidis and Spirakis 2006.
        """
        outcomes = np.zeros((self.num_rows, 2))
        for row, outcome in self.outcomes.items():
            outcomes[int(row)] = outcome
        tries, right = outcomes.T
        p = (right + 1) / (tries + 2)
        weights = np.maximum(4 * p * (1 - p), self.floor)
        rng = np.random.default_rng([self.seed, ticket])
        keys = rng.exponential(size=self.num_rows) / weights
        self.first = ticket
        self._rows = np.argsort(keys, kind="stable")

    def __getitem__(self, number: int) -> int:
        return int(self._rows[(number - self.first) % self.num_rows])

    def record(self, results: list[tuple[int, bool]]) -> None:
        """Add the (row, whether it was right) of every answer of a step, on whatever rank."""
        for row, right in results:
            outcome = self.outcomes.setdefault(str(row), [0, 0])
            outcome[0] += 1
            outcome[1] += right
