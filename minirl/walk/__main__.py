"""One GRPO step of the real program with real numbers, station by station.

    python -m minirl.walk
    python -m minirl.walk --break loss-scale logprob-temperature stale-engine

Two ranks on the CPU train a model of 0.2M parameters to spell words backward. Each of ten stations
(step.py) prints what goes in, what comes out, and the file and line of the code that does it.
The ninth compares it with the same step in plain PyTorch: one process, one sequence at a time, an
ordinary Hugging Face model. The exit code is 0 only if loss and gradient norm agree.

`--break` breaks rules on purpose and prints the wrong number next to the right one. The program
starts its two ranks itself; under torchrun it just runs. It leaves nothing on the disk.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

BREAKS = ("loss-scale", "logprob-temperature", "stale-engine")


def main() -> None:
    """Parse flags; start two ranks, or make the step on this one."""
    parser = argparse.ArgumentParser(description="One GRPO step with real numbers.")
    parser.add_argument("--break", dest="broken", nargs="+", choices=BREAKS, default=[])
    broken = parser.parse_args().broken
    if "RANK" not in os.environ:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", "2", "-m", "minirl.walk", *sys.argv[1:]]
        with tempfile.TemporaryDirectory() as folder:  # for all that torchrun would leave
            quiet = {"OMP_NUM_THREADS": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TMPDIR": folder}
            sys.exit(subprocess.run(command, env=os.environ | quiet).returncode)

    # Imports of ten seconds, which the process that starts the ranks does not need.
    import torch.distributed as dist

    from minirl.parallel.machines import join_world
    from minirl.walk.step import Walk

    mesh = join_world()
    with tempfile.TemporaryDirectory() as folder:
        equal = Walk(Path(folder), mesh).step(broken)
    if dist.is_initialized():  # some versions of vLLM destroy the default group with the engine
        dist.destroy_process_group()
    sys.exit(not equal)


if __name__ == "__main__":
    main()
