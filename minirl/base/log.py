"""What a run logs: console, metrics.jsonl, TensorBoard, trackers, and the seconds of each phase.

Only rank 0 writes.
"""

import contextlib
import json
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import torch
from tqdm import tqdm

from minirl.base.files import write_whole
from minirl.run.trackers import Tracker

# A point of time: in seconds of the host, or on the device, whose kernels run behind the host.
Moment = float | torch.cuda.Event


class Timer:
    """Seconds by phase. Phases nest; a phase's time excludes that of the phases inside it.

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
        """Add the time since the last call to the innermost phase."""
        now = self._now()
        if self._stack:
            self._intervals.append((self._stack[-1], self._mark, now))
            self._add_memory(self._stack[-1])
        self._mark = now

    def _add_memory(self, phase: str) -> None:
        """Note the most memory since the last call as that of a phase.

        What was not there all the time is left out. The engine wakes and sleeps in phases of its
        own, in which torch's counters stand still, so that is right in each of them.
        """
        if self.device.type != "cuda":
            return
        before = self._unmapped
        self._unmapped = self.unmapped_bytes()
        never_there = min(before, self._unmapped)
        peaks = {
            "allocated": torch.cuda.max_memory_allocated(self.device),
            "reserved": torch.cuda.max_memory_reserved(self.device),
        }
        for kind, peak in peaks.items():
            self._note(f"{phase}_{kind}", max(0, peak - never_there))
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
        self._stack.append(name)
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
            seconds[name] += _seconds_between(first, last)
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


def _seconds_between(first: Moment, last: Moment) -> float:
    if isinstance(first, float) or isinstance(last, float):
        assert isinstance(first, float) and isinstance(last, float)
        return last - first
    return first.elapsed_time(last) / 1000


class Log:
    """Console, progress bar, metrics.jsonl, TensorBoard and trackers of a run.

    Made on every rank; silent on all but rank 0. Files in the run folder: `metrics.jsonl` (one
    object a step) and `tensorboard/`. Where the console is no terminal, but a file, a step is a
    line in place of a move of the progress bar.

    Args:
        folder: of the run.
        rank: of this process.
        first_step: of a resumed run; else 0.
        trackers: returns what else gets the metrics; called on rank 0.
    """

    def __init__(
        self,
        folder: Path,
        *,
        rank: int,
        first_step: int,
        trackers: Callable[[], Iterable[Tracker]] = tuple,
    ):
        self.rank = rank
        self.bar = tqdm(disable=True)
        self.has_terminal = sys.stderr.isatty()
        self.total = 0  # Steps of the present progress bar.
        self.description = ""
        self.began = time.monotonic()  # When its first step did,
        self.num_shown = 0  # and how many have ended since.
        self.trackers: list[Tracker] = []
        if rank == 0:
            self.trackers += trackers()
            # Here, because it is slow to import and needed on one rank only.
            from torch.utils.tensorboard import SummaryWriter

            threading.excepthook = partial(_leave_out_board, threading.excepthook)
            # TensorBoard hides the steps that a resumed run repeats.
            self.board = SummaryWriter(folder / "tensorboard", purge_step=first_step or None)
            self.file = (folder / "metrics.jsonl").open("a")

    def progress(self, description: str, total: int, start: int = 0) -> None:
        """Begin a new progress bar, which `scalars` advances."""
        self.bar.close()
        self.total = total
        self.description = description
        self.began = time.monotonic()
        self.num_shown = 0
        self.bar = tqdm(
            total=total,
            initial=start,
            desc=description,
            file=sys.stderr,
            dynamic_ncols=True,
            mininterval=1.0,
            disable=self.rank > 0 or not self.has_terminal,
        )

    def scalars(
        self, phase: str, step: int, values: dict[str, float], shown: Iterable[str] = ()
    ) -> None:
        """Write one row: {"phase": "rl", "step": 7, ...}.

        Args:
            phase: what kind of row this is.
            step: its step.
            values: the metrics.
            shown: metrics to show beside the progress bar, which then advances by a step.
        """
        if shown:
            postfix = {name: f"{values[name]:.3g}" for name in shown if name in values}
            self.bar.set_postfix(postfix, refresh=False)
            self.bar.update(1)
            if self.rank == 0 and not self.has_terminal:
                say(self._line_of_step(step, postfix))
        if self.rank == 0:
            self.file.write(json.dumps({"phase": phase, "step": step, **values}) + "\n")
            self.file.flush()
            for name, value in values.items():
                self.board.add_scalar(f"{phase}/{name}", value, step)
            for tracker in self.trackers:
                tracker.log(phase, step, values)

    def _line_of_step(self, step: int, shown: dict[str, str]) -> str:
        """Return a step as a line: its number, what is shown, how long the rest will take."""
        self.num_shown += 1
        seconds = (time.monotonic() - self.began) / self.num_shown
        left = seconds * (self.total - step - 1)
        values = ", ".join(f"{name} {value}" for name, value in shown.items())
        return (
            f"{self.description} step {step + 1}/{self.total}: {values}; "
            f"{seconds:.3g} s/step, {tqdm.format_interval(left)} left"
        )

    def text(self, name: str, step: int, text: str) -> None:
        """Write a text to TensorBoard and the trackers."""
        if self.rank == 0:
            indented = "\n".join(f"    {line}" for line in text.split("\n"))
            self.board.add_text(name, indented, step)  # as code: an answer may be anything
            for tracker in self.trackers:
                tracker.text(name, step, text)

    def say(self, message: str) -> None:
        """Print a message on the console of rank 0, above the progress bar."""
        if self.rank == 0:
            say(message)

    def close(self) -> None:
        """Close the progress bar and the files."""
        self.bar.close()
        if self.rank == 0:
            self.board.close()
            self.file.close()
            for tracker in self.trackers:
                tracker.close()


def _leave_out_board(
    show: Callable[[threading.ExceptHookArgs], object], failed: threading.ExceptHookArgs
) -> None:
    """Show what a thread has raised, unless it is TensorBoard's.

    That error is raised in the main thread, too, by the next thing that is logged, and is told once
    there.
    """
    if type(failed.thread).__module__ != "tensorboard.summary.writer.event_file_writer":
        show(failed)


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
    tqdm.write(f"minirl: {printable(message)}", file=sys.stderr)


# C0 without tab and line feed, DEL and C1.
_CONTROLS = (*range(9), *range(11, 32), *range(127, 160))
_ESCAPED = {code: f"\\x{code:02x}" for code in _CONTROLS}


def printable(text: str) -> str:
    """Return a text with its control characters escaped, for a terminal.

    What a policy or a row says could else clear the screen or rename its window.
    """
    return text.translate(_ESCAPED)


def truncate(path: Path, *, keep_before: int, keep_sft: bool) -> None:
    """Drop the rows of metrics.jsonl that a resumed run will write again.

    Lines that are no rows, as a full disk or a power cut leaves one at the end, are dropped, too,
    and told in one line.

    Args:
        path: the file.
        keep_before: RL and evaluation steps from this one on are dropped.
        keep_sft: whether to keep the rows of the warm start.
    """
    if not path.exists():
        path.unlink(missing_ok=True)  # a link to nothing, where the run would make a file
        return
    kept = []
    num_torn = 0
    for line in path.read_bytes().split(b"\n"):
        if not line.strip():
            continue
        place = _place_of_row(line)
        if place is None:
            num_torn += 1
            continue
        phase, step = place
        is_warm_start = phase == "sft" or step < 0
        if keep_sft if is_warm_start else step < keep_before:
            kept.append(line.decode() + "\n")
    if num_torn:
        say(f"{path}: {num_torn} lines that are no rows (written only in part?) are left out")
    write_whole(path, "".join(kept))


def _place_of_row(line: bytes) -> tuple[str, int] | None:
    """Return phase and step of a row of metrics.jsonl; None: the line is no row."""
    try:
        row = json.loads(line)
        return str(row["phase"]), int(row["step"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
