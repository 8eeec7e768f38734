"""Will it fit, and how fast is a step? Before a GPU is taken.

    python -m minirl.plan --config my.yaml --gpus 8 --gpu h200

Needs no GPU and no weights: a model's config.json is enough. Flags that are not the planner's own
are settings of the run, as its program takes them.
"""

import argparse
import contextlib
import sys

from transformers import PretrainedConfig
from transformers.utils import logging

from minirl.config.parse import load_config, parse_flags
from minirl.config.rl import RLConfig
from minirl.config.shared import TrainingConfig
from minirl.config.supervised import DPOConfig, RMConfig, SFTConfig, SupervisedConfig
from minirl.config.validate import resolve_lengths, validate_parallel
from minirl.errors import BAD_INPUT, UserError, require
from minirl.model import build, families
from minirl.parallel import tensor
from minirl.plan import advice, cards, estimate, page, pretend
from minirl.plan.planner import Plan
from minirl.plan.workload import Lengths, Workload, rl_workload, supervised_workload

PROGRAMS: dict[str, type[TrainingConfig]] = {
    "rl": RLConfig,
    "sft": SFTConfig,
    "rm": RMConfig,
    "dpo": DPOConfig,
}


def main() -> int:
    """Print the plan. Return the exit code: 0: it fits; 2: it does not, or a mistake."""
    logging.set_verbosity_error()
    try:
        plan, advised = make_plan(sys.argv[1:])
    except UserError as error:
        print(f"minirl: error: {error}", file=sys.stderr)
        return BAD_INPUT
    source = "a dry run"
    if not plan.by_dry_run:
        why = "as --formulas asks" if pretend.compiler() else "g++ is not installed"
        source = f"closed formulas (no dry run: {why})"
    print(page.full(plan, advised, source))
    return BAD_INPUT if plan.lacks else 0


def make_plan(argv: list[str]) -> tuple[Plan, list[advice.Advice]]:
    """Return the plan that the flags ask for, and settings that do better.

    Raises:
        UserError: for whatever is wrong with the flags, the config or the model.
    """
    own, rest = _own_flags().parse_known_args(argv)
    card = cards.find_card(own.gpu, own.memory_gb, own.tflops, own.bandwidth_gb, own.host_memory_gb)
    require(own.gpus >= 1, f"--gpus {own.gpus} must be at least 1")
    program = own.program or _guess_program(own.config)
    flags = ["--config", own.config] if own.config else []
    cfg: TrainingConfig = parse_flags(PROGRAMS[program], flags + rest)
    if isinstance(cfg, RLConfig):
        resolve_lengths(cfg)
    lengths = Lengths(prompt=own.prompt_tokens, answer=own.answer_tokens)
    workload = _workload(cfg, own.gpus, lengths)
    models = estimate.Models(workload)
    gpus_per_node = min(own.gpus_per_node, own.gpus)

    plan = estimate.by_formulas(workload, models, card, gpus_per_node)
    advised = advice.advise(workload, models, card, gpus_per_node, lengths)
    if not own.formulas and pretend.compiler():
        plan = estimate.by_dry_run(workload, models, card, gpus_per_node, plan.checkpointing)
    return plan, advised


def _own_flags() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m minirl.plan",
        description=(__doc__ or "").split("\n\n")[0],
        epilog="All other flags are settings of the run, such as --policy.model MODEL.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", help="YAML file of the run")
    parser.add_argument("--program", choices=PROGRAMS, help="if the file does not tell")
    parser.add_argument("--gpus", type=int, default=8, help="of all nodes (8)")
    parser.add_argument("--gpus-per-node", type=int, default=8, help="(8)")
    parser.add_argument("--gpu", default="h200", help=f"one of {', '.join(cards.CARDS)} (h200)")
    for name, what in (
        ("memory-gb", "GB of a GPU"),
        ("tflops", "its bfloat16 TFLOP/s without sparsity"),
        ("bandwidth-gb", "GB/s of its memory"),
        ("host-memory-gb", "GB of the host for each GPU"),
    ):
        parser.add_argument(f"--{name}", type=float, default=0.0, help=f"{what}, if not --gpu's")
    parser.add_argument(
        "--prompt-tokens", type=int, default=0, help="of an average prompt (the longest allowed)"
    )
    parser.add_argument(
        "--answer-tokens", type=int, default=0, help="of an average answer (the longest allowed)"
    )
    parser.add_argument("--formulas", action="store_true", help="closed formulas, no dry run")
    return parser


def _guess_program(path: str | None) -> str:
    """Return the program that has all settings of a file; minirl.rl, if there is no file.

    Raises:
        UserError: the file fits no program, with what is wrong with it for the nearest.
    """
    if path is None:
        return "rl"
    fitting = []
    for name, config in PROGRAMS.items():
        with contextlib.suppress(UserError):
            load_config(config, path)
            fitting.append(name)
    if not fitting:
        load_config(RLConfig, path)  # says what is wrong
    hints = [name for name in fitting if name in path]
    require(
        len(fitting) == 1 or len(hints) == 1 or "rl" in fitting,
        f"--config {path} is for any of {', '.join(fitting)}: say which by --program",
    )
    if len(fitting) == 1:
        return fitting[0]
    return hints[0] if len(hints) == 1 else "rl"


def _workload(cfg: TrainingConfig, world_size: int, lengths: Lengths) -> Workload:
    validate_parallel(cfg.parallel, world_size)
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
        return rl_workload(cfg, world_size, models, lengths)
    assert isinstance(cfg, SupervisedConfig)
    if isinstance(cfg, DPOConfig) and cfg.reference:
        models["reference"] = _read_model(cfg.reference, "reference", cfg)
    return supervised_workload(cfg, world_size, models, lengths)


def _read_model(model: str, setting: str, cfg: TrainingConfig) -> PretrainedConfig:
    """Return a model's config. Raises UserError: there is none, or it is not supported."""
    require(
        model != "scratch",
        f"{setting} = scratch is made from the rows when the run starts, so there is nothing to "
        "plan; give a folder with a config.json or a hub id",
    )
    config = build.read_config(model)
    families.check_supported(config, f"{setting} = {model}")
    tensor.check_divides(families.divided(config), cfg.parallel.tensor)
    return config


if __name__ == "__main__":
    sys.exit(main())
