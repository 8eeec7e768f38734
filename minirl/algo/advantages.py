"""Advantage estimators without a critic. Each is one function; its name goes into ESTIMATORS or
TOKEN_ESTIMATORS.

Most give every token of an answer the same advantage. Such an estimator gets all episodes of a
step, those of all ranks:
    rewards  float64 [N]
    groups   int64 [N]   0 .. G-1; siblings of one prompt share a number
and returns float64 [N]. A group of equal rewards gets exactly 0, whatever the reward.

A token estimator gets a micro-batch with old and reference log-probs, the reward of each token
(float64 [T], this rank's rows; `normalize.over_sequences` brings them in order) and the config, and
returns the advantages [T].
"""

from collections.abc import Callable

import torch
from torch import Tensor

from minirl.algo.losses import kl
from minirl.algo.normalize import over_sequences, sequence_sums, to_rows
from minirl.config.lookup import find_function
from minirl.config.rl import AlgoConfig
from minirl.types import Packed

Sums = Callable[[Tensor], Tensor]
Estimator = Callable[[Tensor, Tensor], Tensor]
TokenEstimator = Callable[[Packed, Tensor, AlgoConfig], Tensor]
WHITENED = (
    "reinforce_pp",
    "gae",
    # Token estimators whose advantages get mean 0 and deviation 1 over the tokens of the global
    # batch.
)


def center(rewards: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
    """Rewards minus the mean of their group, and the size of the group; float64 [N] both.

    Equal rewards are set to 0 explicitly: their mean can be off by rounding, and a division by a
    tiny deviation would blow that up to an advantage of order 1.
    """

    def over_group(how: str) -> Tensor:
        return torch.zeros_like(rewards).scatter_reduce_(
            0, groups, rewards, how, include_self=False
        )[groups]

    centered = (rewards - over_group("mean")).masked_fill(
        over_group("amin") == over_group("amax"), 0.0
    )
    return centered, groups.bincount()[groups].to(rewards.dtype)


def grpo(rewards: Tensor, groups: Tensor) -> Tensor:
    """A_i = (r_i - mean(r)) / (std(r) + 1e-6), std unbiased. Shao et al. 2024, DeepSeekMath (arXiv
    2402.03300), sec. 4.1.
    """
    centered, size = center(rewards, groups)
    squares = torch.zeros_like(rewards).index_add_(0, groups, centered**2)[groups]
    return centered / ((squares / (size - 1).clamp(min=1)).sqrt() + 1e-6)


def dr_grpo(rewards: Tensor, groups: Tensor) -> Tensor:
    """A_i = r_i - mean(r). Liu et al. 2025, Understanding R1-Zero-like training (arXiv 2503.20783);
    pair with aggregation fixed.
    """
    return center(rewards, groups)[0]


def rloo(rewards: Tensor, groups: Tensor) -> Tensor:
    """A_i = r_i - mean of the others = (r_i - mean(r)) n/(n-1). Ahmadian et al. 2024, Back to
    basics (arXiv 2402.14740), eq. 6.
    """
    centered, size = center(rewards, groups)
    return centered * size / (size - 1).clamp(min=1)


def reinforce_pp_baseline(rewards: Tensor, groups: Tensor) -> Tensor:
    """A_i = (r_i - mean(r)) / std over the global batch. Hu et al. 2025, REINFORCE++ (arXiv
    2501.03262), sec. 3.2.

    The paper also subtracts the batch mean, which is 0 after the group means are gone; leaving that
    out keeps equal groups at exactly 0.
    """
    centered, _ = center(rewards, groups)
    return centered / (centered.square().mean().sqrt() + 1e-8)


def discounted(sequence: Tensor, rewards: Tensor, factor: float) -> Tensor:
    """sum_l factor^l r_{t + l} over the later tokens of the same sequence, [N]; in log2(longest)
    passes, each of which joins two runs of sums.
    """
    out, step = rewards.clone(), 1
    while step < len(out) and bool((same := sequence[step:] == sequence[:-step]).any()):
        out[:-step] += torch.where(same, factor**step * out[step:], 0.0)
        step *= 2
    return out


def reinforce_pp(batch: Packed, rewards: Tensor, cfg: AlgoConfig) -> Tensor:
    """A_t = sum_{k >= t} gamma^(k - t) r_k, whitened over the global batch. Hu et al. 2025,
    REINFORCE++ (arXiv 2501.03262), sec. 3.1; the KL is in r with algo.kl_in reward.
    """
    return over_sequences(lambda sequence, r: discounted(sequence, r, cfg.gamma), batch, rewards)


def gae(batch: Packed, rewards: Tensor, cfg: AlgoConfig) -> Tensor:
    """A_t = sum_l (gamma lambda)^l d_{t + l} with d_t = r_t + gamma V_{t+1} - V_t, whitened over
    the global batch. Schulman et al. 2016 (arXiv 1506.02438), eq. 16. Sets `batch.returns`, A_t +
    V_t, before the whitening.

    V is of what stood before the token (`batch.values`), known at sampled tokens only, so the
    successor of one is the next sampled one, over what an environment said in between; after the
    last one it is 0.
    """

    def estimate(sequence: Tensor, r: Tensor, v: Tensor) -> Tensor:
        last = torch.ones_like(sequence, dtype=torch.bool)
        last[:-1] = sequence[1:] != sequence[:-1]
        return discounted(
            sequence,
            r + cfg.gamma * v.roll(-1).masked_fill(last, 0.0) - v,
            cfg.gamma * cfg.gae_lambda,
        )

    advantages = over_sequences(estimate, batch, rewards, batch.values.double())
    batch.returns = torch.where(batch.loss_mask, advantages + batch.values, 0.0).to(
        batch.values.dtype
    )
    return advantages


def on_policy_distill(batch: Packed, rewards: Tensor, cfg: AlgoConfig) -> Tensor:
    """A_t = log teacher - log policy: minus the reverse KL at the sampled token; rewards play no
    part. Agarwal et al. 2023 (arXiv 2306.13649); as an
    advantage: Lu 2025, "On-policy distillation".
    """
    return batch.ref_logprobs - batch.old_logprobs


ESTIMATORS: dict[str, Estimator] = {
    f.__name__: f for f in (grpo, dr_grpo, rloo, reinforce_pp_baseline)
}
TOKEN_ESTIMATORS: dict[str, TokenEstimator] = {
    f.__name__: f for f in (reinforce_pp, gae, on_policy_distill)
}


def find(name: str) -> Estimator | TokenEstimator:
    """The estimator that `algo.advantage` names. Raises UserError if there is none."""
    return find_function("algo.advantage", name, ESTIMATORS | TOKEN_ESTIMATORS)


def need_old_logprobs(cfg: AlgoConfig) -> bool:
    """They are made of the policy's own log-probs, beside rewards, values and what a reference
    says.
    """
    return cfg.advantage == "on_policy_distill" or bool(cfg.kl_coef) and cfg.kl_in == "reward"


def assign(
    batches: list[Packed],
    estimator: Estimator | TokenEstimator,
    cfg: AlgoConfig,
    kl_coef: float,
    *,
    sums: Sums,
    maxima: Sums,
    gather: Callable[[object], list],
) -> None:
    """Set `advantages` [T], 0 outside the loss, of micro-batches that know what the estimator asks
    for: old and reference log-probs (`need_old_logprobs`), values. Collective.

    sums, maxima: of a CPU tensor over the ranks that hold different tokens, or all; gather: a value
    of every rank.
    """
    in_reward = kl_coef if cfg.kl_in == "reward" else 0.0
    penalties = [
        torch.where(
            b.loss_mask, in_reward * kl(b.old_logprobs, b.ref_logprobs, cfg.kl_estimator), 0.0
        ).double()
        if in_reward
        else torch.zeros_like(b.engine_logprobs, dtype=torch.float64)
        for b in batches
    ]
    if cfg.advantage in TOKEN_ESTIMATORS:
        values = [
            estimator(b, token_rewards(b, penalty), cfg)
            for b, penalty in zip(batches, penalties, strict=True)
        ]
        values = (
            whiten(values, [b.loss_mask for b in batches], sums, maxima)
            if cfg.advantage in WHITENED
            else values
        )
    else:
        values = _by_group(batches, penalties, estimator, gather)
    for batch, value in zip(batches, values, strict=True):
        known = next(
            x for x in (batch.old_logprobs, batch.values, batch.engine_logprobs) if x is not None
        )
        batch.advantages = torch.where(batch.loss_mask, value, 0.0).to(known.dtype)


def token_rewards(batch: Packed, penalty: Tensor) -> Tensor:
    """float64 [T]: minus the penalty of each token, what answers earned at their last tokens, and
    the rest of the sequence's reward at its last sampled one. Ouyang et al. 2022 (arXiv
    2203.02155), eq. 2.
    """
    last = over_sequences(
        lambda sequence: torch.cat(
            [
                sequence[1:] != sequence[:-1],
                sequence.new_ones(min(1, len(sequence)), dtype=torch.bool),
            ]
        ),
        batch,
    )
    turns = (
        torch.zeros_like(penalty)
        if batch.turn_rewards is None
        else torch.where(batch.loss_mask, batch.turn_rewards, 0.0).double()
    )
    return (
        torch.where(last, to_rows(batch.rewards - sequence_sums(turns, batch), batch), 0.0)
        + turns
        - penalty
    )


def whiten(values: list[Tensor], masks: list[Tensor], sums: Sums, maxima: Sums) -> list[Tensor]:
    """(A - mean) / (deviation + 1e-8) over all tokens in the loss, of all ranks; where all are
    equal, exactly 0.
    """
    own = torch.cat([v[m].double() for v, m in zip(values, masks, strict=True)]).cpu()
    highest, lowest = maxima(
        torch.tensor([x.max() if len(x) else -torch.inf for x in (own, -own)], dtype=torch.float64)
    ).tolist()
    if highest == -lowest:
        return [torch.zeros_like(v) for v in values]
    total, count = sums(torch.tensor([own.sum(), len(own)], dtype=torch.float64)).tolist()
    mean = total / max(1.0, count)
    (squares,) = sums(((own - mean) ** 2).sum()[None]).tolist()
    return [(v - mean) / ((squares / max(1.0, count)) ** 0.5 + 1e-8) for v in values]


def _by_group(
    batches: list[Packed],
    penalties: list[Tensor],
    estimator: Estimator,
    gather: Callable[[object], list],
) -> list[Tensor]:
    """Siblings are anywhere by now, so every rank estimates the whole batch from a table of all
    rewards, less each answer's penalties. An episode counts once in its group, and all its segments
    get what it earns.
    """
    own: dict[tuple[int, int, int], tuple[float, float]] = {}
    for batch, penalty in zip(batches, penalties, strict=True):
        charged = zip(batch.rewards.tolist(), sequence_sums(penalty, batch).tolist(), strict=True)
        own |= {
            name: pair
            for name, pair, num in zip(
                batch.sequence_ids, charged, batch.loss_tokens.tolist(), strict=True
            )
            if num
        }
    table = {
        name: pair for part in reversed(gather(own)) for name, pair in part.items()
    }  # of copies of a sequence the first rank's
    rewards: dict[tuple[int, int], float] = {}
    for (group, episode, _), (reward, penalty) in sorted(
        table.items()
    ):  # segments share the reward, and are each charged
        rewards[group, episode] = rewards.get((group, episode), reward) - penalty
    _, groups = torch.tensor([group for group, _ in rewards], dtype=torch.int64).unique(
        return_inverse=True
    )
    found = dict(
        zip(
            rewards,
            estimator(torch.tensor(list(rewards.values()), dtype=torch.float64), groups).tolist(),
            strict=True,
        )
    )
    return [
        to_rows(
            torch.tensor(
                [found.get(n[:2], 0.0) for n in b.sequence_ids],
                dtype=torch.float64,
                device=b.inputs.device,
            ),
            b,
        )
        for b in batches
    ]
