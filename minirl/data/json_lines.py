"""JSON lines, parsed when they are asked for; memory holds 8 bytes a line."""

import itertools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from minirl.base.errors import UserError, require
from minirl.base.reading import check_value
from minirl.parallel.mesh import Mesh

LINE_FEED = ord("\n")
BLOCK_BYTES = 2**20  # Bytes that the index reads at once.
# bool [256]: the bytes that a blank line may begin with.
IS_SPACE = np.isin(np.arange(256), list(b" \t\n\r\x0b\f"))


DECODER = json.JSONDecoder()


class JsonLines(Sequence):
    """The lines of a file that are not blank."""

    def __init__(self, path: Path, label: str, mesh: Mesh | None = None):
        """Find the lines of the file. Collective with a mesh: each rank reads its share.

        Args:
            path: the file.
            label: begins an error message.
            mesh: the ranks; None: this process alone reads the file.

        Raises:
            UserError: the ranks see files of different sizes.
        """
        self.label = label
        try:
            self.file = path.open("rb")
        except OSError as error:
            raise UserError(f"{label} cannot be read: {error}; give another file") from error
        self.size = os.fstat(self.file.fileno()).st_size
        rank, world_size = (mesh.rank, mesh.world_size) if mesh else (0, 1)
        if mesh:
            sizes = mesh.gather(self.size)
            require(
                len(set(sizes)) == 1,
                f"{label}: the ranks see files of {min(sizes)} to {max(sizes)} bytes; give all "
                "machines the same file",
            )
        first = self.size * rank // world_size
        last = self.size * (rank + 1) // world_size
        starts, blanks = self._find_lines(first, last)
        # int64 [N]: the first byte of each line that is not blank. It ends where the next begins.
        self.starts = mesh.gather_array(starts) if mesh else starts
        # int64 [B]: the first byte of each blank line; they count where lines are numbered.
        self.blanks = mesh.gather_array(blanks) if mesh else blanks

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, i: int) -> Any:  # type: ignore[override]  # takes no slices
        if not 0 <= i < len(self):
            raise IndexError(i)
        return self.read(i, i + 1)[0]

    def read(self, first: int, last: int) -> list:
        """Return the lines from `first` to before `last`, read at once and parsed.

        Raises:
            UserError: a line is not JSON.
        """
        places = self.starts[first:last].tolist()
        end = int(self.starts[last]) if last < len(self) else self.size
        begin = places[0]
        block = os.pread(self.file.fileno(), end - begin, begin)
        rows = []
        for i, (start, stop) in enumerate(itertools.pairwise([*places, end])):
            line, _, _ = block[start - begin : stop - begin].partition(b"\n")
            try:
                rows.append(_parse(line.decode()))
            except (ValueError, RecursionError) as error:
                wanted = "UTF-8 text" if isinstance(error, UnicodeDecodeError) else "JSON"
                raise UserError(
                    f"{self.where(first + i)} is not {wanted}: {error}; mend or remove the line"
                ) from error
        return rows

    def where(self, i: int) -> str:
        """Return the place of a line for an error message: its number in the file, from 1."""
        num_blanks = int(np.searchsorted(self.blanks, self.starts[i]))
        return f"{self.label}: line {i + num_blanks + 1}"

    def _find_lines(self, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        """Return where lines begin in the bytes from `first` to before `last`.

        Returns:
            (lines that are not blank, blank lines), int64. Lines of bytes are cut at line feeds
            only, not at the separators that texts may hold.
        """
        found = [np.zeros(int(first == 0 < last), np.int64)]  # the first line of the file
        candidates = found.copy()
        # The other lines begin behind a line feed, which may be the last byte of another share.
        for place in range(max(first - 1, 0), last - 1, BLOCK_BYTES):
            size = min(BLOCK_BYTES, last - 1 - place)
            block = np.frombuffer(os.pread(self.file.fileno(), size + 1, place), np.uint8)
            behind = np.flatnonzero(block[:-1] == LINE_FEED) + 1
            found.append(place + behind)
            candidates.append(place + behind[IS_SPACE[block[behind]]])
        starts = np.concatenate(found)
        blanks = [place for place in np.concatenate(candidates).tolist() if self._is_blank(place)]
        if not blanks:
            return starts, np.zeros(0, np.int64)
        return np.setdiff1d(starts, blanks, assume_unique=True), np.array(blanks)

    def _is_blank(self, start: int) -> bool:
        self.file.seek(start)
        return not self.file.readline().strip()


def _parse(text: str) -> Any:
    """Return what `parse_json` does; a text without spaces around it takes less time."""
    try:
        value, end = DECODER.raw_decode(text)
    except ValueError:
        end = -1
    if end != len(text):
        value = json.loads(text)
    check_value(value, text)
    return value
