"""Tensors that are made whole in one exchange, against torch's own gathering of each."""

import pytest
import torch

import tiny
from harness import ranks
from minirl.config.policy import ParallelConfig, PolicyConfig
from minirl.parallel.fsdp import local
from minirl.train.policy import Policy
from sharded import whole


def gather_both_ways(mesh, folder):
    policy = Policy(PolicyConfig(dtype="float32"), folder, mesh)
    shards = policy.shards()
    for p in shards.values():  # Other numbers on every rank: of copies, its own are kept.
        local(p.detach()).normal_(generator=torch.Generator().manual_seed(mesh.rank))
    expected = {name: p.full_tensor() for name, p in shards.items()}
    found = whole({"shards": shards, "number": 3, "plain": torch.ones(2)})
    assert found["number"] == 3 and found["plain"].tolist() == [1.0, 1.0]
    return expected, found["shards"]


@pytest.mark.parametrize(
    ("world", "parallel"),
    [(1, None), (4, None), (4, ParallelConfig(tensor=2)), (4, ParallelConfig(replicate=2))],
)
def test_each_tensor_is_as_torch_gathers_it(tmp_path, world, parallel):
    # Six experts are three a tensor rank, of which FSDP gives two ranks parts of different sizes.
    folder = tiny.make(tmp_path / "model", "qwen3_moe", num_experts=6)
    for expected, found in ranks(world, gather_both_ways, folder, parallel=parallel):
        assert expected.keys() == found.keys()
        for name, t in expected.items():
            assert torch.equal(t, found[name]), name
