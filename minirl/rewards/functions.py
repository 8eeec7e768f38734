"""What an answer earns: a weighted sum of reward functions, and the graders known by name.

A reward is any function `(prompt, completion, row) -> float`, in any file:

    # my_reward.py
    def brevity(prompt, completion, row):
        return 1.0 if completion.strip() == row["answer"] else -0.01 * len(completion)

    --reward.function my_reward.py:brevity

or an HTTP endpoint (rewards/http.py), or one written for OpenRLHF or TRL (`openrlhf:file.py`,
`trl:file.py:function`), or several of them. `row["rendered_prompt"]` is the prompt as the policy
reads it.
"""

import math
import numbers
import re
import secrets
from collections.abc import Callable, Iterable
from pkgutil import resolve_name

import math_verify
import numpy as np
import reasoning_gym

from minirl import sandbox
from minirl.config.lookup import find_function
from minirl.config.shared import RewardConfig
from minirl.errors import UserError
from minirl.rewards.http import RemoteReward

RewardFunction = Callable[[str | list[dict], str, dict], float]
# By what stands before the first colon: what makes a reward function of the rest; imported when
# asked for
ADAPTERS = {"openrlhf": "minirl.envs.openrlhf:reward", "trl": "minirl.rewards.trl:reward"}


class Rewards:
    """A weighted sum of reward functions."""

    def __init__(self, *parts: tuple[float, RewardFunction, str]):
        """Weight, function and name of each."""
        self.parts = parts

    def check_rows(self, rows: Iterable[dict]) -> None:
        """Refuse rows that a registered reward cannot grade, or a machine that cannot, before
        anything is generated. Raises UserError.
        """
        names = [name for *_, name in self.parts]
        if "python_tests" in names:
            sandbox.check_supported()
        for row, name in ((row, name) for row in rows for name in names):
            if name in ("exact", "final_answer", "math_verify") and row.get("answer") is None:
                raise UserError(
                    f"reward.function = {name} compares with the answer, and a row has none (data.answer_key): {str(row)[:120]}"
                )
            if name == "python_tests" and not isinstance(row.get("tests"), str):
                raise UserError(
                    f"reward.function = python_tests runs the text in the column `tests`, and a row has none: {str(row)[:120]}"
                )
            if name == "reasoning_gym" and "source_dataset" not in (row.get("metadata") or {}):
                raise UserError(
                    f"reward.function = reasoning_gym needs rows with metadata.source_dataset, and a row has none: {str(row)[:120]}"
                )

    def __call__(self, row: dict, completion: str, info: dict | None = None) -> float:
        """What it is made of goes to `info["rewards"]`, name -> value, if it has several parts.
        Raises UserError as `grade`.
        """
        values = {name: grade(function, name, row, completion) for _, function, name in self.parts}
        if info is not None and len(values) > 1:
            info["rewards"] = values
        return sum(weight * values[name] for weight, _, name in self.parts)


def grade(function: RewardFunction, name: str, row: dict, completion: str) -> float:
    """Raises UserError if the function raises or returns anything but a finite number: an answer
    cannot be left out of its group, and any number in place of its reward would be learned from.
    """
    shown = f"prompt {str(row['prompt'])[:80]!r}, completion {completion[:80]!r}"
    try:
        value = function(row["prompt"], completion, row)
        valid = isinstance(value, numbers.Real | np.bool_) and math.isfinite(value)
    except UserError:
        raise
    except (
        Exception
    ) as error:  # the user's code may raise anything; it is told with the input that did it
        raise UserError(
            f"reward.function = {name} raised {type(error).__name__}: {error} for {shown}"
        ) from error
    if not valid:
        raise UserError(
            f"reward.function = {name} returned {value!r} for {shown}; it must return one finite number"
        )
    return float(value)


def make_rewards(cfg: RewardConfig | str) -> Rewards:
    """What `reward.function` names (a text alone stands for a config with it). Raises UserError for
    what cannot be found.
    """
    cfg = RewardConfig(function=cfg) if isinstance(cfg, str) else cfg
    names = [
        name for name in ([cfg.function] if isinstance(cfg.function, str) else cfg.function) if name
    ]
    if (
        not (names or cfg.model)
        or len(set(names)) < len(names)
        or cfg.weights
        and len(cfg.weights) != len(names)
        or not all(map(math.isfinite, cfg.weights))
    ):
        raise UserError(
            f"reward.function = {cfg.function}, reward.weights = {cfg.weights}: give different functions, and no or as many finite weights"
        )
    found = [_find(name, cfg) for name in names]
    return Rewards(*zip(cfg.weights or [1.0] * len(names), found, names, strict=True))


def _find(name: str, cfg: RewardConfig) -> RewardFunction:
    kind, _, rest = name.partition(":")
    if kind in ("http", "https"):
        return RemoteReward(name, cfg)
    return (
        resolve_name(ADAPTERS[kind])(rest)
        if kind in ADAPTERS
        else find_function("reward.function", name, REWARDS)
    )


def exact(prompt: str | list[dict], completion: str, row: dict) -> float:
    """1 if the completion is the answer, spaces at the ends aside."""
    return float(completion.strip() == str(row["answer"]).strip())


def final_answer(prompt: str | list[dict], completion: str, row: dict) -> float:
    """1 for the right number after `Answer:`, 0.3 if only the last number of the text is right: a
    small model finds the right number before the form.
    """
    gold = str(row["answer"]).replace(",", "").strip()
    text = completion.replace(",", "")
    if gold in re.findall(r"[Aa]nswer:\s*\$?(-?\d+(?:\.\d+)?)", text)[-1:]:
        return 1.0
    return 0.3 if gold in re.findall(r"-?\d+(?:\.\d+)?", text)[-1:] else 0.0


def verified(prompt: str | list[dict], completion: str, row: dict) -> float:
    """1 if math-verify finds the completion's final expression equal to the answer. Its own time
    limits use signals, which do not work in threads.
    """
    answer = str(row["answer"])
    if "$" not in answer and "\\boxed" not in answer:
        answer = (
            f"${answer}$"  # bare LaTeX, as in MATH, would be read as a text with some number in it
        )
    gold = math_verify.parse(answer, parsing_timeout=None)
    return float(
        math_verify.verify(
            gold, math_verify.parse(completion, parsing_timeout=None), timeout_seconds=None
        )
    )


def gym_score(prompt: str | list[dict], completion: str, row: dict) -> float:
    """The score of reasoning-gym's own grader for the row's generator, 0 to 1; partly right answers
    earn part. Some graders evaluate what the policy wrote as code (that of `countdown` by sympy's
    parser); the environment `countdown` does not.
    """
    return reasoning_gym.get_score_answer_fn(row["metadata"]["source_dataset"])(
        completion.strip(), row
    )


def python_tests(prompt: str | list[dict], completion: str, row: dict) -> float:
    """1 if the program in the completion (its last fenced block, or all of it) passes the row's
    `tests`, Python statements that run behind it in the sandbox. The tests' process is the
    program's, so they must reach a last line of their own; one that reads that line in its own file
    and prints it would be believed.
    """
    blocks = re.findall(r"```(?:python|py)?\n(.*?)```", completion, flags=re.DOTALL)
    passed = secrets.token_hex(8)
    result = sandbox.run(
        f"{blocks[-1] if blocks else completion}\n\n{row['tests']}\nprint({passed!r})\n",
        sandbox.Limits(seconds=10.0),
    )
    return float(result.status == "ok" and result.output.rstrip().endswith(passed))


REWARDS: dict[str, RewardFunction] = {
    "exact": exact,
    "final_answer": final_answer,
    "math_verify": verified,
    "reasoning_gym": gym_score,
    "python_tests": python_tests,
}
