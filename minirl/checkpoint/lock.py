"""A lock on the folder of a run, so that no second run writes there.

Rank 0 holds `lock` in the folder from the first thing that the run writes to its end. The kernel
frees it however the process ends. The file stays in the folder of a run that has begun. One that is
refused before it writes anything else removes it.

Across machines it is as good as the file system: NFS (version 4, or 3 with its lock daemon) keeps
such a lock on the server, which frees that of a dead machine when its lease has run out. If a file
system has no locks, one line says so.
"""

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from minirl.base.errors import UserError, require
from minirl.base.log import say
from minirl.base.reading import is_file

NAME = "lock"
# A killed process frees its memory before its locks.
SECONDS_TO_WAIT = 5.0

_held: dict[Path, int] = {}  # File descriptors by folder, of this process.
_made: set[Path] = set()  # Of these folders, those that were not there before.


def hold(output: Path) -> None:
    """Lock the folder of a run, which is made if it is missing. Nothing if this process has it.

    Raises:
        UserError: another run holds it, or it cannot be written to.
    """
    if output in _held:
        return
    try:
        if not os.path.lexists(output):
            output.mkdir(parents=True)
            _made.add(output)
        _held[output] = _open_locked(output)
    except OSError as error:
        raise UserError(
            f"output = {output} cannot be written to: {error}; make room there, or choose another "
            "folder"
        ) from error


def _open_locked(output: Path) -> int:
    """Return the descriptor that holds the lock. Raises UserError and OSError."""
    path = output / NAME
    require(
        not path.is_symlink(),
        f"{path} is a symbolic link, and the run would overwrite what it points to; remove it",
    )
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    if not _lock(descriptor, output):
        holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
        os.close(descriptor)
        raise UserError(
            f"output = {output} is in use by another run ({holder or 'it does not say which'}); "
            "wait for its end or end it, or name another folder with --output"
        )
    if not path.exists() or path.stat().st_ino != os.fstat(descriptor).st_ino:
        os.close(descriptor)
        return _open_locked(output)  # who had the lock has removed the file meanwhile
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    return descriptor


def _lock(descriptor: int, output: Path) -> bool:
    """Return whether nobody else has the lock; wait a little for a run that is ending."""
    end = time.monotonic() + SECONDS_TO_WAIT
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                return False
            time.sleep(0.05)
        except OSError as error:
            say(
                f"output = {output} cannot be locked ({error}): see that no second run writes there"
            )
            return True
        else:
            return True


def require_free(output: Path) -> None:
    """Raise UserError if another run holds the folder. Writes nothing where there is no lock."""
    if output not in _held and is_file(output / NAME):
        hold(output)


@contextlib.contextmanager
def released(output: Path) -> Iterator[None]:
    """Release the lock of a folder, if this process holds it, at the end of the block.

    If nothing else has been written there, the file is removed, and a folder that was made for it.
    """
    try:
        yield
    finally:
        descriptor = _held.pop(output, None)
        if descriptor is not None:
            # The disk may be why the run ends.
            with contextlib.suppress(OSError):
                if os.listdir(output) == [NAME]:
                    os.unlink(output / NAME)
                    if output in _made:
                        os.rmdir(output)
            os.close(descriptor)


def _forget() -> None:
    """Close the locks in a fork of this process, which would hold them beyond its end."""
    for descriptor in _held.values():
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_forget)
