"""The settings that would make a run fit its GPUs, or make it faster, found by trying them."""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from minirl.config.rl import RLConfig
from minirl.config.shared import TrainingConfig
from minirl.config.supervised import PairsConfig, SupervisedConfig
from minirl.model import families
from minirl.model.families import layer_values
from minirl.plan.cards import Card
from minirl.plan.estimate import CHECKPOINTING, Models, by_formulas
from minirl.plan.planner import Plan, could_share_base
from minirl.plan.workload import Lengths, Workload, with_settings

# A setting by its name, and a value to try.
Change = tuple[str, Any]

MOST_CHANGES = 3
LEAST_GAIN = 0.97  # Of the seconds of a step, for a change to be worth it.
SIZES = (1, 2, 4, 8)
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
        return " ".join(_flag(name, value) for name, value in self.changes)


def advise(
    workload: Workload, models: Models, card: Card, gpus_per_node: int, lengths: Lengths
) -> list[Advice]:
    """Return the settings that make a run fit, the fastest first, by the formulas.

    Each change among them gains 3 % at least, or is needed. State in 8 bits, and shards and
    gradients in the host's memory, are only tried if nothing else helps.
    """
    fitting: list[Advice] = []
    for first in LAST_RESORTS:
        for changes in _combinations(workload, gpus_per_node):
            cfg = workload.cfg
            named = dict((*first, *changes))
            if len(named) < len(first) + len(changes):
                continue  # the same setting twice
            for name, value in named.items():
                cfg = with_setting(cfg, name, value)
            if not _can_be(cfg):
                continue
            changed = with_settings(workload, cfg, lengths)
            plan = by_formulas(changed, models, card, gpus_per_node)
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
    if policy.cpu_offload and policy.optimizer_state == "offload":
        return False
    if policy.cpu_offload and policy.lora.quantization != "none":
        return False
    shares = isinstance(cfg, RLConfig) and cfg.critic.share_base
    return not shares or could_share_base(cfg)


def with_setting(cfg: Any, name: str, value: Any) -> Any:
    """Return a config with another value of a setting, whose name may have dots."""
    section, _, rest = name.partition(".")
    if rest:
        value = with_setting(vars(cfg)[section], rest, value)
    return dataclasses.replace(cfg, **{section: value})


def _combinations(workload: Workload, gpus_per_node: int) -> Iterator[tuple[Change, ...]]:
    """Yield up to three changes at a time."""
    choices = []
    for name, (current, values) in _choices(workload, gpus_per_node).items():
        choices.append([None, *((name, value) for value in values if value != current)])
    for combination in itertools.product(*choices):
        changes = tuple(change for change in combination if change)
        if len(changes) <= MOST_CHANGES:
            yield changes


def _choices(workload: Workload, gpus_per_node: int) -> dict[str, tuple[Any, list[Any]]]:
    """Return, by setting, its value and those to try."""
    cfg = workload.cfg
    budgets = [cfg.tokens_per_rank // n for n in (2, 4, 8)]
    longest = _longest(cfg)
    choices: dict[str, tuple[Any, list[Any]]] = {
        "policy.activation_checkpointing": (
            cfg.policy.activation_checkpointing,
            list(CHECKPOINTING),
        ),
        "policy.optimizer_state": (cfg.policy.optimizer_state, ["offload"]),
        "policy.accumulate": (cfg.policy.accumulate, ["sharded"]),
        "tokens_per_rank": (
            cfg.tokens_per_rank,
            [n for n in budgets if n * cfg.parallel.context >= longest],
        ),
        "parallel.tensor": (cfg.parallel.tensor, _tensor_sizes(workload, gpus_per_node)),
        "parallel.replicate": (cfg.parallel.replicate, [1]),
    }
    if workload.engine:
        sizes = _engine_sizes(workload, gpus_per_node)
        choices["engine.tensor_parallel_size"] = (workload.engine.tensor_parallel_size, sizes)
    has_critic = any(role.loss == "value" for role in workload.others)
    if has_critic and isinstance(cfg, RLConfig) and could_share_base(cfg):
        choices["critic.share_base"] = (cfg.critic.share_base, [True])
    return choices


def _longest(cfg: TrainingConfig) -> int:
    """Return how many tokens a micro-batch must hold at least."""
    if isinstance(cfg, SupervisedConfig):
        return cfg.data.max_tokens * (2 if isinstance(cfg.data, PairsConfig) else 1)
    assert isinstance(cfg, RLConfig)
    return cfg.engine.max_model_len


def _tensor_sizes(workload: Workload, gpus_per_node: int) -> list[int]:
    """Return sizes of `parallel.tensor` that divide the model, the ranks and a node."""
    quantized = [role.policy.lora.quantization != "none" for role in workload.roles]
    if any(quantized):
        return [1]  # Matrices in four bits are not split.
    parallel = workload.cfg.parallel
    ranks = workload.world_size // (parallel.context * parallel.replicate)
    # A size divides all of these if it divides what they have in common.
    common = math.gcd(ranks, gpus_per_node, *families.divided(workload.policy.model).values())
    return [size for size in SIZES if common % size == 0]


def _engine_sizes(workload: Workload, gpus_per_node: int) -> list[int]:
    """Return sizes of `engine.tensor_parallel_size` that divide the model, ranks and a node."""
    values = workload.policy.model.get_text_config().to_dict()
    heads = values["num_attention_heads"]
    all_kv_heads = layer_values(values, "num_key_value_heads")
    return [
        size
        for size in SIZES
        if heads % size == 0
        and all(kv % size == 0 or size % kv == 0 for kv in all_kv_heads)
        and workload.world_size % size == 0
        and gpus_per_node % size == 0
    ]


def _flag(name: str, value: object) -> str:
    flag = "--" + name.replace("_", "-")
    return flag if value is True else f"{flag} {value}"
