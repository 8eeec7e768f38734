"""What a run logs: metrics.jsonl, TensorBoard, W&B and a progress bar. Only rank 0 writes."""

import io
import json
import math
import sys
import threading
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from tqdm import tqdm

from minirl.base.log import say
from minirl.run.trackers import Wandb


class Log:
    """Console, progress bar, metrics.jsonl, TensorBoard and W&B of a run.

    Made on every rank; silent on all but rank 0. Files in the run folder: `metrics.jsonl` (one
    object a step) and `tensorboard/`. If the console is no terminal, each step prints a line
    instead of moving the progress bar.

    Args:
        folder: the run's folder.
        rank: rank of this process.
        first_step: TensorBoard hides what is there of this step and of later ones.
        open_wandb: begins the run at Weights & Biases; called on rank 0. None: it is not there.
    """

    def __init__(
        self,
        folder: Path,
        *,
        rank: int,
        first_step: int,
        open_wandb: Callable[[], Wandb] | None = None,
    ):
        self.rank = rank
        self.bar = tqdm(disable=True)
        self.has_terminal = sys.stderr.isatty()
        self.wandb = open_wandb() if open_wandb and rank == 0 else None
        if rank == 0:
            # Imported here, because it is slow and only this rank needs it.
            from torch.utils.tensorboard import SummaryWriter

            threading.excepthook = partial(_leave_out_board, threading.excepthook)
            self.board = SummaryWriter(folder / "tensorboard", purge_step=first_step)
            self.file = (folder / "metrics.jsonl").open("a")

    def progress(self, description: str, total: int, start: int = 0) -> None:
        """Begin a new progress bar, which `scalars` advances."""
        self.bar.close()
        self.bar = tqdm(
            total=total,
            initial=start,
            desc=description,
            file=sys.stderr if self.has_terminal else io.StringIO(),
            dynamic_ncols=True,
            mininterval=1.0 if self.has_terminal else math.inf,
            disable=self.rank > 0,
        )

    def scalars(
        self, phase: str, step: int, values: dict[str, float], shown: Iterable[str] = ()
    ) -> None:
        """Write one row: {"phase": "rl", "step": 7, ...}.

        Args:
            phase: the kind of row.
            step: number of the step.
            values: the metrics.
            shown: names of the metrics that the progress bar shows; it advances if there are any.
        """
        if self.rank > 0:
            return
        bar = self.bar
        if shown:
            postfix = {name: f"{values[name]:.3g}" for name in shown if name in values}
            bar.set_postfix(postfix, refresh=False)
            bar.update(1)
        if shown and not self.has_terminal:
            metrics = ", ".join(f"{name} {value}" for name, value in postfix.items())
            seconds = bar.format_dict["elapsed"] / (bar.n - bar.initial)
            total = int(bar.total or 0)
            left = tqdm.format_interval(seconds * (total - step - 1))
            say(f"{bar.desc} step {step + 1}/{total}: {metrics}; {seconds:.3g} s/step, {left} left")
        # By `float`: a number of one's own may be NumPy's or a tensor's.
        self.file.write(json.dumps({"phase": phase, "step": step, **values}, default=float) + "\n")
        self.file.flush()
        for name, value in values.items():
            self.board.add_scalar(f"{phase}/{name}", value, step)
        if self.wandb:
            self.wandb.log(phase, step, values)

    def text(self, name: str, step: int, text: str) -> None:
        """Write a text to TensorBoard and W&B."""
        if self.rank == 0:
            indented = "\n".join(f"    {line}" for line in text.splitlines())
            self.board.add_text(name, indented, step)  # as code: an answer may be anything
            if self.wandb:
                self.wandb.text(name, step, text)

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
            if self.wandb:
                self.wandb.close()


def _leave_out_board(
    show: Callable[[threading.ExceptHookArgs], object], failed: threading.ExceptHookArgs
) -> None:
    """Show what a thread has raised, unless it is TensorBoard's.

    The next line that is logged raises that error in the main thread, too.
    """
    if type(failed.thread).__module__ != "tensorboard.summary.writer.event_file_writer":
        show(failed)
