"""Memory of long-context training: minirl.sft on rows of `length` tokens, each cut over more and
more ranks.

    python benchmarks/long.py --length 32768 --context 1 2 4

Runs the program itself under torchrun with as many ranks as a row is cut into, on plain text made
for it (a fixed phrase at random places among random letters, so that the loss must fall where
attention reaches back). Prints for each the loss of the first and last step, trained tokens per
second, and the peak memory of a rank, with what a process has before it makes a model.
"""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro


@dataclass(kw_only=True)
class Load:
    length: int = 32768
    context: tuple[int, ...] = (1, 2, 4)
    engines: tuple[str, ...] = ("all_gather", "ring")
    num_steps: int = 2
    hidden_size: int = 128
    num_layers: int = 2
    dtype: str = "float32"
    activation_checkpointing: bool = False


def write_rows(path: Path, length: int, num_rows: int) -> None:
    """Texts of `length` characters, which are as many tokens for the character tokenizer of a
    scratch model.
    """
    rng = np.random.default_rng(0)
    with path.open("w") as file:
        for _ in range(num_rows):
            letters = rng.integers(97, 123, length).astype(np.uint8)
            phrase = rng.integers(97, 123, 64).astype(np.uint8)
            for start in rng.integers(0, length - 64, length // 256):
                letters[start : start + 64] = phrase
            file.write(json.dumps({"text": letters.tobytes().decode()}) + "\n")


def main(load: Load) -> None:
    print(
        f"one row of {load.length} tokens a step, {load.num_layers} layers of {load.hidden_size}, {load.dtype}{', activation checkpointing' * load.activation_checkpointing}"
    )
    print(f"{'ranks':>5} {'engine':<11} {'loss':>15} {'tokens/s':>9} {'peak MiB of each rank':<30}")
    for size in load.context:
        for engine in load.engines if size > 1 else load.engines[:1]:
            with tempfile.TemporaryDirectory() as folder:
                write_rows(Path(folder) / "rows.jsonl", load.length, 3)
                flags = {
                    "output": f"{folder}/run",
                    "num-steps": load.num_steps,
                    "batch-size": 1,
                    "tokens-per-rank": -(-load.length // size),
                    "parallel.context": size,
                    "data.train": f"{folder}/rows.jsonl",
                    "data.max-tokens": load.length,
                    "data.held-out": 1,
                    "policy.lr": 2e-3,
                    "policy.dtype": load.dtype,
                    "policy.scratch.hidden-size": load.hidden_size,
                    "policy.scratch.num-layers": load.num_layers,
                    "eval.every": 0,
                }
                flags |= {"parallel.context-engine": engine} if size > 1 else {}
                command = [
                    str(Path(sys.executable).with_name("torchrun")),
                    "--standalone",
                    "--nproc-per-node",
                    str(size),
                    "-m",
                    "minirl.sft",
                    *[str(x) for name, value in flags.items() for x in (f"--{name}", value)],
                ]
                command += (
                    ["--policy.activation-checkpointing"] if load.activation_checkpointing else []
                )
                done = subprocess.run(
                    command, env=os.environ, capture_output=True, text=True, check=False
                )
                if done.returncode:
                    sys.exit(done.stderr[-3000:])
                summary = json.loads((Path(folder) / "run" / "summary.json").read_text())
                rows = [
                    json.loads(line)
                    for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
                ]
            losses = [row["loss"] for row in rows if row["phase"] == "train"]
            print(
                f"{size:>5} {engine if size > 1 else '-':<11} {losses[0]:>7.4f} {losses[-1]:>7.4f} {summary['tokens_per_second_by_phase']['trained']:>9.0f} "
                f"{' '.join(f'{m:.0f}' for m in summary['peak_rss_mb_by_rank'])}",
                flush=True,
            )


if __name__ == "__main__":
    main(tyro.cli(Load, description=__doc__))
