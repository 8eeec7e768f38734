"""The page and what belongs to it: as files for a browser, and as one file with the data in it."""

import base64
import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from minirl.base.files import write_whole
from minirl.view.run import Run, to_json

HERE = Path(__file__).parent
# uPlot draws the curves: https://github.com/leeoniya/uPlot, version 1.6.32 as its package has it.
STYLES = ("vendor/uPlot.min.css", "view.css")
SCRIPTS = ("vendor/uPlot.iife.min.js", "charts.js", "trajectories.js", "view.js")
LICENSE = "vendor/LICENSE"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
MOST_GROUPS = 100  # Of a run in a file, if no share is asked for.


def read(name: str) -> str:
    """Return the text of a file of the page."""
    return (HERE / name).read_text()


def files() -> dict[str, tuple[str, bytes]]:
    """Return all that a browser may ask for, except data: name in the address -> type and bytes."""
    found = {}
    for name in (*STYLES, *SCRIPTS):
        found[name] = (TYPES[Path(name).suffix], read(name).encode())
    head = "\n".join(f'<link rel="stylesheet" href="{name}">' for name in STYLES)
    scripts = "\n".join(f'<script src="{name}"></script>' for name in SCRIPTS)
    page = read("page.html").replace("<!--head-->", head).replace("<!--scripts-->", scripts)
    found[""] = (TYPES[".html"], page.encode())
    return found


def export(runs: list[Run], path: Path, share: float | None) -> tuple[int, int]:
    """Write one HTML file with curves, answers and trajectories of runs, for mail and notes.

    Args:
        runs: the runs to show.
        path: the file to write.
        share: the share of the groups of each run, evenly over its steps; at least one group. None:
            all, or MOST_GROUPS of them if there are more.

    Returns:
        How many groups are in the file, and how many the runs have.
    """
    exported: list[dict[str, Any]] = []
    num_exported = 0
    num_groups = 0
    for run in runs:
        about = run.describe()
        groups = run.table.groups
        num = MOST_GROUPS if share is None else max(1, round(share * len(groups)))
        chosen = np.linspace(0, len(groups) - 1, min(num, len(groups))).round().astype(int)
        found = []
        for group in groups[np.unique(chosen)]:
            whole = run.group(group["step"].item(), group["group"].item())
            found.append(run.reader.describe(group) | {"whole": whole})
        num_exported += len(found)
        num_groups += len(groups)
        exported.append(
            {
                "about": about,
                "settings": run.settings(),
                "metrics": run.all_lines("metrics.jsonl"),
                "answers": run.all_lines("answers.jsonl"),
                "groups": found,
                "histograms": run.table.histograms(groups),
            }
        )
    style = "\n".join(read(name) for name in STYLES)
    script = "\n".join(read(name) for name in SCRIPTS)
    # JSON without "<", which no text in it can end.
    embedded = to_json({"runs": exported}).replace("<", "\\u003c")
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    head = (
        f"<!-- This file contains uPlot.\n{read(LICENSE)}-->\n"
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{style}</style>'
    )
    scripts = (
        f'<script type="application/json" id="data">{embedded}</script>\n<script>{script}</script>'
    )
    page = read("page.html").replace("<!--head-->", head).replace("<!--scripts-->", scripts)
    write_whole(path, page)
    return num_exported, num_groups


def _hash(text: str) -> str:
    """Return how a content security policy names a text in the page."""
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"
