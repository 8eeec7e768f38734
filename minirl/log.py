"""What a run logs: console, metrics.jsonl, TensorBoard, and the seconds of each phase.

Only rank 0 writes.
"""

import contextlib
import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from tqdm import tqdm


class Timer:
    """Wall seconds by phase. Phases nest; a phase's time excludes that of the phases inside it."""

    def __init__(self, device: torch.device):
        self.device = device
        self.began = time.perf_counter()
        self.wall: dict[str, float] = defaultdict(float)
        self._mark = self.began  # when the last interval was added to its phase
        self._stack: list[str] = []

    def _add_interval(self) -> None:
        """Add the time since the last call to the innermost phase."""
        if self.device.type == "cuda":
            # Kernels run behind the host; without this their time would count in a later phase.
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        if self._stack:
            self.wall[self._stack[-1]] += now - self._mark
        self._mark = now

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time inside the block as that of a phase."""
        self._add_interval()
        self._stack.append(name)
        try:
            yield
        finally:
            self._add_interval()
            self._stack.pop()

    def take(self) -> dict[str, float]:
        """Return wall seconds by phase since the last call."""
        self._add_interval()
        taken = dict(self.wall)
        self.wall.clear()
        return taken


class Log:
    """Console, progress bar, metrics.jsonl and TensorBoard of a run.

    Made on every rank; silent on all but rank 0. Files in the run folder: `metrics.jsonl` (one
    object a step) and `tensorboard/`.
    """

    def __init__(self, folder: Path, *, rank: int, first_step: int):
        self.rank = rank
        self.bar = tqdm(disable=True)
        if rank == 0:
            # Here, because it is slow to import and needed on one rank only.
            from torch.utils.tensorboard import SummaryWriter

            # TensorBoard hides the steps that a resumed run repeats.
            self.board = SummaryWriter(folder / "tensorboard", purge_step=first_step or None)
            self.file = (folder / "metrics.jsonl").open("a")

    def progress(self, description: str, total: int, start: int = 0) -> None:
        """Begin a new progress bar, which `scalars` advances."""
        self.bar.close()
        self.bar = tqdm(
            total=total,
            initial=start,
            desc=description,
            file=sys.stderr,
            dynamic_ncols=True,
            mininterval=1.0,
            disable=self.rank > 0,
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
        if self.rank == 0:
            self.file.write(json.dumps({"phase": phase, "step": step, **values}) + "\n")
            self.file.flush()
            for name, value in values.items():
                self.board.add_scalar(f"{phase}/{name}", value, step)

    def say(self, message: str) -> None:
        """Print a message on the console of rank 0, above the progress bar."""
        if self.rank == 0:
            tqdm.write(f"minirl: {message}", file=sys.stderr)

    def close(self) -> None:
        """Close the progress bar and the files."""
        self.bar.close()
        if self.rank == 0:
            self.board.close()
            self.file.close()


def truncate(path: Path, *, keep_before: int, keep_sft: bool) -> None:
    """Drop the rows of metrics.jsonl that a resumed run will write again.

    Args:
        path: the file.
        keep_before: RL and evaluation steps from this one on are dropped.
        keep_sft: whether to keep the rows of the warm start.
    """
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines(keepends=True):
        row = json.loads(line)
        is_warm_start = row["phase"] == "sft" or row["step"] < 0
        if keep_sft if is_warm_start else row["step"] < keep_before:
            kept.append(line)
    path.write_text("".join(kept))
