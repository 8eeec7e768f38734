"""The kinds of runs that `preempt.py` interrupts, and their inputs."""

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Kind = Literal[
    "grpo", "ahead", "ppo", "kl", "dapo", "sft", "dpo", "long", "lockstep", "stream", "inflight"
]
REWARD = """def vowels(prompt, completion, row):
    return sum(letter in "aeiou" for letter in completion) / 4 + (len(completion) < 3) / 2
"""

PROMPTS = 4  # Of a step of RL.
MAX_STALENESS = 2
SCRATCH = {"hidden-size": 32, "num-layers": 1, "num-heads": 2, "num-kv-heads": 1, "head-dim": 32}
COMMON: dict[str, object] = {
    "tokens-per-rank": 512,
    "policy.dtype": "float32",
    "policy.lr": 1e-3,
    "policy.model": "scratch",
    **{f"policy.scratch.{name}": size for name, size in SCRATCH.items()},
    "checkpoint.every": 3,
    "data.held-out": 4,
}
RL: dict[str, object] = {
    **COMMON,
    "data.max-prompt-tokens": 12,
    "engine.kv-cache-gb": 0.01,
    "reward.function": "FOLDER/reward.py:vowels",
    "rollout.prompts-per-step": PROMPTS,
    "rollout.samples-per-prompt": 4,
    "rollout.max-tokens": 6,
    "rollout.dump": True,
    "eval.every": 3,
    "debug.collapse-steps": 0,
}
AHEAD = {
    "rollout.ahead": 4,
    "rollout.max-staleness": MAX_STALENESS,
    "rollout.max-tokens": 24,
    "checkpoint.every": 2,
    "eval.every": 0,
}
SPLIT = {**RL, "parallel.generators": 1, "checkpoint.every": 2, "eval.every": 2}
BEST = {"sft.num-steps": 4, "checkpoint.best-metric": "accuracy"}
SUPERVISED = {**COMMON, "data.max-tokens": 32, "batch-size": 8, "eval.every": 4}


@dataclass(frozen=True)
class Run:
    """A kind of run."""

    module: str
    num_steps: int
    settings: dict[str, object]
    rows: str = "rows.jsonl"
    is_bitwise: bool = True  # A resumed run equals the undisturbed one.


RUNS: dict[Kind, Run] = {
    "grpo": Run("minirl.rl", 12, {**RL, **BEST}),
    "ahead": Run("minirl.rl", 12, {**RL, **AHEAD}, is_bitwise=False),
    "ppo": Run(
        "minirl.rl",
        12,
        {**RL, "algo.advantage": "gae", "critic.dtype": "float32", "policy.ema-decay": 0.9}
        | {"critic.warmup-steps": 4},
    ),
    "kl": Run(
        "minirl.rl",
        12,
        {**RL, "algo.kl-coef": 0.01, "algo.kl-target": 0.01, "ref.every": 4}
        | {"policy.optimizer": "muon", "rollout.curriculum-floor": 0.1},
    ),
    "dapo": Run(
        "minirl.rl",
        12,
        {**RL, "rollout.extra-prompts": 4, "rollout.keep-inside": "0.3 0.7"}
        | {"algo.updates-per-step": 2, "reward.normalize": True},
    ),
    "sft": Run("minirl.sft", 40, {**SUPERVISED, "policy.ema-decay": 0.9}),
    "dpo": Run("minirl.dpo", 40, SUPERVISED, rows="pairs.jsonl"),
    "long": Run(
        "minirl.rl",
        200,
        {**RL, "checkpoint.every": 10, "eval.every": 50, "rollout.max-tokens": 4},
    ),
    "lockstep": Run(
        "minirl.rl",
        12,
        {**SPLIT, **BEST, "checkpoint.keep": 1, "rollout.curriculum-floor": 0.1},
    ),
    "stream": Run("minirl.rl", 12, {**SPLIT, "rollout.overlap": "stream"}, is_bitwise=False),
    "inflight": Run(
        "minirl.rl",
        12,
        {**SPLIT, **BEST, "rollout.overlap": "inflight", "rollout.max-staleness": MAX_STALENESS}
        | {"rollout.max-tokens": 24},
        is_bitwise=False,
    ),
}
CHAINS: tuple[Kind, ...] = ("grpo", "ahead", "ppo", "kl", "dapo", "sft", "dpo")
CHAINS += ("lockstep", "stream", "inflight")


def write_inputs(folder: Path) -> None:
    """Write a reward function, and rows and pairs of words."""
    (folder / "reward.py").write_text(REWARD)
    words = ["".join(letters) for letters in itertools.product("abcde", repeat=3)]
    rows = [{"prompt": word, "answer": word[-1], "completion": word[::-1]} for word in words]
    pairs = [{"prompt": word, "chosen": word[::-1], "rejected": word} for word in words]
    pairs = [pair for pair in pairs if pair["chosen"] != pair["rejected"]]
    for name, lines in (("rows", rows), ("pairs", pairs)):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"{name}.jsonl").write_text(text)
