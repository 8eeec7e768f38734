"""The moving average of the weights that each supervised program writes, and refits of a policy
whose root is gathered: both look parameters up after a forward without a backward."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file

import tiny
from harness import ranks
from minirl import dpo, rm
from minirl.algo import losses
from minirl.config.parse import parse_flags
from minirl.config.policy import PolicyConfig
from minirl.config.rl import AlgoConfig, RefitConfig
from minirl.config.shared import EngineConfig
from minirl.config.supervised import DPOConfig, RMConfig, SFTConfig
from minirl.engine.engine import RolloutEngine
from minirl.parallel.fsdp import local
from minirl.refit.refit import Refit
from minirl.run import supervised
from minirl.train.policy import Policy
from sharded import whole
from test_gradients import batches_of, trajectories

DECAY = 0.3
NUM_STEPS = 5
PROGRAMS = {
    "sft": (supervised.SupervisedTrainer, SFTConfig),
    "rm": (rm.RewardModelTrainer, RMConfig),
    "dpo": (dpo.DPOTrainer, DPOConfig),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("averages")
    tiny.make(folder / "model", tied=True)
    rows = [
        {"prompt": f"say {n}", "chosen": str(n) * 3, "rejected": "no" * (n % 5 + 1)}
        for n in range(30)
    ]
    (folder / "rm.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "dpo.jsonl").write_text((folder / "rm.jsonl").read_text())
    texts = "".join(json.dumps({"text": f"{row['prompt']}{row['chosen']}"}) + "\n" for row in rows)
    (folder / "sft.jsonl").write_text(texts)
    return folder


def train(mesh, name, given):
    """Return the whole weights after each update; the program writes what it writes.

    Each update is followed by a measurement, also the last one before the export."""
    program, config = PROGRAMS[name]
    after = []
    update = Policy.update

    def recorded(self, minibatch, loss, lr):
        metrics = update(self, minibatch, loss, lr)
        after.append(whole(self.shards()))
        self.measure(minibatch, loss)
        return metrics

    Policy.update = recorded
    program.main(parse_flags(config, [str(x) for x in given]), mesh)
    return after


def formula(weights):
    """The first weights; then each time a part of the way to the next, of `DECAY` in the end."""
    average = weights[0].clone()
    for n, w in enumerate(weights[1:], start=1):
        average += (1 - min(DECAY, (1 + n) / (10 + n))) * (w - average)
    return average


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_exported_average_is_that_of_every_weight(folder, tmp_path, name):
    given = {
        "--output": tmp_path,
        "--policy.model": folder / "model",
        "--policy.dtype": "float32",
        "--policy.lr": 1e-2,
        "--policy.ema-decay": DECAY,
        "--data.train": folder / f"{name}.jsonl",
        "--data.held-out": 6,
        "--data.max-tokens": 48,
        "--tokens-per-rank": 128,
        "--batch-size": 8,
        "--num-steps": NUM_STEPS,
        "--eval.every": 1,
    }
    flags = [x for item in given.items() for x in item]
    after = ranks(2, train, name, flags)[0]
    assert len(after) == NUM_STEPS
    exported = load_file(tmp_path / "model_ema" / "model.safetensors")
    last = load_file(tmp_path / "model" / "model.safetensors")
    assert exported.keys() == last.keys() == after[0].keys()
    assert "model.embed_tokens.weight" in exported and "model.norm.weight" in exported
    assert ("score.weight" in exported) == (name == "rm")
    for weight, value in exported.items():
        expected = formula([w[weight].double() for w in after])
        assert (value - expected).abs().max() < 1e-6, weight
        assert torch.equal(last[weight], after[-1][weight]), weight
        assert (value - last[weight]).abs().max() > 1e-4, weight


# --------------------------------------------------------------------------------------------------
# a forward without a backward


def after_a_forward(mesh, folder):
    policy = Policy(PolicyConfig(dtype="float32"), folder, mesh)
    names = list(policy.shards())
    before = policy.shards()
    micros = [trajectories()[mesh.rank :: mesh.world_size]]
    batches = batches_of(micros, policy)
    policy.annotate([batches], "old_logprobs")
    after = policy.shards()
    assert list(after) == names
    assert all(after[name] is before[name] for name in names)

    # 1. A new optimizer has the shards, too.
    policy.annotate([batches], "old_logprobs")
    policy.forget_optimizer_state()
    known = {p for part in policy.optimizer.parts for g in part.param_groups for p in g["params"]}
    assert known == set(before.values())

    # 2. So has a refit, whose weights are those after the next step.
    policy.annotate([batches], "old_logprobs")
    engine = RolloutEngine(
        EngineConfig(max_model_len=64, max_num_seqs=4, kv_cache_gb=0.02),
        folder,
        mesh,
        dtype="float32",
    )
    refit = Refit(RefitConfig(), policy.shards(), policy.parts(), engine, check=True)
    metrics = policy.update(batches, losses.policy(AlgoConfig(), 20), lr=1e-2)
    assert math.isfinite(metrics["grad_norm"]) and metrics["grad_norm"] > 0
    with engine.awake(refit, policy.sleeper):
        embedding = engine.parameters()["model.embed_tokens.weight"]
        rows = whole(policy.shards())["model.embed_tokens.weight"]
        assert torch.equal(embedding[: len(rows)], rows)
    policy.annotate([batches], "old_logprobs")
    assert local(policy.shards()["model.norm.weight"]).numel() in (64, 128)


@pytest.mark.parametrize("world", [1, 2])
def test_shards_are_the_shards_after_a_forward_without_a_backward(folder, world):
    ranks(world, after_a_forward, folder / "model")
