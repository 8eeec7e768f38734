"""SFT, reward models, DPO and KTO that train adapters: what they write is what PEFT makes of it,
and they resume bitwise. vLLM serves an adapter beside its base."""

import json
import os
import shutil
import subprocess
import sys

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
from minirl.run.supervised import SupervisedTrainer
from test_critic import metrics_of
from test_lora_files import config_of, write
from test_lora_program import to_flags

CONFIGS = {"sft": SFTConfig, "rm": RMConfig, "dpo": DPOConfig, "kto": KTOConfig}
TRAINERS = {
    "sft": SupervisedTrainer,
    "rm": rm.RewardModelTrainer,
    "dpo": dpo.DPOTrainer,
    "kto": kto.KTOTrainer,
}
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
    ranks(2, run, program, to_flags(settings))
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


SERVE = """
import json, sys
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

model, adapter = sys.argv[1:]
llm = LLM(
    model, enable_lora=True, max_lora_rank=8, enforce_eager=True, dtype="float32", max_model_len=64
)
prompt = {"prompt_token_ids": [5, 9, 11, 4, 7, 3]}
sampling = SamplingParams(temperature=1.0, max_tokens=8, seed=0, logprobs=0)
request = LoRARequest("adapter", 1, adapter)
answer = llm.generate(prompt, sampling, lora_request=request, use_tqdm=False)[0].outputs[0]
ids = list(answer.token_ids)
logprobs = [of[token].logprob for of, token in zip(answer.logprobs, ids)]
print("ANSWER " + json.dumps([ids, logprobs]))
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU build of vLLM")
def test_vllm_serves_the_adapter(tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 192, "head_dim": 32}
    folder = tiny.make(tmp_path / "m", "qwen3", dtype=torch.float32, **sizes)
    ranks(1, write, tmp_path, config_of(folder, tmp_path, "float32"))
    served = subprocess.run(
        [sys.executable, "-c", SERVE, folder, tmp_path / "adapter"],
        env={
            **os.environ,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "TORCHDYNAMO_DISABLE": "1",  # compiling takes longer than all else
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=400,
    )
    (line,) = [line for line in served.stdout.splitlines() if line.startswith("ANSWER ")]
    ids, logprobs = json.loads(line.removeprefix("ANSWER "))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "live", dtype=torch.float32)
    prompt = [5, 9, 11, 4, 7, 3]
    logits = merged(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]
    assert (torch.tensor(logprobs) - expected).abs().max() < 1e-4
