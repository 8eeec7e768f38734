"""Rows that several ranks read, each its share: the same rows, split and order as an obvious twin
finds alone; one clear error on all ranks; costs that grow as the rows do."""

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from unittest import mock

import numpy as np
import pytest

import tiny
from harness import RankFailed, ranks
from in_memory import ALONE, memory_rows
from minirl.base.errors import UserError
from minirl.config.rl import RLConfig
from minirl.config.shared import DataConfig, RewardConfig
from minirl.config.supervised import ChatsConfig
from minirl.data.chat import encode, render
from minirl.data.examples import Chats
from minirl.data.formats import open_examples
from minirl.data.lengths import LengthBound, check_lengths
from minirl.data.order import DIGEST, Curriculum, choose, read_rows
from minirl.data.prompts import Prompts, open_prompts
from minirl.data.rows import Order
from minirl.data.sources import JsonLines
from minirl.model.scratch import make_tokenizer
from minirl.parallel.machines import errors_of_all
from minirl.rewards.loading import make_rewards
from minirl.run.inputs import NO_ANSWER, UNGRADED, PromptChecks, check_same_rows
from minirl.run.metrics import Progress


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


# --------------------------------------------------------------------------------------------------
# the obvious twins


def twin_lines(data: bytes) -> list[tuple[int, object]]:
    """(number, value) of every line that is not blank."""
    lines = enumerate(data.split(b"\n"), start=1)
    return [(number, json.loads(line)) for number, line in lines if line.strip()]


def twin_split(rows: list[dict], held_out: int, seed: int, distinct: bool):
    """Numbers of the rows to train on, and of the held-out ones. Equal rows are equal JSON."""
    prompts = []
    names = []
    for row in rows:
        prompt = hashlib.sha256(f"{seed} {json.dumps(row.get('prompt') or row)}".encode())
        prompts.append(prompt.digest()[:8])
        rest = json.dumps({key: row[key] for key in row if key != "prompt"})
        prompt.update(rest.encode() if row.get("prompt") else b"")
        names.append(prompt.digest()[:8])
    chosen = sorted(set(prompts))[:held_out]
    seen = set()
    train = []
    for number, name in enumerate(zip(prompts, names, strict=True)):
        if name[0] not in chosen and not (distinct and name in seen):
            train.append(number)
        seen.add(name)
    held = []
    for prompt in chosen:
        numbers = [number for number, other in enumerate(prompts) if other == prompt]
        if distinct:
            held.append(min(numbers, key=lambda number: (names[number], number)))
        else:
            held.append(numbers[-1])
    return train, held


# --------------------------------------------------------------------------------------------------
# the index

FILES = {
    "plain": b'{"a": 1}\n{"a": 2}\n{"a": 3}\n',
    "no line feed at the end": b'{"a": 1}\n\n{"a": 2}',
    "blank lines": b'\n \n{"a": 1}\n\r\n\t \n  {"a": 2}  \r\n\x0b\x0c\n{"a": 3}\n\n\n',
    "one line": b"7",
    "separators in a text": '["a\u2028b\x85c"]\n[2]\n'.encode(),
    "empty": b"",
    "blank": b"\n  \n",
}


def indexed(mesh, path):
    lines = JsonLines(path.open("rb"), "x", mesh)
    numbers = [int(lines.where(i).removeprefix("x: line ")) for i in range(len(lines))]
    assert list(lines) == (lines.read(0, len(lines)) if len(lines) else [])
    return list(zip(numbers, lines, strict=True))


def all_indexed(mesh, paths):
    return [indexed(mesh, path) for path in paths]


def test_ranks_find_the_lines_that_one_finds(tmp_path):
    paths = []
    for name, data in FILES.items():
        paths.append(tmp_path / name)
        paths[-1].write_bytes(data)
    wanted = [twin_lines(data) for data in FILES.values()]
    assert [indexed(None, path) for path in paths] == wanted
    for world in (2, 4):
        assert ranks(world, all_indexed, paths) == [wanted] * world


def sized(mesh, folder):
    path = folder / f"{mesh.rank}.jsonl"
    path.write_bytes(b"1\n" * (1 + mesh.rank))
    JsonLines(path.open("rb"), "data.train = a.jsonl", mesh)


def test_ranks_that_see_other_files_are_told(tmp_path):
    with pytest.raises(RankFailed, match="a.jsonl: the ranks see files of 2 to 4 bytes; give all"):
        ranks(2, sized, tmp_path)


# --------------------------------------------------------------------------------------------------
# reading and splitting


def prompts_with_repeats(num: int) -> list[dict]:
    rows = []
    for n in range(num):
        prompt = f"row {n % (num - num // 4)} \u00e9"
        if n % 5 == 0:
            prompt = [{"role": "user", "content": prompt}]
        rows.append({"prompt": prompt, "n": n})
        if n % 3:
            rows[-1]["answer"] = str(n)
    return rows


def read_by(mesh, sources, held_out):
    """Rows to train on, held-out rows and what is noted of them, and the order of training."""
    cfg = DataConfig(max_prompt_tokens=12)
    checks = PromptChecks(make_rewards(RewardConfig(function="exact")), make_tokenizer([]), cfg)
    opened = open_prompts(sources, "data.train", cfg, mesh)
    found = []
    for rows in read_rows(opened, mesh, 3, held_out, checks.mark):
        found.append(([row["n"] for row in rows], rows.marks.tolist()))
    train, _ = read_rows(opened, mesh, 3, held_out)
    prompts = Prompts(train, make_tokenizer([]), cfg, seed=5)
    return found, [prompts.row(ticket)["n"] for ticket in range(2 * len(train))]


def test_ranks_split_as_the_twin_does(tmp_path):
    rows = prompts_with_repeats(203)
    sources = [jsonl(tmp_path / "a.jsonl", rows[:150]), jsonl(tmp_path / "b.jsonl", rows[150:])]
    results = []
    for world in (1, 2, 4):
        results += ranks(world, read_by, sources, 9)
    assert all(found == results[0] for found in results)
    ((train, train_marks), (held_out, _)), drawn = results[0]
    opened = open_prompts(sources, "data.train", DataConfig(), ALONE)
    assert (train, held_out) == twin_split(list(opened.read(0, len(rows))), 9, 3, distinct=True)
    assert len(train) + len(held_out) < len(rows)
    for number, marks in zip(train, train_marks, strict=True):
        has_answer = "answer" in rows[number]
        assert (marks & (NO_ANSWER | UNGRADED) == 0) == has_answer
    order = Order(len(train), seed=5, shuffle=True)
    assert drawn == [train[order[ticket]] for ticket in range(2 * len(train))]


@pytest.mark.parametrize("distinct", [True, False])
@pytest.mark.parametrize("held_out", [1, 7, 29])
def test_digests_split_as_the_twin_does(distinct, held_out):
    rows = [{"prompt": str(n % 30), "n": n} for n in range(100)]
    train, held = read_rows(memory_rows(rows, distinct), ALONE, 4, held_out)
    found = ([row["n"] for row in train], [row["n"] for row in held])
    assert found == twin_split(rows, held_out, 4, distinct)


def test_digests_that_begin_alike_are_told_apart():
    digests = np.zeros(4, DIGEST)
    digests["prompt"] = [2, 1, 2, 1]
    is_trained, held_out, num_doubles = choose(digests, 1, distinct=True)
    assert (np.flatnonzero(is_trained).tolist(), held_out.tolist(), num_doubles) == ([0], [1], 2)
    is_trained, held_out, _ = choose(digests, 1, distinct=False)
    assert (np.flatnonzero(is_trained).tolist(), held_out.tolist()) == ([0, 2], [3])
    digests["row"] = [1, 2, 2, 1]  # of one prompt two rows
    is_trained, held_out, num_doubles = choose(digests, 1, distinct=True)
    assert (np.flatnonzero(is_trained).tolist(), held_out.tolist(), num_doubles) == ([0, 2], [3], 0)


def bad_on(mesh, source):
    opened = open_prompts(source, "data.train", DataConfig(), mesh)
    try:
        read_rows(opened, mesh, 0, 2)
    except UserError as error:
        return str(error)


def test_the_first_bad_row_is_told_by_every_rank(tmp_path):
    rows = [{"prompt": f"row {n}"} for n in range(40)]
    rows[33] = {"question": "?"}
    rows[38] = ["no object"]
    source = jsonl(tmp_path / "a.jsonl", rows)
    for world in (1, 3):
        told = ranks(world, bad_on, source)
        assert len(set(told)) == 1 and "a.jsonl: line 34: data.prompt_key = 'prompt'" in told[0]


def raise_on_some(mesh):
    with errors_of_all(mesh):
        if mesh.rank % 2:
            raise UserError(f"rank {mesh.rank} cannot")


def test_an_error_of_one_rank_is_one_of_all():
    for world in (2, 4):
        with pytest.raises(RankFailed, match="rank 1 cannot"):
            ranks(world, raise_on_some)


def gathered(mesh, shapes, num_bytes):
    parts = [np.full(shape, mesh.rank, np.int32) for shape in shapes[mesh.rank]]
    with mock.patch("minirl.parallel.mesh.GATHERED_BYTES", num_bytes):
        return [mesh.gather_array(part) for part in parts]


@pytest.mark.parametrize("num_bytes", [1, 30, 2**24])
def test_arrays_of_all_ranks_come_end_to_end(num_bytes):
    shapes = [[(3,), (0, 2), (0,)], [(1,), (4, 2), (0,)], [(2,), (1, 2), (0,)]]
    for arrays in ranks(3, gathered, shapes, num_bytes):
        assert arrays[0].tolist() == [0, 0, 0, 1, 2, 2]
        assert arrays[1].tolist() == [[1, 1]] * 4 + [[2, 2]]
        assert len(arrays[2]) == 0


# --------------------------------------------------------------------------------------------------
# lengths

TEMPLATES = {
    "constant": "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}<|assistant|>",
    "trims": "{% for m in messages %}{{ m.content | trim }}.{% endfor %}",
    "repeats": "{% for m in messages %}{{ m.content + m.content }}{% endfor %}",
    "refuses": "{{ raise_exception('no') }}",
}


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("system", ["", "be brief"])
def test_a_prompt_has_no_more_tokens_than_its_bound(template, system):
    tokenizer = make_tokenizer([])
    tokenizer.chat_template = TEMPLATES[template]
    texts = ["a", "  spaces  ", "x" * 40, "caf\u00e9 \u2028 \u5b57" * 3]
    chat_rows = [[{"role": "user", "content": t}, {"role": "tool", "content": t}] for t in texts]
    for limit in (8, 20, 60, 200):
        bound = LengthBound(tokenizer, DataConfig(system_prompt=system, max_prompt_tokens=limit))
        for prompt in [*texts, *chat_rows]:
            messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
            if system:
                messages = [{"role": "system", "content": system}, *messages]
            if template in ("repeats", "refuses"):
                assert bound.exceeds({"prompt": prompt})
            elif not bound.exceeds({"prompt": prompt}):
                assert len(encode(tokenizer, render(tokenizer, messages))) <= limit
    generous = DataConfig(system_prompt=system, max_prompt_tokens=120)
    known = [not LengthBound(tokenizer, generous).exceeds({"prompt": p}) for p in texts[:3]]
    assert all(known) == (template in ("constant", "trims"))
    image = [{"role": "user", "content": [{"type": "image", "image": "data:"}]}]
    assert LengthBound(tokenizer, generous).exceeds({"prompt": image})


def test_rows_that_a_run_does_not_draw_are_not_encoded():
    rows = memory_rows([{"prompt": str(n)} for n in range(50)])
    rows.marks[:] = 1
    cfg = DataConfig(max_prompt_tokens=100)
    prompts = Prompts(rows, make_tokenizer([]), cfg, seed=1)
    encoded = []
    prompts.encode = lambda row: encoded.append(row["prompt"]) or []
    assert check_lengths(prompts, ALONE, 1, num_tickets=10) == 0
    assert sorted(encoded) == sorted(prompts.row(ticket)["prompt"] for ticket in range(10))
    check_lengths(prompts, ALONE, 1)
    assert len(encoded) == 10 + 50


# --------------------------------------------------------------------------------------------------
# chats, encoded ahead


def chats_of(mesh, rows, max_tokens=64):
    thread = ThreadPoolExecutor(1)
    cfg = ChatsConfig(max_tokens=max_tokens)
    return Chats(rows, make_tokenizer([]), [1], cfg, mesh, thread, seed=2)


def steps_of(mesh, first, kept_bytes):
    """Examples of the steps from one on, on all ranks; few encoded rows are kept."""
    rows = memory_rows([{"text": chr(97 + n) * (n + 1)} for n in range(11)])
    chats = chats_of(mesh, rows)
    chats.KEPT_BYTES = kept_bytes
    steps = []
    for step in range(first, 6):
        taken = chats.examples(range(4 * step, 4 * step + 4))
        here = [(t.group, t.tokens.tolist()) for t in taken.here]
        steps.append((sorted(sum(mesh.gather(here), [])), taken.num_rows, taken.num_tokens))
    return steps


def test_steps_are_the_twin_s_for_any_number_of_ranks_and_from_any_step():
    order = Order(11, seed=2, shuffle=True)
    twin = []
    for step in range(6):
        texts = [chr(97 + order[n]) * (order[n] + 1) for n in range(4 * step, 4 * step + 4)]
        tokens = [[*make_tokenizer([])(text)["input_ids"], 1] for text in texts]
        numbered = list(zip(range(4 * step, 4 * step + 4), tokens, strict=True))
        twin.append((numbered, 4, sum(map(len, tokens))))
    for world in (1, 2, 4):
        assert ranks(world, steps_of, 0, 2**20) == [twin] * world
    assert ranks(2, steps_of, 3, 2500) == [twin[3:]] * 2


def test_only_the_rows_of_a_step_and_the_next_are_encoded():
    rows = memory_rows([{"text": str(n)} for n in range(100)])
    chats = chats_of(ALONE, rows)
    chats.examples(range(8))
    chats.thread.shutdown()  # after what was begun
    order = chats.order.rows(0, 16).tolist()
    # Row 0 shows at the start that not all are dropped.
    assert set(chats.kept) == {0, *order}


def fail_at_a_row(mesh, source):
    rows, _ = read_rows(open_examples(source, "data.train", ChatsConfig(), mesh), mesh, 0)
    chats = chats_of(mesh, rows)
    told = None
    for step in range(10):
        try:
            chats.examples(range(2 * step, 2 * step + 2))
        except UserError as error:
            told = str(error)
            break
    return step, told


def test_a_row_that_cannot_be_encoded_is_told_by_every_rank_at_its_step(tmp_path):
    """Here one with an image, for a model that reads none."""
    chats = [[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]] * 20
    picture = {"type": "image", "image": tiny.picture(56, 56)}
    chats[13] = [{"role": "user", "content": [picture]}, chats[0][1]]
    source = jsonl(tmp_path / "a.jsonl", [{"messages": messages} for messages in chats])
    place = Order(20, seed=2, shuffle=True).rows(0, 20).tolist().index(13)
    for world in (1, 2):
        for step, told in ranks(world, fail_at_a_row, source):
            assert step == place // 2
            assert "a.jsonl: line 14: a chat has images, and policy.model reads none" in told


def test_a_step_whose_rows_are_all_dropped_has_none():
    rows = memory_rows([{"text": "good"}, {"text": ""}, {"text": ""}])
    chats = chats_of(ALONE, rows)
    taken = [chats.examples(range(n, n + 1)) for n in range(3)]
    assert sorted(step.num_rows for step in taken) == [0, 0, 1]
    assert sorted(step.num_lost for step in taken) == [[0, 0], [0, 1], [0, 1]]


# --------------------------------------------------------------------------------------------------
# order and curriculum


def test_a_stretch_of_the_order_is_its_rows_one_by_one():
    for shuffle in (True, False):
        one, all_at_once = (Order(7, seed=1, shuffle=shuffle) for _ in range(2))
        for first, last in ((0, 3), (5, 23), (6, 7), (4, 4)):
            wanted = [one[n] for n in range(first, last)]
            assert all_at_once.rows(first, last).tolist() == wanted


def test_a_resumed_run_knows_its_rows(tmp_path, capfd):
    """By their number, their order and what they hold; a file may have been written again."""
    train = [{"prompt": f"p{n}"} for n in range(300)]
    held_out = [{"prompt": f"h{n}"} for n in range(8)]
    cfg = RLConfig(output=str(tmp_path), resume=True)
    check = partial(check_same_rows, cfg, ALONE, "300 prompts")
    hashes = check(train, held_out)
    checkpoint = tmp_path / "checkpoints/step-2"
    checkpoint.mkdir(parents=True)
    progress = asdict(Progress(data="300 old prompts", rows=hashes, outcomes="some"))
    (checkpoint / "progress.json").write_text(json.dumps({"progress": progress}))
    (tmp_path / "checkpoints/step-4").mkdir()
    (tmp_path / "checkpoints/step-4/progress.json").write_text("damaged")

    assert check(train, held_out, by_outcomes=True) == hashes and capfd.readouterr().err == ""
    for other in (train[:-1], train[::-1], [*train[:-1], {"prompt": "new"}]):
        assert check(other, held_out) != hashes
        said = capfd.readouterr().err
        assert "other data than before (300 old prompts): its rows come in another ord" in said
        assert "held out" not in said
        with pytest.raises(UserError, match="the outcomes of the old ones; resume with the same"):
            check(other, held_out, by_outcomes=True)
    check(train, held_out[1:])
    assert "other ones are held out, which may have been trained on" in capfd.readouterr().err
    cfg.resume = False
    check(train[:-1], held_out)
    assert capfd.readouterr().err == ""


def test_a_curriculum_draws_by_weight():
    rows = Order(200, seed=4, shuffle=True)
    drawn = Curriculum(rows, 0.2)
    drawn.record(np.array([(n % 40, n % 3 == 0) for n in range(300)]))
    drawn.start(17)
    tries = np.bincount(np.arange(300) % 40, minlength=200)
    right = np.bincount((np.arange(300) % 40)[::3], minlength=200)
    p = (right + 1) / (tries + 2)
    weights = np.maximum(4 * p * (1 - p), 0.2)
    keys = np.random.default_rng([4, 17]).exponential(size=200) / weights
    wanted = np.argsort(keys, kind="stable").tolist()
    assert [drawn[17 + n] for n in range(250)] == (2 * wanted)[:250]
    resumed = Curriculum(rows, 0.2, drawn.save())
    assert (resumed.outcomes == drawn.outcomes).all() and len(drawn.save()) < 1500
    with pytest.raises(UserError, match="outcomes of prompt 39, and data.train has 30 prompts now"):
        Curriculum(Order(30, seed=4, shuffle=True), 0.2, drawn.save())
