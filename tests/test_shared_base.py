"""A critic on the policy's frozen base: the same numbers as with a base of its own, held once."""

import dataclasses

import pytest
import torch

import tiny
from harness import ranks
from minirl.algo import losses
from minirl.batch.exchange import exchange
from minirl.batch.packing import pack
from minirl.config.policy import LoraConfig, ParallelConfig, PolicyConfig
from minirl.config.rl import AlgoConfig, CriticConfig
from minirl.parallel.fsdp import local, reshard
from minirl.train.policy import Policy
from sharded import whole
from test_critic import turns
from test_families import stay_float64


def own_bytes(model, other=None):
    """Return the bytes of a model's storages that are not another's, each once."""

    def storages(of):
        reshard(of)
        found = [local(p).untyped_storage() for p in of.parameters()]
        return {storage.data_ptr(): storage.nbytes() for storage in found}

    taken = storages(other) if other else {}
    return sum(size for place, size in storages(model).items() if place not in taken)


def two_steps(mesh, folder, share, lora):
    """Train a policy and its critic by turns. Return what both learnt, and the critic's bytes."""
    stay_float64()
    policy = Policy(PolicyConfig(dtype="float64", lora=lora), folder, mesh)
    critic = Policy(
        CriticConfig(dtype="float64", lora=dataclasses.replace(lora, rank=2, modules_to_save=[])),
        folder,
        mesh,
        score=True,
        base=policy if share else None,
    )
    (micros,) = exchange(turns(12)[mesh.rank :: mesh.world_size], mesh, 60)
    batches = [pack(m, mesh.device, layout=critic.layout) for m in micros]
    for _ in range(2):
        critic.annotate([batches], "values")
        policy.annotate([batches], "old_logprobs")
        for batch in batches:
            batch.returns = batch.values + batch.loss_mask
            batch.advantages = batch.loss_mask.double() * 0.5
        critic.update(batches, losses.value(0.2), lr=1e-2)
        policy.update(batches, losses.policy(AlgoConfig(), 20), lr=1e-2)
    policy.annotate([batches], "old_logprobs")
    critic.annotate([batches], "values")
    return {
        "policy": whole({n: p for n, p in policy.model.named_parameters() if p.requires_grad}),
        "critic": whole({n: p for n, p in critic.model.named_parameters() if p.requires_grad}),
        "values": [batch.values for batch in batches],
        "shared": critic.model.shared,
        "bytes": own_bytes(critic.model, policy.model),
        "all_bytes": own_bytes(critic.model),
        "trained_bytes": sum(local(p).nbytes for p in critic.model.parameters() if p.requires_grad),
    }


KINDS = {
    "plain": ({}, None),
    "nf4": ({"quantization": "nf4"}, None),
    "tensor": ({}, ParallelConfig(tensor=2)),
    "head": ({"modules_to_save": ["lm_head.*", "model.norm.*"]}, None),
}


@pytest.mark.parametrize("kind", KINDS)
def test_shared_base_gives_what_an_own_one_gives(tmp_path, kind):
    settings, parallel = KINDS[kind]
    lora = LoraConfig(rank=4, alpha=8, **settings)
    folder = tiny.make(
        tmp_path / "m",
        "qwen3",
        dtype=torch.float64,
        hidden_size=64,
        intermediate_size=192,
        head_dim=16,
        tie_word_embeddings=False,
    )
    expected = ranks(2, two_steps, folder, False, lora, parallel=parallel)[0]
    got = ranks(2, two_steps, folder, True, lora, parallel=parallel)[0]
    for what in ("policy", "critic"):
        assert got[what].keys() == expected[what].keys()
        for name, value in got[what].items():
            assert torch.equal(value, expected[what][name]), name
    for value, other in zip(got["values"], expected["values"], strict=True):
        assert torch.equal(value, other)
    assert "score.weight" in got["critic"]

    assert not expected["shared"]
    assert expected["bytes"] == expected["all_bytes"]
    assert got["all_bytes"] == expected["all_bytes"]
    num_own = 64 * 8 if kind == "head" else 0  # The norm that the policy trains, in float64.
    assert got["bytes"] <= got["trained_bytes"] + num_own
