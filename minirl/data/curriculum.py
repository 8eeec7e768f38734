"""A curriculum: prompts drawn by the variance of their past success."""

import numpy as np

from minirl.data.datasets import Mixture, Order, Prompts
from minirl.errors import require


class Curriculum(Order):
    """Which row a ticket is, where p(1 - p) decides, the variance of a success of probability p:
    what is always or never right teaches nothing.

    Rows are drawn without repetition, with weights max(4 p (1 - p), floor). p = (right + 1) /
    (tries + 2), Laplace's rule, is 1/2 for a prompt never tried, which makes it the most uncertain;
    the floor lets what was once hopeless or easy be tried again. Foster and Foerster 2025 (arXiv
    2502.12272).
    """

    def __init__(self, prompts: Prompts, floor: float, outcomes: dict[str, list[int]]):
        """`outcomes`: row -> [tries, right], which `record` adds to, for checkpoints (keys as JSON
        has them). Raises UserError.
        """
        require(
            not isinstance(prompts.order, Mixture),
            f"rollout.curriculum_floor = {floor} draws prompts by their success, and the `weight` of "
            "sources in data.train by their source; set it to 0 or give no weights",
        )
        super().__init__(len(prompts.rows), seed=prompts.seed, shuffle=True)
        self.floor, self.outcomes = floor, outcomes
        self.start(0)

    def start(self, ticket: int) -> None:
        """Draw for the tickets from this one on: a function of seed, ticket and outcomes, and of no
        rank. Until the next call, a ticket's row stays.

        The order of E_i / w_i, E_i exponential, draws without repetition by weight: Efraimidis and
        Spirakis 2006.
        """
        tries, right = np.zeros((2, self.num_rows))
        seen = np.fromiter(map(int, self.outcomes), np.int64)
        tries[seen], right[seen] = np.array(list(self.outcomes.values())).reshape(-1, 2).T
        p = (right + 1) / (tries + 2)
        keys = np.random.default_rng([self.seed, ticket]).exponential(
            size=self.num_rows
        ) / np.maximum(4 * p * (1 - p), self.floor)
        self.first, self._rows = ticket, np.argsort(keys, kind="stable")

    def __getitem__(self, number: int) -> int:
        return int(self._rows[(number - self.first) % self.num_rows])

    def record(self, results: list[tuple[int, bool]]) -> None:
        """Row of each answer of a step, on whatever rank, and whether it was right."""
        for row, right in results:
            outcome = self.outcomes.setdefault(str(row), [0, 0])
            outcome[0] += 1
            outcome[1] += int(right)
