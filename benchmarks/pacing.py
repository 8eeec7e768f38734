"""Partial rollouts, simulated: what pacing costs, and what beginning stale groups anew would.

    python benchmarks/pacing.py

One process, no engine: answers have log-normal lengths and share the engines' speed, and the rules
of minirl/rollout/pacing.py say what begins, what a step waits for and what it trains on. Beside
them `restart`, the rule that they stand for: a group older than max_staleness begins anew; and
`no limit`: groups go on for as long as they take.

Prints for each load the simulated seconds of a rollout (mean of a step, after the first third), the
share of all sampled tokens that is thrown away, the tickets that no step has trained on within
max_staleness steps after the one in which they first began, and the longest answers of the groups
that were trained on, as a share of those that were begun: below 1 the training misses long answers.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
import tyro

from minirl.rollout.pacing import GroupState, Pace

Rule = Literal["restart", "pace", "no limit"]
RULES: tuple[Rule, ...] = ("restart", "pace", "no limit")


@dataclass(frozen=True, kw_only=True)
class Load:
    """A run to simulate."""

    num_engines: int = 8
    prompts: int = 64  # Of a step.
    samples: int = 8
    ahead: int = 32
    max_staleness: int = 2
    median: float = 3000.0  # Tokens of an answer.
    sigma: float = 0.8  # Deviation of the logarithm of lengths.
    longest: float = 32000.0  # Tokens at which an answer is cut.
    steps: int = 60


LOADS = (
    Load(),
    Load(sigma=1.0),
    Load(sigma=1.0, ahead=64),
    Load(sigma=1.0, ahead=64, max_staleness=4),
    Load(sigma=1.2, ahead=64, longest=65000.0),
    Load(sigma=1.2, ahead=64, longest=65000.0, max_staleness=4),
)


@dataclass
class SimulatedGroup:
    """The answers to a prompt."""

    ticket: int
    first_step: int  # In which it first began.
    version: int  # The step in which it began, the last time.
    lengths: np.ndarray  # float64 [samples], tokens at the end.
    done: np.ndarray  # float64 [samples], tokens so far.

    def state(self, *, is_finished: bool) -> GroupState:
        """Return what the rules of pacing know of it."""
        return GroupState(self.ticket, self.version, is_finished, is_finished, 0)


class Outcome(NamedTuple):
    """What a simulated run gives."""

    seconds: float  # Of a step's rollout.
    thrown_away: float  # Share of the sampled tokens.
    num_late: int  # Tickets that were not trained on in time.
    long_share: float  # Longest answers that were trained on, over those that were begun.
    most_begun: int  # Groups that were begun and not trained on at once.


class Simulation:
    """A run under one of the rules."""

    def __init__(self, load: Load, rule: Rule):
        self.load = load
        self.rule = rule
        self.pace = Pace(
            prompts_per_step=load.prompts,
            ahead=load.ahead,
            max_staleness=load.max_staleness,
            updates_per_step=1,
        )
        self.rng = np.random.default_rng(0)
        self.groups: list[SimulatedGroup] = []
        self.next_ticket = 0
        self.tokens_trained = 0.0
        self.tokens_lost = 0.0
        self.trained: list[tuple[int, SimulatedGroup]] = []  # With their steps.
        self.longest_begun: list[float] = []
        self.most_begun = 0

    def run(self) -> Outcome:
        """Run all steps."""
        seconds = [self.step(number) for number in range(self.load.steps)]
        warm = self.load.steps // 3
        late = [step - group.first_step > self.load.max_staleness for step, group in self.trained]
        last = self.load.steps - 1
        late += [last - group.first_step > self.load.max_staleness for group in self.groups]
        longest = [group.lengths.max() for step, group in self.trained if step >= warm]
        return Outcome(
            float(np.mean(seconds[warm:])),
            self.tokens_lost / (self.tokens_lost + self.tokens_trained),
            sum(late),
            float(np.mean(longest) / np.mean(self.longest_begun)),
            self.most_begun,
        )

    def step(self, number: int) -> float:
        """Simulate a step; return the seconds of its rollout."""
        if self.rule == "restart":
            self.begin_stale_groups_anew(number)
        begun = [group.state(is_finished=False) for group in self.groups]
        goals = self.pace.goals(begun, number) if self.rule == "pace" else []
        for _ in range(self.pace.num_new(self.load.prompts, len(begun))):
            self.groups.append(self.new_group(number))
        self.most_begun = max(self.most_begun, len(self.groups))

        # All answers grow at the same rate: the goals are reached after so many tokens.
        missing = np.array([(group.lengths - group.done).max() for group in self.groups])
        versions = np.array([group.version for group in self.groups])
        num_tokens = np.sort(missing)[self.load.prompts - 1]
        for goal in goals:
            due = np.sort(missing[versions <= goal.version])
            num_tokens = max(num_tokens, due[goal.num_groups - 1])
        seconds = self.sample(num_tokens)

        finished = [
            group.state(is_finished=True)
            for group, tokens in zip(self.groups, missing, strict=True)
            if tokens <= num_tokens
        ]
        chosen = self.pace.choose(finished)
        for group in self.groups:
            if group.ticket in chosen:
                self.trained.append((number, group))
                self.tokens_trained += group.lengths.sum()
        self.groups = [group for group in self.groups if group.ticket not in chosen]
        return seconds

    def begin_stale_groups_anew(self, number: int) -> None:
        """Throw away what groups have sampled that are older than max_staleness."""
        for group in self.groups:
            if group.version < number - self.load.max_staleness:
                self.tokens_lost += group.done.sum()
                group.done = np.zeros_like(group.done)
                group.version = number

    def new_group(self, step: int) -> SimulatedGroup:
        """Return a new group. Answers to one prompt resemble each other in length."""
        half = self.load.sigma * math.sqrt(0.5)
        mean = math.log(self.load.median) + half * self.rng.standard_normal()
        lengths = np.exp(mean + half * self.rng.standard_normal(self.load.samples))
        lengths = np.minimum(lengths, self.load.longest)
        self.longest_begun.append(lengths.max())
        self.next_ticket += 1
        return SimulatedGroup(self.next_ticket, step, step, lengths, np.zeros_like(lengths))

    def sample(self, num_tokens: float) -> float:
        """Let every answer grow by as many tokens as it lacks, at most `num_tokens`.

        Returns:
            Seconds: an answer alone gets 90 tokens a second, and half of that among 192 others on
            its engine.
        """
        lacking = np.concatenate([group.lengths - group.done for group in self.groups])
        ends = np.sort(np.minimum(lacking[lacking > 0], num_tokens))
        num_running = np.arange(len(ends), 0, -1) / self.load.num_engines
        seconds_per_token = (1 + np.maximum(1, num_running) / 192) / 90
        for group in self.groups:
            group.done = np.minimum(group.lengths, group.done + num_tokens)
        return float((np.diff(ends, prepend=0.0) * seconds_per_token).sum())


def main(steps: int = 60) -> None:
    """Print a line for each load and rule.

    Args:
        steps: of a simulated run.
    """
    print("  prompts ahead stale sigma longest rule       s/step  thrown   late  long  most begun")
    for load in LOADS:
        for rule in RULES:
            outcome = Simulation(replace(load, steps=steps), rule).run()
            print(
                f"  {load.prompts:7} {load.ahead:5} {load.max_staleness:5} {load.sigma:5} "
                f"{load.longest:7.0f} {rule:8} {outcome.seconds:8.0f} {outcome.thrown_away:7.1%} "
                f"{outcome.num_late:6} {outcome.long_share:5.2f} {outcome.most_begun:11}"
            )


if __name__ == "__main__":
    tyro.cli(main)
