"""What an error of a reward function says: of the function, of a completion, of signals."""

import traceback
from pathlib import Path

import minirl

PACKAGE = str(Path(minirl.__file__).parent)
CURE = (
    "rewards run in threads, and Python handles signals in the main thread only: do without them, "
    "as math-verify does with parse(..., parsing_timeout=None) and verify(..., "
    "timeout_seconds=None)"
)


def needs_main_thread(error: BaseException | None) -> bool:
    """Return whether an error, or one that it comes from, says that a thread handles no signals."""
    while error is not None:
        if isinstance(error, ValueError) and "signal only works in main thread" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


class RaisedThereError(Exception):
    """What a function has raised in a worker.

    Args:
        is_mistake: as the function of this name says.
    """

    def __init__(self, is_mistake: bool):
        super().__init__()
        self.is_mistake = is_mistake


def is_mistake(error: BaseException | None) -> bool:
    """Return whether an error is of a reward function itself, whatever the completion was.

    Args:
        error: what it raised; None: it returned what is no number.
    """
    if isinstance(error, RaisedThereError):
        return error.is_mistake
    if error is None or type(error) in (NameError, ImportError, ModuleNotFoundError):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    has_entered = any(not frame.filename.startswith(PACKAGE) for frame in frames)
    return needs_main_thread(error) or not has_entered
