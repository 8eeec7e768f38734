"""Correction for the engine sampling from slightly other probabilities than the trainer computes.

Tokens come from the engine's kernels, gradients from the trainer's, and the two differ (most in
bf16, and more if the engine's weights are older), which biases the policy gradient. The ratio r =
pi_trainer / pi_engine corrects it, at a variance that must be bounded.
"""

import torch
from torch import Tensor

from minirl.algo.normalize import sequence_sums, to_rows
from minirl.config.rl import CorrectionConfig
from minirl.errors import require
from minirl.types import Packed

# tis, truncated importance sampling: Yao et al. 2025, "Your efficient RL framework secretly brings
# you off-policy RL training"; Ionides 2008 for
# the truncation. icepop: Ling team 2025, "Every step evolves" (arXiv 2510.18855), sec. 3.
# seq-mask-tis: sequences are dropped by the geometric mean
# of their ratios, tokens of the others count with their own ratio; as OpenRLHF does.
PRESETS = {
    "off": {"level": "off", "mode": "truncate", "gate": "ratio", "low": 0.0, "high": 2.0},
    "tis": {"level": "token", "mode": "truncate", "gate": "ratio", "low": 0.0, "high": 2.0},
    "icepop": {"level": "token", "mode": "mask", "gate": "ratio", "low": 0.5, "high": 5.0},
    "seq-mask-tis": {
        "level": "geometric",
        "mode": "mask",
        "gate": "ratio",
        "low": 0.5,
        "high": 5.0,
    },
}


def resolve(cfg: CorrectionConfig) -> CorrectionConfig:
    """What the preset says, but for what is set beside it. Raises UserError for bounds that leave
    nothing.
    """
    out = CorrectionConfig(
        **PRESETS[cfg.preset]
        | {name: value for name, value in vars(cfg).items() if value is not None}
    )
    require(
        0 <= out.low <= 1 <= out.high and out.divergence > 0,
        f"algo.correction: low = {out.low}, high = {out.high}, divergence = {out.divergence}; "
        "equal probabilities have ratio 1 and divergence 0, so low must be in [0, 1], high at least 1 and divergence above 0",
    )
    return out


def divergence(old: Tensor, engine: Tensor, gate: str) -> Tensor:
    """Of the two coins "this token or another" that trainer and engine toss, p = e^old and q =
    e^engine, [T]; binary_kl: KL(q || p) = q log(q / p) + (1 - q) log((1 - q) / (1 - p)); tv: |p -
    q|. Lower bounds of the divergences of the whole distributions; Qi et al. 2026 (arXiv
    2602.04879).
    """
    p, q = old.exp(), engine.exp()
    if gate == "tv":
        return (p - q).abs()
    tiny = torch.finfo(p.dtype).eps  # at probability 1 the other side of the coin has none
    others_p, others_q = (-torch.expm1(old)).clamp(min=tiny), (-torch.expm1(engine)).clamp(min=tiny)
    return q * (engine - old) + others_q * (others_q / others_p).log()


def weights(old: Tensor, batch: Packed, cfg: CorrectionConfig) -> tuple[Tensor, Tensor]:
    """(weight of each token's loss [T], tokens outside the gate [T] bool) for the trainer's
    log-probs `old` [T]; without gradient.

    `cfg` is resolved. The level says what a ratio or divergence is of: token; sequence: the product
    of its tokens' ratios, the sum of their divergences; geometric: the geometric mean, the mean.
    Outside are ratios not in [low, high], or divergences above cfg.divergence. There the mode sets
    the weight: mask: 0; clip: the ratio brought into [low, high]; truncate: the ratio but at most
    high. Inside it is the ratio; under mask a token's own, for there the level only selects.
    """
    log_ratio = torch.where(batch.loss_mask, (old - batch.engine_logprobs).detach(), 0.0)

    def at_level(values: Tensor) -> Tensor:
        if cfg.level == "token":
            return values
        sums = sequence_sums(values, batch)
        return to_rows(
            sums if cfg.level == "sequence" else sums / batch.loss_tokens.clamp(min=1), batch
        )

    ratio = at_level(log_ratio).exp()
    if cfg.gate == "ratio":
        outside = (ratio < cfg.low) | (ratio > cfg.high)
    else:
        outside = (
            at_level(
                torch.where(
                    batch.loss_mask, divergence(old.detach(), batch.engine_logprobs, cfg.gate), 0.0
                )
            )
            > cfg.divergence
        )
    if cfg.mode == "mask":
        return log_ratio.exp().masked_fill(outside, 0.0), outside
    return torch.where(
        outside, ratio.clamp(cfg.low if cfg.mode == "clip" else None, cfg.high), ratio
    ), outside
