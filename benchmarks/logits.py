"""The engine's logits in float32 and in the weights' bfloat16: log-probs beside the trainer's.

    torchrun --nproc-per-node 1 -m benchmarks.logits

An engine in bfloat16 samples answers from a dense model with random weights, whose logits are as
large as a trained model's. Prints for each dtype of its logits |engine - trainer| of the sampled
tokens' log-probs, mean and 99th percentile, and the seconds of this process's CPU for the answers.
The trainer's logits are in float32 (`logits in float32`, as it computes them on CUDA), or what it
computes on this device (`trainer`; on a CPU they are rounded to bfloat16).
"""

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from unittest import mock

import numpy as np
import torch
import tyro
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

from benchmarks.router_replay import ENGINES, to_trajectory
from minirl.batch.packing import pack
from minirl.config.policy import PolicyConfig
from minirl.config.shared import EngineConfig
from minirl.engine import patches
from minirl.engine.engine import EngineOutput, RolloutEngine, Sampling
from minirl.model import causal
from minirl.model.logprob import logprob_entropy
from minirl.model.scratch import make_tokenizer
from minirl.parallel.machines import join_world
from minirl.parallel.mesh import Mesh
from minirl.train.policy import Policy
from minirl.types.packed import Packed, Trajectory


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """What to measure."""

    heads: tuple[Literal["model", "float32"], ...] = ("model", "float32")
    """Dtypes of logits; model: the weights'."""
    vocabulary: int = 32768
    hidden_size: int = 512
    num_layers: int = 4
    deviation: float = 8.0
    """Standard deviation of the logits of a token."""
    prompts: int = 4
    samples: int = 8
    """Answers to each prompt."""
    tokens: int = 64
    """Of an answer."""


def make_model(folder: Path, args: Arguments) -> None:
    """Write a dense model with random weights and a character tokenizer."""
    tokenizer = make_tokenizer([])
    config = Qwen3Config(
        vocab_size=args.vocabulary,
        hidden_size=args.hidden_size,
        intermediate_size=2 * args.hidden_size,
        num_hidden_layers=args.num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        initializer_range=0.05,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    # Behind the last norm the squares of a token's features have a mean of 1.
    torch.nn.init.normal_(model.lm_head.weight, std=args.deviation / args.hidden_size**0.5)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def sample(folder: Path, mesh: Mesh, args: Arguments) -> tuple[list[Trajectory], float]:
    """Return answers of the engine to random prompts, and the CPU-seconds that they took."""
    cfg = EngineConfig(max_model_len=256, kv_cache_gb=0.2)
    engine = RolloutEngine(cfg, folder, mesh, dtype="bfloat16", load_weights=True)
    ENGINES.append(engine)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(5, 250, 16).tolist() for _ in range(args.prompts)]
    num_answers = args.prompts * args.samples
    for num_tokens in (1, args.tokens):  # The first is a warm-up.
        began = time.process_time()
        outputs: list[EngineOutput] = []
        for i in range(num_answers):
            sampling = Sampling(max_tokens=num_tokens, stop_token_ids=())
            engine.add(str(i), prompts[i % args.prompts], sampling, seed=i)
        while len(outputs) < num_answers:
            outputs += engine.step()
        seconds = time.process_time() - began
    return [to_trajectory(prompts[int(o.request_id) % args.prompts], o) for o in outputs], seconds


def wide(hidden: Tensor, weight: Tensor, *rest: object, **options: object) -> tuple:
    """Return log-probs and entropies by logits in float32."""
    return logprob_entropy(hidden.float(), weight.float(), *rest, **options)  # type: ignore


def difference(policy: Policy, batch: Packed) -> str:
    """Return mean and 99th percentile of |engine - trainer|."""
    with policy.inference():
        logprobs, _ = policy.model(batch)
    distance = (logprobs - batch.engine_logprobs)[batch.loss_rows].abs().double()
    return f"{distance.mean():.4f} | {distance.quantile(0.99):.4f}"


def main(args: Arguments) -> None:
    """Measure both dtypes."""
    mesh = join_world()
    lines = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder, args)
        policy = Policy(PolicyConfig(dtype="bfloat16"), folder, mesh, trainable=False)
        for head in args.heads:
            patches.HEAD_DTYPE = head
            trajectories, seconds = sample(folder, mesh, args)
            batch = pack(trajectories, mesh.device, layout=policy.layout)
            with mock.patch.object(causal, "logprob_entropy", wide):
                to_float32 = difference(policy, batch)
            dtype = "bfloat16" if head == "model" else head
            to_trainer = difference(policy, batch)
            lines.append(f"| {dtype} | {to_float32} | {to_trainer} | {seconds:.2f} |")
    print("| engine | logits in float32: mean | 99 % | trainer: mean | 99 % | CPU-s |")
    print("|---|---|---|---|---|---|")
    print("\n".join(lines))


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
