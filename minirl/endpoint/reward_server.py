"""A reward model's server: it answers the protocol of rewards/http.py.

Texts of requests that come together are scored in one forward. What cannot be read is refused
before it joins others, and each text of a forward that fails is tried alone.
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from minirl.base.errors import UserError, require
from minirl.base.reading import key_of_environment
from minirl.config.supervised import ServeConfig
from minirl.endpoint.http import (
    LOOPBACK,
    BadRequest,
    bind,
    make_server,
    read_json,
    require_key,
    require_loopback,
    wait_for_disconnect,
)
from minirl.types.packed import Trajectory

Encode = Callable[[str], Trajectory]  # raises UserError
Score = Callable[[list[Trajectory]], list[float]]


def serve(encode: Encode, score: Score, cfg: ServeConfig) -> None:
    """Answer the protocol at `/` and `/get_reward` until the process gets a signal to stop.

    Args:
        encode: makes a text the sequence to score; called in one thread.
        score: returns the scores of sequences; called in another thread, with at most
            `tokens_per_batch` tokens unless a single sequence has more.
        cfg: address, key, limits, and how texts share a forward.

    Raises:
        UserError: the address is not free, or the variable that should have the key is not set.
    """
    key = key_of_environment("api_key_env", cfg.api_key_env)
    with bind(cfg.host, cfg.port) as bound_socket:
        asyncio.run(_serve(Batcher(encode, score, cfg), key, cfg, bound_socket))


async def _serve(batcher: "Batcher", key: str, cfg: ServeConfig, bound_socket: Any) -> None:
    async def get_reward(request: Request) -> JSONResponse:
        require_key(request, key)
        # A page in a browser reaches servers on its machine, but would not know a key. What pages
        # post has an origin, and may name another host.
        if not key and "origin" in request.headers:
            raise BadRequest("web pages may not ask without a key; set api_key_env", 403)
        if not key and cfg.host in LOOPBACK:
            require_loopback(request)
        body = await read_json(request, cfg.limits)
        texts = body.get("query") if isinstance(body, dict) else None
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise BadRequest('malformed request: give {"query": [text, ...]}')
        require(
            len(texts) <= cfg.limits.prompts,
            f"the request has {len(texts)} queries, more than limits.prompts = "
            f"{cfg.limits.prompts}; send several requests (minirl.rl sends at most reward.threads "
            "queries in one)",
        )
        scoring = asyncio.ensure_future(batcher.score(texts))
        leaving = asyncio.ensure_future(wait_for_disconnect(request.receive))
        await asyncio.wait([scoring, leaving], return_when=asyncio.FIRST_COMPLETED)
        leaving.cancel()
        if not scoring.done():
            scoring.cancel()
            return JSONResponse({})  # nobody reads it
        return JSONResponse({"rewards": scoring.result()})

    routes = [Route(path, get_reward, methods=["POST"]) for path in ("/", "/get_reward")]
    running = asyncio.create_task(batcher.run())
    try:
        await make_server(routes, cfg.limits).serve([bound_socket])
    finally:
        running.cancel()


@dataclass(frozen=True)
class _Waiting:
    """A sequence that waits for its score."""

    row: Trajectory
    score: asyncio.Future[float]  # cancelled when its client leaves


class Batcher:
    """Scores the texts of all requests, as many in a forward as its budget of tokens allows."""

    def __init__(self, encode: Encode, score: Score, cfg: ServeConfig):
        """`cfg` has the budget, and how long to wait for other requests."""
        self._encode = encode
        self._score = score
        self._tokens_per_batch = cfg.tokens_per_batch
        self._wait_seconds = cfg.wait_ms / 1000
        self._encoder = ThreadPoolExecutor(1, thread_name_prefix="encode")
        self._model = ThreadPoolExecutor(1, thread_name_prefix="score")
        self._waiting: deque[_Waiting] = deque()
        self._news = asyncio.Event()  # Something waits.

    async def score(self, texts: list[str]) -> list[float]:
        """Return the scores of the texts, in their order.

        Raises:
            BadRequest: a text cannot be read or scored, or its score is not finite.
        """
        loop = asyncio.get_running_loop()
        rows = await loop.run_in_executor(self._encoder, self._encode_all, texts)
        mine = [_Waiting(row, loop.create_future()) for row in rows]
        self._waiting += mine
        self._news.set()
        scores = await asyncio.gather(*(each.score for each in mine), return_exceptions=True)
        for number, score in enumerate(scores):
            if isinstance(score, BaseException):
                raise BadRequest(f"query {number} cannot be scored: {score!r}", 500)
            if not math.isfinite(score):  # another try would not help
                raise BadRequest(f"query {number} was scored {score}", 422)
        return [score for score in scores if not isinstance(score, BaseException)]

    def _encode_all(self, texts: list[str]) -> list[Trajectory]:
        rows = []
        for number, text in enumerate(texts):
            try:
                rows.append(self._encode(text))
            except UserError as error:
                raise BadRequest(f"query {number}: {error}") from error
        return rows

    async def run(self) -> None:
        """Score what waits, until this task is cancelled."""
        while True:
            await self._news.wait()
            await asyncio.sleep(self._wait_seconds)
            if batch := self._take():
                await self._score_batch(batch)

    def _take(self) -> list[_Waiting]:
        """Take the sequences that wait longest and fit into the budget, at least one."""
        batch: list[_Waiting] = []
        num_tokens = 0
        waiting = deque(each for each in self._waiting if not each.score.cancelled())
        while waiting:
            # The end, and the token whose row is its score.
            num_tokens += len(waiting[0].row.tokens) + 2
            if batch and num_tokens > self._tokens_per_batch:
                break
            batch.append(waiting.popleft())
        self._waiting = waiting
        if not waiting:
            self._news.clear()
        return batch

    async def _score_batch(self, batch: list[_Waiting]) -> None:
        """Set the scores of a batch; if it fails, those of each sequence alone."""
        loop = asyncio.get_running_loop()
        rows = [each.row for each in batch]
        try:
            scores = await loop.run_in_executor(self._model, self._score, rows)
        except Exception as error:  # a forward may raise anything, and the others must be answered
            if len(batch) == 1:
                if not batch[0].score.cancelled():
                    batch[0].score.set_exception(error)
                return
            for each in batch:
                await self._score_batch([each])
            return
        for each, score in zip(batch, scores, strict=True):
            if not each.score.cancelled():
                each.score.set_result(score)
