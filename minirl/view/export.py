"""One HTML file with curves, answers and some of the trajectories of runs, for mail and notes."""

from pathlib import Path
from typing import Any

import numpy as np

from minirl.files import write_whole
from minirl.view import pages
from minirl.view.data import Runs, clean, describe_group


def export(runs: Runs, path: Path, share: float) -> int:
    """Write the file, and return how many groups are in it.

    Args:
        runs: to show.
        path: of the file.
        share: of the groups of each run, evenly over its steps; at least one.
    """
    described = runs.describe()
    exported: list[dict[str, Any]] = []
    num_groups = 0
    for number, about in enumerate(described):
        groups = _groups(runs, number, share)
        num_groups += len(groups)
        exported.append(
            {
                "about": about,
                "settings": runs.settings(number),
                "metrics": _all_metrics(runs, number),
                "answers": runs.answers(number),
                "groups": groups,
            }
        )
    write_whole(path, pages.whole({"runs": exported}))
    return num_groups


def _all_metrics(runs: Runs, number: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    place = ""
    while True:
        part = runs.metrics(number, place)
        rows += part["rows"]
        place = part["place"]
        if part["is_end"]:
            return rows


def _groups(runs: Runs, number: int, share: float) -> list[dict[str, Any]]:
    """Return a share of the groups of a run: what the list says of each, and its trajectories."""
    reader = runs.readers[number]
    groups = reader.table.groups
    if not len(groups):
        return []
    num = max(1, round(share * len(groups)))
    chosen = np.unique(np.linspace(0, len(groups) - 1, num).round().astype(int))
    found = []
    for group in groups[chosen]:
        about = clean(describe_group(reader, group))
        about["whole"] = runs.group(number, about["step"], about["group"])
        found.append(about)
    return found
