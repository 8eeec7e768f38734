"""Which ranks should generate? Steps simulated, for 8 to 4,096 GPUs.

    python -m benchmarks.overlap                       # three minutes
    python -m benchmarks.overlap --sizes 8 --steps 18

Prints the seconds of a step for ranks that do both in turn and for every overlap, each with the
fastest number of generators, and what becomes of them where engines are slow, fail, come and go,
are of another card, or wait for environments. Speeds are the planner's formulas for H200
(minirl/plan), and no run of such a size has confirmed them. `predict` does the same for measured
speeds.
"""

import functools
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import tyro

from benchmarks import fits
from benchmarks.outages import ChangingJob, Outages
from minirl.config.rl import RLConfig
from minirl.plan import overlap
from minirl.plan.cards import CARDS
from minirl.plan.overlap import STALENESS, Case, Comparison, Simulated
from minirl.plan.plan import Engine, Workload, read_models
from minirl.plan.simulation import Job, LogNormal, Outcome

LENGTHS = LogNormal.of_mean(5000.0, 1.0, 32768.0)
PROMPT_TOKENS = 512


class Size(NamedTuple):
    """A job for a number of GPUs."""

    model: str
    ranks_of_engine: int
    prompts: int
    samples: int


SIZES = {
    8: Size("Qwen3-4B", 1, 64, 8),
    64: Size("Qwen3-32B", 2, 256, 16),
    1024: Size("Qwen3-235B-A22B", 8, 1024, 16),
    4096: Size("Qwen3-235B-A22B", 8, 4096, 16),
}
COLUMNS = [
    *(("colocated", 0), ("lockstep", 0), ("stream", 0)),
    *((way, bound) for bound in STALENESS for way in ("ahead", "inflight")),
]


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """A change of a job. Environments are those of the simulation."""

    name: str
    slow_share: float = 0.0  # Of the engines, each of which takes twice as long.
    outages: Outages | None = None
    turn_seconds: float = 0.0  # Of an environment, in each of 8 turns.
    card: str = ""  # Of the generators.


MOST_TRIED = 3  # Numbers of generators that are tried again, the fastest of the first table.
STEPS_OF_CHANCE = 24  # More than for the first table.
TWICE_AN_HOUR = Outages(up_seconds=1800.0, down_seconds=300.0)
HALF_BORROWED = Outages(share=0.5, up_seconds=600.0, down_seconds=600.0)
WHAT_IFS = (
    WhatIf(name="as above"),
    WhatIf(name="an eighth of the engines at half speed", slow_share=1 / 8),
    WhatIf(name="engines fail twice an hour for 5 minutes", outages=TWICE_AN_HOUR),
    WhatIf(name="half come and go every 10 minutes", outages=HALF_BORROWED),
    WhatIf(
        name="... and others continue their tokens",
        outages=replace(HALF_BORROWED, keeps_tokens=True),
    ),
    WhatIf(name="generators are H20", card="h20"),
    WhatIf(name="environments: 8 turns of 30 s", turn_seconds=30.0),
)


@functools.cache
def comparison(num_gpus: int, steps: int = 0) -> Comparison:
    """Return what the planner finds for a size; `steps` are simulated, 0: as many as it takes."""
    size = SIZES[num_gpus]
    job = fits.job(size.model)
    longest = int(LENGTHS.longest)
    settings: dict[str, Any] = {
        "engine": replace(
            job.engine,
            tensor_parallel_size=size.ranks_of_engine,
            max_model_len=PROMPT_TOKENS + longest,
        ),
        "rollout": replace(
            job.rollout,
            prompts_per_step=size.prompts,
            samples_per_prompt=size.samples,
            max_tokens=longest,
        ),
        "env": replace(job.env, max_tokens=longest),
    }
    cfg: RLConfig = replace(job, **settings)
    models = read_models(cfg, {"policy": fits.MODELS[size.model].to_dict()})
    workload = Workload(cfg, num_gpus, models, PROMPT_TOKENS, int(LENGTHS.mean))
    return overlap.compare(workload, num_gpus, CARDS["h200"], 8, LENGTHS, steps=steps)


def ranked(results: list[Simulated], way: str, bound: int) -> list[Simulated]:
    """Return the results of a way, the fastest first; of any bound of staleness, if it is 0."""
    found = [r for r in results if r.case.way == way and bound in (0, r.case.max_staleness)]
    return sorted(found, key=lambda result: result.outcome.seconds)


def best(results: list[Simulated], way: str, bound: int) -> Simulated | None:
    """Return the first of `ranked`, if there is one."""
    return next(iter(ranked(results, way, bound)), None)


def cell(result: Simulated | None) -> str:
    """Return seconds, and the number of generators."""
    if result is None:
        return "-"
    generators = f" ({result.case.generators})" if result.case.generators else ""
    return f"{result.outcome.seconds:.0f}{generators}"


def table(sizes: tuple[int, ...], steps: int = 0) -> str:
    """Return the table of all sizes."""
    names = [f"{way} {bound}" if bound else way for way, bound in COLUMNS]
    rows = [fits.row("GPUs, model, answers", *names), "|---" * (1 + len(names)) + "|"]
    for num_gpus in sizes:
        size = SIZES[num_gpus]
        results = comparison(num_gpus, steps).results
        cells = [cell(best(results, way, bound)) for way, bound in COLUMNS]
        answers = f"{num_gpus:,}, {size.model}, {size.prompts * size.samples:,}"
        rows.append(fits.row(answers, *cells))
    return "\n".join(rows)


def changed(result: Simulated, what_if: WhatIf, steps: int) -> Simulated:
    """Return a result for another world."""
    engine = None
    if what_if.card:
        generating = result.plan.generators or result.plan
        assert generating.workload.engine
        card = CARDS[what_if.card]
        engine = Engine(generating.workload, generating.workload.engine, card)
    job = overlap.job_of(result.plan, LENGTHS, engine=engine)
    slowness = np.ones(job.num_engines)
    slowness[: round(what_if.slow_share * job.num_engines)] = 2.0

    def slow(running: np.ndarray, contexts: np.ndarray) -> np.ndarray:
        return step_seconds(running, contexts) * slowness

    step_seconds = job.step_seconds
    known = vars(job) | {
        "step_seconds": slow,
        "environment_seconds": 8 * what_if.turn_seconds,
        "steps": steps,
    }
    job = ChangingJob(**known, outages=what_if.outages)
    return result._replace(job=job, outcome=overlap.simulate(result.case, job))


def table_of_what_ifs(num_gpus: int, steps: int = STEPS_OF_CHANCE) -> str:
    """Return the table of other worlds, of the ways that have generators, and of `ahead`."""
    columns = [("ahead", 2), ("lockstep", 0), ("inflight", 2)]
    names = [f"{way} {bound}" if bound else way for way, bound in columns]
    rows = [fits.row(f"{num_gpus} GPUs", *names, "tokens lost"), "|---" * 5 + "|"]
    for what_if in WHAT_IFS:
        cells = []
        lost = 0.0
        for way, bound in columns:
            # A rank that does both cannot go alone, or be of another card.
            if way == "ahead" and (what_if.outages or what_if.card):
                cells.append("")
                continue
            found = ranked(comparison(num_gpus).results, way, bound)[:MOST_TRIED]
            changes = [changed(result, what_if, steps) for result in found]
            fastest = best(changes, way, bound)
            cells.append(cell(fastest))
            lost = fastest.outcome.lost if fastest else 0.0
        rows.append(fits.row(what_if.name, *cells, f"{lost:.0%}" if lost else ""))
    return "\n".join(rows)


def predict(
    case: Case,
    *,
    engines: int,
    prompts: int,
    samples: int,
    tokens: float,
    step_seconds: float,
    train_seconds: float,
    environment_seconds: float = 0.0,
    refit_seconds: float = 0.0,
    sleep_seconds: float = 0.0,
    slots: int = 256,
) -> Outcome:
    """Return what a run gives whose speeds are measured.

    Args:
        case: how its steps are run, such as Case("inflight", 1, 2): one generator, at most 2 steps.
        engines: that generate; all of them, if the ranks do both.
        prompts: of a step.
        samples: answers to each.
        tokens: of each answer, in all turns.
        step_seconds: of an engine's step, however many sequences it has.
        train_seconds: of a step of this many trainers, from its batch to its new weights.
        environment_seconds: of an answer, in all turns.
        refit_seconds: of a refit, with what else the sides do at their meetings.
        sleep_seconds: between generation and training, if the ranks do both.
        slots: `engine.max_num_seqs`.
    """

    def seconds(running: np.ndarray, contexts: np.ndarray) -> np.ndarray:
        return np.full(len(running), step_seconds)

    job = Job(
        prompts=prompts,
        samples=samples,
        lengths=LogNormal(tokens, 0.0, tokens),
        environment_seconds=environment_seconds,
        num_engines=engines,
        slots=slots,
        step_seconds=seconds,
        train_seconds=train_seconds,
        refit_seconds=refit_seconds,
        sleep_seconds=sleep_seconds,
    )
    return overlap.simulate(case, job)


def main(sizes: tuple[int, ...] = tuple(SIZES), what_ifs: int = 64, steps: int = 0) -> None:
    """Print the tables.

    Args:
        sizes: numbers of GPUs.
        what_ifs: the number of GPUs of the second table. 0: leave it out.
        steps: to simulate; 0: as many as each table takes.
    """
    print(table(sizes, steps))
    quantiles = np.quantile(LENGTHS.draw(np.random.default_rng(0), 2000, 8), (0.5, 0.9, 0.99))
    print(
        f"\nassumed: prompts of {PROMPT_TOKENS} tokens, answers of {LENGTHS.mean:,.0f} (mean; 50, "
        f"90, 99 %: {', '.join(f'{n:,.0f}' for n in quantiles)}; cut at {LENGTHS.longest:,.0f}), "
        "bfloat16, H200, 8 to a node; no evaluation, no checkpoint, engines alike and never ill. "
        "In parentheses the fastest number of generators."
    )
    if what_ifs:
        print(f"\n{table_of_what_ifs(what_ifs, steps or STEPS_OF_CHANCE)}")
        print(
            "\nassumed: only the engine that fails is missing, and its groups begin again on "
            "others; minirl ends the run instead, and a resumed one begins them again"
        )


if __name__ == "__main__":
    tyro.cli(main)
