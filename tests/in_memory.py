"""Rows of a test, the mesh of a process that is alone, and images that nobody looks at."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np

from minirl.data.order import read_rows
from minirl.data.rows import Rows
from minirl.data.sources import Source
from minirl.types.packed import ImageSpan

# A mesh of one rank, as far as rows need it.
ALONE = SimpleNamespace(
    rank=0, world_size=1, gather=lambda value: [value], gather_array=lambda array: array
)


def memory_rows(rows: list[dict], distinct: bool = False) -> Rows:
    """Return rows that are in memory, as they are."""
    source = Source(
        label="data.train = memory",
        name="",
        weight=None,
        is_generated=False,
        rows=rows,
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


class SeesAhead:
    """In place of a `Vision`, where nobody looks at pixels: the tokens of an image see later ones
    of it."""

    sees_ahead = "always"

    def check_ring(self, is_ring):
        pass

    def batch(self, sequences, device):
        return None


def with_images(trajectories):
    """The same with an image in each prompt and each answer that has room for one."""
    out = []
    for t in trajectories:
        num_prompt = int(t.sampled.argmax())
        num_answer = len(t.tokens) - num_prompt
        spans = [ImageSpan(2, 9, "")] if num_prompt > 12 else []
        if num_answer > 8:
            spans.append(ImageSpan(num_prompt + 1, 5, ""))
        out.append(replace(t, images=spans))
    return out


def encoded_rows(chats):
    """The rows of this rank as token ids by their numbers, without dropped ones."""
    encoded = {}
    for number in range(chats.mesh.rank, len(chats), chats.mesh.world_size):
        row = chats.thread.submit(chats._encode_row, number).result()
        if row.trajectories:
            encoded[number] = row.trajectories
    return encoded
