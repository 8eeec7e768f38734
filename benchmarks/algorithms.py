"""Held-out accuracy before and after RL, and seconds, of every method's recipe on the quickstart's
model and task, over seeds.

    python benchmarks/algorithms.py                                    # all methods, seeds 0 1 2, 2 ranks
    python benchmarks/algorithms.py --methods gspo dapo --seeds 0 --ranks 1 --steps 120

Each run is the program as a user starts it. Seconds are of the RL steps on this machine, warm start
and evaluation aside.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
METHODS = {
    "grpo": "quickstart_rl",
    **{
        name: name
        for name in (
            "rloo",
            "dr_grpo",
            "gspo",
            "cispo",
            "dapo",
            "reinforce_pp",
            "reinforce_pp_baseline",
            "ppo",
        )
    },
}


def run(method: str, seed: int, args: argparse.Namespace, folder: Path) -> dict:
    """summary.json of one run."""
    output = folder / f"{method}-{seed}"
    command = [
        str(Path(sys.executable).with_name("torchrun")),
        "--standalone",
        "--nproc-per-node",
        str(args.ranks),
        "-m",
        "minirl.rl",
        "--config",
        f"configs/{METHODS[method]}.yaml",
        "--output",
        str(output),
        "--seed",
        str(seed),
        "--eval.every",
        "0",
        "--checkpoint.every",
        "0",
        *(["--num-steps", str(args.steps)] if args.steps else []),
    ]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if ended.returncode:
        sys.exit(f"{' '.join(command)}\n{ended.stderr[-3000:]}")
    return json.loads((output / "summary.json").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=0, help="RL steps; 0: as the recipe says")
    args = parser.parse_args()
    print(f"{'method':<24}{'seeds':>6}{'before':>18}{'after':>18}{'gain, least':>13}{'seconds':>9}")
    with tempfile.TemporaryDirectory() as folder:
        for method in args.methods:
            found = [run(method, seed, args, Path(folder)) for seed in args.seeds]
            before, after = (
                [f[f"accuracy_{when}_rl"] for f in found] for when in ("before", "after")
            )
            seconds = [
                sum(
                    v
                    for name, v in f["seconds"].items()
                    if name not in ("start", "sft", "evaluate", "export")
                )
                for f in found
            ]
            gain = min(b - a for a, b in zip(before, after, strict=True))
            shown = ["  ".join(f"{v:.2f}" for v in values) for values in (before, after)]
            print(
                f"{method:<24}{len(found):>6}{shown[0]:>18}{shown[1]:>18}{gain:>13.2f}{statistics.mean(seconds):>9.0f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
