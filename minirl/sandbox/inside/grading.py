"""Graders of other packages in processes of their own, with limits of time and memory.

minirl.rewards.graders starts this file once in a rank and for each package. It imports the package
and then forks a worker whenever it is asked to, which costs milliseconds. A worker gives up its
rights (kernel.py), and grades answers until it is killed, or is no longer wanted. So what an answer
makes a grader do can hurt no other process, and a worker that runs into a limit is soon replaced.

A request is pickled, since it comes from the trainer. A reply is JSON, since it comes from a
process that has read what a policy wrote:
{"value": number}, {"stopped": why} or {"mistake": what is wrong with the row}.
"""

import ast
import builtins
import functools
import gc
import json
import logging
import os
import pickle
import re
import resource
import select
import signal
import socket
import struct
import sys
from collections.abc import Callable
from decimal import Decimal
from multiprocessing.connection import Connection
from pathlib import Path

from minirl.sandbox.inside.kernel import confine, end_with_parent

# To the template process: what to do, and for KILL the worker's pid. FORK comes with a socket.
ORDER = struct.Struct("=ci")
FORK, KILL = b"f", b"k"
NUMBER = struct.Struct("=i")  # Its reply: the pid, or how the worker ended.
READY = b"ready"
SECONDS_BETWEEN_LOOKS = 5.0  # At the parent, which could have ended without a word.

# reasoning-gym's modules that evaluate an answer as Python, and as an expression of sympy.
READ_AS_PYTHON = (
    "reasoning_gym.algorithmic.binary_matrix",
    "reasoning_gym.algorithmic.number_sorting",
    "reasoning_gym.algorithmic.spiral_matrix",
    "reasoning_gym.algorithmic.string_insertion",
    "reasoning_gym.games.n_queens",
)
# What an expression may be made of, besides numbers and names that mean nothing to sympy.
FUNCTIONS = frozenset(
    ("sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan", "acot", "asec", "acsc")
    + ("sinh", "cosh", "tanh", "coth", "sech", "csch", "asinh", "acosh", "atanh")
    + ("exp", "log", "ln", "sqrt", "cbrt", "root", "erf", "factorial")
    + ("Abs", "abs", "sign", "floor", "ceiling", "Rational", "Integer", "pi", "oo")
)
EXPRESSION = re.compile(r"[\w\s+\-*/^().,!]*", re.ASCII)
ATTRIBUTE = re.compile(r"\.\s*[A-Za-z_]")
NAME = re.compile(r"[A-Za-z_]\w*")


class RowError(Exception):
    """What is wrong with a row, whatever the answer is."""


def main() -> None:
    """Import the package, then fork workers and end them as the trainer asks."""
    settings = json.loads(sys.argv[1])
    logging.disable()  # What packages say about each answer.
    grade = GRADERS[settings["package"]]()
    gc.freeze()  # So that collections in workers do not copy what they share.
    control = socket.socket(fileno=settings["control"])
    control.sendall(READY)
    # The trainer reads errors until here.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    os.close(nowhere)

    while True:
        readable, _, _ = select.select([control], [], [], SECONDS_BETWEEN_LOOKS)
        if os.getppid() != settings["parent"]:
            return  # The workers end with this process.
        if not readable:
            continue
        order, descriptors, _, _ = socket.recv_fds(control, ORDER.size, 1)
        if not order:
            return
        kind, pid = ORDER.unpack(order)
        if kind == KILL:
            os.kill(pid, signal.SIGKILL)  # If it has ended, its number is not another's yet.
            control.sendall(NUMBER.pack(os.waitpid(pid, 0)[1]))
            continue
        template = os.getpid()
        pid = os.fork()
        if pid == 0:
            control.close()
            end_with_parent()
            if os.getppid() == template:
                work(grade, Connection(descriptors[0]), settings)
            os._exit(0)
        os.close(descriptors[0])
        control.sendall(NUMBER.pack(pid))


def work(grade: Callable, trainer: Connection, settings: dict) -> None:
    """Give up all rights, then grade answers until the trainer closes its end."""
    num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    memory = num_pages * resource.getpagesize() + settings["memory"]
    limits = {
        resource.RLIMIT_AS: (memory, memory),
        resource.RLIMIT_FSIZE: (0, 0),
        resource.RLIMIT_NOFILE: (64, 64),
    }
    confine(settings["readable"], None, limits)
    while True:
        try:
            arguments = pickle.loads(trainer.recv_bytes())
        except EOFError:
            return
        # Its signal ends the process, wherever it is: a power of numbers is one call of Python.
        signal.setitimer(signal.ITIMER_PROF, settings["seconds"])
        reply: dict[str, object]
        try:
            reply = {"value": float(grade(*arguments))}
        except RowError as error:
            reply = {"mistake": str(error)}
        except MemoryError:
            reply = {"stopped": "memory"}
        except Exception as error:  # a grader may raise anything at what a policy wrote
            reply = {"stopped": f"{type(error).__name__}: {error}"[:200]}
        signal.setitimer(signal.ITIMER_PROF, 0)
        trainer.send_bytes(json.dumps(reply).encode())


# --------------------------------------------------------------------------------------------------
# the graders


def as_latex(text: str) -> str:
    """Return a row's answer for math-verify, which reads bare LaTeX as some number in a text."""
    # It would read 1e-6 as a product of e, and the 1 of 1 1/2 alone.
    if re.fullmatch(r"\s*-?\d+(\.\d+)?[eE][+-]?\d{1,2}\s*", text):
        text = f"{Decimal(text):f}"
    text = re.sub(r"^\s*(-?\d+) (\d+)/(\d+)\s*$", r"\1\\frac{\2}{\3}", text)
    is_marked = re.search(r"(?<!\\)\$|\\boxed|\\\[|\\\(", text)
    return text if is_marked else f"${text}$"


def make_math_verify() -> Callable[[str, str], bool]:
    """Return math-verify's comparison of a row's answer, a text, with the completion."""
    import math_verify

    def grade(answer: str, completion: str) -> bool:
        # Its own time limits are off: they raise in places where they are taken for "not equal".
        gold = math_verify.parse(as_latex(answer), parsing_timeout=None)
        given = math_verify.parse(completion, parsing_timeout=None)
        return math_verify.verify(gold, given, timeout_seconds=None)

    # The first call builds grammars and patterns; all workers share them.
    grade("$\\frac{1}{2}$", "so it is $x = 0.5$")
    return grade


def make_reasoning_gym() -> Callable[[str, dict], float]:
    """Return reasoning-gym's grader of a completion and an entry of any of its data sets.

    Some of its graders evaluate the completion as code. Here they read it as a literal of Python,
    or as an expression without attributes, texts and names that do more than compute.
    """
    import reasoning_gym
    import sympy
    from reasoning_gym.factory import DATASETS
    from reasoning_gym.games import countdown, puzzle24

    unguarded = sympy.parse_expr
    known = frozenset(dir(sympy)) | frozenset(dir(builtins))

    def parse_expr(text: str, *args: object, **options: object) -> sympy.Basic:
        check_expression(text, known)
        return unguarded(text, *args, **options)

    for module in (sympy, countdown, puzzle24):
        module.parse_expr = parse_expr
    for name in READ_AS_PYTHON:
        vars(sys.modules[name])["eval"] = ast.literal_eval
    grader_of = functools.cache(reasoning_gym.get_score_answer_fn)

    def grade(completion: str, entry: dict) -> float:
        name = entry["metadata"]["source_dataset"]
        if name not in DATASETS:
            raise RowError(f"reasoning-gym has no data set {name!r}")
        return grader_of(name)(completion, entry)

    return grade


def check_expression(text: str, known: frozenset[str]) -> None:
    """Raise ValueError for a text that sympy would not read as a plain expression.

    sympy evaluates what it reads as Python, with all its names and the built-in functions.

    Args:
        text: an answer.
        known: all names that mean something to sympy. Those of one letter are harmless.
    """
    if not EXPRESSION.fullmatch(text) or ATTRIBUTE.search(text):
        raise ValueError(f"not an expression: {text[:80]!r}")
    for name in NAME.findall(text):
        is_symbol = len(name) == 1 or (name not in known and not name.startswith("_"))
        if not is_symbol and name not in FUNCTIONS:
            raise ValueError(f"{name!r} is no function of an expression")


GRADERS: dict[str, Callable[[], Callable[..., float]]] = {
    "math_verify": make_math_verify,
    "reasoning_gym": make_reasoning_gym,
}
