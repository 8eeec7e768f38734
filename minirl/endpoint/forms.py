"""How each API writes a request and its response, in one table.

OpenAI's chat is what its responses and Anthropic's messages are translated to. Responses keep no
state here: a request has all of its chat in `input`. What would need a memory
(`previous_response_id`, `conversation`, `background`) or tools that run at the server is refused.
"""

import itertools
import json
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple

from minirl.base.errors import UserError, require
from minirl.endpoint.completions import Choice, ChoicePart, JSONObject, PendingResponse
from minirl.endpoint.http import MESSAGES
from minirl.rollout.conversation import decode

MODEL = "policy"
COMPLETIONS = "/v1/completions"


class Form(NamedTuple):
    """How one API writes.

    Attributes:
        to_chat: returns the body of a chat or completion that asks for the same. Raises UserError
            for what the endpoint cannot do; KeyError, TypeError or AttributeError for a malformed
            body.
        body: returns the body of a response, which is finished.
        events: yields the response as events while it is sampled. Raises what its `parts` does.
        last: what ends a stream of events.
    """

    to_chat: Callable[[JSONObject], JSONObject]
    body: Callable[[PendingResponse], JSONObject]
    events: Callable[[PendingResponse], AsyncIterator[JSONObject]]
    last: str = ""


# --------------------------------------------------------------------------------------------------
# OpenAI's chats and completions


def _chat_head(response: PendingResponse) -> JSONObject:
    kind = "chat.completion.chunk" if response.request.stream else "chat.completion"
    return {
        "id": f"chatcmpl-{response.name}",
        "object": kind if response.request.messages is not None else "text_completion",
        "created": response.created,
        "model": MODEL,
    }


def _chat_usage(response: PendingResponse) -> JSONObject:
    num_read, num_sampled = response.num_tokens()
    total = num_read + num_sampled
    return {"prompt_tokens": num_read, "completion_tokens": num_sampled, "total_tokens": total}


def _chat_choice(part: ChoicePart) -> JSONObject:
    """Return a part of a choice, or the whole of it, as an entry of `choices`."""
    choice = part.choice
    entry: JSONObject = {"index": choice.index, "finish_reason": part.finish_reason or None}
    logprobs = choice.request.logprobs  # 0 asks for them, too
    if part.finish_reason and logprobs is not None and logprobs is not False:
        entry["logprobs"] = _logprobs(choice)
    if choice.request.messages is None:
        return entry | {"text": part.text}
    message: JSONObject = {"role": "assistant"} if part.is_first else {}
    message["content"] = part.text
    if part.finish_reason == "tool_calls":
        message["content"] = part.text or None
        calls = enumerate(choice.calls_to_send())
        message["tool_calls"] = [{"index": number, **call} for number, call in calls]
    return entry | {"delta" if choice.request.stream else "message": message}


def _logprobs(choice: Choice) -> dict[str, list]:
    """Return the log-probs of all sampled tokens, in the form of a chat or of a completion."""
    done = choice.completion()
    rows = []  # Of each token: itself, then the likeliest in its place.
    for number, token in enumerate(done.tokens):
        pairs = [(token, done.logprobs[number]), *(done.top[number] if done.top else ())]
        rows.append([(decode(choice.tokenizer, [each]), logprob) for each, logprob in pairs])
    if choice.request.messages is None:
        found: dict[str, list] = {
            "tokens": [row[0][0] for row in rows],
            "token_logprobs": done.logprobs,
        }
        return found | {"top_logprobs": [dict(row[1:]) for row in rows]} if done.top else found
    content = []
    for row in rows:
        entries = [{"token": text, "logprob": value, "bytes": None} for text, value in row]
        content.append(entries[0] | {"top_logprobs": entries[1:]})
    return {"content": content}


def chat_body(response: PendingResponse) -> JSONObject:
    """Return a chat completion, or a completion."""
    parts = [ChoicePart(choice, choice.text, choice.finish_reason) for choice in response.choices]
    choices = [_chat_choice(part) for part in parts]
    return {**_chat_head(response), "choices": choices, "usage": _chat_usage(response)}


async def chat_events(response: PendingResponse) -> AsyncIterator[JSONObject]:
    """Yield the chunks of a chat completion, or of a completion."""
    head = _chat_head(response)
    async for part in response.parts():
        yield head | {"choices": [_chat_choice(part)], "usage": None}
    if (response.request.stream_options or {}).get("include_usage"):
        yield head | {"choices": [], "usage": _chat_usage(response)}


def _function_tool(**fields: Any) -> JSONObject:
    """Return a tool as chats have it; fields that are None are left out."""
    known = {name: value for name, value in fields.items() if value is not None}
    return {"type": "function", "function": known}


async def _text_parts(response: PendingResponse) -> AsyncIterator[ChoicePart]:
    """Yield the parts of the only choice's text; an answer that only calls tools has none."""
    async for part in response.parts():
        if part.text or part.finish_reason != "tool_calls":
            yield part


# --------------------------------------------------------------------------------------------------
# Anthropic's messages

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
CHOICES = {"any": "required", "auto": "auto", "none": "none"}  # Of tools, as chats name them.


def from_anthropic(body: JSONObject) -> JSONObject:
    """Return the body of the chat that asks for the same."""
    messages = []
    if body.get("system"):
        messages.append({"role": "system", "content": body["system"]})
    for message in body["messages"]:
        messages += _from_anthropic_message(message)
    tools = []
    for tool in body.get("tools") or ():
        fields = {"name": tool["name"], "description": tool.get("description", "")}
        tools.append(_function_tool(**fields, parameters=tool["input_schema"]))
    chat = {
        "messages": messages,
        "max_tokens": body["max_tokens"],
        "stop": body.get("stop_sequences"),
        "stream": body.get("stream"),
        "tools": tools,
        "chat_template_kwargs": body.get("chat_template_kwargs"),
    }
    if choice := body.get("tool_choice"):
        named = {"type": "function", "function": {"name": choice.get("name")}}
        chat["tool_choice"] = CHOICES.get(choice["type"], named)
        chat["parallel_tool_calls"] = not choice.get("disable_parallel_tool_use")
    if wanted := (body.get("output_config") or {}).get("format"):
        schema = {"name": "answer", "schema": wanted["schema"]}
        chat["response_format"] = {"type": wanted["type"], "json_schema": schema}
    return chat


def _from_anthropic_message(message: JSONObject) -> list[JSONObject]:
    """Return the results of tools as messages of their own, then what else the message has."""
    if isinstance(message["content"], str):
        return [message]
    messages = []
    parts = []
    tool_calls = []
    for block in message["content"]:
        if block["type"] == "tool_use":
            function = {"name": block["name"], "arguments": json.dumps(block["input"])}
            tool_calls.append({"id": block["id"], "function": function})
        elif block["type"] == "tool_result":
            content = block.get("content")
            if isinstance(content, list):
                content = [_from_anthropic_part(part) for part in content]
            reply = {"tool_call_id": block["tool_use_id"], "content": content}
            messages.append({"role": "tool", **reply})
        else:
            parts.append(_from_anthropic_part(block))
    if parts or tool_calls:
        messages.append({"role": message["role"], "content": parts, "tool_calls": tool_calls})
    return messages


def _from_anthropic_part(block: JSONObject) -> JSONObject:
    """Return a block of a text or an image as a part of a chat's message."""
    if block["type"] != "image":
        return block
    source = block["source"]
    url = (
        source["url"]
        if source["type"] == "url"
        else (f"data:{source['media_type']};base64,{source['data']}")
    )
    return {"type": "image_url", "image_url": {"url": url}}


def anthropic_body(response: PendingResponse) -> JSONObject:
    """Return Anthropic's message of the response, as it stands; it has one choice."""
    (choice,) = response.choices
    content: list[JSONObject] = []
    if choice.text or not choice.tool_calls:
        content.append({"type": "text", "text": choice.text})
    for (function, arguments), sent in zip(choice.tool_calls, choice.calls_to_send(), strict=True):
        call = {"id": sent["id"], "name": function, "input": arguments}
        content.append({"type": "tool_use", **call})
    is_stop = choice.stop_string and not choice.tool_calls
    num_read, num_sampled = response.num_tokens()
    return {
        "id": f"msg_{response.name}",
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": content,
        "stop_reason": "stop_sequence" if is_stop else STOP_REASONS.get(choice.finish_reason),
        "stop_sequence": choice.stop_string,
        "usage": {"input_tokens": num_read, "output_tokens": num_sampled},
    }


async def anthropic_events(response: PendingResponse) -> AsyncIterator[JSONObject]:
    """Yield the response as events: the blocks of the message, one after the other."""
    begun = anthropic_body(response) | {"content": [], "stop_reason": None, "stop_sequence": None}
    yield {"type": "message_start", "message": begun}
    async for part in _text_parts(response):
        if part.is_first:
            block = {"type": "text", "text": ""}
            yield {"type": "content_block_start", "index": 0, "content_block": block}
        delta = {"type": "text_delta", "text": part.text}
        yield {"type": "content_block_delta", "index": 0, "delta": delta}
    message = anthropic_body(response)
    for index, block in enumerate(message["content"]):
        if block["type"] == "tool_use":
            begun = block | {"input": {}}
            yield {"type": "content_block_start", "index": index, "content_block": begun}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    ended = {name: message[name] for name in ("stop_reason", "stop_sequence")}
    yield {"type": "message_delta", "delta": ended, "usage": message["usage"]}
    yield {"type": "message_stop"}


# --------------------------------------------------------------------------------------------------
# OpenAI's responses

NEEDS_MEMORY = ("previous_response_id", "conversation", "background", "prompt")
PARTS = ("input_text", "output_text", "text")  # Names of a text in a content.


def from_responses(body: JSONObject) -> JSONObject:
    """Return the body of the chat that asks for the same."""
    for name in NEEDS_MEMORY:
        require(
            not body.get(name),
            f"{name} is not supported here: the endpoint keeps no responses; send the whole chat "
            "as `input`, and wait for the answer",
        )
    messages: list[JSONObject] = []
    if body.get("instructions"):
        messages.append({"role": "system", "content": body["instructions"]})
    items = body["input"]
    for item in [{"role": "user", "content": items}] if isinstance(items, str) else items:
        _append_item(messages, item)
    tools = []
    for tool in body.get("tools") or ():
        require(
            tool["type"] == "function",
            f"there is a tool of type {tool['type']!r}; the endpoint takes function tools, which "
            "the client runs",
        )
        names = ("name", "description", "parameters")
        tools.append(_function_tool(**{name: tool.get(name) for name in names}))
    choice = body.get("tool_choice")
    if isinstance(choice, dict) and choice["type"] == "function":
        choice = {"type": "function", "function": {"name": choice["name"]}}
    wanted = (body.get("text") or {}).get("format")
    if wanted and wanted["type"] == "json_schema":
        wanted = {"type": "json_schema", "json_schema": {"schema": wanted["schema"]}}
    with_logprobs = "message.output_text.logprobs" in (body.get("include") or ())
    return {
        "messages": messages,
        "max_tokens": body.get("max_output_tokens"),
        "logprobs": with_logprobs or bool(body.get("top_logprobs")),
        "top_logprobs": body.get("top_logprobs"),
        "stream": body.get("stream"),
        "tools": tools or None,
        "tool_choice": choice,
        "parallel_tool_calls": body.get("parallel_tool_calls"),
        "response_format": wanted,
        "chat_template_kwargs": body.get("chat_template_kwargs"),
    }


def _append_item(messages: list[JSONObject], item: JSONObject) -> None:
    """Append an item of the input. What an answer said and what it called become one message."""
    kind = item.get("type", "message")
    if kind == "message":
        messages.append({"role": item["role"], "content": _to_chat_content(item["content"])})
    elif kind == "function_call":
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        function = {"name": item["name"], "arguments": item["arguments"]}
        call = {"id": item["call_id"], "type": "function", "function": function}
        messages[-1].setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        content = _to_chat_content(item["output"])
        messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": content})
    else:
        raise UserError(
            f"the input has an item of type {kind!r}; the endpoint takes message, function_call "
            "and function_call_output"
        )


def _to_chat_content(content: str | list[JSONObject]) -> str | list[JSONObject]:
    """Return a content in the parts that chats have; raises UserError for other parts."""
    if isinstance(content, str):
        return content
    parts = []
    for part in content:
        kind = part["type"]
        require(
            kind in PARTS or kind == "input_image",
            f"a content has a part of type {kind!r}; the endpoint takes texts and input_image",
        )
        if kind == "input_image":
            parts.append({"type": "image_url", "image_url": {"url": part["image_url"]}})
        else:
            parts.append({"type": "text", "text": part["text"]})
    return parts


def _text_part(text: str, logprobs: list) -> JSONObject:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _items(response: PendingResponse) -> list[JSONObject]:
    """Return the items of the output: what was said, if anything was, then the calls."""
    (choice,) = response.choices
    items: list[JSONObject] = []
    if choice.text or not choice.tool_calls:
        item = {"id": f"msg_{response.name}", "type": "message", "role": "assistant"}
        logprobs = _logprobs(choice)["content"] if choice.request.logprobs else []
        content = [_text_part(choice.text, logprobs)]
        items.append(item | {"status": "completed", "content": content})
    for call in choice.calls_to_send():
        item = {"id": f"fc_{call['id']}", "type": "function_call", "call_id": call["id"]}
        items.append(item | call["function"] | {"status": "completed"})
    return items


def responses_body(response: PendingResponse) -> JSONObject:
    """Return OpenAI's response, as it stands; it has one choice."""
    (choice,) = response.choices
    is_cut = choice.finish_reason == "length"
    status = "completed" if choice.finish_reason else "in_progress"
    num_read, num_sampled = response.num_tokens()
    return {
        "id": f"resp_{response.name}",
        "object": "response",
        "created_at": response.created,
        "completed_at": int(time.time()) if choice.finish_reason else None,
        "status": "incomplete" if is_cut else status,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "error": None,
        "model": MODEL,
        "output": _items(response) if choice.finish_reason else [],
        "parallel_tool_calls": response.request.parallel_tool_calls is not False,
        "tool_choice": "auto",
        "tools": [],
        "usage": {
            "input_tokens": num_read,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": num_sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": num_read + num_sampled,
        },
    }


async def responses_events(response: PendingResponse) -> AsyncIterator[JSONObject]:
    """Yield the response as events: its items, one after the other."""
    numbers = itertools.count()

    def event(kind: str, **fields: Any) -> JSONObject:
        return {"type": f"response.{kind}", **fields, "sequence_number": next(numbers)}

    begun = responses_body(response) | {"status": "in_progress", "output": []}
    yield event("created", response=begun)
    yield event("in_progress", response=begun)
    item: JSONObject = {"id": f"msg_{response.name}", "type": "message", "role": "assistant"}
    place: JSONObject = {"item_id": item["id"], "output_index": 0, "content_index": 0}
    async for part in _text_parts(response):
        if part.is_first:
            item |= {"status": "in_progress", "content": []}
            yield event("output_item.added", output_index=0, item=item)
            yield event("content_part.added", **place, part=_text_part("", []))
        yield event("output_text.delta", **place, delta=part.text, logprobs=[])
    for index, item in enumerate(_items(response)):
        if item["type"] == "message":
            (said,) = item["content"]
            logprobs = said["logprobs"]
            yield event("output_text.done", **place, text=said["text"], logprobs=logprobs)
            yield event("content_part.done", **place, part=said)
        else:
            begun = item | {"arguments": "", "status": "in_progress"}
            yield event("output_item.added", output_index=index, item=begun)
            place = {"item_id": item["id"], "output_index": index}
            arguments = item["arguments"]
            yield event("function_call_arguments.delta", **place, delta=arguments)
            name = item["name"]
            yield event("function_call_arguments.done", **place, arguments=arguments, name=name)
        yield event("output_item.done", output_index=index, item=item)
    ended = responses_body(response)
    yield event(ended["status"], response=ended)


CHAT = Form(dict, chat_body, chat_events, "data: [DONE]\n\n")
FORMS = {  # By path.
    "/v1/chat/completions": CHAT,
    COMPLETIONS: CHAT,
    MESSAGES: Form(from_anthropic, anthropic_body, anthropic_events),
    "/v1/responses": Form(from_responses, responses_body, responses_events),
}
