"""A reward model's server: it answers the protocol of rewards/http.py.

Texts of requests that come while the model runs are scored in one forward. What cannot be read is
refused before it joins others, and each request of a forward that fails is tried alone.
"""

import asyncio
import hashlib
import itertools
import math
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from cachetools import LRUCache
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from minirl.base.errors import UserError, require
from minirl.base.log import say
from minirl.base.reading import key_of_environment
from minirl.config.supervised import ServeConfig
from minirl.endpoint import http
from minirl.types.packed import Trajectory

Encode = Callable[[str], Trajectory]  # raises UserError
Score = Callable[[list[Trajectory]], list[float]]
NUM_KNOWN = 2**17  # Scores that are kept, of the last texts.


def serve(encode: Encode, score: Score, cfg: ServeConfig) -> None:
    """Answer the protocol at `/` and `/get_reward` until the process gets a signal to stop.

    Args:
        encode: makes a text the sequence to score; called in one thread.
        score: returns the scores of sequences; called in another thread.
        cfg: address, key and limits.

    Raises:
        UserError: the address is not free, or the variable that should have the key is not set.
    """
    key = key_of_environment("api_key_env", cfg.api_key_env)
    batcher = Batcher(encode, score)

    async def get_reward(request: Request) -> JSONResponse:
        sent = http.api_key(request)
        if key and not secrets.compare_digest(sent.encode(), key.encode()):
            raise http.BadRequest("the API key is missing or wrong", 401, "invalid_api_key")
        # A page in a browser reaches servers on its machine, but would not know a key. What pages
        # post has an origin, and may name another host.
        if not key and "origin" in request.headers:
            raise http.BadRequest("web pages may not ask without a key; set api_key_env", 403)
        if not key and cfg.host in http.LOOPBACK:
            http.require_loopback(request)
        texts = (await http.read_json(request, cfg.limits)).get("query")
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise http.BadRequest('malformed request: give {"query": [text, ...]}')
        require(
            len(texts) <= cfg.limits.prompts,
            f"the request has {len(texts)} queries, more than limits.prompts = "
            f"{cfg.limits.prompts}; send several requests (minirl.rl sends at most reward.threads "
            "queries in one)",
        )
        return JSONResponse({"rewards": await batcher.score(texts)})

    routes = [Route(path, get_reward, methods=["POST"]) for path in ("/", "/get_reward")]
    with http.bind(cfg.host, cfg.port) as bound_socket:
        port = bound_socket.getsockname()[1]
        say(f"rewards are served at http://{cfg.host}:{port}/get_reward")
        asyncio.run(http.make_server(routes, cfg.limits).serve([bound_socket]))


class _Waiting(NamedTuple):
    """The sequences of a request, which wait for their scores."""

    rows: list[Trajectory]
    scores: asyncio.Future[list[float]]


class Batcher:
    """Scores the texts of all requests: those that wait while the model runs share the next one."""

    def __init__(self, encode: Encode, score: Score):
        self.encode = encode
        self.score_rows = score
        self.encoder = ThreadPoolExecutor(1, thread_name_prefix="encode")
        self.model = ThreadPoolExecutor(1, thread_name_prefix="score")
        self.running = asyncio.Lock()
        self.waiting: list[_Waiting] = []
        # By the hash of a text. What is scored together decides the last bits of a score, and equal
        # answers must earn the same.
        self.known: LRUCache[bytes, float] = LRUCache(NUM_KNOWN)

    async def score(self, texts: list[str]) -> list[float]:
        """Return the scores of the texts, in their order.

        Raises:
            BadRequest: a text cannot be read or scored, or its score is not finite.
        """
        loop = asyncio.get_running_loop()
        rows = []
        for number, text in enumerate(texts):
            try:
                rows.append(await loop.run_in_executor(self.encoder, self.encode, text))
            except UserError as error:
                raise http.BadRequest(f"query {number}: {error}") from error
        mine = _Waiting(rows, loop.create_future())
        self.waiting.append(mine)
        async with self.running:
            if not mine.scores.done():
                batch = self.waiting
                self.waiting = []
                await self._score_batch(batch)
        scores = []
        for text, new_score in zip(texts, mine.scores.result(), strict=True):
            digest = hashlib.sha256(text.encode(errors="surrogatepass")).digest()
            scores.append(self.known.setdefault(digest, new_score))
        for number, score in enumerate(scores):
            if not math.isfinite(score):  # another try would not help
                raise http.BadRequest(f"query {number} was scored {score}", 422)
        return scores

    async def _score_batch(self, batch: list[_Waiting]) -> None:
        """Set the scores of some requests; if their forward fails, those of each alone."""
        rows = list(itertools.chain.from_iterable(each.rows for each in batch))
        loop = asyncio.get_running_loop()
        try:
            scores = await loop.run_in_executor(self.model, self.score_rows, rows) if rows else []
        except Exception as error:  # a forward may raise anything, and the others must be answered
            if len(batch) == 1:
                refusal = http.BadRequest(f"it cannot be scored: {error!r}", 500)
                batch[0].scores.set_exception(refusal)
                return
            for each in batch:
                await self._score_batch([each])
            return
        first = 0
        for each in batch:
            each.scores.set_result(scores[first : first + len(each.rows)])
            first += len(each.rows)
