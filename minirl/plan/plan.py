"""Whether a run fits its GPUs, and how long a step takes.

What each model costs is in costs.py. Here is what is on a GPU at the same time, and what takes
turns.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from minirl.base.errors import require
from minirl.config.policy import Checkpointing
from minirl.config.rl import RLConfig
from minirl.config.shared import MOST_SEQS, TrainingConfig
from minirl.plan.cards import Card
from minirl.plan.costs import (
    BYTES,
    OPTIMIZER,
    PARAMETERS,
    REACHED,
    WIDE,
    Cost,
    CostModel,
    Parts,
    Training,
    rule_flops,
)
from minirl.plan.sizes import ModelSizes
from minirl.plan.workload import Role, Workload

GIB = 2**30
CHECKPOINTING: tuple[Checkpointing, ...] = ("off", "selective", "full")
# What is in no formula. Sizes are usual ones: they depend on driver, NCCL and vLLM.
CONTEXT = 0.6 * GIB  # CUDA's context and loaded kernels.
NCCL = 1.5 * GIB  # Buffers of its communicators.
GRAPHS = 1.0 * GIB  # The engine's CUDA graphs, which stay while it sleeps.
ENGINE_WORKSPACE = 1.5 * GIB  # Activations of the engine's largest batch.
FRAGMENTS = 0.03  # Share of the card that is lost between blocks of memory.
MERGE_BYTES = 28  # Read and written to merge adapters into a weight for the engine.
# Seconds of the host for a token of each answer, for each answer, and for a layer without graphs;
# and the least that a collective takes.
HOST_SECONDS_PER_STEP = 2e-3
HOST_SECONDS_PER_ANSWER = 1e-5
EAGER_SECONDS_PER_LAYER = 2e-4
SHORTEST_COLLECTIVE = 2e-5


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run takes on its fullest GPU."""

    workload: Workload
    card: Card
    checkpointing: Checkpointing  # Of the policy: off, selective or full.
    alive: dict[str, Parts]  # Most bytes at once by phase, and what they are for.
    on_host: float  # Bytes in the host's memory for each GPU: what sleeps there, or lives there.
    kv_tokens: int | None  # Tokens in the KV cache of an engine; None: there is no engine.
    # Of the same memory, in tokens, what the states of each sequence take; 0: no layer has any.
    state_tokens: int
    seconds: dict[str, float]  # Of a step, by phase.
    wire: dict[str, float]  # Bytes that pass the link of a GPU in a step, by phase.
    share_of_peak: float  # Of the card's multiplications, in forward and backward.
    has_delta_nets: bool
    # Bytes on a GPU that critic.share_base saves, or would save. 0: no critic could share the base.
    shared_base: float

    @property
    def memory(self) -> dict[str, float]:
        """Return most bytes at once, by phase."""
        return {phase: sum(parts.values()) for phase, parts in self.alive.items()}

    @property
    def limit(self) -> float:
        """Return the bytes that a GPU has for all this."""
        return self.card.memory_gib * GIB * (1 - FRAGMENTS)

    @property
    def largest(self) -> str:
        """Return the phase that needs most memory."""
        memory = self.memory
        return max(memory, key=lambda phase: memory[phase])

    @property
    def lacks(self) -> str:
        """Return what does not fit; empty: all does."""
        phase = self.largest
        needed = self.memory[phase]
        if needed > self.limit:
            parts = self.alive[phase]
            most = max(parts, key=lambda part: parts[part])
            return (
                f"{phase} needs {needed / GIB:.1f} GiB of {self.limit / GIB:.1f}; "
                f"{parts[most] / GIB:.1f} are {most}"
            )
        if self.on_host > self.card.host_memory_gib * GIB:
            return (
                f"{self.on_host / GIB:.1f} GiB in the host's memory for each GPU, which has "
                f"{self.card.host_memory_gib:.1f}"
            )
        engine = self.workload.engine
        room = (self.kv_tokens or 0) - self.state_tokens
        if engine and room < engine.max_model_len:
            return (
                f"the KV cache holds {max(0, room):,} tokens, less than one context of "
                f"engine.max_model_len = {engine.max_model_len:,}"
            )
        return ""

    @property
    def step_seconds(self) -> float:
        """Return the seconds of a step."""
        return sum(self.seconds.values())


def make_plan(
    workload: Workload,
    sizes: Mapping[str, ModelSizes],
    card: Card,
    gpus_per_node: int,
    *,
    automatic: tuple[Checkpointing, ...] = CHECKPOINTING,
    liger: bool = True,
) -> Plan:
    """Return the plan of a run.

    Args:
        workload: what the run does.
        sizes: of its models, by the names of their roles.
        card: the GPUs.
        gpus_per_node: how many of them are linked.
        automatic: what `policy.activation_checkpointing` auto may stand for: the first that fits.
        liger: liger-kernel is installed where it runs, for `policy.kernels` auto.
    """
    wanted = workload.cfg.policy.activation_checkpointing
    for checkpointing in automatic if wanted == "auto" else (wanted,):
        costs = {}
        for role in workload.roles:
            training = training_of(
                workload, role, sizes[role.name], card, gpus_per_node, checkpointing, liger=liger
            )
            costs[role.name] = CostModel(training).cost()
        plan = assemble(workload, sizes, costs, card, checkpointing)
        if not plan.lacks:
            break
    return plan


def training_of(
    workload: Workload,
    role: Role,
    model: ModelSizes,
    card: Card,
    gpus_per_node: int,
    checkpointing: Checkpointing,
    *,
    liger: bool = True,
) -> Training:
    """Return how a model of a run is trained. The arguments are those of `make_plan`."""
    return Training(
        model=model,
        card=card,
        gpus_per_node=gpus_per_node,
        world_size=workload.world_size,
        policy=role.policy,
        parallel=workload.cfg.parallel,
        load=workload.load,
        loss=role.loss,
        shares_base=role.shares_base,
        fused=liger if role.policy.kernels == "auto" else role.policy.kernels != "torch",
        checkpointing=checkpointing,
    )


def assemble(
    workload: Workload,
    sizes: Mapping[str, ModelSizes],
    costs: Mapping[str, Cost],
    card: Card,
    checkpointing: Checkpointing,
) -> Plan:
    """Return the plan of a run whose models cost so much. Arguments are those of `make_plan`."""
    engine = Engine(workload, sizes["policy"], card)
    policy = costs["policy"]
    computing = policy.seconds["forward"] + policy.seconds["backward"]
    on_host = sum(_on_host(workload, role, sizes[role.name]) for role in workload.roles)
    if workload.engine and workload.engine.sleep_level == 1:
        on_host += engine.weights
    shared_base = 0.0
    if "critic" in sizes and could_share_base(workload.cfg):
        shared_base = _frozen_on_rank(workload, workload.roles[1], sizes["critic"])
    return Plan(
        workload=workload,
        card=card,
        checkpointing=checkpointing,
        alive=_alive(workload, sizes["policy"], costs, engine),
        on_host=on_host,
        kv_tokens=engine.kv_tokens if workload.engine else None,
        state_tokens=math.ceil(engine.state_tokens),
        seconds=_seconds(workload, sizes["policy"], costs, engine, card),
        wire=_wire(workload, policy, engine),
        share_of_peak=policy.flops / computing / (card.tflops * 1e12),
        has_delta_nets=any(layer.delta_net for m in sizes.values() for layer in m.layers),
        shared_base=shared_base,
    )


def check_lower_bound(workload: Workload, model: ModelSizes, card: Card) -> None:
    """Refuse a run whose sharded state and one layer alone do not fit.

    Raises:
        UserError: it cannot fit, whatever its batches are.
    """
    cfg = workload.cfg
    if cfg.policy.cpu_offload:
        return
    of_state = {"device": 16, "8bit": 10, "offload": 8}[cfg.policy.optimizer_state]
    if cfg.policy.optimizer == "muon" and of_state > 8:
        of_state = (of_state + 8) // 2
    frozen = _frozen_on_rank(workload, workload.roles[0], model)
    trained = model.trained * of_state * cfg.parallel.replicate / workload.world_size
    layer = max(layer.numel for layer in model.layers)
    needed = frozen + trained + 2 * layer / cfg.parallel.tensor + CONTEXT
    require(
        needed <= card.memory_gib * GIB,
        f"policy.model = {cfg.policy.model}: {model.parameters / 1e9:.1f}B parameters on "
        f"{workload.world_size} ranks of {card.memory_gib:.1f} GiB: weights, gradients and the "
        f"optimizer's state alone are {(frozen + trained) / GIB:.1f} GiB a rank "
        f"(policy.optimizer_state = {cfg.policy.optimizer_state}, parallel.replicate = "
        f"{cfg.parallel.replicate}); take more GPUs, policy.optimizer_state = offload or 8bit, "
        "or policy.cpu_offload. `python -m minirl.plan` tries them",
    )


class Engine:
    """An engine on one GPU, or its part of one that several share."""

    def __init__(self, workload: Workload, model: ModelSizes, card: Card):
        self.workload = workload
        self.model = model
        self.card = card
        self.weights = 0.0  # Bytes, as the next.
        self.total = 0.0
        self.graphs = 0.0
        self.kv_tokens = 0
        self.state_bytes = 0.0  # Of a sequence, however long it is.
        self.state_tokens = 0.0  # As many tokens take as much.
        cfg = workload.engine
        if cfg is None:
            return
        self.ranks = cfg.tensor_parallel_size
        element = 4 if cfg.dtype == "float32" else 2
        self.graphs = 0.0 if cfg.enforce_eager else GRAPHS
        self.weights = model.parameters * element / self.ranks
        self.kv_bytes = 0.0  # Of a token.
        for layer, num in model.layers.items():
            self.kv_bytes += num * layer.cached * max(1.0, layer.kv_heads / self.ranks) * element
            if layer.delta_net:
                net = layer.delta_net
                convolved = net.mixed * (net.convolution - 1) * element
                recurrent = net.state * (model.state_bytes or element)
                self.state_bytes += num * (convolved + recurrent) / self.ranks
        self.state_tokens = self.state_bytes / self.kv_bytes
        self.total = cfg.gpu_memory_utilization * card.memory_gib * GIB
        without_cache = self.weights + ENGINE_WORKSPACE + self.graphs + CONTEXT
        cache = self.total - without_cache
        if cfg.kv_cache_gb:
            cache = cfg.kv_cache_gb * GIB
            self.total = cache + without_cache
        self.kv_tokens = int(cache // self.kv_bytes)

    @property
    def received(self) -> float:
        """Return the bytes of a refit from other ranks: this one has its own shard already."""
        return self.weights * (1 - 1 / self.workload.world_size)

    def seconds(self) -> float:
        """Return the seconds of generating a step's answers.

        Each step of the engine reads the weights and all cached keys and values once, and reads and
        writes all states. Prompts are read once for all their answers.
        """
        workload = self.workload
        cfg = workload.engine
        if cfg is None:
            return 0.0
        model = self.model
        num_sequences = workload.num_sequences / (workload.world_size / self.ranks)
        length = workload.load.prompt + workload.answer / 2
        at_once = min(
            num_sequences,
            cfg.max_num_seqs or MOST_SEQS,
            max(1.0, self.kv_tokens / (length + self.state_tokens)),
        )
        bandwidth = self.card.bandwidth_gb * 1e9 * REACHED["memory"]
        flops = self.card.tflops * 1e12 * REACHED["matmul"]
        work_of_token = (2 * model.active_parameters + rule_flops(model)) / self.ranks
        of_sequence = length * self.kv_bytes + 2 * self.state_bytes
        reading = (self.weights + at_once * of_sequence) / bandwidth
        step = max(reading, at_once * work_of_token / flops)
        if cfg.enforce_eager:
            step = max(step, EAGER_SECONDS_PER_LAYER * model.num_layers)
        step += HOST_SECONDS_PER_STEP + HOST_SECONDS_PER_ANSWER * at_once
        if self.ranks > 1:  # A sum after attention and one after the MLP.
            summed = 2 * at_once * model.hidden * 2 * (1 - 1 / self.ranks)
            sending = summed / (self.card.link_gb * 1e9 * REACHED["wire"])
            step += 2 * model.num_layers * (SHORTEST_COLLECTIVE + sending)
        waves = max(1.0, num_sequences / at_once)
        prompts = num_sequences / workload.load.samples * workload.load.prompt
        return waves * workload.answer * step + prompts * work_of_token / flops


def _alive(
    workload: Workload, model: ModelSizes, costs: Mapping[str, Cost], engine: Engine
) -> dict[str, Parts]:
    """Return what is on the device in each phase. `model`: the policy's."""
    policy = costs["policy"]
    always = {"CUDA context": CONTEXT}
    if workload.world_size > 1:
        always["NCCL"] = NCCL
    phases: dict[str, Parts] = {}
    asleep = dict(always)
    # The optimizer's state sleeps until the first step, if an engine has put it to sleep.
    sleeping: set[str] = set()
    if workload.engine:
        phases["rollout"] = {"engine": engine.total, "NCCL": always.get("NCCL", 0.0)}
        phases["refit"] = {
            **always,
            "engine's weights": engine.weights,
            "engine's graphs": engine.graphs,
            PARAMETERS: policy.parameters - _asleep_in_refit(workload, model),
            # Two buckets, each with one to send and one to receive.
            "buffers": 4.0 * workload.bucket_bytes if workload.world_size > 1 else 0.0,
            "merged adapters": _merged(workload, model),
        }
        asleep["engine's graphs"] = engine.graphs
        if workload.engine.sleep_level == 0:
            asleep["engine"] = engine.total
        sleeping = {"annotate"}
        if workload.num_updates == 1:
            sleeping = {"annotate", "forward", "backward"}
    for phase, parts in policy.alive.items():
        if phase != "annotate" or workload.num_annotations:
            phases[phase] = asleep | parts
            if phase in sleeping:
                phases[phase].pop(OPTIMIZER)
    for role in workload.roles[1:]:
        others = {"policy's parameters": policy.parameters}
        if not workload.engine:
            others["policy's optimizer state"] = policy.optimizer
        for phase in ("backward", "optimizer") if role.loss == "value" else ("annotate",):
            phases[f"{role.name}, {phase}"] = asleep | others | costs[role.name].alive[phase]
    return phases


def _merged(workload: Workload, model: ModelSizes) -> float:
    """Return the bytes that a refit needs to merge adapters into the base, which sleeps.

    These are the adapters, of which a rank has all that its shards need; the merged shards of a
    bucket; and the largest weight while it is merged, or the embedding, which only is copied.
    """
    if not model.is_adapted or workload.engine is None:
        return 0.0
    shards = workload.world_size / workload.cfg.parallel.replicate
    element = BYTES[workload.roles[0].policy.dtype]
    adapters = 0.0
    largest = model.vocabulary * model.hidden * element
    for m, num in model.all_matrices():
        of_a = m.rank * m.inputs * max(1, m.experts)
        adapters += num * ((m.adapter - of_a) / shards + of_a / (shards if m.experts else 1))
        if m.rank:
            largest = max(largest, m.numel * 2 * element)
    bucket = workload.bucket_bytes * workload.engine.tensor_parallel_size / shards
    return WIDE * adapters + bucket + largest / shards


def _asleep_in_refit(workload: Workload, model: ModelSizes) -> float:
    """Return the bytes of a rank's part of a base that has adapters, which a refit reads copies of.

    With cpu_offload it is on the host in any case.
    """
    role = workload.roles[0]
    if not model.is_adapted or role.policy.cpu_offload:
        return 0.0
    return _frozen_on_rank(workload, role, model)


def _frozen_on_rank(workload: Workload, role: Role, model: ModelSizes) -> float:
    """Return the bytes of a rank's part of a model's frozen weights."""
    frozen = model.frozen_bytes(BYTES[role.policy.dtype], WIDE)
    return frozen * workload.cfg.parallel.replicate / workload.world_size


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


def _on_host(workload: Workload, role: Role, model: ModelSizes) -> float:
    """Return the bytes of a model in the host's memory: what sleeps there, or lives there."""
    share = workload.cfg.parallel.replicate / workload.world_size
    if role.loss == "frozen":
        return 2 * model.parameters * share
    state = {"device": 8, "8bit": 2, "offload": 8}[role.policy.optimizer_state]
    trained = model.trained * share
    frozen = 0.0 if role.shares_base else _frozen_on_rank(workload, role, model)
    if role.policy.cpu_offload:
        return frozen + (4 + 4 + state) * trained  # Gradients, too.
    if workload.engine:
        return frozen + (4 + state) * trained
    return state * trained if role.policy.optimizer_state == "offload" else 0.0


def _seconds(
    workload: Workload,
    model: ModelSizes,
    costs: Mapping[str, Cost],
    engine: Engine,
    card: Card,
) -> dict[str, float]:
    """Return the seconds of a step's phases: the longer of computing and sending."""
    num_micro = workload.load.num_micro * workload.num_updates
    seconds: dict[str, float] = {}
    if workload.engine:
        host = card.host_gb * 1e9
        seconds["rollout"] = engine.seconds()
        seconds["refit"] = engine.received / (card.link_gb * 1e9 * REACHED["wire"])
        if model.is_adapted:
            merged = MERGE_BYTES * model.parameters * workload.cfg.parallel.replicate
            bandwidth = card.bandwidth_gb * 1e9 * REACHED["memory"]
            seconds["refit"] += merged / workload.world_size / bandwidth
            seconds["refit"] += _asleep_in_refit(workload, model) / host
        moved = sum(2 * (cost.parameters + cost.optimizer) for cost in costs.values())
        if workload.engine.sleep_level == 1:
            moved += 2 * engine.weights
        seconds["sleep_wake"] = moved / host

    def longer(cost: Cost, phase: str) -> float:
        return max(cost.seconds[phase], cost.wire_seconds[phase])

    annotate = workload.num_annotations * longer(costs["policy"], "annotate")
    annotate += sum(longer(costs[role.name], "annotate") for role in workload.roles[1:])
    if annotate:
        seconds["annotate"] = num_micro * annotate
    trained = [costs[role.name] for role in workload.roles if role.loss != "frozen"]
    for phase in ("forward", "backward"):
        seconds[phase] = num_micro * sum(longer(cost, phase) for cost in trained)
    of_step = sum(longer(cost, "optimizer") for cost in trained)
    seconds["optimizer"] = workload.num_updates * of_step
    return seconds


def _wire(workload: Workload, policy: Cost, engine: Engine) -> dict[str, float]:
    """Return the bytes that pass the link of a GPU in a step, by phase."""
    num_micro = workload.load.num_micro * workload.num_updates
    wire: dict[str, float] = {}
    if workload.engine:
        wire["refit"] = engine.received
    if workload.num_annotations:
        wire["annotate"] = num_micro * workload.num_annotations * policy.wire["annotate"]
    for phase in ("forward", "backward"):
        wire[phase] = num_micro * policy.wire[phase]
    return wire
