"""When groups begin, on which engine, and which of them a step waits for.

With `rollout.ahead` a step begins more groups than it trains on, and the next step continues the
unfinished ones. A group must be trained on within `rollout.max_staleness` steps after the one in
which it began. To restart a group that is older would throw its tokens away, and, because long
answers are the ones that grow old, would keep them out of the training. Two rules hold instead:

1. Admission: at most `prompts_per_step * (1 + max_staleness)` groups are begun and not trained on.
2. Deadlines: a step continues until those groups have finished that would otherwise become too old,
   and it trains on the oldest of its finished groups.

Why this suffices: let n = prompts_per_step, and c(k) the number of groups that must be trained on
within k more steps. Everything is in time as long as c(k) <= n * (k + 1) for every k from 0 to
max_staleness. The step waits for c(k) - n * k of those groups, for each k, which is at most n, and
then trains on n groups, the oldest first. So of what must be trained on within k steps after the
next one, at most n * (k + 1) are left: the inequality holds again. New groups only count in
k = max_staleness, where it is the rule of admission.

A ticket is the number of a prompt. Engines take tickets from a queue on torchrun's store (`pull`),
or are dealt them by number (`deal`).
"""

import heapq
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch.distributed as dist

# Seconds between two looks at what the other engines have finished. Each look is a round trip to
# the one process that has the store, and a thousand engines look.
SECONDS_BETWEEN_LOOKS = 0.5


class Goal(NamedTuple):
    """So many groups that began at `version` or before it have to finish, on all ranks together."""

    version: int  # Optimizer steps that the weights had seen.
    num_groups: int


# Takes the versions of the groups that have finished on this engine; returns whether all engines
# together have reached their goals.
IsEnough = Callable[[list[int]], bool]


class GroupState(NamedTuple):
    """What all ranks know of a group of training that was begun and is not trained on."""

    ticket: int
    version: int  # Optimizer steps that the weights had seen when it began.
    is_finished: bool
    is_varied: bool  # Finished, and dynamic sampling would train on it.
    rank: int  # The rank that runs its episodes.


@dataclass(frozen=True, kw_only=True)
class Pace:
    """The pace of a run's rollouts; the arguments are settings of the config."""

    prompts_per_step: int
    ahead: int  # At most prompts_per_step * max_staleness.
    max_staleness: int  # In steps of the run.
    updates_per_step: int  # By which versions grow in a step, at most.

    def num_new(self, num_missing: int, num_begun: int) -> int:
        """Return how many groups may begin.

        Args:
            num_missing: groups that the step has still to finish.
            num_begun: groups that are begun and not finished in this step.
        """
        return max(0, num_missing + self.ahead - num_begun)

    def goals(self, begun: Collection[GroupState], version: int) -> list[Goal]:
        """Return what has to finish in this step, lest it become too old in a later one.

        Args:
            begun: the groups that earlier steps began.
            version: optimizer steps that the weights have seen.
        """
        goals = []
        for num_steps in range(self.max_staleness):
            # Of what must be trained on within `num_steps` more steps, those can take their share.
            oldest = version - (self.max_staleness - num_steps) * self.updates_per_step
            num_due = sum(state.version <= oldest for state in begun)
            num_groups = num_due - num_steps * self.prompts_per_step
            if num_groups > 0:
                goals.append(Goal(oldest, num_groups))
        return goals

    def choose(self, finished: Collection[GroupState]) -> set[int]:
        """Return the tickets to train on: groups that are varied before others, then the oldest."""
        preferred = sorted(finished, key=lambda s: (not s.is_varied, s.version, s.ticket))
        return {state.ticket for state in preferred[: self.prompts_per_step]}


def pull(
    tickets: Sequence[int],
    goals: list[Goal],
    store: dist.Store,
    number: int,
    seconds: float | None = None,
) -> tuple[Iterator[int], IsEnough]:
    """Share tickets by counters on torchrun's store, so that long completions balance.

    Args:
        tickets: the tickets for all engines.
        goals: what all engines together have to reach.
        store: the store that all ranks share.
        number: number of this call, the same on all engines and never used again.
        seconds: between two looks at what other engines have finished; None:
            SECONDS_BETWEEN_LOOKS.

    Returns:
        The tickets that no engine has taken when this one asks, and whether the goals are reached.
    """

    def untaken() -> Iterator[int]:
        while (taken := store.add(f"minirl/tickets/{number}", 1) - 1) < len(tickets):
            yield tickets[taken]

    counts = _FinishedCounts(goals, store, number, seconds or SECONDS_BETWEEN_LOOKS)
    return untaken(), counts.is_enough


class _FinishedCounts:
    """Counts the finished groups of all engines on the store, one counter for each goal.

    They are looked at when this engine has finished more, and else so many seconds later.
    """

    def __init__(self, goals: list[Goal], store: dist.Store, number: int, seconds: float):
        self.seconds = seconds
        self.goals = goals
        self.store = store
        self.name = f"minirl/finished/{number}"
        self._counted = [0] * len(goals)  # What this engine has added, for each goal.
        self._num_finished = -1  # At the last look.
        self._next_look = 0.0
        self._reached = False

    def is_enough(self, versions: list[int]) -> bool:
        has_news = len(versions) != self._num_finished
        if not self._reached and (has_news or time.monotonic() >= self._next_look):
            self._num_finished = len(versions)
            self._next_look = time.monotonic() + self.seconds
            self._reached = True
            for i, goal in enumerate(self.goals):
                # Add what has finished here since the last look.
                num_new = _num_until(goal.version, versions) - self._counted[i]
                self._counted[i] += num_new
                num_finished = self.store.add(f"{self.name}/{i}", num_new)
                self._reached &= num_finished >= goal.num_groups
        return self._reached


def deal(
    tickets: Sequence[int],
    goals: list[Goal],
    version: int,
    begun: list[list[int]],
    replica: int,
) -> tuple[Iterator[int], IsEnough]:
    """Share tickets by their number, which is repeatable.

    Args:
        tickets: the tickets for all engines.
        goals: what all engines together have to reach.
        version: version of the groups that will begin.
        begun: for each engine, the versions of its unfinished groups.
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
