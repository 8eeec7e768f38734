"""Find the function that a setting names: a registered one, or one in a file of the user.

A file of the user is a module of its own, whatever its name. Like a script it can import its
neighbours, the modules in its folder, while it is imported.
"""

import functools
import hashlib
import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from minirl.base.errors import UserError, require
from minirl.config.values import read_options

USER = "minirl_user_"  # Begins the names of modules of files of the user.
_imported: dict[Path, ModuleType] = {}  # By file.
_neighbours: dict[str, Path] = {}  # Name of a module that a file has imported -> its folder.


def find_function(setting: str, value: str, registered: dict[str, Callable]) -> Callable:
    """Return a registered function, or the function that `file.py:function` names.

    With `?name=value&name=value` after it, the function gets these arguments in every call.

    Args:
        setting: name of the setting, for messages.
        value: its value.
        registered: the functions that can be given by name.

    Raises:
        UserError: if there is no such function, its file does not import, a neighbour of the file
            has the name of another folder's, which has been imported, or the arguments are written
            otherwise.
    """
    if value in registered:
        return registered[value]
    place, _, query = value.partition("?")
    path, _, name = place.rpartition(":")
    require(
        path,
        f"{setting} = {value!r} is neither registered ({', '.join(registered)}) nor of the form "
        "file.py:function",
    )
    require(Path(path).is_file(), f"{setting} = {value}: no file {path}")
    file = Path(path).resolve()
    if file not in _imported:
        _imported[file] = _import_file(file, f"{setting} = {value}: {path}")
    function = vars(_imported[file]).get(name)
    if not callable(function):
        raise UserError(f"{setting} = {value}: {path} has no function {name}")
    try:
        options = read_options(query)
    except ValueError as error:
        raise UserError(f"{setting} = {value}: {error}; write ?name=value&name=value") from error
    return functools.partial(function, **options) if options else function


def _import_file(file: Path, where: str) -> ModuleType:
    """Return the module of a file. Raises UserError with `where` in front if it does not import."""
    folder = file.parent
    for neighbour, other in _neighbours.items():
        require(
            other == folder or not _is_in(folder, neighbour),
            f"{where}: its neighbour {neighbour} has the name of one in {other}, which is imported "
            "already; rename one of them",
        )
    name = f"{USER}{file.stem}"
    if name in sys.modules:
        name += f"_{hashlib.sha256(str(file).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise UserError(f"{where} is not a Python file (.py)")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look up their module there
    before = set(sys.modules)
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()  # a file may be as new as the run
    try:
        spec.loader.exec_module(module)
    # The user's code may raise anything.
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        del sys.modules[name]
        problem = f"{type(error).__name__}: {error}{line_of(error)}"
        raise UserError(f"{where} does not import: {problem}") from error
    finally:
        sys.path.remove(str(folder))
    new = sys.modules.keys() - before
    _neighbours.update({name: folder for name in new if _is_in(folder, name)})
    return module


def line_of(error: BaseException) -> str:
    """Return the last line of a user's file that led to an error, as the end of a message."""
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        if frame.f_globals.get("__name__", "").startswith(USER):
            return f" ({Path(frame.f_code.co_filename).name}, line {line})"
    return ""


def cure_of(error: BaseException | None) -> str:
    """Return what to do about a user's error, as the end of a message; empty: that is not known.

    It is known of signals, which threads do not handle.
    """
    while error is not None:
        if isinstance(error, ValueError) and "signal only works in main thread" in str(error):
            return (
                "; rewards run in threads, and Python handles signals in the main thread only: do "
                "without them, as math-verify does with parse(..., parsing_timeout=None) and "
                "verify(..., timeout_seconds=None)"
            )
        error = error.__cause__ or error.__context__
    return ""


def _is_in(folder: Path, name: str) -> bool:
    """Return whether a folder has a module or a package of this name."""
    return (folder / f"{name}.py").is_file() or (folder / name / "__init__.py").is_file()
