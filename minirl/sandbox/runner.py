"""Run an untrusted Python program.

It runs in a process of its own, in a folder of its own, and can reach nothing else.
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

from minirl.errors import require

INSIDE = Path(__file__).with_name("inside.py")
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

    # ok; error (an exception, or an exit code other than 0); timeout; disk; killed (by a signal).
    status: str
    output: str  # Standard output and error in the order they came, cut at the end.


# By exit code, or minus the signal that ended the process. Another signal: killed; code: error.
STATUSES = {0: "ok", -signal.SIGXCPU: "timeout", -signal.SIGXFSZ: "disk"}


def run(program: str, limits: Limits) -> ProgramResult:
    """Run `program` under Python with the packages of this environment.

    Blocks; call it from a thread. The program cannot read or write a file outside its folder
    (except Python's own), open a socket, start or signal a process, or outlive its time.

    Raises:
        UserError: where the kernel cannot enforce that: nothing runs unprotected.
    """
    check_supported()
    return _run(program, limits)


@functools.cache
def check_supported() -> None:
    """Raise UserError on a machine without Landlock or seccomp."""
    result = _run("print('kept in')", Limits(seconds=30))
    require(
        (result.status, result.output) == ("ok", "kept in\n"),
        "programs need a sandbox of Landlock and seccomp (Linux 5.13 or later on x86_64 or "
        f"aarch64), and it did not start: {result.output[-300:]}",
    )


def _run(program: str, limits: Limits) -> ProgramResult:
    end = time.monotonic() + limits.seconds
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
        output, status = _watch(process, folder, limits, end)
    finally:
        process.kill()  # it has no children
        code = process.wait()
        _remove(folder)

    text = output[: limits.output].decode(errors="replace")
    if len(output) > limits.output:
        text += "\n... (cut)"
    if status is None:
        status = STATUSES.get(code, "error" if code > 0 else "killed")
    return ProgramResult(status, text)


def _watch(
    process: subprocess.Popen, folder: str, limits: Limits, end: float
) -> tuple[bytes, str | None]:
    """Read the output of a process until it ends.

    Output beyond `limits.output` is dropped, not left in the pipe, so that the program goes on.

    Returns:
        The output, and why the process has to be ended if it does not end by itself.
    """
    pipe = process.stdout
    assert pipe  # as `_run` has asked for
    output = b""
    next_look = 0.0
    with pipe, selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while process.poll() is None or selector.select(0):
            now = time.monotonic()
            if now > end:
                return output, "timeout"
            if now > next_look:
                next_look = now + 0.1
                if _size(folder) > limits.disk_mb * 2**20:
                    return output, "disk"
            for key, _ in selector.select(min(0.05, end - now)):
                chunk = os.read(key.fd, 65536)
                if not chunk:
                    selector.unregister(pipe)
                elif len(output) <= limits.output:
                    output += chunk
    return output, None


def _size(folder: str) -> int:
    """Return the bytes of all files, while the program may be changing them."""
    total = 0
    for root, _, files in os.walk(folder):
        for name in files:
            with contextlib.suppress(OSError):
                total += Path(root, name).lstat().st_size
    return total


def _remove(folder: str) -> None:
    """Remove a folder whose program may have taken away the right to look into parts of it."""
    for root, folders, _ in os.walk(folder):
        for name in folders:
            if not Path(root, name).is_symlink():
                os.chmod(Path(root, name), 0o700)
    shutil.rmtree(folder)
