r"""Interrupted and resumed runs beside uninterrupted ones: equal to the bit, and nothing is left.

    python -m benchmarks.preempt                                  # 25 kill -9 over all kinds
    python -m benchmarks.preempt --signals mixed --interruptions 30
    python -m benchmarks.preempt --kinds long --signals mixed --interruptions 20
    python -m benchmarks.preempt --small                          # what the tests run

Each kind of run is started under torchrun on two CPU ranks, and ends undisturbed. Then it is
started again and interrupted at moments that a seed draws, each time followed by the same command
with --resume. A moment is a step of the run, drawn over all of them and the time before the first,
and a pause after it. Interruptions are kill -9 of a rank or of torchrun, and (`mixed`) SIGTERM,
SIGUSR1 and SIGINT to a rank or to torchrun, which ask for a checkpoint.

An interruption is held if torchrun ends with the code of launch/README.md, no rank prints a
traceback and no process is left. At the end of a chain are compared: metrics.jsonl without clocks,
every exported weight and every dumped episode, bitwise; and no unfinished file or shared memory may
be left. With rollout.ahead (kind `ahead`) and inflight a resumed run begins unfinished groups
again, under other weights than the undisturbed run, and with stream the order of sums depends on
the time. There it is compared with its promises: every step has its prompts, no prompt is trained
on twice, and none later than rollout.max_staleness allows.

grpo     SFT before it, evaluations, the best checkpoint kept
ahead    partial rollouts
ppo      a critic, and a moving average of the weights
kl       KL to a reference that is refreshed, Muon, a curriculum
dapo     dynamic sampling by extra prompts, two updates a step
sft, dpo on rows and pairs
long     200 steps of GRPO
lockstep, stream, inflight
         a rank that trains and one that generates (rollout.overlap)

Prints a line for each interruption, then a table; exit code 1 if anything did not hold.
"""

import contextlib
import dataclasses
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
import tyro

from benchmarks.preempt_compare import broken_promises, differences
from benchmarks.preempt_job import (
    NUM_RANKS,
    Interruption,
    Job,
    shared_memory,
    survivors,
)
from benchmarks.preempt_runs import (
    CHAINS,
    RUNS,
    Kind,
    Run,
    write_inputs,
)

IN_START = 0.25  # Share of the interruptions that come while the run starts.
KILLS = (
    Interruption(signal.SIGKILL, "a rank"),
    Interruption(signal.SIGKILL, "torchrun"),
)
REQUESTS = (
    Interruption(signal.SIGTERM, "a rank"),
    Interruption(signal.SIGTERM, "torchrun"),
    Interruption(signal.SIGUSR1, "a rank"),
    Interruption(signal.SIGUSR1, "torchrun"),
    Interruption(signal.SIGINT, "a rank"),
    Interruption(signal.SIGINT, "torchrun"),
)
MIXED = (*KILLS, *REQUESTS)


@dataclass(kw_only=True)
class Load:
    """Which runs, and how they are interrupted."""

    kinds: tuple[Kind, ...] = CHAINS
    interruptions: int = 25
    """Of all kinds together, spread evenly over them."""
    signals: Literal["kills", "mixed"] = "kills"
    num_steps: int = 0
    """Of each run; 0: as many as its kind has."""
    seed: int = 0
    warm: bool = False
    """Agents and ranks are forks, which start in seconds."""
    small: bool = False
    """The smallest load: SFT of few steps with a signal and a kill, warm."""
    folder: Path | None = None
    """Where the runs and what they print go, and stay. None: a temporary folder."""
    minutes: float = 10.0
    """For a start, a wait or an end; what takes longer hangs."""


@dataclass
class Outcome:
    """What came of an interruption."""

    interruption: Interruption
    step: int  # Finished steps when it came.
    seconds: float  # Until the last process had ended.
    code: int | None
    faults: list[str]


class Chain:
    """A run of one kind: undisturbed, or interrupted and resumed until it ends."""

    def __init__(self, run: Run, load: Load, data: Path, output: Path):
        self.load = load
        self.run = run
        self.output = output
        self.seconds = 60 * load.minutes
        self.num_starts = 0
        self.shared_memory: set[Path] = set()  # That its processes had.
        settings = {**self.run.settings, "num-steps": self.run.num_steps, "output": output}
        settings["data.train"] = data / self.run.rows
        self.flags: list[str] = []
        for name, value in settings.items():
            text = str(value).replace("FOLDER", str(data))
            self.flags += [f"--{name}", *([] if value is True else text.split(" "))]

    def start(self) -> Job:
        """Start the run, or resume it."""
        resume = ["--resume"] if self.num_starts else []
        log = self.output.with_name(f"{self.output.name}-{self.num_starts}.txt")
        self.num_starts += 1
        return Job(self.run.module, [*self.flags, *resume], log, warm=self.load.warm)

    def step(self) -> int:
        """Return how many steps of training metrics.jsonl has."""
        path = self.output / "metrics.jsonl"
        text = path.read_text() if path.exists() else ""
        return text.count('"phase": "rl"') + text.count('"phase": "train"')

    def finish(self) -> tuple[float, float, list[str]]:
        """Let the run reach its end.

        Returns:
            Seconds from the ranks' start until they opened the folder, seconds after that, and what
            went wrong.
        """
        job = self.start()
        job.wait_until(lambda: len(job.ranks()) == NUM_RANKS, self.seconds)
        began = time.monotonic()
        job.wait_until(lambda: has_opened(job), self.seconds)
        opened = time.monotonic()
        job.wait_until(lambda: False, self.seconds)
        seconds = (opened - began, time.monotonic() - opened)
        code = job.exit_code()
        job.kill()
        return *seconds, [] if code == 0 else [f"ended with code {code}: {last_words(job.log)}"]

    def interrupt(
        self, interruption: Interruption, step: int, pause: float, rng: random.Random
    ) -> Outcome | None:
        """Start the run and interrupt it.

        Args:
            interruption: what comes.
            step: it comes after so many finished steps; -1: while the run starts.
            pause: and so many seconds.
            rng: draws the rank.

        Returns:
            None if the run has ended before.
        """
        job = self.start()
        job.wait_until(lambda: len(job.ranks()) == NUM_RANKS, self.seconds)
        if step >= 0:
            job.wait_until(lambda: has_opened(job) and self.step() >= step, self.seconds)
        job.wait_until(lambda: False, pause)
        at = self.step()
        processes = job.processes()
        ranks = job.ranks()
        if job.exit_code() == 0 or len(ranks) < NUM_RANKS:
            return self._end_early(job, interruption)

        self.shared_memory |= shared_memory(processes)
        target = rng.choice(ranks) if interruption.target == "a rank" else processes[0]
        # Imports take seconds, in which a signal ends a process as it ends any other, and until the
        # ranks have joined each other one that ends has to fail, for the others to be ended.
        is_heard = has_opened(job)
        began = time.monotonic()
        target.send_signal(interruption.number)
        job.wait_until(lambda: False, self.seconds)
        code = job.exit_code()
        left = survivors(processes)
        seconds = time.monotonic() - began
        for p in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                p.kill()

        faults = []
        if code is None:
            faults.append("it hangs")
        elif code != interruption.exit_code and (is_heard or interruption in KILLS):
            faults.append(f"code {code} and not {interruption.exit_code}")
        if left:
            faults.append(f"{len(left)} processes are left")
        if re.search(r"minirl: rank \d+ crashed", job.log.read_text()):
            faults.append(f"a traceback: {last_words(job.log)}")
        return Outcome(interruption, at, seconds, code, faults)

    def _end_early(self, job: Job, interruption: Interruption) -> Outcome | None:
        """Wait for a job that ends by itself; it is a fault if it fails."""
        job.wait_until(lambda: False, self.seconds)
        code = job.exit_code()
        job.kill()
        if code == 0:
            return None
        faults = [f"it ended before, with code {code}: {last_words(job.log)}"]
        return Outcome(interruption, self.step(), 0.0, code, faults)


def has_opened(job: Job) -> bool:
    """Whether the run has opened its folder, and metrics.jsonl holds finished steps only."""
    return "; writing " in job.log.read_text()


def last_words(log: Path) -> str:
    """Return what a program said last."""
    lines = [line for line in log.read_text().splitlines() if line.startswith("minirl:")]
    return f"{lines[-1]} ({log})" if lines else f"nothing ({log})"


def prove(kind: Kind, load: Load, folder: Path, num: int) -> tuple[list[Outcome], list[str]]:
    """Interrupt a run `num` times. Return the outcomes, and what differs at the end."""
    run = RUNS[kind]
    run = dataclasses.replace(run, num_steps=load.num_steps or run.num_steps)
    rng = random.Random(f"{load.seed} {kind}")
    for path in folder.glob(f"{kind}-*"):  # of a proof before
        path.unlink() if path.is_file() else shutil.rmtree(path)
    whole = Chain(run, load, folder, folder / f"{kind}-whole")
    start_seconds, train_seconds, faults = whole.finish()
    if faults:
        return [], faults
    print(f"{kind}: undisturbed {start_seconds:.1f} s to start, {train_seconds:.1f} s to train")

    chain = Chain(run, load, folder, folder / f"{kind}-interrupted")
    kinds = KILLS if load.signals == "kills" else MIXED
    outcomes = []
    for step in sorted(rng.randrange(run.num_steps) for _ in range(num)):
        interruption = rng.choice(kinds)
        if rng.random() < IN_START:
            moment = (-1, rng.uniform(0, start_seconds))
        else:
            moment = (step, rng.uniform(0, train_seconds / run.num_steps))
        outcome = chain.interrupt(interruption, *moment, rng)
        if outcome is None:
            break
        outcomes.append(outcome)
        print(
            f"  {kind:8} {outcome.step:3} steps, {interruption!s:20} code {outcome.code!s:4} "
            f"{outcome.seconds:5.1f} s  {'; '.join(outcome.faults) or 'held'}",
            flush=True,
        )
    _, _, faults = chain.finish()
    if run.is_bitwise:
        faults += differences(whole.output, chain.output)
    else:
        faults += broken_promises(run, chain.output)
    left = [path for path in chain.shared_memory if path.exists()]
    left += chain.output.rglob("*.partial*")
    return outcomes, faults + [f"{path} is left" for path in left]


def main(load: Load) -> int:
    """Run all chains. Return the exit code."""
    if load.small:
        load = dataclasses.replace(
            load,
            kinds=("sft",),
            interruptions=2,
            signals="mixed",
            num_steps=20,
            seed=709,  # Draws SIGUSR1 to a rank after step 5, and a kill after step 9.
            warm=True,
        )
    temporary = tempfile.mkdtemp(prefix="preempt-") if load.folder is None else ""
    folder = Path(temporary or str(load.folder)).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    write_inputs(folder)

    all_faults: list[str] = []
    table = []
    for i, kind in enumerate(load.kinds):
        num = load.interruptions // len(load.kinds)
        num += i < load.interruptions % len(load.kinds)
        outcomes, faults = prove(kind, load, folder, num)
        held = [outcome for outcome in outcomes if not outcome.faults]
        seconds = max((outcome.seconds for outcome in outcomes), default=0.0)
        codes = sorted({str(outcome.code) for outcome in outcomes})
        differs = "; ".join(faults) or "nothing"
        table.append(
            f"| {kind} | {len(outcomes)} | {len(held)} | {', '.join(codes)} | {seconds:.1f} | "
            f"{differs} |"
        )
        all_faults += faults + sum((outcome.faults for outcome in outcomes), [])
    print("\n| run | interrupted | held | exit codes | longest end, s | differs |")
    print("|---|---|---|---|---|---|")
    print("\n".join(table))
    print(f"\n{len(all_faults)} faults{': ' + '; '.join(all_faults) if all_faults else ''}")
    if temporary and not all_faults:
        shutil.rmtree(temporary)
    return 1 if all_faults else 0


if __name__ == "__main__":
    if main(tyro.cli(Load)):
        sys.exit(1)
