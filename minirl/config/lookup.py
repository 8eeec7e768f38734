"""Find the function that a setting names: a registered one, or one in a file of the user.

A file of the user is a module of its own, whatever its name. Like a script it can import its
neighbours, the modules in its folder, while it is imported. These become modules of their own, too,
so that two folders may each have a `helper.py`.
"""

import contextlib
import hashlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType, ModuleType

from minirl.base.errors import UserError, require

_imported: dict[Path, ModuleType] = {}  # By file.
# By folder: the neighbours that its files have imported, by the names they were imported by.
_neighbours: dict[Path, dict[str, ModuleType]] = {}


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
    module = _import_file(Path(file).resolve(), f"{setting} = {value}: {file}")
    function = vars(module).get(name)
    if not callable(function):
        raise UserError(f"{setting} = {value}: {file} has no function {name}")
    return function


def _import_file(file: Path, where: str) -> ModuleType:
    """Return the module of a file, which is imported once.

    Raises:
        UserError: it does not import; `where` begins the message.
    """
    if file in _imported:
        return _imported[file]
    name = _module_name(file, file.stem)
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise UserError(f"{where} is not a Python file (.py)")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look up their module there
    try:
        with _neighbours_of(file.parent):
            spec.loader.exec_module(module)
    # The user's code may raise anything.
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        del sys.modules[name]
        problem = f"{type(error).__name__}: {error}"
        raise UserError(f"{where} does not import: {problem}") from error
    _imported[file] = module
    return module


def _module_name(file: Path, stem: str) -> str:
    """Return the name of a file's module: by its stem, or if another has that, also by its path."""
    name = f"minirl_user_{stem}"
    if name not in sys.modules:
        return name
    return f"{name}_{hashlib.sha256(str(file).encode()).hexdigest()[:12]}"


def _file_of(module: ModuleType) -> Path | None:
    """Return the file of a module; None if it has none, as those that are built in."""
    file = vars(module).get("__file__")
    return Path(file).resolve() if isinstance(file, str) else None


@contextlib.contextmanager
def _neighbours_of(folder: Path) -> Iterator[None]:
    """Let imports find the modules of a folder first, and nobody else find them afterwards.

    A folder that is on Python's path anyway keeps its modules where they are.
    """
    before = dict(sys.modules)
    _hide_namesakes(folder)
    sys.modules.update(_neighbours.get(folder, {}))
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()  # a file may be as new as the run
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        if str(folder) not in [str(Path(entry).resolve()) for entry in sys.path]:
            _set_apart(folder, before)


def _hide_namesakes(folder: Path) -> None:
    """Take modules of other folders out of the way that have the names of neighbours.

    Python's own and installed ones stay, and so does minirl.
    """
    neighbours = {path.stem for path in folder.glob("*.py")}
    neighbours |= {path.parent.name for path in folder.glob("*/__init__.py")}
    neighbours -= sys.stdlib_module_names | {"minirl", "__main__"}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in neighbours:
            continue
        file = _file_of(module)
        if file and "site-packages" not in file.parts and folder not in file.parents:
            del sys.modules[name]


def _set_apart(folder: Path, before: dict[str, ModuleType]) -> None:
    """Rename the modules of a folder that were not there before, and what they define.

    `before`: sys.modules as it was. What was hidden comes back.
    """
    neighbours = _neighbours.setdefault(folder, {})
    for name, module in list(sys.modules.items()):
        if before.get(name) is module:
            continue  # Its file is not looked at: there are thousands, each a walk of the disk.
        file = _file_of(module)
        if file is None or folder not in file.parents:
            continue
        neighbours[name] = module
        del sys.modules[name]
        if module.__name__ == name:
            module.__name__ = _module_name(file, name.replace(".", "_"))
            sys.modules[module.__name__] = module
            _rename_definitions(module, name, module.__name__)
    for name in before.keys() - sys.modules.keys():
        sys.modules[name] = before[name]


def _rename_definitions(holder: ModuleType | type, old: str, new: str) -> None:
    """Make the classes and functions of a module findable by its name, as pickle wants it."""
    for value in list(vars(holder).values()):
        if isinstance(value, type | FunctionType) and value.__module__ == old:
            value.__module__ = new
            if isinstance(value, type):
                _rename_definitions(value, old, new)
