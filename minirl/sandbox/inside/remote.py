"""What a program has defined, used from another process: that of the tests which judge it.

The tests see functions, classes and objects of the program as stand-ins. What is done with one is
asked of the program's process, and the reply travels as a value (values.py):

    tests    add(1, 2)     {"do": "call", "arguments": [{"object": 0}, 1, 2], "options": {}}
    program                {"value": 3, "changed": {}}
    tests    3 == 3

So a program says what its functions return, and no more: it has no part in comparing, and the
tests are not in its process, but for the arguments of its functions. A stand-in is equal to no
plain value, whatever the program's object says of itself.
"""

import builtins
import collections
import importlib
import json
import operator
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Any

from minirl.sandbox.inside.frames import receive, send
from minirl.sandbox.inside.values import NotPlainError, decode, encode

MAX_REPLY = 2**26  # Bytes.
# Modules that tests may import in a process without the program: they only compute.
PURE_MODULES = frozenset(
    ("array", "bisect", "cmath", "collections", "copy", "datetime", "decimal", "enum", "fractions")
    + ("functools", "heapq", "itertools", "json", "math", "numbers", "numpy", "operator", "re")
    + ("statistics", "string", "time", "typing")
)
# Other names by which tests take a module, if the program has imported it so.
MODULE_ALIASES = {"np": "numpy"}
# What a program can have under a name of its own, as `f = abs`, and the tests then have from Python
# itself: it only computes. All else of `builtins` stays in the program's process, so that no `eval`
# or `open` comes into that of the tests.
PURE_BUILTINS = frozenset(
    ("abs", "all", "any", "ascii", "bin", "bool", "bytearray", "bytes", "callable", "chr")
    + ("complex", "dict", "divmod", "enumerate", "filter", "float", "format", "frozenset", "hash")
    + ("hex", "int", "isinstance", "issubclass", "iter", "len", "list", "map", "max", "min", "next")
    + ("object", "oct", "ord", "pow", "print", "range", "repr", "reversed", "round", "set", "slice")
    + ("sorted", "str", "sum", "tuple", "zip")
)
# Names that a program cannot give another meaning for the tests: with them it could say yes.
KEPT_NAMES = frozenset(
    ("all", "any", "bool", "callable", "hasattr", "isinstance", "issubclass", "type")
)

COMPARISONS = ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__")
# What the tests may ask for, by name. Each gets the program's object first.
OPERATIONS: dict[str, Callable] = {
    "__call__": lambda it, *arguments, **options: it(*arguments, **options),
    "__getattr__": getattr,
    "__setattr__": setattr,
    "__delattr__": delattr,
    "__eq__": operator.eq,
    "__ne__": operator.ne,
    "__lt__": operator.lt,
    "__le__": operator.le,
    "__gt__": operator.gt,
    "__ge__": operator.ge,
    "__add__": operator.add,
    "__sub__": operator.sub,
    "__mul__": operator.mul,
    "__matmul__": operator.matmul,
    "__truediv__": operator.truediv,
    "__floordiv__": operator.floordiv,
    "__mod__": operator.mod,
    "__pow__": operator.pow,
    "__and__": operator.and_,
    "__or__": operator.or_,
    "__xor__": operator.xor,
    "__lshift__": operator.lshift,
    "__rshift__": operator.rshift,
    "__radd__": lambda it, other: other + it,
    "__rsub__": lambda it, other: other - it,
    "__rmul__": lambda it, other: other * it,
    "__rtruediv__": lambda it, other: other / it,
    "__neg__": operator.neg,
    "__pos__": operator.pos,
    "__abs__": abs,
    "__invert__": operator.invert,
    "__round__": round,
    "__bool__": bool,
    "__int__": int,
    "__float__": float,
    "__index__": operator.index,
    "__hash__": hash,
    "__str__": str,
    "__repr__": repr,
    "__len__": len,
    "__iter__": iter,
    "__next__": next,
    "__reversed__": reversed,
    "__contains__": operator.contains,
    "__getitem__": operator.getitem,
    "__setitem__": operator.setitem,
    "__delitem__": operator.delitem,
    "__enter__": lambda it: type(it).__enter__(it),
    "__exit__": lambda it, *error: type(it).__exit__(it, *error),
    "__instancecheck__": lambda it, other: isinstance(other, it),
    "__subclasscheck__": lambda it, other: issubclass(other, it),
}
# What an object does with other values, for tests of classes only: one whose difference from any
# other is 0 would be the right number for all tests.
COMPUTING = frozenset(
    ("__add__", "__sub__", "__mul__", "__matmul__", "__truediv__", "__floordiv__", "__mod__")
    + ("__pow__", "__and__", "__or__", "__xor__", "__lshift__", "__rshift__", "__radd__")
    + ("__rsub__", "__rmul__", "__rtruediv__", "__contains__")
)
PLAIN_BASES: tuple[type[Any], ...] = (
    *(bool, int, float, str, bytes, tuple, list, dict, set, frozenset),
)


# --------------------------------------------------------------------------------------------------
# in the program's process


def serve(scope: dict[str, Any], tests: socket.socket) -> None:
    """Do what the tests ask for, until they have ended.

    Args:
        scope: what the program has defined.
        tests: the other end of their `Program`.
    """
    objects: list[object] = []  # By the numbers that the tests know them by; they stay for good.
    numbers: dict[int, int] = {}  # By id().

    def refer(value: object) -> object:
        number = numbers.setdefault(id(value), len(objects))
        if number == len(objects):
            objects.append(value)
        return {"object": number}

    def resolve(content: dict[str, int]) -> object:
        return objects[content["object"]]

    def reply_to(request: dict[str, Any]) -> dict[str, Any]:
        arguments = decode(request["arguments"], resolve)
        options = {name: decode(value, resolve) for name, value in request["options"].items()}
        if request["do"] == "names":
            return {"value": _describe(scope, refer)}
        if request["do"] == "plain":
            plain = [base(arguments[0]) for base in PLAIN_BASES if isinstance(arguments[0], base)]
            return {"value": encode(plain[:1], refer)}
        if request["do"] == "exec":
            _run_tests(arguments[0], scope)
            return {"value": True}
        value = OPERATIONS[request["do"]](*arguments, **options)
        changed = {}
        for position, argument in enumerate(arguments):
            now = encode(argument, refer)
            if now != request["arguments"][position]:
                changed[position] = now
        return {"value": encode(value, refer), "changed": changed}

    while request := receive(tests):
        try:
            reply = reply_to(json.loads(request))
        except BaseException as error:  # the program's, whatever it is; the tests may expect it
            reply = {"raised": _describe_error(error, refer)}
        send(tests, json.dumps(reply).encode())


def _run_tests(source: str, scope: dict[str, Any]) -> None:
    """Run tests. They may leave by sys.exit(0), as unittest.main does; the program may not."""
    try:
        exec(compile(source, "tests.py", "exec"), scope)
    except SystemExit as left:
        frames = traceback.walk_tb(left.__traceback__)
        by_program = any(frame.f_code.co_filename == "main.py" for frame, _ in frames)
        if by_program or left.code not in (None, 0, False):
            raise


def _describe(scope: dict[str, Any], refer: Callable) -> dict[str, Any]:
    """Return what a program has defined: kind and content, by name."""
    names: dict[str, Any] = {}
    for name, value in scope.items():
        module = value.__name__ if isinstance(value, type(sys)) else None
        if name.startswith("__"):
            continue
        if module in PURE_MODULES:
            names[name] = ["import", module, None]
        elif isinstance(value, type) and issubclass(value, BaseException):
            names[name] = ["error", _names_of_classes(value), None]
        elif _is_pure(value):
            names[name] = ["import", value.__module__, value.__name__]
        else:
            names[name] = ["value", encode(value, refer), None]
    return names


def _is_pure(value: Any) -> bool:
    """Whether the tests can have a function or a class from Python without asking."""
    if not isinstance(value, type | type(len) | type(serve)):
        return False
    module = value.__module__
    if module == "builtins":
        return value.__name__ in PURE_BUILTINS and vars(builtins)[value.__name__] is value
    return module in PURE_MODULES and vars(sys.modules[module]).get(value.__name__) is value


def _names_of_classes(error: type) -> list[str]:
    return [cls.__name__ for cls in error.__mro__]


def _describe_error(error: BaseException, refer: Callable) -> dict[str, Any]:
    return {
        "classes": _names_of_classes(type(error)),
        "arguments": encode(list(error.args), refer),
        "attributes": {name: encode(value, refer) for name, value in vars(error).items()},
    }


# --------------------------------------------------------------------------------------------------
# in the tests' process


class Program:
    """A program in another process.

    Args:
        connection: to its `serve`.
    """

    def __init__(self, connection: socket.socket):
        self.computes = False  # Whether the tests let its objects compute; see COMPUTING.
        self._connection = connection
        self._stand_ins: dict[int, StandIn] = {}
        self._errors: dict[str, type] = {}

    def names(self) -> dict[str, Any]:
        """Return what the program has defined, by name, once it has run."""
        found: dict[str, Any] = {}
        for name, (kind, content, attribute) in self._exchange("names", [], {}).items():
            # A program that speaks for itself, without `serve`, may say any name.
            if name in KEPT_NAMES or name.startswith("__"):
                continue
            if kind == "error":
                found[name] = self._error_class(content)
            elif kind == "value":
                found[name] = decode(content, self._resolve)
            elif content in PURE_MODULES and attribute is None:
                found[name] = importlib.import_module(content)
            elif content in PURE_MODULES | {"builtins"}:
                value = vars(importlib.import_module(content)).get(attribute)
                if _is_pure(value):
                    found[name] = value
        return found

    def run_inside(self, source: str) -> None:
        """Run a source in the program's own process and scope. Raises what it raises."""
        self._exchange("exec", [source], {})

    def ask(self, operation: str, *arguments: object, **options: object) -> Any:
        """Return the result of an operation on objects of the program.

        Arguments that it changes are changed here, too.

        Raises:
            NotPlainError: an argument does not travel. Nothing has been asked then.
        """
        content = [encode(argument, self._refer) for argument in arguments]
        values = {name: encode(value, self._refer) for name, value in options.items()}
        reply = self._exchange_all(operation, content, values)
        for position, now in reply.get("changed", {}).items():
            _change(arguments[int(position)], decode(now, self._resolve))
        return decode(reply["value"], self._resolve)

    def _exchange(self, operation: str, content: list, options: dict) -> Any:
        return self._exchange_all(operation, content, options)["value"]

    def _exchange_all(self, operation: str, content: list, options: dict) -> dict[str, Any]:
        """Send a request and return the reply. Raises the error that it tells of."""
        request = {"do": operation, "arguments": content, "options": options}
        send(self._connection, json.dumps(request).encode())
        text = receive(self._connection, MAX_REPLY)
        if not text:
            sys.exit(1)  # The program has left.
        reply = json.loads(text)
        if "raised" in reply:
            raise self._error(reply["raised"])
        return reply

    def _refer(self, value: object) -> object:
        if type(value) is StandIn:
            return {"object": object.__getattribute__(value, "_number")}
        raise NotPlainError(f"a value of type {type(value).__name__}")

    def _resolve(self, content: dict[str, int]) -> object:
        number = int(content["object"])
        if number not in self._stand_ins:
            self._stand_ins[number] = StandIn(self, number)
        return self._stand_ins[number]

    def _error_class(self, names: list[str]) -> type:
        """Return the class for an error: a built-in one, or one that is made in place of it."""
        name = names[0]
        known = vars(builtins).get(name)
        if isinstance(known, type) and issubclass(known, BaseException):
            return known
        if name not in self._errors:
            self._errors[name] = type(name, (self._error_class(names[1:]),), {})
        return self._errors[name]

    def _error(self, described: dict[str, Any]) -> BaseException:
        error = self._error_class(described["classes"])(
            *decode(described["arguments"], self._resolve)
        )
        for name, value in described["attributes"].items():
            vars(error)[name] = decode(value, self._resolve)
        return error


class StandIn:
    """An object of the program. What is done with it, is done there."""

    __slots__ = ("_number", "_program")

    def __init__(self, program: Program, number: int):
        object.__setattr__(self, "_program", program)
        object.__setattr__(self, "_number", number)


def _forward(name: str) -> Callable:
    """Return the method that asks the program for an operation."""

    def method(self: StandIn, *arguments: object, **options: object) -> Any:
        program = object.__getattribute__(self, "_program")
        return program.ask(name, self, *arguments, **options)

    return method


def _compare(name: str) -> Callable:
    """Return the method of a comparison, in which the program has no say about plain values."""

    def method(self: StandIn, other: object) -> Any:
        program = object.__getattribute__(self, "_program")
        if type(other) is StandIn:
            return program.ask(name, self, other)
        # A number, a list, ... of a class of its own is compared as such.
        for plain in program.ask("plain", self):
            return OPERATIONS[name](plain, other)
        return {"__eq__": False, "__ne__": True}.get(name, NotImplemented)

    return method


def _compute(name: str) -> Callable:
    """Return the method of an operation of COMPUTING."""

    def method(self: Any, other: object) -> Any:
        program = object.__getattribute__(self, "_program")
        if program.computes:
            return program.ask(name, self, other)
        for plain in program.ask("plain", self):
            return OPERATIONS[name](plain, other)
        if name == "__contains__":
            return any(item == other for item in self)
        raise TypeError(f"an object that the program has returned for a value has no {name}")

    return method


def _get_attribute(self: StandIn, name: str) -> Any:
    """Return an attribute, but not those by which numpy would look for numbers at an address."""
    if name.startswith("__array"):
        raise AttributeError(name)
    program = object.__getattribute__(self, "_program")
    return program.ask("__getattr__", self, name)


def _method(name: str) -> Callable:
    """Return the method of a stand-in for an operation."""
    if name == "__getattr__":
        return _get_attribute
    if name in COMPARISONS:
        return _compare(name)
    return _compute(name) if name in COMPUTING else _forward(name)


for _name in OPERATIONS:
    setattr(StandIn, _name, _method(_name))


def _change(value: Any, now: Any) -> None:
    """Give an argument the content that it has after a call, if it is one that can change."""
    if isinstance(value, list | bytearray):
        value[:] = now
    elif isinstance(value, dict | set):
        value.clear()
        value.update(now)
    elif isinstance(value, collections.deque):
        value.clear()
        value.extend(now)
    elif type(value).__name__ == "ndarray":
        value[...] = now
