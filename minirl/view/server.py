"""The server of the page, on this machine's loopback only.

An address names a run by its number, never by a path. A browser may be led here by any page that
it shows, so requests must name this host (no rebinding of DNS), and the page may load nothing but
what is served here.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from minirl.base.errors import require
from minirl.config.shared import LimitsConfig
from minirl.endpoint.http import bind, make_server, require_loopback
from minirl.view import page
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

Answer = Callable[[Request], Awaitable[Response]]


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

    def group(run: Run, given: dict[str, str]) -> Any:
        return run.group(parse_number(given, "step", 0), parse_number(given, "group", 0))

    finders: dict[str, Callable[[Run, dict[str, str]], Any]] = {
        "runs": lambda run, given: [run.describe() for run in runs],
        "metrics": lambda run, given: run.metrics(given.get("place", "")),
        "answers": lambda run, given: run.all_lines("answers.jsonl"),
        "settings": lambda run, given: run.settings(),
        "groups": lambda run, given: run.groups(parse_query(given)),
        "group": group,
    }
    found = []
    for name, (kind, body) in page.files().items():
        found.append(Route(f"/{name}", _file(kind, body), methods=["GET"]))
    for name, find in finders.items():
        found.append(Route(f"/api/{name}", _data(runs, find), methods=["GET"]))
    return found


def _file(kind: str, body: bytes) -> Answer:
    """Return what answers with a file of the page."""

    async def answer(request: Request) -> Response:
        require_loopback(request)
        return Response(body, media_type=kind, headers=HEADERS)

    return answer


def _data(runs: list[Run], find: Callable[[Run, dict[str, str]], Any]) -> Answer:
    """Return what answers with the JSON of what `find` returns, which reads files in a thread."""

    def answer_in_thread(given: dict[str, str]) -> str:
        number = parse_number(given, "run", 0)
        require(0 <= number < len(runs), f"there is no run {number}")
        return to_json(find(runs[number], given))

    async def answer(request: Request) -> Response:
        require_loopback(request)
        body = await run_in_threadpool(answer_in_thread, dict(request.query_params))
        return Response(body, media_type="application/json", headers=HEADERS)

    return answer
