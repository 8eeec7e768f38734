"""Checkpoints of a run: resumable state (`state.py`) and Hugging Face folders (`export.py`)."""

from minirl.checkpoint.export import Exporter, export
from minirl.checkpoint.state import (
    Saver,
    drop_references,
    find,
    finished,
    load_checkpoint,
    load_rollouts,
    restore,
)

__all__ = [
    "Exporter",
    "Saver",
    "drop_references",
    "export",
    "find",
    "finished",
    "load_checkpoint",
    "load_rollouts",
    "restore",
]
