"""What ends a run before its time: signals, time limits, other ranks, and the user's code. Each is
told once, by its cause, and no run hangs."""

import asyncio
import contextlib
import errno
import faulthandler
import http.server
import io
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from subprocess import PIPE
from types import SimpleNamespace
from unittest import mock

import psutil
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import tiny
from harness import ranks
from minirl.base.errors import UserError
from minirl.base.log import say
from minirl.base.oversight import Oversight
from minirl.checkpoint.state import finished
from minirl.config.rl import DebugConfig
from minirl.config.shared import RewardConfig
from minirl.config.supervised import SFTConfig
from minirl.rewards.http import RemoteReward
from minirl.rewards.scoring import Rewards
from minirl.run.metrics import Health
from minirl.run.trainer import BaseTrainer
from minirl.supervise import watch
from minirl.supervise.lifecycle import explain
from minirl.supervise.watch import Watch
from nodes import Job, Node
from programs import Ended, fork
from test_program import read, repeatable

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="two ranks with an engine each")

# Beside the time that the machine takes for anything at all.
SECONDS = 180

USER = '''
import asyncio, itertools, json, os, re, sys, threading, time
from pathlib import Path
from minirl.envs import Agent, Env, Result
from minirl.supervise import watch

here = Path(__file__).parent
rank = os.environ.get("RANK", "0")

def in_the_run(function):
    """Not at the first call, before the model is loaded."""
    def call(prompt, completion, row):
        return 1.0 if completion.startswith("<think>") else function(prompt, completion, row)
    return call

def good(prompt, completion, row):
    return len(completion) / 10

calls = itertools.count()

@in_the_run
def held_up(prompt, completion, row):
    """The second evaluation waits until the test lets it continue."""
    if next(calls) >= 8:  # a rank's share of the first
        (here / "scoring").touch()
        while not (here / "told").exists():
            time.sleep(0.01)
    return len(completion) / 10

@in_the_run
def sleeps(prompt, completion, row):
    time.sleep(1000 if rank == "0" else 0)
    return 1.0

@in_the_run
def sleeps_and_another_hears_late(prompt, completion, row):
    if rank == "1":
        watch.LOOK_SECONDS = 10.0  # as on a loaded machine: its watch has no turn for so long
    return sleeps(prompt, completion, row)

@in_the_run
def exits(prompt, completion, row):
    sys.exit(0)

def always(prompt, completion, row):
    return 1.0

@in_the_run
def closes(prompt, completion, row):
    sys.stdout.close()
    sys.stderr.close()
    return 1.0

@in_the_run
def closes_and_fails(prompt, completion, row):
    sys.stderr.close()
    raise RuntimeError("after closing")

@in_the_run
def closes_all(prompt, completion, row):
    os.closerange(3, 1000)
    return 1.0

@in_the_run
def leaves(prompt, completion, row):
    if rank == "1" or os.environ.get("WORLD_SIZE") == "1":
        os._exit(0)
    return 1.0

def leaves_thread(prompt, completion, row):
    if threading.active_count() < 50:
        threading.Thread(target=time.sleep, args=(1000,)).start()
    return len(completion) / 10

@in_the_run
def stops(prompt, completion, row):
    if rank == "1":
        os.kill(os.getpid(), 19)
    return 1.0

class Asynchronous(Env):
    graded = True
    async def reset(self, row):
        return row["prompt"]
    async def step(self, state):
        return Result(done=True)

class Slow(Asynchronous):
    """Six turns of training prompts, and so a second at least."""
    async def step(self, state):
        if state.row["prompt"] == "held out":
            return Result(done=True)
        (here / "training").touch()
        await asyncio.sleep(0.2)
        return Result(observation="more", done=state.turn == 5)

class Fails(Asynchronous):
    async def reset(self, row):
        raise RuntimeError("no server")

class Mistyped(Asynchronous):
    async def step(self, state):
        return Result(done=state.anser == "1")

class Blocks(Asynchronous):
    async def step(self, state):
        time.sleep(1000)

class Swallows(Asynchronous):
    async def step(self, state):
        while True:
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                pass

class Exits(Asynchronous):
    async def step(self, state):
        sys.exit(0)

class Cancels(Asynchronous):
    async def step(self, state):
        raise asyncio.CancelledError("mine")

class Times(Asynchronous):
    """Its time is over, and that of the run is not."""
    async def step(self, state):
        raise TimeoutError("mine")

class Stops(Env):
    graded = True
    def reset(self, row):
        raise StopIteration("mine")

class Unmade(Env):
    def __init__(self):
        sys.exit(0)

class AgentExits(Agent):
    async def run(self, row, session):
        sys.exit(0)

def estimate(rewards, groups):
    sys.exit(0)

class Later(Env):
    """A constructor that fails when the run is under way."""
    made = 0
    graded = True
    def __init__(self):
        Later.made += 1
        if Later.made > 3:
            self.fail()
    def reset(self, row):
        return row["prompt"]
    def step(self, state):
        return Result(done=True)

class BlocksLater(Later):
    def fail(self):
        time.sleep(1000)

class RaisesLater(Later):
    def fail(self):
        raise RuntimeError("no more of them")
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("faults")
    tiny.make(folder / "model")
    rows = [json.dumps({"prompt": f"{i} times {i}", "answer": str(i * i)}) for i in range(20)]
    (folder / "rows.jsonl").write_text("\n".join(rows))
    pairs = [json.dumps({"messages": chat(i)}) for i in range(20)]
    (folder / "chats.jsonl").write_text("\n".join(pairs))
    (folder / "user.py").write_text(USER)
    (folder / "exits.py").write_text("import sys\nsys.exit(0)\n")
    (folder / "engine.py").write_text(
        "import time\n"
        "from minirl.engine.engine import RolloutEngine\n"
        "RolloutEngine.step = lambda engine: time.sleep(1000)\n"
        "def good(prompt, completion, row):\n"
        "    return 1.0\n"
    )
    return folder


def chat(number: int) -> list[dict]:
    return [
        {"role": "user", "content": f"{number}?"},
        {"role": "assistant", "content": "yes" * (number % 3 + 1)},
    ]


def flags(folder: Path, output: Path, *more: object) -> list:
    given = {
        "output": output,
        "policy.model": folder / "model",
        "policy.dtype": "float32",
        "policy.lr": 1e-3,
        "data.train": folder / "rows.jsonl",
        "data.held-out": 2,
        "data.max-prompt-tokens": 32,
        "reward.function": f"{folder}/user.py:good",
        "reward.timeout-seconds": 30,
        "num-steps": 2,
        "rollout.prompts-per-step": 2,
        "rollout.samples-per-prompt": 2,
        "rollout.max-tokens": 6,
        "eval.every": 0,
        "engine.kv-cache-gb": 0.01,
        "env.timeout-seconds": 30,
        "timeout-minutes": 1,
    }
    pairs = [[f"--{name}", value] for name, value in given.items()]
    return [*sum(pairs, []), *more]


# --------------------------------------------------------------------------------------------------
# signals


def start(folder: Path, module: str, given: list, log: Path) -> Job:
    """Two ranks under an agent of torchrun, in forks."""
    return Job([Node("127.0.0.1", folder)], module, [given], log)


def stop(job: Job, number: int, to: list) -> tuple[Ended, float]:
    """Send a signal to processes; return how the job ended, and after how many seconds."""
    began = time.monotonic()
    for process in to:
        os.kill(process.pid, number)
    ended = job.end(SECONDS)
    return ended, time.monotonic() - began


def steps(output: Path, phase: str = "rl") -> list[int]:
    path = output / "metrics.jsonl"
    if not path.exists():
        return []
    return [row["step"] for row in read(path) if row["phase"] == phase]


def test_a_signal_to_one_rank_stops_all_and_the_run_goes_on_bitwise(folder, tmp_path):
    out = tmp_path / "out"
    given = flags(folder, out, "--num-steps", 12, "--resume")  # in an empty folder, it begins
    job = start(folder, "minirl.rl", given, tmp_path / "log")
    job.wait_for(lambda: len(steps(out)) >= 2)
    ended, seconds = stop(job, signal.SIGUSR1, [job.agents[0].ranks()[1]])
    print(f"SIGUSR1: ended after {seconds:.1f} s")
    assert ended.code == 0, ended.err
    assert "Traceback" not in ended.err and not ended.errors()
    assert ended.err.count("SIGUSR1: the run ends after this step") == 1
    (saved,) = finished(out)
    assert saved < 12 and steps(out) == list(range(saved))
    assert f"stopped by a signal after {saved} steps; saved" in ended.err
    assert "the same command and --resume" in ended.err

    resumed = fork("minirl.rl", given, tmp_path / "resumed", world=2)
    undisturbed = flags(folder, tmp_path / "whole", "--num-steps", 12)
    whole = fork("minirl.rl", undisturbed, tmp_path / "whole-log", world=2)
    assert resumed.code == whole.code == 0, resumed.err + whole.err
    rows = [repeatable(read(tmp_path / name / "metrics.jsonl")) for name in ("out", "whole")]
    assert rows[0] == rows[1]
    weights = [load_file(tmp_path / name / "model/model.safetensors") for name in ("out", "whole")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[1])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_torchrun_passes_signals_on_and_waits(folder, tmp_path, number):
    out = tmp_path / "out"
    given = {
        "output": out,
        "policy.model": folder / "model",
        "policy.dtype": "float32",
        "num-steps": 10**6,
        "batch-size": 4,
        "data.train": folder / "chats.jsonl",
        "data.held-out": 2,
        "data.max-tokens": 64,
    }
    pairs = [[f"--{name}", value] for name, value in given.items()]
    job = start(folder, "minirl.sft", sum(pairs, []), tmp_path / "log")
    job.wait_for(lambda: len(steps(out, "train")) > 2)
    ranks = job.agents[0].ranks().values()
    ended, seconds = stop(job, number, [job.agents[0].process])
    print(f"{number.name}: ended after {seconds:.1f} s")
    assert not any(p.is_running() for p in ranks)
    assert ended.err.count(f"{number.name}: the run ends after this step") == 1, ended.err
    assert ended.err.count("stopped by a signal after") == 1
    assert " crashed\n" not in ended.err and "Traceback" not in ended.err and not ended.errors()
    assert list(finished(out)) == [len(steps(out, "train"))]


def test_a_second_interrupt_ends_all_at_once(folder, tmp_path):
    """torchrun sends SIGTERM for it."""
    given = flags(folder, tmp_path / "out", "--reward.function", f"{folder}/user.py:sleeps")
    job = start(folder, "minirl.rl", given, tmp_path / "log")
    printed = job.agents[0].log.read_text
    job.wait_for(lambda: "no finished checkpoint" in printed() or "writing" in printed())
    job.wait_for((tmp_path / "out/metrics.jsonl").exists)
    time.sleep(1)
    os.kill(job.agents[0].process.pid, signal.SIGINT)
    job.wait_for(lambda: "SIGINT: the run ends" in printed(), 30)
    ended, seconds = stop(job, signal.SIGINT, [job.agents[0].process])
    print(f"second SIGINT: ended after {seconds:.1f} s")
    assert ended.err.count("ended at once, nothing is saved; continue with --resume") == 1, (
        ended.err
    )
    assert "Traceback" not in ended.err and "stopped by" not in ended.err
    assert not (tmp_path / "out/checkpoints").exists()


def test_a_signal_before_the_first_step_ends_at_once(folder, tmp_path):
    """With code 0: whoever queued the job starts it again."""
    (folder / "slow.py").write_text("import time\ntime.sleep(1000)\n")
    given = flags(folder, tmp_path / "out", "--reward.function", f"{folder}/slow.py:f")
    job = start(folder, "minirl.rl", given, tmp_path / "log")
    job.wait_for(lambda: len(job.agents[0].ranks()) == 2)
    time.sleep(3)
    ended, _ = stop(job, signal.SIGUSR1, list(job.agents[0].ranks().values())[:1])
    assert ended.code == 0, ended.err
    assert ended.err.count("there is nothing to save yet; continue with --resume") == 1, ended.err


STARTS_PROGRAMS = """
import os
from subprocess import Popen
from minirl.supervise.watch import Watch

of_an_agent = Popen(["sh", "-c", "sleep 1000; true"])
with_a_session = Popen(["sleep", "1000"], start_new_session=True, stdout=-3, stderr=-3)
shell = f"/proc/{of_an_agent.pid}/task/{of_an_agent.pid}/children"
while not open(shell).read():
    pass
print(of_an_agent.pid, open(shell).read(), with_a_session.pid, flush=True)
Watch().end_all("the reason", 3)
"""


def test_programs_that_a_rank_has_started_end_with_it():
    """But for one with a session of its own, as a tracker has."""
    ended = subprocess.run([sys.executable, "-c", STARTS_PROGRAMS], capture_output=True, text=True)
    assert ended.returncode == 3 and "minirl: the reason" in ended.stderr, ended.stderr
    *of_an_agent, with_a_session = map(int, ended.stdout.split())
    os.kill(with_a_session, signal.SIGKILL)
    assert len(of_an_agent) == 2
    assert not any(is_running(pid) for pid in of_an_agent)


def is_running(pid):
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


LEAVES_A_REASON = """
import os, resource
from minirl.supervise import write_error_file
resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))
write_error_file("a longer reason than this disk has room for")
"""


def test_a_full_disk_leaves_no_half_of_an_error_file(tmp_path):
    """torchrun would end with a traceback of its own, for JSON that it cannot read."""
    path = tmp_path / "error.json"
    environment = {**os.environ, "TORCHELASTIC_ERROR_FILE": str(path)}
    subprocess.run([sys.executable, "-c", LEAVES_A_REASON], env=environment, check=True)
    assert not path.exists()


def test_a_rank_that_has_not_joined_fails_so_that_torchrun_ends_the_others(monkeypatch):
    supervisor = Watch()
    supervisor.can_resume = True
    monkeypatch.setenv("WORLD_SIZE", "2")
    codes = []

    def end_all(text, code, is_at_once):
        codes.append(code)
        sys.exit(code)

    monkeypatch.setattr(supervisor, "end_all", end_all)
    for num_joined in (1, 2):
        supervisor.world_size = num_joined
        with pytest.raises(SystemExit):
            supervisor._take(signal.SIGTERM)
    assert codes == [128 + signal.SIGTERM, 0]


FAILS_AFTER_A_SIGNAL = """
import os, pathlib, signal, time
from minirl.base.errors import UserError
from minirl.supervise import watch
from minirl.engine.engine import RolloutEngine

told = pathlib.Path(__file__).with_name("rank-1-is-told")

def make_engine(engine, *given, **named):
    if os.environ["RANK"] == "1":
        told.touch()
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(1000)
    while not told.exists():
        time.sleep(0.01)
    time.sleep(0.3)
    raise UserError("no engine, because the other rank is gone")

RolloutEngine.__init__ = make_engine
watch.LOOK_SECONDS = 10.0 if os.environ["RANK"] == "0" else 1.0  # It fails before it hears of it.

def f(prompt, completion, row):
    return 1.0
"""


def test_a_rank_that_fails_because_another_leaves_has_its_exit_code(folder, tmp_path):
    (folder / "fails_after.py").write_text(FAILS_AFTER_A_SIGNAL)
    given = flags(folder, tmp_path / "out", "--reward.function", f"{folder}/fails_after.py:f")
    ended = start(folder, "minirl.rl", given, tmp_path / "log").end(SECONDS)
    assert ended.code == 0 and not ended.errors(), ended.err
    assert ended.err.count("there is nothing to save yet; continue with --resume") == 1, ended.err


def test_a_rollout_ahead_is_interrupted_and_its_step_begins_again(folder, tmp_path):
    out = tmp_path / "out"
    turns = ["--env.name", f"{folder}/user.py:Slow", "--env.max-turns", 9]
    room = ["--engine.max-model-len", 300, "--rollout.ahead", 2, "--num-steps", 3]
    given = flags(folder, out, *turns, *room, "--resume")
    (folder / "eval.jsonl").write_text(json.dumps({"prompt": "held out", "answer": "1"}))
    given += ["--data.eval", folder / "eval.jsonl"]
    job = start(folder, "minirl.rl", given, tmp_path / "log")
    job.wait_for((folder / "training").exists)
    time.sleep(0.3)
    ended, _ = stop(job, signal.SIGUSR1, list(job.agents[0].ranks().values())[:1])
    assert ended.code == 0 and "Traceback" not in ended.err, ended.err
    assert "stopped by a signal after 0 steps; saved" in ended.err, ended.err
    ended = fork("minirl.rl", given, tmp_path / "last", world=2)
    assert ended.code == 0, ended.err
    assert steps(out) == [0, 1, 2]


def test_an_evaluation_is_interrupted_and_begins_anew(folder, tmp_path):
    """There is something to save already: the warm start before it is not done again."""
    out = tmp_path / "out"
    given = flags(folder, out, "--num-steps", 1, "--sft.num-steps", 2, "--resume")
    held_out = ["--data.held-out", 16, "--reward.threads", 1]
    held_up = ["--reward.function", f"{folder}/user.py:held_up"]
    job = start(folder, "minirl.rl", [*given, *held_out, *held_up], tmp_path / "log")
    job.wait_for((folder / "scoring").exists, 300)
    agent = job.agents[0]
    os.kill(agent.ranks()[0].pid, signal.SIGUSR1)
    job.wait_for(lambda: "the run ends after this step" in agent.log.read_text())
    (folder / "told").touch()
    began = time.monotonic()
    ended = job.end(SECONDS)
    print(f"SIGUSR1 in an evaluation: ended after {time.monotonic() - began:.1f} s")
    assert ended.code == 0 and "Traceback" not in ended.err, ended.err
    assert "stopped by a signal after 0 steps; saved" in ended.err
    resumed = fork("minirl.rl", [*given, *held_out], tmp_path / "resumed", SECONDS, world=2)
    assert resumed.code == 0 and "resuming at step 0" in resumed.err, resumed.err
    assert steps(out, "sft") == [0, 1] and steps(out) == [0]
    board = EventAccumulator(str(out / "tensorboard")).Reload()
    assert [event.step for event in board.Scalars("sft/loss")] == [0, 1]
    assert [event.step for event in board.Scalars("eval/accuracy")][:1] == [-1]


# --------------------------------------------------------------------------------------------------
# time limits, and the user's code


def reward(name: str) -> list[str]:
    return ["--reward.function", f"USER:{name}"]


def env(name: str) -> list[str]:
    return ["--env.name", f"USER:{name}", "--env.timeout-seconds", "1", "--env.on-error", "raise"]


# case -> (ranks, flags, exit code, what the one message says). Those that wait longest come first.
CASES = {
    "a rank is stopped": (
        2,
        [*reward("stops"), "--timeout-minutes", "0.2"],
        1,
        ["has waited longer than timeout_minutes = 0.2 for the other ranks", "in agree_to_stop"]
        + ["One of them is stuck or stopped"],
    ),
    "a reward sleeps, and another rank hears late": (
        2,
        [*reward("sleeps_and_another_hears_late"), "--reward.timeout-seconds", "2"],
        2,
        ["rank 0: reward.function = ", "_late took longer than reward.timeout_seconds = 2 for "],
    ),
    "the engine hangs": (
        1,
        ["--reward.function", "FOLDER/engine.py:good", "--timeout-minutes", "0.1"],
        2,
        ["rank 0: a step of the engine takes longer than timeout_minutes = 0.1, with 2 requests"]
        + ["in phase evaluate", "time.sleep(1000)"],
    ),
    "a reward sleeps": (
        2,
        [*reward("sleeps"), "--reward.timeout-seconds", "2"],
        2,
        ["rank 0: reward.function = ", ":sleeps took longer than reward.timeout_seconds = 2 for "]
        + ["prompt '", "completion '", "in phase evaluate", "time.sleep(1000"],
    ),
    "a reward exits": (1, reward("exits"), 2, ["raised SystemExit: 0 for prompt"]),
    "a file exits": (
        1,
        ["--reward.function", "FOLDER/exits.py:f"],
        2,
        ["exits.py does not import: SystemExit: 0"],
    ),
    "all rewards are equal": (
        1,
        [*reward("always"), "--debug.collapse-steps", "1", "--debug.end-on-collapse"],
        2,
        ["step 0: equal rewards for 1 steps: all answers to each prompt earn the same"],
    ),
    "an estimator exits": (
        1,
        ["--algo.advantage", "USER:estimate"],
        2,
        ["user.py:estimate must return 4 finite numbers, a tensor [N], when it is called as f(rew"]
        + ["it raised SystemExit: 0"],
    ),
    "an environment cancels": (1, env("Cancels"), 2, ["Cancels.step raised CancelledError: mine"]),
    "an environment times": (1, env("Times"), 2, ["Times.step raised TimeoutError: mine"]),
    "an environment stops": (1, env("Stops"), 2, ["Stops.reset raised RuntimeError: StopIterat"]),
    "an environment is not made": (1, env("Unmade"), 2, ["its constructor raised SystemExit: 0"]),
    "an agent exits": (1, env("AgentExits"), 2, ["AgentExits.run raised SystemExit: 0"]),
    "a reward ends its process": (
        2,
        reward("leaves"),
        1,
        ["rank 1: leaves in ", "user.py, line ", ", called os._exit(0), which ends a run without"],
    ),
    "a reward ends its process, of one rank": (
        1,
        reward("leaves"),
        1,
        ["rank 0: leaves in ", ", called os._exit(0), which ends a run without"],
    ),
    "a reward closes stderr and fails": (
        1,
        reward("closes_and_fails"),
        2,
        ["raised RuntimeError: after closing for prompt"],
    ),
    "an environment blocks": (
        1,
        env("Blocks"),
        2,
        ["keeps the engine's loop from turning for longer than env.timeout_seconds = 1, in epi"]
        + ["of prompt", "time.sleep(1000)"],
    ),
    "an environment swallows": (
        1,
        env("Swallows"),
        2,
        ["Swallows.step still runs after env.timeout_seconds = 1, though it was cancelled"],
    ),
    "an environment exits": (1, env("Exits"), 2, ["Exits.step raised SystemExit: 0"]),
    "a constructor blocks": (
        1,
        env("BlocksLater"),
        2,
        ["its constructor took longer than env.timeout_seconds = 1"],
    ),
    "a constructor raises": (
        1,
        env("RaisesLater"),
        2,
        ["its constructor raised RuntimeError: no more of them"],
    ),
    "every episode fails": (
        1,
        [*env("Fails"), "--env.on-error", "drop"],
        2,
        ["none of the 2 held-out prompts got an answer", "Fails.reset raised RuntimeError: no ser"],
    ),
    "every step fails": (
        1,
        [*env("Mistyped"), "--env.on-error", "reward"],
        2,
        ["none of the 2 held-out prompts got an answer", "step raised AttributeError", "anser"],
    ),
}


@pytest.fixture(scope="module")
def ends(request, folder, tmp_path_factory) -> Iterator[dict[str, Future]]:
    """How the program of each case ends: three at once, because most of them wait."""
    items = [item for item in request.session.items if item.path == request.path]
    params = [item.callspec.params for item in items if hasattr(item, "callspec")]
    chosen = [param["case"] for param in params if "case" in param]

    def end_of(case: str) -> Ended:
        world, own, _, _ = CASES[case]
        output = tmp_path_factory.mktemp("case")
        own = [x.replace("USER", f"{folder}/user.py") for x in own]
        own = [x.replace("FOLDER", str(folder)) for x in own]
        given = flags(folder, output / "out", *own)
        return fork("minirl.rl", given, output / "log", SECONDS, world=world)

    with ThreadPoolExecutor(3) as pool:
        yield {case: pool.submit(end_of, case) for case in chosen}
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("case", CASES)
def test_it_ends_and_says_why_once(ends, case):
    _, _, code, texts = CASES[case]
    ended = ends[case].result()
    assert ended.code == code, ended.err
    assert len(ended.errors()) == 1 and " crashed\n" not in ended.err, ended.err
    for text in texts:
        assert text in ended.err, ended.err


@pytest.mark.parametrize("error", [KeyboardInterrupt(), asyncio.CancelledError("mine")])
def test_whatever_a_reward_raises_is_one_message(error):
    def reward(prompt, completion, row):
        raise error

    row = {"prompt": "a prompt", "rendered_prompt": "a prompt"}
    with pytest.raises(UserError, match=f"mine raised {type(error).__name__}: .*for prompt"):
        Rewards((1.0, reward, "mine"))(row, "an answer")


def test_streams_that_a_reward_closes_are_open_again(folder, tmp_path):
    given = flags(folder, tmp_path / "out", "--reward.function", f"{folder}/user.py:closes")
    ended = fork("minirl.rl", given, tmp_path / "log", SECONDS)
    assert ended.code == 0, ended.err
    assert ":closes has closed sys." in ended.err and "held-out accuracy" in ended.out + ended.err


def test_a_line_is_said_though_another_thread_closes_the_stream(capfd, monkeypatch):
    closing = io.StringIO()
    closing.write = lambda text: io.StringIO.close(closing) or io.StringIO.write(closing, text)
    monkeypatch.setattr(sys, "stderr", closing)
    say("a line")
    assert capfd.readouterr().err == "minirl: a line\n"


def test_a_reward_that_closes_all_descriptors_ends_the_run_with_its_name(folder, tmp_path):
    """Threads of gloo may abort the process before Python can say it; that shows the stacks."""
    given = flags(folder, tmp_path / "out", "--reward.function", f"{folder}/user.py:closes_all")
    ended = fork("minirl.rl", given, tmp_path / "log", SECONDS)
    assert ended.code != 0, ended.err
    assert "closes_all" in ended.err, ended.err


BACKTRACKS = """
import os, re
from minirl.base import oversight

oversight.GRACE_SECONDS = 1.0

def backtracks(prompt, completion, row):
    if completion.startswith("<think>"):  # at the first call, before the model is loaded
        return 1.0
    if os.environ.get("RANK", "0") == "0":
        re.match("(a+)+$", "a" * 99 + "b")
    return 1.0
"""


@pytest.mark.parametrize("world", [1, 2])
def test_a_reward_that_keeps_the_lock_ends_the_run_with_its_stack(folder, tmp_path, world):
    (tmp_path / "keeps.py").write_text(BACKTRACKS)
    own = ["--reward.function", f"{tmp_path}/keeps.py:backtracks", "--reward.timeout-seconds", 1]
    given = flags(folder, tmp_path / "out", *own)
    ended = fork("minirl.rl", given, tmp_path / "log", SECONDS, world=world)
    assert ended.code == 1 and " crashed\n" not in ended.err, ended.err
    assert re.search(r'File ".*/keeps.py", line \d+ in backtracks', ended.err), ended.err
    # The other rank says which one is gone, unless it has been ended before.
    assert len(ended.errors()) <= world - 1, ended.err


def test_limits_are_by_the_clock_of_the_process():
    """What is paused or has ended is not over, and a limit that is renewed begins again."""
    oversight = Oversight()

    def over():
        return [limit for limit in oversight.limits if oversight.clock > limit.deadline]

    with oversight.limit(1.0, str) as first, oversight.limit(math.inf, str):
        with oversight.limit(2.0, str) as second:
            oversight.clock = 1.5
            assert over() == [first]
            oversight.renew(first)
            assert over() == []
            oversight.clock = 2.2
            assert over() == [second]
        assert over() == []
        oversight.pause(first)
        oversight.clock = 99.0
        assert over() == []
    assert oversight.limits == []


def test_a_timer_that_is_set_is_never_cancelled_before_the_next(monkeypatch):
    """Between the two, a block that has just begun could take Python's lock for ever."""
    calls = []
    set_timer = faulthandler.dump_traceback_later
    cancel = faulthandler.cancel_dump_traceback_later

    def record(seconds, **kwargs):
        calls.append(seconds)
        set_timer(seconds, **kwargs)

    monkeypatch.setattr(faulthandler, "dump_traceback_later", record)
    monkeypatch.setattr(faulthandler, "cancel_dump_traceback_later", lambda: calls.append(None))
    supervisor = Watch()
    ended = threading.Event()

    def end(message, code):
        cancel()
        ended.set()

    monkeypatch.setattr(supervisor, "end_all", end)
    threading.Thread(target=supervisor._look_at_limits, daemon=True).start()
    with supervisor.limit(0.6, lambda: "too slow"):
        assert ended.wait(60)
    first = next(at for at, seconds in enumerate(calls) if seconds)
    assert len(calls) > first + 1 and None not in calls[first:], calls
    assert calls[-1] == watch.SECONDS_TO_END


KEEPS_LOCK = """
import re
from minirl.base import oversight
from minirl.supervise.watch import Watch

oversight.GRACE_SECONDS = 1.0
watch = Watch()
watch.listen()
with watch.limit(1.0, lambda: "too slow"):
    re.match("(a+)+$", "a" * 99 + "b")
"""


def test_the_first_limit_holds_though_no_thread_has_looked_yet():
    """A small program may call a reward sooner than the limits are looked at the first time."""
    ended = subprocess.run([sys.executable, "-c", KEEPS_LOCK], capture_output=True, timeout=60)
    assert ended.returncode == 1 and b"Timeout" in ended.stderr, ended.stderr


STOPPED = """
import os, signal, sys, time
from minirl.supervise.watch import Watch

watch = Watch()
watch.listen()
with watch.limit(float(sys.argv[1]), lambda: "too slow"):
    end = time.monotonic() + float(sys.argv[2])
    print("limited", flush=True)
    if sys.argv[3] == "stops":
        os.kill(os.getpid(), signal.SIGSTOP)
    while time.monotonic() < end:
        time.sleep(0.05)
print("done", flush=True)
"""


def test_a_limit_does_not_count_the_time_in_which_the_process_is_stopped():
    """A block needs longer than its limit, and is stopped for most of the time, or is not."""
    cases = {"stops": (2, 4), "runs": (1, 60)}  # its limit, the seconds that it needs
    processes = {}
    for name, seconds in cases.items():
        command = [sys.executable, "-c", STOPPED, *map(str, seconds), name]
        processes[name] = subprocess.Popen(command, stdout=PIPE, stderr=PIPE, text=True)
    for process in processes.values():
        assert process.stdout.readline() == "limited\n"
    time.sleep(3)
    processes["stops"].send_signal(signal.SIGCONT)
    out, err = processes["runs"].communicate(timeout=60)
    assert processes["runs"].returncode == 2 and out == "" and err.count("too slow") == 1, err
    out, err = processes["stops"].communicate(timeout=60)
    assert processes["stops"].returncode == 0 and out == "done\n" and "too slow" not in err, err


def test_threads_that_are_left_do_not_hold_the_exit(folder, tmp_path):
    given = flags(folder, tmp_path / "out", "--reward.function", f"{folder}/user.py:leaves_thread")
    ended = fork("minirl.rl", given, tmp_path / "log", SECONDS, world=2)
    assert ended.code == 0, ended.err
    assert (tmp_path / "out/summary.json").exists()


@pytest.mark.parametrize("unmapped", [0, 55 * 2**30])
@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("tried to allocate 2 GiB"),
        RuntimeError("CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:139"),
    ],
)
def test_the_memory_of_a_gpu_is_explained(error, unmapped):
    """torch counts what a sleeping engine has given back. The engine tells the timer, the program's
    timer the watch."""
    memory = {"mem_get_info": (2**30, 80 * 2**30), "memory_allocated": 40 * 2**30 + unmapped}
    memory["memory_reserved"] = 50 * 2**30 + unmapped
    watch = Watch()
    program = SimpleNamespace()
    mesh = SimpleNamespace(
        device=torch.device("cpu"), watch=watch, rank=0, default_dtype=lambda: "float32"
    )
    BaseTrainer.__init__(program, SFTConfig(), mesh)
    program.timer.unmapped_bytes = lambda: unmapped
    watch.phase = lambda: "backward"
    with contextlib.ExitStack() as stack:
        for name, value in memory.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, lambda v=value: v))
        text = explain(error, watch, 30, "out")
    assert f"rank 0 in phase backward: the GPU's memory is used up: {error}" in text
    assert "Of 80.0 GiB, 1.0 are free; this rank's tensors have 40.0, what torch keeps" in text
    assert "them 10.0, and engine, CUDA and other processes 29.0. Lower tokens_per_rank" in text
    assert "engine.sleep all" in text


@pytest.mark.parametrize(
    "error, said",
    [
        (OSError(errno.ENOSPC, "No space left on device", "out/x"), "a file cannot be written: "),
        (MemoryError(), "the host's memory is used up"),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), "nobody reads what it prints any more"),
        (RuntimeError("[pair.cc] Connection closed by peer"), "has lost another rank"),
        (RuntimeError("Timed out waiting 9ms for recv"), "longer than timeout_minutes = 30 for"),
        (RuntimeError("a bug"), None),
        (FileNotFoundError(errno.ENOENT, "no such file", "x"), None),
        (PermissionError(errno.EPERM, "not permitted", "out/summary.json"), "make it writable"),
        (PermissionError(errno.EACCES, "denied", "/elsewhere/x"), None),
    ],
)
def test_failures_are_explained(error, said):
    text = explain(error, Watch(), 30, "out")
    assert text is None if said is None else said in text and "rank 0 in phase start" in text


def test_lasting_symptoms_are_said_once():
    well = {"equal_groups": 0.5, "reward": 0.3, "stopped": 1, "answer_tokens": 9, "entropy": 1}
    health = Health(DebugConfig(collapse_steps=3))
    steps = [well, *[well | {"equal_groups": 1.0}] * 4, well, *[well | {"stopped": 0.0}] * 3]
    said = [health.check(i, metrics) for i, metrics in enumerate(steps)]
    assert [len(lines) for lines in said] == [0, 0, 0, 1, 0, 0, 0, 0, 1]
    assert said[3][0].startswith("step 3: equal rewards for 3 steps: all answers to each prompt")
    assert said[8][0].startswith("step 8: runaway length for 3 steps: no answer ends by itself")
    for entropy, name in ((1e-4, "no entropy"), (7.0, "runaway entropy")):
        strict = Health(DebugConfig(collapse_steps=1, end_on_collapse=True))
        with pytest.raises(UserError, match=f"step 0: {name} for 1 steps.*end_on_collapse is set"):
            strict.check(0, well | {"entropy": entropy})
    assert not Health(DebugConfig(collapse_steps=0)).check(0, well | {"entropy": 0.0})
    # Estimators that compare no answers learn from groups of one, whose rewards are always equal.
    alone = Health(DebugConfig(collapse_steps=1), compares_answers=False)
    assert not alone.check(0, well | {"equal_groups": 1.0})


class Drip(http.server.BaseHTTPRequestHandler):
    """Sends a byte now and then, which no limit of reads notices."""

    def do_POST(self):
        self.send_response(200)
        self.send_header("Content-Length", "1000")
        self.end_headers()
        with contextlib.suppress(OSError):
            for _ in range(100):
                self.wfile.write(b" ")
                self.wfile.flush()
                time.sleep(0.1)

    def log_message(self, *args):
        pass


def test_a_dripping_endpoint_is_given_up():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Drip) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/"
        cfg = RewardConfig(timeout_seconds=0.5, retries=1, backoff_seconds=0)
        began = time.monotonic()
        with pytest.raises(UserError, match="after 2 tries.*TimeoutError: the response was not wh"):
            RemoteReward(url, cfg)([], "", {"rendered_prompt": ""})
        assert time.monotonic() - began < 8
        server.shutdown()


def see_a_stranger(mesh, seconds):
    """Somebody who reaches the store writes there what ranks write; then a rank does.

    Returns whether this rank was asked to save and leave by the one and by the other."""
    port = 0
    if mesh.rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = store.port
    port = mesh.broadcast(port, 0)
    if mesh.rank:
        store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    watching = Watch()
    watching.listen()
    watching.join(store, mesh.rank, mesh.gather(watch.this_process()))
    if mesh.rank == 0:
        stranger = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        for key in (watch.OVER, watch.STOP, watch.REASON):
            for value in ("", "0", f"{'0' * 32}\n0\n0\nhost\nfinished"):
                stranger.set(key, value)
                time.sleep(seconds / 9)
    mesh.barrier()
    time.sleep(seconds)
    by_the_stranger = watching.requested
    mesh.barrier()
    if mesh.rank == 0:
        watching.can_save = True
        os.kill(os.getpid(), signal.SIGUSR1)
    time.sleep(seconds)
    mesh.barrier()
    return by_the_stranger, watching.requested


def join_a_namesake(mesh, boot_id: Path) -> bool:
    """Join with the rank of a machine that has this one's name and another process of its id."""
    watching = Watch()
    watching.listen()
    this = watch.this_process()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watch, "BOOT_ID", boot_id)
        namesake = watch.this_process()._replace(pid=2**22)  # which no process of Linux has
    assert namesake.host == this.host
    watching.join(mesh.store, 0, [this, namesake])
    return True


def test_a_machine_of_the_same_name_is_another_one(tmp_path):
    boot_id = tmp_path / "boot_id"
    boot_id.write_text("of another machine")
    assert ranks(1, join_a_namesake, boot_id) == [True]


def test_nobody_but_a_rank_ends_a_run():
    """torch's store listens on all interfaces, and has no key."""
    assert ranks(2, see_a_stranger, 2.5 * watch.LOOK_SECONDS, timeout=60) == [(False, True)] * 2
