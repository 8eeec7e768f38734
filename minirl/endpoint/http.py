"""The server: uvicorn's, with time limits for clients that are slow and room for new ones.

uvicorn bounds heads, but has no time limit for a head or a body, answers refusals in plain text,
and counts connections only to refuse requests. Here the time that counts is that of the loop: one
that stands still for minutes, as while the trainer trains, finds its clients as it left them.
"""

import asyncio
import json
import resource
import socket
import sys
import time
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from minirl.base.errors import UserError
from minirl.endpoint.limits import BadRequest, LimitedApp, too_long_head

# Connections that the kernel keeps while the loop stands still: they cost no descriptor.
_BACKLOG = 4096
# Those that asyncio accepts in one turn. Out of descriptors it fails as often in a turn.
_ACCEPTS_PER_TURN = 128
_OUT_OF_DESCRIPTORS = "socket.accept() out of system resource"  # as asyncio says it

# What a connection waits for.
_REQUEST = "the next request"
_HEAD = "the head of a request"
_BODY = "the body of a request"
_READER = "the client to read"
_APP = "the response"


def bind(host: str, port: int, section: str = "") -> socket.socket:
    """Return a socket that listens at the address.

    Args:
        host: Name or number of the interface.
        port: 0 takes a free one.
        section: Of the config that has `host` and `port`, for the message: `endpoint.`.

    Raises:
        UserError: The address is not free.
    """
    try:
        return socket.create_server((host, port), backlog=_BACKLOG)
    except (OSError, OverflowError) as error:
        raise UserError(
            f"{section}host = {host}, {section}port = {port}: {error}; choose a free one"
        ) from error


class _Config(uvicorn.Config):
    """uvicorn's settings, and our limits."""

    def __init__(self, app: LimitedApp):
        super().__init__(
            app,
            http=Connection,
            loop="asyncio",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",  # a bad request is the client's affair
            access_log=False,
            backlog=_ACCEPTS_PER_TURN,
            h11_max_incomplete_event_size=app.limits.head_kb * 1024,
            # The loop stands still for minutes, and a connection that was silent in this time must
            # not be closed.
            timeout_keep_alive=10**6,
            timeout_graceful_shutdown=5,
        )
        self.limits = app.limits
        # The rest of the process needs descriptors, too.
        num_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.max_connections = min(app.limits.connections, max(1, num_files // 2))


class Connection(H11Protocol):
    """A client's connection, which says what it waits for."""

    config: _Config

    def __init__(self, *args: Any, **options: Any):
        """Take what uvicorn gives a connection."""
        super().__init__(*args, **options)
        # What it waited for at the last tick, with the request that was the last one then.
        self.last_wait: tuple[str, object] = (_HEAD, None)
        self.num_ticks = 0  # For how many ticks it has waited for that.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin. Where all places are taken, the one that was idle longest makes room."""
        if len(self.connections) >= self.config.max_connections:
            idle = [c for c in self.connections if isinstance(c, Connection) and c.is_idle()]
            if idle:
                max(idle, key=lambda c: c.num_ticks).end()
            else:
                super().connection_made(transport)
                self.refuse(BadRequest("too many connections; try again later", 503))
                return
        super().connection_made(transport)

    def waits_for(self) -> str:
        """Return what this connection waits for now."""
        if self.conn.their_state is h11.SEND_BODY:
            return _BODY
        if self.flow.write_paused:
            return _READER
        if self.conn.their_state is h11.IDLE:
            has_begun = self.cycle is None or self.conn.trailing_data[0]
            return _HEAD if has_begun else _REQUEST
        return _APP

    def is_idle(self) -> bool:
        """Return whether no request of this connection is being answered."""
        return self.waits_for() in (_HEAD, _REQUEST) and not self.transport.is_closing()

    def tick(self) -> None:
        """Note that a second has passed, and end this connection if its client is too slow."""
        wait = (self.waits_for(), self.cycle)
        self.num_ticks = self.num_ticks + 1 if wait == self.last_wait else 0
        self.last_wait = wait
        if self.num_ticks <= self.config.limits.seconds:
            return
        if wait[0] == _READER:
            self.transport.abort()
        elif wait[0] in (_HEAD, _BODY):
            limit = self.config.limits.seconds
            self.refuse(BadRequest(f"{wait[0]} took longer than limits.seconds = {limit:g}", 408))

    def refuse(self, error: BadRequest) -> None:
        """Send an error, unless a response has begun, and close the connection."""
        has_body = self.scope is None or self.scope["method"] != "HEAD"
        if has_body and self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = json.dumps(error.body()).encode()
            headers = {"Content-Type": "application/json", "Content-Length": str(len(body))}
            headers |= {"Connection": "close"} | error.headers()
            events = (
                h11.Response(status_code=error.status, headers=list(headers.items())),
                h11.Data(data=body),
                h11.EndOfMessage(),
            )
            for event in events:
                self.transport.write(self.conn.send(event) or b"")
        self.end()

    def end(self) -> None:
        """Close the connection; a request that is not answered is given up."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP, or too long. uvicorn calls this where it handles the error."""
        error = sys.exception()
        if isinstance(error, h11.RemoteProtocolError) and error.error_status_hint == 431:
            self.refuse(too_long_head(self.config.limits))
        else:
            self.refuse(BadRequest(f"{msg} {error}"))


class Server(uvicorn.Server):
    """A server that outlasts slow clients, and being out of file descriptors."""

    def __init__(self, app: LimitedApp):
        """`app`: what answers; its limits are those of the connections, too."""
        super().__init__(_Config(app))
        self._last_warning = -float("inf")

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen."""
        asyncio.get_running_loop().set_exception_handler(self._on_loop_error)
        await super().startup(sockets)
        for each in sockets or ():
            each.listen(_BACKLOG)  # asyncio has lowered it to the number of accepts

    async def on_tick(self, counter: int) -> bool:
        """Look after the connections once a second. uvicorn calls this every 0.1 s."""
        if counter % 10 == 0:
            for connection in list(self.server_state.connections):
                if isinstance(connection, Connection):
                    connection.tick()
        return await super().on_tick(counter)

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Say once a minute that descriptors are wanting; asyncio tries again in a second."""
        if context["message"] != _OUT_OF_DESCRIPTORS:
            loop.default_exception_handler(context)
        elif time.monotonic() - self._last_warning > 60:
            self._last_warning = time.monotonic()
            print(
                f"minirl: no file descriptor is left for a new connection ({context['exception']}),"
                " which waits; raise `ulimit -n`, or lower limits.connections",
                file=sys.stderr,
            )
