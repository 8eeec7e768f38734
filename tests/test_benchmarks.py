"""Every benchmark, started with its smallest load: the figures that it prints exist and are finite.

Those that call torchrun get their ranks as forks instead, which saves ten seconds of imports each.
"""

import math
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from programs import ROOT, fork

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="smallest loads of a CPU")
TINY = ["--policy.scratch.hidden-size", 32, "--policy.scratch.num-layers", 1]
TASK = "reasoning_gym:spell_backward?min_word_len=3&max_word_len=3&size=40&seed=1"
# Benchmark -> (ranks; 0: none, flags). `long`, `mesh` and `algorithms` start ranks themselves.
LOADS = {
    "attention": (0, ["--lengths", 3, 5, "--repeats", 1]),
    "images": (0, ["FOLDER/squares", "--num", 2]),
    "supervised": (
        0,
        ["--hidden-size", 32, "--num-layers", 1, "--rows", 2, "--row-tokens", 8]
        + ["--pairs", 2, "--prompt-tokens", 4, "--tokens", 512, "--steps", 2],
    ),
    "refit": (2, [*TINY, "--engine.kv-cache-gb", 0.05]),
    "step": (
        2,
        ["--config", ROOT / "benchmarks" / "step.yaml", "--output", "FOLDER/run", *TINY]
        + ["--num-steps", 3, "--rollout.prompts-per-step", 2, "--rollout.samples-per-prompt", 2]
        + ["--rollout.max-tokens", 4, "--data.train", TASK],
    ),
    "rollout": (
        2,
        ["--hidden-size", 64, "--num-layers", 1, "--repeats", 1, "--share", 0.03]
        + ["--seconds", 0.01],
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
}
# Pieces of the output, in which # stands for a number.
SHOWN = {
    "attention": ["2 sequences, 8 tokens", "packed # ms", "padded # ms", "dense # ms # x packed"],
    "images": ["2 rows in"],
    "supervised": [f"{name} # tokens per CPU-second" for name in ("SFT", "DPO", "RM")],
    "refit": ["all_to_all # # # #", "all_gather # # # #", "full gather # # # #", "wire torch."],
    "step": ["backward # CPU-s # %", "all # CPU-s 100.00 %", "backward: # % refit: # %"],
    "rollout": ["async #, at most", "idle time #, at most", "CPU time #, at least 0.95"],
    "long": ["2 ring # # # # #"],
    "mesh": ["dp 2 # # # fsdp # (#)"],
    "algorithms": ["grpo # # # # #"],
}


def test_every_benchmark_is_started():
    files = {path.stem for path in (ROOT / "benchmarks").glob("*.py")}
    assert files == set(LOADS) == set(SHOWN)


@pytest.fixture
def forks(tmp_path, monkeypatch):
    """`subprocess.run` of a torchrun command runs the program in forks."""

    def run(command, **kwargs):
        assert Path(command[0]).name == "torchrun"
        num_ranks = int(command[command.index("--nproc-per-node") + 1])
        program = command[command.index("--nproc-per-node") + 2 :]
        if program[0] == "-m":
            module, *flags = program[1:]
        else:
            module, flags = f"benchmarks.{Path(program[0]).stem}", program[1:]
        ended = fork(module, flags, tmp_path / "ranks", world=num_ranks)
        return subprocess.CompletedProcess(command, ended.code, ended.out, ended.err)

    monkeypatch.setattr(subprocess, "run", run)


@pytest.mark.parametrize("name", LOADS)
def test_the_smallest_load_prints_finite_figures(name, tmp_path, forks, monkeypatch, capsys):
    num_ranks, flags = LOADS[name]
    flags = [str(flag).replace("FOLDER", str(tmp_path)) for flag in flags]
    if name in ("long", "mesh", "algorithms"):
        path = ROOT / "benchmarks" / f"{name}.py"
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
