"""Tokens per CPU-second of an optimizer step of SFT, DPO and a reward model, one process.

    python benchmarks/supervised.py
    python benchmarks/supervised.py --hidden-size 512 --num-layers 8

The model is a Qwen3, of 4.8M parameters if no flag says otherwise, in float32. SFT: 8 rows of 512
tokens. Pairs: 32, prompts of 64 tokens and answers of 32 to 96; a step of DPO includes its
reference's pass. Tokens are those of all sequences, a pair's prompt counted in both, as a trainer
that does not share it computes them. Prints the median of the steps after the first.
"""

import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import tyro
from transformers import Qwen3Config, Qwen3ForCausalLM

from minirl.algo import losses, preference
from minirl.config.policy import PolicyConfig
from minirl.config.supervised import DPOLossConfig, RewardModelLossConfig
from minirl.model.scratch import make_tokenizer
from minirl.parallel.machines import join_world
from minirl.parallel.mesh import Mesh
from minirl.run.supervised import make_minibatch
from minirl.train.policy import Policy
from minirl.types.packed import Trajectory


@dataclass(kw_only=True)
class Load:
    hidden_size: int = 256
    num_layers: int = 4
    rows: int = 8
    row_tokens: int = 512
    pairs: int = 32
    prompt_tokens: int = 64
    tokens: int = 4096
    """Budget of a micro-batch."""
    steps: int = 4


def make_model(load: Load, folder: Path) -> Path:
    config = Qwen3Config(
        vocab_size=3392,
        hidden_size=load.hidden_size,
        intermediate_size=4 * load.hidden_size,
        num_hidden_layers=load.num_layers,
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
    """Return a prompt with an answer of random tokens."""
    tokens = np.concatenate([prompt, rng.integers(5, 3000, num_answer)]).astype(np.int32)
    return Trajectory(
        tokens=tokens,
        sampled=np.arange(len(tokens)) >= len(prompt),
        logprobs=np.zeros(len(tokens), np.float32),
        group=group,
        episode=episode,
    )


def make_pairs(load: Load, rng: np.random.Generator) -> list[Trajectory]:
    """Return two answers to each prompt."""
    prompts = [rng.integers(5, 3000, load.prompt_tokens) for _ in range(load.pairs)]
    pairs = []
    for group, prompt in enumerate(prompts):
        for episode in range(2):
            num_answer = int(rng.integers(32, 97))
            pairs.append(sequence(rng, prompt, num_answer, group, episode))
    return pairs


def measure(
    name: str,
    model: Policy,
    examples: list[Trajectory],
    loss: losses.Loss,
    load: Load,
    mesh: Mesh,
    *,
    ref: Policy | None = None,
) -> None:
    """Print tokens per CPU-second. With `ref`, its log-probs are part of the step."""
    seconds = []
    for _ in range(load.steps):
        start = time.process_time()
        batches = make_minibatch(examples, model, load.tokens, pairs=name != "SFT")
        if ref:
            ref.annotate([batches], "ref_logprobs")
        model.update(batches, loss, model.cfg.learning_rate)
        seconds.append(time.process_time() - start)
    num_tokens = sum(len(t.tokens) for t in examples)
    num_rows = sum(len(b.inputs) for b in batches)
    rate = num_tokens / statistics.median(seconds[1:])
    load_text = f"{num_tokens} tokens, {num_rows} rows computed, {len(batches)} micro-batches"
    print(f"{name:<4} {rate:8,.0f} tokens per CPU-second ({load_text})", flush=True)


def main(load: Load) -> None:
    mesh = join_world()
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    cfg = PolicyConfig(dtype="float32", lr=1e-4, reshard_after_forward=False)
    with tempfile.TemporaryDirectory() as temporary:
        folder = make_model(load, Path(temporary))
        policy = Policy(cfg, folder, mesh)
        ref = Policy(cfg, folder, mesh, trainable=False)
        reward_model = Policy(cfg, folder, mesh, score=True)
    prompt = np.array([1])
    rows = [sequence(rng, prompt, load.row_tokens - 1, n) for n in range(load.rows)]
    pairs = make_pairs(load, rng)
    dpo = preference.dpo(DPOLossConfig())
    reward_loss = preference.reward_model(RewardModelLossConfig())
    num_parameters = sum(p.numel() for p in policy.model.parameters())
    print(f"{num_parameters / 1e6:.2f}M parameters, {torch.get_num_threads()} threads")
    measure("SFT", policy, rows, losses.sft(), load, mesh)
    measure("DPO", policy, pairs, dpo, load, mesh, ref=ref)
    measure("RM", reward_model, pairs, reward_loss, load, mesh)


if __name__ == "__main__":
    main(tyro.cli(Load, description=__doc__))
