"""The sampler of ranks that only generate, whose engines go on while other ranks train.

Between two runs, and from one step to the next, unfinished requests stay in the engine. Weights may
change in between (`EngineLoop.change_weights`).
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from minirl.data.prompts import Prompts
from minirl.engine.engine import Sampling
from minirl.parallel.sides import seconds_between_looks
from minirl.rollout.pacing import Goal, GroupState
from minirl.rollout.sampler import Group, Sampler, StepRollout
from minirl.types.packed import Trajectory

NUM_PARTS = 8  # Of a step whose groups are handed on as they finish.


class GeneratingSampler(Sampler):
    """A sampler whose groups go on between its runs, unless the sides are in lockstep."""

    ahead = 0  # What is drawn of later steps; the loop of the generators sets it.
    can_stop = False  # The trainers say when.

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.pauses = self.cfg.rollout.overlap == "lockstep"
        # An engine that has enough waits for the others to see it.
        self.seconds_between_looks = seconds_between_looks(self.engine.num_replicas)

    def collect(self, prompts: Prompts, *args: Any, **options: Any) -> list[Trajectory] | None:
        """Run episodes as `Sampler.collect` does; the groups of training pause meanwhile."""
        if self.begun and not self.pauses:
            # The requests of training leave the engine until its next run.
            if self.engine.is_leader:
                none: Iterator[Group] = iter(())
                finished = self.engine_loop.run(self.training.run(none, 0, lambda versions: True))
                self.training.groups |= {group.ticket: group for group in finished}
            else:
                self.engine_loop.run(None)
        return super().collect(prompts, *args, **options)

    def run_on(self, first: int, sampling: Sampling, is_called: Callable[[], bool]) -> int:
        """Go on with groups of the next steps until this rank is called. Collective.

        Args:
            first: the first new ticket.
            sampling: how to sample.
            is_called: returns whether trainers wait for this side, sooner or later on all ranks.

        Returns:
            The first ticket that is new afterwards.
        """
        tickets, first = self.issue(self.pace().num_new(0, len(self.begun)), first)
        make_group = self.group_maker(sampling, self.engine_loop.version)
        num_samples = self.training_config.samples_per_prompt
        groups = self._run_groups(
            self.training, make_group, tickets, num_samples, [], is_called=is_called
        )
        self.training.groups |= {group.ticket: group for group in groups}
        self._exchange_states([])
        self.take_back(tickets, ())
        return first

    def collect_parts(
        self,
        first: int,
        sampling: Sampling,
        *,
        version: int,
        is_called: Callable[[], bool],
    ) -> Iterator[StepRollout]:
        """Yield the groups of a training step in parts, as they finish. Collective.

        All parts together are what `collect_step` returns.

        Args:
            first: the first new ticket.
            sampling: how to sample.
            version: optimizer steps that the weights have seen.
            is_called: returns whether trainers wait for a part; until then it grows.
        """
        cfg = self.training_config
        self.engine_loop.version = version
        make_group = self.group_maker(sampling, version)
        part = math.ceil(cfg.prompts_per_step / NUM_PARTS)
        num_missing = num_to_issue = cfg.prompts_per_step
        num_extra = cfg.extra_prompts
        replaced: dict[int, Group] = {}  # This rank's groups that others replace, by ticket.
        replaced_states: dict[int, GroupState] = {}  # Those of all ranks.
        has_trained = False
        while num_missing:
            tickets, first = self.issue(num_to_issue, first)
            num_groups = min(part, num_missing, len(self.begun) + len(tickets))
            groups = self._run_groups(
                self.training,
                make_group,
                tickets,
                cfg.samples_per_prompt,
                [Goal(version, num_groups)],
                is_called=is_called,
            )
            states = self._exchange_states(groups)
            num_begun = self.take_back(tickets, states)
            chosen = {t for t, state in states.items() if state.is_varied}
            num_missing -= len(chosen)
            num_replaced = min(len(states) - len(chosen), num_extra)
            num_extra -= num_replaced
            num_to_issue = len(tickets) - num_begun + num_replaced
            replaced |= {g.ticket: g for g in groups if g.ticket not in chosen}
            replaced_states |= {t: s for t, s in states.items() if t not in chosen}
            if not self.begun and not num_to_issue:  # Some that were replaced fill the step up.
                filling = sorted(replaced_states)[:num_missing]
                chosen |= set(filling)
                groups = [*(g for g in groups if g.ticket not in replaced), *replaced.values()]
                num_missing = 0
            rollout = self.rollout_of(
                groups,
                chosen,
                first,
                is_last=num_missing == 0,
                must_train=num_missing == 0 and not has_trained,
            )
            num_here = sum(len(t.tokens) for t in rollout.trajectories)
            has_trained |= bool(self.mesh.sums(torch.tensor(num_here)))
            yield rollout
