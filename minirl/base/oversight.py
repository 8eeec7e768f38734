"""What code asks of who watches over its process: time limits, and whether it is to stop.

`minirl.supervise.watch.Watch` is the one of a program: it hears signals and the other ranks, and
ends the run when a limit is over. Where nobody has started one, there is this one, which lets
everything pass.
"""

import contextlib
from collections.abc import Callable
from typing import Any


class Oversight:
    """Watches over nothing.

    Attributes:
        requested: a signal to this rank, or to another that has told it, asks to save and leave.
        can_save: the program will look at `requested`. Before that, a signal ends it at once.
        phase: returns what the main thread is at.
        unmapped_bytes: returns what torch counts of a device's memory and a sleeping engine has
            given back.
        finish_writing: waits a while for what is written beside training, before a limit ends it.
        record_end: notes in the folder of the run how it ends: state, reason. On one rank.
    """

    def __init__(self) -> None:
        self.requested = False
        self.can_save = False
        self.phase: Callable[[], str] = lambda: "start"
        self.unmapped_bytes: Callable[[], int] = lambda: 0
        self.finish_writing: Callable[[], None] = lambda: None
        self.record_end: Callable[[str, str], None] = lambda state, reason: None

    def limit(
        self, seconds: float, what: Callable[[], str]
    ) -> contextlib.AbstractContextManager[Any]:
        """End the run if the block takes longer.

        For what cannot be interrupted in any other way. The block gets the limit: `renew` starts
        its time again, and `pause` lets it wait for that.

        Args:
            seconds: of a process that runs; infinity: there is no limit.
            what: says what took longer, and what to do. Called in another thread then, and where
                the block begins.
        """
        return contextlib.nullcontext()

    def renew(self, limit: Any) -> None:
        """Let the time of a limit begin now."""

    def pause(self, limit: Any) -> None:
        """Let a limit wait for `renew`."""
