"""How the host's work of a training step grows: exchange, packing, advantages, threshold, means.

    python benchmarks/growth_step.py

One process plays rank 0 of a world: what the other ranks would send is made up, so that this rank
does all of its own work and no wire is there. Prints CPU seconds of the rank for a call, and the
bytes that it sends to or gets from the others, by ranks and by work.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import numpy as np
import torch

from minirl.algo import advantages
from minirl.algo.selection import kth_largest
from minirl.config.rl import AlgoConfig
from minirl.data.exchange import exchange
from minirl.data.packing import pack
from minirl.evaluation import means_of_step
from minirl.parallel.mesh import Mesh
from minirl.rollout.tickets import spread
from minirl.types import Trajectory

CPU = torch.device("cpu")
WORLDS = (8, 64, 1024)
SIZES = (8, 32, 128)  # Answers of a rank.
SAMPLES = 8  # Of a prompt.
PROMPT = 256  # Tokens.
BUDGET = 65536  # Rows of a micro-batch.


class Law(NamedTuple):
    """A measured point."""

    name: str
    num_ranks: int
    size: int  # Answers of a rank; of the threshold, tokens of a rank.
    cpu_seconds: float
    num_bytes: int  # Sent or received by a rank.


@dataclass
class FakeMesh:
    """Rank 0 of a world whose other ranks have what it has, in groups of their own."""

    world_size: int
    rank: int = 0
    num_copies: int = 1
    context_size: int = 1
    num_bytes: int = 0
    outside: float = 0.0  # CPU seconds in which the others' parts were made up.
    _sent: list[bytes] = field(default_factory=list)

    @property
    def data_size(self) -> int:
        """Return the number of ranks, all of which have data of their own."""
        return self.world_size

    def gather_rows(self, rows: np.ndarray) -> list[np.ndarray]:
        """Return this rank's table and those of the others: with other groups and ranks."""
        began = time.process_time()
        tables = [rows]
        for rank in range(1, self.world_size):
            table = rows.copy()
            if rows.shape[1] > 2:  # Not names with values.
                table[:, 0] += rank * 1_000_000
            if rows.shape[1] == 11:  # Headers of the exchange.
                table[:, 3] = rank
            tables.append(table)
        self.num_bytes += rows.nbytes * self.world_size
        self.outside += time.process_time() - began
        return tables

    gather_named = Mesh.gather_named

    def gather(self, value: object) -> list:
        """Return the value for every rank."""
        return [value] * self.world_size

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        """Return what equal values of all ranks add up to."""
        self.num_bytes += values.nbytes
        return values * self.world_size

    def all_to_all(self, messages: list[bytes], num_received: list[int]) -> np.ndarray:
        """Return records of this rank in place of those of the others.

        They all begin with a whole record, so that what is parsed is as long as it says.
        """
        began = time.process_time()
        self.num_bytes += sum(map(len, messages)) + sum(num_received)
        received = np.zeros(sum(num_received), np.uint8)
        own = np.frombuffer(messages[0], np.uint8)
        received[: len(own)] = own
        self.outside += time.process_time() - began
        return received


def answers(num: int, mean: float = 1500.0, longest: int = 8000) -> list[Trajectory]:
    """Return answers of log-normal lengths, 8 to a prompt."""
    rng = np.random.default_rng(0)
    trajectories = []
    for i in range(num):
        if i % SAMPLES == 0:
            prompt = rng.integers(0, 1000, PROMPT)
        length = int(min(rng.lognormal(math.log(mean), 0.8) + 16, longest))
        tokens = np.concatenate([prompt, rng.integers(0, 1000, length)]).astype(np.int32)
        info = {"answer_tokens": length, "stopped": True, "staleness": 0, "score": 1.0}
        trajectories.append(
            Trajectory(
                tokens=tokens,
                sampled=np.arange(len(tokens)) >= PROMPT,
                logprobs=np.zeros(len(tokens), np.float32),
                turn_rewards=np.zeros(len(tokens), np.float32),
                reward=float(rng.random()),
                group=i // SAMPLES,
                episode=i % SAMPLES,
                info={"source": None, **info},
            )
        )
    return trajectories


def law(name: str, mesh: FakeMesh, size: int, call: Callable[[], object]) -> Law:
    """Measure a call."""
    mesh.num_bytes, mesh.outside = 0, 0.0
    began = time.process_time()
    call()
    seconds = time.process_time() - began - mesh.outside
    return Law(name, mesh.world_size, size, seconds, mesh.num_bytes)


def step_laws(num_ranks: int, size: int) -> list[Law]:
    """Measure a step in which every rank has `size` answers."""
    mesh = FakeMesh(num_ranks)
    own = answers(size)
    batches = [pack(own, CPU)]
    cfg = AlgoConfig()

    def assign() -> None:
        advantages.assign(
            batches,
            advantages.grpo,
            cfg,
            sum_over_ranks=mesh.sums,
            max_over_ranks=mesh.sums,
            gather_rows=mesh.gather_rows,
        )

    return [
        law("exchange", mesh, size, lambda: exchange(own, cast(Mesh, mesh), BUDGET)),
        law("packing", mesh, size, lambda: pack(own, CPU)),
        law("advantages", mesh, size, assign),
        law("means of a step", mesh, size, lambda: means_of_step(own, 1.0, cast(Mesh, mesh))),
        law("dealing tickets", mesh, size, lambda: spread(size * num_ranks, [0] * num_ranks)),
    ]


def threshold_law(num_ranks: int, num_tokens: int) -> Law:
    """Measure the threshold of high entropy, with `num_tokens` on each rank."""
    mesh = FakeMesh(num_ranks)
    values = np.random.default_rng(0).gamma(0.3, 1.0, num_tokens)
    k = math.ceil(0.2 * num_tokens * num_ranks)
    return law("threshold", mesh, num_tokens, lambda: kth_largest(values, k, mesh.sums))


def laws(sizes: tuple[int, ...] = SIZES, worlds: tuple[int, ...] = WORLDS) -> list[Law]:
    """Return the measured points, by ranks and by answers of a rank."""
    found = []
    for num_ranks in worlds:
        for size in sizes:
            found += step_laws(num_ranks, size)
            found.append(threshold_law(num_ranks, 8000 * size))
    return found


def main() -> None:
    """Print the laws."""
    torch.set_num_threads(1)
    print(f"{'what':16} {'ranks':>6} {'size':>9} {'CPU ms':>9} {'kB':>10}")
    for name, num_ranks, size, seconds, num_bytes in laws():
        print(f"{name:16} {num_ranks:6} {size:9} {seconds * 1e3:9.1f} {num_bytes / 1e3:10.0f}")


if __name__ == "__main__":
    main()
