"""When groups begin, and which of them a step waits for, so that no sampled token is thrown away.

With `rollout.ahead` more groups are begun than a step trains on, and what is unfinished goes on in
the next step. A group must be trained on within `rollout.max_staleness` steps after the one in
which it began. To begin it anew when it is older throws its tokens away, and, because long answers
are the ones that grow old, keeps them out of the training. So two rules hold instead:

1. Admission: at most `prompts_per_step * (1 + max_staleness)` groups are begun and not trained on.
2. Deadlines: a step goes on until those groups have finished that would otherwise become too old,
   and it trains on the oldest of its finished groups.

Why this suffices: let n = prompts_per_step, and c(k) the number of groups that must be trained on
within k more steps. Everything is in time as long as c(k) <= n * (k + 1) for every k from 0 to
max_staleness. The step waits for c(k) - n * k of those groups, for each k, which is at most n, and
then trains on n groups, the oldest first. So of what must be trained on within k steps after the
next one, at most n * (k + 1) are left: the inequality holds again. New groups only count in
k = max_staleness, where it is the rule of admission.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import NamedTuple


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
    num_trajectories: int  # 0 if it is not finished.
    rank: int  # Where its episodes run.


def by_age(state: GroupState) -> tuple[int, int]:
    """Return what sorts groups: the oldest first, and by ticket where they began together."""
    return state.version, state.ticket


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
        preferred = sorted(finished, key=lambda state: (not state.is_varied, *by_age(state)))
        return {state.ticket for state in preferred[: self.prompts_per_step]}

    def late(self, begun: Collection[GroupState], version: int) -> set[int]:
        """Return the tickets of groups that cannot be trained on in time, whatever is waited for.

        There are none unless the settings have changed since these groups began.
        """
        late = set()
        num_before = 0  # Groups that are trained on earlier.
        for state in sorted(begun, key=by_age):
            num_steps = num_before // self.prompts_per_step
            age = version + num_steps * self.updates_per_step - state.version
            if age > self.max_staleness * self.updates_per_step:
                late.add(state.ticket)
            else:
                num_before += 1
        return late
