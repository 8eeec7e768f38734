"""Rows of a test, and the mesh of a process that is alone."""

from types import SimpleNamespace

import numpy as np

from minirl.data.rows import Rows
from minirl.data.sources import Source
from minirl.data.split import read_rows

# A mesh of one rank, as far as rows need it.
ALONE = SimpleNamespace(
    rank=0, world_size=1, gather=lambda value: [value], gather_array=lambda array: array
)


def memory_rows(rows: list[dict], distinct: bool = False) -> Rows:
    """Return rows that are in memory, as they are."""
    source = Source(
        label="data.train = memory", name="", weight=None, is_generated=False, rows=rows
    )
    num = len(rows)
    return Rows([source], lambda raw, place: raw, distinct, np.arange(num), np.zeros(num, np.uint8))


def split(rows: list[dict], held_out: int, seed: int) -> tuple[list[dict], list[dict]]:
    """Return lists of the rows to train on and of the held-out ones."""
    train, chosen = read_rows(memory_rows(rows), ALONE, seed, held_out)
    return list(train), list(chosen)


def read_all(rows: Rows) -> Rows:
    """Read and check rows."""
    return read_rows(rows, ALONE, 0)[0]
