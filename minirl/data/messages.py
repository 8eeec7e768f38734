"""Chat messages, tools and calls of tools: what is one, and in what form.

Rows, environments and requests bring them in the forms of TRL, OpenAI and `datasets`; chat
templates read one form.
"""

import json
from typing import Any, TypeGuard

from minirl.base.errors import UserError
from minirl.base.reading import parse_json

Messages = list[dict]  # A chat: each with a role and a content.
RowPrompt = str | Messages

# Who speaks in a row of ShareGPT's layout -> the role.
SPEAKERS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "observation": "tool",
    "tool": "tool",
    "function_call": "assistant",
}


def to_messages(prompt: RowPrompt, system_prompt: str) -> Messages:
    """Return a prompt as messages, after the system prompt unless it is empty or there is one."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if system_prompt and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system_prompt})
    return messages


def from_sharegpt(raw: dict) -> dict:
    """Return a row with role and content in its messages, where ShareGPT has `from` and `value`.

    A list of such messages is replaced in whatever column it is, and so is a single one: the two
    sides of a pair. `system`, if the row has it, is put before `conversations`, and `<image>` is
    the place of an image if the row has some. Messages of others than SPEAKERS stay as they are,
    and `why_no_messages` says why.
    """
    found = {}
    has_images = bool(raw.get("image") or raw.get("images"))
    for key, value in raw.items():
        messages = [value] if isinstance(value, dict) else value
        if not (isinstance(messages, list) and messages and _are_of_sharegpt(messages)):
            continue
        found[key] = [_from_speaker(message, has_images) for message in messages]
    if not found:
        return raw
    system = raw.get("system")
    chat = found.get("conversations")
    if chat and chat[0]["role"] != "system" and isinstance(system, str) and system:
        chat.insert(0, {"role": "system", "content": system})
    return raw | found


def _are_of_sharegpt(messages: list) -> bool:
    return all(
        isinstance(message, dict)
        and isinstance(message.get("from"), str)
        and message["from"] in SPEAKERS
        and isinstance(message.get("value"), str)
        for message in messages
    )


def _from_speaker(message: dict, has_images: bool) -> dict:
    """Return one message of ShareGPT's with its role; a `function_call` as a call of a tool."""
    role = SPEAKERS[message["from"]]
    text = message["value"]
    if message["from"] == "function_call":
        call = {"type": "function", "function": _parsed(text)}
        return {"role": role, "content": "", "tool_calls": [call]}
    if not has_images or "<image>" not in text:
        return {"role": role, "content": text}
    parts = []
    for number, piece in enumerate(text.split("<image>")):
        if number:
            parts.append({"type": "image"})
        if piece.strip():
            parts.append({"type": "text", "text": piece})
    return {"role": role, "content": parts}


def why_no_messages(value: object) -> str:
    """Return what is wrong with a list of messages with role and content; empty: nothing."""
    if not isinstance(value, list) or not value:
        return "there is no list of messages"
    for number, message in enumerate(value, start=1):
        if not isinstance(message, dict) or "role" not in message:
            return _why_not_of_sharegpt(value) or f"message {number} has no role and content"
        role = message["role"]
        if not isinstance(role, str) or not role:
            return f"the role of message {number} is {role!r}; it must be a text"
        calls = message.get("tool_calls")
        if calls and (problem := _why_no_calls(calls)):
            return f"message {number} has tool_calls, and {problem}"
        content = message.get("content")
        if content is None and calls:
            continue
        if "content" not in message:
            return f"message {number} has no role and content"
        are_parts = isinstance(content, list) and content and all(map(_is_part, content))
        if not (isinstance(content, str) or are_parts):
            return (
                f"the content of message {number} is {str(content)[:80]!r}; it must be a text or a "
                'list of {"type": "text", "text": ...} and {"type": "image"}'
            )
    return ""


def _why_not_of_sharegpt(messages: list) -> str:
    """Return which message is not as `from_sharegpt` takes it; empty: none has from and value."""
    if not any(isinstance(message, dict) and "from" in message for message in messages):
        return ""
    for number, message in enumerate(messages, start=1):
        if not _are_of_sharegpt([message]):
            return (
                f"message {number} is {str(message)[:80]}; its from must be one of "
                f"{', '.join(SPEAKERS)}, and its value a text"
            )
    return "its messages have from and value"


def is_messages(value: object) -> TypeGuard[Messages]:
    """Return whether this is a list of messages with role and content, and not empty."""
    return not why_no_messages(value)


def is_prompt(value: object) -> TypeGuard[RowPrompt]:
    """Return whether this is a text or a list of messages, and not empty."""
    return is_messages(value) or (isinstance(value, str) and bool(value))


def fault_of(value: object) -> str:
    """Return what is wrong with a value that is a list but no messages, to end a sentence."""
    return f", as {why_no_messages(value)}" if isinstance(value, list) and value else ""


def _is_part(part: object) -> bool:
    """Return whether this is a text or an image in a message's content."""
    if not isinstance(part, dict):
        return False
    if part.get("type") == "text":
        return isinstance(part.get("text"), str)
    if part.get("type") == "image_url":
        place = part.get("image_url")
        return isinstance(place, dict) and isinstance(place.get("url"), str)
    return part.get("type") == "image"


def _why_no_calls(calls: object) -> str:
    """Return what is wrong with the calls of tools in a message; empty: nothing."""
    if not isinstance(calls, list):
        return f"they are no list: {str(calls)[:80]!r}"
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            return f'one has no {{"function": {{"name": ...}}}}: {str(call)[:80]!r}'
        if not isinstance(_arguments(function), dict):
            return (
                f"the arguments of {function['name']!r} are neither a mapping nor the JSON text of "
                f"one: {str(function.get('arguments'))[:80]!r}"
            )
    return ""


def _arguments(function: dict) -> Any:
    """Return the arguments of a call, read if they are a JSON text."""
    arguments = _parsed(function.get("arguments"))
    return {} if arguments is None else arguments


def for_template(messages: Messages) -> Messages:
    """Return messages as chat templates want them: arguments of calls are mappings.

    A message with calls has a content, which may be empty. Done twice, it changes nothing more.
    Calls must be good by `why_no_messages`.
    """
    if not any("tool_calls" in message for message in messages):
        return messages
    out = []
    for message in messages:
        message = {key: value for key, value in message.items() if value is not None}
        calls = []
        for call in message.pop("tool_calls", ()):
            function = {**call["function"], "arguments": _arguments(call["function"])}
            known = {key: value for key, value in call.items() if value is not None}
            calls.append({"type": "function", **known, "function": function})
        if calls:
            message["tool_calls"] = calls
        out.append({**message, "content": message.get("content", "")})
    return out


def has_calls(messages: Messages) -> bool:
    """Return whether a message calls a tool."""
    return any(message.get("tool_calls") for message in messages)


def read_tools(value: object, where: str) -> list[dict] | None:
    """Return the JSON schemas of tools as chat templates want them; None for none.

    Args:
        value: a list of schemas of functions in OpenAI's form, or without its `type` around them;
            each of them, or the list, may be a JSON text, as data sets often keep them.
        where: begins an error message.

    Raises:
        UserError: it is none of these.
    """
    tools = _parsed(value)
    if tools is None or tools == []:
        return None
    found = []
    for item in tools if isinstance(tools, list) else [tools]:
        tool = without_none(_parsed(item))
        if isinstance(tool, dict) and "function" not in tool:
            tool = {"type": "function", "function": tool}
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise UserError(
                f"{where} holds {str(item)[:100]!r}, which describes no tool; give a list of JSON "
                'schemas {"type": "function", "function": {"name": ..., "parameters": ...}}, or '
                "the JSON text of one"
            )
        found.append(tool)
    return found


def _parsed(value: object) -> Any:
    """Return what a JSON text says; anything else, and a text that is no JSON, as it is."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    try:
        return parse_json(value)
    except ValueError:
        return value


def without_none(value: Any) -> Any:
    """Return nested values without the keys that `datasets` fills with None."""
    if isinstance(value, dict):
        return {key: without_none(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [without_none(inner) for inner in value]
    return value


def read_template_kwargs(value: object, where: str) -> dict | None:
    """Return arguments of a chat template, a mapping or the JSON text of one; None for none.

    Raises:
        UserError: it is neither, or sets what is given to a template anyway; `where` begins the
            message.
    """
    kwargs = without_none(_parsed(value))
    if not kwargs:
        return None
    if not isinstance(kwargs, dict):
        raise UserError(
            f"{where} = {str(value)[:100]!r} is no mapping; give names and values, such as "
            f"{json.dumps({'enable_thinking': False})}"
        )
    for name in kwargs:
        if not isinstance(name, str) or not name.isidentifier() or name in RESERVED:
            raise UserError(
                f"{where} sets {name!r}, which is no argument of a chat template that can be set; "
                "name variables that the template reads, such as enable_thinking"
            )
    return kwargs


# What minirl gives to the tokenizer's `apply_chat_template`, or what has a setting or column.
RESERVED = (
    *("add_generation_prompt", "chat_template", "continue_final_message", "conversation"),
    *("max_length", "messages", "padding", "return_assistant_tokens_mask", "return_dict"),
    *("return_tensors", "self", "tokenize", "tokenizer_kwargs", "tools", "truncation"),
)
