"""Runs minirl's programs the way their users do: under torchrun, alone, or as forks of a process
that has imported everything.

A fork costs a tenth of a second where torchrun pays ten of imports, and goes through the same
`__main__` and the same exit."""

import contextlib
import json
import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path

import psutil

from harness import PRELOAD, end_with_the_forkserver

ROOT = Path(__file__).parent.parent
QUICKSTART = ROOT / "configs" / "quickstart_rl.yaml"
# A few of the quickstart's words: to make its 20,000 takes a rank a second.
WORDS = "reasoning_gym:spell_backward?min_word_len=3&max_word_len=6&size=100&seed=1"
# The environment of a program that takes its CPU for one with AVX2 and nothing newer.
AVX2 = {
    "PYTHONPATH": f"{ROOT / 'tests' / 'avx2'}:{ROOT}",
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    # Kernels that torch.compile has kept for one of the two CPUs crash on the other.
    "TORCHINDUCTOR_CACHE_DIR": f"{tempfile.gettempdir()}/torchinductor_avx2",
}


def as_flags(text: str) -> list[str]:
    """The flags of a command line whose values have no spaces."""
    return text.split()


@dataclass
class Ended:
    code: int
    out: str
    err: str

    def errors(self) -> list[str]:
        """The messages for the user."""
        return [line for line in self.err.splitlines() if line.startswith("minirl: error:")]


def rows_of(output: Path, phase: str) -> list[dict]:
    """The metrics of a phase of a run, without what depends on the machine and on the time."""
    found = []
    for line in (output / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row["phase"] != phase:
            continue
        for name in list(row):
            if name.startswith(("time/", "tokens_per_second", "host_gib/")):
                del row[name]
        found.append(row)
    return found


class Running:
    """A program under way. Its streams go to files, so that no full pipe stops it. It ends with the
    test that has started it, however that ends (conftest.py)."""

    started: "list[Running]" = []  # By the test that runs.

    def __init__(self, command: list[str], log: Path, env: dict[str, str] | None = None):
        log.mkdir(parents=True, exist_ok=True)
        self.out, self.err = log / "out.txt", log / "err.txt"
        with self.out.open("w") as out, self.err.open("w") as err:
            self.process = subprocess.Popen(
                command, cwd=ROOT, stdout=out, stderr=err, env={**os.environ, **(env or {})}
            )
        self.started.append(self)

    def ranks(self) -> list[psutil.Process]:
        """The processes that torchrun started, in the order of their ranks; empty before it did."""
        children = [p for p in psutil.Process(self.process.pid).children() if "RANK" in p.environ()]
        return sorted(children, key=lambda p: int(p.environ()["RANK"]))

    def wait_for(self, happened: Callable[[], bool], seconds: float) -> None:
        end = time.monotonic() + seconds
        while not happened():
            if self.process.poll() is not None or time.monotonic() > end:
                self.end(0)
                raise AssertionError(
                    f"it did not come to that:\n{self.out.read_text()}\n{self.err.read_text()}"
                )
            time.sleep(0.02)

    def end(self, seconds: float) -> Ended:
        """Wait; what runs longer is killed with all its children."""
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
        return Ended(self.process.returncode, self.out.read_text(), self.err.read_text())

    def kill(self) -> None:
        """With all its children; nothing happens to what has ended."""
        if self.process.poll() is None:
            for p in [*psutil.Process(self.process.pid).children(recursive=True), self.process]:
                with contextlib.suppress(psutil.NoSuchProcess):  # It has just ended.
                    p.kill()
            self.process.wait()


def torchrun(
    module: str, flags: list[object], log: Path, env: dict[str, str] | None = None
) -> Running:
    """Two ranks."""
    launcher = [
        Path(sys.executable).with_name("torchrun"),
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        module,
    ]
    return Running([str(x) for x in [*launcher, *flags]], log, env)


def alone(module: str, flags: list[object], log: Path) -> Running:
    return Running([str(x) for x in [sys.executable, "-m", module, *flags]], log)


# The environment of a machine that reaches others by a proxy only. Nothing answers there.
BEHIND_A_PROXY = dict.fromkeys(("HTTP_PROXY", "http_proxy"), "http://127.0.0.1:9")


def fork(
    module: str,
    flags: list[object],
    log: Path,
    seconds: float = 120,
    world: int = 0,
    text: str = "",
    env: dict[str, str] | None = None,
) -> Ended:
    """`python -m module flags < text`, or with the environment that torchrun gives to each of
    `world` ranks; `env` is added to it. The exit code is that of the first that failed."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    log.mkdir(parents=True, exist_ok=True)
    for name in STREAMS:
        (log / name).write_text("")
    (log / "in.txt").write_text(text)
    held, port = hold_port("127.0.0.1")
    common = {
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": world,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    environments = [
        {name: str(value) for name, value in (common | {"RANK": rank, "LOCAL_RANK": rank}).items()}
        for rank in range(world)
    ] or [{}]
    for given in environments:
        given.update(env or {})
    processes = [
        context.Process(target=_main, args=(module, [str(f) for f in flags], str(log), given))
        for given in environments
    ]
    try:
        for p in processes:
            p.start()
        end = time.monotonic() + seconds
        running = {p.sentinel: p for p in processes}
        while running:
            ready = wait(list(running), max(0.0, end - time.monotonic()))
            ended = [running.pop(sentinel) for sentinel in ready]
            if not ended or any(p.exitcode for p in ended):
                break
        codes = [p.exitcode for p in processes]
    finally:
        for p in processes:
            p.kill()
            p.join()
        held.close()
    return Ended(
        next(filter(None, [*codes, *(p.exitcode for p in processes)]), 0),
        *((log / name).read_text() for name in STREAMS),
    )


def hold_port(address: str = "") -> tuple[socket.socket, int]:
    """Return a free port and a socket that is bound to it: as long as it is open, the system gives
    the port to nobody who asks for any free one. A server that asks for this port may still listen
    there, if it sets SO_REUSEADDR, as torch's store and asyncio do."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((address, 0))
    return held, held.getsockname()[1]


STREAMS = ("out.txt", "err.txt")


def _main(module: str, flags: list[str], log: str, env: dict[str, str]) -> None:
    end_with_the_forkserver()
    os.chdir(ROOT)
    os.environ.update(env)
    for stream, name in enumerate(STREAMS, start=1):
        os.dup2(os.open(f"{log}/{name}", os.O_WRONLY | os.O_APPEND), stream)
    sys.stdin = open(f"{log}/in.txt")  # noqa: SIM115 (open as long as the process is)
    sys.argv = [module, *flags]
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", RuntimeWarning
        )  # the module was imported before, under its own name
        runpy.run_module(module, run_name="__main__")
