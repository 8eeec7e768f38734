"""Anthropic's messages: a request translated to OpenAI's chat, and its response in blocks."""

import json
from collections.abc import AsyncIterator

from minirl.endpoint.protocol import JSONObject, event
from minirl.endpoint.response import PendingResponse

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def to_chat(body: JSONObject) -> JSONObject:
    """Return the body of OpenAI's chat request that asks for the same.

    Raises:
        KeyError, TypeError, AttributeError: `body` is malformed.
    """
    messages = []
    if body.get("system"):
        messages.append({"role": "system", "content": body["system"]})
    for message in body["messages"]:
        messages += _to_chat_messages(message)
    tools = []
    for tool in body.get("tools") or ():
        function = {
            "name": tool["name"],
            "description": tool.get("description", ""),
            "parameters": tool["input_schema"],
        }
        tools.append({"type": "function", "function": function})
    choice = body.get("tool_choice") or {}
    chat = {
        "messages": messages,
        "max_tokens": body["max_tokens"],
        "stop": body.get("stop_sequences"),
        "stream": body.get("stream"),
        "tools": tools,
        "tool_choice": _to_chat_choice(choice),
        "chat_template_kwargs": body.get("chat_template_kwargs"),
    }
    if choice.get("disable_parallel_tool_use"):
        chat["parallel_tool_calls"] = False
    output_format = (body.get("output_config") or {}).get("format")
    if output_format:
        schema = {"name": "answer", "schema": output_format["schema"]}
        chat["response_format"] = {"type": output_format["type"], "json_schema": schema}
    return chat


def _to_chat_choice(choice: JSONObject) -> str | JSONObject | None:
    """Return the choice of tools in OpenAI's form. `choice`: empty if there is none."""
    if not choice:
        return None
    if choice["type"] == "tool":
        return {"type": "function", "function": {"name": choice["name"]}}
    return "required" if choice["type"] == "any" else choice["type"]


def _to_chat_messages(message: JSONObject) -> list[JSONObject]:
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


class AnthropicResponse(PendingResponse):
    """The response to a request for a message."""

    def _message(self) -> JSONObject:
        """Return Anthropic's message of the response so far, which has one choice."""
        (choice,) = self.choices
        name = self.head["id"]
        content: list[JSONObject] = []
        if choice.visible_text:
            content.append({"type": "text", "text": choice.visible_text})
        for number, (function, arguments) in enumerate(choice.tool_calls):
            call = {"id": f"toolu_{name}_{number}", "name": function, "input": arguments}
            content.append({"type": "tool_use", **call})
        stop_reason = STOP_REASONS.get(choice.finish_reason)
        if choice.stop_string and not choice.tool_calls:
            stop_reason = "stop_sequence"
        usage = self.usage()
        return {
            "id": name,
            "type": "message",
            "role": "assistant",
            "model": self.head["model"],
            "content": content,
            "stop_reason": stop_reason,
            "stop_sequence": choice.stop_string,
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "output_tokens": usage["completion_tokens"],
            },
        }

    async def body(self) -> JSONObject:
        """Return the whole response. Raises what its `chunks` does."""
        async for _ in self.chunks():
            pass
        return self._message()

    async def events(self) -> AsyncIterator[str]:
        """Yield the response as server-sent events. Raises what its `chunks` does."""
        yield event(
            type="message_start",
            message=self._message() | {"content": [], "stop_reason": None, "stop_sequence": None},
        )
        text_began = False
        async for chunk in self.chunks():
            text = chunk["delta"]["content"]
            if not text:
                continue
            if not text_began:
                yield event(
                    type="content_block_start", index=0, content_block={"type": "text", "text": ""}
                )
                text_began = True
            yield event(
                type="content_block_delta", index=0, delta={"type": "text_delta", "text": text}
            )
        message = self._message()
        for index, block in enumerate(message["content"]):
            if block["type"] == "tool_use":
                yield event(
                    type="content_block_start", index=index, content_block=block | {"input": {}}
                )
                yield event(
                    type="content_block_delta",
                    index=index,
                    delta={"type": "input_json_delta", "partial_json": json.dumps(block["input"])},
                )
            yield event(type="content_block_stop", index=index)
        yield event(
            type="message_delta",
            delta={name: message[name] for name in ("stop_reason", "stop_sequence")},
            usage=message["usage"],
        )
        yield event(type="message_stop")
