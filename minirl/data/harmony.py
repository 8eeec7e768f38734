"""Answers in harmony, the form that gpt-oss speaks: several messages, each in a channel.

    <|channel|>analysis<|message|>Let me look.<|end|>
    <|start|>assistant<|channel|>commentary to=functions.find <|constrain|>json<|message|>{}<|call|>

Thoughts are in the channel `analysis`, calls of tools in `commentary` with the tool as recipient,
and what the user reads is in `final` (OpenAI, "OpenAI harmony response format", 2025).
"""

import contextlib
import json
import re
from typing import Any, NamedTuple

NAME = "harmony"  # Of the form, in endpoint.tool_parser.
CHANNEL = "<|channel|>"
TOKENS = frozenset((CHANNEL, "<|start|>", "<|message|>"))  # By which a tokenizer knows it.
_START = "<|start|>"
_BODY = "<|message|>"
_ENDS = re.compile(r"<\|(?:end|call|return)\|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_FUNCTIONS = "functions."
_SPECIAL = re.compile(r"<\|\w+\|>")


class Message(NamedTuple):
    """One message of an answer."""

    channel: str  # "": none is named.
    recipient: str  # "": the user.
    body: str

    @property
    def function(self) -> str:
        """Return the name of the tool that it calls, "" if it calls none."""
        is_call = self.recipient.startswith(_FUNCTIONS)
        return self.recipient.removeprefix(_FUNCTIONS) if is_call else ""


def parse(text: str) -> list[Message]:
    """Return the messages of an answer.

    Args:
        text: with its special tokens. It may begin in the header of the first message, which the
            prompt began, and end in the midst of the last.
    """
    messages = []
    for piece in text.split(_START):
        header, is_message, body = piece.partition(_BODY)
        if is_message:
            channel = _CHANNEL.search(header)
            recipient = _RECIPIENT.search(header)
            messages.append(
                Message(
                    channel[1] if channel else "",
                    recipient[1] if recipient else "",
                    _ENDS.split(body, maxsplit=1)[0],
                )
            )
    return messages


def visible_text(text: str, *, with_calls: bool = False) -> str:
    """Return what the user reads of an answer: all but thoughts and calls.

    A text without any message is read as it is.

    Args:
        text: as `parse` takes it.
        with_calls: what is said to tools is read, too.
    """
    messages = parse(text)
    if not messages and CHANNEL not in text:
        return _SPECIAL.sub("", text)
    said = [m for m in messages if m.channel != "analysis"]
    shown = [m.body for m in said if with_calls or not m.recipient]
    return "\n".join(shown)


def to_chat_message(text: str) -> dict[str, Any]:
    """Return an answer as the templates of such models take it: a message with `thinking`.

    They refuse a content that has channels.
    """
    messages = parse(text)
    chat_message: dict[str, Any] = {"role": "assistant", "content": visible_text(text)}
    thoughts = [m.body for m in messages if m.channel == "analysis" and not m.recipient]
    if thoughts:
        chat_message["thinking"] = "\n".join(thoughts)
    calls = []
    for message in messages:
        if message.function:
            arguments: Any = message.body  # a text if it is no JSON
            with contextlib.suppress(ValueError, RecursionError):
                arguments = json.loads(message.body)
            function = {"name": message.function, "arguments": arguments}
            calls.append({"type": "function", "function": function})
    if calls:
        chat_message["tool_calls"] = calls
    return chat_message
