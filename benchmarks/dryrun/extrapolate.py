"""What a whole model costs, from dry runs of the same model with few layers."""

import copy
import dataclasses
import fnmatch
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from benchmarks.dryrun.kinds import BASE, END, MIDDLE, START
from minirl.base.errors import UserError
from minirl.config.policy import PolicyConfig
from minirl.model import build
from minirl.model.trained import names_in_files
from minirl.plan.costs import Parts, Training


@dataclass(kw_only=True)
class Cost:
    """What a dry run counts of `minirl.plan.costs.Training`."""

    parameters: float  # Bytes between two steps, as the next.
    optimizer: float
    alive: dict[str, Parts]  # At the peak of each phase.
    seconds: dict[str, float]
    wire: dict[str, float]


def layer_counts(config: PretrainedConfig) -> tuple[int, int]:
    """Return two numbers of layers, from which that of the whole model can be extrapolated.

    The layers between the two are as the rest of the model's: its first layers may be dense where
    the others are mixtures, and every sixth may see no window. One layer is too few, because FSDP
    gathers the next one while one computes. A model that is as small as that is taken whole: then
    both are its number of layers. So is one with inputs of each layer, for which its embedding has
    columns, or with layers that share keys and values, which are its last ones.
    """
    values = config.get_text_config().to_dict()
    num_layers = values["num_hidden_layers"]
    if values.get("hidden_size_per_layer_input") or values.get("num_kv_shared_layers"):
        return num_layers, num_layers
    first = values.get("first_k_dense_replace") or 0
    period = math.lcm(values.get("decoder_sparse_step") or 1, _period(values.get("layer_types")))
    few = first + max(2, period)
    few += (num_layers - few) % period  # so that whole periods are left
    more = few + max(2, period)
    if more > num_layers:
        return num_layers, num_layers
    return few, more


def cut(config: PretrainedConfig, num_layers: int) -> PretrainedConfig:
    """Return the config of the same model with fewer layers."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    text.num_hidden_layers = num_layers
    values = text.to_dict()
    if values.get("layer_types"):
        text.layer_types = values["layer_types"][:num_layers]
    if values.get("per_layer_config"):
        by_layer = {int(layer): sizes for layer, sizes in values["per_layer_config"].items()}
        text.per_layer_config = {i: sizes for i, sizes in by_layer.items() if i < num_layers}
    return config


def _period(kinds: list[str] | None) -> int:
    """Return after how many layers their kinds repeat."""
    kinds = kinds or [""]
    for period in range(1, len(kinds)):
        if all(kinds[i] == kinds[i - period] for i in range(period, len(kinds))):
            return period
    return len(kinds)


def dry_costs(trained: list[tuple[Training, PretrainedConfig]]) -> list[Cost]:
    """Return what models cost by dry runs of a few layers and of some more, in one process.

    Args:
        trained: how each model is trained, and its config.

    Raises:
        UserError: there is no C++ compiler, or a dry run fails.
    """
    jobs = []
    with tempfile.TemporaryDirectory() as folder:
        for number, (training, config) in enumerate(trained):
            for num_layers in layer_counts(config):
                path = Path(folder) / f"{number}-{num_layers}"
                smaller = cut(config, num_layers)
                smaller.save_pretrained(path)
                jobs.append(_job(training, path, smaller))
        results = run_jobs(jobs)
    costs = []
    for number, (training, config) in enumerate(trained):
        few, more = results[2 * number : 2 * number + 2]
        costs.append(_extrapolate(few, more, layer_counts(config), training))
    return costs


def _job(training: Training, folder: Path, config: PretrainedConfig) -> dict[str, Any]:
    """Return a job with the model of a folder, which has fewer layers."""
    # From the second micro-batch on they are all alike.
    load = dataclasses.replace(training.load, num_micro=min(2, training.load.num_micro))
    policy = dataclasses.asdict(training.policy)
    policy = {f.name: policy[f.name] for f in dataclasses.fields(PolicyConfig)}
    policy["activation_checkpointing"] = training.checkpointing
    # Patterns of layers that are not there would be refused.
    score = training.loss in ("value", "reward")
    model = build.make_meta_model(config, torch.float32, score=score)
    weights = list(itertools.chain.from_iterable(names_in_files(model).values()))
    policy["freeze"] = [
        pattern for pattern in training.policy.freeze if fnmatch.filter(weights, pattern)
    ]
    policy["lora"]["adapter"] = ""  # Its values do not matter.
    # As the size of the whole model decides it.
    policy["accumulate"] = "whole" if training.keeps_whole else "sharded"
    return {
        "folder": str(folder),
        "load": dataclasses.asdict(load),
        "world_size": training.world_size,
        "gpus_per_node": training.gpus_per_node,
        "card": dataclasses.asdict(training.card),
        "policy": policy,
        "parallel": dataclasses.asdict(training.parallel),
        "loss": training.loss,
        "share_base": training.shares_base,
    }


def run_jobs(jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run jobs on pretended devices, in another process, and return their results.

    Raises:
        UserError: the process fails, or one of the jobs.
    """
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.dryrun.jobs"],
        input=json.dumps(jobs),
        capture_output=True,
        text=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
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
    few: dict[str, Any], more: dict[str, Any], counts: tuple[int, int], training: Training
) -> Cost:
    """Return what a model costs from results with fewer layers.

    Args:
        few: result with a few layers.
        more: result with some more; or both are of the whole model.
        counts: their numbers of layers.
        training: of the whole model.
    """
    times = 0.0
    if counts[0] < counts[1]:
        times = (training.model.num_layers - counts[1]) / (counts[1] - counts[0])

    def whole(smaller: float, larger: float) -> float:
        return larger + times * (larger - smaller)

    cost = Cost(
        parameters=whole(few["parameter_bytes"], more["parameter_bytes"]),
        optimizer=whole(few["optimizer_bytes"], more["optimizer_bytes"]),
        alive={},
        seconds={},
        wire={},
    )
    for phase in training.alive.keys() & few["phases"].keys():
        a = few["phases"][phase]
        b = more["phases"][phase]
        num = 1 if phase == "optimizer" else max(1, few["num_micro"])
        cost.alive[phase] = alive_at_peak(few, more, phase, times)
        cost.seconds[phase] = whole(device_seconds(a), device_seconds(b)) / num
        if phase == "optimizer":  # with what it moves to the host and computes there
            cost.seconds[phase] = max(cost.seconds[phase], training.seconds[phase])
        cost.wire[phase] = whole(_on_wire(a, "bytes"), _on_wire(b, "bytes")) / num
    return cost


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


def device_seconds(phase: dict[str, Any]) -> float:
    """Return the seconds of a phase's kernels, without what is sent."""
    work = phase["work"].items()
    return sum(of_kind["seconds"] for kind, of_kind in work if kind not in ("NCCL", "PCIe"))


def _on_wire(phase: dict[str, Any], unit: str) -> float:
    return phase["work"]["NCCL"][unit] if "NCCL" in phase["work"] else 0.0
