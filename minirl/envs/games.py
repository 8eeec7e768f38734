"""Two games in which later turns need what earlier ones brought.

Guess a number; each wrong guess is answered by "higher" or "lower". Halving the range finds 15 of
16 numbers in 4 turns, chance finds 4. A row only gives the number, by an integer `answer`; its
prompt is not shown.

    --env.name guess?high=16 --env.max-turns 4 --data.train rows.jsonl

Make a target of some numbers, each used once, by + - * /. The reply to a wrong answer says what is
wrong, and the next turn can correct it. Rows and prompts are reasoning-gym's. Its grader is not
used: it hands the answer to `eval`.

    --env.name countdown --env.max-turns 2
    --data.train reasoning_gym:countdown?min_numbers=3&max_numbers=3
"""

import re

from minirl.base.errors import UserError
from minirl.envs import Env, Result, State
from minirl.envs.tools import evaluate


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
