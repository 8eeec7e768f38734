"""The endpoint: programs that talk to a model over HTTP talk to this rank's engine, and every token
of what is said is kept.

A key is a session, and a session a conversation (rollout/conversation.py). A request appends its
prompts and answers to segments that they go on, token by token, or begins new ones; it is answered
as a whole, or has never been asked. The server runs in the driver's loop, so it stands still while
the trainer trains, and clients wait: give them a time limit that outlasts a step.
"""

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import uvicorn
from fastapi import FastAPI
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from transformers import PreTrainedTokenizerBase

from minirl.config.shared import EndpointConfig
from minirl.data.images import Vision
from minirl.envs.base import Session
from minirl.errors import UserError
from minirl.rewards.http import listen
from minirl.rollout import anthropic, protocol
from minirl.rollout.conversation import Completion, Conversation
from minirl.rollout.engine import Sampling
from minirl.rollout.engine_loop import Request
from minirl.rollout.episode import sample_seed

MODEL = "policy"


class BadRequest(UserError):
    """A request that is not answered: message, status (400), code (None)."""


@dataclass
class _Session:
    seed: tuple[int, ...]
    sampling: Sampling
    conversation: Conversation
    said: dict[str, str] = field(
        default_factory=dict
        # the answers as they were sampled, by what a client sends back of them
        # (`protocol.recognise`)
    )
    asked: list[asyncio.Task] = field(default_factory=list)  # the work on each request so far


class PendingResponse:
    """A request at work. The conversation hears of it when it is answered."""

    def __init__(self, endpoint: "Endpoint", session: _Session, asked: protocol.CompletionRequest):
        """Raises UserError, KeyError, TypeError or ValueError."""
        self.endpoint, self.session, self.asked, self.news = (
            endpoint,
            session,
            asked,
            asyncio.Queue(),
        )
        self.answers: list[protocol.Choice] = []
        name = (*session.seed, len(session.asked))
        for prompt in [
            prompt
            for prompt in asked.prompts(endpoint.tokenizer, session.said)
            for _ in range(asked.n)
        ]:
            tokens, _, shown = whole = session.conversation.whole(*prompt)
            if (room := endpoint.max_model_len - len(tokens)) < 1:
                raise BadRequest(
                    f"the prompt has {len(tokens)} tokens and engine.max_model_len = {endpoint.max_model_len} leaves no room for an answer",
                    400,
                    "context_length_exceeded",
                )
            if endpoint.vision and len(shown) > endpoint.vision.max_images:
                raise BadRequest(
                    f"the chat has {len(shown)} images, more than engine.max_images = {endpoint.vision.max_images}"
                )
            sampling = replace(
                session.sampling,
                max_tokens=min(asked.max_tokens or room, session.sampling.max_tokens, room),
            )
            request = Request(
                tokens=tokens,
                images=shown,
                sampling=sampling,
                seed=sample_seed(*name, len(self.answers)),
                name=name,
            )
            self.answers.append(protocol.Choice(request, whole, asked, endpoint.tokenizer))
        kind = (
            "text_completion"
            if asked.messages is None
            else "chat.completion.chunk"
            if asked.stream
            else "chat.completion"
        )
        self.head = {
            "id": f"chatcmpl-{'-'.join(map(str, name))}",
            "object": kind,
            "created": int(time.time()),
            "model": MODEL,
        }
        self.task = asyncio.ensure_future(self._work())
        self.task.add_done_callback(lambda _: self.news.put_nowait(None))
        session.asked.append(self.task)

    async def _work(self) -> None:
        async with asyncio.TaskGroup() as group:
            for i, answer in enumerate(self.answers):
                asking = group.create_task(self.endpoint.ask(answer.request))
                if self.asked.stream or answer.stops:  # else the text can wait for the end
                    answer.request.on_tokens = partial(self._hear, i, answer, asking)
        for i, answer in enumerate(self.answers):
            answer.hear(last=True)
            segment = self.session.conversation.go_on(*answer.prompt)
            self.session.said[protocol.recognise(answer.shown, answer.calls)] = segment.say(
                answer.kept(), self.endpoint.tokenizer
            )
            self.news.put_nowait(answer.choice(i))

    def _hear(self, i: int, answer: protocol.Choice, asking: asyncio.Task) -> None:
        answer.hear()
        if answer.stop is not None:
            asking.cancel()  # that is no failure of the group
        elif self.asked.stream and (choice := answer.choice(i)):
            self.news.put_nowait(choice)

    async def choices(self) -> AsyncIterator[dict[str, Any]]:
        """The answers as OpenAI's `choices`, bit by bit if they are streamed. Raises BadRequest if
        the session is closed.
        """
        while (choice := await self.news.get()) is not None:
            yield choice
        if self.task.cancelled():
            raise BadRequest("the session was closed")
        self.task.result()

    def usage(self) -> dict[str, int]:
        """So far."""
        prompt, completion = (
            sum(len(a.prompt[0]) for a in self.answers[:: self.asked.n]),
            sum(len(a.kept().tokens) for a in self.answers),
        )
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }

    async def stream(self, events: AsyncIterator[str]) -> AsyncIterator[str]:
        """With the error, if it comes to that when an answer has begun."""
        try:
            async for event in events:
                yield event
        except BadRequest as error:
            yield protocol.event(**protocol.error(*error.args))

    async def watch(self, request: HTTPRequest) -> None:
        """Whoever leaves has not asked."""
        while (await request.receive())["type"] != "http.disconnect":
            pass
        self.task.cancel()


class Endpoint:
    """An OpenAI-compatible (and Anthropic) server of this rank's engine."""

    def __init__(
        self,
        ask: Callable[[Request], Coroutine[Any, Any, Completion]],
        tokenizer: PreTrainedTokenizerBase,
        cfg: EndpointConfig,
        *,
        max_model_len: int,
        vision: Vision | None = None,
    ):
        """`ask`: the driver's."""
        self.ask, self.tokenizer, self.cfg, self.max_model_len, self.vision = (
            ask,
            tokenizer,
            cfg,
            max_model_len,
            vision,
        )
        self._sessions: dict[str, _Session] = {}

    async def start(self) -> None:
        """Serve in the loop that runs. Raises UserError if the address cannot be had."""
        posts = [
            Route(path, self._answer, methods=["POST"])
            for path in ("/v1/chat/completions", "/v1/completions", "/v1/messages")
        ]
        app = FastAPI(
            openapi_url=None,
            routes=[*posts, Route("/v1/models", self._models)],
            exception_handlers={
                UserError: lambda request, error: JSONResponse(
                    protocol.error(*error.args), (*error.args, 400)[1]
                ),
                ClientDisconnect: lambda request, error: JSONResponse({}),
            },
        )
        listening = listen(self.cfg.host, self.cfg.port, "endpoint.")
        self.base_url = f"http://{self.cfg.host}:{listening.getsockname()[1]}/v1"
        # The loop stands still for minutes, and a connection that was silent in this time must not
        # be closed.
        self._server = uvicorn.Server(
            uvicorn.Config(
                app,
                log_config=None,
                log_level="warning",
                access_log=False,
                lifespan="off",
                ws="none",
                timeout_keep_alive=10**6,
                timeout_graceful_shutdown=5,
            )
        )
        self._server.capture_signals = contextlib.nullcontext  # they are the program's
        self._serving = asyncio.ensure_future(self._server.serve(sockets=[listening]))

    async def stop(self) -> None:
        """Sessions that are open are closed."""
        for key in list(self._sessions):
            self.close(key)
        self._server.should_exit = True
        await self._serving

    def open(self, seed: tuple[int, ...], sampling: Sampling) -> Session:
        """A session whose samples follow from `seed` and the order of its requests."""
        key = secrets.token_urlsafe(24)
        self._sessions[key] = _Session(seed, sampling, Conversation(self.tokenizer, self.vision))
        return Session(base_url=self.base_url, api_key=key, model=MODEL)

    def close(self, api_key: str) -> Conversation:
        """What was said with this key, which is then worth nothing; what is still being asked is
        dropped.
        """
        session = self._sessions.pop(api_key)
        for task in session.asked:
            task.cancel()
        return session.conversation

    async def _models(self, request: HTTPRequest) -> JSONResponse:
        self._session(request)
        return JSONResponse(
            {
                "object": "list",
                "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "minirl"}],
            }
        )

    async def _answer(self, request: HTTPRequest) -> Response:
        body, api = (
            await request.body(),
            anthropic if request.url.path == "/v1/messages" else protocol,
        )
        session = self._session(request)
        try:
            asked = protocol.CompletionRequest.model_validate(
                anthropic.to_chat(json.loads(body)) if api is anthropic else json.loads(body)
            )
            if (asked.messages is None) != (request.url.path == "/v1/completions"):
                raise BadRequest("a chat has `messages`, a completion a `prompt`")
            exchange = PendingResponse(self, session, asked)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BadRequest(f"malformed request: {type(error).__name__}: {error}") from error
        exchange.watching = asyncio.ensure_future(exchange.watch(request))
        if asked.stream:
            return StreamingResponse(
                exchange.stream(api.events(exchange)), media_type="text/event-stream"
            )
        return JSONResponse(await api.whole(exchange))

    def _session(self, request: HTTPRequest) -> _Session:
        key = request.headers.get("x-api-key") or request.headers.get(
            "authorization", ""
        ).removeprefix("Bearer ")
        if key not in self._sessions:
            raise BadRequest("the key is of no open session", 401, "invalid_api_key")
        return self._sessions[key]
