"""Held-out accuracy before and after RL, and seconds, of every method's recipe, over seeds.

    python benchmarks/algorithms.py                        # all methods, seeds 0 1 2, 2 ranks
    python benchmarks/algorithms.py --methods gspo dapo --seeds 0 --ranks 1 --num-steps 120

Each run is the program as a user starts it, on the quickstart's model and task. Flags that are not
listed in `--help` go to `minirl.rl`. Prints a line for each method: held-out accuracy of each seed
before and after RL, the least gain, and the mean seconds of the RL steps on this machine, warm
start and evaluation aside.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
# Method -> file in configs/.
METHODS = {
    "grpo": "quickstart_rl",
    "rloo": "rloo",
    "dr_grpo": "dr_grpo",
    "gspo": "gspo",
    "cispo": "cispo",
    "dapo": "dapo",
    "reinforce_pp": "reinforce_pp",
    "reinforce_pp_baseline": "reinforce_pp_baseline",
    "ppo": "ppo",
}
NOT_RL = ("start", "sft", "evaluate", "export")  # phases


def run(method: str, seed: int, num_ranks: int, flags: list[str]) -> dict:
    """Return the summary of one run."""
    torchrun = [str(Path(sys.executable).with_name("torchrun")), "--standalone"]
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "run"
        command = [*torchrun, "--nproc-per-node", str(num_ranks), "-m", "minirl.rl"]
        command += ["--config", f"configs/{METHODS[method]}.yaml"]
        command += ["--output", str(output), "--seed", str(seed)]
        command += ["--eval.every", "0", "--checkpoint.every", "0", *flags]
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if ended.returncode:
            sys.exit(f"{' '.join(command)}\n{ended.stderr[-3000:]}")
        return json.loads((output / "summary.json").read_text())


def rl_seconds(summary: dict) -> float:
    """Return the seconds of the RL steps."""
    phases = summary["seconds"].items()
    return sum(seconds for phase, seconds in phases if phase not in NOT_RL)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--ranks", type=int, default=2)
    args, flags = parser.parse_known_args()
    print(f"{'method':<24}{'seeds':>6}{'before':>18}{'after':>18}{'gain, least':>13}{'seconds':>9}")
    for method in args.methods:
        summaries = [run(method, seed, args.ranks, flags) for seed in args.seeds]
        before = [summary["accuracy_before_rl"] for summary in summaries]
        after = [summary["accuracy_after_rl"] for summary in summaries]
        gain = min(b - a for a, b in zip(before, after, strict=True))
        seconds = statistics.mean(rl_seconds(summary) for summary in summaries)
        columns = [
            f"{method:<24}{len(summaries):>6}",
            f"{'  '.join(f'{value:.2f}' for value in before):>18}",
            f"{'  '.join(f'{value:.2f}' for value in after):>18}",
            f"{gain:>13.2f}{seconds:>9.0f}",
        ]
        print("".join(columns), flush=True)


if __name__ == "__main__":
    main()
