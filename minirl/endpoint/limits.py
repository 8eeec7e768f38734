"""What a server takes from a client, and the error in OpenAI's form that refuses the rest.

An application checks the key of a request by its headers, and only then reads its body: `read_json`
and the receiver of `LimitedApp` keep it within `LimitsConfig`.
"""

import json
import secrets
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minirl.base.errors import UserError
from minirl.config.shared import LimitsConfig

# Anthropic's names of errors by status; of others it is "invalid_request_error".
_KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}
_RETRY_SECONDS = 1
MESSAGES = "/v1/messages"  # Anthropic's, whose errors have another form.
# The names by which a client on this machine asks a server that only this machine reaches.
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


class BadRequest(UserError):
    """A request that gets an error in place of its response."""

    def __init__(
        self,
        message: str,
        status: int = 400,
        code: str | None = None,
        param: str | None = None,
        ends: bool = False,
    ):
        """Make the error.

        Args:
            message: What is wrong, and what would be right.
            status: Of HTTP.
            code: OpenAI's name of the error.
            param: The field at fault.
            ends: The connection ends with the response: where the request ends is not certain.
        """
        super().__init__(message)
        self.ends = ends
        self.status = status
        self.code = code
        self.param = param

    def body(self, path: str = "") -> dict[str, Any]:
        """Return the body of the response, in the form of the API that the path belongs to."""
        kind = _KINDS.get(self.status, "invalid_request_error")
        if path.startswith(MESSAGES):
            return {"type": "error", "error": {"type": kind, "message": str(self)}}
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def headers(self) -> dict[str, str]:
        """Return the headers of the response: when to ask again, if that can help, and the end."""
        headers = {"Connection": "close"} if self.ends else {}
        if self.status in (429, 503):
            headers["Retry-After"] = str(_RETRY_SECONDS)
        return headers


def api_key(request: Request) -> str:
    """Return the key that a client sent, as OpenAI's or as Anthropic's clients do; "": none."""
    headers = request.headers
    return headers.get("x-api-key") or headers.get("authorization", "").removeprefix("Bearer ")


def require_key(request: Request, key: str) -> None:
    """Refuse a request without this key; an empty one lets everybody in. Raises BadRequest."""
    if key and not secrets.compare_digest(api_key(request).encode(), key.encode()):
        raise BadRequest("the API key is missing or wrong", 401, "invalid_api_key")


def require_loopback(request: Request) -> None:
    """Refuse a request that names another host, as a page with a rebound name sends it.

    Raises:
        BadRequest: It names no host of `LOOPBACK`.
    """
    host = request.headers.get("host", "")
    name = host if host.endswith("]") else host.rpartition(":")[0] or host
    if name not in LOOPBACK:
        raise BadRequest(f"this server is at {' or '.join(LOOPBACK)}, not at {host!r:.100}", 403)


async def read_json(request: Request) -> Any:
    """Return the body of a request. Check its key first.

    Raises:
        BadRequest: It is too large, or no JSON.
    """
    body = await request.body()
    try:
        return json.loads(body)
    except RecursionError as error:
        raise BadRequest("malformed request: its JSON is nested too deep") from error
    except ValueError as error:
        raise BadRequest(f"malformed request: {type(error).__name__}: {error}") from error


class LimitedApp:
    """An application that gets requests only within limits, and reads bodies only within them."""

    def __init__(self, app: ASGIApp, limits: LimitsConfig):
        """`app` turns a BadRequest into its response, as that of `make_app` does."""
        self.app = app
        self.limits = limits
        self.max_body = round(limits.body_mb * 2**20)
        self.max_bodies = round(limits.bodies_mb * 2**20)
        self.open_requests = 0
        self.body_bytes = 0  # Of all open requests.

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request (ASGI)."""
        body = _LimitedBody(self, receive)
        self.open_requests += 1
        try:
            self._check_head(scope)
            await self.app(scope, body.receive, send)
        except BadRequest as error:
            await error_response(error, path=scope["path"])(scope, receive, send)
        finally:
            self.open_requests -= 1
            self.body_bytes -= body.num_bytes

    def _check_head(self, scope: Scope) -> None:
        """Refuse a request by what is known before its body is read. Raises BadRequest."""
        if self.open_requests > self.limits.requests:
            raise BadRequest(
                f"{self.limits.requests} requests are open (limits.requests); ask again later", 503
            )
        num_bytes = sum(len(name) + len(value) for name, value in scope["headers"])
        if num_bytes > self.limits.head_kb * 1024:
            raise too_long_head(self.limits)
        headers = dict(scope["headers"])
        if b"content-length" in headers:
            if b"transfer-encoding" in headers:
                raise BadRequest(
                    "a request has both Content-Length and Transfer-Encoding", ends=True
                )
            self.check_body(int(headers[b"content-length"]))

    def check_body(self, num_bytes: int) -> None:
        """Refuse a body of more bytes than one may have. Raises BadRequest."""
        if num_bytes > self.max_body:
            raise BadRequest(
                f"the body has more than limits.body_mb = {self.limits.body_mb:g} MB", 413
            )


class _LimitedBody:
    """Receives the body of one request, and counts it."""

    def __init__(self, app: LimitedApp, receive: Receive):
        self.app = app
        self.wrapped = receive
        self.num_bytes = 0

    async def receive(self) -> Message:
        """Return the next message. Raises BadRequest if the body is too large."""
        message = await self.wrapped()
        num_bytes = len(message.get("body", b""))
        self.num_bytes += num_bytes
        self.app.body_bytes += num_bytes
        self.app.check_body(self.num_bytes)
        if num_bytes and self.app.body_bytes > self.app.max_bodies:
            raise BadRequest(
                f"the bodies of all open requests have more than limits.bodies_mb = "
                f"{self.app.limits.bodies_mb:g} MB; ask again later",
                503,
            )
        return message


def too_long_head(limits: LimitsConfig) -> BadRequest:
    """Return the error for a request line and headers that are too long."""
    return BadRequest(f"the headers have more than limits.head_kb = {limits.head_kb} KB", 431)


def make_app(routes: Sequence[Route], limits: LimitsConfig) -> LimitedApp:
    """Return an application whose errors have OpenAI's form, whatever they are."""
    app = FastAPI(
        openapi_url=None,
        routes=list(routes),
        exception_handlers={
            UserError: _send_user_error,
            HTTPException: _send_http_error,
            ClientDisconnect: _send_nothing,
            Exception: _send_crash,
        },
    )
    return LimitedApp(app, limits)


def error_response(
    error: BadRequest, headers: dict[str, str] | None = None, path: str = ""
) -> JSONResponse:
    """Return the response for an error. `headers`: further ones. `path`: of the request."""
    return JSONResponse(error.body(path), error.status, error.headers() | (headers or {}))


async def _send_user_error(request: Request, error: Exception) -> JSONResponse:
    refusal = error if isinstance(error, BadRequest) else BadRequest(str(error))
    return error_response(refusal, path=request.url.path)


async def _send_http_error(request: Request, error: Exception) -> JSONResponse:
    """Answer a path or a method that the server has not got."""
    assert isinstance(error, HTTPException)
    message = error.detail
    if error.status_code in (404, 405):
        routes = [route for route in request.app.routes if isinstance(route, Route)]
        names = [f"{'GET' if 'GET' in (r.methods or ()) else 'POST'} {r.path}" for r in routes]
        message = (
            f"there is no {request.method} {request.url.path} here; there are {', '.join(names)}"
        )
    headers = dict(error.headers or {})
    return error_response(BadRequest(message, error.status_code), headers, request.url.path)


async def _send_nothing(*_: object) -> JSONResponse:
    """Answer a client that has left."""
    return JSONResponse({})


async def _send_crash(request: Request, _: Exception) -> JSONResponse:
    """Answer a request in which the server itself failed; its traceback is in the log."""
    error = BadRequest("the server failed; its log says why", 500)
    return error_response(error, path=request.url.path)
