"""The page and what belongs to it: served on this machine's loopback only, or as one file.

An address names a run by its number, never by a path. A browser may be led here by any page that
it shows, so requests must name this host (no rebinding of DNS), and the page may load nothing but
what is served here.
"""

import asyncio
import base64
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from minirl.base.errors import require
from minirl.base.files import write_whole
from minirl.config.shared import LimitsConfig
from minirl.endpoint.http import bind, make_server, require_loopback
from minirl.view.run import Run, parse_number, parse_query, to_json

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
        "/api/metrics": lambda run, given: run.metrics(given.get("place", "")),
        "/api/answers": lambda run, given: run.all_lines("answers.jsonl"),
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
