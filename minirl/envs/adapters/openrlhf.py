"""OpenRLHF's files, as they are: rewards, and agents of several turns.

    # def reward_func(queries, prompts, labels, **kwargs)
    --reward.function openrlhf:reward_func.py
    # class AgentInstance with async reset(states) and step(states)
    --env.name openrlhf:agent_func.py

openrlhf need not be installed: while a file is loaded, its imports find stand-ins with what such
files use: empty base classes, and answers of mathematics graded by math-verify. What an
`AgentExecutor` adds to an `AgentInstance` is not used, because minirl runs the episodes. Answers
have no special tokens, which OpenRLHF leaves in them.
"""

import contextlib
import inspect
import logging
import sys
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch

from minirl.base.errors import UserError, require
from minirl.config.lookup import find_function
from minirl.envs import Env, Raw, Result, State
from minirl.rewards import AdaptedReward, Answer, graders


def to_number(value: object) -> float:
    """Return a number, or the number that a list or tensor holds."""
    if not isinstance(value, torch.Tensor):
        value = torch.as_tensor(value, dtype=torch.float64)
    return value.item()


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


def load_from_file(setting: str, file: str, name: str) -> Callable:
    """Return what an OpenRLHF file calls `name`.

    Its imports of OpenRLHF's modules find stand-ins if that is not installed.

    Raises:
        UserError: if the file does not import or has nothing of that name.
    """
    place = f"{file.removesuffix(':' + name)}:{name}"
    if "openrlhf" in sys.modules or find_spec("openrlhf"):
        return find_function(setting, place, {})
    for module_name, contents in CONTENTS.items():
        module = ModuleType(module_name)
        vars(module).update(contents)
        # An import of something else shows it in its error.
        module.__file__ = "minirl's stand-in; install openrlhf, or do without it in this file"
        sys.modules[module_name] = module
        parent, _, child = module_name.rpartition(".")
        if parent:
            vars(sys.modules[parent])[child] = module
    try:
        return find_function(setting, place, {})
    finally:
        for module_name in CONTENTS:
            del sys.modules[module_name]


# --------------------------------------------------------------------------------------------------
# rewards


class OpenRLHFReward(AdaptedReward):
    """A `reward_func`, called for one answer at a time, with lists of one.

    It may return such a list, or a dict that has it as `rewards`. Of a dict the numbers in
    `extra_logs` go to the metrics; `scores` are not used, because metrics are of the reward.

    Raises:
        UserError: if the file does not import or has no such function.
    """

    def __init__(self, file: str):
        self.function = load_from_file("reward.function", file, "reward_func")

    def score(self, answer: Answer) -> float:
        """Return the reward."""
        prompt = answer.row["rendered_prompt"]
        label = answer.row.get("answer")
        result = self.function([prompt + answer.completion], [prompt], [label])
        if not isinstance(result, dict):
            return to_number(result)
        for name, value in (result.get("extra_logs") or {}).items():
            answer.call.log_metric(name, to_number(value))
        return to_number(result["rewards"])


# --------------------------------------------------------------------------------------------------
# agents


@cache  # An episode makes an agent, not a module.
def load_agent(file: str) -> Any:
    """Return the `AgentInstance` of a file.

    Raises:
        UserError: if the file does not import or has none, or an executor that leads its episodes.
    """
    executor: Any = object
    with contextlib.suppress(UserError):  # a file with an AgentInstance alone will do
        executor = load_from_file("env.name", file, "AgentExecutor")
    require(
        "execute" not in vars(executor),
        f"env.name = openrlhf:{file}: its AgentExecutor has an `execute` of its own, and minirl "
        "runs the episodes; give an AgentInstance, or make an agent of it, which asks the policy "
        "over HTTP (minirl/endpoint/README.md)",
    )
    return load_from_file("env.name", file, "AgentInstance")


class OpenRLHF(Env):
    """An `AgentInstance`. Its texts go to the policy as they are.

    The first observation is the rendered prompt. A feedback follows the answer's tokens, the one
    that ended it included, with any marks of a chat that it writes itself. `scores` and
    `extra_logs` go to the metrics.
    """

    needs_prompt = True

    def __init__(self, file: str):
        self.agent_class = load_agent(file)
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
        logs = reply.get("extra_logs") or {}
        if "scores" in reply:
            logs = {**logs, "scores": reply["scores"]}
        return Result(
            observation=Raw(feedback),
            reward=to_number(reply["rewards"]),
            done=bool(reply["done"]),
            info={name: to_number(value) for name, value in logs.items()},
        )
