"""What a running program uses that no limit of the kernel counts, and its folder's end.

Paths are bytes here: a program may name its files as it likes.
"""

import os
import stat
from pathlib import Path

MAX_NAMES = 4096  # Files and folders that a program may have.
MAX_THREADS = 256
MAX_PATH = 4000  # Bytes. The kernel takes 4095.


class OverLimitError(Exception):
    """A program uses more than it may: `status` of its result."""

    def __init__(self, status: str):
        super().__init__(status)
        self.status = status


def check_usage(folder: str, pid: int, max_bytes: int) -> None:
    """Raise OverLimitError if a program has too many bytes or names in files, or threads.

    The program continues meanwhile: whatever is gone when it is looked at counts as nothing.

    Args:
        folder: all named files of the program are in it.
        pid: of the program.
        max_bytes: of all files together, also of those that are open without a name.
    """
    total = _unnamed_bytes(folder, pid)
    num_names = 0
    waiting = [os.fsencode(folder)]
    while waiting:
        path = waiting.pop()
        for entry in _list(path):
            num_names += 1
            try:
                status = entry.stat(follow_symlinks=False)
            except OSError:
                continue
            if stat.S_ISDIR(status.st_mode):
                waiting.append(entry.path)
            total += _bytes_of(status)
            if total > max_bytes or num_names > MAX_NAMES or len(entry.path) > MAX_PATH:
                raise OverLimitError("disk")
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return  # The program has ended.
    # The name, in parentheses, may contain anything; the threads are the 18th field after it.
    if int(text.rpartition(")")[2].split()[17]) > MAX_THREADS:
        raise OverLimitError("killed")


def _list(path: bytes) -> list[os.DirEntry]:
    """Return what is in a folder, MAX_NAMES + 1 entries at most. None, if it cannot be listed."""
    entries = []
    try:
        with os.scandir(path) as found:
            for entry in found:
                entries.append(entry)
                if len(entries) > MAX_NAMES:
                    break
    except OSError:
        return []
    return entries


def _bytes_of(status: os.stat_result) -> int:
    """Return the bytes of a file, or those that are reserved for it if they are more."""
    if not stat.S_ISREG(status.st_mode):
        return 0
    return max(status.st_size, 512 * status.st_blocks)


def _unnamed_bytes(folder: str, pid: int) -> int:
    """Return the bytes of files that are removed and still open.

    Raises:
        OverLimitError: one is neither open nor named, but mapped, so that its size is unknown.
    """
    open_files: dict[tuple[int, int], int] = {}
    try:
        descriptors = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return 0  # The program has ended.
    for descriptor in descriptors:
        try:
            status = os.stat(f"/proc/{pid}/fd/{descriptor}")
        except OSError:
            continue
        if stat.S_ISREG(status.st_mode) and status.st_nlink == 0:
            open_files[status.st_dev, status.st_ino] = _bytes_of(status)
    mapped = _mapped_inodes(folder, pid)
    if not mapped <= {inode for _, inode in open_files}:
        raise OverLimitError("disk")
    return sum(open_files.values())


def _mapped_inodes(folder: str, pid: int) -> set[int]:
    """Return the inodes of the removed files of `folder` that a program has in its memory."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_bytes().splitlines()
    except OSError:
        return set()
    inside = os.fsencode(folder) + b"/"
    inodes = set()
    for line in lines:
        # addresses, rights, offset, device, inode, path
        fields = line.split(None, 5)
        if len(fields) == 6 and fields[5].startswith(inside) and fields[5].endswith(b" (deleted)"):
            inodes.add(int(fields[4]))
    return inodes


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
