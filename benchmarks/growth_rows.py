"""How the cost of a start grows with the rows: seconds of CPU and bytes of one process.

    python benchmarks/growth_rows.py
    torchrun --nproc-per-node 2 benchmarks/growth_rows.py --sizes 10000000

Rows of RL are a prompt of 500 bytes with its answer, chats two texts of 300 bytes. Costs are those
of rank 0. Bytes are those of the most memory that Python and numpy had at once.
"""

import json
import os
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
import tyro

from minirl.config.shared import DataConfig, RewardConfig
from minirl.config.supervised import ChatsConfig
from minirl.data.curriculum import Curriculum
from minirl.data.examples import Chats, open_chats
from minirl.data.json_lines import JsonLines
from minirl.data.prompts import Prompts, open_prompts
from minirl.data.rows import read_rows
from minirl.inputs import MAY_BE_LONG, PromptChecks
from minirl.model.scratch import make_tokenizer
from minirl.parallel.mesh import Mesh, join_world
from minirl.rewards.functions import make_rewards
from minirl.supervised import mark_row

HELD_OUT = 128
BATCH = 64


@dataclass
class Load:
    """What to measure."""

    sizes: list[int] = field(default_factory=lambda: [10_000, 100_000, 1_000_000])  # Rows.
    folder: str = ""  # Where the rows are written for a while; empty: the system's.


class Law(NamedTuple):
    """A measured point of a law."""

    name: str
    world: int  # Ranks.
    size: int  # Rows.
    cpu_seconds: float
    num_bytes: int
    follows_rows: bool  # Whether the cost may grow with the rows at all.


class Alone:
    """A mesh of one rank, as far as rows need it."""

    rank = 0
    world_size = 1

    def gather(self, value: object) -> list:
        """Return what one rank gathers."""
        return [value]

    def gather_array(self, part: np.ndarray) -> np.ndarray:
        """Return the arrays of one rank end to end."""
        return part


def write_prompts(path: Path, num: int) -> None:
    """Write rows of RL."""
    text = "some words of a problem " * 20
    with path.open("w") as file:
        for n in range(num):
            row = {"prompt": f"Question {n}: {text}", "answer": str(n), "data_source": "x"}
            file.write(json.dumps(row) + "\n")


def write_chats(path: Path, num: int) -> None:
    """Write chats of one turn."""
    text = "some words of an answer " * 12
    with path.open("w") as file:
        for n in range(num):
            user = {"role": "user", "content": f"Question {n}: {text}"}
            assistant = {"role": "assistant", "content": f"{text} {n}"}
            file.write(json.dumps({"messages": [user, assistant]}) + "\n")


def measure(
    name: str, size: int, mesh: Mesh, work: Callable[[], object], *, follows_rows: bool = True
) -> Law:
    """Call it twice: for its seconds, then for its bytes."""
    began = time.process_time()
    work()
    seconds = time.process_time() - began
    tracemalloc.start()
    work()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return Law(name, mesh.world_size, size, seconds, peak, follows_rows)


def prompt_laws(path: Path, size: int, mesh: Mesh) -> Iterator[Law]:
    """Measure the start of RL: index, reading with all checks, order, curriculum."""
    cfg = DataConfig(max_prompt_tokens=1024)
    tokenizer = make_tokenizer([])
    yield measure("index of JSON lines", size, mesh, lambda: JsonLines(path, "x", mesh))

    def read() -> Prompts:
        checks = PromptChecks(make_rewards(RewardConfig(function="exact")), tokenizer, cfg)
        opened = open_prompts(str(path), "data.train", cfg, mesh)
        train, _ = read_rows(opened, mesh, 0, HELD_OUT, checks.mark)
        checks.refuse_ungraded(train)
        prompts = Prompts(train, tokenizer, cfg, seed=0)
        prompts.check_lengths(mesh, MAY_BE_LONG)
        return prompts

    yield measure("prompts: index, read, check, split", size, mesh, read)
    prompts = read()

    def draw() -> None:
        prompts.order = type(prompts.order)(len(prompts.rows), seed=0, shuffle=True)
        prompts.row(0)

    yield measure("order of an epoch", size, mesh, draw)
    curriculum = Curriculum(prompts, 0.1)
    yield measure("curriculum, a step", size, mesh, lambda: curriculum.start(BATCH))


def chat_laws(path: Path, size: int, mesh: Mesh) -> Iterator[Law]:
    """Measure the start of SFT: reading, and the rows of the first step as token ids."""
    cfg = ChatsConfig()
    tokenizer = make_tokenizer([])
    opened = open_chats(str(path), "data.train", cfg, mesh)
    train, _ = read_rows(opened, mesh, 0, HELD_OUT, mark_row)
    yield measure(
        "chats: read, check, split",
        size,
        mesh,
        lambda: read_rows(opened, mesh, 0, HELD_OUT, mark_row),
    )
    with ThreadPoolExecutor(1) as thread:

        def first_step() -> None:
            chats = Chats(train, tokenizer, [1], cfg, mesh, thread, seed=0, shuffle=False)
            chats.examples(range(BATCH))

        first_step()  # what is loaded once
        yield measure("chats: encode a step", size, mesh, first_step, follows_rows=False)


def laws(sizes: list[int], folder: str = "", mesh: Mesh | None = None) -> list[Law]:
    """Return the laws at these numbers of rows, those of one law side by side.

    Args:
        sizes: numbers of rows.
        folder: where the rows are written for a while; empty: the system's.
        mesh: the ranks; None: this process is alone.
    """
    mesh = mesh or cast(Mesh, Alone())
    found: list[Law] = []
    with tempfile.TemporaryDirectory(dir=folder or None) as scratch:
        path = Path(mesh.gather(scratch)[0]) / "rows.jsonl"
        for size in sizes:
            for write, measured in ((write_prompts, prompt_laws), (write_chats, chat_laws)):
                if mesh.rank == 0:
                    write(path, size)
                mesh.gather(None)  # rank 0 has written
                found += measured(path, size, mesh)
                mesh.gather(None)  # all have read
    names = [law.name for law in found]
    return sorted(found, key=lambda law: (names.index(law.name), law.size))


def main(load: Load) -> None:
    """Print a line for each law and size."""
    mesh = join_world() if "RANK" in os.environ else None
    found = laws(load.sizes, load.folder, mesh)
    if mesh and mesh.rank > 0:
        return
    for law in found:
        print(
            f"{law.name:36} {law.size:>9} rows {law.cpu_seconds:8.3f} CPU-s "
            f"{law.cpu_seconds / law.size * 1e6:8.2f} us a row {law.num_bytes / 1e6:8.1f} MB "
            f"{law.num_bytes / law.size:8.1f} bytes a row"
        )


if __name__ == "__main__":
    main(tyro.cli(Load))
