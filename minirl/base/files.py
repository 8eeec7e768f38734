"""Files and folders that are there as a whole or not at all, also after a power cut.

What is new is written beside its final name, brought to the disk, and then renamed. A rename is one
act of the file system: whoever looks sees the old one or the new one.
"""

import errno
import os
import shutil
import zlib
from pathlib import Path
from typing import NamedTuple

# What a disk does that has no room, is broken, or is not there any more.
DISK_FAILURES = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EIO,
    errno.EROFS,
    errno.ESTALE,
)


class Checksum(NamedTuple):
    """What a file should hold."""

    size: int  # Bytes.
    crc32: int


def write_synced(path: Path, data: bytes) -> Checksum:
    """Write a new file and bring it to the disk; for files of a folder that is renamed later.

    What had the name is removed: to open a link would empty the file that it points to.
    """
    path.unlink(missing_ok=True)
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return Checksum(len(data), zlib.crc32(data))


def write_whole(path: Path, text: str) -> None:
    """Write a text file, or replace it, so that it is there as a whole or not at all."""
    partial = path.with_name(f"{path.name}.partial")
    write_synced(partial, text.encode())
    partial.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_file(path: Path) -> None:
    """Bring a file, which somebody else has written and closed, to the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_files(folder: Path) -> None:
    """Bring the files of a folder to the disk."""
    for path in folder.iterdir():
        if path.is_file():
            sync_file(path)


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
    """Give the folder at `partial_of(folder)`, whose files are on the disk, its name.

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


def checksum_of(path: Path) -> Checksum:
    """Return the checksum of what a file holds now."""
    size = 0
    crc = 0
    with path.open("rb") as file:
        while block := file.read(1 << 24):
            size += len(block)
            crc = zlib.crc32(block, crc)
    return Checksum(size, crc)
