"""Expert parallelism: on every mesh as in one process, whatever else is on."""

import pytest
import torch

import tiny
from harness import ranks
from minirl.config.lora import LoraConfig
from minirl.config.policy import ParallelConfig
from test_gradients import worst
from test_lora import two_steps

WHOLE = {"lora": LoraConfig()}  # All weights are trained themselves.
WHAT = ("grads", "merged", "averages")


def on(**axes):
    return ParallelConfig(**axes)


# By name: number of ranks, and their axes.
MESHES = {
    "ep2": (2, on(experts=2)),
    "ep2_efsdp2": (4, on(experts=2)),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.make(
        tmp_path_factory.mktemp("moe") / "m", "qwen3_moe", dtype=torch.float64, num_experts=8
    )


@pytest.fixture(scope="module")
def alone(folder):
    (one,) = ranks(1, two_steps, folder, False, WHOLE)
    return one


def compare(got, alone):
    for what in WHAT:
        assert got[what].keys() == alone[what].keys()
        assert worst(got[what], alone[what]) < 1e-12, what


@pytest.mark.parametrize("name", MESHES)
def test_every_mesh_trains_as_one_process(name, folder, alone):
    world, parallel = MESHES[name]
    got = ranks(world, two_steps, folder, parallel.sequence, WHOLE, parallel=parallel)[0]
    compare(got, alone)
