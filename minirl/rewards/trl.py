"""TRL's reward functions, as they are.

    --reward.function trl:my_rewards.py:f
    # def f(completions, **columns) -> list[float | None], or async
    --reward.function trl:accuracy_reward
    --reward.function 'trl:get_soft_overlong_punishment?max_completion_len=256&soft_punish_cache=64'

`f` gets by keyword whichever it asks for (all of them, if it takes **kwargs): `prompts`,
`completions`, `completion_ids`, every column of the row (minirl adds `answer` and `data_source`),
each as a list of one, and `trainer_state`, `log_extra` and `log_metric`. It is called for one
completion at a time, from several threads. Where the prompt is a list of messages the completion is
one too, else it is a text. None, "this does not apply", is left out of the sum of rewards and of
the metrics. What is asynchronous runs in one event loop, as in TRL.

Without a file the function is one that TRL ships, from the installed package `trl`. Those read chat
messages, so they get such, and `solution` is the row's `answer` if it has no such column.
"""

import importlib
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from minirl.config.lookup import find_function
from minirl.errors import UserError, require
from minirl.rewards import AdaptedReward, RewardCall, RowPrompt
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
    """A function that is called with lists of one.

    Args:
        place: what names it, for errors.
        function: the function.
        is_shipped: it is TRL's own, which reads chat messages alone.

    Raises:
        UserError: It has a parameter that cannot be given by keyword.
    """

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
        """Return what the function gives; None: it does not apply.

        Raises:
            ValueError: It returned anything but one value.
        """

        def log_extra(column: str, values: list) -> None:
            [call.columns[column]] = values

        message = [{"role": "assistant", "content": completion}]
        as_text = isinstance(prompt, str) and not self.is_shipped
        given: dict[str, Any] = {name: [value] for name, value in self._columns(row).items()}
        given |= {
            "prompts": [prompt],
            "completions": [completion if as_text else message],
            "completion_ids": [call.tokens],
            "trainer_state": replace(call.state),
            "log_extra": log_extra,
            "log_metric": call.log_metric,
        }
        [value] = self.call(given)
        return plain_number(value)

    def _columns(self, row: dict) -> dict:
        columns = {name: value for name, value in row.items() if name not in NOT_COLUMNS}
        if self.is_shipped and "solution" not in columns and row.get("answer") is not None:
            columns["solution"] = str(row["answer"])
        return columns
