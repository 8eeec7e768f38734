"""What a run leaves for people: the closing table, summary.json, the curves and sampled answers."""

import json
from pathlib import Path


def slowest(seconds: list[dict[str, float]], **tokens: int) -> dict[str, float]:
    """Phases of all ranks -> {"time/<phase>": that of the rank that took longest}, speeds of what
    is in `tokens`, and what each rank waited for others.
    """
    times = {
        name: max(s.get(name, 0.0) for s in seconds)
        for name in sorted({name for s in seconds for name in s})
    }
    idle = {f"time/idle_rank{rank}": s["idle"] for rank, s in enumerate(seconds) if "idle" in s}
    return (
        {f"time/{name}": value for name, value in times.items()}
        | idle
        | {f"tokens_per_second/{name}": speed for name, speed in speeds(tokens, times).items()}
    )


def speeds(tokens: dict[str, int], seconds: dict[str, float]) -> dict[str, float]:
    """Tokens a second by the phases that generate or train on them."""
    phases = {"generated": ("rollout",), "trained": ("forward", "backward")}
    return {
        name: tokens[name] / max(sum(seconds.get(phase, 0.0) for phase in phases[name]), 1e-9)
        for name in phases
        if name in tokens
    }


def write_curves(folder: Path) -> Path:
    """Draw metrics.jsonl of a run folder to curves.png: a panel per quantity that people look at
    first.
    """
    from matplotlib.figure import (
        Figure,  # not pyplot, which keeps figures and may look for a screen
    )

    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    panels = {
        "held-out accuracy": ("eval", "accuracy"),
        "reward": ("rl", "reward"),
        "answer tokens": ("rl", "answer_tokens"),
        "entropy": ("rl", "entropy"),
        "engine-trainer |log-prob| difference": ("rl", "mismatch"),
        "SFT loss": ("sft", "loss"),
        "loss": ("train", "loss"),
        "held-out loss": ("eval", "loss"),
    }
    points = {
        title: [(row["step"], row[name]) for row in rows if row["phase"] == phase and name in row]
        for title, (phase, name) in panels.items()
    }
    shown = {title: found for title, found in points.items() if found}
    figure = Figure(figsize=(12, 6), layout="constrained")
    for number, (title, found) in enumerate(shown.items(), start=1):
        axis = figure.add_subplot(-(-len(shown) // 3), min(3, len(shown)), number)
        axis.plot(*zip(*found, strict=True), marker="o" if len(found) < 30 else None)
        axis.set(title=title, xlabel="step")
        axis.grid(alpha=0.3)
    path = folder / "curves.png"
    figure.savefig(path, dpi=110)
    return path


def write_answers(folder: Path, evaluations: dict[str, dict]) -> None:
    """answers.json, and those before and after RL on the console."""
    answers = {name: evaluation["answers"] for name, evaluation in evaluations.items()}
    (folder / "answers.json").write_text(json.dumps(answers, indent=2) + "\n")
    for when in ("before", "after"):
        print(f"sampled answers {when} RL")
        for a in answers.get(f"{when}_rl", []):
            prompt = a["prompt"] if isinstance(a["prompt"], str) else a["prompt"][-1]["content"]
            print(
                f"  [{a['reward']:.2f}] {' '.join(prompt.split())[-70:]} -> {' '.join(a['answer'].split())[:90]}"
            )


def write(
    folder: Path,
    scores: dict[str, float | None],
    tokens: dict[str, int],
    seconds: dict[str, float],
    common: dict,
) -> None:
    """summary.json, curves.png, and the closing table, which begins with held-out `scores`, by
    their titles. Seconds are rank 0's; `tokens_per_second` counts the tokens that were generated
    over the whole of the RL steps, evaluation aside.
    """
    steps = sum(
        v
        for name, v in seconds.items()
        if name not in ("start", "sft", "evaluate", "export", "checkpoint")
    )
    summary = {
        **{title.lower().replace(" ", "_"): value for title, value in scores.items()},
        **(
            {"tokens_per_second": tokens["generated"] / max(steps, 1e-9)}
            if "generated" in tokens
            else {}
        ),
        "tokens_per_second_by_phase": speeds(tokens, seconds),
        "seconds": seconds,
        **common,
    }
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    print(table(summary, scores))
    print(
        f"curves       {write_curves(folder)}\nTensorBoard  tensorboard --logdir {folder / 'tensorboard'}\nsummary      {folder / 'summary.json'}\n"
        f"model        {summary['model']}",
        flush=True,
    )


def table(summary: dict, scores: dict[str, float | None]) -> str:
    """The closing table; None is shown as a dash."""
    blocks = [
        {f"held-out {title}": value for title, value in scores.items()},
        {f"tokens/s, {k}": v for k, v in summary["tokens_per_second_by_phase"].items()},
        {f"seconds, {name}": value for name, value in summary["seconds"].items()},
        {"peak memory of a rank, MiB": summary["peak_rss_mb"]},
    ]
    width = max(len(name) for block in blocks for name in block)
    line = "-" * (width + 12)

    def shown(value: float | None) -> str:
        return "-" if value is None else f"{value:.3f}" if abs(value) < 10 else f"{value:,.0f}"

    return "\n".join(
        [
            line,
            *(
                row
                for block in blocks
                for row in (
                    *(f"{name:<{width}}  {shown(value):>10}" for name, value in block.items()),
                    line,
                )
            ),
        ]
    )
