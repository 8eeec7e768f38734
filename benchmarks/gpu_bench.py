"""What the sections of gpu.py share: sizes, timing, rows of the table, optimizer steps."""

import dataclasses
import functools
import json
import statistics
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
from transformers import PretrainedConfig, Qwen3Config

from benchmarks.dryrun.jobs import trajectories
from benchmarks.dryrun.meter import Meter
from benchmarks.fits import MODELS
from benchmarks.gpu_stages import lib
from benchmarks.gpu_stages.lib import GIB
from minirl.algo import losses
from minirl.batch.packing import pack
from minirl.config.parse import fill_config
from minirl.config.policy import PolicyConfig
from minirl.config.rl import AlgoConfig, RLConfig
from minirl.model import build, causal, loading
from minirl.parallel import fsdp
from minirl.parallel.machines import join_world
from minirl.parallel.mesh import Mesh
from minirl.plan.cards import Card
from minirl.plan.costs import Load
from minirl.plan.sizes import read_sizes
from minirl.run.metrics import StepWork, flops
from minirl.train.policy import Policy
from minirl.types.packed import Packed

PHASES = ("forward", "backward", "optimizer")  # Of an optimizer step.
NUM_WARMUP = 2  # Steps that do not count.
Dtype = Literal["float32", "bfloat16"]


CONFIGS = {
    "0.6B": MODELS["Qwen3-0.6B"],
    "1.7B": MODELS["Qwen3-1.7B"],
    "8B": MODELS["Qwen3-8B"],
    "tiny": Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=512,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    ),
}


TASK = "{} + {} ="  # Of three digits each; the tokenizer reads letters and the ends of messages.
TASK_TOKENS = len("123 + 456 =") + len(["<|user|>", "<|end|>", "<|assistant|>"])


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How large everything is."""

    load: Load  # Of an optimizer step.
    few: int  # Rows, for attention that has all scores in memory.
    models: tuple[str, ...]  # Of steps and heads; attention and layers are those of the last one.
    rl_models: tuple[str, ...]  # The first one is that of `weights`, too.
    layers: int  # Of the model in which layers are timed,
    layer_vocabulary: int  # whose head is to take no time.
    matrix: int  # Rows and columns.
    copied: int  # Bytes.
    prompts: int  # Of an RL step.
    samples: int
    answer: int  # Tokens.
    tokens_per_rank: int
    repeats: int


FULL = Sizes(
    load=Load(tokens=8192, num_micro=2, sequence=1024, prompt=256, samples=8),
    few=2048,
    models=("1.7B", "8B"),
    rl_models=("1.7B", "0.6B"),
    layers=4,
    layer_vocabulary=1024,
    matrix=8192,
    copied=GIB,
    prompts=16,
    samples=8,
    answer=512,
    tokens_per_rank=16896,  # A quarter of a step.
    repeats=10,
)
SMALL = Sizes(
    load=Load(tokens=96, num_micro=2, sequence=32, prompt=8, samples=2),
    few=32,
    models=("tiny",),
    rl_models=("tiny",),
    layers=2,
    layer_vocabulary=512,
    matrix=128,
    copied=2**20,
    prompts=2,
    samples=2,
    answer=4,
    tokens_per_rank=96,
    repeats=2,
)


class Bench:
    """A section under way in this process.

    Args:
        section: its name.
        folder: holds the folders of models.
        file: gets the rows of the table, as JSON.
        sizes: how large everything is.
        card: what MFU and the plan refer to.
        device: where it computes.
        enforce_eager: engines run without CUDA graphs.
        meter: of a pretended device; None: the device is there.
    """

    def __init__(
        self,
        section: str,
        folder: Path,
        file: Path,
        sizes: Sizes,
        card: Card,
        device: torch.device,
        *,
        enforce_eager: bool,
        meter: Meter | None = None,
    ):
        self.section = section
        self.folder = folder
        self.file = file
        self.sizes = sizes
        self.card = card
        self.device = device
        self.enforce_eager = enforce_eager
        self.meter = meter
        self.on_gpu = device.type == "cuda"
        self.dtype: Dtype = "bfloat16" if self.on_gpu else "float32"

    @functools.cached_property
    def mesh(self) -> Mesh:
        """Return a world of one, which is joined here."""
        return join_world()

    def add(self, what: str, value: float | None, unit: str) -> None:
        """Write a row, so that it counts even if the section fails later.

        Args:
            what: was measured.
            value: None: nothing, and `unit` says why.
            unit: of the value.
        """
        row = {"section": self.section, "what": what, "value": value, "unit": unit}
        with self.file.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def needs_gpu(self, what: str) -> None:
        self.add(what, None, "needs a GPU")

    def time(self, what: str, function: Callable[[], object], flops: float) -> None:
        """Add the milliseconds of a call, and how fast it computes."""
        if self.meter:
            self.meter.phase = what
            function()
            work = self.meter.phases[what].work.values()
            self.add(what, 1e3 * sum(kind.seconds for kind in work), "ms")
            return
        seconds = self.seconds(function)
        self.add(what, 1e3 * seconds, "ms")
        self.add(what, flops / seconds / 1e12, "TFLOP/s")

    def seconds(self, function: Callable[[], object]) -> float:
        """Return the median seconds of a call, on CUDA those of the device."""
        for _ in range(3):
            function()
        timed = lib.device_seconds if self.on_gpu else lib.wall_seconds
        return statistics.median(timed(function) for _ in range(self.sizes.repeats))


def free_gib() -> float:
    """Return what is free of the device's memory, for any process."""
    return torch.cuda.mem_get_info()[0] / GIB


# --------------------------------------------------------------------------------------------------
# models and batches


def random_weights() -> AbstractContextManager:
    """Fill models at random inside the block: no file is read."""
    return mock.patch.object(loading, "load_weights", _fill_at_random)


@torch.no_grad()
def _fill_at_random(
    model: Any,
    folder: Path,
    device: torch.device,
    *,
    cpu_offload: bool = False,
    setting: str = "policy.model",
) -> None:
    loading.allocate(model, device, cpu_offload=cpu_offload)
    for t in causal.tensors(model).values():
        if t.ndim == 1:  # a norm
            fsdp.local(t).fill_(1.0)
        else:
            fsdp.local(t).normal_(std=0.02)


def make_batch(load: Load, device: torch.device) -> Packed:
    """Return a micro-batch, as the plan has it."""
    batch = pack(trajectories(load), device)
    batch.advantages = torch.ones(len(batch.inputs), device=device)
    return batch


def count_pairs(batch: Packed) -> int:
    """Return how many keys the rows of a batch see, all together."""
    return int((batch.positions + 1).sum())


# --------------------------------------------------------------------------------------------------
# optimizer steps


@dataclass(frozen=True, kw_only=True)
class Step:
    """An optimizer step to measure, or to plan."""

    section: str
    prefix: str = ""  # Of the names of its rows.
    model: str  # Name of its folder.
    policy: PolicyConfig
    load: Load
    per_layer: bool = False  # The figures are of a layer.


def all_steps(sizes: Sizes, dtype: Dtype) -> list[Step]:
    """Return the steps of the sections `step-*` and `layer-*`."""
    steps = []
    for model in sizes.models:
        policy = PolicyConfig(dtype=dtype, activation_checkpointing="off")
        steps.append(Step(section=f"step-{model}", model=model, policy=policy, load=sizes.load))
    for kernels in ("torch", "liger"):
        for checkpointing in ("off", "selective", "full"):
            steps.append(_layer_step(sizes, dtype, kernels, checkpointing))
    steps.append(_layer_step(sizes, dtype, "compile", "off"))
    return steps


def _layer_step(sizes: Sizes, dtype: Dtype, kernels: Any, checkpointing: Any) -> Step:
    return Step(
        section=f"layer-{kernels}",
        prefix=f"checkpointing {checkpointing}: ",
        model="layers",
        policy=PolicyConfig(dtype=dtype, kernels=kernels, activation_checkpointing=checkpointing),
        load=dataclasses.replace(sizes.load, num_micro=1),
        per_layer=True,
    )


def measure_step(bench: Bench, step: Step) -> None:
    """Make a step, several times, and add its rows."""
    with random_weights():
        policy = Policy(step.policy, bench.folder / step.model, bench.mesh)
    loss = losses.policy(AlgoConfig(), step.load.sequence)
    minibatch = [make_batch(step.load, bench.device)] * step.load.num_micro
    seconds = defaultdict(list)
    for i in range(NUM_WARMUP + bench.sizes.repeats):
        policy.update(minibatch, loss, lr=1e-6)
        memory = policy.timer.take_memory()
        for phase, value in policy.timer.take().items():
            if i >= NUM_WARMUP:
                seconds[phase].append(value)
    medians = {phase: statistics.median(values) for phase, values in seconds.items()}
    allocated = [gib for name, gib in memory.items() if name.endswith("_allocated")]
    add_step(bench, step, medians, max(allocated, default=None))


def add_step(bench: Bench, step: Step, seconds: dict[str, float], peak: float | None) -> None:
    """Add the rows of a step.

    Args:
        bench: the section.
        step: that was measured or planned.
        seconds: by phase.
        peak: GiB of tensors; None: of a CPU.
    """
    config = build.read_config(bench.folder / step.model)
    num_layers = config.num_hidden_layers
    if step.per_layer:
        for phase in ("forward", "backward"):
            bench.add(f"{step.prefix}{phase}", 1e3 * seconds[phase] / num_layers, "ms")
    else:
        for phase in PHASES:
            bench.add(phase, 1e3 * seconds[phase], "ms")
        flops = count_flops(config, step.load)
        percent = 100 / (bench.card.tflops * 1e12)
        without_optimizer = seconds["forward"] + seconds["backward"]
        whole = without_optimizer + seconds["optimizer"]
        bench.add("MFU, forward and backward", percent * flops / without_optimizer, "%")
        bench.add(f"MFU, all, of {num_layers} layers", percent * flops / whole, "%")
    if peak is not None:
        bench.add(f"{step.prefix}peak of tensors", peak, "GiB")


def count_flops(config: PretrainedConfig, load: Load) -> float:
    """Return the multiplications and additions that a step cannot do without."""
    model = read_sizes(config.to_dict())
    batch = make_batch(load, torch.device("cpu"))
    pairs = count_pairs(batch)
    work = StepWork(rows=len(batch.inputs), loss_rows=len(batch.loss_rows), pairs=pairs)
    return load.num_micro * flops(model, work)


def count_layers(config: PretrainedConfig, load: Load, free_bytes: float) -> int:
    """Return how many of a model's layers can be trained on a device of so much memory."""
    model = read_sizes(config.to_dict())
    # Of a parameter: float32 weight, gradient and AdamW's moments. The root is gathered, too, and
    # its gradient is there in bfloat16 and twice in float32.
    root = sum(m.numel for m in model.root) * (16 + 2 + 2 + 4 + 4)
    # A layer keeps about 26 numbers of the hidden size for a row.
    of_layer = max(sum(m.numel for m in layer.matrices) for layer in model.layers)
    layer = of_layer * 16 + load.tokens * model.hidden * 2 * 26
    rest = 8 * GIB  # Logits, two gathered layers, what the allocator loses.
    return min(model.num_layers, int((0.95 * free_bytes - root - rest) / layer))


# --------------------------------------------------------------------------------------------------
# RL


def rl_config(bench: Bench, model: str) -> RLConfig:
    """Return the config of an RL run on sums."""
    sizes = bench.sizes
    settings = {
        "output": str(bench.folder / f"run-{model}"),
        "num_steps": 4,
        "tokens_per_rank": sizes.tokens_per_rank,
        "policy": {
            "model": str(bench.folder / model),
            "dtype": bench.dtype,
            "activation_checkpointing": "off",
        },
        "engine": {
            "enforce_eager": bench.enforce_eager,
            "kv_cache_gb": 0.0 if bench.on_gpu else 0.05,
        },
        "data": {
            "train": str(bench.folder / "sums.jsonl"),
            "held_out": 2,
            "max_prompt_tokens": 2 * TASK_TOKENS,
        },
        "rollout": {
            "prompts_per_step": sizes.prompts,
            "samples_per_prompt": sizes.samples,
            "max_tokens": sizes.answer,
        },
        "eval": {"every": 0},
    }
    return fill_config(RLConfig, settings)
