"""What a run logs: metrics.jsonl, TensorBoard, trackers and a progress bar. Only rank 0 writes."""

import json
import sys
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from tqdm import tqdm

from minirl.base.files import write_whole
from minirl.base.log import say
from minirl.run.trackers import Tracker


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
