"""OpenAI's responses: a request translated to a chat, and its response in items.

It keeps no state: a request has all of its chat in `input`. What would need a memory
(`previous_response_id`, `conversation`, `background`) or tools that run at the server is refused.
"""

import time
from collections.abc import AsyncIterator, Iterator

from minirl.base.errors import UserError, require
from minirl.endpoint.protocol import JSONObject, event
from minirl.endpoint.response import PendingResponse

_UNSUPPORTED = {
    "previous_response_id": "the endpoint keeps no responses; send the whole chat as `input`",
    "conversation": "the endpoint keeps no conversations; send the whole chat as `input`",
    "background": "a response is made while its request is open; leave it out",
    "prompt": "the endpoint keeps no prompts; send `instructions` and `input`",
}
_TEXTS = ("input_text", "output_text", "text")


def to_chat(body: JSONObject) -> JSONObject:
    """Return the body of the chat request that asks for the same.

    Raises:
        UserError: `body` asks for what the endpoint cannot do.
        KeyError, TypeError, AttributeError: it is malformed.
    """
    for name, why in _UNSUPPORTED.items():
        require(not body.get(name), f"{name} is not supported here: {why}")
    messages: list[JSONObject] = []
    if body.get("instructions"):
        messages.append({"role": "system", "content": body["instructions"]})
    items = body["input"]
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    for item in items:
        _append(messages, item)
    tools = []
    for tool in body.get("tools") or ():
        require(
            tool["type"] == "function",
            f"there is a tool of type {tool['type']!r}; the endpoint takes function tools, which "
            "the client runs",
        )
        names = ("name", "description", "parameters")
        function = {name: tool[name] for name in names if tool.get(name) is not None}
        tools.append({"type": "function", "function": function})
    return {
        "messages": messages,
        "max_tokens": body.get("max_output_tokens"),
        "stream": body.get("stream"),
        "tools": tools or None,
        "tool_choice": _to_chat_choice(body.get("tool_choice")),
        "parallel_tool_calls": body.get("parallel_tool_calls"),
        "response_format": _to_chat_format(body.get("text") or {}),
        "chat_template_kwargs": body.get("chat_template_kwargs"),
    }


def _append(messages: list[JSONObject], item: JSONObject) -> None:
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
        if kind in _TEXTS:
            parts.append({"type": "text", "text": part["text"]})
        elif kind == "input_image":
            parts.append({"type": "image_url", "image_url": {"url": part["image_url"]}})
        else:
            raise UserError(
                f"a content has a part of type {kind!r}; the endpoint takes texts and input_image"
            )
    return parts


def _to_chat_choice(choice: str | JSONObject | None) -> str | JSONObject | None:
    if not isinstance(choice, dict):
        return choice
    require(
        choice["type"] == "function",
        f"tool_choice has the type {choice['type']!r}; give auto, none, required or a function",
    )
    return {"type": "function", "function": {"name": choice["name"]}}


def _to_chat_format(text: JSONObject) -> JSONObject | None:
    """Return the format of the answer, as chats have it."""
    wanted = text.get("format")
    if not wanted or wanted["type"] != "json_schema":
        return wanted
    schema = {"name": wanted.get("name", "answer"), "schema": wanted["schema"]}
    return {"type": "json_schema", "json_schema": schema}


class ResponsesResponse(PendingResponse):
    """The response to a request for a response, which has one choice."""

    @property
    def _name(self) -> str:
        return str(self.head["id"]).removeprefix("chatcmpl-")

    def _items(self) -> list[JSONObject]:
        """Return the items of the output: what was said, if anything was, then the calls."""
        (choice,) = self.choices
        items: list[JSONObject] = []
        if choice.visible_text or not choice.tool_calls:
            items.append(self._message(choice.visible_text, "completed"))
        for call in choice.calls_to_send():
            items.append(
                {
                    "id": f"fc_{call['id']}",
                    "type": "function_call",
                    "call_id": call["id"],
                    **call["function"],
                    "status": "completed",
                }
            )
        return items

    def _message(self, text: str, status: str) -> JSONObject:
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        return {
            "id": f"msg_{self._name}",
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": [part] if status == "completed" else [],
        }

    def _response(self, status: str) -> JSONObject:
        """Return the response as it stands."""
        (choice,) = self.choices
        is_cut = choice.finish_reason == "length"
        usage = self.usage()
        request = self.request
        return {
            "id": f"resp_{self._name}",
            "object": "response",
            "created_at": self.head["created"],
            "completed_at": int(time.time()) if choice.finish_reason else None,
            "status": "incomplete" if is_cut else status,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "error": None,
            "model": self.head["model"],
            "output": self._items() if choice.finish_reason else [],
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "tool_choice": "auto",
            "tools": [],
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            },
        }

    async def body(self) -> JSONObject:
        """Return the whole response. Raises what its `chunks` does."""
        async for _ in self.chunks():
            pass
        return self._response("completed")

    async def events(self) -> AsyncIterator[str]:
        """Yield the response as server-sent events. Raises what its `chunks` does."""
        number = 0
        async for each in self._numberless_events():
            yield event(**each, sequence_number=number)
            number += 1

    async def _numberless_events(self) -> AsyncIterator[JSONObject]:
        begun = self._response("in_progress")
        yield {"type": "response.created", "response": begun}
        yield {"type": "response.in_progress", "response": begun}
        place = {"item_id": f"msg_{self._name}", "output_index": 0, "content_index": 0}
        has_begun = False
        async for chunk in self.chunks():
            text = chunk["delta"]["content"]
            if not text:
                continue
            if not has_begun:
                for each in self._begin_message(place):
                    yield each
                has_begun = True
            yield {"type": "response.output_text.delta", **place, "delta": text, "logprobs": []}
        for index, item in enumerate(self._items()):
            if item["type"] == "message":
                if not has_begun:
                    for each in self._begin_message(place):
                        yield each
                (part,) = item["content"]
                text = part["text"]
                yield {"type": "response.output_text.done", **place, "text": text, "logprobs": []}
                yield {"type": "response.content_part.done", **place, "part": part}
                yield {"type": "response.output_item.done", "output_index": 0, "item": item}
            else:
                for each in _call_events(index, item):
                    yield each
        ended = self._response("completed")
        yield {"type": f"response.{ended['status']}", "response": ended}

    def _begin_message(self, place: JSONObject) -> Iterator[JSONObject]:
        item = self._message("", "in_progress")
        yield {"type": "response.output_item.added", "output_index": 0, "item": item}
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        yield {"type": "response.content_part.added", **place, "part": part}


def _call_events(index: int, item: JSONObject) -> Iterator[JSONObject]:
    place = {"item_id": item["id"], "output_index": index}
    begun = item | {"arguments": "", "status": "in_progress"}
    yield {"type": "response.output_item.added", "output_index": index, "item": begun}
    arguments = {"arguments": item["arguments"], "name": item["name"]}
    delta = "response.function_call_arguments.delta"
    yield {"type": delta, **place, "delta": item["arguments"]}
    yield {"type": "response.function_call_arguments.done", **place, **arguments}
    yield {"type": "response.output_item.done", "output_index": index, "item": item}
