"""OpenRLHF's own files, as they are: rewards and multi-turn agents.

    --reward.function openrlhf:reward_func.py      # def reward_func(queries, prompts, labels,
    **kwargs)
    --env.name openrlhf:agent_func.py              # class AgentInstance with async reset(states) and step(states)

openrlhf need not be installed: while a file is loaded, its import of the base classes in
`openrlhf.utils.agent` finds empty ones. What an `AgentExecutor` adds is not used (minirl plays the
episodes); a file whose agent is all in one has an `execute` that drives OpenRLHF's engine, and
becomes an `Agent` of rollout/env.py by hand.
"""

import inspect
import sys
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from types import ModuleType

import torch

from minirl.config.lookup import find_function
from minirl.envs.base import Env, Raw, Result, State
from minirl.errors import UserError

BASES = (
    "AgentInstanceBase",
    "AgentExecutorBase",
    "MultiTurnAgentExecutor",
    "SingleTurnAgentExecutor",
)


def load(setting: str, file: str, name: str) -> Callable:
    """What an OpenRLHF file calls `name`. Raises UserError."""
    stand_in = ModuleType("openrlhf.utils.agent")
    vars(stand_in).update({base: type(base, (), {}) for base in BASES})
    places = (
        ("openrlhf", "openrlhf.utils", "openrlhf.utils.agent")
        if find_spec("openrlhf") is None
        else ()
    )
    sys.modules.update(dict.fromkeys(places, stand_in))
    try:
        return find_function(setting, f"{file}:{name}", {})
    finally:
        for place in places:
            del sys.modules[place]


def number(value: object) -> float:
    """Of a number, or of a list or tensor that holds one."""
    return float(torch.as_tensor(value))


def reward(file: str) -> Callable[[str | list[dict], str, dict], float]:
    """The reward of `reward_func`, called for one answer at a time, with lists of one; it may
    return them, or a dict that has them as `rewards`. Its `scores` and `extra_logs` are not used:
    metrics are of the reward. Raises UserError.
    """
    function = load("reward.function", file, "reward_func")

    def score(prompt: str | list[dict], completion: str, row: dict) -> float:
        given = function(
            [row["rendered_prompt"] + completion], [row["rendered_prompt"]], [row.get("answer")]
        )
        return number(given["rewards"] if isinstance(given, dict) else given)

    return score


agent_class = cache(load)  # an episode makes an agent, not a module


class OpenRLHF(Env):
    """An `AgentInstance`. Its texts are raw: the first observation is the rendered prompt, and a
    feedback follows the answer's tokens, the one that ended it included, with whatever marks of a
    chat it writes itself. `scores` and `extra_logs` go to the metrics.
    """

    def __init__(self, file: str):
        self.agent_class = agent_class("env.name", file, "AgentInstance")

    async def reset(self, row: dict) -> Raw:
        self.agent = self.agent_class.__new__(self.agent_class)
        if inspect.isawaitable(
            begun := self.agent.__init__()
        ):  # older files have `async def __init__`, as their agents were remote actors
            await begun
        self.text = (
            await self.agent.reset(
                {"observation": row["rendered_prompt"], "label": row.get("answer")}
            )
        )["observation"]
        return Raw(self.text)

    async def step(self, state: State) -> Result:
        given = await self.agent.step(
            {
                "observation_text": self.text,
                "action_text": state.answer,
                "label": state.row.get("answer"),
                "sampling_params": None,
            }
        )
        if given.get("sampling_params") is not None or given.get("environment_images"):
            raise UserError(
                "env.name = openrlhf: step returned sampling_params or images; sampling is the policy's (rollout.temperature ...)"
            )
        self.text += state.answer + given["environment_feedback"]
        logs = {
            **given.get("extra_logs", {}),
            **({"scores": given["scores"]} if "scores" in given else {}),
        }
        return Result(
            observation=Raw(given["environment_feedback"]),
            reward=number(given["rewards"]),
            done=bool(given["done"]),
            info={name: number(value) for name, value in logs.items()},
        )
