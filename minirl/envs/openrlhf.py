"""OpenRLHF's own files, as they are: rewards and multi-turn agents.

    # def reward_func(queries, prompts, labels, **kwargs)
    --reward.function openrlhf:reward_func.py
    # class AgentInstance with async reset(states) and step(states)
    --env.name openrlhf:agent_func.py

openrlhf need not be installed: while a file is loaded, its import of the base classes in
`openrlhf.utils.agent` finds empty ones. What an `AgentExecutor` adds is not used, because minirl
runs the episodes. A file whose agent is all in one has an `execute` that drives OpenRLHF's engine;
turn it into an `Agent` of envs/base.py by hand.
"""

import inspect
import sys
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import Any, cast

import torch

from minirl.config.lookup import find_function
from minirl.envs.base import Env, Raw, Result, State
from minirl.errors import UserError
from minirl.rewards import RewardFunction, RowPrompt

BASES = (
    "AgentInstanceBase",
    "AgentExecutorBase",
    "MultiTurnAgentExecutor",
    "SingleTurnAgentExecutor",
)
MODULES = ("openrlhf", "openrlhf.utils", "openrlhf.utils.agent")


def load_from_file(setting: str, file: str, name: str) -> Callable:
    """Return what an OpenRLHF file calls `name`.

    Raises:
        UserError: if the file does not import or has nothing of that name.
    """
    stand_in = ModuleType("openrlhf.utils.agent")
    vars(stand_in).update({base: type(base, (), {}) for base in BASES})
    missing = () if find_spec("openrlhf") else MODULES
    sys.modules.update(dict.fromkeys(missing, stand_in))
    try:
        return find_function(setting, f"{file}:{name}", {})
    finally:
        for module in missing:
            del sys.modules[module]


load_class = cache(load_from_file)  # an episode makes an agent, not a module


def to_number(value: object) -> float:
    """Return a number, or the number that a list or tensor holds."""
    return float(torch.as_tensor(value))


def reward(file: str) -> RewardFunction:
    """Return the reward function of a file with `reward_func`.

    It is called for one answer at a time, with lists of one. It may return such a list, or a dict
    that has it as `rewards`; its `scores` and `extra_logs` are not used, because metrics are of the
    reward.

    Raises:
        UserError: if the file does not import or has no such function.
    """
    function = load_from_file("reward.function", file, "reward_func")

    def score(prompt: RowPrompt, completion: str, row: dict) -> float:
        rendered = row["rendered_prompt"]
        result = function([rendered + completion], [rendered], [row.get("answer")])
        return to_number(result["rewards"] if isinstance(result, dict) else result)

    return score


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
