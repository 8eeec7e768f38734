"""TRL's reward functions, as they are.

    --reward.function trl:my_rewards.py:f
    # def f(completions, **columns) -> list[float | None], or async
    --reward.function trl:accuracy_reward
    --reward.function 'trl:get_soft_overlong_punishment?max_completion_len=256&soft_punish_cache=64'

`f` gets by keyword whichever it asks for (all of them, if it takes **kwargs): `prompts`,
`completions`, `completion_ids`, every column of the row (minirl adds `answer` and `data_source`),
each as a list, and `trainer_state`, `log_extra` and `log_metric`. It is called for all completions
of a prompt at once, from several threads. Where the prompt is a list of messages the completion is
one too: all that was said since, with calls of tools and their replies; else it is a text. None,
"this does not apply", is left out of the sum of rewards and of the metrics. What is asynchronous
runs in one event loop, as in TRL.

Without a file the function is one that TRL ships, from the installed package `trl`. Those read chat
messages, so they get such, and `solution` is the row's `answer` if it has no such column.
"""

import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from minirl.base.errors import UserError, require
from minirl.config.lookup import find_function
from minirl.rewards import AdaptedReward, Answer, RewardCall, RowPrompt
from minirl.rewards.by_name import NamedCall, plain_number, read_options

NOT_COLUMNS = ("prompt", "completion", "completion_ids", "rendered_prompt")
GIVEN = (
    "prompts",
    "completions",
    "completion_ids",
    "trainer_state",
    "log_extra",
    "log_metric",
)


def reward(place: str) -> AdaptedReward:
    """Return the reward function at `place`: file.py:function, or a name of TRL's own.

    Raises:
        UserError: There is no such function, or it cannot be called as TRL does.
    """
    file, _, _ = place.rpartition(":")
    if file:
        return TRLReward(place, find_function("reward.function", place, {}))
    return TRLReward(place, _shipped(place), is_shipped=True)


def _shipped(place: str) -> Callable:
    """Return a function that TRL ships, made with the options behind `?`, if it has any.

    Raises:
        UserError: trl is not installed, has no such function, or its options are wrong.
    """
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
        require(not query, f"{where}: {name} takes no options behind ?")
        return function
    try:
        return function(**read_options(query))
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{where}: {error}; give its arguments {inspect.signature(function)} behind ?, as in "
            f"trl:{name}?NAME=VALUE&NAME=VALUE"
        ) from error


class TRLReward(AdaptedReward):
    """A function that is called for all completions of a prompt.

    Args:
        place: what names it, for errors.
        function: the function.
        is_shipped: it is TRL's own, which reads chat messages alone.

    Raises:
        UserError: It has a parameter that cannot be given by keyword.
    """

    together = True

    def __init__(self, place: str, function: Callable, *, is_shipped: bool = False):
        self.call = NamedCall(f"reward.function = trl:{place}", function, "TRL")
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

    def score(
        self, prompt: RowPrompt, completion: str, row: dict, call: RewardCall
    ) -> float | None:
        """Return what the function gives for a completion alone. Raises as `score_all` does."""
        [value] = self.score_all([Answer(row=row, completion=completion, call=call)])
        return value

    def score_all(self, answers: Sequence[Answer]) -> list[float | None]:
        """Return what the function gives for completions of one prompt; None: it does not apply.

        Raises:
            ValueError: It returned, or logged in a column, anything but a value for each.
        """

        def log_extra(column: str, values: Sequence) -> None:
            _require_one_each(f"log_extra({column!r}, ...) got", values, answers)
            for answer, value in zip(answers, values, strict=True):
                answer.call.columns[column] = value

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
            columns["solution"] = str(row["answer"])
        return columns


def _require_one_each(what: str, values: Sequence, answers: Sequence[Answer]) -> None:
    if len(values) != len(answers):
        raise ValueError(f"{what} {len(values)} values for {len(answers)} completions")
