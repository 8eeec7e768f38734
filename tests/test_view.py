"""`python -m minirl.view`: its tables against the trajectories, its server, and the page in a real
browser (Chromium; where there is none, tests that need it are skipped, or fail if $CI is set)."""

import base64
import contextlib
import importlib.util
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import dumped
import tiny
from harness import PRELOAD
from minirl.base.errors import UserError
from minirl.checkpoint.run_folder import head_of
from minirl.config.rl import RLConfig
from minirl.data.images import to_url
from minirl.model.scratch import make_tokenizer
from minirl.rollout import index, records
from minirl.types.packed import ImageSpan
from minirl.view import server, trajectories
from minirl.view.__main__ import main
from minirl.view.server import KILLED, Run, parse_query, read_lines, to_json
from minirl.view.trajectories import ROW, Table, prompt_text, token_texts
from programs import QUICKSTART, ROOT, WORDS, fork
from run_folders import save_config

SECONDS = 60_000  # Of the browser, in ms: machines are slow.


# --------------------------------------------------------------------------------------------------
# a real run


@pytest.fixture(scope="module")
def real(tmp_path_factory) -> Path:
    """Two ranks, and a reward that even an untrained model earns now and then."""
    if torch.cuda.is_available():
        pytest.skip("a run on CPU")
    output = tmp_path_factory.mktemp("real") / "run"
    reward = output.parent / "reward.py"
    reward.write_text(
        "def vowels(prompt, completion, row):\n"
        "    return sum(letter in 'aeiou' for letter in completion) / 10\n"
    )
    flags = ["--config", QUICKSTART, "--output", output, "--num-steps", 2, "--sft.num-steps", 4]
    flags += ["--data.train", WORDS, "--data.held-out", 4, "--eval.every", 1]
    flags += ["--rollout.prompts-per-step", 4]
    flags += ["--rollout.samples-per-prompt", 4, "--rollout.dump", "--tokens-per-rank", 256]
    flags += ["--reward.function", f"{reward}:vowels"]
    ended = fork("minirl.rl", flags, output.parent / "log", 300, world=2)
    assert ended.code == 0, ended.err
    return output


def test_a_real_run_leaves_what_its_training_made_of_each_token(real):
    """By the slow way: read all lines, and look each trajectory up."""
    folder = real / "rollouts"
    table = Table(folder)
    table.refresh()
    lines = []
    for path in sorted(folder.glob("*.jsonl")):
        lines += records.read_file(path)
    assert len(table.rows) == len(lines) == 2 * 4 * 4 and table.steps() == [0, 1]
    assert (table.rows["trained_rank"] >= 0).all() and (table.rows["advantage"] != 0).any()
    assert (table.rows["trained_rank"] != table.rows["rank"]).any()  # they have travelled
    page = Run(real)
    of_run = [json.loads(line) for line in (real / "metrics.jsonl").read_text().splitlines()]
    for step in (0, 1):
        worst, mean, entropies, num = 0.0, 0.0, 0.0, 0
        for row in table.groups[table.groups["step"] == step]:
            shown = page.group(step, int(row["group"]))["trajectories"]
            for t in shown:
                values = t["values"]
                sampled = np.array(t["sampled"], bool)
                mismatch = np.array(values["mismatch"])[sampled]
                worst = max(worst, mismatch.max())
                mean += mismatch.sum()
                entropies += np.array(values["entropy"])[sampled].sum()
                num += sampled.sum()
                advantages = np.array(values["advantage"])
                assert len(set(advantages[sampled])) == 1 and not advantages[~sampled].any()
                assert "".join(t["texts"]).startswith("Spell") or t["texts"]
            assert [t["row"]["answer"][::-1] in t["prompt"] for t in shown] == [True] * 4
            # GRPO by hand.
            rewards = np.array([t["shaped"] for t in shown])
            deviation = rewards.std(ddof=1)
            expected = (rewards - rewards.mean()) / (deviation + 1e-6) if deviation else rewards * 0
            got = [t["values"]["advantage"][-1] for t in shown]
            assert got == pytest.approx(expected, abs=1e-4)
        (logged,) = (r for r in of_run if r["phase"] == "rl" and r["step"] == step)
        assert worst == pytest.approx(logged["mismatch_max"], rel=1e-3)
        assert mean / num == pytest.approx(logged["mismatch"], rel=1e-3)
        assert entropies / num == pytest.approx(logged["entropy"], rel=1e-3)


def test_a_real_run_is_written_while_it_goes_on(real):
    summary = json.loads((real / "summary.json").read_text())
    assert summary["state"] == "finished" and summary["reason"] == ""
    answers = [json.loads(line) for line in (real / "answers.jsonl").read_text().splitlines()]
    assert [row["step"] for row in answers] == [-1, 0, 1, 2]
    assert (real / "curves.png").read_bytes().startswith(b"\x89PNG")


# --------------------------------------------------------------------------------------------------
# the table


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return dumped.make_run(tmp_path_factory.mktemp("view") / "mine")


def groups_of(run: Path, **given: str) -> list[tuple[int, int]]:
    found = Run(run).groups(parse_query(given))["groups"]
    return [(g["step"], g["group"]) for g in found]


def test_filters_and_orders(run):
    numbers = [8, 9, 10, 11, 4, 5, 6, 7, 0, 1, 2, 3]
    everything = [(number // 4, number) for number in numbers]
    assert groups_of(run) == everything
    assert groups_of(run, flags="cut_off") == [(2, 8), (1, 4), (0, 0)]
    assert groups_of(run, flags="failed") == [(2, 9), (1, 5), (0, 1)]
    assert groups_of(run, flags="equal") == [(2, 10), (1, 6), (0, 2)]
    assert groups_of(run, flags="cut_off,failed") == []
    assert (0, 2) not in groups_of(run, unequal="1") and len(groups_of(run, unequal="1")) == 9
    assert groups_of(run, first="1", last="1") == [(1, 4 + n) for n in range(4)]
    assert groups_of(run, sort="mismatch")[:2] == [(2, 11), (2, 10)]
    assert groups_of(run, sort="mismatch", ascending="1")[0] == (0, 0)
    assert groups_of(run, size="5", page="2") == everything[10:]
    assert groups_of(run, size="5", page="9") == []
    assert groups_of(run, search="OWNED") == [(2, 8), (1, 4), (0, 0)]
    assert groups_of(run, search="Word 1") == [(2, 10), (2, 11), (0, 1)]
    assert groups_of(run, search="valueerror", last="1") == [(1, 5), (0, 1)]
    assert groups_of(run, search="completion") == []  # a name in the file, and no text


def test_a_folder_that_has_not_changed_is_not_read_again(run, monkeypatch):
    table = Table(run / "rollouts")
    table.refresh()
    assert len(table.rows)
    monkeypatch.setattr(trajectories.index, "parts", lambda folder: pytest.fail("it is read"))
    table.refresh()


def test_a_search_finds_what_is_new(run, tmp_path):
    copy = tmp_path / "growing"
    shutil.copytree(run, copy)
    shown = Run(copy)
    query = parse_query({"search": '\u00fcber "x"'})
    assert shown.groups(query)["total"] == 0
    tokenizer = make_tokenizer([])
    found = dumped.trajectory(99, 0, "drow", tokenizer, completion='so \u00fcber "X"')
    dumped.write_step(copy / "rollouts", 3, [found])
    assert [g["group"] for g in shown.groups(query)["groups"]] == [99]
    other = dumped.trajectory(99, 0, "drow", tokenizer)  # a resumed run writes the step again
    dumped.write_step(copy / "rollouts", 3, [other])
    assert shown.groups(query)["total"] == 0


def test_histograms_count_every_episode(run):
    shown = Run(run)
    histograms = shown.groups(parse_query({"first": "1"}))["histograms"]
    rewards, lengths = histograms["reward"], histograms["sampled tokens"]
    # Of each step: 8 episodes of the first two groups and the last one earn 1 by turns, 4 of a
    # group all do.
    assert (rewards["counts"][0], rewards["counts"][-1]) == (2 * 6, 2 * 10)
    assert sum(rewards["counts"]) == sum(lengths["counts"]) == 2 * 16
    assert (lengths["edges"][0], lengths["counts"][0]) == (4, 2 * 15)  # "drow"
    longest = len(dumped.NASTY)
    assert lengths["edges"][-2] <= longest <= lengths["edges"][-1] and lengths["counts"][-1] == 2
    assert shown.groups(parse_query({"first": "9"}))["histograms"] == {}


def test_rewards_that_differ_by_rounding_are_in_one_bar(tmp_path):
    tokenizer = make_tokenizer([])
    found = [dumped.trajectory(0, n, "drow", tokenizer) for n in range(2)]
    found[0].reward, found[1].reward = 1.0, 0.1 + 0.2 + 0.7 - 1e-16
    assert found[0].reward != found[1].reward
    dumped.write_step(tmp_path / "rollouts", 0, found)
    (tmp_path / "metrics.jsonl").touch()
    counts = Run(tmp_path).groups(parse_query({}))["histograms"]["reward"]["counts"]
    assert sorted(counts)[-2:] == [0, 2]


def test_the_reward_of_a_group_is_the_mean_of_its_episodes():
    """Not of its rows: an episode of three segments counts once."""
    rows = np.zeros(4, ROW)
    rows["segment"] = [0, 1, 2, 0]
    rows["reward"] = [1.0, 1.0, 1.0, 0.0]
    (group,) = trajectories._group(rows)
    assert group["reward"] == 0.5 and group["num_rows"] == 4


def test_images_of_a_row_are_shown_whatever_gave_them(tmp_path):
    """A data URL has a type only if the row has one. What is no image is not shown."""
    made = dumped.make_run(tmp_path / "run", num_steps=1)
    for path in (made / "rollouts").glob("step-*"):
        path.unlink()
    urls = [
        tiny.picture(56, 56),
        to_url(base64.b64decode(tiny.picture(28, 28).partition(",")[2])),
        "https://elsewhere/a.png",
    ]
    t = dumped.trajectory(0, 0, "drow", make_tokenizer([]))
    t.images = [ImageSpan(0, 1, url) for url in urls]
    dumped.write_step(made / "rollouts", 0, [t])
    seen = Run(made)
    seen.groups(parse_query({}))
    (shown,) = seen.table.group(0, 0)["trajectories"]
    assert [image[2] for image in shown["images"]] == urls[:2]


def test_a_wrong_query_is_refused():
    with pytest.raises(UserError, match="page = '../etc' is no whole number"):
        parse_query({"page": "../etc"})


def test_a_query_for_a_flag_that_is_none_is_refused(run):
    with pytest.raises(UserError, match="flags = zzz: give some of step, group, "):
        groups_of(run, flags="zzz")


def test_damaged_files_of_a_run_are_named(run, tmp_path):
    copy = tmp_path / "damaged"
    shutil.copytree(run, copy)
    (copy / "summary.json").write_text('{"state": "fin')
    assert Run(copy).describe()["state"] == "unknown"
    (copy / "metrics.jsonl").write_text('{"step": 1}\n{"st\n')
    with pytest.raises(UserError, match="metrics.jsonl has a line that is no JSON"):
        read_lines(copy / "metrics.jsonl")


def test_a_folder_that_is_no_run_is_refused(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert f"{tmp_path} is not the folder of a run" in capsys.readouterr().err


def test_steps_without_tables_are_read_from_their_lines(run, tmp_path):
    """Those of a run that is in the middle of a step, or of an older version."""
    copy = tmp_path / "old"
    shutil.copytree(run, copy)
    for path in [*copy.glob("rollouts/*.npz"), *copy.glob("rollouts/*.npy")]:
        path.unlink()
    assert groups_of(copy) == groups_of(run)
    assert groups_of(copy, flags="failed") == groups_of(run, flags="failed")
    group = Run(copy).group(0, 1)
    assert set(group["trajectories"][0]["values"]["advantage"]) == {None}
    assert group["trajectories"][0]["values"]["engine"][-1] < 0


def test_a_resumed_run_drops_what_it_writes_again(run, tmp_path):
    copy = tmp_path / "resumed"
    shutil.copytree(run, copy)
    folder = Run(copy)
    assert folder.describe()["steps"] == [0, 1, 2]
    records.drop_steps(copy / "rollouts", 1)
    assert folder.describe()["steps"] == [0]
    names = sorted(path.name for path in (copy / "rollouts").iterdir())
    parts = [f"step-0-rank-0.{kind}" for kind in ("jsonl", "npy", "npz")]
    assert names == [*parts, "tokenizer.json"]


def test_texts_of_tokens_join_to_the_text():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    text = "naïve café – 数学 🙂🙂 end\n  two"
    by_bytes = Tokenizer(models.BPE())
    by_bytes.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    by_bytes.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=260, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    by_bytes.train_from_iterator(["a"], trainer)
    tokens = by_bytes.encode(text).ids
    texts = token_texts(by_bytes, tokens)
    assert len(texts) == len(tokens) > len(text) and "".join(texts) == text
    assert texts.count("🙂") == 2
    cut = token_texts(by_bytes, by_bytes.encode("数").ids[:2])  # the answer ended in a character
    assert cut[0] == "" and "\ufffd" in cut[1]

    characters = make_tokenizer([]).backend_tokenizer
    tokens = characters.encode("two words").ids
    assert "".join(token_texts(characters, tokens)) == "two words"


def test_calls_of_a_prompt_are_shown():
    call = {"function": {"name": "add", "arguments": {"a": "é"}}}
    prompt = [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_calls": None},
    ]
    called = '{"name": "add", "arguments": {"a": "é"}}'
    assert prompt_text(prompt) == f"user: 1 + 1?\nassistant: {called}\ntool: 2"


# --------------------------------------------------------------------------------------------------
# files that grow, and runs that end


def test_rows_are_read_as_they_come(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert read_lines(path, "") == ([], "", False)
    dumped.write_rows(path, [{"step": 0}, {"step": 1}])
    first = read_lines(path, "")
    assert [row["step"] for row in first.rows] == [0, 1]
    with path.open("a") as file:
        file.write('{"step": 2}\n{"st')  # the run is writing
    second = read_lines(path, first.place)
    assert [row["step"] for row in second.rows] == [2] and not second.is_new
    with path.open("a") as file:
        file.write('ep": 3}\n')
    assert [row["step"] for row in read_lines(path, second.place).rows] == [3]
    (tmp_path / "new").write_text('{"step": 0}\n')
    (tmp_path / "new").replace(path)  # as a resumed run drops rows
    inode = path.stat().st_ino
    again = read_lines(path, second.place)
    assert again.is_new and [row["step"] for row in again.rows] == [0]
    assert read_lines(path, "7:99999").rows == again.rows
    # The file system may give the number of a file that is gone to another one.
    path.write_text('{"step": 5}\n{"step": 6}\n')
    assert path.stat().st_ino == inode
    assert [row["step"] for row in read_lines(path, again.place).rows] == [5, 6]


def test_a_table_is_read_again_after_a_poll_while_a_resumed_run_drops_steps(tmp_path, monkeypatch):
    folder = dumped.make_run(tmp_path / "run", num_steps=4) / "rollouts"
    table = Table(folder)
    table.refresh()
    assert table.steps() == [0, 1, 2, 3]
    read_step = trajectories._read_step

    def read_too_late(parts):
        records.drop_steps(folder, 1)
        return read_step(parts)

    changed = index.part_of(folder, 1, 0)
    changed.lines.replace(folder / "other")  # its table is written again
    (folder / "other").replace(changed.lines)
    os.utime(changed.lines, ns=(1, 1))
    with monkeypatch.context() as patch:
        patch.setattr(trajectories, "_read_step", read_too_late)
        table.refresh()
    assert table.steps() == [0, 1, 2, 3]
    table.refresh()
    assert table.steps() == [0] and set(table.rows["step"].tolist()) == {0}


def test_what_the_list_shows_of_a_chat_is_found(tmp_path):
    folder = dumped.make_run(tmp_path / "run", num_steps=1) / "rollouts"
    path = index.part_of(folder, 0, 0).lines
    shutil.rmtree(folder)
    folder.mkdir()
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    prompt = [{"role": "user", "content": "ab \u00e4"}, {"role": "assistant", "tool_calls": [call]}]
    info = {"prompt": prompt, "completion": "x", "error": "", "stopped": True}
    record = {"tokens": [5], "sampled": [1], "reward": 0.0, "info": info}
    record |= {"group": 0, "episode": 0, "segment": 0}
    path.write_text(json.dumps(record) + "\n")
    table = Table(folder)
    table.refresh()
    for text in ("user: ab", "\u00e4", 'assistant: {"name": "add"', '"a": 1'):
        assert len(table.select(trajectories.Query(search=text))) == 1, text
    assert not len(table.select(trajectories.Query(search="user: x")))


def test_a_table_that_was_cut_is_named(tmp_path):
    folder = dumped.make_run(tmp_path / "run", num_steps=1) / "rollouts"
    path = index.part_of(folder, 0, 0).table
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(UserError, match=f"{path} is damaged .*; copy it again"):
        Table(folder).refresh()


def test_runs_of_one_name_are_told_apart_and_a_folder_is_no_export(tmp_path, capsys):
    one = dumped.make_run(tmp_path / "a/out", num_steps=1)
    other = dumped.make_run(tmp_path / "b/out", num_steps=1)
    assert main([str(one), str(other), "--export", str(tmp_path)]) == 2
    assert "is a folder; name a file" in capsys.readouterr().err
    assert main([str(one), str(other), "--export", str(tmp_path / "both.html")]) == 0
    page = (tmp_path / "both.html").read_text().replace('": "', '":"')
    assert f'"name":"{one}"' in page and f'"name":"{other}"' in page


def test_a_run_that_was_killed_does_not_run(run, tmp_path):
    copy = tmp_path / "killed"
    shutil.copytree(run, copy)
    (copy / "summary.json").write_text('{"state": "running", "reason": ""}')
    assert Run(copy).describe()["state"] == KILLED
    holder = (
        "import sys, time; from pathlib import Path; from minirl.checkpoint import run_folder; "
    )
    holder += "run_folder.hold(Path(sys.argv[1])); print('held', flush=True); time.sleep(600)"
    command = [sys.executable, "-c", holder, str(copy)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout.readline() == "held\n"
        assert Run(copy).describe()["state"] == "running"
        process.kill()
        process.wait()
    assert Run(copy).describe()["state"] == KILLED


def test_numbers_that_json_has_not():
    value = {"a": [1.0, float("nan"), (float("inf"), "x")]}
    assert json.loads(to_json(value)) == {"a": [1.0, None, [None, "x"]]}


# --------------------------------------------------------------------------------------------------
# the server


class Served:
    """The page of some runs, served by the program until the block ends, however it ends."""

    def __init__(self, *runs: Path):
        command = [sys.executable, "-m", "minirl.view", *map(str, runs), "--port", "0"]
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> "Served":
        try:
            self.url = self.process.stdout.readline().split()[-1]
        except BaseException:  # pytest's time limit, too
            self.end()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def get(self, path: str, **headers: str) -> tuple[int, bytes]:
        request = urllib.request.Request(self.url + path, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, response.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def end(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(60)
        finally:
            self.process.kill()
            self.process.stdout.close()


@pytest.fixture(scope="module")
def served(run):
    with Served(run) as server:
        yield server


def serve_in_fork(runs: tuple[Path, ...], pipe: Connection) -> None:
    server.serve([Run(path) for path in runs], 0, pipe.send)


class ServedByFork(Served):
    """The same, by a fork of a process that has imported everything."""

    def __init__(self, *runs: Path):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self.address, theirs = context.Pipe(duplex=False)
        self.process = context.Process(target=serve_in_fork, args=(runs, theirs))
        self.process.start()
        theirs.close()

    def __enter__(self) -> "ServedByFork":
        try:
            self.url = self.address.recv()
        except BaseException:
            self.end()
            raise
        return self

    def end(self) -> None:
        self.process.terminate()
        self.process.join(60)
        self.process.kill()
        self.process.join()


@pytest.fixture
def serve():
    """`serve(*runs)` is a page for one test."""
    with contextlib.ExitStack() as servers:
        yield lambda *runs: servers.enter_context(ServedByFork(*runs))


def test_a_failed_test_leaves_no_server(run):
    with pytest.raises(ZeroDivisionError), Served(run) as server:
        assert server.get("")[0] == 200
        1 / 0  # noqa: B018
    assert server.process.poll() is not None


def test_only_what_belongs_to_the_page_is_served(served, run):
    status, body = served.get("")
    assert status == 200 and b"view.js" in body and b"http" not in body.replace(b"http-equiv", b"")
    for path in ("../../pyproject.toml", "..%2f..%2fpyproject.toml", "/etc/passwd", "view.py"):
        assert served.get(path)[0] == 404, path
    for path in ("api/metrics?run=1", "api/metrics?run=../x", "api/group?run=0&step=0&group=99"):
        status, body = served.get(path)
        assert status == 400 and b"error" in body, path
    assert json.loads(served.get("api/runs")[1])[0]["folder"] == str(run)


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", ""])
def test_another_hosts_pages_cannot_read(served, host):
    status, body = served.get("api/runs", Host=host)
    assert status in (400, 403) and b"trajectories" not in body
    assert served.get("api/runs", Host="localhost:1234")[0] == 200  # as through ssh -L


def test_a_taken_port_is_one_message(served, run, capsys):
    port = served.url.rstrip("/").rpartition(":")[2]
    assert main([str(run), "--port", port]) == 2
    assert f"--port = {port}" in capsys.readouterr().err


NUM_STEPS, NUM_GROUPS = 100, 125  # Of 8 trajectories: 100,000.


def test_100_000_trajectories_answer_within_a_second(tmp_path):
    """Lines are written once and linked: that many alike are as hard to search as others."""
    folder = tmp_path / "large"
    rollouts = folder / "rollouts"
    rollouts.mkdir(parents=True)
    (folder / "config.yaml").write_text("seed: 0\n")
    tokenizer = make_tokenizer([])
    trajectories = [
        dumped.trajectory(number // 8, number % 8, "drow", tokenizer)
        for number in range(8 * NUM_GROUPS)
    ]
    for step in range(NUM_STEPS):
        dumped.write_step(rollouts, step, trajectories, mismatch=0.01 * (step + 1))
    shown = Run(folder)
    began = time.process_time()
    shown.describe()
    seconds_to_open = time.process_time() - began
    assert len(shown.table.rows) == 100_000
    assert seconds_to_open < 5

    for given in ({"sort": "mismatch"}, {"unequal": "1", "page": "500"}, {"first": "40"}):
        began = time.process_time()
        page = shown.groups(parse_query(given))
        shown.group(page["groups"][0]["step"], page["groups"][0]["group"])
        assert time.process_time() - began < 1, given
        assert len(page["groups"]) == 20


# --------------------------------------------------------------------------------------------------
# the page in a browser


def find_browser() -> str | None:
    """Chromium or Chrome: $MINIRL_BROWSER, or that of the system. None: that of playwright."""
    named = os.environ.get("MINIRL_BROWSER")
    names = ("chromium", "chromium-browser", "google-chrome")
    return named or next(filter(None, map(shutil.which, names)), None)


def give_up(reason: str) -> None:
    """Skip the test; where $CI is set, fail it: nobody reads there what was skipped."""
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


def test_without_a_browser_tests_are_skipped_on_a_users_machine_and_fail_in_ci(monkeypatch):
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="no browser"):
        give_up("no browser")
    monkeypatch.delenv("CI")
    with pytest.raises(pytest.skip.Exception, match="no browser"):
        give_up("no browser")


@pytest.fixture(scope="module")
def browser():
    if importlib.util.find_spec("playwright") is None:
        give_up("playwright is not installed")
    from playwright import sync_api as playwright

    with playwright.sync_playwright() as driver:
        path = find_browser()
        if path is None and not Path(driver.chromium.executable_path).exists():
            give_up(
                "no browser: install chromium, or `python -m playwright install chromium`, or set "
                "MINIRL_BROWSER"
            )
        found = driver.chromium.launch(
            executable_path=path, args=["--no-sandbox"], timeout=2 * SECONDS
        )
        yield found
        found.close()


def refused_by_policy(said: str) -> list[str]:
    return [said] if "Content Security Policy" in said else []


@pytest.fixture
def page(browser):
    opened = browser.new_page(viewport={"width": 1500, "height": 950})
    opened.set_default_timeout(SECONDS)
    opened.problems = []
    opened.on("pageerror", lambda error: opened.problems.append(str(error)))
    opened.on("console", lambda said: opened.problems.extend(refused_by_policy(said.text)))
    opened.asked = []
    opened.on("request", lambda request: opened.asked.append(request.url))
    yield opened
    opened.close()
    assert not opened.problems


def wait_until(page, expression: str) -> None:
    """Wait for JavaScript to be true. (What playwright has for it, the page's policy refuses.)"""
    end = time.monotonic() + SECONDS / 1000
    while not page.evaluate(expression):
        assert time.monotonic() < end, expression
        page.wait_for_timeout(50)


def curve(page, metric: str) -> list[list[float]]:
    """What the chart of a metric draws: steps, and the values of each line."""
    plot = f"document.querySelector('[data-metric=\"{metric}\"]')?.plot"
    wait_until(page, f"Boolean({plot})")
    return page.evaluate(f"{plot}.data.map((values) => [...values])")


def save(page, name: str) -> None:
    """Leave a screenshot where $MINIRL_SCREENSHOTS says, if it does."""
    folder = os.environ.get("MINIRL_SCREENSHOTS")
    if folder:
        page.screenshot(path=f"{folder}/{name}.png")


def test_curves_of_a_real_run(page, serve, real):
    server = serve(real)
    page.goto(server.url)
    logged = [json.loads(line) for line in (real / "metrics.jsonl").read_text().splitlines()]
    rewards = [row["reward"] for row in logged if row["phase"] == "rl"]
    assert curve(page, "rl/reward") == [[0, 1], rewards]
    assert page.locator(".badge.finished").count() == 1
    save(page, "curves")
    page.fill("#search", "longest")
    page.check("#metric-rl\\/longest_answer")
    assert len(curve(page, "rl/longest_answer")) == 2
    before = page.locator('[data-metric="rl/loss"]').count()
    page.fill("#search", "rl/loss")
    page.check("#metric-rl\\/loss")
    assert (before, page.locator('[data-metric="rl/loss"]').count()) == (0, 1)
    page.locator("#smoothing").fill("0.8")
    steps, raw, smooth = curve(page, "rl/reward")
    assert (steps, raw) == ([0, 1], rewards)
    assert smooth == pytest.approx([raw[0], (0.16 * raw[0] + 0.2 * raw[1]) / 0.36])

    page.click("nav >> text=time")
    page.wait_for_selector(".chart canvas")
    assert "rollout" in page.inner_text("table")
    page.click("nav >> text=answers")
    page.wait_for_selector(".answer")
    page.click("nav >> text=settings")
    page.wait_for_selector(".settings")
    changed, defaults = page.locator(".panel").all()
    assert "rollout.prompts_per_step\t16\t4" in changed.inner_text()
    assert "algo.clip_low" not in changed.inner_text()
    defaults.locator("summary").click()
    assert "algo.clip_low\t0.2\t0.2" in defaults.inner_text()

    page.click("nav >> text=trajectories")
    page.wait_for_selector(".trajectory")
    assert page.locator(".trajectory").count() == 4
    save(page, "trajectories")
    assert all(url.startswith((server.url, "data:")) for url in page.asked)


def test_filters_colours_and_hostile_texts(page, served):
    page.goto(f"{served.url}#trajectories")
    page.wait_for_selector(".trajectory")
    assert page.locator(".group-item").count() == 12
    # The first group has the hostile answer: as text, in spans, without effect.
    assert dumped.NASTY in page.locator(".trajectory").first.inner_text().replace("\n", "")
    assert page.title() == "minirl" and page.locator(".tokens script, .tokens img").count() == 0

    bad, good = page.locator(".trajectory").nth(0), page.locator(".trajectory").nth(1)
    colour = "e => getComputedStyle(e).backgroundColor"
    assert bad.locator(".token").first.evaluate(colour).startswith("rgba(214, 40, 57")
    assert good.locator(".token").first.evaluate(colour).startswith("rgba(30, 140, 70")
    assert "advantage -1" in bad.locator(".token").first.get_attribute("title")
    assert page.inner_text(".legend").startswith("advantage")
    for kind in ("logprob", "mismatch", "entropy", "staleness"):
        page.select_option("#kind", kind)
        colours = good.locator(".token").evaluate_all(f"es => es.map({colour})")
        assert all(c.startswith("rgba(124, 58, 200") for c in colours)
    page.select_option("#kind", "logprob")
    colours = good.locator(".token").evaluate_all(f"es => es.map({colour})")
    assert len(set(colours)) == 4  # each token has a log-prob of its own

    page.check("#flag-failed")
    wait_until(page, "document.querySelectorAll('.group-item').length === 3")
    assert "step raised ValueError: no" in page.inner_text("#detail")
    page.uncheck("#flag-failed")
    wait_until(page, "document.querySelectorAll('.group-item').length === 12")
    page.select_option("#sort", "mismatch")
    wait_until(page, "document.querySelector('.group-item').textContent.includes('group 11')")
    page.click(".group-item >> nth=2")
    wait_until(page, "document.querySelector('#detail').textContent.includes('group 9')")


def test_back_goes_back_and_a_link_shows_one_episode(page, served):
    page.goto(served.url)
    page.wait_for_selector(".chart canvas >> nth=0")
    page.click("nav >> text=trajectories")
    page.click("text=step 1 · group 5")
    wait_until(page, "document.querySelector('#detail').textContent.includes('group 5')")
    page.click("text=step 0 · group 2")
    wait_until(page, "document.querySelector('#detail').textContent.includes('group 2')")
    page.go_back()
    wait_until(page, "document.querySelector('#detail').textContent.includes('group 5')")
    address = page.locator(".trajectory >> nth=2").locator("a").get_attribute("href")
    page.go_back()
    page.go_back()
    page.wait_for_selector(".chart canvas >> nth=0")
    assert page.locator('nav [aria-selected="true"]').inner_text() == "curves"

    page.goto("about:blank")
    page.goto(served.url + address)
    page.wait_for_selector('.trajectory[aria-current="true"]')
    assert page.inner_text('.trajectory[aria-current="true"] h2').startswith("episode 2")
    assert "group 5" in page.inner_text("#detail summary")
    page.goto(f"{served.url}#trajectories?run=0&step=9&group=9")
    page.wait_for_selector("text=step 9 has no group 9")


def test_texts_are_found_and_counted(page, served):
    page.goto(f"{served.url}#trajectories")
    page.wait_for_selector(".trajectory")
    readings = [reading.inner_text() for reading in page.locator("#histograms .reading").all()]
    assert readings == ["48 episodes", "48 episodes"]
    page.fill("#text", "OWNED")
    page.press("#text", "Enter")
    wait_until(page, "document.querySelectorAll('.group-item').length === 3")
    assert page.locator(".flag.found").count() == 1  # of the four episodes of the group
    page.wait_for_selector("#histograms >> text=12 episodes")


def test_rows_and_reasons_are_shown(page, run, serve, tmp_path):
    """Of an agent, whose row has no prompt, and two of whose episodes came to nothing."""
    copy = tmp_path / "agent"
    shutil.copytree(run, copy)
    tokenizer = make_tokenizer([])
    common = {"prompt": "", "row": {"task": "Book a flight.", "level": "3"}}
    refusal = "response_format has the type 'grammar'"
    infos = [
        {},
        {"env": {"turns": 0, "truncated": 1.0}},
        {"refusal": refusal},
        {"endpoint": {"outside_loss": 1.0}},
    ]
    dumped_ones = []
    for episode, info in enumerate(infos):
        text = "" if info else "done"
        t = dumped.trajectory(77, episode, text, tokenizer, **common, **info)
        if info:
            for name in ("tokens", "sampled", "logprobs", "turn_rewards", "versions"):
                setattr(t, name, getattr(t, name)[:0])
        dumped_ones.append(t)
    one = SimpleNamespace(rank=0, world_size=1)
    records.write_step(dumped_ones, copy / "rollouts", 3, one)
    page.goto(f"{serve(copy).url}#trajectories")
    page.wait_for_selector(".trajectory")
    assert "task: Book a flight. · level: 3" in page.locator(".group-item").first.inner_text()
    row = [cell.inner_text() for cell in page.locator("#detail td").all()]
    assert row == ["task", "Book a flight.", "level", "3"]
    texts = [box.inner_text() for box in page.locator(".trajectory").all()]
    assert "The policy sampled no token" not in texts[0]
    assert "no token: a limit of tokens or turns left no room" in texts[1]
    assert f"no token: the endpoint refused the agent's last request: {refusal}." in texts[2]
    assert "no token: all its tokens were held to a format or a call" in texts[3]


def test_what_goes_wrong_in_a_tab_stays_visible(page, serve, run, tmp_path):
    live = tmp_path / "live"
    shutil.copytree(run, live)
    failing = {"status": 400, "json": {"error": {"message": "the disk is on fire"}}}
    page.route("**/api/groups*", lambda route: route.fulfill(**failing))
    page.goto(f"{serve(live).url}#trajectories")
    page.wait_for_selector("#problem >> text=the disk is on fire")
    dumped.write_rows(live / "metrics.jsonl", [{"phase": "rl", "step": 3, "reward": 0.9}])
    wait_until(page, "state.rows[0].lines['rl/reward'].length === 4")
    for _ in range(2):  # refreshes
        with page.expect_response("**/api/metrics*"):
            pass
    assert "the disk is on fire" in page.inner_text("#problem")
    page.unroute("**/api/groups*")
    dumped.write_rows(live / "metrics.jsonl", [{"phase": "rl", "step": 4, "reward": 0.9}])
    page.wait_for_selector(".trajectory")
    assert page.inner_text("#problem") == ""


def test_charts_zoom_and_have_a_log_axis(page, serve, run, tmp_path):
    copy = tmp_path / "many"
    shutil.copytree(run, copy)
    phases = {f"time/phase_{i}": 1.0 + i for i in range(20)}
    rows = [{"phase": "rl", "step": step, "reward": step, **phases} for step in range(3, 101)]
    dumped.write_rows(copy / "metrics.jsonl", rows)
    page.goto(serve(copy).url)
    assert len(curve(page, "rl/reward")[0]) == 101
    reward = "document.querySelector('[data-metric=\"rl/reward\"]').plot"
    assert page.evaluate(f"{reward}.axes[0].label") == "step"
    assert page.evaluate(f"{reward}.scales.y.distr") != 3
    drawn = page.evaluate(
        f"[...{reward}.ctx.getImageData(0, 0, {reward}.ctx.canvas.width, 200).data]"
    )
    pixels = np.array(drawn).reshape(-1, 4)
    assert (pixels[:, :3] == [0x3B, 0x7D, 0xDD]).all(axis=1).sum() > 50  # the run's line

    area = page.locator('[data-metric="rl/reward"] .u-over').bounding_box()
    page.mouse.move(area["x"] + area["width"] * 0.25, area["y"] + 50)
    page.mouse.down()
    page.mouse.move(area["x"] + area["width"] * 0.5, area["y"] + 60, steps=5)
    page.mouse.up()
    for metric in ("rl/reward", "rl/entropy"):
        plot = f"document.querySelector('[data-metric=\"{metric}\"]').plot"
        wait_until(page, f"{plot} && {plot}.scales.x.min > 20 && {plot}.scales.x.max < 55")
    page.click("#all-steps")
    wait_until(page, f"{reward} && {reward}.scales.x.max === 100")
    page.check("#log")
    wait_until(page, f"{reward} && {reward}.scales.y.distr === 3")
    assert curve(page, "rl/reward")[1][0] is None  # of 0, which has no logarithm

    page.uncheck("#group-rl")
    page.check("#group-rl\\/time")
    assert page.locator(".columns .chart").count() == 23  # all of rl/time
    page.click("nav >> text=time")
    page.wait_for_selector(".chart canvas")
    keys = page.locator(".key").evaluate_all("es => es.map(e => e.style.background)")
    assert len(keys) == 22 and len(set(keys)) == 22  # two of them are the first rows'

    ground = "getComputedStyle(document.body).backgroundColor"
    assert page.evaluate(ground) == "rgb(245, 246, 248)"
    page.emulate_media(color_scheme="dark")
    assert page.evaluate(ground) == "rgb(20, 24, 31)"


def test_two_runs_are_compared(page, serve, run, tmp_path):
    runs = []
    for name, lr in (("slow", 1e-6), ("fast", 3e-6)):
        shutil.copytree(run, tmp_path / name)
        cfg = RLConfig(num_steps=7)
        cfg.policy.lr = lr
        path = tmp_path / name / "config.yaml"
        save_config(cfg, path)
        path.write_text(head_of(RLConfig) + path.read_text())
        runs.append(tmp_path / name)
    server = serve(*runs)
    page.goto(f"{server.url}#settings")
    page.wait_for_selector(".settings")
    texts = [panel.inner_text() for panel in page.locator(".panel").all()]
    assert texts[0].splitlines()[1:] == [
        "setting\tdefault\tslow\tfast",
        "policy.lr\tnull\t1e-6\t3e-6",
    ]
    assert "num_steps\t100\t7\t7" in texts[1] and len(texts) == 3

    page.click("nav >> text=curves")
    assert len(curve(page, "rl/reward")) == 3  # steps, and two lines
    page.uncheck("#show-1")
    assert len(curve(page, "rl/reward")) == 2


def test_the_page_follows_a_run(page, serve, run, tmp_path):
    live = tmp_path / "live"
    shutil.copytree(run, live)
    server = serve(live)
    page.goto(server.url)
    assert curve(page, "rl/reward")[0] == [0, 1, 2]
    later = [{"phase": "rl", "step": 3, "reward": 0.9}, {"phase": "eval", "step": 3, "accuracy": 1}]
    dumped.write_rows(live / "metrics.jsonl", later)
    assert curve(page, "eval/accuracy") == [[3], [1]]
    wait_until(
        page,
        "document.querySelector('[data-metric=\"rl/reward\"] .reading').textContent === '0.9 at 3'",
    )
    (live / "summary.json").write_text('{"state": "failed", "reason": "rank 1 crashed"}')
    page.wait_for_selector("text=rank 1 crashed")
    page.click("nav >> text=trajectories")
    page.wait_for_selector(".trajectory")
    tokenizer = make_tokenizer([])
    dumped.write_step(live / "rollouts", 3, [dumped.trajectory(99, 0, "new", tokenizer)])
    page.wait_for_selector("text=step 3 · group 99")
    server.end()
    wait_until(page, "document.querySelector('#connection').textContent.includes('trying again')")


def test_an_exported_page_needs_nothing_else(page, run, tmp_path, capsys):
    file = tmp_path / "mine.html"
    assert main([str(run), "--export", str(file), "--share", "1"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"wrote {file} with 12 of 12 groups of trajectories, and with all metrics, answers and "
        "settings"
    ]
    text = file.read_text()
    assert "<script>document" not in text and "Copyright (c) 2022 Leon Sorokin" in text
    page.goto(file.as_uri())
    assert curve(page, "rl/reward")[0] == [0, 1, 2]
    page.click("nav >> text=trajectories")
    page.wait_for_selector(".trajectory")
    assert dumped.NASTY in page.locator(".trajectory").first.inner_text().replace("\n", "")
    assert page.locator(".group-item").count() == 12 and page.title() == "minirl"
    page.check("#flag-equal")
    wait_until(page, "document.querySelectorAll('.group-item').length === 3")
    page.click("nav >> text=answers")
    page.wait_for_selector(".answer")
    assert page.asked == [file.as_uri()]

    assert main([str(run), "--export", str(file), "--share", "0.25"]) == 0
    said = capsys.readouterr().out
    assert "with 3 of 12 groups" in said and "--share 1 exports all groups" in said
    page.reload()
    page.click("nav >> text=trajectories")
    assert "This file has 3 of 12 groups" in page.inner_text("#left-out")
    assert page.inner_text("#histograms .reading >> nth=0") == "48 episodes"  # of all groups
    page.goto(f"{file.as_uri()}#trajectories?run=0&step=0&group=3")
    wait_until(page, "document.querySelector('#detail').textContent.includes('without group 3')")
    assert main([str(run), "--export", str(file), "--share", "2"]) == 2
    assert "--share 2.0 must be above 0" in capsys.readouterr().err
    assert index.VALUES[0] == "advantage"
