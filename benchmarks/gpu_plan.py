"""What minirl.plan expects of the sections of gpu.py: a section of its own, on no device."""

import contextlib
import copy
import dataclasses
import io
import json
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks import gpu_bench
from benchmarks.dryrun import jobs as dryrun
from benchmarks.dryrun.jobs import Job
from benchmarks.dryrun.meter import Meter
from benchmarks.gpu_bench import GIB, Bench, Step
from minirl.config.validate import resolve_lengths
from minirl.model import build, fused
from minirl.plan.plan import Workload, read_models


def plan(bench: Bench, kernels: dict[str, Callable[[Bench], None]]) -> None:
    """Add what the plan says of the rows of other sections.

    Args:
        bench: the section `plan`.
        kernels: sections without a mesh and a model, by name.
    """
    wanted = []
    for step in gpu_bench.all_steps(bench.sizes, "bfloat16"):
        if step.policy.kernels != "compile":  # what it would make is not known
            wanted.append(step)
    for model in bench.sizes.rl_models:
        cfg = gpu_bench.rl_config(bench, model)
        cfg.policy.dtype = "bfloat16"
        resolve_lengths(cfg)
        configs = {"policy": build.read_config(bench.folder / model).to_dict()}
        answer = bench.sizes.answer
        models = read_models(cfg, configs)
        load = Workload(cfg, 1, models, gpu_bench.TASK_TOKENS, answer).load
        wanted.append(Step(section=f"grpo-{model}", model=model, policy=cfg.policy, load=load))

    for step, result in zip(wanted, dry_run(bench, wanted), strict=True):
        if "error" in result:
            bench.add(step.section, None, f"no plan: {result['error']}")
            continue
        of_section = in_section(bench, step.section)
        seconds = {}
        for name, phase in result["phases"].items():
            seconds[name] = sum(work["seconds"] for work in phase["work"].values())
        if step.section.startswith("grpo-"):
            for name in gpu_bench.PHASES:
                of_section.add(name, 1e3 * seconds[name], "ms")
        else:
            phases = [result["phases"][name] for name in gpu_bench.PHASES]
            peak = max(phase["peak"] for phase in phases)
            gpu_bench.add_step(of_section, step, seconds, peak / GIB)

    # The process pretends to have a device now.
    meter = Meter(bench.card, 1)
    with FakeTensorMode(allow_non_fake_inputs=True), meter:
        for name, function in kernels.items():
            function(in_section(bench, name, meter))


def in_section(bench: Bench, section: str, meter: Meter | None = None) -> Bench:
    """Return the same for rows of another section, on the pretended device if there is a meter."""
    other = copy.copy(bench)
    other.section = section
    if meter:
        other.meter = meter
        other.device = torch.device("cuda", 0)
        other.on_gpu = True
        other.dtype = "bfloat16"
    return other


def dry_run(bench: Bench, wanted: list[Step]) -> list[dict[str, Any]]:
    """Return what benchmarks.dryrun says of each step."""
    best: fused.Choice = "liger" if fused.has_liger() else "torch"
    jobs = []
    for step in wanted:
        policy = step.policy
        if policy.kernels == "auto":
            policy = dataclasses.replace(policy, kernels=best)
        job = Job(
            folder=str(bench.folder / step.model),
            load=step.load,
            world_size=1,
            gpus_per_node=1,
            card=bench.card,
            policy=policy,
        )
        jobs.append(dataclasses.asdict(job))
    printed = io.StringIO()
    stdin = mock.patch.object(sys, "stdin", io.StringIO(json.dumps(jobs)))
    with stdin, contextlib.redirect_stdout(printed):
        dryrun.main()
    return json.loads(printed.getvalue())
