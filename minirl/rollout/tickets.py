"""How tickets are shared among the engines, and how each knows that all have done enough."""

import heapq
import time
from collections.abc import Iterator, Sequence

import torch.distributed as dist

from minirl.rollout.pacing import Goal, IsEnough

# Seconds between two looks at what the other engines have finished. Each look is a round trip to
# the one process that has the store, and a thousand engines look.
SECONDS_BETWEEN_LOOKS = 0.5


def pull(
    tickets: Sequence[int], goals: list[Goal], store: dist.Store, number: int
) -> tuple[Iterator[int], IsEnough]:
    """Share tickets by counters on torchrun's store, so that long completions balance.

    Args:
        tickets: of all engines.
        goals: of all engines together.
        store: that of all ranks.
        number: of this call, the same on all engines and never the same again.

    Returns:
        The tickets that no engine has taken when this one asks, and whether the goals are reached.
    """

    def own_tickets() -> Iterator[int]:
        while (taken := store.add(f"minirl/tickets/{number}", 1) - 1) < len(tickets):
            yield tickets[taken]

    return own_tickets(), _FinishedCounts(goals, store, f"minirl/finished/{number}").is_enough


class _FinishedCounts:
    """Counts the finished groups of all engines on the store, one counter for each goal.

    They are looked at when this engine has finished more, and else every half second.
    """

    def __init__(self, goals: list[Goal], store: dist.Store, name: str):
        self.goals = goals
        self.store = store
        self.name = name
        self._counted = [0] * len(goals)  # Of this engine, for each goal.
        self._num_finished = -1  # At the last look.
        self._next_look = 0.0
        self._reached = False

    def is_enough(self, versions: list[int]) -> bool:
        has_news = len(versions) != self._num_finished
        if not self._reached and (has_news or time.monotonic() >= self._next_look):
            self._num_finished = len(versions)
            self._next_look = time.monotonic() + SECONDS_BETWEEN_LOOKS
            self._reached = self._count(versions)
        return self._reached

    def _count(self, versions: list[int]) -> bool:
        """Add what has finished here since the last look; return whether all goals are reached."""
        reached = True
        for i, goal in enumerate(self.goals):
            num_own = _num_until(goal.version, versions)
            num_new = num_own - self._counted[i]
            self._counted[i] = num_own
            num_finished = self.store.add(f"{self.name}/{i}", num_new)
            reached = reached and num_finished >= goal.num_groups
        return reached


def deal(
    tickets: Sequence[int],
    goals: list[Goal],
    version: int,
    begun: list[list[int]],
    replica: int,
) -> tuple[Iterator[int], IsEnough]:
    """Share tickets by their number, which is repeatable.

    Args:
        tickets: of all engines.
        goals: of all engines together.
        version: that of the groups that will begin.
        begun: for each engine, the versions of its groups that go on.
        replica: number of this engine.

    Returns:
        This engine's tickets, and whether it has reached its part of each goal.
    """
    dealt = spread(len(tickets), [len(versions) for versions in begun])
    everything = []
    for versions, new in zip(begun, dealt, strict=True):
        everything.append(versions + [version] * len(new))

    quotas = []
    for goal in goals:
        # The engine with most groups finishes most.
        loads = [-_num_until(goal.version, versions) for versions in everything]
        quotas.append(len(spread(goal.num_groups, loads)[replica]))

    def is_enough(versions: list[int]) -> bool:
        return all(
            _num_until(goal.version, versions) >= quota
            for goal, quota in zip(goals, quotas, strict=True)
        )

    return (tickets[i] for i in dealt[replica]), is_enough


def spread(num: int, loads: list[int]) -> list[list[int]]:
    """Deal 0 .. num - 1, one by one, to whichever has least; of several the first.

    Args:
        num: how many to deal.
        loads: what each has before.

    Returns:
        What each gets.
    """
    dealt: list[list[int]] = [[] for _ in loads]
    heap = [(load, number) for number, load in enumerate(loads)]
    heapq.heapify(heap)
    for i in range(num):
        load, number = heap[0]
        dealt[number].append(i)
        heapq.heapreplace(heap, (load + 1, number))
    return dealt


def _num_until(version: int, versions: list[int]) -> int:
    """Return how many versions are not newer than `version`."""
    return sum(other <= version for other in versions)
