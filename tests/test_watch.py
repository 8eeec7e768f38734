"""A run that can be watched: its files while it runs and after it has failed or was stopped, and
the trackers (the real packages, offline). How a whole run ends is in test_program.py."""

import dataclasses
import json
import os
import signal
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import torch

from harness import ranks
from minirl.base.errors import UserError
from minirl.config import validate
from minirl.config.shared import LogConfig
from minirl.config.supervised import SFTConfig
from minirl.run import log, results
from minirl.run.trackers import Wandb
from minirl.supervise import watch
from programs import QUICKSTART, WORDS, alone, fork

on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="small runs on CPU")
SECONDS = 300
REWARD = """
calls = 0

def vowels(prompt, completion, row):
    return sum(letter in "aeiou" for letter in completion) / 10

def fails_later(prompt, completion, row):
    global calls
    calls += 1
    if calls > 20:
        raise ValueError("no more")
    return vowels(prompt, completion, row)
"""


def flags(folder: Path, function: str, *more: object) -> list[object]:
    (folder / "reward.py").write_text(REWARD)
    given = ["--config", QUICKSTART, "--output", folder / "run", "--sft.num-steps", 0]
    given += ["--data.train", WORDS, "--data.held-out", 4, "--eval.every", 1]
    given += ["--rollout.prompts-per-step", 2]
    given += ["--rollout.samples-per-prompt", 4, "--log.samples", 2]
    return [*given, "--reward.function", f"{folder}/reward.py:{function}", *more]


def summary_of(folder: Path) -> dict:
    return json.loads((folder / "run" / "summary.json").read_text())


def check_files(run: Path, num_evaluations: int) -> None:
    """What is there to look at, whole."""
    assert (run / "curves.png").read_bytes().startswith(b"\x89PNG")
    answers = [json.loads(line) for line in (run / "answers.jsonl").read_text().splitlines()]
    assert [row["step"] for row in answers] == list(range(num_evaluations))
    assert all(len(row["answers"]) == 4 for row in answers)
    assert not list(run.glob("*.partial"))


@on_cpu
def test_a_run_that_ends_by_a_mistake(tmp_path):
    given = flags(tmp_path, "fails_later", "--num-steps", 5)
    ended = fork("minirl.rl", given, tmp_path / "log", SECONDS)
    assert ended.code == 2, ended.err
    summary = summary_of(tmp_path)
    assert summary["state"] == "failed" and "no more" in summary["reason"]
    assert summary["reason"].startswith("error: ") and summary["held_out"]["reward"] >= 0
    num_steps = sum(line.startswith("minirl: rl step ") for line in ended.err.splitlines())
    check_files(tmp_path / "run", summary["step"] + 1)
    assert num_steps >= 1 and ended.err.rstrip().splitlines()[-1].startswith("minirl: error")


@on_cpu
def test_a_run_that_a_signal_stops(tmp_path):
    given = flags(tmp_path, "vowels", "--num-steps", 500, "--eval.every", 2)
    running = alone("minirl.rl", given, tmp_path / "log")
    running.wait_for(lambda: "rl step 1/" in running.err.read_text(), SECONDS)
    assert summary_of(tmp_path)["state"] == "running"
    running.process.send_signal(signal.SIGINT)
    ended = running.end(SECONDS)
    assert ended.code == 0, ended.err
    summary = summary_of(tmp_path)
    assert summary["state"] == "stopped" and "stopped by a signal" in summary["reason"]
    assert summary["step"] >= 1 and summary["tokens"]["generated"] > 0
    assert (tmp_path / "run" / "curves.png").exists()


# --------------------------------------------------------------------------------------------------
# parts


def hang_up(mesh) -> bool:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    rank = watch.Watch()
    rank.listen()
    os.kill(os.getpid(), signal.SIGHUP)
    time.sleep(0.1)
    rank.end()
    return True


def test_nohup_keeps_a_run_that_loses_its_terminal():
    assert ranks(1, hang_up) == [True]


def test_the_end_is_noted_even_if_it_cannot_be_written(tmp_path):
    """A folder that is gone, or a summary that is none: the run has said why it ends."""
    results.record_end(tmp_path / "gone", "failed", "x")
    (tmp_path / "summary.json").write_text("{")
    results.record_end(tmp_path, "failed", "x")
    assert (tmp_path / "summary.json").read_text() == "{"


def test_a_file_system_that_hangs_does_not_hold_the_end(monkeypatch):
    import threading

    monkeypatch.setattr(watch, "SECONDS_TO_RECORD", 0.2)
    hanging = threading.Event()
    rank = watch.Watch()
    rank.record_end = lambda state, reason: hanging.wait(60)
    rank._record("failed", "x")  # returns
    hanging.set()


def test_answers_are_dropped_with_the_steps_that_are_made_again(tmp_path):
    first = results.Results(tmp_path, 0, resumed=False)
    for step in (-1, 0, 2, 4):
        first.add_answers(step, None, [{"prompt": "a", "answer": "b", "reward": 1.0}])
    results.Results(tmp_path, 2, resumed=True)
    rows = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [-1, 0]
    assert json.loads((tmp_path / "summary.json").read_text())["state"] == "running"


def test_a_row_that_is_being_written_is_left_out(tmp_path):
    from minirl.run.results import read_rows

    (tmp_path / "metrics.jsonl").write_text('{"phase": "rl", "step": 0}\n{"phase": "r')
    assert read_rows(tmp_path / "metrics.jsonl") == [{"phase": "rl", "step": 0}]
    assert read_rows(tmp_path / "none.jsonl") == []


def test_texts_of_chats_and_their_parts():
    chat = [{"role": "user", "content": [{"type": "text", "text": "how\nmany?"}]}]
    shown = results.describe([{"prompt": chat, "answer": "a\n b", "reward": 0.5}])
    assert shown.startswith("  [0.50] ") and shown.endswith(" -> a b") and "\n" not in shown
    assert "user: " in results.full_text([{"prompt": chat, "answer": "x", "reward": 1}])


HOSTILE = "\x1b]0;owned\x07\x1b[2J\r\x9b2J\ttab\nline"
HARMLESS = "\\x1b]0;owned\\x07\\x1b[2J\\x0d\\x9b2J\ttab\nline"


def test_control_characters_are_escaped_on_a_terminal(tmp_path, capsys, monkeypatch):
    """In the log, and in the message with which a run ends."""
    log.say(HOSTILE)
    shown = results.describe([{"prompt": HOSTILE, "answer": HOSTILE, "reward": 0.5}])
    log.say(shown)
    assert HARMLESS in capsys.readouterr().err and "\x1b" in shown

    monkeypatch.setattr(watch, "leave", sys.exit)
    reason = tmp_path / "reason.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(reason))
    with pytest.raises(SystemExit):
        watch.Watch().end_all(HOSTILE, 2)
    assert HARMLESS in capsys.readouterr().err
    assert json.loads(reason.read_text())["message"]["message"].endswith(HARMLESS)


def test_the_closing_table_has_no_line_for_what_was_not_done():
    scores = results.accuracies({"before_rl": {"scores": {"accuracy": 0.25}}})
    summary = {"gpu_memory_gib": {}, "tokens_per_second_by_phase": {}, "seconds": {"rollout": 12.0}}
    text = results.table(summary | {"sizes": {}, "peak_rss_mb": 1234.0}, scores)
    assert [line.split("  ")[0] for line in text.splitlines() if not line.startswith("--")] == [
        "held-out accuracy before RL",
        "seconds, rollout",
        "peak memory of a rank, MiB",
    ]
    assert "---\n---" not in text


# --------------------------------------------------------------------------------------------------
# trackers


def test_a_missing_package_is_told_at_the_start():
    with (
        mock.patch.object(validate, "find_spec", lambda package: None),
        pytest.raises(UserError, match="log.wandb = 'mine': it needs the package.*wandb`"),
    ):
        validate.check_settings(settings_of(LogConfig(wandb="mine")), 1)
    validate.check_settings(settings_of(LogConfig()), 1)


def settings_of(log: LogConfig) -> SFTConfig:
    cfg = SFTConfig(log=log)
    cfg.policy.model = "scratch"
    cfg.data.train = "a.jsonl"
    return cfg


def write_log(folder: Path, cfg: LogConfig, step: int) -> None:
    made = log.Log(
        folder, rank=0, first_step=step, open_wandb=lambda: Wandb(cfg, folder, {"seed": 1})
    )
    made.scalars("rl", step, {"reward": 0.5 + step})
    made.scalars("eval", step - 1, {"accuracy": 0.25})
    made.text("answers", step, "a <b>")
    made.close()


def test_wandb_offline_goes_on_under_its_id(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    cfg = LogConfig(wandb="mine", run_name="first")
    for step in (0, 1):
        write_log(tmp_path, cfg, step)
    known = json.loads((tmp_path / "trackers.json").read_text())
    assert known["name"] == "first"
    runs = sorted(tmp_path.glob("wandb/offline-run-*"))
    # One that begins in the same second has a number behind the id.
    write_log(tmp_path, dataclasses.replace(cfg, run_name="second"), 2)
    renamed = json.loads((tmp_path / "trackers.json").read_text())
    assert renamed == {"name": "second", "id": known["id"]}
    assert len(runs) == 2 and all(f"-{known['id']}" in run.name for run in runs)
    data = b"".join(path.read_bytes() for path in tmp_path.glob("wandb/*/run-*.wandb"))
    assert b"rl/reward" in data and b"eval/accuracy" in data and b"seed" in data
    texts = [path.read_text() for path in tmp_path.glob("wandb/*/files/answers.md")]
    assert any("a <b>" in text for text in texts)


def test_wandb_keeps_the_rows_of_a_run_that_fails(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    tracker = Wandb(LogConfig(wandb="mine"), tmp_path, {})
    tracker.log("rl", 7, {"reward": 0.5})
    tracker.close(1)
    data = b"".join(path.read_bytes() for path in tmp_path.glob("wandb/*/run-*.wandb"))
    assert b"rl/reward" in data


def test_wandb_without_a_login_is_one_message(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    failing = mock.Mock(side_effect=wandb.errors.UsageError("api_key not configured"))
    monkeypatch.setattr(wandb, "init", failing)
    with pytest.raises(UserError, match="log.wandb = mine: api_key.*WANDB_MODE=offline"):
        Wandb(LogConfig(wandb="mine"), tmp_path, {})
    assert not list(tmp_path.iterdir())  # Or the same command, after a login, would be refused.
