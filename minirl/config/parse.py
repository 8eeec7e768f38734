"""From a YAML file and flags to a config, and back.

Only known keys and right types are accepted, and one message says what is wrong.
"""

import argparse
import contextlib
import dataclasses
import difflib
import functools
import io
import json
import os
import re
import sys
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pydantic

from minirl.base.errors import DONE, UserError, require
from minirl.base.reading import is_file, is_unicode, read_text
from minirl.config.values import BOOLEANS, parse_yaml, read_word

# Where the recipes are: a link to configs/ in a clone, a copy of it in a wheel.
RECIPES = Path(__file__).parent.parent / "recipes"

CONFIG_HELP = (
    "--config FILE reads settings from a YAML file; flags win over it. A switch takes true or "
    "false, too."
)

# By pydantic's kind of error: what to say instead of its message, which speaks of Python.
MESSAGES = {
    "missing": "has too few values",
    "dataclass_type": "must be a mapping of settings",
    "too_long": "has too many values",
}


def parse_flags(cls: type, argv: list[str] | None = None) -> Any:
    """Read `--config FILE` (if given) and then the flags of a config class.

    `--help` prints all settings. Rank 0 does, and the program exits.

    Args:
        cls: a config class, with its program (`-m minirl.NAME`) in its docstring.
        argv: arguments; None: those of the process.

    Raises:
        UserError: for a missing file, a flag that tyro refuses (its words are the message), an
            unknown setting and a wrong value.
    """
    general = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    general.add_argument("--config", nargs="?", const="", action="append", default=[])
    general.add_argument("-h", "--help", action="store_true")
    for word in sys.argv if argv is None else argv:
        shown = repr(word[:200])
        require("\0" not in word, f"{shown} has a zero byte; write it without")
        require(is_unicode(word), f"{shown} has bytes that are not UTF-8; write it without")
    known, flags = general.parse_known_args(argv)
    files = known.config
    require(len(files) < 2, f"--config is given {len(files)} times: {', '.join(files)}; name one")
    default = {"default": load_config(cls, find_recipe(files[0]))} if files else {}
    flags = ["--help"] if known.help else _with_plain_switches(cls, flags)

    import tyro  # here, because only programs need it and importing it is slow

    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            cfg = tyro.cli(
                cls,
                prog=f"python -m {program_of(cls)}",
                args=flags,
                description=f"{cls.__doc__}\n\n{CONFIG_HELP}",
                config=(tyro.conf.PositionalRequiredArgs,),
                registry=_registry(),
                **default,
            )
    except SystemExit as stop:
        if not known.help:
            lines = [line.rstrip() for line in said.getvalue().splitlines()]
            raise UserError("wrong flags\n" + "\n".join(lines).rstrip()) from stop
        if os.environ.get("RANK", "0") == "0":
            with contextlib.suppress(BrokenPipeError):  # of a pager that was left
                print(said.getvalue(), end="", flush=True)
        raise SystemExit(DONE) from stop
    return fill_config(cls, dataclasses.asdict(cfg))


def _with_plain_switches(cls: type, flags: list[str]) -> list[str]:
    """Write `--rollout.dump=True` and `--rollout.dump true` as tyro takes a switch: by name alone.

    False is `--rollout.no-dump`.

    Raises:
        UserError: what follows `=` is no boolean.
    """
    switches = set(_switches(cls, "--"))
    written = []
    waiting = flags[::-1]
    while waiting:
        word = waiting.pop()
        name, equals, text = word.partition("=")
        flag = name.replace("_", "-")
        if flag not in switches:
            written.append(word)
            continue
        value: bool | None = True
        if equals:
            value = BOOLEANS.get(text.lower())
            require(value is not None, f"{name} = {text!r} is no boolean; give true or false")
        elif waiting and waiting[-1].lower() in BOOLEANS:
            value = BOOLEANS[waiting.pop().lower()]
        section, dot, last = flag.removeprefix("--").rpartition(".")
        written.append(flag if value else f"--{section}{dot}no-{last}")
    return written


def _switches(cls: type, prefix: str) -> Iterator[str]:
    """Return the flags of a config class that are booleans."""
    for name, hint in typing.get_type_hints(cls).items():
        flag = prefix + name.replace("_", "-")
        if hint is bool:
            yield flag
        elif dataclasses.is_dataclass(hint) and isinstance(hint, type):
            yield from _switches(hint, f"{flag}.")


def program_of(cls: type) -> str:
    """Return the program of a config class, as its docstring names it: `-m PACKAGE.NAME`.

    A class of the user's with further settings need not name it.
    """
    docstrings = " ".join(base.__doc__ or "" for base in cls.__mro__)
    return re.findall(r"-m (\w+\.\w+)", docstrings)[0]


def _registry() -> Any:
    """Return what tyro has to know of mappings and of numbers that may be left out.

    A flag of a mapping takes names and values in turn.
    """
    from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec

    def read(words: list[str]) -> dict[str, Any]:
        if len(words) % 2:
            raise ValueError(f"names and values come in turn, and {words[-1]!r} has no value")
        return {name: read_word(word) for name, word in zip(words[::2], words[1::2], strict=True)}

    def write(values: dict[str, Any]) -> list[str]:
        words = []
        for name, value in values.items():
            # Words that `read` reads back equal: JSON where a text would be read as something else.
            is_plain_text = isinstance(value, str) and read_word(value) == value
            words += [name, value if is_plain_text else json.dumps(value, ensure_ascii=False)]
        return words

    registry = ConstructorRegistry()

    @registry.primitive_rule
    def mapping(info: Any) -> Any:
        if typing.get_origin(info.type) is not dict:
            return None
        return PrimitiveConstructorSpec(
            nargs="*",
            metavar="[NAME VALUE ...]",
            instance_from_str=read,
            is_instance=lambda value: isinstance(value, dict),
            str_from_instance=write,
        )

    @registry.primitive_rule
    def number_or_none(info: Any) -> Any:
        # What tyro says by itself of a value that is neither speaks of Python's types.
        kinds = [
            typing.get_args(kind)[0] if typing.get_origin(kind) is typing.Annotated else kind
            for kind in typing.get_args(info.type)
        ]
        if kinds not in ([int, type(None)], [float, type(None)]):
            return None
        number = kinds[0]
        return PrimitiveConstructorSpec(
            nargs=1,
            metavar=f"{{None}}|{number.__name__.upper()}",
            instance_from_str=lambda words: None if words[0] == "None" else number(words[0]),
            is_instance=lambda value: value is None or isinstance(value, number),
            str_from_instance=lambda value: [str(value)],
        )

    return registry


def find_recipe(path: str) -> str:
    """Return the path of a recipe of minirl that is asked for by name, from any folder.

    A file of that path counts first. `quickstart_rl`, `quickstart_rl.yaml` and
    `configs/quickstart_rl.yaml` are the same recipe.
    """
    folder, name = os.path.split(path)
    if path and not is_file(path) and folder in ("", "configs"):
        recipe = RECIPES / (name if name.endswith(".yaml") else f"{name}.yaml")
        if is_file(recipe):
            return str(recipe)
    return path


def load_config(cls: type, path: str, section: str = "") -> Any:
    """Read a config class from a YAML file, or from one section of the file.

    Raises:
        UserError: for a file that cannot be read, YAML that is not valid, and what `fill_config`
            refuses.
    """
    values = parse_yaml(read_text(path, "--config"), f"--config {path}")
    if section and isinstance(values, dict):
        values = values.get(section, {})
    return fill_config(cls, values, f"{path}: ", section)


def flatten(values: dict, prefix: str = "") -> dict[str, object]:
    """Return the settings of nested mappings by `section.name`."""
    flat: dict[str, object] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def get(cfg: Any, name: str) -> Any:
    """Return the value of a setting, whose name may have dots; None: there is no such one."""
    section, _, rest = name.partition(".")
    value = vars(cfg).get(section)
    return get(value, rest) if rest and value is not None else value


def with_settings(cfg: Any, values: Mapping[str, Any]) -> Any:
    """Return a config with other values of settings, whose names may have dots."""
    for name, value in values.items():
        section, _, rest = name.partition(".")
        if rest:
            value = with_settings(vars(cfg)[section], {rest: value})
        cfg = dataclasses.replace(cfg, **{section: value})
    return cfg


@functools.cache  # It takes a tenth of a second.
def _model_of(cls: type) -> Any:
    """Return the model of pydantic that has an instance of a config class as `cfg`."""
    strict = pydantic.ConfigDict(strict=True, extra="forbid")
    return pydantic.create_model("Config", __config__=strict, cfg=(cls, ...))


def fill_config(cls: type, values: Any, where: str = "", section: str = "") -> Any:
    """Make a config class from nested mappings.

    Args:
        cls: the config class.
        values: nested mappings of settings.
        where: begins every message, such as a file name.
        section: the section that the mappings were in, if they are only a part of a file.

    Raises:
        UserError: for a key that does not exist (naming the closest that does), and for a value of
            the wrong type or out of its bounds.
    """
    as_json = json.dumps({"cfg": values}, default=str)  # a date as a text
    try:
        return _model_of(cls).model_validate_json(as_json).cfg  # by JSON's types: lists are tuples
    except pydantic.ValidationError as error:
        first = error.errors()[0]

    # Follow the place of the error down the classes to the setting that is wrong.
    names = [section] if section else []
    for key in first["loc"][1:]:
        if not dataclasses.is_dataclass(cls):
            break  # the rest of the place is an item of a list, or one of several types
        hints = typing.get_type_hints(cls)
        known = [setting.name for setting in dataclasses.fields(cls)]
        if key not in known:
            prefix = "".join(f"{name}." for name in names)
            close = difflib.get_close_matches(str(key), known, n=1)
            hint = f"known here: {', '.join(known)}"
            if close:
                hint = f"did you mean {prefix}{close[0]}?"
            outer, dot, inner = str(key).partition(".")
            if dot:
                hint = f"in a file, a setting with a dot is written {outer}: {{{inner}: ...}}"
            raise UserError(f"{where}unknown setting {prefix}{key}; {hint}")
        names.append(str(key))
        require(
            key in values,
            f"{where}{'.'.join(names)} has no default and is not set there; give it a default in "
            f"{cls.__name__}",
        )
        cls = hints[key]
        values = values[key]
    setting = ".".join(names) or "the file"
    problem = MESSAGES.get(first["type"], first["msg"].removeprefix("Input "))
    shown = repr(values)
    if len(shown) > 300:
        shown = f"{shown[:300]}..."
    if isinstance(values, bool):
        problem += "; YAML reads off, on, no and yes so unless they are in quotes"
    raise UserError(f"{where}{setting} = {shown} {problem}")
