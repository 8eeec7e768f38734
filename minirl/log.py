"""What a run says: console, metrics.jsonl, TensorBoard, and the seconds of each phase. Only rank 0
writes.
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

    def __init__(self, device: torch.device | None = None):
        self.device = device or torch.device("cpu")
        self.began = self._mark = time.perf_counter()
        self.wall: dict[str, float] = defaultdict(float)
        self._stack: list[str] = []

    def _book(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(
                self.device
            )  # kernels run behind the host; without it their time lands in a later phase
        before, self._mark = self._mark, time.perf_counter()
        if self._stack:
            self.wall[self._stack[-1]] += self._mark - before

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._book()
        self._stack.append(name)
        try:
            yield
        finally:
            self._book()
            self._stack.pop()

    def take(self) -> dict[str, float]:
        """Wall seconds by phase since the last call."""
        self._book()
        taken, self.wall = self.wall, defaultdict(float)
        return dict(taken)


class Log:
    """Scalars of this run. Made on every rank; silent on all but rank 0.

    Files in the run folder: `metrics.jsonl` (one object a step), `tensorboard/`.
    """

    def __init__(self, folder: Path, *, rank: int, first_step: int = 0):
        self.folder, self.rank = folder, rank
        self.bar = tqdm(disable=True)
        if rank == 0:
            from torch.utils.tensorboard import (
                SummaryWriter,  # slow to import, and needed on one rank only
            )

            self.board = SummaryWriter(
                folder / "tensorboard", purge_step=first_step or None
            )  # hides what a resumed run repeats
            self.file = (folder / "metrics.jsonl").open("a")

    def progress(self, description: str, total: int, start: int = 0) -> None:
        """Begin a progress bar in place of the last; `scalars` moves it."""
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
        """Write one row: {"phase": "rl", "step": 7, ...}. `shown`: it is a step, and the progress
        bar goes on, with these of the values beside it.
        """
        if shown:
            self.bar.set_postfix(
                {name: f"{values[name]:.3g}" for name in shown if name in values}, refresh=False
            )
            self.bar.update(1)
        if self.rank == 0:
            self.file.write(json.dumps({"phase": phase, "step": step, **values}) + "\n")
            self.file.flush()
            for name, value in values.items():
                self.board.add_scalar(f"{phase}/{name}", value, step)

    def say(self, message: str) -> None:
        if self.rank == 0:
            tqdm.write(f"minirl: {message}", file=sys.stderr)

    def close(self) -> None:
        self.bar.close()
        if self.rank == 0:
            self.board.close()
            self.file.close()


def truncate(path: Path, *, keep_before: int, keep_sft: bool) -> None:
    """Drop the rows that a resumed run will write again: RL and evaluation steps from `keep_before`
    on.
    """
    if path.exists():
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        kept = [
            row
            for row in rows
            if (keep_sft if row["phase"] == "sft" or row["step"] < 0 else row["step"] < keep_before)
        ]
        path.write_text("".join(json.dumps(row) + "\n" for row in kept))
