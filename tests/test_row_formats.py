"""What people bring as rows: TRL's formats, tools and their calls, arguments of chat templates.

The rows of minirl/data/README.md are read from the page and run by the programs."""

import base64
import json
import re
from dataclasses import replace
from datetime import datetime
from types import SimpleNamespace

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tiny
from in_memory import ALONE
from minirl.base.errors import UserError
from minirl.config.parse import load_config, parse_flags
from minirl.config.rl import RLConfig
from minirl.config.shared import DataConfig, RowsConfig
from minirl.config.supervised import ChatsConfig, LabelledConfig, PairsConfig, SFTConfig
from minirl.data import chat
from minirl.data.chat import why_no_messages
from minirl.data.examples import to_examples
from minirl.data.formats import open_examples
from minirl.data.lengths import check_lengths
from minirl.data.order import read_rows
from minirl.data.prompts import Prompts, open_prompts
from minirl.data.tokenizer import read_template_kwargs, read_tools, use_template
from minirl.engine.loop import Completion
from minirl.model.scratch import make_tokenizer
from minirl.rollout.conversation import Conversation
from minirl.run import supervised
from minirl.run.inputs import HAS_CALLS, PromptChecks, marks_for_template, require_shown
from minirl.run.supervised import mark_row
from minirl.types.packed import prompt_length
from programs import ROOT, fork

PAGE = (ROOT / "minirl" / "data" / "README.md").read_text()
ROWS = dict(
    zip(
        ("standard", "conversational", "tools", "kwargs"),
        [json.loads(text) for text in re.findall(r"^```json\n(.*?)^```", PAGE, re.M | re.S)],
        strict=True,
    )
)
# Shows tools and calls, and has an argument.
TEMPLATE = (
    "{% macro say(m) %}{{ m.content }}{% if enable_thinking is defined and not enable_thinking %}"
    "!{% endif %}{% endmacro %}"
    "{% if tools %}[{% for t in tools %}{{ t.function.name }} {% endfor %}]{% endif %}"
    "{% for m in messages %}{{ '<|' + m.role + '|>' if m.role != 'tool' else '<|system|>' }}"
    "{% if m.role == 'user' %}{{ say(m) }}{% else %}{{ m.content }}{% endif %}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}"
    "{% for k, v in c.function.arguments.items() %}({{ k }}={{ v }}){% endfor %}{% endfor %}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SWITCH = ROWS["tools"]["tools"][0]


def tokenizer_of(**settings):
    tokenizer = make_tokenizer([])
    tokenizer.chat_template = TEMPLATE
    return use_template(tokenizer, RowsConfig(**settings))


def written(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def copies(name, num=12):
    """A row of the page, with prompts of its own."""
    rows = []
    for n in range(num):
        row = json.loads(json.dumps(ROWS[name]))
        if isinstance(row["prompt"], str):
            row["prompt"] = f"{n}. {row['prompt']}"
        else:
            row["prompt"][0]["content"] = f"{n}. {row['prompt'][0]['content']}"
        rows.append(row)
    return rows


# What a row of the page becomes, `*` around what is in the loss, with the flags it is read with.
EXPECTED = {
    "standard": ("The sky is* blue.<|end|>*", {"apply_chat_template": False}),
    "conversational": (
        "<|user|>What color is the sky?<|end|><|assistant|>*It is blue.<|end|>*",
        {},
    ),
    "tools": (
        "[switch ]<|user|>Turn on the lamp.<|end|><|assistant|>*switch(lamp=on)<|end|>*",
        {},
    ),
    "kwargs": ("<|user|>2 + 2?!<|end|><|assistant|>*4<|end|>*", {}),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_row_is_the_text_that_it_should_be(tmp_path, name):
    """In fine-tuning, as a side of a pair, and as a prompt of RL with its later turns."""
    text, settings = EXPECTED[name]
    before, answer, _ = text.split("*")
    tokenizer = tokenizer_of(**settings)
    row = ROWS[name]
    stop_ids = [tokenizer.eos_token_id]
    source = written(tmp_path / "rows.jsonl", [row])

    chats = open_examples(source, "data.train", ChatsConfig(**settings), ALONE)
    (example,) = to_examples(tokenizer, None, chats[0], stop_ids)
    assert tokenizer.decode(example.tokens) == before + answer
    assert tokenizer.decode(example.tokens[example.sampled]) == answer

    pair = row | {"chosen": row["completion"], "rejected": "no"}
    if not isinstance(pair["chosen"], str):
        pair["rejected"] = [{"role": "assistant", "content": "no"}]
    source = written(tmp_path / "pairs.jsonl", [pair])
    sides = open_examples(source, "data.train", PairsConfig(**settings), ALONE)[0]
    messages = sides["prompt"] + sides["chosen"]
    example = {**sides, "messages": messages, "trained": [len(messages) - 1]}
    (chosen,) = to_examples(tokenizer, None, example, stop_ids)
    assert tokenizer.decode(chosen.tokens) == before + answer

    cfg = DataConfig(**settings)
    source = written(tmp_path / "prompts.jsonl", [row])
    prompts = Prompts(open_prompts(source, "data.train", cfg, ALONE), tokenizer, cfg, seed=0)
    made = prompts.rows[0]
    assert prompts.rendered(made) == before
    assert tokenizer.decode(prompts.encode(made)) == before
    if name != "standard":
        turns = [*prompts.messages(made), {"role": "assistant", "content": "x"}]
        turns.append({"role": "user", "content": "why?"})
        later = Conversation(tokenizer, None, made).continue_with_messages(turns)
        mark = "!" if name == "kwargs" else ""
        assert later.text == f"{before}x<|end|><|user|>why?{mark}<|end|><|assistant|>"


def test_a_prompt_that_is_too_long_keeps_its_end(tmp_path):
    """And the chat goes on from it, token by token."""
    cfg = DataConfig(max_prompt_tokens=9, too_long="truncate_left")
    tokenizer = tokenizer_of()
    source = written(tmp_path / "a.jsonl", copies("conversational"))
    prompts = Prompts(open_prompts(source, "data.train", cfg, ALONE), tokenizer, cfg, seed=0)
    assert check_lengths(prompts, ALONE, 1) == 0 and len(prompts.rows) == 12
    whole = prompts.encode(prompts.rows[0])
    chat_so_far = prompts.messages(prompts.rows[0])
    conversation = Conversation(tokenizer, cut_to=prompts.cut_to)
    segment = conversation.continue_with_messages(chat_so_far)
    assert len(whole) > 9 and segment.tokens == whole[-9:]

    answer = chat.encode(tokenizer, "x<|end|>")
    said = Completion(answer, [0.0] * len(answer), True, [0] * len(answer))
    text = segment.append_completion(said, tokenizer)
    chat_so_far += [{"role": "assistant", "content": text}, {"role": "user", "content": "why?"}]
    assert conversation.continue_with_messages(chat_so_far) is segment
    later = chat.encode(tokenizer, chat.render(tokenizer, chat_so_far))
    assert segment.tokens == later[len(whole) - 9 :]
    assert len(conversation.segments) == 1


# --------------------------------------------------------------------------------------------------
# arguments of templates


def test_arguments_are_typed_as_in_yaml(tmp_path):
    flags = ["--data.chat-template-kwargs", "enable_thinking", "False", "n", "3", "s", "a b"]
    wanted = {"enable_thinking": False, "n": 3, "s": "a b"}
    cfg = parse_flags(SFTConfig, [*flags, "--num-epochs", "2"])
    assert (cfg.data.chat_template_kwargs, cfg.num_epochs) == (wanted, 2.0)
    (tmp_path / "c.yaml").write_text("data: {chat_template_kwargs: {a: '1', b: true}}")
    assert load_config(SFTConfig, str(tmp_path / "c.yaml")).data.chat_template_kwargs == {
        "a": "1",
        "b": True,
    }
    with pytest.raises(UserError, match="names and values come in turn"):
        parse_flags(SFTConfig, flags[:2])


def test_arguments_hold_everywhere_and_those_of_a_row_count_before():
    question = [{"role": "user", "content": "q"}]
    tokenizer = make_tokenizer([])
    tokenizer.chat_template = "\n" + TEMPLATE  # a line break that stays
    use_template(tokenizer, RowsConfig(chat_template_kwargs={"enable_thinking": False}))
    assert chat.render(tokenizer, question) == "\n<|user|>q!<|end|><|assistant|>"
    mine = {"enable_thinking": True}
    assert "!" not in chat.render(tokenizer, question, chat_template_kwargs=mine)
    row = {"template_inputs": {"chat_template_kwargs": mine}}
    assert "!" not in chat.renderer(tokenizer, row)(question)
    shown = tokenizer_of(chat_template_kwargs={"x": [1, None, "é\"'", {"a": True}]})
    shown.chat_template = shown.chat_template.split("{{ '' }}")[0] + "{{ x | tojson }}"
    assert json.loads(chat.render(shown, question)) == [1, None, "é\"'", {"a": True}]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("thinking", "has .'thinking'"),
        ([1], r"has .'\[1\]'"),
        ({"tools": []}, "has .'tools'"),
        ({"not a name": 1}, "has .'not a name'"),
    ],
)
def test_what_is_no_argument_is_refused(value, message):
    with pytest.raises(UserError, match=f"^here .*{message}"):
        read_template_kwargs(value, "here")


# --------------------------------------------------------------------------------------------------
# tools


@pytest.mark.parametrize(
    "value",
    [
        [SWITCH],
        json.dumps([SWITCH]),
        [json.dumps(SWITCH)],
        [SWITCH["function"]],
        [SWITCH | {"strict": None}],
    ],
    ids=["list", "text", "list of texts", "bare", "gaps of Arrow"],
)
def test_tools_come_in_several_forms(value):
    assert read_tools(value, "x") == [SWITCH]
    assert read_tools([], "x") is read_tools("", "x") is read_tools(None, "x") is None


def test_what_is_null_in_a_tool_stays_unless_a_table_has_put_it_there():
    """As pydantic writes an optional argument."""
    unit = {"default": None, "title": "Unit"}
    parameters = {"type": "object", "properties": {"unit": unit}}
    tool = {"type": "function", "function": {"name": "heat", "parameters": parameters}}
    assert read_tools([tool], "x", has_gaps=False) == [tool]
    assert read_tools(json.dumps([tool]), "x") == [tool]
    assert read_tools([json.dumps(tool)], "x") == [tool]
    (without,) = read_tools([tool], "x")
    assert without["function"]["parameters"]["properties"] == {"unit": {"title": "Unit"}}


@pytest.mark.parametrize("value", [["search"], "search", 7, [{"description": "none"}]])
def test_what_describes_no_tool_is_refused(tmp_path, value):
    source = written(tmp_path / "a.jsonl", [{"prompt": "a", "tools": value}])
    with pytest.raises(UserError, match="line 1: data.tools_key = 'tools' .*describes no tool"):
        open_prompts(source, "data.train", DataConfig(), ALONE)[0]
    assert open_prompts(source, "data.train", DataConfig(tools_key=""), ALONE)[0]["tools"] == value


def test_a_bad_call_is_refused():
    for function in ({"name": "f", "arguments": "{"}, {"arguments": {}}):
        message = {"role": "assistant", "tool_calls": [{"function": function}]}
        assert "message 1 is" in why_no_messages([message])


def test_a_template_that_leaves_out_tools_or_calls_is_refused(tmp_path):
    cfg = DataConfig()
    plain = make_tokenizer([])
    for name, row, message in (
        ("tools", ROWS["tools"], r"line 1: the chat template .* shows no tools.*\(switch\)"),
        (
            "calls",
            {"prompt": [*ROWS["tools"]["prompt"], *ROWS["tools"]["completion"]], "answer": "1"},
            "line 1: the chat template .* shows no tool_calls",
        ),
    ):
        source = written(tmp_path / f"{name}.jsonl", [row])
        opened = open_prompts(source, "data.train", cfg, ALONE)
        rows, _ = read_rows(opened, ALONE, 0, mark=marks_for_template)
        require_shown(rows, tokenizer_of())
        with pytest.raises(UserError, match=message):
            require_shown(rows, plain)


def test_a_template_that_leaves_out_thoughts_is_refused(tmp_path):
    shown = make_tokenizer([])
    shown.chat_template = shown.chat_template.replace(
        "message.content", "(message.thinking or '') + message.content"
    )
    answer = {"role": "assistant", "content": "4", "thinking": "2 and 2"}
    question = {"role": "user", "content": "2 + 2?"}
    for cfg, row in (
        (ChatsConfig(), {"messages": [question, answer]}),
        (PairsConfig(), {"prompt": "2 + 2?", "chosen": [answer], "rejected": [answer]}),
    ):
        source = written(tmp_path / "a.jsonl", [row])
        opened = open_examples(source, "data.train", cfg, ALONE)
        rows, _ = read_rows(opened, ALONE, 0, mark=marks_for_template)
        require_shown(rows, shown)
        with pytest.raises(UserError, match=r"line 1: .* leaves out the 'thinking' of an answer"):
            require_shown(rows, make_tokenizer([]))
    # What was thought before a prompt is not trained.
    source = written(tmp_path / "b.jsonl", [{"prompt": [question, answer, question]}])
    opened = open_prompts(source, "data.train", DataConfig(), ALONE)
    rows, _ = read_rows(opened, ALONE, 0, mark=marks_for_template)
    require_shown(rows, make_tokenizer([]))


def test_calls_may_be_shown_by_a_template_that_is_for_tools(tmp_path):
    plain = make_tokenizer([])
    plain.chat_template = {
        "default": plain.chat_template,
        "tool_use": tokenizer_of().chat_template,
    }
    row = ROWS["tools"]
    row = {"prompt": [*row["prompt"], *row["completion"]], "answer": "1", "tools": row["tools"]}
    source = written(tmp_path / "a.jsonl", [row])
    opened = open_prompts(source, "data.train", DataConfig(), ALONE)
    rows, _ = read_rows(opened, ALONE, 0, mark=marks_for_template)
    require_shown(rows, plain)


# --------------------------------------------------------------------------------------------------
# keys, doubles, prompts of an environment


@pytest.mark.parametrize("key", ["images_key", "source_key", "tools_key"])
def test_a_named_column_that_no_row_has_is_refused(tmp_path, key):
    source = written(tmp_path / "a.jsonl", [{"prompt": str(n), "answer": n} for n in range(9)])
    opened = open_prompts(source, "data.train", DataConfig(**{key: "picture"}), ALONE)
    with pytest.raises(
        UserError, match=f"data.{key} = 'picture' names a column that no row .* prompt, answer; set"
    ):
        read_rows(opened, ALONE, 0, 2)


def test_dots_lead_into_nested_columns(tmp_path):
    row = {
        "extra_info": {"question": "2 + 2 = ?", "from": {"set": "sums"}},
        "reward_model": {"ground_truth": "4"},
    }
    cfg = DataConfig(
        prompt_key="extra_info.question",
        answer_key="reward_model.ground_truth",
        source_key="extra_info.from.set",
    )
    source = written(tmp_path / "a.jsonl", [row] * 9)
    opened = open_prompts(source, "data.train", cfg, ALONE)
    rows, _ = read_rows(opened, ALONE, 0)
    wanted = {"prompt": "2 + 2 = ?", "answer": "4", "data_source": "sums"}
    assert {name: rows[0][name] for name in wanted} == wanted
    chats = open_examples(
        written(tmp_path / "b.jsonl", [{"turn": {"user": "a", "model": "b"}}]),
        "data.train",
        ChatsConfig(prompt_key="turn.user", completion_key="turn.model"),
        ALONE,
    )
    assert [message["content"] for message in chats[0]["messages"]] == ["a", "b"]

    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    named = DataConfig(prompt_key="messages", tools_key="")
    talks = written(tmp_path / "talk.jsonl", [{"messages": talk, "tools": "none"}] * 9)
    rows, _ = read_rows(open_prompts(talks, "data.train", named, ALONE), ALONE, 0)
    assert (rows[0]["prompt"], rows[0]["answer"]) == (talk[:1], "b")

    plain = written(tmp_path / "c.jsonl", [{"a.b": "with dots in its name", "a": {"b": "nested"}}])
    opened = open_prompts(plain, "data.train", DataConfig(prompt_key="a.b"), ALONE)
    assert opened[0]["prompt"] == "with dots in its name"
    missing = open_prompts(
        source, "data.train", replace(cfg, answer_key="reward_model.gold"), ALONE
    )
    with pytest.raises(UserError, match="'reward_model.gold' names a column that no row"):
        read_rows(missing, ALONE, 0)


def test_rows_are_distinct_by_all_that_they_have(tmp_path):
    rows = [{"prompt": str(n % 30), "answer": n % 60} for n in range(90)]
    opened = open_prompts(written(tmp_path / "a.jsonl", rows), "data.train", DataConfig(), ALONE)
    train, held_out = read_rows(opened, ALONE, 0, 6)
    assert (len(held_out), len(train), train.num_doubles) == (6, 2 * 24, 30)
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in held_out}


def test_few_rows_hold_out_an_eighth_and_say_so(tmp_path, capsys):
    rows = [{"prompt": str(n)} for n in range(300)]
    for num, wanted in ((300, 128), (255, 31), (3, 1)):
        source = written(tmp_path / "a.jsonl", rows[:num])
        opened = open_prompts(source, "data.train", DataConfig(), ALONE)
        train, held_out = read_rows(opened, ALONE, 0, None)
        assert (len(train), len(held_out)) == (num - wanted, wanted)
        assert (
            f"{num} distinct prompts, of which {wanted} are held" in capsys.readouterr().err
        ) == (num < 256)
    with pytest.raises(UserError, match="data.held_out = 3 leaves nothing of the 3"):
        read_rows(opened, ALONE, 0, 3)


@pytest.mark.parametrize("common", [{}, {"prompt": "play"}], ids=["none", "one for all"])
def test_an_environment_with_prompts_of_its_own_needs_none(tmp_path, common):
    source = written(tmp_path / "a.jsonl", [common | {"answer": n} for n in range(12)])
    opened = open_prompts(source, "data.train", DataConfig(), ALONE, env_prompts=True)
    train, held_out = read_rows(opened, ALONE, 0, 2)
    assert (len(train), len(held_out)) == (10, 2)
    cfg = DataConfig()
    assert bool(Prompts(train, tokenizer_of(), cfg, seed=0).rendered(train[0])) == bool(common)
    if not common:
        with pytest.raises(UserError, match="must name a text"):
            open_prompts(source, "data.train", DataConfig(), ALONE)[0]


def test_a_warm_start_imitates_answers_to_what_rl_asks(tmp_path):
    """Prompts that are too long keep their end; there must be some."""
    source = written(tmp_path / "a.jsonl", [{"prompt": "0123456789" * 3, "answer": "yes"}])
    cfg = RLConfig()
    cfg.data.max_prompt_tokens = 20
    cfg.data.too_long = "truncate_left"
    rows, _ = read_rows(open_prompts(source, "data.train", cfg.data, ALONE), ALONE, 0)
    prompts = Prompts(rows, tokenizer_of(), cfg.data, seed=0)
    inputs = SimpleNamespace(prompts=prompts, stop_ids=[tokenizer_of().eos_token_id])
    example = supervised._example(cfg, inputs, 0)
    num = prompt_length(example)
    assert num == 20 and example.tokens[:num].tolist() == prompts.encode(rows[0])[-20:]
    assert len(example.tokens) == len(example.sampled) == len(example.logprobs)

    source = written(tmp_path / "b.jsonl", [{"answer": n} for n in range(12)])
    (tmp_path / "env.py").write_text("from minirl.envs import Env\n\nclass Mine(Env):\n    pass\n")
    given = ["--policy.model", "scratch", "--data.train", source, "--output", tmp_path / "out"]
    given += ["--env.name", f"{tmp_path}/env.py:Mine", "--sft.num-steps", 1]
    ended = fork("minirl.rl", given, tmp_path / "log")
    assert ended.code == 2 and "sft.num_steps = 1 needs a prompt in every row" in ended.err


def test_texts_without_a_template_are_no_messages(tmp_path):
    source = written(tmp_path / "a.jsonl", [ROWS["conversational"]])
    for open_rows, cfg in (
        (open_prompts, DataConfig(apply_chat_template=False)),
        (open_examples, ChatsConfig(apply_chat_template=False)),
    ):
        with pytest.raises(UserError, match="apply_chat_template = False takes texts"):
            open_rows(source, "data.train", cfg, ALONE)[0]


# --------------------------------------------------------------------------------------------------
# the programs


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tiny.make(tmp_path_factory.mktemp("rows") / "model")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def common_flags(model, name, rows, output):
    given = [
        *("--policy.model", model, "--policy.dtype", "float32", "--output", output),
        *("--data.train", rows, "--num-steps", 1, "--eval.every", 0, "--tokens-per-rank", 512),
    ]
    if name == "standard":
        given += ["--data.no-apply-chat-template"]
    return given


@pytest.mark.parametrize("names", [["standard"], ["conversational", "tools", "kwargs"]])
def test_rows_of_the_page_fine_tune(model, tmp_path, names):
    rows = []
    for name in names:
        rows += copies(name, 12 // len(names))
    source = written(tmp_path / "rows.jsonl", rows)
    given = common_flags(model, names[0], source, tmp_path / "out")
    more = ["--batch-size", 4, "--data.max-tokens", 256]
    ended = fork("minirl.sft", [*given, *more], tmp_path / "log", 500)
    assert ended.code == 0, ended.err
    assert "12 distinct prompts, of which 1 are held out" in ended.err
    assert (tmp_path / "out" / "model" / "model.safetensors").exists()


@pytest.mark.parametrize("name", ["standard", "tools"])
def test_rows_of_the_page_are_prompts(model, tmp_path, name):
    rows = written(tmp_path / "rows.jsonl", [*copies(name), *copies(name, 2)])
    given = common_flags(model, name, rows, tmp_path / "out")
    more = [
        *("--rollout.prompts-per-step", 2, "--rollout.samples-per-prompt", 2),
        *("--rollout.max-tokens", 4, "--rollout.dump", "--engine.dtype", "float32"),
    ]
    ended = fork("minirl.rl", [*given, *more], tmp_path / "log", 500)
    assert ended.code == 0, ended.err
    assert "2 left out because they equal others" in ended.err
    tokenizer = tokenizer_of()
    dumped = (tmp_path / "out" / "rollouts" / "step-0-rank-0.jsonl").read_text().splitlines()
    for record in map(json.loads, dumped):
        text = tokenizer.decode(record["tokens"])
        begin = r"\d+\. The sky is" if name == "standard" else r"\[switch \]<\|user\|>\d+\. Turn"
        assert re.match(begin, text), text


# --------------------------------------------------------------------------------------------------
# tables as they are


def table(path, rows):
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def read(source, cfg, held_out=0, mark=mark_row):
    opened = open_examples(source, "data.train", cfg, ALONE)
    return read_rows(opened, ALONE, 0, held_out, mark)


def said(messages):
    return [(message["role"], message["content"]) for message in messages]


@pytest.mark.parametrize("system", [[], [{"role": "system", "content": "short"}]])
@pytest.mark.parametrize("extra", [{}, {"weight": 1.0}, {"tool_calls": None}, {"name": "a"}])
def test_a_pair_does_not_repeat_its_prompt(tmp_path, system, extra):
    """Whatever else the messages of whole chats have, and though it lacks their system's."""

    def chat_of(answer):
        turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": answer}]
        return [message | extra for message in (*system, *turns)]

    rows = [{"prompt": "q", "chosen": chat_of("a"), "rejected": chat_of("b")}] * 2
    (pair, _), _ = read(table(tmp_path / "a.parquet", rows), PairsConfig())
    assert said(pair["prompt"]) == [*said(system), ("user", "q")]
    assert said(pair["chosen"]) == [("assistant", "a")]
    assert said(pair["rejected"]) == [("assistant", "b")]


def test_a_side_that_asks_something_else_is_refused(tmp_path):
    asked = {"role": "user", "content": "another question"}
    sides = [[asked, {"role": "assistant", "content": text}] for text in ("a", "b")]
    row = {"prompt": "q", "chosen": sides[0], "rejected": sides[1]}
    with pytest.raises(UserError, match="begins by the user's message 'another question', and nei"):
        read(written(tmp_path / "a.jsonl", [row]), PairsConfig())


def test_a_margin_that_is_null_is_none(tmp_path):
    rows = [{"prompt": "q", "chosen": "a", "rejected": "b", "margin": m} for m in (1.5, None)]
    pairs, _ = read(table(tmp_path / "a.parquet", rows), PairsConfig())
    assert [pair["margin"] for pair in pairs] == [1.5, 0.0]


def test_the_time_of_a_message_is_a_text(tmp_path):
    """As WildChat has it; chats are compared, dumped and shown to judges as JSON."""
    times = [datetime(2024, 5, 1, 12, minute) for minute in range(4)]
    turns = [("user", "q"), ("assistant", "a")]
    rows = [
        {"chat": [{"role": r, "content": c, "at": time, "in": {"at": time}} for r, c in turns]}
        for time in times
    ]
    source = table(tmp_path / "a.parquet", rows)
    (row, *_), _ = read(source, ChatsConfig(messages_key="chat"))
    assert said(row["messages"]) == turns
    assert row["messages"][0]["at"] == "2024-05-01 12:00:00" == row["messages"][0]["in"]["at"]
    opened = open_prompts(source, "data.train", DataConfig(prompt_key="chat"), ALONE)
    prompts, _ = read_rows(opened, ALONE, 0)
    assert len(prompts) == 4 and json.dumps(prompts[0]["prompt"])


def test_a_saved_table_is_read_without_its_form(tmp_path):
    rows = [{"prompt": f"{n}", "answer": n} for n in range(3)]
    saved = datasets.Dataset.from_list(rows)
    saved.set_format("numpy", columns=["prompt"])
    saved.save_to_disk(tmp_path / "saved")
    opened = open_prompts(str(tmp_path / "saved"), "data.train", DataConfig(), ALONE)
    assert list(read_rows(opened, ALONE, 0)[0]) == rows


def test_an_image_of_a_table_is_no_message(tmp_path):
    data = base64.b64decode(tiny.picture(56, 56).partition(",")[2])
    rows = [{"prompt": "see", "completion": "a", "image": {"bytes": data, "path": None}}]
    (row,), _ = read(table(tmp_path / "a.parquet", rows), ChatsConfig())
    assert len(chat.images_of(row["messages"])) == 1


def test_an_answer_in_parts_is_a_text(tmp_path):
    """As the last turn of a chat is in tables of images (llava-instruct-mix)."""
    turns = [("user", [("image", None), ("text", "how many?")]), ("assistant", [("text", "two")])]
    messages = []
    for role, parts in turns:
        content = [{"index": 0, "type": kind, "text": text} for kind, text in parts]
        messages.append({"role": role, "content": content})
    data = base64.b64decode(tiny.picture(56, 56).partition(",")[2])
    rows = [{"messages": messages, "images": [{"bytes": data, "path": None}]}]
    source = table(tmp_path / "a.parquet", rows)
    (row,), _ = read_rows(open_prompts(source, "data.train", DataConfig(), ALONE), ALONE, 0)
    assert row["answer"] == "two" and len(chat.images_of(row["prompt"])) == 1


def picture_file(folder):
    path = folder / "a.png"
    path.write_bytes(base64.b64decode(tiny.picture(56, 56).partition(",")[2]))
    return str(path)


def test_whole_chats_of_a_pair_share_the_images_of_their_row(tmp_path):
    path = picture_file(tmp_path)
    place = {"type": "image"}
    asked = ["which?", [place, {"type": "text", "text": "which?"}]]
    for content in asked:
        sides = {
            side: [{"role": "user", "content": content}, {"role": "assistant", "content": side}]
            for side in ("chosen", "rejected")
        }
        rows = [sides | {"images": [path]}]
        (row,), _ = read(written(tmp_path / "a.jsonl", rows), PairsConfig())
        assert len(chat.images_of(row["prompt"])) == 1
        assert [row[side][-1]["content"] for side in sides] == list(sides)
    texts = {"chosen": "q 1", "rejected": "q 2", "images": [path]}
    with pytest.raises(UserError, match="two plain texts have no place for the row's images"):
        read(written(tmp_path / "a.jsonl", [texts]), PairsConfig())


def test_an_image_s_place_in_a_text_is_that_of_verl(tmp_path):
    path = picture_file(tmp_path)
    asked = [{"role": "user", "content": "Is <image> as <image>?"}]
    for prompt in (asked, asked[0]["content"]):
        rows = [{"prompt": prompt, "images": [path, path]}]
        opened = open_prompts(
            written(tmp_path / "a.jsonl", rows), "data.train", DataConfig(), ALONE
        )
        (row,) = read_rows(opened, ALONE, 0)[0]
        kinds = [part.get("text", "image") for part in row["prompt"][0]["content"]]
        assert kinds == ["Is ", "image", " as ", "image", "?"]


def test_one_image_needs_no_list(tmp_path):
    rows = [{"prompt": "see", "completion": "a", "picture": picture_file(tmp_path)}]
    cfg = ChatsConfig(images_key="picture")
    (row,), _ = read(written(tmp_path / "a.jsonl", rows), cfg)
    assert len(chat.images_of(row["messages"])) == 1


def test_columns_that_rl_does_not_show_are_nobody_s(tmp_path):
    """Lists of texts, and chats with calls beside a prompt that is a text."""
    called = {**ROWS["tools"]["completion"][0]}
    rows = [{"prompt": f"{n}", "rejected": ["x", None], "messages": [called]} for n in range(3)]
    opened = open_prompts(written(tmp_path / "a.jsonl", rows), "data.train", DataConfig(), ALONE)
    checks = PromptChecks(None, tokenizer_of(), DataConfig())
    train, _ = read_rows(opened, ALONE, 0, mark=checks.mark)
    assert train.first_marked(HAS_CALLS) is None and len(train) == 3


def test_what_a_held_out_row_asks_is_not_trained_on(tmp_path, capsys):
    """Unless all rows ask the same."""
    rows = [
        {"prompt": f"{n}", "completion": f"{n} {k}", "label": k % 2 == 0}
        for n in range(40)
        for k in range(4)
    ]
    train, held_out = read(written(tmp_path / "a.jsonl", rows), LabelledConfig(), 8)
    asked = {row["messages"][0]["content"] for row in held_out}
    assert len(held_out) == 8
    assert len(train) == 4 * (40 - len(asked))
    assert not asked & {row["messages"][0]["content"] for row in train}
    left_out = 4 * len(asked) - 8
    assert f"{left_out} rows ask what held-out ones ask, and are left" in capsys.readouterr().err
    alike = [row | {"prompt": "q"} for row in rows]
    train, held_out = read(written(tmp_path / "b.jsonl", alike), LabelledConfig(), 8)
    assert (len(train), len(held_out)) == (152, 8)


@pytest.mark.parametrize("label", ["1", "true", 1.0])
def test_labels_of_tables_are_taken(tmp_path, label):
    row = {"prompt": "q", "completion": "a", "label": label}
    (found,), _ = read(written(tmp_path / "a.jsonl", [row]), LabelledConfig())
    assert found["label"] is True


def test_splits_may_be_added_up(tmp_path):
    for name in ("train", "test"):
        written(tmp_path / f"{name}.jsonl", [{"prompt": name}])
    opened = open_prompts(f"{tmp_path}?split=train+test", "data.train", DataConfig(), ALONE)
    assert [row["prompt"] for row in opened] == ["train", "test"]
