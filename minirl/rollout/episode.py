"""An episode: what an environment and the policy say in turn, until one of them or a budget ends
it.
"""

import asyncio
import contextlib
import dataclasses
import functools
import inspect
import math
import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from minirl.config.shared import SamplingConfig
from minirl.data import chat
from minirl.data.images import BadImage, attach, plain, to_url
from minirl.envs.base import Agent, Env, Observation, Result, State
from minirl.errors import UserError
from minirl.rewards.functions import Rewards
from minirl.rollout.conversation import Conversation, Segment
from minirl.rollout.engine import Sampling
from minirl.rollout.engine_loop import EngineLoop, Request, in_thread
from minirl.types import Trajectory


class EnvFailed(Exception):
    """An environment raised, was too slow, or returned what it must not."""


@dataclass(kw_only=True)
class Episode:
    """Where it stands."""

    ticket: int
    number: int  # of the sample in its group
    row: dict
    env: Env | Agent
    conversation: Conversation
    segment: Segment | None = None  # the one that goes on
    messages: list[dict] = field(default_factory=list)
    sampling: Sampling
    request: Request | None = None  # the answer that is being sampled
    turn: int = 0  # answers so far
    answer: str = ""
    stopped: bool = False
    truncated: bool = False
    reward: float = 0.0
    error: str = ""
    info: dict[str, float] = field(default_factory=dict)
    outcome: Callable[[], list[Trajectory]] | None = (
        None  # of one that is played to its end; waits for the rewards
    )

    def saved(self) -> dict:
        """For pickle; waits for the rewards if it is played."""
        if self.outcome:
            return {"outcome": functools.partial(list, self.outcome())}
        return {name: value for name, value in vars(self).items() if name != "conversation"} | {
            "segments": self.conversation.segments
        }

    def restore(self, saved: dict) -> None:
        """What was `saved`, into an episode that has not begun."""
        self.conversation.segments = saved.pop("segments", [])
        vars(self).update(saved)


class EpisodeRunner:
    """What the episodes of a rank share."""

    def __init__(
        self,
        driver: EngineLoop,
        rewards: Rewards,
        cfg: SamplingConfig,
        seed: int,
        endpoint: Any = None,
    ):
        """`endpoint`: of server.py, for agents."""
        self.driver, self.rewards, self.cfg, self.system_prompt, self.seed, self.endpoint = (
            driver,
            rewards,
            cfg.env,
            cfg.data.system_prompt,
            seed,
            endpoint,
        )
        self.threads = asyncio.Semaphore(self.cfg.threads)
        self.failures: list[str] = []  # why episodes failed

    async def run(self, e: Episode) -> None:
        """To its end, from wherever it stands. Raises UserError."""
        try:
            try:
                if isinstance(e.env, Agent):
                    return await self._run_agent(e)
                if e.segment is None:
                    self._observe(e, await self._call(e.env.reset, e.row))
                    e.row = {**e.row, "rendered_prompt": e.segment.text}
                while await self._turn(e):
                    pass
            finally:
                await self._call(e.env.close)
        except (EnvFailed, BadImage) as failure:
            e.error = str(failure)
            self.failures.append(e.error)
            if self.cfg.on_error == "raise":
                raise UserError(
                    f"env.name = {self.cfg.name} failed: {failure}, in an episode of {str(e.row)[:200]}; mend it, or set env.on_error reward or drop"
                ) from failure
            self._apply_result(e, Result(reward=self.cfg.error_reward, truncated=e.truncated))

    def finish(self, e: Episode) -> list[Trajectory]:
        """Its trajectories, with what the reward functions say. Called in a thread. Raises
        UserError as they do.
        """
        info = {
            "prompt": plain(e.row["prompt"]),
            "completion": e.answer,
            "source": e.row.get("data_source"),
            "stopped": e.stopped and not e.truncated,
            "answer_tokens": e.conversation.num_sampled(),
            "error": e.error,
        }
        if self.cfg.name != "single_turn":
            info["completion"] = "\n".join(
                s.text for s in e.conversation.segments
            )  # all that was said, for what the row asks need not be in it
            info["env"] = {
                "turns": e.turn,
                "truncated": float(e.truncated),
                "failed": float(bool(e.error)),
                **e.info,
            }
        reward = e.reward + (
            self.rewards(e.row, e.answer, info) if e.env.graded and not e.error else 0.0
        )
        return (
            []
            if e.error and self.cfg.on_error == "drop"
            else e.conversation.trajectories(
                group=e.ticket, episode=e.number, reward=reward, info=info
            )
        )

    async def _turn(self, e: Episode) -> bool:
        """An answer, and what the environment says to it. False: it was the last, or there is no
        room for one.
        """
        if e.request is None:
            room = min(
                e.sampling.max_tokens,
                self.cfg.max_tokens - e.conversation.num_sampled(),
                self.driver.engine.cfg.max_model_len - len(e.segment.tokens),
            )
            if (
                room < 1
                or e.turn >= self.cfg.max_turns
                or e.conversation.vision
                and len(e.segment.images) > e.conversation.vision.max_images
            ):
                e.truncated = True
                return False
            e.request = Request(
                tokens=e.segment.tokens,
                images=e.segment.images,
                sampling=dataclasses.replace(e.sampling, max_tokens=room),
                seed=sample_seed(self.seed, e.ticket, e.number, e.turn),
                name=(e.ticket, e.number),
            )
        said = await self.driver.answer(e.request)
        e.request = None
        text = e.segment.append_completion(said, e.conversation.tokenizer)
        e.answer, e.stopped = (
            e.conversation.tokenizer.decode(said.tokens, skip_special_tokens=True),
            said.stopped,
        )
        if e.messages:
            e.messages = [*e.messages, {"role": "assistant", "content": text}]
        e.turn += 1
        if (
            e.conversation.vision and e.conversation.vision.token in said.tokens
        ):  # the engine would take it for an image's place
            e.truncated = True
            return False
        result = await self._call(
            e.env.step,
            State(
                row=e.row, answer=e.answer, stopped=e.stopped, turn=e.turn - 1, messages=e.messages
            ),
        )
        self._apply_result(e, result)
        if unknown := result.sampling.keys() - {"max_tokens", "stop_token_ids"}:
            raise EnvFailed(
                f"its result sets sampling {', '.join(sorted(unknown))}, and an environment may set max_tokens and stop_token_ids"
            )
        e.sampling = dataclasses.replace(e.sampling, **result.sampling)
        if result.done or result.truncated:
            return False
        self._observe(e, result.observation, result.messages, result.images)
        return True

    async def _run_agent(self, e: Episode) -> None:
        """An agent's episode."""
        session = self.endpoint.open((self.seed, e.ticket, e.number), e.sampling)
        try:
            self._apply_result(e, await self._call(e.env.run, e.row, session))
        finally:
            e.conversation = self.endpoint.close(session.api_key)
        e.turn, e.stopped = sum(s.num_completions for s in e.conversation.segments), True
        for segment in e.conversation.segments[-1:]:
            begin = max(
                (i for i, sampled in enumerate(segment.sampled, 1) if not sampled), default=0
            )
            e.answer = e.conversation.tokenizer.decode(
                segment.tokens[begin:], skip_special_tokens=True
            )

    async def _call(self, function: Callable, *arguments: object) -> Any:
        """Raises EnvFailed for whatever it raises but a UserError, and if it is too slow."""
        direct = inspect.iscoroutinefunction(function)
        async with contextlib.nullcontext() if direct else self.threads:
            try:
                async with asyncio.timeout(self.cfg.timeout_seconds):
                    return await (
                        function(*arguments) if direct else in_thread(function, *arguments)
                    )
            except UserError:
                raise
            except TimeoutError as error:
                raise EnvFailed(
                    f"{function.__qualname__} took longer than env.timeout_seconds = {self.cfg.timeout_seconds}"
                ) from error
            except (
                Exception
            ) as error:  # code of the user's may raise anything, and only its own episode shall end
                raise EnvFailed(
                    f"{function.__qualname__} raised {type(error).__name__}: {error}"
                ) from error

    def _apply_result(self, e: Episode, result: Result) -> None:
        if not isinstance(result, Result) or not all(
            isinstance(v, numbers.Real | np.bool_) and math.isfinite(v)
            for v in (result.reward, *result.info.values())
        ):
            raise EnvFailed(
                f"it returned {result!r}, not a Result with a finite reward and finite numbers in info"
            )
        e.reward += float(result.reward)
        if e.segment:
            e.segment.add_reward(float(result.reward))
        e.truncated, e.info = (
            result.truncated,
            e.info | {name: float(value) for name, value in result.info.items()},
        )

    def _observe(
        self,
        e: Episode,
        said: Observation | None,
        messages: list[dict] | None = None,
        shown: Sequence[object] = (),
    ) -> None:
        """What the environment says, or the whole chat anew."""
        before = e.messages if messages is None else []
        if (
            messages is None
            and isinstance(said, list)
            and said
            and isinstance(said[0], dict)
            or type(said) is str
        ):
            if e.segment and not e.messages:
                raise EnvFailed(
                    f"it began with tokens or a Raw text and goes on with the message {said!r}"
                )
            messages = chat.to_messages(said, "" if e.segment else self.system_prompt)
        if messages:
            e.messages = before + attach(messages, shown)
            e.segment = e.conversation.continue_with_messages(e.messages)
        elif said and isinstance(said, list | str):
            e.segment = e.conversation.append_raw(
                said, e.segment, [to_url(image) for image in shown]
            )
        else:
            raise EnvFailed(
                f"it is not done and said {said!r}; give an observation: a text, messages or tokens"
            )


def sample_seed(*numbers: int) -> int:
    """A seed of its own for every sample, the same whoever generates it."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint32)[0])
