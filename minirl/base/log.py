"""Lines on the console, and the seconds of each phase."""

import contextlib
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from tqdm import tqdm

# A point of time: float, in seconds of the host, or torch.cuda.Event, where kernels run later.
Moment = Any


class Timer:
    """Seconds by phase. Phases nest; a phase's time excludes that of the phases inside it.

    Of an evaluation it does not: what computes there is no part of a step.

    On CUDA the time is that of the device: events are put between its kernels, and are read in
    `take`, so that the host never waits in between. There the most memory of each phase is counted,
    too.

    Attributes:
        unmapped_bytes: returns how much of the memory that torch counts the device has back, as
            long as an engine sleeps. The engine sets it.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.began = time.perf_counter()
        self._mark = self._now()  # when the last interval was added to its phase
        self._stack: list[str] = []
        self._failed = ""  # The innermost phase that an error has ended; empty: none has.
        self._intervals: list[tuple[str, Moment, Moment]] = []
        self._memory: dict[str, float] = {}  # GiB.
        self.unmapped_bytes: Callable[[], int] = lambda: 0
        self._unmapped = 0  # When memory was counted last.

    def _now(self) -> Moment:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _add_interval(self) -> None:
        """Add the time since the last call, and the most memory, to the innermost phase."""
        phase = self._stack[-1] if self._stack else ""
        since = self._mark
        self._mark = self._now()
        if phase:
            self._intervals.append((phase, since, self._mark))
        if not phase or self.device.type != "cuda":
            return
        # The most memory since the last call. What was not there all the time is left out: the
        # engine wakes and sleeps in phases of these names, where torch's counters do not change.
        before = self._unmapped
        self._unmapped = self.unmapped_bytes()
        never_there = min(before, self._unmapped)
        allocated = torch.cuda.max_memory_allocated(self.device)
        reserved = torch.cuda.max_memory_reserved(self.device)
        self._note(f"{phase}_allocated", allocated - never_there)
        self._note(f"{phase}_reserved", reserved - never_there)
        torch.cuda.reset_peak_memory_stats(self.device)

    def _note(self, name: str, num_bytes: int) -> None:
        self._memory[name] = max(self._memory.get(name, 0.0), num_bytes / 2**30)

    def note_device(self, name: str) -> None:
        """Note what is used of the whole device now, by this process and all others."""
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            self._note(name, total - free)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time inside the block as that of a phase."""
        self._add_interval()
        self._stack.append("evaluate" if "evaluate" in self._stack else name)  # All of it is.
        self._failed = ""
        has_failed = True
        try:
            yield
            has_failed = False
        finally:
            if has_failed:
                self._failed = self._failed or name
            self._add_interval()
            self._stack.pop()

    def current(self) -> str:
        """Return the innermost phase, or that which an error has just ended.

        Another thread may ask, too.
        """
        stack = self._stack[-1:]
        return self._failed or (stack[0] if stack else "between steps")

    def take(self) -> dict[str, float]:
        """Return seconds by phase since the last call. On CUDA it waits for the device."""
        self._add_interval()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        seconds: dict[str, float] = defaultdict(float)
        for name, first, last in self._intervals:
            is_host = isinstance(last, float)
            seconds[name] += last - first if is_host else first.elapsed_time(last) / 1000
        self._intervals.clear()
        return dict(seconds)

    def take_memory(self) -> dict[str, float]:
        """Return the most memory since the last call, in GiB; nothing without CUDA.

        PHASE_allocated is that of tensors, PHASE_reserved what torch has taken from the device for
        them, and other names are those of `note_device`.
        """
        memory = dict(self._memory)
        self._memory.clear()
        return memory


def restore_streams() -> str:
    """Open stdout and stderr again where somebody has closed them: a run has to say why it ends.

    Returns the name of a stream that was closed; empty: none was.
    """
    closed = ""
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        if vars(sys)[name].closed:
            closed = f"sys.{name}"
            # Closing a stream of Python's leaves its descriptor open.
            vars(sys)[name] = open(  # noqa: SIM115  # it stays open
                descriptor, "w", buffering=1, errors="backslashreplace", closefd=False
            )
    return closed


def say(message: str) -> None:
    """Print a message on the console, above a progress bar if there is one."""
    restore_streams()
    text = f"minirl: {printable(message)}"
    try:
        tqdm.write(text, file=sys.stderr)
    except ValueError:  # A reward in another thread has closed it at this moment.
        os.write(2, f"{text}\n".encode(errors="backslashreplace"))


# C0 without tab and line feed, DEL and C1.
_CONTROLS = (*range(9), *range(11, 32), *range(127, 160))
_ESCAPED = {code: f"\\x{code:02x}" for code in _CONTROLS}


def printable(text: str) -> str:
    """Return a text with its control characters escaped, for a terminal.

    What a policy or a row says could else clear the screen or rename its window.
    """
    return text.translate(_ESCAPED)
