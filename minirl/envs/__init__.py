"""Environments: what the policy acts in. Whoever writes one finds here all that it needs.

An environment shows a row, reads an answer, replies, until the episode is done. There is one object
for each episode.

    # my_env.py
    from minirl.envs import Env, Result

    class Guess(Env):
        def reset(self, row):
            self.number = int(row["answer"])
            return "I think of a number from 1 to 100. Which?"

        def step(self, state):
            guess = int(state.answer) if state.answer.strip().isdecimal() else 0
            if guess == self.number:
                return Result(reward=1.0, done=True)
            return Result(observation="higher" if guess < self.number else "lower")

    --env.name my_env.py:Guess --env.max-turns 8

`reset`, `step` and `run` may be `async def`. Others run in threads, so both overlap with
generation; on CPU it waits for `reset` and `step`, so that runs repeat.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field


class Raw(str):
    """A text that goes to the policy as it is, without the chat template."""


# What a user says, chat messages, tokens, or a raw text.
Observation = str | list[dict] | list[int] | Raw


@dataclass(frozen=True, kw_only=True)
class State:
    """What an environment gets with an answer."""

    row: dict  # With `rendered_prompt`, the first prompt as the policy read it.
    answer: str  # The policy's latest answer, without special tokens.
    stopped: bool  # Whether the answer ended by itself; False: it was cut at a limit.
    turn: int  # 0 for the first answer.
    messages: list[dict]  # The chat so far, this answer last; empty if it has no messages.
    tokens: list[int] = field(default_factory=list)  # Of the answer, as they were sampled,
    logprobs: list[float] = field(default_factory=list)  # and their log-probs.


@dataclass(kw_only=True)
class Result:
    """What an environment returns for an answer."""

    observation: Observation | None = None  # What follows the answer; needed unless done.
    # For this answer. The episode earns the sum, credited to the answers it was given for.
    reward: float = 0.0
    done: bool = False
    # Done, but not because of the policy: for metrics and reward.unstopped.
    truncated: bool = False
    # The whole chat from here on, to rewrite history. It counts instead of an observation.
    messages: list[dict] | None = None
    # Images of the observation: paths, bytes, PIL images or data URLs, for its parts {"type":
    # "image"}; a text without such parts follows them.
    images: list = field(default_factory=list)
    # From the next answer on: `max_tokens`, `stop_token_ids`. What would change its probabilities
    # belongs to the run (rollout.temperature ...).
    sampling: dict = field(default_factory=dict)
    # Numbers for the log: means over episodes under `env/`.
    info: dict[str, float] = field(default_factory=dict)

    def __post_init__(self):
        for name, *kinds in (("images", list, tuple), ("sampling", dict), ("info", dict)):
            value = vars(self)[name]
            if not isinstance(value, tuple(kinds)):
                raise TypeError(f"a Result has {name} = {value!r}; give a {kinds[0].__name__}")


class Env:
    """One episode."""

    graded = False  # Whether the reward functions also score the last answer.
    needs_prompt = False  # Whether `reset` shows the row's prompt, so that every row must have one.

    def reset(self, row: dict) -> Observation | Awaitable[Observation]:
        """Return the first prompt.

        `row["rendered_prompt"]` is the row's own prompt as the policy would read it.
        """
        raise NotImplementedError("the class has no reset(self, row); write it")

    def step(self, state: State) -> Result | Awaitable[Result]:
        """Return the reply to an answer."""
        raise NotImplementedError("the class has no step(self, state); write it")

    async def close(self) -> None:
        """Release what the episode holds, after its end or if it was made only as a check."""


@dataclass(frozen=True)
class EnvMaker:
    """Makes the environment of an episode."""

    make: Callable[[], Env]
    example: Env  # It was made to see that one can be, and is closed.

    def __call__(self) -> Env:
        """Make an environment."""
        return self.make()


class SingleTurn(Env):
    """One answer to the row's prompt, which the reward functions score."""

    graded = True
    needs_prompt = True

    async def reset(self, row: dict) -> Observation:
        """Return the row's prompt. Not in a thread, which would cost more than it does."""
        return row["prompt"]

    async def step(self, state: State) -> Result:
        """End the episode."""
        return Result(done=True)


@dataclass(frozen=True, kw_only=True)
class Session:
    """An OpenAI-compatible (and Anthropic) endpoint over this rank's engine.

    It keeps the exact tokens of every request and answer with this key. `base_url` ends with /v1,
    as the OpenAI client wants it; the Anthropic client wants it without.
    """

    base_url: str
    api_key: str
    model: str


class Agent(Env):
    """An episode that a program leads, which talks to the policy through an endpoint.

    All its answers are trained on. `reset` and `step` are not called.
    """

    def run(self, row: dict, session: Session) -> Result | Awaitable[Result]:
        """Run the episode and return its result, of which reward, truncated and info count.

        With `graded` the reward functions also score the last answer: that of the chat which had
        its first answer last. With chats side by side this depends on their times.
        """
        raise NotImplementedError("the class has no run(self, row, session); write it")
