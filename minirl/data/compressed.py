"""Compressed files of rows, `.gz` and `.zst`, decompressed once into the cache of `datasets`.

A row is read from its place in a file, which a compressed file cannot be asked for.
"""

import fcntl
import gzip
import hashlib
import os
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from minirl.base.errors import UserError

ENDINGS = (".gz", ".zst")
BLOCK_BYTES = 2**20  # Of a compressed file, read at once.


def decompressed(path: Path, cache: Path, label: str) -> Path:
    """Return the decompressed copy of a file; its name ends as that of the file without `.gz`.

    The first process to ask makes it, and the others on the machine wait. A file that has changed,
    by its size or time, is another file.

    Args:
        path: a file whose name ends in one of ENDINGS.
        cache: folder of the cache of `datasets`.
        label: begins an error message.

    Raises:
        UserError: it is damaged or cut off, the cache has no room, or zstandard is not installed.
    """
    decompress = _gzip_blocks if path.suffix == ".gz" else _zstd_blocks(label)
    folder = cache / "minirl"
    try:
        status = path.stat()
        key = f"{path.resolve()}\0{status.st_size}\0{status.st_mtime_ns}"
        name = hashlib.sha256(key.encode()).hexdigest()[:24]
        copy = folder / f"{name}{Path(path.stem).suffix}"
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"{name}.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not copy.exists():
                with path.open("rb") as file:
                    _write(copy, decompress(file))
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(
            f"{label}: not a good {path.suffix} file: {error}; download or compress it again"
        ) from error
    except OSError as error:
        raise UserError(
            f"{label}: it is decompressed into {folder}, and that failed: {error}; make room, or "
            "set HF_DATASETS_CACHE to another folder"
        ) from error
    return copy


def _write(path: Path, blocks: Iterator[bytes]) -> None:
    """Write a file that is there as a whole or not at all."""
    descriptor, partial = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.writelines(blocks)
        os.replace(partial, path)
    finally:
        Path(partial).unlink(missing_ok=True)  # it is there if something failed


def _gzip_blocks(file: BinaryIO) -> Iterator[bytes]:
    """Yield what a .gz file holds. Raises BadGzipFile, EOFError and zlib.error."""
    with gzip.open(file) as content:
        while block := content.read(BLOCK_BYTES):
            yield block


def _zstd_blocks(label: str) -> Callable[[BinaryIO], Iterator[bytes]]:
    """Return what yields the content of a .zst file, of one frame or several.

    It raises EOFError if the file is damaged or cut off, which the library's own stream does not.

    Raises:
        UserError: zstandard is not installed.
    """
    try:
        import zstandard
    except ImportError as error:
        raise UserError(
            f"{label}: to read .zst, install zstandard: .venv/bin/python -m pip install zstandard"
        ) from error

    def blocks(file: BinaryIO) -> Iterator[bytes]:
        frame = zstandard.ZstdDecompressor().decompressobj()
        try:
            while block := file.read(BLOCK_BYTES):
                while block:
                    if frame.eof:
                        frame = zstandard.ZstdDecompressor().decompressobj()
                    yield frame.decompress(block)
                    block = frame.unused_data
        except zstandard.ZstdError as error:
            raise EOFError(str(error)) from error
        if not frame.eof:
            raise EOFError("it ends in the middle of a frame")

    return blocks
