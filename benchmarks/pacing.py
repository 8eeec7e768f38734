"""Partial rollouts, simulated: what pacing costs, and what beginning stale groups again would.

    python -m benchmarks.pacing

The engines of minirl/plan/simulation.py draw answers of log-normal lengths, and the rules of
minirl/rollout/pacing.py say what begins, what a step waits for and what it trains on. Beside them
`restart`, the rule that they stand for: a group older than max_staleness begins again; and
`no limit`: groups go on for as long as they take.

Prints for each load the simulated seconds of a rollout (mean of a step, after the first third), the
share of all sampled tokens that is thrown away, the tickets that no step has trained on within
max_staleness steps after the one in which they first began, and the longest answers of the groups
that were trained on, as a share of those that were begun: below 1 the training misses long answers.
"""

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
import tyro

from benchmarks.outages import ChangingEngines, ChangingJob
from minirl.plan.simulation import WARM_UP, LogNormal, SimulatedRun

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


class Outcome(NamedTuple):
    """What a simulated run gives."""

    seconds: float  # Of a step's rollout.
    thrown_away: float  # Share of the sampled tokens.
    num_late: int  # Tickets that were not trained on in time.
    long_share: float  # Longest answers that were trained on, over those that were begun.
    most_begun: int  # Groups that were begun and not trained on at once.


def step_seconds(running: np.ndarray, contexts: np.ndarray) -> np.ndarray:
    """Return the seconds of an engine's step.

    An answer alone gets 90 tokens a second, and half of that among 192 others on its engine.
    """
    return (1 + np.maximum(1, running) / 192) / 90


def simulate(load: Load, rule: Rule) -> Outcome:
    """Simulate a run under one of the rules, without the time of training."""
    job = ChangingJob(
        prompts=load.prompts,
        samples=load.samples,
        lengths=LogNormal(load.median, load.sigma, load.longest),
        num_engines=load.num_engines,
        slots=load.samples * (load.prompts + load.ahead),
        step_seconds=step_seconds,
        train_seconds=0.0,
    )
    run = SimulatedRun(job, ahead=load.ahead, max_staleness=load.max_staleness)
    engines = run.engines
    assert isinstance(engines, ChangingEngines)
    warm = int(load.steps * WARM_UP)
    first_steps = np.empty(0, np.int64)  # Of each ticket.
    trained_in = np.empty(0, np.int64)  # And the step that trains on it.
    most_begun = 0
    for step in range(load.steps):
        if step == warm:
            began = engines.now
        if rule == "restart":
            stale = run.begun[run.versions[run.begun] < step - load.max_staleness]
            engines.begin_again(stale)
            run.versions[stale] = step
        goals = run.issue(step)
        num_new = len(run.versions) - len(first_steps)
        first_steps = np.append(first_steps, np.full(num_new, step))
        trained_in = np.append(trained_in, np.full(num_new, load.steps - 1))
        most_begun = max(most_begun, len(run.begun))
        run.wait(goals if rule == "pace" else goals[-1:])
        trained_in[run.take(step)] = step

    is_trained = np.isin(np.arange(len(trained_in)), run.begun, invert=True)
    trained_tokens = engines.lengths[is_trained].sum()
    longest = engines.lengths.max(1)
    return Outcome(
        (engines.now - began) / (load.steps - warm),
        float(engines.lost / (engines.lost + trained_tokens)),
        int((trained_in - first_steps > load.max_staleness).sum()),
        float(longest[is_trained & (trained_in >= warm)].mean() / longest.mean()),
        most_begun,
    )


def main(steps: int = 60) -> None:
    """Print a line for each load and rule.

    Args:
        steps: of a simulated run.
    """
    print("  prompts ahead stale sigma longest rule       s/step  thrown   late  long  most begun")
    for load in LOADS:
        for rule in RULES:
            outcome = simulate(replace(load, steps=steps), rule)
            print(
                f"  {load.prompts:7} {load.ahead:5} {load.max_staleness:5} {load.sigma:5} "
                f"{load.longest:7.0f} {rule:8} {outcome.seconds:8.0f} {outcome.thrown_away:7.1%} "
                f"{outcome.num_late:6} {outcome.long_share:5.2f} {outcome.most_begun:11}"
            )


if __name__ == "__main__":
    tyro.cli(main)
