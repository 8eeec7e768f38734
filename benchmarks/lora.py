"""Adapters beside full training: held-out accuracy, seconds, memory, parameters, mismatch.

    python -m benchmarks.lora                                 # the quickstart's task, 2 ranks
    python -m benchmarks.lora --task products --kinds full r16
    python -m benchmarks.lora --kinds r32 --ranks 1 --num-steps 120

Each run is `minirl.rl` as a user starts it. The task `words` begins with the quickstart's model
after its warm start, which is made first, once; `products` with SmolLM2-135M-Instruct
(launch/get_smollm2.sh). Adapters have ten times the learning rate of full training. Flags that are
not listed in `--help` go to `minirl.rl`.

Prints a line for each kind: held-out accuracy before and after; seconds of the RL steps on this
machine; the most memory of a rank; trained parameters, and their share of the model's; and the mean
difference of log-probs between engine and trainer, per token.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from safetensors import safe_open

from minirl.run.metrics import OUTSIDE_STEPS
from minirl.run.results import read_rows

ROOT = Path(__file__).parent.parent
WORDS = "configs/quickstart_rl.yaml"
# What the warm start has made is the model of every kind.
WARM_START_ONLY = ["--num-steps", "1", "--eval.every", "0", "--checkpoint.every", "0"]
FASTER = 10  # The learning rate of adapters, in that of full training.
# By kind: its flags, and whether it trains adapters.
KINDS: dict[str, list[str]] = {
    "full": [],
    "r1": ["--policy.lora.rank", "1"],
    "r8": ["--policy.lora.rank", "8"],
    "r16": ["--policy.lora.rank", "16"],
    "r32": ["--policy.lora.rank", "32"],
    "r32 attention": ["--policy.lora.rank", "32", "--policy.lora.targets", "attention"],
    "r32 nf4": ["--policy.lora.rank", "32", "--policy.lora.quantization", "nf4"],
}
DEFAULT_KINDS = {
    "words": ["full", "r1", "r8", "r32", "r32 attention", "r32 nf4"],
    "products": ["full", "r16"],
}
# Of products, as many answers are sampled in the end as tell kinds apart.
LONGER = ["--num-steps", "40", "--eval.every", "40", "--eval.samples", "16"]
# By task: its config, the learning rate of full training, flags before the user's own.
TASKS: dict[str, tuple[str, float, list[str]]] = {
    "words": (WORDS, 4e-4, []),
    "products": ("configs/smollm2_products.yaml", 3e-5, LONGER),
}


def train(config: str, output: Path, num_ranks: int, flags: list[str]) -> dict:
    """Run `minirl.rl`, and return the summary that it leaves."""
    torchrun = [str(Path(sys.executable).with_name("torchrun")), "--standalone"]
    command = [*torchrun, "--nproc-per-node", str(num_ranks), "-m", "minirl.rl"]
    command += ["--config", config, "--output", str(output), *flags]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if ended.returncode:
        sys.exit(f"{' '.join(command)}\n{ended.stderr[-3000:]}")
    return json.loads((output / "summary.json").read_text())


def count(folder: Path) -> int:
    """Return how many numbers the safetensors files of a folder hold."""
    num = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  # it is no mapping
                num += math.prod(file.get_slice(name).get_shape())
    return num


def measure(task: str, kind: str, model: list[str], num_ranks: int, flags: list[str]) -> dict:
    """Return a line of the table."""
    config, lr, first = TASKS[task]
    adapts = kind != "full"
    own = [*model, *KINDS[kind], "--policy.lr", str(lr * FASTER if adapts else lr)]
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "run"
        own += ["--checkpoint.every", "0"]
        summary = train(config, output, num_ranks, [*first, *flags, *own])
        rows = read_rows(output / "metrics.jsonl")
        num_trained = count(output / ("adapter" if adapts else "model"))
        share = num_trained / count(output / "model")
    accuracy = [row["accuracy"] for row in rows if row["phase"] == "eval"]
    mismatch = [row["mismatch"] for row in rows if row["phase"] == "rl"]
    seconds = summary["seconds"].items()
    return {
        "before": accuracy[0],
        "after": accuracy[-1],
        "seconds": sum(value for phase, value in seconds if phase not in OUTSIDE_STEPS),
        "peak_mib": summary["peak_rss_mb"],
        "trained": num_trained,
        "share": share,
        "mismatch": statistics.mean(mismatch),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", choices=sorted(TASKS), default="words")
    parser.add_argument("--kinds", nargs="+", choices=sorted(KINDS), help="default: by the task")
    parser.add_argument("--ranks", type=int, default=2)
    args, flags = parser.parse_known_args()

    with tempfile.TemporaryDirectory() as folder:
        model = []
        if args.task == "words":
            first = Path(folder) / "first"
            train(WORDS, first, args.ranks, [*flags, *WARM_START_ONLY])
            model = ["--policy.model", str(first / "sft"), "--sft.num-steps", "0"]
        print("kind            accuracy        seconds  MiB a rank     trained            mismatch")
        for kind in args.kinds or DEFAULT_KINDS[args.task]:
            line = measure(args.task, kind, model, args.ranks, flags)
            print(
                f"{kind:14s}  {line['before']:.3f} to {line['after']:.3f}  {line['seconds']:7.1f}  "
                f"{line['peak_mib']:10,.0f}  {line['trained']:11,d} ({line['share']:.2%})  "
                f"{line['mismatch']:.1e}",
                flush=True,
            )


if __name__ == "__main__":
    main()
