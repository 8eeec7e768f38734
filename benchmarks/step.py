"""Where the CPU-seconds of an RL step go, and what share of them is neither generation nor forward
nor backward.

    torchrun --nproc-per-node 2 benchmarks/step.py --config benchmarks/step.yaml
    torchrun --nproc-per-node 2 benchmarks/step.py --config benchmarks/step.yaml --policy.model
    FOLDER --rollout.max-tokens 256

It is the program minirl.rl itself; any of its flags sets model and load. CPU-seconds of rank 0,
median over the steps after the second; on a noisy machine they say more than wall time. A rank that
waits for another in a collective may burn CPU there, which is counted where it waits.
"""

import json
import shutil
import statistics
import time
from pathlib import Path

from minirl import cli
from minirl.config.rl import RLConfig
from minirl.parallel.mesh import Mesh
from minirl.rl import Trainer

USEFUL = ("rollout", "forward", "backward")


class TimedTrainer(Trainer):
    def __init__(self, cfg: RLConfig, mesh: Mesh):
        super().__init__(cfg, mesh)
        self.marks: list[dict[str, float]] = []

    def report(self, *args) -> None:  # noqa: ANN002 - passed through
        super().report(*args)
        self.marks.append(dict(self.timer.cpu) | {"all": time.process_time()})


def main(cfg: RLConfig, mesh: Mesh) -> None:
    if mesh.rank == 0:
        shutil.rmtree(cfg.output, ignore_errors=True)
    mesh.barrier()
    trainer = TimedTrainer(cfg, mesh)
    trainer.train()
    steps = [
        {k: b[k] - a.get(k, 0.0) for k in b}
        for a, b in zip(trainer.marks[1:], trainer.marks[2:], strict=False)
    ]
    phases = [
        p for p in trainer.marks[-1] if p not in ("all", "start", "evaluate", "export", "sft")
    ]
    median = {p: statistics.median(s.get(p, 0.0) for s in steps) for p in [*phases, "all"]}
    median["unphased"] = median["all"] - sum(median[p] for p in phases)
    if mesh.rank == 0:
        print(
            f"\n{len(steps)} steps on {mesh.world_size} ranks, {sum(p.numel() for p in trainer.policy.model.parameters()) / 1e6:.1f}M parameters"
        )
        for name, seconds in sorted(median.items(), key=lambda item: -item[1]):
            print(f"{name:<12} {seconds:9.4f} CPU-s  {100 * seconds / median['all']:6.2f} %")
        overhead = 1 - sum(median[p] for p in USEFUL) / median["all"]
        result = {
            "overhead": overhead,
            "refit": median["refit"] / median["all"],
            "cpu_seconds": median,
        }
        print(
            f"not generation, forward or backward: {100 * overhead:.2f} %   refit: {100 * result['refit']:.2f} %"
        )
        (Path(cfg.output) / "bench.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    cli.run(RLConfig, main)
