"""Writes a model of Qwen3-0.6B's shape with random weights in bfloat16, and rows with sums.

    python -m benchmarks.gpu_stages.s5_model FOLDER

$GPU_RUN_SIZE names another shape of gpu_bench.CONFIGS.
"""

import json
import os
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from benchmarks.gpu_bench import CONFIGS, TASK
from benchmarks.gpu_stages import lib
from benchmarks.gpu_stages.lib import DEVICE, SMALL, value
from minirl.model import scratch


def write_model(folder: Path) -> None:
    config = CONFIGS["tiny" if SMALL else os.environ.get("GPU_RUN_SIZE", "0.6B")]
    tokenizer = scratch.make_tokenizer([])
    config.eos_token_id = tokenizer.eos_token_id
    config.pad_token_id = tokenizer.pad_token_id
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    value("parameters", sum(p.numel() for p in model.parameters()))


def write_rows(file: Path) -> None:
    lines = []
    for a in range(100, 400):
        row = {"prompt": TASK.format(a, a + 107), "answer": str(2 * a + 107)}
        lines.append(json.dumps(row) + "\n")
    file.write_text("".join(lines))


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    value("writing the model", lib.wall_seconds(lambda: write_model(folder / "model")), "s")
    write_rows(folder / "sums.jsonl")
    lib.leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
