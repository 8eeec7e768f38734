"""The first code in a sandbox's process: it gives up its rights and runs main.py.

It is started by `minirl.sandbox.runner`. A program that is judged by tests (python_tests) is asked
for them after it has run, over a socket:

    program  b"ready"                    main.py has run to its end
    judge    nonce and tests             as JSON, to the end of the stream
    program  the nonce                   the tests have run to their end

What the program prints is no part of this, so that it may print what it likes.
"""

import builtins
import json
import os
import resource
import socket
import sys
import traceback
from pathlib import Path

from minirl.confine.kernel import Confinement, confine, end_with_parent

READY = b"ready"


def main() -> None:
    """Give up all rights, then run main.py of the current folder. Settings are in sys.argv[1]."""
    del sys.path[0]  # Where this file is; the program has no need of it.
    settings = json.loads(sys.argv[1])
    sys.argv = ["main.py"]
    folder = os.getcwd()
    end_with_parent()
    if os.getppid() != settings["parent"]:
        sys.exit(1)  # It ended before the line above.
    confine(Confinement(settings["readable"], folder, limits(settings)))

    sys.path.insert(0, folder)
    scope = {"__name__": "__main__", "__builtins__": builtins, "__file__": "main.py"}
    judge = settings["judge"]
    if judge is None:
        execute("main.py", scope)
    else:
        face_tests(scope, judge)


def limits(settings: dict) -> dict[int, tuple[int, int]]:
    """Return the limits of `confine`, by resource."""
    seconds, memory, disk = settings["seconds"], settings["memory"], settings["disk"]
    return {
        # The first makes a signal that says why, the second cannot be caught.
        resource.RLIMIT_CPU: (seconds, seconds + 1),
        resource.RLIMIT_AS: (memory, memory),
        resource.RLIMIT_FSIZE: (disk, disk),
        resource.RLIMIT_NOFILE: (256, 256),
        resource.RLIMIT_CORE: (0, 0),
        resource.RLIMIT_MEMLOCK: (0, 0),
        resource.RLIMIT_MSGQUEUE: (0, 0),
    }


def execute(file: str, scope: dict, source: str | None = None) -> None:
    """Run a source, that of `file` if none is given. An error is printed, and ends the process."""
    try:
        if source is None:
            source = Path(file).read_text(encoding="utf-8")
        exec(compile(source, file, "exec"), scope)
    except SystemExit:
        raise
    except BaseException as error:  # whatever it is, the traceback shows the program's frames only
        own_frames = error.__traceback__.tb_next if error.__traceback__ else None
        traceback.print_exception(error.with_traceback(own_frames))
        sys.exit(1)


def face_tests(scope: dict, descriptor: int) -> None:
    """Run main.py, ask for the tests, run them, and say that they have passed."""
    try:
        execute("main.py", scope)
    except SystemExit as left:
        if left.code not in (None, 0):
            raise
    judge = socket.socket(fileno=descriptor)
    judge.sendall(READY)
    with judge.makefile("rb") as stream:
        tests = json.load(stream)
    execute("tests.py", scope, tests["source"])
    judge.sendall(tests["nonce"].encode())
    os._exit(0)  # What the program would still do at its end is no matter of the tests.
