"""The tokens of an episode: what was rendered, what was sampled, and when the one does not continue
the other.

A chat goes on token by token. After an answer the template renders the whole chat anew; if that
text begins with all that the policy has read and said, the rest of it (the end of the turn, the
reply, the header of the next answer) is tokenised and appended. If not, the environment or the
template has rewritten history (some drop the thoughts of earlier turns, some trim answers, some end
them by another token than the one sampled), and a new segment starts. So what is trained on is
always what was sampled, after exactly what it was sampled after.

Tokenizers that come from sentencepiece write a space before a text, and some special tokens swallow
the spaces behind them: what goes on is encoded and decoded together with the token before it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from transformers import PreTrainedTokenizerBase

from minirl.data import chat, images
from minirl.data.images import ImageSpan, Vision
from minirl.errors import UserError
from minirl.types import Trajectory


@dataclass
class Completion:
    """What was sampled for one answer. The lists are parallel."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(
        default_factory=list
    )  # of each token, under the distribution it was drawn from (temperature applied)
    stopped: bool = (
        False  # ended by a stop token, which is then the last token; otherwise the length ran out
    )
    versions: list[int] = field(
        default_factory=list
    )  # of each token: the optimizer steps that the weights had seen which drew it


@dataclass
class Segment:
    """One token-exact sequence. The lists are parallel."""

    text: str = ""  # of all tokens, with the special ones
    tokens: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)  # -1 where nothing was sampled
    turn_rewards: list[float] = field(
        default_factory=list
    )  # given for the answer that ends with the token
    answers: int = 0
    images: list[ImageSpan] = field(default_factory=list)

    def read(
        self,
        tokens: list[int],
        text: str,
        shown: Sequence[ImageSpan] = (),
        said: Completion | None = None,
    ) -> None:
        """What the policy is told, or, if it comes from it, what it `said`."""
        self.images += shown
        self.text += text
        self.tokens += tokens
        self.sampled += [said is not None] * len(tokens)
        self.logprobs += said.logprobs if said else [0.0] * len(tokens)
        self.versions += said.versions if said else [-1] * len(tokens)
        self.turn_rewards += [0.0] * len(tokens)

    def say(self, completion: Completion, tokenizer: PreTrainedTokenizerBase) -> str:
        """What it answers; returned as a text with its special tokens but the one that ends it."""
        text, last = added(tokenizer, self.tokens, completion.tokens), completion.tokens[-1:]
        self.read(completion.tokens, text, said=completion)
        self.answers += 1
        ended = completion.stopped and not tokenizer.decode(
            last, skip_special_tokens=True
        )  # no part of the content, as `</code>` would be
        return text.removesuffix(tokenizer.decode(last)) if ended else text

    def shows(self, urls: Sequence[str]) -> bool:
        """Its images are the first of these."""
        return [p.url for p in self.images] == list(urls[: len(self.images)])

    def end(self) -> int:
        """Behind the last sampled token; 0 if there is none."""
        return max((i for i, sampled in enumerate(self.sampled, 1) if sampled), default=0)

    def reward(self, value: float) -> None:
        """For the last answer."""
        if end := self.end():
            self.turn_rewards[end - 1] += value


def unexpanded(tokens: list[int], shown: Sequence[ImageSpan]) -> list[int]:
    """With one token for each image, as the engine is told."""
    rest = {place for p in shown for place in range(p.start + 1, p.start + p.num_tokens)}
    return [token for i, token in enumerate(tokens) if i not in rest]


def added(
    tokenizer: PreTrainedTokenizerBase, before: list[int], tokens: list[int], **options: bool
) -> str:
    """What tokens add to the text of those before them. `options`: of decode."""
    border = len(before) - 1
    while (known := tokenizer.decode(before[border:], **options)).startswith(
        "\ufffd"
    ) and border > 0:
        border -= 1  # it is in the middle of a character
    after = tokenizer.decode(before[border:] + tokens, **options)
    return after[len(known) :] if after.startswith(known) else tokenizer.decode(tokens, **options)


class Conversation:
    """The segments of an episode, or of a session of the endpoint."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vision: Vision | None = None):
        self.tokenizer, self.vision = tokenizer, vision
        self.segments: list[Segment] = []

    def ask(self, messages: list[dict], tools: list[dict] | None = None) -> Segment:
        """The segment that ends with the header of the answer to `messages`, the whole chat so far:
        one that this goes on, or a new one. Raises UserError if the template refuses.
        """
        return self.go_on(
            *self.whole(
                chat.render(self.tokenizer, messages, tools=tools), images.of_chat(messages)
            )
        )

    def whole(
        self, prompt: str | list[int], urls: Sequence[str] = ()
    ) -> tuple[list[int], str, list[ImageSpan]]:
        """A prompt (a text with all its special tokens, or tokens) as tokens, as a text, and the
        places of its images, going on from a segment; nothing is noted.
        """
        if isinstance(prompt, str):
            begin = (
                _longest(s for s in self.segments if prompt.startswith(s.text) and s.shows(urls))
                or Segment()
            )
            tokens, shown = self._expand(
                self._encode(prompt[len(begin.text) :], begin.tokens),
                urls[len(begin.images) :],
                len(begin.tokens),
            )
            return begin.tokens + tokens, prompt, begin.images + shown
        begin = (
            _longest(s for s in self.segments if prompt[: len(s.tokens)] == s.tokens) or Segment()
        )
        return (
            prompt,
            begin.text + added(self.tokenizer, begin.tokens, prompt[len(begin.tokens) :]),
            begin.images,
        )

    def go_on(self, tokens: list[int], text: str, shown: Sequence[ImageSpan] = ()) -> Segment:
        """The segment that ends with what `whole` gave: one that it goes on still, or a new one."""
        urls = [p.url for p in shown]
        segment = (
            _longest(
                s
                for s in self.segments
                if tokens[: len(s.tokens)] == s.tokens and text.startswith(s.text) and s.shows(urls)
            )
            or self._begin()
        )
        segment.read(
            tokens[len(segment.tokens) :], text[len(segment.text) :], shown[len(segment.images) :]
        )
        return segment

    def read(
        self, said: list[int] | str, segment: Segment | None = None, urls: Sequence[str] = ()
    ) -> Segment:
        """The segment, or a new one, with tokens or a raw text appended, in which one token stands
        for an image.
        """
        segment = segment or self._begin()
        ids, text = (
            (self._encode(said, segment.tokens), said)
            if isinstance(said, str)
            else (list(said), added(self.tokenizer, segment.tokens, said))
        )
        tokens, shown = self._expand(ids, urls, len(segment.tokens))
        segment.read(tokens, text, shown)
        return segment

    def _expand(
        self, ids: list[int], urls: Sequence[str], begin: int
    ) -> tuple[list[int], list[ImageSpan]]:
        if self.vision:
            return self.vision.expand(ids, urls, begin)
        if urls:
            raise UserError(
                "a chat has images, and policy.model reads none; take a model of a family that does"
            )
        return ids, []

    def _encode(self, text: str, before: list[int]) -> list[int]:
        """Of a text that follows these tokens: as behind the last of them if that stays what it is,
        else as behind a token that ends a text.
        """
        for last in (before[-1:], [self.tokenizer.eos_token_id] if before else []):
            begin = self.tokenizer.decode(last) if last != [None] else ""
            ids = chat.encode(self.tokenizer, begin + text)
            if (
                begin and "\ufffd" not in begin and ids[:1] == last
            ):  # not a part of a character, which has no text
                return ids[1:]
        return chat.encode(self.tokenizer, text)

    def num_sampled(self) -> int:
        """Tokens."""
        return sum(sum(s.sampled) for s in self.segments)

    def _begin(self) -> Segment:
        self.segments.append(Segment())
        return self.segments[-1]

    def trajectories(
        self, *, group: int, episode: int, reward: float, info: dict
    ) -> list[Trajectory]:
        """One for each segment in which something was sampled, to its last sampled token; all carry
        the episode's `reward`.
        """
        return [
            Trajectory(
                tokens=np.array(s.tokens[: s.end()], np.int32),
                sampled=np.array(s.sampled[: s.end()], np.bool_),
                logprobs=np.array(s.logprobs[: s.end()], np.float32),
                turn_rewards=np.array(s.turn_rewards[: s.end()], np.float32),
                versions=np.array(s.versions[: s.end()], np.int32),
                images=[p for p in s.images if p.start < s.end()],
                info=info,
                reward=reward,
                group=group,
                episode=episode,
                segment=i,
                version=min(v for v in s.versions if v >= 0),
            )
            for i, s in enumerate(s for s in self.segments if s.end())
        ]


def _longest(segments: Iterator[Segment]) -> Segment | None:
    return max(segments, key=lambda s: len(s.tokens), default=None)
