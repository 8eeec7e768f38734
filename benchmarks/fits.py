"""Which models fit which GPUs, with which settings, by the planner's formulas.

    python benchmarks/fits.py            # the tables of minirl/plan/README.md

The job is GRPO on 64 prompts of up to 512 tokens with 8 answers of up to 2,048 each.
"""

import functools
from typing import Any

from transformers import LlamaConfig, PretrainedConfig, Qwen3Config, Qwen3MoeConfig
from transformers.utils import logging

from minirl.config.policy import LoraConfig, PolicyConfig
from minirl.config.rl import RLConfig
from minirl.config.shared import DataConfig, RolloutConfig
from minirl.config.validate import resolve_dtypes, resolve_lengths
from minirl.plan.__main__ import Advice, advise
from minirl.plan.cards import find_card
from minirl.plan.plan import Workload, read_models

# (GPUs, of which card, a node's)
MACHINES = {
    "1 x 24 GB": (1, "rtx4090", 1),
    "1 x 80 GB": (1, "h100", 1),
    "4 x 80 GB": (4, "h100", 8),
    "8 x 80 GB": (8, "h100", 8),
    "8 x 141 GB": (8, "h200", 8),
    "4 nodes of 8 x 141 GB": (32, "h200", 8),
}


# Those that each model of the first table is tried on.
FOR_ALL = [name for name in MACHINES if name != "4 x 80 GB"]

# What is trained: all weights, or adapters.
TRAINED = {
    "all": LoraConfig(),
    "LoRA": LoraConfig(rank=32),
    "QLoRA": LoraConfig(rank=32, quantization="nf4"),
}
# Rows of the second table.
ADAPTED = (
    ("Qwen3-4B", "1 x 24 GB", "LoRA"),
    ("Qwen3-8B", "1 x 24 GB", "QLoRA"),
    ("Qwen3-8B", "1 x 80 GB", "LoRA"),
    ("Qwen3-14B", "1 x 80 GB", "LoRA"),
    ("Qwen3-32B", "1 x 80 GB", "QLoRA"),
    ("Qwen3-32B", "4 x 80 GB", "LoRA"),
    ("Qwen3-30B-A3B", "4 x 80 GB", "LoRA"),
    ("Llama-3.3-70B", "8 x 80 GB", "LoRA"),
    ("Qwen3-235B-A22B", "8 x 141 GB", "LoRA"),
)


def dense(hidden: int, ffn: int, layers: int, heads: int, tied: bool) -> PretrainedConfig:
    """Return the config of a Qwen3 model, all of which have 8 key-value heads of 128."""
    return Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=151936,
        max_position_embeddings=40960,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=tied,
    )


def mixture(hidden: int, expert: int, layers: int, heads: int) -> PretrainedConfig:
    """Return the config of a Qwen3 mixture, all of which have 128 experts, 8 for a token."""
    config: Any = Qwen3MoeConfig  # whose fields transformers fills in
    return config(
        vocab_size=151936,
        hidden_size=hidden,
        moe_intermediate_size=expert,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        tie_word_embeddings=False,
    )


MODELS = {
    "Qwen3-0.6B": dense(1024, 3072, 28, 16, True),
    "Qwen3-1.7B": dense(2048, 6144, 28, 16, True),
    "Qwen3-4B": dense(2560, 9728, 36, 32, True),
    "Qwen3-8B": dense(4096, 12288, 36, 32, False),
    "Qwen3-14B": dense(5120, 17408, 40, 40, False),
    "Qwen3-32B": dense(5120, 25600, 64, 64, False),
    "Llama-3.3-70B": LlamaConfig(
        vocab_size=128256,
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
    ),
    "Qwen3-30B-A3B": mixture(2048, 768, 48, 32),
    "Qwen3-235B-A22B": mixture(4096, 1536, 94, 64),
}


def job(name: str, trained: str = "all") -> RLConfig:
    """Return the config of the job with a model, of which all is trained or adapters."""
    cfg = RLConfig(
        policy=PolicyConfig(model=name, lora=TRAINED[trained]),
        data=DataConfig(max_prompt_tokens=512),
        rollout=RolloutConfig(prompts_per_step=64, samples_per_prompt=8, max_tokens=2048),
    )
    resolve_lengths(cfg)
    resolve_dtypes(cfg, "bfloat16")
    return cfg


@functools.cache
def best(name: str, machine: str, trained: str = "all") -> Advice | None:
    """Return the fastest settings that fit. None: there are none."""
    num_gpus, card_name, per_node = MACHINES[machine]
    cfg = job(name, trained)
    models = read_models(cfg, {"policy": MODELS[name].to_dict()})
    workload = Workload(cfg, num_gpus, models)
    advised = advise(workload, find_card(card_name), min(per_node, num_gpus))
    return advised[0] if advised else None


def cell(name: str, machine: str, trained: str = "all") -> str:
    """Return the seconds of a step with the fastest settings that fit, and their flags."""
    found = best(name, machine, trained)
    if found is None:
        return "-"
    seconds = f"{found.plan.step_seconds:.0f}"
    return f"{seconds} `{found.flags}`" if found.flags else seconds


def row(*cells: str) -> str:
    """Return a row of a table in Markdown."""
    return f"| {' | '.join(cells)} |"


def table() -> str:
    """Return the first table: models, and the machines that all of them are tried on."""
    rows = [row("model", *FOR_ALL), "|---" * (1 + len(FOR_ALL)) + "|"]
    for name in MODELS:
        rows.append(row(name, *(cell(name, machine) for machine in FOR_ALL)))
    return "\n".join(rows)


def table_of_adapters() -> str:
    """Return the second table: adapters, and all weights on the same machine."""
    rows = [row("model", "GPUs", "adapters", "s a step", "all weights"), "|---" * 5 + "|"]
    for name, machine, trained in ADAPTED:
        adapted = cell(name, machine, trained)
        rows.append(row(name, machine, trained, adapted, cell(name, machine)))
    return "\n".join(rows)


def main() -> None:
    """Print the tables."""
    logging.set_verbosity_error()
    print(table(), table_of_adapters(), sep="\n\n")


if __name__ == "__main__":
    main()
