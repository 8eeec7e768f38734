"""Tools at the endpoint: formats of calls, calls that are demanded, OpenAI's responses, templates
that show no tools, and what is refused."""

import json
from types import SimpleNamespace

import openai
import pytest

from minirl.base.errors import UserError
from minirl.config.shared import EndpointConfig
from minirl.data import chat, harmony
from minirl.endpoint import tool_calls
from minirl.endpoint.server import Endpoint
from minirl.endpoint.tool_calls import make_reader
from minirl.model.scratch import make_tokenizer
from minirl.rollout.conversation import read_answer
from test_server import CALL, HI, TEMPLATE, TOOL, play

NAMED = {"type": "function", "function": {"name": "add"}}
FLAT_TOOL = {"type": "function", **TOOL["function"]}
TWICE = (
    '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'
)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}

# How the templates of families write tools and calls, on the tiny tokenizer's roles.
HEAD = "{%- if tools %}{{ tools | tojson }}{% endif -%}{%- for m in messages %}"
BODY = "{{ '<|' + m.role + '|>' + (m.content or '') }}{%- for c in m.tool_calls or () %}"
TAIL = "{% endfor -%}{{ '<|end|>' }}{% endfor -%}"
FAMILIES = {
    "hermes": "{{ '<tool_call>\\n' + (c.function | tojson) + '\\n</tool_call>' }}",
    "glm45": "{{ '<tool_call>' + c.function.name + '\\n' }}{% for k, v in c.function.arguments"
    ".items() %}{{ '<arg_key>' + k + '</arg_key>\\n<arg_value>' + v + '</arg_value>\\n' }}"
    "{% endfor %}{{ '</tool_call>' }}",
    "qwen3_coder": "{{ '<tool_call>\\n<function=' + c.function.name + '>\\n' }}{% for k, v in "
    "c.function.arguments.items() %}{{ '<parameter=' + k + '>\\n' + v + '\\n</parameter>\\n' }}"
    "{% endfor %}{{ '</function>\\n</tool_call>' }}",
    "mistral": "{{ '[TOOL_CALLS]' + c.function.name + '[ARGS]' }}"
    "{{ c.function.arguments | tojson }}",
    "llama3_json": '{{ \'<|python_tag|>{"name": "\' + c.function.name + \'", "parameters": \' + '
    "(c.function.arguments | tojson) + '}' }}",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_parser_is_the_one_that_reads_what_the_template_writes(family):
    tool_calls.preload()
    tokenizer = make_tokenizer([])
    special = {"mistral": ["[TOOL_CALLS]", "[ARGS]"], "llama3_json": ["<|python_tag|>"]}
    special |= {"glm45": [], "hermes": [], "qwen3_coder": []}
    tokenizer.add_special_tokens({"additional_special_tokens": special[family]})
    tokenizer.chat_template = HEAD + BODY + FAMILIES[family] + TAIL
    tool = {
        "type": "function",
        "function": {
            "name": "find",
            "description": "",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
    reader = make_reader(tokenizer, [tool], "auto", "auto")
    assert reader.parser == family
    call = {"function": {"name": "find", "arguments": {"city": "Oslo"}}, "type": "function"}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    written = chat.render(tokenizer, [*HI, answer], header=False).rpartition("<|assistant|>")[2]
    content, calls = reader.read(written.removesuffix("<|end|>"))
    assert (content.strip(), calls) == ("", [("find", {"city": "Oslo"})])
    assert reader.read("no call at all") == ("no call at all", [])
    forced = make_reader(tokenizer, [tool], "required", "auto").guide()
    assert (forced is None) == (family == "mistral")  # vLLM has no grammar for it
    assert forced is None or "find" in forced.text


def test_parsers_by_name():
    tokenizer = make_tokenizer([])
    tokenizer.chat_template = TEMPLATE
    assert make_reader(tokenizer, [TOOL], "auto", "pythonic").parser == "pythonic"
    with pytest.raises(UserError, match="endpoint.tool_parser = nope: vLLM has no parser"):
        make_reader(tokenizer, [TOOL], "auto", "nope")
    with pytest.raises(UserError, match="endpoint.tool_parser = llama3_json: .*python_tag"):
        make_reader(tokenizer, [TOOL], "auto", "llama3_json")


def test_an_endpoint_looks_its_parser_up_before_it_serves():
    tokenizer = make_tokenizer([])
    tokenizer.chat_template = TEMPLATE
    prompts = SimpleNamespace(tokenizer=tokenizer, vision=None)
    with pytest.raises(UserError, match="endpoint.tool_parser = hermse: vLLM has no parser"):
        Endpoint(SimpleNamespace(), prompts, EndpointConfig(tool_parser="hermse"))


def test_a_template_that_shows_no_tools_is_refused():
    async def program(w):
        w.engine.tokenizer.chat_template = TEMPLATE.replace("tools", "others")
        for extra in ({}, {"tool_choice": "required"}):
            with pytest.raises(openai.BadRequestError, match="shows no tools.*data.chat_template"):
                await w.ask(messages=HI, tools=[TOOL], **extra)
        await w.ask(messages=HI, tools=[TOOL], tool_choice="none")
        session = w.endpoint.session(w.session.api_key)
        assert len(session.refusals) == 2 and session.metrics()["refused"] == 2.0

    play(program, "ok")


def test_without_tools_a_template_gets_none():
    """Llama's writes how to call them for any list, be it empty."""

    async def program(w):
        marked = "{% if tools is not none %}TOOLS{% endif %}" + TEMPLATE
        w.engine.tokenizer.chat_template = marked
        await w.ask(messages=HI, tools=[TOOL])
        await w.ask(messages=HI)
        await w.ask(messages=HI, extra_body={"tools": []})
        await w.message(messages=HI)
        assert [said[0].startswith("TOOLS") for said in w.said()] == [True, False, False, False]

    play(program, "ok", "ok", "ok", "ok")


def test_variables_of_the_template_come_with_the_request():
    async def program(w):
        w.engine.tokenizer.chat_template = "{% if loud %}LOUD {% endif %}" + TEMPLATE
        await w.ask(messages=HI, extra_body={"chat_template_kwargs": {"loud": True}})
        assert w.said()[0][0].startswith("LOUD <|user|>hi")
        with pytest.raises(
            openai.BadRequestError, match=r"chat_template_kwargs has \['tokenize'\]"
        ):
            await w.ask(messages=HI, extra_body={"chat_template_kwargs": {"tokenize": True}})

    play(program, "ok")


def test_demands_become_guides():
    """What an answer cannot be held to is asked for as a text, and counted."""

    async def program(w):
        shape = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
        await w.ask(messages=HI, response_format=shape)
        await w.ask(messages=HI, response_format={"type": "json_object"})
        await w.ask(messages=HI, tools=[TOOL], tool_choice="required")
        await w.ask(messages=HI, tools=[TOOL], tool_choice=NAMED)
        await w.ask(messages=HI, tools=[TOOL], response_format=shape)
        await w.message(
            messages=HI,
            tools=[{"name": "add", "input_schema": SCHEMA}],
            tool_choice={"type": "any"},
        )
        bare = {"type": "function", "function": {"name": "now"}}
        await w.ask(messages=HI, tools=[bare], tool_choice="required")
        guides = [request.guide for request in w.engine.requests]
        formats = [json.loads(guide.text)["format"] for guide in guides[:2]]
        assert formats[0]["json_schema"] == SCHEMA
        assert formats[1]["json_schema"] == {"type": "object"}
        for guide in (guides[2], guides[3], guides[5]):
            assert "add" in guide.text
        assert guides[4] is None
        # Without a schema a tool has no parameters, and not any value in their place.
        assert '{"type": "object", "properties": {}}' in guides[6].text
        assert w.endpoint.session(w.session.api_key).metrics()["unguided"] == 1.0

    play(program, *["x"] * 7)


def test_a_held_answer_is_streamed_at_its_end():
    async def program(w):
        stream = await w.ask(
            messages=HI, stream=True, stop=["!"], response_format={"type": "json_object"}
        )
        parts = [c.choices[0].delta.content async for c in stream]
        assert parts == ['{"a": 1}']

    play(program, '{"a": 1}! more')


def test_parallel_calls():
    async def program(w):
        both = await w.ask(messages=HI, tools=[TOOL])
        calls = both.choices[0].message.tool_calls
        assert [json.loads(call.function.arguments)["a"] for call in calls] == [1, 2]
        assert len({call.id for call in calls}) == 2
        one = await w.ask(messages=HI, tools=[TOOL], parallel_tool_calls=False)
        assert len(one.choices[0].message.tool_calls) == 1
        results = [{"role": "tool", "tool_call_id": call.id, "content": "3"} for call in calls]
        said = both.choices[0].message.model_dump(exclude_none=True)
        await w.ask(messages=[*HI, said, *results], tools=[TOOL])
        assert TWICE + "<|end|><|user|>3<|end|><|user|>3<|end|>" in w.said()[0][0]

    play(program, TWICE, TWICE, "six")


# What Mistral's templates refuse: an id that is not of 9 characters, and two roles in a row, where
# only messages that have `tool_calls` do not count.
STRICT = """
{%- if tools %}{{ tools | tojson }}{% endif -%}
{%- set last = namespace(role="assistant") -%}
{%- for m in messages -%}
  {%- if m.tool_calls -%}
    {{ '<|assistant|>' -}}
    {%- for c in m.tool_calls -%}
      {%- if (c.id or '') | length != 9 %}{{ raise_exception("ids have 9 letters") }}{% endif -%}
      {{ '<tool_call>' + (c.function | tojson) + '</tool_call>' -}}
    {%- endfor -%}
    {{ '<|end|>' -}}
  {%- elif m.role == 'tool' -%}
    {%- if (m.tool_call_id or '') | length != 9 %}{{ raise_exception("ids have 9 letters") }}
    {%- endif -%}
    {{ '<|user|>' + m.content + '<|end|>' -}}
  {%- else -%}
    {%- if m.role == last.role %}{{ raise_exception("roles alternate") }}{% endif -%}
    {%- set last.role = m.role -%}
    {{ '<|' + m.role + '|>' + m.content + '<|end|>' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif -%}
"""


def test_a_template_that_knows_calls_by_their_messages_alone():
    """An agent of three turns, and a client that shows a call of its own."""

    async def program(w):
        w.engine.tokenizer.chat_template = STRICT
        chat = list(HI)
        for turn in range(3):
            message = (await w.ask(messages=chat, tools=[TOOL])).choices[0].message
            chat.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls or ():
                chat.append({"role": "tool", "tool_call_id": call.id, "content": str(turn)})
        assert chat[-1] == {"role": "assistant", "content": "done"}
        written = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
        *_, (text, _) = w.said()
        assert text.count(f"<|assistant|>{written}<|end|>") == 2
        assert text.endswith("<|user|>1<|end|><|assistant|>done<|end|>")
        shown = {"name": "add", "arguments": ""}
        call = {"id": "123456789", "type": "function", "function": shown}
        answer = {"role": "assistant", "content": None, "tool_calls": [call]}
        result = {"role": "tool", "tool_call_id": "123456789", "content": "3"}
        await w.ask(messages=[*HI, answer, result], tools=[TOOL])

    play(program, CALL, CALL, "done", "well")


def test_such_a_template_takes_the_ids_of_anthropics_calls():
    async def program(w):
        w.engine.tokenizer.chat_template = STRICT
        tools = [{"name": "add", "input_schema": SCHEMA}]
        first = await w.message(messages=HI, tools=tools)
        *_, call = first.content
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "3"}
        chat = [*HI, {"role": "assistant", "content": first.model_dump()["content"]}]
        second = await w.message(
            messages=[*chat, {"role": "user", "content": [result]}], tools=tools
        )
        assert second.content[0].text == "done"

    play(program, CALL, "done")


@pytest.mark.parametrize(
    "call",
    [
        '{"name": "add", "arguments": {"a": NaN}}',
        '{"name": "add", "arguments": {"a": 1e999}}',
        '{"name": "\\ud800", "arguments": {"a": 1}}',
        '{"name": "add", "arguments": {"a": "\\ud800"}}',
    ],
)
def test_a_call_that_no_response_can_hold_is_a_text(call):
    async def program(w):
        choice = (await w.ask(messages=HI, tools=[TOOL])).choices[0]
        assert choice.finish_reason == "stop" and not choice.message.tool_calls
        tools = [{"name": "add", "input_schema": SCHEMA}]
        message = await w.message(messages=HI, tools=tools)
        assert message.stop_reason == "end_turn" and call in message.content[0].text

    play(program, f"<tool_call>{call}</tool_call>", f"<tool_call>{call}</tool_call>")


def test_a_large_vocabulary_is_listed_once(monkeypatch):
    """vLLM's parsers ask for it when they are made, and one is made for each answer."""
    tokenizer = make_tokenizer([])
    tokenizer.chat_template = HEAD + BODY + FAMILIES["qwen3_coder"] + TAIL
    asked = []
    get_vocab = type(tokenizer).get_vocab
    monkeypatch.setattr(
        type(tokenizer), "get_vocab", lambda self: asked.append(0) or get_vocab(self)
    )
    for _ in range(3):
        make_reader(tokenizer, [TOOL], "auto", "qwen3_coder").read("no call")
    assert len(asked) == 1


def test_reward_functions_get_the_calls_and_the_replies():
    """What an agent's chat says since its prompt, as TRL's functions have it: from the first
    message that was sampled in this session on, whatever the prompt itself says."""

    async def program(w):
        shown = [{"role": "user", "content": "go"}, {"role": "assistant", "content": "ok"}]
        chat = [{"role": "system", "content": "short"}, *shown, *HI]
        both = (await w.ask(messages=chat, tools=[TOOL])).choices[0].message
        for number, call in enumerate(both.tool_calls):
            reply = {"role": "tool", "tool_call_id": call.id, "content": f"sum {number}"}
            chat = [*chat, *([] if number else [both.model_dump(exclude_none=True)]), reply]
        await w.ask(messages=chat, tools=[TOOL])

        [segment] = w.endpoint.session(w.session.api_key).conversation.segments
        called, *replies, last = segment.messages
        assert called["role"] == "assistant" and not called["content"]
        calls = [call["function"] for call in called["tool_calls"]]
        assert calls == [{"name": "add", "arguments": {"a": n}} for n in (1, 2)]
        assert [(r["role"], r["name"], r["content"]) for r in replies] == [
            ("tool", "add", "sum 0"),
            ("tool", "add", "sum 1"),
        ]
        assert last == {"role": "assistant", "content": "three"}

    play(program, TWICE, "three")


def test_responses():
    async def program(w):
        create = w.gpt.responses.create
        first = await create(
            model="any", instructions="s", input="hi", tools=[FLAT_TOOL], store=False
        )
        assert [item.type for item in first.output] == ["message", "function_call"]
        assert first.output_text == "I add. " and first.status == "completed"
        assert first.usage.output_tokens == len(CALL) + 1
        call = first.output[1]
        assert (call.name, json.loads(call.arguments)) == ("add", {"a": 1})
        answers = [item.model_dump(exclude_none=True) for item in first.output]
        chat = [
            {"role": "user", "content": "hi"},
            *answers,
            {"type": "function_call_output", "call_id": call.call_id, "output": "2"},
        ]
        async with w.gpt.responses.stream(
            model="any", instructions="s", input=chat, tools=[FLAT_TOOL]
        ) as stream:
            texts = [e.delta async for e in stream if e.type == "response.output_text.delta"]
            second = await stream.get_final_response()
        assert "".join(texts) == second.output_text == "It is 2"
        assert w.said() == [
            (
                f"<|system|>{json.dumps([TOOL])}<|end|><|system|>s<|end|><|user|>hi<|end|>"
                f"<|assistant|>{CALL}<|end|><|user|>2<|end|><|assistant|>It is 2<|end|>",
                len(CALL) + 1 + 8,
            )
        ]
        async with w.gpt.responses.stream(
            model="any", input="hi", tools=[FLAT_TOOL], tool_choice="required"
        ) as stream:
            kinds = [event.type async for event in stream]
            third = await stream.get_final_response()
        assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
        assert [item.type for item in third.output] == ["function_call", "function_call"]
        cut = await create(model="any", input="hi", max_output_tokens=2)
        assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        sure = await create(model="any", input="hi", include=["message.output_text.logprobs"])
        said = sure.output[0].content[0].logprobs
        assert [each.token for each in said] == ["o", "k", "<|end|>"]
        assert [each.logprob for each in said] == w.engine.requests[-1].done.logprobs

    play(program, CALL, "It is 2", TWICE, "long", "ok")


def test_what_responses_cannot_do_is_refused():
    async def program(w):
        for wrong, why in (
            ({"previous_response_id": "resp_1"}, "keeps no responses"),
            ({"tools": [{"type": "web_search"}]}, "tool of type 'web_search'"),
            ({"input": [{"type": "item_reference", "id": "x"}]}, "item of type 'item_reference'"),
            ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "'input_file'"),
            ({"input": None}, "malformed request"),
            ({"tool_choice": {"type": "allowed_tools"}}, "type 'allowed_tools'; give auto"),
        ):
            with pytest.raises(openai.BadRequestError, match=why):
                await w.gpt.responses.create(**{"model": "any", "input": "hi"} | wrong)
        assert w.engine.requests == [] and w.said() == []

    play(program)


def test_errors_are_one_sentence():
    async def program(w):
        wrong = await w.http.post("/v1/chat/completions", json={"messages": "hi"})
        assert wrong.json() == {
            "error": {
                "message": "malformed request: messages: input should be a valid list",
                "type": "invalid_request_error",
                "param": "messages",
                "code": None,
            }
        }
        missing = await w.http.post("/v1/messages", json={"messages": HI})
        assert missing.json() == {
            "type": "error",
            "error": {
                "type": "invalid_request_error",
                "message": "malformed request: the field 'max_tokens' is missing",
            },
        }
        unknown = await w.http.post("/v1/embeddings", json={})
        assert unknown.status_code == 404
        assert unknown.json()["error"]["message"] == (
            "there is no POST /v1/embeddings here; there are POST /v1/chat/completions, POST "
            "/v1/completions, POST /v1/messages, POST /v1/responses, POST "
            "/v1/messages/count_tokens, POST /tokenize, POST /detokenize, GET /v1/models, GET "
            "/health"
        )
        with pytest.raises(openai.BadRequestError, match="the request has none"):
            await w.ask(messages=HI, tool_choice="required")

    play(program)


# What templates of gpt-oss make of a chat: thoughts are kept of the last answer, a call names its
# tool in the header, and a content with channels is refused.
HARMONY = (
    "{%- if tools %}{{ '<|start|>developer<|message|>' + (tools | tojson) + '<|end|>' }}"
    "{% endif -%}"
    "{%- for m in messages -%}"
    "{%- if m.role != 'assistant' -%}"
    "{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}"
    "{%- else -%}"
    "{%- if '<|channel|>' in m.content -%}{{ raise_exception('channels in the content') }}"
    "{%- endif -%}"
    "{%- if m.thinking and loop.last -%}"
    "{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{%- endif -%}"
    "{%- if m.tool_calls -%}"
    "{{ '<|start|>assistant to=functions.' + m.tool_calls[0].function.name }}"
    "{{ '<|channel|>commentary json<|message|>' }}"
    "{{ (m.tool_calls[0].function.arguments | tojson) + '<|call|>' }}"
    "{%- else -%}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}"
    "{%- endif -%}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|start|>assistant' }}{%- endif -%}"
)
HARMONY_TOKENS = ("start", "end", "message", "channel", "constrain", "call", "return")
THOUGHT = "<|channel|>analysis<|message|>The tool knows.<|end|><|start|>assistant"
CALLED = (
    THOUGHT + "<|channel|>commentary to=functions.add <|constrain|>json<|message|>"
    '{"a": 1, "b": 2}<|call|>'
)
ANSWERED = (
    "<|channel|>analysis<|message|>3.<|end|><|start|>assistant<|channel|>final<|message|>It is 3."
)


def speak_harmony(tokenizer):
    special = [f"<|{name}|>" for name in HARMONY_TOKENS]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.chat_template = HARMONY
    return tokenizer


def test_harmony_is_read_as_it_is_written_and_as_it_is_sampled():
    tokenizer = speak_harmony(make_tokenizer([]))
    reader = make_reader(tokenizer, [TOOL], "auto", "auto")
    assert reader.parser == "harmony" and reader.guide() is None
    assert reader.read(CALLED) == ("", [("add", {"a": 1, "b": 2})])
    both = CALLED.replace(
        THOUGHT, THOUGHT + "<|channel|>commentary<|message|>I add.<|end|><|start|>assistant"
    )
    assert reader.read(both) == ("I add.", [("add", {"a": 1, "b": 2})])
    assert reader.read(ANSWERED) == (ANSWERED, [])
    broken = CALLED.replace('{"a": 1', '{"a": ')
    assert reader.read(broken) == (broken, [])
    foreign = CALLED.replace("functions.add", "python")
    assert reader.read(foreign) == (foreign, [])


def test_what_an_answer_in_harmony_says():
    assert harmony.visible_text(ANSWERED) == "It is 3."
    assert harmony.visible_text(CALLED) == harmony.visible_text(THOUGHT) == ""
    assert harmony.visible_text("no channel<|return|>") == "no channel"
    assert harmony.visible_text("<|channel|>analysis") == ""  # it ended in the header
    assert harmony.to_chat_message(CALLED) == {
        "role": "assistant",
        "content": "",
        "thinking": "The tool knows.",
        "tool_calls": [
            {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
        ],
    }
    tokenizer = speak_harmony(make_tokenizer([]))
    tokens = tokenizer(ANSWERED, add_special_tokens=False)["input_ids"]
    assert read_answer(tokenizer, tokens) == "It is 3."
    assert read_answer(make_tokenizer([]), [10, 11]) == make_tokenizer([]).decode([10, 11])


def test_an_agent_speaks_harmony():
    """Thoughts are not shown, calls are OpenAI's, and earlier answers go to the template as it
    wants them. What is trained on is what was sampled."""

    async def program(w):
        speak_harmony(w.engine.tokenizer)
        first = await w.ask(messages=HI, tools=[TOOL])
        message = first.choices[0].message
        assert message.content is None and first.choices[0].finish_reason == "tool_calls"
        assert json.loads(message.tool_calls[0].function.arguments) == {"a": 1, "b": 2}
        reply = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "3"}
        asked = [*HI, message.model_dump(exclude_none=True), reply]
        second = await w.ask(messages=asked, tools=[TOOL])
        assert second.choices[0].message.content == "It is 3."
        asked += [second.choices[0].message.model_dump(exclude_none=True), *HI]
        await w.ask(messages=asked, tools=[TOOL])
        texts = [text.removesuffix("<|end|>") for text, _ in w.said()]
        assert texts[0].endswith("<|start|>user<|message|>hi<|end|><|start|>assistant" + CALLED)
        assert "to=functions.add<|channel|>commentary json<|message|>{" in texts[1]
        assert texts[1].endswith("<|start|>assistant" + ANSWERED)
        assert "<|channel|>final<|message|>It is 3.<|end|>" in texts[2]
        assert texts[2].endswith("<|start|>assistant" + ANSWERED)

    play(program, CALLED, ANSWERED, ANSWERED)


# As gpt-oss has it: the thoughts of calls are shown, and a tool replies to a call.
THOUGHTFUL = HARMONY.replace("m.thinking and loop.last", "m.thinking").replace(
    "{%- for m in messages -%}",
    "{%- for m in messages -%}{%- if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls "
    "-%}{{ raise_exception('a tool replies to a call') }}{%- endif -%}",
)


def test_a_call_in_harmony_that_cannot_be_read_is_shown():
    async def program(w):
        speak_harmony(w.engine.tokenizer)
        for shown in ('{"a": , "b": 2}', "1 + 1", ""):
            choice = (await w.ask(messages=HI, tools=[TOOL])).choices[0]
            assert (choice.message.content, choice.finish_reason) == (shown, "stop")

    foreign = CALLED.replace("functions.add", "python").replace('{"a": 1, "b": 2}', "1 + 1")
    play(program, CALLED.replace('{"a": 1', '{"a": '), foreign, THOUGHT)


def test_an_answer_with_calls_keeps_its_thoughts():
    async def program(w):
        speak_harmony(w.engine.tokenizer).chat_template = THOUGHTFUL
        message = (await w.ask(messages=HI, tools=[TOOL])).choices[0].message
        reply = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "3"}
        await w.ask(messages=[*HI, message.model_dump(exclude_none=True), reply], tools=[TOOL])
        *_, (text, _) = w.said()
        assert text.count("<|channel|>analysis<|message|>The tool knows.<|end|>") == 1

    play(program, CALLED, ANSWERED)
