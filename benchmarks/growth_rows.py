"""How the cost of a start grows with the rows and the ranks.

A part of `benchmarks/growth.py`. Rows of RL are a prompt of 500 bytes with its answer, chats two
texts of 300 bytes. The file has only this rank's share of the rows; digests and places of lines of
the other shares are made up. Bytes are those of the most memory that Python and numpy had at once.
"""

import itertools
import tempfile
import tracemalloc
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np

from benchmarks.growth_law import Bound, Part, Point, least_seconds
from minirl.config.shared import DataConfig, RewardConfig
from minirl.config.supervised import ChatsConfig
from minirl.data.examples import Chats
from minirl.data.formats import open_examples
from minirl.data.lengths import check_lengths
from minirl.data.order import Curriculum, read_rows
from minirl.data.prompts import Prompts, open_prompts
from minirl.data.rows import Rows
from minirl.data.sources import JsonLines
from minirl.model.scratch import make_tokenizer
from minirl.parallel.mesh import Mesh
from minirl.rewards.loading import make_rewards
from minirl.run.inputs import MAY_BE_LONG, PromptChecks
from minirl.run.supervised import mark_row

HELD_OUT = 128
BATCH = 64


@dataclass
class ImaginedMesh:
    """A rank in the middle of a world; rows of a file are divided among the ranks."""

    world_size: int
    num_rows: int
    line_bytes: int  # All lines have so many.

    @property
    def rank(self) -> int:
        """Return the rank that works."""
        return self.world_size // 2

    def gather(self, value: object) -> list:
        """Return the value for every rank."""
        return [value] * self.world_size

    def gather_array(self, part: np.ndarray) -> np.ndarray:
        """Return this rank's part between those that others would have."""
        if not len(part):
            return part
        if part.dtype == np.int64:
            return np.arange(self.num_rows) * self.line_bytes
        whole = np.zeros((self.num_rows, *part.shape[1:]), np.uint8)
        if part.ndim == 2:
            whole = np.random.default_rng(0).integers(0, 256, whole.shape, np.uint8)
        first = self.rank * -(-self.num_rows // self.world_size)
        whole[first : first + len(part)] = part
        return whole


def write_prompts(path: Path, num: int) -> None:
    """Write rows of RL of 530 bytes."""
    text = "some words of a problem " * 20
    with path.open("w") as file:
        for n in range(num):
            file.write(f'{{"prompt": "{n:09} {text}", "answer": "{n:09}", "data_source": "x"}}\n')


def write_chats(path: Path, num: int) -> None:
    """Write chats of one turn of 700 bytes."""
    text = "some words of an answer " * 12
    with path.open("w") as file:
        for n in range(num):
            user = f'{{"role": "user", "content": "{n:09} {text}"}}'
            assistant = f'{{"role": "assistant", "content": "{text} {n:09}"}}'
            file.write(f'{{"messages": [{user}, {assistant}]}}\n')


def point(name: str, mesh: ImaginedMesh, work: Callable[[], object]) -> Point:
    """Measure seconds, and in another call, which they would slow down, bytes."""
    seconds = least_seconds(work)
    tracemalloc.start()
    work()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return Point(name, mesh.world_size, mesh.num_rows, seconds, peak)


def load_prompts(path: Path, mesh: Mesh) -> Prompts:
    """Return prompts, as a program of RL loads and checks them."""
    cfg = DataConfig(max_prompt_tokens=1024)
    tokenizer = make_tokenizer([])
    checks = PromptChecks(make_rewards(RewardConfig(function="exact")), tokenizer, cfg)
    opened = open_prompts(str(path), "data.train", cfg, mesh)
    train, _ = read_rows(opened, mesh, 0, HELD_OUT, checks.mark)
    checks.refuse_bad(train)
    prompts = Prompts(train, tokenizer, cfg, seed=0)
    check_lengths(prompts, mesh, MAY_BE_LONG)
    return prompts


def load_chats(path: Path, mesh: Mesh) -> Rows:
    """Return the rows of SFT, read and checked."""
    opened = open_examples(str(path), "data.train", ChatsConfig(), mesh)
    train, _ = read_rows(opened, mesh, 0, HELD_OUT, mark_row)
    return train


class AtOnce(Executor):
    """A thread's place where what is asked of it is done at once, so that it can be measured."""

    def submit(self, work: Callable, /, *args: object, **kwargs: object) -> Future:
        """Do the work."""
        future: Future = Future()
        future.set_result(work(*args, **kwargs))
        return future


def make_chats(train: Rows, mesh: Mesh, thread: Executor) -> Chats:
    """Return the chats of SFT, which the thread encodes ahead of the steps."""
    tokenizer = make_tokenizer([])
    return Chats(train, tokenizer, [1], ChatsConfig(), mesh, thread, seed=0, shuffle=False)


def prompt_points(path: Path, imagined: ImaginedMesh) -> list[Point]:
    """Measure the start of RL: index, reading with all checks, order, curriculum."""
    mesh = cast(Mesh, imagined)
    prompts = load_prompts(path, mesh)
    curriculum = Curriculum(prompts.order, 0.1)

    def draw() -> None:
        prompts.order = type(prompts.order)(len(prompts.rows), seed=0, shuffle=True)
        prompts.row(0)

    return [
        point("index of JSON lines", imagined, lambda: JsonLines(path.open("rb"), "x", mesh)),
        point("prompts: read, check, split", imagined, lambda: load_prompts(path, mesh)),
        point("order of an epoch", imagined, draw),
        point("curriculum, a step", imagined, lambda: curriculum.start(BATCH)),
    ]


def chat_points(path: Path, imagined: ImaginedMesh) -> list[Point]:
    """Measure the start of SFT, and the rows of a step as token ids."""
    mesh = cast(Mesh, imagined)
    train = load_chats(path, mesh)
    steps = itertools.count()
    chats = make_chats(train, mesh, AtOnce())

    def encode() -> None:
        first = BATCH * next(steps)
        chats.examples(range(first, first + BATCH))

    encode()  # what is loaded once
    return [
        point("chats: read, check, split", imagined, lambda: load_chats(path, mesh)),
        point("chats: encode a step", imagined, encode),
    ]


def measure(num_rows: int, num_ranks: int) -> list[Point]:
    """Measure a start with so many rows, which are written to a temporary folder."""
    points = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        for write, measure_file in ((write_prompts, prompt_points), (write_chats, chat_points)):
            write(path, num_rows)
            mesh = ImaginedMesh(num_ranks, num_rows, path.stat().st_size // num_rows)
            points += measure_file(path, mesh)
    return points


PART = Part(
    unit="rows",
    sizes=[10_000, 100_000, 1_000_000],
    worlds=[8, 64, 1024],
    bounds={
        "index of JSON lines": Bound(size=1, ranks=0),
        "prompts: read, check, split": Bound(size=1, ranks=0),
        "order of an epoch": Bound(size=1, ranks=0),
        "curriculum, a step": Bound(size=1, ranks=0),
        "chats: read, check, split": Bound(size=1, ranks=0),
        "chats: encode a step": Bound(size=0, ranks=0),
    },
    measure=measure,
)
