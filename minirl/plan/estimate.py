"""A run's plan by formulas or by dry runs."""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from minirl.base.errors import UserError
from minirl.base.reading import library_reads
from minirl.config.policy import Checkpointing, LoraConfig, PolicyConfig
from minirl.data import vision
from minirl.model import families
from minirl.plan import formulas, memory
from minirl.plan.adapted import fitting_to
from minirl.plan.cards import Card
from minirl.plan.formulas import Cost
from minirl.plan.kinds import BASE, END, MIDDLE, START
from minirl.plan.planner import Plan, assemble
from minirl.plan.shape import Shape, cut, layer_counts, patterns_of_cut, read_shape
from minirl.plan.workload import Role, Workload

CHECKPOINTING: tuple[Checkpointing, ...] = ("off", "selective", "full")


class Models:
    """Sizes of a run's models, which are read once however many settings are tried.

    Args:
        workload: the run.
        liger: liger-kernel is installed where it runs, for `policy.kernels` auto.
    """

    def __init__(self, workload: Workload, *, liger: bool = True):
        self.liger = liger
        self.shapes: dict[str, Shape] = {}
        for role in workload.roles:
            self.shapes[role.name] = read_shape(
                role.model,
                score=role.loss in ("value", "reward"),
                policy=None if role.loss == "frozen" else role.policy,
            )


def by_formulas(
    workload: Workload,
    models: Models,
    card: Card,
    gpus_per_node: int,
    automatic: tuple[Checkpointing, ...] = CHECKPOINTING,
) -> Plan:
    """Return the plan of a run from closed formulas.

    Args:
        workload: what the run does.
        models: its sizes.
        card: the GPUs.
        gpus_per_node: how many of them are linked.
        automatic: what `policy.activation_checkpointing` auto may stand for: the first that fits.
    """
    wanted = workload.cfg.policy.activation_checkpointing
    tried = automatic if wanted == "auto" else (wanted,)
    for checkpointing in tried:
        costs = {}
        for role in workload.roles:
            job = _formula_job(workload, role, models, card, gpus_per_node, checkpointing)
            costs[role.name] = formulas.cost(job)
        plan = assemble(
            workload,
            models.shapes,
            costs,
            card,
            checkpointing=checkpointing,
            by_dry_run=False,
        )
        if not plan.lacks:
            break
    return plan


def _formula_job(
    workload: Workload,
    role: Role,
    models: Models,
    card: Card,
    gpus_per_node: int,
    checkpointing: Checkpointing,
) -> memory.Job:
    fused = ("liger", "compile", "auto") if models.liger else ("liger", "compile")
    return memory.Job(
        shape=models.shapes[role.name],
        card=card,
        gpus_per_node=gpus_per_node,
        world_size=workload.world_size,
        policy=role.policy,
        parallel=workload.cfg.parallel,
        load=workload.load,
        loss=role.loss,
        shares_base=role.shares_base,
        liger=role.policy.kernels in fused,
        checkpointing=checkpointing,
    )


# --------------------------------------------------------------------------------------------------
# dry runs


def by_dry_run(
    workload: Workload, models: Models, card: Card, gpus_per_node: int, checkpointing: Checkpointing
) -> Plan:
    """Return the plan of a run from dry runs of its models with few layers.

    Args:
        workload: what the run does.
        models: its sizes.
        card: the GPUs.
        gpus_per_node: how many of them are linked.
        checkpointing: of activations: off, selective or full.

    Raises:
        UserError: there is no C++ compiler, a dry run fails, or there are no files that say how a
            model reads images.
    """
    costs = {}
    with tempfile.TemporaryDirectory() as folder:
        jobs: list[dict[str, Any]] = []
        counts = []
        for role in workload.roles:
            few_and_more = dict.fromkeys(layer_counts(role.model))  # one, if both are the whole
            counts.append(list(few_and_more))
            job = _formula_job(workload, role, models, card, gpus_per_node, checkpointing)
            for num_layers in few_and_more:
                path = Path(folder) / f"{len(jobs)}"
                config = cut(role.model, num_layers)
                config.save_pretrained(path)
                if families.reads_images(config):
                    model = str(role.model.name_or_path)
                    with library_reads(f"the image processor of {model} (see --formulas)"):
                        vision.save_processor(model, path)
                # Patterns of layers that are not there would be refused.
                score = role.loss in ("value", "reward")
                freeze = patterns_of_cut(config, score, role.policy.freeze)
                lora = fitting_to(config, score, role.policy.lora)
                jobs.append(_dry_job(job, path, freeze, lora))
        results = iter(run_dry(jobs))
        for role, of_role in zip(workload.roles, counts, strict=True):
            with_layers = [next(results) for _ in of_role]
            shape = models.shapes[role.name]
            job = _formula_job(workload, role, models, card, gpus_per_node, checkpointing)
            formula = formulas.cost(job)
            costs[role.name] = _extrapolate(with_layers, of_role, shape.num_layers, formula)
    return assemble(
        workload, models.shapes, costs, card, checkpointing=checkpointing, by_dry_run=True
    )


def _dry_job(job: memory.Job, folder: Path, freeze: list[str], lora: LoraConfig) -> dict[str, Any]:
    """Return the same job with the model of a folder, which has fewer layers.

    Args:
        job: of the whole model.
        folder: of the other model.
        freeze: the patterns of frozen weights that match some of it.
        lora: with the patterns that do.
    """
    # From the second micro-batch on they are all alike.
    load = dataclasses.replace(job.load, num_micro=min(2, job.load.num_micro))
    policy = dataclasses.asdict(job.policy)
    policy = {f.name: policy[f.name] for f in dataclasses.fields(PolicyConfig)}
    policy["activation_checkpointing"] = job.checkpointing
    policy["freeze"] = freeze
    policy["lora"] = dataclasses.asdict(lora) | {"adapter": ""}  # Its values do not matter.
    # As the size of the whole model decides it.
    whole = memory.accumulates_whole(job.policy, job.shape, job.parallel)
    policy["accumulate"] = "whole" if whole else "sharded"
    return {
        "folder": str(folder),
        "load": dataclasses.asdict(load),
        "world_size": job.world_size,
        "gpus_per_node": job.gpus_per_node,
        "card": dataclasses.asdict(job.card),
        "policy": policy,
        "parallel": dataclasses.asdict(job.parallel),
        "loss": job.loss,
        "share_base": job.shares_base,
    }


def run_dry(jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run jobs on pretended devices, in a process of their own, and return their results.

    Raises:
        UserError: the process fails, or one of the jobs.
    """
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "minirl.plan.dryrun"],
        input=json.dumps(jobs),
        capture_output=True,
        text=True,
        env=environment,
    )
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:]
        raise UserError(f"the dry run failed: {''.join(last)}")
    results = json.loads(done.stdout)
    for result in results:
        if "error" in result:
            raise UserError(f"the dry run failed: {result['error']}")
    return results


def _extrapolate(
    results: list[dict[str, Any]], counts: list[int], num_layers: int, formula: Cost
) -> Cost:
    """Return what a model costs from results with fewer layers.

    Args:
        results: with a few layers and with some more; or of the whole model.
        counts: their numbers of layers.
        num_layers: of the whole model.
        formula: the formulas' answer, from which the needed work is taken.
    """
    few, more = results[0], results[-1]
    times = 0.0
    if len(counts) == 2:
        times = (num_layers - counts[1]) / (counts[1] - counts[0])

    def beyond(smaller: float, larger: float) -> float:
        return larger + times * (larger - smaller)

    peaks = {}
    alive = {}
    seconds = {}
    wire = {}
    wire_seconds = {}
    for phase in formula.peaks:
        a = few["phases"][phase]
        b = more["phases"][phase]
        alive[phase] = alive_at_peak(few, more, phase, times)
        peaks[phase] = sum(alive[phase].values())
        num = 1 if phase == "optimizer" else max(1, few["num_micro"])
        seconds[phase] = beyond(_device_seconds(a), _device_seconds(b)) / num
        if phase == "optimizer":  # with what it moves to the host and computes there
            seconds[phase] = max(seconds[phase], formula.seconds[phase])
        wire[phase] = beyond(_on_wire(a, "bytes"), _on_wire(b, "bytes")) / num
        wire_seconds[phase] = beyond(_on_wire(a, "seconds"), _on_wire(b, "seconds")) / num
    return Cost(
        parameters=beyond(few["parameter_bytes"], more["parameter_bytes"]),
        optimizer=beyond(few["optimizer_bytes"], more["optimizer_bytes"]),
        peaks=peaks,
        alive=alive,
        seconds=seconds,
        wire=wire,
        wire_seconds=wire_seconds,
        flops=formula.flops,
    )


def alive_at_peak(
    few: dict[str, Any], more: dict[str, Any], phase: str, times: float
) -> dict[str, float]:
    """Return the bytes at the peak of a phase by what they are for, extrapolated.

    Each part of a phase grows by so much for a layer, and the largest one counts. Before the first
    layer that is state. From the last layer on it is state and what layers keep. Between the two
    there is never more than at one of the ends, but for the first layer's own. In backward the
    peak is at the last layers: then everything is kept that was kept at the end of forward.
    """

    def growth(of_phase: str, part: str) -> dict[str, float]:
        a = few["phases"][of_phase]["parts"][part]["kinds"]
        b = more["phases"][of_phase]["parts"][part]["kinds"]
        return {kind: times * (b.get(kind, 0) - a.get(kind, 0)) for kind in a | b}

    def grown(result: dict[str, Any], part: str, growth: dict[str, float]) -> dict[str, float]:
        sizes = result["phases"][phase]["parts"][part]["kinds"]
        return {kind: sizes.get(kind, 0) + growth.get(kind, 0) for kind in sizes | growth}

    if phase == "optimizer":
        parts = [grown(more, START, growth(phase, START))]
    elif phase == "backward":
        parts = [
            grown(more, START, growth("forward", END)),
            grown(more, END, growth(phase, END)),
        ]
    else:
        parts = [
            grown(more, START, growth(phase, START)),
            grown(few, MIDDLE, growth(phase, START)),
            grown(more, END, growth(phase, END)),
        ]
    largest = max(parts, key=lambda sizes: sum(sizes.values()))
    # What another model holds is counted there.
    return {kind: size for kind, size in largest.items() if size > 0 and kind != BASE}


def _device_seconds(phase: dict[str, Any]) -> float:
    return sum(
        work["seconds"] for kind, work in phase["work"].items() if kind not in ("NCCL", "PCIe")
    )


def _on_wire(phase: dict[str, Any], unit: str) -> float:
    return phase["work"]["NCCL"][unit] if "NCCL" in phase["work"] else 0.0
