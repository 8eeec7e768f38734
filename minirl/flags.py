"""From a YAML file and flags to a config, and back: known keys only, right types only, one message for what is wrong."""

import contextlib
import dataclasses
import difflib
import importlib.util
import os
import re
import sys
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import yaml

from minirl.types import UserError


def parse(cls: type, argv: list[str] | None = None) -> Any:
    """Read `--config FILE` (if given) and then the flags of a config class.

    Raises UserError for a missing file, a key that does not exist (naming the closest) or a value of the wrong type;
    tyro itself answers wrong flags and exits with code 2.
    """
    import tyro  # here, because only programs need it and it takes a while

    argv = list(sys.argv[1:] if argv is None else argv)
    required = any(f.default is f.default_factory is dataclasses.MISSING for f in dataclasses.fields(cls))
    default = None if required else cls()
    for i, arg in enumerate(argv):
        if arg == "--config" or arg.startswith("--config="):
            path = arg.partition("=")[2] or (argv[i + 1] if i + 1 < len(argv) else "")
            default = load(cls, path)
            del argv[i : i + (1 if "=" in arg else 2)]
            break
    program = re.search(r"-m (minirl\.\w+)", cls.__doc__)[1]
    with contextlib.ExitStack() as stack:
        if os.environ.get("RANK", "0") != "0":  # one rank tells what is wrong
            silence = stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(contextlib.redirect_stderr(silence))
            stack.enter_context(contextlib.redirect_stdout(silence))
        return tyro.cli(cls, prog=f"python -m {program}", args=argv, description=cls.__doc__, config=(tyro.conf.PositionalRequiredArgs,),
                        **({} if default is None else {"default": default}))


def load(cls: type, path: str, section: str = "") -> Any:
    """A config class from a file, or from one section of the file. Raises UserError."""
    if not Path(path).is_file():
        raise UserError(f"--config {path!r}: no such file")
    try:
        values = yaml.safe_load(Path(path).read_text()) or {}
    except yaml.YAMLError as error:
        raise UserError(f"--config {path}: not valid YAML: {error}") from error
    if section:
        return _fill(cls, values.get(section, {}) if isinstance(values, dict) else values, where=path, prefix=f"{section}.")
    return _fill(cls, values, where=path, prefix="")


def save(cfg: Any, path: Path) -> None:
    """Write a config that `load` reads back equal."""
    path.write_text(yaml.safe_dump(to_dict(cfg), sort_keys=False))


def to_dict(cfg: Any) -> dict:
    return {k: list(v) if isinstance(v, tuple) else to_dict(v) if dataclasses.is_dataclass(v) else v
            for k, v in ((f.name, getattr(cfg, f.name)) for f in dataclasses.fields(cfg))}


def _fill(cls: type, values: Any, *, where: str, prefix: str) -> Any:
    if not isinstance(values, dict):
        raise UserError(f"{where}: {prefix.rstrip('.') or 'the file'} must be a mapping of settings, not {values!r}")
    hints = typing.get_type_hints(cls)
    given = {}
    for key, value in values.items():
        if key not in hints:
            close = difflib.get_close_matches(str(key), hints, n=1)
            hint = f"did you mean {prefix}{close[0]}?" if close else f"known here: {', '.join(hints)}"
            raise UserError(f"{where}: unknown setting {prefix}{key}; {hint}")
        if dataclasses.is_dataclass(hints[key]):
            given[key] = _fill(hints[key], value, where=where, prefix=f"{prefix}{key}.")
        else:
            given[key] = _convert(hints[key], value, f"{where}: {prefix}{key}")
    return cls(**given)


def _convert(hint: Any, value: Any, name: str) -> Any:
    """YAML gives 1e-4 as text and 1 for 1.0; anything else of the wrong type is an error."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        if value not in args or isinstance(value, bool):
            raise UserError(f"{name} = {value!r} is not one of {', '.join(map(str, args))}")
        return value
    if origin in (typing.Union, types.UnionType):
        arms = [a for a in args if (typing.get_origin(a) is list) == isinstance(value, list)]
        return None if value is None and type(None) in args else _convert(next((a for a in arms if a is not type(None)), args[0]), value, name)
    if origin in (list, tuple):
        if not isinstance(value, list):
            raise UserError(f"{name} = {value!r} must be a list")
        if origin is tuple and len(value) != len(args):
            raise UserError(f"{name} = {value!r} must have {len(args)} values")
        return origin(_convert(args[0], v, name) for v in value)
    try:
        if hint is float and not isinstance(value, bool):
            return float(value)
    except (TypeError, ValueError):
        pass
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise UserError(f"{name} = {value!r} must be of type {hint.__name__}")
    return value


def find_function(setting: str, value: str, registered: dict[str, Callable]) -> Callable:
    """What a setting names: a registered function, or `file.py:function` of the user's. Raises UserError for what is not there."""
    if value in registered:
        return registered[value]
    file, _, name = value.rpartition(":")
    if not file:
        raise UserError(f"{setting} = {value!r} is neither registered ({', '.join(registered)}) nor of the form file.py:function")
    if not Path(file).is_file():
        raise UserError(f"{setting} = {value}: no file {file}")
    if not file.endswith(".py"):
        raise UserError(f"{setting} = {value}: {file} is not a Python file (.py)")
    spec = importlib.util.spec_from_file_location(f"minirl_user_{Path(file).stem}", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the user's code may raise anything
        raise UserError(f"{setting} = {value}: {file} does not import: {type(error).__name__}: {error}") from error
    if not callable(vars(module).get(name)):
        raise UserError(f"{setting} = {value}: {file} has no function {name}")
    return vars(module)[name]
