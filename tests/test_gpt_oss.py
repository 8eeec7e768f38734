"""gpt-oss: published checkpoints in MXFP4."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Mxfp4Config

import tiny
from harness import ranks, two_at_once
from minirl.base.errors import UserError
from minirl.checkpoint import exporting
from minirl.config.policy import LoraConfig, ParallelConfig, PolicyConfig
from minirl.model import build
from minirl.model.checks import check_supported
from minirl.train.policy import Policy
from test_rollout import ROWS, sampler_program


def make_mxfp4(folder, **config):
    """A tiny gpt-oss as it is published: experts' matrices as blocks and exponents."""
    tiny.make(folder, "gpt_oss", dtype=torch.bfloat16, **config)
    path = folder / "model.safetensors"
    weights = load_file(path)
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
        num_experts, columns, rows = weights.pop(name).shape
        shape = (num_experts, rows, columns // 32)
        weights[f"{name}_blocks"] = torch.randint(
            256, (*shape, 16), dtype=torch.uint8, generator=generator
        )
        weights[f"{name}_scales"] = torch.randint(
            121, 126, shape, dtype=torch.uint8, generator=generator
        )
    save_file(weights, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def exported(mesh, folder, out):
    exporting.export(Policy(PolicyConfig(dtype="bfloat16"), folder, mesh), out)


@pytest.mark.parametrize("parallel", [None, ParallelConfig(tensor=2)])
def test_mxfp4_is_read_as_the_library_dequantises_it(tmp_path, parallel):
    """Shards of 3 ranks cut blocks of 32, and those of tensor parallelism experts."""
    folder = make_mxfp4(tmp_path / "model", hidden_size=192)
    world = 2 if parallel else 3
    ranks(world, exported, folder, tmp_path / "out", parallel=parallel)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    wanted, found = (
        AutoModelForCausalLM.from_pretrained(
            where, dtype=torch.bfloat16, quantization_config=quantization
        ).state_dict()
        for where, quantization in (
            (folder, Mxfp4Config(dequantize=True)),
            (tmp_path / "out", None),
        )
    )
    assert wanted.keys() == found.keys()
    for name, t in wanted.items():
        assert torch.equal(found[name], t.to(found[name].dtype)), name
    assert len(found["model.layers.1.mlp.experts.down_proj"].unique()) > 30


@pytest.fixture(scope="module")
def through_the_engine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpt_oss") / "model"
    make_mxfp4(folder, swiglu_limit=7.0)
    arguments = (1, sampler_program, folder, ROWS, 3, 0.7, {}, "round_robin")
    with two_at_once({"mxfp4": arguments}) as results:
        yield results


def test_a_published_checkpoint_is_trained_and_refitted_in_bfloat16(through_the_engine):
    (r,) = through_the_engine["mxfp4"].result()
    assert len(r["trajectories"]) == 27 and 0 < r["mismatch"] < 1e-4


@pytest.mark.parametrize(
    ("name", "value"),
    [("swiglu_limit", 5.0), ("layer_types", ["full_attention", "sliding_attention"])],
)
def test_what_the_engine_has_as_constants_is_asked_for(tmp_path, name, value):
    good = build.read_config(tiny.make(tmp_path / "good", "gpt_oss", swiglu_limit=7.0))
    check_supported(good, "policy.model = x", device="cuda")
    setattr(good, name, value)
    check_supported(good, "policy.model = x")  # training alone
    with pytest.raises(UserError, match=f"with {name} = .* vLLM computes another gpt_oss"):
        check_supported(good, "policy.model = x", device="cuda")


def adapted(mesh, folder, targets, quantization):
    cfg = LoraConfig(rank=2, targets=targets, quantization=quantization)
    return len(Policy(PolicyConfig(lora=cfg), folder, mesh).model.adapters.packed)


def test_adapters_of_attention_but_not_of_experts(tmp_path):
    folder = tiny.make(tmp_path / "model", "gpt_oss")
    assert ranks(1, adapted, folder, ["attention"], "none") == [0]
    for targets, quantization in ((["all-linear"], "none"), (["attention"], "nf4")):
        with pytest.raises(Exception, match=r"experts model\.layers\.0\.mlp\.experts are"):
            ranks(1, adapted, folder, targets, quantization)
