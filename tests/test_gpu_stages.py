"""The stages that show what minirl does on a GPU: in a small form on a CPU, and how they are run.

Stages whose small form takes long here (whole runs, TRL's trainer, a second engine) are left to
`python -m benchmarks.gpu_stages --small`."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
import tyro

from benchmarks.gpu_stages import runner, s9_trl
from benchmarks.gpu_stages.runner import Arguments, Command, Runner, Stage
from minirl.config.parse import parse_flags
from minirl.config.rl import RLConfig
from programs import ROOT, fork

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="small forms of a CPU")
STAGES = ROOT / "benchmarks" / "gpu_stages"
# Module -> (flags, checks that hold).
SMALL = {
    "s2_engine": (
        ["dense"],
        [
            "rollout 0: refit is bitwise a full gather",
            "rollout 1: engine's log-probs are the trainer's",
            "same seeds give the same tokens",
            "steps that only decode sample vLLM's tokens",
        ],
    ),
    "s1_oracle": (["--cases", "lora"], ["lora: 3 steps on device and CPU"]),
    "s8_two_ranks": (["--cases", "tensor"], ["two ranks: tensor"]),
}
WITH_SIDES = ("s1_oracle", "s8_two_ranks")


@pytest.mark.parametrize("module", SMALL)
def test_a_stage_holds_on_a_cpu(module, tmp_path, monkeypatch):
    flags, checks = SMALL[module]
    words = [f"benchmarks.gpu_stages.{module}", *flags]
    if module in WITH_SIDES:
        words.insert(0, "stage_in_forks")
    ended = fork(words[0], words[1:], tmp_path / "log")
    lines = ended.out.splitlines()
    assert ended.code == 0, ended.out + ended.err
    assert not [line for line in lines if line.startswith("FAIL")]
    for check in checks:
        assert [line for line in lines if line.startswith(f"ok   {check}  ")], ended.out


def test_a_copy_of_the_runner_runs_a_stage(tmp_path):
    """As it is on a host that gets the stages in a folder of their own."""
    copy = tmp_path / "bundle" / "run"
    shutil.copytree(STAGES, copy)
    out = tmp_path / "out"
    command = [sys.executable, copy / "runner.py", "--minutes", "5", "--spent", "1.5"]
    command += ["--serial", "--small", "--out", out, "--only", "kernels"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "PASS kernels" in ended.stdout
    rows = json.loads((out / "results.json").read_text())["stages"]
    (kernels,) = [row for row in rows if row["status"] == "PASS"]
    checks = [row for row in kernels["results"] if "check" in row]
    assert len(checks) == 17 and all(row["ok"] for row in checks)
    summary = (out / "summary.txt").read_text()
    assert "ok   packed attention equals SDPA" in summary and "\n== kernels\n" in summary
    assert "[kernels] ok   attention dq" in (out / "log.txt").read_text()


def test_stages_are_listed_and_unknown_ones_refused():
    command = [sys.executable, "-m", "benchmarks.gpu_stages"]
    listed = subprocess.run([*command, "--list"], cwd=ROOT, capture_output=True, text=True)
    names = [line.split()[1] for line in listed.stdout.splitlines()]
    assert {"env", "engine", "oracle", "bench", "vs-minirl", "vs-trl", "micro"} < set(names)
    refused = subprocess.run(
        [*command, "--only", "nothing"], cwd=ROOT, capture_output=True, text=True
    )
    assert refused.returncode == 1 and "--only nothing: there is no such stage" in refused.stderr


@pytest.mark.parametrize("small", [False, True])
def test_every_stage_starts_programs_that_take_its_flags(small, tmp_path):
    """Runs with flags that minirl.rl has; and modules that are there."""
    stages = runner.all_stages(tmp_path, small)
    for stage in stages:
        for words in (command.words for command in stage.commands):
            if "minirl.rl" in words:
                parse_flags(RLConfig, words[words.index("minirl.rl") + 1 :])
            elif words[1] == "-m" and words[2].startswith("benchmarks."):
                assert (ROOT / f"{words[2].replace('.', '/')}.py").exists(), words


@pytest.mark.parametrize("small", [False, True])
def test_minirl_and_trl_do_the_same_work(small, tmp_path):
    stages = {stage.name: stage for stage in runner.all_stages(tmp_path, small)}
    words = stages["vs-minirl"].commands[1].words
    cfg = parse_flags(RLConfig, words[words.index("minirl.rl") + 1 :])
    for name in ("vs-trl", "vs-trl-128", "vs-trl-liger", "vs-trl-float32"):
        args = tyro.cli(s9_trl.Arguments, args=stages[name].commands[1].words[3:])
        given = s9_trl.settings(args)
        num_answers = given["per_device_train_batch_size"] * given["gradient_accumulation_steps"]
        rollout = cfg.rollout
        assert num_answers == rollout.prompts_per_step * rollout.samples_per_prompt
        assert given["num_generations"] == rollout.samples_per_prompt
        assert given["max_completion_length"] == rollout.max_tokens
        assert given["learning_rate"] == cfg.policy.lr
        assert given["max_steps"] == cfg.num_steps
        assert given["beta"] == cfg.algo.kl_coef
        assert args.folder / "model" == Path(cfg.policy.model)


def test_tests_that_run_alone_have_their_names():
    text = (ROOT / "tests" / "test_gpu.py").read_text()
    for name in (runner.TIMER_TEST, *runner.ENGINE_TESTS):
        assert f"def {name}(" in text


# --------------------------------------------------------------------------------------------------
# how stages are run, with programs of a line


def make_runner(folder: Path, stages: list[Stage], **changes) -> Runner:
    args = {"minutes": 5.0, "only": [], "serial": False, "small": False, "out": folder / "out"}
    args |= {"list_stages": False, "spent": 0.0}
    (folder / "work").mkdir()
    return Runner(Arguments(**(args | changes)), folder / "work", stages)


def is_running(pid: int) -> bool:
    """Whether there is such a process, and more of it than what its parent has not read."""
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def stage(name: str, wave: int, *programs: str, limit: float = 60.0) -> Stage:
    commands = [Command([sys.executable, "-c", program]) for program in programs]
    return Stage(name, wave, limit, commands)


def test_stages_go_on_after_failures_hangs_and_full_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "SHORTEST", 0)
    pid = tmp_path / "pid"
    sleeper = "import time; time.sleep(100)"
    hang = (
        "import pathlib, subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-c', {sleeper!r}])\n"
        f"pathlib.Path({str(pid)!r}).write_text(str(child.pid))\n"
        "print('it waits', flush=True)\n"
        "child.wait()"
    )
    marker = tmp_path / "marker"
    out_of_memory = (
        "import pathlib\n"
        f"marker = pathlib.Path({str(marker)!r})\n"
        "if not marker.exists():\n"
        "    marker.touch()\n"
        "    raise SystemExit('torch.OutOfMemoryError: CUDA out of memory.')"
    )
    stages = [
        stage(
            "fails", 0, "print('FAIL sum  1 is not 2'); raise ValueError('no')", "print('ok   b  ')"
        ),
        stage("hangs", 0, hang, limit=2.0),
        stage("memory", 0, out_of_memory),
        stage("later", 1, "print('ok   a  ')"),
        stage("named", runner.BY_NAME, "raise SystemExit(1)"),
    ]
    stages[3].keep = {"kept.txt": tmp_path / "made.txt"}
    (tmp_path / "made.txt").write_text("kept")
    began = time.monotonic()
    assert make_runner(tmp_path, stages).run() == 1
    assert time.monotonic() - began < 30
    fails, hangs, memory, later, named = stages
    assert fails.status == "FAIL"
    assert fails.note == "exit 1; 1 ok; sum  1 is not 2; ValueError: no"
    assert hangs.status == "TIME" and not is_running(int(pid.read_text()))
    assert memory.status == "PASS" and memory.note == "again, alone"
    assert later.status == "PASS" and later.note == "1 ok"
    assert named.status == "not run"
    assert (tmp_path / "out" / "kept.txt").read_text() == "kept"
    assert "[hangs] it waits" in (tmp_path / "out" / "log.txt").read_text()
    rows = json.loads((tmp_path / "out" / "results.json").read_text())["stages"]
    assert [row["status"] for row in rows] == ["FAIL", "TIME", "PASS", "PASS", "not run"]


def test_stages_are_skipped_when_the_time_is_over(tmp_path):
    stages = [stage("late", 0, "print('ok   a  ')")]
    assert make_runner(tmp_path, stages, minutes=0.1).run() == 1
    assert stages[0].status == "SKIP"


def test_a_model_that_is_there_is_not_written_again(tmp_path):
    made = tmp_path / "made"
    program = f"import pathlib; pathlib.Path({str(made)!r}).open('a').write('once')"
    stages = [stage(name, wave, program) for wave, name in enumerate("ab")]
    for each in stages:
        each.commands[0].unless = made
    assert make_runner(tmp_path, stages, only=["a", "b"]).run() == 0
    assert made.read_text() == "once"
