"""Rows from every kind of place are the same rows; sources mixed by size or weight come in an order
of the seed and the number alone."""

import gzip
import json
import os
import tracemalloc
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from PIL import Image

from harness import ranks
from in_memory import ALONE, read_all
from minirl.base.errors import UserError
from minirl.config.parse import load_config, parse_flags
from minirl.config.rl import RLConfig
from minirl.config.shared import DataConfig, EvaluateConfig, RowsConfig
from minirl.config.supervised import ChatsConfig, PairsConfig
from minirl.config.validate import validate_templates
from minirl.data import chat
from minirl.data.examples import Chats, encode_chat
from minirl.data.formats import open_examples
from minirl.data.lengths import LengthBound, check_lengths
from minirl.data.order import WeightedOrder, read_rows
from minirl.data.prompts import Prompts, open_prompts
from minirl.data.rows import Order
from minirl.data.tokenizer import use_template
from minirl.model.scratch import make_tokenizer
from minirl.run.inputs import load_splits
from run_folders import save_config

USER, ANSWER = {"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}
SYSTEM = {"role": "system", "content": "Count."}
HUMAN, GPT = {"from": "human", "value": "1+1"}, {"from": "gpt", "value": "2"}  # ShareGPT's
ROWS = [{"prompt": f'row {i},\n"{i}"', "answer": f"00{i}", "level": str(i % 3)} for i in range(12)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def opened(source, setting="data.train", **cfg):
    source = source if isinstance(source, list) else str(source)
    return open_prompts(source, setting, DataConfig(**cfg), ALONE)


def rows_of(source, setting="data.train", **cfg):
    return read_all(opened(source, setting, **cfg))


def chats_of(source, **cfg):
    return read_all(open_examples(source, "data.train", ChatsConfig(**cfg), ALONE))


# --------------------------------------------------------------------------------------------------
# places


def test_sources_of_one_name_are_told_apart(tmp_path):
    """A benchmark's rows are often in test.jsonl, in a folder of its own."""
    places = []
    for folder in ("easy", "hard"):
        (tmp_path / folder).mkdir()
        places.append(jsonl(tmp_path / folder / "test.jsonl", [{"prompt": "p", "answer": "1"}]))
    assert [row["data_source"] for row in rows_of(places)] == places
    named = [f"{place}?name=both" for place in places]
    assert [row["data_source"] for row in rows_of(named)] == ["both"]
    generated = [f"reasoning_gym:gcd?size=2&seed={seed}" for seed in range(2)]
    assert {row["data_source"] for row in rows_of(generated)} == set(generated)


def test_a_block_is_read_whole_though_linux_reads_2_gib_at_once(tmp_path, monkeypatch):
    rows = [{"prompt": "p" * n} for n in range(1, 9)]
    source = jsonl(tmp_path / "a.jsonl", rows)
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda file, size, begin: pread(file, min(size, 20), begin))
    assert [row["prompt"] for row in rows_of(source)] == [row["prompt"] for row in rows]


def test_rows_without_a_prompt_may_hold_what_json_does_not(tmp_path):
    """An environment makes the prompts."""
    rows = [{"answer": n % 2, "when": datetime(2026, 1, 1 + n % 2, tzinfo=UTC)} for n in range(4)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    opened_rows = open_prompts(
        str(tmp_path / "a.parquet"), "data.train", DataConfig(), ALONE, env_prompts=True
    )
    assert [row["answer"] for row in read_all(opened_rows)] == [0, 1]


def written(folder, kind):
    table = datasets.Dataset.from_list(ROWS)
    if kind in ("jsonl", "json lines"):
        return jsonl(folder / f"a.{kind[:5].strip()}", ROWS)
    if kind == "json list":
        (folder / "a.json").write_text(json.dumps(ROWS, indent=1))
    elif kind == "parquet":
        table.to_parquet(folder / "a.parquet")
    elif kind == "csv":
        table.to_csv(folder / "a.csv")
    elif kind == "json lines, gz":
        (folder / "a.jsonl.gz").write_bytes(gzip.compress(LINES))
    elif kind == "json lines, zst":  # of two frames, as pzstd writes them
        frames = [zstandard.compress(LINES[:300]), zstandard.compress(LINES[300:])]
        (folder / "a.jsonl.zst").write_bytes(b"".join(frames))
    elif kind == "json list, gz":
        (folder / "a.json.gz").write_bytes(gzip.compress(json.dumps(ROWS).encode()))
    elif kind == "saved":
        table.save_to_disk(folder / "a.saved")
    else:
        datasets.DatasetDict(train=table, test=table.select([3])).save_to_disk(folder / "a.splits")
    return str(next(folder.glob("a.*"))) + ("?split=train" if kind == "splits" else "")


@pytest.mark.parametrize(
    "kind",
    [
        *("jsonl", "json lines", "json lines, gz", "json lines, zst", "json list"),
        *("json list, gz", "parquet", "csv", "saved", "splits"),
    ],
)
def test_the_same_rows_from_every_format(tmp_path, kind):
    assert list(rows_of(written(tmp_path, kind))) == ROWS


def test_a_compressed_file_is_decompressed_once_and_again_when_it_has_changed(tmp_path):
    source = tmp_path / "a.jsonl.gz"
    copies = Path(datasets.config.HF_DATASETS_CACHE) / "minirl"
    for rows in (ROWS, ROWS[:3]):
        source.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
        first = opened(source)
        times = {path: path.stat().st_mtime_ns for path in copies.glob("*.jsonl")}
        assert list(read_all(first)) == list(rows_of(source)) == rows
        assert {path: path.stat().st_mtime_ns for path in copies.glob("*.jsonl")} == times
        assert first.sources[0].name == "a"
    assert len(times) == 2


def open_gz(mesh, source, cache):
    datasets.config.HF_DATASETS_CACHE = cache
    return len(open_prompts(source, "data.train", DataConfig(), mesh))


def test_ranks_decompress_a_file_together(tmp_path):
    source = written(tmp_path, "json lines, gz")
    assert ranks(2, open_gz, source, tmp_path / "cache") == [len(ROWS)] * 2
    assert len(list((tmp_path / "cache" / "minirl").glob("*.jsonl"))) == 1


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_a_damaged_compressed_file_is_refused_and_leaves_nothing(tmp_path, kind):
    path = Path(written(tmp_path, f"json lines, {kind}"))
    whole = path.read_bytes()
    for data in (whole[:-9], b"nothing of the kind"):
        path.write_bytes(data)
        with pytest.raises(
            UserError, match=rf"a.jsonl.{kind}: not a good .{kind} file, or no room in .*again"
        ):
            rows_of(path)
    left = Path(datasets.config.HF_DATASETS_CACHE, "minirl").iterdir()
    assert {path.suffix for path in left} == {".lock"}


def test_a_bad_line_of_a_compressed_file_has_its_number(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(LINES + b"{"))
    with pytest.raises(UserError, match=r"a.jsonl.gz: line 13 is not JSON"):
        rows_of(tmp_path / "a.jsonl.gz")


def test_a_folder_of_files_and_a_hub_id_go_through_load_dataset(tmp_path, monkeypatch):
    jsonl(tmp_path / "train.jsonl", ROWS[:5])
    jsonl(tmp_path / "test.jsonl", ROWS[5:])
    assert list(rows_of(f"{tmp_path}?split=test")) == ROWS[5:]
    with pytest.raises(UserError, match=r"its splits are train, test; name one by \?split=NAME"):
        rows_of(tmp_path)
    asked = []
    monkeypatch.setattr(
        datasets,
        "load_dataset",
        lambda *args, **kwargs: asked.append((args, kwargs)) or datasets.Dataset.from_list(ROWS),
    )
    assert list(rows_of("org/name?subset=main&split=train[:12]")) == ROWS
    assert asked == [(("org/name", "main"), {"split": "train[:12]"})]


def test_csv_values_stay_the_texts_they_are(tmp_path):
    (tmp_path / "a.csv").write_text("prompt,answer\nNA,007\nnull,1.0\n")
    assert [(r["prompt"], r["answer"]) for r in rows_of(tmp_path / "a.csv")] == [
        ("NA", "007"),
        ("null", "1.0"),
    ]
    with pytest.raises(UserError, match="makes numbers, 7 of 007; name the files"):
        rows_of(tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "a.csv",
            "prompt,answer\na,b,c\n",
            "each row must have as many values as the first line has names",
        ),
        ("a.csv", "prompt,answer\na\n", "each row must have as many values"),
        ("a.parquet", "nothing of the kind", r"a.parquet cannot be read: Arrow"),
        ("a.json", "[{]", r"not a good .json file"),
        ("a.jsonl?split=train", "{}\n", "a file has no option split; it has weight and name"),
        ("a.jsonl?weight=0", "{}\n", r"weight = 0.0 is not above 0 and finite"),
        ("a.jsonl?weight=many", "{}\n", "could not convert string to float.*weight is a number"),
        ("a.jsonl?weight", "{}\n", "options are written"),
    ],
)
def test_a_source_that_cannot_be_read_is_refused(tmp_path, name, text, message):
    (tmp_path / name.partition("?")[0]).write_text(text)
    with pytest.raises(UserError, match=rf"data.train = .*{message}"):
        rows_of(tmp_path / name)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("saved?split=train", r"its splits are none; name one"),
        ("splits", "its splits are train, test"),
        ("splits?split=dev", "its splits are train, test"),
        ("splits?split=train&subset=main", "a saved folder has no subset"),
        ("splits?spilt=train", "a data set has no option spilt"),
        ("empty", "no file of rows, and as a data set it cannot be read"),
    ],
)
def test_a_folder_or_split_that_is_not_there_is_refused(tmp_path, source, message):
    for kind in ("saved", "splits"):
        (tmp_path / kind).mkdir()
    written(tmp_path / "saved", "saved")
    written(tmp_path / "splits", "splits")
    (tmp_path / "empty").mkdir()
    folder, _, query = source.partition("?")
    place = {"saved": "saved/a.saved", "splits": "splits/a.splits", "empty": "empty"}[folder]
    with pytest.raises(UserError, match=rf"data.train = .*{message}"):
        rows_of(f"{tmp_path}/{place}?{query}" if query else f"{tmp_path}/{place}")


def test_a_hub_id_that_cannot_be_loaded_is_refused():
    """The tests run offline."""
    with pytest.raises(
        UserError,
        match="data.train = no-such-org/no-such-set: no file of rows, "
        "and as a data set it cannot be read",
    ):
        rows_of("no-such-org/no-such-set")


def test_a_large_file_is_not_held_in_memory(tmp_path):
    source = jsonl(
        tmp_path / "a.jsonl", [{"prompt": str(i), "text": "x" * 10_000} for i in range(2000)]
    )
    tracemalloc.start()
    train, held_out = read_rows(opened(source), ALONE, 0, 20)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 3e6 < 2e7 < (tmp_path / "a.jsonl").stat().st_size
    assert len(train) == 1980 and len(held_out) == 20 and len(train[7]["text"]) == 10_000


def test_max_samples_takes_the_first_of_each_source(tmp_path):
    sources = [
        jsonl(tmp_path / "a.jsonl", ROWS[:5]),
        jsonl(tmp_path / "b.jsonl", ROWS[5:]) + "?name=b",
    ]
    assert [row["answer"] for row in rows_of(sources, max_samples=2)] == [
        "000",
        "001",
        "005",
        "006",
    ]
    assert len(chats_of(sources, max_samples=3, completion_key="answer")) == 6


# --------------------------------------------------------------------------------------------------
# layouts


@pytest.mark.parametrize(
    ("row", "prompt", "answer"),
    [
        ({"prompt": "q", "answer": "a"}, "q", "a"),
        ({"prompt": "q", "solution": "s"}, "q", "s"),
        ({"prompt": [USER], "solution": "s"}, [USER], "s"),
        ({"prompt": "q", "answer": "a", "solution": "s"}, "q", "a"),
        ({"prompt": "q", "completion": "c"}, "q", None),
        ({"messages": [USER, ANSWER]}, [USER], "2"),
        ({"messages": [USER, ANSWER], "solution": "s"}, [USER], "s"),
        ({"messages": [USER]}, [USER], None),
        ({"input": "q", "label": "l"}, "q", "l"),
        ({"input": "q", "output": "o"}, "q", None),
        ({"instruction": "do", "output": "o"}, "do", None),
        ({"instruction": "do", "input": "it", "output": "o"}, "do\n\nit", None),
        ({"instruction": "do", "input": ""}, "do", None),
        ({"context_messages": [USER], "label": 0}, [USER], 0),
        ({"prompt": None, "input": "q"}, "q", None),
        ({"conversations": [USER, ANSWER]}, [USER], "2"),
        ({"conversations": [HUMAN, GPT]}, [USER], "2"),
        ({"conversations": [HUMAN], "answer": "3"}, [USER], "3"),
        ({"conversations": [HUMAN, GPT], "system": "Count."}, [SYSTEM, USER], "2"),
    ],
)
def test_prompts_in_the_layouts_of_others(tmp_path, row, prompt, answer):
    (found,) = rows_of(jsonl(tmp_path / "a.jsonl", [row]))
    assert (found["prompt"], found.get("answer")) == (prompt, answer)
    changed = ("prompt", "answer", "conversations")
    assert {k: v for k, v in found.items() if k not in changed} == {
        k: v for k, v in row.items() if k not in changed
    }


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [USER, ANSWER]},
        {"prompt": "1+1", "completion": "2"},
        {"prompt": [USER], "completion": [ANSWER]},
        {"input": "1+1", "output": "2"},
        {"instruction": "1+1", "output": "2"},
        {"instruction": "1+1", "input": "", "output": "2"},
        {"context_messages": [USER], "output": "2"},
        {"conversations": [USER, ANSWER]},
        {"conversations": [HUMAN, GPT]},
        {"messages": [HUMAN, GPT]},
        {"prompt": [HUMAN], "completion": [GPT]},
    ],
)
def test_chats_in_the_layouts_of_others(tmp_path, row):
    assert list(chats_of(jsonl(tmp_path / "a.jsonl", [row]))) == [
        {"messages": [USER, ANSWER], "trained": [1]}
    ]


def test_pairs_in_sharegpt_s_layout(tmp_path):
    other = {"from": "gpt", "value": "3"}
    wrong = {"role": "assistant", "content": "3"}
    for row in (
        {"conversations": [HUMAN], "chosen": GPT, "rejected": other},
        {"chosen": [HUMAN, GPT], "rejected": [HUMAN, other]},
    ):
        source = jsonl(tmp_path / "a.jsonl", [row])
        (pair,) = read_all(open_examples(source, "data.train", PairsConfig(), ALONE))
        assert (pair["prompt"], pair["chosen"], pair["rejected"]) == ([USER], [ANSWER], [wrong])


def test_calls_of_tools_in_sharegpt_s_layout(tmp_path):
    function = {"name": "add", "arguments": {"a": 1}}
    turns = [HUMAN, {"from": "function_call", "value": json.dumps(function)}]
    turns += [{"from": "observation", "value": "2"}, GPT]
    tools = json.dumps([{"name": "add", "parameters": {}}])
    (row,) = chats_of(jsonl(tmp_path / "a.jsonl", [{"conversations": turns, "tools": tools}]))
    call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function"}]}
    call["tool_calls"][0]["function"] = function
    assert row["messages"] == [USER, call, {"role": "tool", "content": "2"}, ANSWER]
    assert row["trained"] == [1, 3]
    assert row["template_inputs"]["tools"][0]["function"]["name"] == "add"


def test_places_of_images_in_sharegpt_s_layout(tmp_path):
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    turns = [{"from": "human", "value": "<image>\nWhat?"}, GPT]
    row = {"image": str(tmp_path / "a.png"), "conversations": turns}
    (row,) = chats_of(jsonl(tmp_path / "a.jsonl", [row]))
    assert [part["type"] for part in row["messages"][0]["content"]] == ["image", "text"]


@pytest.mark.parametrize(
    ("turn", "message"),
    [
        (
            {"from": "narrator", "value": "x"},
            "message 2 is {'from': 'narrator', .*from, one of human",
        ),
        ({"from": "gpt", "value": None}, "message 2 is {'from': 'gpt', 'value': None}"),
        ({"from": "function_call", "value": "add(1)"}, "message 2 is .*tool_calls"),
    ],
)
def test_who_speaks_in_sharegpt_s_layout_is_known(tmp_path, turn, message):
    source = jsonl(tmp_path / "a.jsonl", [{"conversations": [HUMAN, turn]}])
    with pytest.raises(UserError, match=f"line 1.*{message}"):
        chats_of(source)


def test_a_name_that_was_asked_for_has_no_others(tmp_path):
    source = jsonl(tmp_path / "a.jsonl", [{"input": "q", "label": "l"}])
    with pytest.raises(
        UserError, match=r"line 1: data.prompt_key = 'question' must name .*row has input, label"
    ):
        rows_of(source, prompt_key="question")
    with pytest.raises(UserError, match=r"data.answer_key = 'gold' names a column that no row of"):
        rows_of(source, answer_key="gold")


def test_where_a_row_is_from(tmp_path):
    one = jsonl(tmp_path / "one.jsonl", [{"prompt": "a"}, {"prompt": "b", "datasource": "math"}])
    two = jsonl(tmp_path / "two.jsonl", [{"prompt": "c", "kind": 7}])
    assert [row.get("data_source") for row in rows_of(one)] == [None, "math"]
    assert [row.get("data_source") for row in rows_of([one, f"{two}?name=other"])] == [
        "one",
        "math",
        "other",
    ]
    assert [row.get("data_source") for row in rows_of([one, two], source_key="kind")] == [
        "one",
        "one",
        "7",
    ]
    levels = [{"prompt": str(n), "level": level} for n, level in enumerate((0, False, "", None))]
    found = rows_of(jsonl(tmp_path / "three.jsonl", levels), source_key="level")
    assert [row.get("data_source") for row in found] == ["0", "False", None, None]


# --------------------------------------------------------------------------------------------------
# mixing


def sources(folder, sizes, weights):
    places = []
    for name, size, weight in zip("abcdef", sizes, weights, strict=False):
        place = jsonl(folder / f"{name}.jsonl", [{"prompt": f"{name}{i}"} for i in range(size)])
        places.append(f"{place}?weight={weight}" if weight else place)
    return places


def prompts(rows, seed=0, **cfg):
    return Prompts(rows, make_tokenizer([]), DataConfig(**cfg), seed=seed)


def test_without_weights_sources_are_mixed_by_size(tmp_path):
    rows = rows_of(sources(tmp_path, [6, 3], [None, None]))
    assert type(prompts(rows).order) is Order
    assert sorted(prompts(rows).row(t)["prompt"] for t in range(9)) == sorted(
        row["prompt"] for row in rows
    )


def test_by_weight_an_epoch_has_the_shares_and_a_source_repeats_nothing_early(tmp_path):
    rows = rows_of(sources(tmp_path, [70, 20, 10], [1, 2, 0.5]))
    mixed = prompts(rows)
    assert isinstance(mixed.order, WeightedOrder)
    drawn = [mixed.row(t)["prompt"] for t in range(500)]
    for epoch in range(5):
        assert Counter(p[0] for p in drawn[100 * epoch : 100 * epoch + 100]) == {
            "a": 29,
            "b": 57,
            "c": 14,
        }  # 28.57, 57.14, 14.29
    for name, size in (("a", 70), ("b", 20), ("c", 10)):
        for epoch in range(5):
            times = Counter(p for p in drawn[: 100 * epoch + 100] if p[0] == name)
            assert (
                max(times.values()) - (min(times.values()) if len(times) == size else 0) <= 1
            )  # no row once more before all others came
    assert (
        0 < sum(p[0] == "a" for p in drawn[:50]) < 29
    )  # spread over the epoch, not one source after the other


def test_a_mixture_is_a_function_of_seed_and_number(tmp_path):
    """So 1, 2 or 4 engines that share the tickets of a step see the same prompts, and a run that
    goes on at ticket 130 goes on in the order."""
    rows = rows_of(sources(tmp_path, [30, 20], [1, 3]))
    drawn = [prompts(rows).row(t)["prompt"] for t in range(200)]
    once = prompts(rows)
    drawn_at = {
        int(t): once.row(int(t))["prompt"] for t in np.random.default_rng(0).permutation(200)
    }
    assert [drawn_at[t] for t in range(200)] == drawn
    for world in (1, 2, 4):
        ranks = [prompts(rows_of(sources(tmp_path, [30, 20], [1, 3]))) for _ in range(world)]
        for step in range(16, 20):
            tickets = range(8 * step, 8 * step + 8)
            for rank, p in enumerate(ranks):
                seen = [p.row(ticket)["prompt"] for ticket in tickets[rank::world]]
                assert seen == drawn[8 * step + rank : 8 * step + 8 : world]
    assert [prompts(rows, seed=1).row(t)["prompt"] for t in range(200)] != drawn


def test_held_out_rows_of_a_mixture_are_used_once_and_those_left_keep_their_weights(tmp_path):
    train, held_out = read_rows(opened(sources(tmp_path, [30, 20], [1, 3])), ALONE, 0, 10)
    shown = Prompts(held_out, make_tokenizer([]), DataConfig(), seed=0, shuffle=False)
    assert sorted(shown.row(t)["prompt"] for t in range(10)) == sorted(
        row["prompt"] for row in held_out
    )
    assert Counter(prompts(train).row(t)["prompt"][0] for t in range(40)) == {"a": 10, "b": 30}
    assert not {row["prompt"] for row in held_out} & {
        prompts(train).row(t)["prompt"] for t in range(80)
    }


def test_chats_are_mixed_the_same_way(tmp_path):
    texts = [
        jsonl(tmp_path / f"{c}.jsonl", [{"text": c * 3}] * size) + f"?weight={w}"
        for c, size, w in (("a", 8, 1), ("b", 2, 4))
    ]
    chats = Chats(
        chats_of(texts),
        make_tokenizer([]),
        [1],
        ChatsConfig(),
        ALONE,
        ThreadPoolExecutor(1),
        seed=0,
    )
    first = [int(t.tokens[0]) for t in chats.examples(range(10)).here]
    assert sorted(Counter(first).values()) == [2, 8]


@pytest.mark.parametrize(
    ("weights", "setting", "message"),
    [
        (
            [1, None],
            "data.train",
            r"a.jsonl\?weight=1: give a weight to every source of data.train or to none",
        ),
        ([1, 1], "data.eval", r"a.jsonl\?weight=1: .*held-out rows are all used once"),
    ],
)
def test_weights_that_mean_nothing_are_refused(tmp_path, weights, setting, message):
    with pytest.raises(UserError, match=rf"{setting} = .*{message}"):
        rows_of(sources(tmp_path, [4, 4], weights), setting)


def test_a_weight_too_small_for_one_example_is_refused(tmp_path):
    with pytest.raises(
        UserError,
        match=(
            r"b.jsonl\?weight=0.001: 0 of 8 examples by its weight, from 4 rows; raise its "
            r"weight or leave it out"
        ),
    ):
        prompts(rows_of(sources(tmp_path, [4, 4], [1, 0.001])))
    with pytest.raises(UserError, match=r"b.jsonl: no rows"):
        rows_of(sources(tmp_path, [4, 0], [None, None]))


# --------------------------------------------------------------------------------------------------
# long prompts


def drop_long(mesh, source):
    cfg = DataConfig(max_prompt_tokens=9, too_long="drop")
    bound = LengthBound(make_tokenizer([]), cfg)
    opened = open_prompts(source, "data.train", cfg, mesh)
    rows, _ = read_rows(opened, mesh, 0, mark=bound.exceeds)
    p = Prompts(rows, make_tokenizer([]), cfg, seed=0)
    return check_lengths(p, mesh, 1), [p.row(t)["prompt"] for t in range(12)]


def test_long_prompts_can_be_dropped_and_counted(tmp_path):
    source = jsonl(tmp_path / "a.jsonl", [{"prompt": "x" * n} for n in range(1, 11)])
    found = ranks(2, drop_long, source)
    assert found[0] == found[1] == ranks(1, drop_long, source)[0]
    num_dropped, drawn = found[0]
    # A token a byte, and <|user|> <|end|> <|assistant|>.
    assert num_dropped == 4 and {len(text) for text in drawn} == set(range(1, 7))
    rows = rows_of(source)
    rows.marks[:] = 1
    with pytest.raises(
        UserError,
        match=(
            "a.jsonl: all 10 prompts have more than data.max_prompt_tokens = 3 tokens; raise it"
        ),
    ):
        check_lengths(prompts(rows, max_prompt_tokens=3, too_long="drop"), ALONE, 1)


@pytest.mark.parametrize("too_long", ["error", "drop"])
def test_images_for_a_model_that_reads_none_are_refused(tmp_path, too_long):
    Image.new("RGB", (8, 8)).save(tmp_path / "x.png")
    row = {"prompt": "a", "images": [str(tmp_path / "x.png")]}
    rows = rows_of(jsonl(tmp_path / "a.jsonl", [row]))
    rows.marks[:] = 1
    with pytest.raises(UserError, match="line 1: a prompt has images, and policy.model reads none"):
        check_lengths(prompts(rows, too_long=too_long), ALONE, 1)


# --------------------------------------------------------------------------------------------------
# templates


def test_a_chat_template_from_a_file(tmp_path):
    (tmp_path / "t.jinja").write_text(
        "{% for m in messages %}[{{ m.content }}]{% endfor %}"
        "{% if messages[0].content == 'bad' %}{{ raise_exception('no') }}{% endif %}"
    )
    tokenizer = use_template(make_tokenizer([]), RowsConfig(chat_template=f"{tmp_path}/t.jinja"))
    assert tokenizer.decode(chat.encode(tokenizer, chat.render(tokenizer, [USER]))) == "[1+1]"
    with pytest.raises(UserError, match="the chat template refuses a chat: no"):
        chat.encode(tokenizer, chat.render(tokenizer, [{"role": "user", "content": "bad"}]))
    with pytest.raises(UserError, match="data.chat_template = '.*none.jinja': no such file"):
        use_template(tokenizer, RowsConfig(chat_template=f"{tmp_path}/none.jinja"))
    before = tokenizer.chat_template
    assert use_template(tokenizer, RowsConfig()).chat_template == before


def test_a_plain_template_has_the_prompt_and_then_the_answer():
    plain = "Q: \"{}\"\n{{ {% 'é' %}\nA: "
    with_bos = make_tokenizer([])
    with_bos.add_special_tokens({"bos_token": "<|user|>"})
    for tokenizer in (make_tokenizer([]), with_bos):
        tokenizer = use_template(
            tokenizer, RowsConfig(input_template=plain.replace("{{ {%", "{ {%"))
        )
        text = "Q: \"{{ 1+1 }}\"\n{ {% 'é' %}\nA: "
        ids = chat.encode(
            tokenizer, chat.render(tokenizer, [{"role": "user", "content": "{{ 1+1 }}"}])
        )
        assert ids == tokenizer(text)["input_ids"]
        ((whole, mask, _),) = encode_chat(
            tokenizer,
            [{"role": "user", "content": "{{ 1+1 }}"}, ANSWER],
            [1],
            [tokenizer.eos_token_id],
        )
        assert whole == [
            *ids,
            *tokenizer("2", add_special_tokens=False)["input_ids"],
            tokenizer.eos_token_id,
        ]
        assert mask == [False] * len(ids) + [True, True]
        for messages in ([USER, ANSWER, USER], [{"role": "system", "content": "s"}, USER]):
            with pytest.raises(
                UserError,
                match="data.input_template.* take a prompt that is one text and an answer",
            ):
                chat.encode(tokenizer, chat.render(tokenizer, messages))


# --------------------------------------------------------------------------------------------------
# settings


def test_several_sources_in_a_file_and_by_flags(tmp_path):
    (tmp_path / "c.yaml").write_text(
        "data:\n  train:\n  - a.jsonl?weight=1\n  - b.jsonl?weight=2\n  eval: c.jsonl\n"
        "reward: {function: [exact, my.py:f], weights: [1, 0.5]}\n"
    )
    cfg = load_config(RLConfig, str(tmp_path / "c.yaml"))
    assert (cfg.data.train, cfg.data.eval, cfg.reward.weights) == (
        ["a.jsonl?weight=1", "b.jsonl?weight=2"],
        "c.jsonl",
        [1.0, 0.5],
    )
    save_config(cfg, tmp_path / "again.yaml")
    assert load_config(RLConfig, str(tmp_path / "again.yaml")) == cfg
    cfg = parse_flags(
        RLConfig,
        [
            "--config",
            str(tmp_path / "c.yaml"),
            "--data.train",
            "d.jsonl",
            "--data.eval",
            "e.jsonl",
            "f.csv",
            "--reward.function",
            "exact",
        ],
    )
    assert (cfg.data.train, cfg.data.eval, cfg.reward.function) == (
        "d.jsonl",
        ["e.jsonl", "f.csv"],
        "exact",
    )
    for text, value in (("3", "3"), ("[1]", r"\[1\]"), ("null", "None")):
        (tmp_path / "bad.yaml").write_text(f"data: {{train: {text}}}")
        with pytest.raises(UserError, match=f"data.train = {value} should be a valid string"):
            load_config(RLConfig, str(tmp_path / "bad.yaml"))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"input_template": "no place"}, "data.input_template = 'no place': it must have {} once"),
        ({"input_template": "{} {}"}, "it must have {} once"),
        (
            {"input_template": "{}", "system_prompt": "s"},
            "data.system_prompt = 's', data.input_template = '{}': an input template has no place",
        ),
        (
            {"input_template": "{}", "chat_template": "f"},
            "data.chat_template = 'f', data.input_template = '{}': an input template has no place",
        ),
    ],
)
def test_data_settings_that_cannot_work_are_refused(values, message):
    with pytest.raises(UserError, match=message):
        validate_templates(DataConfig(**values))
    with pytest.raises(UserError, match=message):
        validate_templates(ChatsConfig(train="a.jsonl", **values))


def test_settings_out_of_their_bounds_are_refused():
    for name, value in (
        ("reward.retries", -1),
        ("reward.backoff-seconds", -0.5),
        ("reward.timeout-seconds", 0.0),
        ("data.max-samples", -1),
    ):
        with pytest.raises(
            UserError, match=rf"{name.replace('-', '_')} = {value} should be greater than"
        ):
            parse_flags(EvaluateConfig, [f"--{name}", str(value)])


@pytest.mark.parametrize(
    ("train", "held_out", "is_said"),
    [
        ("{}/a.jsonl", "{}/link.jsonl", True),
        (["{}/b.jsonl?weight=1", "{}/a.jsonl?weight=2"], "{}/a.jsonl", True),
        ("{}/a.jsonl", "{}/b.jsonl", False),
        ("reasoning_gym:chain_sum?size=9&seed=1", "reasoning_gym:chain_sum?size=9&seed=2", False),
    ],
)
def test_held_out_rows_that_are_trained_on_are_said(tmp_path, capfd, train, held_out, is_said):
    (tmp_path / "a.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    (tmp_path / "b.jsonl").write_text('{"prompt": "c"}\n')
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "a.jsonl")
    sources = [train] if isinstance(train, str) else train
    train = [source.format(tmp_path) for source in sources]
    cfg = DataConfig(train=train, eval=held_out.format(tmp_path))
    load_splits(open_prompts, cfg, 0, ALONE, lambda row: 0)
    said = f"data.eval and data.train both name {tmp_path}/a.jsonl: held-out scores are of rows"
    assert (said in capfd.readouterr().err) == is_said
