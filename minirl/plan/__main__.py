"""Will it fit, and how fast is a step? Before a GPU is taken.

    python -m minirl.plan --config my.yaml --gpus 8 --gpu h200

Needs no GPU, no weights and no torch: a model's config.json is enough. Flags that are not the
planner's are settings of the run, as its program takes them.
"""

import argparse
import contextlib
import sys

from minirl.base.errors import BAD_INPUT, DONE, UserError, require
from minirl.config.parse import load_config, parse_flags
from minirl.config.rl import RLConfig
from minirl.config.shared import TrainingConfig
from minirl.config.supervised import (
    DPOConfig,
    KTOConfig,
    RMConfig,
    SFTConfig,
    SupervisedConfig,
)
from minirl.config.validate import check_models, resolve_lengths, validate_parallel
from minirl.plan import advice, cards, page
from minirl.plan.plan import Plan, make_plan
from minirl.plan.sizes import read_config
from minirl.plan.workload import Lengths, Workload, rl_workload, supervised_workload

PROGRAMS: dict[str, type[TrainingConfig]] = {
    "rl": RLConfig,
    "sft": SFTConfig,
    "rm": RMConfig,
    "dpo": DPOConfig,
    "kto": KTOConfig,
}


def main() -> int:
    """Print the plan. Return the exit code: 0: it fits; 2: it does not, or a mistake."""
    try:
        plan, advised = plan_of_flags(sys.argv[1:])
    except UserError as error:
        print(f"minirl: error: {error}", file=sys.stderr)
        return BAD_INPUT
    print(page.full(plan, advised))
    return BAD_INPUT if plan.lacks else DONE


def plan_of_flags(argv: list[str]) -> tuple[Plan, list[advice.Advice]]:
    """Return the plan that flags ask for, and settings that do better.

    Raises:
        UserError: for whatever is wrong with the flags, the config or the models.
    """
    flags, rest = parser().parse_known_args(argv)
    card = cards.find_card(
        flags.gpu, flags.memory_gb, flags.tflops, flags.bandwidth_gb, flags.host_memory_gb
    )
    require(flags.gpus >= 1, f"--gpus {flags.gpus} must be at least 1")
    program = PROGRAMS[flags.program or _guess_program(flags.config)]
    cfg = parse_flags(program, [*(["--config", flags.config] if flags.config else []), *rest])
    if isinstance(cfg, RLConfig):
        resolve_lengths(cfg)
    check_models(cfg)
    validate_parallel(cfg.parallel, flags.gpus)
    gpus_per_node = min(flags.gpus_per_node, flags.gpus)
    lengths = Lengths(prompt=flags.prompt_tokens, answer=flags.answer_tokens)
    workload = _read_workload(cfg, flags.gpus, lengths)
    sizes = {role.name: role.sizes() for role in workload.roles}
    _check_parallel(workload, gpus_per_node)
    plan = make_plan(workload, sizes, card, gpus_per_node)
    return plan, advice.advise(workload, sizes, card, gpus_per_node, lengths)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the planner's flags."""
    parser = argparse.ArgumentParser(
        prog="python -m minirl.plan",
        description="Will it fit, and how fast is a step? Before a GPU is taken.",
        epilog="All other flags are settings of the run, such as --policy.model MODEL. From a "
        "checkout, python -m benchmarks.dryrun runs minirl's own steps on pretended GPUs.",
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
    for name in ("prompt", "answer"):
        what = f"of an average {name} (the longest allowed)"
        parser.add_argument(f"--{name}-tokens", type=int, default=0, help=what)
    parser.add_argument("--formulas", action="store_true", help="as it always is, by now")
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


def _read_workload(cfg: TrainingConfig, world_size: int, lengths: Lengths) -> Workload:
    """Return what a run does, with the configs of its models. Raises UserError."""
    models = {"policy.model": cfg.policy.model}
    if isinstance(cfg, RLConfig):
        models |= {
            "critic.model": cfg.critic.model,
            "ref.model": cfg.ref.model,
            "reward.model": cfg.reward.model,
        }
    elif isinstance(cfg, DPOConfig | KTOConfig):
        models["reference"] = cfg.reference
    roles = {"policy.model": "policy", "critic.model": "critic", "reward.model": "reward model"}
    found = {}
    for setting, model in models.items():
        require(
            model != "scratch",
            f"{setting} = scratch is made from the rows when the run starts, so there is nothing "
            "to plan; give a folder with a config.json or a hub id",
        )
        if model or setting == "policy.model":
            found[roles.get(setting, "reference")] = read_config(model, setting)
    if isinstance(cfg, RLConfig):
        return rl_workload(cfg, world_size, found, lengths)
    assert isinstance(cfg, SupervisedConfig)
    return supervised_workload(cfg, world_size, found, lengths)


def _check_parallel(workload: Workload, gpus_per_node: int) -> None:
    """Refuse axes that do not divide a model. Raises UserError."""
    parallel = workload.cfg.parallel
    engine = workload.engine
    require(
        engine is None or workload.world_size % engine.tensor_parallel_size == 0,
        f"engine.tensor_parallel_size = {engine and engine.tensor_parallel_size} does not divide "
        f"--gpus {workload.world_size}",
    )
    for role in workload.roles:
        model = role.sizes()
        undivided = model.undivided(parallel.tensor)
        require(
            not undivided,
            f"parallel.tensor = {parallel.tensor} does not divide {undivided} of the {role.name}",
        )
        experts = max(layer.experts for layer in model.layers)
        require(
            experts % parallel.experts == 0 and (experts or parallel.experts == 1),
            f"parallel.experts = {parallel.experts} does not divide the {experts} experts of the "
            f"{role.name}",
        )
    require(
        gpus_per_node % parallel.experts == 0 or parallel.experts_across_nodes,
        f"parallel.experts = {parallel.experts} does not divide the {gpus_per_node} GPUs of a "
        "node, so that tokens would travel between nodes; add --parallel.experts-across-nodes",
    )


if __name__ == "__main__":
    sys.exit(main())
