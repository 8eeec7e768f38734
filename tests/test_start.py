"""How programs start: flags and mistakes are answered before anything slow is imported, every
setting has its sentence, and what ends a run is the last thing on the screen."""

import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.request import proxy_bypass

import psutil
import pytest
from requests.utils import get_environ_proxies

import tiny
from benchmarks import fits
from minirl.base.errors import UserError
from minirl.config import validate
from minirl.config.parse import parse_flags
from minirl.config.rl import RLConfig
from minirl.config.shared import EvaluateConfig, ExportConfig
from minirl.config.supervised import DPOConfig, KTOConfig, RMConfig, ServeConfig, SFTConfig
from minirl.supervise.cli import reach_this_machine
from nodes import Job, Node
from programs import BEHIND_A_PROXY, QUICKSTART, ROOT, WORDS, Ended, fork, rows_of, torchrun

CLASSES = (
    RLConfig,
    SFTConfig,
    RMConfig,
    DPOConfig,
    KTOConfig,
    EvaluateConfig,
    ExportConfig,
    ServeConfig,
)

# --------------------------------------------------------------------------------------------------
# seconds to an answer

SLOW = ("torch", "numpy", "transformers", "datasets", "vllm", "reasoning_gym", "matplotlib")
SAY_IMPORTED = f"""
import runpy, sys
module, *flags = sys.argv[1:]
sys.argv = [module, *flags]
code = 0
try:
    runpy.run_module(module, run_name="__main__", alter_sys=True)
except SystemExit as stop:
    code = stop.code
print("imported:", *(name for name in {SLOW} if name in sys.modules))
sys.exit(code)
"""


def start(module: str, flags: list[str], folder: Path) -> tuple[Ended, float]:
    """How a program ends that only has to answer, and the CPU-seconds that it takes."""
    command = [sys.executable, "-c", SAY_IMPORTED, module, *flags]
    out, err = folder / "out.txt", folder / "err.txt"
    with out.open("w") as to_out, err.open("w") as to_err:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=to_out,
            stderr=to_err,
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    ended = Ended(process.returncode, out.read_text(), err.read_text())
    return ended, usage.ru_utime + usage.ru_stime


PROGRAMS = ("rl", "sft", "rm", "dpo", "kto", "evaluate", "checkpoint", "plan")


@pytest.mark.parametrize("program", PROGRAMS)
def test_help_comes_in_a_second(program, tmp_path):
    ended, seconds = start(f"minirl.{program}", ["--help"], tmp_path)
    assert (ended.code, ended.err) == (0, "")
    assert f"usage: python -m minirl.{program}" in ended.out
    assert ended.out.endswith("imported:\n")
    assert seconds < 1.0 * SLACK


def test_a_plan_comes_in_a_second_without_torch(tmp_path):
    """With advice, for a model of which there is only a config."""
    fits.MODELS["Qwen3-32B"].save_pretrained(tmp_path)
    flags = ["--config", str(ROOT / "configs" / "qwen3_32b_8gpu.yaml"), "--gpu", "h100"]
    ended, seconds = start("minirl.plan", [*flags, "--policy.model", str(tmp_path)], tmp_path)
    assert (ended.code, ended.err) == (0, "")
    assert "fits with activation checkpointing" in ended.out
    assert ended.out.endswith("imported:\n")
    assert seconds < 1.0 * SLACK


SLACK = 2  # On a machine that is slow, or busy with other things.
MISTAKES = {  # name -> program, flags, what is said
    "a typo": ("rl", "--num-stepz 3", "--num-steps"),
    "a typo in a file": ("rl", "--config typo.yaml", "did you mean num_steps"),
    "no file": ("rl", "--config none.yaml", "no such file"),
    "a bound": ("sft", "--policy.lr -1", "policy.lr = -1"),
    "a combination": (
        "rl",
        "--policy.model scratch --data.train rows.jsonl --rollout.samples-per-prompt 1",
        "compares the samples of one prompt",
    ),
    "no rows": (
        "dpo",
        "--policy.model a/b --data.train none.jsonl",
        "data.train = 'none.jsonl': no such file",
    ),
    "no model": (
        "sft",
        "--data.train rows.jsonl --policy.model models/mine",
        "policy.model = 'models/mine' is neither a folder nor a hub id",
    ),
    "no reward": (
        "rl",
        "--policy.model scratch --data.train rows.jsonl --reward.function none.py:score",
        "reward.function = none.py:score: no file none.py",
    ),
    "no environment": (
        "evaluate",
        "--model a/b --data.eval rows.jsonl --env.name none.py:Mine?x=1",
        "env.name = none.py:Mine?x=1: no file none.py",
    ),
    "no template": (
        "sft",
        "--policy.model scratch --data.train rows.jsonl --data.chat-template none.jinja",
        "data.chat_template = 'none.jinja': no such file",
    ),
    "no judge": ("rm", "serve runs/none", "model = 'runs/none' is neither a folder"),
    "no run": ("checkpoint", "export runs/none", "run = runs/none"),
    "no card": ("plan", "--gpu h2000", "--gpu 'h2000' is not a known card"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_answered_in_a_second(name, tmp_path):
    program, flags, message = MISTAKES[name]
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    (tmp_path / "typo.yaml").write_text("num_stepz: 3\n")
    ended, seconds = start(f"minirl.{program}", flags.split(), tmp_path)
    assert ended.code == 2 and len(ended.errors()) == 1, ended.err
    assert message in " ".join(ended.err.split())
    assert ended.out == "imported:\n"
    assert seconds < 1.0 * SLACK


@pytest.mark.parametrize(
    "model", ["a", "org/name", "org/name-1.5_b", "./there", "runs/there", "there"]
)
def test_what_may_be_a_model_is_left_to_who_opens_it(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("there", "runs/there"):
        Path(folder).mkdir(parents=True)
    validate.check_model(model, "policy.model")


@pytest.mark.parametrize("model", ["", "a/b/c", "./a", "/a/b", "../a", "~/a", "runs/a", "a b"])
def test_what_can_be_no_model_is_refused(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="policy.model = .* neither a folder nor a hub id"):
        validate.check_model(model, "policy.model")


# --------------------------------------------------------------------------------------------------
# the help


def help_of(cls, flags, capsys) -> str:
    with pytest.raises(SystemExit):
        parse_flags(cls, [*flags, "--help"])
    return capsys.readouterr().out


@pytest.mark.parametrize("cls", CLASSES)
def test_every_setting_has_a_sentence(cls, capsys):
    """The comment of its field; tyro adds the default in parentheses."""
    entries = re.split(r"\n  (?=--[a-z])", help_of(cls, [], capsys))[1:]
    assert entries
    for entry in entries:
        words = entry.partition("(default")[0].partition(" -----")[0].split()
        meaning = [
            word for word in words if not (word.startswith(("-", "{", "[")) or word.isupper())
        ]
        assert len(meaning) > 1, f"say in the comment of {words[0]} what it means"


def test_the_help_shows_the_values_of_a_file(tmp_path, capsys):
    file = tmp_path / "c.yaml"
    file.write_text(
        "policy: {betas: [0.8, 0.7], cpu_offload: true}\nreward: {function: [exact, a.py:f]}\n"
        "data: {train: rows.jsonl, chat_template_kwargs: {x: 'true', y: text}}\n"
    )
    text = " ".join(help_of(RLConfig, ["--config", str(file)], capsys).split())
    assert "Of AdamW. (default: 0.8 0.7)" in text
    assert "(default: exact a.py:f)" in text
    assert "(default: rows.jsonl)" in text
    assert """(default: x '"true"' y text)""" in text


# --------------------------------------------------------------------------------------------------
# the last thing on the screen

USER_PROGRAM = """
import os
from minirl.supervise import cli
from minirl.config.shared import EvaluateConfig
from minirl.base.errors import UserError

def main(cfg, mesh):
    case = os.environ["CASE"]
    if case == "all find it":
        raise UserError("the rows are wrong;\\ncorrect them")
    if case == "one finds it" and mesh.rank == 1:
        raise UserError("the rows are wrong;\\ncorrect them")
    if case == "a bug" and mesh.rank == 1:
        {}["accuracy"]
    mesh.barrier()

if __name__ == "__main__":
    cli.run(EvaluateConfig, main)
"""
WRONG = "minirl: error: the rows are wrong;\n  correct them"
CASES = {  # case -> flags, the reason in torchrun's report, the exit code of its rank
    "a typo": ("--num-stepz 3", r"minirl: error: wrong flags\n[^=]*--num-stepz[^=]*", 2),
    "all find it": ("", WRONG, 2),
    "one finds it": ("", WRONG, 2),
    "a bug": ("", r"minirl: rank 1 crashed\n  Traceback(?s:.*)\n  KeyError: 'accuracy'\s*", 1),
}


@pytest.mark.parametrize("case", CASES)
def test_torchrun_ends_with_the_reason(case, tmp_path, monkeypatch):
    """One under torchrun as it is, the others under an agent of it whose ranks are forks."""
    flags, reason, code = CASES[case]
    (tmp_path / "user_program.py").write_text(USER_PROGRAM)
    tiny.make(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "a", "answer": "b"}))
    words = ["--model", str(tmp_path / "model"), "--data.eval", str(tmp_path / "rows.jsonl")]
    words += flags.split()
    if case == "one finds it":
        env = {"CASE": case, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
        ended = torchrun("user_program", words, tmp_path / "log", env).end(300)
    else:
        monkeypatch.syspath_prepend(tmp_path)
        node = Node("127.0.0.1", tmp_path, environment={"CASE": case})
        ended = Job([node], "user_program", [words], tmp_path / "log").end(300)
    assert ended.code == 1

    # Nothing but torchrun's report, of one rank.
    _, failures, root_cause = re.split(r"\n-{10,}\n", ended.err)
    shown = re.fullmatch(
        r"Root Cause \(first observed failure\):\n\[\d\]:\n"
        rf"(?:  \w+ *: .*\n){{3}}  exitcode  : {code} .*\n  error_file: .*\n"
        rf"  traceback : {reason}\n=+\s*",
        root_cause,
    )
    assert shown, root_cause
    # A rank that has not come to its flags yet is ended by torchrun, and listed for that.
    others = set(re.findall(r"traceback : (.*)", failures))
    assert all("SIGTERM" in other for other in others), failures
    assert case == "a typo" or not others, failures
    assert "To enable traceback" not in ended.err
    # Said once by a rank, too, for logs of its own.
    assert case == "a bug" or len(ended.errors()) == 1, ended.err


def test_the_quickstart_refuses_a_mistake_on_several_machines_together(monkeypatch, capsys):
    """A rank that does not know the others' flags joins them, and does not answer alone."""
    from minirl.supervise import cli, lifecycle

    joined = []
    monkeypatch.setattr(lifecycle, "run", lambda *what: joined.append(what))
    monkeypatch.setattr(sys, "argv", ["minirl.rl", "--config", str(QUICKSTART), "--seed", "-1"])
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    cli.run(RLConfig, "minirl.rl:Trainer.main")
    ((config, cfg, mistake, program),) = joined
    assert (config, cfg, program) == (RLConfig, None, "minirl.rl:Trainer.main")
    assert "seed = -1" in str(mistake) and "".join(capsys.readouterr()) == ""

    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(SystemExit) as stop:
        cli.run(RLConfig, "minirl.rl:Trainer.main")
    assert stop.value.code == 2 and "seed = -1" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit) as stop:
        cli.run(RLConfig, "minirl.rl:Trainer.main")
    assert stop.value.code == 0 and "".join(capsys.readouterr()) == ""


OPEN_STREAMS = """
import os, sys
from minirl.supervise.cli import open_streams
open_streams()
for number, name in enumerate(("stdin", "stdout", "stderr")):
    assert vars(sys)[name].fileno() == number and os.readlink(f"/proc/self/fd/{number}")
print("half a pair: \\ud800", file=sys.stderr)
with open(sys.argv[1], "w") as file:
    assert file.fileno() > 2
"""


@pytest.mark.parametrize("closed", ["<&- >&- 2>&-", ">&-", "2>&-", ""])
def test_a_program_may_be_started_without_streams(closed, tmp_path):
    """As some put a job into the background; no file that it writes gets what is printed."""
    script = f'exec "$@" {closed}'
    command = ["sh", "-c", script, "sh", sys.executable, "-c", OPEN_STREAMS, tmp_path / "file"]
    subprocess.run(command, check=True)
    assert (tmp_path / "file").read_text() == ""


@pytest.mark.parametrize(
    ("given", "unproxied"),
    [
        ({}, {"127.0.0.1", "localhost", "0.0.0.0"}),
        ({"NO_PROXY": "a.com"}, {"127.0.0.1", "localhost", "0.0.0.0", "a.com"}),
        ({"no_proxy": "a.com"}, {"127.0.0.1", "localhost", "0.0.0.0", "a.com"}),
        ({"NO_PROXY": "*"}, {"127.0.0.1", "localhost", "0.0.0.0", "a.com", "b.com"}),
    ],
)
def test_this_machine_is_reached_past_a_proxy(given, unproxied, monkeypatch):
    """Also by libraries that read one of the two names first."""
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (given | BEHIND_A_PROXY).items():
        monkeypatch.setenv(name, value)
    reach_this_machine()
    hosts = ("127.0.0.1", "localhost", "0.0.0.0", "a.com", "b.com")
    assert {host for host in hosts if proxy_bypass(host)} == unproxied
    assert {host for host in hosts if not get_environ_proxies(f"http://{host}/")} == unproxied


def test_a_trainer_of_a_file_is_refused_ranks_that_only_generate(monkeypatch):
    """They have trainers of their own, which would run in its place."""
    from minirl.supervise import cli, lifecycle

    joined = []
    monkeypatch.setattr(lifecycle, "run", lambda *what: joined.append(what[2:]))
    flags = ["--config", str(QUICKSTART), "--parallel.generators", "1"]
    monkeypatch.setattr(sys, "argv", ["my_trainer.py", *flags])
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    cli.run(RLConfig, "my_trainer:MyTrainer.main")
    cli.run(RLConfig, "minirl.rl:Trainer.main", "minirl.split:main")
    (refused, _), taken = joined
    assert "parallel.generators = 1: only `-m minirl.rl`" in str(refused)
    assert taken == (None, "minirl.split:main")


def test_a_program_of_two_ranks_may_train_two_times(tmp_path):
    """The end of the first run's engines leaves the groups of ranks as they are."""
    flags = ["--config", QUICKSTART, "--num-steps", 2, "--sft.num-steps", 0, "--eval.every", 0]
    flags += ["--data.train", WORDS, "--data.held-out", 4, "--output", tmp_path]
    ended = fork("trains_twice", flags, tmp_path / "log", world=2)
    assert ended.code == 0, ended.err
    first, second = (rows_of(tmp_path / name, "rl") for name in ("first", "second"))
    assert len(first) == 2 and first == second


FAILING_TEST = """
import sys
from pathlib import Path
import psutil
from programs import Running

def test_that_does_not_come_to_its_end(tmp_path):
    sleeps = "import subprocess; subprocess.run(['sleep', '60'])"
    running = Running([sys.executable, "-c", sleeps], tmp_path / "log")
    running.wait_for(lambda: psutil.Process(running.process.pid).children(), 60)
    Path("started").write_text(" ".join(str(p.pid) for p in psutil.Process().children(True)))
    assert False, "as it were"
"""


def test_what_a_failed_test_has_started_ends_with_it(tmp_path):
    (tmp_path / "test_failing.py").write_text(FAILING_TEST)
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "test_failing.py"]
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'tests'}:{ROOT}"}
    ended = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert "1 failed" in ended.stdout and "as it were" in ended.stdout, ended.stdout
    started = (tmp_path / "started").read_text().split()
    assert len(started) == 2
    for pid in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            assert psutil.Process(int(pid)).status() == psutil.STATUS_ZOMBIE
