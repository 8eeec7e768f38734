"""A number is guessed, and each wrong guess is told on which side it lies: the smallest task in
which later turns need what earlier ones brought.

    --env.name guess?high=16 --env.max-turns 4 --data.train rows.jsonl

Halving the range finds 15 of 16 numbers in 4 turns, chance 4. A row gives the number only, by an
integer `answer`; its prompt is not shown.
"""

import re

from minirl.envs.base import Env, Result, State
from minirl.errors import UserError


class Guess(Env):
    """1 for the number within the turns that there are, else 0."""

    def __init__(self, *, high: int = 16):
        if not isinstance(high, int) or high < 2:
            raise ValueError(f"high = {high!r} must be a number from 2 up")
        self.high = high

    def reset(self, row: dict) -> str:
        try:
            self.number = 1 + int(row["answer"]) % self.high
        except (KeyError, ValueError) as error:
            raise UserError(
                f"env.name = guess makes its number of an integer `answer`, and a row has none (data.answer_key): {str(row)[:120]}"
            ) from error
        return f"I think of a number from 1 to {self.high}. Which?"

    def step(self, state: State) -> Result:
        answer = state.answer.strip()
        if not re.fullmatch(r"\d{1,9}", answer):
            return Result(observation="That is not a number.")
        if int(answer) == self.number:
            return Result(reward=1.0, done=True, info={"turns": state.turn + 1})
        return Result(observation="higher" if int(answer) < self.number else "lower")
