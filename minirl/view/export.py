"""One HTML file with curves, answers and some of the trajectories of runs, for mail and notes."""

from pathlib import Path
from typing import Any

import numpy as np

from minirl.base.files import write_whole
from minirl.view import pages
from minirl.view.data import Runs, clean, describe_group

MOST_GROUPS = 100  # Of a run, if no share is asked for.


def export(runs: Runs, path: Path, share: float | None) -> tuple[int, int]:
    """Write the file.

    Args:
        runs: to show.
        path: of the file.
        share: of the groups of each run, evenly over its steps; at least one. None: all, or
            MOST_GROUPS of them if there are more.

    Returns:
        How many groups are in the file, and how many the runs have.
    """
    described = runs.describe()
    exported: list[dict[str, Any]] = []
    num_exported = 0
    num_groups = 0
    for number, about in enumerate(described):
        groups = _groups(runs, number, share)
        table = runs.readers[number].table
        num_exported += len(groups)
        num_groups += len(table.groups)
        exported.append(
            {
                "about": about,
                "settings": runs.settings(number),
                "metrics": _all_metrics(runs, number),
                "answers": runs.answers(number),
                "groups": groups,
                "histograms": clean(table.histograms(table.groups)),
            }
        )
    write_whole(path, pages.whole({"runs": exported}))
    return num_exported, num_groups


def _all_metrics(runs: Runs, number: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    place = ""
    while True:
        part = runs.metrics(number, place)
        rows += part["rows"]
        place = part["place"]
        if part["is_end"]:
            return rows


def _groups(runs: Runs, number: int, share: float | None) -> list[dict[str, Any]]:
    """Return a share of the groups of a run: what the list says of each, and its trajectories."""
    reader = runs.readers[number]
    groups = reader.table.groups
    if not len(groups):
        return []
    num = min(MOST_GROUPS, len(groups)) if share is None else max(1, round(share * len(groups)))
    chosen = np.unique(np.linspace(0, len(groups) - 1, num).round().astype(int))
    found = []
    for group in groups[chosen]:
        about = clean(describe_group(reader, group))
        about["whole"] = runs.group(number, about["step"], about["group"])
        found.append(about)
    return found
