"""Router replay: how far the trainer's log-probs are from the engine's, without it and with it.

    torchrun --nproc-per-node 1 benchmarks/router_replay.py

Engine and trainer compute in the same dtype with the same random weights. The engine samples; the
trainer computes the log-probs of what it sampled, first by its own routers' choices, then by the
engine's (`algo.router_replay`). Prints for each family of mixtures the share of tokens and layers
whose experts differ, and |engine - trainer| of the sampled tokens' log-probs: mean, 99th percentile
and largest.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import tyro
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from minirl.batch.packing import pack
from minirl.config.policy import PolicyConfig
from minirl.config.shared import EngineConfig
from minirl.engine.engine import EngineOutput, RolloutEngine, Sampling
from minirl.model.scratch import make_tokenizer
from minirl.parallel.machines import join_world
from minirl.parallel.mesh import Mesh
from minirl.train.policy import Policy
from minirl.types.packed import Packed, Trajectory

# Names of the number of experts and of their size in the config of a family.
SIZES = {
    "qwen3_moe": ("num_experts", "moe_intermediate_size"),
    "olmoe": ("num_experts", "intermediate_size"),
    "mixtral": ("num_local_experts", "intermediate_size"),
}
# An engine that ends takes the process group along, which the next family's policy needs.
ENGINES: list[RolloutEngine] = []


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """What to measure."""

    families: tuple[str, ...] = tuple(SIZES)
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    hidden_size: int = 128
    num_layers: int = 4
    experts: int = 16
    top_k: int = 4
    prompts: int = 4  # Each is answered so many times:
    samples: int = 8
    tokens: int = 64  # Of an answer.


def make_model(folder: Path, family: str, args: Arguments) -> None:
    """Write a mixture with random weights and a character tokenizer."""
    tokenizer = make_tokenizer([])
    experts, size = SIZES[family]
    sizes = {"intermediate_size": args.hidden_size}
    sizes |= {experts: args.experts, size: args.hidden_size // 4}
    config = AutoConfig.for_model(
        family,
        hidden_size=args.hidden_size,
        num_hidden_layers=args.num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        initializer_range=0.1,
        vocab_size=len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        num_experts_per_tok=args.top_k,
        **sizes,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def sample(folder: Path, mesh: Mesh, args: Arguments) -> list[Trajectory]:
    """Let the engine answer random prompts."""
    cfg = EngineConfig(max_model_len=256, kv_cache_gb=0.1)
    engine = RolloutEngine(cfg, folder, mesh, dtype=args.dtype, load_weights=True, routes=True)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(5, 250, 16).tolist() for _ in range(args.prompts)]
    sampling = Sampling(max_tokens=args.tokens, stop_token_ids=())
    num_answers = args.prompts * args.samples
    for i in range(num_answers):
        engine.add(str(i), prompts[i % args.prompts], sampling, seed=i)
    outputs: list[EngineOutput] = []
    while len(outputs) < num_answers:
        outputs += engine.step()
    ENGINES.append(engine)
    return [to_trajectory(prompts[int(o.request_id) % args.prompts], o) for o in outputs]


def to_trajectory(prompt: list[int], output: EngineOutput) -> Trajectory:
    """Return a prompt and its answer as a trajectory."""
    number = int(output.request_id)
    return Trajectory(
        tokens=np.array(prompt + output.tokens, np.int32),
        sampled=np.array([False] * len(prompt) + [True] * len(output.tokens)),
        logprobs=np.array([0.0] * len(prompt) + output.logprobs, np.float32),
        routes=output.routes,
        group=number,
    )


def differences(policy: Policy, batch: Packed, replays: bool) -> tuple[Tensor, dict[str, float]]:
    """Return |engine - trainer| of the sampled tokens' log-probs, and what the routers did."""
    policy.replays_routes = replays
    routing = policy.model.routing
    assert routing
    with policy.inference():
        routing.begin_step(len(batch.loss_rows), [batch], policy.model)
        with routing.counting(policy.mesh):
            logprobs, _ = policy.model(batch)
        metrics = routing.finish(policy.mesh)
    distance = (logprobs - batch.engine_logprobs)[batch.loss_rows].abs()
    return distance.double().cpu(), metrics


def measure(family: str, mesh: Mesh, args: Arguments) -> str:
    """Return the lines of a family."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder, family, args)
        trajectories = sample(folder, mesh, args)
        policy = Policy(PolicyConfig(dtype=args.dtype), folder, mesh, trainable=False)
    batch = pack(trajectories, mesh.device, layout=policy.layout)
    lines = []
    for replays in (False, True):
        distance, metrics = differences(policy, batch, replays)
        changed = f"{metrics['router_changed']:.1%}" if replays else ""
        quantile = distance.quantile(0.99)
        lines.append(
            f"| {family} | {'on' if replays else 'off'} | {changed} | {distance.mean():.4f} | "
            f"{quantile:.4f} | {distance.max():.4f} |"
        )
    return "\n".join(lines)


def main(args: Arguments) -> None:
    """Measure all families."""
    mesh = join_world()
    lines = [measure(family, mesh, args) for family in args.families]
    print("| family | replay | experts differ | mean | 99 % | largest |\n|---|---|---|---|---|---|")
    print("\n".join(lines))


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
