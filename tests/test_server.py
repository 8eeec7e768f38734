"""The endpoint, through the clients that people use: what they get, what the conversation keeps,
and what it keeps of clients that disconnect."""

import asyncio
import json
import os
import signal
import socket
import threading
import time
from functools import partial
from types import SimpleNamespace

import anthropic
import httpx
import openai
import pytest
import torch
from transformers import AutoModelForCausalLM

import tiny
from harness import ranks
from minirl.base.errors import UserError
from minirl.config.policy import PolicyConfig
from minirl.config.rl import RefitConfig
from minirl.config.shared import EndpointConfig, EngineConfig
from minirl.data import chat
from minirl.data.tokenizer import load_tokenizer, stop_token_ids
from minirl.endpoint import forms
from minirl.endpoint.server import Endpoint
from minirl.engine.engine import RolloutEngine, Sampling
from minirl.engine.loop import EngineLoop
from minirl.model.scratch import make_tokenizer
from minirl.refit.refit import Refit
from minirl.train.policy import Policy

# As Qwen's and Hermes' templates write tools, on the roles that the tokenizer has.
TEMPLATE = """{%- if tools %}{{ '<|system|>' + tools | tojson + '<|end|>' }}{% endif -%}
{%- for m in messages %}{{ '<|' + ('user' if m.role == 'tool' else m.role) + '|>' + m.content }}
{%- for c in m.tool_calls or () %}{{ '<tool_call>'
    + {'name': c.function.name, 'arguments': c.function.arguments} | tojson
    + '</tool_call>' }}{% endfor -%}
{{ '<|end|>' }}{% endfor -%}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif -%}"""
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}}},
    },
}
CALL = 'I add. <tool_call>\n{"name":   "add", "arguments": {"a": 1}}\n</tool_call>'
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


class Scripted:
    """In place of the engine: answers by script, a token each time the loop comes round."""

    def __init__(self, *texts, max_model_len=99):
        self.engine = SimpleNamespace(cfg=SimpleNamespace(max_model_len=max_model_len))
        self.tokenizer = make_tokenizer([])
        self.tokenizer.chat_template = TEMPLATE
        self.prompts = SimpleNamespace(tokenizer=self.tokenizer, vision=None)
        self.texts, self.requests, self.live = list(texts), [], 0
        self.discarded_tokens = 0

    async def generate(self, request):
        self.requests.append(request)
        self.live += 1
        try:
            text = self.texts.pop(0) if self.texts else "x" * 3000
            if isinstance(text, Exception):
                raise text
            for token in (chat.encode(self.tokenizer, text) + [self.tokenizer.eos_token_id])[
                : request.sampling.max_tokens
            ]:
                await asyncio.sleep(0)
                request.done.tokens.append(token)
                request.done.logprobs.append(-token / 100)
                request.done.versions.append(3)
                request.done.stopped = token == self.tokenizer.eos_token_id
                if request.on_tokens:
                    request.on_tokens()
            return request.done
        finally:
            self.live -= 1


def play(program, *texts, max_model_len=4000):
    """Run program(world): an endpoint whose engine says `texts`, a session, clients of it."""

    async def main():
        engine = Scripted(*texts, max_model_len=max_model_len)
        sampling = Sampling(max_tokens=3000, stop_token_ids=(engine.tokenizer.eos_token_id,))
        engine.loop = asyncio.get_running_loop()
        endpoint = Endpoint(engine, engine.prompts, EndpointConfig())
        session = endpoint.open((5, 6), sampling)
        root = session.base_url.removesuffix("/v1")
        async with (
            openai.AsyncOpenAI(
                base_url=session.base_url, api_key=session.api_key, max_retries=0
            ) as gpt,
            anthropic.AsyncAnthropic(
                base_url=root, api_key=session.api_key, max_retries=0
            ) as claude,
            httpx.AsyncClient(
                base_url=root, headers={"Authorization": f"Bearer {session.api_key}"}
            ) as http,
        ):
            world = SimpleNamespace(
                engine=engine,
                endpoint=endpoint,
                session=session,
                gpt=gpt,
                claude=claude,
                http=http,
                ask=partial(gpt.chat.completions.create, model="any"),
                message=partial(claude.messages.create, model="any", max_tokens=100),
            )
            world.said = lambda: [
                (s.text, s.sampled.count(True))
                for s in endpoint._sessions[session.api_key].conversation.segments
            ]
            try:
                return await asyncio.wait_for(program(world), 20)
            finally:
                await asyncio.wait_for(endpoint.stop(), 20)
                assert engine.live == 0

    return asyncio.run(main())


def test_chat_and_what_is_kept_of_it():
    async def program(w):
        first = await w.ask(
            messages=[{"role": "developer", "content": "s"}, *HI], temperature=0.0, logprobs=True
        )
        choice = first.choices[0]
        assert (choice.message.content, choice.message.role, choice.finish_reason, first.model) == (
            "héllo",
            "assistant",
            "stop",
            "policy",
        )
        assert first.usage.model_dump(
            include={"prompt_tokens", "completion_tokens", "total_tokens"}
        ) == {"prompt_tokens": 8, "completion_tokens": 7, "total_tokens": 15}
        assert [round(p.logprob, 6) for p in choice.logprobs.content] == [
            -t / 100 for t in w.engine.requests[0].done.tokens
        ]
        messages = [
            {"role": "system", "content": "s"},
            *HI,
            choice.message.model_dump(exclude_none=True),
            {"role": "user", "content": [{"type": "text", "text": "go on"}]},
        ]
        second = await w.ask(messages=messages, max_completion_tokens=4)
        assert (second.choices[0].message.content, second.choices[0].finish_reason) == (
            "well",
            "length",
        )
        conversation = w.endpoint.close(w.session.api_key)
        (segment,) = conversation.segments
        assert segment.text == (
            "<|system|>s<|end|><|user|>hi<|end|><|assistant|>héllo<|end|><|user|>"
            "go on<|end|><|assistant|>well"
        )
        a, b = w.engine.requests
        assert (
            segment.tokens
            == chat.encode(w.engine.tokenizer, segment.text)
            == b.tokens + b.done.tokens
        )
        assert b.tokens[: len(a.tokens) + 7] == a.tokens + a.done.tokens
        assert [
            p for p, s in zip(segment.logprobs, segment.sampled, strict=True) if s
        ] == a.done.logprobs + b.done.logprobs
        assert [v for v in segment.versions if v >= 0] == [3] * 11
        assert len({a.seed, b.seed}) == 2
        assert (a.sampling.temperature, b.sampling.max_tokens) == (1.0, 4)
        with pytest.raises(openai.AuthenticationError):
            await w.ask(messages=HI)
        return a.seed, b.seed

    assert play(program, "héllo", "well, well") == play(program, "héllo", "well, well")


def test_what_was_sampled_goes_on_though_the_client_saw_less_of_it():
    async def program(w):
        first = await w.ask(messages=HI, stop=["Obs:", "never"])
        assert (
            first.choices[0].message.content,
            first.choices[0].finish_reason,
            first.usage.completion_tokens,
        ) == ("look ", "stop", 9)
        assert w.said() == [("<|user|>hi<|end|><|assistant|>look Obs:", 9)]
        [segment] = w.endpoint._sessions[w.session.api_key].conversation.segments
        assert segment.answer == "look "  # for reward functions
        await asyncio.sleep(0.01)
        assert w.engine.live == 0  # the engine is not asked for the rest
        second = await w.ask(
            messages=[
                *HI,
                {"role": "assistant", "content": "look "},
                {"role": "user", "content": "1"},
            ],
            stop="<|",
            stream=True,
        )
        assert "".join([c.choices[0].delta.content async for c in second]) == "so it is "
        assert w.said() == [
            (
                "<|user|>hi<|end|><|assistant|>look Obs:<|end|><|user|>1<|end|><|assistant|>so "
                "it is <|",
                9 + 11,
            )
        ]

    play(program, "look Obs: never", "so it is <| and more")


def test_equal_answers_stay_what_each_of_them_was():
    """Two turns look alike to the client; the first one ended by a stop string."""

    async def program(w):
        messages = list(HI)
        for _ in range(3):
            said = (await w.ask(messages=messages, stop=["Obs:"])).choices[0].message.content
            again = {"role": "user", "content": "again"}
            messages += [{"role": "assistant", "content": said}, again]
        turn = "<|end|><|user|>again<|end|><|assistant|>"
        hi = "<|user|>hi<|end|><|assistant|>"
        assert [text for text, _ in w.said()] == [f"{hi}look Obs:{turn}look {turn}done<|end|>"]

    play(program, "look Obs: 1", "look ", "done")


def test_a_field_that_is_null_is_left_out():
    async def program(w):
        answer = await w.ask(messages=HI, n=None, max_tokens=3, max_completion_tokens=None)
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage.completion_tokens == 3

    play(program, "a long answer")


def test_streaming_never_cuts_a_character():
    async def program(w):
        stream = await w.ask(messages=HI, stream=True, stream_options={"include_usage": True}, n=2)
        chunks = [chunk async for chunk in stream]
        parts = [
            [c.choices[0].delta.content for c in chunks if c.choices and c.choices[0].index == i]
            for i in range(2)
        ]
        assert ["".join(p) for p in parts] == ["a世界é", "b\ufffdc"]
        assert parts[0][:5] == ["a", "世", "界", "é", ""]
        assert [
            c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason
        ] == ["stop", "stop"]
        assert [c.choices[0].delta.role for c in chunks if c.choices].count("assistant") == 2
        assert (
            chunks[-1].choices,
            chunks[-1].usage.completion_tokens,
            chunks[-1].usage.prompt_tokens,
        ) == ([], 16, 5)
        assert chunks[0].usage is None
        assert [text for text, _ in w.said()] == [
            "<|user|>hi<|end|><|assistant|>a世界é<|end|>",
            "<|user|>hi<|end|><|assistant|>b\ufffdc<|end|>",
        ]

    play(program, "a世界é", "b\ufffdc")


def test_a_tool_is_called_and_its_result_read():
    async def program(w):
        for stream in (False, True):
            choice = await said(await w.ask(messages=HI, tools=[TOOL], stream=stream), stream)
            assert (choice["content"], choice["finish"]) == ("I add. ", "tool_calls")
            (call,) = choice["calls"]
            assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == (
                "add",
                {"a": 1},
            )
            answer = {"role": "assistant", "content": choice["content"], "tool_calls": [call]}
            second = await w.ask(
                messages=[
                    *HI,
                    answer,
                    {"role": "tool", "tool_call_id": call["id"], "content": "2"},
                ],
                tools=[TOOL],
            )
            assert (
                second.choices[0].message.content == "It is <tool_call>{broken"
            )  # in sight, because it is no call
            assert second.choices[0].message.tool_calls is None
            assert w.said()[-1][0] == (
                f"<|system|>{json.dumps([TOOL])}<|end|><|user|>hi<|end|><|assistant|>{CALL}"
                f"<|end|><|user|>2<|end|><|assistant|>It is <tool_call>{{broken<|end|>"
            )
        assert len(w.said()) == 2
        plain = await w.ask(messages=HI, tools=[TOOL], tool_choice="none")
        assert (plain.choices[0].message.content, plain.choices[0].message.tool_calls) == (
            CALL,
            None,
        )
        assert "system" not in w.said()[-1][0]

    play(program, CALL, "It is <tool_call>{broken", CALL, "It is <tool_call>{broken", CALL)


async def said(reply, stream):
    """Content, tool calls and end of a chat's answer, whichever way it came."""
    if not stream:
        choice = reply.choices[0]
        return {
            "content": choice.message.content,
            "calls": [c.model_dump() for c in choice.message.tool_calls],
            "finish": choice.finish_reason,
        }
    choices = [chunk.choices[0] async for chunk in reply]
    return {
        "content": "".join(c.delta.content or "" for c in choices),
        "calls": [c.model_dump(exclude={"index"}) for c in choices[-1].delta.tool_calls],
        "finish": choices[-1].finish_reason,
    }


def test_completions_of_texts_and_tokens():
    async def program(w):
        text = await w.gpt.completions.create(
            model="any", prompt=["ab", "cd"], n=2, max_tokens=2, logprobs=0
        )
        assert [(c.index, c.text, c.finish_reason) for c in text.choices] == [
            (0, "on", "length"),
            (1, "tw", "length"),
            (2, "th", "length"),
            (3, "fo", "length"),
        ]
        assert (text.usage.prompt_tokens, text.usage.completion_tokens) == (4, 8)
        assert (text.choices[0].logprobs.tokens, len(text.choices[0].logprobs.token_logprobs)) == (
            ["o", "n"],
            2,
        )
        tokens = chat.encode(w.engine.tokenizer, "abon")
        stream = await w.gpt.completions.create(model="any", prompt=[*tokens, 70], stream=True)
        assert "".join([c.choices[0].text async for c in stream]) == "five"
        conversation = w.endpoint.close(w.session.api_key)
        assert [s.tokens[:5] for s in conversation.segments][:1] == [[*tokens, 70]]
        assert [s.sampled.count(True) for s in conversation.segments] == [2 + 5, 2, 2, 2]
        assert len({r.seed for r in w.engine.requests}) == 5

    play(program, "one", "two", "three", "four", "five")


def test_what_a_client_asks_beside_completions():
    async def program(w):
        plain = httpx.AsyncClient(base_url=w.http.base_url)
        async with plain:
            assert (await plain.get("/health")).status_code == 200
            assert (await plain.post("/tokenize", json={"prompt": "a"})).status_code == 401
        tools = [{"name": "add", "input_schema": {"type": "object"}}]
        counted = await w.claude.messages.count_tokens(
            model="any", system="s", messages=HI, tools=tools
        )
        said = await w.message(system="s", messages=HI, tools=tools)
        assert counted.input_tokens == said.usage.input_tokens > 0
        with pytest.raises(anthropic.BadRequestError, match="field 'role' is missing"):
            await w.claude.messages.count_tokens(model="any", messages=[{"content": "x"}])

        chat_tokens = (await w.http.post("/tokenize", json={"messages": HI})).json()
        assert chat_tokens["max_model_len"] == 4000
        assert chat_tokens["count"] == len(chat_tokens["tokens"])
        assert (await w.ask(messages=HI)).usage.prompt_tokens == chat_tokens["count"]
        tokens = (await w.http.post("/tokenize", json={"prompt": "ab<|end|>"})).json()["tokens"]
        assert tokens == chat.encode(w.engine.tokenizer, "ab<|end|>")
        text = await w.http.post("/detokenize", json={"tokens": tokens})
        assert text.json() == {"prompt": "ab<|end|>"}
        for path, body in (
            ("/tokenize", {"prompt": ["a", "b"]}),
            ("/tokenize", {}),
            ("/detokenize", {"tokens": [99999]}),
            ("/detokenize", {"prompt": "a"}),
            ("/detokenize", []),
        ):
            refused = await w.http.post(path, json=body)
            assert refused.status_code == 400, (path, body, refused.text)
        assert len(w.engine.requests) == 2 and len(w.said()) == 2

    play(program, "one", "two")


def test_anthropic():
    async def program(w):
        first = await w.message(
            system=[{"type": "text", "text": "s"}], messages=HI, stop_sequences=["!"]
        )
        assert (
            first.content[0].text,
            first.stop_reason,
            first.stop_sequence,
            first.usage.output_tokens,
        ) == ("yes", "stop_sequence", "!", 4)
        assert (await w.message(messages=HI, max_tokens=2)).stop_reason == "max_tokens"
        tools = [{"name": "add", "description": "", "input_schema": TOOL["function"]["parameters"]}]
        whole = await w.message(messages=HI, tools=tools)
        async with w.claude.messages.stream(
            model="any", max_tokens=100, messages=HI, tools=tools
        ) as stream:
            texts = [text async for text in stream.text_stream]
            streamed = await stream.get_final_message()
        assert "".join(texts) == "I add. "
        for message in (whole, streamed):
            assert (
                [b.type for b in message.content],
                message.stop_reason,
                message.usage.output_tokens,
            ) == (["text", "tool_use"], "tool_use", len(CALL) + 1)
            use = message.content[1]
            assert (message.content[0].text, use.name, use.input) == ("I add. ", "add", {"a": 1})
            reply = {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": use.id,
                        "content": [{"type": "text", "text": "2"}],
                    },
                    {"type": "text", "text": "so"},
                ],
            }
            last = await w.message(
                messages=[
                    *HI,
                    {
                        "role": "assistant",
                        "content": [b.model_dump(exclude_none=True) for b in message.content],
                    },
                    reply,
                ],
                tools=tools,
            )
            assert (last.content[0].text, last.stop_reason) == ("two", "end_turn")
            assert any(
                text.endswith(
                    f"<|assistant|>{CALL}<|end|><|user|>2<|end|><|user|>so<|end|>"
                    f"<|assistant|>two<|end|>"
                )
                for text, _ in w.said()
            )
        assert [num for _, num in w.said()] == [4, 2, len(CALL) + 5, len(CALL) + 5]

    play(program, "yes! no", "long", CALL, CALL, "two", "two")


def test_images_of_anthropics_tools_are_images_of_a_chat():
    data = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    blocks = [
        {"type": "text", "text": "the screen"},
        {"type": "image", "source": data},
        {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}},
    ]
    result = {"type": "tool_result", "tool_use_id": "a", "content": blocks}
    body = {"max_tokens": 9, "messages": [{"role": "user", "content": [result]}]}
    (message,) = forms.from_anthropic(body)["messages"]
    assert message["role"] == "tool" and message["content"] == [
        blocks[0],
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
        {"type": "image_url", "image_url": {"url": "http://x/y.png"}},
    ]


MALFORMED = [
    b"",
    b"{",
    b"[]",
    b"null",
    b'{"messages": "hi"}',
    b'{"messages": [1]}',
    b'{"messages": [{"content": "no role"}]}',
    b'{"prompt": 3}',
    b'{"prompt": []}',
    b'{"prompt": [0, 99999]}',
    b'{"prompt": [-1]}',
    b'{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}',
    *(
        json.dumps({"messages": HI, "prompt": "x", "max_tokens": 5} | bad).encode()
        for bad in (
            {"n": 0},
            {"max_tokens": 0},
            {"stop": 3},
            {"tools": "x"},
            {"n": "many"},
            {"top_logprobs": 21, "logprobs": True},
            {"top_logprobs": -1, "logprobs": True},
            {"top_logprobs": 0, "echo": True},
            {"response_format": {"type": "grammar"}},
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "other"}},
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "other"}}},
            {"tool_choice": "required"},
            {"chat_template_kwargs": {"tokenize": True}},
            {"structured_outputs": {"choice": ["yes", "no"]}},
            {"guided_regex": "a+"},
            {"continue_final_message": True},
        )
    ),
    b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
]


def test_what_is_malformed_is_refused_and_leaves_nothing():
    async def program(w):
        for path in ("chat/completions", "completions", "messages"):
            for body in MALFORMED[: -1 if path == "completions" else None]:
                if path == "messages" and b"max_tokens" in body and b"tool" not in body:
                    continue  # OpenAI's fields are not Anthropic's
                answer = await w.http.post(f"/v1/{path}", content=body)
                assert answer.status_code == 400, (path, body, answer.text)
                assert (
                    answer.json()["error"]["type"] == "invalid_request_error"
                    and answer.json()["error"]["message"]
                )
                if path == "messages":
                    assert answer.json()["type"] == "error"  # as Anthropic's client wants it
                else:
                    assert {"message", "type", "param", "code"} == answer.json()["error"].keys()
                assert "pydantic" not in answer.text and "\n" not in answer.text
        with pytest.raises(openai.BadRequestError) as long:
            await w.ask(messages=[{"role": "user", "content": "x" * 100}])
        assert long.value.code == "context_length_exceeded"
        # By which agents' libraries know it.
        assert "this model's maximum context length is 100 tokens" in str(long.value)
        with pytest.raises(anthropic.BadRequestError, match="engine.max_model_len = 100"):
            await w.message(messages=[{"role": "user", "content": "x" * 100}])
        assert w.said() == [] and w.engine.requests == []
        for wrong in ("no", "x" * 32):
            assert (
                await w.http.get("/v1/models", headers={"Authorization": f"Bearer {wrong}"})
            ).status_code == 401
            answer = await w.http.post(
                "/v1/messages", headers={"x-api-key": wrong, "Authorization": ""}, content=b"{}"
            )
            assert (answer.status_code, answer.json()["error"]["type"]) == (
                401,
                "authentication_error",
            )
        assert [model.id async for model in w.gpt.models.list()] == ["policy"]
        assert (await w.ask(messages=HI)).choices[0].finish_reason == "length"
        assert (
            await w.ask(messages=[*HI, {"role": "user", "content": "x" * 60}])
        ).usage.total_tokens == 100

    play(program, max_model_len=100)


def test_a_body_that_comes_after_the_session_was_closed_is_refused():
    async def program(w):
        await w.ask(messages=HI)
        host, port = w.session.base_url.removeprefix("http://").removesuffix("/v1").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        body = json.dumps({"model": "any", "messages": HI}).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\n"
            f"Authorization: Bearer {w.session.api_key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode())
        await writer.drain()
        await asyncio.sleep(0.1)  # The server waits for the body.
        conversation = w.endpoint.close(w.session.api_key)
        writer.write(body)
        assert b"401" in await reader.readuntil(b"\r\n")
        writer.close()
        assert len(conversation.segments) == 1

    play(program, "one", "after the end")


def test_a_client_that_disconnects_leaves_nothing():
    async def program(w):
        await w.ask(messages=HI)
        before = w.said()
        chats = [*HI, {"role": "assistant", "content": "one"}, {"role": "user", "content": "2"}]
        for options in ({}, {"n": 3}, {"stream": True}):
            asking = asyncio.ensure_future(w.ask(messages=chats, **options))
            if "stream" in options:
                stream = await asking
                await anext(aiter(stream))
                await stream.close()
            else:
                while w.engine.live < options.get("n", 1):
                    await asyncio.sleep(0)
                assert w.said() == before
                asking.cancel()
            await until(lambda: w.engine.live == 0)
            assert w.said() == before
        w.engine.texts = ["short", RuntimeError("the engine broke")]
        with pytest.raises(openai.InternalServerError):
            await w.ask(messages=chats, n=2)
        assert w.said() == before
        w.engine.texts = ["two"]
        await w.ask(messages=chats)
        assert [num for _, num in w.said()] == [4 + 4]
        streaming = await w.ask(messages=chats, stream=True)
        asking = asyncio.ensure_future(w.ask(messages=chats))
        await until(lambda: w.engine.live == 2)
        conversation = w.endpoint.close(w.session.api_key)
        assert [s.sampled.count(True) for s in conversation.segments] == [8]
        with pytest.raises(openai.APIError, match="session was closed"):
            await asking
        with pytest.raises(openai.APIError, match="session was closed"):
            [chunk async for chunk in streaming]
        assert [s.sampled.count(True) for s in conversation.segments] == [8]
        await until(lambda: w.engine.live == 0)
        num_sampled = sum(len(request.done.tokens) for request in w.engine.requests)
        assert w.engine.discarded_tokens == num_sampled - 8 > 0

    play(program, "one")


async def until(condition):
    while not condition():
        await asyncio.sleep(0.005)


def test_the_program_keeps_its_signals_and_connections_outlast_a_pause():
    loop, engine = asyncio.new_event_loop(), Scripted("one", "two", "three")
    engine.loop = loop
    handler = signal.getsignal(signal.SIGINT)
    endpoint = Endpoint(engine, engine.prompts, EndpointConfig())
    loop.run_until_complete(asyncio.sleep(0.05))
    assert signal.getsignal(signal.SIGINT) is handler
    with socket.socket() as taken, pytest.raises(UserError, match="endpoint.port = "):
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        Endpoint(engine, engine.prompts, EndpointConfig(port=taken.getsockname()[1]))
    session, answers = endpoint.open((1,), Sampling(max_tokens=2, stop_token_ids=())), []

    def agent():
        with openai.OpenAI(
            base_url=session.base_url, api_key=session.api_key, max_retries=0
        ) as client:
            for _ in range(3):
                answers.append(
                    client.chat.completions.create(model="any", messages=HI)
                    .choices[0]
                    .message.content
                )

    thread = threading.Thread(target=agent)
    thread.start()
    while len(answers) < 3:
        loop.run_until_complete(asyncio.sleep(0.05))
        time.sleep(0.05)  # as while the trainer trains
    thread.join()
    assert answers == ["on", "tw", "th"]
    assert endpoint._server.server_state.total_requests == 3
    loop.run_until_complete(endpoint.stop())
    loop.close()


def engine_program(mesh, folder):
    os.environ["NO_PROXY"] = "127.0.0.1"
    tokenizer = load_tokenizer(folder)
    policy = Policy(PolicyConfig(model=str(folder), dtype="float32"), folder, mesh)
    engine = RolloutEngine(
        EngineConfig(max_model_len=128, max_num_seqs=64, kv_cache_gb=0.03),
        folder,
        mesh,
        dtype="float32",
    )
    driver, asked = EngineLoop(engine, repeatable=False), []
    generate = driver.generate

    def ask(request):
        asked.append(request)
        return generate(request)

    driver.generate = ask

    sampling = Sampling(max_tokens=12, stop_token_ids=tuple(stop_token_ids(tokenizer, folder)))
    endpoint = Endpoint(driver, SimpleNamespace(tokenizer=tokenizer, vision=None), EndpointConfig())
    out = {}
    with engine.awake(
        Refit(RefitConfig(), policy.shards(), policy.parts(), engine), policy.sleeper
    ):
        out["chat"] = driver.run(agent(endpoint, sampling))
        out["asked"] = [(r.tokens, r.done.tokens, r.done.logprobs) for r in asked]
        sessions = [endpoint.open((7, i), sampling) for i in range(20)]
        out["outcomes"], out["kept"], out["left"] = driver.run(
            asyncio.to_thread(lambda: asyncio.run(crowd(sessions)))
        )
        driver.run(
            until(
                lambda: all(
                    task.done() for s in sessions for task in endpoint._sessions[s.api_key].tasks
                )
            )
        )
        out["heard"] = [
            [
                tuple(
                    tokenizer.decode(
                        [t for t, said in zip(s.tokens, s.sampled, strict=True) if said is by],
                        skip_special_tokens=True,
                    )
                    for by in (False, True)
                )
                for s in endpoint.close(session.api_key).segments
            ]
            for session in sessions
        ]
        out["unfinished"] = (
            engine.llm.llm_engine.has_unfinished_requests(),
            [
                str(e)
                for q in (driver._running.values(), driver._waiting, driver._paused)
                for e in q
            ],
        )
        driver.run(endpoint.stop())
    driver.close()
    return out


async def agent(endpoint, sampling):
    """Three turns, the first of them streamed; the last in a thread, as agents that are not async
    are."""
    session, messages = endpoint.open((1, 2, 3), sampling), list(HI)
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
        for stream in (True, False):
            options = {} if stream else {"logprobs": True, "top_logprobs": 3}
            reply = await client.chat.completions.create(
                model="any", messages=messages, stream=stream, **options
            )
            if not stream:
                logprobs = [each.model_dump() for each in reply.choices[0].logprobs.content]
            content = (
                "".join([c.choices[0].delta.content async for c in reply])
                if stream
                else reply.choices[0].message.content
            )
            messages += [
                {"role": "assistant", "content": content},
                {"role": "user", "content": "go on"},
            ]

    def last():
        with anthropic.Anthropic(
            base_url=session.base_url.removesuffix("/v1"), api_key=session.api_key
        ) as client:
            return client.messages.create(
                model="any", max_tokens=5, messages=messages
            ).usage.output_tokens

    used = await asyncio.to_thread(last)
    return (
        used,
        logprobs,
        [(s.tokens, s.sampled, s.logprobs) for s in endpoint.close(session.api_key).segments],
    )


async def crowd(sessions, num=1000):
    """1,000 requests at once: every 20th leaves midway, every 20th is malformed."""
    num_sessions = len(sessions)
    clients = [
        openai.AsyncOpenAI(base_url=s.base_url, api_key=s.api_key, max_retries=0, timeout=100)
        for s in sessions
    ]
    kept, left = [[] for _ in sessions], []

    async def one(i):
        client, prompt = clients[i % num_sessions], f"I am {i}."
        if i % 20 == i // 20 % 20:
            with pytest.raises(openai.BadRequestError):
                await client.chat.completions.create(
                    model="any", messages=[{"role": "user", "content": prompt}], n=0
                )
            return "refused"
        if i % 20 == (i // 20 + 10) % 20:
            left.append(prompt)
            asking = asyncio.ensure_future(
                client.chat.completions.create(
                    model="any", messages=[{"role": "user", "content": prompt}], stream=i % 3 == 0
                )
            )
            if i % 3 == 0:
                stream = await asking
                await anext(aiter(stream))
                await stream.close()
            await asyncio.wait([asking], timeout=0.3)
            asking.cancel()
            return "left"
        reply = await client.chat.completions.create(
            model="any", messages=[{"role": "user", "content": prompt}]
        )
        kept[i % num_sessions].append((prompt, reply.choices[0].message.content))
        return "answered"

    outcomes = await asyncio.gather(*(one(i) for i in range(num)))
    for client in clients:
        await client.close()
    return outcomes, kept, left


def test_the_real_engine(tmp_path):
    (out,) = ranks(1, engine_program, tiny.make(tmp_path / "model"))
    tokenizer = load_tokenizer(tmp_path / "model")
    used, told, segments = out["chat"]
    assert used == len(out["asked"][2][1]) <= 5
    (segment,) = segments
    tokens, sampled, logprobs = segment
    assert tokens == [*out["asked"][2][0], *out["asked"][2][1]]
    assert [t for t, s in zip(tokens, sampled, strict=True) if s] == [
        t for _, said, _ in out["asked"] for t in said
    ]
    assert [p for p, s in zip(logprobs, sampled, strict=True) if s] == [
        p for _, _, ps in out["asked"] for p in ps
    ]
    # The likeliest tokens in the place of each are those of the model.
    prompt, answer, own = out["asked"][1]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    values, tokens = logits.log_softmax(-1).topk(3)
    assert [each["logprob"] for each in told] == own
    for place, each in enumerate(told):
        shown = [(top["token"], top["logprob"]) for top in each["top_logprobs"]]
        expected = values[place].tolist()
        assert [value for _, value in shown] == pytest.approx(expected, abs=1e-4)
        named = [tokenizer.decode([token]) for token in tokens[place].tolist()]
        assert [token for token, _ in shown] == named
    assert out["unfinished"] == (False, [])
    assert [out["outcomes"].count(o) for o in ("answered", "left", "refused")] == [900, 50, 50]
    for kept, heard in zip(out["kept"], out["heard"], strict=True):
        assert sorted(kept) == sorted(pair for pair in heard if pair[0] not in out["left"])
    assert (
        sum(prompt in out["left"] for heard in out["heard"] for prompt, _ in heard) < 25
    )  # others were answered before it was known that they had left
