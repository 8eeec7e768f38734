"""A run with router replay and partial rollouts, and what resumes from one of its checkpoints."""

import json
import shutil

import pytest
import torch

import tiny
from harness import ranks
from test_critic import metrics_of, run
from test_lora_program import to_flags

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="bitwise repeatable on CPU only")

# Every third prompt has five turns of 12 tokens, the others one and a second one of 2, behind which
# a step ends: the long ones continue over several steps.
USER = """
from minirl.envs import Env, Result

class Talk(Env):
    def reset(self, row):
        self.is_long = int(row["answer"]) % 3 == 0
        return row["prompt"]

    def step(self, state):
        return Result(
            observation="go on",
            reward=sum(map(ord, state.answer)) % 7 / 7,
            done=state.turn == (4 if self.is_long else 1),
            sampling={"max_tokens": 12 if self.is_long else 2},
        )
"""


def flags_of(folder):
    """Return the flags of a run of 4 steps on 2 ranks, saved after each other one."""
    tiny.make(folder / "model", "qwen3_moe", hidden_size=64)
    rows = [json.dumps({"prompt": f"say {n}", "answer": str(n)}) + "\n" for n in range(24)]
    (folder / "rows.jsonl").write_text("".join(rows))
    (folder / "talk.py").write_text(USER)
    settings = {
        "output": folder / "run",
        "policy.model": folder / "model",
        "policy.dtype": "float32",
        "policy.lr": 1e-2,  # Routes at later weights are others.
        "algo.router-replay": True,
        "env.name": f"{folder}/talk.py:Talk",
        "env.max-turns": 5,
        "data.train": folder / "rows.jsonl",
        "data.held-out": 2,
        "data.max-prompt-tokens": 24,
        "engine.max-model-len": 128,
        "engine.kv-cache-gb": 0.05,
        "rollout.ahead": 8,
        "rollout.max-tokens": 12,
        "rollout.prompts-per-step": 4,
        "rollout.samples-per-prompt": 2,
        "tokens-per-rank": 128,
        "num-steps": 4,
        "eval.every": 0,
        "checkpoint.every": 2,
    }
    return to_flags(settings)


def test_two_runs_resumed_from_one_checkpoint_are_the_same_run(tmp_path):
    output = tmp_path / "run"
    ranks(2, run, flags_of(tmp_path))
    rows = [row for row in metrics_of(output) if row["phase"] == "rl"]
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    # What continues has routes of older weights, which the trainer would not choose.
    assert all(row["router_replayed"] == 1.0 for row in rows)
    assert rows[2]["staleness"] > 0
    assert rows[2]["router_changed"] > 0.1

    progress = json.loads((output / "checkpoints/step-2/progress.json").read_text())["progress"]
    assert len(progress["unfinished_tickets"]) == 8 and progress["unfinished_tokens"] > 0
    resumed = [tmp_path / "first", tmp_path / "second"]
    for copy in resumed:
        shutil.copytree(output, copy)
        shutil.rmtree(copy / "checkpoints" / "step-4")
        shutil.rmtree(copy / "model")
        ranks(2, run, ["--config", output / "config.yaml", "--output", copy, "--resume"])
    first, second = (metrics_of(copy) for copy in resumed)
    assert first == second
    assert [row["staleness"] for row in first if row.get("step") == 2] == [0]
    model, again = (copy / "model" / "model.safetensors" for copy in resumed)
    assert model.read_bytes() == again.read_bytes()
