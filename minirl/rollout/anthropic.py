"""Anthropic's messages, as the endpoint speaks them: a request translated to a chat of OpenAI's,
and its answer told in blocks.
"""

import json
from collections.abc import AsyncIterator
from typing import Any

from minirl.rollout.protocol import event

REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def to_chat(body: dict[str, Any]) -> dict[str, Any]:
    """Raises KeyError, TypeError or AttributeError."""
    messages = [{"role": "system", "content": body["system"]}] if body.get("system") else []
    for message in body["messages"]:
        blocks = (
            [{"type": "text", "text": message["content"]}]
            if isinstance(message["content"], str)
            else message["content"]
        )
        calls = [
            {"id": b["id"], "function": {"name": b["name"], "arguments": json.dumps(b["input"])}}
            for b in blocks
            if b["type"] == "tool_use"
        ]
        messages += [
            {"role": "tool", "tool_call_id": b["tool_use_id"], "content": b.get("content")}
            for b in blocks
            if b["type"] == "tool_result"
        ]
        rest = [
            b
            if b["type"] != "image"
            else {
                "type": "image_url",
                "image_url": {
                    "url": f"data:{b['source']['media_type']};base64,{b['source']['data']}"
                },
            }
            for b in blocks
            if b["type"] not in ("tool_use", "tool_result")
        ]
        messages += (
            [{"role": message["role"], "content": rest, "tool_calls": calls}]
            if rest or calls
            else []
        )
    tools = [
        {
            "type": "function",
            "function": {
                "name": t["name"],
                "description": t.get("description", ""),
                "parameters": t["input_schema"],
            },
        }
        for t in body.get("tools") or ()
    ]
    return {
        "messages": messages,
        "max_tokens": body["max_tokens"],
        "stop": body.get("stop_sequences"),
        "stream": body.get("stream"),
        "tools": tools,
        "tool_choice": body["tool_choice"]["type"] if body.get("tool_choice") else None,
    }


def message(exchange: Any) -> dict[str, Any]:
    """The answer so far. `exchange`: of server.py."""
    (answer,), name, usage = exchange.answers, exchange.head["id"], exchange.usage()
    uses = [
        {"type": "tool_use", "id": f"toolu_{name}_{k}", "name": f, "input": arguments}
        for k, (f, arguments) in enumerate(answer.calls)
    ]
    return {
        "id": name,
        "type": "message",
        "role": "assistant",
        "model": exchange.head["model"],
        "content": ([{"type": "text", "text": answer.shown}] if answer.shown else []) + uses,
        "stop_reason": "stop_sequence" if answer.stop and not uses else REASONS.get(answer.finish),
        "stop_sequence": answer.stop,
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "output_tokens": usage["completion_tokens"],
        },
    }


async def whole(exchange: Any) -> dict[str, Any]:
    """Raises what the exchange's `choices` does, as `events`."""
    return [message(exchange) async for _ in exchange.choices()][-1]


async def events(exchange: Any) -> AsyncIterator[str]:
    begun = False
    yield event(
        type="message_start",
        message=message(exchange) | {"content": [], "stop_reason": None, "stop_sequence": None},
    )
    async for choice in exchange.choices():
        if text := choice["delta"]["content"]:
            yield (
                ""
                if begun
                else event(
                    type="content_block_start", index=0, content_block={"type": "text", "text": ""}
                )
            )
            begun = True
            yield event(
                type="content_block_delta", index=0, delta={"type": "text_delta", "text": text}
            )
    end = message(exchange)
    for at, block in enumerate(end["content"]):
        if block["type"] == "tool_use":
            yield event(type="content_block_start", index=at, content_block=block | {"input": {}})
            yield event(
                type="content_block_delta",
                index=at,
                delta={"type": "input_json_delta", "partial_json": json.dumps(block["input"])},
            )
        yield event(type="content_block_stop", index=at)
    yield event(
        type="message_delta",
        delta={"stop_reason": end["stop_reason"], "stop_sequence": end["stop_sequence"]},
        usage=end["usage"],
    )
    yield event(type="message_stop")
