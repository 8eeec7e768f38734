"""What the page shows of a run folder beside trajectories: state, settings, metrics, answers.

Everything is read from files that a run writes as a whole or line by line, so a run that goes on
can be read at any time. A file that is missing yet is empty.
"""

import dataclasses
import fcntl
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from minirl.base.errors import require
from minirl.checkpoint.changes import head_of
from minirl.config.parse import flatten
from minirl.config.rl import RLConfig
from minirl.config.supervised import DPOConfig, KTOConfig, RMConfig, SFTConfig
from minirl.config.yaml_text import parse_yaml, to_yaml
from minirl.view.table import Table

CONFIGS = (RLConfig, SFTConfig, RMConfig, DPOConfig, KTOConfig)
KILLED = "killed"  # It says that it runs, and nobody holds its lock.
MOST_BYTES = 1 << 24  # Of metrics in one response.


class Rows(NamedTuple):
    """Rows of a file of lines, from a place on."""

    rows: list[dict[str, Any]]
    place: str  # Where to go on reading.
    is_new: bool  # The file is another one than before: forget the rows that were read.
    is_end: bool  # There is no more yet.


class Settings(NamedTuple):
    """Settings by name, such as `algo.kl_coef`."""

    values: dict[str, Any]
    defaults: dict[str, Any]  # Of this version; empty: the file does not say of which program.


class RunFolder:
    """A run folder, which may be of a run that goes on."""

    def __init__(self, path: Path):
        """Open the folder of a run; any other path is a UserError."""
        require(
            (path / "metrics.jsonl").is_file() or (path / "config.yaml").is_file(),
            f"{path} is not the folder of a run: it has neither metrics.jsonl nor config.yaml; "
            "give what the run had as --output",
        )
        self.path = path
        self.name = path.resolve().name
        self.table = Table(path / "rollouts")

    def describe(self) -> dict[str, Any]:
        """Return name, state and summary of the run."""
        summary = _read_object(self.path / "summary.json")
        state = summary.pop("state", "unknown")
        if state == "running" and not is_held(self.path / "lock"):
            state = KILLED
        self.table.refresh()
        return {
            "name": self.name,
            "folder": str(self.path),
            "state": state,
            "reason": summary.pop("reason", ""),
            "summary": summary,
            "num_trajectories": len(self.table.rows),
            "num_groups": len(self.table.groups),
            "steps": self.table.steps(),
        }

    def settings(self) -> Settings:
        """Return the settings of the run; none if it has left no config.yaml."""
        path = self.path / "config.yaml"
        text = path.read_text() if path.is_file() else ""
        defaults: dict[str, Any] = {}
        for config in CONFIGS:
            if text.startswith(head_of(config)):
                # Through YAML, as the run's own were: tuples become lists.
                defaults = parse_yaml(to_yaml(dataclasses.asdict(config())), "defaults")
        return Settings(flatten(parse_yaml(text, str(path))), flatten(defaults))

    def metrics(self, place: str) -> Rows:
        """Return the rows of metrics.jsonl behind a place; "" is the beginning."""
        return read_rows(self.path / "metrics.jsonl", place)

    def answers(self) -> list[dict[str, Any]]:
        """Return the answers to held-out prompts, an object for each evaluation."""
        rows: list[dict[str, Any]] = []
        place = ""
        while True:
            part = read_rows(self.path / "answers.jsonl", place)
            rows += part.rows
            place = part.place
            if part.is_end:
                return rows


def _read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file that is written whole; an empty one if it is missing."""
    return json.loads(path.read_text()) if path.is_file() else {}


def read_rows(path: Path, place: str) -> Rows:
    """Return the whole lines of a file behind a place, parsed.

    Args:
        path: of the file, which may grow, or be replaced by another.
        place: as an earlier call returned it; "": the beginning.
    """
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return Rows([], "", bool(place), True)
    with file:
        status = os.fstat(file.fileno())
        number, _, offset = place.partition(":")
        is_same = number == str(status.st_ino) and offset.isdigit()
        start = int(offset) if is_same else 0
        if start > status.st_size:
            is_same, start = False, 0
        file.seek(start)
        block = file.read(MOST_BYTES)
    end = block.rfind(b"\n") + 1
    lines = [line for line in block[:end].split(b"\n") if line.strip()]
    is_end = start + end >= status.st_size or end == 0
    return Rows(
        [json.loads(line) for line in lines],
        f"{status.st_ino}:{start + end}",
        bool(place) and not is_same,
        is_end,
    )


def is_held(path: Path) -> bool:
    """Return whether a run holds the lock of its folder; also if that cannot be found out."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False
