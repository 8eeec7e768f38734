"""What rollout.dump costs a rank: seconds of a step and bytes on the disk.

    python benchmarks/dump.py --trajectories 256 --tokens 2000

One process, no engine and no model: random trajectories, packed as a step packs them, go through
`minirl.run.dump.Dump`. `lines` is what the rank has sampled (JSON, all that a replay needs),
`tables` what training made of each token, and the index. Without rollout.dump both are 0.
"""

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import tyro

from minirl.base.log import Timer
from minirl.batch.packing import pack
from minirl.config.rl import RLConfig
from minirl.config.shared import RolloutConfig
from minirl.model.scratch import make_tokenizer
from minirl.parallel.machines import join_world
from minirl.run.dump import Dump
from minirl.types.packed import Trajectory


@dataclass(kw_only=True)
class Options:
    """What a rank has in a step."""

    trajectories: int = 256  # Answers to prompts, eight to each.
    tokens: int = 2000  # Of a prompt with its answer.
    steps: int = 3


def sample(group: int, episode: int, num_tokens: int, rng: np.random.Generator) -> Trajectory:
    """Return a random answer to a prompt of a tenth of the tokens, which siblings share."""
    num_prompt = num_tokens // 10
    tokens = rng.integers(0, 150_000, num_tokens).astype(np.int32)
    tokens[:num_prompt] = group
    sampled = np.arange(num_tokens) >= num_prompt
    info: dict[str, Any] = {"prompt": "x" * num_prompt, "completion": "x" * num_tokens}
    info |= {"source": None, "stopped": True, "error": "", "score": 1.0, "staleness": 0}
    return Trajectory(
        tokens=tokens,
        sampled=sampled,
        logprobs=np.where(sampled, -rng.random(num_tokens), 0).astype(np.float32),
        turn_rewards=np.zeros(num_tokens, np.float32),
        versions=np.where(sampled, 0, -1).astype(np.int32),
        group=group,
        episode=episode,
        info=info,
    )


def now() -> np.ndarray:
    """Return the time of the clock, and the CPU time of this process."""
    return np.array([time.perf_counter(), time.process_time()])


def main(options: Options) -> None:
    """Print the seconds and bytes of a step."""
    mesh = join_world()
    rng = np.random.default_rng(0)
    tokenizer = make_tokenizer([])
    seconds = {"lines": np.zeros(2), "tables": np.zeros(2)}  # Of the clock, and of the CPU.
    with tempfile.TemporaryDirectory() as folder:
        cfg = RLConfig(output=folder, rollout=RolloutConfig(dump=True))
        policy: Any = SimpleNamespace(mesh=mesh, timer=Timer(mesh.device), num_updates=0)
        dump = Dump(Path(cfg.output), policy, tokenizer)
        for step in range(options.steps):
            trajectories = [
                sample(i // 8, i % 8, options.tokens, rng) for i in range(options.trajectories)
            ]
            micro_batches = [trajectories[i : i + 8] for i in range(0, len(trajectories), 8)]
            batches = [pack(micro, mesh.device) for micro in micro_batches]
            for batch in batches:
                batch.advantages = torch.randn(len(batch.inputs))
                batch.old_logprobs = -torch.rand(len(batch.inputs))
                batch.old_entropy = torch.rand(len(batch.inputs))
            began = now()
            dump.begin(step, trajectories)
            seconds["lines"] += now() - began
            dump.add(micro_batches, batches)
            began = now()
            dump.finish()
            seconds["tables"] += now() - began
        bytes_of = {
            "lines": sum(p.stat().st_size for p in Path(folder).rglob("*.jsonl")),
            "tables": sum(p.stat().st_size for p in Path(folder).rglob("*.np[yz]")),
        }
    num_tokens = options.trajectories * options.tokens
    print(f"{options.trajectories} trajectories of {options.tokens} tokens, a step of a rank")
    for name in seconds:
        mb = bytes_of[name] / options.steps / 1e6
        wall, cpu = (seconds[name] / options.steps).tolist()
        per_token = mb * 1e6 / num_tokens
        print(f"{name} {wall:.3f} s, {cpu:.3f} CPU-s, {mb:.2f} MB, {per_token:.1f} bytes a token")


if __name__ == "__main__":
    main(tyro.cli(Options))
