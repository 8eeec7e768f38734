"""OpenRLHF's files, as they are: rewards, agents of several turns, and executors.

    # def reward_func(queries, prompts, labels, **kwargs)
    --reward.function openrlhf:reward_func.py
    # class AgentInstance with async reset(states) and step(states)
    --env.name openrlhf:agent_func.py
    # class AgentExecutor(AgentExecutorBase) with async execute(prompt, label, sampling_params,
    # max_length, hf_tokenizer, llm_engine)
    --env.name openrlhf:executor.py --env.max-turns 8

openrlhf need not be installed: while a file is loaded, its imports find stand-ins with what such
files use: empty base classes, and answers of mathematics graded by math-verify. What an
`AgentExecutor` without an `execute` of its own adds to an `AgentInstance` is not used, because
minirl runs the episodes.

`execute` runs in an event loop of its own. Each `await llm_engine.generate(token_ids,
sampling_params)` is a turn of the episode. minirl has sampled its tokens and log-probs and keeps
them: what `execute` returns of them has no effect, only `reward`, `scores`, `extra_logs` and
`truncated`.
An executor runs one episode at a time and then another, so that what it keeps (a server, a client)
is made once for each episode that runs at the same time. `generate` may be called from any thread.
"""

import asyncio
import contextlib
import inspect
import logging
import queue
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import torch

from minirl.base.errors import UserError
from minirl.config.lookup import find_function
from minirl.envs import Env, Raw, Result, State
from minirl.rewards import AdaptedReward, Answer, graders
from minirl.rewards.adapters import event_loop


def to_number(value: object) -> float:
    """Return a number, or the number that a list or tensor holds."""
    return float(torch.as_tensor(value))


def extract_boxed_answer(solution: str) -> str | None:
    r"""Return what is inside the last \boxed{...} or \fbox{...} of a text; None: there is none."""
    start = max(solution.rfind("\\boxed{"), solution.rfind("\\fbox{"))
    if start < 0:
        return None
    first = solution.index("{", start) + 1
    depth = 1
    for end in range(first, len(solution)):
        depth += {"{": 1, "}": -1}.get(solution[end], 0)
        if depth == 0:
            return solution[first:end]
    return None  # it is never closed


def grade_answer(given_answer: str | None, ground_truth: str | None) -> bool:
    """Return whether math-verify finds two expressions equal, in a process with limits."""
    if given_answer is None or ground_truth is None:
        return False
    if given_answer.strip() == ground_truth.strip():
        return True
    pool = graders.pool("math_verify")
    return pool.grade(f"${ground_truth}$", f"$\\boxed{{{given_answer}}}$") == 1.0


MATH = {"extract_boxed_answer": extract_boxed_answer, "grade_answer": grade_answer}
CONTENTS: dict[str, dict[str, Any]] = {
    "openrlhf": {},
    "openrlhf.utils": MATH,
    "openrlhf.utils.math_utils": MATH,
    "openrlhf.utils.logging_utils": {"init_logger": logging.getLogger},
    "openrlhf.utils.agent": MATH
    | {
        name: type(name, (), {})
        for name in (
            "AgentInstanceBase",
            "AgentExecutorBase",
            "MultiTurnAgentExecutor",
            "SingleTurnAgentExecutor",
        )
    },
}


@contextlib.contextmanager
def stand_ins() -> Iterator[None]:
    """Let imports of OpenRLHF's modules find stand-ins inside the block, if it is not installed."""
    if "openrlhf" in sys.modules or find_spec("openrlhf"):
        yield
        return
    for name, contents in CONTENTS.items():
        module = ModuleType(name)
        vars(module).update(contents)
        # An import of something else shows it in its error.
        module.__file__ = "minirl's stand-in; install openrlhf, or do without it in this file"
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            vars(sys.modules[parent])[child] = module
    try:
        yield
    finally:
        for name in CONTENTS:
            del sys.modules[name]


# --------------------------------------------------------------------------------------------------
# rewards


def load_from_file(setting: str, file: str, name: str) -> Callable:
    """Return what an OpenRLHF file calls `name`.

    Raises:
        UserError: if the file does not import or has nothing of that name.
    """
    with stand_ins():
        return find_function(setting, f"{file}:{name}", {})


load_class = cache(load_from_file)  # an episode makes an agent, not a module


def reward(file: str) -> AdaptedReward:
    """Return the reward function of a file with `reward_func`.

    Raises:
        UserError: if the file does not import or has no such function.
    """
    return OpenRLHFReward(load_from_file("reward.function", file, "reward_func"))


class OpenRLHFReward(AdaptedReward):
    """A `reward_func`, called for one answer at a time, with lists of one.

    It may return such a list, or a dict that has it as `rewards`. Of a dict the numbers in
    `extra_logs` go to the metrics; `scores` are not used, because metrics are of the reward.
    """

    def __init__(self, function: Callable):
        self.function = function

    def score(self, answer: Answer) -> float:
        """Return the reward."""
        prompt = answer.row["rendered_prompt"]
        label = answer.row.get("answer")
        result = self.function([prompt + answer.completion], [prompt], [label])
        if not isinstance(result, dict):
            return to_number(result)
        for name, value in result.get("extra_logs", {}).items():
            answer.call.log_metric(name, to_number(value))
        return to_number(result["rewards"])


# --------------------------------------------------------------------------------------------------
# agents


def agent(file: str) -> Env:
    """Return the environment of a file, by what it has: an executor, or an `AgentInstance`.

    Raises:
        UserError: if the file does not import or has neither.
    """
    with contextlib.suppress(UserError):  # a file with an AgentInstance alone will do
        executor = load_class("env.name", file, "AgentExecutor")
        if hasattr(executor, "execute"):
            return OpenRLHFExecutor(executor)
    return OpenRLHF(file)


class OpenRLHF(Env):
    """An `AgentInstance`. Its texts go to the policy as they are.

    The first observation is the rendered prompt. A feedback follows the answer's tokens, the one
    that ended it included, with any marks of a chat that it writes itself. `scores` and
    `extra_logs` go to the metrics.
    """

    needs_prompt = True

    def __init__(self, file: str):
        self.agent_class = cast(Any, load_class("env.name", file, "AgentInstance"))
        # `reset` calls its constructor.
        self.agent: Any = self.agent_class.__new__(self.agent_class)
        self.text = ""  # all that was shown and answered so far

    async def reset(self, row: dict) -> Raw:
        """Construct the agent and return its first observation."""
        # Older files have `async def __init__`, because their agents were remote actors.
        made = self.agent.__init__()
        if inspect.isawaitable(made):
            await made
        states = {"observation": row["rendered_prompt"], "label": row.get("answer")}
        self.text = (await self.agent.reset(states))["observation"]
        return Raw(self.text)

    async def step(self, state: State) -> Result:
        """Pass an answer to the agent and return its feedback."""
        reply = await self.agent.step(
            {
                "observation_text": self.text,
                "action_text": state.answer,
                "label": state.row.get("answer"),
                "sampling_params": None,
            }
        )
        if reply.get("sampling_params") is not None or reply.get("environment_images"):
            raise UserError(
                "env.name = openrlhf: step returned sampling_params or images, which have no "
                "effect here; sampling belongs to the run (rollout.temperature ...)"
            )
        feedback = reply["environment_feedback"]
        self.text += state.answer + feedback
        logs = reply.get("extra_logs", {})
        if "scores" in reply:
            logs = {**logs, "scores": reply["scores"]}
        return Result(
            observation=Raw(feedback),
            reward=to_number(reply["rewards"]),
            done=bool(reply["done"]),
            info={name: to_number(value) for name, value in logs.items()},
        )


# --------------------------------------------------------------------------------------------------
# executors

Executor = Any  # An object of the user's class.


@dataclass(frozen=True)
class GenerateCall:
    """A call of `generate` that waits for its turn."""

    tokens: list[int]
    max_tokens: int | None
    reply: "Future[SimpleNamespace]"


class LLMEngine:
    """The engine that an executor gets; its episodes follow one another."""

    def __init__(self) -> None:
        self.episode: OpenRLHFExecutor | None = None

    async def generate(
        self, prompt_token_ids: list[int], sampling_params: Any, **options: object
    ) -> SimpleNamespace:
        """Return one completion by vLLM's names, sampled as the run says but for `max_tokens`."""
        if self.episode is None or options.get("multi_modal_data"):
            raise UserError(
                "env.name = openrlhf: llm_engine.generate was called after its episode had ended, "
                "or with images; give it the tokens of an episode under way"
            )
        request = GenerateCall(list(prompt_token_ids), sampling_params.max_tokens, Future())
        self.episode.wake(request)
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
        self.requests: asyncio.Queue[GenerateCall | None] | None = None  # None: it has ended.
        self.request: GenerateCall | None = None  # The one that the policy answers now.
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
        # What it may read of how the policy is sampled, by vLLM's names.
        sampling = SimpleNamespace(
            max_tokens=self.policy.max_tokens,
            temperature=self.policy.temperature,
            top_p=1.0,
            top_k=-1,
            min_p=0.0,
            n=1,
            logprobs=1,
        )
        execution = self.executor.execute(
            prompt=row["rendered_prompt"],
            label=row.get("answer"),
            sampling_params=sampling,
            max_length=self.policy.max_length,
            hf_tokenizer=self.policy.tokenizer,
            llm_engine=self.engine,
        )
        self.execution = asyncio.run_coroutine_threadsafe(execution, event_loop())
        self.execution.add_done_callback(lambda _: self.wake(None))
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
        assert self.request and self.requests and self.execution and self.engine
        logprobs = zip(state.tokens, state.logprobs, strict=True)
        completion = SimpleNamespace(
            token_ids=state.tokens,
            text=state.answer,
            logprobs=[{token: SimpleNamespace(logprob=value)} for token, value in logprobs],
            finish_reason="stop" if state.stopped else "length",
            index=0,
        )
        prompt = self.request.tokens
        output = SimpleNamespace(prompt_token_ids=prompt, outputs=[completion], finished=True)
        self.request.reply.set_result(output)
        before = self.tokens + state.tokens
        self.request = await self.requests.get()
        if self.request is None:
            returned = self.execution.result()
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

    def wake(self, request: GenerateCall | None) -> None:
        """Let the policy answer a request, in its turn; None: it has ended. In any thread."""
        if self.loop and self.requests and not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.requests.put_nowait, request)

    async def close(self) -> None:
        """End an execution that still runs. Its executor, in any state, is not used again."""
        if self.engine:
            self.engine.episode = None
        if self.request and not self.request.reply.done():
            self.request.reply.cancel()
        if self.execution:
            self.execution.cancel()
