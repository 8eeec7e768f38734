"""What code asks of the supervisor of its process: time limits, and whether it should stop.

`minirl.supervise.watch.Watch` supervises a program: it takes signals, sees other ranks end, and
ends the run when a limit is over. Where none has been started there is an `Oversight`, which keeps
limits and never looks at them.
"""

import asyncio
import contextlib
import faulthandler
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field

BEAT = "minirl/beat"  # /RANK on the store counts as long as the process of that rank runs.
TICK_SECONDS = 0.25  # A supervisor looks at the limits so often,
GRACE_SECONDS = 5.0  # and on a loaded machine so much later.


@dataclass(eq=False)
class Limit:
    """A time limit of a block that a thread is in."""

    seconds: float
    describe: Callable[[], str]
    deadline: float  # By `Oversight.clock`; infinity: there is none.
    thread: int = field(default_factory=threading.get_ident)


class Oversight:
    """Keeps time limits and what a supervisor asks of the program; nobody looks at them.

    Attributes:
        clock: seconds that this process has run, without those in which it was stopped.
        beats: other ranks look whether this process runs.
        requested: a signal to this rank or to another asks to save and leave.
        can_save: the program will look at `requested`. Before that, a signal ends it at once.
        phase: returns the name of what the main thread does.
        unmapped_bytes: returns how many bytes torch counts of a device's memory that a sleeping
            engine has given back.
        finish_writing: waits a while for a checkpoint in the background, before the run ends.
        record_end: notes in the run's folder how it ends: state, reason. On one rank.
        close_logs: sends what is logged and not yet sent, of a run that fails.
    """

    def __init__(self) -> None:
        self.clock = 0.0
        self.limits: list[Limit] = []
        self.calls: dict[asyncio.Timeout, Limit] = {}  # What `limit_call` limits.
        self.seconds_left: dict[asyncio.Timeout, float] = {}  # Of those whose time stands still.
        self.arming = threading.Lock()
        # When faulthandler ends this process, by time.monotonic(); infinity: no timer is set. Minus
        # infinity: no limit may set one, as before somebody looks at them.
        self.armed_until = -math.inf
        self.beats = False
        self.requested = False
        self.can_save = False
        self.phase: Callable[[], str] = lambda: "start"
        self.unmapped_bytes: Callable[[], int] = lambda: 0
        self.finish_writing: Callable[[], None] = lambda: None
        self.record_end: Callable[[str, str], None] = lambda state, reason: None
        self.close_logs: Callable[[], None] = lambda: None

    @contextlib.contextmanager
    def limit(self, seconds: float, describe: Callable[[], str]) -> Iterator[Limit]:
        """End the run if the block takes longer; for what cannot be interrupted otherwise.

        Args:
            seconds: how long the block may take; infinity: there is no limit.
            describe: returns what took longer and what to do. Another thread calls it.
        """
        limit = Limit(seconds, describe, self.clock + seconds)
        self.limits.append(limit)
        with self.arming:  # Before the block, which may keep Python's lock from its start.
            if self.seconds_to_exit(limit) + time.monotonic() < self.armed_until:
                self.arm([limit])
        try:
            yield limit
        finally:
            self.limits.remove(limit)

    @contextlib.asynccontextmanager
    async def limit_call(
        self, timeout: asyncio.Timeout, seconds: float, describe: Callable[[], str]
    ) -> AsyncIterator[None]:
        """Cancel the block by `timeout`; end the run if it takes `seconds` nevertheless.

        Neither counts the time from `stop_calls` to `continue_calls`.
        """
        with self.limit(seconds, describe) as limit:
            async with timeout:
                self.calls[timeout] = limit
                try:
                    yield
                finally:
                    del self.calls[timeout]

    def stop_calls(self) -> None:
        """Stop the time of all limited calls, in their loop: of training, until a rollout is due.

        A step of training, a checkpoint or an evaluation may take longer than an agent is given,
        which gets no completions meanwhile.
        """
        now = asyncio.get_running_loop().time()
        for timeout, limit in self.calls.items():
            end = timeout.when()
            self.pause(limit)
            if end and not timeout.expired():
                self.seconds_left[timeout] = end - now
                timeout.reschedule(None)

    def continue_calls(self) -> None:
        """Let the time of all calls continue."""
        for timeout, limit in self.calls.items():
            self.renew(limit)
            if timeout in self.seconds_left:
                now = asyncio.get_running_loop().time()
                timeout.reschedule(now + self.seconds_left[timeout])
        self.seconds_left = {}

    def seconds_to_exit(self, limit: Limit) -> float:
        """Return in how many seconds faulthandler's timer ends the process because of a limit.

        The timer counts the time in which the process is stopped by SIGSTOP, too, so it has twice
        the time.
        """
        return limit.deadline - self.clock + max(GRACE_SECONDS, limit.seconds)

    def arm(self, limits: list[Limit]) -> None:
        """Set faulthandler's timer for the earliest of some limits.

        Code that keeps Python's global lock stops all threads. The timer needs no lock: it prints
        all stacks and ends the process. A timer that is set is replaced in one call: between a
        cancel and a new timer another thread could get the lock, and keep it.
        """
        seconds = min(map(self.seconds_to_exit, limits), default=math.inf)
        self.armed_until = time.monotonic() + seconds
        if seconds < math.inf:
            faulthandler.dump_traceback_later(max(seconds, TICK_SECONDS), exit=True, file=2)
        else:
            faulthandler.cancel_dump_traceback_later()

    def renew(self, limit: Limit) -> None:
        """Start the time of a limit again, now."""
        limit.deadline = self.clock + limit.seconds

    def pause(self, limit: Limit) -> None:
        """Stop the time of a limit until `renew`."""
        limit.deadline = math.inf
