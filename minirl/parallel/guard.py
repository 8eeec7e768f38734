"""A small process beside a rank, for code that keeps Python's global lock and never lets it go.

A regular expression that backtracks without end stops every thread of its process, the watch too.
So the watch says every second what would be over when, and this process acts when it hears no more
of it. It runs as a script, and imports nothing that takes long.
"""

import json
import os
import select
import signal
import sys
import time

TICK_SECONDS = 0.5
GRACE_SECONDS = 5.0  # That a healthy watch may be silent: a loaded machine is slow.
STACK_SECONDS = 0.5  # For the rank's stacks to be printed.


def main(pid: int) -> None:
    """Guard the rank that has started this process, until it ends."""
    over_in = float("inf")  # Seconds, since the last word of the watch.
    what = ""
    silent = 0.0
    heard = b""
    while os.getppid() == pid:
        ready, _, _ = select.select([0], [], [], TICK_SECONDS)
        if ready:
            part = os.read(0, 1 << 16)
            if not part:
                return
            *lines, heard = (heard + part).split(b"\n")
            if lines:
                over_in, what = json.loads(lines[-1])
                silent = 0.0
        elif not is_stopped(pid):
            silent += TICK_SECONDS
            if silent > over_in + GRACE_SECONDS:
                end(pid, what)
                return


def is_stopped(pid: int) -> bool:
    """Whether somebody has stopped the process, as Ctrl-Z does."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "Tt"
    except OSError:  # it has just ended
        return True


def end(pid: int, what: str) -> None:
    """Say what takes too long, let the rank print its stacks (faulthandler can), and kill it."""
    print(
        f"\nminirl: error: {what}\nIt keeps Python's global lock, so that nothing else runs in "
        "this process. Its threads:",
        file=sys.stderr,
        flush=True,
    )
    os.kill(pid, signal.SIGUSR2)
    time.sleep(STACK_SECONDS)
    os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]))
