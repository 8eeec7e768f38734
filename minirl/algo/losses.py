"""Losses: pure functions of one packed micro-batch that return a value per token.

A token loss is called with the batch, the policy's log-probs and entropy (float32 [T], 0 where
`batch.loss_mask` is False) and returns the loss of each token [T] and a dict of metrics [T]. With
aggregation `pair` both are per pair [P]. `normalize` turns values into means. Metrics are averaged
over the tokens in the loss; of names that end in `_max` the maximum is taken.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from minirl.algo import correction
from minirl.algo.normalize import MAX_LOG_RATIO, bounded_exp, sequence_sums, to_rows
from minirl.config.lookup import find_function
from minirl.config.rl import AlgoConfig
from minirl.types.packed import Packed

Metrics = dict[str, Tensor]

# f(batch, logprobs, entropy, cfg) -> (loss [T], metrics [T]): a policy loss in a file of the user.
OwnLoss = Callable[[Packed, Tensor, Tensor, AlgoConfig], tuple[Tensor, Metrics]]
POLICY_LOSSES = ("ppo", "gspo", "cispo")

MAX_MEAN_LOG_RATIO = 10.0  # Of the geometric mean of a sequence, in GSPO: verl's.
MAX_K3_LOG_RATIO = 10.0  # log(reference / policy) of a token, beyond which k3 does not grow.


@dataclass(frozen=True, kw_only=True)
class Loss:
    """A token loss and how its values become one number."""

    token_loss: Callable[[Packed, Tensor, Tensor], tuple[Tensor, Metrics]]
    aggregation: str = "token"  # See `normalize.weights`.
    fixed_length: int = 1  # The constant length of aggregation `fixed`.
    # Whether the loss has a term in the entropy; costs one more buffer in the head's backward.
    entropy_gradient: bool = False


def kl_estimator(cfg: AlgoConfig) -> str:
    """Return what `algo.kl_estimator` auto stands for: k1 in the reward, k3 in the loss."""
    if cfg.kl_estimator != "auto":
        return cfg.kl_estimator
    return "k1" if cfg.kl_in == "reward" else "k3"


def kl(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """Estimate KL(policy || reference) at sampled tokens, [T].

    With d = log(ref / policy): k1 = -d (unbiased, noisy), k2 = d^2 / 2, k3 = e^d - 1 - d (unbiased,
    never negative). Schulman 2020, "Approximating KL divergence". k3 takes d as at most 10, so that
    its gradient is 0 above: e^d is 10^13 at d = 30. (OpenRLHF and verl, which bound k3 itself by
    10, have that from d = 2.6 on.)

    Which one is right depends on where it counts, since the gradient of an estimate is not an
    estimate of the gradient. As a loss k2 has the gradient of the KL; that of k1 is 0 on average,
    and that of k3 belongs to the reverse divergence. As a part of the reward, where the policy
    gradient multiplies it by grad log policy, k1 gives the gradient of the KL; k2 and k3, which
    vanish to second order near the reference, hardly pull back there.
    """
    d = ref_logprobs - logprobs
    if estimator == "k1":
        return -d
    if estimator == "k2":
        return d**2 / 2
    d = d.clamp(max=MAX_K3_LOG_RATIO)
    return torch.expm1(d) - d


def kl_loss(logprobs: Tensor, old_logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """Return the KL term of a loss, [T].

    It is k1, k2 or k3, or `unbiased`: the value of r k3 with r = policy / old, through which the
    gradient goes too. With g = grad log policy, grad (r k3) = r (k3 + 1 - e^d) g = -r d g. The mean
    of that over tokens of `old` is the gradient of the KL. Tang and Munos 2025 (arXiv 2506.09477);
    DeepSeek-V3.2 (arXiv 2512.02556), sec. 3.1. It is computed as -r d g, the gradient of r k2 with
    a constant r: in float32 the terms of r (k3 + 1 - e^d) cancel from 17 nats on.
    """
    if estimator == "unbiased":
        ratio = bounded_exp(logprobs - old_logprobs).detach()
        d = (ref_logprobs - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).detach()
        value = ratio * (torch.expm1(d) - d)
        with_gradient = ratio * kl(logprobs, ref_logprobs, "k2")
        return value + (with_gradient - with_gradient.detach())
    return kl(logprobs, ref_logprobs, estimator)


def adapt_kl_coef(coef: float, measured: float, target: float) -> float:
    """Return coef (1 + 0.1 clip(measured / target - 1, -0.2, 0.2)): more where the KL is too high.

    Ziegler et al. 2019 (arXiv 1909.08593), sec. 2.2.
    """
    error = min(0.2, max(-0.2, measured / target - 1))
    return coef * (1 + 0.1 * error)


def ppo_clip(ratio: Tensor, advantages: Tensor, cfg: AlgoConfig) -> Tensor:
    """Return -min(r A, clip(r, 1 - low, 1 + high) A), [T].

    Schulman et al. 2017 (arXiv 1707.06347), eq. 7. Separate bounds are DAPO's clip-higher (arXiv
    2503.14476, sec. 3.1). With dual_clip = c > 1 the loss at negative advantages is at most -c A,
    so that one token with a huge ratio cannot dominate the batch: Ye et al. 2020 (arXiv
    1912.09729), eq. 5.
    """
    clipped = ratio.clamp(1 - cfg.clip_low, 1 + cfg.clip_high) * advantages
    loss = -torch.minimum(ratio * advantages, clipped)
    if cfg.dual_clip:
        bounded = torch.minimum(loss, -cfg.dual_clip * advantages)
        loss = torch.where(advantages < 0, bounded, loss)
    return loss


def sequence_ratio(log_ratio: Tensor, batch: Packed) -> Tensor:
    """Return (prod_t r_t)^(1/L) of each sequence at its rows, [T]; its gradient is its token's.

    GSPO: Zheng et al. 2025 (arXiv 2507.18071), eq. 7. Where all tokens of an answer count alike,
    the gradients of its rows add up to that of the whole ratio; where they do not, because of their
    advantages or of a mask, each counts by itself (GSPO-token, eq. 14). Mean log-ratios are at
    most 10, where the gradient is 0, as in verl.
    """
    sums = sequence_sums(torch.where(batch.loss_mask, log_ratio.detach(), 0.0), batch)
    means = to_rows(sums / batch.sequences.loss_tokens.clamp(min=1), batch)
    return (means + (log_ratio - log_ratio.detach())).clamp(max=MAX_MEAN_LOG_RATIO).exp()


def cispo(ratio: Tensor, logprobs: Tensor, advantages: Tensor, cfg: AlgoConfig) -> Tensor:
    """Return -sg(clip(r, 1 - low, 1 + high)) A log policy, [T].

    A clipped token keeps a gradient, of bounded weight. MiniMax 2025 (arXiv 2506.13585), eq. 4.
    """
    weight = ratio.detach().clamp(1 - cfg.clip_low, 1 + cfg.clip_high)
    return -weight * advantages * logprobs


def old_logprobs(batch: Packed, logprobs: Tensor) -> Tensor:
    """Return the log-probs before the step's first update, [T], without gradient."""
    return logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs


def find_own(name: str) -> OwnLoss | None:
    """Return the loss of a file that `algo.loss` names; None: it is one of minirl's.

    Raises:
        UserError: there is none of that name.
    """
    if name in POLICY_LOSSES:
        return None
    return find_function("algo.loss", name, dict.fromkeys(POLICY_LOSSES, ppo_clip))


def policy(cfg: AlgoConfig, max_tokens: int) -> Loss:
    """Return the policy loss that the config asks for, one of minirl's or that of a file.

    The old log-probs are the trainer's own before the first update (`batch.old_logprobs`). With one
    update per batch they equal the current ones, so the batch need not carry them.

    Args:
        cfg: the section `algo` of the config, with the present weight of the KL.
        max_tokens: sampled tokens of an episode at most, for aggregation `fixed`.

    Raises:
        UserError: `cfg.loss` names none.
    """
    own = find_own(cfg.loss)
    estimator = kl_estimator(cfg)
    corrected: correction.Correction | None = None
    if (cfg.correction.level or cfg.correction.preset) != "off":
        corrected = correction.resolve(cfg.correction)

    def token_loss(batch: Packed, logprobs: Tensor, entropy: Tensor) -> tuple[Tensor, Metrics]:
        # 1. The ratio to the old policy, and the surrogate.
        old = old_logprobs(batch, logprobs)
        own_metrics: Metrics = {}
        if cfg.loss == "gspo":
            ratio = sequence_ratio(logprobs - old, batch)
        else:
            ratio = bounded_exp(logprobs - old)
        if own:
            loss, own_metrics = own(replace(batch, old_logprobs=old), logprobs, entropy, cfg)
        elif cfg.loss == "cispo":
            loss = cispo(ratio, logprobs, batch.advantages, cfg)
        elif corrected and corrected.trust_region:
            loss = -ratio * batch.advantages  # The mask of the correction stands for the clip.
        else:
            loss = ppo_clip(ratio, batch.advantages, cfg)
        with torch.no_grad():
            mismatch = (old - batch.engine_logprobs).abs()
            too_low = (ratio < 1 - cfg.clip_low) & (batch.advantages < 0)
            too_high = (ratio > 1 + cfg.clip_high) & (batch.advantages > 0)
            metrics = {
                "entropy": entropy.detach(),
                "clip_fraction": (too_low | too_high).float(),
                "mismatch": mismatch,
                "mismatch_max": mismatch,
                "policy_kl": kl(old, logprobs, "k3"),  # Tokens are drawn by the old policy.
                **own_metrics,
            }

        # 2. Correct for the engine having sampled from slightly other probabilities.
        if corrected:
            weight, outside = correction.weights(logprobs, old, batch, corrected)
            loss = loss * weight
            metrics |= {"correction_weight": weight, "correction_outside": outside.float()}

        # 3. Entropy bonus; both only at the tokens of highest entropy, if so configured.
        if cfg.entropy_coef:
            loss = loss - cfg.entropy_coef * entropy
        if batch.high_entropy_mask is not None:
            loss = loss * batch.high_entropy_mask

        # 4. KL to the reference, at every token.
        if batch.ref_logprobs is not None:
            ref_kl = kl_loss(logprobs, old, batch.ref_logprobs, estimator)
            if cfg.kl_coef and cfg.kl_in == "loss":
                loss = loss + cfg.kl_coef * ref_kl
            metrics["ref_kl"] = ref_kl.detach()
        return loss, metrics

    return Loss(
        token_loss=token_loss,
        aggregation=cfg.aggregation,
        fixed_length=max_tokens,
        entropy_gradient=bool(cfg.entropy_coef) or own is not None,
    )


def value_clip(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> Tensor:
    """Return max((V - R)^2, (V' - R)^2) / 2 with V' = V_old + clamp(V - V_old, -clip, clip), [T].

    With clip = 0 the second term is left out. Schulman et al. 2017 (arXiv 1707.06347), eq. 9, L^VF.
    The clip is that of its authors' code, "PPO2" of openai/baselines: a critic moves at most so far
    from the values that advantages were made with.
    """
    loss = (values - returns).square()
    if clip:
        clipped = old_values + (values - old_values).clamp(-clip, clip)
        loss = torch.maximum(loss, (clipped - returns).square())
    return loss / 2


def value(clip: float) -> Loss:
    """Return a critic's loss, the mean over all sampled tokens.

    `batch.values` are the critic's own values before the first update.
    """

    def token_loss(batch: Packed, values: Tensor, entropy: Tensor) -> tuple[Tensor, Metrics]:
        with torch.no_grad():
            clipped = (values - batch.values).abs() > clip
            metrics = {
                "value": values,
                "return": batch.returns,
                "error": (values - batch.returns).abs(),
                "clip_fraction": clipped.float() * (clip > 0),
            }
        return value_clip(values, batch.values, batch.returns, clip), metrics

    return Loss(token_loss=token_loss)


def sft() -> Loss:
    """Return the negative log-likelihood of the target tokens, the mean over all of them."""

    def token_loss(batch: Packed, logprobs: Tensor, entropy: Tensor) -> tuple[Tensor, Metrics]:
        return -logprobs, {"entropy": entropy.detach()}

    return Loss(token_loss=token_loss)
