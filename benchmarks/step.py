r"""Where the CPU-seconds of an RL step go.

    torchrun --nproc-per-node 2 benchmarks/step.py --config benchmarks/step.yaml
    torchrun --nproc-per-node 2 benchmarks/step.py --config benchmarks/step.yaml \
        --policy.model FOLDER --rollout.max-tokens 256

It is the program minirl.rl itself; any of its flags sets model and load. Prints CPU-seconds of rank
0 by phase, medians over the steps after the second, and what share of them is neither generation
nor forward nor backward; on a noisy machine they say more than wall time. A rank that waits for
another in a collective may burn CPU there, which is counted where it waits. The output folder is
replaced.
"""

import contextlib
import json
import shutil
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch

from minirl.base.log import Timer
from minirl.config.rl import RLConfig
from minirl.parallel.mesh import Mesh
from minirl.rl import Trainer
from minirl.supervise import cli

USEFUL = ("rollout", "forward", "backward")
NUM_WARMUP = 2  # steps that do not count


class CpuTimer(Timer):
    """Counts CPU-seconds by phase beside the wall seconds.

    `intervals` has a dict for each `take`, which a program calls once a step.
    """

    def __init__(self, device: torch.device):
        super().__init__(device)
        self.intervals: list[dict[str, float]] = []
        self._cpu: dict[str, float] = defaultdict(float)
        self._phases = ["outside"]  # those that are open, the innermost last
        self._cpu_mark = time.process_time()

    def _count(self) -> None:
        now = time.process_time()
        self._cpu[self._phases[-1]] += now - self._cpu_mark
        self._cpu_mark = now

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        with super().phase(name):
            self._count()
            self._phases.append(name)
            try:
                yield
            finally:
                self._count()
                self._phases.pop()

    def take(self) -> dict[str, float]:
        self._count()
        self.intervals.append(self._cpu)
        self._cpu = defaultdict(float)
        return super().take()


def main(cfg: RLConfig, mesh: Mesh) -> None:
    if mesh.rank == 0:
        shutil.rmtree(cfg.output, ignore_errors=True)
    mesh.barrier()
    timer = CpuTimer(mesh.device)
    with mock.patch("minirl.run.trainer.Timer", lambda device: timer):
        trainer = Trainer(cfg, mesh)
    trainer.train()
    if mesh.rank == 0:
        num_parameters = sum(p.numel() for p in trainer.policy.model.parameters())
        report(timer.intervals, Path(cfg.output), f"{num_parameters / 1e6:.1f}M parameters")


def report(intervals: list[dict[str, float]], output: Path, model: str) -> None:
    """Print the table and write it to bench.json."""
    steps = [interval for interval in intervals if "backward" in interval][NUM_WARMUP:]
    phases = sorted(set().union(*steps))
    medians = {phase: statistics.median(step.get(phase, 0.0) for step in steps) for phase in phases}
    medians["all"] = statistics.median(sum(step.values()) for step in steps)
    print(f"\n{len(steps)} steps, {model}")
    for phase, seconds in sorted(medians.items(), key=lambda item: -item[1]):
        print(f"{phase:<12} {seconds:9.4f} CPU-s  {100 * seconds / medians['all']:6.2f} %")
    overhead = 1 - sum(medians[phase] for phase in USEFUL) / medians["all"]
    refit = medians["refit"] / medians["all"]
    print(
        f"not generation, forward or backward: {100 * overhead:.2f} %   refit: {100 * refit:.2f} %"
    )
    result = {"overhead": overhead, "refit": refit, "cpu_seconds": medians}
    (output / "bench.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    cli.run(RLConfig, main)
