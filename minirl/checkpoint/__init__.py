"""Checkpoints of a run: resumable state (`state.py`) and Hugging Face folders (`exporting.py`).

The names below are imported when they are asked for: `python -m minirl.checkpoint` imports this
file before it reads its flags, and torch would take seconds.
"""

from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minirl.checkpoint.exporting import Exporter, export
    from minirl.checkpoint.finding import drop_references, find, finished, resume
    from minirl.checkpoint.state import Saver, load_checkpoint, restore

__all__ = [
    "Exporter",
    "Saver",
    "drop_references",
    "export",
    "find",
    "finished",
    "load_checkpoint",
    "restore",
    "resume",
]

FILES = {
    "exporting": ("Exporter", "export"),
    "finding": ("drop_references", "find", "finished", "resume"),
    "state": ("Saver", "load_checkpoint", "restore"),
}


def __getattr__(name: str) -> Any:
    """Return a name of this package from its file, for Python's import and attributes."""
    for file, names in FILES.items():
        if name in names:
            return resolve_name(f"minirl.checkpoint.{file}:{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
