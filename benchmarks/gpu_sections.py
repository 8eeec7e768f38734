"""The sections of gpu.py, which starts this program once for each of them.

    python -m benchmarks.gpu_sections --section attention --folder FOLDER --json FILE

Section `device` makes the folders of models, which the others read. Section `plan` says what
minirl.plan expects of the rows of the others.
"""

import dataclasses
import functools
import gc
import json
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import tyro
from safetensors.torch import save_file
from torch import Tensor, nn

from benchmarks import gpu_bench, gpu_plan
from benchmarks.dryrun.extrapolate import cut
from benchmarks.gpu_bench import CONFIGS, FULL, GIB, SMALL, Bench, free_gib
from benchmarks.gpu_stages.lib import wall_seconds
from minirl.algo import losses
from minirl.config.policy import PolicyConfig
from minirl.config.rl import RefitConfig
from minirl.config.shared import EngineConfig
from minirl.engine.engine import RolloutEngine
from minirl.model import scratch
from minirl.model.attention import packed_attention
from minirl.model.build import head_kernels
from minirl.model.logprob import logprob_entropy
from minirl.parallel import fsdp
from minirl.plan import cards
from minirl.plan.costs import Load
from minirl.refit.refit import Refit
from minirl.rl import Trainer
from minirl.train.policy import Policy


@dataclass(kw_only=True)
class Arguments:
    section: str
    folder: Path
    """Where models are."""
    json: Path
    """Gets the rows."""
    small: bool = False
    card: str = ""
    enforce_eager: bool = False


# --------------------------------------------------------------------------------------------------
# kernels


def device(bench: Bench) -> None:
    """Make what other sections read, and measure what they are compared with."""
    if not bench.on_gpu and bench.sizes is FULL:
        sys.exit("there is no CUDA device; --small runs tiny shapes on a CPU")
    free = free_gib() if bench.on_gpu else math.inf
    make_models(bench, free * GIB)
    make_task(bench.folder / "sums.jsonl")
    if bench.on_gpu:
        name = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
        bench.add(f"free memory of {name}", free, "GiB")
    size = bench.sizes.matrix
    a = torch.randn((size, size), device=bench.device, dtype=getattr(torch, bench.dtype))
    bench.time(f"matrix product of {size} x {size}", lambda: a @ a, 2.0 * size**3)
    bench.add("copy on the device, read and written", copy_rate(bench), "GB/s")
    if bench.on_gpu:
        bench.add("copy from pinned host memory", copy_rate(bench, pin_memory=True), "GB/s")


def make_models(bench: Bench, free_bytes: float) -> None:
    """Write folders without weights, of models as large as the device can train."""
    sizes = bench.sizes
    configs: dict[str, Any] = {}
    for name in sizes.models + sizes.rl_models:
        configs[name] = CONFIGS[name]
        if bench.on_gpu:
            num_layers = gpu_bench.count_layers(CONFIGS[name], sizes.load, free_bytes)
            configs[name] = cut(CONFIGS[name], num_layers)
    configs["layers"] = cut(CONFIGS[sizes.models[-1]], sizes.layers)
    configs["layers"].vocab_size = sizes.layer_vocabulary
    tokenizer = scratch.make_tokenizer([])
    for name, config in configs.items():
        config.save_pretrained(bench.folder / name)
        tokenizer.save_pretrained(bench.folder / name)
        save_file({}, bench.folder / name / "model.safetensors")


def make_task(file: Path) -> None:
    """Write rows for RL."""
    rows = []
    for a in range(100, 200):
        rows.append(
            json.dumps({"prompt": gpu_bench.TASK.format(a, a + 107), "answer": str(2 * a + 107)})
        )
    file.write_text("\n".join(rows))


def copy_rate(bench: Bench, *, pin_memory: bool = False) -> float:
    """Return GB/s of a copy on the device, or to it from the host."""
    num_bytes = bench.sizes.copied
    target = torch.empty(num_bytes, dtype=torch.uint8, device=bench.device)
    if pin_memory:
        source = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    else:
        source = torch.zeros_like(target)
        num_bytes *= 2
    return num_bytes / bench.seconds(lambda: target.copy_(source, non_blocking=True)) / 1e9


def attention(bench: Bench) -> None:
    load = bench.sizes.load
    time_attention(bench, "packed", load, getattr(torch, bench.dtype))
    if not bench.on_gpu:
        bench.needs_gpu("few rows: flash against formula")
        return
    few = dataclasses.replace(load, tokens=bench.sizes.few)
    time_attention(bench, "few rows, flash in bfloat16", few, torch.bfloat16)
    # No kernel takes float32 there.
    time_attention(bench, "few rows, formula in float32", few, torch.float32)


def time_attention(bench: Bench, name: str, load: Load, dtype: torch.dtype) -> None:
    config = CONFIGS[bench.sizes.models[-1]]
    batch = gpu_bench.make_batch(load, bench.device)

    def random(num_heads: int) -> Tensor:
        shape = (1, num_heads, len(batch.inputs), config.head_dim)
        return torch.randn(shape, device=bench.device, dtype=dtype, requires_grad=True)

    q = random(config.num_attention_heads)
    num_kv_heads = config.num_key_value_heads or config.num_attention_heads
    k = random(num_kv_heads)
    v = random(num_kv_heads)

    def forward() -> Tensor:
        return packed_attention(nn.Identity(), q, k, v, None, pack=batch)[0]

    out = forward()
    grad = torch.randn_like(out)
    flops = 4.0 * gpu_bench.count_pairs(batch) * config.num_attention_heads * config.head_dim
    bench.time(f"{name}: forward", forward, flops)
    bench.time(
        f"{name}: backward",
        lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True),
        2.5 * flops,
    )


def head(bench: Bench) -> None:
    for model in bench.sizes.models:
        rows = bench.sizes.load.tokens
        width = CONFIGS[model].hidden_size
        vocabulary = CONFIGS[model].vocab_size
        like = {"device": bench.device, "dtype": getattr(torch, bench.dtype)}
        hidden = torch.randn((rows, width), **like)
        weight = torch.randn((vocabulary, width), **like).mul_(0.02)
        targets = torch.arange(rows, device=bench.device) % vocabulary
        call = functools.partial(
            head_step, hidden.requires_grad_(), weight.requires_grad_(), targets
        )
        bench.time(f"{model}: forward and backward", call, 6.0 * rows * width * vocabulary)


def head_step(hidden: Tensor, weight: Tensor, targets: Tensor) -> None:
    kernels = head_kernels(hidden.device, hidden.dtype)
    logprobs, _ = logprob_entropy(hidden, weight, targets, kernels=kernels)
    torch.autograd.grad(logprobs, (hidden, weight), torch.ones_like(logprobs))


# --------------------------------------------------------------------------------------------------
# optimizer steps


def steps(bench: Bench) -> None:
    """Measure the optimizer steps of a section `step-*` or `layer-*`."""
    for step in gpu_bench.all_steps(bench.sizes, bench.dtype):
        if step.section == bench.section:
            gpu_bench.measure_step(bench, step)
            gc.collect()  # what was measured has cycles
            if bench.on_gpu:
                torch.cuda.empty_cache()


# --------------------------------------------------------------------------------------------------
# engine and RL


def weights(bench: Bench) -> None:
    """Measure sleep, wake and refit."""
    folder = bench.folder / bench.sizes.rl_models[0]
    with gpu_bench.random_weights():
        policy = Policy(PolicyConfig(dtype=bench.dtype), folder, bench.mesh)
    few = dataclasses.replace(bench.sizes.load, tokens=bench.sizes.few)
    batch = gpu_bench.make_batch(few, bench.device)
    policy.update([batch], losses.sft(), lr=1e-6)  # there is a state then
    if bench.on_gpu:
        sleep_and_wake(bench, policy)
    else:
        bench.needs_gpu("sleep and wake")

    policy.sleeper.sleep()
    engine = RolloutEngine(
        EngineConfig(
            max_model_len=512,
            kv_cache_gb=0 if bench.on_gpu else 0.05,
            enforce_eager=bench.enforce_eager,
        ),
        folder,
        bench.mesh,
        dtype=bench.dtype,
        timer=policy.timer,
    )
    refit = Refit(RefitConfig(), policy.shards(), policy.parts(), engine)
    engine.sleep()
    policy.sleeper.wake_parameters()
    change_places(bench, policy, engine, refit)
    engine.close()


def change_places(bench: Bench, policy: Policy, engine: RolloutEngine, refit: Refit) -> None:
    """Measure what surrounds a rollout."""
    seconds = defaultdict(list)
    left = 0.0
    policy.timer.take()  # of what was before
    for _ in range(4):
        with engine.awake(refit, policy.sleeper):
            left = free_gib() if bench.on_gpu else 0.0
        with policy.timer.phase("sleep_wake"):
            policy.sleeper.wake_optimizer()
        for phase, value in policy.timer.take().items():
            seconds[phase].append(value)
    medians = {phase: statistics.median(values[1:]) for phase, values in seconds.items()}
    num_bytes = 0
    for name, p in policy.shards().items():
        num_bytes += p.numel() * (p.element_size() + refit.dtypes[name].itemsize)
    bench.add("refit, read and written", num_bytes / GIB, "GiB")
    bench.add("refit", 1e3 * medians["refit"], "ms")
    bench.add("refit", num_bytes / medians["refit"] / 1e9, "GB/s")
    if bench.on_gpu:
        bench.add("all sleeping and waking of a rollout", 1e3 * medians["sleep_wake"], "ms")
        bench.add("tokens of the KV cache", engine.kv_cache_tokens, "")
        bench.add("memory left, engine awake", left, "GiB")
        bench.add("memory left, engine asleep", free_gib(), "GiB")
        bench.add("plain copy on the device", copy_rate(bench), "GB/s")


def sleep_and_wake(bench: Bench, policy: Policy) -> None:
    """Measure the trainer's way to host memory and back."""
    shards = [fsdp.local(p) for p in policy.model.parameters()]
    num_bytes = sum(t.nbytes for t in shards + policy.optimizer.tensors())

    def wake() -> None:
        policy.sleeper.wake_parameters()
        policy.sleeper.wake_optimizer()

    bench.add("trainer's state", num_bytes / GIB, "GiB")
    bench.add("memory left, trainer awake", free_gib(), "GiB")
    bench.add(
        "first sleep, which takes host memory", 1e3 * wall_seconds(policy.sleeper.sleep), "ms"
    )
    bench.add("memory left, trainer asleep", free_gib(), "GiB")
    seconds = defaultdict(list)
    for _ in range(3):
        seconds["wake"].append(wall_seconds(wake))
        seconds["sleep"].append(wall_seconds(policy.sleeper.sleep))
    wake()
    for name, times in seconds.items():
        median = statistics.median(times)
        bench.add(name, 1e3 * median, "ms")
        bench.add(name, num_bytes / median / 1e9, "GB/s")


def grpo(bench: Bench) -> None:
    """Run minirl.rl."""
    cfg = gpu_bench.rl_config(bench, bench.section.removeprefix("grpo-"))

    class Measured(Trainer):
        def finish(self) -> None:
            """Add the rows before the last evaluation and the export, which may take long."""
            add_phases(bench, self.run.output / "metrics.jsonl")
            super().finish()

    with gpu_bench.random_weights():
        Measured.main(cfg, bench.mesh)


def add_phases(bench: Bench, metrics: Path) -> None:
    """Add medians over all steps of a run but the first."""
    lines = metrics.read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["phase"] == "rl"][1:]
    units = {"time": "ms", "tokens_per_second": "tokens/s", "gpu_gib": "GiB", "memory": "times"}
    whole = 0.0
    for name in rows[-1]:
        kind, _, what = name.partition("/")
        if kind in units and not what.startswith("idle_"):
            value = statistics.median(row[name] for row in rows if name in row)
            if kind == "time":
                value *= 1e3
                whole += value
            bench.add(what, value, units[kind])
    bench.add("all phases", whole, "ms")


# --------------------------------------------------------------------------------------------------

SECTIONS: dict[str, Callable[[Bench], None]] = {
    "device": device,
    "attention": attention,
    "head": head,
    "step": steps,
    "layer": steps,
    "weights": weights,
    "grpo": grpo,
    "plan": lambda bench: gpu_plan.plan(bench, {"attention": attention, "head": head}),
}


def find_card(args: Arguments, kind: str) -> cards.Card:
    """Return what MFU and the plan refer to: the card that is asked for, or else the device's.

    The section `device` comes first and notes it, because `plan` sees no device.
    """
    found = args.folder / "card.json"
    if kind != "device":
        return cards.Card(**json.loads(found.read_text()))
    if args.card or not torch.cuda.is_available():
        card = cards.find_card(args.card or "h200")
    else:
        properties = torch.cuda.get_device_properties(0)
        card = cards.of_device(properties.name, properties.total_memory)
    found.write_text(json.dumps(dataclasses.asdict(card)))
    return card


def main(args: Arguments) -> None:
    kind = args.section.partition("-")[0]
    on_gpu = torch.cuda.is_available() and kind != "plan"
    bench = Bench(
        args.section,
        args.folder,
        args.json,
        SMALL if args.small else FULL,
        find_card(args, kind),
        torch.device("cuda" if on_gpu else "cpu"),
        enforce_eager=args.enforce_eager,
    )
    SECTIONS[kind](bench)
    if dist.is_initialized():  # vLLM may have ended it
        dist.destroy_process_group()


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
