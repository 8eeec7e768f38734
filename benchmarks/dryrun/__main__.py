"""What a training step of a large model takes on GPUs that are not there, before and after.

    python -m benchmarks.dryrun                          # Qwen3-8B on 8 H200
    python -m benchmarks.dryrun --model Qwen3-1.7B

Dry runs of few layers are extrapolated to the whole model (extrapolate.py): 2 micro-batches
of 8 answers to a prompt, 256 + 768 tokens each. The first row is how minirl was before its GPU
paths were made for such models; every further row changes one thing.
"""

import argparse
import dataclasses
import tempfile
from pathlib import Path
from typing import Any

from transformers.utils import logging

from benchmarks.dryrun.extrapolate import alive_at_peak, cut, layer_counts, run_jobs
from benchmarks.fits import MODELS
from minirl.plan.costs import Load

PHASES = ("forward", "backward", "optimizer")
OLD = {"kernels": "torch", "accumulate": "whole", "activation_checkpointing": "off"}
# (what changes, policy settings, bytes of the head's chunks)
VARIANTS: list[tuple[str, dict[str, str], int]] = [
    ("as it was: whole gradients, modules of the library, small chunks of logits", OLD, 2**26),
    ("chunks of 512 MiB in the head", OLD, 2**29),
    ("sharded gradients", OLD | {"accumulate": "sharded"}, 2**29),
    ("liger kernels", OLD | {"accumulate": "sharded", "kernels": "liger"}, 2**29),
]
for which in ("selective", "full"):
    settings = {"accumulate": "sharded", "kernels": "liger", "activation_checkpointing": which}
    VARIANTS.append((f"{which} activation checkpointing", settings, 2**29))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", choices=MODELS, default="Qwen3-8B")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=6410, help="rows of a micro-batch, at most")
    parser.add_argument("--layers", type=int, default=0, help="extrapolate to so many (all)")
    parser.add_argument("--variants", type=int, default=len(VARIANTS), help="the first so many")
    args = parser.parse_args()
    variants = VARIANTS[: args.variants]
    logging.set_verbosity_error()
    config = MODELS[args.model]
    counts = layer_counts(config)
    num_layers = args.layers or config.num_hidden_layers
    with tempfile.TemporaryDirectory() as folder:
        jobs: list[dict[str, Any]] = []
        for _, policy, chunk in variants:
            for count in counts:
                path = Path(folder) / str(count)
                cut(config, count).save_pretrained(path)
                jobs.append(
                    {
                        "folder": str(path),
                        "load": dataclasses.asdict(Load(tokens=args.tokens)),
                        "world_size": args.ranks,
                        "policy": policy,
                        "head_chunk_bytes": chunk,
                    }
                )
        results = run_jobs(jobs)
    print("| | peak GiB | device ms | share of peak | NCCL ms | GB moved | kernels | host waits |")
    print("|---|---|---|---|---|---|---|---|")
    for i, (name, _, _) in enumerate(variants):
        few, more = results[2 * i : 2 * i + 2]
        print(f"| {name} | {_row(few, more, counts, num_layers)} |")


def _row(few: dict, more: dict, counts: tuple[int, int], num_layers: int) -> str:
    """Return the cells of a variant."""
    times = (num_layers - counts[1]) / (counts[1] - counts[0])
    a = _totals(few)
    b = _totals(more)
    whole = {name: b[name] + times * (b[name] - a[name]) for name in a}
    peaks = []
    for phase in PHASES:
        peaks.append(sum(alive_at_peak(few, more, phase, times).values()))
    useful = whole["flops"] - whole["flops again"]
    return " | ".join(
        [
            f"{max(peaks) / 2**30:.1f}",
            f"{whole['seconds'] * 1e3:,.0f}",
            f"{useful / whole['seconds'] / 989e12:.1%}",
            f"{whole['nccl'] * 1e3:.0f}",
            f"{whole['bytes'] / 1e9:,.0f}",
            f"{whole['kernels']:,.0f}",
            f"{sum(num for _, _, num in more['waits'])}",
        ]
    )


def _totals(result: dict[str, Any]) -> dict[str, float]:
    """Return a step's figures: forward, backward and optimizer."""
    total = dict.fromkeys(("seconds", "flops", "flops again", "bytes", "kernels", "nccl"), 0.0)
    for phase in PHASES:
        for kind, work in result["phases"][phase]["work"].items():
            if kind in ("NCCL", "PCIe"):
                total["nccl"] += work["seconds"] * (kind == "NCCL")
                continue
            total["seconds"] += work["seconds"]
            total["flops"] += work["flops"]
            total["bytes"] += work["bytes"]
            total["kernels"] += work["kernels"]
    # What backward does beyond twice the forward pass was done before.
    forward = _flops(result, "forward")
    total["flops again"] = max(0.0, _flops(result, "backward") - 2 * forward)
    return total


def _flops(result: dict[str, Any], phase: str) -> float:
    """Return the work of the matrix products of a phase."""
    return result["phases"][phase]["work"]["matmul"]["flops"]


if __name__ == "__main__":
    main()
