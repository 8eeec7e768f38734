"""What tests ask of the folder of a run."""

import dataclasses
from pathlib import Path
from typing import Any

from minirl.checkpoint.finding import finished
from minirl.config.values import to_yaml


def save_config(cfg: Any, path: Path) -> None:
    """Write a config that `load_config` reads back equal."""
    path.write_text(to_yaml(dataclasses.asdict(cfg)), encoding="utf-8")


def newest_checkpoint(run: Path) -> Path | None:
    """Return the newest finished checkpoint of a run folder, whole or damaged."""
    return next(reversed(finished(run).values()), None)
