"""Reads a run's metrics.jsonl: all its steps are there, and finite; medians by phase.

python -m benchmarks.gpu_stages.s4_metrics FOLDER STEPS
"""

import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks.gpu_stages import lib
from benchmarks.gpu_stages.lib import check, value

NUM_WARMUP = 2  # Steps that do not count: memory of the host is pinned then.
FINITE = ("reward", "loss", "grad_norm", "mismatch", "answer_tokens")
KINDS = ("time", "gpu_gib", "memory", "rollout", "tokens_per_second")
NAMES = ("mismatch", "refit_bytes", "kv_cache_tokens", "mfu", "utilisation")


def check_rows(rows: list[dict[str, Any]], num_steps: int) -> None:
    check(f"{num_steps} RL steps", len(rows) == num_steps, f"{len(rows)} rows")
    for name in FINITE:
        values = [row[name] for row in rows if name in row]
        is_finite = bool(values) and all(map(math.isfinite, values))
        check(f"{name} is finite", is_finite, f"first {values[:1]}, last {values[-1:]}")
    skipped = sum(row.get("skipped_updates", 0) for row in rows)
    check("no update was skipped", not skipped, f"{skipped}")


def add_medians(rows: list[dict[str, Any]]) -> None:
    times = [f"{row['time/step']:.3f}" for row in rows]
    value("seconds of each step", " ".join(times))
    value("gradient norms", " ".join(f"{row['grad_norm']:.3g}" for row in rows))
    late = rows[NUM_WARMUP:] or rows
    names = set()
    for row in late:
        names |= {name for name in row if name.partition("/")[0] in KINDS or name in NAMES}
    for name in sorted(names):
        values = [row[name] for row in late if name in row]
        value(name, statistics.median(values), f"median of {len(values)}")


def main(folder: Path, num_steps: int) -> None:
    metrics = folder / "metrics.jsonl"
    if not metrics.exists():
        check("the run wrote metrics.jsonl", False)
        lib.leave()
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    rows = [line for line in lines if line["phase"] == "rl"]
    check_rows(rows, num_steps)
    add_medians(rows)
    for line in lines:
        if line["phase"] == "eval":
            value(f"held-out accuracy at step {line['step']}", line["accuracy"])
    summary = folder / "summary.json"
    state = json.loads(summary.read_text())["state"] if summary.exists() else "there is none"
    check("summary.json says finished", state == "finished", state)
    lib.leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
