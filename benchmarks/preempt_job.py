"""A program on two ranks under torchrun, that can be interrupted: a part of `preempt.py`.

A job is torchrun itself, or (`warm`) the same agent and its ranks as forks of a process that has
imported everything: a start then takes seconds, and not half a minute of a core.
"""

import contextlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn

import psutil
from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import MultiprocessContext
from torch.distributed.launcher.api import elastic_launch

ROOT = Path(__file__).parent.parent
NUM_RANKS = 2
SECONDS_TO_VANISH = 10.0  # For the processes of a job, when torchrun has ended.
LAUNCH = [
    f"--nproc-per-node={NUM_RANKS}",
    "--rdzv-backend=c10d",
    "--rdzv-endpoint=localhost:0",
    "--rdzv-id=preempt",
    # torchrun passes these on. Without the flag SIGUSR1 would kill it.
    "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
]


@dataclass(frozen=True)
class Interruption:
    """A signal, and who gets it."""

    number: signal.Signals
    target: Literal["a rank", "torchrun"]

    def __str__(self) -> str:
        return f"{self.number.name} to {self.target}"

    @property
    def exit_code(self) -> int:
        """torchrun's, as launch/README.md has it."""
        if self.number == signal.SIGKILL:
            return -self.number if self.target == "torchrun" else 1
        return 1 if self.target == "torchrun" else 0


class Job:
    """torchrun and its ranks; what they print goes to a file."""

    def __init__(self, module: str, flags: list[str], log: Path, *, warm: bool):
        self.log = log
        self.exit_code: Callable[[], int | None]  # None: it runs.
        log.write_text("")
        if warm:
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(["tests.preload"])
            fork = context.Process(target=run_agent, args=(module, flags, str(log)))
            fork.start()
            assert fork.pid is not None
            self.pid = fork.pid
            self.exit_code = lambda: fork.exitcode
        else:
            torchrun = Path(sys.executable).with_name("torchrun")
            command = [str(torchrun), *LAUNCH, "-m", module, *flags]
            with log.open("a") as file:
                process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file)
            self.pid = process.pid
            self.exit_code = process.poll

    def ranks(self) -> list[psutil.Process]:
        """Return the processes of the ranks that run."""
        with contextlib.suppress(psutil.NoSuchProcess):
            children = psutil.Process(self.pid).children()
            return [p for p in children if _is_rank(p)]
        return []

    def wait_until(self, happened: Callable[[], bool], seconds: float) -> bool:
        """Return whether something happened before the job ended and the time was over."""
        end = time.monotonic() + seconds
        while self.exit_code() is None and time.monotonic() < end:
            if happened():
                return True
            time.sleep(0.03)
        return False

    def processes(self) -> list[psutil.Process]:
        """Return torchrun and all its descendants."""
        with contextlib.suppress(psutil.NoSuchProcess):
            torchrun = psutil.Process(self.pid)
            return [torchrun, *torchrun.children(recursive=True)]
        return []

    def kill(self) -> None:
        """Kill what is left of the job."""
        for p in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                p.kill()
        while self.exit_code() is None:
            time.sleep(0.01)


def survivors(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Return which of the processes still run after a while."""
    end = time.monotonic() + SECONDS_TO_VANISH
    alive = processes
    while alive and time.monotonic() < end:
        alive = [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        time.sleep(0.02)
    return alive


def shared_memory(processes: list[psutil.Process]) -> set[Path]:
    """Return the files in /dev/shm that the processes have."""
    found: set[Path] = set()
    for p in processes:
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{p.pid}/maps").read_text().split()
            found |= {Path(word) for word in words if word.startswith("/dev/shm/")}
    return found


def run_agent(module: str, flags: list[str], log: str) -> None:
    """Be torchrun on the benchmark's ranks, in a fork."""
    os.chdir(ROOT)
    for stream in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND), stream)
    be_agent(LAUNCH, module, flags)


def be_agent(launch: list[str], module: str, flags: list[str]) -> NoReturn:
    """Be the agent that torchrun would be with the flags `launch`; its ranks are forks."""
    config, _, _ = run.config_from_args(run.parse_args([*launch, "-m", module, *flags]))
    config.start_method = "fork"
    MultiprocessContext._is_done = _have_all_ended  # type: ignore[assignment, method-assign]
    try:
        elastic_launch(config, _run_rank)(module, flags)
    except BaseException as error:  # what torchrun would end with
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)


def _have_all_ended(agent: MultiprocessContext) -> bool:
    """Count ranks that have ended well as done; they leave before they return anything."""
    assert agent._pc is not None
    for rank, process in enumerate(agent._pc.processes):
        if process.exitcode == 0:
            agent._return_values.setdefault(rank, None)
    return len(agent._return_values) == agent.nprocs


def _run_rank(module: str, flags: list[str]) -> None:
    Path("/proc/self/comm").write_text(f"rank-{os.environ['RANK']}")
    # As a program that torchrun starts has them, and not a function of its own.
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = [module, *flags]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # it was imported under its own name
        runpy.run_module(module, run_name="__main__")


def _is_rank(process: psutil.Process) -> bool:
    """Whether torchrun, or its fork, has started this process as a rank."""
    with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        return process.name().startswith("rank-") or "RANK" in process.environ()
    return False
