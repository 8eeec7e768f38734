"""What the page shows of a run folder: state, settings, metrics, answers, groups of trajectories.

Everything is read from files that a run writes as a whole or line by line, so a run that is not
done can be read at any time. A file that is still missing is empty.
"""

import dataclasses
import fcntl
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import pydantic_core

from minirl.base.errors import UserError, require
from minirl.checkpoint.run_folder import head_of
from minirl.config.parse import flatten
from minirl.config.rl import RLConfig
from minirl.config.supervised import DPOConfig, KTOConfig, RMConfig, SFTConfig
from minirl.config.values import parse_yaml, to_yaml
from minirl.view.trajectories import Query, Table

CONFIGS = (RLConfig, SFTConfig, RMConfig, DPOConfig, KTOConfig)
KILLED = "killed"  # Its summary says that it runs, and nobody holds its lock.
LARGEST_PAGE = 100  # Groups.


class Lines(NamedTuple):
    """The rows of a file of JSON lines, from a place on."""

    rows: list[dict[str, Any]]
    place: str  # Where to continue reading.
    is_new: bool  # The file is another one than before: forget the rows that were read.


class Run:
    """The folder of a run, which may be running."""

    def __init__(self, path: Path):
        """Open the folder of a run; any other path is a UserError."""
        require(
            (path / "metrics.jsonl").is_file() or (path / "config.yaml").is_file(),
            f"{path} is not the folder of a run: it has neither metrics.jsonl nor config.yaml; "
            "give what the run had as --output",
        )
        self.path = path
        self.table = Table(path / "rollouts")

    def describe(self) -> dict[str, Any]:
        """Return name, state and summary of the run."""
        summary_path = self.path / "summary.json"
        summary = json.loads(summary_path.read_text()) if summary_path.is_file() else {}
        state = summary.pop("state", "unknown")
        if state == "running" and not is_held(self.path / "lock"):
            state = KILLED
        self.table.refresh()
        return {
            "name": self.path.resolve().name,
            "folder": str(self.path),
            "state": state,
            "reason": summary.pop("reason", ""),
            "summary": summary,
            "num_trajectories": len(self.table.rows),
            "num_groups": len(self.table.groups),
            "steps": self.table.steps(),
        }

    def settings(self) -> dict[str, Any]:
        """Return the settings of the run by name, such as `algo.kl_coef`, and their defaults.

        There are none if the run has left no config.yaml, and no defaults if that does not say of
        which program it is.
        """
        path = self.path / "config.yaml"
        text = path.read_text() if path.is_file() else ""
        defaults: dict[str, Any] = {}
        for config in CONFIGS:
            if text.startswith(head_of(config)):
                # Through YAML, as the run's settings were: tuples become lists.
                defaults = parse_yaml(to_yaml(dataclasses.asdict(config())), "defaults")
        return {"values": flatten(parse_yaml(text, str(path))), "defaults": flatten(defaults)}

    def metrics(self, place: str) -> dict[str, Any]:
        """Return the rows of metrics.jsonl after a place; "" is the beginning."""
        return read_lines(self.path / "metrics.jsonl", place)._asdict()

    def all_lines(self, name: str) -> list[dict[str, Any]]:
        """Return all rows of a file of the folder.

        Args:
            name: `metrics.jsonl`, or `answers.jsonl`, which has the answers to held-out prompts, an
                object for each evaluation.
        """
        return read_lines(self.path / name, "").rows

    def groups(self, query: Query) -> dict[str, Any]:
        """Return a page of groups, and histograms of those of all pages."""
        self.table.refresh()
        groups = self.table.select(query)
        start = query.page * query.page_size
        return {
            "groups": [self.table.describe(g) for g in groups[start : start + query.page_size]],
            "total": len(groups),
            "page": query.page,
            "histograms": self.table.histograms(groups),
        }

    def group(self, step: int, group: int) -> dict[str, Any]:
        """Return a group with its trajectories. Raises UserError if there is none."""
        self.table.refresh()
        return self.table.group(step, group)


def read_lines(path: Path, place: str) -> Lines:
    """Return the whole lines of a file after a place, parsed.

    Args:
        path: a file that may grow, or be replaced by another.
        place: as an earlier call returned it; "": the beginning.
    """
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return Lines([], "", bool(place))
    with file:
        status = os.fstat(file.fileno())
        number, _, offset = place.partition(":")
        is_same = number == str(status.st_ino) and int(offset) <= status.st_size
        start = int(offset) if is_same else 0
        file.seek(start)
        block = file.read()
    end = block.rfind(b"\n") + 1
    rows = [json.loads(line) for line in block[:end].split(b"\n") if line.strip()]
    return Lines(rows, f"{status.st_ino}:{start + end}", bool(place) and not is_same)


def is_held(path: Path) -> bool:
    """Return whether a run holds the lock of its folder; also if that cannot be found out."""
    try:
        with path.open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def parse_query(given: dict[str, str]) -> Query:
    """Return the query of an address. Raises UserError for what it cannot be."""
    return Query(
        flags=tuple(filter(None, given.get("flags", "").split(","))),
        unequal=given.get("unequal") == "1",
        first_step=parse_number(given, "first", 0),
        last_step=parse_number(given, "last", Query().last_step),
        sort=given.get("sort", "step"),
        ascending=given.get("ascending") == "1",
        page=max(0, parse_number(given, "page", 0)),
        page_size=min(LARGEST_PAGE, max(1, parse_number(given, "size", Query().page_size))),
        search=given.get("search", ""),
    )


def parse_number(given: dict[str, str], name: str, default: int) -> int:
    """Return a whole number of an address. Raises UserError for anything else."""
    text = given.get(name, "")
    if not text:
        return default
    try:
        return int(text)
    except ValueError as error:
        raise UserError(f"{name} = {text!r} is no whole number") from error


def to_json(value: Any) -> str:
    """Return a value as JSON; numbers that JSON does not have become null."""
    return pydantic_core.to_json(value, inf_nan_mode="null").decode()
