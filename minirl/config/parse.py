"""From a YAML file and flags to a config, and back: known keys only, right types only, one message
for what is wrong.
"""

import argparse
import dataclasses
import difflib
import json
import os
import re
import typing
from pathlib import Path
from typing import Any

import pydantic
import yaml

from minirl.errors import UserError, require


class _Loader(yaml.SafeLoader):
    """Reads 1e-4 as a number, which YAML 1.1 takes for a text, ..."""


class _Dumper(yaml.SafeDumper):
    """... and so writes the text 1e-4 with quotes."""


yaml.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?\d[\d.]*[eE][-+]?\d+$"),
    list("-+0123456789"),
    Loader=_Loader,
    Dumper=_Dumper,
)
WRONG = {
    "missing": "has too few values",
    "dataclass_type": "must be a mapping of settings",
}  # what pydantic would say in other terms than a user's


def parse_flags(cls: type, argv: list[str] | None = None) -> Any:
    """Read `--config FILE` (if given) and then the flags of a config class.

    Raises UserError for a missing file and for what `fill_config` refuses; tyro itself answers
    wrong flags and exits with code 2.
    """
    import tyro  # here, because only programs need it and it takes a while

    file = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    file.add_argument("--config", nargs="?", const="")
    given, argv = file.parse_known_args(argv)
    default = {} if given.config is None else {"default": load_config(cls, given.config)}
    program = re.search(r"-m (minirl\.\w+)", cls.__doc__)[1]
    cfg = tyro.cli(
        cls,
        prog=f"python -m {program}",
        args=argv,
        description=cls.__doc__,
        config=(tyro.conf.PositionalRequiredArgs,),
        console_outputs=os.environ.get("RANK", "0") == "0",
        **default,
    )  # one rank tells what is wrong
    return fill_config(cls, dataclasses.asdict(cfg))


def load_config(cls: type, path: str, section: str = "") -> Any:
    """A config class from a file, or from one section of the file. Raises UserError."""
    require(Path(path).is_file(), f"--config {path!r}: no such file")
    try:
        values = yaml.load(Path(path).read_text(), _Loader) or {}
    except yaml.YAMLError as error:
        raise UserError(f"--config {path}: not valid YAML: {error}") from error
    if section:
        values = values.get(section, {}) if isinstance(values, dict) else values
    return fill_config(cls, values, f"{path}: ", section)


def save_config(cfg: Any, path: Path) -> None:
    """Write a config that `load_config` reads back equal."""
    path.write_text(yaml.dump(dataclasses.asdict(cfg), Dumper=_Dumper, sort_keys=False))


def fill_config(cls: type, values: Any, where: str = "", section: str = "") -> Any:
    """A config class from nested mappings. Raises UserError for a key that does not exist (naming
    the closest) and for a value of the wrong type or out of its bounds, which begins with `where`
    (and `section`, if the mappings are one of a file).
    """
    model = pydantic.create_model(
        "Config", __config__=pydantic.ConfigDict(strict=True, extra="forbid"), cfg=(cls, ...)
    )
    try:
        return model.model_validate_json(
            json.dumps({"cfg": values}, default=str)
        ).cfg  # JSON's types: lists become tuples
    except pydantic.ValidationError as error:
        wrong = error.errors()[0]
    names = [section] if section else []
    for key in wrong["loc"][1:]:
        if not dataclasses.is_dataclass(cls):
            break  # what follows is an item of a list, or a type that it may be of
        hints, prefix = typing.get_type_hints(cls), "".join(f"{name}." for name in names)
        if key not in hints:
            close = difflib.get_close_matches(str(key), hints, n=1)
            raise UserError(
                f"{where}unknown setting {prefix}{key}; "
                + (
                    f"did you mean {prefix}{close[0]}?"
                    if close
                    else f"known here: {', '.join(hints)}"
                )
            )
        names, cls, values = [*names, key], hints[key], values[key]
    raise UserError(
        f"{where}{'.'.join(names) or 'the file'} = {values!r} {WRONG.get(wrong['type'], wrong['msg'].removeprefix('Input '))}"
    )
