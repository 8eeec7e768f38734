"""The process in which tests judge a program that runs in another one.

    runner   main.py ───────────────▶ program's process: runs main.py, then serves (remote.py)
       ╲                                  ▲ calls and values
        tests ──────────────────────▶ tests' process: runs them with stand-ins for what main.py
              ◀────────────────────── defines, and says PASSED
             verdict

Both are in the sandbox. The program's process holds neither the tests nor the connection that the
verdict goes through. What it prints, and whether it leaves by sys.exit(0), is no matter.

The tests use the built-in functions and the modules, whatever the program calls its own; only tests
of nothing else take `sum` or `max` for the program's. Objects of the program compute with other
values, or say that they contain one, only for tests that name a class of it (a capital letter):
where a function is to return a number, nothing else passes for one.

Some tests need the program in their own process: they give it a function of their own, replace its
standard output, or are cases of unittest. Those run there, and then it is the program's process
that says how they ended. A program that was made for it could lie there.
"""

import ast
import builtins
import importlib
import os
import socket
import traceback
from collections.abc import Callable

from minirl.sandbox.inside.kernel import Confinement, confine, end_with_parent
from minirl.sandbox.inside.remote import MODULE_ALIASES, PURE_MODULES, Program, StandIn
from minirl.sandbox.inside.values import NotPlainError

PASSED = b"passed"
# Names with which tests look at more than values.
INSIDE_ONLY = frozenset(
    ("__builtins__", "__import__", "breakpoint", "compile", "dir", "eval", "exec", "globals")
    + ("input", "locals", "open", "super", "vars")
)
ASYNCHRONOUS = (ast.AsyncFunctionDef, ast.AsyncFor, ast.AsyncWith, ast.Await)


def start_tests(verdict_descriptor: int, rights: Confinement) -> socket.socket:
    """Start the tests' process. Returns the program's end of the connection to it.

    Args:
        verdict_descriptor: of the connection to the runner, which this process does not keep.
        rights: of the process; it does not outlive this one.
    """
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
        confine(rights)
        with verdict.makefile("rb") as stream:
            source = stream.read().decode()
        if _do_pass(source, Program(tests_end)):
            verdict.sendall(PASSED)
    os._exit(0)


def _do_pass(source: str, program: Program) -> bool:
    """Run the tests. Returns whether they reach their end; prints the error if not."""
    try:
        names = program.names()
        if can_be_apart(source):
            try:
                names = names_for(source, names)
                program.computes = any(_is_class(name, value) for name, value in names.items())
                scope = {"__name__": "__main__", "__builtins__": builtins, **names}
                scope["type"] = _type_in(program)
                exec(compile(source, "tests.py", "exec"), scope)
                return True
            except NotPlainError:
                pass  # They do what cannot be done apart.
        program.run_inside(source)
        return True
    except BaseException:  # the tests' or the program's, and it has failed whatever it is
        traceback.print_exc()
        return False


def names_for(source: str, names: dict[str, object]) -> dict[str, object]:
    """Return what tests see of a program's names: those that they ask it for.

    Those of built-in functions are not among them, unless the tests ask for nothing else. Where the
    tests take attributes of a name of a module, as `math.isclose`, it is the module, whatever the
    program calls so, but for a class of that name from that module (`datetime`).
    """
    tree = ast.parse(source)
    wanted = _free_names(tree) & names.keys()
    own = {name for name in wanted if name not in vars(builtins) and name not in PURE_MODULES}
    if own:
        wanted -= vars(builtins).keys()
    seen = {name: names[name] for name in wanted}
    with_attributes = {
        node.value.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }
    for name in with_attributes & wanted & (PURE_MODULES | MODULE_ALIASES.keys()):
        module = importlib.import_module(MODULE_ALIASES.get(name, name))
        if name not in vars(module) or seen[name] is not vars(module)[name]:
            seen[name] = module
    return seen


def _free_names(tree: ast.AST) -> set[str]:
    """Return the names that a source uses and does not define."""
    used = set()
    defined = set()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Load()):
                used.add(name)
            case ast.Name(id=name) | ast.arg(arg=name):
                defined.add(name)
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                defined.add(name)
    return used - defined


def _is_class(name: str, value: object) -> bool:
    """Whether tests that name this object of the program take it for a class."""
    return type(value) is StandIn and name[0].isupper()


def _type_in(program: Program) -> Callable:
    """Return what `type` is for the tests: it knows the classes of the program's objects."""

    def type_of(value: object) -> object:
        if type(value) is StandIn:
            return program.ask("__getattr__", value, "__class__")
        return type(value)

    return type_of


def can_be_apart(source: str) -> bool:
    """Return whether tests look at nothing of a program but values."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    return all(_is_apart(node, called) for node in ast.walk(tree))


def _is_apart(node: ast.AST, called: set[int]) -> bool:
    match node:
        case ast.Import(names=names):
            return all(alias.name.split(".")[0] in PURE_MODULES for alias in names)
        case ast.ImportFrom(module=module):
            return (module or "").split(".")[0] in PURE_MODULES
        case ast.ClassDef(bases=bases):
            return not bases  # One of them could be the program's.
        case ast.FunctionDef(name=name):
            return name not in vars(builtins)  # The program would see what takes its place.
        case ast.Name(id="type"):
            return id(node) in called
        case ast.Name(id=name, ctx=ast.Store()):
            return name not in vars(builtins)
        case ast.Name(id=name):
            return name not in INSIDE_ONLY
    return not isinstance(node, ASYNCHRONOUS)
