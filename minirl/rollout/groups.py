"""Groups of episodes that run together on this rank's engine."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

from minirl.base.errors import require
from minirl.rewards import Answer
from minirl.rollout.episode import Episode, EpisodeRunner
from minirl.rollout.pacing import IsEnough
from minirl.types.packed import Trajectory


@dataclass
class Group:
    """The episodes of one ticket."""

    ticket: int
    version: int  # Optimizer steps that the weights had seen when it began.
    episodes: list[Episode]
    tasks: list[asyncio.Task] = field(default_factory=list)  # Of the episodes that run here.
    # Where reward functions compare the completions: of episodes that have ended, what other
    # functions gave, by number; and of all, once the last has ended, their trajectories.
    scored: dict[int, Future[Answer | None]] = field(default_factory=dict)
    compared: Future[dict[int, list[Trajectory]]] | None = None

    @property
    def finished(self) -> bool:
        """Whether all episodes have ended."""
        return all(e.outcome for e in self.episodes)

    def trajectories(self) -> list[Trajectory]:
        """Return the trajectories of the episodes that have ended; waits for the rewards.

        Raises:
            UserError: a reward function failed.
        """
        return sum([e.outcome() for e in self.episodes if e.outcome], [])

    def trajectories_of(self, number: int) -> list[Trajectory]:
        """Return the trajectories of an episode whose answer is compared with the others'."""
        assert self.compared, "the group goes on"
        return self.compared.result()[number]

    def num_sampled(self) -> int:
        """Return the number of tokens that have been sampled for it, but for dropped episodes."""
        return sum(e.num_sampled() for e in self.episodes)


@dataclass(kw_only=True)
class StepRollout:
    """What the rollout of a training step gives. All but the first field are of all ranks."""

    trajectories: list[Trajectory]  # This rank's part.
    num_trajectories: int  # Those with tokens to train on.
    num_tokens: int  # Sampled in them, those outside the loss included.
    next_ticket: int  # The first ticket of the next step.
    failures: list[str]  # Why episodes failed.
    # Of each episode with a request that the endpoint refused, the last one.
    refusals: list[str]
    # Tokens that were sampled since the last step and will not be trained on: groups that dynamic
    # sampling leaves out, episodes that are dropped, requests that an agent gave up.
    discarded_tokens: int
    # A signal has interrupted it: there are no trajectories, and all groups go on in the next one.
    is_interrupted: bool = False

    def troubles(self) -> list[str]:
        """Return what there is to say of episodes that failed or were refused what they asked."""
        lines = []
        if self.failures:
            lines.append(
                f"{len(self.failures)} episodes failed, the first because {self.failures[0]}"
            )
        if self.refusals:
            lines.append(
                f"the endpoint refused requests of {len(self.refusals)} episodes, the last: "
                f"{self.refusals[-1]}"
            )
        return lines

    def require_tokens(self) -> None:
        """Refuse a step of which no rank has a token to train on. Raises UserError."""
        reason = "the policy sampled no token in any"
        if self.num_tokens:
            reason = (
                f"all {self.num_tokens} sampled tokens were the grammar's, which are outside the "
                "loss; let the agent ask something without tool_choice and response_format, or "
                "teach policy.model the format first, by minirl.sft"
            )
        why = [*self.failures[:1], *self.refusals[-1:], reason][0]
        require(self.num_trajectories, f"no episode can be trained on: {why}")


class GroupScheduler:
    """Runs groups of episodes together.

    Groups that are unfinished when it has enough of them stay in `groups`, and the next run goes on
    with them.
    """

    def __init__(self, runner: EpisodeRunner):
        self.runner = runner
        self.groups: dict[int, Group] = {}  # By ticket.
        self._num_active = 0  # Episodes that have begun and not ended.
        self._finished_versions: list[int] = []  # Of the groups that have finished.
        self._error: BaseException | None = None  # Of the first episode that ends the run.
        self._episode_of: dict[asyncio.Task, tuple[Group, Episode]] = {}
        self._ended: asyncio.Queue[asyncio.Task] = asyncio.Queue()

    async def run(self, new_groups: Iterator[Group], room: int, is_enough: IsEnough) -> list[Group]:
        """Run the unfinished groups and new ones, until there are enough or no more.

        Args:
            new_groups: one is taken only when it can begin.
            room: a new group begins while fewer episodes than this go on, or none.
            is_enough: takes the versions of the finished groups. Those of other ranks count, too,
                so that its result may change between two calls.

        Returns:
            The groups that have finished, in the order of their tickets.

        Raises:
            UserError: an episode ended the run.
        """
        self._error = None
        if self.groups:  # Otherwise what is paused is another scheduler's.
            self.runner.engine_loop.resume()
        for group in self.groups.values():
            if not group.tasks:
                self._start(group)
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
        while self.runner.engine_loop.active_episodes:  # An environment's step is not interrupted.
            await self._collect_finished(0.001)
        if self._error:
            raise self._error
        finished = [group for _, group in sorted(self.groups.items()) if group.finished]
        for group in finished:
            del self.groups[group.ticket]
        return finished

    def _start(self, group: Group) -> None:
        """Start a task for each episode that has not ended."""
        self.groups[group.ticket] = group
        for episode in group.episodes:
            if episode.outcome:
                continue
            self._num_active += 1
            # The engine must not step before all episodes that begin together have made their first
            # request. When an agent, which asks through the endpoint, will do so is unknown.
            if not self.runner.makes_agents:
                self.runner.engine_loop.active_episodes += 1
            name = f"episode {episode.number} of prompt {episode.ticket}: {str(episode.row)[:200]}"
            task = asyncio.create_task(self.runner.run(episode), name=name)
            self._episode_of[task] = group, episode
            task.add_done_callback(self._ended.put_nowait)
            group.tasks.append(task)

    async def _collect_finished(self, seconds: float) -> None:
        """Wait for the next episode to end, for so long at most, and have it scored."""
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
        self.runner.count_if_dropped(episode)
        if self.runner.rewards.together and not self.runner.is_dropped(episode):
            episode.waits = True
            episode.outcome = partial(group.trajectories_of, episode.number)
            group.scored[episode.number] = self.runner.pool.submit(self.runner.score, episode)
        else:
            episode.outcome = self.runner.pool.submit(self.runner.finish, episode).result
        if group.finished:
            self._finished_versions.append(group.version)
            if group.scored:
                # The pool is first in, first out: what it waits for is done or under way.
                group.compared = self.runner.pool.submit(self._compare, group)
            for each in group.episodes:
                each.waits = False

    def _compare(self, group: Group) -> dict[int, list[Trajectory]]:
        """Return the trajectories of episodes whose answers reward functions compare, by number."""
        episodes = [e for e in group.episodes if e.number in group.scored]
        answers = [group.scored[e.number].result() for e in episodes]
        trajectories = self.runner.finish_together(episodes, answers)
        return {e.number: own for e, own in zip(episodes, trajectories, strict=True)}
