"""The planner's formulas next to dry runs: memory, time and traffic of a training step.

    python -m benchmarks.dryrun.compare

tests/test_costs.py holds some of these cases within 10 %.
"""

from dataclasses import dataclass, field
from typing import Any

from transformers import DeepseekV3Config, Gemma2Config, Qwen3_5TextConfig, Qwen3NextConfig
from transformers.utils import logging

from benchmarks.dryrun.extrapolate import Cost, dry_costs
from benchmarks.fits import MODELS
from minirl.config.parse import fill_config
from minirl.config.policy import ParallelConfig, PolicyConfig
from minirl.plan.cards import CARDS
from minirl.plan.costs import Load, LossName, Training
from minirl.plan.sizes import read_sizes

DENSE = MODELS["Qwen3-8B"]
MIXTURE = MODELS["Qwen3-30B-A3B"]
HYBRID = Qwen3_5TextConfig(  # As Qwen3.5-27B, but for its vocabulary.
    vocab_size=151936,
    hidden_size=5120,
    intermediate_size=17408,
    num_hidden_layers=64,
    num_attention_heads=24,
    num_key_value_heads=4,
    head_dim=256,
    linear_num_key_heads=16,
    linear_num_value_heads=48,
)
GEMMA = Gemma2Config(  # As Gemma 2 9B.
    hidden_size=3584,
    intermediate_size=14336,
    num_hidden_layers=42,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=256,
)
LATENT = DeepseekV3Config(  # As Moonlight-16B-A3B.
    vocab_size=163840,
    hidden_size=2048,
    intermediate_size=11264,
    moe_intermediate_size=1408,
    num_hidden_layers=27,
    num_attention_heads=16,
    num_key_value_heads=16,
    n_shared_experts=2,
    n_routed_experts=64,
    n_group=1,
    topk_group=1,
    num_experts_per_tok=6,
    q_lora_rank=None,
    first_k_dense_replace=1,
)
LOAD = Load(tokens=8192)
LONG = Load(tokens=16384, sequence=4096)
PAIRS = Load(tokens=8192, samples=2, whole_groups=True)
LORA = {"rank": 32}
NF4 = LORA | {"quantization": "nf4"}


@dataclass(kw_only=True)
class Case:
    """A model, and how GPUs of a node train it."""

    model: Any
    world_size: int = 8
    checkpointing: str = "selective"
    policy: dict[str, Any] = field(default_factory=dict)  # Other settings.
    parallel: dict[str, Any] = field(default_factory=dict)
    load: Load = field(default_factory=lambda: LOAD)
    loss: LossName = "policy"
    share_base: bool = False

    def training(self) -> Training:
        """Return the same for the formulas."""
        fixed = {"dtype": "bfloat16", "activation_checkpointing": self.checkpointing}
        policy = fill_config(PolicyConfig, self.policy | fixed)
        score = self.loss in ("value", "reward")
        return Training(
            model=read_sizes(self.model.to_dict(), score=score, policy=policy),
            card=CARDS["h200"],
            gpus_per_node=8,
            world_size=self.world_size,
            policy=policy,
            parallel=fill_config(ParallelConfig, self.parallel),
            load=self.load,
            loss=self.loss,
            shares_base=self.share_base,
            fused=policy.kernels != "torch",
            checkpointing=self.checkpointing,
        )


CASES = {
    "dense": Case(model=DENSE, checkpointing="off"),
    "dense, selective": Case(model=DENSE),
    "dense, full": Case(model=DENSE, checkpointing="full"),
    "whole gradients": Case(model=DENSE, policy={"accumulate": "whole"}),
    "the library's modules": Case(model=DENSE, checkpointing="off", policy={"kernels": "torch"}),
    "small, tied head": Case(model=MODELS["Qwen3-0.6B"], checkpointing="off"),
    # Attention over blocks in plain torch keeps scores, which the formulas leave out.
    "softcapped scores": Case(model=GEMMA),
    "tensor 2": Case(model=DENSE, parallel={"tensor": 2}),
    "tensor 4, sequence": Case(model=DENSE, parallel={"tensor": 4, "sequence": True}),
    "context 2": Case(model=DENSE, parallel={"context": 2}, load=LONG),
    "replicate 2": Case(model=DENSE, parallel={"replicate": 2}),
    "8 bits": Case(model=DENSE, policy={"optimizer_state": "8bit"}),
    "score head": Case(model=DENSE, loss="value"),
    "pairs": Case(model=DENSE, loss="dpo", load=PAIRS),
    "mixture": Case(model=MIXTURE),
    "mixture, experts 4": Case(model=MIXTURE, parallel={"experts": 4}),
    "latent mixture": Case(model=LATENT),
    "adapters": Case(model=DENSE, checkpointing="full", policy={"lora": LORA}),
    "adapters of experts": Case(model=MIXTURE, policy={"lora": LORA}),
    "four bits": Case(model=DENSE, policy={"lora": NF4}),
    "critic on a shared base": Case(
        model=DENSE, policy={"lora": LORA}, loss="value", share_base=True
    ),
    "frozen embedding": Case(model=DENSE, policy={"freeze": ["model.embed_tokens.weight"]}),
    "hybrid": Case(model=HYBRID),
    "hybrid, full": Case(model=HYBRID, checkpointing="full"),
    "hybrid, tensor 2": Case(model=HYBRID, parallel={"tensor": 2}),
    "hybrid mixture": Case(model=Qwen3NextConfig()),
    # Next to two generators, whose engines a refit fills.
    "six trainers of 32B": Case(model=MODELS["Qwen3-32B"], world_size=6),
}


def differences(case: Case, dry: Cost) -> dict[str, float]:
    """Return by how much the formulas are above a dry run, as a share of it, by figure."""
    formula = case.training()
    pairs = {"state": (formula.parameters + formula.optimizer, dry.parameters + dry.optimizer)}
    for phase in ("forward", "backward", "optimizer"):
        pairs[f"peak, {phase}"] = (
            sum(formula.alive[phase].values()),
            sum(dry.alive[phase].values()),
        )
    seconds = [cost.seconds["forward"] + cost.seconds["backward"] for cost in (formula, dry)]
    sent = [
        sum(formula.sent["forward"] + formula.sent["backward"]),
        dry.wire["forward"] + dry.wire["backward"],
    ]
    pairs |= {"seconds": (seconds[0], seconds[1]), "wire": (sent[0], sent[1])}
    return {name: a / b - 1 for name, (a, b) in pairs.items()}


def compare(names: list[str]) -> dict[str, dict[str, float]]:
    """Return the differences of some cases, by name."""
    dry = dry_costs([(CASES[name].training(), CASES[name].model) for name in names])
    found = {}
    for name, cost in zip(names, dry, strict=True):
        found[name] = differences(CASES[name], cost)
    return found


def main() -> None:
    """Print the table."""
    logging.set_verbosity_error()
    found = compare(list(CASES))
    print("| formulas against dry runs |", " | ".join(found["dense"]), "|")
    print("|---" * (1 + len(found["dense"])) + "|")
    for name, by_figure in found.items():
        print(f"| {name} |", " | ".join(f"{share:+.1%}" for share in by_figure.values()), "|")


if __name__ == "__main__":
    main()
