"""Time limits of what cannot be interrupted in any other way, and the clock that they go by.

A thread of its own looks at them. It talks to nobody, so that nothing makes it late but code that
keeps Python's global lock, and then the guard (guard.py) is there.
"""

import contextlib
import faulthandler
import math
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from minirl.supervise import guard
from minirl.supervise.guard import Board

TICK_SECONDS = 0.25  # Limits are looked at so often.
NOWHERE = -1  # A limit that is not on the board.


@dataclass(kw_only=True)
class Limit:
    """A time limit of something that a thread is at."""

    seconds: float
    what: Callable[[], str]  # Says what took longer; called in another thread.
    place: int  # On the board.
    deadline: float = math.inf  # By `Limits.clock`.
    thread: int = field(default_factory=threading.get_ident)


class Limits:
    """The time limits of a process; nobody looks at them before `start`.

    Attributes:
        clock: seconds that this process has run. It stands still while the process is stopped, so
            that no limit is over when it goes on.
        guard: the process id of its guard; 0: it has none.
    """

    def __init__(self, rank: int, on_over: Callable[[Limit], None]):
        """`on_over`: called in a thread of its own, once, for the first limit that is over."""
        self.rank = rank
        self.on_over = on_over
        self.clock = 0.0
        self.guard = 0
        self._limits: dict[int, Limit] = {}  # By the order in which they began.
        self._num_begun = 0
        self._lock = threading.Lock()
        self._board: Board | None = None
        self._free_places = deque(range(Board.NUM_PLACES))
        self._guard_process: subprocess.Popen | None = None

    def start(self) -> None:
        """Start the thread that looks, and the guard."""
        faulthandler.register(guard.STACKS, chain=False)
        page = guard.make_page()
        self._board = Board(page)
        command = [sys.executable, "-I", "-S", guard.__file__, str(os.getpid()), str(page)]
        self._guard_process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,  # Ends with this process, and so does the guard.
            pass_fds=[page],
            start_new_session=True,  # Ctrl-C is not for it.
        )
        self.guard = self._guard_process.pid
        os.close(page)
        threading.Thread(target=self._run, name="limits", daemon=True).start()

    @contextlib.contextmanager
    def limit(self, seconds: float, what: Callable[[], str]) -> Iterator[Limit]:
        """Call `on_over` if the block takes longer than so many seconds. See `Watch.limit`."""
        if math.isinf(seconds):
            yield Limit(seconds=seconds, what=what, place=NOWHERE)
            return
        limit = Limit(seconds=seconds, what=what, place=self._take_place())
        limit.deadline = self.clock + seconds
        if self._board and limit.place != NOWHERE:
            self._board.note(limit.place, limit.deadline, f"rank {self.rank}: {what()}")
        with self._lock:
            self._num_begun += 1
            number = self._num_begun
        self._limits[number] = limit
        try:
            yield limit
        finally:
            del self._limits[number]
            if limit.place != NOWHERE:
                self._move(limit, math.inf)
                self._free_places.append(limit.place)

    def renew(self, limit: Limit) -> None:
        """Let the time of a limit begin now."""
        self._move(limit, self.clock + limit.seconds)

    def pause(self, limit: Limit) -> None:
        """Let a limit wait for `renew`."""
        self._move(limit, math.inf)

    def _move(self, limit: Limit, deadline: float) -> None:
        limit.deadline = deadline
        if self._board and limit.place != NOWHERE:
            self._board.move(limit.place, deadline)

    def _take_place(self) -> int:
        """Return a free place of the board; without one, the guard does not know the limit."""
        try:
            return self._free_places.popleft()
        except IndexError:
            return NOWHERE

    def _run(self) -> None:
        """Let the clock go on and the heart beat, and look at the limits until one is over."""
        before = time.monotonic()
        is_over = False
        while True:
            time.sleep(TICK_SECONDS)
            now = time.monotonic()
            self.clock += min(now - before, 2 * TICK_SECONDS)  # More: the process was stopped.
            before = now
            assert self._board
            self._board.beat(self.clock)
            limit = None if is_over else self.first_over()
            if limit:
                is_over = True
                # In a thread of its own: it may take long, and the heart has to beat meanwhile.
                threading.Thread(
                    target=self.on_over, args=(limit,), name="over", daemon=True
                ).start()

    def first_over(self) -> Limit | None:
        """Return the first of the limits that are over; None: no limit is."""
        for limit in list(self._limits.values()):
            if self.clock > limit.deadline:
                return limit
        return None
