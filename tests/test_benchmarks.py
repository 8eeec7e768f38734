"""Every benchmark, started with its smallest load: the figures that it prints exist and are finite.

Processes that they start are forks instead, which saves ten seconds of imports each.
"""

import itertools
import json
import math
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import experts, fits, gpu_sections, overlap, vs_trl
from benchmarks.dryrun.pretend import compiler
from minirl.plan.cards import of_device
from programs import ROOT, fork

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="smallest loads of a CPU")
TINY = ["--policy.scratch.hidden-size", 32, "--policy.scratch.num-layers", 1]
TASK = "reasoning_gym:spell_backward?min_word_len=3&max_word_len=3&size=40&seed=1"
# Benchmark -> (ranks; 0: none, flags).
LOADS = {
    "attention": (0, ["--lengths", 3, 5, "--repeats", 1]),
    "images": (0, ["FOLDER/squares", "--num", 2]),
    "supervised": (
        0,
        ["--hidden-size", 32, "--num-layers", 1, "--rows", 2, "--row-tokens", 8]
        + ["--pairs", 2, "--prompt-tokens", 4, "--tokens", 512, "--steps", 2],
    ),
    "refit": (2, ["--policy.model", "scratch", *TINY, "--engine.kv-cache-gb", 0.05]),
    "step": (
        2,
        ["--config", ROOT / "benchmarks" / "step.yaml", "--output", "FOLDER/run", *TINY]
        + ["--num-steps", 3, "--rollout.prompts-per-step", 2, "--rollout.samples-per-prompt", 2]
        + ["--rollout.max-tokens", 4, "--data.train", TASK],
    ),
    "rollout": (
        2,
        ["--hidden-size", 64, "--num-layers", 1, "--repeats", 1, "--share", 0.03]
        + ["--seconds", 0.01, "--small"],
    ),
    "long": (
        0,
        ["--length", 256, "--context", 2, "--engines", "ring", "--num-steps", 2]
        + ["--hidden-size", 32, "--num-layers", 1],
    ),
    "mesh": (
        0,
        ["--ranks", 2, "--meshes", "dp 2", "--length", 64, "--sequences", 2, "--steps", 1]
        + ["--scratch.num-layers", 1],
    ),
    "algorithms": (
        0,
        ["--methods", "grpo", "--seeds", 0, *TINY, "--num-steps", 1, "--sft.num-steps", 1]
        + ["--data.held-out", 2, "--data.train", TASK, "--rollout.prompts-per-step", 2]
        + ["--rollout.samples-per-prompt", 2, "--policy.lr-warmup-steps", 0],
    ),
    "lora": (
        0,
        ["--kinds", "r1", *TINY, "--num-steps", 1, "--sft.num-steps", 1]
        + ["--data.held-out", 2, "--data.train", TASK, "--rollout.prompts-per-step", 2]
        + ["--rollout.samples-per-prompt", 2, "--policy.lr-warmup-steps", 0],
    ),
    "mixture": (
        0,
        ["--experts-over", 2, "--num-steps", 1, "--sft.num-steps", 1, "--data.held-out", 2]
        + ["--data.train", TASK, "--rollout.prompts-per-step", 2]
        + ["--rollout.samples-per-prompt", 2, "--policy.lr-warmup-steps", 0],
    ),
    "grading": (0, ["--answers", 3, "--programs", 2, "--threads", 1, 2]),
    "gpu": (0, ["--small", "--out", "FOLDER/gpu"]),
    "growth": (0, ["--parts", "step", "--sizes", 1, 2, "--worlds", 8]),
    "startup": (1, ["--prompts", 300, "--chats", 300]),
    "pacing": (0, ["--steps", 3]),
    "overlap": (0, ["--sizes", 8, "--what-ifs", 8, "--steps", 2]),
    "overlap_runs": (0, ["--cases", "lockstep-1+1", "--sleep", 0.01, "--steps", 6]),
    "dump": (0, ["--trajectories", 8, "--tokens", 20, "--steps", 1]),
    # TRL's side needs an environment of its own, which only a network gives.
    "vs_trl": (
        0,
        ["--order", "minirl", "minirl", "--cases", "grpo-natural", "dpo", "--steps", 3]
        + ["--prompts", 2, "--samples", 2, "--rows", 2, "--hidden-size", 32, "--num-layers", 1],
    ),
    "preempt": (0, ["--small", "--folder", "FOLDER/preempt"]),
    "router_replay": (
        1,
        ["--families", "qwen3_moe", "--num-layers", 2, "--experts", 4, "--top-k", 2]
        + ["--prompts", 2, "--samples", 1, "--tokens", 8],
    ),
    "logits": (
        1,
        ["--vocabulary", 512, "--hidden-size", 64, "--num-layers", 1, "--prompts", 2]
        + ["--samples", 1, "--tokens", 8],
    ),
    "dryrun": (0, ["--model", "Qwen3-0.6B", "--tokens", 1100, "--variants", 1]),
}
# Benchmarks that cannot do without a compiler.
COMPILING = ("dryrun",)
# Benchmarks that start processes, which become forks.
STARTING = (
    "long",
    "mesh",
    "algorithms",
    "lora",
    "mixture",
    "gpu",
    "vs_trl",
    "preempt",
    "overlap_runs",
    "dryrun",
)
# Files that are parts of another one.
PARTS = {"gpu_bench", "gpu_plan", "gpu_sections", "outages", "trl_side"}
PARTS |= {"preempt_compare", "preempt_job", "preempt_runs"}
PARTS |= {"growth_law", "growth_load", "growth_refit", "growth_rows", "growth_save", "growth_step"}
# The plan's figure beside a measured one: a pretended device needs a compiler.
PLAN = " #" if compiler() else ""
# Pieces of the output, in which # stands for a number.
SHOWN = {
    "attention": ["2 sequences, 8 tokens", "packed # ms", "padded # ms", "dense # ms # x packed"],
    "images": ["2 rows in"],
    "supervised": [f"{name} # tokens per CPU-second" for name in ("SFT", "DPO", "RM")],
    "refit": ["refit # # # #", "full gather # # # #", "wire torch."],
    "step": ["backward # CPU-s # %", "all # CPU-s 100.00 %", "backward: # % refit: # %"],
    "rollout": ["async #, at most", "idle time #, at most", "at least 0.95", "host #, at most 6.0"],
    "long": ["2 ring # # # # #"],
    "mesh": ["dp 2 # # # fsdp # (#)"],
    "algorithms": ["grpo # # # # #"],
    "lora": ["r1 # to # # # # (#%) #"],
    "mixture": ["2 # to # # # #"],
    "grading": [
        "| answers, math_verify | # | # | # |",
        "| answers, reasoning_gym | # | # | # |",
        "| programs, sandbox.run | | # | # |",
        "| programs, sandbox.passes | | # | # |",
    ],
    "gpu": [
        "device copy on the device, read and written # GB/s",
        f"step-tiny forward #{PLAN} ms step-tiny backward #{PLAN} ms",
        f"step-tiny optimizer #{PLAN} ms",
        f"step-tiny MFU, all, of 2 layers #{PLAN} %",
        f"attention packed: forward #{PLAN} ms",
        f"attention packed: backward #{PLAN} ms",
        f"head tiny: forward and backward #{PLAN} ms",
        f"layer-torch checkpointing full: backward #{PLAN} ms",
        "layer-liger needs a GPU",
        "weights refit # ms weights refit # GB/s",
        f"grpo-tiny forward #{PLAN} ms",
        "grpo-tiny rollout # ms",
    ],
    "growth": [
        f"| {law} | 8 | 1, 2 | #, # | #, # | |"
        for law in ("pacing", "exchange", "packing", "advantages", "dealing tickets", "threshold")
    ],
    "startup": [
        "300 prompts, ready: # s, # CPU-s a rank, # MB",
        "300 chats, first step encoded: # s, # CPU-s a rank, # MB",
    ],
    "pacing": ["pace # #% # # #", "no limit # #% # # #"],
    "overlap": [
        "| 8, Qwen3-4B, 512 | # | # (#) | # (#) | # | # (#) | # | # (#) | # | # (#) |",
        "| engines fail twice an hour for 5 minutes | | # (#) | # (#) |",
        "| generators are H20 | | # (#) | # (#) | |",
    ],
    "overlap_runs": ["16 sequences: # ms a step", "| lockstep-1+1 | # | # |"],
    "dump": [f"{name} # s, # CPU-s, # MB, # bytes a token" for name in ("lines", "tables")],
    "vs_trl": ["| grpo-natural | # | | | | |", "| dpo | # | | | | |"],
    "preempt": [
        "SIGUSR1 to a rank code 0",
        "SIGKILL to torchrun code -9",
        "| sft | 2 | 2 | -9, 0 | # | nothing |",
    ],
    "router_replay": [
        "| qwen3_moe | off | | # | # | # |",
        "| qwen3_moe | on | #% | # | # | # |",
    ],
    "logits": ["| bfloat16 | # | # | # | # | # |", "| float32 | # | # | # | # | # |"],
    "dryrun": ["as it was: whole gradients", "| # | # | #% | # | # | # | 2 |"],
}


def test_every_benchmark_is_started():
    files = {path.stem for path in (ROOT / "benchmarks").glob("*.py")}
    assert files - PARTS - {"fits", "experts"} | {"dryrun"} == set(LOADS) == set(SHOWN)


def test_what_fits_are_the_tables_of_the_page():
    """All of `fits`, which has no smaller load."""
    page = (ROOT / "minirl" / "plan" / "README.md").read_text()
    printed = re.findall(r"^\| model \| .*\n(?:\|.*\n)+", page, re.MULTILINE)
    found = [fits.table(), fits.table_of_adapters()]
    assert [text.strip() for text in printed] == found, "put in what benchmarks/fits.py prints"


def test_what_experts_cost_is_the_table_of_the_page():
    """All of `experts`, which has no smaller load."""
    page = (ROOT / "minirl" / "parallel" / "README.md").read_text()
    (printed,) = re.findall(r"^\| model \| nodes \|.*\n(?:\|.*\n)+", page, re.MULTILINE)
    assert printed == experts.table(), "put in what `python -m benchmarks.experts` prints"


def test_simulated_steps_are_those_of_the_page():
    """Of the smallest size; the others take a minute."""
    page = (ROOT / "benchmarks" / "README.md").read_text()
    begin = "| 8, Qwen3-4B"
    (printed,) = re.findall(rf"^{re.escape(begin)}.*$", page, re.MULTILINE)
    found = overlap.table((8,)).splitlines()[-1]
    assert found.startswith(begin)
    numbers = [[float(n) for n in re.findall(r"(\d+)", row)] for row in (printed, found)]
    assert numbers[0] == pytest.approx(numbers[1], rel=0.03), "put in what overlap.py prints"


@pytest.fixture
def forks(tmp_path, monkeypatch):
    """`subprocess.run` of a Python program or of torchrun runs the program in forks."""
    numbers = itertools.count()

    def run(command, **kwargs):
        num_ranks = 0
        program = command[1:]
        if Path(command[0]).name == "torchrun":
            num_ranks = int(command[command.index("--nproc-per-node") + 1])
            program = command[command.index("--nproc-per-node") + 2 :]
        if program[0] == "-m":
            module, *flags = program[1:]
        else:
            module, flags = f"benchmarks.{Path(program[0]).stem}", program[1:]
        log = tmp_path / f"fork{next(numbers)}"
        seconds, text = kwargs.get("timeout") or 120, kwargs.get("input") or ""
        ended = fork(module, flags, log, seconds, num_ranks, text)
        if file := kwargs.get("stdout"):
            file.write(ended.out + ended.err)
        return subprocess.CompletedProcess(command, ended.code, ended.out, ended.err)

    monkeypatch.setattr(subprocess, "run", run)


@pytest.mark.parametrize("name", LOADS)
def test_the_smallest_load_prints_finite_figures(name, tmp_path, forks, monkeypatch, capsys):
    if name in COMPILING and not compiler():
        pytest.skip("a dry run needs g++, which is not installed")
    num_ranks, flags = LOADS[name]
    flags = [str(flag).replace("FOLDER", str(tmp_path)) for flag in flags]
    if name in STARTING:
        path = ROOT / "benchmarks" / f"{name}.py"
        if name == "dryrun":
            path = ROOT / "benchmarks" / name / "__main__.py"
        monkeypatch.setattr(sys, "argv", [str(path), *flags])
        runpy.run_path(str(path), run_name="__main__")
        out = capsys.readouterr().out
    else:
        ended = fork(f"benchmarks.{name}", flags, tmp_path / "log", world=num_ranks)
        assert ended.code == 0, ended.err
        out = ended.out
    words = " ".join(out.split())
    for piece in SHOWN[name]:
        pattern = r"(-?[\d.,]+|nan|-?inf)".join(re.escape(part) for part in piece.split("#"))
        match = re.search(pattern, words)
        assert match, f"{piece!r} is not in\n{out}"
        assert all(math.isfinite(float(n.strip(",").replace(",", ""))) for n in match.groups())


def test_a_profile_says_what_a_step_spends_its_time_in(forks, monkeypatch, capsys):
    flags = ["--profile", "--cases", "sft-packed", "--steps", "4", "--rows", "2"]
    monkeypatch.setattr(sys, "argv", ["vs_trl", *flags, "--hidden-size", "32", "--num-layers", "1"])
    runpy.run_path(str(ROOT / "benchmarks" / "vs_trl.py"), run_name="__main__")
    products = r"\| sft-packed \| aten::(add)?mm \| [1-9]\d* \| \d+\.\d% \|"
    assert re.search(products, capsys.readouterr().out)


def test_the_comparison_reads_what_both_sides_print():
    assert vs_trl.parse_seconds("{'loss': 1}\n[9.0, 8.0, 2.0, 4.0]\n", 4) == [2.0, 4.0]
    seconds = {"minirl": [1.0, 2.0, 3.0], "trl": [3.0, 5.0, 100.0]}
    assert vs_trl.table_row("dpo", seconds) == "| dpo | 2.00 | 5.00 | 2.50 |  |  |"
    assert vs_trl.as_trl({"prompt": "ab"}) == {"prompt": "<|user|>ab<|end|><|assistant|>"}
    load = vs_trl.Load(prompts=8, samples=16)
    arguments = vs_trl.trl_arguments("grpo-forced", load, by_vllm=True)
    assert arguments["use_vllm"]
    names = ("per_device_train_batch_size", "gradient_accumulation_steps")
    assert math.prod(arguments[name] for name in names) == 8 * 16


def test_the_gpu_benchmark_takes_the_card_that_it_runs_on(tmp_path, monkeypatch):
    """Unless it is asked for another; its section `plan`, which sees no device, takes the same."""
    h100 = SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=85_017_493_504)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: h100)

    def card_of(kind, card=""):
        args = gpu_sections.Arguments(section=kind, folder=tmp_path, json=tmp_path, card=card)
        return gpu_sections.find_card(args, kind)

    assert (card_of("device").name, card_of("device").bandwidth_gb) == ("h100", 3350)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert card_of("plan") == of_device(h100.name, h100.total_memory)
    assert card_of("device").name == "h200"
    assert card_of("device", "l40s").name == card_of("plan").name == "l40s"


def test_sections_of_the_gpu_benchmark_fail_alone(tmp_path, monkeypatch, capsys):
    """A crash, a hang and the end of the time are lines of the table beside what was measured."""

    def run(command, *, stdout, timeout, **kwargs):
        section, folder, rows = (
            command[command.index(flag) + 1] for flag in ("--section", "--folder", "--json")
        )
        (Path(folder) / "layers").mkdir(exist_ok=True)
        row = {"section": section, "what": "figure", "value": 1.5, "unit": "ms"}
        Path(rows).write_text(json.dumps(row) + "\n")
        if section == "head":
            raise subprocess.TimeoutExpired(command, timeout)
        if section == "attention":
            stdout.write("Traceback:\ntorch.OutOfMemoryError: CUDA out of memory\n[rank0] warns\n")
            return subprocess.CompletedProcess(command, 1)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run)
    path = ROOT / "benchmarks" / "gpu.py"
    flags = ["--small", "--sections", "attention", "head", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [str(path), *flags])
    gpu = runpy.run_path(str(path), run_name="__main__")
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[2:] == [
        "device figure 1.500 ms",
        "attention figure 1.500 ms",
        "attention failed: torch.OutOfMemoryError: CUDA out of memory",
        "head figure 1.500 ms",
        "head not finished in 240 s",
        "plan figure 1.500 ms",
    ]
    assert len(json.loads((tmp_path / "gpu.json").read_text())["rows"]) == 6

    late = gpu["Sections"](gpu["Arguments"](minutes=0.1, out=str(tmp_path)), tmp_path)
    assert late.run("head", 60)[0]["unit"] == "not run: out of time"
