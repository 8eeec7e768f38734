"""Memory of long-context training: minirl.sft on long rows, each cut over more and more ranks.

    python benchmarks/long.py --length 32768 --context 1 2 4

Runs the program itself under torchrun with as many ranks as a row is cut into, on plain text made
for it: a fixed phrase at random places among random letters, so that the loss must fall where
attention reaches back. Prints for each number of ranks the loss of the first and last step, trained
tokens per second, and the peak memory of each rank, with what a process has before it makes a
model.
"""

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import tyro

PHRASE = 64  # characters


@dataclass(kw_only=True)
class Load:
    length: int = 32768
    """Tokens of a row."""
    context: tuple[int, ...] = (1, 2, 4)
    """Ranks that a row is cut into, in turn."""
    engines: tuple[str, ...] = ("all_gather", "ring")
    num_steps: int = 2
    hidden_size: int = 128
    num_layers: int = 2
    dtype: str = "float32"
    activation_checkpointing: Literal["off", "selective", "full"] = "off"


def write_rows(path: Path, length: int, num_rows: int) -> None:
    """Write texts of `length` characters, which a scratch model's tokenizer makes single tokens."""
    rng = np.random.default_rng(0)
    with path.open("w") as file:
        for _ in range(num_rows):
            letters = rng.integers(97, 123, length).astype(np.uint8)
            phrase = rng.integers(97, 123, PHRASE).astype(np.uint8)
            for start in rng.integers(0, length - PHRASE, length // 256):
                letters[start : start + PHRASE] = phrase
            file.write(json.dumps({"text": letters.tobytes().decode()}) + "\n")


def train(load: Load, size: int, engine: str, folder: Path) -> tuple[list[float], dict]:
    """Run minirl.sft on `size` ranks; return the loss of each step and the summary."""
    write_rows(folder / "rows.jsonl", load.length, 3)
    settings: dict[str, object] = {
        "output": folder / "run",
        "num-steps": load.num_steps,
        "batch-size": 1,
        "tokens-per-rank": -(-load.length // size),
        "parallel.context": size,
        "data.train": folder / "rows.jsonl",
        "data.max-tokens": load.length,
        "data.held-out": 1,
        "policy.lr": 2e-3,
        "policy.dtype": load.dtype,
        "policy.model": "scratch",
        "policy.scratch.hidden-size": load.hidden_size,
        "policy.scratch.num-layers": load.num_layers,
        "eval.every": 0,
    }
    if size > 1:
        settings["parallel.context-engine"] = engine
    torchrun = [str(Path(sys.executable).with_name("torchrun")), "--standalone"]
    command = [*torchrun, "--nproc-per-node", str(size), "-m", "minirl.sft"]
    for name, value in settings.items():
        command += [f"--{name}", str(value)]
    command += ["--policy.activation-checkpointing", load.activation_checkpointing]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        sys.exit(ended.stderr[-3000:])
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    losses = [row["loss"] for row in rows if row["phase"] == "train"]
    return losses, json.loads((folder / "run" / "summary.json").read_text())


def main(load: Load) -> None:
    how = f"{load.dtype}, activation checkpointing {load.activation_checkpointing}"
    shape = f"{load.num_layers} layers of {load.hidden_size}"
    print(f"one row of {load.length} tokens a step, {shape}, {how}")
    print(f"{'ranks':>5} {'engine':<11} {'loss':>15} {'tokens/s':>9} {'peak MiB of each rank':<30}")
    for size in load.context:
        for engine in load.engines if size > 1 else ("-",):
            with tempfile.TemporaryDirectory() as folder:
                losses, summary = train(load, size, engine, Path(folder))
            tokens_per_second = summary["tokens_per_second_by_phase"]["trained"]
            memory = " ".join(f"{mib:.0f}" for mib in summary["peak_rss_mb_by_rank"])
            figures = f"{losses[0]:>7.4f} {losses[-1]:>7.4f} {tokens_per_second:>9.0f} {memory}"
            print(f"{size:>5} {engine:<11} {figures}", flush=True)


if __name__ == "__main__":
    main(tyro.cli(Load, description=__doc__))
