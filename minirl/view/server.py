"""The page and what belongs to it: served on this machine's loopback only, or as one file.

What it shows of a run is read from files that the run writes as a whole or line by line, so a run
that is not done can be read at any time. A file that is still missing is empty.

An address names a run by its number, never by a path. A browser may be led here by any page that
it shows, so requests must name this host (no rebinding of DNS), and the page may load nothing but
what is served here.
"""

import asyncio
import base64
import contextlib
import dataclasses
import fcntl
import hashlib
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import pydantic_core
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from minirl.base.errors import UserError, require
from minirl.base.files import write_whole
from minirl.checkpoint.run_folder import head_of
from minirl.config.parse import flatten
from minirl.config.rl import RLConfig
from minirl.config.shared import LimitsConfig
from minirl.config.supervised import DPOConfig, KTOConfig, RMConfig, SFTConfig
from minirl.config.values import parse_yaml, to_yaml
from minirl.endpoint.http import bind, make_server, require_loopback
from minirl.view.trajectories import Query, Table

CONFIGS = (RLConfig, SFTConfig, RMConfig, DPOConfig, KTOConfig)
KILLED = "killed"  # Its summary says that it runs, and nobody holds its lock.
LARGEST_PAGE = 100  # Groups.
HOST = "127.0.0.1"
# Nothing but what this package serves: no script of a trajectory's text, no other host.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
HERE = Path(__file__).parent
# uPlot draws the curves: https://github.com/leeoniya/uPlot, version 1.6.32 as its package has it.
STYLES = ("vendor/uPlot.min.css", "view.css")
SCRIPTS = ("vendor/uPlot.iife.min.js", "charts.js", "trajectories.js", "view.js")
LICENSE = "vendor/LICENSE"
TYPES = {".css": "text/css", ".js": "text/javascript"}
MOST_GROUPS = 100  # Of a run in a file, if no share is asked for.
CHECKED = 4096  # Bytes before a place by which a file is known again: more than a line of metrics.


# --------------------------------------------------------------------------------------------------
# a run


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
        self.name = path.resolve().name
        self.table = Table(path / "rollouts")

    def describe(self) -> dict[str, Any]:
        """Return name, state and summary of the run."""
        summary_path = self.path / "summary.json"
        summary = {}
        if summary_path.is_file():
            with contextlib.suppress(ValueError):  # A copy may be cut.
                summary = json.loads(summary_path.read_text())
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


def read_lines(path: Path, place: str = "") -> Lines:
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
        # It is the same file if it has the same bytes before the place. The number of an inode does
        # not tell: it is given again when a file is replaced twice.
        offset, _, checksum = place.partition(":")
        is_same = bool(place) and checksum == str(_checksum_before(file, int(offset)))
        start = int(offset) if is_same else 0
        file.seek(start)
        block = file.read()
        end = block.rfind(b"\n") + 1
        next_place = f"{start + end}:{_checksum_before(file, start + end)}"
    try:
        rows = [json.loads(line) for line in block[:end].split(b"\n") if line.strip()]
    except ValueError as error:
        raise UserError(f"{path} has a line that is no JSON: {error}; repair it") from error
    return Lines(rows, next_place, bool(place) and not is_same)


def _checksum_before(file: BinaryIO, place: int) -> int:
    """Return a checksum of the last bytes before a place."""
    start = max(0, place - CHECKED)
    file.seek(start)
    return zlib.crc32(file.read(place - start))


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


# --------------------------------------------------------------------------------------------------
# the page


def serve(runs: list[Run], port: int, say: Callable[[str], None]) -> None:
    """Serve the page until the process gets a signal to stop.

    Args:
        runs: the runs to show.
        port: 0 takes a free one.
        say: is called with the address.

    Raises:
        UserError: the port is not free.
    """
    with bind(HOST, port, "--") as bound_socket:
        say(f"http://{HOST}:{bound_socket.getsockname()[1]}/")
        asyncio.run(make_server(routes(runs), LimitsConfig()).serve([bound_socket]))


def routes(runs: list[Run]) -> list[Route]:
    """Return what can be asked for: the files of the page, and data of a run as JSON."""
    finders: dict[str, Callable[[Run, dict[str, str]], Any]] = {
        "/api/runs": lambda run, given: [run.describe() for run in runs],
        "/api/metrics": lambda run, given: read_lines(
            run.path / "metrics.jsonl", given.get("place", "")
        )._asdict(),
        "/api/answers": lambda run, given: read_lines(run.path / "answers.jsonl").rows,
        "/api/settings": lambda run, given: run.settings(),
        "/api/groups": lambda run, given: run.groups(parse_query(given)),
        "/api/group": lambda run, given: run.group(
            parse_number(given, "step", 0), parse_number(given, "group", 0)
        ),
    }
    head = "\n".join(f'<link rel="stylesheet" href="{name}">' for name in STYLES)
    scripts = "\n".join(f'<script src="{name}"></script>' for name in SCRIPTS)

    def find(path: str, given: dict[str, str]) -> tuple[str, str]:
        """Return what is at a path, for the parameters of the address, and its type."""
        if path in finders:
            number = parse_number(given, "run", 0)
            require(0 <= number < len(runs), f"there is no run {number}")
            return to_json(finders[path](runs[number], given)), "application/json"
        if path == "/":
            return html(head, scripts), "text/html"
        return read(path[1:]), TYPES[Path(path).suffix]

    async def answer(request: Request) -> Response:
        require_loopback(request)
        given = dict(request.query_params)
        body, kind = await run_in_threadpool(find, request.scope["path"], given)
        return Response(body, media_type=kind, headers=HEADERS)

    files = [f"/{name}" for name in (*STYLES, *SCRIPTS)]
    return [Route(path, answer, methods=["GET"]) for path in (*finders, *files, "/")]


def read(name: str) -> str:
    """Return the text of a file of the page."""
    return (HERE / name).read_text()


def html(head: str, scripts: str) -> str:
    """Return the page with what its head has, and the scripts at its end."""
    return read("page.html").replace("<!--head-->", head).replace("<!--scripts-->", scripts)


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
            found.append(run.table.describe(group) | {"whole": whole})
        num_exported += len(found)
        num_groups += len(groups)
        exported.append(
            {
                "about": about,
                "settings": run.settings(),
                "metrics": read_lines(run.path / "metrics.jsonl").rows,
                "answers": read_lines(run.path / "answers.jsonl").rows,
                "groups": found,
                "histograms": run.table.histograms(groups),
            }
        )
    style = "\n".join(read(name) for name in STYLES)
    script = "\n".join(read(name) for name in SCRIPTS)
    # JSON without "<", which no text in it can end.
    embedded = to_json({"runs": exported}).replace("<", "\\u003c")
    # How a content security policy names texts in the page.
    hashes = []
    for text in (script, style):
        digest = hashlib.sha256(text.encode()).digest()
        hashes.append(f"sha256-{base64.b64encode(digest).decode()}")
    policy = (
        f"default-src 'none'; script-src '{hashes[0]}'; style-src '{hashes[1]}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    head = (
        f"<!-- This file contains uPlot.\n{read(LICENSE)}-->\n"
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{style}</style>'
    )
    scripts = (
        f'<script type="application/json" id="data">{embedded}</script>\n<script>{script}</script>'
    )
    write_whole(path, html(head, scripts))
    return num_exported, num_groups


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
