"""Engines that come and go, for overlap.py and pacing.py: those of minirl/plan never fail."""

import math
from dataclasses import dataclass

import numpy as np

from minirl.plan.simulation import Engines, EnoughAt, Job


@dataclass(frozen=True, kw_only=True)
class Outages:
    """Engines that come and go: they fail and are repaired, or are taken away and given back."""

    share: float = 1.0  # Of the engines, to which this happens.
    up_seconds: float  # Mean time from coming to going.
    down_seconds: float  # Mean time until an engine is back.
    keeps_tokens: bool = False  # Other engines continue its groups; else they begin again.


@dataclass(frozen=True, kw_only=True)
class ChangingJob(Job):
    """A run whose engines come and go, or whose groups may begin again."""

    outages: Outages | None = None

    def engines(self) -> "ChangingEngines":
        """Return its engines."""
        return ChangingEngines(self)


class ChangingEngines(Engines):
    """Engines that come and go."""

    job: ChangingJob

    def __init__(self, job: ChangingJob):
        super().__init__(job)
        self._outages_rng = np.random.default_rng(job.seed).spawn(2)[1]
        self._is_away = np.zeros(job.num_engines, np.bool_)
        self._changes_at = np.full(job.num_engines, math.inf)  # When it goes or comes.
        self._room_of_all = self._room.copy()
        if job.outages:
            num = round(job.outages.share * job.num_engines)
            up = self._outages_rng.exponential(job.outages.up_seconds, num)
            self._changes_at[:num] = up

    def begin_again(self, tickets: np.ndarray) -> None:
        """Throw away what groups have drawn, and let them draw it again before all others."""
        self.lost += float(self.drawn_tokens()[tickets].sum())
        self.answers = self.answers[~np.isin(self.answers["ticket"], tickets)]
        others = self._waiting[~np.isin(self._waiting["ticket"], tickets)]
        self._waiting = np.concatenate((self._answers_of(tickets), others))
        self._num_left[tickets] = self.job.samples
        self.finished_at[tickets] = math.inf

    def advance(self, until: float = math.inf, enough_at: EnoughAt | None = None) -> None:
        """Let a round pass, which ends when an engine comes or goes."""
        while self._changes_at.min() <= self.now:
            self._come_or_go(int(self._changes_at.argmin()))
        super().advance(min(until, self._changes_at.min()), enough_at)

    def _pass(self, until: float, busy_until: np.ndarray) -> None:
        super()._pass(until, np.where(self._is_away, until, busy_until))

    def _come_or_go(self, engine: int) -> None:
        """Let an engine come back, or go and leave its groups to the others."""
        outages = self.job.outages
        assert outages
        self._is_away[engine] ^= True
        self._room = np.where(self._is_away, 0, self._room_of_all)
        mean = outages.down_seconds if self._is_away[engine] else outages.up_seconds
        self._changes_at[engine] = self.now + self._outages_rng.exponential(mean)
        is_left = self.answers["engine"] == engine
        left = self.answers[is_left]
        if outages.keeps_tokens:
            by_group = left[np.argsort(left["ticket"])]
            self._waiting = np.concatenate((by_group, self._waiting))
            self.answers = self.answers[~is_left]
        elif len(left):
            self.begin_again(np.unique(left["ticket"]))
