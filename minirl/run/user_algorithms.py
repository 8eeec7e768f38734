"""Estimators and losses from files of the user, tried on a made-up batch before anything is loaded.

A wrong shape or a NaN, which would end the run after its first rollout, ends it here. What an
estimator returns later is checked, too.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial, wraps
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minirl.algo import advantages, correction, losses, token_advantages
from minirl.algo.advantages import Estimator
from minirl.algo.normalize import to_rows
from minirl.base.errors import UserError, require
from minirl.base.oversight import Oversight
from minirl.batch.packing import pack
from minirl.checkpoint.state import random_states
from minirl.config.lookup import line_of
from minirl.config.rl import AlgoConfig, RLConfig
from minirl.types.packed import UNSET, Packed, Trajectory

# Metrics of a step that a loss has none of.
TAKEN = {"loss", "grad_norm", "lr", "skipped_updates", "mismatch", "mismatch_max", "ref_kl"}
TAKEN |= {"reward", "shaped_reward", "answer_tokens", "longest_answer", "stopped", "staleness"}
TAKEN |= {"equal_groups", "extra_prompts", "kl_coef", "step", "phase"}
TAKEN |= {"correction_weight", "correction_outside"}
# Rewards of the made-up answers to three prompts. Those to the last are equal, and fewer.
REWARDS = ((1.0, 0.0, 0.5), (0.0, -1.0, 1.0), (0.5, 0.5))


def make_batch(samples: int, *, with_reference: bool, groups: Sequence[int] = (0, 1)) -> Packed:
    """Return a packed batch of answers of several lengths, with old log-probs and advantages.

    Args:
        samples: number of answers to each prompt, at most 3.
        with_reference: whether the batch has log-probs of a reference, too.
        groups: to which prompts, by their places in REWARDS. An answer is the same in every batch.
    """
    rng = np.random.default_rng(0)
    trajectories = []
    for number, rewards in enumerate(REWARDS):
        prompt = rng.integers(5, 50, 3 + number)
        for episode, reward in enumerate(rewards[:samples]):
            tokens = np.concatenate([prompt, rng.integers(5, 50, 2 + 2 * episode + number)])
            sampled = np.arange(len(tokens)) >= len(prompt)
            trajectories.append(
                Trajectory(
                    tokens=tokens.astype(np.int32),
                    sampled=sampled,
                    logprobs=(-rng.random(len(tokens)) * sampled).astype(np.float32),
                    reward=reward,
                    turn_rewards=np.zeros(len(tokens), np.float32),
                    group=number,
                    episode=episode,
                    group_tokens=12,
                )
            )
    chosen = [t for t in trajectories if t.group in groups]
    # Where a step has it: a tensor that a user's function makes elsewhere is noticed.
    batch = pack(chosen, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    # The same of a token in every batch.
    noise = 1.4 * (97.0 * batch.inputs + 13.0 * batch.positions).sin()
    batch.old_logprobs = batch.engine_logprobs + 0.1 * noise * batch.loss_mask
    batch.old_entropy = noise.abs() * batch.loss_mask
    if with_reference:
        batch.ref_logprobs = batch.engine_logprobs - 0.1 * noise * batch.loss_mask
    batch.advantages = noise * batch.loss_mask
    return batch


def check_methods(cfg: RLConfig, watch: Oversight) -> Estimator:
    """Try the estimator and the loss that a run names; return the estimator.

    Args:
        cfg: the config of the run.
        watch: ends the run if the user's estimator is too slow.

    Raises:
        UserError: there is none of that name, it fails, or the estimator compares answers and there
            is one to a prompt, or answers to several and a step comes in parts.
    """
    correction.resolve(cfg.algo.correction)
    check_loss(cfg.algo)
    name = cfg.algo.advantage
    estimator = advantages.find(name)
    if ":" not in name:
        return estimator
    samples = cfg.rollout.samples_per_prompt
    require(
        samples > 1 or not estimator.compares_answers,
        f"rollout.samples_per_prompt = {samples}: algo.advantage = {name} compares the samples of "
        "one prompt, as f(rewards, groups) does, so it needs at least 2; if it does not compare "
        "them, declare it with @estimator(compares_nothing=True) of minirl.algo.advantages",
    )
    estimator = checked(estimator, cfg, watch)
    batch = make_batch(min(samples, 3), with_reference=cfg.algo.kl_coef > 0)
    compares_all = estimator.whitened
    if estimator.by_token:
        check_by_token(estimator, cfg)
    else:
        in_loss = (batch.sequences.loss_tokens > 0).cpu()
        groups = torch.tensor([group for group, _, _ in batch.sequences.ids])
        rewards, groups = batch.sequences.rewards.cpu()[in_loss], groups[in_loss]
        before = random_states()
        estimates = estimator(rewards, groups)
        require(
            random_states() == before,
            f"algo.advantage = {name} must not draw random numbers, which differ from rank to rank "
            "as the advantages would; draw them from a generator that it makes and seeds itself",
        )
        # As in a step with a group of equal rewards that has lost an answer.
        with_equal = torch.cat([rewards, rewards.new_full([min(samples, 2)], 0.5)])
        estimator(with_equal, torch.cat([groups, groups.new_full([min(samples, 2)], 2)]))
        if cfg.rollout.overlap == "stream":
            in_parts = torch.empty_like(estimates)
            for group in groups.unique():
                part = rewards[groups == group]
                in_parts[groups == group] = estimator(part, torch.zeros(len(part)).long())
            compares_all |= not torch.allclose(estimates, in_parts)
    require(
        cfg.rollout.overlap != "stream" or not compares_all,
        f"rollout.overlap = stream, algo.advantage = {name}: stream sums gradients before the "
        "step's last answer is there, and the method compares all answers of a step; take lockstep",
    )
    return estimator


def check_by_token(estimator: Estimator, cfg: RLConfig) -> None:
    """Try an estimator of tokens on a made-up batch, and on parts of it.

    Raises:
        UserError: it fails, changes the batch, or a token's advantage depends on what is packed
            into the same batch.
    """
    where = f"algo.advantage = {cfg.algo.advantage}"
    samples = min(cfg.rollout.samples_per_prompt, 3)
    make = partial(make_batch, samples, with_reference=cfg.algo.kl_coef > 0)
    batch = make()
    before = _copy_of(batch)
    alone = [make(groups=[group]) for group in range(len(REWARDS))]
    values = []
    for trial in (batch, *alone):
        penalty = torch.zeros_like(trial.engine_logprobs, dtype=torch.float64)
        rewards = token_advantages.token_rewards(trial, penalty)
        values.append(estimator(trial, rewards, cfg.algo))
    _require_unchanged(where, before, _copy_of(batch))
    _require_packing_is_free(where, "the advantage", batch, values[0], alone, values[1:])


def checked(estimator: Estimator, cfg: RLConfig, watch: Oversight) -> Estimator:
    """Return a user's estimator with a time limit and a check of what it returns.

    A call raises UserError if it raises, or returns anything but N numbers, of which those that are
    used are finite. It ends the run if it takes longer than timeout_minutes.
    """
    name = f"algo.advantage = {cfg.algo.advantage}"
    form = "f(batch, rewards, cfg)" if estimator.by_token else "f(rewards, groups)"
    too_slow = f"{name} takes longer than timeout_minutes = {cfg.timeout_minutes:g}; make it faster"

    @wraps(estimator.function)
    def call(*arguments: Any) -> Tensor:
        rewards = arguments[1] if estimator.by_token else arguments[0]
        used = arguments[0].loss_rows if estimator.by_token else slice(None)
        expected = (
            f"{name} must return {len(rewards)} finite numbers, a tensor [N], when it is called "
            f"as {form}"
        )
        try:
            with watch.limit(60 * cfg.timeout_minutes, lambda: too_slow):
                estimates = estimator(*arguments)
        # The user's code may raise anything.
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            problem = f"{type(error).__name__}: {error}{line_of(error)}"
            raise UserError(f"{expected}; it raised {problem}") from error
        if not isinstance(estimates, Tensor) or estimates.is_complex():
            raise UserError(f"{expected}; it returned {estimates!r:.200}")
        require(
            estimates.shape == rewards.shape,
            f"{expected}; it returned one of shape {list(estimates.shape)}",
        )
        estimates = estimates.detach().to(rewards)  # its device and dtype
        is_wrong = ~estimates[used].isfinite()
        require(
            not is_wrong.any(),
            f"{expected}; {int(is_wrong.sum())} of them are not finite, the first for an answer "
            f"with reward {rewards[used][is_wrong][:1].tolist()}",
        )
        return estimates

    return replace(estimator, function=call)


def check_loss(cfg: AlgoConfig) -> None:
    """Try the loss of a file, if `algo.loss` names one: shapes, finite numbers, a gradient.

    Raises:
        UserError: there is none, or it fails.
    """
    user_loss = losses.find_own(cfg.loss)
    if user_loss is None:
        return
    where = f"algo.loss = {cfg.loss}"
    expected = (
        f"{where}: it is called as f(batch, logprobs, entropy, cfg) and must return (loss [T], a "
        "dict of metrics [T])"
    )

    make = partial(make_batch, 3, with_reference=cfg.kl_coef > 0)
    batch = make()
    before = _copy_of(batch)
    logprobs = batch.engine_logprobs.clone().requires_grad_()
    entropy = batch.old_entropy.clone().requires_grad_()
    # The batch, each of its groups alone, another group, and log-probs that are far from the old.
    far = make()
    far.old_logprobs = far.old_logprobs - 3
    alone = [make(groups=[group]) for group in range(len(REWARDS))]
    has_old = advantages.need_old_logprobs(cfg, advantages.find(cfg.advantage))
    results = []
    for trial in (batch, far, *alone):
        given = (logprobs, entropy)
        if trial is not batch:
            given = (trial.engine_logprobs, trial.old_entropy)
        # As a step has it: log-probs before an update are always there for a loss.
        shown = trial if has_old else replace(trial, old_entropy=UNSET)
        try:
            loss, metrics = user_loss(shown, *given, cfg)
        # The user's code may raise anything.
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            problem = f"{type(error).__name__}: {error}{line_of(error)}"
            raise UserError(f"{expected}; {problem}") from error
        results.append((loss, metrics))
    loss, metrics = results[0]
    require(isinstance(metrics, dict), f"{expected}; its metrics are {metrics!r:.200}")
    unnamed = [name for name in metrics if not isinstance(name, str)]
    require(not unnamed, f"{where}: names of metrics are texts, not {unnamed}")
    taken = sorted(TAKEN & metrics.keys())
    require(not taken, f"{where}: a step has metrics named {', '.join(taken)} already; rename it")

    num_rows = len(batch.inputs)
    for name, values in (("its loss", loss), *metrics.items()):
        require(
            isinstance(values, torch.Tensor) and values.shape == (num_rows,),
            f"{where}: {name} must be a tensor [T] with a value for each of {num_rows} rows, and "
            f"is {values!r:.200}",
        )
        in_loss = values[batch.loss_mask]
        require(
            in_loss.isfinite().all(),
            f"{where}: {name} is not finite at tokens in the loss: {in_loss}",
        )
    require(
        loss.isfinite().all(),
        f"{where}: its loss is not finite at tokens outside the loss, where log-probs, entropy and "
        f"advantages are 0: {loss}",
    )
    if loss.requires_grad:
        loss[batch.loss_mask].sum().backward()
    gradient = logprobs.grad
    require(
        gradient is not None and bool(gradient.isfinite().all()) and bool(gradient.any()),
        f"{where}: the gradient of its loss by logprobs is 0 or not finite: {gradient}; compute it "
        "from them, without detach() and torch.no_grad()",
    )

    # What would go wrong only later.
    given_now = {"logprobs": logprobs.detach(), "entropy": entropy.detach()}
    before |= {"logprobs": batch.engine_logprobs, "entropy": batch.old_entropy}
    _require_unchanged(where, before, _copy_of(batch) | given_now)
    for _, others in results:
        require(
            isinstance(others, dict) and others.keys() == metrics.keys(),
            f"{where}: its metrics must have the same names at each call, on all ranks, and are "
            f"{', '.join(metrics) or 'none'} or {', '.join(others) or 'none'}; return each name, "
            "with zeros where there is nothing",
        )
    of_groups = [loss.detach() for loss, _ in results[2:]]
    _require_packing_is_free(where, "its loss", batch, loss.detach(), alone, of_groups)


def _copy_of(batch: Packed) -> dict[str, Tensor]:
    """Return copies of the tensors of a batch, by name."""
    return {name: value.clone() for name, value in vars(batch).items() if type(value) is Tensor}


def _require_unchanged(where: str, before: dict[str, Tensor], now: dict[str, Tensor]) -> None:
    """Raise UserError for a function that changes its arguments, which others read after it."""
    changed = [name for name, value in before.items() if not torch.equal(value, now[name])]
    require(
        not changed,
        f"{where}: it changes {', '.join(changed)}, which is read again after it; work on a "
        ".clone()",
    )


def _require_packing_is_free(
    where: str,
    what: str,
    batch: Packed,
    values: Tensor,
    alone: list[Packed],
    of_groups: list[Tensor],
) -> None:
    """Raise UserError if what a function makes of a token depends on the rest of the batch.

    Which sequences are packed together depends on tokens_per_rank and on the number of ranks.

    Args:
        where: the setting that names the function.
        what: what it makes.
        batch: a made-up batch.
        values: what the function makes of the batch, [T].
        alone: batches of one group each, by group; not all are in `batch`.
        of_groups: what the function makes of these, [T] each.
    """
    of_sequences = [group for group, _, _ in batch.sequences.ids]
    groups = torch.tensor(of_sequences, device=batch.inputs.device)
    group_of_row = to_rows(groups, batch)
    for group in groups.unique().tolist():
        by_itself = of_groups[group][alone[group].loss_mask]
        together = values[batch.loss_mask & (group_of_row == group)]
        require(
            torch.allclose(by_itself.double(), together.double(), rtol=1e-4, atol=1e-5),
            f"{where}: {what} of a token must not depend on other sequences of the batch, which "
            "change with tokens_per_rank and the number of ranks; of a group by itself it is "
            f"{by_itself.tolist()}, with another one {together.tolist()}",
        )
