"""The shipped environments by name, and how a setting becomes the environment of an episode."""

import inspect
from collections.abc import Callable
from functools import partial
from pkgutil import resolve_name
from urllib.parse import parse_qsl

from minirl.config.lookup import find_function
from minirl.data.sources import option
from minirl.envs.base import Env
from minirl.errors import UserError

# The shipped ones, imported when asked for
ENVS = {
    "single_turn": "minirl.envs.single_turn:SingleTurn",
    "guess": "minirl.envs.guess:Guess",
    "countdown": "minirl.envs.countdown:Countdown",
    "tools": "minirl.envs.tools:Tools",
    "openrlhf": "minirl.envs.openrlhf:OpenRLHF",
    "verifiers": "minirl.envs.verifiers:Verifiers",
    "openenv": "minirl.envs.openenv:OpenEnv",
}


def make_env(name: str) -> Callable[[], Env]:
    """What makes the environment of an episode. `name`: `NAME`, `NAME:argument` of a shipped one or
    `file.py:Class`, and what else its constructor takes as `?key=value&...`. One is made here, to
    see that it can be. Raises UserError.
    """
    place, _, query = name.partition("?")
    shipped, _, argument = place.partition(":")
    if shipped in ENVS:
        found, arguments = resolve_name(ENVS[shipped]), [argument] if argument else []
    else:
        found, arguments = find_function("env.name", place, ENVS), []
    try:
        make = partial(
            found,
            *arguments,
            **{key: option(value) for key, value in parse_qsl(query, strict_parsing=bool(query))},
        )
        made = make()
    except (TypeError, ValueError) as error:
        raise UserError(f"env.name = {name}: {error}") from error
    if not isinstance(made, Env):
        raise UserError(
            f"env.name = {name} makes {type(made).__name__}, which is neither an Env nor an Agent (minirl.envs)"
        )
    if not inspect.iscoroutinefunction(made.close):
        made.close()
    return make
