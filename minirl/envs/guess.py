"""Guess a number; each wrong guess is answered by "higher" or "lower".

It is the smallest task in which later turns need what earlier ones brought.

    --env.name guess?high=16 --env.max-turns 4 --data.train rows.jsonl

Halving the range finds 15 of 16 numbers in 4 turns, chance finds 4. A row only gives the number, by
an integer `answer`; its prompt is not shown.
"""

import re

from minirl.base.errors import UserError
from minirl.envs.base import Env, Result, State


class Guess(Env):
    """Earn 1 for the number within the turns of an episode, else 0."""

    def __init__(self, *, high: int = 16):
        if not isinstance(high, int) or high < 2:
            raise ValueError(f"high = {high!r} must be an integer of at least 2")
        self.high = high
        self.number = 0  # set by `reset`

    def reset(self, row: dict) -> str:
        """Choose the number that the row's answer stands for.

        Raises:
            UserError: for a row without an integer answer.
        """
        try:
            self.number = 1 + int(row["answer"]) % self.high
        except (KeyError, ValueError) as error:
            raise UserError(
                "env.name = guess makes its number of an integer `answer` (data.answer_key), and a "
                f"row has none: {str(row)[:120]}"
            ) from error
        return f"I think of a number from 1 to {self.high}. Which?"

    def step(self, state: State) -> Result:
        """Compare a guess with the number."""
        answer = state.answer.strip()
        if not re.fullmatch(r"\d{1,9}", answer):
            return Result(observation="That is not a number.")
        guess = int(answer)
        if guess == self.number:
            return Result(reward=1.0, done=True, info={"turns": state.turn + 1})
        return Result(observation="higher" if guess < self.number else "lower")
