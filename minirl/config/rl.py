"""The settings of RL alone; `shared.py` has those that it shares with other programs."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from minirl.config.policy import LearningRateSchedule, PolicyConfig
from minirl.config.shared import SamplingConfig, TrainingConfig
from minirl.config.values import (
    Finite,
    NonNegative,
    NonNegativeInt,
    OptionalEpochs,
    Positive,
    PositiveInt,
    PositiveShare,
    Share,
)

MOST_IN_FLIGHT = 4 * 2**30  # Bytes of weights on their way from a rank without an engine.


@dataclass(kw_only=True)
class RefitConfig:
    """How weights move from the trainer's shards to the engine."""

    #: MiB that a rank receives at once. Two buckets are in flight, each with as much to send, so
    #: that the peak of extra memory is four times it (on ranks that only train, 4 GiB).
    bucket_mb: PositiveInt = 256


@dataclass(kw_only=True)
class CorrectionConfig:
    """How to correct for the engine sampling from other probabilities than the trainer computes.

    See algo/correction.py. A setting that is None takes the preset's value.
    """

    #: Presets and their sources are in algo/correction.py. seq-mis is TRL's default. dppo-tv and
    #: dppo-kl, for answers of weights that are several steps old, take the place of algo.clip_*.
    preset: Literal["off", "tis", "icepop", "seq-mask-tis", "seq-mis", "dppo-tv", "dppo-kl"] = "tis"
    #: Which trainer-over-engine ratio counts: that of each token, the product over a sequence, or
    #: the geometric mean of the sequence.
    level: Literal["off", "token", "sequence", "geometric"] | None = None
    #: What happens outside the gate. clip: bring the ratio into [low, high]. mask: leave the tokens
    #: out; the others weigh by their own ratio, whatever the level. mis: leave them out; the others
    #: weigh by the ratio of the level. truncate: bring the ratio down to high.
    mode: Literal["clip", "mask", "mis", "truncate"] | None = None
    #: Outside is a ratio not in [low, high], or a divergence above `divergence`.
    gate: Literal["ratio", "binary_kl", "tv"] | None = None
    low: Finite | None = None  # Lower bound of the ratio.
    high: Finite | None = None  # Upper bound of the ratio.
    #: Bound of the gates binary_kl (in nats) and tv (a difference of probabilities). Left out:
    #: 0.05, in dppo-tv 0.15.
    divergence: Positive | None = None


@dataclass(kw_only=True)
class RefConfig:
    """The frozen model that the KL is measured against, loaded only if something needs it."""

    #: Folder or hub id with the policy's vocabulary: the teacher of on_policy_distill. Empty: the
    #: policy before RL; with adapters its base, with those of policy.lora.adapter.
    model: str = ""
    #: Steps after which the reference is replaced by the policy of that time (ProRL, arXiv
    #: 2505.24864, sec. 3.2). 0: never.
    every: NonNegativeInt = 0
    #: Also forget the policy's optimizer state each time, as in ProRL; the learning rate continues
    #: as it would have.
    reset_optimizer: bool = False


@dataclass(kw_only=True)
class AlgoConfig:
    """The method.

    Advantages: grpo, dr_grpo, rloo, reinforce_pp_baseline; by token: reinforce_pp, gae,
    on_policy_distill. Aggregations: `token` is the mean over tokens, `sequence` the mean over
    sequences of their token means, `prompt` the mean over prompts of the means of all their tokens,
    and `fixed` the sum over tokens divided by sequences times env.max_tokens (Dr.GRPO).
    """

    #: A registered name, or `file.py:function` to be called as f(rewards, groups), or by token as
    #: f(batch, rewards, cfg); see algo/README.md.
    advantage: str = "grpo"
    #: Of reinforce_pp_baseline: after the group means, give the advantages mean 0 and deviation 1
    #: over the tokens of the global batch, as its authors' code does, instead of deviation 1 over
    #: its answers.
    whiten_tokens: bool = False
    gamma: PositiveShare = 1.0  # Discount per sampled token, of reinforce_pp and gae.
    #: Of gae. 0 trusts the critic for all but the next token's reward, 1 only the rewards.
    gae_lambda: Share = 0.95
    #: ppo: clipped ratios of tokens. gspo: clipped ratios of sequences, with bounds near 3e-4.
    #: cispo: clipped weights of log-probs. Or `file.py:function`, to be called as
    #: f(batch, logprobs, entropy, cfg); see algo/README.md.
    loss: str = "ppo"
    clip_low: Share = 0.2  # The ratio is clipped below 1 - clip_low ...
    clip_high: NonNegative = 0.2  # ... and above 1 + clip_high (DAPO's clip-higher: 0.28).
    #: Bound c > 1 of the loss at negative advantages (Ye et al. 2020). 0: off.
    dual_clip: Finite = 0.0
    #: How the tokens' losses become one number, as said above.
    aggregation: Literal["token", "sequence", "prompt", "fixed"] = "token"
    #: Weight of the KL to the reference (`ref`). 0: no reference is loaded for it.
    kl_coef: NonNegative = 0.0
    #: Where the KL counts. reward: each token pays for its own; estimators that compare answers sum
    #: it over the answer.
    kl_in: Literal["loss", "reward"] = "loss"
    #: Formulas of `kl` in algo/losses.py. unbiased (in the loss only): the value of k3, weighted so
    #: that its gradient is right, off policy too. auto: k1 in the reward, where the gradients of k2
    #: and k3 are not the KL's; k3 in the loss.
    kl_estimator: Literal["auto", "k1", "k2", "k3", "unbiased"] = "auto"
    #: Nats per token: the weight of the KL is adapted so that the KL stays there (Ziegler et al.
    #: 2019). 0: the weight is fixed.
    kl_target: NonNegative = 0.0
    entropy_coef: Finite = 0.0  # Weight of the entropy bonus.
    #: Policy gradient and bonus count only at this share of an update's tokens, those with the
    #: highest entropy before the step's first update (0.2 in arXiv 2506.01939). 0: at all tokens.
    entropy_share: Share = 0.0
    #: Send each token to the experts that the engine sent it to (R3, arXiv 2510.11370), in all
    #: forwards of the policy; the routers' weights of these experts stay the trainer's. For
    #: mixtures of experts, where rounding makes the two choose differently.
    router_replay: bool = False
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    #: Optimizer steps of a pass over a step's rollouts; prompts_per_step is split evenly over them.
    updates_per_step: PositiveInt = 1
    #: Passes over a step's rollouts (PPO epochs). Ratios and clipping are to the policy before the
    #: first of their updates.
    num_epochs: PositiveInt = 1


@dataclass(kw_only=True)
class CriticConfig(PolicyConfig):
    """The critic of algo.advantage = gae (PPO).

    It is a model with a score head, of its own size and with its own optimizer.
    """

    #: Folder or hub id with the policy's vocabulary: a reward model, or a language model (its score
    #: head starts at 0). Empty: the policy before RL, without policy.lora.adapter.
    model: str = ""
    #: Hold no base of its own, but the policy's: the critic is then adapters (critic.lora) and a
    #: score head on the frozen model that policy.lora adapts, also after a warm start. It saves the
    #: memory of a second base.
    share_base: bool = False
    #: Learning rate. Left out: 5e-6, and ten times that for adapters.
    lr: NonNegative | None = None
    warmup_steps: NonNegativeInt = 0  # RL steps in which only the critic learns.
    #: How far values may move from those that advantages were made with. 0: no bound.
    value_clip: NonNegative = 0.2

    default_lr: ClassVar[float] = 5e-6


def section_of(cfg: PolicyConfig) -> str:
    """Return the section of the config that the settings of a model are."""
    return "critic" if isinstance(cfg, CriticConfig) else "policy"


@dataclass(kw_only=True)
class WarmStartConfig:
    """A supervised warm start on the training rows' own answers, before RL."""

    num_steps: NonNegativeInt = 0  # Optimizer steps; 0: no warm start.
    batch_size: PositiveInt = 64  # Rows of an optimizer step, over all ranks.
    lr: NonNegative = 2e-3  # Learning rate.
    lr_schedule: LearningRateSchedule = "cosine"  # As `policy.lr_schedule`.
    lr_warmup_steps: NonNegativeInt = 20  # Steps of linear warm-up.
    #: Share of the answers in which one character is replaced at random: a model that knows the
    #: task but makes mistakes is what a reward teaches fastest.
    wrong_character: Share = 0.0


@dataclass(kw_only=True)
class DebugConfig:
    """Checks, of which some cost time."""

    #: After each refit compare the engine bitwise with a full gather into weights that were all NaN
    #: before; end the run if they differ.
    check_refit: bool = False
    #: Warn when so many steps in a row look collapsed in the same way: all rewards of each prompt
    #: are equal, no answer ends by itself, or the entropy is near zero or that of noise.
    #: 0: never.
    collapse_steps: NonNegativeInt = 10
    end_on_collapse: bool = False  # And end the run then.


@dataclass(kw_only=True)
class RLConfig(SamplingConfig, TrainingConfig):
    """Train by RL: `torchrun --nproc-per-node N -m minirl.rl --config FILE [--flag value ...]`."""

    output: str = "runs/rl"
    num_steps: NonNegativeInt = 100
    #: Passes over the training prompts, in place of num_steps; may be a fraction. 0: num_steps
    #: counts. Prompts that dynamic sampling adds come on top.
    num_epochs: OptionalEpochs = 0.0
    refit: RefitConfig = field(default_factory=RefitConfig)
    algo: AlgoConfig = field(default_factory=AlgoConfig)
    ref: RefConfig = field(default_factory=RefConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    sft: WarmStartConfig = field(default_factory=WarmStartConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)
