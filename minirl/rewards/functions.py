"""What an answer earns: a weighted sum of reward functions, and the registered functions.

A reward function is any `(prompt, completion, row) -> float`, in any file:

    # my_reward.py
    def brevity(prompt, completion, row):
        return 1.0 if completion.strip() == row["answer"] else -0.01 * len(completion)

    --reward.function my_reward.py:brevity

or an HTTP endpoint (rewards/http.py), or a function written for OpenRLHF or TRL
(`openrlhf:file.py`, `trl:file.py:function`), or several of them. `row["rendered_prompt"]` is the
prompt as the policy reads it.
"""

import math
import numbers
import re
import secrets
from functools import partial
from pkgutil import resolve_name

import math_verify
import numpy as np
import reasoning_gym

from minirl import sandbox
from minirl.config.lookup import find_function
from minirl.config.shared import RewardConfig
from minirl.errors import UserError, require
from minirl.parallel.watch import Watch
from minirl.rewards import RewardFunction, RowPrompt
from minirl.rewards.http import RemoteReward

# What makes a reward function of the text behind `openrlhf:` or `trl:`; imported when it is needed.
ADAPTERS = {"openrlhf": "minirl.envs.openrlhf:reward", "trl": "minirl.rewards.trl:reward"}


class Rewards:
    """A weighted sum of reward functions."""

    def __init__(
        self,
        *weighted: tuple[float, RewardFunction, str],
        seconds: float = math.inf,
        watch: Watch | None = None,
    ):
        """Take the functions.

        Args:
            weighted: weight, function and name of each.
            seconds: time limit of a call, but of an endpoint's, which has its own.
            watch: of the process, which ends the run if a call takes longer; None: none does.
        """
        self.weighted = weighted
        self.seconds = seconds
        self.watch = watch or Watch()

    def check_supported(self) -> None:
        """Refuse a function that cannot work on this machine. Raises UserError."""
        if any(name == "python_tests" for _, _, name in self.weighted):
            sandbox.check_supported()

    def check_row(self, row: dict) -> None:
        """Refuse, before anything is generated, what a registered function cannot grade.

        Raises:
            UserError: The row has not what a function reads.
        """
        for _, _, name in self.weighted:
            if name in ("exact", "final_answer", "math_verify"):
                if row.get("answer") is not None:
                    continue
                problem = "compares with the answer, and a row has none (data.answer_key)"
            elif name == "python_tests" and not isinstance(row.get("tests"), str):
                problem = "runs the text in the column `tests`, and a row has none"
            elif name == "reasoning_gym" and not _names_generator(row):
                problem = "needs rows with metadata.source_dataset, and a row has none"
            else:
                continue
            raise UserError(f"reward.function = {name} {problem}: {str(row)[:120]}")

    def __call__(self, row: dict, completion: str, info: dict | None = None) -> float:
        """Return the weighted sum.

        Args:
            row: Of the data, with `prompt` and, for some functions, `rendered_prompt`.
            completion: Without special tokens.
            info: If there are several functions, `info["rewards"]` is set to name -> value.

        Raises:
            UserError: As `grade` does.
        """
        values = {}
        for _, function, name in self.weighted:
            seconds = math.inf if isinstance(function, RemoteReward) else self.seconds
            too_slow = partial(_describe_too_slow, name, seconds, row, completion)
            with self.watch.limit(seconds, too_slow):
                values[name] = grade(function, name, row, completion)
        if info is not None and len(values) > 1:
            info["rewards"] = values
        return sum(weight * values[name] for weight, _, name in self.weighted)


def _describe_too_slow(name: str, seconds: float, row: dict, completion: str) -> str:
    return (
        f"reward.function = {name} took longer than reward.timeout_seconds = {seconds:g} for "
        f"{_inputs(row, completion)}; mend it, or raise reward.timeout_seconds"
    )


def _inputs(row: dict, completion: str) -> str:
    """Return what a function was called with, for errors."""
    return f"prompt {str(row['prompt'])[:80]!r}, completion {completion[:80]!r}"


def _names_generator(row: dict) -> bool:
    return "source_dataset" in (row.get("metadata") or {})


def grade(function: RewardFunction, name: str, row: dict, completion: str) -> float:
    """Return what one function gives for one completion.

    Raises:
        UserError: The function raises, or returns anything but one finite number. The answer cannot
            be left out of its group, and any number in place of its reward would be learned.
    """
    inputs = _inputs(row, completion)
    try:
        value = function(row["prompt"], completion, row)
        valid = isinstance(value, numbers.Real | np.bool_) and math.isfinite(value)
    except UserError:
        raise
    # The user's code may raise anything. sys.exit is no end of the run, either.
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        raise UserError(
            f"reward.function = {name} raised {type(error).__name__}: {error} for {inputs}"
        ) from error
    require(
        valid,
        f"reward.function = {name} returned {value!r} for {inputs}; "
        "it must return one finite number",
    )
    return float(value)


def make_rewards(cfg: RewardConfig, watch: Watch | None = None) -> Rewards:
    """Return the sum that `reward.function` and `reward.weights` describe.

    Args:
        cfg: the section of the config.
        watch: of the process, for reward.timeout_seconds; None: there is no time limit.

    Raises:
        UserError: A function is not found, or functions and weights do not fit.
    """
    names = [cfg.function] if isinstance(cfg.function, str) else cfg.function
    names = [name for name in names if name]
    settings = f"reward.function = {cfg.function}, reward.weights = {cfg.weights}"
    require(names or cfg.model, f"{settings}: nothing scores; name a function, or set reward.model")
    require(len(set(names)) == len(names), f"{settings}: a function is named twice; name it once")
    require(
        len(cfg.weights) in (0, len(names)),
        f"{settings}: there are {len(cfg.weights)} weights for {len(names)} functions; "
        "give one for each, or none",
    )
    require(
        all(map(math.isfinite, cfg.weights)),
        f"{settings}: a weight is not finite; give finite numbers",
    )
    functions = [_find_function(name, cfg) for name in names]
    weights = cfg.weights or [1.0] * len(names)
    weighted = zip(weights, functions, names, strict=True)
    return Rewards(*weighted, seconds=cfg.timeout_seconds, watch=watch)


def _find_function(name: str, cfg: RewardConfig) -> RewardFunction:
    kind, _, argument = name.partition(":")
    if kind in ("http", "https"):
        return RemoteReward(name, cfg)
    if kind in ADAPTERS:
        return resolve_name(ADAPTERS[kind])(argument)
    return find_function("reward.function", name, REWARDS)


def exact(prompt: RowPrompt, completion: str, row: dict) -> float:
    """Return 1 if the completion is the answer, apart from spaces at the ends."""
    return float(completion.strip() == str(row["answer"]).strip())


def final_answer(prompt: RowPrompt, completion: str, row: dict) -> float:
    """Return 1 for the right number after `Answer:`, 0.3 if the last number in the text is right.

    A small model finds the right number before it finds the form.
    """
    gold = str(row["answer"]).replace(",", "").strip()
    text = completion.replace(",", "")
    if gold in re.findall(r"[Aa]nswer:\s*\$?(-?\d+(?:\.\d+)?)", text)[-1:]:
        return 1.0
    return 0.3 if gold in re.findall(r"-?\d+(?:\.\d+)?", text)[-1:] else 0.0


def verify_math(prompt: RowPrompt, completion: str, row: dict) -> float:
    """Return 1 if math-verify finds the completion's last expression equal to the answer.

    Its own timeouts are off: they use signals, which do not work in threads.
    """
    answer = str(row["answer"])
    if "$" not in answer and "\\boxed" not in answer:
        # Bare LaTeX, as in MATH, would be read as a text with some number in it.
        answer = f"${answer}$"
    gold = math_verify.parse(answer, parsing_timeout=None)
    given = math_verify.parse(completion, parsing_timeout=None)
    return float(math_verify.verify(gold, given, timeout_seconds=None))


def score_reasoning_gym(prompt: RowPrompt, completion: str, row: dict) -> float:
    """Return the score of reasoning-gym's own grader of the row's data set, 0 to 1.

    Partly right answers earn a part. Some graders evaluate what the policy wrote as code (that of
    `countdown` by sympy's parser); the environment `countdown` does not.
    """
    score = reasoning_gym.get_score_answer_fn(row["metadata"]["source_dataset"])
    return score(completion.strip(), row)


def python_tests(prompt: RowPrompt, completion: str, row: dict) -> float:
    """Return 1 if the program in the completion passes the row's `tests`.

    The program is the completion's last fenced block, or all of it. The tests are Python statements
    that run behind it, in the sandbox. Both run in one process, so the tests must reach a last
    line, which prints a secret. A program that reads this line in its own file and prints the
    secret would pass.
    """
    blocks = re.findall(r"```(?:python|py)?\n(.*?)```", completion, flags=re.DOTALL)
    program = blocks[-1] if blocks else completion
    secret = secrets.token_hex(8)
    code = f"{program}\n\n{row['tests']}\nprint({secret!r})\n"
    result = sandbox.run(code, sandbox.Limits(seconds=10.0))
    return float(result.status == "ok" and result.output.rstrip().endswith(secret))


REWARDS = {
    "exact": exact,
    "final_answer": final_answer,
    "math_verify": verify_math,
    "reasoning_gym": score_reasoning_gym,
    "python_tests": python_tests,
}
