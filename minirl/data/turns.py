"""Chats to imitate: token ids, with the assistant's turns in the loss.

A turn is trained as a policy that is asked for it would see it: after what the chat template
renders when a generation prompt follows the messages before it. Most templates render a turn alike
whatever follows, and a chat is one rendering. Some rewrite history (Qwen3's drops what was thought
in earlier turns). Then the turns that one rendering holds as the policy would see them share it,
and each of the others is in another rendering.
"""

import bisect
import os
import re
from collections.abc import Callable
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from minirl.base.errors import UserError
from minirl.data.chat import renderer
from minirl.data.messages import Messages


class Rendering(NamedTuple):
    """A chat up to one of its turns, as token ids."""

    ids: list[int]  # Token ids.
    mask: list[bool]  # Of each token: whether it is in the loss.
    num_messages: int  # The messages of the chat that it holds.


class _Turn(NamedTuple):
    """A chat up to one of its turns, which nothing follows."""

    num_messages: int  # Up to the turn, with it.
    text: str
    start: int  # Number of characters before the answer.


def encode_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Messages,
    trained: list[int],
    stop_ids: list[int],
    show: Callable[..., str] | None = None,
) -> list[Rendering]:
    """Return a chat as the renderings that hold all of its turns, each turn in the loss of one.

    The mask is True on what a policy that is asked for the messages `trained` would sample: the
    content and the token that ends the turn, not the header before nor the line break after it. A
    token on both sides of the border between header and answer is not in the loss. Nothing follows
    the last token in the loss.

    Args:
        tokenizer: has the chat template.
        messages: the chat.
        trained: indices of the assistant turns in the loss, in order; each follows a message.
        stop_ids: tokens that end an answer.
        show: renders a chat of this row, as `chat.renderer` returns it; None: as the template does
            without tools and arguments.

    Returns:
        The renderings, in the order of their last turns. All but the last one are there because the
        template renders their turns otherwise when others follow.

    Raises:
        UserError: the template refuses the chat, renders a call of a tool otherwise than its
            generation prompt begins it, or does not end a turn by a stop token.
    """
    show = show or renderer(tokenizer, {})
    turns = [_render_turn(tokenizer, messages, i, stop_ids, show) for i in trained]
    renderings = []
    while turns:
        # The rendering of the last turn, and the turns that it holds as the policy would see them.
        text = turns[-1].text
        ids, spans = _encode(tokenizer, text)
        mask = [False] * len(ids)
        length = 0
        others = []
        for turn in turns:
            # The first token that has none of the characters before the answer. Offsets leave out a
            # space that a token begins with: if the token before ends too early, this one holds the
            # last of these characters.
            first = bisect.bisect_left(spans, turn.start, key=lambda span: span[0])
            while 0 < first < len(spans) and spans[first - 1][1] < turn.start:
                first += 1
            last = next((n for n in range(first, len(ids)) if ids[n] in stop_ids), None)
            end = len(text) if last is None else spans[last][1]
            if turn.text[:end] != text[:end]:
                others.append(turn)
                continue
            if last is None:
                raise UserError(
                    "the chat template does not end an answer by one of the stop tokens "
                    f"{stop_ids}; name one that does by data.chat_template, or its token as "
                    f"eos_token_id in generation_config.json ({text[turn.start :][:100]!r})"
                )
            mask[first : last + 1] = [True] * (last + 1 - first)
            length = max(length, last + 1)
        renderings.append(Rendering(ids[:length], mask[:length], turns[-1].num_messages))
        turns = others
    return renderings[::-1]


def _encode(
    tokenizer: PreTrainedTokenizerBase, text: str
) -> tuple[list[int], list[tuple[int, int]]]:
    """Return the token ids of a text, and of each its first character and the one after its last.

    Without a warning for long chats, which are cut later.
    """
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return encoded["input_ids"], encoded["offset_mapping"]


def _render_turn(
    tokenizer: PreTrainedTokenizerBase,
    messages: Messages,
    index: int,
    stop_ids: list[int],
    show: Callable[..., str],
) -> _Turn:
    """Return the chat up to a turn as the template renders it, or as a policy would see it.

    The template's rendering is taken if it begins as the generation prompt does and has all of the
    turn's content. A generation prompt may, after the begin of the header, begin the answer by tags
    (`<think>` of DeepSeek-R1's distilled models) that the rendering does not have: then the answer
    begins where the two part.
    Else (the same template leaves out what was thought, even in the last turn) the content follows
    the generation prompt as it is.
    """
    before = show(messages[:index])
    text = show(messages[: index + 1], header=False)
    start = len(before)
    is_begun = text.startswith(before)
    if not is_begun:
        header = len(os.path.commonprefix([before, show(messages[:index], header=False)]))
        # Where the token of the generation prompt begins in which the two part.
        starts = [first for first, _ in _encode(tokenizer, before)[1]]
        num_shared = len(os.path.commonprefix([before, text]))
        start = starts[bisect.bisect_right(starts, num_shared) - 1]
        has_only_tags = re.fullmatch(r"(\s*<[^<>]+>\s*)+", before[start:]) is not None
        is_begun = start > header and has_only_tags
    content = messages[index]["content"]
    if not isinstance(content, str):
        content = "".join(part["text"] for part in content if part["type"] == "text")
    has_all = "".join(content.split()) in "".join(text[start:].split())
    if not is_begun or not has_all:
        if not content.strip() or messages[index].get("tool_calls"):
            raise UserError(
                f"the chat template renders message {index + 1} of a chat otherwise than its "
                "generation prompt begins it; name another by data.chat_template "
                f"({str(messages[index])[:100]})"
            )
        # The generation prompt may end with the tag that the content begins with:
        # `<think>well</think>4` after `<|Assistant|><think>` is `well</think>4`.
        opening = re.search(r"(<[^<>]+>)(\s*)$", before)
        if opening and content.lstrip().startswith(opening[1]):
            content = content.lstrip().removeprefix(opening[1]).removeprefix(opening[2])
        start = len(before)
        text = before + content
    stops = [str(tokenizer.decode([token])) for token in stop_ids]
    if not any(stop in text[start:] for stop in stops):
        text += _end_of_answers(show, stops)
    return _Turn(index + 1, text, start)


def _end_of_answers(show: Callable[..., str], stops: list[str]) -> str:
    """Return what follows an answer up to a stop token; nothing if the template has none there.

    It is looked for after the last answer of a chat, then before another question (`<|user|>` of
    GLM-4.5).
    """
    chat = [
        {"role": "user", "content": "minirl asks"},
        {"role": "assistant", "content": "minirl answers"},
        {"role": "user", "content": "minirl asks again"},
    ]
    for messages in (chat[:2], chat):
        text = show(messages, header=False)
        after = text.partition("minirl answers")[2].partition("minirl asks again")[0]
        ends = [after.index(stop) + len(stop) for stop in stops if stop in after]
        if ends:
            return after[: min(ends)]
    return ""
