"""How long a run is, and what changes on its way: learning rates and the order of minibatches."""

import math

import numpy as np

from minirl.config.lengths import validate_warmup
from minirl.config.policy import PolicyConfig
from minirl.config.rl import RLConfig


def learning_rate(cfg: PolicyConfig, step: int, num_steps: int) -> float:
    """Return the learning rate of optimizer step `step` (from 0) of `num_steps`.

    It rises linearly from 0 over the warm-up. Then it is constant, or it falls to `lr_min_ratio`
    times `lr`: by half a cosine or linearly until the end, or (wsd: warm-up, stable, decay) it is
    constant until the last `lr_decay_ratio` of all steps, in which it falls linearly. wsd is of Hu
    et al. 2024 (arXiv 2404.06395, section 4.2), its linear decay of Hägele et al. 2024 (arXiv
    2405.18392).
    """
    num_warmup = cfg.lr_warmup_steps or math.ceil(cfg.lr_warmup_ratio * num_steps)
    if step < num_warmup:
        return cfg.learning_rate * (step + 1) / num_warmup
    if cfg.lr_schedule == "constant":
        return cfg.learning_rate

    num_decay = num_steps - num_warmup
    if cfg.lr_schedule == "wsd":
        num_decay = min(num_decay, math.ceil(cfg.lr_decay_ratio * num_steps))
    fallen = (step - (num_steps - num_decay)) / max(1, num_decay)
    fallen = min(max(fallen, 0.0), 1.0)  # A resumed run may be longer than it was.
    share = 1 - fallen
    if cfg.lr_schedule == "cosine":
        share = (1 + math.cos(math.pi * fallen)) / 2
    return cfg.learning_rate * (cfg.lr_min_ratio + (1 - cfg.lr_min_ratio) * share)


def minibatch_order(num_minibatches: int, *, seed: int, step: int, epoch: int) -> list[int]:
    """Return the order in which a pass over a batch of rollouts takes its minibatches.

    The first pass takes them as they are, which is the order of their prompts; each further one
    shuffles them. It depends on no number of ranks.

    Args:
        num_minibatches: `algo.updates_per_step`.
        seed: of the run.
        step: of the run.
        epoch: of the step, from 0 to before `algo.num_epochs`.
    """
    if epoch == 0:
        return list(range(num_minibatches))
    return np.random.default_rng([seed, step, epoch]).permutation(num_minibatches).tolist()


def num_rl_steps(cfg: RLConfig, num_prompts: int) -> int:
    """Return the number of steps of an RL run: num_steps, or as many as num_epochs takes.

    Args:
        cfg: the config of the run.
        num_prompts: how many there are to train on.

    Raises:
        UserError: the critic's warm-up leaves the policy none of them.
    """
    if not cfg.num_epochs:
        return cfg.num_steps
    exact = cfg.num_epochs * num_prompts / cfg.rollout.prompts_per_step
    num_steps = max(1, math.ceil(exact - 1e-9))  # 0.1 * 30 is more than 3
    validate_warmup(cfg, num_steps)
    return num_steps


def num_tickets(cfg: RLConfig) -> int | None:
    """Return how many tickets a run draws at most; None: it may draw any row."""
    rollout = cfg.rollout
    if rollout.curriculum_floor or cfg.num_epochs:
        return None
    per_step = rollout.prompts_per_step + rollout.extra_prompts
    # Groups that are begun ahead may not be trained on when the run ends.
    of_rollouts = (cfg.num_steps + 1 + rollout.max_staleness) * per_step + rollout.ahead
    return max(of_rollouts, cfg.sft.num_steps * cfg.sft.batch_size)
