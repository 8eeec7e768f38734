"""From the minibatches of rollouts to optimizer steps: their order and learning rates."""

import math

import numpy as np

from minirl.algo.losses import Loss
from minirl.config.policy import PolicyConfig
from minirl.config.rl import RLConfig
from minirl.train.policy import Metrics, Minibatch, Policy


def learning_rate(cfg: PolicyConfig, step: int, num_steps: int) -> float:
    """Return the learning rate of optimizer step `step` (from 0) of `num_steps`.

    It rises linearly from 0 over the warm-up. Then it is constant, or it falls to `lr_min_ratio`
    times `lr`: by half a cosine or linearly until the end, or (wsd: warm-up, stable, decay) it is
    constant and falls linearly in the last `lr_decay_ratio` of all steps. Sources of wsd: Hu et al.
    2024 (arXiv 2404.06395, section 4.2); of linear decay: Hägele et al. 2024 (arXiv 2405.18392).
    """
    lr = cfg.lr
    assert lr is not None  # as `Policy` has filled it in
    num_warmup = cfg.lr_warmup_steps or math.ceil(cfg.lr_warmup_ratio * num_steps)
    if step < num_warmup:
        return lr * (step + 1) / num_warmup
    if cfg.lr_schedule == "constant":
        return lr

    num_decay = num_steps - num_warmup
    if cfg.lr_schedule == "wsd":
        num_decay = min(num_decay, math.ceil(cfg.lr_decay_ratio * num_steps))
    fallen = (step - (num_steps - num_decay)) / max(1, num_decay)
    fallen = min(max(fallen, 0.0), 1.0)  # A resumed run may be longer than it was.
    share = 1 - fallen
    if cfg.lr_schedule == "cosine":
        share = (1 + math.cos(math.pi * fallen)) / 2
    return lr * (cfg.lr_min_ratio + (1 - cfg.lr_min_ratio) * share)


def minibatch_order(num_minibatches: int, *, seed: int, step: int, epoch: int) -> list[int]:
    """Return the order in which a pass over a batch of rollouts takes its minibatches.

    The first pass takes them in the order of their prompts; each later pass shuffles them. The
    order does not depend on the number of ranks.

    Args:
        num_minibatches: number of minibatches (`algo.updates_per_step`).
        seed: seed of the run.
        step: number of the RL step.
        epoch: number of the pass, from 0 to before `algo.num_epochs`.
    """
    if epoch == 0:
        return list(range(num_minibatches))
    return np.random.default_rng([seed, step, epoch]).permutation(num_minibatches).tolist()


def update_in_passes(
    model: Policy,
    minibatches: list[Minibatch],
    loss: Loss,
    cfg: RLConfig,
    step: int,
    num_steps: int,
    start: int = 0,
) -> Metrics:
    """Make an optimizer step on each minibatch in each of `algo.num_epochs` passes. Collective.

    Args:
        model: the policy or the critic.
        minibatches: this rank's minibatches, as many as on every other rank.
        loss: what to minimise.
        cfg: the config of the run.
        step: number of the RL step.
        num_steps: RL steps of the run.
        start: the RL step from which this model is trained, and its schedule counts.

    Returns:
        The mean of each metric over the updates; the maximum of metrics named `*_max`. Nothing
        where no update had a token to learn from.
    """
    per_step = cfg.algo.num_epochs * cfg.algo.updates_per_step
    # Of the optimizer step. `model.num_updates` has those of a resumed run's earlier settings.
    number = (step - start) * per_step
    updates = []
    for epoch in range(cfg.algo.num_epochs):
        for chosen in minibatch_order(len(minibatches), seed=cfg.seed, step=step, epoch=epoch):
            lr = learning_rate(model.cfg, number, (num_steps - start) * per_step)
            number += 1
            if metrics := model.update(minibatches[chosen], loss, lr):
                updates.append(metrics)
    means = {}
    for name in next(iter(updates), {}):
        values = [update[name] for update in updates]
        means[name] = max(values) if name.endswith("_max") else float(np.mean(values))
    return means
