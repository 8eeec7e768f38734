"""Whether a run fits its GPUs, and how long a step takes.

What each model costs comes from the formulas or from a dry run. Here is what is on a GPU at the
same time, and what takes turns.
"""

import math
from dataclasses import dataclass

import torch

from minirl.base.errors import require
from minirl.config.policy import Checkpointing
from minirl.config.rl import RLConfig
from minirl.config.shared import TrainingConfig
from minirl.engine.engine import MOST_SEQS
from minirl.plan import kinds
from minirl.plan.cards import (
    EAGER_SECONDS_PER_LAYER,
    HOST_SECONDS_PER_ANSWER,
    HOST_SECONDS_PER_STEP,
    REACHED,
    SHORTEST_COLLECTIVE,
    Card,
)
from minirl.plan.delta_nets import DeltaNets
from minirl.plan.formulas import Cost
from minirl.plan.shape import Shape
from minirl.plan.workload import Role, Workload

GIB = 2**30
# What no dry run sees. Sizes are usual ones: they depend on driver, NCCL and vLLM.
CONTEXT = 0.6 * GIB  # CUDA's context and loaded kernels.
NCCL = 1.5 * GIB  # Buffers of its communicators.
GRAPHS = 1.0 * GIB  # The engine's CUDA graphs, which stay while it sleeps.
ENGINE_WORKSPACE = 1.5 * GIB  # Activations of the engine's largest batch.
MERGE = 28  # Bytes that are read and written to merge adapters into a weight.
FRAGMENTS = 0.03  # Share of the card that is lost between blocks of memory.


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run takes on its fullest GPU."""

    workload: Workload
    card: Card
    checkpointing: Checkpointing  # of the policy: off, selective or full.
    memory: dict[str, float]  # Most bytes at once, by phase.
    alive: dict[str, dict[str, float]]  # What they are.
    on_host: float  # Bytes in the host's memory for each GPU: what sleeps there, or lives there.
    kv_tokens: int | None  # Tokens in the KV cache of an engine; None: there is no engine.
    # Of the same memory, in tokens, what the states of each sequence take; 0: no layer has any.
    state_tokens: int
    seconds: dict[str, float]  # Of a step, by phase.
    wire: dict[str, float]  # Bytes that pass the link of a GPU in a step, by phase.
    share_of_peak: float  # Of the card's multiplications, in forward and backward.
    by_dry_run: bool
    # Bytes on a GPU that critic.share_base saves, or would save. 0: no critic could share the base.
    of_shared_base: float = 0.0

    @property
    def limit(self) -> float:
        """Return the bytes that a GPU has for all this."""
        return self.card.memory_gib * GIB * (1 - FRAGMENTS)

    @property
    def largest(self) -> str:
        """Return the phase that needs most memory."""
        return max(self.memory, key=lambda phase: self.memory[phase])

    @property
    def lacks(self) -> str:
        """Return what does not fit; empty: all does."""
        if self.memory[self.largest] > self.limit:
            parts = self.alive[self.largest]
            most = max(parts, key=lambda part: parts[part])
            return (
                f"{self.largest} needs {self.memory[self.largest] / GIB:.1f} GiB of "
                f"{self.limit / GIB:.1f}; {parts[most] / GIB:.1f} are {most}"
            )
        if self.on_host > self.card.host_memory_gib * GIB:
            return (
                f"{self.on_host / GIB:.1f} GiB in the host's memory for each GPU, which has "
                f"{self.card.host_memory_gib:.1f}"
            )
        engine = self.workload.engine
        room = (self.kv_tokens or 0) - self.state_tokens
        if engine and self.kv_tokens is not None and room < engine.max_model_len:
            return (
                f"the KV cache holds {max(0, room):,} tokens, less than one context of "
                f"engine.max_model_len = {engine.max_model_len:,}"
            )
        return ""

    @property
    def too_large(self) -> str:
        """Return what alone has no room on a GPU, with its size; empty: there is no such thing."""
        sizes: dict[str, float] = {}
        for parts in self.alive.values():
            for part, size in parts.items():
                sizes[part] = max(size, sizes.get(part, 0.0))
        part = max(sizes, key=lambda part: sizes[part])
        if sizes[part] <= self.limit:
            return ""
        return f"{part} alone takes {sizes[part] / GIB:.1f} GiB of {self.limit / GIB:.1f}"

    @property
    def step_seconds(self) -> float:
        """Return the seconds of a step."""
        return sum(self.seconds.values())


def assemble(
    workload: Workload,
    shapes: dict[str, Shape],
    costs: dict[str, Cost],
    card: Card,
    *,
    checkpointing: Checkpointing,
    by_dry_run: bool,
) -> Plan:
    """Return the plan of a run.

    Args:
        workload: what the run does.
        shapes: of its models, by their roles' names.
        costs: of the same.
        card: the GPUs.
        checkpointing: of the policy's activations.
        by_dry_run: costs are a dry run's, not the formulas'.
    """
    engine = _Engine(workload, shapes["policy"], card)
    alive = _alive(workload, shapes["policy"], costs, engine)
    seconds = _seconds(workload, shapes, costs, engine, card)
    policy = costs["policy"]
    computing = policy.seconds["forward"] + policy.seconds["backward"]
    return Plan(
        workload=workload,
        card=card,
        checkpointing=checkpointing,
        memory={phase: sum(parts.values()) for phase, parts in alive.items()},
        alive=alive,
        on_host=sum(_on_host(workload, role, shapes[role.name]) for role in workload.roles)
        + (engine.weights if workload.engine and workload.engine.sleep_level == 1 else 0.0),
        kv_tokens=engine.kv_tokens if workload.engine else None,
        state_tokens=math.ceil(engine.state_tokens),
        seconds=seconds,
        wire=_wire(workload, costs, engine),
        share_of_peak=policy.flops / computing / (card.tflops * 1e12),
        by_dry_run=by_dry_run,
        of_shared_base=_of_shared_base(workload, shapes),
    )


def check_lower_bound(workload: Workload, shape: Shape, card: Card) -> None:
    """Refuse a run whose sharded state and one layer alone do not fit.

    Raises:
        UserError: it cannot fit, whatever its batches are.
    """
    cfg = workload.cfg
    if cfg.policy.cpu_offload:
        return
    bytes_of_state = {"device": 16, "8bit": 10, "offload": 8}[cfg.policy.optimizer_state]
    if cfg.policy.optimizer == "muon" and bytes_of_state > 8:
        bytes_of_state = (bytes_of_state + 8) // 2
    # What is frozen is weights alone.
    needed_on_all = _frozen_bytes(workload.policy, shape)
    needed_on_all += shape.trained_parameters * bytes_of_state
    needed_for_state = needed_on_all * cfg.parallel.replicate / workload.world_size
    needed = needed_for_state + 2 * shape.layer_parameters / cfg.parallel.tensor + CONTEXT
    memory = card.memory_gib * GIB
    require(
        needed <= memory,
        f"policy.model = {cfg.policy.model}: {shape.parameters / 1e9:.1f}B parameters on "
        f"{workload.world_size} ranks of {card.memory_gib:.1f} GiB: weights, gradients and the "
        f"optimizer's state alone are {needed_for_state / GIB:.1f} GiB a rank "
        f"(policy.optimizer_state = {cfg.policy.optimizer_state}, parallel.replicate = "
        f"{cfg.parallel.replicate}); take more GPUs, policy.optimizer_state = offload or 8bit, "
        "or policy.cpu_offload. `python -m minirl.plan` tries them",
    )


class _Engine:
    """An engine on one GPU, or its part of one that several share."""

    def __init__(self, workload: Workload, shape: Shape, card: Card):
        self.workload = workload
        self.shape = shape
        self.card = card
        self.cfg = workload.engine
        self.weights = 0.0
        self.received = 0.0
        self.total = 0.0
        self.kv_tokens = 0
        self.state_bytes = 0.0  # Of a sequence, however long it is.
        self.state_tokens = 0.0  # As many tokens take as much.
        self.graphs = 0.0
        if self.cfg is None:
            return
        ranks = self.cfg.tensor_parallel_size
        element = 4 if self.cfg.dtype == "float32" else 2
        self.graphs = 0.0 if self.cfg.enforce_eager else GRAPHS
        self.weights = shape.parameters * element / ranks
        # Of a refit: this rank has its own shard already.
        self.received = self.weights * (1 - 1 / workload.world_size)
        # A latent vector is of all heads, and every rank has it.
        kv_features = 2 * max(1.0, shape.kv_heads / ranks) * shape.head_dim
        self.kv_bytes = (shape.latent or kv_features) * element * shape.attention_layers
        if shape.delta_nets:
            self.state_bytes = _state_bytes(shape.delta_nets, element) / ranks
            self.state_tokens = self.state_bytes / self.kv_bytes
        self.total = self.cfg.gpu_memory_utilization * card.memory_gib * GIB
        beside_cache = self.weights + ENGINE_WORKSPACE + self.graphs + CONTEXT
        cache = self.total - beside_cache
        if self.cfg.kv_cache_gb:
            cache = self.cfg.kv_cache_gb * GIB
            self.total = cache + beside_cache
        self.kv_tokens = int(cache // self.kv_bytes)

    def seconds(self) -> float:
        """Return the seconds of generating a step's answers.

        Each step of the engine reads the weights and all cached keys and values once, and reads and
        writes all states. Prompts are read once for all their answers.
        """
        if self.cfg is None:
            return 0.0
        workload = self.workload
        ranks = self.cfg.tensor_parallel_size
        num_engines = workload.world_size // ranks
        num_sequences = workload.num_sequences / num_engines
        load = workload.load
        length = load.prompt + workload.answer / 2
        at_once = min(
            num_sequences,
            self.cfg.max_num_seqs or MOST_SEQS,
            max(1.0, self.kv_tokens / (length + self.state_tokens)),
        )
        waves = max(1.0, num_sequences / at_once)
        bandwidth = self.card.bandwidth_gb * 1e9 * REACHED["memory"]
        flops = self.card.tflops * 1e12 * REACHED["matmul"]
        work_of_token = (2 * self.shape.active_parameters + self.shape.rule_flops) / ranks
        of_sequence = length * self.kv_bytes + 2 * self.state_bytes
        reading = (self.weights + at_once * of_sequence) / bandwidth
        step = max(reading, at_once * work_of_token / flops)
        if self.cfg.enforce_eager:
            step = max(step, EAGER_SECONDS_PER_LAYER * self.shape.num_layers)
        step += HOST_SECONDS_PER_STEP + HOST_SECONDS_PER_ANSWER * at_once
        if ranks > 1:  # A sum after attention and one after the feed-forward.
            summed = 2 * at_once * self.shape.hidden * 2 * (1 - 1 / ranks)
            sending = summed / (self.card.link_gb * 1e9 * REACHED["wire"])
            step += 2 * self.shape.num_layers * (SHORTEST_COLLECTIVE + sending)
        prompts = num_sequences / load.samples * load.prompt
        return waves * workload.answer * step + prompts * work_of_token / flops


def _state_bytes(nets: DeltaNets, element: int) -> int:
    """Return the bytes of a sequence's states in all gated delta nets, as vLLM keeps them.

    Args:
        nets: sizes.
        element: bytes of an element in the engine's dtype.
    """
    convolved = nets.mixed * (nets.convolution - 1) * element
    recurrent = nets.states * (nets.state_bytes or element)
    return nets.num_layers * (convolved + recurrent)


def _alive(
    workload: Workload, shape: Shape, costs: dict[str, Cost], engine: _Engine
) -> dict[str, dict[str, float]]:
    """Return what is on the device in each phase. `shape`: of the policy."""
    policy = costs["policy"]
    always = {"CUDA context": CONTEXT}
    if workload.world_size > 1:
        always["NCCL"] = NCCL
    phases: dict[str, dict[str, float]] = {}
    asleep = dict(always)
    if workload.engine:
        phases["rollout"] = {"engine": engine.total, "NCCL": always.get("NCCL", 0.0)}
        phases["refit"] = {
            **always,
            "engine's weights": engine.weights,
            "engine's graphs": engine.graphs,
            kinds.PARAMETERS: policy.parameters - _asleep_in_refit(workload, shape),
            "buffers": _buffers(workload),
            "merged adapters": _merged(workload, shape),
        }
        asleep["engine's graphs"] = engine.graphs
        if workload.engine.sleep_level == 0:
            asleep["engine"] = engine.total

    # The optimizer's state sleeps until the first step, if an engine has put it to sleep.
    for phase in ("forward", "backward", "optimizer"):
        parts = dict(policy.alive[phase])
        if workload.engine and workload.num_updates == 1 and phase != "optimizer":
            parts.pop(kinds.OPTIMIZER, None)
        phases[phase] = asleep | parts
    if workload.num_annotations:
        parts = dict(policy.alive["annotate"])
        if workload.engine:
            parts.pop(kinds.OPTIMIZER, None)
        phases["annotate"] = asleep | parts
    for role in workload.others:
        cost = costs[role.name]
        beside = {"policy's parameters": policy.parameters}
        if not workload.engine:
            beside["policy's optimizer state"] = policy.optimizer
        names = ("backward", "optimizer") if role.loss == "value" else ("annotate",)
        for phase in names:
            phases[f"{role.name}, {phase}"] = asleep | beside | cost.alive[phase]
    return phases


def _buffers(workload: Workload) -> float:
    """Return the bytes of a refit's two buckets, each with one to send and one to receive."""
    return 4.0 * workload.bucket_bytes if workload.world_size > 1 else 0.0


def _merged(workload: Workload, shape: Shape) -> float:
    """Return the bytes that a refit needs to merge adapters into the base, which sleeps.

    These are the adapters, of which a rank has all that its shards need; the merged shards of a
    bucket; and the largest weight while it is merged, or the embedding, which only is copied.
    """
    adapters = shape.adapters
    if adapters is None or workload.engine is None:
        return 0.0
    shards = workload.world_size / workload.cfg.parallel.replicate
    of_linears = 0.0
    for linear in adapters.linears:
        num_a, num_b = linear.numel(adapters.rank, 1, 0.0)
        of_linears += num_b / shards + (num_a / shards if linear.experts else num_a)
    bucket = workload.bucket_bytes * workload.engine.tensor_parallel_size / shards
    element = _element(workload.policy)
    # A matrix in the dtype of the base, however that is held, and what it is merged to.
    largest = adapters.largest * 2 * element
    largest = max(largest, shape.vocabulary * shape.hidden * element)
    return 4 * of_linears * shape.num_layers + bucket + largest / shards


def _asleep_in_refit(workload: Workload, shape: Shape) -> float:
    """Return the bytes of a rank's part of a base that has adapters, which a refit reads copies of.

    With cpu_offload it is on the host in any case.
    """
    policy = workload.policy.policy
    if shape.adapters is None or policy.cpu_offload:
        return 0.0
    share = workload.cfg.parallel.replicate / workload.world_size
    return _frozen_bytes(workload.policy, shape) * share


def _element(role: Role) -> int:
    """Return the bytes of an element in the dtype that a model computes in."""
    return getattr(torch, role.policy.dtype).itemsize


def _frozen_bytes(role: Role, shape: Shape) -> float:
    """Return the bytes of a model's frozen weights, on all ranks together."""
    return shape.frozen_bytes(element=_element(role), master=4)


def _of_shared_base(workload: Workload, shapes: dict[str, Shape]) -> float:
    """Return the bytes of a GPU's part of the base that critic and policy could share, or do."""
    critics = [role for role in workload.others if role.loss == "value"]
    if not critics or not could_share_base(workload.cfg):
        return 0.0
    of_all = _frozen_bytes(critics[0], shapes["critic"])
    return of_all * workload.cfg.parallel.replicate / workload.world_size


def could_share_base(cfg: TrainingConfig) -> bool:
    """Return whether critic.share_base is possible: both models are adapters of one base."""
    if not isinstance(cfg, RLConfig):
        return False
    policy = cfg.policy
    critic = cfg.critic
    alike = (policy.dtype, policy.cpu_offload, policy.lora.quantization) == (
        critic.dtype,
        critic.cpu_offload,
        critic.lora.quantization,
    )
    return bool(policy.lora.rank and critic.lora.rank and not critic.model) and alike


def _on_host(workload: Workload, role: Role, shape: Shape) -> float:
    """Return the bytes of a model in the host's memory: what sleeps there, or lives there."""
    share = workload.cfg.parallel.replicate / workload.world_size
    if role.loss == "frozen":
        return 2 * shape.parameters * share
    state = {"device": 8, "8bit": 2, "offload": 8}[role.policy.optimizer_state]
    trained = shape.trained_parameters * share
    frozen = 0.0 if role.shares_base else _frozen_bytes(role, shape) * share
    if role.policy.cpu_offload:
        return frozen + (4 + 4 + state) * trained  # Gradients, too.
    if workload.engine:
        return frozen + (4 + state) * trained
    return state * trained if role.policy.optimizer_state == "offload" else 0.0


def _seconds(
    workload: Workload,
    shapes: dict[str, Shape],
    costs: dict[str, Cost],
    engine: _Engine,
    card: Card,
) -> dict[str, float]:
    """Return the seconds of a step's phases: the longer of computing and sending."""
    num_micro = workload.load.num_micro * workload.num_updates
    host = card.host_gb * 1e9
    seconds: dict[str, float] = {}
    policy = costs["policy"]
    if workload.engine:
        seconds["rollout"] = engine.seconds()
        moved = 2 * (policy.parameters + policy.optimizer)
        seconds["refit"] = engine.received / (card.link_gb * 1e9 * REACHED["wire"])
        if shapes["policy"].adapters:
            merged = MERGE * shapes["policy"].parameters * workload.cfg.parallel.replicate
            bandwidth = card.bandwidth_gb * 1e9 * REACHED["memory"]
            seconds["refit"] += merged / workload.world_size / bandwidth
            seconds["refit"] += _asleep_in_refit(workload, shapes["policy"]) / host
        for role in workload.others:
            cost = costs[role.name]
            moved += 2 * (cost.parameters + cost.optimizer)
        if workload.engine.sleep_level == 1:
            moved += 2 * engine.weights
        seconds["sleep_wake"] = moved / host

    annotate = workload.num_annotations * _longer(policy, "annotate")
    for role in workload.others:
        annotate += _longer(costs[role.name], "annotate")
    if annotate:
        seconds["annotate"] = num_micro * annotate

    trained = [policy] + [costs[role.name] for role in workload.others if role.loss == "value"]
    for phase in ("forward", "backward"):
        seconds[phase] = num_micro * sum(_longer(cost, phase) for cost in trained)
    seconds["optimizer"] = workload.num_updates * sum(
        _longer(cost, "optimizer") for cost in trained
    )
    return seconds


def _longer(cost: Cost, phase: str) -> float:
    return max(cost.seconds[phase], cost.wire_seconds[phase])


def _wire(workload: Workload, costs: dict[str, Cost], engine: _Engine) -> dict[str, float]:
    """Return the bytes that pass the link of a GPU in a step, by phase."""
    num_micro = workload.load.num_micro * workload.num_updates
    wire: dict[str, float] = {}
    if workload.engine:
        wire["refit"] = engine.received
    if workload.num_annotations:
        passes = num_micro * workload.num_annotations
        wire["annotate"] = passes * costs["policy"].wire["annotate"]
    for phase in ("forward", "backward"):
        wire[phase] = num_micro * costs["policy"].wire[phase]
    return wire
