"""Sizes and checksums of a checkpoint's files, by which a damaged one is found before it is read.

`checksums.json` is the last file of a checkpoint. Each rank counts the bytes that it writes while
it writes them, so nothing is read for it. When a run resumes, its ranks share the files and read
them in parallel: each byte once, on one of the ranks.
"""

import contextlib
import io
import itertools
import json
import os
import zlib
from collections.abc import Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem

from minirl.base.files import Checksum, checksum_of, write_synced
from minirl.parallel.mesh import World

NAME = "checksums.json"
# Without these there is no checkpoint, whatever the list says.
NEEDED = ("progress.json", "state/.metadata")
# crc32 leaves Python's lock alone, so threads count in parallel, too.
NUM_THREADS = 4


class StateWriter(dcp.FileSystemWriter):
    """Writes the state of models and optimizers as torch does.

    Attributes:
        checksums: of this rank's files that are written, by name.
    """

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.checksums: dict[str, Checksum] = {}
        self.fs = _CountingFileSystem(self.checksums)


class _CountingFileSystem(FileSystem):
    """Counts what goes through its streams."""

    def __init__(self, checksums: dict[str, Checksum]):
        super().__init__()
        self.checksums = checksums

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Generator[io.IOBase, None, None]:
        with Path(path).open(mode) as file:
            stream = _CountingStream(file)
            yield cast(io.IOBase, stream)
        self.checksums[Path(path).name] = Checksum(stream.size, stream.crc)

    def rename(self, path: str | os.PathLike, new_path: str | os.PathLike) -> None:
        super().rename(path, new_path)
        self.checksums[Path(new_path).name] = self.checksums.pop(Path(path).name)


class _CountingStream:
    """The part of a file that torch's writer uses. It is written from begin to end."""

    def __init__(self, file: Any):
        self.file = file
        self.size = 0
        self.crc = 0

    def write(self, data: Any) -> int:
        self.crc = zlib.crc32(data, self.crc)
        self.size += memoryview(data).nbytes
        return self.file.write(data)

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        self.file.flush()

    def fileno(self) -> int:
        # torch asks for it to fsync, without a flush before.
        self.file.flush()
        return self.file.fileno()

    def close(self) -> None:
        self.file.close()


def write_checksums(checkpoint: Path, files: Mapping[str, Checksum]) -> None:
    """Write the list of a checkpoint's files, by paths in its folder."""
    listed = {name: list(files[name]) for name in sorted(files)}
    content = {"crc32": _crc_of_list(listed), "files": listed}
    write_synced(checkpoint / NAME, json.dumps(content).encode())


def read_checksums(checkpoint: Path) -> dict[str, Checksum]:
    """Return the list of a checkpoint's files.

    Raises:
        ValueError: it is missing or damaged; the text says how.
    """
    try:
        content = json.loads((checkpoint / NAME).read_bytes())
        listed = content["files"]
        if content["crc32"] != _crc_of_list(listed):
            raise ValueError(f"{NAME} has another checksum than was written")
        files = {name: Checksum(int(size), int(crc)) for name, (size, crc) in listed.items()}
    except FileNotFoundError as error:
        raise ValueError(
            f"{NAME} is missing: it is not whole, or of minirl 0.4.0 or before"
        ) from error
    except (OSError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{NAME} cannot be read: {error}") from error
    for name in NEEDED:
        if name not in files:
            raise ValueError(f"{NAME} does not list {name}")
    return files


def _crc_of_list(listed: object) -> int:
    return zlib.crc32(json.dumps(listed, sort_keys=True).encode())


def find_damage(checkpoint: Path, world: World) -> str:
    """Return which file of a checkpoint is damaged and how; empty: it is whole. Collective.

    Every file is read once, by one of the ranks.
    """
    files: dict[str, Checksum] = {}
    damage = ""
    if world.rank == 0:
        try:
            files = read_checksums(checkpoint)
        except ValueError as error:  # also of JSON and of texts that are none
            damage = str(error) if str(error).startswith(NAME) else f"{NAME} is damaged: {error}"
    files, damage = world.broadcast((files, damage), 0)
    if damage:
        return damage

    largest_first = sorted(files, key=lambda name: (-files[name].size, name))
    own = largest_first[world.rank :: world.world_size]
    with ThreadPoolExecutor(NUM_THREADS, "checksum") as pool:
        damages = list(pool.map(lambda name: _damage_of(checkpoint, name, files[name]), own))
    of_ranks = world.gather([damage for damage in damages if damage])
    found = list(itertools.chain.from_iterable(of_ranks))
    if not found:
        return ""
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return found[0] + more


def _damage_of(checkpoint: Path, name: str, expected: Checksum) -> str:
    """Return what is wrong with a file; empty: nothing. Its size is looked at before it is read."""
    path = checkpoint / name
    try:
        size = path.stat().st_size
        if size != expected.size:
            return f"{name} has {size} bytes and not {expected.size}"
        if checksum_of(path) != expected:
            return f"{name} does not hold what was written: its checksum differs"
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read: {error}"
    return ""
