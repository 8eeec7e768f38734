"""Advantage estimators. Each is one function; its name goes into ESTIMATORS or TOKEN_ESTIMATORS.

Most give every token of an answer the same advantage. Such an estimator is called with all episodes
of a step, those of all ranks:
    rewards  float64 [N]
    groups   int64 [N]   0 .. G - 1; siblings of one prompt share a number
and returns float64 [N]. A group of equal rewards gets exactly 0, whatever the reward.

A token estimator is called with a micro-batch that has old and reference log-probs, the reward of
each token (float64 [T], this rank's rows; `normalize.over_sequences` brings them into order) and
the config, and returns the advantages [T].

An estimator in a file is of one kind or the other by its signature: f(rewards, groups) or
f(batch, rewards, cfg). `compares_nothing` and `whitened` declare what else it is.
"""

import inspect
from collections.abc import Callable, Sequence
from inspect import Parameter

import numpy as np
import torch
from torch import Tensor

from minirl.algo.losses import kl, kl_estimator
from minirl.algo.normalize import over_sequences, sequence_sums, to_rows
from minirl.base.errors import UserError, require
from minirl.config.lookup import find_function
from minirl.config.rl import AlgoConfig
from minirl.types.packed import Packed, Trajectory

Reduce = Callable[[Tensor], Tensor]  # A CPU tensor of every rank to their sum or maximum.
# A table of numbers of every rank to all of them, in rank order.
GatherRows = Callable[[np.ndarray], list[np.ndarray]]

Estimator = Callable[..., Tensor]
# Token estimators whose advantages get mean 0 and deviation 1 over the tokens of the global batch.
WHITENED: set[Estimator] = set()
# Estimators of whole answers that do not compare the answers to a prompt, so that one will do.
COMPARES_NOTHING: set[Estimator] = set()


def whitened(estimator: Estimator) -> Estimator:
    """Declare (as a decorator) that a token estimator's results are whitened over all tokens."""
    WHITENED.add(estimator)
    return estimator


def compares_nothing(estimator: Estimator) -> Estimator:
    """Declare (as a decorator) that an estimator works with one answer to a prompt."""
    COMPARES_NOTHING.add(estimator)
    return estimator


def is_by_token(estimator: Estimator) -> bool:
    """Return whether an estimator is of single tokens: it is called with three arguments."""
    given = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(estimator).parameters.values()
    return sum(p.kind in given and p.default is Parameter.empty for p in parameters) == 3


def compares_answers(estimator: Estimator) -> bool:
    """Return whether an estimator needs several answers to a prompt."""
    return not is_by_token(estimator) and inspect.unwrap(estimator) not in COMPARES_NOTHING


# --------------------------------------------------------------------- estimators of whole answers


def center(rewards: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
    """Return rewards minus the mean of their group, and the size of the group; float64 [N] both.

    Equal rewards are set to 0 explicitly: their mean can be off by rounding, and a division by a
    tiny deviation would blow that up to an advantage of order 1.
    """

    def over_group(how: str) -> Tensor:
        per_group = torch.zeros_like(rewards)
        return per_group.scatter_reduce_(0, groups, rewards, how, include_self=False)[groups]

    all_equal = over_group("amin") == over_group("amax")
    centered = (rewards - over_group("mean")).masked_fill(all_equal, 0.0)
    return centered, groups.bincount()[groups].to(rewards.dtype)


def grpo(rewards: Tensor, groups: Tensor) -> Tensor:
    """Return A_i = (r_i - mean(r)) / (std(r) + 1e-6), std unbiased.

    Shao et al. 2024, DeepSeekMath (arXiv 2402.03300), sec. 4.1.
    """
    centered, size = center(rewards, groups)
    squares = torch.zeros_like(rewards).index_add_(0, groups, centered**2)[groups]
    return centered / ((squares / (size - 1).clamp(min=1)).sqrt() + 1e-6)


def dr_grpo(rewards: Tensor, groups: Tensor) -> Tensor:
    """Return A_i = r_i - mean(r); to be combined with aggregation `fixed`.

    Liu et al. 2025, Understanding R1-Zero-like training (arXiv 2503.20783).
    """
    return center(rewards, groups)[0]


def rloo(rewards: Tensor, groups: Tensor) -> Tensor:
    """Return A_i = r_i - mean of the others = (r_i - mean(r)) n / (n - 1).

    Ahmadian et al. 2024, Back to basics (arXiv 2402.14740), eq. 6.
    """
    centered, size = center(rewards, groups)
    return centered * size / (size - 1).clamp(min=1)


def reinforce_pp_baseline(rewards: Tensor, groups: Tensor) -> Tensor:
    """Return A_i = (r_i - mean(r)) / std over the global batch.

    Hu et al. 2025, REINFORCE++ (arXiv 2501.03262), sec. 3.2. The paper also subtracts the batch
    mean, which over answers is 0 after the group means are gone; leaving that out keeps equal
    groups at exactly 0.

    The authors' code (OpenRLHF) and verl normalise over tokens: long answers count more, the mean
    over tokens is not 0 and is subtracted, and equal groups do not stay at 0. On random groups the
    two differ by up to 0.6. `algo.whiten_tokens` takes theirs: `assign` then whitens the result,
    whose scale does not matter to that.
    """
    centered, _ = center(rewards, groups)
    return centered / (centered.square().mean().sqrt() + 1e-8)


# --------------------------------------------------------------------- estimators of single tokens


def discounted(sequence: Tensor, rewards: Tensor, factor: float) -> Tensor:
    """Return sum_l factor^l r_{t + l} over the later tokens of the same sequence, [N].

    It takes log2(longest) passes, each of which doubles the number of tokens that are summed.

    Args:
        sequence: int64 [N], number of each token's sequence, ascending.
        rewards: float64 [N].
        factor: of one step.
    """
    sums = rewards.clone()
    step = 1
    while step < len(sums):
        same = sequence[step:] == sequence[:-step]
        if not same.any():
            break
        sums[:-step] += torch.where(same, factor**step * sums[step:], 0.0)
        step *= 2
    return sums


@whitened
def reinforce_pp(batch: Packed, rewards: Tensor, cfg: AlgoConfig) -> Tensor:
    """Return A_t = sum_{k >= t} gamma^(k - t) r_k, to be whitened over the global batch.

    With algo.kl_in reward the KL is part of r. Hu et al. 2025, REINFORCE++ (arXiv 2501.03262), sec.
    3.1.
    """
    return over_sequences(lambda sequence, r: discounted(sequence, r, cfg.gamma), batch, rewards)


@whitened
def gae(batch: Packed, rewards: Tensor, cfg: AlgoConfig) -> Tensor:
    """Return A_t = sum_l (gamma lambda)^l d_{t + l} with d_t = r_t + gamma V_{t+1} - V_t.

    To be whitened over the global batch. Sets `batch.returns`, A_t + V_t, before the whitening. V
    is the value of what stands before the token (`batch.values`), known at sampled tokens only. So
    the successor of a token is the next sampled one, over what an environment said in between;
    after the last one V is 0. Schulman et al. 2016 (arXiv 1506.02438), eq. 16.
    """

    def estimate(sequence: Tensor, r: Tensor, v: Tensor) -> Tensor:
        next_v = v.roll(-1).masked_fill(_is_last_token(sequence), 0.0)
        delta = r + cfg.gamma * next_v - v
        return discounted(sequence, delta, cfg.gamma * cfg.gae_lambda)

    advantages = over_sequences(estimate, batch, rewards, batch.values.double())
    returns = torch.where(batch.loss_mask, advantages + batch.values, 0.0)
    batch.returns = returns.to(batch.values.dtype)
    return advantages


def on_policy_distill(batch: Packed, rewards: Tensor, cfg: AlgoConfig) -> Tensor:
    """Return A_t = log teacher - log policy: minus the reverse KL at the sampled token.

    Rewards play no part. Agarwal et al. 2023 (arXiv 2306.13649); as an advantage: Lu 2025,
    "On-policy distillation".
    """
    return batch.ref_logprobs - batch.old_logprobs


ESTIMATORS = {f.__name__: f for f in (grpo, dr_grpo, rloo, reinforce_pp_baseline)}
TOKEN_ESTIMATORS = {f.__name__: f for f in (reinforce_pp, gae, on_policy_distill)}


def find(name: str) -> Callable[..., Tensor]:
    """Return the estimator that `algo.advantage` names.

    Raises:
        UserError: if there is none of that name.
    """
    return find_function("algo.advantage", name, ESTIMATORS | TOKEN_ESTIMATORS)


# ------------------------------------------------------------------------- the advantages of a step


def need_old_logprobs(cfg: AlgoConfig) -> bool:
    """Return whether advantages are made of the policy's own log-probs before the step."""
    kl_in_reward = bool(cfg.kl_coef) and cfg.kl_in == "reward"
    is_own = cfg.advantage not in ESTIMATORS | TOKEN_ESTIMATORS
    may_read_them = cfg.advantage == "on_policy_distill" or (
        is_own and is_by_token(find(cfg.advantage))
    )
    return may_read_them or kl_in_reward


def assign(
    batches: list[Packed],
    estimator: Callable[..., Tensor],
    cfg: AlgoConfig,
    *,
    dtype: torch.dtype,
    without_tokens: Sequence[Trajectory] = (),
    sum_over_ranks: Reduce,
    max_over_ranks: Reduce,
    gather_rows: GatherRows,
) -> None:
    """Set `advantages` [T] of every micro-batch of a step, 0 outside the loss. Collective.

    Args:
        batches: with what the estimator needs: old and reference log-probs (`need_old_logprobs`),
            values.
        estimator: as `find` returned it for cfg.advantage.
        cfg: the section `algo` of the config, with the present weight of the KL.
        dtype: of the advantages, which are computed in float64: that of the policy's log-probs.
        without_tokens: episodes that this rank ran and that have no token. Their rewards are
            outcomes of the policy like others, so they count where siblings are compared. That no
            token of theirs is trained on biases nothing: what an episode is compared with does not
            depend on its own actions.
        sum_over_ranks: adds a CPU tensor over the ranks that hold different tokens.
        max_over_ranks: takes its maximum over all ranks.
        gather_rows: returns a table of numbers of every rank.
    """
    penalties = [_kl_penalty(batch, cfg) for batch in batches]
    if is_by_token(estimator):
        values = [
            _by_token(batch, penalty, estimator, cfg)
            for batch, penalty in zip(batches, penalties, strict=True)
        ]
        if inspect.unwrap(estimator) in WHITENED:
            values = whiten(values, batches, sum_over_ranks, max_over_ranks)
    else:
        table = np.concatenate(
            [_rows_of_sequences(batches, penalties), _rows_without_tokens(without_tokens)]
        )
        values = _by_group(batches, gather_rows(table), estimator, cfg.advantage)
        if cfg.whiten_tokens:
            values = whiten(values, batches, sum_over_ranks, max_over_ranks)

    for batch, value in zip(batches, values, strict=True):
        batch.advantages = torch.where(batch.loss_mask, value, 0.0).to(dtype)


def _kl_penalty(batch: Packed, cfg: AlgoConfig) -> Tensor:
    """Return what each token pays for its KL to the reference, float64 [T]; 0 if in the loss."""
    if cfg.kl_in != "reward" or not cfg.kl_coef:
        return torch.zeros_like(batch.engine_logprobs, dtype=torch.float64)
    penalty = cfg.kl_coef * kl(batch.old_logprobs, batch.ref_logprobs, kl_estimator(cfg))
    return torch.where(batch.loss_mask, penalty, 0.0).double()


def token_rewards(batch: Packed, penalty: Tensor) -> Tensor:
    """Return the reward of each token, float64 [T].

    It is minus the token's penalty, plus what an answer earned at its last token, plus the rest of
    the sequence's reward at its last sampled token. Ouyang et al. 2022 (arXiv 2203.02155), eq. 2.
    """
    is_last = over_sequences(_is_last_token, batch)
    if batch.turn_rewards is None:
        turns = torch.zeros_like(penalty)
    else:
        turns = torch.where(batch.loss_mask, batch.turn_rewards, 0.0).double()
    remaining = to_rows(batch.rewards - sequence_sums(turns, batch), batch)
    return torch.where(is_last, remaining, 0.0) + turns - penalty


def _by_token(batch: Packed, penalty: Tensor, estimator: Estimator, cfg: AlgoConfig) -> Tensor:
    """Return the advantages [T] of a micro-batch from an estimator of single tokens."""
    rewards = token_rewards(batch, penalty)
    if cfg.advantage in TOKEN_ESTIMATORS:
        return estimator(batch, rewards, cfg)
    counts = batch.loss_mask
    found = call_own(estimator, cfg.advantage, counts.nonzero()[:, 0], batch, rewards, cfg)
    return found.to(rewards.device)


def _is_last_token(sequence: Tensor) -> Tensor:
    """Return where an ascending int64 [N] of sequence numbers ends each sequence, bool [N]."""
    return sequence.diff(append=sequence.new_full((1,), -1)) != 0


def whiten(
    values: list[Tensor], batches: list[Packed], sum_over_ranks: Reduce, max_over_ranks: Reduce
) -> list[Tensor]:
    """Return (A - mean) / (deviation + 1e-8) over all tokens in the loss, on all ranks.

    Where all are equal, the result is exactly 0.
    """
    in_loss = [v[batch.loss_mask].double() for v, batch in zip(values, batches, strict=True)]
    tokens = torch.cat(in_loss).cpu()

    bounds = [tokens.max(), (-tokens).max()] if len(tokens) else [-torch.inf, -torch.inf]
    highest, minus_lowest = max_over_ranks(torch.tensor(bounds, dtype=torch.float64)).tolist()
    if highest == -minus_lowest:
        return [torch.zeros_like(value) for value in values]

    counted = torch.tensor([tokens.sum(), len(tokens)], dtype=torch.float64)
    total, count = sum_over_ranks(counted).tolist()
    count = max(1.0, count)
    mean = total / count
    squares = sum_over_ranks(((tokens - mean) ** 2).sum()[None]).item()
    deviation = (squares / count) ** 0.5
    return [(value - mean) / (deviation + 1e-8) for value in values]


def _by_group(
    batches: list[Packed],
    tables: list[np.ndarray],
    estimator: Callable[..., Tensor],
    name: str,
) -> list[Tensor]:
    """Return the advantages [T] of each micro-batch from an estimator that compares siblings.

    Siblings may be on any rank, so every rank has the rows of all (`tables`, of each rank) and
    estimates the whole step. `name`: of the estimator, for errors.
    """
    # 1. All sequences. Tensor- and context-parallel ranks have copies: the first rank's count.
    rows = np.concatenate(tables)
    order = np.lexsort((rows[:, 2], rows[:, 1], rows[:, 0]))  # Stable: by rank, where equal.
    rows = rows[order]
    is_copy = (np.diff(rows[:, :3], axis=0, prepend=-1) == 0).all(1)
    rows = rows[~is_copy]

    # 2. An episode counts once in its group. Its segments share the reward, and each pays.
    ids = rows[:, :2].astype(np.int64)
    begins = (np.diff(ids, axis=0, prepend=-1) != 0).any(1)
    episodes = ids[begins]
    earned = rows[begins, 3]
    np.subtract.at(earned, begins.cumsum() - 1, rows[:, 4])  # One after the other.

    # 3. Estimate, with groups numbered 0 .. G - 1.
    _, groups = np.unique(episodes[:, 0], return_inverse=True)
    rewards = torch.from_numpy(earned)
    every = torch.arange(len(rewards))
    estimates = call_own(estimator, name, every, rewards, torch.from_numpy(groups).long())

    # 4. Every row of a sequence gets the advantage of its episode.
    own_groups = [group for batch in batches for group, _, _ in batch.sequence_ids]
    is_own = np.isin(episodes[:, 0], own_groups)
    own_episodes = map(tuple, episodes[is_own].tolist())
    advantage_of = dict(zip(own_episodes, estimates.numpy()[is_own].tolist(), strict=True))
    values = []
    for batch in batches:
        per_sequence = [advantage_of.get(ids[:2], 0.0) for ids in batch.sequence_ids]
        as_tensor = torch.tensor(per_sequence, dtype=torch.float64, device=batch.inputs.device)
        values.append(to_rows(as_tensor, batch))
    return values


def call_own(estimator: Estimator, name: str, counting: Tensor, *arguments: object) -> Tensor:
    """Return the advantages of an estimator, which may be the user's; float64 [N], on the CPU.

    Args:
        estimator: is called with `arguments`, the last tensor of which has N numbers: rewards.
        name: of the estimator, for errors.
        counting: int64, the numbers that have a meaning.
        arguments: (rewards, groups), or (batch, rewards of tokens, cfg).

    Raises:
        UserError: it raises, or returns anything but N numbers, of which those that count are
            finite.
    """
    rewards = next(x for x in arguments if isinstance(x, Tensor))
    expected = f"algo.advantage = {name} must return {len(rewards)} finite numbers, a tensor [N]"
    try:
        estimates = estimator(*arguments)
    # The user's code may raise anything.
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        problem = f"{type(error).__name__}: {error}"
        raise UserError(f"{expected}; it raised {problem}") from error
    if not isinstance(estimates, Tensor) or estimates.is_complex():
        raise UserError(f"{expected}; it returned {estimates!r:.200}")
    require(
        estimates.shape == rewards.shape,
        f"{expected}; it returned one of shape {list(estimates.shape)}",
    )
    estimates = estimates.detach().to("cpu", torch.float64)
    counted = estimates[counting.cpu()]
    wrong = int((~counted.isfinite()).sum())
    require(
        not wrong,
        f"{expected}; {wrong} of them are not finite, the first for an answer with reward "
        f"{rewards.cpu()[counting.cpu()][~counted.isfinite()][:1].tolist()}",
    )
    return estimates


def _rows_of_sequences(batches: list[Packed], penalties: list[Tensor]) -> np.ndarray:
    """Return this rank's sequences with tokens in the loss, without shared prompts and padding.

    Returns:
        float64 [S, 5]: group, episode, segment, reward, penalty of all its tokens.
    """
    tables = []
    for batch, penalty in zip(batches, penalties, strict=True):
        ids = np.array(batch.sequence_ids, np.float64).reshape(-1, 3)
        paid = sequence_sums(penalty, batch)
        numbers = torch.stack([batch.rewards, paid, batch.loss_tokens.double()], 1).cpu().numpy()
        in_loss = numbers[:, 2] > 0
        tables.append(np.concatenate([ids, numbers[:, :2]], 1)[in_loss])
    return np.concatenate([np.empty((0, 5)), *tables])


def _rows_without_tokens(episodes: Sequence[Trajectory]) -> np.ndarray:
    """Return the same of episodes that have no tokens, which pay nothing."""
    rows = [(t.group, t.episode, t.segment, t.reward, 0.0) for t in episodes]
    return np.array(rows, np.float64).reshape(-1, 5)
