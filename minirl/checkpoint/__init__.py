"""Checkpoints of a run: resumable state (`state.py`) and Hugging Face folders (`export.py`)."""

from minirl.checkpoint.export import Exporter, export
from minirl.checkpoint.finding import drop_references, find, find_whole, finished
from minirl.checkpoint.state import Saver, load_checkpoint, load_rollouts, restore

__all__ = [
    "Exporter",
    "Saver",
    "drop_references",
    "export",
    "find",
    "find_whole",
    "finished",
    "load_checkpoint",
    "load_rollouts",
    "restore",
]
