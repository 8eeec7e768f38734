"""Tokens per CPU-second of an optimizer step of SFT, DPO (its reference's pass included) and a
reward model, float32, one process.

    python benchmarks/supervised.py

The model is a Qwen3 of 4.8M parameters. SFT: 8 rows of 512 tokens. Pairs: 32, prompts of 64 tokens
and answers of 32 to 96. Tokens are those of all sequences, a pair's prompt counted in both, as a
trainer that does not share it computes them. Median of the steps after the first.
"""

import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from minirl.algo import losses, preference
from minirl.config.shared import PolicyConfig
from minirl.config.supervised import DPOLossConfig, RewardModelLossConfig
from minirl.model.scratch import make_tokenizer
from minirl.parallel.mesh import join_world
from minirl.policy import Policy, make_minibatch
from minirl.types import Trajectory

STEPS, BUDGET = 4, 4096


def make(folder: Path) -> Path:
    config = Qwen3Config(
        vocab_size=3392,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    make_tokenizer([]).save_pretrained(folder)
    return folder


def sequence(
    rng: np.random.Generator, prompt: np.ndarray, num_answer: int, group: int, episode: int = 0
) -> Trajectory:
    tokens = np.concatenate([prompt, rng.integers(5, 3000, num_answer)]).astype(np.int32)
    return Trajectory(
        tokens=tokens,
        sampled=np.arange(len(tokens)) >= len(prompt),
        logprobs=np.zeros(len(tokens), np.float32),
        group=group,
        episode=episode,
    )


def main() -> None:
    mesh, rng = join_world(), np.random.default_rng(0)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder, cfg = (
            make(Path(temporary)),
            PolicyConfig(dtype="float32", lr=1e-4, reshard_after_forward=False),
        )
        policy, ref, judge = (
            Policy(cfg, folder, mesh),
            Policy(cfg, folder, mesh, trainable=False),
            Policy(cfg, folder, mesh, score=True),
        )
    rows = [sequence(rng, np.array([1]), 511, n) for n in range(8)]
    prompts = [rng.integers(5, 3000, 64) for _ in range(32)]
    pairs = [
        sequence(rng, prompt, int(rng.integers(32, 97)), n, episode)
        for n, prompt in enumerate(prompts)
        for episode in range(2)
    ]
    print(
        f"{sum(p.numel() for p in policy.model.parameters()) / 1e6:.2f}M parameters, {torch.get_num_threads()} threads"
    )
    for name, model, examples, loss in (
        ("SFT", policy, rows, losses.sft()),
        ("DPO", policy, pairs, preference.dpo(DPOLossConfig())),
        ("RM", judge, pairs, preference.reward_model(RewardModelLossConfig())),
    ):
        seconds = []
        for _ in range(STEPS):
            began = time.process_time()
            batches = make_minibatch(examples, model, mesh, BUDGET, pairs=name != "SFT")
            if name == "DPO":
                ref.annotate([batches], "ref_logprobs")
            model.update(batches, loss, cfg.lr)
            seconds.append(time.process_time() - began)
        tokens, computed = sum(len(t.tokens) for t in examples), sum(len(b.inputs) for b in batches)
        print(
            f"{name:<4} {tokens / statistics.median(seconds[1:]):8,.0f} tokens per CPU-second ({tokens} tokens, {computed} rows computed, {len(batches)} micro-batches)"
        )


if __name__ == "__main__":
    main()
