"""Steps of RL in time: engines that draw answers of many lengths, and trainers that wait for them.

Nothing is computed but when things happen. Answers have lengths with a long tail, share the speed
of their engine, and are whole groups on one engine; the rules of rollout/pacing.py say which groups
begin, what a step waits for and what it trains on. `colocated`, `lockstep`, `stream` and `inflight`
are the ways in which trainers and engines take turns (`parallel.generators`, `rollout.overlap`).

Time passes in rounds: within one, every answer grows at the speed that its engine has with the
answers that run on average.
"""

import bisect
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from minirl.base.errors import require
from minirl.rollout import index
from minirl.rollout.pacing import Goal, GroupState, Pace, spread

# Takes the running sequences of each engine, and the tokens in their contexts, both float64 [E].
# Returns the seconds in which each sequence gets a token, float64 [E].
StepSeconds = Callable[[np.ndarray, np.ndarray], np.ndarray]
# Takes the tickets of groups, int64 [N], and when they will finish, float64 [N]. Returns when
# there will be enough; inf: not with these.
EnoughAt = Callable[[np.ndarray, np.ndarray], float]

ROUND = 4  # In a round at most this part of the answers ends,
ROUND_WITH_QUEUE = 16  # or this, where others wait for their places.
NUM_PARTS = 8  # Of a step with `stream`, at most, as split.py has it.
WARM_UP = 1 / 3  # Share of the steps that are left out of means.


# --------------------------------------------------------------------------------------------------
# what is drawn


class LogNormal(NamedTuple):
    """Lengths with a long tail. Half of the variance of their logarithms is between prompts."""

    median: float  # Tokens.
    sigma: float  # Standard deviation of the logarithm.
    longest: float  # Tokens at which an answer is cut.

    @classmethod
    def of_mean(cls, mean: float, sigma: float, longest: float) -> "LogNormal":
        """Return the distribution that has this mean after the cut."""
        low, high = mean * math.exp(-(sigma**2)), longest * math.exp(8 * sigma)
        for _ in range(60):
            middle = math.sqrt(low * high)
            low, high = (low, middle) if cls(middle, sigma, longest).mean > mean else (middle, high)
        return cls(low, sigma, longest)

    @property
    def mean(self) -> float:
        """Return the mean after the cut."""
        sigma = max(self.sigma, 1e-6)
        cut = math.log(self.longest / self.median) / sigma  # In standard deviations.
        below = self.median * math.exp(sigma**2 / 2) * NormalDist().cdf(cut - sigma)
        return below + self.longest * (1 - NormalDist().cdf(cut))

    def draw(self, rng: np.random.Generator, num_groups: int, samples: int) -> np.ndarray:
        """Return tokens of answers, float64 [num_groups, samples]."""
        normal = rng.standard_normal((num_groups, 1 + samples))
        deviations = (normal[:, :1] + normal[:, 1:]) * math.sqrt(0.5)
        return np.minimum(self.median * np.exp(self.sigma * deviations), self.longest)


class Measured:
    """Lengths that a run has had: its groups as they were, in a random order.

    Args:
        groups: tokens of the answers of each group, float64 [samples], of which there may be more
            or fewer than a simulated group has.
    """

    def __init__(self, groups: list[np.ndarray]):
        self.counts = np.array([len(group) for group in groups])
        self.starts = np.cumsum(self.counts) - self.counts
        self.tokens = np.concatenate(groups)

    @classmethod
    def of_dump(cls, folder: Path) -> "Measured":
        """Return the lengths of dumped rollouts (`rollout.dump`).

        Raises:
            UserError: the folder has none.
        """
        tables = [index.read_table(part) for part in index.parts(folder)]
        sampled = [table[0] for table in tables if table]
        require(sampled, f"--lengths {folder} has no dumped rollouts (rollout.dump)")
        rows = np.concatenate(sampled)
        # An answer may be in several segments.
        answers, number = np.unique(rows[["group", "episode"]], return_inverse=True)
        tokens = np.bincount(number, rows["num_sampled"])
        _, starts = np.unique(answers["group"], return_index=True)
        return cls(np.split(tokens, starts[1:]))

    @property
    def mean(self) -> float:
        """Return the mean."""
        return float(self.tokens.mean())

    def draw(self, rng: np.random.Generator, num_groups: int, samples: int) -> np.ndarray:
        """Return tokens of answers, float64 [num_groups, samples]."""
        groups = rng.integers(len(self.counts), size=(num_groups, 1))
        places = np.arange(samples) % self.counts[groups]
        return np.maximum(self.tokens[self.starts[groups] + places], 1.0)


Lengths = LogNormal | Measured


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run to simulate: what a step draws, and how long its parts take."""

    prompts: int  # Of a step.
    samples: int  # Answers to each prompt.
    lengths: Lengths
    prompt_tokens: float = 0.0
    environment_seconds: float = 0.0  # Of an answer, in all its turns.

    num_engines: int
    slots: int  # Sequences that an engine generates at once.
    step_seconds: StepSeconds
    token_seconds: float = 0.0  # Of reading a token of a prompt, or of an answer under new weights.

    train_seconds: float  # Of a step's answers: log-probs, forward, backward.
    update_seconds: float = 0.0  # Of a step's optimizer.
    part_seconds: float = 0.0  # Of the smallest micro-batch.
    refit_seconds: float = 0.0
    sleep_seconds: float = 0.0  # Colocated: until the trainer's turn, and the engine's again.

    steps: int = 18
    seed: int = 0

    def engines(self) -> "Engines":
        """Return its engines."""
        return Engines(self)


# --------------------------------------------------------------------------------------------------
# engines


ANSWER = np.dtype(
    [
        ("ticket", "<i8"),
        ("engine", "<i8"),
        ("left", "<f8"),  # Tokens that it lacks.
        ("pause", "<f8"),  # Seconds that its environment still takes.
        ("context", "<f8"),  # Tokens that it has, prompt included.
    ]
)


class Engines:
    """Engines that take groups from a queue and draw their answers.

    Attributes:
        now: seconds since the run began; who moves it lets time pass in which nothing is drawn.
        idle: seconds of all engines together in which they had no answer to draw.
        lost: tokens that were drawn and thrown away, which these engines never do.
        lengths: float64 [N, samples], tokens of the answers of each ticket.
        finished_at: float64 [N], when the group of each ticket finished; inf: it has not.
    """

    def __init__(self, job: Job):
        self.job = job
        self.now = 0.0
        self.idle = 0.0
        self.lost = 0.0
        self.lengths = np.empty((0, job.samples))
        self.finished_at = np.empty(0)
        self.answers = np.empty(0, ANSWER)
        self._num_left = np.empty(0, np.int64)  # Answers of each ticket that are not at their end.
        self._waiting = np.empty(0, ANSWER)  # Groups that no engine has taken, one after another.
        self._lengths_rng = np.random.default_rng(job.seed).spawn(1)[0]
        self._stall = np.zeros(job.num_engines)  # Seconds until each engine draws again.
        self._step = job.step_seconds(np.ones(job.num_engines), self._stall)
        self._room = np.full(job.num_engines, max(1, job.slots // job.samples))  # Groups.

    def begin(self, num: int) -> range:
        """Put new groups on the queue; return their tickets."""
        tickets = range(len(self.lengths), len(self.lengths) + num)
        lengths = self.job.lengths.draw(self._lengths_rng, num, self.job.samples)
        self.lengths = np.concatenate((self.lengths, lengths))
        self.finished_at = np.concatenate((self.finished_at, np.full(num, math.inf)))
        self._num_left = np.concatenate((self._num_left, np.full(num, self.job.samples)))
        self._waiting = np.concatenate((self._waiting, self._answers_of(np.array(tickets))))
        return tickets

    def _answers_of(self, tickets: np.ndarray) -> np.ndarray:
        """Return the answers of groups, ANSWER [N], of which nothing is drawn."""
        answers = np.empty(len(tickets) * self.job.samples, ANSWER)
        answers["ticket"] = np.repeat(tickets, self.job.samples)
        answers["left"] = self.lengths[tickets].ravel()
        answers["pause"] = self.job.environment_seconds
        answers["context"] = self.job.prompt_tokens
        return answers

    def drawn_tokens(self) -> np.ndarray:
        """Return how many tokens of the answers of each ticket are drawn, float64 [N]."""
        every = np.concatenate((self.answers, self._waiting))
        left = np.bincount(every["ticket"], every["left"], len(self.lengths))
        return self.lengths.sum(1) - left

    def stall(self, seconds: float, *, recompute: bool) -> None:
        """Let each engine wait from now on, and then read its answers again if it must."""
        self._stall += seconds
        if recompute:
            # The samples of a group share its prompt.
            shared = (1 - 1 / self.job.samples) * self.job.prompt_tokens
            tokens = self._by_engine(self.answers["context"] - shared)
            self._stall += self.job.token_seconds * tokens

    def advance(self, until: float = math.inf, enough_at: EnoughAt | None = None) -> None:
        """Let a round pass.

        Args:
            until: the time at which it ends at the latest.
            enough_at: the round ends when enough groups have finished.
        """
        self._take_waiting()
        if not len(self.answers):
            assert until < math.inf, "there is nothing to draw"
            self._pass(until, np.full(self.job.num_engines, self.now))
        else:
            self._draw(until, enough_at)

    def _draw(self, until: float, enough_at: EnoughAt | None) -> None:
        """Let answers grow for a round."""
        answers = self.answers
        engine = answers["engine"]
        most = max(1, len(answers) // (ROUND_WITH_QUEUE if len(self._waiting) else ROUND))
        # The turns of environments are spread over an answer.
        drawing = answers["left"] * self._step[engine]
        runs = drawing / (drawing + answers["pause"])  # Share of the time in the engine.
        now, ends = self._ends_of_round(runs, answers["context"], until, most)
        # On average over the round, those that end in it run for a part of it, and have half of
        # what they draw in it.
        runs *= (np.minimum(ends, now) - self.now) / (now - self.now)
        contexts = answers["context"] + self._drawn(now, ends) * answers["left"] / 2
        now, ends = self._ends_of_round(runs, contexts, until, most)
        order = np.flatnonzero(ends <= now)
        order = order[np.argsort(ends[order])]
        # A group finishes with its last answer, which is the first from the end.
        ending = answers["ticket"][order]
        found, from_behind, counts = np.unique(ending[::-1], return_index=True, return_counts=True)
        last = np.sort(len(ending) - 1 - from_behind[counts == self._num_left[found]])
        tickets = ending[last]
        times = ends[order][last]
        if enough_at:
            now = min(now, enough_at(tickets, times))
            order = order[ends[order] <= now]
        self.finished_at[tickets[times <= now]] = times[times <= now]
        np.subtract.at(self._num_left, answers["ticket"][order], 1)

        drawn = self._drawn(now, ends)
        answers["context"] += drawn * answers["left"]
        answers["left"] *= 1 - drawn
        answers["pause"] *= 1 - drawn
        busy_until = np.full(self.job.num_engines, self.now)
        np.maximum.at(busy_until, engine, np.minimum(ends, now))
        self._pass(now, busy_until)
        self.answers = np.delete(answers, order)

    def _ends_of_round(
        self, runs: np.ndarray, contexts: np.ndarray, until: float, most: int
    ) -> tuple[float, np.ndarray]:
        """Return when a round ends, and when each answer would.

        Args:
            runs: float64 [N], the share of the round in which each answer is in its engine.
            contexts: float64 [N], the tokens that it has meanwhile.
            until: the time at which the round ends at the latest.
            most: how many answers end in it at most.
        """
        answers = self.answers
        engine = answers["engine"]
        on_engines = (self._by_engine(runs), self._by_engine(runs * contexts))
        self._step = self.job.step_seconds(*on_engines)
        seconds = answers["left"] * self._step[engine] + answers["pause"]
        ends = self.now + self._stall[engine] + seconds
        return min(until, float(np.partition(ends, most - 1)[most - 1])), ends

    def _drawn(self, now: float, ends: np.ndarray) -> np.ndarray:
        """Return the share of what each answer lacks that is drawn in a round, float64 [N].

        Args:
            now: the end of the round.
            ends: float64 [N], when each answer ends.
        """
        began = self.now + self._stall[self.answers["engine"]]
        return np.clip((now - began) / (ends - began), 0.0, 1.0)

    def _pass(self, until: float, busy_until: np.ndarray) -> None:
        """Let time pass, in which engines have answers to draw until then."""
        self.idle += float((until - busy_until).sum())
        self._stall = np.maximum(self._stall - (until - self.now), 0.0)
        self.now = until

    def _by_engine(self, values: np.ndarray | None) -> np.ndarray:
        """Return the sums of values of answers, or their number, of each engine."""
        return np.bincount(self.answers["engine"], values, self.job.num_engines)

    def _take_waiting(self) -> None:
        """Let engines with room take groups from the queue."""
        waiting = self._waiting
        if not len(waiting):
            return
        job = self.job
        groups = np.ceil(self._by_engine(None) / job.samples).astype(np.int64)
        room = np.maximum(self._room - groups, 0)
        if not room.any():
            return
        is_first = np.diff(waiting["ticket"], prepend=-1) != 0
        places = np.cumsum(is_first) - 1  # Of the groups in the queue.
        num = min(places[-1] + 1, room.sum())
        engines = np.empty(num, np.int64)
        for engine, numbers in enumerate(spread(num, (-room).tolist())):
            engines[numbers] = engine
        num_answers = int((places < num).sum())
        taken = waiting[:num_answers]
        taken["engine"] = engines[places[:num_answers]]
        self.answers = np.concatenate((self.answers, taken))
        self._waiting = waiting[num_answers:]
        # A prompt is read once for its group.
        read = taken["context"] - job.prompt_tokens * ~is_first[:num_answers]
        self._stall += job.token_seconds * np.bincount(taken["engine"], read, job.num_engines)


# --------------------------------------------------------------------------------------------------
# a run


class Outcome(NamedTuple):
    """What a simulated run gives: means of its steps, after the first third."""

    seconds: float  # Of a step.
    idle_trainers: float  # Share of the time in which they wait for answers.
    idle_engines: float  # Share of the time in which they have none to draw.
    staleness: float  # Steps from the drawing of a token to its training, on average.
    most_stale: int  # Steps from the beginning of a group to its training, at most.
    lost: float  # Share of the drawn tokens that was thrown away.


class SimulatedRun:
    """The groups of a run on its engines, and what is noted of its steps.

    Attributes:
        begun: int64 [N], tickets of the groups that are begun and not trained on.
        versions: int64 [M], the step in which the group of each ticket began.
    """

    def __init__(self, job: Job, *, ahead: int = 0, max_staleness: int = 1):
        self.job = job
        self.engines = job.engines()
        self.pace = Pace(
            prompts_per_step=job.prompts,
            ahead=ahead,
            max_staleness=max_staleness,
            updates_per_step=1,
        )
        self.begun = np.empty(0, np.int64)
        self.versions = np.empty(0, np.int64)
        self._token_ages = np.empty(0)  # Of each ticket: sum over its tokens, in steps.
        # Of each step that was trained: the age of its oldest group, and of its tokens on average.
        self._ages: list[tuple[int, float]] = []
        # At the end of each step: the time, and seconds of trainers and of engines without work.
        self._ends = [(0.0, 0.0, 0.0)]

    def refit(self) -> None:
        """Note that what is drawn from now on has newer weights."""
        drawn = self.engines.drawn_tokens()
        self._token_ages[self.begun] += drawn[self.begun]

    def issue(self, version: int) -> list[Goal]:
        """Let as many groups begin as a step may begin; return what the step waits for."""
        num = self.job.prompts
        goals = self.pace.goals(self._states(self.begun), version)
        tickets = self.engines.begin(self.pace.num_new(num, len(self.begun)))
        self.begun = np.concatenate((self.begun, np.array(tickets, np.int64)))
        self.versions = np.concatenate((self.versions, np.full(len(tickets), version)))
        self._token_ages = np.concatenate((self._token_ages, np.zeros(len(tickets))))
        return [*goals, Goal(version, num)]

    def wait(self, goals: list[Goal]) -> float:
        """Let time pass until the goals are reached; return how long that took."""
        began = self.engines.now
        while missing := self._missing(goals):
            self.engines.advance(enough_at=partial(self._enough_at, missing))
        return self.engines.now - began

    def advance_by(self, seconds: float) -> None:
        """Let engines draw for so long."""
        until = self.engines.now + seconds
        while self.engines.now < until:
            self.engines.advance(until)

    def take(self, version: int) -> np.ndarray:
        """Return the tickets of the groups that a step trains on, int64 [prompts], in order."""
        chosen = np.array(sorted(self.pace.choose(self._states(self._finished()))))
        self.begun = np.setdiff1d(self.begun, chosen)
        token_age = self._token_ages[chosen].sum() / self.engines.lengths[chosen].sum()
        self._ages.append((int((version - self.versions[chosen]).max()), float(token_age)))
        return chosen

    def end_step(self, waited: float) -> None:
        """Note the end of a step, in which the trainers waited so long."""
        _, waited_before, _ = self._ends[-1]
        self._ends.append((self.engines.now, waited_before + waited, self.engines.idle))

    def outcome(self) -> Outcome:
        """Return what the run gave."""
        engines = self.engines
        num_steps = len(self._ends) - 1
        first = int(num_steps * WARM_UP)
        seconds, waited, idle = (np.array(self._ends[-1]) - self._ends[first]).tolist()
        return Outcome(
            seconds / (num_steps - first),
            waited / seconds,
            idle / seconds / self.job.num_engines,
            float(np.mean([token_age for _, token_age in self._ages[first:]])),
            max(age for age, _ in self._ages),
            engines.lost / (engines.lost + float(engines.drawn_tokens().sum())),
        )

    def _finished(self) -> np.ndarray:
        return self.begun[self.engines.finished_at[self.begun] <= self.engines.now]

    def _states(self, tickets: np.ndarray) -> list[GroupState]:
        """Return what the rules of pacing know of groups, which are here all varied."""
        is_finished = self.engines.finished_at[tickets] <= self.engines.now
        columns = (tickets, self.versions[tickets], is_finished)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        return [GroupState(ticket, version, ended, ended, 0) for ticket, version, ended in rows]

    def _missing(self, goals: list[Goal]) -> list[Goal]:
        """Return what is missing until the goals are reached."""
        versions = self.versions[self._finished()]
        left = [Goal(version, num - int((versions <= version).sum())) for version, num in goals]
        return [goal for goal in left if goal.num_groups > 0]

    def _enough_at(self, missing: list[Goal], tickets: np.ndarray, times: np.ndarray) -> float:
        """Return when these groups, which finish at these times, reach what is missing."""
        latest = 0.0
        for version, num_groups in missing:
            due = times[self.versions[tickets] <= version]
            latest = max(latest, due[num_groups - 1] if len(due) >= num_groups else math.inf)
        return latest


# --------------------------------------------------------------------------------------------------
# how engines and trainers take turns


def colocated(job: Job, *, ahead: int = 0, max_staleness: int = 2) -> Outcome:
    """Simulate ranks that draw and train in turn, with `rollout.ahead`."""
    run = SimulatedRun(job, ahead=ahead, max_staleness=max_staleness)
    for step in range(job.steps):
        run.engines.now += job.refit_seconds
        run.engines.stall(0.0, recompute=True)
        run.refit()
        run.wait(run.issue(step))
        run.take(step)
        run.engines.now += job.train_seconds + job.update_seconds + job.sleep_seconds
        run.end_step(0.0)
    return run.outcome()


def lockstep(job: Job) -> Outcome:
    """Simulate generators that draw a step's groups while trainers train on the last step's."""
    run = SimulatedRun(job)
    train = job.train_seconds + job.update_seconds
    run.wait(run.issue(0))
    for step in range(job.steps):
        run.engines.now += job.refit_seconds  # The trainers have the batch already.
        run.refit()
        run.take(step)
        drawn = job.refit_seconds + run.wait(run.issue(step))
        late = max(0.0, train - drawn)
        run.engines.now += late
        run.engines.idle += job.num_engines * late
        run.end_step(max(0.0, drawn - train))
    return run.outcome()


def stream(job: Job) -> Outcome:
    """Simulate trainers that work on groups as they finish, with an update when all have."""
    run = SimulatedRun(job)
    engines = run.engines
    part = math.ceil(job.prompts / NUM_PARTS)  # At least.
    for step in range(job.steps):
        engines.now += job.refit_seconds
        run.refit()
        now = engines.now
        run.wait(run.issue(step))
        tickets = run.take(step)
        tickets = tickets[np.argsort(engines.finished_at[tickets])]
        finished_at = engines.finished_at[tickets].tolist()
        tokens = engines.lengths[tickets].sum(1)
        waited = 0.0
        num_taken = 0
        while num_taken < len(tickets):
            last = min(num_taken + part, len(tickets)) - 1
            waited += max(0.0, finished_at[last] - now)
            now = max(now, finished_at[last])
            num_finished = bisect.bisect_right(finished_at, now)
            share = tokens[num_taken:num_finished].sum() / tokens.sum()
            now += max(job.part_seconds, share * job.train_seconds)
            num_taken = num_finished
        late = now + job.update_seconds - engines.now
        engines.now += late
        engines.idle += job.num_engines * late
        run.end_step(waited)
    return run.outcome()


def inflight(
    job: Job, *, max_staleness: int, ahead: int | None = None, recompute: bool = True
) -> Outcome:
    """Simulate generators that never wait, with weights that change under running answers.

    Args:
        job: the run.
        max_staleness: as `rollout.max_staleness`.
        ahead: groups under way besides those of a step; None: as many as max_staleness allows.
        recompute: as `rollout.kv`.
    """
    most = job.prompts * max_staleness
    run = SimulatedRun(job, ahead=most if ahead is None else ahead, max_staleness=max_staleness)
    for step in range(job.steps):
        run.engines.stall(job.refit_seconds, recompute=recompute)
        run.refit()
        goals = run.issue(step)
        run.advance_by(job.refit_seconds)
        waited = run.wait(goals)
        run.take(step)
        run.advance_by(job.train_seconds + job.update_seconds)
        run.end_step(waited)
    return run.outcome()
