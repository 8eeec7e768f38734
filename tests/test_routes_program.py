"""A run with router replay, resumed from a checkpoint with unfinished episodes: their routes go on
with them."""

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
# a step ends: the long ones go on over several steps, and are saved in the middle of an answer.
USER = """
from minirl.envs.base import Env, Result

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


def saved_episodes(checkpoint):
    """Return the unfinished groups' episodes in a checkpoint, as rollout/saved.py has them."""
    files = checkpoint.glob("rollouts-*.jsonl")
    lines = [line for file in files for line in file.read_text().splitlines()]
    return [episode for line in lines for episode in json.loads(line)["episodes"]]


def check_saved(episodes):
    """Assert that routes go with tokens of ended episodes, of turns and of a request under way."""
    ended = [t for episode in episodes for t in episode.get("trajectories", [])]
    under_way = [episode for episode in episodes if "segments" in episode]
    turns = [segment for episode in under_way for segment in episode["segments"]]
    requests = [episode["request"]["done"] for episode in under_way]
    for saved in (ended, turns, requests):
        assert saved
        for record in saved:
            num_tokens, num_mixtures, num_chosen = record["routes"]["shape"]
            assert num_tokens > 20  # Of the prompt, they would be 9.
            assert (num_mixtures, num_chosen) == (2, 2)
    # Of one that began under older weights than its request, which has read all of it again.
    assert any({0, 1} <= set(segment["versions"]) for segment in turns)


def test_a_resumed_run_replays_the_routes_of_its_checkpoint(tmp_path):
    output, again = tmp_path / "run", tmp_path / "again"
    ranks(2, run, flags_of(tmp_path))
    check_saved(saved_episodes(output / "checkpoints" / "step-2"))

    shutil.copytree(output, again)
    shutil.rmtree(again / "checkpoints" / "step-4")
    shutil.rmtree(again / "model")
    ranks(2, run, ["--config", output / "config.yaml", "--output", again, "--resume"])
    assert metrics_of(again) == metrics_of(output)
    model, resumed = (folder / "model" / "model.safetensors" for folder in (output, again))
    assert resumed.read_bytes() == model.read_bytes()

    # What was trained on after it has routes of older weights, which the trainer would not choose.
    rows = [row for row in metrics_of(again) if row["phase"] == "rl"]
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert all(row["router_replayed"] == 1.0 for row in rows)
    assert rows[2]["staleness"] > 0
    assert rows[2]["router_changed"] > 0.1
