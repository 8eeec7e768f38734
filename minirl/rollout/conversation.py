"""The tokens of an episode: what was prompted, what was sampled, and where history was rewritten.

A chat continues token by token. After a completion the template renders the whole chat again. If
this text begins with the text of all tokens so far, the remainder (the end of the turn, the reply,
the header of the next completion) is tokenized and appended. If not, the environment or the
template has rewritten history, and a new segment begins: some templates drop the thoughts of
earlier turns, some trim completions, some end them with another token than the sampled one. So a
sampled token is always trained on after exactly the tokens that it was sampled after.

Tokenizers from sentencepiece write a space before a text, and some special tokens swallow the
spaces after them. Text is therefore encoded and decoded together with the token before it.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from minirl.base.errors import UserError
from minirl.base.reading import LONGEST_CHARACTER
from minirl.data import chat, harmony
from minirl.data.vision import Vision
from minirl.engine.loop import Completion, extended
from minirl.types.packed import ImageSpan, Trajectory


class Prompt(NamedTuple):
    """A prompt as the engine reads it."""

    tokens: list[int]
    text: str  # Of all tokens, with the special ones.
    images: list[ImageSpan]


@dataclass
class Segment:
    """One token-exact sequence of prompts and completions. The lists are parallel."""

    text: str = ""  # Of all tokens, with the special ones.
    prompt: str = ""  # Of all tokens before the last completion.
    tokens: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # 0 where nothing was sampled.
    versions: list[int] = field(default_factory=list)  # -1 where nothing was sampled.
    # Reward for the completion that ends with the token.
    turn_rewards: list[float] = field(default_factory=list)
    num_completions: int = 0
    num_guided: int = 0  # Number of sampled tokens that a grammar put outside the loss.
    # Of the last completion, also those that a grammar put there.
    answer_tokens: list[int] = field(default_factory=list)
    answer: str = ""  # The last completion of an agent, up to a stop string, with its calls.
    stopped: bool = False  # The last completion ended by itself.
    images: list[ImageSpan] = field(default_factory=list)
    # For an agent's chat: the messages, from the first sampled one on.
    messages: list[dict] = field(default_factory=list)
    routes: np.ndarray | None = None  # Of the first tokens.

    def append_prompt(self, prompt: Prompt) -> None:
        """Append tokens that the policy reads."""
        num = len(prompt.tokens)
        self.images += prompt.images
        self.text += prompt.text
        self.tokens += prompt.tokens
        self.sampled += [False] * num
        self.logprobs += [0.0] * num
        self.versions += [-1] * num
        self.turn_rewards += [0.0] * num

    def append_completion(self, completion: Completion, tokenizer: PreTrainedTokenizerBase) -> str:
        """Append tokens that the policy sampled. Those of a grammar count as if it had read them.

        Returns:
            Their text with special tokens, without the token that ends the completion. An end token
            that is also text, as `</code>`, is part of the content and stays.
        """
        text = decode_after(tokenizer, self.tokens, completion.tokens)
        self.prompt = self.text
        self.text += text
        self.tokens += completion.tokens
        self.answer_tokens = completion.tokens
        self.stopped = completion.stopped
        guided = completion.guided or [False] * len(completion.tokens)
        drawn = zip(completion.logprobs, completion.versions, guided, strict=True)
        for logprob, version, is_guided in drawn:
            self.sampled.append(not is_guided)
            self.logprobs.append(0.0 if is_guided else logprob)
            self.versions.append(-1 if is_guided else version)
            self.turn_rewards.append(0.0)
        if completion.routes is not None:  # some may belong to tokens after a stop string
            self.routes = extended(self.routes, completion.routes[: len(self.tokens)])
        self.num_guided += sum(completion.guided)
        self.num_completions += 1
        last = completion.tokens[-1:]
        if completion.stopped and not decode(tokenizer, last, skip_special_tokens=True):
            return text.removesuffix(decode(tokenizer, last))
        return text

    def begins(self, prompt: str | list[int], urls: Sequence[str]) -> bool:
        """Return whether a prompt (a text with images, or tokens) begins with this segment."""
        if isinstance(prompt, str):
            images = [image.url for image in self.images]
            return prompt.startswith(self.text) and images == list(urls[: len(images)])
        return prompt[: len(self.tokens)] == self.tokens

    def end(self) -> int:
        """Return the number of tokens up to and with the last sampled one; 0: none was sampled."""
        return next((i for i in range(len(self.sampled), 0, -1) if self.sampled[i - 1]), 0)

    def add_reward(self, reward: float) -> None:
        """Credit `reward` to the last completion; without one it is not credited to a token."""
        if end := self.end():
            self.turn_rewards[end - 1] += reward


def decode(tokenizer: PreTrainedTokenizerBase, tokens: list[int], **options: bool) -> str:
    """Return the text of tokens. `options` are those of the tokenizer's `decode`."""
    # It is a str already; the library's annotation also allows the result of a batch.
    return str(tokenizer.decode(tokens, **options))


@functools.cache
def speaks_harmony(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether a model answers in harmony, which has messages and channels."""
    return tokenizer.get_added_vocab().keys() >= harmony.TOKENS


def read_answer(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> str:
    """Return the visible text of an answer: without special tokens and harmony's thoughts."""
    if speaks_harmony(tokenizer):
        return harmony.visible_text(decode(tokenizer, tokens))
    return decode(tokenizer, tokens, skip_special_tokens=True)


def to_message(tokenizer: PreTrainedTokenizerBase, text: str) -> dict[str, Any]:
    """Return an answer, with its special tokens, as a message for the chat template."""
    if speaks_harmony(tokenizer):
        return harmony.to_chat_message(text)
    return {"role": "assistant", "content": text}


def decode_after(
    tokenizer: PreTrainedTokenizerBase, before: list[int], tokens: list[int], **options: bool
) -> str:
    """Return the text that `tokens` add to the text of the tokens before them.

    It decodes the last of these again, from the nearest token at which a character begins.
    """
    border = 0
    context = ""
    for border in reversed(range(max(0, len(before) - LONGEST_CHARACTER), len(before))):
        context = decode(tokenizer, before[border:], **options)
        if not context.startswith("\ufffd"):  # else it begins in the middle of a character
            break
    text = decode(tokenizer, before[border:] + tokens, **options)
    if text.startswith(context):
        return text[len(context) :]
    return decode(tokenizer, tokens, **options)


@functools.lru_cache(maxsize=64)
def _encoded(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    """Return the tokens of a text: of a prompt once for all its samples, which begin together."""
    return tuple(chat.encode(tokenizer, text))


class Conversation:
    """The segments of an episode, or of a session of the endpoint.

    Attributes:
        render: gives the text of a chat, with the tools and template arguments of its row.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        vision: Vision | None = None,
        row: dict | None = None,
        cut_to: int = 0,
    ):
        """Begin without a token.

        Args:
            tokenizer: the model's.
            vision: how the model reads images; None: it reads none.
            row: the episode's row, which has tools and template arguments.
            cut_to: keep only so many last tokens of a longer first prompt; 0: keep all.
        """
        self.cut_to = cut_to
        self.tokenizer = tokenizer
        self.vision = vision
        self.render = chat.renderer(tokenizer, row or {})
        self.segments: list[Segment] = []

    def continue_with_messages(self, messages: list[dict]) -> Segment:
        """Append the prompt of the next completion: the whole chat so far, and its header.

        Returns:
            The segment that this prompt continues, or a new one.

        Raises:
            UserError: the template refuses the chat, or its images do not fit.
        """
        text = self.render(messages)
        prompt = self.tokenize_prompt(text, chat.images_of(messages))
        if self.cut_to and not self.segments and not prompt.images:
            # The text stays whole, because a later rendering has to begin with it.
            prompt = prompt._replace(tokens=prompt.tokens[-self.cut_to :])
        return self.append_prompt(prompt)

    def tokenize_prompt(self, prompt: str | list[int], urls: Sequence[str]) -> Prompt:
        """Tokenize a prompt as it continues a segment, and append nothing.

        Args:
            prompt: a text with all its special tokens, or tokens.
            urls: images of a text, as data URLs. Tokens have no images.

        Raises:
            UserError: the number of images is not that of the prompt's places for images.
        """
        segment = self._longest(urls, prompt) or Segment()
        if isinstance(prompt, str):
            rest: str | list[int] = prompt[len(segment.text) :]
        else:
            rest = prompt[len(segment.tokens) :]
        added = self._read(rest, segment.tokens, urls[len(segment.images) :])
        return Prompt(
            segment.tokens + added.tokens, segment.text + added.text, segment.images + added.images
        )

    def append_prompt(self, prompt: Prompt) -> Segment:
        """Append a tokenized prompt to the longest segment that it continues, or to a new one."""
        urls = [image.url for image in prompt.images]
        segment = self._longest(urls, prompt.text, prompt.tokens) or self._new_segment()
        segment.append_prompt(
            Prompt(
                prompt.tokens[len(segment.tokens) :],
                prompt.text[len(segment.text) :],
                prompt.images[len(segment.images) :],
            )
        )
        return segment

    def append_raw(
        self, raw: list[int] | str, segment: Segment | None = None, urls: Sequence[str] = ()
    ) -> Segment:
        """Append tokens or a raw text, with one token for each image, to `segment` or a new one."""
        segment = segment or self._new_segment()
        segment.append_prompt(self._read(raw, segment.tokens, urls))
        return segment

    def _longest(self, urls: Sequence[str], *prompts: str | list[int]) -> Segment | None:
        """Return the longest segment that a prompt begins with, in each of its forms."""
        segments = self.segments
        for prompt in prompts:
            segments = [segment for segment in segments if segment.begins(prompt, urls)]
        return max(segments, key=lambda segment: len(segment.tokens), default=None)

    def _read(self, raw: list[int] | str, before: list[int], urls: Sequence[str]) -> Prompt:
        """Return tokens or a text as they follow the tokens `before`.

        The token of each image is repeated as often as the image has tokens.
        """
        text = raw if isinstance(raw, str) else decode_after(self.tokenizer, before, raw)
        tokens = self._encode(raw, before) if isinstance(raw, str) else raw
        if self.vision:
            expanded = self.vision.expand(tokens, urls, len(before))
            return Prompt(expanded.tokens, text, expanded.spans)
        if urls:
            raise UserError(
                "a chat has images, and policy.model reads none; use a model of a family that does"
            )
        return Prompt(tokens, text, [])

    def _encode(self, text: str, before: list[int]) -> list[int]:
        """Return the tokens of `text` as it follows the tokens `before`.

        It is encoded after the last of them, if this one stays the same token; else after the token
        that ends a text; else alone.
        """
        for token in (before[-1], self.tokenizer.eos_token_id) if before else ():
            context = "" if token is None else decode(self.tokenizer, [token])
            if not context or "\ufffd" in context:  # part of a character has no text
                continue
            ids = chat.encode(self.tokenizer, context + text)
            if ids[:1] == [token]:
                return ids[1:]
        return list(_encoded(self.tokenizer, text))

    def num_sampled(self) -> int:
        """Return the number of tokens in the loss, in all segments."""
        return sum(sum(segment.sampled) for segment in self.segments)

    def num_guided(self) -> int:
        """Return the number of sampled tokens that a grammar put outside the loss."""
        return sum(segment.num_guided for segment in self.segments)

    def _new_segment(self) -> Segment:
        self.segments.append(Segment())
        return self.segments[-1]

    def trajectories(
        self, *, group: int, episode: int, reward: float, info: dict, version: int = 0
    ) -> list[Trajectory]:
        """Return a trajectory for each segment with sampled tokens, up to the last of these.

        All have the episode's `reward`. An episode without sampled tokens is one trajectory without
        tokens, which is not trained on; its reward counts in its group. It is called once, when the
        episode has ended: the segments give up their tokens.

        Args:
            group: ticket of the prompt.
            episode: number of the sample in its group.
            reward: reward of the episode.
            info: what logs and dumps show of it.
            version: optimizer steps of the weights, for an episode without sampled tokens.
        """
        trajectories: list[Trajectory] = []
        for segment in [s for s in self.segments if s.end()] or [Segment()]:
            end = segment.end()
            drawn_by = [version for version in segment.versions if version >= 0]
            trajectories.append(
                Trajectory(
                    tokens=np.array(segment.tokens[:end], np.int32),
                    sampled=np.array(segment.sampled[:end], np.bool_),
                    logprobs=np.array(segment.logprobs[:end], np.float32),
                    turn_rewards=np.array(segment.turn_rewards[:end], np.float32),
                    versions=np.array(segment.versions[:end], np.int32),
                    version=min(drawn_by, default=version),
                    routes=None if segment.routes is None else segment.routes[:end],
                    images=[image for image in segment.images if image.start < end],
                    info=info,
                    reward=reward,
                    group=group,
                    episode=episode,
                    segment=len(trajectories),
                )
            )
            # Lists take seven times the memory of arrays.
            segment.tokens, segment.logprobs, segment.versions = [], [], []
        return trajectories
