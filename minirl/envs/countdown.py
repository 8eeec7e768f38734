"""Make a target of some numbers, each used once, by + - * /.

The reply to a wrong answer says what is wrong, and the next turn can correct it.

    --env.name countdown --env.max-turns 2
    --data.train reasoning_gym:countdown?min_numbers=3&max_numbers=3

Rows and prompts are reasoning-gym's. Its grader is not used: it hands the answer to `eval`.
"""

import re

from minirl.base.errors import UserError
from minirl.envs.base import Env, Result, State
from minirl.envs.tools import evaluate


class Countdown(Env):
    """Earn 1 for the target, `form` for another value of the right numbers.

    An episode earns what its best answer does, however many there are.
    """

    needs_prompt = True

    def __init__(self, *, form: float = 0.1):
        self.form = form
        self.best = 0.0
        self.numbers: list[int] = []  # set by `reset`, like the target
        self.target = 0

    def reset(self, row: dict) -> str | list[dict]:
        """Return the row's prompt.

        Raises:
            UserError: for a row of something else.
        """
        try:
            self.numbers = sorted(row["metadata"]["numbers"])
            self.target = row["metadata"]["target"]
        except KeyError as error:
            raise UserError(
                "env.name = countdown needs rows of reasoning_gym:countdown, with metadata.numbers "
                f"and target; one has none: {str(row)[:120]}"
            ) from error
        return row["prompt"]

    def step(self, state: State) -> Result:
        """Grade the last line of an answer."""
        score, reply = self.grade(state.answer.strip().rpartition("\n")[2])
        earned = max(0.0, score - self.best)
        self.best += earned
        return Result(observation=reply, reward=earned, done=score == 1.0)

    def grade(self, expression: str) -> tuple[float, str]:
        """Return the score of an expression, and what is wrong with it."""
        if not re.fullmatch(r"[\d\s()+*/-]+", expression):  # so no number hides in 1e2, 1_2 or 1.2
            return 0.0, "The last line is to be an arithmetic expression, and nothing else."
        try:
            value = evaluate(expression)
        except ValueError as error:
            return 0.0, f"That cannot be calculated: {error}"
        if sorted(map(int, re.findall(r"\d+", expression))) != self.numbers:
            needed = ", ".join(map(str, self.numbers))
            return 0.0, f"Use each of {needed} once, and no other number."
        if value != self.target:
            return self.form, f"That is {value}, not {self.target}."
        return 1.0, ""
