"""The knobs of RL alone; `config.py` has those that it shares with other programs."""

from dataclasses import dataclass, field
from typing import Literal

from pydantic import FiniteFloat, NonNegativeFloat, NonNegativeInt, PositiveInt

from minirl.config.shared import PolicyConfig, PositiveShare, SamplingConfig, Share, TrainingConfig


@dataclass(kw_only=True)
class RefitConfig:
    """How weights move from the trainer's shards to the engine."""

    transport: Literal["all_to_all", "all_gather"] = "all_to_all"
    """all_to_all sends each rank what its engine lacks; all_gather sends every rank every shard."""
    bucket_mb: PositiveInt = 256  # Bytes on the wire at once; the peak of extra memory.


@dataclass(kw_only=True)
class CorrectionConfig:
    """What is done about the engine's probabilities differing from the trainer's; see
    algo/correction.py. None: what the preset says.
    """

    preset: Literal["off", "tis", "icepop", "seq-mask-tis"] = "tis"
    level: Literal["off", "token", "sequence", "geometric"] | None = None
    """Trainer-over-engine ratio of each token, of a sequence (their product) or its geometric
    mean."""
    mode: Literal["clip", "mask", "truncate"] | None = None
    """Of what is outside the gate: bring the ratio into [low, high], leave the tokens out, or bring
    the ratio down to high."""
    gate: Literal["ratio", "binary_kl", "tv"] | None = (
        None  # Outside is a ratio not in [low, high], or a divergence above `divergence`.
    )
    low: float | None = None
    high: float | None = None
    divergence: float = 0.05  # Nats of binary KL, or difference of probabilities (total variation).


@dataclass(kw_only=True)
class RefConfig:
    """The frozen model that the KL is taken to, loaded only if something needs it."""

    model: str = ""
    """Folder or hub id with the policy's vocabulary: the teacher of on_policy_distill. Empty: the
    policy as RL found it."""
    every: NonNegativeInt = 0
    """Steps after which the reference becomes the policy as it is then (ProRL, arXiv 2505.24864,
    sec. 3.2); 0: never."""
    reset_optimizer: bool = False
    """And the policy's optimizer forgets its state at the same time, as in ProRL; the learning rate
    goes on as it would have."""


@dataclass(kw_only=True)
class AlgoConfig:
    """The method.

    Advantages: grpo, dr_grpo, rloo, reinforce_pp_baseline; by token: reinforce_pp, gae,
    on_policy_distill. Aggregation `sequence` is the mean over sequences of their token means,
    `prompt` over prompts of the means of all their tokens, and `fixed` sums over tokens, divided by
    sequences times rollout.max_tokens (Dr.GRPO).
    """

    advantage: str = "grpo"
    """A registered name or `file.py:function`, called as f(rewards, groups); see
    algo/advantages.py."""
    gamma: PositiveShare = 1.0  # Discount per sampled token of reinforce_pp and gae.
    gae_lambda: Share = (
        0.95  # Of gae: 0 trusts the critic for all but the next token's reward, 1 only the rewards.
    )
    loss: Literal["ppo", "gspo", "cispo"] = "ppo"
    """ppo: clipped ratios of tokens; gspo: of sequences, bounds near 3e-4; cispo: clipped weights
    of log-probs."""
    clip_low: Share = 0.2  # Ratio is clipped below 1 - clip_low ...
    clip_high: NonNegativeFloat = 0.2  # ... and above 1 + clip_high (DAPO's clip-higher: 0.28).
    dual_clip: float = (
        0.0  # Bound c > 1 of the loss at negative advantages (Ye et al. 2020); 0: off.
    )
    aggregation: Literal["token", "sequence", "prompt", "fixed"] = (
        "token"  # Of the tokens' losses: the mean over tokens, or as said above.
    )
    kl_coef: NonNegativeFloat = (
        0.0  # Weight of the KL to the reference (`ref`); 0: none is loaded for it.
    )
    kl_in: Literal["loss", "reward"] = (
        # reward: each token is charged, which estimators that compare answers sum over the answer.
        "loss"
    )
    kl_estimator: Literal["k1", "k2", "k3", "unbiased"] = "k3"
    """unbiased (in the loss): the value of k3, weighted so that its gradient is right, off policy
    too."""
    kl_target: NonNegativeFloat = 0.0
    """Nats per token: the weight is adapted so that the KL stays there (Ziegler et al. 2019); 0: it
    is fixed."""
    entropy_coef: FiniteFloat = 0.0
    entropy_share: Share = 0.0
    """Policy gradient and bonus only at this share of a step's tokens, those of highest entropy
    before its first update (0.2 in arXiv 2506.01939). 0: all."""
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    updates_per_step: PositiveInt = (
        1  # Optimizer steps per batch of rollouts; prompts_per_step is split evenly.
    )


@dataclass(kw_only=True)
class CriticConfig(PolicyConfig):
    """The critic of algo.advantage = gae (PPO): a model with a score head, of its own size and with
    its own optimizer.
    """

    model: str = ""
    """Folder or hub id with the policy's vocabulary: a reward model, or a language model (its score
    head begins at 0). Empty: the policy as RL finds it."""
    lr: NonNegativeFloat = 5e-6
    warmup_steps: NonNegativeInt = (
        0  # RL steps in which the critic learns and the policy does not move.
    )
    value_clip: NonNegativeFloat = (
        0.2  # Bound of how far values move from those that advantages were made with; 0: off.
    )


@dataclass(kw_only=True)
class WarmStartConfig:
    """A supervised warm start on the training rows' own answers, before RL."""

    num_steps: NonNegativeInt = 0
    batch_size: PositiveInt = 64
    lr: NonNegativeFloat = 2e-3
    lr_warmup_steps: NonNegativeInt = 20
    wrong_character: Share = 0.0
    """Share of the answers in which one character is replaced at random: a model that knows the
    task but errs is what a reward teaches fastest."""


@dataclass(kw_only=True)
class DebugConfig:
    check_refit: bool = False
    """After each refit compare the engine bitwise with a full gather into weights that were all NaN
    before; ends the run if they differ."""


@dataclass(kw_only=True)
class RLConfig(SamplingConfig, TrainingConfig):
    """`torchrun --nproc-per-node N -m minirl.rl --config FILE [--flag value ...]`"""

    output: str = "runs/rl"
    num_steps: NonNegativeInt = 100
    refit: RefitConfig = field(default_factory=RefitConfig)
    algo: AlgoConfig = field(default_factory=AlgoConfig)
    ref: RefConfig = field(default_factory=RefConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    sft: WarmStartConfig = field(default_factory=WarmStartConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)
