"""Three optimizer steps of small models on this device, and by the same program on the CPU.

Losses, gradient norms and log-probs of families and settings are the same. The program starts
itself twice, with --side, once without a device.
"""

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from benchmarks.dryrun.jobs import trajectories
from benchmarks.gpu_stages import lib
from benchmarks.gpu_stages.lib import SMALL, check
from minirl.algo import losses
from minirl.batch.packing import pack
from minirl.config.parse import fill_config
from minirl.config.policy import PolicyConfig
from minirl.parallel.machines import join_world
from minirl.parallel.mesh import Mesh
from minirl.plan.costs import Load
from minirl.train.policy import Policy

FAMILIES = ("qwen3", "gemma2", "gemma3_text", "qwen3_moe", "gpt_oss", "qwen3_5_text", "qwen2")
SETTINGS: dict[str, dict[str, Any]] = {  # Of `policy`, with qwen3.
    "muon": {"optimizer": "muon"},
    "8bit": {"optimizer_state": "8bit"},
    "offload": {"optimizer_state": "offload"},
    "cpu_offload": {"cpu_offload": True},
    "selective": {"activation_checkpointing": "selective"},
    "full": {"activation_checkpointing": "full"},
    "lora": {"lora": {"rank": 4}},
    "bf16": {"dtype": "bfloat16"},
}
SMALL_CASES = ("qwen3", "qwen3_moe", "cpu_offload", "lora")
LIMIT = 2e-3
ROUNDED = {"bf16": 0.05, "8bit": 0.05, "muon": 0.05}  # Limits of what rounds by itself.
NUM_STEPS = 3


@dataclass(kw_only=True)
class Arguments:
    side: Path | None = None
    """Train here, and write the figures to this file."""
    models: Path | None = None
    """Of --side: has a folder for each family."""
    cases: tuple[str, ...] = SMALL_CASES if SMALL else (*FAMILIES, *SETTINGS)


def family_of(case: str) -> str:
    return case if case in FAMILIES else "qwen3"


def train(case: str, models: Path, mesh: Mesh) -> list[list[float]]:
    """Return the figures of each step."""
    cfg = fill_config(PolicyConfig, {"dtype": "float32"} | SETTINGS.get(case, {}))
    policy = Policy(cfg, models / family_of(case), mesh)
    load = Load(tokens=160, num_micro=1, sequence=48, prompt=16, samples=3)
    rows = []
    for _ in range(NUM_STEPS):
        batch = pack(trajectories(load), mesh.device, layout=policy.layout)
        policy.annotate([[batch]], "old_logprobs")
        metrics = policy.update([batch], losses.sft(), lr=1e-3)
        assert batch.old_logprobs is not None
        logprobs = batch.old_logprobs.double()
        figures = [metrics["loss"], metrics["grad_norm"], float(logprobs.mean())]
        rows.append([*figures, float(logprobs[0])])
        policy.sleeper.sleep()
        policy.sleeper.wake_parameters()
    return rows


def run_side(args: Arguments) -> None:
    """Train all cases in this process, and write the figures of those that do not fail."""
    assert args.side and args.models
    mesh = join_world()
    results: dict[str, list[list[float]]] = {}
    for case in args.cases:
        with lib.part(case):
            results[case] = train(case, args.models, mesh)
        args.side.write_text(json.dumps(results))
    lib.leave()


def compare(case: str, device: list[list[float]], cpu: list[list[float]]) -> None:
    worst = lib.largest_difference(device, cpu)
    has_learned = device[-1][0] < device[0][0]
    shown = [round(row[0], 4) for row in device]
    check(
        f"{case}: {NUM_STEPS} steps on device and CPU",
        worst < ROUNDED.get(case, LIMIT) and has_learned,
        f"worst relative difference {worst:.2g}; losses {shown}",
    )


def main(args: Arguments) -> None:
    if args.side:
        run_side(args)
    sys.path.insert(0, str(Path.cwd() / "tests"))
    import tiny

    with tempfile.TemporaryDirectory() as folder:
        models = Path(folder)
        for family in {family_of(case) for case in args.cases}:
            tiny.make(models / family, family)
        command = [sys.executable, "-m", "benchmarks.gpu_stages.s1_oracle", "--models", folder]
        command += ["--cases", *args.cases, "--side"]
        sides = []
        for where, hidden in (("device", {}), ("cpu", {"CUDA_VISIBLE_DEVICES": ""})):
            environment = lib.side_environment(STAGE_JSON="", **hidden)
            file = models / f"{where}.json"
            sides.append(subprocess.Popen([*command, str(file)], env=environment))
        for process in sides:
            process.wait()
        device = lib.read_results(models / "device.json")
        cpu = lib.read_results(models / "cpu.json")
    for case in args.cases:
        if case in device and case in cpu:
            compare(case, device[case], cpu[case])
        else:
            failed = [side for side, of in (("device", device), ("CPU", cpu)) if case not in of]
            check(f"{case}: {NUM_STEPS} steps on device and CPU", False, f"failed: {failed}")
    lib.leave()


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
