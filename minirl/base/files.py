"""Files and folders that are there as a whole or not at all, also after a power cut.

What is new is written under another name, brought to the disk, and then renamed. A rename is one
act of the file system: whoever looks sees the old one or the new one.

When one of several ranks cannot write, the ranks exchange what has failed, and all raise the same
error.
"""

import contextlib
import errno
import os
import shutil
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from minirl.base.errors import UserError, require

# Errors of a disk that has no room, is broken, or is not there any more.
DISK_FAILURES = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EIO,
    errno.EROFS,
    errno.ESTALE,
)


@contextlib.contextmanager
def synced(path: Path) -> Iterator[BinaryIO]:
    """Open a new file to write, and bring it to the disk at the end.

    What had the name is removed: to open a link would empty the file that it points to.
    """
    path.unlink(missing_ok=True)
    with path.open("xb") as file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
        except OSError as error:
            error.filename = error.filename or str(path)  # Errors of a write have none.
            raise


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a file to write, which gets its name at the end, when it is on the disk as a whole."""
    partial = path.with_name(f"{path.name}.partial")
    with synced(partial) as file:
        yield file
    partial.replace(path)
    sync_folder(path.parent)


def write_synced(path: Path, data: bytes) -> None:
    """Write a new file and bring it to the disk; for files of a folder that is renamed later."""
    with synced(path) as file:
        file.write(data)


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file, or replace it, so that it is there as a whole or not at all."""
    with replacing(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_files(paths: Iterable[Path]) -> None:
    """Bring files, which other libraries have written and closed, to the disk; folders are not."""
    for path in paths:
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def remove(path: Path) -> None:
    """Remove a file, a folder with everything in it, or a link, but not what it points to.

    Nothing happens if there is none.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def partial_of(folder: Path) -> Path:
    """Return where a folder is while it is not whole."""
    return Path(f"{folder}.partial")


def publish_folder(folder: Path) -> None:
    """Give the folder at `partial_of(folder)`, which is on the disk with its files, its name.

    Whenever this is killed, what has the name is whole.
    """
    sync_folder(partial_of(folder))
    replaced = Path(f"{folder}.replaced")
    remove(replaced)
    if folder.exists():
        folder.rename(replaced)
    partial_of(folder).rename(folder)
    sync_folder(folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def describe_failure(error: BaseException | None, rank: int) -> str:
    """Return the text of a failed write for all ranks, with a traceback if it is a bug.

    Args:
        error: what was raised; None: nothing, and the text is empty.
        rank: the rank that failed.
    """
    if error is None:
        return ""
    if isinstance(error, OSError):
        return f"rank {rank}: {type(error).__name__}: {error}"
    if isinstance(error, UserError):
        return f"rank {rank}: {error}"
    return f"rank {rank}: {''.join(traceback.format_exception(error))}"


@contextlib.contextmanager
def library_writes() -> Iterator[None]:
    """Raise what libraries in Rust make of a full disk (safetensors, tokenizers) as OSError."""
    try:
        yield
    except Exception as error:
        if "(os error " not in str(error):
            raise
        raise OSError(str(error)) from error


def attempt(write: Callable[[], object], rank: int) -> str:
    """Write, and return what the file system refused; empty: it is written."""
    try:
        with library_writes():
            write()
    except OSError as error:
        return describe_failure(error, rank)
    return ""


def require_written(path: Path, partial: Path, failures: list[str]) -> None:
    """Raise UserError if a rank has failed. Ranks that give the same raise the same.

    Args:
        path: what should have been written.
        partial: where it is while it is not whole.
        failures: texts of `attempt` on all ranks.
    """
    found = "; ".join(failure for failure in failures if failure)
    require(
        not found,
        f"{path} could not be written ({found}). If the disk is full, make room there and start "
        "again (a run with --resume), or name another output folder. "
        f"{partial} is not whole, and nothing will read it",
    )
