"""The simulation of minirl/plan against runs on CPU ranks whose environments sleep.

    python -m benchmarks.overlap_runs                        # three minutes
    python -m benchmarks.overlap_runs --cases lockstep-1+1 inflight-1+1

Sleep is no work, so that two cores are enough for four ranks. Speeds are measured first: of engines
in a run whose environment does not sleep, and of trainers and meetings in a run in lockstep of as
many ranks. What is then simulated is how they take turns. Prints for each way the seconds of a
step, measured and simulated.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import tyro

from benchmarks.overlap import predict
from minirl.plan.overlap import Case

ENVIRONMENT = """
import asyncio
from minirl.envs import Env, Result

class Sleeps(Env):
    graded = True
    async def reset(self, row):
        return row["prompt"]
    async def step(self, state):
        await asyncio.sleep({seconds})
        return Result(observation="more", done=state.turn == {turns} - 1)
"""
REWARD = """
def vowels(prompt, completion, row):
    return sum(letter in "aeiou" for letter in completion) / 10
"""
TURNS = 6
TOKENS = 4  # Of a turn.
PROMPTS = 4  # Of a step.
SAMPLES = 4
MAX_STALENESS = 1
WARM_UP = 4  # Steps.

CASES: dict[str, tuple[int, Case]] = {  # All ranks, and how they take turns.
    "colocated-2": (2, Case("colocated")),
    "lockstep-1+1": (2, Case("lockstep", 1)),
    "stream-1+1": (2, Case("stream", 1)),
    "inflight-1+1": (2, Case("inflight", 1, MAX_STALENESS)),
    "lockstep-2+1": (3, Case("lockstep", 1)),
    "inflight-2+1": (3, Case("inflight", 1, MAX_STALENESS)),
    "lockstep-2+2": (4, Case("lockstep", 2)),
    "inflight-2+2": (4, Case("inflight", 2, MAX_STALENESS)),
}


class Measured(NamedTuple):
    """Means of a run's steps after the first ones, in seconds."""

    step: float
    trainers: float  # What trainers do themselves: all but waiting, and the refit.
    generators: float  # What generators do besides rollouts: refits, and giving away batches.
    rollout: float

    @classmethod
    def of(cls, folder: Path) -> "Measured":
        """Return what a run's folder says."""
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        steps = [r for r in rows if r["phase"] == "rl" and r["step"] >= WARM_UP]

        def mean(name: str) -> float:
            return sum(row.get(name, 0.0) for row in steps) / len(steps)

        step = mean("time/step")
        rollout = mean("time/rollout")
        is_split = "time/idle_trainers" in steps[0]
        waiting = mean("time/idle_trainers") if is_split else rollout
        return cls(
            step=step,
            trainers=max(0.0, step - waiting - mean("time/refit")),
            generators=max(0.0, step - rollout - mean("time/idle_generators")),
            rollout=rollout,
        )


def measure(num_ranks: int, case: Case, seconds: float, samples: int, num_steps: int) -> Measured:
    """Run it with an environment that sleeps for so many seconds a turn."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "env.py").write_text(ENVIRONMENT.format(seconds=seconds, turns=TURNS))
        (folder / "reward.py").write_text(REWARD)
        rows = [json.dumps({"prompt": f"{a} and {b}"}) for a in "abcdefg" for b in "hijklmn"]
        (folder / "rows.jsonl").write_text("\n".join(rows))
        settings: dict[str, object] = {
            "policy.model": "scratch",
            "policy.dtype": "float32",
            "policy.lr": 0.0,  # Answers stay as long as they are.
            "data.train": folder / "rows.jsonl",
            "data.max-prompt-tokens": 16,
            "data.held-out": 1,
            "env.name": f"{folder}/env.py:Sleeps",
            "env.max-turns": TURNS,
            "reward.function": f"{folder}/reward.py:vowels",
            "rollout.prompts-per-step": PROMPTS,
            "rollout.samples-per-prompt": samples,
            "rollout.max-tokens": TOKENS,
            "rollout.tickets": "pull",
            "engine.kv-cache-gb": 0.02,
            "engine.max-model-len": 128,
            "eval.every": 0,
            "num-steps": num_steps,
            "output": folder / "run",
        }
        if case.generators:
            settings |= {
                "parallel.generators": case.generators,
                "rollout.overlap": case.way,
                "rollout.max-staleness": max(1, case.max_staleness),
            }
        torchrun = [str(Path(sys.executable).with_name("torchrun")), "--standalone"]
        command = [*torchrun, "--nproc-per-node", str(num_ranks), "-m", "minirl.rl"]
        for setting, value in settings.items():
            command += [f"--{setting}", str(value)]
        command += ["--policy.scratch.phrases", " and ", "more"]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        if ended.returncode:
            sys.exit(ended.stderr[-3000:])
        return Measured.of(folder / "run")


def main(
    cases: tuple[str, ...] = tuple(CASES), sleep: float = 0.2, steps: int = 24, runs: int = 1
) -> None:
    """Print the table.

    Args:
        cases: which of them: colocated-2, lockstep-1+1, ...
        sleep: seconds that an environment sleeps in each turn.
        steps: of a run.
        runs: of each case, of which the fastest counts.
    """

    def fastest(
        num_ranks: int, case: Case, seconds: float = sleep, samples: int = SAMPLES
    ) -> Measured:
        found = [measure(num_ranks, case, seconds, samples, steps) for _ in range(runs)]
        return min(found, key=lambda measured: measured.step)

    # Answers that begin together take their turns together, so that an engine's steps have all of
    # them. One engine that never waits, with the sequences of one engine and of one of two:
    tokens = TURNS * TOKENS
    engine_step = {}
    for engines in (1, 2):
        samples = SAMPLES // engines
        rollout = fastest(1, Case("colocated"), 0.0, samples).rollout
        engine_step[engines] = rollout / tokens
        print(f"{PROMPTS * samples} sequences: {1e3 * engine_step[engines]:.2f} ms a step")
    print("| ranks | measured | simulated | |\n|---|---|---|---|")
    in_lockstep: dict[int, Measured] = {}
    for name in cases:
        num_ranks, case = CASES[name]
        found = fastest(num_ranks, case)
        speeds = found
        if case.way == "lockstep":
            in_lockstep[num_ranks] = found
        elif case.generators and num_ranks in in_lockstep:
            speeds = in_lockstep[num_ranks]
        engines = case.generators or num_ranks
        simulated = predict(
            case,
            engines=engines,
            prompts=PROMPTS,
            samples=SAMPLES,
            tokens=tokens,
            step_seconds=engine_step[engines],
            train_seconds=speeds.trainers,
            environment_seconds=TURNS * sleep,
            refit_seconds=speeds.generators if case.generators else 0.0,
        ).seconds
        more = simulated / found.step - 1
        print(f"| {name} | {found.step:.3f} | {simulated:.3f} | {more:+.0%} |", flush=True)


if __name__ == "__main__":
    tyro.cli(main)
