"""What a run leaves for people: the closing table, its summary, and curves."""

import contextlib
import json
import math
import statistics
import threading
from pathlib import Path

from minirl.base.files import remove, sync_file

# By kind of token: the phases that generate or train on it.
PHASES_OF_TOKENS = {"generated": ("rollout",), "trained": ("forward", "backward")}
# Phases that are not part of the RL steps.
OUTSIDE_STEPS = ("start", "sft", "evaluate", "export", "checkpoint")
# The panels of curves.png: title -> (phase, metric) of metrics.jsonl.
PANELS = {
    "held-out accuracy": ("eval", "accuracy"),
    "reward": ("rl", "reward"),
    "answer tokens": ("rl", "answer_tokens"),
    "entropy": ("rl", "entropy"),
    "engine-trainer |log-prob| difference": ("rl", "mismatch"),
    "SFT loss": ("sft", "loss"),
    "loss": ("train", "loss"),
    "held-out loss": ("eval", "loss"),
}


def slowest(seconds: list[dict[str, float]], **tokens: int) -> dict[str, float]:
    """Return the metrics of time of a step.

    Args:
        seconds: by phase, for each rank.
        tokens: numbers of tokens on all ranks, by the keys of PHASES_OF_TOKENS.

    Returns:
        "time/PHASE" of the rank that took longest; of the seconds that ranks waited for the others,
        whose maximum is "time/idle", also "time/idle_min", "time/idle_median" and the rank of the
        maximum, "time/idle_max_rank"; and "tokens_per_second/KIND".
    """
    times = {}
    for name in sorted(set().union(*seconds)):
        times[name] = max(of_rank.get(name, 0.0) for of_rank in seconds)

    metrics = {f"time/{name}": value for name, value in times.items()}
    if "idle" in times:
        idle = [of_rank.get("idle", 0.0) for of_rank in seconds]
        metrics["time/idle_min"] = min(idle)
        metrics["time/idle_median"] = statistics.median(idle)
        metrics["time/idle_max_rank"] = idle.index(max(idle))
    for kind, speed in speeds(tokens, times).items():
        metrics[f"tokens_per_second/{kind}"] = speed
    return metrics


def highest(memory: list[dict[str, float]]) -> dict[str, float]:
    """Return the most GiB of any rank, by what they are of, out of those of each rank."""
    names = sorted(set().union(*memory))
    return {name: max(of_rank.get(name, 0.0) for of_rank in memory) for name in names}


def speeds(tokens: dict[str, int], seconds: dict[str, float]) -> dict[str, float]:
    """Return tokens per second by kind, over the phases that generate or train on them."""
    per_second = {}
    for kind, phases in PHASES_OF_TOKENS.items():
        if kind in tokens:
            total = sum(seconds.get(phase, 0.0) for phase in phases)
            per_second[kind] = tokens[kind] / max(total, 1e-9)
    return per_second


def read_rows(path: Path) -> list[dict]:
    """Return the rows of metrics.jsonl, without one at the end that is being written."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_bytes().split(b"\n"):
        with contextlib.suppress(ValueError):
            rows.append(json.loads(line))
    return rows


_drawing = threading.Lock()  # One curves.png at a time.


def write_curves(folder: Path) -> Path:
    """Draw metrics.jsonl of a run folder to curves.png: a panel per quantity."""
    with _drawing:
        return _write_curves(folder)


def _write_curves(folder: Path) -> Path:
    # Not pyplot, which keeps figures and may look for a screen.
    from matplotlib.figure import Figure

    rows = read_rows(folder / "metrics.jsonl")
    curves = {}
    for title, (phase, name) in PANELS.items():
        points = [(r["step"], r[name]) for r in rows if r["phase"] == phase and name in r]
        if points:
            curves[title] = points

    num_columns = min(3, len(curves))
    num_rows = math.ceil(len(curves) / 3)
    figure = Figure(figsize=(12, 6))
    # Room for labels. A layout that matplotlib computes takes as long as all else.
    figure.subplots_adjust(
        left=0.06, right=0.98, bottom=0.09, top=0.94, wspace=0.25, hspace=0.2 + 0.15 * num_rows
    )
    for number, (title, points) in enumerate(curves.items(), start=1):
        axis = figure.add_subplot(num_rows, num_columns, number)
        axis.plot(*zip(*points, strict=True), marker="o" if len(points) < 30 else None)
        axis.set(title=title, xlabel="step")
        axis.grid(alpha=0.3)
    path = folder / "curves.png"
    partial = folder / "curves.png.partial"
    remove(partial)
    figure.savefig(partial, dpi=110, format="png")
    sync_file(partial)
    partial.replace(path)
    return path


def accuracies(evaluations: dict[str, dict]) -> dict[str, float | None]:
    """Return the accuracies of a run for its summary; None for an evaluation that it has not made.

    Args:
        evaluations: results by name: before_sft, before_rl, after_rl.
    """
    accuracy = {name: result["scores"]["accuracy"] for name, result in evaluations.items()}
    after_sft = accuracy.get("before_rl") if "before_sft" in accuracy else None
    return {
        "accuracy before SFT": accuracy.get("before_sft"),
        "accuracy after SFT": after_sft,
        "accuracy before RL": accuracy.get("before_rl"),
        "accuracy after RL": accuracy.get("after_rl"),
    }


def summarise(
    scores: dict[str, float | None],
    tokens: dict[str, int],
    seconds: dict[str, float],
    common: dict,
) -> dict:
    """Return what summary.json says of a run.

    Args:
        scores: held-out scores by title, with which it begins.
        tokens: numbers of tokens of the whole run, by the keys of PHASES_OF_TOKENS, and those that
            were sampled in vain as `discarded`. `tokens_per_second` counts the generated ones over
            the whole of the RL steps, without evaluation.
        seconds: of rank 0, by phase.
        common: more entries.
    """
    summary: dict = {title.lower().replace(" ", "_"): value for title, value in scores.items()}
    if "generated" in tokens:
        in_steps = sum(seconds.values()) - outside_steps(seconds)
        summary["tokens_per_second"] = tokens["generated"] / max(in_steps, 1e-9)
    if "discarded" in tokens:
        summary["discarded_tokens"] = tokens["discarded"]
    summary["tokens_per_second_by_phase"] = speeds(tokens, seconds)
    summary["seconds"] = seconds
    return summary | common


def outside_steps(seconds: dict[str, float]) -> float:
    """Return the seconds, by phase, of phases that are no parts of steps."""
    return sum(seconds.get(name, 0.0) for name in OUTSIDE_STEPS)


def show(folder: Path, summary: dict, scores: dict[str, float | None]) -> None:
    """Print the closing table, and where everything is. `scores`: as in `summarise`."""
    print(table(summary, scores))
    print(f"curves       {folder / 'curves.png'}")
    print(f"in a browser python -m minirl.view {folder}")
    print(f"TensorBoard  tensorboard --logdir {folder / 'tensorboard'}")
    print(f"summary      {folder / 'summary.json'}")
    print(f"model        {summary['model']}", flush=True)


def table(summary: dict, scores: dict[str, float | None]) -> str:
    """Return the closing table: decimals only of small numbers, and no line for None."""
    of_gpu = {f"GPU GiB, {name}": value for name, value in summary["gpu_memory_gib"].items()}
    blocks = [
        {f"held-out {title}": value for title, value in scores.items() if value is not None},
        {f"tokens/s, {kind}": v for kind, v in summary["tokens_per_second_by_phase"].items()},
        {f"seconds, {name}": value for name, value in summary["seconds"].items()},
        summary["sizes"] | of_gpu | {"peak memory of a rank, MiB": summary["peak_rss_mb"]},
    ]
    width = max(len(name) for name in set().union(*blocks))
    rule = "-" * (width + 12)

    lines = [rule]
    for block in blocks:
        for name, value in block.items():
            shown = f"{value:.3f}" if abs(value) < 10 else f"{value:,.0f}"
            lines.append(f"{name:<{width}}  {shown:>10}")
        if block:
            lines.append(rule)
    return "\n".join(lines)
