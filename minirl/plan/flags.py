"""The flags of `python -m minirl.plan`: its own, and settings of the run.

They are read before torch is imported, which takes seconds.
"""

import argparse
import contextlib

from minirl.base.errors import UserError, require
from minirl.config.named import check_models
from minirl.config.parse import load_config, parse_flags
from minirl.config.rl import RLConfig
from minirl.config.shared import TrainingConfig
from minirl.config.supervised import DPOConfig, KTOConfig, RMConfig, SFTConfig
from minirl.config.validate import resolve_lengths, validate_parallel
from minirl.plan import cards

PROGRAMS: dict[str, type[TrainingConfig]] = {
    "rl": RLConfig,
    "sft": SFTConfig,
    "rm": RMConfig,
    "dpo": DPOConfig,
    "kto": KTOConfig,
}


def read_flags(argv: list[str]) -> tuple[argparse.Namespace, TrainingConfig]:
    """Return the planner's own flags and the settings of the run, which can work together.

    Raises:
        UserError: for whatever is wrong with them.
    """
    own, rest = own_flags().parse_known_args(argv)
    find_card(own)
    require(own.gpus >= 1, f"--gpus {own.gpus} must be at least 1")
    program = own.program or _guess_program(own.config)
    flags = ["--config", own.config] if own.config else []
    cfg: TrainingConfig = parse_flags(PROGRAMS[program], flags + rest)
    if isinstance(cfg, RLConfig):
        resolve_lengths(cfg)
    require(
        cfg.policy.model != "scratch",
        "policy.model = scratch is made from the rows when the run starts, so there is nothing to "
        "plan; give a folder with a config.json or a hub id",
    )
    check_models(cfg)
    validate_parallel(cfg.parallel, own.gpus)
    return own, cfg


def find_card(own: argparse.Namespace) -> cards.Card:
    """Return the GPU that the flags describe. Raises UserError."""
    return cards.find_card(own.gpu, own.memory_gb, own.tflops, own.bandwidth_gb, own.host_memory_gb)


def own_flags() -> argparse.ArgumentParser:
    """Return the parser of the planner's own flags."""
    parser = argparse.ArgumentParser(
        prog="python -m minirl.plan",
        description="Will it fit, and how fast is a step? Before a GPU is taken.",
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

    Of several, it is the one that the file's name names, or minirl.rl, or minirl.sft.

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
    if len(hints) == 1:
        return hints[0]
    usual = [name for name in ("rl", "sft") if name in fitting]
    require(
        len(fitting) == 1 or usual,
        f"--config {path} is for any of {', '.join(fitting)}: say which by --program",
    )
    return (usual or fitting)[0]
