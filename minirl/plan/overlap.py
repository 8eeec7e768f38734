"""Which ranks should generate: the steps of a run in every way, simulated.

Seconds of what engines and trainers do are those of plan.py; simulation.py lets time pass. `table`
is what `python -m minirl.plan --overlap` prints.
"""

import dataclasses
import math
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np

from minirl.base.errors import UserError
from minirl.config.parse import get, with_settings
from minirl.config.rl import RLConfig
from minirl.plan import simulation
from minirl.plan.cards import GIB, Card
from minirl.plan.plan import HOST_SECONDS_PER_LAYER, Engine, Plan, Workload, check, make_plan
from minirl.plan.simulation import Job, Lengths, Outcome

Way = Literal["colocated", "ahead", "lockstep", "stream", "inflight"]

STALENESS = (1, 2, 4)  # Values of rollout.max_staleness.
ALL_SIZES = 16  # GPUs up to which every number of generators is tried; else eighths of them.
LEAST_GAIN = 0.98  # Of the seconds of a step, for older tokens to be worth it.
MANY_GPUS = 64  # From here on, fewer steps are simulated: a step has more answers.


class Case(NamedTuple):
    """A way of running the steps."""

    way: Way
    generators: int = 0
    max_staleness: int = 0
    ahead: int = 0


class Simulated(NamedTuple):
    """A case, with its plan and what was simulated."""

    case: Case
    flags: str  # That turn the config into the case.
    plan: Plan
    job: Job
    outcome: Outcome


class Comparison(NamedTuple):
    """What was found."""

    results: list[Simulated]  # Of all cases that fit.
    reasons: dict[Way, str]  # Of each way that has no result: why the last one that was tried not.


def cases(num_gpus: int, ranks_of_engine: int, prompts: int) -> list[Case]:
    """Return what is tried.

    Args:
        num_gpus: of trainers and generators together.
        ranks_of_engine: over which an engine is.
        prompts: of a step.
    """
    found = [Case("colocated")]
    for most in STALENESS:
        for ahead in {math.ceil(prompts * most / 2), prompts * most}:
            found.append(Case("ahead", 0, most, ahead))
    sizes = set(range(1, num_gpus))
    if num_gpus > ALL_SIZES:
        sizes = {num_gpus * eighths // 8 for eighths in range(1, 8)}
    for generators in sorted(sizes):
        if generators % ranks_of_engine == 0:
            found += [Case("lockstep", generators), Case("stream", generators)]
            found += [Case("inflight", generators, most) for most in STALENESS]
    return found


def settings_of(case: Case, cfg: RLConfig) -> dict[str, Any]:
    """Return the settings of a run in the way of a case."""
    return {
        "parallel.generators": case.generators,
        "rollout.overlap": case.way if case.generators else "lockstep",
        "rollout.ahead": case.ahead,
        "rollout.max_staleness": case.max_staleness or cfg.rollout.max_staleness,
        "rollout.kv": cfg.rollout.kv if case.way == "inflight" else "recompute",
        "engine.sleep": "auto" if case.generators else cfg.engine.sleep,
    }


def flags_of(case: Case, cfg: RLConfig) -> str:
    """Return the flags of a case, and those that take back what the config says otherwise."""
    flags = [] if case.generators or case.ahead else ["(all ranks do both)"]
    always = {
        "parallel.generators": case.generators,
        "rollout.overlap": case.generators,
        "rollout.ahead": case.ahead,
        "rollout.max_staleness": case.max_staleness,
    }
    for name, value in settings_of(case, cfg).items():
        if always.get(name) or value != get(cfg, name):
            flags.append(f"--{name.replace('_', '-')} {value}")
    return " ".join(flags)


def job_of(
    plan: Plan, lengths: Lengths, turn_seconds: float = 0.0, engine: Engine | None = None
) -> Job:
    """Return the job that a plan is of.

    Args:
        plan: of all ranks, or of trainers with their generators.
        lengths: of answers; their mean is that of the plan's workload.
        turn_seconds: of an environment, each turn.
        engine: that of the generators, if it is not the plan's.
    """
    workload = plan.workload
    cfg = workload.cfg
    assert isinstance(cfg, RLConfig)
    generating = plan.sides[-1]
    engine = engine or generating.engine
    assert engine
    load = workload.load
    # Of the sequences that run at some time, long ones are more: each counts by its length.
    drawn = lengths.draw(np.random.default_rng(0), 2000, load.samples)
    length = load.prompt + float((drawn**2).mean() / drawn.mean()) / 2
    seconds = plan.seconds
    training = ["annotate", "forward", "backward"]
    passes = 3 if plan.checkpointing != "off" else 2
    num_layers = workload.models["policy"].num_layers
    if plan.generators:
        training.append("sleep_wake")
    return Job(
        prompts=cfg.rollout.prompts_per_step,
        samples=load.samples,
        lengths=lengths,
        prompt_tokens=load.prompt,
        environment_seconds=turn_seconds * cfg.env.max_turns,
        num_engines=generating.workload.world_size // engine.ranks,
        slots=int(engine.slots(length)),
        step_seconds=partial(engine.step_seconds, larger=np.maximum),
        token_seconds=engine.token_seconds,
        train_seconds=sum(seconds.get(phase, 0.0) for phase in training),
        update_seconds=seconds["optimizer"],
        part_seconds=passes * num_layers * HOST_SECONDS_PER_LAYER,
        refit_seconds=seconds["refit"],
        sleep_seconds=0.0 if plan.generators else seconds["sleep_wake"],
        steps=18 if plan.num_gpus <= MANY_GPUS else 12,
    )


def simulate(case: Case, job: Job, *, recompute: bool = True) -> Outcome:
    """Return what a job gives in the way of a case; `recompute` is `rollout.kv`."""
    bound = case.max_staleness
    if case.way == "lockstep":
        return simulation.lockstep(job)
    if case.way == "stream":
        return simulation.stream(job)
    if case.way == "inflight":
        return simulation.inflight(job, max_staleness=bound, recompute=recompute)
    return simulation.colocated(job, ahead=case.ahead, max_staleness=bound)


def compare(
    workload: Workload,
    num_gpus: int,
    card: Card,
    gpus_per_node: int,
    lengths: Lengths,
    turn_seconds: float = 0.0,
    steps: int = 0,
) -> Comparison:
    """Simulate a run in every way.

    Args:
        workload: what the run does, with the mean of `lengths` as its answer.
        num_gpus: of trainers and generators together.
        card: the GPUs.
        gpus_per_node: how many of them are linked.
        lengths: of answers.
        turn_seconds: of an environment, each turn.
        steps: to simulate; 0: as many as are usual.
    """
    cfg = workload.cfg
    assert isinstance(cfg, RLConfig)
    results: list[Simulated] = []
    reasons: dict[Way, str] = {}
    for case in cases(num_gpus, cfg.engine.tensor_parallel_size, cfg.rollout.prompts_per_step):
        changed = with_settings(cfg, settings_of(case, cfg))
        tried = workload.changed(changed, num_gpus - case.generators)
        try:
            check(tried)
        except UserError as error:
            reasons[case.way] = str(error)
            continue
        plan = make_plan(tried, card, gpus_per_node)
        if plan.lacks:
            reasons[case.way] = plan.lacks
            continue
        job = job_of(plan, lengths, turn_seconds)
        job = dataclasses.replace(job, steps=steps or job.steps)
        outcome = simulate(case, job, recompute=cfg.rollout.kv == "recompute")
        results.append(Simulated(case, flags_of(case, cfg), plan, job, outcome))
    done = {result.case.way for result in results}
    missing = {way: reason for way, reason in reasons.items() if way not in done}
    return Comparison(results, missing)


def table(comparison: Comparison) -> str:
    """Return what `compare` has found, for people."""
    results, reasons = comparison
    whys = [f"  no {way}: {reason}" for way, reason in reasons.items()]
    if not results:
        return "\n".join(["", "", "steps of every way, simulated: none", *whys])
    columns: list[tuple[Way, int]] = [("lockstep", 0), ("stream", 0)]
    columns += [("inflight", most) for most in STALENESS]
    names = [f"{way} {most}" if most else way for way, most in columns]
    title = "steps of every way, simulated: seconds (inflight: with rollout.max_staleness)"
    lines = ["", "", title, f"  generators{''.join(f'{name:>12}' for name in names)}"]
    seconds = {result.case[:3]: f"{result.outcome.seconds:.1f}" for result in results}
    for generators in sorted({result.case.generators for result in results} - {0}):
        row = [seconds.get((way, generators, most), "-") for way, most in columns]
        lines.append(f"{generators:12}{''.join(f'{cell:>12}' for cell in row)}")
    lines += whys

    lines += ["", "the fastest of each"]
    lines.append("                  idle     steps old    GiB of a GPU")
    lines.append("  seconds  train  draw   mean  most  train  draw")
    kinds: dict[tuple[Way, int], list[Simulated]] = {}  # By way and bound of staleness.
    for result in results:
        kinds.setdefault((result.case.way, result.case.max_staleness), []).append(result)
    lines += [_line(min(of_kind, key=_seconds)) for of_kind in kinds.values()]
    limit = min(map(_seconds, results)) / LEAST_GAIN
    fast = [result for result in results if _seconds(result) <= limit]
    fastest = min(fast, key=lambda result: (result.outcome.staleness, _seconds(result)))
    words = f"fastest: {fastest.flags}"
    is_split = fastest.case.generators > 0
    others = [result for result in results if (result.case.generators > 0) != is_split]
    if others:
        other = min(others, key=_seconds)
        kind = "ranks that do both" if is_split else "generators on ranks of their own"
        words += f"; the fastest of {kind}, {other.flags}, takes "
        words += f"{_seconds(other) / _seconds(fastest):.2f} times as long"
    if _seconds(fastest) > min(map(_seconds, results)):
        within = f"{1 - LEAST_GAIN:.0%} of the least, and its tokens are younger"
        words += f"; its {_seconds(fastest):.1f} s are within {within}"
    return "\n".join([*lines, words, "", _assumptions(fastest.job)])


def _seconds(result: Simulated) -> float:
    return result.outcome.seconds


def _line(result: Simulated) -> str:
    outcome = result.outcome
    is_split = result.case.generators > 0
    idle = (f"{outcome.idle_trainers:.0%}" if is_split else "", f"{outcome.idle_engines:.0%}")
    memory = [f"{max(side.memory.values()) / GIB:.1f}" for side in result.plan.sides]
    memory += [""] * (not is_split)
    return (
        f"{outcome.seconds:9.1f}{idle[0]:>7}{idle[1]:>6}{outcome.staleness:7.1f}"
        f"{outcome.most_stale:6}{memory[0]:>7}{memory[1]:>6}  {result.flags}"
    )


def _assumptions(job: Job) -> str:
    """Return what the simulation rests on, with the speeds of the fastest way."""
    drawn = job.lengths.draw(np.random.default_rng(0), 2000, job.samples)
    quantiles = [f"{int(n):,}" for n in np.quantile(drawn, (0.5, 0.9, 0.99, 1.0))]
    running = np.array([1.0, float(job.slots)])
    contexts = running * (job.prompt_tokens + drawn.mean() / 2)
    alone, many = job.step_seconds(running, contexts).tolist()
    environment = f"{job.environment_seconds:g} s of an environment an answer, "
    environment *= job.environment_seconds > 0
    return (
        f"assumed: answers of {', '.join(quantiles)} tokens (50, 90, 99, 100 %), mean "
        f"{drawn.mean():,.0f}; {environment}a sequence alone in its engine "
        f"gets {1 / alone:.0f} tokens/s, each of {job.slots} {1 / many:.0f}; with the fastest way "
        f"training takes {job.train_seconds + job.update_seconds:.1f} s and a refit "
        f"{job.refit_seconds:.2f} s. No evaluation, no checkpoint, no failures, engines alike."
    )
