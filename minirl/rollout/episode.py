"""An episode: the environment and the policy take turns until one of them or a budget ends it."""

import asyncio
import contextlib
import copy
import dataclasses
import inspect
import json
import math
import numbers
import reprlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from minirl.base.errors import UserError
from minirl.config.lookup import line_of
from minirl.config.rl import RLConfig
from minirl.config.shared import EvaluateConfig
from minirl.data.chat import is_text, parts_of, plain, to_messages, why_no_messages
from minirl.data.images import BadImage, attach, to_url
from minirl.engine.engine import Sampling
from minirl.engine.loop import EngineLoop, Request
from minirl.envs import Agent, Env, EnvMaker, Raw, Result, State
from minirl.envs.registry import in_thread
from minirl.rewards import Answer, RewardCall
from minirl.rewards.scoring import Rewards
from minirl.rollout.conversation import Conversation, Segment, read_answer, to_message
from minirl.rollout.records import joined
from minirl.types.packed import UNSET, Trajectory

MOST_CHARACTERS = 500  # Of a column of a row that a dump shows.
# Of a long list, such as one of tests, only the first items become a text.
BEGINNING = reprlib.Repr()
BEGINNING.maxdict = BEGINNING.maxlist = BEGINNING.maxtuple = BEGINNING.maxstring = MOST_CHARACTERS
CANCEL_SECONDS = 1.0  # The least time that an environment gets to end when it is cancelled.


class EnvFailed(Exception):
    """An environment raised, was too slow, or returned something that is not allowed."""


@dataclass(kw_only=True)
class Episode:
    """An episode and where it stands."""

    ticket: int
    number: int  # Number of the sample in its group.
    row: dict
    env: Env = UNSET  # Made when the episode begins.
    conversation: Conversation
    segment: Segment = UNSET  # The current segment, once there is one.
    messages: list[dict] = field(default_factory=list)
    num_prompt_messages: int = 0  # Number of `messages` before the first completion.
    # What was said since the prompt, the last completion last; empty if the episode is no chat.
    said: list[dict] = field(default_factory=list)
    sampling: Sampling
    request: Request | None = None  # For the completion that is being sampled.
    turn: int = 0  # Number of completions so far.
    answer: str = ""  # The last completion as a text, without special tokens.
    last: Segment = field(default_factory=Segment)  # The one with the last completion.
    truncated: bool = False
    rewards: list[float] = field(default_factory=list)  # What the environment gave.
    error: str = ""
    is_dropped: bool = False  # It has failed, and is left out of its group (env.on_error drop).
    info: dict[str, float] = field(default_factory=dict)
    endpoint: dict[str, float] = field(default_factory=dict)  # What the endpoint says of an agent.
    refusal: str = ""  # Why the endpoint refused an agent's last request, if it did.

    def num_sampled(self) -> int:
        """Return the number of tokens sampled so far; 0 if the episode was dropped."""
        if self.is_dropped:
            return 0
        unfinished = len(self.request.done.tokens) if self.request else 0
        return self.conversation.num_sampled() + unfinished


class EpisodeRunner:
    """Runs the episodes of a rank.

    Attributes:
        threads: bounds the threads that call environments that are not asynchronous.
        pool: threads that score episodes that have ended.
        troubles: of each episode that failed, or that the endpoint refused a request, why.
    """

    def __init__(
        self,
        engine_loop: EngineLoop,
        rewards: Rewards,
        cfg: RLConfig | EvaluateConfig,
        make_env: EnvMaker,
        endpoint: Any = None,
    ):
        """Make the runner.

        Args:
            engine_loop: samples completions.
            rewards: score episodes that have ended.
            cfg: the program's config. Seed, ticket, number and turn give the seed of each sample.
            make_env: makes the environment of an episode.
            endpoint: the endpoint (minirl/endpoint) that agents ask.
        """
        self.engine_loop = engine_loop
        self.rewards = rewards
        self.cfg = cfg.env
        self.system_prompt = cfg.data.system_prompt
        self.seed = cfg.seed
        self.endpoint = endpoint

        async def make_here() -> Env:
            return make_env()

        example = make_env.example
        self.makes_agents = isinstance(example, Agent)
        first_call = example.run if isinstance(example, Agent) else example.reset
        # What is asynchronous may belong to the thread that made it. Else to make it may block.
        is_async = inspect.iscoroutinefunction(first_call)
        self.make_env: Callable = make_here if is_async else make_env
        self.threads = asyncio.Semaphore(self.cfg.threads)
        self.pool = ThreadPoolExecutor(cfg.reward.threads, thread_name_prefix="reward")
        self.troubles: list[str] = []

    def with_own_threads(self) -> "EpisodeRunner":
        """Return the same runner with as many threads more, and its own troubles: an evaluation's.

        All threads of this one may be those of agents that wait until training continues.
        """
        other = copy.copy(self)
        other.threads = asyncio.Semaphore(self.cfg.threads)
        other.troubles = []
        return other

    async def run(self, e: Episode) -> None:
        """Run an episode to its end.

        Raises:
            UserError: the environment failed, and env.on_error is raise.
        """
        try:
            e.env = await self._call(self.make_env, name="its constructor")
            try:
                if isinstance(e.env, Agent):
                    await self._run_agent(e, e.env)
                else:
                    await self._run_turns(e)
            finally:
                await self._call(e.env.close)
        except (EnvFailed, BadImage) as failure:
            e.error = str(failure)
            if e.refusal:
                e.error += f"; the endpoint refused its last request: {e.refusal}"
            e.is_dropped = self.cfg.on_error == "drop"
            if self.cfg.on_error == "raise":
                raise UserError(
                    f"env.name = {self.cfg.name} failed: {e.error}, in an episode of "
                    f"{str(e.row)[:200]}; fix it, or set env.on_error reward or drop"
                ) from failure
            self._apply_result(e, Result(reward=self.cfg.error_reward, truncated=e.truncated))
        if e.error or e.refusal:
            self.troubles.append(e.error or f"the endpoint refused a request: {e.refusal}")

    def score(self, e: Episode) -> Answer | None:
        """Score the last answer of an episode by functions that do not compare its group.

        Called in a thread.

        Returns:
            The answer; None: nothing scores it.

        Raises:
            UserError: a reward function failed.
        """
        if e.is_dropped or e.error or not e.env.graded:
            return None
        call = RewardCall(tokens=e.last.answer_tokens, messages=e.said)
        row = {**e.row, "rendered_prompt": e.last.prompt} if e.last.prompt else e.row
        answer = Answer(row=row, completion=e.answer, call=call)
        self.rewards.score_alone(answer)
        return answer

    def finish(
        self, episodes: Sequence[Episode], answers: Sequence[Answer | None]
    ) -> list[Trajectory]:
        """Let functions compare the answers of a group. Called in a thread.

        Args:
            episodes: the episodes of a group, which have ended.
            answers: what `score` returned for each of them.

        Returns:
            Their trajectories, episode by episode.

        Raises:
            UserError: a reward function failed.
        """
        scored = [answer for answer in answers if answer]
        if scored:
            self.rewards.score_together(scored)
        trajectories = []
        for e, answer in zip(episodes, answers, strict=True):
            if e.is_dropped:
                continue
            columns = {}
            for name, value in e.row.items():
                if name not in ("prompt", "rendered_prompt") and value is not None:
                    is_nested = isinstance(value, list | tuple | dict)
                    text = BEGINNING.repr(value) if is_nested else str(value)
                    columns[str(name)] = text[:MOST_CHARACTERS]
            info = {
                "prompt": plain(e.row["prompt"]),
                "row": columns,
                "completion": e.answer,
                "source": e.row.get("data_source"),
                "stopped": e.last.stopped and not e.truncated,
                "answer_tokens": e.conversation.num_sampled() + e.conversation.num_guided(),
                "error": e.error,
                "refusal": e.refusal,
            }
            if self.cfg.name != "single_turn":
                # The whole text, because the answer to the row need not be in the last completion.
                info["completion"] = joined([s.text for s in e.conversation.segments])
                info["last_turn"] = e.answer  # Reward functions get this text.
                info["env"] = {
                    **e.info,
                    "turns": e.turn,
                    "truncated": float(e.truncated),
                    "failed": float(bool(e.error)),
                }
            if e.endpoint:
                info["endpoint"] = e.endpoint
            # Added exactly: ten times 0.1 make 1, which may be `eval.threshold`.
            reward = math.fsum(e.rewards)
            if answer:
                reward += self.rewards.total(answer, info)
            trajectories += e.conversation.trajectories(
                group=e.ticket,
                episode=e.number,
                reward=reward,
                info=info,
                version=self.engine_loop.version,
            )
        return trajectories

    # ----------------------------------------------------------------------------------------------
    # a turn

    async def _run_turns(self, e: Episode) -> None:
        """Let environment and policy take turns until one of them or a budget ends the episode."""
        first = await self._call(e.env.reset, e.row)
        self._observe(e, Result(observation=first))
        e.row = {**e.row, "rendered_prompt": e.segment.text}
        tokenizer = e.conversation.tokenizer
        vision = e.conversation.vision
        while request := self._next_request(e):
            # 1. The policy's answer.
            e.request = request
            completion = await self.engine_loop.generate_for_episode(request)
            e.request = None
            text = e.segment.append_completion(completion, tokenizer)
            e.last = e.segment
            e.answer = read_answer(tokenizer, completion.tokens)
            if e.messages:
                message = to_message(tokenizer, text)
                e.said = [*e.messages[e.num_prompt_messages :], {**message, "content": e.answer}]
                e.messages = [*e.messages, message]
            e.turn += 1
            if vision and not set(vision.stop_ids).isdisjoint(completion.tokens):
                break  # The engine would read such a token as the place of an image.

            # 2. The environment's reply.
            state = State(
                row=e.row,
                answer=e.answer,
                stopped=completion.stopped,
                turn=e.turn - 1,
                messages=copy.deepcopy(e.messages),  # the environment may change them
                tokens=completion.tokens,
                logprobs=completion.logprobs,
            )
            result = await self._call(e.env.step, state)
            self._apply_result(e, result)
            if result.sampling:
                _check_sampling(result.sampling, tokenizer)
                e.sampling = dataclasses.replace(e.sampling, **result.sampling)
            if result.done or result.truncated:
                return
            self._observe(e, result)
        e.truncated = True

    def _next_request(self, e: Episode) -> Request | None:
        """Return the request for the next completion; None if a budget leaves no room for one."""
        room = min(
            e.sampling.max_tokens,
            (e.sampling.episode_tokens or self.cfg.max_tokens) - e.conversation.num_sampled(),
            e.sampling.context(self.engine_loop.engine.cfg.max_model_len) - len(e.segment.tokens),
        )
        if room < 1 or e.turn >= self.cfg.max_turns:
            return None
        vision = e.conversation.vision
        if vision and len(e.segment.images) > vision.max_images:
            return None
        if vision:  # An image that the engine cannot take ends this episode alone.
            vision.unexpanded(e.segment.tokens, e.segment.images)
        return Request(
            tokens=e.segment.tokens,
            images=e.segment.images,
            sampling=dataclasses.replace(e.sampling, max_tokens=room),
            seed=sample_seed(self.seed, e.ticket, e.number, e.turn),
            name=(e.ticket, e.number),
        )

    def _apply_result(self, e: Episode, result: Result) -> None:
        """Add the environment's reward and numbers for the last completion."""
        if not isinstance(result, Result):
            raise EnvFailed(f"it returned {result!r}, not a Result")
        for name, value in [("reward", result.reward), *result.info.items()]:
            if not (isinstance(value, numbers.Real | np.bool_) and math.isfinite(value)):
                raise EnvFailed(
                    f"it returned {name} = {value!r}, not a Result with a finite reward and finite "
                    "numbers in info"
                )
        e.rewards.append(float(result.reward))
        if e.segment:
            e.segment.add_reward(float(result.reward))
        e.truncated = result.truncated
        e.info = e.info | {name: float(value) for name, value in result.info.items()}

    def _observe(self, e: Episode, result: Result) -> None:
        """Append the environment's observation to the current segment, or to a new one."""
        observation: Any = result.observation  # Anything: the environment is the user's code.
        is_chat = isinstance(observation, list) and observation and isinstance(observation[0], dict)
        messages = result.messages  # The whole chat. If there are some, they replace `observation`.
        history = e.messages if messages is None else []
        is_said = is_chat or (isinstance(observation, str) and not isinstance(observation, Raw))
        if messages is None and is_said:
            if e.segment and not e.messages:
                raise EnvFailed(
                    "it began with tokens or a Raw text and continues with the message "
                    f"{observation!r}"
                )
            if is_chat:
                _check_messages(observation)
            # Sliced, an Enum's member or NumPy's text is a plain one.
            messages = to_messages(observation[:], "" if e.segment else self.system_prompt)
        if messages is not None:
            _check_messages(messages)
            if result.images or any(map(parts_of, messages)):
                messages = attach(messages, result.images, last=result.messages is not None)
            e.messages = history + messages
            if not e.turn:
                e.num_prompt_messages = len(e.messages)
            e.segment = e.conversation.continue_with_messages(e.messages)
            return
        said = f"it said {str(observation)[:200]!r}"
        if not (isinstance(observation, list | str) and observation):
            raise EnvFailed(
                f"it is not done and said {observation!r}; give an observation: a text, messages "
                "or tokens"
            )
        if isinstance(observation, list):
            _check_tokens(said, observation, e.conversation.tokenizer)
        elif not is_text(observation):
            raise EnvFailed(f"{said}, with half of a surrogate pair")
        urls = [to_url(image) for image in result.images]
        e.segment = e.conversation.append_raw(observation, e.segment, urls)

    # ----------------------------------------------------------------------------------------------
    # calls of the user's code

    async def _run_agent(self, e: Episode, agent: Agent) -> None:
        """Run an agent, which asks for its completions over HTTP."""
        session = self.endpoint.open((self.seed, e.ticket, e.number), e.sampling, e.row)
        state = self.endpoint.session(session.api_key)
        e.conversation = state.conversation
        try:
            self._apply_result(e, await self._call(agent.run, e.row, session))
        finally:
            self.endpoint.close(session.api_key)
            e.endpoint = state.metrics()
            if state.refusals:
                e.refusal = state.refusals[-1]
            segments = e.conversation.segments
            e.turn = sum(segment.num_completions for segment in segments)
            e.last = segments[-1] if segments else Segment(stopped=True)
            e.said = e.last.messages
            e.answer = e.last.answer

    async def _call(self, function: Callable, *arguments: object, name: str = "") -> Any:
        """Call a function of the environment, in a thread unless it is asynchronous.

        A call that does not end when it is cancelled ends the run.

        Args:
            function: a method of the environment, or what makes it.
            arguments: its arguments.
            name: for errors; "": the function's name.

        Raises:
            UserError: as the function does.
            EnvFailed: it raised anything else, or was too slow.
        """
        name = name or function.__qualname__
        seconds = self.cfg.timeout_seconds
        too_slow = (
            f"env.name = {self.cfg.name}: {name} still runs after env.timeout_seconds = "
            f"{seconds:g}, though it was cancelled; let asyncio.CancelledError pass"
        )
        is_async = inspect.iscoroutinefunction(function)
        slot: Any = contextlib.nullcontext() if is_async else self.threads
        timeout = asyncio.timeout(seconds)
        try:
            async with slot:
                longest = 2 * seconds + CANCEL_SECONDS
                async with self.engine_loop.watch.limit_call(timeout, longest, lambda: too_slow):
                    if is_async:
                        return await function(*arguments)
                    return await in_thread(function, *arguments)
        except UserError:
            raise
        # The user's code may raise anything, and then only this episode ends.
        except (Exception, SystemExit, KeyboardInterrupt, asyncio.CancelledError) as error:
            task = asyncio.current_task()
            if task and task.cancelling():  # by the loop, which is being closed
                raise
            if timeout.expired():
                problem = f"took longer than env.timeout_seconds = {seconds}"
            else:
                problem = f"raised {type(error).__name__}: {error}{line_of(error)}"
            raise EnvFailed(f"{name} {problem}") from error


def _check_messages(value: Any) -> None:
    """Raise EnvFailed if a value is no list of messages, or has half of a surrogate pair."""
    problem = why_no_messages(value)
    if not problem and not is_text(
        json.dumps(plain(value), ensure_ascii=False, default=str, skipkeys=True)
    ):
        problem = "a text has half of a surrogate pair"
    if problem:
        raise EnvFailed(
            f"it gave the messages {str(value)[:200]}: {problem}; give a list of messages with "
            "role and content"
        )


def _check_sampling(changed: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise EnvFailed if an environment sets sampling that it may not, or that makes no sense."""
    for name, value in changed.items():
        is_number = name == "max_tokens" and type(value) is int and value > 0
        is_list = name == "stop_token_ids" and isinstance(value, list | tuple)
        what = f"its result sets sampling {name} = {value!r:.200}"
        if not (is_number or is_list):
            raise EnvFailed(
                f"{what}; an environment may set max_tokens, a whole number above 0, and "
                "stop_token_ids, a list of tokens"
            )
        if is_list:
            _check_tokens(what, value, tokenizer)


def _check_tokens(what: str, values: list | tuple, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise EnvFailed, with a message that begins with `what`, if values are not token ids."""
    for value in values:
        is_number = isinstance(value, numbers.Integral) and not isinstance(value, bool)
        if not is_number or not 0 <= value < len(tokenizer):
            raise EnvFailed(
                f"{what}: {value!r} is no token; tokens are numbers from 0 to {len(tokenizer) - 1}"
            )


def sample_seed(*numbers: int) -> int:
    """Return a seed for each sample, which does not depend on the rank that generates it."""
    return np.random.SeedSequence(numbers).generate_state(1).item()
