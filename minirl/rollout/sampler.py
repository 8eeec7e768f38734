"""The sampler: groups of episodes on this rank's engine, together with those of the other ranks.

A ticket is the number of a prompt; its group is all of the prompt's samples. With `rollout.ahead` a
step begins more groups than it needs. When it has enough, the others are interrupted, and the next
step continues them under its new weights (partial rollouts: APRIL, arXiv 2509.18521; Kimi k1.5,
arXiv 2501.12599, sec. 2.6.2). pacing.py says when groups begin and which of them a step waits for.
"""

import asyncio
import copy
import itertools
import math
import reprlib
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from minirl.base.errors import UserError
from minirl.config.rl import RLConfig
from minirl.config.shared import EndpointConfig, EvaluateConfig, RolloutConfig
from minirl.data.prompts import Prompts
from minirl.engine.engine import RolloutEngine, Sampling
from minirl.engine.loop import EngineLoop
from minirl.envs import Agent, EnvMaker
from minirl.rewards import Answer
from minirl.rewards.scoring import Rewards
from minirl.rollout.conversation import Conversation
from minirl.rollout.episode import Episode, EpisodeRunner
from minirl.rollout.pacing import Goal, GroupState, IsEnough, Pace, deal, pull
from minirl.types.packed import UNSET, Trajectory

# Opens an endpoint (minirl/endpoint) of a loop, for prompts of these templates.
OpenEndpoint = Callable[[EngineLoop, Prompts, EndpointConfig], Any]


@dataclass
class Group:
    """The episodes of one ticket."""

    ticket: int
    version: int  # Optimizer steps that the weights had seen when it began.
    episodes: list[Episode]
    # Answers of episodes that have ended, by number, with the scores of functions that do not
    # compare them. None: nothing scores it.
    answers: dict[int, Future[Answer | None]] = field(default_factory=dict)
    result: Future[list[Trajectory]] = UNSET  # Of a finished group.

    @property
    def finished(self) -> bool:
        """Whether all episodes have ended. Their rewards may still be computed."""
        return len(self.answers) == len(self.episodes)

    def trajectories(self) -> list[Trajectory]:
        """Return the trajectories of a finished group, episode by episode; wait for the rewards.

        Raises:
            UserError: a reward function failed.
        """
        return self.result.result()

    def num_sampled(self) -> int:
        """Return the number of tokens that have been sampled, without those of dropped episodes."""
        return sum(e.num_sampled() for e in self.episodes)


@dataclass(kw_only=True)
class StepRollout:
    """What the rollout of a training step gives. All but the first field count all ranks."""

    trajectories: list[Trajectory]  # This rank's part.
    next_ticket: int  # The first ticket of the next step.
    # Tokens that were sampled since the last step and will not be trained on: groups that dynamic
    # sampling leaves out, episodes that are dropped, requests that an agent gave up.
    discarded_tokens: int
    unfinished: list[int]  # Tickets of groups that the next step continues, or begins first.
    unfinished_tokens: int  # Tokens that have been sampled for them.
    trouble: str  # What there is to say of episodes that failed or were refused a request.
    is_last: bool = True  # No other part of the step follows.


class GroupScheduler:
    """Runs groups of episodes together.

    Groups that are unfinished when it has enough of them stay in `groups`, and the next run
    continues them.
    """

    def __init__(self, runner: EpisodeRunner):
        self.runner = runner
        self.groups: dict[int, Group] = {}  # By ticket.
        self._num_active = 0  # Episodes that have begun and not ended.
        self._finished_versions: list[int] = []  # Versions of the groups that have finished.
        self._error: BaseException | None = None  # The first error that ends the run.
        self._episode_of: dict[asyncio.Task, tuple[Group, Episode]] = {}
        self._ended: asyncio.Queue[asyncio.Task] = asyncio.Queue()

    async def run(
        self,
        new_groups: Iterator[Group],
        room: int,
        is_enough: IsEnough,
        *,
        settles: bool = True,
    ) -> list[Group]:
        """Run the unfinished groups and new ones, until there are enough or no more.

        Args:
            new_groups: groups to begin; one is taken only when it can begin.
            room: a new group begins while fewer episodes than this are running, or none.
            is_enough: takes the versions of the finished groups. Groups of other ranks count, too,
                so that its result may change between two calls.
            settles: wait until no environment is at work. Otherwise those go on when the loop does.

        Returns:
            The groups that have finished, in the order of their tickets.

        Raises:
            UserError: an episode ended the run.
        """
        self._error = None
        if self.groups:  # Otherwise the paused requests are another scheduler's.
            self.runner.engine_loop.resume()
        self._finished_versions = [g.version for g in self.groups.values() if g.finished]
        while not (self._error or is_enough(self._finished_versions)):
            while self._num_active < max(1, room):
                new_group = next(new_groups, None)
                if new_group is None:
                    break
                self._start(new_group)
            if not self._num_active:
                break
            await self._collect_finished(0.02)  # Not longer: other ranks may have done enough.
        else:
            self.runner.engine_loop.may_step = False
            await asyncio.sleep(0)  # From now on who has just got a completion counts as at work.
        while settles and self.runner.engine_loop.active_episodes:
            await self._collect_finished(0.001)  # An environment's step is not interrupted.
        if self._error:
            raise self._error
        finished = [group for _, group in sorted(self.groups.items()) if group.finished]
        for group in finished:
            del self.groups[group.ticket]
        return finished

    def _start(self, group: Group) -> None:
        """Start a task for each episode."""
        self.groups[group.ticket] = group
        for episode in group.episodes:
            self._num_active += 1
            # The engine must not step before all episodes that begin together have made their first
            # request. Nobody knows when an agent, which asks through the endpoint, will do so.
            if not self.runner.makes_agents:
                self.runner.engine_loop.active_episodes += 1
            row = reprlib.repr(episode.row)  # Which may hold megabytes of tests.
            name = f"episode {episode.number} of prompt {episode.ticket}: {row}"
            task = asyncio.create_task(self.runner.run(episode), name=name)
            self._episode_of[task] = group, episode
            task.add_done_callback(self._ended.put_nowait)

    async def _collect_finished(self, seconds: float) -> None:
        """Wait for the next episode to end, at most so many seconds, and have it scored."""
        try:
            async with asyncio.timeout(seconds):
                task = await self._ended.get()
        except TimeoutError:
            return
        group, episode = self._episode_of.pop(task)
        if not self.runner.makes_agents:
            self.runner.engine_loop.mark_idle()
        if task.exception():
            self._error = self._error or task.exception()
            return
        self._num_active -= 1
        if episode.is_dropped:
            self.runner.engine_loop.discarded_tokens += episode.conversation.num_sampled()
        pool = self.runner.pool
        group.answers[episode.number] = pool.submit(self.runner.score, episode)
        if group.finished:
            self._finished_versions.append(group.version)
            group.result = pool.submit(self._finish, group)

    def _finish(self, group: Group) -> list[Trajectory]:
        """Return the trajectories of a group, when its answers are scored."""
        # The pool is first in, first out: what this waits for is done or under way.
        answers = [group.answers[e.number].result() for e in group.episodes]
        return self.runner.finish(group.episodes, answers)


class Sampler:
    """Samples groups of episodes with this rank's engine.

    Attributes:
        engine_loop: steps the engine.
        runner: runs the episodes.
        training: has the groups that the next training step continues.
        evaluation: has run the groups of the last call of `collect`.
        begun: those groups, of all ranks, by ticket.
        waiting: tickets that the next steps take before new ones: no engine had room for them, or
            the run was resumed while their groups were unfinished.
    """

    pauses = True  # Unfinished requests leave the engine when a run ends.
    seconds_between_looks: float | None = None  # At what other engines have; None: pacing's.

    def __init__(
        self,
        engine: RolloutEngine,
        make_env: EnvMaker,
        rewards: Rewards,
        prompts: Prompts,
        cfg: RLConfig | EvaluateConfig,
        open_endpoint: OpenEndpoint,
    ):
        """Make the loop, and the endpoint if the environment is an agent.

        Args:
            engine: this rank's engine, or the one that it has a part of.
            make_env: makes the environment of an episode.
            rewards: score episodes that have ended.
            prompts: the prompts of training.
            cfg: the program's config.
            open_endpoint: for agents, which ask the engine over HTTP.
        """
        self.engine = engine
        self.mesh = engine.mesh
        self.prompts = prompts
        self.cfg = cfg
        is_inflight = self.mesh.side == "generators" and cfg.rollout.overlap == "inflight"
        pulls = {"pull": True, "round_robin": False, "auto": engine.on_cuda or is_inflight}
        self.pulls = pulls[cfg.rollout.tickets]
        self.engine_loop = EngineLoop(
            engine,
            repeatable=not self.pulls,
            watch=self.mesh.watch,
            step_seconds=60 * cfg.timeout_minutes,
            turn_seconds=cfg.env.timeout_seconds,
        )
        self.endpoint = None
        if engine.is_leader and isinstance(make_env.example, Agent):
            self.endpoint = open_endpoint(self.engine_loop, prompts, cfg.endpoint)
        self.runner = EpisodeRunner(self.engine_loop, rewards, cfg, make_env, self.endpoint)
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
        version: int | None = None,
        can_stop: bool = True,
    ) -> list[Trajectory] | None:
        """Run `num_samples` episodes of each ticket, together with the engines of the other ranks.

        Collective.

        Args:
            prompts: the prompts that the tickets are numbers of.
            tickets: numbers of prompts.
            num_samples: episodes of each.
            sampling: how to sample.
            version: optimizer steps that the weights have seen; None: the loop's.
            can_stop: a signal interrupts it.

        Returns:
            The trajectories of this rank's groups, in the order of their tickets. Ranks that follow
            an engine's leader have none. None: a signal asks to stop, on any rank.

        Raises:
            UserError: a reward function failed, or an environment with env.on_error raise.
        """
        version = self.engine_loop.version if version is None else version
        self.engine_loop.version = version
        num_discarded = self.engine_loop.discarded_tokens
        make_group = partial(self._make_group, prompts, num_samples, sampling, version)
        goals = [Goal(version, len(tickets))]
        self.evaluation = GroupScheduler(self.runner.with_own_threads())
        groups = self._run_groups(
            self.evaluation, make_group, tickets, num_samples, goals, pauses=True, can_stop=can_stop
        )
        self.engine_loop.discarded_tokens = num_discarded  # Of training alone.
        if can_stop and self.mesh.agree_to_stop():
            return None  # without waiting for the rewards that are still being computed
        trajectories = list(itertools.chain.from_iterable(g.trajectories() for g in groups))
        is_stopped = can_stop and self.mesh.agree_to_stop()  # Rewards may take long.
        return None if is_stopped else trajectories

    # ----------------------------------------------------------------------------------------------
    # a training step

    def collect_step(self, first: int, sampling: Sampling, *, version: int) -> StepRollout | None:
        """Return the groups of a training step. Collective.

        The step has rollout.prompts_per_step groups, from those that earlier steps began and from
        new tickets. Dynamic sampling (DAPO, arXiv 2503.14476, sec. 3.2): a group with a mean reward
        that is not strictly inside rollout.keep_inside is replaced, by groups of at most
        rollout.extra_prompts further tickets; if these are too few, the step also has the earliest
        of the replaced groups.

        Args:
            first: the first new ticket.
            sampling: how to sample.
            version: optimizer steps that the weights have seen.

        Returns:
            What the step trains on. None: a signal asks to stop, on any rank, and groups of several
            steps would have to finish first (rollout.ahead).
        """
        cfg = self.training_config
        pace = self.pace()
        self.engine_loop.version = version
        make_group = self.group_maker(sampling, version)
        # What would become too old has to finish in the first round.
        goals = pace.goals(self.begun.values(), version)
        most_new = pace.num_new(cfg.prompts_per_step, len(self.begun)) + cfg.extra_prompts

        finished: dict[int, Group] = {}  # This rank's finished groups, by ticket.
        states: dict[int, GroupState] = {}  # The finished groups of all ranks, by ticket.
        while (missing := cfg.prompts_per_step - sum(s.is_varied for s in states.values())) > 0:
            num_tickets = min(most_new, pace.num_new(missing, len(self.begun)))
            tickets, first = self.issue(num_tickets, first)
            if not self.begun and not tickets:
                break  # There is nothing to continue, and no extra prompt is left.
            goals.append(Goal(version, min(missing, len(self.begun) + len(tickets))))
            groups = self._run_groups(
                self.training, make_group, tickets, cfg.samples_per_prompt, goals
            )
            if self.can_stop and self.mesh.agree_to_stop():
                return None
            goals = []
            finished |= {group.ticket: group for group in groups}
            states |= self._exchange_states(groups)
            most_new -= self.take_back(tickets, states)
        chosen = pace.choose(states.values())
        for ticket, state in states.items():
            if state.is_varied and ticket not in chosen:  # One too many waits for the next step.
                self.begun[ticket] = state
                if ticket in finished:
                    self.training.groups[ticket] = finished[ticket]
        groups = [g for ticket, g in sorted(finished.items()) if ticket not in self.begun]
        return self.rollout_of(groups, chosen, first)

    @property
    def training_config(self) -> RolloutConfig:
        """Return what a training step samples."""
        assert isinstance(self.cfg, RLConfig)  # Only training has steps.
        return self.cfg.rollout

    @property
    def ahead(self) -> int:
        """Return how many groups to begin beyond what a step needs."""
        return self.cfg.rollout.ahead

    @property
    def can_stop(self) -> bool:
        """Return whether a signal interrupts a step: it would have to finish those of others."""
        return bool(self.ahead)

    def pace(self) -> Pace:
        """Return the rules by which groups of training begin and are taken."""
        assert isinstance(self.cfg, RLConfig)
        cfg = self.cfg.rollout
        return Pace(
            prompts_per_step=cfg.prompts_per_step,
            ahead=self.ahead,
            max_staleness=cfg.max_staleness,
            updates_per_step=self.cfg.algo.num_epochs * self.cfg.algo.updates_per_step,
        )

    def group_maker(self, sampling: Sampling, version: int) -> Callable[[int], Group]:
        """Return what makes the group of a ticket of training."""
        num_samples = self.training_config.samples_per_prompt
        return partial(self._make_group, self.prompts, num_samples, sampling, version)

    def issue(self, num: int, first: int) -> tuple[list[int], int]:
        """Return so many tickets, those that wait before new ones, and the next new one.

        Args:
            num: how many.
            first: the first new ticket.
        """
        num_unseen = max(0, num - len(self.waiting))
        tickets = [*self.waiting[:num], *range(first, first + num_unseen)]
        self.waiting = self.waiting[num:]
        return tickets, first + num_unseen

    def take_back(self, tickets: list[int], states: Collection[int]) -> int:
        """Let tickets that no engine had room for wait; return how many of the others there are.

        Args:
            tickets: tickets that were issued.
            states: tickets of finished groups.
        """
        unused = [t for t in tickets if t not in self.begun and t not in states]
        self.waiting = sorted(self.waiting + unused)
        return len(tickets) - len(unused)

    def _exchange_states(self, finished: list[Group]) -> dict[int, GroupState]:
        """Let all ranks know the groups of this one. Collective.

        Sets `begun` to the unfinished groups of all ranks.

        Args:
            finished: groups of this rank that have finished since the last call.

        Returns:
            The finished ones of all ranks, by ticket.
        """
        cfg = self.training_config
        low, high = cfg.keep_inside
        rank = self.mesh.rank
        here = []
        for group in finished:
            rewards = [t.reward for t in group.trajectories() if t.segment == 0]
            is_varied = bool(rewards) and low < sum(rewards) / len(rewards) < high
            is_kept = is_varied or not cfg.extra_prompts
            here.append(GroupState(group.ticket, group.version, True, is_kept, rank))
        for group in self.training.groups.values():
            here.append(GroupState(group.ticket, group.version, False, False, rank))
        rows = np.array(here, np.int64).reshape(-1, len(GroupState._fields))
        with self.engine.timer.phase("idle"):
            table = self.mesh.gather_array(rows)
        states = [GroupState(*row) for row in table.tolist()]
        self.begun = {s.ticket: s for s in states if not s.is_finished}
        return {s.ticket: s for s in states if s.is_finished}

    def rollout_of(
        self,
        groups: list[Group],
        chosen: set[int],
        next_ticket: int,
        *,
        is_last: bool = True,
        must_train: bool = True,
    ) -> StepRollout:
        """Return what a step trains on, or a part of it, with the numbers of all ranks. Collective.

        Args:
            groups: this rank's finished groups, of which those that are not chosen are discarded.
            chosen: tickets of the groups to train on.
            next_ticket: the first ticket of the next step.
            is_last: no other part of the step follows.
            must_train: there is nothing else to train on.

        Raises:
            UserError: no rank has a token to train on, and must.
        """
        trajectories = []
        for group in groups:
            if group.ticket in chosen:
                trajectories += group.trajectories()
            elif is_last:
                self.engine_loop.discarded_tokens += group.num_sampled()

        # Numbers are added. Texts, which are rare, are gathered only if there are any.
        numbers = (
            sum(len(t.tokens) > 0 for t in trajectories),
            sum(t.info["answer_tokens"] for t in trajectories if t.segment == 0),
            len(self.runner.troubles),
            self.engine_loop.discarded_tokens,
            sum(group.num_sampled() for group in self.training.groups.values()),
        )
        self.engine_loop.discarded_tokens = 0
        totals = self.mesh.sums(torch.tensor(numbers)).tolist()
        num_trajectories, num_tokens, num_troubles, discarded, unfinished = totals
        trouble = ""
        if num_troubles:
            first = sum(self.mesh.gather(self.runner.troubles[:1]), [])[0]
            trouble = (
                f"{num_troubles} episodes failed or were refused a request, the first: {first}"
            )
        if not num_trajectories and must_train:
            why = "the policy sampled no token in any"
            if num_tokens:
                why = (
                    f"all {num_tokens} sampled tokens were the grammar's, which are outside the "
                    "loss; let the agent ask something without tool_choice and response_format, or "
                    "teach policy.model the format first, by minirl.sft"
                )
            raise UserError(f"no episode can be trained on: {trouble or why}")
        self.runner.troubles.clear()
        return StepRollout(
            trajectories=trajectories,
            next_ticket=next_ticket,
            discarded_tokens=discarded,
            unfinished=sorted([*self.begun, *self.waiting]),
            unfinished_tokens=unfinished,
            trouble=trouble,
            is_last=is_last,
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
        *,
        pauses: bool = False,
        can_stop: bool | None = None,
        is_called: Callable[[], bool] | None = None,
    ) -> list[Group]:
        """Run groups until all ranks together have reached the goals.

        Args:
            scheduler: has the unfinished groups to continue.
            make_group: makes the group of a ticket.
            tickets: new tickets, to be shared among the engines.
            num_samples: episodes of a group.
            goals: what is enough; the last one counts all groups.
            pauses: unfinished requests leave the engine at the end, whatever the overlap is.
            can_stop: a signal ends it, too; None: as `can_stop` of the sampler says.
            is_called: returns whether others wait for what is there; before, nothing is enough.

        Returns:
            This rank's finished groups.
        """
        pauses = pauses or self.pauses
        if not self.engine.is_leader:
            self.engine_loop.run(None)
            return []
        num_engines = self.engine.num_replicas
        begun = self.begun if scheduler is self.training else {}
        if self.pulls:
            number = next(self.counter_numbers)
            seconds = self.seconds_between_looks
            tickets_here, is_enough = pull(tickets, goals, self.mesh.store, number, seconds)
        else:
            versions: list[list[int]] = [[] for _ in range(num_engines)]
            for state in begun.values():
                versions[state.rank // self.engine.tp_size].append(state.version)
            version = self.engine_loop.version
            tickets_here, is_enough = deal(tickets, goals, version, versions, self.engine.replica)
        # At most an even share at once: with room for all, the engine that asks first would take
        # everything. A group begins only where all its episodes have room.
        share = math.ceil((len(begun) + len(tickets)) / num_engines)
        room = min(self.engine.cfg.max_num_seqs, share * num_samples) - num_samples + 1

        def may_end(versions: list[int]) -> bool:
            stops = self.can_stop if can_stop is None else can_stop
            if stops and self.mesh.watch.requested:
                return True
            return is_enough(versions) and (is_called is None or is_called())

        groups = scheduler.run(map(make_group, tickets_here), room, may_end, settles=pauses)
        return self.engine_loop.run(groups, pauses=pauses)

    def _make_group(
        self, prompts: Prompts, num_samples: int, sampling: Sampling, version: int, ticket: int
    ) -> Group:
        row = prompts.row(ticket)
        row = {**row, "rendered_prompt": prompts.rendered(row)}
        tokenizer, vision, cut_to = prompts.tokenizer, prompts.vision, prompts.cut_to
        episodes = [
            Episode(
                ticket=ticket,
                number=number,
                row=copy.deepcopy(row),  # an environment may change it
                conversation=Conversation(tokenizer, vision, row, cut_to=cut_to),
                sampling=sampling,
            )
            for number in range(num_samples)
        ]
        return Group(ticket, version, episodes)
