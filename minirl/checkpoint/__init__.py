"""Checkpoints of a run: resumable state (`state.py`) and Hugging Face folders (`export.py`)."""

from minirl.checkpoint.export import choose, export, export_checkpoint
from minirl.checkpoint.state import (
    Saver,
    drop_references,
    find,
    find_best,
    finished,
    load_checkpoint,
    load_rollouts,
    restore,
)

__all__ = [
    "Saver",
    "choose",
    "drop_references",
    "export",
    "export_checkpoint",
    "find",
    "find_best",
    "finished",
    "load_checkpoint",
    "load_rollouts",
    "restore",
]
