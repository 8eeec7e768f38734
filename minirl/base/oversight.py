"""What code asks of the supervisor of its process: time limits, and whether it should stop.

`minirl.supervise.watch.Watch` supervises a program: it takes signals, sees other ranks end, and
ends the run when a limit is over. Where none has been started there is an `Oversight`, which keeps
limits and never looks at them.
"""

import contextlib
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field


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
        requested: a signal to this rank or to another asks to save and leave.
        can_save: the program will look at `requested`. Before that, a signal ends it at once.
        phase: returns the name of what the main thread does.
        unmapped_bytes: returns how many bytes torch counts of a device's memory that a sleeping
            engine has given back.
        finish_writing: waits a while for a checkpoint in the background, before the run ends.
        record_end: notes in the run's folder how it ends: state, reason. On one rank.
    """

    def __init__(self) -> None:
        self.clock = 0.0
        self.limits: list[Limit] = []
        self.requested = False
        self.can_save = False
        self.phase: Callable[[], str] = lambda: "start"
        self.unmapped_bytes: Callable[[], int] = lambda: 0
        self.finish_writing: Callable[[], None] = lambda: None
        self.record_end: Callable[[str, str], None] = lambda state, reason: None

    @contextlib.contextmanager
    def limit(self, seconds: float, describe: Callable[[], str]) -> Iterator[Limit]:
        """End the run if the block takes longer; for what cannot be interrupted otherwise.

        Args:
            seconds: how long the block may take; infinity: there is no limit.
            describe: returns what took longer and what to do. Another thread calls it.
        """
        limit = Limit(seconds, describe, self.clock + seconds)
        self.limits.append(limit)
        try:
            yield limit
        finally:
            self.limits.remove(limit)

    def renew(self, limit: Limit) -> None:
        """Start the time of a limit again, now."""
        limit.deadline = self.clock + limit.seconds

    def pause(self, limit: Limit) -> None:
        """Stop the time of a limit until `renew`."""
        limit.deadline = math.inf
