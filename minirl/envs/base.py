"""What the policy acts in: an environment shows a row, hears an answer, replies, until the episode
is done. One object an episode.

    # my_env.py
    from minirl.envs.base import Env, Result

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

`reset`, `step` and `run` may be `async def`; others run in threads, so both overlap with
generation.
"""

from dataclasses import dataclass, field


class Raw(str):
    """A text that goes to the policy as it is, without the chat template."""


Observation = (
    str | list[dict] | list[int] | Raw
)  # what a user says, chat messages, tokens, or a raw text


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
    # For this answer. The episode earns the sum of all, credited to the answers they were given
    # for.
    reward: float = 0.0
    done: bool = False
    truncated: bool = False  # done, but not by the policy's doing: for metrics and reward.unstopped
    messages: list[dict] | None = (
        # the whole chat from here on, instead of an observation: for environments that rewrite
        # history
        None
    )
    # Go with the observation: paths, bytes, PIL images or data URLs, for its parts {"type":
    # "image"}; a text without such parts follows them.
    images: list = field(default_factory=list)
    # Of the next answer: `max_tokens`, `stop_token_ids`. What would change its probabilities is the
    # policy's (rollout.temperature ...).
    sampling: dict = field(default_factory=dict)
    info: dict[str, float] = field(
        default_factory=dict
    )  # numbers for the log: means over episodes under `env/`


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
    """An OpenAI-compatible (and Anthropic) endpoint over this rank's engine that keeps the exact
    tokens of all that is said with this key. `base_url` ends with /v1, as the OpenAI client wants
    it; the Anthropic client wants it without.
    """

    base_url: str
    api_key: str
    model: str


class Agent(Env):
    """An episode that a program of its own leads, talking to the policy through an endpoint. All
    its answers are trained on; nobody calls `reset` and `step`.
    """

    def run(self, row: dict, session: Session) -> Result:
        """Play the episode; `reward`, `truncated` and `info` of the result count. With `graded` the
        reward functions score the last answer, too, of the chat that it began last.
        """
        raise NotImplementedError
