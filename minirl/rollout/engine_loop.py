"""The engine's heart: one asyncio loop in the main thread, in which episodes and the endpoint ask
for answers while the engine steps.

Between two steps of the engine everything that waits gets its turn. Where an engine spans several
ranks, its leader runs the loop and tells the others before each step what to add and what to drop.
"""

import asyncio
import itertools
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from minirl.data.images import ImageSpan
from minirl.rollout.conversation import Completion, unexpanded
from minirl.rollout.engine import RolloutEngine, Sampling


@dataclass(kw_only=True)
class Request:
    """An answer in the making. What of it is there when a rollout is interrupted stays, and the
    next rollout goes on from it.
    """

    tokens: list[int]  # of the prompt
    sampling: Sampling
    seed: int
    images: Sequence[ImageSpan] = ()  # of the prompt
    # requests that wait together are added in this order, if runs are to be repeatable
    name: tuple = ()
    on_tokens: Callable[[], None] | None = None  # called after each step that brought some
    done: Completion = field(default_factory=Completion)


class EngineLoop:
    def __init__(self, engine: RolloutEngine, *, repeatable: bool):
        """`repeatable`: the engine waits until every player has asked for its next answer, so that
        what it computes together does not depend on how long environments take.
        """
        self.engine, self.repeatable = engine, repeatable
        self.loop = asyncio.new_event_loop()
        self.version = 0  # optimizer steps that the weights have seen
        self.active_episodes = 0  # episodes that are at work, and not waiting for an answer
        self._numbers = itertools.count()  # of requests to the engine
        self.halted = False  # no step more in this run
        self._news = asyncio.Event()
        self._waiting: list[tuple[Request, asyncio.Future]] = []
        self._paused: list[tuple[Request, asyncio.Future]] = []
        self._running: dict[str, tuple[Request, asyncio.Future]] = {}

    # ------------------------------------------------------------------------------------------------
    # for those who ask

    def close(self) -> None:
        """Drop everything."""
        while tasks := asyncio.all_tasks(self.loop):
            for task in tasks:
                task.cancel()
            self.loop.run_until_complete(asyncio.wait(tasks))
        self.loop.close()

    async def generate(self, request: Request) -> Completion:
        """Sample an answer; engine.max_model_len must have room for a token of it. Cancelling the
        caller drops the request.
        """
        future = (
            asyncio.get_running_loop().create_future()
        )  # cancelled with the caller, which whoever holds the request looks at
        self._waiting.append((request, future))
        self._news.set()
        return await future

    def mark_idle(self) -> None:
        """A player is done, or waits."""
        self.active_episodes -= 1
        self._news.set()

    async def answer(self, request: Request) -> Completion:
        """`generate`, of a player."""
        self.mark_idle()
        try:
            return await self.generate(request)
        finally:
            self.active_episodes += 1

    # ------------------------------------------------------------------------------------------------
    # for who runs a rollout

    def run(self, main: Coroutine | None) -> Any:
        """Step the engine until `main` is done; its result (None on ranks that follow, which pass
        None). What is unfinished then is held.
        """
        if not self.engine.is_leader:
            while self._tick():
                pass
            return None
        return self.loop.run_until_complete(self._drive(main))

    def release(self) -> None:
        """Go on with what is held."""
        self._waiting, self._paused = self._paused + self._waiting, []

    async def _drive(self, main: Coroutine) -> Any:
        self.halted, task = False, asyncio.ensure_future(main)
        task.add_done_callback(lambda _: self._news.set())
        while not task.done():
            self._news.clear()
            for _ in range(
                8
                # whoever got an answer may now ask for the next; a request over HTTP takes several
                # turns of the loop
            ):
                await asyncio.sleep(0)
            if (
                self.halted
                or self.repeatable
                and self.active_episodes
                or not (self._waiting or self._running)
            ):
                await self._news.wait()
            else:
                self._tick()
        self._hear(self.engine.unfinished())
        self._paused += [
            entry for entry in (*self._running.values(), *self._waiting) if not entry[1].cancelled()
        ]
        self._waiting = []
        self._tick(more=False)
        return task.result()

    def _tick(self, more: bool = True) -> bool:
        """Drop and add requests and step the engine, on all its ranks alike. False at the end of a
        run, when all are dropped.
        """
        orders = None
        if self.engine.is_leader:
            waiting = sorted(
                (entry for entry in self._waiting if not entry[1].cancelled()),
                key=lambda entry: entry[0].name if self.repeatable else (),
            )
            new = {str(next(self._numbers)): entry for entry in waiting}
            dropped = [
                name
                for name, (_, future) in self._running.items()
                if future.cancelled() or not more
            ]
            orders = (
                more,
                dropped,
                [
                    (name, *_remaining(request), request.on_tokens is not None)
                    for name, (request, _) in new.items()
                ],
            )
            self._running = {
                name: entry for name, entry in self._running.items() if name not in dropped
            } | new
            self._waiting = []
        more, dropped, added = self.engine.tensor_parallel_broadcast(orders)
        self.engine.abort(dropped)
        for each in added:
            self.engine.add(*each)
        self._hear(self.engine.step() if more else [])
        return more

    def _hear(self, outputs: list[tuple[str, list[int], list[float], str | None]]) -> None:
        """Of `step` or `unfinished`."""
        for name, tokens, logprobs, finish in (
            output for output in outputs if output[0] in self._running
        ):  # the leader hears, and not of what was dropped
            request, future = self._running[name]
            request.done.tokens += tokens
            request.done.logprobs += logprobs
            request.done.versions += [self.version] * len(tokens)
            if request.on_tokens:
                request.on_tokens()
            if finish:
                del self._running[name]
                request.done.stopped = finish == "stop"
                if not future.done():
                    future.set_result(request.done)


def _remaining(request: Request) -> tuple[list[int], Sampling, int, tuple[str, ...]]:
    """What the engine is to add to what is there already; with another seed, for the first one's
    numbers are used up.
    """
    num = len(request.done.tokens)
    sampling = replace(request.sampling, max_tokens=request.sampling.max_tokens - num)
    tokens, urls = unexpanded(request.tokens, request.images), tuple(p.url for p in request.images)
    return tokens + request.done.tokens, sampling, (request.seed + 2654435761 * num) % 2**32, urls


async def in_thread(function: Callable, *arguments: object) -> Any:
    """Call it in a thread of its own, which nobody waits for at the end of the program if the
    caller gives it up.
    """
    future = Future()
    future.set_running_or_notify_cancel()  # from now on nobody cancels it, whoever gives it up

    def work() -> None:
        try:
            future.set_result(function(*arguments))
        except Exception as error:  # it is raised again where the call was made
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return await asyncio.wrap_future(future)
