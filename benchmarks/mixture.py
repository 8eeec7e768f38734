"""A mixture of experts learns the quickstart's task, with and without expert parallelism.

    python -m benchmarks.mixture
    python -m benchmarks.mixture --experts-over 2 --num-steps 120

The model is made from nothing: 5M parameters, 8 experts in each of 3 layers, of which a token
takes 2. It learns from examples first (`configs/quickstart_rl.yaml`), then from reward. Each run is
`minirl.rl` as a user starts it, on 2 ranks, and all begin with the same weights. Flags that are not
listed in `--help` go to `minirl.rl`.

Prints a line for each run: `parallel.experts`; held-out accuracy after the examples and after the
reward; seconds on this machine; the most memory of a rank; and the mean difference of log-probs
between engine and trainer, per token.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path

import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.lora import ROOT, WORDS, train
from minirl.model.scratch import make_tokenizer
from minirl.run.results import read_rows

MAX_LEN = 64  # Tokens of the longest prompt with its answer, and some to spare.


def make_model(folder: Path) -> int:
    """Write a mixture with random weights and the quickstart's tokenizer; return its parameters."""
    quickstart = yaml.safe_load((ROOT / WORDS).read_text())
    tokenizer = make_tokenizer(quickstart["policy"]["scratch"]["phrases"])
    config = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=(len(tokenizer) + 63) // 64 * 64,
        hidden_size=128,
        moe_intermediate_size=512,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_LEN,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())


def measure(model: Path, experts_over: int, num_ranks: int, flags: list[str]) -> str:
    """Return a line of the table."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "run"
        own = ["--policy.model", str(model), "--parallel.experts", str(experts_over)]
        summary = train(WORDS, output, num_ranks, [*own, "--checkpoint.every", "0", *flags])
        rows = read_rows(output / "metrics.jsonl")
    accuracy = [row["accuracy"] for row in rows if row["phase"] == "eval"]
    mismatch = statistics.mean(row["mismatch"] for row in rows if row["phase"] == "rl")
    seconds = sum(summary["seconds"].values())
    return (
        f"{experts_over:16d}  {accuracy[0]:.3f} to {accuracy[-1]:.3f}  {seconds:7.1f}  "
        f"{summary['peak_rss_mb']:10,.0f}  {mismatch:.1e}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--experts-over", type=int, nargs="+", default=[1, 2], help="ranks")
    parser.add_argument("--ranks", type=int, default=2)
    args, flags = parser.parse_known_args()

    with tempfile.TemporaryDirectory() as folder:
        num_parameters = make_model(Path(folder))
        print(json.dumps({"parameters": num_parameters}))
        print("parallel.experts  accuracy        seconds  MiB a rank  mismatch")
        for experts_over in args.experts_over:
            print(measure(Path(folder), experts_over, args.ranks, flags), flush=True)


if __name__ == "__main__":
    main()
