"""The registered reward functions, and what each of them needs of a row.

Whether an answer is equal is decided by text (`exact`, `final_answer`), by math-verify, by
reasoning-gym, or by tests of a program in the sandbox.
"""

import math
import re
from decimal import Decimal

import numpy as np

from minirl.rewards import RewardFunction, RowPrompt, graders
from minirl.sandbox import runner

NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
ANSWER = r"[Aa]nswer:[\s*`(+$€£]*(?:\\boxed\{)?"
# What continues a number to an expression, such as 1/2, 1 1/2 or 1e5.
MORE = r"[.,:eE]\d|\*\*\d|\{,\}|[)}$]* ?(?:[/*^+×-] ?[({]?\d|\\\w*frac)|\)\(| \d+/\d| \d{3}(?!\d)"
# `++` gives nothing back.
NUMBER_AFTER_ANSWER = re.compile(rf"{ANSWER}(-?\d++(?:\.\d++)?)(?!{MORE})")
COMMA_OF_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")


def said(completion: str, row: dict) -> str:
    """Return what follows the thoughts that a completion begins with; nothing, if they do not end.

    They are between <think>, with which some templates end the prompt, and </think>.
    """
    is_open = row.get("rendered_prompt", "").rstrip().endswith("<think>")
    has_thoughts = is_open or completion.lstrip().startswith("<think>")
    return completion.partition("</think>")[2] if has_thoughts else completion


def text_of(answer: str | float) -> str:
    """Return a row's answer as people write it: numbers without exponent and needless zeros."""
    if isinstance(answer, float):
        return np.format_float_positional(answer, trim="-")
    return str(answer)


def exact(prompt: RowPrompt, completion: str, row: dict) -> float:
    """Return 1 if the completion is the answer, apart from spaces at the ends."""
    return float(said(completion, row).strip() == text_of(row["answer"]).strip())


def final_answer(prompt: RowPrompt, completion: str, row: dict) -> float:
    """Return 1 for the right number after `Answer:`, 0.3 if the last number in the text is right.

    A small model finds the right number before it finds the form. 72.0 is 72.
    """
    gold = COMMA_OF_THOUSANDS.sub("", text_of(row["answer"])).strip()
    if not NUMBER.fullmatch(gold):
        return 0.0
    text = COMMA_OF_THOUSANDS.sub("", said(completion, row)).replace("\N{MINUS SIGN}", "-")
    if Decimal(gold) in map(Decimal, NUMBER_AFTER_ANSWER.findall(text)[-1:]):
        return 1.0
    return 0.3 if Decimal(gold) in map(Decimal, NUMBER.findall(text)[-1:]) else 0.0


def verify_math(prompt: RowPrompt, completion: str, row: dict) -> float:
    """Return 1 if math-verify finds the completion's last expression equal to the answer.

    It runs in a process with limits; a completion that reaches one earns 0, as a StoppedGrade.
    """
    return graders.pool("math_verify").grade(text_of(row["answer"]), said(completion, row))


def score_reasoning_gym(prompt: RowPrompt, completion: str, row: dict) -> float:
    """Return the score of reasoning-gym's own grader of the row's data set, 0 to 1.

    Partly right answers earn a part. It runs in a process with limits, as math-verify does. What
    some graders would evaluate as code is read as a literal or a plain expression.
    """
    entry = {name: row[name] for name in ("question", "answer", "metadata") if name in row}
    return graders.pool("reasoning_gym").grade(said(completion, row).strip(), entry)


def python_tests(prompt: RowPrompt, completion: str, row: dict) -> float:
    """Return 1 if the program in the completion passes the row's `tests`.

    The program is the completion's last fenced block of Python, else the last that names no
    language, or all of it. The tests are Python statements
    that run in the sandbox, in another process than the program (sandbox/inside/trial.py). What the
    program prints does not count, nor that it ends by sys.exit(0).
    """
    program = runner.program_in(said(completion, row))
    return float(runner.passes(program, row["tests"], runner.ProgramLimits(seconds=10.0)))


REWARDS: dict[str, RewardFunction] = {
    "exact": exact,
    "final_answer": final_answer,
    "math_verify": verify_math,
    "reasoning_gym": score_reasoning_gym,
    "python_tests": python_tests,
}


def why_not(name: str, row: dict) -> str:
    """Return what a row lacks that a registered function reads; empty: nothing, or it is none."""
    match name:
        case "exact" | "final_answer" | "math_verify":
            answer = row.get("answer")
            if answer is None:
                return "compares with the answer, and a row has none (data.answer_key)"
            is_number = type(answer) in (int, float) and math.isfinite(answer)
            if not is_number and not isinstance(answer, str):
                return (
                    f"compares with the answer, and that of a row is {str(answer)[:80]} "
                    f"({type(answer).__name__}); make it a text or finite number (data.answer_key)"
                )
            gold = text_of(answer)
            if name == "final_answer" and gold and not final_answer("", f"Answer: {gold}", row):
                return f"compares numbers, and a row has {gold[:50]!r}; take exact or math_verify"
        case "reasoning_gym":
            metadata = row.get("metadata")
            if not (isinstance(metadata, dict) and isinstance(metadata.get("source_dataset"), str)):
                return "needs rows with metadata.source_dataset, and a row has none"
        case "python_tests":
            if not isinstance(row.get("tests"), str):
                return "runs the text in the column `tests`, and a row has none"
            return runner.why_no_tests(row["tests"])
    return ""
