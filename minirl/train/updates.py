"""The optimizer steps of an RL step: passes over a batch of rollouts."""

import numpy as np

from minirl.algo.losses import Loss
from minirl.config.rl import RLConfig
from minirl.train.policy import Metrics, Minibatch, Policy
from minirl.train.schedule import learning_rate, minibatch_order


def update_in_passes(
    model: Policy,
    minibatches: list[Minibatch],
    loss: Loss,
    cfg: RLConfig,
    *,
    step: int,
    num_steps: int,
) -> Metrics:
    """Make an optimizer step on each minibatch in each of `algo.num_epochs` passes. Collective.

    Args:
        model: the policy or the critic.
        minibatches: of this rank, as many on every rank.
        loss: what to minimise.
        cfg: the config of the run.
        step: of the run.
        num_steps: RL steps in which this model is trained: the length of its schedule.

    Returns:
        The mean of each metric over the updates; of names that end in `_max`, the maximum.
    """
    num_updates = num_steps * cfg.algo.num_updates
    updates = []
    for epoch in range(cfg.algo.num_epochs):
        for number in minibatch_order(len(minibatches), seed=cfg.seed, step=step, epoch=epoch):
            lr = learning_rate(model.cfg, model.num_updates, num_updates)
            updates.append(model.update(minibatches[number], loss, lr))
    metrics = {}
    for name in updates[0]:
        values = [update[name] for update in updates]
        metrics[name] = max(values) if name.endswith("_max") else float(np.mean(values))
    return metrics
