"""The endpoint: programs that call a model over HTTP call this rank's engine; all tokens are kept.

An API key stands for a session, and a session has one conversation (rollout/conversation.py). A
request appends its prompts and completions to segments that they continue token by token, or to new
ones: all of them when the response is finished, or none. The server runs in the engine's event
loop, so it stands still while the trainer trains, and clients wait: give them a timeout that is
longer than a step.
"""

import contextlib
import json
import secrets
from collections.abc import AsyncIterator
from typing import Any

import uvicorn
from fastapi import FastAPI
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from minirl.config.shared import EndpointConfig
from minirl.data.prompts import Prompts
from minirl.envs.base import Session
from minirl.errors import UserError
from minirl.rewards.http import bind
from minirl.rollout import anthropic
from minirl.rollout.conversation import Conversation
from minirl.rollout.engine import Sampling
from minirl.rollout.engine_loop import EngineLoop
from minirl.rollout.protocol import BadRequest, CompletionRequest, event
from minirl.rollout.response import MODEL, PendingResponse, SessionState

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MESSAGES = "/v1/messages"  # Anthropic's


class _Server(uvicorn.Server):
    """A server that leaves the signals to the program."""

    capture_signals: Any = contextlib.nullcontext


class Endpoint:
    """An OpenAI-compatible (and Anthropic) server of this rank's engine."""

    def __init__(self, engine_loop: EngineLoop, prompts: Prompts, cfg: EndpointConfig):
        """Bind the address, and serve whenever the engine's loop runs.

        Args:
            engine_loop: Samples completions.
            prompts: Have the tokenizer, and how the model reads images.
            cfg: The address.

        Raises:
            UserError: The address is not free.
        """
        self.engine_loop = engine_loop
        self.prompts = prompts
        self._sessions: dict[str, SessionState] = {}
        bound_socket = bind(cfg.host, cfg.port, "endpoint.")
        self.base_url = f"http://{cfg.host}:{bound_socket.getsockname()[1]}/v1"
        posts = [
            Route(path, self._post, methods=["POST"]) for path in (CHAT, COMPLETIONS, MESSAGES)
        ]
        app = FastAPI(
            openapi_url=None,
            routes=[*posts, Route("/v1/models", self._models)],
            exception_handlers={UserError: _send_error, ClientDisconnect: _send_nothing},
        )
        # The loop stands still for minutes, and a connection that was silent in this time must not
        # be closed.
        self._server = _Server(
            uvicorn.Config(
                app,
                log_config=None,
                log_level="warning",
                lifespan="off",
                ws="none",
                timeout_keep_alive=10**6,
                timeout_graceful_shutdown=5,
            )
        )
        self._serving = engine_loop.loop.create_task(self._server.serve([bound_socket]))

    async def stop(self) -> None:
        """Close the open sessions and stop serving."""
        for key in list(self._sessions):
            self.close(key)
        self._server.should_exit = True
        await self._serving

    def open(self, seed: tuple[int, ...], sampling: Sampling) -> Session:
        """Open a session whose samples follow from `seed` and the order of its requests."""
        key = secrets.token_urlsafe(24)
        self._sessions[key] = SessionState(
            seed=seed,
            sampling=sampling,
            conversation=Conversation(self.prompts.tokenizer, self.prompts.vision),
            engine_loop=self.engine_loop,
        )
        return Session(base_url=self.base_url, api_key=key, model=MODEL)

    def conversation(self, api_key: str) -> Conversation:
        """Return what is sampled with this key; it grows with each finished request."""
        return self._sessions[api_key].conversation

    def close(self, api_key: str) -> Conversation:
        """Return what was sampled with this key, which is invalid from now on.

        Requests that are not finished are dropped.
        """
        session = self._sessions.pop(api_key)
        for task in session.tasks:
            task.cancel()
        return session.conversation

    async def _models(self, http_request: HTTPRequest) -> JSONResponse:
        self._session(http_request)
        return JSONResponse(
            {
                "object": "list",
                "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "minirl"}],
            }
        )

    async def _post(self, http_request: HTTPRequest) -> Response:
        """Answer a request for completions, in the form of the API that its path belongs to."""
        path = http_request.url.path
        body = await http_request.body()
        session = self._session(http_request)
        make_response = PendingResponse
        try:
            fields = json.loads(body)
            if path == MESSAGES:
                fields = anthropic.to_chat(fields)
                make_response = anthropic.AnthropicResponse
            request = CompletionRequest.model_validate(fields)
            if (request.messages is None) != (path == COMPLETIONS):
                raise BadRequest("a chat needs `messages`, a completion needs a `prompt`")
            response = make_response(session, request, http_request.receive)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BadRequest(f"malformed request: {type(error).__name__}: {error}") from error
        if request.stream:
            return StreamingResponse(_with_error(response.events()), media_type="text/event-stream")
        return JSONResponse(await response.body())

    def _session(self, http_request: HTTPRequest) -> SessionState:
        headers = http_request.headers
        key = headers.get("x-api-key") or headers.get("authorization", "").removeprefix("Bearer ")
        if key not in self._sessions:
            raise BadRequest("the API key belongs to no open session", 401, "invalid_api_key")
        return self._sessions[key]


async def _send_error(_: HTTPRequest, error: UserError) -> JSONResponse:
    bad_request = error if isinstance(error, BadRequest) else BadRequest(str(error))
    return JSONResponse(bad_request.body(), bad_request.status)


async def _send_nothing(*_: object) -> JSONResponse:
    """Answer a client that has left."""
    return JSONResponse({})


async def _with_error(events: AsyncIterator[str]) -> AsyncIterator[str]:
    """Yield the events, and the error that ends a response after its status was sent."""
    try:
        async for each in events:
            yield each
    except BadRequest as error:
        yield event(**error.body())
