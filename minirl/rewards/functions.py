"""What an answer earns: a weighted sum of reward functions, and the registered functions.

A reward function is any `(prompt, completion, row) -> float`, in any file:

    # my_reward.py
    def brevity(prompt, completion, row):
        return 1.0 if completion.strip() == row["answer"] else -0.01 * len(completion)

    --reward.function my_reward.py:brevity

or an HTTP endpoint (rewards/http.py), or a function written for OpenRLHF, TRL or verl
(`openrlhf:file.py`, `trl:file.py:function`, `verl:file.py:function`), or several of them.
`row["rendered_prompt"]` is the prompt as the policy reads it.
"""

import copy
import math
import numbers
import re
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import numpy as np

import minirl
from minirl.base.errors import UserError, require
from minirl.base.log import restore_streams, say
from minirl.base.oversight import Oversight
from minirl.config.lookup import find_function
from minirl.config.shared import RewardConfig
from minirl.rewards import (
    AdaptedReward,
    Answer,
    RewardCall,
    RewardFunction,
    RowPrompt,
    TrainerState,
    graders,
)
from minirl.rewards.adapters import foreign_prefix
from minirl.rewards.http import RemoteReward
from minirl.sandbox import runner

# What makes a reward function of the text after a prefix; imported when it is needed.
ADAPTERS = {
    "openrlhf": "minirl.envs.adapters.openrlhf:reward",
    "trl": "minirl.rewards.adapters:trl_reward",
    "verl": "minirl.rewards.adapters:verl_reward",
}

PACKAGE = str(Path(minirl.__file__).parent)
CURE = (
    "rewards run in threads, and Python handles signals in the main thread only: do without them, "
    "as math-verify does with parse(..., parsing_timeout=None) and verify(..., "
    "timeout_seconds=None)"
)

FENCE_FLAGS = re.DOTALL | re.IGNORECASE


class Rewards:
    """A weighted sum of reward functions."""

    def __init__(
        self,
        *weighted: tuple[float, RewardFunction | AdaptedReward, str],
        seconds: float = math.inf,
        watch: Oversight | None = None,
    ):
        """Take the functions.

        Args:
            weighted: weight, function and name of each.
            seconds: time limit of a call of a function that has none of its own.
            watch: of the process, which ends the run if a call takes longer; None: none does.
        """
        self.weighted: tuple[tuple[float, RewardFunction | AdaptedReward, str], ...] = weighted
        self._has_graders = any(name in graders.GRADERS for _, _, name in weighted)
        self._stop_reports = graders.StopReports()
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
            if isinstance(function, AdaptedReward):
                problem = function.why_not(row)
                if not problem:
                    continue
            elif name in ("exact", "final_answer", "math_verify"):
                problem = _why_no_answer(row.get("answer"))
                if not problem:
                    continue
            elif name == "python_tests" and not isinstance(row.get("tests"), str):
                problem = "runs the text in the column `tests`, and a row has none"
            elif name == "reasoning_gym" and not _names_generator(row):
                problem = "needs rows with metadata.source_dataset, and a row has none"
            else:
                continue
            raise UserError(f"reward.function = {name} {problem}: {str(row)[:120]}")

    @property
    def together(self) -> bool:
        """Whether a function is called for all completions of a prompt at once."""
        return any(is_together(function) for _, function, _ in self.weighted)

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
            info: If there are several functions, `info["rewards"]` is set to name -> value. If one
                is a grader of another package, `info["graders"]["stopped"]` to whether it reached a
                limit or failed. What functions log is in `info["reward_metrics"]` (name -> mean)
                and `info["reward_columns"]`.
        """
        values = {name: answer.values[name] for _, _, name in self.weighted}
        call = answer.call
        stopped = {n: v for n, v in values.items() if isinstance(v, graders.StoppedGrade)}
        for name, value in stopped.items():
            self._stop_reports.report(name, value, answer.completion)
        applying = {name: value for name, value in values.items() if value is not None}
        if info is not None and len(values) > 1:
            info["rewards"] = {name: float(value) for name, value in applying.items()}
        if info is not None and call.metrics:
            info["reward_metrics"] = {n: sum(v) / len(v) for n, v in call.metrics.items()}
        if info is not None and call.columns:
            info["reward_columns"] = {n: to_plain(value) for n, value in call.columns.items()}
        if info is not None and self._has_graders:
            info["graders"] = {"stopped": float(bool(stopped))}
        weights = {name: weight for weight, _, name in self.weighted}
        return sum((weights[name] * value for name, value in applying.items()), 0.0)

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

    def replace(self, name: str, function: AdaptedReward) -> None:
        """Take another function in place of that of this name."""
        self.weighted = tuple(
            (weight, function if own_name == name else own, own_name)
            for weight, own, own_name in self.weighted
        )


def _why_no_answer(answer: object) -> str:
    """Return why nothing compares with this answer; empty: it is a text or a number."""
    if answer is None:
        return "compares with the answer, and a row has none (data.answer_key)"
    if isinstance(answer, str):
        return ""
    is_number = isinstance(answer, int | float) and math.isfinite(answer)
    if is_number and not isinstance(answer, bool):
        return ""
    return (
        f"compares with the answer, and that of a row is {str(answer)[:80]} "
        f"({type(answer).__name__}); make it a text or a finite number (data.answer_key)"
    )


def to_plain(value: object) -> object:
    """Return a value that a function logs as JSON can hold it; a text of it, if it is no such."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): to_plain(item) for key, item in value.items()}
    return str(value)


def is_together(function: RewardFunction | AdaptedReward) -> bool:
    """Whether a function is called for all completions of a prompt at once."""
    return isinstance(function, AdaptedReward) and function.together


def _inputs(answers: Sequence[Answer]) -> str:
    """Return what a function was called with, for errors."""
    first = answers[0]
    others = f" and {len(answers) - 1} others" if len(answers) > 1 else ""
    return f"prompt {str(first.row['prompt'])[:80]!r}, completion {first.completion[:80]!r}{others}"


def _names_generator(row: dict) -> bool:
    metadata = row.get("metadata")
    return isinstance(metadata, dict) and isinstance(metadata.get("source_dataset"), str)


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
            [answer] = own
            values = [function(answer.row["prompt"], answer.completion, answer.row)]
        wrong = [v for v in values if v is not None and not _is_finite(v)]
        if not isinstance(function, AdaptedReward):
            wrong += [v for v in values if v is None]
    except UserError:
        raise
    # The user's code may raise anything. sys.exit is no end of the run, either.
    except BaseException as error:
        cure = f"; {CURE}" if needs_main_thread(error) else ""
        raise UserError(
            f"reward.function = {name} raised {type(error).__name__}: {error} for {inputs}{cure}"
        ) from error
    require(
        not wrong,
        f"reward.function = {name} returned {wrong and wrong[0]!r} for {inputs}; "
        "it must return one finite number",
    )
    # A stopped grade says why it is 0.
    return [v if v is None or isinstance(v, graders.StoppedGrade) else float(v) for v in values]


def needs_main_thread(error: BaseException | None) -> bool:
    """Return whether an error, or one that it comes from, says that a thread handles no signals."""
    while error is not None:
        if isinstance(error, ValueError) and "signal only works in main thread" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


class RaisedThereError(Exception):
    """What a function has raised in a worker.

    Args:
        is_mistake: as the function of this name says.
    """

    def __init__(self, is_mistake: bool):
        super().__init__()
        self.is_mistake = is_mistake


def is_mistake(error: BaseException | None) -> bool:
    """Return whether an error is of a reward function itself, whatever the completion was.

    Args:
        error: what it raised; None: it returned what is no number.
    """
    if isinstance(error, RaisedThereError):
        return error.is_mistake
    if error is None or type(error) in (NameError, ImportError, ModuleNotFoundError):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    has_entered = any(not frame.filename.startswith(PACKAGE) for frame in frames)
    return needs_main_thread(error) or not has_entered


def _is_finite(value: Any) -> bool:
    return isinstance(value, numbers.Real | np.bool_) and math.isfinite(value)


def make_rewards(cfg: RewardConfig, watch: Oversight | None = None) -> Rewards:
    """Return the sum that `reward.function` and `reward.weights` describe.

    Args:
        cfg: the section of the config.
        watch: of the process, for reward.timeout_seconds; None: there is no time limit.

    Raises:
        UserError: A function is not found, or functions and weights do not fit.
    """
    names = [cfg.function] if isinstance(cfg.function, str) else cfg.function
    names = [name for name in names if name]
    settings = f"reward.function = {cfg.function}, reward.weights = {cfg.weights}"
    require(names or cfg.model, f"{settings}: nothing scores; name a function, or set reward.model")
    require(len(set(names)) == len(names), f"{settings}: a function is named twice; name it once")
    require(
        len(cfg.weights) in (0, len(names)),
        f"{settings}: there are {len(cfg.weights)} weights for {len(names)} functions; "
        "give one for each, or none",
    )
    require(
        all(map(math.isfinite, cfg.weights)),
        f"{settings}: a weight is not finite; give finite numbers",
    )
    functions = [find_reward(name, cfg) for name in names]
    weights = cfg.weights or [1.0] * len(names)
    weighted = zip(weights, functions, names, strict=True)
    return Rewards(*weighted, seconds=cfg.timeout_seconds, watch=watch)


def find_reward(name: str, cfg: RewardConfig) -> RewardFunction | AdaptedReward:
    """Return the function of one name. Raises UserError if there is none, or it cannot work."""
    kind, _, argument = name.partition(":")
    if kind in ("http", "https"):
        return RemoteReward(name, cfg)
    if kind in ADAPTERS:
        return resolve_name(ADAPTERS[kind])(argument)
    function = find_function("reward.function", name, REWARDS)
    prefix, parameter = foreign_prefix(function)
    if prefix:
        place = name.rpartition(":")[0] if prefix == "openrlhf" else name
        raise UserError(
            f"reward.function = {name} has a parameter {parameter!r}, as functions of {prefix} "
            f"have, and would be called with (prompt, completion, row); name it {prefix}:{place}, "
            "or give its parameters other names"
        )
    return function


def exact(prompt: RowPrompt, completion: str, row: dict) -> float:
    """Return 1 if the completion is the answer, apart from spaces at the ends."""
    return float(completion.strip() == str(row["answer"]).strip())


def final_answer(prompt: RowPrompt, completion: str, row: dict) -> float:
    """Return 1 for the right number after `Answer:`, 0.3 if the last number in the text is right.

    A small model finds the right number before it finds the form.
    """
    gold = str(row["answer"]).replace(",", "").strip()
    text = completion.replace(",", "")
    if gold in re.findall(r"[Aa]nswer:\s*\$?(-?\d+(?:\.\d+)?)", text)[-1:]:
        return 1.0
    return 0.3 if gold in re.findall(r"-?\d+(?:\.\d+)?", text)[-1:] else 0.0


def verify_math(prompt: RowPrompt, completion: str, row: dict) -> float:
    """Return 1 if math-verify finds the completion's last expression equal to the answer.

    It runs in a process with limits; a completion that reaches one earns 0, as a StoppedGrade.
    """
    answer = str(row["answer"])
    if "$" not in answer and "\\boxed" not in answer:
        # Bare LaTeX, as in MATH, would be read as a text with some number in it.
        answer = f"${answer}$"
    return graders.pool("math_verify").grade(answer, completion)


def score_reasoning_gym(prompt: RowPrompt, completion: str, row: dict) -> float:
    """Return the score of reasoning-gym's own grader of the row's data set, 0 to 1.

    Partly right answers earn a part. It runs in a process with limits, as math-verify does. What
    some graders would evaluate as code is read as a literal or a plain expression.
    """
    entry = {name: row[name] for name in ("question", "answer", "metadata") if name in row}
    return graders.pool("reasoning_gym").grade(completion.strip(), entry)


def python_tests(prompt: RowPrompt, completion: str, row: dict) -> float:
    """Return 1 if the program in the completion passes the row's `tests`.

    The program is the completion's last fenced block, or all of it. The tests are Python statements
    that run in the sandbox, in another process than the program (sandbox/inside/trial.py). What the
    program prints does not count, nor that it ends by sys.exit(0).
    """
    blocks = re.findall(r"```(?:python3?|py)?[ \t]*\r?\n(.*?)```", completion, FENCE_FLAGS)
    program = blocks[-1] if blocks else completion
    passed = runner.passes(program, row["tests"], runner.ProgramLimits(seconds=10.0))
    return float(passed)


REWARDS = {
    "exact": exact,
    "final_answer": final_answer,
    "math_verify": verify_math,
    "reasoning_gym": score_reasoning_gym,
    "python_tests": python_tests,
}
