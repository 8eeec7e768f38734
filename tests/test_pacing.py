"""Pacing: whatever finishes first, every group is trained on in time and nothing is thrown away."""

import dataclasses
import itertools

import numpy as np
import pytest

from benchmarks import pacing
from minirl.rollout.pacing import Goal, GroupState, Pace, deal


def group(ticket, version, *, finished=False, varied=True):
    return GroupState(ticket, version, finished, finished and varied, 0)


def reached(goals, finished):
    for goal in goals:
        if sum(state.version <= goal.version for state in finished) < goal.num_groups:
            return False
    return True


@pytest.mark.parametrize("updates", [1, 2])
@pytest.mark.parametrize("max_staleness", [1, 2, 4])
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_every_group_is_trained_on_in_time_even_if_the_youngest_finish_first(
    updates, max_staleness, share
):
    rng = np.random.default_rng(0)
    num, ahead = 6, round(6 * max_staleness * share)
    pace = Pace(
        prompts_per_step=num, ahead=ahead, max_staleness=max_staleness, updates_per_step=updates
    )
    begun, version, fresh, oldest = [], 0, itertools.count(), 0
    for _ in range(60):
        goals = pace.goals(begun, version)
        new = pace.num_new(num, len(begun))
        begun += [group(next(fresh), version) for _ in range(new)]
        assert len(begun) == num + ahead <= num * (1 + max_staleness)
        # The youngest first, so that those with a deadline come last: the worst that can be.
        ending = sorted(begun, key=lambda state: (-state.version, rng.random()))
        count = next(
            count for count in range(num, len(ending) + 1) if reached(goals, ending[:count])
        )
        finished = [state._replace(is_finished=True, is_varied=True) for state in ending[:count]]
        chosen = pace.choose(finished)
        assert len(chosen) == num
        for state in finished:
            if state.ticket in chosen:
                oldest = max(oldest, version - state.version)
        begun = [state for state in begun if state.ticket not in chosen]
        version += rng.choice([0, updates, updates])  # a step may be without an update
    assert oldest == max_staleness * updates


@pytest.mark.parametrize(("num", "max_staleness"), [(1, 1), (1, 4), (2, 1), (2, 2), (2, 3), (3, 2)])
def test_in_every_order_of_finishes_all_groups_are_trained_on_in_time(num, max_staleness):
    """Every state that generators who never wait can be in when a step begins (ahead = n * S).

    A state is how many groups of each age are begun and not finished, and how many are finished
    and not trained on. Whatever has finished when the trainers come, the goals among it, no group
    may be older than the bound.
    """
    ahead = num * max_staleness
    pace = Pace(prompts_per_step=num, ahead=ahead, max_staleness=max_staleness, updates_per_step=1)
    empty = (0,) * (max_staleness + 1)
    found, new = {(empty, empty)}, [(empty, empty)]
    while new:
        unfinished, finished = new.pop()
        begun = [group(0, -age) for age, n in enumerate(unfinished) for _ in range(n)]
        begun += [group(0, -age, finished=True) for age, n in enumerate(finished) for _ in range(n)]
        goals = [*pace.goals(begun, 0), Goal(0, num)]
        issued = pace.num_new(num, len(begun))
        assert len(begun) + issued == num * (max_staleness + 1)
        unfinished = (unfinished[0] + issued, *unfinished[1:])
        for more in itertools.product(*(range(n + 1) for n in unfinished)):
            there = [n + m for n, m in zip(finished, more, strict=True)]
            states = [
                group(0, -age, finished=True) for age, n in enumerate(there) for _ in range(n)
            ]
            states = [state._replace(ticket=i) for i, state in enumerate(states)]
            if not reached(goals, states):
                continue
            for ticket in pace.choose(states):
                there[-states[ticket].version] -= 1
            left = [n - m for n, m in zip(unfinished, more, strict=True)]
            assert left[-1] == there[-1] == 0, "too old in the next step"
            state = ((0, *left[:-1]), (0, *there[:-1]))
            assert sum(map(sum, state)) == ahead
            if state not in found:
                found.add(state)
                new.append(state)


def test_varied_groups_are_chosen_before_others_and_then_the_oldest():
    pace = Pace(prompts_per_step=3, ahead=3, max_staleness=1, updates_per_step=1)
    finished = [
        group(4, 7, finished=True),
        group(3, 8, finished=True),
        group(2, 8, finished=True),
        group(1, 7, finished=True, varied=False),
    ]
    assert pace.choose(finished) == {4, 2, 3}
    assert pace.choose(finished[1:]) == {2, 3, 1}


def test_engines_share_goals_as_they_share_groups():
    begun = [[3, 3, 4], [4], [3]]  # versions of each engine's groups
    goals = [Goal(3, 2), Goal(5, 6)]
    parts = [deal([10, 11, 12, 13], goals, 5, begun, replica) for replica in range(3)]
    assert [list(tickets) for tickets, _ in parts] == [[], [10, 12], [11, 13]]
    enough = [is_enough for _, is_enough in parts]
    # Who has most owes most, of several the first: both of version 3, and two of all six each.
    assert enough[0]([3, 3]) and not enough[0]([3, 4, 5])
    assert enough[1]([5, 5]) and not enough[1]([4])
    assert enough[2]([5, 5]) and not enough[2]([3])


LOAD = pacing.Load(prompts=16, samples=4, ahead=16, sigma=1.0, steps=30, num_engines=2)


def test_pacing_throws_nothing_away_where_beginning_again_does():
    again, paced, unlimited = (pacing.simulate(LOAD, rule) for rule in pacing.RULES)
    assert again.thrown_away > 0.1 and again.num_late > 5 and unlimited.num_late > 5
    assert paced.thrown_away == paced.num_late == 0 and paced.most_begun == 32
    assert unlimited.seconds <= paced.seconds
    # With time enough for the longest answers, the limit costs nothing.
    patient = dataclasses.replace(LOAD, max_staleness=12)
    outcome = pacing.simulate(patient, "pace")
    assert outcome.seconds == pytest.approx(unlimited.seconds, rel=0.02)
