"""Find the function that a setting names: a registered one, or one in a file of the user's."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

from minirl.errors import UserError, require


def find_function(setting: str, value: str, registered: dict[str, Callable]) -> Callable:
    """What a setting names: a registered function, or `file.py:function` of the user's. Raises
    UserError for what is not there.
    """
    if value in registered:
        return registered[value]
    file, _, name = value.rpartition(":")
    require(
        file,
        f"{setting} = {value!r} is neither registered ({', '.join(registered)}) nor of the form file.py:function",
    )
    require(Path(file).is_file(), f"{setting} = {value}: no file {file}")
    require(file.endswith(".py"), f"{setting} = {value}: {file} is not a Python file (.py)")
    spec = importlib.util.spec_from_file_location(f"minirl_user_{Path(file).stem}", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the user's code may raise anything
        raise UserError(
            f"{setting} = {value}: {file} does not import: {type(error).__name__}: {error}"
        ) from error
    require(callable(vars(module).get(name)), f"{setting} = {value}: {file} has no function {name}")
    return vars(module)[name]
