"""The shipped environments by name, and how a setting becomes an environment and is called."""

import asyncio
import inspect
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pkgutil import resolve_name
from typing import Any, cast

from minirl.base.errors import UserError, require
from minirl.config.lookup import find_function, line_of
from minirl.config.values import read_options
from minirl.envs import Env, EnvMaker

# Shipped environments, imported when they are asked for.
ENVS = {
    "single_turn": "minirl.envs:SingleTurn",
    "guess": "minirl.envs.games:Guess",
    "countdown": "minirl.envs.games:Countdown",
    "tools": "minirl.envs.tools:Tools",
    "openrlhf": "minirl.envs.adapters.openrlhf:OpenRLHF",
    "verifiers": "minirl.envs.adapters.verifiers:Verifiers",
    "openenv": "minirl.envs.adapters.openenv:OpenEnv",
}


def make_env(name: str) -> EnvMaker:
    """Return what makes the environment of an episode.

    Args:
        name: `NAME` or `NAME:argument` of a shipped one, or `file.py:Class`, followed by further
            arguments of its constructor as `?key=value&...`.

    Raises:
        UserError: if there is no such environment, or it cannot be made.
    """
    place, _, query = name.partition("?")
    shipped, _, argument = place.partition(":")
    method = "constructor"
    try:
        options = read_options(query)
        if shipped in ENVS:
            arguments = [argument] if argument else []
            make = partial(resolve_name(ENVS[shipped]), *arguments, **options)
        else:
            make = partial(find_function("env.name", place, dict.fromkeys(ENVS, Env)), **options)
        env = make()
        method = "close"
        # An environment may make it an ordinary function.
        if isinstance(env, Env) and not inspect.iscoroutinefunction(env.close):
            cast(Callable, env.close)()
    except UserError:
        raise
    except (TypeError, ValueError) as error:
        raise UserError(f"env.name = {name}: {error}") from error
    # The user's code may raise anything.
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        problem = f"{type(error).__name__}: {error}{line_of(error)}"
        raise UserError(f"env.name = {name}: its {method} raised {problem}") from error
    require(
        isinstance(env, Env),
        f"env.name = {name} makes {type(env).__name__}, which is neither an Env nor an Agent "
        "(minirl.envs)",
    )
    return EnvMaker(make, env)


async def in_thread(function: Callable, *arguments: object) -> Any:
    """Call a function in a new thread, and return its result.

    If the caller is cancelled, the thread continues by itself; the end of the program does not wait
    for it.
    """
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()  # From here on the caller cannot cancel it.

    def work() -> None:
        try:
            future.set_result(function(*arguments))
        except StopIteration as error:  # for asyncio that is the end of a coroutine
            future.set_exception(RuntimeError(f"StopIteration: {error}"))
        except BaseException as error:  # It is raised again where the call was made.
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return await asyncio.wrap_future(future)
