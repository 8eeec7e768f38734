"""Tables of dumped trajectories, to search 100,000 of them without reading them.

`rollout.dump` leaves these files of each step and rank in <output>/rollouts:

    step-N-rank-R.jsonl   The trajectories that the rank sampled, one a line (records.py).
    step-N-rank-R.npz     `sampled`: a row of numbers for each of these lines. `trained`: a row for
                          each trajectory that the rank trained on, which others may have sampled.
    step-N-rank-R.npy     float32 [T, 3]: a row for each token that the rank trained on, the
                          trajectories of `trained` end to end: advantage, log-prob and entropy,
                          before the step's first update; nan: it was not computed.

and the policy's `tokenizer.json`. A row of `trained` belongs to the line of any rank with the same
group, episode and segment.
"""

import re
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from minirl.base.errors import UserError
from minirl.base.files import replacing

SAMPLED = np.dtype(
    [
        ("group", "<i8"),
        ("episode", "<i4"),
        ("segment", "<i4"),
        ("start", "<i8"),  # First byte of the line.
        ("num_bytes", "<i8"),  # Bytes of the line, without the line feed.
        ("num_tokens", "<i4"),
        ("num_sampled", "<i4"),
        ("reward", "<f8"),  # From the environment and the reward functions.
        ("shaped", "<f8"),  # After the config's section `reward` has shaped it.
        ("staleness", "<i4"),  # Optimizer steps since the oldest token was sampled.
        ("stopped", "?"),  # The last answer ended by a stop token, and no limit cut the episode.
        ("failed", "?"),
    ]
)
TRAINED = np.dtype(
    [
        ("group", "<i8"),
        ("episode", "<i4"),
        ("segment", "<i4"),
        ("start", "<i8"),  # First row in the file of tokens; it has `num_tokens` of them.
        ("num_tokens", "<i4"),
        ("mismatch", "<f4"),  # Largest |trainer - engine| of a sampled token, nats.
        ("mean_mismatch", "<f4"),
        ("entropy", "<f4"),  # Mean over the sampled tokens, nats.
        ("advantage", "<f4"),  # Mean over the sampled tokens.
    ]
)
VALUES = ("advantage", "logprob", "entropy")  # The columns of the file of tokens.
TOKENIZER = "tokenizer.json"


class Part(NamedTuple):
    """The files of a step and rank."""

    step: int
    rank: int
    lines: Path
    table: Path
    values: Path


def part_of(folder: Path, step: int, rank: int) -> Part:
    """Return the paths of the files of a step and rank; the files need not exist."""
    paths = [folder / f"step-{step}-rank-{rank}.{suffix}" for suffix in ("jsonl", "npz", "npy")]
    return Part(step, rank, *paths)


def parts(folder: Path) -> list[Part]:
    """Return the parts in a folder that have trajectories, by step and rank."""
    found = []
    for path in folder.glob("step-*-rank-*.jsonl"):
        match = re.fullmatch(r"step-(\d+)-rank-(\d+)\.jsonl", path.name)
        if match:
            found.append(part_of(folder, int(match[1]), int(match[2])))
    return sorted(found)


def remove(part: Part) -> None:
    """Remove the files of a part; the tables first, which refer to the other files."""
    for path in (part.table, part.values, part.lines):
        path.unlink(missing_ok=True)


def write_tables(part: Part, sampled: np.ndarray, trained: np.ndarray, values: np.ndarray) -> None:
    """Write the tables of a part: first the table of tokens, which the others refer to.

    Args:
        part: the files' paths.
        sampled: SAMPLED [N].
        trained: TRAINED [M].
        values: float32 [T, 3].
    """
    with replacing(part.values) as file:
        np.save(file, values)
    with replacing(part.table) as file:
        np.savez(file, sampled=sampled, trained=trained)


def read_table(part: Part) -> tuple[np.ndarray, np.ndarray] | None:
    """Return `sampled` and `trained` of a part; None: the step is unfinished, or has no tables.

    Raises:
        UserError: the file was cut, as by a copy that did not end.
    """
    try:
        with np.load(part.table, allow_pickle=False) as tables:
            # By name: tables of older runs have a column more.
            sampled = tables["sampled"][list(SAMPLED.names or ())]
            return sampled.astype(SAMPLED), tables["trained"].astype(TRAINED)
    except FileNotFoundError:
        return None
    except (zipfile.BadZipFile, ValueError, EOFError) as error:
        raise UserError(f"{part.table} is damaged ({error}); copy it again") from error


def read_values(part: Part, start: int, num_tokens: int) -> np.ndarray:
    """Return the values of tokens, float32 [L, 3], by the columns of `trained`."""
    values = np.load(part.values, mmap_mode="r", allow_pickle=False)
    return np.array(values[start : start + num_tokens])


def places(sizes: Iterable[int], start: int = 0) -> Iterator[tuple[int, int]]:
    """Yield first byte and number of bytes of each line of a file, without their line feeds.

    Args:
        sizes: bytes of each line.
        start: where the first one begins.
    """
    for size in sizes:
        yield start, size
        start += size + 1
