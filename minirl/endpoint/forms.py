"""How OpenAI's and Anthropic's APIs write a request and its response, in one table.

Anthropic's messages are translated to OpenAI's chats. OpenAI's Responses are not there: their
clients (openai-agents) speak chat completions, too.
"""

import json
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple

from minirl.endpoint.http import MESSAGES
from minirl.endpoint.protocol import JSONObject
from minirl.endpoint.response import Choice, ChoicePart, PendingResponse
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
        function = {"name": tool["name"], "parameters": tool["input_schema"]}
        function["description"] = tool.get("description", "")
        tools.append({"type": "function", "function": function})
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
            reply = {"tool_call_id": block["tool_use_id"], "content": block.get("content")}
            messages.append({"role": "tool", **reply})
        elif block["type"] == "image":
            source = block["source"]
            url = f"data:{source['media_type']};base64,{source['data']}"
            parts.append({"type": "image_url", "image_url": {"url": url}})
        else:
            parts.append(block)
    if parts or tool_calls:
        messages.append({"role": message["role"], "content": parts, "tool_calls": tool_calls})
    return messages


def anthropic_body(response: PendingResponse) -> JSONObject:
    """Return Anthropic's message of the response, as it stands; it has one choice."""
    (choice,) = response.choices
    content: list[JSONObject] = []
    if choice.text or not choice.tool_calls:
        content.append({"type": "text", "text": choice.text})
    for number, (function, arguments) in enumerate(choice.tool_calls):
        call = {"id": f"toolu_{response.name}_{number}", "name": function, "input": arguments}
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
    async for part in response.parts():
        if not part.text and part.finish_reason == "tool_calls":
            continue  # An answer that only calls tools has no text.
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


CHAT = Form(dict, chat_body, chat_events, "data: [DONE]\n\n")
FORMS = {  # By path.
    "/v1/chat/completions": CHAT,
    COMPLETIONS: CHAT,
    MESSAGES: Form(from_anthropic, anthropic_body, anthropic_events),
}
