"""The sampler: groups of episodes on this rank's engine, beside those of the other ranks.

A ticket is the number of a prompt; its group is all of the prompt's samples. With `rollout.ahead` a
step begins more groups than it needs. When it has enough, the others are interrupted, and the next
step goes on with them under its new weights (partial rollouts: APRIL, arXiv 2509.18521; Kimi k1.5,
arXiv 2501.12599, sec. 2.6.2). pacing.py says when groups begin and which of them a step waits for.
"""

import copy
import inspect
import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from minirl.config.rl import RLConfig
from minirl.config.shared import EndpointConfig, EvaluateConfig
from minirl.data.prompts import Prompts
from minirl.engine.engine import RolloutEngine, Sampling
from minirl.engine.loop import EngineLoop
from minirl.envs.base import Agent, Env
from minirl.rewards.functions import Rewards
from minirl.rollout.conversation import Conversation
from minirl.rollout.episode import Episode, EpisodeRunner
from minirl.rollout.groups import Group, GroupScheduler, StepRollout
from minirl.rollout.pacing import Goal, GroupState, Pace
from minirl.rollout.saved import (
    SavedGroup,
    read_line,
    restore_episodes,
    write_anew,
    write_group,
)
from minirl.rollout.tickets import deal, pull
from minirl.rollout.time_limits import make_in_time
from minirl.types.packed import Trajectory

# Opens an endpoint (minirl/endpoint) of a loop, for prompts of these templates.
OpenEndpoint = Callable[[EngineLoop, Prompts, EndpointConfig], Any]

REQUEST = -1  # In place of a ticket: a signal has asked this rank to save and leave.


class Sampler:
    """Samples groups of episodes with this rank's engine.

    Attributes:
        engine_loop: steps the engine.
        runner: runs the episodes.
        training: has the groups that the next training step goes on with.
        begun: those groups, of all ranks, by ticket.
        waiting: tickets that had no room in the steps that they were taken for; they are next.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        make_env: Callable[[], Env],
        rewards: Rewards,
        prompts: Prompts,
        cfg: RLConfig | EvaluateConfig,
        open_endpoint: OpenEndpoint,
    ):
        """Make the loop, and the endpoint if the environment is an agent.

        Args:
            engine: this rank's, or the one that it has a part of.
            make_env: makes the environment of one episode.
            rewards: score episodes that have ended.
            prompts: those of training.
            cfg: of the program.
            open_endpoint: for agents, which ask the engine over HTTP.
        """
        self.engine = engine
        self.mesh = engine.mesh
        self.make_env = make_env
        self.prompts = prompts
        self.cfg = cfg
        pulls = {"pull": True, "round_robin": False, "auto": engine.on_cuda}
        self.pulls = pulls[cfg.rollout.tickets]
        self.engine_loop = EngineLoop(
            engine,
            repeatable=not self.pulls,
            watch=self.mesh.watch,
            step_seconds=60 * cfg.timeout_minutes,
            turn_seconds=cfg.env.timeout_seconds,
        )
        self.endpoint = None
        self.is_interrupted = False  # The rollout of this training step, by a signal, on any rank.
        example = make_in_time(make_env, cfg.env, self.mesh.watch)
        if engine.is_leader and isinstance(example, Agent):
            self.endpoint = open_endpoint(self.engine_loop, prompts, cfg.endpoint)
        first_call = example.run if isinstance(example, Agent) else example.reset
        self.runner = EpisodeRunner(
            self.engine_loop,
            rewards,
            cfg,
            self.endpoint,
            make_env,
            # What is asynchronous may belong to the thread that made it.
            makes_in_thread=not inspect.iscoroutinefunction(first_call),
        )
        self.training = GroupScheduler(self.runner)
        self.begun: dict[int, GroupState] = {}
        self.waiting: list[int] = []
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
    ) -> list[Trajectory] | None:
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
            an engine's leader have none. None: a signal asks to stop, on any rank.

        Raises:
            UserError: a reward function failed, or an environment with env.on_error raise.
        """
        self.engine_loop.version = version
        self.runner.take_troubles()
        make_group = partial(self._make_group, prompts, num_samples, sampling, version)
        goals = [Goal(version, len(tickets))]
        scheduler = GroupScheduler(self.runner)
        groups = self._run_groups(scheduler, make_group, tickets, num_samples, goals, {})
        if self.mesh.agree_to_stop():
            return None  # without waiting for the rewards that are still being computed
        trajectories = list(itertools.chain.from_iterable(g.trajectories() for g in groups))
        return None if self.mesh.agree_to_stop() else trajectories  # Rewards may take long.

    # ----------------------------------------------------------------------------------------------
    # a training step

    @property
    def pace(self) -> Pace:
        """Return the pace that the config asks for."""
        assert isinstance(self.cfg, RLConfig)  # Only training has steps.
        return Pace(
            prompts_per_step=self.cfg.rollout.prompts_per_step,
            ahead=self.cfg.rollout.ahead,
            max_staleness=self.cfg.rollout.max_staleness,
            updates_per_step=self.cfg.algo.num_updates,
        )

    def collect_step(self, first: int, sampling: Sampling, *, version: int) -> StepRollout:
        """Return the groups of a training step. Collective.

        The step has rollout.prompts_per_step groups, from those that earlier steps began and from
        new tickets. Dynamic sampling (DAPO, arXiv 2503.14476, sec. 3.2): groups whose mean reward
        is not strictly inside rollout.keep_inside are replaced by those of at most
        rollout.extra_prompts further tickets; if that is not enough, the earliest of them are in
        after all.

        Args:
            first: the first new ticket.
            sampling: how to sample.
            version: optimizer steps that the weights have seen.
        """
        cfg = self.cfg.rollout
        pace = self.pace
        self.engine_loop.version = version
        self.runner.take_troubles()
        make_group = partial(
            self._make_group, self.prompts, cfg.samples_per_prompt, sampling, version
        )
        # What would become too old has to finish in the first round.
        goals = pace.goals(self.begun.values(), version)
        most_new = pace.num_new(cfg.prompts_per_step, len(self.begun)) + cfg.extra_prompts

        finished: dict[int, Group] = {}  # This rank's, by ticket.
        states: dict[int, GroupState] = {}  # Of the finished groups of all ranks, by ticket.
        while (missing := cfg.prompts_per_step - sum(s.is_varied for s in states.values())) > 0:
            num_new = min(most_new, pace.num_new(missing, len(self.begun)))
            tickets, first = self._take_tickets(num_new, first)
            if not self.begun and not tickets:
                break  # There is nothing to go on with, and no extra prompt is left.
            goals.append(Goal(version, min(missing, len(self.begun) + len(tickets))))
            groups = self._run_groups(
                self.training, make_group, tickets, cfg.samples_per_prompt, goals, self.begun
            )
            finished |= {group.ticket: group for group in groups}
            states |= self._exchange_states(groups)
            most_new -= self._return_tickets(tickets, states)
            goals = []
            if self.is_interrupted:
                self.training.groups |= finished
                return self._step_rollout([], first)
        trajectories = self._take_chosen(finished, states, pace.choose(states.values()))
        return self._step_rollout(trajectories, first)

    def _take_tickets(self, num: int, first: int) -> tuple[list[int], int]:
        """Return `num` tickets, those that wait before new ones, and the next new one."""
        num_new = max(0, num - len(self.waiting))
        tickets = self.waiting[:num] + list(range(first, first + num_new))
        self.waiting = self.waiting[num:]
        return tickets, first + num_new

    def _return_tickets(self, tickets: list[int], finished: dict[int, GroupState]) -> int:
        """Let the tickets wait whose groups had no room; return the number of the others."""
        unused = [t for t in tickets if t not in self.begun and t not in finished]
        self.waiting = sorted(self.waiting + unused)
        return len(tickets) - len(unused)

    def _exchange_states(self, finished: list[Group]) -> dict[int, GroupState]:
        """Tell all ranks how the groups of this one stand. Collective.

        Sets `begun` to the unfinished groups of all ranks.

        Args:
            finished: groups of this rank.

        Returns:
            The finished groups of all ranks, by ticket.
        """
        rows = []
        rank = self.mesh.rank
        for group in finished:
            trajectories = group.trajectories()
            is_varied = self._is_varied(trajectories)
            rows.append((group.ticket, group.version, True, is_varied, len(trajectories), rank))
        for group in self.training.groups.values():
            rows.append((group.ticket, group.version, False, False, 0, rank))
        if self._may_interrupt(self.training):
            rows.append((REQUEST, 0, False, False, 0, rank))

        with self.engine.timer.phase("idle"):
            table = self.mesh.gather_array(np.array(rows, np.int64).reshape(-1, 6))
        self.begun = {}
        finished_of_all: dict[int, GroupState] = {}
        for ticket, version, is_finished, is_varied, num_trajectories, of_rank in table.tolist():
            if ticket == REQUEST:
                self.is_interrupted = True
                continue
            state = GroupState(
                ticket, version, bool(is_finished), bool(is_varied), num_trajectories, of_rank
            )
            (finished_of_all if is_finished else self.begun)[ticket] = state
        return finished_of_all

    def _may_interrupt(self, scheduler: GroupScheduler) -> bool:
        """Return whether a signal has asked this rank to stop, and its groups need not be finished.

        Evaluations begin anew. Of training, a checkpoint holds unfinished episodes only with
        rollout.ahead.
        """
        need_not_finish = scheduler is not self.training or bool(self.cfg.rollout.ahead)
        return self.mesh.watch.requested and need_not_finish

    def _is_varied(self, trajectories: list[Trajectory]) -> bool:
        """Return whether a group's mean reward is inside rollout.keep_inside, if that matters."""
        if not self.cfg.rollout.extra_prompts:
            return True
        low, high = self.cfg.rollout.keep_inside
        rewards = [t.reward for t in trajectories if t.segment == 0]
        return bool(rewards) and low < sum(rewards) / len(rewards) < high

    def _take_chosen(
        self, finished: dict[int, Group], states: dict[int, GroupState], chosen: set[int]
    ) -> list[Trajectory]:
        """Return the trajectories of the chosen groups of this rank.

        A varied group too many waits for the next step; the others are discarded.
        """
        trajectories = []
        for ticket, group in sorted(finished.items()):
            if ticket in chosen:
                trajectories += group.trajectories()
            elif states[ticket].is_varied:
                self.training.groups[ticket] = group
            else:
                self.engine_loop.discarded_tokens += group.num_sampled()
        for ticket, state in states.items():
            if state.is_varied and ticket not in chosen:
                self.begun[ticket] = state
        return trajectories

    def _step_rollout(self, trajectories: list[Trajectory], next_ticket: int) -> StepRollout:
        """Return the result of a step, with the numbers of all ranks. Collective."""
        troubles = self.runner.take_troubles()
        # Numbers are added. Texts, which are rare, are gathered only if there are any.
        num_with_tokens = sum(len(t.tokens) > 0 for t in trajectories)
        num_tokens = sum(t.info["answer_tokens"] for t in trajectories if t.segment == 0)
        discarded = self.engine_loop.take_discarded()
        numbers = torch.tensor((num_with_tokens, num_tokens, any(troubles), discarded))
        num_trajectories, num_tokens, is_troubled, discarded = self.mesh.sums(numbers).tolist()
        of_ranks = self.mesh.gather(troubles) if is_troubled else []
        return StepRollout(
            trajectories=trajectories,
            num_trajectories=num_trajectories,
            num_tokens=num_tokens,
            next_ticket=next_ticket,
            failures=sum([failures for failures, _ in of_ranks], []),
            refusals=sum([refusals for _, refusals in of_ranks], []),
            discarded_tokens=discarded,
            is_interrupted=self.is_interrupted,
        )

    # ----------------------------------------------------------------------------------------------
    # how tickets are shared among the engines

    def _run_groups(
        self,
        scheduler: GroupScheduler,
        make_group: Callable[[int], Group],
        tickets: Sequence[int],
        num_samples: int,
        goals: list[Goal],
        begun: dict[int, GroupState],
    ) -> list[Group]:
        """Run groups until all ranks together have reached the goals.

        Args:
            scheduler: with the unfinished groups to go on with.
            make_group: makes the group of a ticket.
            tickets: new ones, to be shared among the engines.
            num_samples: episodes of a group.
            goals: what is enough; the last one counts all groups.
            begun: the unfinished groups of all ranks, by ticket.

        Returns:
            This rank's finished groups.
        """
        if not self.engine.is_leader:
            self.engine_loop.run(None)
            return []
        num_engines = self.engine.num_replicas
        if self.pulls:
            number = next(self.counter_numbers)
            own_tickets, is_enough = pull(tickets, goals, self.mesh.store, number)
        else:
            versions: list[list[int]] = [[] for _ in range(num_engines)]
            for state in begun.values():
                versions[state.rank // self.engine.tp_size].append(state.version)
            version = self.engine_loop.version
            own_tickets, is_enough = deal(tickets, goals, version, versions, self.engine.replica)
        # At most an even share at once: with room for all, the engine that asks first would take
        # everything. A group begins only where all its episodes have room.
        share = math.ceil((len(begun) + len(tickets)) / num_engines)
        room = min(self.engine.cfg.max_num_seqs, share * num_samples) - num_samples + 1

        def may_end(versions: list[int]) -> bool:
            return self._may_interrupt(scheduler) or is_enough(versions)

        return self.engine_loop.run(scheduler.run(map(make_group, own_tickets), room, may_end))

    def _make_group(
        self, prompts: Prompts, num_samples: int, sampling: Sampling, version: int, ticket: int
    ) -> Group:
        row = prompts.row(ticket)
        row = {**row, "rendered_prompt": prompts.rendered(row)}
        episodes = [
            Episode(
                ticket=ticket,
                number=i,
                row=copy.deepcopy(row),  # an environment may change it
                conversation=Conversation(
                    prompts.tokenizer, prompts.vision, row, cut_to=prompts.cut_to
                ),
                sampling=sampling,
            )
            for i in range(num_samples)
        ]
        return Group(ticket, version, episodes)

    # ----------------------------------------------------------------------------------------------
    # checkpoints, and the end of a run

    def state(self) -> list[str]:
        """Return what the next step would go on with, a line for each group, for a checkpoint.

        What is no plain value begins anew there (saved.py).
        """
        lines = [write_group(group) for group in self.training.groups.values()]
        if self.mesh.rank == 0:
            lines += [write_anew(ticket, []) for ticket in self.waiting]
        return lines

    def load(self, states: list[list[str]], sampling: Sampling, *, version: int) -> None:
        """Take this rank's part of the unfinished groups of a checkpoint. Collective.

        Args:
            states: `state` of each rank that saved. If there were more or fewer of them than now,
                each engine takes a share.
            sampling: of episodes that begin anew.
            version: optimizer steps that the weights have seen.

        Raises:
            UserError: a line is none.
        """
        lines: list[str] = []
        if len(states) == self.mesh.world_size:
            lines = states[self.mesh.rank]
        elif self.engine.is_leader:
            lines = sum(states, [])[self.engine.replica :: self.engine.num_replicas]
        waiting = []
        for line in lines:
            saved = read_line(line)
            if not (saved.episodes and self._restore(saved, sampling)):
                waiting.append(saved.ticket)
                self.engine_loop.discarded_tokens += sum(saved.num_sampled)

        # Settings that have changed may leave no time for some. Their tickets begin anew.
        self._exchange_states([])
        late = self.pace.late(self.begun.values(), version)
        for ticket in late:
            del self.begun[ticket]
            if ticket in self.training.groups:
                self.engine_loop.discarded_tokens += self.training.groups.pop(ticket).num_sampled()
        self.waiting = sorted(itertools.chain(late, *self.mesh.gather(waiting)))

    def _restore(self, saved: SavedGroup, sampling: Sampling) -> bool:
        """Go on with a group of a checkpoint. Samples more than the config's are discarded.

        Returns:
            Whether it could be restored.
        """
        num_samples = self.cfg.rollout.samples_per_prompt
        group = self._make_group(self.prompts, num_samples, sampling, saved.version, saved.ticket)
        for episode in group.episodes:
            episode.env = make_in_time(self.make_env, self.cfg.env, self.mesh.watch)
        if not restore_episodes(group, saved):
            return False
        self.training.groups[saved.ticket] = group
        self.engine_loop.discarded_tokens += sum(saved.num_sampled[num_samples:])
        return True

    def num_unfinished_tokens(self) -> int:
        """Return the tokens that all ranks have sampled for groups of later steps. Collective."""
        num_tokens = sum(group.num_sampled() for group in self.training.groups.values())
        return int(self.mesh.sums(torch.tensor(num_tokens)))
