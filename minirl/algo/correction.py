"""What follows from the engine computing slightly other probabilities than the trainer.

Tokens come from the engine's kernels, gradients from the trainer's. The two differ (most in
bfloat16, and more if the engine's weights are older), which biases the policy gradient. The ratio
r = pi_trainer / pi_engine corrects it, at a variance that must be bounded.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from minirl.algo.normalize import bounded_exp, sequence_sums, to_rows
from minirl.base.errors import require
from minirl.config.rl import CorrectionConfig
from minirl.types.packed import Packed


@dataclass(frozen=True, kw_only=True)
class Correction:
    """A resolved CorrectionConfig; the docstring of that says what the fields mean."""

    level: str
    mode: str
    gate: str = "ratio"
    low: float = 0.0
    high: float = math.inf
    divergence: float = 0.05
    trust_region: bool = False  # DPPO, see `trust_region`.


DPPO_MAX_RATIO = 20.0  # Of policy to engine, as in the code of DPPO's authors.
# tis, truncated importance sampling: Yao et al. 2025, "Your efficient RL framework secretly brings
# you off-policy RL training"; Ionides 2008 for the truncation. icepop: Ling team 2025, "Every step
# evolves" (arXiv 2510.18855), sec. 3. seq-mask-tis: sequences are dropped by the geometric mean of
# their ratios, tokens of the others count with their own ratio; as OpenRLHF does. seq-mis, masked
# importance sampling: sequences with a ratio above 3 are dropped, the tokens of the others count
# with the ratio of their sequence; TRL's default, its `sequence_mask`. dppo-tv, dppo-kl: Qi et al.
# 2026, "Rethinking the trust region in LLM reinforcement learning" (arXiv 2602.04879), with the
# bounds of its authors' code.
PRESETS = {
    "off": Correction(level="off", mode="truncate", low=0.0, high=2.0),
    "tis": Correction(level="token", mode="truncate", low=0.0, high=2.0),
    "icepop": Correction(level="token", mode="mask", low=0.5, high=5.0),
    "seq-mask-tis": Correction(level="geometric", mode="mask", low=0.5, high=5.0),
    "seq-mis": Correction(level="sequence", mode="mis", low=0.0, high=3.0),
    "dppo-tv": Correction(
        level="token", mode="mask", gate="tv", divergence=0.15, trust_region=True
    ),
    "dppo-kl": Correction(
        level="token", mode="mask", gate="binary_kl", divergence=0.05, trust_region=True
    ),
}


def resolve(cfg: CorrectionConfig) -> Correction:
    """Return the preset, changed by the other settings.

    Raises:
        UserError: for bounds outside which every token would lie.
    """
    changes = {name: value for name, value in vars(cfg).items() if value is not None}
    del changes["preset"]
    correction = replace(PRESETS[cfg.preset], **changes)
    low = correction.low
    high = correction.high
    require(
        0 <= low <= 1 <= high,
        f"algo.correction: low = {low}, high = {high}; equal probabilities have ratio 1, so low "
        "must be in [0, 1] and high at least 1",
    )
    require(
        not correction.trust_region or changes.keys() <= {"divergence"},
        f"algo.correction: preset = {cfg.preset} has one setting, divergence; unset "
        + ", ".join(name for name in changes if name != "divergence"),
    )
    return correction


def divergence(old: Tensor, engine: Tensor, gate: str) -> Tensor:
    """Return a lower bound of how far trainer and engine diverge at each token, [T].

    Both are reduced to a coin, "this token or another", with p = e^old and q = e^engine. binary_kl:
    KL(q || p) = q log(q / p) + (1 - q) log((1 - q) / (1 - p)). tv: |p - q|. These are lower bounds
    of the divergences of the whole distributions; Qi et al. 2026 (arXiv 2602.04879).

    Args:
        old: log-probs under the trainer, float [T].
        engine: log-probs under the engine, float [T].
        gate: binary_kl or tv.
    """
    p = old.exp()
    q = engine.exp()
    if gate == "tv":
        return (p - q).abs()
    tiny = torch.finfo(p.dtype).eps  # at probability 1 the other side of the coin has none
    other_p = (-torch.expm1(old)).clamp(min=tiny)
    other_q = (-torch.expm1(engine)).clamp(min=tiny)
    return q * (engine - old) + other_q * (other_q / other_p).log()


def weights(logprobs: Tensor, old: Tensor, batch: Packed, cfg: Correction) -> tuple[Tensor, Tensor]:
    """Return the weight of each token's loss, and which tokens are outside the gate.

    The level says what a ratio or divergence belongs to. token: the token. sequence: the product of
    its tokens' ratios, the sum of their divergences. geometric: the geometric mean, the mean.
    Outside the gate are ratios not in [low, high], or divergences above cfg.divergence. There the
    mode sets the weight. mask and mis: 0. clip: the ratio brought into [low, high]. truncate: the
    ratio, but at most high. Inside the gate the weight is the ratio; under mask it is the token's
    own ratio, because there the level only selects. Logarithms of ratios are clamped to [-20, 20],
    as in verl. With cfg.trust_region both are those of `trust_region`.

    Args:
        logprobs: log-probs under the trainer at this update, float [T].
        old: log-probs under the trainer before the step's first update, float [T].
        batch: with `engine_logprobs` and `advantages`.
        cfg: the resolved correction.

    Returns:
        Weights float [T] without gradient, and a bool mask [T].
    """
    if cfg.trust_region:
        return trust_region(logprobs.detach(), old, batch, cfg)
    log_ratio = torch.where(batch.loss_mask, (old - batch.engine_logprobs).detach(), 0.0)

    def at_level(values: Tensor) -> Tensor:
        if cfg.level == "token":
            return values
        per_sequence = sequence_sums(values, batch)
        if cfg.level == "geometric":
            per_sequence = per_sequence / batch.sequences.loss_tokens.clamp(min=1)
        return to_rows(per_sequence, batch)

    ratio = bounded_exp(at_level(log_ratio))
    if cfg.gate == "ratio":
        outside = (ratio < cfg.low) | (ratio > cfg.high)
    else:
        distance = divergence(old.detach(), batch.engine_logprobs, cfg.gate)
        distance = torch.where(batch.loss_mask, distance, 0.0)
        outside = at_level(distance) > cfg.divergence
    if cfg.mode == "mask":
        return bounded_exp(log_ratio).masked_fill(outside, 0.0), outside
    if cfg.mode == "mis":
        return ratio.masked_fill(outside, 0.0), outside
    lowest = cfg.low if cfg.mode == "clip" else None
    return torch.where(outside, ratio.clamp(lowest, cfg.high), ratio), outside


def trust_region(
    policy: Tensor, old: Tensor, batch: Packed, cfg: Correction
) -> tuple[Tensor, Tensor]:
    """Return the weight of each token's loss in DPPO, and which tokens its mask M leaves out.

    DPPO maximizes the sum of M r A with r = policy / engine. M is 0 where D(engine || policy) is
    above cfg.divergence and the update would lead further away: A > 0 and r > 1, or A < 0 and
    r < 1. Elsewhere it is 1, so an update that leads back always counts. Qi et al. 2026 (arXiv
    2602.04879), the mask of DPPO, with their binary D, which is `divergence`.

    M follows the policy from update to update, and takes the place of PPO's clip. The loss has the
    ratio policy / old, not clipped, so the weight is M old / engine. Of large ratios, which M does
    not bound, r is truncated (sec. 5.4): one stale token would outweigh all others of a step.

    Args:
        policy: log-probs under the policy at this update, float [T] without gradient.
        old: log-probs under the policy before the step's first update, float [T].
        batch: with `engine_logprobs` and `advantages`.
        cfg: the resolved correction.
    """
    engine = batch.engine_logprobs
    leads_away = batch.advantages * (policy - engine) > 0
    outside = leads_away & (divergence(policy, engine, cfg.gate) > cfg.divergence)
    weight = torch.minimum(bounded_exp(old - engine), DPPO_MAX_RATIO * bounded_exp(old - policy))
    return weight.masked_fill(outside, 0.0), outside
