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

from minirl.config.shared import LimitsConfig
from minirl.endpoint.http import Server, bind
from minirl.endpoint.limits import make_app, require_loopback
from minirl.view import pages
from minirl.view.data import Runs, parse_number, parse_query, to_bytes

HOST = "127.0.0.1"
HEADERS = {
    "Content-Security-Policy": pages.POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}

Answer = Callable[[Request], Awaitable[Response]]


def serve(runs: Runs, port: int, say: Callable[[str], None]) -> None:
    """Serve the page until the process gets a signal to stop.

    Args:
        runs: to show.
        port: 0 takes a free one.
        say: is told the address.

    Raises:
        UserError: the port is not free.
    """
    with bind(HOST, port, "--") as bound_socket:
        say(f"http://{HOST}:{bound_socket.getsockname()[1]}/")
        asyncio.run(Server(make_app(routes(runs), LimitsConfig())).serve([bound_socket]))


def routes(runs: Runs) -> list[Route]:
    """Return what can be asked for."""
    found = []
    for name, (kind, body) in pages.files().items():
        found.append(Route(f"/{name}", _file(kind, body), methods=["GET"]))

    def add(path: str, answer: Callable[[Request], Any]) -> None:
        found.append(Route(f"/api/{path}", _data(answer), methods=["GET"]))

    add("runs", lambda request: runs.describe())
    add("metrics", lambda request: runs.metrics(_run(request), _given(request).get("place", "")))
    add("answers", lambda request: runs.answers(_run(request)))
    add("settings", lambda request: runs.settings(_run(request)))
    add("groups", lambda request: runs.groups(_run(request), parse_query(_given(request))))
    add("group", _group(runs))
    return found


def _given(request: Request) -> dict[str, str]:
    return dict(request.query_params)


def _run(request: Request) -> int:
    return parse_number(_given(request), "run", 0)


def _group(runs: Runs) -> Callable[[Request], Any]:
    def answer(request: Request) -> Any:
        given = _given(request)
        step = parse_number(given, "step", 0)
        return runs.group(_run(request), step, parse_number(given, "group", 0))

    return answer


def _file(kind: str, body: bytes) -> Answer:
    async def answer(request: Request) -> Response:
        require_loopback(request)
        return Response(body, media_type=kind, headers=HEADERS)

    return answer


def _data(find: Callable[[Request], Any]) -> Answer:
    """Return what answers with the JSON of what `find` returns, which reads files in a thread."""

    async def answer(request: Request) -> Response:
        require_loopback(request)
        body = await run_in_threadpool(lambda: to_bytes(find(request)))
        return Response(body, media_type="application/json", headers=HEADERS)

    return answer
