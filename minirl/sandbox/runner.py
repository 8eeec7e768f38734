"""Run an untrusted Python program in a process and a folder that can reach nothing else."""

import ast
import contextlib
import functools
import itertools
import json
import math
import os
import re
import selectors
import signal
import socket
import stat
import subprocess
import sys
import sysconfig
import tempfile
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path

import minirl
from minirl.base.errors import require
from minirl.sandbox.inside.trial import PASSED

# Starts the program with the inner side of minirl only, whatever is installed.
START = (
    "import sys; sys.path.insert(0, {!r}); from minirl.sandbox.inside.program import main; main()"
)
# It reads no environment but ENVIRONMENT, and no packages of the user's own folder.
PYTHON = (sys.executable, "-sP", "-B", "-u")
ROOT = Path(minirl.__file__).parents[1]
FOLDERS = "minirl-program-"  # Names of the folders of programs begin with it.
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
# The hashes of texts are the same in each run, and with them the order of sets.
ENVIRONMENT = {"LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
SECONDS_BETWEEN_LOOKS = 0.05
SECONDS_OF_LEFT = 24 * 3600.0
MAX_NAMES = 4096  # Files and folders that a program may have.
MAX_THREADS = 256
MAX_PATH = 4000  # Bytes. The kernel takes 4095.
FENCE_FLAGS = re.DOTALL | re.IGNORECASE
# A fenced block of whole lines: its indentation, what its first line says, and the lines.
BLOCK = re.compile(r"^([ \t]*)```([^\n`]*)\n(.*?)^\1```[ \t]*$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class ProgramLimits:
    """What a program may use."""

    # Wall time. Where no core is free for it, a program gets up to as much again, so that a busy
    # machine changes fewer rewards. The limit of CPU time is the next whole second.
    seconds: float = 5.0
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


def run(program: str, limits: ProgramLimits) -> ProgramResult:
    """Run `program` under Python with the packages of this environment.

    Blocks; call it from a thread. The program cannot read or write a file outside its folder
    (except Python's own), open a socket, start or signal a process, or outlive its time. Changes
    of the attributes of its own files do nothing.

    Raises:
        UserError: The kernel cannot enforce that. Nothing runs unprotected.
    """
    check_supported()
    return _run(program, limits)[0]


def passes(program: str, tests: str, limits: ProgramLimits) -> bool:
    """Return whether `tests` of what `program` defines reach their end.

    Both run in the sandbox, in two processes: sandbox/inside/trial.py says how. The program prints
    what it likes, and may leave by sys.exit(0).

    Raises:
        UserError: as `run` does.
    """
    check_supported()
    return _run(program, limits, tests)[1]


def program_in(completion: str) -> str:
    """Return the last fenced block of Python in a text.

    Else it is the last block that names no language, or the whole text.
    """
    named = []
    unnamed = []
    for indent, language, block in BLOCK.findall(completion.replace("\r\n", "\n")):
        words = language.lower().split() or [""]
        if words[0] in ("python", "python3", "py"):
            named.append(textwrap.dedent(block) if indent else block)
        elif not words[0]:
            unnamed.append(block)
    if named or unnamed:
        return (named or unnamed)[-1]
    # One that ends in the line of its last statement.
    blocks = re.findall(r"```(?:python3?|py)?[ \t]*\r?\n(.*?)```", completion, FENCE_FLAGS)
    return textwrap.dedent(blocks[-1]) if blocks else completion


def checks(statement: ast.stmt) -> bool:
    """Return whether a statement of tests can fail of a program."""
    if isinstance(statement, ast.If):
        return any(map(checks, statement.body + statement.orelse))
    if isinstance(statement, ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef):
        return False
    # pytest reads files, which this text is none of, and returns what has failed.
    if ast.unparse(statement).startswith("pytest.main("):
        return False
    is_value = isinstance(statement, ast.Expr | ast.Assign | ast.AnnAssign)
    return not is_value or any(isinstance(part, ast.Call) for part in ast.walk(statement))


def why_no_tests(tests: str) -> str:
    """Return why every program would pass a text of tests, or none; empty: it checks something."""
    try:
        tree = ast.parse(tests)
    except (SyntaxError, ValueError, RecursionError) as error:
        return f"runs the column `tests` as Python, and that of a row is none ({error})"
    if any(map(checks, tree.body)):
        return ""
    return (
        "runs the column `tests`, and that of a row checks nothing: it only defines and imports; "
        "let it assert, or call what it defines, such as check(f)"
    )


@functools.cache
def check_supported() -> None:
    """Raise UserError on a machine without Landlock or seccomp."""
    remove_left()
    result, _ = _run("print('kept in')", ProgramLimits(seconds=30))
    require(
        (result.status, result.output) == ("ok", "kept in\n"),
        "programs need a sandbox of Landlock and seccomp (Linux 5.13 or later on x86_64 or "
        f"aarch64), and it did not start: {result.output[-300:]}",
    )


def _run(
    program: str, limits: ProgramLimits, tests: str | None = None
) -> tuple[ProgramResult, bool]:
    """Return how a program ended, and whether the tests have passed."""
    end = time.monotonic() + limits.seconds
    # The program's folder is in one where it cannot write, which is needed to remove it.
    root = tempfile.mkdtemp(prefix=FOLDERS)
    folder = os.path.join(root, "program")
    os.mkdir(folder)
    Path(folder, "main.py").write_text(program, encoding="utf-8", errors="surrogatepass")
    verdict, inner = socket.socketpair()
    settings = {
        "parent": os.getpid(),
        "readable": READABLE,
        "seconds": int(limits.seconds) + 1,
        "memory": limits.memory_mb * 2**20,
        "disk": limits.disk_mb * 2**20,
        "verdict": None if tests is None else inner.fileno(),
    }
    with inner:
        process = subprocess.Popen(
            [*PYTHON, "-c", START.format(str(ROOT)), json.dumps(settings)],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=[] if tests is None else [inner.fileno()],
            start_new_session=True,
            env={"HOME": folder, "TMPDIR": folder} | ENVIRONMENT,
        )
    try:
        if tests is not None:
            verdict.settimeout(limits.seconds)
            # OSError: the process has ended, or takes too long to start.
            with contextlib.suppress(OSError):
                verdict.sendall(tests.encode(errors="replace"))
                verdict.shutdown(socket.SHUT_WR)
        status, output, passed = watch(process, folder, limits, end, verdict)
    finally:
        process.kill()  # The tests' process ends with it.
        code = process.wait()
        verdict.close()
        if process.stdout:
            process.stdout.close()
        remove_folder(root, "program")

    text = output[: limits.output].decode(errors="replace")
    if len(output) > limits.output:
        text += "\n... (cut)"
    status = status or STATUSES.get(code, "error" if code > 0 else "killed")
    return ProgramResult(status, text), passed


def watch(
    process: subprocess.Popen,
    folder: str,
    limits: ProgramLimits,
    end: float,
    verdict: socket.socket,
) -> tuple[str, bytes, bool]:
    """Watch a program until it ends, has passed its tests, or uses more than it may.

    Args:
        process: the program's process, with a pipe as its output.
        folder: the folder of all files that it can name.
        limits: what it may use.
        end: when its time is over, by time.monotonic(), if there is always a core for it.
        verdict: connection over which the tests' process says PASSED.

    Returns:
        Why it has to be ended (empty: it has ended), its output, whether the tests have passed.
    """
    assert process.stdout  # as `_run` has asked for
    output = b""
    next_look = 0.0
    with (
        open(os.pidfd_open(process.pid), "rb", buffering=0) as ended,
        selectors.DefaultSelector() as selector,
    ):
        selector.register(ended, selectors.EVENT_READ)
        selector.register(process.stdout, selectors.EVENT_READ)
        selector.register(verdict, selectors.EVENT_READ)
        while selector.get_map():
            now = time.monotonic()
            if now > end and now > end + min(seconds_without_core(process.pid), limits.seconds):
                return "timeout", output, False
            if now > next_look:
                next_look = now + SECONDS_BETWEEN_LOOKS
                status = over_limit(folder, process.pid, limits.disk_mb * 2**20)
                if status:
                    return status, output, False
            for key, _ in selector.select(SECONDS_BETWEEN_LOOKS):
                chunk = b""
                if key.fileobj is process.stdout:
                    chunk = os.read(key.fd, 65536)
                    # What exceeds the limit is dropped, so that the program can continue.
                    if len(output) <= limits.output:
                        output += chunk
                elif key.fileobj is verdict:
                    with contextlib.suppress(ConnectionError):
                        if verdict.recv(len(PASSED)) == PASSED:
                            return "", output, True
                if not chunk:
                    selector.unregister(key.fileobj)
    return "", output, False


def seconds_without_core(pid: int) -> float:
    """Return for how long a program and the process of its tests could run, but had no core.

    Of a program with threads, the first one counts.
    """
    nanoseconds = 0
    # The second number, by the kernel's documentation (Documentation/scheduler/sched-stats.rst).
    with contextlib.suppress(OSError):  # One has ended.
        nanoseconds += int(Path(f"/proc/{pid}/schedstat").read_text().split()[1])
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            nanoseconds += int(Path(f"/proc/{child}/schedstat").read_text().split()[1])
    return 1e-9 * nanoseconds


# --------------------------------------------------------------------------------------------------
# what no limit of the kernel counts, and the end of the folder; paths are bytes, because a program
# may name its files as it likes


def over_limit(folder: str, pid: int, max_bytes: int) -> str:
    """Return the status of a program that uses more than it may; empty: it does not.

    The program continues meanwhile: whatever is gone when it is looked at counts as nothing.

    Args:
        folder: all named files of the program are in it.
        pid: of the program.
        max_bytes: of all files together, also of those that are open without a name.
    """
    total = unnamed_bytes(folder, pid)
    num_names = 0
    waiting = [os.fsencode(folder)]
    while waiting:
        entries: list[os.DirEntry] = []
        with contextlib.suppress(OSError), os.scandir(waiting.pop()) as found:
            entries = list(itertools.islice(found, MAX_NAMES + 1))
        for entry in entries:
            num_names += 1
            with contextlib.suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                total += _bytes_of(status)
                if stat.S_ISDIR(status.st_mode):
                    waiting.append(entry.path)
            if total > max_bytes or num_names > MAX_NAMES or len(entry.path) > MAX_PATH:
                return "disk"
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return ""  # The program has ended.
    # The name, in parentheses, may contain anything; the threads are the 18th field after it.
    num_threads = int(text.rpartition(")")[2].split()[17])
    if num_threads > MAX_THREADS:
        return "killed"
    return "disk" if total > max_bytes else ""


def _bytes_of(status: os.stat_result) -> int:
    """Return the bytes of a file, or those that are reserved for it if they are more."""
    if not stat.S_ISREG(status.st_mode):
        return 0
    return max(status.st_size, 512 * status.st_blocks)


def unnamed_bytes(folder: str, pid: int) -> float:
    """Return the bytes of files that are removed and still open.

    Infinity: one is neither open nor named, but mapped, so that its size is unknown.
    """
    try:
        open_files = _removed_and_open(pid)
        lines = Path(f"/proc/{pid}/maps").read_bytes().splitlines()
        # Once more: what was opened and mapped meanwhile is among the lines.
        open_files |= _removed_and_open(pid)
    except OSError:
        return 0  # The program has ended.
    inside = os.fsencode(folder) + b"/"
    for line in lines:
        # addresses, rights, offset, device, inode, path
        fields = line.split(None, 5)
        is_removed = len(fields) == 6 and fields[5].endswith(b" (deleted)")
        if is_removed and fields[5].startswith(inside) and int(fields[4]) not in open_files:
            return math.inf
    return sum(open_files.values())


def _removed_and_open(pid: int) -> dict[int, int]:
    """Return the bytes of files that are removed and open, by inode."""
    found = {}
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            status = os.stat(f"/proc/{pid}/fd/{descriptor}")
            if status.st_nlink == 0:
                found[status.st_ino] = _bytes_of(status)
    return found


def remove_left() -> None:
    """Remove what killed runs have left: folders that are older than any program that runs."""
    for root in Path(tempfile.gettempdir()).glob(f"{FOLDERS}*"):
        with contextlib.suppress(OSError):  # Another rank removes it, too.
            status = root.lstat()
            is_old = time.time() - status.st_mtime > SECONDS_OF_LEFT
            if is_old and status.st_uid == os.getuid() and stat.S_ISDIR(status.st_mode):
                remove_folder(str(root), "program")


def remove_folder(root: str, name: str) -> None:
    """Remove the folder `root`, in which only the program's folder `name` is.

    A program can nest folders deeper than a path or a recursion can be, and take away the rights
    to look into them. So each folder is first moved up into `root`, where the program cannot write.

    Raises:
        OSError: something cannot be removed.
    """
    top = os.fsencode(root)
    waiting = [os.path.join(top, os.fsencode(name))]
    num_moved = 0
    while waiting:
        path = waiting.pop()
        os.chmod(path, 0o700)
        with os.scandir(path) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    # To move a folder to another one means to write in it.
                    os.chmod(entry.path, 0o700)
                    moved = os.path.join(top, b"moved-%d" % num_moved)
                    os.rename(entry.path, moved)
                    num_moved += 1
                    waiting.append(moved)
                else:
                    os.unlink(entry.path)
        os.rmdir(path)
    os.rmdir(top)
