"""The sampler: groups of episodes by ticket, played with this rank's engine beside the other
ranks', until all or enough are done.

A ticket is a prompt with all its samples. With `rollout.ahead` more groups are begun than a step
needs; when it has enough, the others are interrupted, and the next step goes on with them under its
new weights (partial rollouts: APRIL, arXiv 2509.18521; Kimi k1.5, arXiv 2501.12599, sec. 2.6.2).
"""

import asyncio
import contextlib
import itertools
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
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
from minirl.types import Trajectory


@dataclass
class Group:
    """The episodes of a ticket."""

    ticket: int
    version: int  # of the weights when it began
    episodes: list[Episode]
    tasks: list[asyncio.Task] | None = None  # None: it has not begun here

    @property
    def played(self) -> bool:
        return all(e.outcome for e in self.episodes)

    def trajectories(self) -> list[Trajectory]:
        """Waits for the rewards. Raises UserError as they do."""
        return [t for e in self.episodes for t in e.outcome()]

    def pickled(self) -> bytes:
        """Without episodes if one of them is an agent's, or cannot be pickled."""
        if all(e.outcome or not isinstance(e.env, Agent) for e in self.episodes):
            with contextlib.suppress(pickle.PicklingError, AttributeError, TypeError):
                return pickle.dumps((self.ticket, self.version, [e.saved() for e in self.episodes]))
        return pickle.dumps((self.ticket, self.version, []))


class GroupScheduler:
    """Groups that are played together; those that are unfinished when it is interrupted go on when
    it is played again.
    """

    def __init__(self, sampler: "Sampler"):
        self.sampler = sampler
        self.groups: dict[int, Group] = {}
        self.live = 0  # episodes that are not played to the end
        self.ended: asyncio.Queue[tuple[Group, Episode, asyncio.Task]] = asyncio.Queue()

    async def play(
        self,
        begin: Callable[[int], Group],
        queue: Iterator[int],
        room: int,
        enough: Callable[[int], bool],
    ) -> list[Group]:
        """Begin the groups of the tickets in the queue as there is room for their episodes, until
        `enough(groups that are played)` or there is no more to do. Returns those played. Raises
        what the first episode that ends the run does.
        """
        driver, self.error = self.sampler.driver, None
        if self.groups:  # those of another round stay held
            driver.release()
        for group in [g for g in self.groups.values() if g.tasks is None]:
            self._add(group)
        self.num_played = sum(g.played for g in self.groups.values())  # to the end
        while not (self.error or enough(self.num_played)):
            while (not self.live or self.live < room) and (
                ticket := next(queue, None)
            ) is not None:  # one is taken only when its work can begin
                self._add(begin(ticket))
            if not self.live:
                break
            await self._collect_finished(0.02)  # other ranks may have done enough
        else:
            driver.halted = True
        while driver.active_episodes:  # an environment's step is not interrupted
            await self._collect_finished(0.001)
        if self.error:
            raise self.error
        return [
            self.groups.pop(ticket) for ticket in sorted(self.groups) if self.groups[ticket].played
        ]

    def _add(self, group: Group) -> None:
        self.groups[group.ticket], group.tasks = group, []
        for episode in (e for e in group.episodes if not e.outcome):
            self.live += 1
            # An agent asks through the endpoint, and nobody knows when; for others the engine is
            # not to step before all that begin together have asked.
            self.sampler.driver.active_episodes += not isinstance(episode.env, Agent)
            task = asyncio.get_running_loop().create_task(self.sampler.stage.run(episode))
            task.add_done_callback(
                lambda task, episode=episode: self.ended.put_nowait((group, episode, task))
            )
            group.tasks.append(task)

    async def _collect_finished(self, seconds: float) -> None:
        """Take note of the next episode that ends, if one does so soon."""
        try:
            async with asyncio.timeout(seconds):
                group, episode, task = await self.ended.get()
        except TimeoutError:
            return
        if not isinstance(episode.env, Agent):
            self.sampler.driver.mark_idle()
        if self.groups.get(group.ticket) is not group:
            return  # it was given up
        if task.exception():
            self.error = self.error or task.exception()
            return
        self.live -= 1
        episode.outcome = self.sampler.pool.submit(self.sampler.stage.finish, episode).result
        self.num_played += group.played

    def replace(self, old: Group, new: Group) -> None:
        """Give the old one up."""
        self.live -= sum(not e.outcome for e in old.episodes) if old.tasks is not None else 0
        for task in old.tasks or ():
            task.cancel()
        self.groups[new.ticket] = new


class Sampler:
    """Samples groups of episodes with this rank's engine."""

    def __init__(
        self,
        engine: RolloutEngine,
        make_env: Callable[[], Env],
        rewards: Rewards,
        prompts: Prompts,
        cfg: RLConfig | EvaluateConfig,
    ):
        """`prompts`: of training; others are read as they are."""
        self.engine, self.mesh, self.make_env, self.prompts, self.cfg = (
            engine,
            engine.mesh,
            make_env,
            prompts,
            cfg,
        )
        self.pulls = {"pull": True, "round_robin": False, "auto": engine.on_cuda}[
            cfg.rollout.tickets
        ]
        self.driver = EngineLoop(engine, repeatable=not self.pulls)
        self.endpoint = None
        if engine.is_leader and isinstance(make_env(), Agent):
            from minirl.rollout.server import Endpoint  # only agents need it, and it takes a while

            self.endpoint = Endpoint(
                self.driver.generate,
                prompts.tokenizer,
                cfg.endpoint,
                max_model_len=engine.cfg.max_model_len,
                vision=prompts.vision,
            )
            self.driver.loop.run_until_complete(self.endpoint.start())
        self.stage = EpisodeRunner(self.driver, rewards, cfg, cfg.seed, self.endpoint)
        self.pool = ThreadPoolExecutor(cfg.reward.threads, thread_name_prefix="reward")
        self.training = GroupScheduler(self)  # whose unfinished groups the next step goes on with
        self.numbers = itertools.count()  # of counters on the store

    def collect(
        self,
        prompts: Prompts,
        tickets: range,
        num_samples: int,
        sampling: Sampling,
        *,
        version: int = 0,
    ) -> list[Trajectory]:
        """Play the prompts of `tickets`, `num_samples` times each, together with the engines of the
        other ranks.

        Returns this rank's groups, in the order of their tickets; ranks that follow an engine's
        leader return none. Every rank must call it alike. Raises UserError from a reward function,
        or an environment by env.on_error raise.
        """
        return [
            t
            for group in self._play(
                GroupScheduler(self), prompts, tickets, num_samples, sampling, version, len(tickets)
            )
            for t in group.trajectories()
        ]

    def collect_step(
        self, first: int, sampling: Sampling, *, version: int
    ) -> tuple[list[Trajectory], int]:
        """A step's groups: rollout.prompts_per_step from ticket `first` on and from what earlier
        steps began. Those whose mean reward is not strictly inside rollout.keep_inside are replaced
        by the groups of at most rollout.extra_prompts further tickets; if that is not enough, the
        earliest of them are in after all. Returns this rank's part of them, and the next ticket.
        DAPO's dynamic sampling (arXiv 2503.14476, sec. 3.2).
        """
        r, mesh = self.cfg.rollout, self.mesh
        self.stage.failures.clear()
        for group in [
            g
            for g in self.training.groups.values()
            if g.version < version - r.max_staleness * self.cfg.algo.updates_per_step
        ]:
            self.training.replace(
                group,
                self._group(self.prompts, r.samples_per_prompt, sampling, version, group.ticket),
            )
        begun = sum(mesh.gather(len(self.training.groups)))
        last = first + max(0, r.prompts_per_step + r.ahead - begun) + r.extra_prompts
        groups: dict[int, Group] = {}
        varied: dict[int, bool] = {}  # of all ranks
        while (missing := r.prompts_per_step - sum(varied.values())) > 0:
            begun = sum(mesh.gather(len(self.training.groups)))
            tickets = range(first, min(first + max(0, missing + r.ahead - begun), last))
            if not begun and not tickets:
                break
            played = self._play(
                self.training,
                self.prompts,
                tickets,
                r.samples_per_prompt,
                sampling,
                version,
                min(missing, begun + len(tickets)),
            )
            first = tickets.stop
            groups |= {group.ticket: group for group in played}
            for part in mesh.gather(
                {group.ticket: self._is_varied(group.trajectories()) for group in played}
            ):
                varied |= part
        chosen = sorted(varied, key=lambda ticket: (not varied[ticket], ticket))[
            : r.prompts_per_step
        ]
        self.training.groups |= {
            ticket: group
            for ticket, group in groups.items()
            if ticket not in chosen and varied[ticket]
        }
        return [
            t
            for ticket in sorted(groups)
            if ticket in chosen
            for t in groups[ticket].trajectories()
        ], first

    def _is_varied(self, trajectories: list[Trajectory]) -> bool:
        rewards = [t.reward for t in trajectories if t.segment == 0]
        low, high = self.cfg.rollout.keep_inside
        return (
            not self.cfg.rollout.extra_prompts
            or bool(rewards)
            and low < sum(rewards) / len(rewards) < high
        )

    def _play(
        self,
        round: GroupScheduler,
        prompts: Prompts,
        tickets: range,
        num_samples: int,
        sampling: Sampling,
        version: int,
        enough: int,
    ) -> list[Group]:
        """Until `enough` groups are played on all ranks together; this rank's."""
        self.driver.version = version
        loads = self.mesh.gather(len(round.groups))[:: self.engine.tp_size]
        num, me = sum(loads) + len(tickets), self.engine.replica
        if self.pulls:
            number = next(self.numbers)
            queue, is_enough = self._pull(number, tickets), self._count(number, enough)
        else:
            dealt = spread(len(tickets), loads)
            quota = len(
                spread(enough, [-load - len(own) for load, own in zip(loads, dealt, strict=True)])[
                    me
                ]
            )
            queue, is_enough = iter([tickets[i] for i in dealt[me]]), lambda played: played >= quota
        # At most an even share at once: with room for all, the engine that asks first would take
        # everything.
        room = (
            min(self.engine.cfg.max_num_seqs, -(-num // len(loads)) * num_samples) - num_samples + 1
        )
        begin = partial(self._group, prompts, num_samples, sampling, version)
        return (
            self.driver.run(
                round.play(begin, queue, room, is_enough) if self.engine.is_leader else None
            )
            or []
        )

    def _pull(self, number: int, tickets: range) -> Iterator[int]:
        """Take the next ticket that no engine has taken: one counter on torchrun's store, so long
        answers balance themselves.
        """
        while (taken := self.mesh.store.add(f"minirl/tickets/{number}", 1) - 1) < len(tickets):
            yield tickets[taken]

    def _count(self, number: int, enough: int) -> Callable[[int], bool]:
        """Adds up what all engines have played."""
        told = 0

        def is_enough(played: int) -> bool:
            nonlocal told
            new, told = played - told, played
            return self.mesh.store.add(f"minirl/played/{number}", new) >= enough

        return is_enough

    def _group(
        self, prompts: Prompts, num_samples: int, sampling: Sampling, version: int, ticket: int
    ) -> Group:
        row = prompts.row(ticket)
        row = {**row, "rendered_prompt": chat.render(prompts.tokenizer, prompts.messages(row))}
        return Group(
            ticket,
            version,
            [
                Episode(
                    ticket=ticket,
                    number=i,
                    row=row,
                    env=self.make_env(),
                    conversation=Conversation(prompts.tokenizer, prompts.vision),
                    sampling=sampling,
                )
                for i in range(num_samples)
            ],
        )

    def state(self) -> list[bytes]:
        """What the next step would go on with, group by group, for a checkpoint. What cannot be
        pickled begins anew there.
        """
        return [group.pickled() for group in self.training.groups.values()]

    def load(self, states: list[list[bytes]], sampling: Sampling) -> None:
        """Take this rank's part of what all ranks had: its own, or a share if there were more or
        fewer of them.
        """
        own = (
            states[self.mesh.rank]
            if len(states) == self.mesh.world_size
            else sum(states, [])[self.engine.replica :: self.engine.num_replicas]
        )
        for ticket, version, episodes in map(pickle.loads, own if self.engine.is_leader else []):
            group = self.training.groups[ticket] = self._group(
                self.prompts, self.cfg.rollout.samples_per_prompt, sampling, version, ticket
            )
            for episode, saved in zip(group.episodes, episodes, strict=False):
                episode.restore(saved)

    def close(self) -> None:
        if self.endpoint:
            self.driver.loop.run_until_complete(self.endpoint.stop())
        self.driver.close()


def spread(num: int, loads: list[int]) -> list[list[int]]:
    """0 .. num - 1, one by one to whoever has the least (of several the first)."""
    out = [[] for _ in loads]
    for i in range(num):
        out[min(range(len(loads)), key=lambda rank: loads[rank] + len(out[rank]))].append(i)
    return out
