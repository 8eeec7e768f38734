"""verl's reward functions, as they are.

    --reward.function verl:my_scores.py:compute_score
    # def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs), of its
    # `naive`, `dapo` and `prime` managers, or async
    # def compute_scores(data_sources, solution_strs, ground_truths, extra_infos, **kwargs), of its
    # `batch` manager
    --reward.function 'verl:my_scores.py:compute_score?format_score=0.1'  # verl's reward_kwargs

The function gets by keyword those of the four that it names (all of them, if it takes **kwargs):
`ground_truth` is the row's `reward_model.ground_truth`, or its `answer` where it has no column
`reward_model`; `extra_info` is the row's, a dict, with `num_turns`. One with the names in the
plural gets lists of one. It returns a number, or a dict with the number as `score`, of which other
numbers go to the metrics and the rest beside the completion. What is asynchronous runs in one event
loop.
"""

import itertools
import numbers
from collections.abc import Callable
from typing import Any

from minirl.base.errors import UserError, require
from minirl.config.lookup import find_function
from minirl.rewards import AdaptedReward, RewardCall, RowPrompt
from minirl.rewards.by_name import NamedCall, plain_number, read_options

ONE = ("data_source", "solution_str", "ground_truth", "extra_info")
SEVERAL = tuple(f"{name}s" for name in ONE)


def reward(place: str) -> AdaptedReward:
    """Return the reward function at `place`: file.py:function, or with ?name=value behind.

    Raises:
        UserError: There is no such function, or it cannot be called as verl does.
    """
    where = f"reward.function = verl:{place}"
    function_place, _, query = place.partition("?")
    try:
        options = read_options(query)
    except ValueError as error:
        raise UserError(
            f"{where}: {error}; its own arguments are written ?name=value&name=value"
        ) from error
    return VerlReward(where, find_function("reward.function", function_place, {}), options)


class VerlReward(AdaptedReward):
    """A `compute_score` that is called for one completion at a time.

    Args:
        where: setting and value, for errors.
        function: the function.
        options: further arguments of every call.

    Raises:
        UserError: It has a parameter that verl does not give.
    """

    def __init__(self, where: str, function: Callable, options: dict[str, Any]):
        self.call = NamedCall(where, function, "verl")
        self.options = options
        self.takes_lists = bool(self.call.names.intersection(SEVERAL))
        given = (*(SEVERAL if self.takes_lists else ONE), *options)
        unknown = [name for name in self.call.needed if name not in given]
        require(
            not unknown,
            f"{where} needs {', '.join(unknown)}, which verl does not give ({', '.join(given)}); "
            "give it a default, or a value behind the function's name by ?name=value",
        )

    def why_not(self, row: dict) -> str:
        """Return which column is missing that the function has no default for."""
        needed = [name.removesuffix("s") for name in self.call.needed]
        if "data_source" in needed and row.get("data_source") is None:
            return "needs data_source, and a row has none (data.source_key)"
        if "ground_truth" in needed and _ground_truth(row) is None:
            return "needs reward_model.ground_truth, and a row has neither that nor an answer"
        return ""

    def score(self, prompt: RowPrompt, completion: str, row: dict, call: RewardCall) -> Any:
        """Return the reward, and log what a dict has beside it.

        Raises:
            KeyError: A dict has no `score`.
            ValueError: A function that takes lists returned anything but one value.
        """
        # As verl's loops of agents count turns: those of the policy and of others, and the prompt.
        is_policy = [message["role"] == "assistant" for message in call.messages]
        num_turns = 1 + max(1, len(list(itertools.groupby(is_policy))))
        extra_info = {"num_turns": num_turns, **(row.get("extra_info") or {})}
        values = (row.get("data_source"), completion, _ground_truth(row), extra_info)
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
                call.log_metric(name, plain_number(value))
            else:
                call.columns[name] = value
        return plain_number(result["score"])


def _ground_truth(row: dict) -> object:
    reward_model = row.get("reward_model")
    if isinstance(reward_model, dict) and reward_model.get("ground_truth") is not None:
        return reward_model["ground_truth"]
    return row.get("answer")
