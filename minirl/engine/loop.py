"""The engine's loop: one asyncio loop in the main thread, which steps the engine.

Episodes and the endpoint run in the same loop. They ask for completions, and between two steps of
the engine all of them get their turn. If an engine spans several ranks, its leader runs the loop
and sends the others, before each step, the requests to add and to abort.
"""

import asyncio
import contextlib
import itertools
import math
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from minirl.base.oversight import Oversight
from minirl.data.vision import Vision
from minirl.engine.engine import EngineOutput, RolloutEngine, Sampling
from minirl.engine.grammars import Guide
from minirl.types.packed import ImageSpan


@dataclass
class Completion:
    """What the engine sampled for one request. The lists are parallel."""

    tokens: list[int] = field(default_factory=list)
    # Under the distribution that the token was drawn from (temperature applied).
    logprobs: list[float] = field(default_factory=list)
    # True: a stop token ended it, which is the last token. False: the length ran out.
    stopped: bool = False
    # For each token: the optimizer steps of the weights that drew it.
    versions: list[int] = field(default_factory=list)
    # For each token: whether a mask of guided decoding took probability from others, which puts it
    # outside the loss. Empty: nothing was guided.
    guided: list[bool] = field(default_factory=list)
    # Routes of prompt and completion together (types/packed.py). None: not recorded.
    routes: np.ndarray | None = None
    # For each token: the likeliest tokens in its place with their log-probs, if asked for.
    top: list[list[tuple[int, float]]] = field(default_factory=list)


@dataclass(kw_only=True)
class Request:
    """A request for a completion.

    If a rollout is interrupted, what has been sampled stays here, and the next rollout continues
    it.
    """

    tokens: list[int]  # The prompt.
    sampling: Sampling
    seed: int
    images: Sequence[ImageSpan]  # Images of the prompt.
    # Requests that wait together are added in the order of their names, so that runs repeat.
    name: tuple[int, ...]
    on_tokens: Callable[[], None] | None = None  # Called after each step that brought tokens.
    # What the completion is held to. A grammar cannot begin in the middle, so an interrupted
    # request begins again with the same seed.
    guide: Guide | None = None
    on_restart: Callable[[], None] | None = None  # Called when it begins again.
    top_logprobs: int = 0  # How many of the likeliest tokens to report in the place of each.
    done: Completion = field(default_factory=Completion)  # What has been sampled so far.


def extended(routes: np.ndarray | None, longer: np.ndarray) -> np.ndarray:
    """Return the routes of a sequence with those of tokens that had none.

    A token keeps its first route, which the log-prob of the next token was computed by: a later
    request computes the sequence again, maybe with other weights.

    Args:
        routes: routes of the beginning of a sequence; None: there are none.
        longer: routes of a later request, from the first token of the sequence on.
    """
    return longer if routes is None else np.concatenate([routes, longer[len(routes) :]])


# A request and the future on which its caller waits. The future is cancelled with the caller.
_Entry = tuple[Request, asyncio.Future[Completion]]


CLOSE_SECONDS = 5.0  # For tasks that are cancelled when the loop closes.


class EngineLoop:
    """Steps an engine while episodes and the endpoint ask it for completions.

    Attributes:
        loop: the asyncio loop.
        version: optimizer steps that the engine's weights have seen.
        active_episodes: episodes that are at work and not waiting for a completion.
        has_endpoint: requests come over HTTP, too; nobody counts who is at work there.
        may_step: False: do not step the engine any more in this run.
        discarded_tokens: tokens that were sampled and thrown away; who counts them sets it to 0.
        watch: ends the run when the loop stands still.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        *,
        repeatable: bool,
        watch: Oversight | None = None,
        step_seconds: float = math.inf,
        turn_seconds: float = math.inf,
    ):
        """Make the loop.

        Args:
            engine: the engine, awake while `run` runs.
            repeatable: step the engine only when every active episode waits for a completion, so
                that what it computes together does not depend on how long environments take.
            watch: knows the process's time limits; None: there are none.
            step_seconds: time limit of a step of the engine.
            turn_seconds: time limit of what an environment does in the loop without awaiting.
        """
        self.engine = engine
        self.repeatable = repeatable
        self.watch = watch or Oversight()
        self.step_seconds = step_seconds
        self.turn_seconds = turn_seconds
        self._turn_limit: Any = None  # While the loop runs.
        self._next_beat: asyncio.Handle  # Of `_beat`, while the loop runs.
        self.loop = asyncio.new_event_loop()
        self.version = 0
        self.active_episodes = 0
        self.has_endpoint = False
        self._request_numbers = itertools.count()
        self.may_step = True
        self.discarded_tokens = 0
        self._news = asyncio.Event()  # Something has changed that may allow a step.
        self._waiting: list[_Entry] = []  # Not added to the engine yet.
        self._running: dict[str, _Entry] = {}  # In the engine, by the engine's request id.
        self._paused: list[_Entry] = []  # Unfinished when the last run ended.

    def close(self) -> None:
        """Cancel everything that still runs in the loop, and close it.

        Tasks of a user's code that swallow the cancellation remain.
        """
        with self._limited_turns():
            for _ in range(2):  # What is cancelled may begin new tasks.
                tasks = asyncio.all_tasks(self.loop)
                for task in tasks:
                    task.cancel()
                if tasks:
                    self.loop.run_until_complete(asyncio.wait(tasks, timeout=CLOSE_SECONDS))
        if not asyncio.all_tasks(self.loop):
            self.loop.close()

    # ----------------------------------------------------------------------------------------------
    # for those who need a completion

    async def generate(self, request: Request) -> Completion:
        """Sample a completion; cancelling the caller aborts the request.

        engine.max_model_len must have room for at least one token of it.
        """
        future = asyncio.get_running_loop().create_future()
        self._waiting.append((request, future))
        self._news.set()
        return await future

    async def generate_for_episode(self, request: Request) -> Completion:
        """Sample a completion for an active episode, which is idle meanwhile."""
        self.mark_idle()
        try:
            return await self.generate(request)
        finally:
            self.active_episodes += 1

    def mark_idle(self) -> None:
        """Note that an active episode has ended, or waits for a completion."""
        self.active_episodes -= 1
        self._news.set()

    # ----------------------------------------------------------------------------------------------
    # for those who run a rollout

    def run(self, main: Coroutine | None, *, pauses: bool = True) -> Any:
        """Step the engine until `main` is done, and return its result.

        Ranks that are not an engine's leader pass None; they take part in the leader's steps and
        return None.

        Args:
            main: what to wait for.
            pauses: requests that are unfinished then leave the engine, which may sleep or evaluate,
                until `resume`. Otherwise they stay there, and the next run goes on with them.
        """
        if main:
            with self._limited_turns():
                return self.loop.run_until_complete(self._drive(main, pauses))
        while self._tick():
            pass
        return None

    def change_weights(
        self, refit: Callable[[], None], version: int, *, keeps_cache: bool = False
    ) -> None:
        """Give the engine the weights of another version, between two runs. Collective.

        Tokens that running requests sample from then on are of this version.

        Args:
            refit: writes the weights into the engine.
            version: optimizer steps that they have seen.
            keeps_cache: as in `RolloutEngine.change_weights`.
        """
        self._record(self.engine.drain())
        self._record(self.engine.take_unfinished())
        self.engine.change_weights(refit, keeps_cache=keeps_cache)
        self.version = version
        if keeps_cache:  # Keys of earlier weights are for running requests only.
            self.engine.cache_salt = str(next(self._request_numbers))

    def resume(self) -> None:
        """Continue the requests and the calls that earlier runs left unfinished."""
        self._waiting = self._paused + self._waiting
        self._paused = []
        self.watch.continue_calls()

    @contextlib.contextmanager
    def _limited_turns(self) -> Iterator[None]:
        """End the run if the loop stands still in the block, for nothing in the loop could."""

        def describe() -> str:
            task = asyncio.current_task(self.loop)
            where = f", in {task.get_name()}" if task else ""
            return (
                "an environment keeps the engine's loop from turning for longer than "
                f"env.timeout_seconds = {self.turn_seconds:g}{where}. An async function must await "
                "what takes long; one that blocks should be an ordinary function, which runs in a "
                "thread"
            )

        with self.watch.limit(self.turn_seconds, describe) as limit:
            self._turn_limit = limit
            self._next_beat = self.loop.call_soon(self._beat)
            try:
                yield
            finally:
                self._next_beat.cancel()
                self._turn_limit = None

    def _beat(self) -> None:
        """Note that the loop turns, and do so again soon."""
        self.watch.renew(self._turn_limit)
        self._next_beat = self.loop.call_later(min(1.0, self.turn_seconds / 4), self._beat)

    async def _drive(self, main: Coroutine, pauses: bool) -> Any:
        self.may_step = True
        task = asyncio.ensure_future(main)
        task.add_done_callback(lambda _: self._news.set())
        while not task.done():
            self._news.clear()
            # Let those who got a completion ask for the next one. It takes several turns of the
            # loop if a thread or another program answers, and one to see that nobody is at work.
            for _ in range(8):
                await asyncio.sleep(0)
                if not (self.active_episodes or self.has_endpoint):
                    break
            # What is repeatable waits for all episodes that are at work.
            may_step = self.may_step and not (self.repeatable and self.active_episodes)
            if may_step and (self._waiting or self._running):
                self._tick()
            else:
                await self._news.wait()
        if pauses:
            self._pause()
        self._tick(more=False, aborts=pauses)
        self.watch.stop_calls()
        return task.result()

    def _pause(self) -> None:
        """Keep what has been sampled of all requests, for `resume`."""
        self._record(self.engine.unfinished())
        if streamed := [key for key, (request, _) in self._running.items() if request.on_tokens]:
            self._record(self.engine.unfinished(streamed))
        for entry in (*self._running.values(), *self._waiting):
            request, future = entry
            if future.cancelled():
                continue
            if request.guide:  # It begins again.
                self.discarded_tokens += len(request.done.tokens)
                request.done = Completion()
                if request.on_restart:
                    request.on_restart()
            self._paused.append(entry)
        self._waiting = []

    def _tick(self, *, more: bool = True, aborts: bool = False) -> bool:
        """Abort and add requests, then step the engine; on all ranks of the engine alike.

        Args:
            more: False: the run ends, without a step.
            aborts: every request leaves the engine.

        Returns:
            Whether the run goes on.
        """
        if self._turn_limit:
            self.watch.pause(self._turn_limit)  # A step has a limit of its own.
        orders = self._orders(more, aborts) if self.engine.is_leader else None
        more, aborted, added = self.engine.tensor_parallel_broadcast(orders)
        self.engine.abort(aborted)
        for arguments in added:
            self.engine.add(*arguments)
        if more:
            too_long = (
                f"a step of the engine takes longer than timeout_minutes = "
                f"{self.step_seconds / 60:g}, with {len(self._running)} requests; another rank of "
                "the engine, or the GPU, is stuck"
            )
            with self.watch.limit(self.step_seconds, lambda: too_long):
                self._record(self.engine.step())
        if self._turn_limit:
            self.watch.renew(self._turn_limit)
        return more

    def _orders(self, more: bool, aborts: bool) -> tuple[bool, list[str], list[tuple]]:
        """Take what is waiting into the engine; only the leader decides this.

        Returns:
            Whether the engine steps, the ids of the requests to abort, and the arguments of
            `RolloutEngine.add` for each new one.
        """
        cancelled = {key for key, (_, future) in self._running.items() if future.cancelled()}
        # Their tokens in the engine; those in `Request.done` count where the request was made.
        for output in self.engine.unfinished(cancelled) if cancelled else ():
            self.discarded_tokens += len(output.tokens)
        aborted = sorted(set(self._running) if aborts else cancelled)
        for request_id in aborted:
            del self._running[request_id]

        if self.repeatable:
            self._waiting.sort(key=lambda entry: entry[0].name)  # Not by who asked first.
        added: list[tuple] = []
        if not more:
            return more, aborted, added
        for request, future in self._waiting:
            if future.cancelled():
                continue
            request_id = str(next(self._request_numbers))
            self._running[request_id] = request, future
            added.append((request_id, *_remaining(request, self.engine.vision)))
        self._waiting = []
        return more, aborted, added

    def _record(self, outputs: Iterable[EngineOutput]) -> None:
        """Append the engine's new tokens to their requests, and wake the callers of finished ones.

        Only the leader has requests. An output may belong to one that has just been aborted.
        """
        for output in outputs:
            if output.request_id not in self._running:
                continue
            request, future = self._running[output.request_id]
            done = request.done
            done.tokens += output.tokens
            done.logprobs += output.logprobs
            done.versions += [self.version] * len(output.tokens)
            done.guided += output.guided
            done.top += output.top
            if output.routes is not None:
                done.routes = extended(done.routes, output.routes)
            if request.on_tokens and output.tokens:
                request.on_tokens()
                if future.cancelled() and not output.finish_reason:  # What it has is taken at once.
                    self._record(self.engine.unfinished([output.request_id]))
            if output.finish_reason:
                del self._running[output.request_id]
                done.stopped = output.finish_reason == "stop"
                if not future.done():
                    future.set_result(done)


def _remaining(request: Request, vision: Vision | None) -> tuple:
    """Return the arguments of `RolloutEngine.add` for what is still to be sampled of a request.

    A request that continues gets another seed, because the first numbers of its seed are used up.
    (The factor is that of Knuth's multiplicative hash, so that neighbouring seeds do not meet.)
    """
    num_tokens = len(request.done.tokens)
    prompt = request.tokens + request.done.tokens
    if vision:
        prompt = vision.unexpanded(request.tokens, request.images) + request.done.tokens
    sampling = replace(request.sampling, max_tokens=request.sampling.max_tokens - num_tokens)
    seed = (request.seed + 2654435761 * num_tokens) % 2**32
    images = [image.url for image in request.images]
    streams = request.on_tokens is not None
    return prompt, sampling, seed, images, streams, request.guide, request.top_logprobs
