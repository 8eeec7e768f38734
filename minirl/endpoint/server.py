"""The endpoint: programs call this rank's engine over HTTP, and all their tokens are kept.

An API key stands for a session, and a session has one conversation (rollout/conversation.py). A
request appends its prompts and completions to segments that they continue token by token, or to new
ones: all of them when the response is finished, or none. The server runs in the engine's event
loop, so it stands still while the trainer trains, and clients wait: give them a timeout that is
longer than a step.
"""

import contextlib
import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from minirl.base.errors import UserError, require
from minirl.config.shared import EndpointConfig
from minirl.data.prompts import Prompts
from minirl.endpoint import anthropic, responses
from minirl.endpoint.http import MESSAGES, BadRequest, api_key, bind, make_server, read_json
from minirl.endpoint.protocol import JSONObject, event, parse_request
from minirl.endpoint.response import MODEL, PendingResponse, SessionState, read_prompts
from minirl.endpoint.tool_calls import preload
from minirl.engine.engine import Sampling
from minirl.engine.loop import EngineLoop
from minirl.envs import Session
from minirl.rollout.conversation import Conversation, Prompt

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
COUNT_TOKENS = f"{MESSAGES}/count_tokens"
# vLLM's own.
TOKENIZE = "/tokenize"
DETOKENIZE = "/detokenize"
# The APIs other than OpenAI's chats: how a request becomes that of a chat, and the response.
OTHERS: dict[str, tuple[Callable[[JSONObject], JSONObject], type[PendingResponse]]] = {
    MESSAGES: (anthropic.to_chat, anthropic.AnthropicResponse),
    RESPONSES: (responses.to_chat, responses.ResponsesResponse),
}


class Endpoint:
    """An OpenAI-compatible (and Anthropic) server of this rank's engine."""

    def __init__(self, engine_loop: EngineLoop, prompts: Prompts, cfg: EndpointConfig):
        """Bind the address, and serve whenever the engine's loop runs.

        Args:
            engine_loop: samples completions.
            prompts: have the tokenizer, and how the model reads images.
            cfg: the address, and what a client may ask for.

        Raises:
            UserError: the address is not free.
        """
        preload()  # Now, and not while a request waits.
        self.engine_loop = engine_loop
        self.prompts = prompts
        self._sessions: dict[str, SessionState] = {}
        bound_socket = bind(cfg.host, cfg.port, "endpoint.")
        self.base_url = f"http://{cfg.host}:{bound_socket.getsockname()[1]}/v1"
        self._cfg = cfg
        posts = [Route(path, self._post, methods=["POST"]) for path in (CHAT, COMPLETIONS, *OTHERS)]
        routes = [
            *posts,
            Route(COUNT_TOKENS, self._tokenize, methods=["POST"]),
            Route(TOKENIZE, self._tokenize, methods=["POST"]),
            Route(DETOKENIZE, self._detokenize, methods=["POST"]),
            Route("/v1/models", self._models),
            Route("/health", _health),
        ]
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
        inputs = (row or {}).get("template_inputs", {})
        kwargs = inputs.get("chat_template_kwargs")
        chat_row = {"template_inputs": {"chat_template_kwargs": kwargs}} if kwargs else {}
        key = secrets.token_urlsafe(24)
        self._sessions[key] = SessionState(
            seed=seed,
            sampling=sampling,
            conversation=Conversation(self.prompts.tokenizer, self.prompts.vision, chat_row),
            engine_loop=self.engine_loop,
            cfg=self._cfg,
        )
        return Session(base_url=self.base_url, api_key=key, model=MODEL)

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
        session = self._session(http_request)
        with _refusing(session, path):
            fields = await read_json(http_request, self._cfg.limits)
            to_chat, make_response = OTHERS.get(path, (None, PendingResponse))
            request = parse_request(to_chat(fields) if to_chat else fields)
            if (request.messages is None) != (path == COMPLETIONS):
                raise BadRequest("a chat needs `messages`, a completion needs a `prompt`")
            response = make_response(session, request, http_request.receive)
        if response.request.stream:
            events = _with_error(response.events(), path)
            return StreamingResponse(events, media_type="text/event-stream")
        return JSONResponse(await response.body())

    async def _tokenize(self, http_request: HTTPRequest) -> JSONResponse:
        """Answer with the tokens of a prompt as the engine would read it, or with their number."""
        path = http_request.url.path
        session = self._session(http_request)
        with _refusing(session, path):
            fields = await read_json(http_request, self._cfg.limits)
            if path == COUNT_TOKENS:
                fields = anthropic.to_chat({"max_tokens": 1, **fields})
            prompts = _read(session, fields)
            require(len(prompts) == 1, f"{path} takes one prompt, and there are {len(prompts)}")
            tokens = prompts[0].tokens
            if path == COUNT_TOKENS:
                return JSONResponse({"input_tokens": len(tokens)})
            said = {"count": len(tokens), "max_model_len": session.max_model_len, "tokens": tokens}
            return JSONResponse(said)

    async def _detokenize(self, http_request: HTTPRequest) -> JSONResponse:
        """Answer with the text of tokens."""
        session = self._session(http_request)
        with _refusing(session, DETOKENIZE):
            fields = await read_json(http_request, self._cfg.limits)
            # Read as the prompt of a completion, which refuses what are no tokens.
            (prompt,) = _read(session, {"prompt": fields["tokens"]})
            return JSONResponse({"prompt": prompt.text})

    def _session(self, http_request: HTTPRequest) -> SessionState:
        key = api_key(http_request)
        if key not in self._sessions:
            raise BadRequest("the API key belongs to no open session", 401, "invalid_api_key")
        return self._sessions[key]


@contextlib.contextmanager
def _refusing(session: SessionState, path: str) -> Iterator[None]:
    """Turn what a malformed request raises into a BadRequest, and note why one is refused.

    Args:
        session: the session of the request.
        path: the path of the request.

    Raises:
        UserError: the request cannot be answered.
    """
    try:
        try:
            yield
        except KeyError as error:
            raise BadRequest(f"malformed request: the field {error} is missing") from error
        except (TypeError, ValueError, AttributeError, RecursionError) as error:
            problem = (str(error).splitlines() or [""])[0]
            raise BadRequest(f"malformed request: {type(error).__name__}: {problem}") from error
    except UserError as error:
        session.refusals.append(f"POST {path}: {error}")
        raise


def _read(session: SessionState, fields: Any) -> list[Prompt]:
    """Return the prompts that a body has. Raises what `_refusing` turns into a BadRequest."""
    request = parse_request(fields)
    request.check(session.cfg, session.conversation.vision, session.max_model_len)
    return read_prompts(session, request)


async def _health(_: HTTPRequest) -> Response:
    """Answer whoever asks whether the endpoint is there."""
    return Response()


async def _with_error(events: AsyncIterator[str], path: str) -> AsyncIterator[str]:
    """Yield the events of a path, and the error that ends a response after its status was sent."""
    try:
        async for each in events:
            yield each
    except BadRequest as error:
        yield event(**error.body(path))
