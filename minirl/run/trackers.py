"""Weights & Biases and trackio: rank 0 sends them the metrics of a run.

Both keep a run under an id. It stays in the run folder (`trackers.json`), so that a resumed run has
the same one. Each needs its package; both work offline (`WANDB_MODE=offline`; trackio keeps its
database in `TRACKIO_DIR`).
"""

import json
import secrets
from pathlib import Path
from typing import Any

from minirl.base.errors import UserError
from minirl.base.files import write_whole
from minirl.config.shared import LogConfig


class Wandb:
    """Weights & Biases."""

    def __init__(
        self, project: str, name: str, run_id: str, folder: Path, settings: dict[str, Any]
    ):
        import wandb

        try:
            self.run = wandb.init(
                project=project,
                name=name,
                id=run_id,
                resume="allow",
                dir=folder,
                config=settings,
                settings=wandb.Settings(console="off", silent=True),
            )
        except wandb.Error as error:
            raise UserError(
                f"log.wandb = {project}: {error}; log in by `wandb login`, or set "
                "WANDB_MODE=offline and send the run later by `wandb sync`"
            ) from error
        self.phases: set[str] = set()

    def log(self, phase: str, step: int, values: dict[str, float]) -> None:
        """Send the metrics of a step, over a separate axis for each phase."""
        if phase not in self.phases:
            self.phases.add(phase)
            self.run.define_metric(f"{phase}/*", step_metric=f"{phase}/step")
        named = {f"{phase}/{name}": value for name, value in values.items()}
        self.run.log({f"{phase}/step": step, **named})

    def text(self, name: str, step: int, text: str) -> None:
        """Keep a text in the files of the run: one file, a section a step."""
        path = Path(self.run.dir) / f"{name}.md"
        with path.open("a") as file:
            file.write(f"## step {step}\n\n{text}\n\n")

    def close(self) -> None:
        """Send what is left, and end."""
        self.run.finish()


class Trackio:
    """The package trackio of Hugging Face."""

    def __init__(self, project: str, name: str, settings: dict[str, Any]):
        import trackio

        self.run = trackio.init(
            project=project,
            name=name,
            resume="allow",
            config=settings,
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, phase: str, step: int, values: dict[str, float]) -> None:
        """Send the metrics of a step."""
        named = {f"{phase}/{name}": value for name, value in values.items()}
        # A step below 0 is an evaluation before a warm start.
        self.run.log(named, step=max(step, 0))

    def text(self, name: str, step: int, text: str) -> None:
        """Send a text as Markdown."""
        import trackio

        self.run.log({name: trackio.Markdown(text)}, step=max(step, 0))

    def close(self) -> None:
        """Send what is left, and end."""
        self.run.finish()


Tracker = Wandb | Trackio


def open_trackers(cfg: LogConfig, folder: Path, settings: dict[str, Any]) -> list[Tracker]:
    """Return the trackers that the config asks for, of the run in a folder.

    Args:
        cfg: the section `log`.
        folder: the run's folder. A run with an id there keeps it.
        settings: settings of the run, for the trackers to show.

    Raises:
        UserError: a package is missing, or its service cannot be reached.
    """
    if not (cfg.wandb or cfg.trackio):
        return []
    path = folder / "trackers.json"
    if path.exists():
        known = json.loads(path.read_text())
    else:
        name = cfg.run_name or folder.resolve().name
        known = {"name": name, "id": secrets.token_hex(4)}
        write_whole(path, json.dumps(known) + "\n")
    name, run_id = known["name"], known["id"]
    trackers: list[Tracker] = []
    if cfg.wandb:
        trackers.append(Wandb(cfg.wandb, name, run_id, folder, settings))
    if cfg.trackio:
        trackers.append(Trackio(cfg.trackio, f"{name}-{run_id}", settings))
    return trackers
