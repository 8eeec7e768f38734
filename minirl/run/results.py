"""The files of a run that people look at: summary, curves, answers, and the closing table.

Summary and answers are written at each evaluation and when the run ends, however it does, and the
curves are drawn then. `summary.json` says under `state` how the run stands: running, finished,
stopped (by a signal; it can be resumed) or failed, and under `reason` why. A run that was killed
from outside still says running; then no process holds the lock of its folder.
"""

import contextlib
import io
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from minirl.base.files import write_whole
from minirl.base.log import say
from minirl.run import metrics

RUNNING = "running"
FINISHED = "finished"
STOPPED = "stopped"
FAILED = "failed"
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


class Results:
    """The files of a running run. On rank 0 only.

    Args:
        folder: the run's folder.
        first_step: rows from this step on are dropped; the run writes them again.
        resumed: whether the run resumes from a checkpoint.
    """

    def __init__(self, folder: Path, first_step: int, *, resumed: bool):
        self.folder = folder
        self.held_out: dict[str, float] = {}  # The latest scores,
        self.held_out_step: int | None = None  # and of which weights they are.
        for name in ("metrics.jsonl", "answers.jsonl"):
            truncate(folder / name, keep_before=first_step, keep_sft=resumed)
        write_summary(folder, {"state": RUNNING, "reason": "", "step": first_step})

    def write(self, state: str, reason: str, progress: metrics.Progress, step: int) -> None:
        """Write the summary of a run that is not finished, after so many steps."""
        more = {
            "step": step,
            "held_out": self.held_out,
            "held_out_step": self.held_out_step,
            "tokens": progress.tokens,
        }
        summary = summarise(progress, dict(progress.seconds)) | more
        write_summary(self.folder, {"state": state, "reason": reason, **summary})

    def add_answers(self, step: int, name: str | None, answers: list[dict[str, Any]]) -> None:
        """Append answers to held-out prompts to answers.jsonl.

        Args:
            step: step of the evaluation.
            name: name of the evaluation, if it has one (before_rl, ...).
            answers: prompt, answer and reward of each prompt.
        """
        row = {"phase": "eval", "step": step, "name": name, "answers": answers}
        with (self.folder / "answers.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")


def write_summary(folder: Path, values: dict[str, Any]) -> None:
    """Write summary.json of a run folder."""
    write_whole(folder / "summary.json", json.dumps(values, indent=2) + "\n")


def record_end(folder: Path, state: str, reason: str) -> None:
    """Note in a run folder how the run has ended, and draw its curves. Any rank may call it.

    What cannot be written is left out: the run ends for another reason, which was said.
    """
    with contextlib.suppress(OSError, ValueError):
        values = json.loads((folder / "summary.json").read_text())
        write_summary(folder, values | {"state": state, "reason": reason})
        write_curves(folder)


def truncate(path: Path, *, keep_before: int, keep_sft: bool) -> None:
    """Drop the rows of metrics.jsonl that a resumed run will write again.

    Lines that are no rows are dropped, too, and counted in one message: a full disk or a power cut
    leaves one at the end.

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
    for line in lines_of(path):
        try:
            row = json.loads(line)
            phase = str(row["phase"])
            step = int(row["step"])
        except (ValueError, KeyError, TypeError, RecursionError):
            num_torn += 1
            continue
        is_warm_start = phase == "sft" or step < 0
        if keep_sft if is_warm_start else step < keep_before:
            kept.append(line + b"\n")
    if num_torn:
        say(f"{path}: {num_torn} lines that are no rows (written only in part?) are left out")
    write_whole(path, b"".join(kept))


def lines_of(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file that have something, without their ends; only one is in memory."""
    with path.open("rb") as file:
        for line in file:
            if line.strip():
                yield line.removesuffix(b"\n")


def read_rows(path: Path) -> list[dict]:
    """Return the rows of metrics.jsonl, without one at the end that is being written."""
    return list(rows_of(path))


def rows_of(path: Path) -> Iterator[dict]:
    """Yield what `read_rows` returns, of which the rows of a long run would fill the memory."""
    if not path.exists():
        return
    for line in lines_of(path):
        with contextlib.suppress(ValueError):
            yield json.loads(line)


def write_curves(folder: Path) -> None:
    """Draw metrics.jsonl of a run folder to curves.png: a panel per quantity."""
    # pyplot would keep figures and may look for a screen.
    from matplotlib.figure import Figure

    curves: dict[str, list[tuple[int, float]]] = {title: [] for title in PANELS}
    for row in rows_of(folder / "metrics.jsonl"):
        for title, (phase, name) in PANELS.items():
            if row["phase"] == phase and name in row:
                curves[title].append((row["step"], row[name]))
    curves = {title: points for title, points in curves.items() if points}
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
    image = io.BytesIO()
    figure.savefig(image, dpi=110, format="png")
    write_whole(folder / "curves.png", image.getvalue())


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


def summarise(progress: metrics.Progress, seconds: dict[str, float]) -> dict:
    """Return what every summary.json says of tokens and seconds.

    Args:
        progress: tokens of the whole run, by the keys of PHASES_OF_TOKENS, and those that were
            sampled but never used as `discarded`. `tokens_per_second` counts the generated ones
            over all RL steps, without evaluation.
        seconds: those of rank 0, by phase, as they are shown.
    """
    tokens = progress.tokens
    summary: dict = {}
    if "generated" in tokens:
        in_steps = sum(seconds.values()) - metrics.outside_steps(seconds)
        if "idle_trainers" in seconds:  # The generators work at the same time.
            in_steps -= seconds.get("rollout", 0.0) + seconds.get("idle_generators", 0.0)
        summary["tokens_per_second"] = tokens["generated"] / max(in_steps, 1e-9)
    if "discarded" in tokens:
        summary["discarded_tokens"] = tokens["discarded"]
    summary["tokens_per_second_by_phase"] = metrics.speeds(tokens, seconds)
    return summary | {"seconds": seconds}


def finish(
    folder: Path, progress: metrics.Progress, scores: dict[str, float | None], common: dict
) -> None:
    """Write the files of a finished run, and print the closing table and where everything is.

    Args:
        folder: the run's folder.
        progress: seconds and tokens of the whole run.
        scores: held-out scores by title; the summary begins with them.
        common: more entries of the summary.
    """
    longest_first = sorted(progress.seconds.items(), key=lambda item: -item[1])
    seconds = {name: round(value, 3) for name, value in longest_first}
    titled = {title.lower().replace(" ", "_"): value for title, value in scores.items()}
    summary = titled | summarise(progress, seconds) | common
    write_curves(folder)
    write_summary(folder, {"state": FINISHED, "reason": "", **summary})
    print(table(summary, scores))
    print(f"curves       {folder / 'curves.png'}")
    print(f"in a browser python -m minirl.view {folder}")
    print(f"TensorBoard  tensorboard --logdir {folder / 'tensorboard'}")
    print(f"summary      {folder / 'summary.json'}")
    print(f"model        {summary['model']}", flush=True)


def table(summary: dict, scores: dict[str, float | None]) -> str:
    """Return the closing table: decimals only of small numbers, and no line for None."""
    gpu_memory = {f"GPU GiB, {name}": value for name, value in summary["gpu_memory_gib"].items()}
    blocks = [
        {f"held-out {title}": value for title, value in scores.items() if value is not None},
        {f"tokens/s, {kind}": v for kind, v in summary["tokens_per_second_by_phase"].items()},
        {f"seconds, {name}": value for name, value in summary["seconds"].items()},
        summary["sizes"] | gpu_memory | {"peak memory of a rank, MiB": summary["peak_rss_mb"]},
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


def describe(answers: list[dict[str, Any]]) -> str:
    """Return answers to held-out prompts as lines to read: reward, prompt, answer, each cut."""
    lines = []
    for entry in answers:
        prompt = entry["prompt"]
        if not isinstance(prompt, str):
            prompt = prompt[-1]["content"]
        # The content of a message may be a list of parts.
        prompt = " ".join(str(prompt).split())[-70:]
        # Of several turns the last one: the whole text begins with what the policy read.
        answer = " ".join(entry.get("last_turn", entry["answer"]).split())[:90]
        lines.append(f"  [{entry['reward']:.2f}] {prompt} -> {answer}")
    return "\n".join(lines)


def _said(message: dict[str, Any]) -> str:
    """Return the content of a message, and its calls of tools."""
    calls = [json.dumps(call["function"]) for call in message.get("tool_calls") or []]
    return " ".join(str(part) for part in (message["content"], *calls) if part)


def full_text(answers: list[dict[str, Any]]) -> str:
    """Return answers to held-out prompts as a text, whole."""
    texts = []
    for entry in answers:
        prompt = entry["prompt"]
        if not isinstance(prompt, str):
            prompt = "\n".join(f"{message['role']}: {_said(message)}" for message in prompt)
        text = f"reward {entry['reward']:.4g}\n{prompt}\n-> {entry['answer']}"
        if "last_turn" in entry:
            text += f"\nlast turn: {entry['last_turn']}"
        texts.append(text)
    return "\n\n".join(texts)
