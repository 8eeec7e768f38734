"""Reward functions of TRL and verl, as they are; OpenRLHF's are in envs/adapters/openrlhf.py.

TRL's, and those that TRL ships:

    --reward.function trl:my_rewards.py:f
    # def f(completions, **columns) -> list[float | None], or async
    --reward.function trl:accuracy_reward
    --reward.function 'trl:get_soft_overlong_punishment?max_completion_len=256&soft_punish_cache=64'

verl's, of its `naive`, `dapo`, `prime` and (in the plural, with lists) `batch` managers:

    --reward.function verl:my_scores.py:compute_score
    # def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs)
    --reward.function 'verl:my_scores.py:compute_score?format_score=0.1'  # verl's reward_kwargs

A function gets by keyword those parameters that it names, or all with **kwargs. Asynchronous
functions run in one event loop, so that they can keep clients.
"""

import asyncio
import importlib
import inspect
import itertools
import math
import numbers
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from inspect import Parameter
from typing import Any

import numpy as np
import torch

from minirl.base.errors import UserError, require
from minirl.config.lookup import find_function
from minirl.config.values import read_options
from minirl.rewards import AdaptedReward, Answer
from minirl.rewards.functions import text_of
from minirl.sandbox.inside.grading import as_latex

# Parameters by which a function of another library is known: its prefix -> their names.
FOREIGN = {
    "verl": (
        *("solution_str", "solution_strs", "ground_truth", "ground_truths"),
        *("data_sources", "extra_info", "extra_infos"),
    ),
    "openrlhf": ("queries",),
    "trl": ("completions", "completion_ids", "trainer_state"),
}


class NamedCall:
    """A function, perhaps an asynchronous one, that gets by keyword what it asks for.

    Attributes:
        names: of its parameters that can be given by keyword.
        needed: those of them without a default.
        takes_all: whether it has **kwargs.
    """

    def __init__(self, function: Callable):
        self.function = function
        self.names: set[str] = set()
        self.needed: list[str] = []
        self.takes_all = False
        for name, parameter in inspect.signature(function).parameters.items():
            if parameter.kind is Parameter.VAR_KEYWORD:
                self.takes_all = True
            elif parameter.kind not in (Parameter.POSITIONAL_ONLY, Parameter.VAR_POSITIONAL):
                self.names.add(name)
                if parameter.default is Parameter.empty:
                    self.needed.append(name)

    def __call__(self, given: dict[str, Any]) -> Any:
        """Return what the function returns, called with those of `given` that it takes."""
        if not self.takes_all:
            given = {name: value for name, value in given.items() if name in self.names}
        value = self.function(**given)
        if not inspect.isawaitable(value):
            return value

        async def result() -> Any:
            return await value

        return asyncio.run_coroutine_threadsafe(result(), event_loop()).result()


def foreign_prefix(function: Callable) -> tuple[str, str]:
    """Return the prefix for a function that another library calls, and the parameter that says so.

    Both are empty where no parameter has another library's name, or the signature cannot be read.
    """
    names = parameters_of(function)
    for prefix, foreign in FOREIGN.items():
        for name in names:
            if name in foreign:
                return prefix, name
    return "", ""


def parameters_of(function: Callable) -> list[str]:
    """Return the names of a function's parameters; none if its signature cannot be read."""
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return []


def plain_number(value: Any) -> Any:
    """Return the number that a tensor or an array of one value holds; anything else as it is."""
    is_array = isinstance(value, torch.Tensor | np.ndarray | np.generic)
    return value.item() if is_array and math.prod(value.shape) == 1 else value


def event_loop() -> asyncio.AbstractEventLoop:
    """Return the loop of all asynchronous functions, so that they may keep clients. In a thread."""
    with _STARTING:  # Several threads score the first answers.
        return _start_event_loop()


_STARTING = threading.Lock()


@cache
def _start_event_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="reward loop", daemon=True).start()
    return loop


# --------------------------------------------------------------------------------------------------
# TRL

NOT_COLUMNS = ("prompt", "completion", "completion_ids", "rendered_prompt")
GIVEN = (
    "prompts",
    "completions",
    "completion_ids",
    "trainer_state",
    "log_extra",
    "log_metric",
)


def trl_reward(place: str) -> AdaptedReward:
    """Return the reward function at `place`: file.py:function, or a name of TRL's own.

    Raises:
        UserError: There is no such function, or it cannot be called as TRL does.
    """
    if ":" in place:
        return TRLReward(find_function("reward.function", place, {}))
    name, _, query = place.partition("?")
    where = f"reward.function = trl:{place}"
    try:
        shipped = importlib.import_module("trl.rewards")
    except ImportError as error:
        raise UserError(
            f"{where} is a function that TRL ships, and its package does not import ({error}); "
            "pip install trl, or name one of yours as trl:file.py:function"
        ) from error
    names = [n for n in dir(shipped) if n.endswith("_reward") or n.startswith("get_")]
    require(
        name in names,
        f"{where}: trl.rewards has no {name}; it has {', '.join(sorted(names))}. A function of "
        "yours is trl:file.py:function",
    )
    function: Callable = getattr(shipped, name)
    if not name.startswith("get_"):
        require(not query, f"{where}: {name} takes no options after ?")
        return TRLReward(function, is_shipped=True)
    try:
        return TRLReward(function(**read_options(query)), is_shipped=True)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{where}: {error}; give its arguments {inspect.signature(function)} after ?, as in "
            f"trl:{name}?NAME=VALUE&NAME=VALUE"
        ) from error


class TRLReward(AdaptedReward):
    """A function that is called for all completions of a prompt.

    Args:
        function: the function.
        is_shipped: it is TRL's own, which reads chat messages alone.
    """

    together = True

    def __init__(self, function: Callable, *, is_shipped: bool = False):
        self.call = NamedCall(function)
        self.is_shipped = is_shipped
        # Columns without which it cannot be called.
        self.columns = [name for name in self.call.needed if name not in GIVEN]

    def why_not(self, row: dict) -> str:
        """Return which column is missing that the function has no default for."""
        missing = [name for name in self.columns if name not in self._columns(row)]
        if not missing:
            return ""
        known = ", ".join([*GIVEN, *self._columns(row)])
        return (
            f"needs {', '.join(missing)}, which is neither a column nor what TRL's trainer gives "
            f"({known})"
        )

    def score_all(self, answers: Sequence[Answer]) -> list[float | None]:
        """Return what the function gives for completions of one prompt; None: it does not apply.

        Raises:
            ValueError: It returned, or logged in a column, anything but a value for each.
        """

        def log_extra(column: str, values: Sequence) -> None:
            _require_one_each(f"log_extra({column!r}, ...) got", values, answers)
            for answer, value in zip(answers, values, strict=True):
                answer.call.log_column(column, value)

        def log_metric(name: str, value: float) -> None:
            for answer in answers:
                answer.call.log_metric(name, value)

        columns = [self._columns(answer.row) for answer in answers]
        given: dict[str, Any] = {
            name: [values.get(name) for values in columns] for name in columns[0]
        }
        given |= {
            "prompts": [answer.row["prompt"] for answer in answers],
            "completions": [self._completion(answer) for answer in answers],
            "completion_ids": [answer.call.tokens for answer in answers],
            "trainer_state": replace(answers[0].call.state),
            "log_extra": log_extra,
            "log_metric": log_metric,
        }
        values = list(self.call(given))
        _require_one_each("it returned", values, answers)
        return [plain_number(value) for value in values]

    def _completion(self, answer: Answer) -> str | list[dict]:
        """Return a completion as TRL has it; its own functions read the first message of one."""
        message = [{"role": "assistant", "content": answer.completion}]
        if self.is_shipped:
            return message
        if isinstance(answer.row["prompt"], str):
            return answer.completion
        return answer.call.messages or message

    def _columns(self, row: dict) -> dict:
        columns = {name: value for name, value in row.items() if name not in NOT_COLUMNS}
        if self.is_shipped and "solution" not in columns and row.get("answer") is not None:
            columns["solution"] = as_latex(text_of(row["answer"]))
        return columns


def _require_one_each(what: str, values: Sequence, answers: Sequence[Answer]) -> None:
    if len(values) != len(answers):
        raise ValueError(f"{what} {len(values)} values for {len(answers)} completions")


# --------------------------------------------------------------------------------------------------
# verl

ONE = ("data_source", "solution_str", "ground_truth", "extra_info")
SEVERAL = tuple(f"{name}s" for name in ONE)


class VerlReward(AdaptedReward):
    """A `compute_score` that is called for one completion at a time.

    Args:
        place: file.py:function, with further arguments of every call as ?name=value.

    Raises:
        UserError: There is no such function, or it has a parameter that verl does not give.
    """

    def __init__(self, place: str):
        where = f"reward.function = verl:{place}"
        function_place, _, query = place.partition("?")
        try:
            self.options = read_options(query)
        except ValueError as error:
            raise UserError(
                f"{where}: {error}; its own arguments are written ?name=value&name=value"
            ) from error
        self.call = NamedCall(find_function("reward.function", function_place, {}))
        self.takes_lists = bool(self.call.names.intersection(SEVERAL))
        given = (*(SEVERAL if self.takes_lists else ONE), *self.options)
        unknown = [name for name in self.call.needed if name not in given]
        require(
            not unknown,
            f"{where} needs {', '.join(unknown)}, which verl does not give ({', '.join(given)}); "
            "give it a default, or a value after the function's name by ?name=value",
        )

    def why_not(self, row: dict) -> str:
        """Return which column is missing that the function has no default for."""
        needed = [name.removesuffix("s") for name in self.call.needed]
        if "data_source" in needed and row.get("data_source") is None:
            return "needs data_source, and a row has none (data.source_key)"
        if "ground_truth" in needed and _ground_truth(row) is None:
            return "needs reward_model.ground_truth, and a row has neither that nor an answer"
        return ""

    def score(self, answer: Answer) -> Any:
        """Return the reward, and log what else a dict has.

        Raises:
            KeyError: A dict has no `score`.
            ValueError: A function that takes lists returned anything but one value.
        """
        row = answer.row
        # As verl's loops of agents count turns: those of the policy and of others, and the prompt.
        is_policy = [message["role"] == "assistant" for message in answer.call.messages]
        num_turns = 1 + max(1, len(list(itertools.groupby(is_policy))))
        extra_info = {"num_turns": num_turns, **(row.get("extra_info") or {})}
        values = (row.get("data_source"), answer.completion, _ground_truth(row), extra_info)
        if self.takes_lists:
            given = {name: [value] for name, value in zip(SEVERAL, values, strict=True)}
            [result] = self.call(given | self.options)
        else:
            result = self.call(dict(zip(ONE, values, strict=True)) | self.options)
        if not isinstance(result, dict):
            return plain_number(result)
        for name, value in result.items():
            if name == "score":
                continue
            if isinstance(plain_number(value), numbers.Real):
                answer.call.log_metric(name, plain_number(value))
            else:
                answer.call.log_column(name, value)
        return plain_number(result["score"])


def _ground_truth(row: dict) -> object:
    reward_model = row.get("reward_model")
    if isinstance(reward_model, dict) and reward_model.get("ground_truth") is not None:
        return reward_model["ground_truth"]
    return row.get("answer")
