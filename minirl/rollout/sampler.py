"""The sampler: groups of episodes on this rank's engine, beside those of the other ranks.

A ticket is the number of a prompt; its group is all of the prompt's samples. With `rollout.ahead` a
step begins more groups than it needs. When it has enough, the others are interrupted, and the next
step goes on with them under its new weights (partial rollouts: APRIL, arXiv 2509.18521; Kimi k1.5,
arXiv 2501.12599, sec. 2.6.2).
"""

import itertools
import math
import pickle
from collections.abc import Callable, Iterator
from functools import partial

from minirl.config.rl import RLConfig
from minirl.config.shared import EvaluateConfig
from minirl.data import chat
from minirl.data.prompts import Prompts
from minirl.envs.base import Agent, Env
from minirl.rewards.functions import Rewards
from minirl.rollout.conversation import Conversation
from minirl.rollout.engine import RolloutEngine, Sampling
from minirl.rollout.engine_loop import EngineLoop
from minirl.rollout.episode import Episode, EpisodeRunner
from minirl.rollout.groups import Group, GroupScheduler, IsEnough
from minirl.types import Trajectory


class Sampler:
    """Samples groups of episodes with this rank's engine.

    Attributes:
        engine_loop: steps the engine.
        runner: runs the episodes.
        training: has the groups that the next training step goes on with.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        make_env: Callable[[], Env],
        rewards: Rewards,
        prompts: Prompts,
        cfg: RLConfig | EvaluateConfig,
    ):
        """Make the loop, and the endpoint if the environment is an agent.

        Args:
            engine: this rank's, or the one that it has a part of.
            make_env: makes the environment of one episode.
            rewards: score episodes that have ended.
            prompts: those of training.
            cfg: of the program.
        """
        self.engine = engine
        self.mesh = engine.mesh
        self.make_env = make_env
        self.prompts = prompts
        self.cfg = cfg
        pulls = {"pull": True, "round_robin": False, "auto": engine.on_cuda}
        self.pulls = pulls[cfg.rollout.tickets]
        self.engine_loop = EngineLoop(engine, repeatable=not self.pulls)
        self.endpoint = None
        if engine.is_leader and isinstance(make_env(), Agent):
            from minirl.rollout.server import Endpoint  # Slow to import; only agents need it.

            self.endpoint = Endpoint(self.engine_loop, prompts, cfg.endpoint)
        self.runner = EpisodeRunner(self.engine_loop, rewards, cfg, self.endpoint)
        self.training = GroupScheduler(self.runner)
        self.counter_numbers = itertools.count()  # One for each pair of counters on the store.

    def close(self) -> None:
        """Stop the endpoint and the loop."""
        if self.endpoint:
            self.engine_loop.loop.run_until_complete(self.endpoint.stop())
        self.engine_loop.close()

    # ----------------------------------------------------------------------------------------------
    # all groups, for an evaluation

    def collect(
        self,
        prompts: Prompts,
        tickets: range,
        num_samples: int,
        sampling: Sampling,
        *,
        version: int = 0,
    ) -> list[Trajectory]:
        """Run `num_samples` episodes of each ticket, together with the engines of the other ranks.

        Collective.

        Args:
            prompts: whose tickets these are.
            tickets: numbers of prompts.
            num_samples: episodes of each.
            sampling: how to sample.
            version: optimizer steps that the weights have seen.

        Returns:
            The trajectories of this rank's groups, in the order of their tickets. Ranks that follow
            an engine's leader have none.

        Raises:
            UserError: a reward function failed, or an environment with env.on_error raise.
        """
        self.engine_loop.version = version
        make_group = partial(self._make_group, prompts, num_samples, sampling, version)
        groups = self._run_groups(
            GroupScheduler(self.runner), make_group, tickets, num_samples, len(tickets)
        )
        return list(itertools.chain.from_iterable(group.trajectories() for group in groups))

    # ----------------------------------------------------------------------------------------------
    # a training step

    def collect_step(
        self, first: int, sampling: Sampling, *, version: int
    ) -> tuple[list[Trajectory], int]:
        """Return the groups of a training step, and the next ticket. Collective.

        The step has rollout.prompts_per_step groups, from those that earlier steps began and from
        new tickets. Dynamic sampling (DAPO, arXiv 2503.14476, sec. 3.2): groups whose mean reward
        is not strictly inside rollout.keep_inside are replaced by those of at most
        rollout.extra_prompts further tickets; if that is not enough, the earliest of them are in
        after all.

        Args:
            first: the first new ticket.
            sampling: how to sample.
            version: optimizer steps that the weights have seen.

        Returns:
            This rank's part of the trajectories, and the first ticket of the next step.
        """
        assert isinstance(self.cfg, RLConfig)  # Only training has steps.
        cfg = self.cfg.rollout
        self.engine_loop.version = version
        make_group = partial(
            self._make_group, self.prompts, cfg.samples_per_prompt, sampling, version
        )
        self.runner.failures.clear()
        # Begin anew what began more than rollout.max_staleness steps ago.
        oldest = version - cfg.max_staleness * self.cfg.algo.updates_per_step
        for group in list(self.training.groups.values()):
            if group.version < oldest:
                self.training.replace(group, make_group(group.ticket))
        num_new = max(0, cfg.prompts_per_step + cfg.ahead - self._num_unfinished())
        last = first + num_new + cfg.extra_prompts

        finished: dict[int, Group] = {}  # This rank's, by ticket.
        is_varied: dict[int, bool] = {}  # By ticket, of all ranks.
        while (missing := cfg.prompts_per_step - sum(is_varied.values())) > 0:
            num_unfinished = self._num_unfinished()
            num_new = max(0, missing + cfg.ahead - num_unfinished)
            tickets = range(first, min(first + num_new, last))
            if not num_unfinished and not tickets:
                break  # There is nothing to go on with, and no extra prompt is left.
            num_needed = min(missing, num_unfinished + len(tickets))
            groups = self._run_groups(
                self.training, make_group, tickets, cfg.samples_per_prompt, num_needed
            )
            first = tickets.stop
            finished |= {group.ticket: group for group in groups}
            own = {group.ticket: self._is_varied(group.trajectories()) for group in groups}
            for part in self.mesh.gather(own):
                is_varied |= part
        return self._choose(finished, is_varied), first

    def _num_unfinished(self) -> int:
        """Return how many groups of training all ranks can go on with. Collective."""
        return sum(self.mesh.gather(len(self.training.groups)))

    def _is_varied(self, trajectories: list[Trajectory]) -> bool:
        """Return whether a group's mean reward is inside rollout.keep_inside, if that matters."""
        if not self.cfg.rollout.extra_prompts:
            return True
        low, high = self.cfg.rollout.keep_inside
        rewards = [t.reward for t in trajectories if t.segment == 0]
        return bool(rewards) and low < sum(rewards) / len(rewards) < high

    def _choose(self, finished: dict[int, Group], is_varied: dict[int, bool]) -> list[Trajectory]:
        """Return the trajectories of the step's groups: varied ones first, then the earliest.

        A varied group too many waits for the next step.
        """
        by_preference = sorted(is_varied, key=lambda ticket: (not is_varied[ticket], ticket))
        chosen = by_preference[: self.cfg.rollout.prompts_per_step]
        trajectories = []
        for ticket, group in sorted(finished.items()):
            if ticket in chosen:
                trajectories += group.trajectories()
            elif is_varied[ticket]:
                self.training.groups[ticket] = group
        return trajectories

    # ----------------------------------------------------------------------------------------------
    # how tickets are shared among the engines

    def _run_groups(
        self,
        scheduler: GroupScheduler,
        make_group: Callable[[int], Group],
        tickets: range,
        num_samples: int,
        num_needed: int,
    ) -> list[Group]:
        """Run groups until all ranks together have finished enough. Collective.

        Args:
            scheduler: with the unfinished groups to go on with.
            make_group: makes the group of a ticket.
            tickets: new ones, to be shared among the engines.
            num_samples: episodes of a group.
            num_needed: groups that are enough.

        Returns:
            This rank's finished groups.
        """
        num_groups = self.mesh.gather(len(scheduler.groups))[:: self.engine.tp_size]  # Of engines.
        if self.pulls:
            own_tickets, is_enough = self._pull(tickets, num_needed)
        else:
            own_tickets, is_enough = self._deal(tickets, num_groups, num_needed)
        if not self.engine.is_leader:
            self.engine_loop.run(None)
            return []
        # At most an even share at once: with room for all, the engine that asks first would take
        # everything. A group begins only where all its episodes have room.
        share = math.ceil((sum(num_groups) + len(tickets)) / len(num_groups))
        room = min(self.engine.cfg.max_num_seqs, share * num_samples) - num_samples + 1
        return self.engine_loop.run(scheduler.run(map(make_group, own_tickets), room, is_enough))

    def _pull(self, tickets: range, num_needed: int) -> tuple[Iterator[int], IsEnough]:
        """Share tickets by counters on torchrun's store, so that long completions balance.

        Args:
            tickets: of all engines.
            num_needed: groups that all engines together must finish.

        Returns:
            The tickets that no engine has taken when this one asks, and whether the finished groups
            of all engines are enough.
        """
        number = next(self.counter_numbers)
        counted = 0

        def own_tickets() -> Iterator[int]:
            while (taken := self.mesh.store.add(f"minirl/tickets/{number}", 1) - 1) < len(tickets):
                yield tickets[taken]

        def is_enough(num_finished: int) -> bool:
            nonlocal counted
            new = num_finished - counted
            counted = num_finished
            return self.mesh.store.add(f"minirl/finished/{number}", new) >= num_needed

        return own_tickets(), is_enough

    def _deal(
        self, tickets: range, num_groups: list[int], num_needed: int
    ) -> tuple[Iterator[int], IsEnough]:
        """Share tickets by their number, which is repeatable.

        Args:
            tickets: of all engines.
            num_groups: unfinished groups of each engine.
            num_needed: groups that all engines together must finish.

        Returns:
            This engine's tickets, and whether so many finished groups are its part.
        """
        dealt = spread(len(tickets), num_groups)
        # The engine with most groups finishes most.
        loads = [-num - len(new) for num, new in zip(num_groups, dealt, strict=True)]
        quota = len(spread(num_needed, loads)[self.engine.replica])
        own_tickets = (tickets[i] for i in dealt[self.engine.replica])
        return own_tickets, lambda num_finished: num_finished >= quota

    def _make_group(
        self, prompts: Prompts, num_samples: int, sampling: Sampling, version: int, ticket: int
    ) -> Group:
        row = prompts.row(ticket)
        row = {**row, "rendered_prompt": chat.render(prompts.tokenizer, prompts.messages(row))}
        episodes = [
            Episode(
                ticket=ticket,
                number=i,
                row=row,
                env=self.make_env(),
                conversation=Conversation(prompts.tokenizer, prompts.vision),
                sampling=sampling,
            )
            for i in range(num_samples)
        ]
        return Group(ticket, version, episodes)

    # ----------------------------------------------------------------------------------------------
    # checkpoints

    def state(self) -> list[bytes]:
        """Return what the next step would go on with, group by group, for a checkpoint.

        What cannot be pickled begins anew there.
        """
        return [group.pickled() for group in self.training.groups.values()]

    def load(self, states: list[list[bytes]], sampling: Sampling) -> None:
        """Take this rank's part of the unfinished groups of a checkpoint.

        Args:
            states: `state` of each rank that saved. If there were more or fewer of them than now,
                each engine takes a share.
            sampling: of episodes that begin anew.
        """
        if not self.engine.is_leader:
            return
        if len(states) == self.mesh.world_size:
            pickled = states[self.mesh.rank]
        else:
            pickled = sum(states, [])[self.engine.replica :: self.engine.num_replicas]
        num_samples = self.cfg.rollout.samples_per_prompt
        for ticket, version, episodes in map(pickle.loads, pickled):
            group = self._make_group(self.prompts, num_samples, sampling, version, ticket)
            for i, saved in enumerate(episodes[:num_samples]):
                group.episodes[i] = group.episodes[i].restored(saved)
            self.training.groups[ticket] = group


def spread(num: int, loads: list[int]) -> list[list[int]]:
    """Deal 0 .. num - 1, one by one, to whichever has least; of several the first.

    Args:
        num: how many to deal.
        loads: what each has before.

    Returns:
        What each gets.
    """
    dealt: list[list[int]] = [[] for _ in loads]
    loads = list(loads)
    for i in range(num):
        least = loads.index(min(loads))
        dealt[least].append(i)
        loads[least] += 1
    return dealt
