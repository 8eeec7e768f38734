"""Weights & Biases: rank 0 sends it the metrics of a run.

It keeps a run under an id, which stays in the run folder (`trackers.json`), so that a resumed run
has the same one. It needs its package, and works offline (`WANDB_MODE=offline`).
"""

import json
import secrets
from pathlib import Path
from typing import Any

from minirl.base.errors import UserError
from minirl.base.files import write_whole
from minirl.config.shared import LogConfig


class Wandb:
    """A run at Weights & Biases.

    Args:
        cfg: the section `log`, which names a project.
        folder: the run's folder. A run with an id there keeps it.
        settings: settings of the run, to be shown.

    Raises:
        UserError: the service cannot be reached.
    """

    def __init__(self, cfg: LogConfig, folder: Path, settings: dict[str, Any]):
        import wandb

        path = folder / "trackers.json"
        known = {"name": "", "id": secrets.token_hex(4)}
        if path.exists():
            known = json.loads(path.read_text())
        known["name"] = cfg.run_name or folder.resolve().name
        try:
            self.run = wandb.init(
                project=cfg.wandb,
                name=known["name"],
                id=known["id"],
                resume="allow",
                dir=folder,
                config=settings,
                settings=wandb.Settings(console="off", silent=True),
            )
        except wandb.Error as error:
            raise UserError(
                f"log.wandb = {cfg.wandb}: {error}; log in by `wandb login`, or set "
                "WANDB_MODE=offline and send the run later by `wandb sync`"
            ) from error
        write_whole(path, json.dumps(known) + "\n")
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

    def close(self, exit_code: int = 0) -> None:
        """Send what is left, and end; another code than 0 marks a run that has failed."""
        self.run.finish(exit_code=exit_code)
