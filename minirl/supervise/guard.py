"""A small process beside a rank, for code that keeps Python's global lock and never lets it go.

A regular expression that backtracks without end stops every thread of its process, the watch too.
So a rank notes its time limits on a board, a page of memory that this process reads as well. The
watch of the rank lets the heart of the board beat. When it stands still and a limit is over, this
process says so, lets the rank print its stacks, and kills it. Without a limit it does nothing.

It runs as a script, and imports nothing that takes long.
"""

import contextlib
import math
import mmap
import os
import runpy
import select
import signal
import struct
import sys
import time

TICK_SECONDS = 0.5
GRACE_SECONDS = 5.0  # That a healthy watch may be silent: a loaded machine is slow.
STACK_SECONDS = 1.0  # For the rank's stacks to be printed.
TOLD_SECONDS = 10.0  # For the other ranks of the machine to see who has killed this one.

AGENT = os.path.join(os.path.dirname(__file__), "agent.py")  # A script cannot import the package.
STACKS = signal.SIGUSR2  # A rank prints its stacks for it, without needing the lock.
TOLD = "minirl-told"  # The name of a guard that has said why its rank is gone.


class Board:
    """What a rank notes for its guard.

    A head: how often the heart has beaten, and the rank's clock (`Watch.clock`). Then a place for
    each limit: its deadline by that clock, the length of a text in UTF-8, and the text, which says
    what took longer. A deadline of infinity is no limit.
    """

    HEAD = struct.Struct("<Qd")
    PLACE = struct.Struct("<dH")
    PLACE_BYTES = 2048
    NUM_PLACES = 256
    SIZE = PLACE_BYTES * (NUM_PLACES + 1)

    def __init__(self, descriptor: int):
        """Map the page of a descriptor of `make_page`."""
        self._page = mmap.mmap(descriptor, self.SIZE)

    def beat(self, clock: float) -> None:
        """Show that the rank's watch is alive."""
        beats, _ = self.HEAD.unpack_from(self._page)
        self.HEAD.pack_into(self._page, 0, beats + 1, clock)

    def head(self) -> tuple[int, float]:
        """Return how often the heart has beaten, and the clock at the last beat."""
        beats, clock = self.HEAD.unpack_from(self._page)
        return beats, clock

    def note(self, place: int, deadline: float, text: str) -> None:
        """Note a limit."""
        begin = self.PLACE_BYTES * (place + 1)
        room = self.PLACE_BYTES - self.PLACE.size
        encoded = text.encode(errors="backslashreplace")[:room]
        self._page[begin + self.PLACE.size : begin + self.PLACE.size + len(encoded)] = encoded
        self.PLACE.pack_into(self._page, begin, deadline, len(encoded))

    def move(self, place: int, deadline: float) -> None:
        """Change the deadline of a limit; infinity: there is none any more."""
        struct.pack_into("<d", self._page, self.PLACE_BYTES * (place + 1), deadline)

    def earliest(self) -> tuple[float, str]:
        """Return the earliest deadline, and what takes longer."""
        deadline, text = math.inf, b""
        for place in range(self.NUM_PLACES):
            begin = self.PLACE_BYTES * (place + 1)
            own_deadline, length = self.PLACE.unpack_from(self._page, begin)
            if length and own_deadline < deadline:
                deadline = own_deadline
                text = self._page[begin + self.PLACE.size : begin + self.PLACE.size + length]
        return deadline, text.decode(errors="replace")


def make_page() -> int:
    """Return the descriptor of a page for a board, which its mappings keep."""
    descriptor = os.memfd_create("minirl-guard")
    os.ftruncate(descriptor, Board.SIZE)
    return descriptor


def main(pid: int, board: Board) -> None:
    """Guard the rank that has started this process, until it ends and stdin with it."""
    seen = -1
    silent = 0.0  # Seconds in which the heart stood still and the rank was not stopped.
    while os.getppid() == pid:
        ready, _, _ = select.select([0], [], [], TICK_SECONDS)
        if ready:
            return
        beats, clock = board.head()
        if beats != seen or is_stopped(pid):
            seen = beats
            silent = 0.0
            continue
        silent += TICK_SECONDS
        deadline, text = board.earliest()
        if silent > GRACE_SECONDS and clock + silent > deadline + GRACE_SECONDS:
            end(pid, text)
            return


def is_stopped(pid: int) -> bool:
    """Whether somebody has stopped the process, as Ctrl-Z does, or it has just ended."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "TtZX"
    except OSError:
        return True


def end(pid: int, text: str) -> None:
    """Say what takes too long, let the rank print its stacks (faulthandler can), and kill it."""
    message = (
        f"minirl: error: {text}\nIt keeps Python's global lock, so that no other thread of its "
        "process runs, and the process is killed."
    )
    runpy.run_path(AGENT)["tell_agent"](message)
    print(f"\n{message} Its threads:", file=sys.stderr, flush=True)
    os.kill(pid, STACKS)
    time.sleep(STACK_SECONDS)
    with contextlib.suppress(OSError), open("/proc/self/comm", "w") as name:
        name.write(TOLD)
    os.kill(pid, signal.SIGKILL)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):  # Whoever reads what the rank prints need not wait for this process.
        os.dup2(nowhere, stream)
    time.sleep(TOLD_SECONDS)


def has_told(guard: int) -> bool:
    """Whether the guard with this process id has killed its rank, and said why."""
    try:
        with open(f"/proc/{guard}/comm") as name:
            return name.read().strip() == TOLD
    except OSError:
        return False


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # They are for the rank.
    main(int(sys.argv[1]), Board(int(sys.argv[2])))
