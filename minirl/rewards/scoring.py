"""What an answer earns: a weighted sum of reward functions.

A reward function is any `(prompt, completion, row) -> float`, in any file:

    # my_reward.py
    def brevity(prompt, completion, row):
        return 1.0 if completion.strip() == row["answer"] else -0.01 * len(completion)

    --reward.function my_reward.py:brevity

or a registered one (functions.py), an HTTP endpoint (http.py), a function written for OpenRLHF, TRL
or verl (`openrlhf:file.py`, `trl:file.py:function`, `verl:file.py:function`), or several of them.
`row["rendered_prompt"]` is all that the policy read before this completion.
"""

import copy
import math
import numbers
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from minirl.base.errors import UserError, require
from minirl.base.log import restore_streams, say
from minirl.base.oversight import Oversight
from minirl.config.lookup import cure_of, line_of
from minirl.data.chat import plain
from minirl.rewards import AdaptedReward, Answer, RewardCall, RewardFunction, TrainerState, graders
from minirl.rewards.functions import why_not
from minirl.rewards.http import RemoteReward
from minirl.sandbox import runner


class Rewards:
    """A weighted sum of reward functions."""

    def __init__(
        self,
        *weighted: tuple[float, RewardFunction | AdaptedReward, str],
        seconds: float = math.inf,
        watch: Oversight | None = None,
        has_model: bool = False,
    ):
        """Take the functions.

        Args:
            weighted: weight, function and name of each.
            seconds: time limit of a call of a function that has none of its own.
            watch: of the process, which ends the run if a call takes longer; None: none does.
            has_model: a reward model adds its score later.
        """
        self.weighted = list(weighted)
        self.is_one_of_several = len(weighted) + has_model > 1
        self._has_graders = any(name in graders.GRADERS for _, _, name in weighted)
        self._num_stopped: Counter[str] = Counter()  # By grader, in this process.
        self.seconds = seconds
        self.watch = watch or Oversight()
        self.state = TrainerState()  # The run keeps it up to date, for functions of TRL.

    def check_supported(self) -> None:
        """Refuse a function that cannot work on this machine. Raises UserError."""
        for _, _, name in self.weighted:
            if name == "python_tests":
                runner.check_supported()
            elif name in graders.GRADERS:
                graders.pool(name)  # started before anything is generated

    def check_row(self, row: dict) -> None:
        """Refuse, before anything is generated, what a registered function cannot grade.

        Raises:
            UserError: The row has not what a function reads.
        """
        for _, function, name in self.weighted:
            problem = why_not(name, row)
            if isinstance(function, AdaptedReward):
                problem = function.why_not(row)
            require(not problem, f"reward.function = {name} {problem}: {str(row)[:120]}")

    def __call__(
        self,
        row: dict,
        completion: str,
        info: dict | None = None,
        tokens: Sequence[int] = (),
    ) -> float:
        """Return the reward of a completion that is the only one of its prompt.

        Args:
            row: Of the data, with `prompt` and, for some functions, `rendered_prompt`.
            completion: Without special tokens.
            info: As `total` has it.
            tokens: Of the completion, for functions of TRL.

        Raises:
            UserError: As `grade` does.
        """
        answer = Answer(row=row, completion=completion, call=RewardCall(tokens=list(tokens)))
        self.score_alone(answer)
        self.score_together([answer])
        return self.total(answer, info)

    def score_alone(self, answer: Answer) -> None:
        """Call the functions that look at one completion. Raises UserError as `grade` does."""
        answer.call.state = self.state
        for _, function, name in self.weighted:
            if not is_together(function):
                [answer.values[name]] = self.grade_in_time(function, name, [answer])

    def score_together(self, answers: Sequence[Answer]) -> None:
        """Call the functions that compare the completions of a prompt. Raises as `grade` does."""
        for _, function, name in self.weighted:
            if answers and is_together(function):
                values = self.grade_in_time(function, name, answers)
                for answer, value in zip(answers, values, strict=True):
                    answer.values[name] = value

    def total(self, answer: Answer, info: dict | None = None) -> float:
        """Return the weighted sum, without functions that do not apply.

        Args:
            answer: That all functions have scored.
            info: If several rewards are added, `info["rewards"]` is set to name -> value. If one
                is a grader of another package, `info["graders"]["stopped"]` to whether it reached a
                limit or failed. What functions log is in `info["reward_metrics"]` (name -> mean)
                and `info["reward_columns"]`.
        """
        values = {name: answer.values[name] for _, _, name in self.weighted}
        call = answer.call
        stopped = {n: v for n, v in values.items() if isinstance(v, graders.StoppedGrade)}
        for name, value in stopped.items():
            self._num_stopped[name] += 1
            count = self._num_stopped[name]
            if count & (count - 1) == 0:  # The 1st, 2nd, 4th, 8th, ...
                say(
                    f"{name} could not grade an answer, which earns 0 ({value.why}); {count} so "
                    f"far in this process: {answer.completion[:80]!r}"
                )
        applying = {name: value for name, value in values.items() if value is not None}
        if info is not None and self.is_one_of_several:
            info["rewards"] = {name: float(value) for name, value in applying.items()}
        if info is not None and call.metrics:
            info["reward_metrics"] = {n: sum(v) / len(v) for n, v in call.metrics.items()}
        if info is not None and call.columns:
            info["reward_columns"] = call.columns
        if info is not None and self._has_graders:
            info["graders"] = {"stopped": float(bool(stopped))}
        # Added exactly: weights of 0.7, 0.2 and 0.1 make 1, which may be `eval.threshold`.
        return math.fsum(weight * applying[n] for weight, _, n in self.weighted if n in applying)

    def grade_in_time(
        self, function: RewardFunction | AdaptedReward, name: str, answers: Sequence[Answer]
    ) -> list[float | None]:
        """Return what `grade` does; a call that takes too long ends the run."""
        # Endpoints, graders and the sandbox end a call in time by themselves.
        has_limit = isinstance(function, RemoteReward) or name in (*graders.GRADERS, "python_tests")
        seconds = math.inf if has_limit else self.seconds * len(answers)

        def describe_too_slow() -> str:
            times = f" times {len(answers)} completions" if len(answers) > 1 else ""
            return (
                f"reward.function = {name} took longer than reward.timeout_seconds = "
                f"{self.seconds:g}{times} for {_inputs(answers)}; make it faster, or raise "
                "reward.timeout_seconds"
            )

        with self.watch.limit(seconds, describe_too_slow):
            values = grade(function, name, answers)
        if closed := restore_streams():
            say(f"reward.function = {name} has closed {closed}, which is open again")
        return values


def is_together(function: RewardFunction | AdaptedReward) -> bool:
    """Whether a function is called for all completions of a prompt at once."""
    return isinstance(function, AdaptedReward) and function.together


def _inputs(answers: Sequence[Answer]) -> str:
    """Return what a function was called with, for errors."""
    first = answers[0]
    others = f" and {len(answers) - 1} others" if len(answers) > 1 else ""
    prompt = str(plain(first.row["prompt"]))[:80]
    return f"prompt {prompt!r}, completion {first.completion[:80]!r}{others}"


def grade(
    function: RewardFunction | AdaptedReward, name: str, answers: Sequence[Answer]
) -> list[float | None]:
    """Return what one function gives for completions of one prompt; None: it does not apply.

    Args:
        function: one that is not called together gets one completion.
        name: of the function.
        answers: the completions.

    Raises:
        UserError: The function raises, or returns anything but finite numbers. The answer cannot
            be left out of its group, and any number in place of its reward would be learned.
    """
    inputs = _inputs(answers)
    try:
        # Rows of their own: the samples of a prompt are scored at the same time, from one row.
        own = [replace(answer, row=copy.deepcopy(answer.row)) for answer in answers]
        values: Sequence[Any]
        if isinstance(function, AdaptedReward):
            values = function.score_all(own)
        else:
            values = [function(each.row["prompt"], each.completion, each.row) for each in own]
        wrong = []
        for v in values:
            is_finite = isinstance(v, numbers.Real | np.bool_) and math.isfinite(v)
            if not is_finite and not (v is None and is_together(function)):
                wrong.append(v)
    except UserError:
        raise
    # The user's code may raise anything. sys.exit is no end of the run, either.
    except BaseException as error:
        raise UserError(
            f"reward.function = {name} raised {type(error).__name__}: {error} for "
            f"{inputs}{line_of(error)}{cure_of(error)}"
        ) from error
    require(
        not wrong,
        f"reward.function = {name} returned {wrong and wrong[0]!r} for {inputs}; it must return "
        "one finite number (those of TRL, trl:file.py:function, may be async or return None)",
    )
    # A stopped grade says why it is 0.
    return [v if v is None or isinstance(v, graders.StoppedGrade) else float(v) for v in values]
