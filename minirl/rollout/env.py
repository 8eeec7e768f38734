"""What the policy acts in: an environment shows a row, hears an answer, replies, until the episode is done. One object an episode.

    # my_env.py
    from minirl.rollout.env import Env, Result

    class Guess(Env):
        def reset(self, row):
            self.number = int(row["answer"])
            return "I think of a number from 1 to 100. Which?"

        def step(self, state):
            guess = int(state.answer) if state.answer.strip().isdigit() else 0
            if guess == self.number:
                return Result(reward=1.0, done=True)
            return Result(observation="higher" if guess < self.number else "lower")

    --env.name my_env.py:Guess --env.max-turns 8

`reset`, `step` and `run` may be `async def`; others run in threads, so both overlap with generation.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pkgutil import resolve_name
from urllib.parse import parse_qsl

from minirl.data.sources import option
from minirl.flags import find_function
from minirl.types import UserError


class Raw(str):
    """A text that goes to the policy as it is, without the chat template."""


Observation = str | list[dict] | list[int] | Raw  # what a user says, chat messages, tokens, or a raw text


@dataclass(frozen=True, kw_only=True)
class State:
    """What an environment hears."""

    row: dict  # with `rendered_prompt`, the first prompt as the policy read it
    answer: str  # the policy's last one, without special tokens
    stopped: bool  # it ended by itself; False: cut at a limit
    turn: int  # 0 for the first answer
    messages: list[dict]  # the chat so far, this answer last; empty if it is not one of messages


@dataclass(kw_only=True)
class Result:
    observation: Observation | None = None  # what follows the answer; needed unless done
    reward: float = 0.0  # For this answer. The episode earns the sum of all, credited to the answers they were given for.
    done: bool = False
    truncated: bool = False  # done, but not by the policy's doing: for metrics and reward.unstopped
    messages: list[dict] | None = None  # the whole chat from here on, instead of an observation: for environments that rewrite history
    # Go with the observation: paths, bytes, PIL images or data URLs, for its parts {"type": "image"}; a text without such parts follows them.
    images: list = field(default_factory=list)
    # Of the next answer: `max_tokens`, `stop_token_ids`. What would change its probabilities is the policy's (rollout.temperature ...).
    sampling: dict = field(default_factory=dict)
    info: dict[str, float] = field(default_factory=dict)  # numbers for the log: means over episodes under `env/`


class Env:
    """One episode."""

    graded = False  # the reward functions score its last answer, beside what `step` gives

    def reset(self, row: dict) -> Observation:
        """The first prompt. `row["rendered_prompt"]`: the row's own as the policy would read it."""
        raise NotImplementedError

    def step(self, state: State) -> Result:
        """The reply to an answer."""
        raise NotImplementedError

    async def close(self) -> None:
        """The episode has ended, however; or it was made only to see that it can be."""


@dataclass(frozen=True, kw_only=True)
class Session:
    """An OpenAI-compatible (and Anthropic) endpoint over this rank's engine that keeps the exact tokens of all that is said with this key. `base_url`
    ends with /v1, as the OpenAI client wants it; the Anthropic client wants it without."""

    base_url: str
    api_key: str
    model: str


class Agent(Env):
    """An episode that a program of its own leads, talking to the policy through an endpoint. All its answers are trained on; nobody calls `reset` and `step`."""

    def run(self, row: dict, session: Session) -> Result:
        """Play the episode; `reward`, `truncated` and `info` of the result count. With `graded` the reward functions score the last answer, too, of the
        chat that it began last."""
        raise NotImplementedError


# The shipped ones, imported when asked for
ENVS = {"single_turn": "minirl.rollout.env:SingleTurn", "guess": "minirl.envs.guess:Guess", "countdown": "minirl.envs.countdown:Countdown",
        "tools": "minirl.envs.tools:Tools", "openrlhf": "minirl.envs.openrlhf:OpenRLHF",
        "verifiers": "minirl.envs.verifiers:Verifiers", "openenv": "minirl.envs.openenv:OpenEnv"}


class SingleTurn(Env):
    """One answer, scored by the reward functions."""

    graded = True

    async def reset(self, row: dict) -> Observation:  # not in a thread, which would cost more than it does
        return row["prompt"]

    async def step(self, state: State) -> Result:
        return Result(done=True)


def make_env(name: str) -> Callable[[], Env]:
    """What makes the environment of an episode. `name`: `NAME`, `NAME:argument` of a shipped one or `file.py:Class`, and what else its constructor
    takes as `?key=value&...`. One is made here, to see that it can be. Raises UserError."""
    place, _, query = name.partition("?")
    shipped, _, argument = place.partition(":")
    if shipped in ENVS:
        found, arguments = resolve_name(ENVS[shipped]), [argument] if argument else []
    else:
        found, arguments = find_function("env.name", place, ENVS), []
    try:
        make = partial(found, *arguments, **{key: option(value) for key, value in parse_qsl(query, strict_parsing=bool(query))})
        made = make()
    except (TypeError, ValueError) as error:
        raise UserError(f"env.name = {name}: {error}") from error
    if not isinstance(made, Env):
        raise UserError(f"env.name = {name} makes {type(made).__name__}, which is neither an Env nor an Agent (minirl.rollout.env)")
    if not inspect.iscoroutinefunction(made.close):
        made.close()
    return make
