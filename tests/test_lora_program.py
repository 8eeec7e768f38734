"""Runs that train adapters, with the real engine: PPO on a base in four bits that the critic
shares, and GRPO; their results are the merged model and the adapter."""

import json
import shutil

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import tiny
from harness import ranks
from minirl.checkpoint.reading import saved_shapes
from minirl.parallel.tensor import LORA_A, LORA_B
from test_critic import metrics_of, run

PPO = {
    "algo.advantage": "gae",
    "algo.kl-in": "reward",
    "policy.lora.quantization": "nf4",
    "critic.share-base": True,
    "critic.dtype": "float32",
    "critic.lr": 1e-3,
    "critic.lora.rank": 2,
    "critic.lora.quantization": "nf4",
}
KINDS = {"grpo": {}, "ppo_nf4": PPO}


def to_flags(settings):
    """Return settings as flags; those that are True have no value."""
    flags = []
    for name, value in settings.items():
        flags.append(f"--{name}")
        if value is not True:
            flags.append(value)
    return flags


def flags_of(tmp_path, settings):
    """Return the flags of a run of 4 steps on 2 ranks."""
    folder = tiny.make(
        tmp_path / "m", "qwen3", hidden_size=64, intermediate_size=192, head_dim=32, seed=1
    )
    data = tmp_path / "rows.jsonl"
    rows = [json.dumps({"prompt": f"say {n}", "answer": str(n)}) + "\n" for n in range(24)]
    data.write_text("".join(rows))
    reward = tmp_path / "reward.py"
    reward.write_text(
        "def count(prompt, completion, row):\n    return sum(map(ord, completion)) % 7 / 7\n"
    )
    settings = {
        "output": tmp_path / "run",
        "policy.model": folder,
        "policy.dtype": "float32",
        "policy.lr": 1e-2,
        "policy.lora.rank": 4,
        "algo.kl-coef": 0.1,
        "data.train": data,
        "data.held-out": 4,
        "data.max-prompt-tokens": 24,
        "rollout.max-tokens": 8,
        "rollout.prompts-per-step": 4,
        "rollout.samples-per-prompt": 4,
        "tokens-per-rank": 64,
        "num-steps": 4,
        "eval.every": 0,
        "checkpoint.every": 2,
        "engine.kv-cache-gb": 0.05,
        "reward.function": f"{reward}:count",
    } | settings
    return to_flags(settings)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.skipif(torch.cuda.is_available(), reason="bitwise repeatable on CPU only")
def test_run_trains_adapters_and_resumes(tmp_path, kind):
    output = tmp_path / "run"
    flags = flags_of(tmp_path, KINDS[kind])
    ranks(2, run, flags)
    rows = [row for row in metrics_of(output) if row["phase"] == "rl"]

    # The reference is the policy with its adapters off: at first the same, bit by bit.
    assert rows[0]["ref_kl"] == 0.0
    assert rows[3]["ref_kl"] > 0.0
    # The engine has the merged weights.
    for row in rows:
        assert 0 < row["mismatch"] < 1e-5
        assert row["mismatch_max"] < 1e-4
    assert rows[0]["grad_norm"] > 0

    # Of a base in files the merged model is PEFT's.
    merged = load_file(output / "model" / "model.safetensors")
    if kind == "grpo":
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32)
        adapted = PeftModel.from_pretrained(base, output / "adapter").merge_and_unload()
        for name, value in adapted.state_dict().items():
            torch.testing.assert_close(merged[name], value, rtol=1e-6, atol=1e-7)

    # Checkpoints hold what is trained, and a run goes on from one bitwise.
    saved = saved_shapes(output / "checkpoints" / "step-2")
    assert saved
    assert all(LORA_A in name or LORA_B in name or "score" in name for name in saved)
    again = tmp_path / "again"
    shutil.copytree(output, again)
    shutil.rmtree(again / "checkpoints" / "step-4")
    shutil.rmtree(again / "model")
    ranks(2, run, ["--config", output / "config.yaml", "--output", again, "--resume"])
    assert metrics_of(again) == metrics_of(output)
    for name in ("model/model.safetensors", "adapter/adapter_model.safetensors"):
        assert (again / name).read_bytes() == (output / name).read_bytes()


@pytest.mark.skipif(torch.cuda.is_available(), reason="bitwise repeatable on CPU only")
def test_reference_of_a_run_from_an_adapter_has_the_adapter_also_when_resumed(tmp_path):
    flags = flags_of(tmp_path, {"num-steps": 1, "checkpoint.every": 0})
    ranks(2, run, flags)
    adapter = tmp_path / "adapter"
    shutil.move(tmp_path / "run" / "adapter", adapter)
    shutil.rmtree(tmp_path / "run")

    output = tmp_path / "run"
    more = ["--policy.lora.adapter", adapter, "--num-steps", 2, "--checkpoint.every", 1]
    ranks(2, run, [*flags, *more])
    rows = [row for row in metrics_of(output) if row["phase"] == "rl"]
    assert rows[0]["ref_kl"] == 0.0
    assert rows[1]["ref_kl"] > 0.0
    shutil.rmtree(output / "checkpoints" / "step-2")
    shutil.rmtree(output / "model")
    before = metrics_of(output)
    ranks(2, run, ["--config", output / "config.yaml", "--resume"])
    assert metrics_of(output) == before

    # A base that is asked for by its name is the bare base.
    shutil.rmtree(output)
    named = ["--policy.lora.adapter", adapter, "--ref.model", tmp_path / "m"]
    ranks(2, run, [*flags, *named])
    assert [row["ref_kl"] > 0.0 for row in metrics_of(output) if row["phase"] == "rl"] == [True]


def test_reference_of_four_bits_has_the_modules_that_are_trained_whole(tmp_path):
    whole = {"policy.lora.quantization": "nf4", "policy.lora.modules-to-save": "lm_head.*"}
    ranks(2, run, flags_of(tmp_path, {"num-steps": 2, "checkpoint.every": 0} | whole))
    rows = [row for row in metrics_of(tmp_path / "run") if row["phase"] == "rl"]
    assert rows[0]["ref_kl"] == 0.0
    assert rows[1]["ref_kl"] > 0.0
