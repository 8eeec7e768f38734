"""Run a Python program that nobody has read: in a process of its own, with its own folder, and
nothing else within its reach.
"""

import contextlib
import functools
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from minirl.errors import UserError

INSIDE = Path(__file__).with_name("inside.py")
# What Python and compiled packages read while they start.
READABLE = sorted(
    {
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
    }
)


@dataclass(frozen=True, kw_only=True)
class Limits:
    seconds: float = 5.0  # of wall time; of CPU time, the next whole second
    memory_mb: int = 1024  # address space
    output: int = 10_000  # bytes of standard output and error together that are kept
    disk_mb: int = 64  # all files together


@dataclass(frozen=True)
class ProgramResult:
    # ok; error (an exception, or an exit code other than 0); timeout; disk; killed (by a signal)
    status: str
    output: str  # standard output and error, in the order they came, cut at the end
    seconds: float


def run(program: str, limits: Limits = Limits()) -> ProgramResult:
    """Run `program` under Python with the packages of this environment. Blocks; call it from a
    thread.

    It cannot read or write a file outside its folder (but Python's own), open a socket, start or
    signal a process, or outlive its time. Raises UserError where the kernel cannot keep it in:
    nothing is run unprotected.
    """
    check_supported()
    return _run(program, limits)


@functools.cache
def check_supported() -> None:
    """Raises UserError on a machine without Landlock or seccomp."""
    result = _run("print('kept in')", Limits(seconds=30))
    if result != ProgramResult("ok", "kept in\n", result.seconds):
        raise UserError(
            f"programs need a sandbox of Landlock and seccomp (Linux 5.13 or later on x86_64 or aarch64), and it did not start: {result.output[-300:]}"
        )


def _run(program: str, limits: Limits) -> ProgramResult:
    start = time.monotonic()
    folder = tempfile.mkdtemp(prefix="minirl-")
    Path(folder, "main.py").write_text(program, encoding="utf-8", errors="surrogatepass")
    settings = {
        "readable": READABLE,
        "limits": {
            "RLIMIT_CPU": int(limits.seconds) + 1,
            "RLIMIT_AS": limits.memory_mb * 2**20,
            "RLIMIT_CORE": 0,
            "RLIMIT_FSIZE": limits.disk_mb * 2**20,
            "RLIMIT_NOFILE": 256,
        },
    }
    process = subprocess.Popen(
        [sys.executable, "-I", "-B", str(INSIDE), json.dumps(settings)],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env={"HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"},
    )
    try:
        output, ended = _watch(process, folder, limits, start + limits.seconds)
    finally:
        process.kill()  # it has no children
        code = process.wait()
        process.stdout.close()
        _remove(folder)
    text = output[: limits.output].decode(errors="replace") + (
        "\n... (cut)" if len(output) > limits.output else ""
    )
    by_signal = {-signal.SIGXCPU: "timeout", -signal.SIGXFSZ: "disk"}
    return ProgramResult(
        ended or by_signal.get(code) or ("ok" if code == 0 else "error" if code > 0 else "killed"),
        text,
        time.monotonic() - start,
    )


def _watch(
    process: subprocess.Popen, folder: str, limits: Limits, end: float
) -> tuple[bytes, str | None]:
    """Drain it until it ends. Returns its output, and why it has to be ended if it does not end
    itself. Output beyond `limits.output` is dropped, not left in the pipe: the program goes on.
    """
    output, next_look = b"", 0.0
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while process.poll() is None or selector.select(0):
            now = time.monotonic()
            if now > end:
                return output, "timeout"
            if now > next_look:
                next_look = now + 0.1
                if _size(folder) > limits.disk_mb * 2**20:
                    return output, "disk"
            for key, _ in selector.select(min(0.05, end - now)):
                if chunk := os.read(key.fd, 65536):
                    output = output if len(output) > limits.output else output + chunk
                else:
                    selector.unregister(process.stdout)
    return output, None


def _size(folder: str) -> int:
    """Bytes of all files, while the program may be changing them."""
    total = 0
    for root, _, files in os.walk(folder):
        for name in files:
            with contextlib.suppress(OSError):
                total += os.lstat(Path(root, name)).st_size
    return total


def _remove(folder: str) -> None:
    """A program may have taken the right to look into its own folders."""
    for root, folders, _ in os.walk(folder):
        for name in folders:
            if not Path(root, name).is_symlink():
                os.chmod(Path(root, name), 0o700)
    shutil.rmtree(folder)
