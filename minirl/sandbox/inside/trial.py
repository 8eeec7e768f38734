"""Tests judge a program by the values that its functions return.

    runner   main.py ────▶ program's process: runs main.py, then calls the functions asked for
       ╲                       ▲ names and arguments, values
        tests ───────────▶ tests' process: runs the tests and says PASSED
             ◀────────────
              verdict

Both are in the sandbox. In the tests' process a function of the program is a request: name and
arguments go to the other process and a value returns, all as JSON. No code of the program runs
where values are compared, and the program's process holds neither the tests nor the connection for
the verdict. An object of a class of the program arrives as an `Opaque`, which equals nothing.

Tests that need more than values run in the program's process, which then returns a nonce that came
with them. A program made for it can cheat there. Which tests these are is decided by the tests
alone, never by what a program returns.
"""

import ast
import builtins
import collections
import functools
import importlib
import itertools
import json
import os
import socket
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from types import ModuleType
from typing import Any, TextIO

from minirl.sandbox.inside.kernel import end_with_parent

PASSED = b"passed"
MAX_ITEMS = 10_000  # Of an iterator: a generator may have no end.

# Types that travel, by name: its items, which are encoded too, and how to build one from them.
# Subclasses of bool, int, float and str are written by JSON as those are, subclasses of these as
# the first of their bases.
KINDS: dict[str, tuple[type, Callable[[Any], Iterable], Callable[[list], object]]] = {
    "Counter": (collections.Counter, dict.items, lambda items: collections.Counter(dict(items))),
    "OrderedDict": (collections.OrderedDict, dict.items, collections.OrderedDict),
    "dict": (dict, dict.items, dict),
    "range": (range, lambda it: [it.start, it.stop, it.step], lambda items: range(*items)),
    "complex": (complex, lambda it: [it.real, it.imag], lambda items: complex(*items)),
    "Fraction": (Fraction, Fraction.as_integer_ratio, lambda items: Fraction(*items)),
    "Decimal": (Decimal, lambda it: [str(it)], lambda items: Decimal(*items)),
    "datetime": (datetime, lambda it: [str(it)], lambda items: datetime.fromisoformat(*items)),
    "date": (date, lambda it: [str(it)], lambda items: date.fromisoformat(*items)),
    "time": (time, lambda it: [str(it)], lambda items: time.fromisoformat(*items)),
    "timedelta": (
        timedelta,
        lambda it: [it.days, it.seconds, it.microseconds],
        lambda items: timedelta(*items),
    ),
    "keys": (type({}.keys()), list, lambda items: dict.fromkeys(items).keys()),
    "values": (type({}.values()), list, lambda items: dict(enumerate(items)).values()),
    "items": (type({}.items()), list, lambda items: dict(items).items()),
}
LISTS: tuple[Any, ...] = (tuple, set, frozenset, collections.deque, bytes, bytearray)
for kind in LISTS:
    KINDS[kind.__name__] = (kind, list, kind)
ARRAY = "ndarray"  # Travels as its dtype, its shape and its numbers.
KINDS["iterator"] = (Iterator, lambda it: list(itertools.islice(it, MAX_ITEMS)), iter)

# Modules that only compute: tests may use them in a process without the program.
MODULES = frozenset(
    ("bisect", "cmath", "collections", "copy", "datetime", "decimal", "fractions", "functools")
    + ("heapq", "itertools", "json", "math", "numpy", "operator", "re", "statistics", "string")
    + ("time", "typing")
)
ALIASES = {"np": "numpy"}
# Names with which tests look at more than values.
NEED_PROGRAM = frozenset(
    ("__builtins__", "__import__", "breakpoint", "compile", "delattr", "dir", "eval", "exec")
    + ("getattr", "globals", "hasattr", "input", "locals", "open", "setattr", "super", "vars")
)
PLAIN_TYPES = (int, float, str, list, *(kind for kind, _, _ in KINDS.values()))
PLAIN_ATTRIBUTES = frozenset(
    name for kind in PLAIN_TYPES for name in dir(kind) if not name.startswith("_")
)
STATEMENTS_WITH_OBJECTS = (ast.AsyncFunctionDef, ast.AsyncFor, ast.Await, ast.ClassDef, ast.With)


class NotPlainError(BaseException):
    """Tests pass an object that does not travel. No Exception, so that tests do not catch it."""


class Opaque:
    """Stands for an object of the program that does not travel. It equals no other value."""


def encode(value: Any, of_other: Callable[[Any], object]) -> object:
    """Return a value as json.dumps takes it: a list as it is, other kinds as {kind: items}.

    Args:
        value: of any type.
        of_other: returns what to write for a value that does not travel, or raises.
    """
    if value is None or isinstance(value, int | float | str):
        return value
    if isinstance(value, list):
        return [encode(item, of_other) for item in value]
    for name, (kind, items_of, _) in KINDS.items():
        if isinstance(value, kind):
            return {name: [encode(item, of_other) for item in items_of(value)]}
    if _is_array(value) and value.dtype.kind in "biufcU":
        parts = [value.dtype.str, list(value.shape), value.ravel().tolist()]
        return {ARRAY: encode(parts, of_other)}
    return of_other(value)


def decode(content: Any) -> Any:
    """Return a new value from what `encode` has returned. Raises any error if it is not that."""
    if isinstance(content, list):
        return [decode(item) for item in content]
    if not isinstance(content, dict):
        return content
    ((name, items),) = content.items()
    if name == "opaque":
        return Opaque()
    if name == ARRAY:
        import numpy as np  # here: few programs have arrays

        dtype, shape, numbers = decode(items)
        return np.array(numbers, dtype).reshape(shape)
    return KINDS[name][2](decode(items))


def start_tests(verdict_descriptor: int, give_up_rights: Callable[[], None]) -> socket.socket:
    """Start the tests' process. Returns the program's end of the connection to it.

    Args:
        verdict_descriptor: connection to the runner, which this process does not keep.
        give_up_rights: confines the tests' process, which does not outlive this one.
    """
    sys.set_int_max_str_digits(0)  # Numbers travel as texts, whatever their size.
    program_end, tests_end = socket.socketpair()
    verdict = socket.socket(fileno=verdict_descriptor)
    program = os.getpid()
    if os.fork():
        verdict.close()
        tests_end.close()
        return program_end
    program_end.close()
    end_with_parent()
    if os.getppid() == program:
        give_up_rights()
        with verdict.makefile("rb") as stream:
            source = stream.read().decode()
        if _do_pass(source, tests_end.makefile("rw")):
            verdict.sendall(PASSED)
    os._exit(0)


# --------------------------------------------------------------------------------------------------
# in the program's process


def serve(scope: dict[str, Any], tests: socket.socket) -> None:
    """Answer the tests' requests, a line of JSON each, until they have ended.

    Args:
        scope: what the program has defined, by name.
        tests: connection to the tests' process.
    """
    stream = tests.makefile("rw")
    while line := stream.readline():
        try:
            reply = _answer(json.loads(line), scope)
        except BaseException as error:  # the program's, whatever it is; the tests may expect it
            classes = [cls.__name__ for cls in type(error).__mro__]
            reply = {"raised": classes, "arguments": encode(list(error.args), _of_object)}
        stream.write(json.dumps(reply) + "\n")
        stream.flush()


def _answer(request: dict[str, Any], scope: dict[str, Any]) -> dict[str, Any]:
    if "tests" in request:
        scope["__name__"] = "__main__"  # As tests may ask; the program, which has ended, may not.
        have_failed = _watch_results(scope)
        try:
            exec(compile(request["tests"], "tests.py", "exec"), scope)
        except SystemExit as left:  # as unittest.main does; the program may not
            frames = traceback.walk_tb(left.__traceback__)
            by_program = any(frame.f_code.co_filename == "main.py" for frame, _ in frames)
            if by_program or left.code not in (None, 0, False):
                raise
        if have_failed():
            raise AssertionError("a test of unittest or doctest has failed")
        return {"nonce": request["nonce"]}
    if "names" in request:
        known = [name for name in request["names"] if name.partition("().")[0] in scope]
        found = {name: _look_up(name, scope) for name in known}
        return {
            "functions": [name for name, value in found.items() if callable(value)],
            "values": {
                name: encode(value, _of_object)
                for name, value in found.items()
                if not callable(value)
            },
        }
    arguments = decode(request["arguments"])
    value = _look_up(request["call"], scope)(*arguments, **decode(request["options"]))
    now = encode(arguments, _of_object)
    reply = {"value": encode(value, _of_object)}
    return reply if now == request["arguments"] else {**reply, "arguments": now}


def _watch_results(scope: dict[str, Any]) -> Callable[[], bool]:
    """Return what tells whether tests of unittest or doctest have failed from now on.

    Some ways to run them only print it. What the program has of tests is not run with the others.
    """
    import doctest  # here: few tests need the program's process
    import unittest

    scope.pop("load_tests", None)
    for name, value in list(scope.items()):
        if isinstance(value, type) and issubclass(value, unittest.TestCase):
            del scope[name]

    results: list[unittest.TestResult] = []
    runners: list[doctest.DocTestRunner] = []
    for cls, made in ((unittest.TestResult, results), (doctest.DocTestRunner, runners)):
        plain = cls.__init__

        def begin(
            self: Any, *args: Any, plain: Any = plain, made: Any = made, **named: Any
        ) -> None:
            made.append(self)
            plain(self, *args, **named)

        cls.__init__ = begin  # type: ignore[method-assign]
    return lambda: any(not r.wasSuccessful() for r in results) or any(r.failures for r in runners)


def _look_up(name: str, scope: dict[str, Any]) -> Any:
    """Return what a name of the tests stands for: `f`, or `Solution().f` of a new object."""
    name, is_method, attribute = name.partition("().")
    return getattr(scope[name](), attribute) if is_method else scope[name]


def _of_object(value: Any) -> object:
    """Return a number of numpy as Python's, any other object as opaque."""
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return encode(value.tolist(), _of_object)
    return {"opaque": []}


def _is_array(value: object) -> bool:
    """Return whether a value is numpy's array, without an import of numpy."""
    return type(value).__module__ == "numpy" and type(value).__name__ == "ndarray"


# --------------------------------------------------------------------------------------------------
# in the tests' process


def _do_pass(source: str, program: TextIO) -> bool:
    """Run the tests. Returns whether they reach their end; prints the error if not.

    Args:
        source: Python statements.
        program: connection to the program's process.
    """
    try:
        tree = _MethodsOfNewObjects().visit(ast.parse(source))
        if not needs_program(tree):
            try:
                exec(compile(tree, "tests.py", "exec"), _make_scope(tree, program))
                return True
            except NotPlainError:
                pass
        nonce = os.urandom(16).hex()
        return _exchange(program, {"tests": source, "nonce": nonce}).get("nonce") == nonce
    except BaseException:  # the tests' or the program's, and it has failed whatever it is
        traceback.print_exc()
        return False


class _MethodsOfNewObjects(ast.NodeTransformer):
    """Makes `Solution().f`, the form of LeetCode, one name, so that it is called by value."""

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        match node.value:
            case ast.Call(func=ast.Name(id=cls), args=[], keywords=[]) if cls[0].isupper():
                return ast.copy_location(ast.Name(f"{cls}().{node.attr}", ast.Load()), node)
        self.generic_visit(node)
        return node


def needs_program(tree: ast.AST) -> bool:
    """Return whether tests look at more of a program than values, and so run in its process.

    Those are tests that name a class of it, use attributes of objects, call what a function has
    returned, replace a built-in function, or use modules and statements that do more than compute.
    """
    nodes = list(ast.walk(tree))
    if any(name[0].isupper() and "()." not in name for name in _program_names(tree)):
        return True
    called = [node.func for node in nodes if isinstance(node, ast.Call)]
    stored = {
        node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    for function in called:
        if isinstance(function, ast.Call | ast.Subscript):
            return True
        if isinstance(function, ast.Name) and function.id in stored:
            return True
    return any(_needs_object(node, called) for node in nodes)


def _needs_object(node: ast.AST, called: list[ast.expr]) -> bool:
    match node:
        case ast.Attribute(value=ast.Name(id=module), attr=name) if _is_module(module):
            value = vars(_import(module)).get(name)
            # A number of numpy is Python's by value, which is no numpy.integer.
            return value is None or (isinstance(value, type) and node not in called)
        case ast.Attribute(attr=name):
            return name not in PLAIN_ATTRIBUTES
        case ast.FunctionDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
            return name in vars(builtins)
        case ast.Name(id=name):
            return name in NEED_PROGRAM
        case ast.Import(names=names):
            return any(alias.name not in MODULES for alias in names)
        case ast.ImportFrom(module=module):
            return module not in MODULES
    return isinstance(node, STATEMENTS_WITH_OBJECTS)


def _is_module(name: str) -> bool:
    return ALIASES.get(name, name) in MODULES


def _import(name: str) -> ModuleType:
    return importlib.import_module(ALIASES.get(name, name))


def _program_names(tree: ast.AST) -> set[str]:
    """Return the names that tests use and do not define, which are the program's.

    Built-in functions are Python's own, unless the tests name nothing else.
    """
    used = set()
    defined = set()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Load()):
                used.add(name)
            case ast.Name(id=name) | ast.arg(arg=name) | ast.FunctionDef(name=name):
                defined.add(name)
            case ast.Attribute(value=ast.Name(id=name)) if _is_module(name):
                defined.add(name)
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                defined |= {alias.asname or alias.name for alias in names}
            case ast.ExceptHandler(name=str(name)):
                defined.add(name)
    free = used - defined
    return free - vars(builtins).keys() or free


def _make_scope(tree: ast.AST, program: TextIO) -> dict[str, Any]:
    """Return what tests see: the functions and values of the program that they name, and modules.

    A module that tests do not import, as in `math.isclose`, is Python's, whatever the program calls
    so.
    """
    wanted = sorted(_program_names(tree))
    reply = _exchange(program, {"names": wanted})
    names = {name: decode(value) for name, value in reply["values"].items()}
    names |= {name: functools.partial(_call, program, name) for name in reply["functions"]}
    # A program that speaks for itself, without `serve`, may say any name.
    scope: dict[str, Any] = {"__name__": "__main__"}
    scope |= {name: names[name] for name in wanted if name in names}
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id=name)) if _is_module(name):
                scope[name] = _import(name)
    return scope


def _call(program: TextIO, function: str, /, *arguments: object, **options: object) -> object:
    """Return what a function of the program returns. Arguments that it changes are changed here.

    Raises:
        NotPlainError: an argument does not travel. Nothing has been called then.
    """
    request = {
        "call": function,
        "arguments": encode(list(arguments), _refuse),
        "options": encode(options, _refuse),
    }
    reply = _exchange(program, request)
    for argument, now in zip(arguments, decode(reply.get("arguments", [])), strict=False):
        if isinstance(argument, list | bytearray):
            argument[:] = now
        elif isinstance(argument, dict | set):
            argument.clear()
            argument.update(now)
        elif isinstance(argument, collections.deque):
            argument.clear()
            argument.extend(now)
        elif _is_array(argument):
            argument[...] = now  # type: ignore[index]
    return decode(reply["value"])


def _refuse(value: object) -> object:
    if isinstance(value, Opaque):
        raise TypeError("an object of the program is no argument by value")
    raise NotPlainError(f"a value of type {type(value).__name__}")


def _exchange(program: TextIO, request: dict[str, object]) -> dict[str, Any]:
    """Send a request and return the reply. Raises the error that it reports.

    StopIteration is raised as an Exception: it would end a loop of the tests as if all had passed.
    """
    program.write(json.dumps(request) + "\n")
    program.flush()
    line = program.readline()
    if not line:
        os._exit(1)  # The program has left. No error: tests could expect one.
    reply = json.loads(line)
    if "raised" in reply:
        for name in reply["raised"]:
            known = None if name == "StopIteration" else vars(builtins).get(name)
            if isinstance(known, type) and issubclass(known, BaseException):
                raise known(*decode(reply["arguments"]))
    return reply
