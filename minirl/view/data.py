"""The answers to the page's questions about runs, as JSON has them."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from minirl.base.errors import UserError, require
from minirl.view.folder import RunFolder
from minirl.view.search import Search
from minirl.view.table import FLAGS, SORTS, Query
from minirl.view.trajectories import Reader

LARGEST_PAGE = 100  # Groups.


class Runs:
    """The runs that are shown, by number."""

    def __init__(self, paths: list[Path]):
        """Open the folders; a path that is none of a run is a UserError."""
        self.folders = [RunFolder(path) for path in paths]
        self.readers = [Reader(folder.table) for folder in self.folders]
        self.searches = [Search(folder.table) for folder in self.folders]

    def describe(self) -> list[dict[str, Any]]:
        """Return what is said of each run."""
        return [clean(folder.describe()) for folder in self.folders]

    def metrics(self, number: int, place: str) -> dict[str, Any]:
        """Return the rows of metrics behind a place."""
        return clean(self._folder(number).metrics(place)._asdict())

    def answers(self, number: int) -> list[dict[str, Any]]:
        """Return the answers to held-out prompts, by evaluation."""
        return clean(self._folder(number).answers())

    def settings(self, number: int) -> dict[str, Any]:
        """Return the settings of a run and their defaults, by name."""
        return clean(self._folder(number).settings()._asdict())

    def groups(self, number: int, query: Query) -> dict[str, Any]:
        """Return a page of groups, and histograms of those of all pages."""
        reader = self.readers[self._number(number)]
        table = reader.table
        table.refresh()
        groups = table.select(query, self.searches[number].find(query.search))
        start = query.page * query.page_size
        shown = groups[start : start + query.page_size]
        return clean(
            {
                "groups": [describe_group(reader, group) for group in shown],
                "total": len(groups),
                "page": query.page,
                "histograms": table.histograms(groups),
            }
        )

    def group(self, number: int, step: int, group: int) -> dict[str, Any]:
        """Return a group with its trajectories. Raises UserError if there is none."""
        reader = self.readers[self._number(number)]
        if not len(reader.table.find(step, group)):
            reader.table.refresh()
        found = reader.group(step, group)
        require(found is not None, f"step {step} has no group {group}")
        return clean(found)

    def _number(self, number: int) -> int:
        require(0 <= number < len(self.folders), f"there is no run {number}")
        return number

    def _folder(self, number: int) -> RunFolder:
        return self.folders[self._number(number)]


def describe_group(reader: Reader, group: np.ndarray) -> dict[str, Any]:
    """Return what the list of groups says of one."""
    rows = reader.table.members(group)
    described = {name: group[name].item() for name in group.dtype.names or () if name != "first"}
    described["rewards"] = rows["reward"][rows["segment"] == 0].tolist()
    described["prompt"] = reader.describe(rows[0])
    return described


def parse_query(given: dict[str, str]) -> Query:
    """Return the query of an address. Raises UserError for what it cannot be."""
    flags = tuple(flag for flag in given.get("flags", "").split(",") if flag)
    unknown = set(flags) - set(FLAGS)
    require(not unknown, f"flags = {sorted(unknown)}: choose of {', '.join(FLAGS)}")
    sort = given.get("sort", "step")
    require(sort in SORTS, f"sort = {sort!r}: choose of {', '.join(SORTS)}")
    return Query(
        flags=flags,
        unequal=given.get("unequal") == "1",
        first_step=parse_number(given, "first", 0),
        last_step=parse_number(given, "last", Query().last_step),
        sort=sort,
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


def clean(value: Any) -> Any:
    """Return a value without numbers that JSON does not have, which become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: clean(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [clean(part) for part in value]
    return value


def to_bytes(value: Any) -> bytes:
    """Return a value as JSON."""
    return json.dumps(value, allow_nan=False).encode()
