"""Find the function that a setting names: a registered one, or one in a file of the user."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

from minirl.errors import UserError, require


def find_function(setting: str, value: str, registered: dict[str, Callable]) -> Callable:
    """Return a registered function, or the function that `file.py:function` names.

    Args:
        setting: name of the setting, for messages.
        value: its value.
        registered: the functions that can be given by name.

    Raises:
        UserError: if there is no such function or its file does not import.
    """
    if value in registered:
        return registered[value]
    file, _, name = value.rpartition(":")
    require(
        file,
        f"{setting} = {value!r} is neither registered ({', '.join(registered)}) nor of the form "
        "file.py:function",
    )
    require(Path(file).is_file(), f"{setting} = {value}: no file {file}")
    spec = importlib.util.spec_from_file_location(f"minirl_user_{Path(file).stem}", file)
    if spec is None or spec.loader is None:
        raise UserError(f"{setting} = {value}: {file} is not a Python file (.py)")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module there
    try:
        spec.loader.exec_module(module)
    # The user's code may raise anything.
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        problem = f"{type(error).__name__}: {error}"
        raise UserError(f"{setting} = {value}: {file} does not import: {problem}") from error
    function = vars(module).get(name)
    if not callable(function):
        raise UserError(f"{setting} = {value}: {file} has no function {name}")
    return function
