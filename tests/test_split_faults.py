"""What ends a run of generators and trainers before its time, on either side and in each phase: it
is told once, no side waits for the other for ever, and a resumed run goes on as if nothing had
happened."""

import json
import signal
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import tiny
from minirl.base.oversight import Oversight
from minirl.checkpoint.state import finished, read_best
from minirl.parallel import sides
from minirl.parallel.sides import Meetings
from nodes import Job, Node
from programs import Ended, fork
from test_program import read, repeatable

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="two ranks with a CPU engine")

SECONDS = 180
NUM_STEPS = 8

# Imported by each rank of a run, before it has a model.
USER = """
import os, re, signal, time
from minirl.base.log import Timer

rank = os.environ["LOCAL_RANK"]
begin = Timer.phase
num_begun = 0

def phase(timer, name):
    global num_begun
    if (rank, name) == ("{rank}", "{phase}"):
        num_begun += 1
        if num_begun == {number}:
            for number in {signals}:
                os.kill(os.getpid(), number)
                time.sleep(1.2)  # Meanwhile the other side hears of it.
    return begin(timer, name)

Timer.phase = phase

def vowels(prompt, completion, row):
    return sum(letter in "aeiou" for letter in completion) / 10

def in_the_run(function):
    def call(prompt, completion, row):
        return 1.0 if completion.startswith("<think>") else function(prompt, completion, row)
    return call

@in_the_run
def raises(prompt, completion, row):
    raise RuntimeError("mine")

@in_the_run
def sleeps(prompt, completion, row):
    time.sleep(1000)

@in_the_run
def leaves(prompt, completion, row):
    os._exit(0)

@in_the_run
def backtracks(prompt, completion, row):
    re.match("(a+)+$", "a" * 99 + "b")

def estimate(rewards, groups):
    raise SystemExit(0)
"""


@dataclass(frozen=True)
class Fault:
    """Signals that a rank sends itself when it begins a phase for the n-th time."""

    rank: int
    phase: str
    number: int
    signals: tuple[int, ...]

    def module(self, folder: Path) -> Path:
        """Write the module of the reward function, with the fault in it."""
        path = folder / f"{self.phase}_{self.rank}_{self.number}_{sum(self.signals)}.py"
        values = {"rank": self.rank, "phase": self.phase, "number": self.number}
        text = USER
        for name, value in {**values, "signals": [int(n) for n in self.signals]}.items():
            text = text.replace(f"{{{name}}}", str(value))
        path.write_text(text)
        return path


NONE = Fault(0, "none", 0, ())


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("faults")
    tiny.make(folder / "model")
    rows = [json.dumps({"prompt": f"{i} times {i}", "answer": str(i * i)}) for i in range(40)]
    (folder / "rows.jsonl").write_text("\n".join(rows))
    NONE.module(folder)
    return folder


def run(
    folder: Path,
    output: Path,
    fault: Fault = NONE,
    *,
    world: int = 2,
    has_agent: bool = True,
    **changes: object,
) -> Ended:
    """Two ranks by an agent of torchrun, which lets the other rank say what it sees, or alone."""
    given = {
        "output": output,
        "policy.model": folder / "model",
        "policy.dtype": "float32",
        "policy.lr": 1e-3,
        "data.train": folder / "rows.jsonl",
        "data.held_out": 4,
        "data.max_prompt_tokens": 32,
        "reward.function": f"{fault.module(folder)}:vowels",
        "num_steps": NUM_STEPS,
        "parallel.generators": 1,
        "rollout.prompts_per_step": 2,
        "rollout.samples_per_prompt": 4,
        "rollout.max_tokens": 6,
        "eval.every": 2,
        "checkpoint.every": 2,
        "checkpoint.keep": 1,
        "checkpoint.best_metric": "reward",
        "engine.kv_cache_gb": 0.01,
        "timeout_minutes": 1,
    }
    flags: list[object] = ["--resume"]  # In an empty folder, it begins.
    for name, value in (given | changes).items():
        flags += [f"--{name}", *str(value).split(" ")]
    log = output.with_name(f"{output.name}-log-{time.monotonic_ns()}")
    if fault.signals and has_agent:
        return Job([Node("127.0.0.1", folder)], "minirl.rl", [flags], log).end(SECONDS)
    return fork("minirl.rl", flags, log, SECONDS, world=world)


# --------------------------------------------------------------------------------------------------
# interrupted and resumed

KILL, TERM, INT, USR1, HUP = (
    (number,)
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
)
TRAINER, GENERATOR = 0, 1
# One after the other, in one run. With the code, and what is said.
CHAIN = [
    (Fault(GENERATOR, "evaluate", 1, KILL), 1, "rank 1 "),
    (Fault(TRAINER, "sft", 1, HUP), 0, "stopped by a signal in the warm start"),
    (Fault(GENERATOR, "rollout", 2, USR1), 0, "stopped by a signal after"),
    (Fault(GENERATOR, "evaluate", 1, TERM), 0, "stopped by a signal after"),
    (Fault(TRAINER, "checkpoint", 2, INT), 0, "stopped by a signal after"),
    (Fault(GENERATOR, "refit", 2, KILL), 1, "rank 1 "),
    (Fault(TRAINER, "export", 2, KILL), 1, "rank 0 "),
    (Fault(GENERATOR, "evaluate", 1, INT), 0, f"stopped by a signal after {NUM_STEPS} steps"),
]


def test_lockstep_is_bitwise_whatever_interrupts_it(folder, tmp_path):
    """Also the best checkpoint, though the score of its weights comes a step later."""
    started = {"sft.num_steps": 2, "rollout.curriculum_floor": 0.1, "eval.every": 1}
    with ThreadPoolExecutor(1) as pool:
        undisturbed = pool.submit(run, folder, tmp_path / "whole", **started)
        for fault, code, said in CHAIN:
            ended = run(folder, tmp_path / "out", fault, **started)
            assert ended.code == code and said in ended.err, (fault, ended.code, ended.err)
            assert " crashed\n" not in ended.err and len(ended.errors()) <= 1, ended.err
        ended = run(folder, tmp_path / "out", **started)
        assert ended.code == undisturbed.result().code == 0, ended.err + undisturbed.result().err
    rows = [repeatable(read(tmp_path / name / "metrics.jsonl")) for name in ("out", "whole")]
    assert rows[0] == rows[1]
    weights = [load_file(tmp_path / name / "model/model.safetensors") for name in ("out", "whole")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[1])
    best = [read_best(tmp_path / name) for name in ("out", "whole")]
    assert best[0] == best[1]
    saved = [row for row in rows[1] if row["phase"] == "eval" and row["step"] in (2, 4, 6, 8)]
    assert best[1]["value"] == max(row["reward"] for row in saved)
    assert set(finished(tmp_path / "out")) == {best[1]["step"], NUM_STEPS}


def test_a_run_goes_on_with_other_sides(folder, tmp_path):
    """A checkpoint's batch is for lockstep only; else its prompts are drawn again."""
    out = tmp_path / "out"
    stopped = Fault(GENERATOR, "rollout", 4, TERM)
    ended = run(folder, out, stopped, **{"checkpoint.every": 100})
    assert ended.code == 0 and "stopped by a signal after" in ended.err, ended.err
    (step,) = finished(out)
    assert (out / f"checkpoints/step-{step}/drawn-0.json").exists()
    further = [
        (3, {"parallel.generators": 2, "rollout.overlap": "inflight"}),
        (3, {"parallel.generators": 2}),
        (3, {"rollout.overlap": "stream"}),
        (1, {"parallel.generators": 0}),
    ]
    for number, (world, changes) in enumerate(further, start=step + 1):
        ended = run(folder, out, world=world, **{"num_steps": number, **changes})
        assert ended.code == 0, ended.err
    steps = [row["step"] for row in read(out / "metrics.jsonl") if row["phase"] == "rl"]
    assert steps == list(range(number))


def test_a_batch_of_other_settings_is_drawn_again(folder, tmp_path):
    """Both steps after a resume have as many answers as the settings ask for, of rows that the
    curriculum knows."""
    out = tmp_path / "out"
    ended = run(folder, out, **{"num_steps": 3, "checkpoint.keep": 2})
    assert ended.code == 0 and (out / "checkpoints/step-2/drawn-0.json").exists(), ended.err
    changes = {"rollout.samples_per_prompt": 6, "rollout.curriculum_floor": 0.1, "num_steps": 4}
    ended = run(folder, out, **{"rollout.dump": True, **changes})
    assert ended.code == 0 and "drawn with other settings" in ended.err, ended.err
    for step in (2, 3):
        answers = read(out / f"rollouts/step-{step}-rank-0.jsonl")
        assert len(answers) == 12


# --------------------------------------------------------------------------------------------------
# each by itself


def reward(name: str, **changes: object) -> dict[str, object]:
    return {"reward.function": f"USER:{name}", **changes}


# What happens, changes of the settings, the code, and what is said.
CASES: dict[str, tuple[Fault, dict[str, object], int, list[str]]] = {
    "a reward raises": (NONE, reward("raises"), 2, ["raised RuntimeError: mine for prompt"]),
    "a reward sleeps": (
        NONE,
        reward("sleeps", **{"reward.timeout_seconds": 2}),
        2,
        ["rank 1: reward.function", ":sleeps took longer than reward.timeout_seconds = 2"],
    ),
    "a reward leaves": (NONE, reward("leaves"), 1, ["rank 1: leaves in ", "called os._exit(0)"]),
    "a trainer raises": (
        NONE,
        {"algo.advantage": "USER:estimate"},
        2,
        ["estimate must return", "it raised SystemExit: 0"],
    ),
    "a generator is stopped": (
        Fault(GENERATOR, "rollout", 3, (signal.SIGSTOP,)),
        {"timeout_minutes": 0.25, "rollout.overlap": "inflight"},
        1,
        ["timed out after 15 s without a sign of life from rank 1, one of the generators"],
    ),
    "a second interrupt": (
        Fault(GENERATOR, "rollout", 3, (signal.SIGINT, signal.SIGINT)),
        {},
        130,
        ["SIGINT: ended at once, nothing is saved; continue with --resume"],
    ),
    "a signal in a stream": (
        Fault(GENERATOR, "rollout", 3, (signal.SIGTERM,)),
        {"rollout.overlap": "stream", "rollout.dump": True},
        0,
        ["stopped by a signal after"],
    ),
    "a signal in flight": (
        Fault(TRAINER, "idle_trainers", 5, (signal.SIGTERM,)),
        {"rollout.overlap": "inflight"},
        0,
        ["stopped by a signal after"],
    ),
    "a goal in lockstep": (NONE, {"stop_at": "reward -1"}, 0, ["training ends here"]),
    "a signal after a goal": (
        Fault(GENERATOR, "evaluate", 2, (signal.SIGTERM,)),
        {"stop_at": "reward -1"},
        0,
        ["training ends here", "stopped by a signal after 1 steps"],
    ),
    "a goal in a stream": (
        NONE,
        {"stop_at": "reward -1", "rollout.overlap": "stream", "rollout.prompts_per_step": 4},
        0,
        ["training ends here"],
    ),
}


@pytest.fixture(scope="module")
def ends(folder, tmp_path_factory):
    """How the program of each case ends: three at once, because most of them wait."""

    def end_of(case: str) -> Ended:
        fault, changes, _, _ = CASES[case]
        user = str(fault.module(folder))
        changes = {name: str(value).replace("USER", user) for name, value in changes.items()}
        return run(
            folder, tmp_path_factory.mktemp("case") / "out", fault, has_agent=False, **changes
        )

    with ThreadPoolExecutor(3) as pool:
        yield {case: pool.submit(end_of, case) for case in CASES}
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("case", CASES)
def test_it_ends_and_says_why_once(ends: dict[str, Future], case):
    _, _, code, texts = CASES[case]
    ended = ends[case].result()
    assert ended.code == code, ended.err
    assert len(ended.errors()) == (code in (1, 2)) and " crashed\n" not in ended.err, ended.err
    for text in texts:
        assert text in ended.err, ended.err


def test_a_side_that_hears_nothing_gives_up(monkeypatch):
    """However long the other side takes, as long as its processes run."""
    monkeypatch.setattr(sides, "LOOK", timedelta(milliseconds=1))
    watch = Oversight()
    world = SimpleNamespace(store=dist.HashStore(), world_size=3, watch=watch)
    mesh = SimpleNamespace(everyone=world, side="trainers", rank=0, world_size=1)
    meetings = Meetings(mesh, seconds=60)
    looks = iter(range(1000))

    def look(*args):
        watch.clock += 10
        number = next(looks)
        world.store.add("minirl/beat/1", 1)
        if number < 20:
            world.store.add("minirl/beat/2", 1)
        raise dist.DistStoreError("not yet")

    monkeypatch.setattr(dist.HashStore, "wait", look)
    with pytest.raises(dist.DistStoreError, match="without a sign of life from rank 2, one of the"):
        meetings.enter()
    assert 25 <= next(looks) <= 28
