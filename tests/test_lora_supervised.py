"""SFT, reward models, DPO and KTO that train adapters: what they write is what PEFT makes of it, and
they resume bitwise. vLLM serves the adapter of one of them."""

import json
import shutil

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import tiny
from harness import ranks
from minirl import dpo, kto, rm
from minirl.checkpoint.reading import saved_shapes
from minirl.config.parse import parse_flags
from minirl.config.supervised import DPOConfig, KTOConfig, RMConfig, SFTConfig
from minirl.supervised import SupervisedTrainer
from test_critic import metrics_of

CONFIGS = {"sft": SFTConfig, "rm": RMConfig, "dpo": DPOConfig, "kto": KTOConfig}
TRAINERS = {"sft": SupervisedTrainer, "rm": rm.Trainer, "dpo": dpo.Trainer, "kto": kto.Trainer}
# By program: what of a row it reads besides the prompt.
COLUMNS = {
    "sft": lambda n: {"completion": str(n) * 3},
    "rm": lambda n: {"chosen": str(n) * 3, "rejected": "no"},
    "dpo": lambda n: {"chosen": str(n) * 3, "rejected": "no"},
    "kto": lambda n: {"completion": str(n) * 3, "label": n % 2 == 0},
}


def run(mesh, program, flags):
    cfg = parse_flags(CONFIGS[program], [str(flag) for flag in flags])
    TRAINERS[program].main(cfg, mesh)


def train(tmp_path, program):
    """Train 4 steps on 2 ranks. Return the folder of the model and that of the run."""
    folder = tiny.make(tmp_path / "m", "qwen3", head_dim=32, seed=1)
    rows = [json.dumps({"prompt": f"say {n}", **COLUMNS[program](n)}) for n in range(24)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    settings = {
        "output": tmp_path / "run",
        "policy.model": folder,
        "policy.dtype": "float32",
        "policy.lr": 1e-2,
        "policy.lora.rank": 4,
        "data.train": tmp_path / "rows.jsonl",
        "data.held-out": 4,
        "data.max-tokens": 48,
        "tokens-per-rank": 128,
        "batch-size": 8,
        "num-steps": 4,
        "eval.every": 2,
        "checkpoint.every": 2,
    }
    flags = [part for name, value in settings.items() for part in (f"--{name}", value)]
    ranks(2, run, program, flags)
    return folder, tmp_path / "run"


@pytest.mark.parametrize("program", CONFIGS)
@pytest.mark.skipif(torch.cuda.is_available(), reason="bitwise repeatable on CPU only")
def test_program_trains_adapters_and_resumes(tmp_path, program):
    folder, output = train(tmp_path, program)
    rows = metrics_of(output)
    losses = [row["loss"] for row in rows if row["phase"] == "eval"]
    assert losses[-1] < losses[0]
    if program in (
        "dpo",
        "kto",
    ):  # the reference is the policy with adapters off: the same at first
        assert losses[0] == pytest.approx({"dpo": np.log(2), "kto": 0.5}[program], abs=1e-7)

    # The merged model is what PEFT makes of base and adapter.
    kind = AutoModelForCausalLM
    more = {}
    if program == "rm":
        kind, more = AutoModelForSequenceClassification, {"num_labels": 1}
    base = kind.from_pretrained(folder, dtype=torch.float32, **more)
    theirs = PeftModel.from_pretrained(base, output / "adapter").merge_and_unload().state_dict()
    ours = load_file(output / "model" / "model.safetensors")
    assert ("score.weight" in ours) == (program == "rm")
    for name, value in ours.items():
        torch.testing.assert_close(theirs[name], value, rtol=1e-6, atol=1e-7)

    # A checkpoint has what is trained, and a run goes on from it.
    saved = saved_shapes(output / "checkpoints" / "step-2")
    assert saved
    assert all("lora_" in name or name == "score.weight" for name in saved)
    again = tmp_path / "again"
    shutil.copytree(output, again)
    for name in ("checkpoints/step-4", "model", "adapter"):
        shutil.rmtree(again / name)
    ranks(2, run, program, ["--config", output / "config.yaml", "--output", again, "--resume"])
    assert metrics_of(again) == metrics_of(output)
    for name in ("model/model.safetensors", "adapter/adapter_model.safetensors"):
        assert (again / name).read_bytes() == (output / name).read_bytes()
