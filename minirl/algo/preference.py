"""Losses of judged answers: reward models and direct preference optimization (pairs), KTO (single).

The first answer of a pair was chosen, the second rejected. Each loss is a function of what the
model gives whole sequences, which `sequence_sums` adds up: a value per pair, or per single answer,
[P], and the mean is over all of them in the optimizer step.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from minirl.algo.losses import Loss, Metrics
from minirl.algo.normalize import sequence_sums, weights
from minirl.config.supervised import DPOLossConfig, KTOLossConfig, RewardModelLossConfig
from minirl.types.packed import Packed


def reward_pair(
    chosen: Tensor, rejected: Tensor, margins: Tensor, cfg: RewardModelLossConfig
) -> Tensor:
    """Return the Bradley-Terry loss of two scores, [P].

    sigmoid: -log sigmoid(r_c - r_r - m), where the margin m is how much better the chosen answer
    is. Touvron et al. 2023, Llama 2 (arXiv 2307.09288), eq. 2. logexp: log(1 + exp(r_r - r_c)),
    without margins; Stiennon et al. 2020 (arXiv 2009.01325). center_coef c adds c (r_c + r_r)^2,
    which holds scores near 0. Eisenstein et al. 2023 (arXiv 2312.09244).
    """
    difference = chosen - rejected - (margins if cfg.loss == "sigmoid" else 0.0)
    center = cfg.center_coef * (chosen + rejected).square()
    return F.softplus(-difference) + center  # stable: -log sigmoid(x) = softplus(-x)


def dpo_pair(difference: Tensor, cfg: DPOLossConfig) -> Tensor:
    """Return the loss of z = log(pi / ref) of the chosen answer minus that of the rejected, [P].

    sigmoid: -log sigmoid(beta z). Rafailov et al. 2023 (arXiv 2305.18290), eq. 7. With
    label_smoothing e, the chance that a pair is the wrong way round: (1 - e) of it and e of
    -log sigmoid(-beta z). Mitchell 2023, cDPO. hinge: max(0, 1 - beta z). Zhao et al. 2023, SLiC
    (arXiv 2305.10425). ipo: (z - 1 / (2 beta))^2. Azar et al. 2023 (arXiv 2310.12036), eq. 17.
    """
    scaled = cfg.beta * difference
    if cfg.loss == "hinge":
        return F.relu(1 - scaled)
    if cfg.loss == "ipo":
        return (difference - 1 / (2 * cfg.beta)).square()
    smoothing = cfg.label_smoothing
    return (1 - smoothing) * F.softplus(-scaled) + smoothing * F.softplus(scaled)


def reward_model(cfg: RewardModelLossConfig) -> Loss:
    """Return the loss of a model with a score head; a sequence's score is that of its last row."""

    def loss(batch: Packed, scores: Tensor, entropy: Tensor) -> tuple[Tensor, Metrics]:
        last_scores = sequence_sums(scores * batch.is_last_row, batch)
        chosen, rejected = last_scores[batch.preference.answers].unbind(1)
        better, worse = batch.sequences.rewards.to(scores.dtype)[batch.preference.answers].unbind(1)
        with torch.no_grad():
            metrics = {
                "accuracy": (chosen > rejected).double(),
                "margin": chosen - rejected,
                "score_chosen": chosen,
                "score_rejected": rejected,
            }
        return reward_pair(chosen, rejected, better - worse, cfg), metrics

    return Loss(token_loss=loss, aggregation="pair")


def dpo(cfg: DPOLossConfig) -> Loss:
    """Return the DPO loss of a policy. Batches need `ref_logprobs`. Rewards are beta log(pi / ref).

    length_normalized: log-probs of a sequence are means over its tokens, in the paper's equations
    (Lambert et al. 2024, Tulu 3, arXiv 2411.15124). nll_coef c adds c times -log pi of the chosen
    answer per token. Pang et al. 2024 (arXiv 2404.19733).
    """

    def loss(batch: Packed, logprobs: Tensor, entropy: Tensor) -> tuple[Tensor, Metrics]:
        lengths = batch.sequences.loss_tokens.clamp(min=1)
        policy = sequence_sums(logprobs, batch)
        ref = sequence_sums(batch.ref_logprobs.to(logprobs.dtype), batch)
        log_ratio = (policy - ref) / (lengths if cfg.length_normalized else 1)
        chosen, rejected = log_ratio[batch.preference.answers].unbind(1)
        likelihood = (policy / lengths)[batch.preference.answers[:, 0]]
        with torch.no_grad():
            metrics = {
                "accuracy": (chosen > rejected).double(),
                "margin": cfg.beta * (chosen - rejected),
                "reward_chosen": cfg.beta * chosen,
                "reward_rejected": cfg.beta * rejected,
                "nll_chosen": -likelihood,
            }
        return dpo_pair(chosen - rejected, cfg) - cfg.nll_coef * likelihood, metrics

    return Loss(token_loss=loss, aggregation="pair")


def kto_value(log_ratio: Tensor, desirable: Tensor, kl: Tensor, cfg: KTOLossConfig) -> Tensor:
    """Return the loss of d = log(pi / ref) of single answers, [P].

    kto: w_D (1 - sigmoid(beta (d - z))) of a desirable answer, w_U (1 - sigmoid(beta (z - d))) of
    an undesirable one, with the KL z = `kl` as a constant. Ethayarajh et al. 2024
    (arXiv 2402.01306), eq. 7 and 8. apo_zero_unpaired: the same with z = 0. D'Oosterlinck et al.
    2024 (arXiv 2408.06266), the variant of eq. 7 for single answers.
    """
    against = kl if cfg.loss == "kto" else torch.zeros_like(kl)
    is_wanted = desirable.to(log_ratio.dtype)
    distance = cfg.beta * (2 * is_wanted - 1) * (log_ratio - against)
    kind_weights = cfg.desirable_weight * is_wanted + cfg.undesirable_weight * (1 - is_wanted)
    return kind_weights * torch.sigmoid(-distance)  # 1 - sigmoid(x)


def log_ratios(logprobs: Tensor, ref_logprobs: Tensor, batch: Packed) -> Tensor:
    """Return log(pi / ref) of answers that were judged alone, [P]."""
    policy = sequence_sums(logprobs, batch)
    ref = sequence_sums(ref_logprobs.to(logprobs.dtype), batch)
    return (policy - ref)[batch.preference.answers[:, 0]]


@torch.no_grad()
def kto_baseline(batches: list[Packed], data_sums: Callable[[Tensor], Tensor]) -> Tensor:
    """Return max(0, mean log(pi / ref)) over all answers of all ranks, float64. Collective.

    It is z of `kto_value` if each answer belongs to another prompt: an estimate of the KL that is
    biased, but as cheap as a forward pass (arXiv 2402.01306, sec. 4.1).

    Args:
        batches: of this rank, with `old_logprobs` and `ref_logprobs`.
        data_sums: adds a CPU tensor over the ranks that hold different tokens.
    """
    totals = torch.zeros(2, dtype=torch.float64)
    for batch in batches:
        ratios = log_ratios(batch.old_logprobs, batch.ref_logprobs, batch).double()
        shares = weights(batch, "pair")
        totals += torch.stack([(ratios * shares).sum(), shares.sum()]).cpu()
    total, count = data_sums(totals).unbind()
    return (total / count.round().clamp(min=1)).clamp(min=0)


def kto(cfg: KTOLossConfig) -> Loss:
    """Return the KTO loss of a policy. Batches need `ref_logprobs` and `baseline`.

    A positive reward of a sequence marks a desirable answer. Metrics of one kind of answers are 0
    at the other kind, and `share_desirable` says how to make means of them.
    """

    def loss(batch: Packed, logprobs: Tensor, entropy: Tensor) -> tuple[Tensor, Metrics]:
        log_ratio = log_ratios(logprobs, batch.ref_logprobs, batch)
        desirable = batch.sequences.rewards[batch.preference.answers[:, 0]] > 0
        kl = batch.preference.baseline.to(log_ratio)
        with torch.no_grad():
            reward = cfg.beta * log_ratio
            baseline = cfg.beta * kl
            is_right = torch.where(desirable, reward > baseline, reward < baseline)
            metrics = {
                "accuracy": is_right.double(),
                "kl": kl.expand(len(reward)),
                "share_desirable": desirable.double(),
                "reward_desirable": torch.where(desirable, reward, 0.0),
                "reward_undesirable": torch.where(desirable, 0.0, reward),
            }
        return kto_value(log_ratio, desirable, kl, cfg), metrics

    return Loss(token_loss=loss, aggregation="pair")
