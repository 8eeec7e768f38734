"""Stand-ins for the modules of OpenRLHF that its own example files import.

They are there while such a file is loaded, if openrlhf is not installed. Each has what those files
use of it, and says what it lacks by its own name.
"""

import contextlib
import logging
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch

from minirl.rewards import graders


def to_number(value: object) -> float:
    """Return a number, or the number that a list or tensor holds."""
    return float(torch.as_tensor(value))


def _base(name: str) -> type:
    return type(name, (), {})


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
        name: _base(name)
        for name in (
            "AgentInstanceBase",
            "AgentExecutorBase",
            "MultiTurnAgentExecutor",
            "SingleTurnAgentExecutor",
        )
    },
}


class StandIn(ModuleType):
    """A module that says what it has not got."""

    def __getattr__(self, name: str) -> Any:
        """Raise ImportError, which names the module; AttributeError for what Python itself asks."""
        if name.startswith("__") or f"{self.__name__}.{name}" in CONTENTS:
            raise AttributeError(name)
        own = [key for key in vars(self) if not key.startswith("__")]
        has = ", ".join(own) or "nothing"
        raise ImportError(
            f"minirl's stand-in for {self.__name__} has no {name} (it has {has}); "
            "install openrlhf, or do without it in this file"
        )


@contextlib.contextmanager
def stand_ins() -> Iterator[None]:
    """Let imports of OpenRLHF's modules find stand-ins inside the block, if it is not installed."""
    if "openrlhf" in sys.modules or find_spec("openrlhf"):
        yield
        return
    for name, contents in CONTENTS.items():
        module = StandIn(name)
        vars(module).update(contents)
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            vars(sys.modules[parent])[child] = module
    try:
        yield
    finally:
        for name in CONTENTS:
            del sys.modules[name]
