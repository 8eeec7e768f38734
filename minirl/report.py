"""What a run leaves for people: the closing table, summary.json, the curves and sampled answers."""

import json
import resource
from pathlib import Path

from minirl.parallel.mesh import Mesh


def peak_rss_mb(mesh: Mesh) -> list[float]:
    """Largest resident memory of each rank so far, MiB."""
    return mesh.gather(round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1))


def write_curves(folder: Path) -> Path:
    """Draw metrics.jsonl of a run folder to curves.png: a panel per quantity that people look at first."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    panels = {"held-out accuracy": ("eval", "accuracy"), "reward": ("rl", "reward"), "answer tokens": ("rl", "answer_tokens"),
              "entropy": ("rl", "entropy"), "engine-trainer |log-prob| difference": ("rl", "mismatch"), "SFT loss": ("sft", "loss"),
              "loss": ("train", "loss"), "held-out loss": ("eval", "loss")}
    points = {title: [(row["step"], row[name]) for row in rows if row["phase"] == phase and name in row] for title, (phase, name) in panels.items()}
    shown = {title: found for title, found in points.items() if found}
    figure, axes = pyplot.subplots(-(-len(shown) // 3) or 1, min(3, len(shown)) or 1, figsize=(12, 6), layout="constrained", squeeze=False)
    for axis in axes.flat[len(shown) :]:
        axis.set_axis_off()
    for axis, (title, found) in zip(axes.flat, shown.items(), strict=False):
        axis.plot(*zip(*found, strict=True), marker="o" if len(found) < 30 else None)
        axis.set(title=title, xlabel="step")
        axis.grid(alpha=0.3)
    path = folder / "curves.png"
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path


def summarise(evaluations: dict[str, dict], tokens: dict[str, int], common: dict) -> dict:
    """The content of RL's summary.json, `common` being what `Run.finish` returned. Seconds are rank 0's; `tokens_per_second` counts the
    tokens that were generated and then trained on over the whole of the RL steps, evaluation aside."""
    def accuracy(name: str) -> float | None:
        return evaluations[name]["scores"]["accuracy"] if name in evaluations else None
    seconds = common["seconds"]
    training = seconds.get("forward", 0.0) + seconds.get("backward", 0.0)
    steps = sum(v for name, v in seconds.items() if name not in ("start", "sft", "evaluate", "export", "checkpoint"))
    by_phase = {"generated": tokens.get("generated", 0) / max(seconds.get("rollout", 0.0), 1e-9),
                "trained": tokens.get("trained", 0) / max(training, 1e-9)}
    return {
        "accuracy_before_sft": accuracy("before_sft"),
        "accuracy_after_sft": accuracy("before_rl") if "before_sft" in evaluations else None,
        "accuracy_before_rl": accuracy("before_rl"),
        "accuracy_after_rl": accuracy("after_rl"),
        "tokens_per_second": tokens.get("generated", 0) / max(steps, 1e-9),
        "tokens_per_second_by_phase": by_phase,
        **common,
    }


def write_answers(folder: Path, evaluations: dict[str, dict]) -> None:
    """answers.json, and the same on the console."""
    answers = {name: evaluation["answers"] for name, evaluation in evaluations.items()}
    (folder / "answers.json").write_text(json.dumps(answers, indent=2) + "\n")
    for name, title in (("before_rl", "sampled answers before RL"), ("after_rl", "sampled answers after RL")):
        print(show_answers(title, answers.get(name, [])))


def write(folder: Path, summary: dict, scores: dict[str, float | None]) -> None:
    """summary.json, curves.png, and the closing table, which begins with held-out `scores`."""
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    curves = write_curves(folder)
    print(table(summary, scores))
    print(f"curves       {curves}\nTensorBoard  tensorboard --logdir {folder / 'tensorboard'}\nsummary      {folder / 'summary.json'}\n"
          f"model        {summary['model']}", flush=True)


def table(summary: dict, scores: dict[str, float | None]) -> str:
    """The closing table; None is shown as a dash."""
    rows = [*((f"held-out {title}", value) for title, value in scores.items()), (None, None)]
    rows += [(f"tokens/s, {name}", value) for name, value in summary["tokens_per_second_by_phase"].items()]
    rows += [(None, None), *((f"seconds, {name}", value) for name, value in summary["seconds"].items())]
    rows += [(None, None), ("peak memory of a rank, MiB", summary["peak_rss_mb"])]
    width = max(len(name) for name, _ in rows if name)
    line = "-" * (width + 12)
    def shown(value: float | None) -> str:
        return "-" if value is None else f"{value:.3f}" if abs(value) < 10 else f"{value:,.0f}"
    return "\n".join([line, *(line if name is None else f"{name:<{width}}  {shown(value):>10}" for name, value in rows), line])


def show_answers(title: str, answers: list[dict]) -> str:
    lines = [title]
    for a in answers:
        prompt = a["prompt"] if isinstance(a["prompt"], str) else a["prompt"][-1]["content"]
        lines.append(f"  [{a['reward']:.2f}] {' '.join(prompt.split())[-70:]} -> {' '.join(a['answer'].split())[:90]}")
    return "\n".join(lines)
