"""The tokens of an episode: what was rendered, what was sampled, and when the one does not continue the other.

A chat goes on token by token. After an answer the template renders the whole chat anew; if that text begins with all that the policy has
read and said, the rest of it (the end of the turn, the reply, the header of the next answer) is tokenised alone and appended. If not, the
environment or the template has rewritten history (some drop the thoughts of earlier turns, some trim answers), and a new segment starts.
So what is trained on is always what was sampled, after exactly what it was sampled after.
"""

from dataclasses import dataclass, field

import numpy as np
from transformers import PreTrainedTokenizerBase

from minirl.data import chat
from minirl.types import Trajectory


@dataclass
class Completion:
    """What was sampled for one answer. The lists are parallel."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """Of each token, under the distribution it was drawn from (temperature applied)."""
    stopped: bool = False
    """Ended by a stop token, which is then the last token; otherwise the length ran out."""
    versions: list[int] = field(default_factory=list)
    """Of each token: the optimizer steps that the weights had seen which drew it."""


@dataclass
class Segment:
    """One token-exact sequence. The lists are parallel."""

    text: str = ""
    """Of all tokens, with the special ones."""
    tokens: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    """-1 where nothing was sampled."""
    rewards: list[float] = field(default_factory=list)
    """Given for the answer that ends with the token."""
    asking: bool = False
    """An answer is being sampled."""
    before: tuple[int, str] = (0, "")
    """Its number of tokens and its text before it was last asked."""

    def read(self, tokens: list[int], text: str) -> None:
        """What the policy is told."""
        self.text += text
        self._extend(tokens, False, [0.0] * len(tokens), [-1] * len(tokens))

    def say(self, completion: Completion, tokenizer: PreTrainedTokenizerBase) -> str:
        """What it answers; returned as a text with its special tokens."""
        before, num = tokenizer.decode(self.tokens), len(completion.tokens)
        self._extend(completion.tokens, True, completion.logprobs, completion.versions)
        after = tokenizer.decode(self.tokens)  # all of it: some tokenizers write a token otherwise at the beginning of a text
        text = after[len(before) :] if after.startswith(before) else tokenizer.decode(self.tokens[-num:])
        self.text += text
        return text

    def _extend(self, tokens: list[int], sampled: bool, logprobs: list[float], versions: list[int]) -> None:
        self.tokens += tokens
        self.sampled += [sampled] * len(tokens)
        self.logprobs += logprobs
        self.versions += versions
        self.rewards += [0.0] * len(tokens)

    def reward(self, value: float) -> None:
        """For the last answer."""
        last = max((i for i, sampled in enumerate(self.sampled) if sampled), default=None)
        if last is not None:
            self.rewards[last] += value


class Conversation:
    """The segments of an episode, or of a session of the endpoint."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer
        self.segments: list[Segment] = []

    def ask(self, messages: list[dict], tools: list[dict] | None = None) -> Segment:
        """The segment that ends with the header of the answer to `messages`, the whole chat so far: one that this goes on, or a new one.
        Raises UserError if the template refuses."""
        return self.ask_raw(chat.render(self.tokenizer, messages, tools=tools))

    def ask_raw(self, prompt: str | list[int]) -> Segment:
        """The same of a whole text with all its special tokens, or of a whole in tokens."""
        whole = isinstance(prompt, str)
        fitting = [s for s in self.segments if not s.asking and (prompt.startswith(s.text) if whole else prompt[: len(s.tokens)] == s.tokens)]
        segment = max(fitting, key=lambda s: len(s.tokens)) if fitting else self._begin()
        segment.before = len(segment.tokens), segment.text
        rest = prompt[len(segment.text if whole else segment.tokens) :]
        segment.read(chat.encode(self.tokenizer, rest) if whole else rest, rest if whole else self.tokenizer.decode(rest))
        return segment

    def take_back(self, segment: Segment) -> None:
        """As if it had not been asked, and nothing answered since."""
        length, segment.text = segment.before
        for column in (segment.tokens, segment.sampled, segment.logprobs, segment.versions, segment.rewards):
            del column[length:]
        segment.asking = False
        if not segment.tokens:
            self.segments[:] = [s for s in self.segments if s is not segment]

    def read(self, tokens: list[int] | str) -> Segment:
        """The last segment (a first one if there is none) with tokens, or a raw text, appended."""
        segment = self.segments[-1] if self.segments else self._begin()
        text = tokens if isinstance(tokens, str) else self.tokenizer.decode(tokens)
        segment.read(chat.encode(self.tokenizer, tokens) if isinstance(tokens, str) else list(tokens), text)
        return segment

    def _begin(self) -> Segment:
        self.segments.append(Segment())
        return self.segments[-1]

    def num_sampled(self) -> int:
        return sum(sum(s.sampled) for s in self.segments)

    def trajectories(self, *, group: int, episode: int, reward: float, info: dict) -> list[Trajectory]:
        """One for each segment in which something was sampled, to its last sampled token; all carry the episode's `reward`."""
        out = []
        for s in self.segments:
            if any(s.sampled):
                end = len(s.sampled) - s.sampled[::-1].index(True)
                arrays = {name: np.array(values[:end], dtype) for name, values, dtype in (
                    ("tokens", s.tokens, np.int32), ("sampled", s.sampled, bool), ("logprobs", s.logprobs, np.float32), ("rewards", s.rewards, np.float32),
                    ("versions", s.versions, np.int32))}
                out.append(Trajectory(**arrays, reward=reward, group=group, episode=episode, segment=len(out), version=min(v for v in s.versions if v >= 0), info=info))
        return out
