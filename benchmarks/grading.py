"""Answers a second of graders, in the rank and in processes of their own, and of sandboxes.

    python benchmarks/grading.py
    python benchmarks/grading.py --answers 1000 --threads 1 8

math-verify compares numbers, fractions and roots; reasoning-gym grades its own answers of three
data sets. "In the rank" is the package called here, without a process and without limits. A program
prints a word; one with tests adds two numbers. Every figure is of the wall clock, after a first
answer that starts the processes.
"""

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import reasoning_gym
import tyro

from minirl.rewards import graders
from minirl.sandbox import runner
from minirl.sandbox.inside.grading import make_math_verify

DATA_SETS = ("chain_sum", "countdown", "polynomial_multiplication")
COMPLETIONS = (
    "Half of $20$ is $10$, so the answer is $\\frac{{{n}}}{{2}}$.",
    "\\boxed{{{n}.5}}",
    "We get $x = \\sqrt{{{n}}}$.",
    "I do not know, perhaps {n}?",
)
PROGRAM = "def add(a, b):\n    return a + b\nprint('defined')"
TESTS = "assert add(1, 2) == 3\nassert add('a', 'b') == 'ab'"
LIMITS = runner.ProgramLimits(seconds=60)


@dataclass(kw_only=True)
class Load:
    answers: int = 400
    """For each figure of a grader."""
    programs: int = 40
    """For each figure of a sandbox."""
    threads: list[int] = field(default_factory=lambda: [1, 4])


def math_answers(num: int) -> list[tuple]:
    """Return what math-verify's grader is called with: the row's answer, and a completion."""
    return [(f"${n}.5$", COMPLETIONS[n % len(COMPLETIONS)].format(n=n)) for n in range(num)]


def gym_answers(num: int) -> list[tuple]:
    """Return what reasoning-gym's grader is called with: a completion, and a row."""
    entries = []
    for name in DATA_SETS:
        entries += reasoning_gym.create_dataset(name, size=-(-num // len(DATA_SETS)), seed=1)
    return [(str(entry["answer"]), entry) for entry in entries[:num]]


def gym_in_rank(completion: str, entry: dict) -> float:
    """Return reasoning-gym's own grade, for which it may run the completion as code."""
    name = entry["metadata"]["source_dataset"]
    return reasoning_gym.get_score_answer_fn(name)(completion, entry)


def per_second(grade: Callable, calls: list[tuple], num_threads: int) -> float:
    """Return the calls a second of `grade` in so many threads."""
    grade(*calls[0])
    begin = time.perf_counter()
    if num_threads == 1:
        for arguments in calls:
            grade(*arguments)
    else:
        with ThreadPoolExecutor(num_threads) as threads:
            list(threads.map(lambda arguments: grade(*arguments), calls))
    return len(calls) / (time.perf_counter() - begin)


def main(load: Load) -> None:
    """Print the table."""
    logging.disable()  # What packages say about each answer.
    shown = " | ".join(f"{num} threads" for num in load.threads)
    print(f"| a second | in the rank | {shown} |")
    print("|---|---|" + "---|" * len(load.threads))
    answers: dict[str, tuple[Callable, list[tuple]]] = {
        "math_verify": (make_math_verify(), math_answers(load.answers)),
        "reasoning_gym": (gym_in_rank, gym_answers(load.answers)),
    }
    for package, (grade, calls) in answers.items():
        pool = graders.pool(package)
        in_rank = per_second(grade, calls, 1)
        in_pool = [f"{per_second(pool.grade, calls, num):.0f}" for num in load.threads]
        print(f"| answers, {package} | {in_rank:.0f} | {' | '.join(in_pool)} |")

    programs: dict[str, tuple[Callable, tuple]] = {
        "run": (runner.run, (PROGRAM, LIMITS)),
        "passes": (runner.passes, (PROGRAM, TESTS, LIMITS)),
    }
    for name, (function, arguments) in programs.items():
        calls = [arguments] * load.programs
        rates = [f"{per_second(function, calls, num):.1f}" for num in load.threads]
        print(f"| programs, sandbox.{name} | | {' | '.join(rates)} |")


if __name__ == "__main__":
    main(tyro.cli(Load))
