"""Two sides of one program: ranks that train, and ranks that generate, at the same time.

Each side has the default process group of its own ranks, so that what forms groups of the default
one (DeviceMesh, FSDP2, vLLM) sees no other rank. `Mesh.everyone` has the groups of all ranks, for
what crosses the sides: weights to the generators, trajectories to the trainers. Such a collective
is a meeting. All meetings of a run have one order, so that none waits for another.
"""

import os
import time
from datetime import timedelta
from typing import Literal

import torch.distributed as dist
from torch.distributed import PrefixStore
from torch.distributed import distributed_c10d as c10d

from minirl.base.oversight import BEAT
from minirl.parallel.mesh import Mesh, World

Side = Literal["trainers", "generators"]

LOOK = timedelta(seconds=5)  # A rank that waits for the other side tries again after this.
LOOKS_A_SECOND = 2000  # At the store, of all ranks together.


def enter_side(world: World, num_trainers: int, timeout: timedelta | None) -> Side:
    """Make the ranks of this rank's side its default process group. Collective.

    The groups of `world` stay what they are. RANK and WORLD_SIZE become the side's, because vLLM
    reads them.

    Args:
        world: all ranks.
        num_trainers: how many of them train, the first ones.
        timeout: how long a collective of the side waits.

    Returns:
        This rank's side.
    """
    side: Side = "trainers"
    rank, size = world.rank, num_trainers
    if world.rank >= num_trainers:
        side = "generators"
        rank, size = world.rank - num_trainers, world.world_size - num_trainers
    # torch has a public way to make the first default group only.
    group, _ = c10d._new_process_group_helper(
        size,
        rank,
        [],
        c10d._world.pg_map[world.device_group][0],
        PrefixStore(f"minirl/{side}", world.store),
        c10d.GroupName(f"minirl-{side}"),
        timeout=timeout or c10d.default_pg_timeout,
    )
    c10d._world.pg_group_ranks[group] = {i: i for i in range(size)}
    c10d._update_default_pg(group)
    world.watch.beats = True
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size))
    return side


def seconds_between_looks(num_ranks: int) -> float:
    """Return how often a rank may look at the store, which is one process for all of them."""
    return min(max(num_ranks / LOOKS_A_SECOND, 0.01), 0.5)


class Meetings:
    """The meetings of the two sides, seen from one rank.

    A rank enters a meeting before a collective of both sides, and waits until the other side stands
    there, too. That may take long, and how long a rollout or a step takes is limited elsewhere. But
    the processes of the other side must run.

    Args:
        mesh: this side's.
        seconds: how long a process of the other side may be stopped, or out of reach.
    """

    def __init__(self, mesh: Mesh, seconds: float):
        self.seconds = seconds
        self.world = mesh.everyone
        self.side = mesh.side
        self.other: Side = "generators" if mesh.side == "trainers" else "trainers"
        self.speaks = mesh.rank == 0
        num_here = mesh.world_size
        num_all = self.world.world_size
        on_side = range(num_here, num_all) if mesh.side == "trainers" else range(num_all - num_here)
        # For each rank of the other side: its last beat, and when this rank has first seen that.
        self.beats = dict.fromkeys(on_side, (-1, 0.0))
        self.number = 0
        self._next_look = 0.0

    def is_called(self) -> bool:
        """Return whether the other side stands at the next meeting, as seen a moment ago."""
        now = time.monotonic()
        if now < self._next_look:
            return False
        self._next_look = now + seconds_between_looks(self.world.world_size)
        return self.world.store.check([self._key(self.other)])

    def enter(self) -> None:
        """Wait until the other side stands at the next meeting.

        Raises:
            dist.DistStoreError: a process of the other side does not run any more.
        """
        if self.speaks:
            self.world.store.set(self._key(self.side), "")
        is_there = False
        while not is_there:
            try:
                self.world.store.wait([self._key(self.other)], LOOK)
                is_there = True
            except dist.DistStoreError:  # It takes longer than `LOOK`.
                if self.speaks:
                    self._look_for_beats()
        self.number += 1

    def _look_for_beats(self) -> None:
        """Raise DistStoreError if a rank of the other side has been silent for too long."""
        now = self.world.watch.clock
        for rank, (before, seen) in self.beats.items():
            beat = self.world.store.add(f"{BEAT}/{rank}", 0)
            if beat != before:
                self.beats[rank] = beat, now
            elif now - seen > self.seconds:
                raise dist.DistStoreError(
                    f"timed out after {self.seconds:g} s without a sign of life from rank {rank}, "
                    f"one of the {self.other}"
                )

    def _key(self, side: str) -> str:
        return f"minirl/meeting/{self.number}/{side}"
