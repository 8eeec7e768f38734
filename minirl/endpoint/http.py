"""HTTP servers: uvicorn's, with its limits, and errors in the form of OpenAI's or Anthropic's API.

A handler checks the key of a request by its headers, and only then reads its body by `read_json`,
which keeps to a limit.
"""

import json
import resource
import socket
from collections.abc import Sequence
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from minirl.base.errors import UserError
from minirl.config.shared import LimitsConfig

# Anthropic's names of errors by status; all others are "invalid_request_error".
_ERROR_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    500: "api_error",
}
MESSAGES = "/v1/messages"  # Anthropic's path, where errors have another form.
# The names by which a client on this machine asks a server that only this machine reaches.
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
_BACKLOG = 4096  # Clients that may wait for a connection while the loop stands still.
_FILE_DESCRIPTORS = 65536


class BadRequest(UserError):
    """A request that gets an error in place of its response."""

    def __init__(
        self, message: str, status: int = 400, code: str | None = None, param: str | None = None
    ):
        """Make the error.

        Args:
            message: what is wrong, and what would be right.
            status: status code of HTTP.
            code: OpenAI's name of the error.
            param: the field at fault.
        """
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param

    def body(self, path: str) -> dict[str, Any]:
        """Return the body of the response, in the form of the API that the path belongs to."""
        kind = _ERROR_TYPES.get(self.status, "invalid_request_error")
        if path.startswith(MESSAGES):
            return {"type": "error", "error": {"type": kind, "message": str(self)}}
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


# --------------------------------------------------------------------------------------------------
# what handlers ask of a request


def api_key(request: Request) -> str:
    """Return the key that a client sent, as OpenAI's or as Anthropic's clients do; "": none."""
    headers = request.headers
    return headers.get("x-api-key") or headers.get("authorization", "").removeprefix("Bearer ")


def require_loopback(request: Request) -> None:
    """Refuse a request that names another host, as a page with a rebound name sends it.

    Raises:
        BadRequest: its host is none of `LOOPBACK`.
    """
    host = request.headers.get("host", "")
    name = host if host.endswith("]") else host.rpartition(":")[0] or host
    if name not in LOOPBACK:
        raise BadRequest(f"this server is at {' or '.join(LOOPBACK)}, not at {host!r:.100}", 403)


async def read_json(request: Request, limits: LimitsConfig) -> dict[str, Any]:
    """Return the body of a request, a JSON object. Check its key first.

    Raises:
        BadRequest: the body is too large, or it is no JSON object.
    """
    most = limits.body_mb * 2**20
    body = bytearray()
    num_bytes = int(request.headers.get("content-length", 0))
    if num_bytes <= most:
        async for chunk in request.stream():
            body += chunk
            if len(body) > most:
                break
    if max(num_bytes, len(body)) > most:
        raise BadRequest(f"the body has more than limits.body_mb = {limits.body_mb:g} MB", 413)
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"malformed request: {type(error).__name__}: {error}") from error
    if not isinstance(fields, dict):
        raise BadRequest("malformed request: the body is no JSON object")
    return fields


async def wait_for_disconnect(receive: Receive) -> None:
    """Return when the client has left; `receive` returns the next message of its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


# --------------------------------------------------------------------------------------------------
# the server


def bind(host: str, port: int, section: str = "") -> socket.socket:
    """Return a socket that listens at the address.

    Args:
        host: name or number of the interface.
        port: 0 takes a free one.
        section: the config that has `host` and `port`, for the message: `endpoint.`.

    Raises:
        UserError: the address is not free.
    """
    try:
        listening = socket.create_server((host, port), backlog=_BACKLOG)
        # Connections inherit it. Without it the kernel waits for the client, 40 ms, before it sends
        # the body after the head, or a small chunk of a stream.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listening
    except (OSError, OverflowError) as error:
        raise UserError(
            f"{section}host = {host}, {section}port = {port}: {error}; choose a free port, or "
            "another host"
        ) from error


def make_server(routes: Sequence[Route], limits: LimitsConfig) -> uvicorn.Server:
    """Return a server whose errors have OpenAI's or Anthropic's form, whatever they are.

    It raises the process's limit of file descriptors: each client needs one, and two if it is in
    this process, and a system may begin with 1,024.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < _FILE_DESCRIPTORS:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(_FILE_DESCRIPTORS, hard), hard))
    known = [f"{'GET' if 'GET' in (r.methods or ()) else 'POST'} {r.path}" for r in routes]

    async def answer(request: Request, error: Exception) -> JSONResponse:
        """Answer a request that is refused, or in which the server itself failed."""
        path = request.url.path
        headers: dict[str, str] = {}
        if isinstance(error, HTTPException):  # of Starlette: no route has the path, or the method
            there_is = f"there is no {request.method} {path} here; there are {', '.join(known)}"
            refusal = BadRequest(there_is, error.status_code)
            headers = dict(error.headers or {})
        elif isinstance(error, UserError):
            refusal = error if isinstance(error, BadRequest) else BadRequest(str(error))
        else:  # Its traceback is in the log. A client that has left does not see the answer.
            refusal = BadRequest("the server failed; its log says why", 500)
        return JSONResponse(refusal.body(path), refusal.status, headers)

    kinds = (UserError, HTTPException, ClientDisconnect, Exception)
    app = Starlette(routes=list(routes), exception_handlers=dict.fromkeys(kinds, answer))
    config = uvicorn.Config(
        _OneLength(app),
        http=_Connection,
        loop="asyncio",
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",  # a bad request is the client's affair
        access_log=False,
        backlog=_BACKLOG,
        limit_concurrency=limits.connections + 1,  # From so many on it refuses.
        h11_max_incomplete_event_size=limits.head_kb * 1024,
        # The loop stands still for minutes while the trainer trains, and a connection that was
        # silent in this time must not be closed.
        timeout_keep_alive=10**6,
        timeout_graceful_shutdown=5,
    )
    return uvicorn.Server(config)


class _Connection(H11Protocol):
    """A connection that is forgotten however it ends.

    If the client leaves without reading all, uvicorn's timer of `timeout_keep_alive` keeps it.
    """

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer, too."""
        super().connection_lost(exc)
        self._unset_keepalive_if_required()


class _OneLength:
    """Refuses a request that has a length and chunks, and closes its connection.

    Where such a request ends two readers may see in two places (RFC 9112, section 6.3).
    """

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        names = {name for name, _ in scope["headers"]}
        if not names >= {b"content-length", b"transfer-encoding"}:
            await self.app(scope, receive, send)
            return
        error = BadRequest("a request has both Content-Length and Transfer-Encoding")
        response = JSONResponse(error.body(scope["path"]), 400, {"Connection": "close"})
        await response(scope, receive, send)
