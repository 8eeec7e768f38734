"""OpenRLHF's own files, as they are: rewards and multi-turn agents.

    # def reward_func(queries, prompts, labels, **kwargs)
    --reward.function openrlhf:reward_func.py
    # class AgentInstance with async reset(states) and step(states)
    --env.name openrlhf:agent_func.py
    # class AgentExecutor with an execute of its own (openrlhf_executor.py)
    --env.name openrlhf:executor.py

openrlhf need not be installed: while a file is loaded, its imports find what openrlhf_modules.py
has: empty base classes, and answers of mathematics graded by math-verify. What an
`AgentExecutor` without an `execute` of its own adds to an `AgentInstance` is not used, because
minirl runs the episodes.
"""

import contextlib
import inspect
from collections.abc import Callable
from functools import cache
from typing import Any, cast

from minirl.base.errors import UserError
from minirl.config.lookup import find_function
from minirl.envs.base import Env, Raw, Result, State
from minirl.envs.openrlhf_executor import OpenRLHFExecutor
from minirl.envs.openrlhf_modules import stand_ins, to_number
from minirl.rewards import AdaptedReward, RewardCall, RowPrompt


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

    def score(self, prompt: RowPrompt, completion: str, row: dict, call: RewardCall) -> float:
        """Return the reward."""
        rendered = row["rendered_prompt"]
        result = self.function([rendered + completion], [rendered], [row.get("answer")])
        if not isinstance(result, dict):
            return to_number(result)
        for name, value in result.get("extra_logs", {}).items():
            call.log_metric(name, to_number(value))
        return to_number(result["rewards"])


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
    """An `AgentInstance`, whose texts are raw.

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
