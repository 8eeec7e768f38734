"""How long a run, its phases and its episodes are; settings that cannot be true together."""

from minirl.base.errors import require
from minirl.config.policy import PolicyConfig
from minirl.config.rl import RLConfig
from minirl.config.shared import SamplingConfig


def eval_extra_tokens(cfg: SamplingConfig) -> int:
    """Return how many tokens an episode of evaluation may have more than one of training."""
    return cfg.env.max_turns * max(0, cfg.eval.max_tokens - cfg.rollout.max_tokens)


def validate_schedule(cfg: PolicyConfig, section: str) -> None:
    """Refuse a schedule of the learning rate that is said twice, or whose parts overlap."""
    steps = cfg.lr_warmup_steps
    ratio = cfg.lr_warmup_ratio
    require(
        not (steps and ratio),
        f"{section}.lr_warmup_steps = {steps} and {section}.lr_warmup_ratio = {ratio} both say how "
        "long the warm-up is; set one of them to 0",
    )

    decay = cfg.lr_decay_ratio
    require(
        cfg.lr_schedule != "wsd" or ratio + decay <= 1,
        f"{section}.lr_warmup_ratio = {ratio} and {section}.lr_decay_ratio = {decay} are more than "
        "all steps together; lower one of them",
    )


def validate_length(cfg: RLConfig) -> None:
    """Refuse a run whose length is said twice, or in passes over prompts that it does not draw."""
    default = RLConfig().num_steps
    require(
        not cfg.num_epochs or cfg.num_steps in (0, default),
        f"num_steps = {cfg.num_steps} and num_epochs = {cfg.num_epochs} both say when the run "
        "ends; set one of them to 0",
    )

    require(
        not (cfg.num_epochs and cfg.rollout.replay),
        f"num_epochs = {cfg.num_epochs} is passes over prompts, and rollout.replay = "
        f"{cfg.rollout.replay} draws none; set num_steps instead",
    )


def validate_warmup(cfg: RLConfig, num_steps: int) -> None:
    """Refuse a warm-up of the critic that leaves the policy no step.

    Args:
        cfg: the settings.
        num_steps: of the run.

    Raises:
        UserError: the warm-up is as long as the run.
    """
    warmup_steps = cfg.critic.warmup_steps
    length = f"num_steps = {num_steps}"
    if cfg.num_epochs:
        length = f"the {num_steps} steps of num_epochs = {cfg.num_epochs}"
    require(
        warmup_steps < max(1, num_steps),
        f"critic.warmup_steps = {warmup_steps} leaves the policy none of {length}; lower it",
    )
