"""What a setting means, as the comments of the config classes say it, and what may be given for it.

A comment stands behind the setting, or above it with `#:` before each line, or below it as a text.
"""

import ast
import dataclasses
import inspect
import io
import sys
import tokenize
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

# What to call a value in the help.
WORDS = {str: "TEXT", int: "INT", float: "NUMBER"}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A setting of a program."""

    name: str  # Of its section, such as policy.lr.
    section: type  # The class that it belongs to.
    value: str  # What may be given; empty: it is a switch.
    default: object  # dataclasses.MISSING: there is none.

    @property
    def description(self) -> str:
        """Return what it means, as sentences; empty if nothing is said. Reads the class's file."""
        return describe(self.section, self.name.rpartition(".")[2])

    @property
    def is_switch(self) -> bool:
        """Return whether it is given by its name alone, or by its name with `no-`."""
        return not self.value

    @property
    def is_positional(self) -> bool:
        """Return whether it is a word before the flags."""
        return self.default is dataclasses.MISSING

    @property
    def flag(self) -> str:
        """Return how it is given, without a value."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def negated_flag(self) -> str:
        """Return how a switch is turned off."""
        *sections, last = self.flag.removeprefix("--").split(".")
        return "--" + ".".join([*sections, f"no-{last}"])


def settings_of(cls: type, values: object = None, prefix: str = "") -> Iterator[Setting]:
    """Return the settings of a config class, those of a section after one another.

    Args:
        cls: the class.
        values: an instance, whose values are shown as the defaults; None: those of the class.
        prefix: begins the names.
    """
    hints = typing.get_type_hints(cls)
    sections = []
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            sections.append((field.name, hint))
            continue
        default = field.default
        if values is not None:
            default = vars(values)[field.name]
        elif field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        yield Setting(
            name=prefix + field.name,
            section=cls,
            value=_value_text(hint),
            default=default,
        )
    for name, section in sections:
        inner = vars(values)[name] if values is not None else None
        yield from settings_of(section, inner, f"{prefix}{name}.")


def _value_text(hint: typing.Any) -> str:
    """Return what may be given for a setting of a type; empty for a switch."""
    if hint is bool:
        return ""
    if hint in WORDS:
        return WORDS[hint]
    origin = typing.get_origin(hint)
    arguments = [argument for argument in typing.get_args(hint) if argument is not types.NoneType]
    if origin is typing.Literal:
        choices = [str(choice) for choice in arguments]
        return choices[0] if len(choices) == 1 else f"{{{','.join(choices)}}}"
    if origin is list:
        return f"{_value_text(arguments[0])} ..."
    if origin is tuple:
        return " ".join(_value_text(argument) for argument in arguments)
    if hint is dict or origin is dict:
        return "KEY VALUE ..."
    # One of several types; the last one takes the most words.
    return _value_text(arguments[-1])


def describe(cls: type, name: str) -> str:
    """Return what a setting means; empty if nothing is said.

    A class that changes a default need not say again what its base says.
    """
    for owner in cls.__mro__:
        text = _comments(owner.__module__).get((owner.__qualname__, name))
        if text:
            return text
    return ""


def sentence_of(text: str) -> str:
    """Return the first sentence of a text, without its point."""
    return text.partition(". ")[0].removesuffix(".")


@cache
def _comments(module: str) -> dict[tuple[str, str], str]:
    """Return what the comments in a module say: class and setting -> text."""
    if module == "builtins":
        return {}
    source = inspect.getsource(sys.modules[module])
    comments = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comments[token.start[0]] = token.string
    lines = source.splitlines()
    said = {}
    for node in ast.parse(source).body:
        if not isinstance(node, ast.ClassDef):
            continue
        for statement, following in zip(node.body, [*node.body[1:], None], strict=True):
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                text = _comment_of(statement, comments, lines) or _text_of(following)
                said[node.name, statement.target.id] = text
    return said


def _comment_of(statement: ast.stmt, comments: dict[int, str], lines: list[str]) -> str:
    """Return the comment above a statement, or behind it."""
    above: list[str] = []
    number = statement.lineno - 1
    while lines[number - 1].lstrip().startswith("#:"):
        above.insert(0, comments[number].removeprefix("#:"))
        number -= 1
    if above:
        return " ".join(" ".join(above).split())
    last = statement.end_lineno or statement.lineno
    behind = [comments[n] for n in range(statement.lineno, last + 1) if n in comments]
    return " ".join(" ".join(comment.lstrip("#") for comment in behind).split())


def _text_of(statement: ast.stmt | None) -> str:
    """Return the text that stands as a statement of its own."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return " ".join(str(statement.value.value).split())
    return ""
