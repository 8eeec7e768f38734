"""How the host's work of a step grows: pacing, exchange, packing, advantages, threshold, means.

A part of `benchmarks/growth.py`. Bytes are those that a rank sends to the others or gets of them.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import torch

from benchmarks.growth_law import Bound, Part, Point, least_seconds
from minirl.algo import advantages
from minirl.algo.shaping import kth_largest
from minirl.batch.exchange import HEADER, exchange
from minirl.batch.packing import pack
from minirl.config.rl import AlgoConfig
from minirl.parallel.mesh import Mesh
from minirl.rollout.pacing import GroupState, Pace, deal, spread
from minirl.run.metrics import means_of_step
from minirl.types.packed import Trajectory

CPU = torch.device("cpu")
SAMPLES = 8  # Of a prompt.
PROMPT = 256  # Tokens.
BUDGET = 65536  # Rows of a micro-batch.


@dataclass
class FakeMesh:
    """Rank 0 of a world whose other ranks have what it has, in groups of their own."""

    world_size: int
    rank: int = 0
    num_copies: int = 1
    context: None = None
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
            if rows.dtype.names:  # Not names with values.
                table["group"] += rank * 1_000_000
            if rows.dtype == HEADER:
                table["rank"] = rank
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

    def all_to_all(self, messages: list[bytes]) -> list[bytes]:
        """Return all records of this rank in place of what each of the others sends.

        The exchange reads as many of them as its plan expects.
        """
        began = time.process_time()
        self.num_bytes += 2 * sum(map(len, messages))
        everything = b"".join(messages)
        self.outside += time.process_time() - began
        return [everything] * self.world_size


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


def pace_step(num_ranks: int, num_groups: int) -> None:
    """Plan a step of rollouts that began before it, deal its tickets, and choose what to train on.

    Half of the groups are a version older than the others.
    """
    pace = Pace(prompts_per_step=num_groups, ahead=num_groups, max_staleness=2, updates_per_step=1)
    states = [GroupState(i, 5 + i % 2, False, False, i % num_ranks) for i in range(num_groups)]
    goals = pace.goals(states, 7)
    versions: list[list[int]] = [[] for _ in range(num_ranks)]
    for state in states:
        versions[state.rank].append(state.version)
    own_tickets, is_enough = deal(range(num_groups), goals, 7, versions, 0)
    is_enough([version for version in versions[0] if list(own_tickets)])
    pace.choose(states)


def pace_point(size: int, num_ranks: int) -> Point:
    """Measure the pacing of all ranks' groups, of which each rank gets a line."""
    num_groups = size * num_ranks // SAMPLES
    seconds = least_seconds(lambda: pace_step(num_ranks, num_groups))
    num_bytes = num_groups * 8 * (len(GroupState._fields) - 1)  # the rank is not sent
    return Point("pacing", num_ranks, size, seconds, num_bytes)


def point(name: str, mesh: FakeMesh, size: int, call: Callable[[], object]) -> Point:
    """Measure a call: the least CPU-seconds of three."""
    seconds = []
    for _ in range(3):
        mesh.num_bytes, mesh.outside = 0, 0.0
        began = time.process_time()
        call()
        seconds.append(time.process_time() - began - mesh.outside)
    return Point(name, mesh.world_size, size, min(seconds), mesh.num_bytes)


def measure(size: int, num_ranks: int) -> list[Point]:
    """Measure a step in which every rank has `size` answers, and 8000 tokens for each."""
    mesh = FakeMesh(num_ranks)
    own = answers(size)
    batches = [pack(own, CPU)]
    cfg = AlgoConfig()
    entropies = np.random.default_rng(0).gamma(0.3, 1.0, 8000 * size)
    num_high = math.ceil(0.2 * len(entropies) * num_ranks)

    def assign() -> None:
        advantages.assign(
            batches,
            advantages.find("grpo"),
            cfg,
            dtype=torch.float32,
            sum_over_ranks=mesh.sums,
            max_over_ranks=mesh.sums,
            gather_rows=mesh.gather_rows,
        )

    return [
        pace_point(size, num_ranks),
        point("exchange", mesh, size, lambda: exchange(own, cast(Mesh, mesh), BUDGET)),
        point("packing", mesh, size, lambda: pack(own, CPU)),
        point("advantages", mesh, size, assign),
        point("means of a step", mesh, size, lambda: means_of_step(own, 1.0, cast(Mesh, mesh))),
        point("dealing tickets", mesh, size, lambda: spread(size * num_ranks, [0] * num_ranks)),
        point("threshold", mesh, size, lambda: kth_largest(entropies, num_high, mesh.sums)),
    ]


PART = Part(
    unit="answers of a rank",
    sizes=[8, 32, 128],
    worlds=[8, 64, 1024],
    bounds={
        # Each rank sees a line about every group or answer of the world.
        "pacing": Bound(size=1, ranks=1),
        "exchange": Bound(size=1, ranks=1),
        "packing": Bound(size=1, ranks=0),
        "advantages": Bound(size=1, ranks=1),
        "means of a step": Bound(size=1, ranks=1),
        "dealing tickets": Bound(size=1, ranks=1),
        "threshold": Bound(size=1, ranks=0),
    },
    measure=measure,
)
