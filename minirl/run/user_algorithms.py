"""Estimators and losses from files of the user, tried on a made-up batch before anything is loaded.

A wrong shape or a NaN, which would end the run after its first rollout, ends it here. What an
estimator returns later is checked, too.
"""

from dataclasses import replace
from functools import wraps
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minirl.algo import advantages, correction, losses, token_advantages
from minirl.algo.advantages import Estimator
from minirl.base.errors import UserError, require
from minirl.base.oversight import Oversight
from minirl.batch.packing import pack
from minirl.config.lookup import line_of
from minirl.config.rl import AlgoConfig, RLConfig
from minirl.types.packed import Packed, Trajectory

# Metrics of a step that a loss has none of.
TAKEN = {"loss", "grad_norm", "lr", "skipped_updates", "mismatch", "mismatch_max", "ref_kl"}
TAKEN |= {"reward", "shaped_reward", "answer_tokens", "longest_answer", "stopped", "staleness"}
TAKEN |= {"equal_groups", "extra_prompts", "kl_coef"}
# Rewards of the made-up answers to two prompts.
REWARDS = ((1.0, 0.0, 0.5), (0.0, -1.0, 1.0))


def make_batch(samples: int, *, with_reference: bool) -> Packed:
    """Return a packed batch of answers of several lengths, with old log-probs and advantages.

    Args:
        samples: number of answers to each prompt, at most 3.
        with_reference: whether the batch has log-probs of a reference, too.
    """
    rng = np.random.default_rng(0)
    trajectories = []
    for group, rewards in enumerate(REWARDS):
        prompt = rng.integers(5, 50, 3 + group)
        for episode, reward in enumerate(rewards[:samples]):
            tokens = np.concatenate([prompt, rng.integers(5, 50, 2 + 2 * episode + group)])
            sampled = np.arange(len(tokens)) >= len(prompt)
            trajectories.append(
                Trajectory(
                    tokens=tokens.astype(np.int32),
                    sampled=sampled,
                    logprobs=(-rng.random(len(tokens)) * sampled).astype(np.float32),
                    reward=reward,
                    group=group,
                    episode=episode,
                    group_tokens=12,
                )
            )
    batch = pack(trajectories, torch.device("cpu"))
    noise = torch.from_numpy(rng.normal(size=len(batch.inputs))).float()
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
        rewards = token_advantages.token_rewards(batch, torch.zeros(len(batch.inputs)).double())
        estimator(batch, rewards, cfg.algo)
    else:
        in_loss = batch.sequences.loss_tokens > 0
        groups = torch.tensor([group for group, _, _ in batch.sequences.ids])
        rewards, groups = batch.sequences.rewards[in_loss], groups[in_loss]
        estimates = estimator(rewards, groups)
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
    batch = make_batch(3, with_reference=cfg.kl_coef > 0)
    logprobs = batch.engine_logprobs.clone().requires_grad_()
    try:
        entropy = batch.old_entropy.clone().requires_grad_()
        loss, metrics = user_loss(batch, logprobs, entropy, cfg)
    # The user's code may raise anything.
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        problem = f"{type(error).__name__}: {error}{line_of(error)}"
        raise UserError(f"{expected}; {problem}") from error
    require(isinstance(metrics, dict), f"{expected}; its metrics are {metrics!r:.200}")
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
