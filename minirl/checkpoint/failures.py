"""Failures of writing: ranks tell each other of theirs, and all raise the same error."""

import traceback
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError

from minirl.base.errors import UserError, require

# What disks and folders do. Anything else is a bug.
DISK_ERRORS = (OSError, SafetensorError)


def describe(error: BaseException | None, rank: int) -> str:
    """Return what a rank tells the others of an error, with its traceback if it is a bug.

    Args:
        error: None: there is none, and the text is empty.
        rank: which one failed.
    """
    if error is None:
        return ""
    if isinstance(error, DISK_ERRORS):
        return f"rank {rank}: {type(error).__name__}: {error}"
    if isinstance(error, UserError):
        return f"rank {rank}: {error}"
    return f"rank {rank}: {''.join(traceback.format_exception(error))}"


def attempt(write: Callable[[], object], rank: int) -> str:
    """Write, and return why the disk would not have it; empty: it is written."""
    try:
        write()
    except DISK_ERRORS as error:
        return describe(error, rank)
    return ""


def require_written(path: Path, partial: Path, failures: list[str]) -> None:
    """Raise UserError if a rank has failed. Ranks that give the same raise the same.

    Args:
        path: what should have been written.
        partial: where it is while it is not whole.
        failures: of all ranks; empty texts are none.
    """
    found = "; ".join(failure for failure in failures if failure)
    require(
        not found,
        f"{path} could not be written ({found}); make room there and go on by --resume, or name "
        f"another output folder. {partial} is not whole, and nothing will read it",
    )
