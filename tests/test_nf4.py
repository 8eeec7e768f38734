"""A base in four bits: as bitsandbytes quantises it, and trained like its dequantised twin."""

import bitsandbytes.functional as bnb
import pytest
import torch
from transformers import AutoModelForCausalLM

import tiny
from harness import RankFailed, ranks
from minirl.config.policy import LoraConfig, ParallelConfig, PolicyConfig
from minirl.model import trained
from minirl.train.policy import Policy
from test_gradients import worst
from test_lora import WHAT, two_steps

SIZES = {"hidden_size": 64, "intermediate_size": 192, "head_dim": 16}
EXPERT_SIZES = {
    "qwen3": {},
    "qwen3_moe": {"moe_intermediate_size": 64},
    # Of gated delta nets; without gates of few outputs, which have no adapter and stay as they are.
    "qwen3_next": {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64},
}
MESHES = [(1, None), (2, None), (4, ParallelConfig(replicate=2))]
NF4 = {"lora": LoraConfig(rank=4, alpha=8, quantization="nf4")}


def round_trip(weight):
    """Return a weight quantised and dequantised by bitsandbytes."""
    bits, state = bnb.quantize_4bit(
        weight.float().contiguous(), blocksize=64, quant_type="nf4", compress_statistics=True
    )
    return bnb.dequantize_4bit(bits, state).to(weight.dtype)


def make(tmp_path, family):
    """Return the folders of a model, and of the same with its matrices rounded to NF4."""
    folder = tiny.make(tmp_path / "m", family, dtype=torch.float64, **SIZES, **EXPERT_SIZES[family])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    for name, p in model.named_parameters():
        has_adapter = ".experts." in name or "proj" in name
        is_matrix = has_adapter and name.split(".")[-2] not in trained.GATES
        if "layers." in name and is_matrix:
            p.data = round_trip(p.data)
    rounded = tmp_path / "rounded"
    model.save_pretrained(rounded)
    return folder, rounded


def cut_in_four_bits(mesh, folder):
    Policy(PolicyConfig(**NF4), folder, mesh)


def test_no_tensor_rank_gets_a_part_of_a_matrix_in_four_bits(tmp_path):
    """Whoever makes a policy without the check of settings."""
    folder = tiny.make(tmp_path / "m", "qwen3", **SIZES)
    with pytest.raises(RankFailed, match="matrices in four bits are cut"):
        ranks(2, cut_in_four_bits, folder, parallel=ParallelConfig(tensor=2))


@pytest.mark.parametrize("family", EXPERT_SIZES)
def test_training_equals_that_of_the_dequantised_base(tmp_path, family):
    folder, rounded = make(tmp_path, family)
    (expected,) = ranks(1, two_steps, rounded, False, {})
    for world, parallel in MESHES:
        got = ranks(world, two_steps, folder, False, NF4, parallel=parallel)[0]
        for what in WHAT:
            assert got[what].keys() == expected[what].keys()
            assert worst(got[what], expected[what]) < 1e-12, what
