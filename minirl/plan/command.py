"""The plan that flags ask for, and the page that is printed of it."""

import argparse

from transformers import PretrainedConfig
from transformers.utils import logging

from minirl.base.errors import BAD_INPUT, DONE, require
from minirl.config.rl import RLConfig
from minirl.config.shared import TrainingConfig
from minirl.config.supervised import DPOConfig, KTOConfig, SupervisedConfig
from minirl.model import build, checks, families
from minirl.parallel import tensor
from minirl.plan import advice, estimate, page, pretend
from minirl.plan.flags import find_card
from minirl.plan.planner import Plan
from minirl.plan.workload import Lengths, Workload, rl_workload, supervised_workload


def print_plan(own: argparse.Namespace, cfg: TrainingConfig) -> int:
    """Print the plan of a run, and return the exit code: BAD_INPUT if it does not fit.

    Args:
        own: the planner's own flags.
        cfg: the settings of the run.

    Raises:
        UserError: for whatever is wrong with the models.
    """
    logging.set_verbosity_error()
    plan, advised = make_plan(own, cfg)
    source = "a dry run"
    if not plan.by_dry_run:
        why = "as --formulas asks" if pretend.compiler() else "g++ is not installed"
        source = f"closed formulas (no dry run: {why})"
    print(page.full(plan, advised, source))
    return BAD_INPUT if plan.lacks else DONE


def make_plan(own: argparse.Namespace, cfg: TrainingConfig) -> tuple[Plan, list[advice.Advice]]:
    """Return the plan of a run, and settings that do better. The arguments are `print_plan`'s.

    Raises:
        UserError: for whatever is wrong with the models.
    """
    card = find_card(own)
    lengths = Lengths(prompt=own.prompt_tokens, answer=own.answer_tokens)
    gpus_per_node = min(own.gpus_per_node, own.gpus)
    workload = _workload(cfg, own.gpus, gpus_per_node, lengths)
    models = estimate.Models(workload)

    plan = estimate.by_formulas(workload, models, card, gpus_per_node)
    advised = advice.advise(workload, models, card, gpus_per_node, lengths)
    if not own.formulas and pretend.compiler():
        plan = estimate.by_dry_run(workload, models, card, gpus_per_node, plan.checkpointing)
    return plan, advised


def _workload(
    cfg: TrainingConfig, world_size: int, gpus_per_node: int, lengths: Lengths
) -> Workload:
    models = {"policy": _read_model(cfg.policy.model, "policy.model", cfg)}
    if isinstance(cfg, RLConfig):
        require(
            world_size % cfg.engine.tensor_parallel_size == 0,
            f"engine.tensor_parallel_size = {cfg.engine.tensor_parallel_size} does not divide "
            f"--gpus {world_size}",
        )
        for name, model, setting in (
            ("critic", cfg.critic.model, "critic.model"),
            ("reference", cfg.ref.model, "ref.model"),
            ("reward model", cfg.reward.model, "reward.model"),
        ):
            if model:
                models[name] = _read_model(model, setting, cfg)
        _check_experts(models, cfg, gpus_per_node)
        return rl_workload(cfg, world_size, models, lengths)
    assert isinstance(cfg, SupervisedConfig)
    if isinstance(cfg, DPOConfig | KTOConfig) and cfg.reference:
        models["reference"] = _read_model(cfg.reference, "reference", cfg)
    _check_experts(models, cfg, gpus_per_node)
    return supervised_workload(cfg, world_size, models, lengths)


def _check_experts(
    models: dict[str, PretrainedConfig], cfg: TrainingConfig, gpus_per_node: int
) -> None:
    tokens = cfg.tokens_per_rank
    checks.check_experts(models, cfg.parallel, ranks_of_node=gpus_per_node, tokens_per_rank=tokens)


def _read_model(model: str, setting: str, cfg: TrainingConfig) -> PretrainedConfig:
    """Return a model's config. Raises UserError: there is none, or it is not supported."""
    require(
        model != "scratch",
        f"{setting} = scratch is made from the rows when the run starts, so there is nothing to "
        "plan; give a folder with a config.json or a hub id",
    )
    config = build.read_config(model)
    checks.check_supported(config, f"{setting} = {model}")
    tensor.check_divides(families.divided(config), cfg.parallel.tensor)
    return config
