"""Anthropic's messages, as the endpoint speaks them: a request translated to a chat of OpenAI's, and its answer back."""

import json
from collections.abc import AsyncIterator
from typing import Any

REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def to_chat(body: dict[str, Any]) -> dict[str, Any]:
    """Raises KeyError, TypeError or AttributeError."""
    messages = [{"role": "system", "content": body["system"]}] if body.get("system") else []
    for message in body["messages"]:
        blocks = [{"type": "text", "text": message["content"]}] if isinstance(message["content"], str) else message["content"]
        calls = [{"id": b["id"], "function": {"name": b["name"], "arguments": json.dumps(b["input"])}} for b in blocks if b["type"] == "tool_use"]
        messages += [{"role": "tool", "tool_call_id": b["tool_use_id"], "content": b.get("content")} for b in blocks if b["type"] == "tool_result"]
        rest = [b for b in blocks if b["type"] not in ("tool_use", "tool_result")]
        messages += [{"role": message["role"], "content": rest, "tool_calls": calls}] if rest or calls else []
    tools = [{"type": "function", "function": {"name": t["name"], "description": t.get("description", ""), "parameters": t["input_schema"]}}
             for t in body.get("tools") or ()]
    choice = body.get("tool_choice") or {"type": "auto"}
    forced = {"any": "required", "tool": {"function": {"name": choice.get("name")}}}
    return {"messages": messages, "max_tokens": body["max_tokens"], "stop": body.get("stop_sequences"), "stream": body.get("stream"), "tools": tools,
            "tool_choice": forced.get(choice["type"], choice["type"])}


def reply(answer: dict[str, Any]) -> dict[str, Any]:
    """A whole answer, of OpenAI's."""
    said = answer["choices"][0]["message"]
    text = [{"type": "text", "text": said["content"]}] if said["content"] else []
    return _message(answer) | _end(answer) | {"content": text + [use | {"input": json.loads(arguments)} for use, arguments in _uses(said)]}


async def events(chunks: AsyncIterator[dict[str, Any]], _: object) -> AsyncIterator[str]:
    """Server-sent events. Raises what `chunks` does."""
    begun, texts = False, 0
    async for chunk in chunks:
        if "error" in chunk:
            yield _event(**error(chunk["error"]["message"], chunk["error"]["type"]))
        for choice in chunk.get("choices", ()):
            if not begun:
                begun = True
                yield _event("message_start", message=_message(chunk))
            if text := choice["delta"]["content"]:
                yield "" if texts else _event("content_block_start", index=0, content_block={"type": "text", "text": ""})
                texts = 1
                yield _event("content_block_delta", index=0, delta={"type": "text_delta", "text": text})
            if choice["finish_reason"]:
                yield _event("content_block_stop", index=0) if texts else ""
                for at, (use, arguments) in enumerate(_uses(choice["delta"]), texts):
                    yield _event("content_block_start", index=at, content_block=use)
                    yield _event("content_block_delta", index=at, delta={"type": "input_json_delta", "partial_json": arguments})
                    yield _event("content_block_stop", index=at)
                yield _event("message_delta", delta=_end(chunk), usage=_message(chunk)["usage"]) + _event("message_stop")


def _uses(said: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    """Blocks without their input, and that."""
    return [({"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": {}}, call["function"]["arguments"]) for call in said.get("tool_calls", ())]


def _message(answer: dict[str, Any]) -> dict[str, Any]:
    """Without its content."""
    return {"id": answer["id"], "type": "message", "role": "assistant", "model": answer["model"], "content": [], "stop_reason": None, "stop_sequence": None,
            "usage": {"input_tokens": answer["usage"]["prompt_tokens"], "output_tokens": answer["usage"]["completion_tokens"]}}


def _end(answer: dict[str, Any]) -> dict[str, Any]:
    (choice,) = answer["choices"]
    cut = choice["stop_reason"] if choice["finish_reason"] == "stop" else None
    return {"stop_reason": "stop_sequence" if cut else REASONS[choice["finish_reason"]], "stop_sequence": cut}


def _event(type: str, **fields: object) -> str:  # noqa: A002 - the API's word
    return f"event: {type}\ndata: {json.dumps({'type': type} | fields)}\n\n"


def error(message: str, kind: str, _: str | None = None) -> dict[str, Any]:
    return {"type": "error", "error": {"type": kind, "message": message}}
