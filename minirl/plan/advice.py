"""The settings that would make a run fit its GPUs, or make it faster, found by trying them."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from minirl.config.rl import RLConfig
from minirl.config.shared import TrainingConfig
from minirl.config.supervised import PairsConfig, SupervisedConfig
from minirl.plan.cards import Card
from minirl.plan.plan import CHECKPOINTING, Plan, could_share_base, make_plan
from minirl.plan.sizes import ModelSizes
from minirl.plan.workload import Lengths, Workload, with_settings

# A setting by its name, and a value to try.
Change = tuple[str, Any]

MOST_CHANGES = 3
SIZES = (1, 2, 4, 8)  # Of tensor parallelism.
LEAST_GAIN = 0.97  # Of the seconds of a step, for a change to be worth it.
# Tried in this order, with all else, until something fits.
LAST_RESORTS: tuple[tuple[Change, ...], ...] = (
    (),
    (("policy.optimizer_state", "8bit"),),
    (("policy.cpu_offload", True),),
)


@dataclass(frozen=True, kw_only=True)
class Advice:
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


def advise(
    workload: Workload,
    sizes: Mapping[str, ModelSizes],
    card: Card,
    gpus_per_node: int,
    lengths: Lengths,
) -> list[Advice]:
    """Return the settings that make a run fit, the fastest first. The arguments are `make_plan`'s.

    Each change among them gains 3 % at least, or is needed. State in 8 bits, and shards and
    gradients in the host's memory, are only tried if nothing else helps.
    """
    fitting: list[Advice] = []
    for first in LAST_RESORTS:
        for changes in _combinations(workload, sizes, gpus_per_node):
            named = dict((*first, *changes))
            if len(named) < len(first) + len(changes):
                continue  # the same setting twice
            cfg = workload.cfg
            for name, value in named.items():
                cfg = with_setting(cfg, name, value)
            if not _can_be(cfg):
                continue
            changed = with_settings(workload, cfg, lengths)
            plan = make_plan(changed, sizes, card, gpus_per_node)
            if not plan.lacks:
                fitting.append(Advice(changes=(*first, *changes), plan=plan))
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


def _can_be(cfg: TrainingConfig) -> bool:
    """Return whether settings that are tried can work together."""
    policy = cfg.policy
    is_quantised = policy.lora.quantization != "none"
    if policy.cpu_offload and (policy.optimizer_state == "offload" or is_quantised):
        return False
    shares = isinstance(cfg, RLConfig) and cfg.critic.share_base
    return not shares or could_share_base(cfg)


def with_setting(cfg: Any, name: str, value: Any) -> Any:
    """Return a config with another value of a setting, whose name may have dots."""
    section, _, rest = name.partition(".")
    if rest:
        value = with_setting(vars(cfg)[section], rest, value)
    return dataclasses.replace(cfg, **{section: value})


def _combinations(
    workload: Workload, sizes: Mapping[str, ModelSizes], gpus_per_node: int
) -> Iterator[tuple[Change, ...]]:
    """Yield up to three changes at a time."""
    cfg = workload.cfg
    model = sizes["policy"]
    longest = 0  # Tokens that a micro-batch must hold at least.
    if isinstance(cfg, RLConfig):
        longest = cfg.engine.max_model_len
    elif isinstance(cfg, SupervisedConfig):
        longest = cfg.data.max_tokens * (2 if isinstance(cfg.data, PairsConfig) else 1)
    budgets = [cfg.tokens_per_rank // n for n in (2, 4, 8)]
    ranks = workload.world_size // (cfg.parallel.context * cfg.parallel.replicate)
    # Matrices in four bits are not split.
    is_quantised = any(role.policy.lora.quantization != "none" for role in workload.roles)
    tensor = []
    for size in SIZES[:1] if is_quantised else SIZES:
        if ranks % size == gpus_per_node % size == 0 and not model.undivided(size):
            tensor.append(size)
    choices: list[tuple[str, Any, list[Any]]] = [
        (
            "policy.activation_checkpointing",
            cfg.policy.activation_checkpointing,
            list(CHECKPOINTING),
        ),
        ("policy.optimizer_state", cfg.policy.optimizer_state, ["offload"]),
        ("policy.accumulate", cfg.policy.accumulate, ["sharded"]),
        (
            "tokens_per_rank",
            cfg.tokens_per_rank,
            [n for n in budgets if n * cfg.parallel.context >= longest],
        ),
        ("parallel.tensor", cfg.parallel.tensor, tensor),
        ("parallel.replicate", cfg.parallel.replicate, [1]),
    ]
    if workload.engine:
        of_engine = []
        for size in SIZES:
            splits = model.heads % size == workload.world_size % size == gpus_per_node % size == 0
            if splits and (model.kv_heads % size == 0 or size % model.kv_heads == 0):
                of_engine.append(size)
        current = workload.engine.tensor_parallel_size
        choices.append(("engine.tensor_parallel_size", current, of_engine))
    if "critic" in sizes and isinstance(cfg, RLConfig) and could_share_base(cfg):
        choices.append(("critic.share_base", cfg.critic.share_base, [True]))
    tried = []
    for name, current, values in choices:
        tried.append([None, *((name, value) for value in values if value != current)])
    for combination in itertools.product(*tried):
        changes = tuple(change for change in combination if change)
        if len(changes) <= MOST_CHANGES:
            yield changes
