"""Run an untrusted Python program.

It runs in a process of its own, in a folder of its own, and can reach nothing else.
"""

import functools
import json
import os
import selectors
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import minirl
from minirl.base.errors import require
from minirl.sandbox.judge import Judge
from minirl.sandbox.usage import OverLimitError, check_usage, remove_folder

# Starts the program with the inner side of minirl only, whatever is installed.
START = (
    "import sys; sys.path.insert(0, {!r}); from minirl.sandbox.inside.program import main; main()"
)
ROOT = Path(minirl.__file__).parents[1]
# What Python and compiled packages read while they start.
READABLE = (
    sys.prefix,
    sys.base_prefix,
    sysconfig.get_path("stdlib"),
    "/lib",
    "/lib64",
    "/usr/lib",
    "/usr/lib64",
    "/usr/share/zoneinfo",
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/dev/urandom",
    "/dev/zero",
    "/sys/devices/system/cpu",
)
SECONDS_BETWEEN_LOOKS = 0.05


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a program may use."""

    seconds: float = 5.0  # Wall time; the limit of CPU time is the next whole second.
    memory_mb: int = 1024  # Address space in MiB.
    output: int = 10_000  # Bytes of standard output and error together that are kept.
    disk_mb: int = 64  # All files together, in MiB.


@dataclass(frozen=True)
class ProgramResult:
    """How a program ended, and what it printed."""

    # ok; error (an exception, or an exit code other than 0); timeout; disk (too many bytes or
    # names); killed (by a signal, or for too many threads).
    status: str
    output: str  # Standard output and error in the order they came, cut at the end.


# By exit code, or minus the signal that ended the process. Another signal: killed; code: error.
STATUSES = {0: "ok", -signal.SIGXCPU: "timeout", -signal.SIGXFSZ: "disk"}


def run(program: str, limits: Limits) -> ProgramResult:
    """Run `program` under Python with the packages of this environment.

    Blocks; call it from a thread. The program cannot read or write a file outside its folder
    (except Python's own), open a socket, start or signal a process, or outlive its time. Changes
    of the attributes of its own files do nothing.

    Raises:
        UserError: where the kernel cannot enforce that: nothing runs unprotected.
    """
    check_supported()
    return _run(program, limits)


def passes(program: str, tests: str, limits: Limits) -> bool:
    """Return whether `tests` of what `program` defines reach their end.

    Both run in the sandbox, in two processes: sandbox/inside/trial.py says how. The program prints
    what it likes, and may leave by sys.exit(0).

    Raises:
        UserError: as `run` does.
    """
    check_supported()
    judge = Judge(tests)
    try:
        _run(program, limits, judge)
    finally:
        judge.close()
    return judge.passed


@functools.cache
def check_supported() -> None:
    """Raise UserError on a machine without Landlock or seccomp."""
    result = _run("print('kept in')", Limits(seconds=30))
    require(
        (result.status, result.output) == ("ok", "kept in\n"),
        "programs need a sandbox of Landlock and seccomp (Linux 5.13 or later on x86_64 or "
        f"aarch64), and it did not start: {result.output[-300:]}",
    )


def _run(program: str, limits: Limits, judge: Judge | None = None) -> ProgramResult:
    end = time.monotonic() + limits.seconds
    # The program's folder is in one where it cannot write, which is needed to remove it.
    root = tempfile.mkdtemp(prefix="minirl-")
    folder = os.path.join(root, "program")
    os.mkdir(folder)
    Path(folder, "main.py").write_text(program, encoding="utf-8", errors="surrogatepass")
    settings = {
        "parent": os.getpid(),
        "readable": READABLE,
        "seconds": int(limits.seconds) + 1,
        "memory": limits.memory_mb * 2**20,
        "disk": limits.disk_mb * 2**20,
        "judge": judge.inner.fileno() if judge else None,
    }
    process = subprocess.Popen(
        [sys.executable, "-I", "-B", "-c", START.format(str(ROOT)), json.dumps(settings)],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=[judge.inner.fileno()] if judge else [],
        start_new_session=True,
        env={"HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"},
    )
    if judge:
        judge.inner.close()
    watch = ProgramWatch(process, folder, limits, end, judge)
    try:
        watch.until_end()
    finally:
        process.kill()  # it has no children
        code = process.wait()
        watch.close()
        remove_folder(root, "program")

    text = watch.output[: limits.output].decode(errors="replace")
    if len(watch.output) > limits.output:
        text += "\n... (cut)"
    status = watch.status or STATUSES.get(code, "error" if code > 0 else "killed")
    return ProgramResult(status, text)


class ProgramWatch:
    """Looks at a program until it ends, has passed its tests, or uses more than it may.

    Args:
        process: of the program, with a pipe as its output.
        folder: of the program.
        limits: of the program.
        end: when its time is over, by time.monotonic().
        judge: of its tests, if there are any.
    """

    def __init__(
        self,
        process: subprocess.Popen,
        folder: str,
        limits: Limits,
        end: float,
        judge: Judge | None,
    ):
        assert process.stdout  # as `_run` has asked for
        self.pipe = process.stdout
        self.pid = process.pid
        self.folder = folder
        self.limits = limits
        self.end = end
        self.judge = judge
        self.output = b""
        self.status: str | None = None  # Why the process has to be ended.
        self._has_ended = False
        self._has_said_all = False
        self._ended = os.pidfd_open(process.pid)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._ended, selectors.EVENT_READ, self._note_end)
        self._selector.register(self.pipe, selectors.EVENT_READ, self._read)
        if judge:
            self._selector.register(judge.own, selectors.EVENT_WRITE, judge.send)

    def until_end(self) -> None:
        """Return when the program has ended, or has to."""
        next_look = 0.0
        while not (self._has_ended and self._has_said_all):
            now = time.monotonic()
            if now > self.end:
                self.status = "timeout"
                return
            if now > next_look:
                next_look = now + SECONDS_BETWEEN_LOOKS
                try:
                    check_usage(self.folder, self.pid, self.limits.disk_mb * 2**20)
                except OverLimitError as over:
                    self.status = over.status
                    return
            for key, _ in self._selector.select(min(SECONDS_BETWEEN_LOOKS, self.end - now)):
                key.data(self._selector)
            if self.judge and self.judge.passed:
                return

    def _read(self, selector: selectors.BaseSelector) -> None:
        """Take output. What goes beyond the limit is dropped, so that the program goes on."""
        chunk = os.read(self.pipe.fileno(), 65536)
        if not chunk:
            self._has_said_all = True
            selector.unregister(self.pipe)
        elif len(self.output) <= self.limits.output:
            self.output += chunk

    def _note_end(self, selector: selectors.BaseSelector) -> None:
        self._has_ended = True
        selector.unregister(self._ended)

    def close(self) -> None:
        """Close what the watch has opened, and the pipe."""
        self._selector.close()
        os.close(self._ended)
        self.pipe.close()
