"""Losses: pure functions of one packed micro-batch, returning a value per token; `normalize` turns them into means.

A token loss gets the batch, the policy's log-probs and entropy (float32 [T], 0 where `batch.mask` is False) and returns
the loss of each token [T] and a dict of metrics [T]; of aggregation `pair`, of each pair [P]. Metrics are averaged over the tokens in the loss; of names that end in
`_max` the maximum is taken.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from minirl.algo.correction import truncated_importance
from minirl.config import AlgoConfig
from minirl.types import Packed

TokenLoss = Callable[[Packed, Tensor, Tensor], tuple[Tensor, dict[str, Tensor]]]


@dataclass(frozen=True, kw_only=True)
class Loss:
    token_loss: TokenLoss
    aggregation: str = "token"
    fixed_length: int = 1
    """Of aggregation `fixed`."""
    entropy_gradient: bool = False
    """The loss has a term in the entropy; costs one more buffer in the head's backward."""


def kl(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """Estimate KL(policy || reference) at sampled tokens, [T]. Schulman 2020, "Approximating KL divergence".

    With d = log(ref / policy): k1 = -d (unbiased, noisy), k2 = d^2 / 2 (its gradient is the unbiased one of the KL),
    k3 = e^d - 1 - d (unbiased, never negative).
    """
    d = ref_logprobs - logprobs
    if estimator == "k1":
        return -d
    if estimator == "k2":
        return d**2 / 2
    return torch.expm1(d) - d


def ppo_clip(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float = 0.0) -> Tensor:
    """-min(r A, clip(r, 1 - low, 1 + high) A), [T]. Schulman et al. 2017 (arXiv 1707.06347), eq. 7.

    Separate bounds: DAPO's clip-higher (arXiv 2503.14476, sec. 3.1). With dual_clip = c > 1 the loss at negative advantages is at
    most -c A, so that one token with a huge ratio cannot rule the batch: Ye et al. 2020 (arXiv 1912.09729), eq. 5.
    """
    loss = -torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    if dual_clip:
        loss = torch.where(advantages < 0, torch.minimum(loss, -dual_clip * advantages), loss)
    return loss


def policy(cfg: AlgoConfig, max_tokens: int) -> Loss:
    """PPO-clip with the extras that the config asks for; all of GRPO's family differ only in advantages and aggregation.

    The old log-probs are the trainer's own before the first update (`batch.old_logprobs`); with one update per batch they equal
    the current ones, so the batch need not carry them.
    """

    def token_loss(batch: Packed, logprobs: Tensor, entropy: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        old = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
        ratio = (logprobs - old).exp()
        loss = ppo_clip(ratio, batch.advantages, cfg.clip_low, cfg.clip_high, cfg.dual_clip)
        with torch.no_grad():
            mismatch = (old - batch.engine_logprobs).abs()
            clipped = (ratio < 1 - cfg.clip_low) & (batch.advantages < 0) | (ratio > 1 + cfg.clip_high) & (batch.advantages > 0)
            metrics = {"entropy": entropy.detach(), "clip_fraction": clipped.float(), "mismatch": mismatch, "mismatch_max": mismatch,
                       "policy_kl": kl(logprobs.detach(), old, "k3")}
        if cfg.tis_cap:
            weight = truncated_importance(old, batch.engine_logprobs, cfg.tis_cap)
            loss = loss * weight
            metrics["tis_weight"] = weight
        if cfg.kl_coef:
            ref_kl = kl(logprobs, batch.ref_logprobs, cfg.kl_estimator)
            loss = loss + cfg.kl_coef * ref_kl
            metrics["ref_kl"] = ref_kl.detach()
        if cfg.entropy_coef:
            loss = loss - cfg.entropy_coef * entropy
        return loss, metrics

    return Loss(token_loss=token_loss, aggregation=cfg.aggregation, fixed_length=max_tokens, entropy_gradient=bool(cfg.entropy_coef))


def sft() -> Loss:
    """Negative log-likelihood of the target tokens, mean over all of them."""

    def token_loss(batch: Packed, logprobs: Tensor, entropy: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return -logprobs, {"entropy": entropy.detach()}

    return Loss(token_loss=token_loss)
