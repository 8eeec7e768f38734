"""Will it fit, and how fast is a step? Before a GPU is taken.

    python -m minirl.plan --config my.yaml --gpus 8 --gpu h200

Needs no GPU, no weights and no torch: a model's config.json is enough. Flags that are not the
planner's are settings of the run, as its program takes them.
"""

import argparse
import itertools
import math
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from minirl.base.errors import BAD_INPUT, DONE, UserError, require
from minirl.config import validate
from minirl.config.parse import get, load_config, parse_flags, with_settings
from minirl.config.rl import RLConfig
from minirl.config.shared import TrainingConfig
from minirl.config.supervised import DPOConfig, KTOConfig, RMConfig, SFTConfig
from minirl.plan.cards import CARDS, GIB, REACHED, Card, find_card
from minirl.plan.plan import Plan, Workload, check, make_plan, most, named, read_models
from minirl.plan.sizes import read_config

PROGRAMS: dict[str, type[TrainingConfig]] = {
    "rl": RLConfig,
    "sft": SFTConfig,
    "rm": RMConfig,
    "dpo": DPOConfig,
    "kto": KTOConfig,
}
# The settings that name models, and their roles.
MODELS = {
    "policy.model": "policy",
    "critic.model": "critic",
    "ref.model": "reference",
    "reference": "reference",
    "reward.model": "reward model",
}

# A setting by its name, and a value to try.
Change = tuple[str, Any]
MOST_GPUS = 100_000
MOST_SIGMA = 5.0  # An answer in six is then 150 times as long as the median.
MOST_CHANGES = 3
MOST_ADVICE = 5
SIZES = (1, 2, 4, 8)  # Of tensor parallelism.
LEAST_GAIN = 0.97  # Of the seconds of a step, for a change to be worth it.
# Tried in this order, with all else, until something fits.
LAST_RESORTS: tuple[dict[str, Any], ...] = (
    {},
    {"policy.optimizer_state": "8bit"},
    {"policy.cpu_offload": True, "policy.optimizer_state": "device"},
)


def main() -> int:
    """Print the plan. Return the exit code: 0: it fits; 2: it does not, or a mistake."""
    try:
        plan, advised, more = plan_of_flags(sys.argv[1:])
    except UserError as error:
        print(f"minirl: error: {error}", file=sys.stderr)
        return BAD_INPUT
    print(page(plan, advised) + more)
    return BAD_INPUT if plan.lacks else DONE


# --------------------------------------------------------------------------------------------------
# flags


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
    parser.add_argument("--gpu", default="h200", help=f"one of {', '.join(CARDS)} (h200)")
    for name, default, what in (
        ("gpus", 8, "of all nodes (8)"),
        ("gpus-per-node", 8, "(8)"),
        ("prompt-tokens", 0, "of an average prompt (the longest allowed)"),
        ("answer-tokens", 0, "of an average answer (the longest allowed; --overlap: a quarter)"),
        ("answer-sigma", 1.0, "--overlap: standard deviation of the logarithm of lengths (1)"),
        ("lengths", "", "--overlap: folder of dumped rollouts, with answers of such lengths"),
        ("turn-seconds", 0.0, "--overlap: of an environment, each of env.max_turns (0)"),
        ("memory-gb", 0.0, "GB of a GPU, if not --gpu's"),
        ("tflops", 0.0, "its bfloat16 TFLOP/s without sparsity, if not --gpu's"),
        ("bandwidth-gb", 0.0, "GB/s of its memory, if not --gpu's"),
        ("host-memory-gb", 0.0, "GB of the host for each GPU, if not --gpu's"),
    ):
        parser.add_argument(f"--{name}", type=type(default), default=default, help=what)
    help_text = "simulate which ranks should train and which generate (parallel.generators)"
    parser.add_argument("--overlap", action="store_true", help=help_text)
    return parser


def plan_of_flags(argv: list[str]) -> tuple[Plan, list["Advice"], str]:
    """Return the plan that flags ask for, settings that do better, and the table of --overlap.

    Raises:
        UserError: for whatever is wrong with the flags, the config or the models.
    """
    flags, rest = parser().parse_known_args(argv)
    for name, value in vars(flags).items():
        flag = f"--{name.replace('_', '-')} {value}"
        is_number = isinstance(value, int | float)
        require(
            not is_number or (math.isfinite(value) and value >= 0),
            f"{flag} must be a number from 0 on",
        )
    sigma = flags.answer_sigma
    require(sigma <= MOST_SIGMA, f"--answer-sigma {sigma:g} must be at most {MOST_SIGMA:g}")
    require(flags.gpus_per_node >= 1, f"--gpus-per-node {flags.gpus_per_node} must be at least 1")
    card = find_card(
        flags.gpu,
        memory_gib=flags.memory_gb * 1e9 / GIB,
        tflops=flags.tflops,
        bandwidth_gb=flags.bandwidth_gb,
        host_memory_gib=flags.host_memory_gb * 1e9 / GIB,
    )
    require(flags.gpus >= 1, f"--gpus {flags.gpus} must be at least 1")
    require(flags.gpus <= MOST_GPUS, f"--gpus {flags.gpus} must be at most {MOST_GPUS}")
    require(flags.overlap or not flags.lengths, "--lengths is read by --overlap; give that, too")
    program = PROGRAMS[flags.program or guess_program(flags.config)]
    cfg = parse_flags(program, [*(["--config", flags.config] if flags.config else []), *rest])
    validate.resolve_dtypes(cfg, "bfloat16")
    if isinstance(cfg, RLConfig):
        validate.resolve_lengths(cfg)
    configs = {}
    for setting, role in MODELS.items():
        model = get(cfg, setting)
        require(
            model != "scratch",
            f"{setting} = scratch is made from the rows when the run starts, so there is nothing "
            "to plan; give a folder with a config.json or a hub id",
        )
        require(model or role != "policy", f"{setting}: name the folder or hub id of the model")
        if model:
            configs[role] = read_config(model, setting)
    models = read_models(cfg, configs)
    gpus_per_node = min(flags.gpus_per_node, flags.gpus)
    generators = f"parallel.generators = {cfg.parallel.generators}:"
    is_rl = isinstance(cfg, RLConfig)
    require(is_rl or not cfg.parallel.generators, f"{generators} only minirl.rl generates")
    num_ranks = flags.gpus - cfg.parallel.generators
    require(num_ranks >= 1, f"{generators} of --gpus {flags.gpus} some must train")
    answer = flags.answer_tokens
    if flags.overlap:
        from minirl.plan import overlap, simulation  # here: they need torch, for a second

        require(is_rl, "--overlap: only minirl.rl generates")
        assert isinstance(cfg, RLConfig)
        lengths: simulation.Lengths
        if flags.lengths:
            lengths = simulation.Measured.of_dump(Path(flags.lengths))
        else:
            mean = answer or cfg.env.max_tokens / 4
            lengths = simulation.LogNormal.of_mean(mean, flags.answer_sigma, cfg.env.max_tokens)
        answer = math.ceil(lengths.mean)
    check_averages(cfg, flags.prompt_tokens, answer)
    workload = Workload(cfg, num_ranks, models, flags.prompt_tokens, answer)
    check(workload)
    cfg.data.train = cfg.data.train or "rows that a plan does not need"
    cfg.log.wandb = False
    validate.check_settings(cfg, flags.gpus)
    plan = make_plan(workload, card, gpus_per_node)
    more = ""
    if flags.overlap:
        tried = (flags.gpus, card, gpus_per_node, lengths, flags.turn_seconds)
        more = overlap.table(overlap.compare(workload, *tried))
    return plan, advise(workload, card, gpus_per_node), more


def check_averages(cfg: TrainingConfig, prompt: int, answer: int) -> None:
    """Refuse averages that are longer than the config allows. Raises UserError.

    Args:
        cfg: the config, with lengths resolved.
        prompt: --prompt-tokens; 0: as many as it allows.
        answer: --answer-tokens, likewise.
    """
    if isinstance(cfg, RLConfig):
        limits = {
            f"--prompt-tokens {prompt}": (prompt, "data.max_prompt_tokens"),
            f"--answer-tokens {answer}": (answer, "env.max_tokens"),
        }
    else:
        both = f"--prompt-tokens {prompt} and --answer-tokens {answer}"
        limits = {both: (prompt + max(1, answer), "data.max_tokens")}
    for flag, (number, setting) in limits.items():
        most = get(cfg, setting)
        require(number <= most, f"{flag}: {setting} = {most} is the longest; raise it")


def guess_program(path: str | None) -> str:
    """Return the first program that has all settings of a file; minirl.rl, if there is no file.

    One that the file's name names comes before the others.

    Raises:
        UserError: the file fits no program, with what is wrong with it for the last.
    """
    if path is None:
        return "rl"
    first, *others = sorted(PROGRAMS, key=lambda name: name not in Path(path).name)
    for name in (first, *others):
        with suppress(UserError):
            load_config(PROGRAMS[name], path)
            return name
    return first  # whose config says what is wrong


# --------------------------------------------------------------------------------------------------
# advice


class Advice(NamedTuple):
    """Settings to change, and what the run then takes."""

    changes: tuple[Change, ...]
    plan: Plan

    @property
    def flags(self) -> str:
        """Return the changes as flags of the program."""
        flags = []
        for name, value in self.changes:
            flag = "--" + name.replace("_", "-")
            flags.append(flag if value is True else f"{flag} {value}")
        return " ".join(flags)


def advise(workload: Workload, card: Card, gpus_per_node: int) -> list[Advice]:
    """Return the settings that make a run fit, found by trying, the fastest first.

    Each change among them gains 3 % at least, or is needed. State in 8 bits, and shards and
    gradients in the host's memory, are only tried if nothing else helps. The arguments are those of
    `make_plan`.
    """
    cfg = workload.cfg
    sizes = [size for size in SIZES if gpus_per_node % size == 0]
    generates = workload.engine or workload.only_trains
    choices: dict[str, list[Any]] = {
        "policy.activation_checkpointing": ["auto"],
        "policy.optimizer_state": ["offload"],
        "policy.accumulate": ["sharded"],
        "tokens_per_rank": [0],
        "parallel.tensor": sizes,
        "parallel.replicate": [1],
        "engine.tensor_parallel_size": sizes if generates else [],
        "engine.sleep": ["auto"] if workload.engine else [],
        "critic.share_base": [True] if "critic" in workload.models else [],
    }
    for resort in LAST_RESORTS:
        needed = [(name, value) for name, value in resort.items() if value != get(cfg, name)]
        tried: list[list[Change | None]] = []
        for name, values in choices.items():
            others = [value for value in values if value != get(cfg, name) and name not in resort]
            tried.append([None, *((name, value) for value in others)])
        fitting: list[Advice] = []
        for combination in itertools.product(*tried):
            changes = [change for change in combination if change is not None]
            if len(changes) > MOST_CHANGES:
                continue
            changes = [*needed, *changes]
            changed = with_settings(cfg, dict(changes))
            tried_workload = workload.changed(changed, workload.world_size)
            with suppress(UserError):
                check(tried_workload)
                plan = make_plan(tried_workload, card, gpus_per_node)
                if not plan.lacks:
                    fitting.append(Advice(changes=tuple(changes), plan=plan))
        if fitting:
            break
    # A change that gains nothing is left out.
    fitting.sort(key=lambda advice: (len(advice.changes), advice.plan.step_seconds))
    kept: list[Advice] = []
    for advice in fitting:
        limit = advice.plan.step_seconds / LEAST_GAIN
        simpler = [other for other in kept if set(other.changes) <= set(advice.changes)]
        if all(other.plan.step_seconds > limit for other in simpler):
            kept.append(advice)
    return sorted(kept, key=lambda advice: advice.plan.step_seconds)


# --------------------------------------------------------------------------------------------------
# what is printed


def page(plan: Plan, advised: list[Advice]) -> str:
    """Return all that is printed."""
    workload = plan.workload
    load = workload.load
    parallel = workload.cfg.parallel
    card = plan.card
    shards = plan.trained["policy"].shards
    title = f"{workload.cfg.policy.model} on {plan.num_gpus} x {card.name}"
    verdicts = [side.verdict for side in plan.sides]
    lines = [
        *([title, *verdicts] if plan.generators else [f"{title}: {plan.verdict}"]),
        f"mesh: replicate {parallel.replicate}, FSDP over {shards}, context {parallel.context}, "
        f"tensor {parallel.tensor}; a step: {workload.num_sequences:,} sequences of "
        f"{load.prompt:,} + {load.answer:,} tokens, {workload.num_updates} update(s) of "
        f"{load.num_micro} micro-batch(es) of {load.tokens:,} rows a rank",
        f"{plan.asleep}tokens_per_rank {workload.tokens_per_rank:,}",
        "",
        f"memory, GiB a GPU of {plan.limit / GIB:.1f}: the peak of each phase",
    ]
    for side in plan.sides:
        lines += _memory_lines(side)
    if not plan.lacks:
        lines += ["", f"time of a step: {plan.step_seconds:.1f} s"]
        for side in plan.sides:
            for phase, seconds in side.seconds.items():
                lines.append(f"  {_name(side, phase):22}{seconds:8.2f} s")
    lines += _advice_lines(plan, advised)
    reached = ", ".join(f"{name} {share:.0%}" for name, share in REACHED.items())
    lines += [
        "",
        f"assumed: {card.memory_gib:.1f} GiB, {card.tflops:,.0f} TFLOP/s, "
        f"{card.bandwidth_gb:,.0f} GB/s, {card.link_gb:,.0f} GB/s to GPUs of a node, "
        f"{card.network_gb:,.0f} to other nodes, {card.host_gb:,.0f} to the host; of these "
        f"reached: {reached}. Time is a roofline, memory a sum of live tensors.",
    ]
    if plan.note:
        lines += ["", plan.note]
    if any(model.tower for model in workload.models.values()):
        lines += ["", "images are left out: the text of prompts is counted"]
    return "\n".join(lines)


def _memory_lines(plan: Plan) -> list[str]:
    """Return what each phase takes, and what the KV cache holds."""
    lines = []
    for phase, size in plan.memory.items():
        over = "  <- too much" if size > plan.limit else ""
        largest = named(plan.alive[phase], 4)
        lines.append(f"  {_name(plan, phase):22}{size / GIB:8.1f}  {largest}{over}")
    if plan.engine:
        states = plan.engine.state_tokens
        cache = f"KV cache of an engine: {max(0, plan.engine.kv_tokens):,} tokens"
        if plan.workload.only_generates:
            cache += f" of {plan.engine.needed_tokens():,} that its answers may need"
        more = f"; the states of each sequence take as much as {states:,} of them"
        lines.append(cache + more * (states > 0))
    return lines


def _name(plan: Plan, phase: str) -> str:
    """Return what a phase is called where there may be two kinds of ranks."""
    return f"generators, {phase}" if plan.workload.only_generates else phase


def _advice_lines(plan: Plan, advised: list[Advice]) -> list[str]:
    """Return what to change: what makes it fit, or else what makes it faster."""
    if plan.lacks and not advised:
        largest = [most(parts)[0] for side in plan.sides for parts in side.alive.values()]
        part, size = max(largest, key=lambda part: part[1])
        reason = ""
        if size > plan.limit:
            reason = f" ({part} alone takes {size / GIB:.1f} GiB of {plan.limit / GIB:.1f})"
        return [
            "",
            f"no settings that were tried make it fit{reason}: take more GPUs, or larger ones",
        ]
    title = "settings that make it fit, the fastest first"
    if not plan.lacks:
        title = "settings that may be faster"
        advised = [advice for advice in advised if advice.changes]
    lines = ["", title] if advised else []
    for advice in advised[:MOST_ADVICE]:
        memory = advice.plan.peak / GIB
        flags = advice.flags or "(as it is)"
        lines.append(f"  {advice.plan.step_seconds:7.1f} s {memory:7.1f} GiB  {flags}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
