"""The endpoint: programs that talk to a model over HTTP talk to this rank's engine, and every token of what is said is kept.

A key is a session, and a session a conversation (rollout/conversation.py). A request appends its prompts and answers to segments that
they go on, token by token, or begins new ones; it is answered as a whole, or has never been asked. The server runs in the driver's loop, so it
stands still while the trainer trains, and clients wait: give them a time limit that outlasts a step.
"""

import asyncio
import contextlib
import json
import secrets
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from minirl.config import EndpointConfig
from minirl.rollout import anthropic, protocol
from minirl.rollout.conversation import Completion, Conversation, Segment
from minirl.rollout.driver import Request
from minirl.rollout.engine import Sampling
from minirl.rollout.env import Session
from minirl.rollout.episode import sample_seed
from minirl.rollout.protocol import Answer, Asked
from minirl.types import UserError


class Refused(UserError):
    """A request that is not answered: message, status (400), code (None)."""


@dataclass
class _Session:
    seed: tuple[int, ...]
    sampling: Sampling
    conversation: Conversation
    said: dict[str, str] = field(default_factory=dict)
    """The answers as they were sampled, by what a client sends back of them (`protocol.recognise`)."""
    exchanges: set["_Exchange"] = field(default_factory=set)
    num_asked: int = 0


class _Exchange:
    """A request at work."""

    def __init__(self, endpoint: "Endpoint", session: _Session, asked: Asked):
        """Raises UserError, KeyError, TypeError or ValueError, and leaves nothing in the conversation then."""
        self.endpoint, self.session, self.asked, self.news = endpoint, session, asked, asyncio.Queue()
        self.choices: list[tuple[Segment, Answer]] = []
        name = (*session.seed, session.num_asked)
        with contextlib.ExitStack() as undo:
            for prompt in [prompt for prompt in asked.prompts(endpoint.tokenizer, session.said) for _ in range(asked.n)]:
                segment = session.conversation.ask_raw(prompt)
                undo.callback(session.conversation.take_back, segment)
                segment.asking = True
                if (room := endpoint.max_model_len - len(segment.tokens)) < 1:
                    raise Refused(f"the prompt has {len(segment.tokens)} tokens and engine.max_model_len = {endpoint.max_model_len} leaves no room for an answer", 400,
                                  "context_length_exceeded")
                limit = min(asked.max_tokens or room, session.sampling.max_tokens, room)
                request = Request(tokens=list(segment.tokens), sampling=session.sampling.with_max_tokens(limit), seed=sample_seed(*name, len(self.choices)), name=name)
                self.choices.append((segment, Answer(request, asked, endpoint.tokenizer)))
            self.undo = undo.pop_all()
        session.num_asked += 1
        session.exchanges.add(self)
        self.name = "-".join(map(str, name))
        kind = "text_completion" if asked.messages is None else "chat.completion.chunk" if asked.stream else "chat.completion"
        self.head = {"id": f"chatcmpl-{self.name}", "object": kind, "created": int(time.time()), "model": endpoint.model}
        self.task = asyncio.ensure_future(self._work())
        self.task.add_done_callback(lambda _: self.drop())

    def drop(self) -> None:
        """What has not been answered has not been asked."""
        self.undo.close()
        self.session.exchanges.discard(self)
        if not self.task.cancel():  # it is done
            self.news.put_nowait(None)

    async def _work(self) -> None:
        async with asyncio.TaskGroup() as group:
            for i, (_, answer) in enumerate(self.choices):
                group.create_task(self._sample(i, answer))
        self.undo.pop_all()
        for segment, answer in self.choices:
            segment.asking = False
            self.session.said[protocol.recognise(answer.shown, answer.calls)] = self.asked.opening() + segment.say(answer.kept(), self.endpoint.tokenizer)

    async def _sample(self, i: int, answer: Answer) -> None:
        def hear(*_: object) -> None:
            answer.hear()
            self.news.put_nowait(i)
            if answer.stop is not None:
                asking.cancel()

        answer.request.on_tokens = hear if self.asked.stream or answer.stops else None  # else the text can wait for the end
        asking = asyncio.ensure_future(self.endpoint.ask(answer.request))
        try:
            await asking
        except asyncio.CancelledError:
            if answer.stop is None or asyncio.current_task().cancelling():
                raise
        answer.end()
        self.news.put_nowait(i)

    def told(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """With the usage so far."""
        prompt, completion = sum(len(a.request.tokens) for _, a in self.choices[:: self.asked.n]), sum(a.num_tokens for _, a in self.choices)
        return self.head | {"choices": choices, "usage": {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}}

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """The answers bit by bit; the last has none, only the usage."""
        while (i := await self.news.get()) is not None:
            if choice := self.choices[i][1].choice(i, self.name):
                yield self.told([choice])
        yield protocol.error("the session was closed", "invalid_request_error") if self.task.cancelled() else self.task.result() or self.told([])


class Endpoint:
    """An OpenAI-compatible (and Anthropic) server of this rank's engine."""

    def __init__(self, ask: Callable[[Request], Awaitable[Completion]], tokenizer: PreTrainedTokenizerBase, cfg: EndpointConfig, *, max_model_len: int,
                 model: str = "policy"):
        """`ask`: the driver's."""
        self.ask, self.tokenizer, self.cfg, self.max_model_len, self.model = ask, tokenizer, cfg, max_model_len, model
        self._sessions: dict[str, _Session] = {}

    async def start(self) -> None:
        """Serve in the loop that runs. Raises UserError if the address cannot be had."""
        import uvicorn  # here, because only this needs them and they take a while
        from fastapi import FastAPI
        from fastapi.responses import JSONResponse, StreamingResponse
        from starlette.requests import ClientDisconnect
        from starlette.routing import Route

        self._json, self._stream = JSONResponse, StreamingResponse
        posts = [Route(path, self._answer, methods=["POST"]) for path in ("/v1/chat/completions", "/v1/completions", "/v1/messages")]
        app = FastAPI(openapi_url=None, routes=[*posts, Route("/v1/models", self._models)], exception_handlers={
            UserError: self._refuse, ClientDisconnect: lambda request, error: JSONResponse({})})
        try:
            listening = socket.create_server((self.cfg.host, self.cfg.port), backlog=4096)
        except (OSError, OverflowError) as error:
            raise UserError(f"endpoint.host = {self.cfg.host}, endpoint.port = {self.cfg.port}: {error}; port 0 takes a free one") from error
        self.base_url = f"http://{self.cfg.host}:{listening.getsockname()[1]}/v1"
        # The loop stands still for minutes, and a connection that was silent in this time must not be closed.
        self._server = uvicorn.Server(uvicorn.Config(app, log_config=None, log_level="warning", access_log=False, lifespan="off", ws="none",
                                                     timeout_keep_alive=10**6, timeout_graceful_shutdown=5))
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
        self._sessions[key] = _Session(seed, sampling, Conversation(self.tokenizer))
        return Session(base_url=self.base_url, api_key=key, model=self.model)

    def close(self, api_key: str) -> Conversation:
        """What was said with this key, which is then worth nothing; what is still being asked is dropped."""
        session = self._sessions.pop(api_key)
        for exchange in list(session.exchanges):
            exchange.drop()
        return session.conversation

    async def _models(self, request: Any) -> Any:
        self._session(request)
        return self._json({"object": "list", "data": [{"id": self.model, "object": "model", "created": 0, "owned_by": "minirl"}]})

    async def _answer(self, request: Any) -> Any:
        body, api = await request.body(), _api(request)
        session = self._session(request)
        try:
            asked = Asked.model_validate(anthropic.to_chat(json.loads(body)) if api is anthropic else json.loads(body))
            if (asked.messages is None) != (request.url.path == "/v1/completions"):
                raise Refused("a chat has `messages`, a completion a `prompt`")
            exchange = _Exchange(self, session, asked)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise Refused(f"malformed request: {type(error).__name__}: {error}") from error
        gone = asyncio.ensure_future(_gone(request))
        gone.add_done_callback(lambda _: exchange.drop())
        if asked.stream:
            return self._stream(api.events(exchange.chunks(), asked), media_type="text/event-stream")
        await asyncio.wait({exchange.task})
        if exchange.task.cancelled():
            raise Refused("the session was closed")
        exchange.task.result()
        answer = exchange.told([answer.choice(i, exchange.name) for i, (_, answer) in enumerate(exchange.choices)])
        return self._json(anthropic.reply(answer) if api is anthropic else answer)

    def _session(self, request: Any) -> _Session:
        key = request.headers.get("x-api-key") or request.headers.get("authorization", "").removeprefix("Bearer ")
        if key not in self._sessions:
            raise Refused("the key is of no open session", 401, "invalid_api_key")
        return self._sessions[key]

    async def _refuse(self, request: Any, error: UserError) -> Any:
        message, status, code = (*error.args, 400, None)[:3]
        return self._json(_api(request).error(message, "authentication_error" if status == 401 else "invalid_request_error", code), status)


def _api(request: Any) -> Any:
    return anthropic if request.url.path == "/v1/messages" else protocol


async def _gone(request: Any) -> None:
    """The client has left, or been answered."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
