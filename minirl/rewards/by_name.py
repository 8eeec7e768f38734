"""Functions that are called by the names of their parameters, as TRL and verl call them."""

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable
from functools import cache
from inspect import Parameter
from typing import Any
from urllib.parse import parse_qsl

import numpy as np
import torch

from minirl.base.errors import UserError, require
from minirl.data.sources import option

BY_POSITION = (Parameter.POSITIONAL_ONLY, Parameter.VAR_POSITIONAL)
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
        where: setting and value, for errors.
        names: of its parameters that can be given by keyword.
        needed: those of them without a default.
        takes_all: whether it has **kwargs.
    """

    def __init__(self, where: str, function: Callable, library: str):
        """Read the signature.

        Args:
            where: setting and value, for errors.
            function: the function.
            library: whose functions are called so, for errors.

        Raises:
            UserError: it has a parameter that cannot be given by keyword, or takes nothing.
        """
        self.where = where
        self.function = function
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError) as error:
            raise UserError(f"{where}: its signature cannot be read: {error}") from error
        required = [p for p in parameters if p.default is Parameter.empty]
        unnamed = [p for p in required if p.kind is Parameter.POSITIONAL_ONLY]
        require(
            not unnamed,
            f"{where} cannot be called by keyword, as {library} does: its parameter "
            f"{unnamed and unnamed[0].name!r} is positional-only; drop the / in its signature",
        )
        named = [p for p in parameters if p.kind not in (*BY_POSITION, Parameter.VAR_KEYWORD)]
        self.takes_all = any(p.kind is Parameter.VAR_KEYWORD for p in parameters)
        require(
            named or self.takes_all,
            f"{where} takes no argument by keyword, so nothing could be scored; give it the "
            f"parameters that {library} names, and **kwargs",
        )
        self.names = {p.name for p in named}
        self.needed = [p.name for p in named if p in required]

    def __call__(self, given: dict[str, Any]) -> Any:
        """Return what the function returns, called with those of `given` that it takes."""
        if not self.takes_all:
            given = {name: value for name, value in given.items() if name in self.names}
        value = self.function(**given)
        if inspect.isawaitable(value):
            return asyncio.run_coroutine_threadsafe(_result_of(value), event_loop()).result()
        return value


def foreign_prefix(function: Callable) -> tuple[str, str]:
    """Return the prefix for a function that another library calls, and the parameter that says so.

    Both are empty where no parameter has another library's name, or the signature cannot be read.
    """
    try:
        names = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return "", ""
    for prefix, foreign in FOREIGN.items():
        for name in names:
            if name in foreign:
                return prefix, name
    return "", ""


def read_options(query: str) -> dict[str, Any]:
    """Return the values of `name=value&name=value`. Raises ValueError if it is not of this form."""
    return {key: option(text) for key, text in parse_qsl(query, strict_parsing=bool(query))}


def plain_number(value: Any) -> Any:
    """Return the number that a tensor or an array of one value holds; anything else as it is."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else value
    is_one = isinstance(value, np.ndarray | np.generic) and value.size == 1
    return value.item() if is_one else value


async def _result_of(values: Awaitable) -> Any:
    return await values


@cache
def event_loop() -> asyncio.AbstractEventLoop:
    """Return the loop of all asynchronous functions, so that they may keep clients. In a thread."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="reward loop", daemon=True).start()
    return loop
