"""Chats: what a message is, and how the template and the tokenizer make token ids of messages.

Rows, environments and requests bring messages in the forms of TRL, OpenAI and `datasets`; chat
templates read one form.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, TypeGuard

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from minirl.base.errors import UserError, require
from minirl.base.reading import is_unicode, parsed

ASKED = "minirl asks"  # What is asked of a template to see what it shows.
Messages = list[dict]  # A chat: each with a role and a content.
RowPrompt = str | Messages
# What an error message says of a message that is none.
MESSAGE = (
    'a role, and a content that is a text or a list of {"type": "text", "text": ...} and '
    '{"type": "image"}; each of its tool_calls is {"function": {"name": ..., "arguments": {...}}}'
)


def to_messages(prompt: RowPrompt, system_prompt: str) -> Messages:
    """Return a prompt as messages, after the system prompt unless it is empty or there is one."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if system_prompt and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system_prompt})
    return messages


def why_no_messages(value: object) -> str:
    """Return what is wrong with a list of messages with role and content; empty: nothing."""
    if not isinstance(value, list) or not value:
        return "there is no list of messages"
    for number, message in enumerate(value, start=1):
        if not _is_message(message):
            return f"message {number} is {str(message)[:100]}, and a message has {MESSAGE}"
    return ""


def is_messages(value: object) -> TypeGuard[Messages]:
    """Return whether this is a list of messages with role and content, and not empty."""
    return not why_no_messages(value)


def _is_message(message: object) -> bool:
    if not isinstance(message, dict):
        return False
    role = message.get("role")
    content = message.get("content")
    calls = message.get("tool_calls") or []
    if not isinstance(role, str) or not role:
        return False
    if not isinstance(calls, list) or not all(map(_is_call, calls)):
        return False
    if isinstance(content, list):
        return bool(content) and all(map(_is_part, content))
    return isinstance(content, str) or (content is None and bool(calls))


def _is_call(call: object) -> bool:
    match call:
        case {"function": {"name": str()} as function}:
            return isinstance(parsed(function.get("arguments")) or {}, dict)
    return False


def _is_part(part: object) -> bool:
    match part:
        case {"type": "image"} | {"type": "text", "text": str()}:
            return True
        case {"type": "image_url", "image_url": {"url": str()}}:
            return True
    return False


def parts_of(message: dict) -> list[dict]:
    """Return the parts of a message's content; none if it is a text."""
    content = message.get("content")
    return content if isinstance(content, list) else []


def text_of_part(part: dict) -> str:
    """Return the text of a part of a message; "[image]" of an image."""
    return part["text"] if part["type"] == "text" else "[image]"


def plain(prompt: RowPrompt) -> RowPrompt:
    """Return a prompt for people: a message's content is a text, "[image]" stands for an image."""
    if isinstance(prompt, str):
        return prompt
    out = []
    for message in prompt:
        texts = list(map(text_of_part, parts_of(message)))
        out.append(message | {"content": "".join(texts)} if texts else message)
    return out


def images_of(messages: Messages) -> list[str]:
    """Return the data URLs of the images that `images.attach` put into a chat, in their order."""
    urls = []
    for message in messages:
        urls += [part["image"] for part in parts_of(message) if part["type"] == "image"]
    return urls


def for_template(messages: Messages, as_parts: bool | None = None) -> Messages:
    """Return messages as chat templates want them: arguments of calls are mappings.

    A message with calls has a content, which may be empty. What is None is left out: a table has
    all columns in each row, and templates ask for names (`'image' in part`). Done twice, it changes
    nothing more.

    Args:
        messages: a chat, of which the calls are good by `why_no_messages`.
        as_parts: True: texts become parts; False: parts that are all texts become one text; None:
            contents stay in their form.
    """
    none = "" if any("tool_calls" in message for message in messages) else None
    out = []
    for message in map(_named, messages):
        content = message.get("content", none)
        if parts := list(map(_named, parts_of(message))):
            is_text = as_parts is False and all(_is_part(p) and p["type"] == "text" for p in parts)
            content = "".join(map(text_of_part, parts)) if is_text else parts
        elif as_parts and content:
            content = [{"type": "text", "text": content}]
        calls = []
        for call in message.pop("tool_calls", ()):
            called = call["function"]
            function = {**called, "arguments": parsed(called.get("arguments")) or {}}
            calls.append({"type": "function", **_named(call), "function": function})
        if calls:
            message["tool_calls"] = calls
        out.append({**message, "content": content})
    return out


def _named(value: Any) -> Any:
    """Return a mapping without what is None; anything else as it is."""
    return {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else value


@lru_cache(maxsize=4)
def wants_parts(tokenizer: PreTrainedTokenizerBase, template: str) -> bool:
    """Return whether a tokenizer's template shows a text only where it is a part of a list."""
    return not _shows(tokenizer, as_parts=False) and _shows(tokenizer, as_parts=True)


def _shows(tokenizer: PreTrainedTokenizerBase, *, as_parts: bool) -> bool:
    try:
        text = render(tokenizer, [{"role": "user", "content": ASKED}], as_parts=as_parts)
    except UserError:
        return False
    return ASKED in text and f"'{ASKED}'" not in text  # That is Python's form of the part.


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Messages,
    *,
    header: bool = True,
    tools: list[dict] | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
    as_parts: bool | None = None,
) -> str:
    """Return the chat as text. This is the only place where a template is rendered.

    Args:
        tokenizer: has the chat template.
        messages: the chat.
        header: whether the header of an answer follows, up to where the assistant begins to speak.
        tools: JSON schemas of tools, for the template.
        chat_template_kwargs: further arguments of the template, of a row or of a request. They
            count before data.chat_template_kwargs, which `use_template` has put there.
        as_parts: as in `for_template`; None: as the template shows them.

    Raises:
        UserError: the template raises an error, or renders nothing.
    """
    shown = f"({str(messages)[:200]}); correct the messages or data.chat_template"
    if as_parts is None:
        as_parts = wants_parts(tokenizer, str(tokenizer.chat_template))
    try:
        text = tokenizer.apply_chat_template(
            for_template(messages, as_parts),
            tokenize=False,
            add_generation_prompt=header,
            tools=tools,
            **(chat_template_kwargs or {}),
        )
    except Exception as error:  # a template is a program: it may raise anything
        kind = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
        raise UserError(f"the chat template refuses a chat: {kind}{error} {shown}") from error
    require(text, f"the chat template renders nothing for a chat {shown}")
    return str(text)


def renderer(tokenizer: PreTrainedTokenizerBase, row: dict) -> Callable[..., str]:
    """Return `render` for the chats of a row, with its tools and template arguments."""
    return partial(render, tokenizer, **row.get("template_inputs", {}))


def is_text(text: str) -> bool:
    """Return whether a tokenizer takes a text: half of a surrogate pair is no character."""
    return text.isascii() or is_unicode(text)


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the token ids of a text that has all its special tokens.

    Raises:
        UserError: the text has half of a surrogate pair.
    """
    require(
        is_text(text),
        f"the text {text[:200]!r} has half of a surrogate pair, which is no character; remove it",
    )
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
