"""What of a run folder people look at while the run goes on: summary, curves, answers.

They are written at each evaluation and when the run ends, however it does. `summary.json` says
under `state` how it stands: running, finished, stopped (by a signal; it can be resumed) or failed,
and under `reason` why. A run that was killed from outside still says running; then nobody holds the
lock of its folder.
"""

import contextlib
import json
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from minirl.base.files import write_whole
from minirl.run import report
from minirl.run.log import truncate

RUNNING = "running"
FINISHED = "finished"
STOPPED = "stopped"
FAILED = "failed"


class Results:
    """The files of a run that goes on. On rank 0 only.

    Args:
        folder: of the run.
        first_step: rows of answers from this step on are dropped; the run writes them again.
        resumed: whether the run goes on from a checkpoint.
    """

    def __init__(self, folder: Path, first_step: int, *, resumed: bool):
        self.folder = folder
        self.thread = ThreadPoolExecutor(1, "curves")
        self.drawing: Future[Path] | None = None
        self.held_out: dict[str, float] = {}  # The latest scores.
        truncate(folder / "answers.jsonl", keep_before=first_step, keep_sft=resumed)
        self.write(RUNNING, "", {"step": first_step})

    def write(self, state: str, reason: str, values: dict[str, Any]) -> None:
        """Write summary.json."""
        write_summary(self.folder, {"state": state, "reason": reason, **values})

    def draw(self) -> None:
        """Begin to draw curves.png beside training, unless that is under way."""
        if self.drawing and not self.drawing.done():
            return
        self.wait()
        self.drawing = self.thread.submit(report.write_curves, self.folder)

    def wait(self) -> None:
        """Wait until nothing is drawn. Raises what stopped a drawing."""
        if self.drawing:
            self.drawing.result()
            self.drawing = None

    def add_answers(self, step: int, name: str | None, answers: list[dict[str, Any]]) -> None:
        """Append answers to held-out prompts to answers.jsonl.

        Args:
            step: of the evaluation.
            name: of the evaluation, if it has one (before_rl, ...).
            answers: prompt, answer and reward of each.
        """
        row = {"phase": "eval", "step": step, "name": name, "answers": answers}
        with (self.folder / "answers.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")


def write_summary(folder: Path, values: dict[str, Any]) -> None:
    """Write summary.json of a run folder."""
    write_whole(folder / "summary.json", json.dumps(values, indent=2) + "\n")


def record_end(folder: Path, state: str, reason: str) -> None:
    """Note in a run folder how the run has ended, and draw its curves. Any rank may call it.

    What cannot be written is left: the run ends for another reason, which has been said.
    """
    with contextlib.suppress(OSError, ValueError):
        values = json.loads((folder / "summary.json").read_text())
        write_summary(folder, values | {"state": state, "reason": reason})
        report.write_curves(folder)


def describe(answers: list[dict[str, Any]]) -> str:
    """Return answers to held-out prompts as lines to read: reward, prompt, answer, each cut."""
    lines = []
    for entry in answers:
        prompt = entry["prompt"]
        if not isinstance(prompt, str):
            prompt = prompt[-1]["content"]
        # The content of a message may be a list of parts.
        prompt = " ".join(str(prompt).split())[-70:]
        # Of several turns the last one: the whole begins with what the policy read.
        answer = " ".join(entry.get("last_turn", entry["answer"]).split())[:90]
        lines.append(f"  [{entry['reward']:.2f}] {prompt} -> {answer}")
    return "\n".join(lines)


def full_text(answers: list[dict[str, Any]]) -> str:
    """Return answers to held-out prompts as a text, whole."""
    texts = []
    for entry in answers:
        prompt = entry["prompt"]
        if not isinstance(prompt, str):
            prompt = "\n".join(f"{message['role']}: {message['content']}" for message in prompt)
        text = f"reward {entry['reward']:.4g}\n{prompt}\n-> {entry['answer']}"
        if "last_turn" in entry:
            text += f"\nlast turn: {entry['last_turn']}"
        texts.append(text)
    return "\n\n".join(texts)
