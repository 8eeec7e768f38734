"""What a running program uses that no limit of the kernel counts, and its folder's end.

Paths are bytes here: a program may name its files as it likes.
"""

import contextlib
import itertools
import math
import os
import stat
from pathlib import Path

MAX_NAMES = 4096  # Files and folders that a program may have.
MAX_THREADS = 256
MAX_PATH = 4000  # Bytes. The kernel takes 4095.


def over_limit(folder: str, pid: int, max_bytes: int) -> str:
    """Return the status of a program that uses more than it may; empty: it does not.

    The program continues meanwhile: whatever is gone when it is looked at counts as nothing.

    Args:
        folder: all named files of the program are in it.
        pid: of the program.
        max_bytes: of all files together, also of those that are open without a name.
    """
    total = unnamed_bytes(folder, pid)
    num_names = 0
    waiting = [os.fsencode(folder)]
    while waiting:
        entries: list[os.DirEntry] = []
        with contextlib.suppress(OSError), os.scandir(waiting.pop()) as found:
            entries = list(itertools.islice(found, MAX_NAMES + 1))
        for entry in entries:
            num_names += 1
            with contextlib.suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                total += _bytes_of(status)
                if stat.S_ISDIR(status.st_mode):
                    waiting.append(entry.path)
            if total > max_bytes or num_names > MAX_NAMES or len(entry.path) > MAX_PATH:
                return "disk"
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return ""  # The program has ended.
    # The name, in parentheses, may contain anything; the threads are the 18th field after it.
    num_threads = int(text.rpartition(")")[2].split()[17])
    if num_threads > MAX_THREADS:
        return "killed"
    return "disk" if total > max_bytes else ""


def _bytes_of(status: os.stat_result) -> int:
    """Return the bytes of a file, or those that are reserved for it if they are more."""
    if not stat.S_ISREG(status.st_mode):
        return 0
    return max(status.st_size, 512 * status.st_blocks)


def unnamed_bytes(folder: str, pid: int) -> float:
    """Return the bytes of files that are removed and still open.

    Infinity: one is neither open nor named, but mapped, so that its size is unknown.
    """
    open_files: dict[int, int] = {}  # Bytes by inode.
    try:
        descriptors = os.listdir(f"/proc/{pid}/fd")
        lines = Path(f"/proc/{pid}/maps").read_bytes().splitlines()
    except OSError:
        return 0  # The program has ended.
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            status = os.stat(f"/proc/{pid}/fd/{descriptor}")
            if status.st_nlink == 0:
                open_files[status.st_ino] = _bytes_of(status)
    inside = os.fsencode(folder) + b"/"
    for line in lines:
        # addresses, rights, offset, device, inode, path
        fields = line.split(None, 5)
        is_removed = len(fields) == 6 and fields[5].endswith(b" (deleted)")
        if is_removed and fields[5].startswith(inside) and int(fields[4]) not in open_files:
            return math.inf
    return sum(open_files.values())


def remove_folder(root: str, name: str) -> None:
    """Remove the folder `root`, in which only the program's folder `name` is.

    A program can nest folders deeper than a path or a recursion can be, and take away the rights
    to look into them. So each folder is first moved up into `root`, where the program cannot write.

    Raises:
        OSError: something cannot be removed.
    """
    top = os.fsencode(root)
    waiting = [os.path.join(top, os.fsencode(name))]
    num_moved = 0
    while waiting:
        path = waiting.pop()
        os.chmod(path, 0o700)
        with os.scandir(path) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    # To move a folder to another one means to write in it.
                    os.chmod(entry.path, 0o700)
                    moved = os.path.join(top, b"moved-%d" % num_moved)
                    os.rename(entry.path, moved)
                    num_moved += 1
                    waiting.append(moved)
                else:
                    os.unlink(entry.path)
        os.rmdir(path)
    os.rmdir(top)
