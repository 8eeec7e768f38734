"""The endpoint: programs call this rank's engine over HTTP, and all their tokens are kept.

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

from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from minirl.base.errors import UserError, require
from minirl.config.shared import EndpointConfig
from minirl.data import harmony
from minirl.data.prompts import Prompts
from minirl.endpoint.completions import (
    JSONObject,
    PendingResponse,
    SessionState,
    parse_request,
)
from minirl.endpoint.forms import COMPLETIONS, FORMS, MODEL, from_anthropic
from minirl.endpoint.http import MESSAGES, BadRequest, api_key, bind, make_server, read_json
from minirl.endpoint.tool_calls import make_parser, preload
from minirl.engine.engine import Sampling
from minirl.engine.loop import EngineLoop
from minirl.envs import Session
from minirl.rollout.conversation import Conversation

COUNT_TOKENS = f"{MESSAGES}/count_tokens"
# vLLM's own.
TOKENIZE = "/tokenize"
DETOKENIZE = "/detokenize"


class Endpoint:
    """An OpenAI-compatible (and Anthropic) server of this rank's engine."""

    def __init__(self, engine_loop: EngineLoop, prompts: Prompts, cfg: EndpointConfig):
        """Bind the address, and serve whenever the engine's loop runs.

        Args:
            engine_loop: samples completions.
            prompts: have the tokenizer, and how the model reads images.
            cfg: the address, and what a client may ask for.

        Raises:
            UserError: the address is not free, or vLLM has no such parser of tools.
        """
        preload()  # Now, and not while a request waits.
        if cfg.tool_parser not in ("auto", harmony.NAME):
            make_parser(cfg.tool_parser, prompts.tokenizer, [])
        self.engine_loop = engine_loop
        engine_loop.has_endpoint = True
        self.prompts = prompts
        self._sessions: dict[str, SessionState] = {}
        bound_socket = bind(cfg.host, cfg.port, "endpoint.")
        self.base_url = f"http://{cfg.host}:{bound_socket.getsockname()[1]}/v1"
        self._cfg = cfg
        self._longest_token = max(map(len, prompts.tokenizer.get_vocab()))
        posts = [Route(path, self._complete, methods=["POST"]) for path in FORMS]
        for path in (COUNT_TOKENS, TOKENIZE, DETOKENIZE):
            posts.append(Route(path, self._tokenize, methods=["POST"]))
        routes = [*posts, Route("/v1/models", self._models), Route("/health", lambda _: Response())]
        self._server = make_server(routes, cfg.limits)
        self._server.capture_signals = contextlib.nullcontext  # type: ignore[assignment]
        self._serving = engine_loop.loop.create_task(self._server.serve([bound_socket]))

    async def stop(self) -> None:
        """Close the open sessions and stop serving."""
        for key in list(self._sessions):
            self.close(key)
        self._server.should_exit = True
        await self._serving

    def open(self, seed: tuple[int, ...], sampling: Sampling, row: dict | None = None) -> Session:
        """Open a session whose samples follow from `seed` and the order of its requests.

        Args:
            seed: numbers that no other session has.
            sampling: how its requests sample.
            row: the episode's row. Its template arguments count in the session; its tools are the
                agent's to offer.
        """
        key = secrets.token_urlsafe(24)
        self._sessions[key] = SessionState(
            seed=seed,
            sampling=sampling,
            conversation=Conversation(self.prompts.tokenizer, self.prompts.vision, row),
            engine_loop=self.engine_loop,
            cfg=self._cfg,
            longest_token=self._longest_token,
        )
        # A client's cache, which looks at neither key nor address, must not answer for another
        # episode.
        model = f"{MODEL}-{secrets.token_hex(8)}"
        return Session(base_url=self.base_url, api_key=key, model=model)

    def session(self, api_key: str) -> SessionState:
        """Return the session of this key; its conversation grows with each finished request."""
        return self._sessions[api_key]

    def close(self, api_key: str) -> Conversation:
        """Return what was sampled with this key, which is invalid from now on.

        Requests that are not finished are dropped.
        """
        session = self._sessions.pop(api_key)
        for task in session.tasks:
            task.cancel()
        return session.conversation

    async def _complete(self, http_request: HTTPRequest) -> Response:
        """Answer a request for completions, in the form of the API that its path belongs to."""
        path = http_request.url.path
        form = FORMS[path]
        async with self._reading(http_request) as (session, fields):
            request = parse_request(form.to_chat(fields))
            if (request.messages is None) != (path == COMPLETIONS):
                raise BadRequest("a chat needs `messages`, a completion needs a `prompt`")
            response = PendingResponse(session, request, http_request.receive)

        async def events() -> AsyncIterator[str]:
            """Yield the response, and the error that ends it after its status was sent."""
            try:
                async for event in form.events(response):
                    yield as_text(event)
                yield form.last
            except BadRequest as error:
                yield as_text(error.body(path))

        if request.stream:
            return StreamingResponse(events(), media_type="text/event-stream")
        async for _ in response.parts():
            pass
        return JSONResponse(form.body(response))

    async def _tokenize(self, http_request: HTTPRequest) -> JSONResponse:
        """Answer with the tokens of a prompt as the engine reads it, their number, or their text.

        Tokens are read as the prompt of a completion, which refuses what are no tokens.
        """
        path = http_request.url.path
        async with self._reading(http_request) as (session, fields):
            if path == COUNT_TOKENS:
                fields = from_anthropic({"max_tokens": 1, **fields})
            if path == DETOKENIZE:
                fields = {"prompt": fields["tokens"]}
            prompts = session.read_prompts(parse_request(fields))
            require(len(prompts) == 1, f"{path} takes one prompt, and there are {len(prompts)}")
            tokens = prompts[0].tokens
        if path == COUNT_TOKENS:
            return JSONResponse({"input_tokens": len(tokens)})
        if path == DETOKENIZE:
            return JSONResponse({"prompt": prompts[0].text})
        said = {"count": len(tokens), "max_model_len": session.max_model_len, "tokens": tokens}
        return JSONResponse(said)

    async def _models(self, http_request: HTTPRequest) -> JSONResponse:
        self._session(http_request)
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "minirl"}
        return JSONResponse({"object": "list", "data": [model]})

    def _session(self, http_request: HTTPRequest) -> SessionState:
        key = api_key(http_request)
        if key not in self._sessions:
            raise BadRequest("the API key belongs to no open session", 401, "invalid_api_key")
        return self._sessions[key]

    @contextlib.asynccontextmanager
    async def _reading(self, http_request: HTTPRequest) -> AsyncIterator[tuple[SessionState, Any]]:
        """Give the session and the body of a request, and note why it is refused.

        Raises:
            UserError: the request cannot be answered; also for what a malformed one raises inside.
        """
        session = self._session(http_request)
        try:
            fields = await read_json(http_request, self._cfg.limits)
            self._session(http_request)  # It may have been closed while the body came.
            yield session, fields
            return
        except UserError as error:
            refusal = error
        except KeyError as error:
            refusal = BadRequest(f"malformed request: the field {error} is missing")
        except (TypeError, ValueError, AttributeError, RecursionError) as error:
            problem = (str(error).splitlines() or [""])[0]
            refusal = BadRequest(f"malformed request: {type(error).__name__}: {problem}")
        session.refusals.append(f"POST {http_request.url.path}: {refusal}")
        raise refusal


def as_text(event: JSONObject) -> str:
    """Return a server-sent event; it has a name if the data have a `type`."""
    name = f"event: {event['type']}\n" if "type" in event else ""
    return f"{name}data: {json.dumps(event)}\n\n"
