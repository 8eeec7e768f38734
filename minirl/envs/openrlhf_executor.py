"""OpenRLHF's executors: agents that are all in one, and drive its engine by themselves.

    # class AgentExecutor(AgentExecutorBase) with async execute(prompt, label, sampling_params,
    # max_length, hf_tokenizer, llm_engine)
    --env.name openrlhf:executor.py --env.max-turns 8

`execute` runs in an event loop of its own. Each `await llm_engine.generate(token_ids,
sampling_params)` is a turn of the episode, whose tokens and log-probs minirl has sampled and keeps:
what `execute` returns of them has no effect, only `reward`, `scores`, `extra_logs` and `truncated`.
An executor runs one episode at a time, and goes on with another afterwards, so that what it keeps
(a server, a client) is made once for each episode that is under way. `generate` may be called from
any thread.
"""

import asyncio
import queue
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache
from typing import Any

from minirl.base.errors import UserError
from minirl.envs.base import Env, Result, State
from minirl.envs.openrlhf_modules import to_number
from minirl.rewards.by_name import event_loop

Executor = Any  # An object of the user's class.


@dataclass
class SamplingParams:
    """What an executor may read of how the policy is sampled, by vLLM's names."""

    max_tokens: int
    temperature: float
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    n: int = 1
    logprobs: int | None = 1


@dataclass(frozen=True)
class Logprob:
    """The log-prob of a sampled token."""

    logprob: float


@dataclass(frozen=True)
class Completion:
    """What vLLM calls a CompletionOutput."""

    token_ids: list[int]
    text: str
    logprobs: list[dict[int, Logprob]]
    finish_reason: str
    index: int = 0


@dataclass(frozen=True)
class RequestOutput:
    """What an engine returns for a prompt."""

    prompt_token_ids: list[int]
    outputs: list[Completion]
    finished: bool = True


@dataclass(frozen=True)
class Request:
    """A call of `generate` that waits for its turn."""

    tokens: list[int]
    max_tokens: int | None
    reply: "Future[RequestOutput]"


class LLMEngine:
    """The engine that an executor gets; its episodes follow one another."""

    def __init__(self) -> None:
        self.episode: OpenRLHFExecutor | None = None

    async def generate(
        self, prompt_token_ids: list[int], sampling_params: Any, **options: object
    ) -> RequestOutput:
        """Return one completion, sampled as the run says but for `max_tokens`."""
        if self.episode is None or options.get("multi_modal_data"):
            raise UserError(
                "env.name = openrlhf: llm_engine.generate was called after its episode had ended, "
                "or with images; give it the tokens of an episode under way"
            )
        request = Request(list(prompt_token_ids), sampling_params.max_tokens, Future())
        self.episode.ask(request)
        return await asyncio.wrap_future(request.reply)


@cache
def _idle(executor_class: Callable) -> "queue.SimpleQueue[tuple[Executor, LLMEngine]]":
    """Return the executors of a class that have no episode, with the engines that they know."""
    return queue.SimpleQueue()


class OpenRLHFExecutor(Env):
    """An episode that an executor leads."""

    needs_policy = True

    def __init__(self, executor_class: Callable):
        self.executor_class = executor_class
        self.tokens: list[int] = []  # All that was prompted and sampled so far.
        self.loop: asyncio.AbstractEventLoop | None = None
        self.requests: asyncio.Queue[Request | None] | None = None  # None: it has ended.
        self.request: Request | None = None  # The one that the policy answers now.
        self.engine: LLMEngine | None = None
        self.executor: Executor = None
        self.execution: Future[dict] | None = None

    async def reset(self, row: dict) -> list[int]:
        """Begin to execute, and return the tokens of the first prompt."""
        self.loop = asyncio.get_running_loop()
        self.requests = asyncio.Queue()
        idle = _idle(self.executor_class)
        try:
            self.executor, self.engine = idle.get_nowait()
        except queue.Empty:
            self.executor, self.engine = self.executor_class(), LLMEngine()
        self.engine.episode = self
        sampling = SamplingParams(self.policy.max_tokens, self.policy.temperature)
        execution = self.executor.execute(
            prompt=row["rendered_prompt"],
            label=row.get("answer"),
            sampling_params=sampling,
            max_length=self.policy.max_length,
            hf_tokenizer=self.policy.tokenizer,
            llm_engine=self.engine,
        )
        self.execution = asyncio.run_coroutine_threadsafe(execution, event_loop())
        self.execution.add_done_callback(lambda _: self._wake(None))
        self.request = await self.requests.get()
        if self.request is None:
            self.execution.result()  # raises what it raised
            raise UserError(
                "env.name = openrlhf: execute ended without a call of llm_engine.generate, so that "
                "there is nothing to train on"
            )
        self.tokens = self.request.tokens
        return self.tokens

    async def step(self, state: State) -> Result:
        """Give the executor an answer, and return the next prompt's new tokens, or its result."""
        assert self.request and self.requests and self.execution
        text = state.answer
        completion = Completion(
            token_ids=state.tokens,
            text=text,
            logprobs=[
                {token: Logprob(logprob)}
                for token, logprob in zip(state.tokens, state.logprobs, strict=True)
            ],
            finish_reason="stop" if state.stopped else "length",
        )
        self.request.reply.set_result(RequestOutput(self.request.tokens, [completion]))
        before = self.tokens + state.tokens
        self.request = await self.requests.get()
        if self.request is None:
            return self._finish(self.execution.result())
        tokens = self.request.tokens
        if tokens[: len(before)] != before or len(tokens) == len(before):
            raise UserError(
                "env.name = openrlhf: the prompt of a further llm_engine.generate does not "
                "continue the tokens of the one before with its completion and something new; "
                "append to them, as OpenRLHF's own executors do"
            )
        self.tokens = tokens
        limit = self.request.max_tokens
        sampling = {} if limit is None else {"max_tokens": int(limit)}
        return Result(observation=tokens[len(before) :], sampling=sampling)

    def _finish(self, returned: dict) -> Result:
        assert self.engine
        self.engine.episode = None
        _idle(self.executor_class).put((self.executor, self.engine))
        self.engine = None
        logs = dict(returned.get("extra_logs") or {})
        if returned.get("scores") is not None:
            logs["scores"] = returned["scores"]
        reward = returned.get("reward")
        self.graded = reward is None  # then the run's reward functions score the last answer
        return Result(
            reward=0.0 if reward is None else to_number(reward),
            done=True,
            truncated=bool(returned.get("truncated")),
            info={name: to_number(value) for name, value in logs.items()},
        )

    def ask(self, request: Request) -> None:
        """Let the policy answer a request, in its turn. Called in any thread."""
        self._wake(request)

    def _wake(self, request: Request | None) -> None:
        if self.loop and self.requests and not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.requests.put_nowait, request)

    async def close(self) -> None:
        """End an execution that goes on; its executor, which may be anywhere, is not used again."""
        if self.engine:
            self.engine.episode = None
        if self.request and not self.request.reply.done():
            self.request.reply.cancel()
        if self.execution:
            self.execution.cancel()
