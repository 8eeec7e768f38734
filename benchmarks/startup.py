"""How long a start takes: from JSON lines on a disk to prompts, or to the first batch of SFT.

    torchrun --nproc-per-node 2 -m benchmarks.startup --prompts 10000000 --chats 1000000

Rows are those of benchmarks/growth_rows.py. Prints seconds by the clock, CPU-seconds of the rank
with most, and the bytes that the process of rank 0 grew by at most.
"""

import resource
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import tyro

from benchmarks.growth_rows import (
    BATCH,
    load_chats,
    load_prompts,
    make_chats,
    write_chats,
    write_prompts,
)
from minirl.parallel.machines import join_world
from minirl.parallel.mesh import Mesh


@dataclass
class Load:
    """What to measure."""

    prompts: int = 1_000_000
    chats: int = 100_000
    folder: str = ""  # Where the rows are written for a while; empty: the system's.


def peak_bytes() -> int:
    """Return the most memory that this process has had."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def measure(name: str, num: int, mesh: Mesh, work: Callable[[], object]) -> None:
    """Do it on all ranks and print what it took."""
    mesh.barrier()
    bytes_before = peak_bytes()
    began, began_cpu = time.perf_counter(), time.process_time()
    work()
    mesh.barrier()
    seconds = time.perf_counter() - began
    cpu_seconds = max(mesh.gather(time.process_time() - began_cpu))
    grown = (peak_bytes() - bytes_before) / 1e6
    if mesh.rank == 0:
        print(
            f"{num:,} {name}: {seconds:.1f} s, {cpu_seconds:.1f} CPU-s a rank, {grown:.0f} MB",
            flush=True,
        )


def main(load: Load) -> None:
    """Write the rows, load them and remove them."""
    mesh = join_world()

    def start_sft(path: Path) -> None:
        with ThreadPoolExecutor(1) as thread:
            make_chats(load_chats(path, mesh), mesh, thread).examples(range(BATCH))

    starts = (
        ("prompts, ready", load.prompts, write_prompts, lambda path: load_prompts(path, mesh)),
        ("chats, first step encoded", load.chats, write_chats, start_sft),
    )
    with tempfile.TemporaryDirectory(dir=load.folder or None) as scratch:
        path = Path(mesh.gather(scratch)[0]) / "rows.jsonl"
        for name, num, write, start in starts:
            if mesh.rank == 0:
                write(path, num)
            mesh.barrier()  # the file is there
            measure(name, num, mesh, partial(start, path))
            mesh.barrier()  # all have read


if __name__ == "__main__":
    main(tyro.cli(Load))
