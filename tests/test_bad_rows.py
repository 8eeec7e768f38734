"""Rows, sources and templates that cannot be used end by one message: the place and the mend."""

import json

import datasets
import pytest

from in_memory import ALONE, read_all
from minirl.base.errors import UserError
from minirl.config.shared import DataConfig, RewardConfig, RowsConfig
from minirl.config.supervised import ChatsConfig, PairsConfig
from minirl.data import chat
from minirl.data.formats import open_examples
from minirl.data.lengths import LengthBound
from minirl.data.prompts import open_prompts
from minirl.data.tokenizer import check_template, use_template
from minirl.model.scratch import make_tokenizer
from minirl.rewards.loading import make_rewards

DEEP = "[" * 100_000 + "]" * 100_000
USER = {"role": "user", "content": "1+1?"}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 1}}}
BOT = {"role": "assistant", "content": "2"}
# What is no content of a message.
CONTENTS = {
    "null": None,
    "a number": 5,
    "a bool": True,
    "an object": {"text": "a"},
    "a list of texts": ["a", "b"],
    "a list of numbers": [1],
    "an empty list": [],
    "a part without type": [{"text": "a"}],
    "a part of another type": [{"type": "video", "video": "a.mp4"}],
    "a part whose type is a number": [{"type": 3}],
    "a text part without text": [{"type": "text"}],
    "a text part with a number": [{"type": "text", "text": 3}],
    "an image_url without url": [{"type": "image_url", "image_url": {}}],
    "an image_url that is a text": [{"type": "image_url", "image_url": "http://a"}],
    "a list in a list": [[{"type": "text", "text": "a"}]],
    "a null part": [None],
}
ROLES = {"null": None, "a number": 3, "empty": "", "a list": ["user"], "an object": {}}


def message_of(opened, tmp_path, text, cfg, name="a.jsonl"):
    """What the user is told of a file of rows."""
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError) as error:
        read_all(opened(str(tmp_path / name), "data.train", cfg, ALONE))
    return str(error.value)


@pytest.mark.parametrize("kind", CONTENTS)
@pytest.mark.parametrize("of", ["prompts", "chats", "completions", "pairs", "answers"])
def test_a_content_that_is_none(tmp_path, kind, of):
    bad = {"role": "user", "content": CONTENTS[kind]}
    answer = {"role": "assistant", "content": CONTENTS[kind]}
    opened, cfg, row = {
        "prompts": (open_prompts, DataConfig(), {"prompt": [USER, bad]}),
        "chats": (open_examples, ChatsConfig(), {"messages": [USER, bad, BOT]}),
        "completions": (open_examples, ChatsConfig(), {"prompt": "a", "completion": [answer]}),
        "pairs": (open_examples, PairsConfig(), {"prompt": [bad], "chosen": "a", "rejected": "b"}),
        "answers": (
            open_examples,
            PairsConfig(),
            {"prompt": "a", "chosen": [answer], "rejected": "b"},
        ),
    }[of]
    lines = [{"prompt": "fine", "messages": [USER, BOT], "chosen": "a", "rejected": "b"}, row]
    message = message_of(opened, tmp_path, "\n".join(map(json.dumps, lines)), cfg)
    assert "a.jsonl: line 2" in message and "message 1" in message or "message 2" in message
    assert "content" in message


@pytest.mark.parametrize("kind", ROLES)
def test_a_role_that_is_none(tmp_path, kind):
    text = json.dumps({"prompt": [{"role": ROLES[kind], "content": "a"}]})
    message = message_of(open_prompts, tmp_path, text, DataConfig())
    assert "line 1" in message and "message 1 is" in message


LINES = {
    "100,000 brackets": ('{"prompt": "a", "x": ' + DEEP + "}", "line 1 is not JSON"),
    "100,000 brackets alone": (DEEP, "line 1 is not JSON"),
    "300 levels": ('{"prompt": "a", "x": %s}' % ("[" * 300 + "]" * 300), "100 levels deep"),
    "surrogate": ('{"prompt": "a\\ud800b"}', "half of a surrogate pair"),
    "low surrogate": ('{"prompt": "a\\uDC00"}', "half of a surrogate pair"),
    "surrogate in an answer": ('{"prompt": "a", "answer": "\\ud83d"}', "surrogate"),
    "surrogate in a key": ('{"prompt": "a", "\\ud83d": 1}', "surrogate"),
    "surrogate in a message": (
        '{"prompt": [{"role": "user", "content": "\\udfff"}]}',
        "surrogate",
    ),
    "5,000 digits": ('{"prompt": "a", "n": %s}' % ("9" * 5000), "line 1 is not JSON"),
    "a list": ("[1]", "must be an object"),
    "a text": ('"a"', "must be an object"),
    "a number": ("3", "must be an object"),
    "null": ("null", "must be an object"),
    "NaN": ("NaN", "must be an object"),
    "two objects": ('{"prompt": "a"}{"prompt": "b"}', "line 1 is not JSON"),
    "quotes of Python": ("{'prompt': 'a'}", "line 1 is not JSON"),
    "cut": ('{"prompt": "a', "line 1 is not JSON"),
    "line feed in a text": ('{"prompt": "a\nb"}', "line 1 is not JSON"),
    "byte order mark": ('\ufeff{"prompt": "a"}', "BOM"),
    "prompt is null": ('{"prompt": null}', "data.prompt_key = 'prompt' must name a text"),
    "prompt is a number": ('{"prompt": 3}', "must name a text"),
    "prompt is an object": ('{"prompt": {"a": 1}}', "must name a text"),
    "prompt is a list of texts": ('{"prompt": ["a"]}', "message 1 is"),
    "prompt is a list of lists": ('{"prompt": [[]]}', "message 1 is"),
    "message without role": (
        '{"prompt": [{"content": "a"}]}',
        "a message has a role",
    ),
    "the assistant alone": (
        '{"messages": [{"role": "assistant", "content": "a"}]}',
        "must name a text",
    ),
    "image that is not there": ('{"prompt": "a", "images": ["/no.png"]}', "cannot be read"),
    "image with a zero byte": ('{"prompt": "a", "images": ["a\\u0000b"]}', "cannot be read"),
    "image with a long name": ('{"prompt": "a", "images": ["%s"]}' % ("x" * 300), "be read"),
    "image that is a folder": ('{"prompt": "a", "images": ["/"]}', "cannot be read"),
    "image that is a number": ('{"prompt": "a", "images": [3]}', "an image is a path"),
    "image that is no data": ('{"prompt": "a", "images": ["data:,"]}', "cannot be read"),
    "images that are not base64": (
        '{"prompt": "a", "images": ["data:image/png;base64,???"]}',
        "cannot be read",
    ),
    "place without image": (
        '{"prompt": [{"role": "user", "content": [{"type": "image"}]}]}',
        "places for 1 images came with 0",
    ),
}


@pytest.mark.parametrize("name", LINES)
def test_a_line_that_is_no_prompt(tmp_path, name):
    line, message = LINES[name]
    told = message_of(open_prompts, tmp_path, line + "\n", DataConfig())
    assert message in told and "line 1" in told and len(told) < 1000


def test_odd_rows_that_are_fine(tmp_path):
    lines = [
        {"prompt": "\U0001f600 \u2028"},
        {"prompt": [{"role": "user", "content": ""}]},
        {"prompt": [{"role": "user", "content": [{"type": "text", "text": "a", "image": None}]}]},
        {"prompt": [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}]},
        {"prompt": "a", "deep": json.loads("[" * 90 + "]" * 90), "wide": [[]] * 1000},
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))  # escapes all of Unicode
    rows = read_all(open_prompts(str(tmp_path / "a.jsonl"), "data.train", DataConfig(), ALONE))
    lines[3]["prompt"][1]["content"] = ""  # For templates that join it to a text.
    assert [row["prompt"] for row in rows] == [line["prompt"] for line in lines]


# --------------------------------------------------------------------------------------------------
# columns and answers


def test_a_wrong_name_of_the_answer_is_not_ignored(tmp_path):
    text = '{"prompt": "a", "answer": "b"}'
    told = message_of(open_prompts, tmp_path, text, DataConfig(answer_key="gold"))
    assert "line 1: data.answer_key = 'gold' must name a column, and the row has" in told
    text = '{"prompt": "a", "chosen": "b", "rejected": "c", "margin": 3.0}'
    told = message_of(open_examples, tmp_path, text, PairsConfig(margin_key="by"))
    assert "line 1: data.margin_key = 'by' must name a column" in told


ANSWERS = [["4"], [], {"value": "4"}, float("nan"), float("inf"), True, None]


@pytest.mark.parametrize("answer", ANSWERS, ids=repr)
@pytest.mark.parametrize("function", ["exact", "final_answer", "math_verify"])
def test_an_answer_that_nothing_equals(function, answer):
    rewards = make_rewards(RewardConfig(function=function))
    with pytest.raises(UserError, match=f"reward.function = {function} compares .*data.answer_key"):
        rewards.check_row({"prompt": "2+2", "answer": answer})
    for fine in ("4", 4, 4.5, ""):
        rewards.check_row({"prompt": "2+2", "answer": fine})


@pytest.mark.parametrize("metadata", [None, 3, "source_dataset", [], {}, {"source_dataset": 3}])
def test_metadata_that_names_no_generator(metadata):
    rewards = make_rewards(RewardConfig(function="reasoning_gym"))
    with pytest.raises(UserError, match="needs rows with metadata.source_dataset"):
        rewards.check_row({"prompt": "a", "metadata": metadata})


def test_a_reward_function_that_changes_its_row(tmp_path):
    (tmp_path / "r.py").write_text(
        "def f(prompt, completion, row):\n"
        "    row['answer'] = completion\n    row['deep']['x'].append(1)\n"
        "    if isinstance(prompt, list):\n        prompt.clear()\n"
        "    return float(len(row['deep']['x']))\n"
    )
    rewards = make_rewards(RewardConfig(function=[f"{tmp_path}/r.py:f", "exact"]))
    row = {"prompt": [USER], "answer": "4", "deep": {"x": []}}
    info: dict = {}
    for _ in range(2):
        rewards(row, "5", info)
        assert list(info["rewards"].values()) == [1.0, 0.0]
    assert row == {"prompt": [USER], "answer": "4", "deep": {"x": []}}


def test_margins_that_are_no_numbers(tmp_path):
    for margin in ("1", True, [1], {}, float("nan"), float("inf")):
        row = {"prompt": "a", "chosen": "b", "rejected": "c", "margin": margin}
        told = message_of(open_examples, tmp_path, json.dumps(row), PairsConfig())
        assert "line 1: data.margin_key = 'margin' must name a finite number" in told


PAIRS = {
    "no chosen": {"prompt": "a", "rejected": "b"},
    "no rejected": {"prompt": "a", "chosen": "b"},
    "empty chosen": {"prompt": "a", "chosen": " ", "rejected": "b"},
    "chosen is a number": {"prompt": "a", "chosen": 3, "rejected": "b"},
    "chosen is a list of texts": {"prompt": "a", "chosen": ["b"], "rejected": "c"},
    "a text and messages": {"prompt": "a", "chosen": "b", "rejected": [BOT]},
    "prompt is a number": {"prompt": 3, "chosen": "b", "rejected": "c"},
    "answers of the user": {"prompt": "a", "chosen": [USER], "rejected": [USER]},
    "nothing shared": {"chosen": [BOT], "rejected": [BOT]},
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_row_that_is_no_pair(tmp_path, name):
    told = message_of(open_examples, tmp_path, json.dumps(PAIRS[name]), PairsConfig())
    assert told.startswith("data.train = ") and "a.jsonl: line 1" in told


CHATS = {
    "nothing": {"question": "a"},
    "text is a number": {"text": 3},
    "messages is a text": {"messages": "a"},
    "messages is empty": {"messages": []},
    "messages is an object": {"messages": {"role": "user", "content": "a"}},
    "content list of texts": {"messages": [USER, {"role": "assistant", "content": ["a"]}]},
    "no assistant": {"messages": [USER]},
    "the assistant first": {"messages": [BOT, USER]},
    "no completion": {"prompt": "a"},
    "completion is an object": {"prompt": "a", "completion": {"a": 1}},
    "completion is a list of texts": {"prompt": "a", "completion": ["b"]},
    "completion is empty": {"prompt": "a", "completion": []},
    "prompt is a number": {"prompt": 3, "completion": "b"},
}


@pytest.mark.parametrize("name", CHATS)
def test_a_row_that_is_no_chat(tmp_path, name):
    told = message_of(open_examples, tmp_path, json.dumps(CHATS[name]), ChatsConfig())
    assert told.startswith("data.train = ") and "a.jsonl: line 1" in told


# --------------------------------------------------------------------------------------------------
# sources


SOURCES = {
    "name twice": ("a.csv", "prompt,answer,prompt\na,b,c\n", "each of them once"),
    "quote without end": ("a.csv", 'prompt\n"a', "not a good .csv file"),
    "list of nothing": ("a.json", "[]", "no rows"),
    "deep list": ("a.json", DEEP, "100 levels deep"),
    "cut list": ("a.json", '[{"prompt": "a"}', "not a good .json file"),
    "surrogate": ("a.json", '[{"prompt": "\\ud800"}]', "surrogate"),
    "list of texts": ("a.json", '["a"]', "must be an object"),
    "list of numbers": ("a.json", "[1, 2]", "must be an object"),
    "empty parquet": ("a.parquet", "", "a.parquet cannot be read: Arrow"),
    "no parquet": ("a.parquet", "PAR1nothingPAR1", "a.parquet cannot be read: Arrow"),
    "empty csv": ("a.csv", "", "no rows"),
    "head alone": ("a.csv", "prompt,answer\n", "no rows"),
    "other columns": ("a.csv", "q,a\n1,2\n", "data.prompt_key"),
    "only blank lines": ("a.jsonl", "\n \n\t\n", "no rows"),
}


def test_a_parquet_file_without_rows(tmp_path):
    file = tmp_path / "a.parquet"
    datasets.Dataset.from_dict({"prompt": ["a"]}).select([]).to_parquet(str(file))
    with pytest.raises(UserError, match=r"^data.train = .*a.parquet: no rows"):
        read_all(open_prompts(str(file), "data.train", DataConfig(), ALONE))


@pytest.mark.parametrize("name", SOURCES)
def test_a_file_that_is_no_source(tmp_path, name):
    file, text, message = SOURCES[name]
    told = message_of(open_prompts, tmp_path, text, DataConfig(), file)
    assert message in told and told.startswith("data.train = ") and len(told) < 1000


PLACES = [
    "/nowhere/a.jsonl",
    "x" * 300 + ".jsonl",
    "/dev/null",
    "",
    "?weight=1",
    "reasoning_gym:",
    "reasoning_gym:chain_sum?size=-1",
    "reasoning_gym:chain_sum?size=0",
    "reasoning_gym:chain_sum?size=many",
    "reasoning_gym:chain_sum?min_terms=9&max_terms=2",
    "reasoning_gym:chain_sum?colour=red",
    "reasoning_gym:chain_sum?weight=nan",
    "reasoning_gym:chain_sum?weight=-1",
    "reasoning_gym:chain_sum?weight=inf",
    "reasoning_gym:chain_sum?size",
]


@pytest.mark.parametrize("place", PLACES)
def test_a_place_without_rows(place):
    with pytest.raises(UserError, match="^data.train = "):
        read_all(open_prompts(place, "data.train", DataConfig(), ALONE))


def test_a_saved_folder_that_is_damaged(tmp_path):
    for name, text in (("state.json", "{}"), ("state.json", "{"), ("dataset_dict.json", "[]")):
        folder = tmp_path / f"{name}{len(text)}"
        folder.mkdir()
        (folder / name).write_text(text)
        with pytest.raises(UserError, match="^data.train = .*as a data set it cannot be read"):
            read_all(open_prompts(str(folder), "data.train", DataConfig(), ALONE))


# --------------------------------------------------------------------------------------------------
# templates

TEMPLATES = {
    "division by zero": ("{{ 1 / 0 }}", "refuses a chat: ZeroDivisionError"),
    "a large power": ("{{ 10.0 ** 1000 }}", "refuses a chat: OverflowError"),
    "a large range": ("{% for i in range(10**9) %}{% endfor %}", "refuses a chat: OverflowError"),
    "no method": ("{{ messages.rows() }}", "refuses a chat"),
    "no key": ("{{ messages[9].content }}", "refuses a chat"),
    "no index": ("{{ [][3].x }}", "refuses a chat"),
    "null": ("{{ 'a' + none }}", "refuses a chat: TypeError"),
    "syntax": ("{% for m in messages %}", "refuses a chat"),
    "unknown tag": ("{% while true %}", "refuses a chat"),
    "unknown filter": ("{{ messages | shout }}", "refuses a chat"),
    "raises": ("{{ raise_exception('no') }}", "refuses a chat: no"),
    "nothing": ("", "renders nothing"),
    "nothing for this": ("{% if messages|length > 5 %}a{% endif %}", "renders nothing"),
    "deep": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "refuses a chat: RecursionError"),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_that_fails(tmp_path, name):
    text, message = TEMPLATES[name]
    (tmp_path / "t.jinja").write_text(text)
    cfg = DataConfig(chat_template=str(tmp_path / "t.jinja"))
    tokenizer = use_template(make_tokenizer([]), cfg)
    with pytest.raises(UserError, match=f"the chat template {message}.*data.chat_template"):
        chat.render(tokenizer, [USER])
    if text:  # one that is empty counts as none
        LengthBound(tokenizer, cfg)


@pytest.mark.parametrize(
    "text",
    [
        "hello",
        "{% for m in messages %}{{ m.role }}{% endfor %}",
        "{{ messages[0].content[0] }}",
        "{{ messages[0].content | length }}",
        "{{ bos_token }}",
        "{% for m in messages if m.role == 'human' %}{{ m.content }}{% endfor %}.",
        "{{ messages[0].contents }}.",
    ],
)
def test_a_template_that_leaves_out_the_prompt(tmp_path, text):
    (tmp_path / "t.jinja").write_text(text)
    cfg = RowsConfig(chat_template=str(tmp_path / "t.jinja"))
    tokenizer = use_template(make_tokenizer([]), cfg)
    tokenizer.bos_token = "<|pad|>"
    with pytest.raises(UserError, match="data.chat_template = f leaves out the prompt"):
        check_template(tokenizer, "data.chat_template = f")


def text_part(text):
    return {"type": "text", "text": text}


PARTS = (
    "{% for part in m.content %}{% if part.type == 'image' %}<image>{% else %}{{ part.text }}"
    "{% endif %}{% endfor %}"
)
EITHER = "{% if m.content is string %}{{ m.content }}{% else %}" + PARTS + "{% endif %}"


def test_templates_that_take_the_prompt_in_one_form():
    tokenizer = make_tokenizer([])
    for template in (
        "{{ messages[0].content | trim }}",
        "{% for part in messages[0].content %}{{ part.text }}{% endfor %}.",
        "{% if messages[0].role != 'system' %}{{ raise_exception('system first') }}{% endif %}",
    ):
        tokenizer.chat_template = template
        check_template(tokenizer, "")


@pytest.mark.parametrize(
    "content", ["yes", [{"type": "text", "text": "y"}, {"type": "text", "text": "es"}]]
)
@pytest.mark.parametrize(
    "shows",
    ["{{ m.content }}", "{% if m.content is string %}{{ m.content }}{% endif %}", PARTS, EITHER],
)
def test_a_text_has_the_form_that_its_template_shows(content, shows):
    """Qwen3's template leaves parts out, Llama 3's shows Python's form of them."""
    tokenizer = make_tokenizer([])
    tokenizer.chat_template = f"{{% for m in messages %}}{{{{ m.role }}}}: {shows};{{% endfor %}}"
    messages = [{"role": role, "content": content} for role in ("system", "user", "tool")]
    assert chat.render(tokenizer, messages) == "system: yes;user: yes;tool: yes;"
    picture = {"type": "image", "image": "data:", "text": "a cat"}
    seen = [{"role": "user", "content": [picture, {"type": "text", "text": "yes"}]}]
    if shows in (PARTS, EITHER):
        assert chat.render(tokenizer, seen) == "user: <image>yes;"


@pytest.mark.parametrize("text", [b"\xff\xfe", "é".encode("latin-1"), "{{ 1 }}".encode("utf-16")])
def test_a_template_that_is_no_text(tmp_path, text):
    (tmp_path / "t.jinja").write_bytes(text)
    with pytest.raises(UserError, match="data.chat_template = .* is not UTF-8 text"):
        use_template(make_tokenizer([]), RowsConfig(chat_template=f"{tmp_path}/t.jinja"))


def test_half_of_a_surrogate_pair_is_no_text():
    for text in ("a\ud800", "\udfff"):
        with pytest.raises(UserError, match="half of a surrogate pair"):
            chat.encode(make_tokenizer([]), text)
