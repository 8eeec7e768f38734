"""Whether a run fits its GPUs, and how long a step takes.

What training each model costs is in costs.py. Here is what a config asks for, what is on a GPU at
the same time, and what takes turns. With `parallel.generators` ranks that train and ranks that
generate have a plan each: `Plan` and its `generators`.
"""

import copy
import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minirl.base.errors import require
from minirl.config import validate
from minirl.config.policy import Checkpointing
from minirl.config.rl import MOST_IN_FLIGHT, RLConfig
from minirl.config.shared import MOST_SEQS, EngineConfig, Sleep, TrainingConfig
from minirl.config.supervised import DPOConfig, KTOConfig, RMConfig, SupervisedConfig
from minirl.plan import costs
from minirl.plan.cards import GIB, Card, of_device
from minirl.plan.costs import Load, Parts, Training
from minirl.plan.sizes import HEADS, ModelSizes, read_sizes

if TYPE_CHECKING:
    from minirl.parallel.mesh import Mesh

CHECKPOINTING: tuple[Checkpointing, ...] = ("off", "selective", "full")
SLEEP: tuple[Sleep, ...] = ("none", "cache", "engine", "all")  # The fastest first.
MOST_USED = 0.92  # Share of the card that may be used where what sleeps, or rows, are chosen.
LEAST_GAIN = 0.99  # Of the seconds of a step, for which more is put to sleep.
CPU_TOKENS = 16_384  # Rows of a micro-batch on a CPU, which more do not make faster.
BLOCK = 16  # Tokens of a block of the KV cache.
SPARE_CACHE = 1.05  # Of the tokens that a step's sequences need.
# What is in no formula. Sizes are usual ones: they depend on driver, NCCL and vLLM.
CONTEXT = 0.6 * GIB  # CUDA's context and loaded kernels.
NCCL = 1.5 * GIB  # Buffers of its communicators.
GRAPHS = 1.0 * GIB  # The engine's CUDA graphs, which stay while it sleeps.
ENGINE_WORKSPACE = 1.5 * GIB  # Activations of the engine's largest batch.
FRAGMENTS = 0.03  # Share of the card that is lost between blocks of memory.
MERGE_BYTES = 28  # Read and written to merge adapters into a weight for the engine.
# Seconds of the host, which prepares what the device computes meanwhile.
HOST_SECONDS_PER_STEP = 3.6e-3  # Of the engine,
HOST_SECONDS_PER_ANSWER = 3.5e-6  # and for each answer in it.
EAGER_SECONDS_PER_LAYER = 2e-4  # Of the engine without graphs.
HOST_SECONDS_PER_LAYER = 3.5e-3  # Of a pass in training, however few its rows are.
MAP_SECONDS = 2.3e-3  # Of mapping or unmapping a GiB.
SHORTEST_COLLECTIVE = 2e-5
# A container's limit of memory in bytes ("max": none), as Linux's cgroups of version 2 have it.
MEMORY_LIMIT = Path("/sys/fs/cgroup/memory.max")
TRAINS = ("backward", "optimizer")  # Phases in which a critic is trained.


# --------------------------------------------------------------------------------------------------
# what a config asks for


def reference_of(cfg: TrainingConfig) -> str | None:
    """Return the setting of a run's reference; empty: as the policy; None: it has none."""
    if isinstance(cfg, RLConfig):
        return cfg.ref.model if cfg.algo.kl_coef or cfg.ref.model else None
    return cfg.reference if isinstance(cfg, DPOConfig | KTOConfig) else None


def read_models(
    cfg: TrainingConfig, configs: Mapping[str, Mapping[str, Any]]
) -> dict[str, ModelSizes]:
    """Return the sizes of all models of a run. A reference that is the policy's base is none.

    Args:
        cfg: the config of the run.
        configs: config values of `policy` and, where there are such models, of `critic`,
            `reference` and `reward model`. Without an entry, critic and reference are like the
            policy.
    """
    policy = configs["policy"]
    models = {"policy": read_sizes(policy, cfg.policy, score=isinstance(cfg, RMConfig))}
    if isinstance(cfg, RLConfig) and cfg.algo.advantage == "gae":
        models["critic"] = read_sizes(configs.get("critic", policy), cfg.critic, score=True)
    reference = reference_of(cfg)
    lora = cfg.policy.lora
    # As `Trainer.make_reference` has it.
    is_start = lora.rank and reference == ""
    is_base = lora.rank and not lora.modules_to_save and reference == cfg.policy.model
    is_warmed = isinstance(cfg, RLConfig) and cfg.sft.num_steps > 0
    if reference is not None and (is_warmed or not (is_start or is_base)):
        models["reference"] = read_sizes(configs.get("reference", policy))
    if "reward model" in configs:
        models["reward model"] = read_sizes(configs["reward model"])
    return models


def longest_of(cfg: TrainingConfig) -> int:
    """Return the most rows that may have to be in one micro-batch: a sequence, or a pair."""
    if isinstance(cfg, SupervisedConfig):
        return cfg.data.max_tokens * (2 if isinstance(cfg, RMConfig | DPOConfig) else 1)
    assert isinstance(cfg, RLConfig)
    return cfg.engine.max_model_len + cfg.eval_extra_tokens + 1  # And the end for a reward model.


class Workload:
    """What a run does in a step. Of KTO the second pass of the reference is not in it.

    Args:
        cfg: the config of the run. Lengths and dtypes must be resolved.
        world_size: number of ranks; with `parallel.generators`, of trainers alone.
        models: the sizes of its models.
        prompt: tokens of an average prompt; 0: as many as the config allows.
        answer: the same of an answer.
        only_generates: the ranks are generators instead.
    """

    def __init__(
        self,
        cfg: TrainingConfig,
        world_size: int,
        models: Mapping[str, ModelSizes],
        prompt: int = 0,
        answer: int = 0,
        *,
        only_generates: bool = False,
    ):
        self.cfg = cfg
        self.only_generates = only_generates
        self.only_trains = cfg.parallel.generators > 0 and not only_generates
        self.overlap = ""  # As rollout.overlap.
        self.recomputes = False  # Keys and values, when weights change.
        self.world_size = world_size
        self.models = models
        self.num_updates = 1  # Optimizer steps.
        self.engine: EngineConfig | None = None
        self.bucket_bytes = 0  # On the wire at once in a refit.
        self.num_in_flight = 0  # Sequences that are generated at once, on all ranks.
        is_pairs = isinstance(cfg, RMConfig | DPOConfig)
        samples = 2 if is_pairs else 1
        reads_logprobs = isinstance(cfg, KTOConfig) and cfg.algo.loss == "kto"
        if isinstance(cfg, SupervisedConfig):
            self.num_sequences = cfg.batch_size * samples  # Of a step, on all ranks.
            prompt = prompt or cfg.data.max_tokens // 4
            answer = answer or cfg.data.max_tokens - prompt
        elif isinstance(cfg, RLConfig):
            algo = cfg.algo
            samples = cfg.rollout.samples_per_prompt
            self.num_sequences = cfg.rollout.prompts_per_step * samples
            self.overlap = cfg.rollout.overlap
            self.recomputes = self.overlap == "inflight" and cfg.rollout.kv == "recompute"
            more_prompts = cfg.rollout.extra_prompts + cfg.rollout.num_ahead
            self.num_in_flight = self.num_sequences + more_prompts * samples
            prompt = prompt or cfg.data.max_prompt_tokens
            answer = answer or cfg.env.max_tokens
            self.num_updates = algo.num_epochs * algo.updates_per_step
            reads_logprobs = self.num_updates > 1 or algo.entropy_share > 0
            reads_logprobs |= algo.kl_in == "reward" and algo.kl_coef > 0
            # A function of the user may read them.
            reads_logprobs |= algo.advantage == "on_policy_distill" or ".py" in algo.advantage
            self.bucket_bytes = cfg.refit.bucket_mb * 2**20
            if not (cfg.rollout.replay or self.only_trains):
                longest = cfg.engine.max_model_len + cfg.eval_extra_tokens
                self.engine = dataclasses.replace(cfg.engine, max_model_len=longest)
        # How often the policy computes log-probs before its first update: its own, and those of
        # its base, if that is the reference.
        is_reference = reference_of(cfg) is not None and "reference" not in models
        self.num_annotations = reads_logprobs + is_reference

        context = cfg.parallel.context
        self.load = Load(  # Of a rank, in an optimizer step.
            tokens=cfg.tokens_per_rank * context or longest_of(cfg),
            sequence=prompt + answer,
            prompt=prompt,
            samples=samples,
            whole_groups=is_pairs,
        )
        data_size = max(1, world_size // (context * cfg.parallel.tensor))
        updates = cfg.algo.updates_per_step if isinstance(cfg, RLConfig) else 1
        self.num_on_rank = math.ceil(math.ceil(self.num_sequences / updates) / data_size)
        num_micro = math.ceil(self.num_on_rank / self.load.num_answers)
        self._take(math.ceil(self.num_on_rank / num_micro))

    def _take(self, num_answers: int) -> None:
        """Let a micro-batch hold so many answers."""
        num_micro = math.ceil(self.num_on_rank / num_answers)
        rows = self.load.rows(num_answers)
        self.load = dataclasses.replace(self.load, num_micro=num_micro, tokens=rows)

    def changed(
        self, cfg: TrainingConfig, world_size: int, *, only_generates: bool = False
    ) -> "Workload":
        """Return what as many other ranks do by another config, with models and lengths of this."""
        given = (self.models, self.load.prompt, self.load.answer)
        return Workload(cfg, world_size, *given, only_generates=only_generates)

    def choices(self) -> Iterator["Workload"]:
        """Yield what the run may do: with tokens_per_rank = 0 in few micro-batches first.

        These are of equal size, and hold whole groups, which `exchange` keeps together where it
        can, or a part of a group.
        """
        if not self.cfg.tokens_per_rank:
            samples = self.load.samples
            num_groups = math.ceil(self.num_on_rank / samples)
            sizes = {samples * math.ceil(num_groups / n) for n in range(1, num_groups + 1)}
            part = 1 if self.load.whole_groups else samples
            while part > 1:
                part = math.ceil(part / 2)
                sizes.add(part)
            for num_answers in sorted(sizes, reverse=True):
                other = copy.copy(self)
                other._take(min(num_answers, self.num_on_rank))
                yield other
        yield self

    @property
    def tokens_per_rank(self) -> int:
        """Return the token budget of a micro-batch on a rank."""
        if self.cfg.tokens_per_rank:
            return self.cfg.tokens_per_rank
        longest = max(self.load.tokens, longest_of(self.cfg))
        return math.ceil(longest / self.cfg.parallel.context)


def check(workload: Workload) -> None:
    """Refuse axes that do not divide a model, and settings that do not go together.

    Raises:
        UserError: for the first of them.
    """
    cfg = workload.cfg
    validate.validate_parallel(cfg.parallel, workload.world_size)
    validate.validate_model(cfg.policy, "policy", cfg.parallel.tensor)
    if isinstance(cfg, RLConfig):
        validate.validate_sides(cfg)
        validate.validate_model(cfg.critic, "critic", cfg.parallel.tensor)
        validate.validate_shared_base(cfg)
        ranks = cfg.engine.tensor_parallel_size
        undivided = workload.models["policy"].undivided(ranks, HEADS)
        generators = cfg.parallel.generators
        if generators % ranks:
            undivided = f"parallel.generators = {generators}"
        elif not generators and workload.world_size % ranks:
            undivided = f"--gpus {workload.world_size}"
        require(
            not undivided or cfg.rollout.replay,
            f"engine.tensor_parallel_size = {ranks} does not divide {undivided}",
        )
    for name, model in workload.models.items():
        undivided = model.undivided(cfg.parallel.tensor)
        require(
            not undivided,
            f"parallel.tensor = {cfg.parallel.tensor} does not divide {undivided} of the {name}",
        )
        experts = max(layer.experts for layer in model.layers)
        require(
            experts % cfg.parallel.experts == 0 and (experts or cfg.parallel.experts == 1),
            f"parallel.experts = {cfg.parallel.experts} does not divide the {experts} experts of "
            f"the {name}",
        )


class Engine:
    """An engine on one GPU, or its part of one that several share."""

    def __init__(self, workload: Workload, cfg: EngineConfig, card: Card):
        """Count what is on the GPU while it works."""
        self.workload = workload
        self.cfg = cfg
        self.card = card
        self.model = workload.models["policy"]
        self.ranks = cfg.tensor_parallel_size
        dtype: str = workload.cfg.policy.dtype if cfg.dtype == "auto" else cfg.dtype
        element = 4 if dtype in ("float32", "float64") else 2
        self.weights = self.model.parameters * element / self.ranks  # Bytes, as the next.
        self.on_host = self.weights * (cfg.sleep_level == 1)
        self.graphs = 0.0 if cfg.enforce_eager else GRAPHS
        self.kv_bytes = 0.0  # Of a token.
        self.state_bytes = 0.0  # Of a sequence, however long it is.
        state: Any = self.model.config.get("mamba_ssm_dtype")  # Of Qwen3.5's configs.
        for layer, num in self.model.layers.items():
            self.kv_bytes += num * layer.cached * max(1.0, layer.kv_heads / self.ranks) * element
            if layer.delta_net:
                state_size = layer.delta_net.values * layer.delta_net.key_dim
                of_number = {"float32": 4, "bfloat16": 2, "float16": 2}.get(state, element)
                self.state_bytes += num * state_size * of_number / self.ranks
        # Of a mixture: the bytes of all experts, and the share of them that a token passes.
        self.expert_weights = self.model.in_experts * element / self.ranks
        self.share_of_token = max(layer.share_of_token for layer in self.model.layers)
        # Of reading a token, where all of a batch's products are computed at once.
        self.token_seconds = card.computing(costs.forward_flops(self.model, 1, 1, 0) / self.ranks)
        self.fills_its_share = False  # vLLM measures what is left for the cache.
        # Tokens that take as much as the states of a sequence.
        self.state_tokens = math.ceil(self.state_bytes / self.kv_bytes)
        without_cache = self.weights + ENGINE_WORKSPACE + self.graphs + CONTEXT
        cache = cfg.gpu_memory_utilization * card.memory_gib * GIB - without_cache
        needed = self.needed_tokens() * self.kv_bytes
        if cfg.kv_cache_gb:
            cache = cfg.kv_cache_gb * GIB
        elif (
            not workload.only_generates  # where nobody else wants the memory
            and len(self.model.layers) == 1
            and not self.state_bytes
            and needed < cache
        ):
            # As large as a step can use. Of layers that differ vLLM decides what a token takes.
            cache = needed
        else:
            self.fills_its_share = True
        self.cache = cache
        self.total = without_cache + cache
        self.kv_tokens = int(cache // self.kv_bytes)

    def needed_tokens(self) -> int:
        """Return how many tokens of the cache the sequences of a step need at the same time."""
        workload = self.workload
        num_sequences = math.ceil(workload.num_in_flight * self.ranks / workload.world_size)
        at_once = min(num_sequences, self.cfg.max_num_seqs or MOST_SEQS)
        blocks = math.ceil(self.cfg.max_model_len / BLOCK)
        return math.ceil(SPARE_CACHE * at_once * blocks * BLOCK)

    def config(self, sleep: Sleep) -> EngineConfig:
        """Return its settings for vLLM, which demands that its share is free when it starts."""
        cfg = dataclasses.replace(self.cfg, sleep=sleep)
        if not self.fills_its_share:
            cfg.kv_cache_gb = self.cache / GIB
            share = self.total / (self.card.memory_gib * GIB)
            cfg.gpu_memory_utilization = min(share, cfg.gpu_memory_utilization)
        return cfg

    def stays(self, sleep: Sleep) -> Parts:
        """Return what is on the device while the trainer works."""
        if sleep == "none":
            # Under the names that `in_refit` has for them: there they are, too.
            named = {"engine's weights": self.weights, "engine's graphs": self.graphs}
            return named | {"engine": self.total - CONTEXT - sum(named.values())}
        weights = self.weights if sleep == "cache" else 0.0
        return {"engine's graphs": self.graphs, "engine's weights": weights}

    def mapped(self, sleep: Sleep) -> float:
        """Return how many bytes are mapped before it works, and unmapped afterwards."""
        return {"none": 0.0, "cache": self.cache}.get(sleep, self.cache + self.weights)

    def slots(self, length: float) -> float:
        """Return how many sequences of an average length have room at the same time."""
        room = max(1.0, self.kv_tokens / (length + self.state_tokens))
        return min(self.cfg.max_num_seqs or MOST_SEQS, room)

    def at_once(self) -> float:
        """Return how many sequences it generates at the same time, on average."""
        workload = self.workload
        num = workload.num_in_flight if workload.overlap == "inflight" else workload.num_sequences
        slots = self.slots(workload.load.prompt + workload.load.answer / 2)
        return min(num * self.ranks / workload.world_size, slots)

    def step_seconds(
        self, running: Any, contexts: Any, larger: Callable[[Any, Any], Any] = max
    ) -> Any:
        """Return the seconds of a step, in which each sequence gets a token.

        It reads the weights, of a mixture those of the experts that a token needs, and all cached
        keys and values once, and reads and writes all states.

        Args:
            running: sequences, a number or an array.
            contexts: tokens in their contexts, all together, as `running`.
            larger: returns the larger of two numbers, or of each pair of two arrays'.
        """
        model = self.model
        unread = self.expert_weights * (1 - self.share_of_token) ** running
        cached = contexts * self.kv_bytes + 2 * running * self.state_bytes
        reading = self.card.moving(self.weights - unread + cached)
        step = larger(reading, running * self.token_seconds)
        if self.cfg.enforce_eager:
            step = larger(step, EAGER_SECONDS_PER_LAYER * model.num_layers)
        # While the device computes a step, the host prepares the next one.
        step = larger(step, HOST_SECONDS_PER_STEP + HOST_SECONDS_PER_ANSWER * running)
        if self.ranks > 1:  # A sum after attention and one after the MLP.
            summed = 2 * running * model.hidden * 2 * (1 - 1 / self.ranks)
            step = step + 2 * model.num_layers * (SHORTEST_COLLECTIVE + self.card.sending(summed))
        return step

    def seconds(self) -> float:
        """Return the seconds of generating a step's answers.

        Prompts are read once for all their answers.
        """
        load = self.workload.load
        num_sequences = self.workload.num_sequences * self.ranks / self.workload.world_size
        at_once = self.at_once()
        step = self.step_seconds(at_once, at_once * (load.prompt + load.answer / 2))
        waves = num_sequences / at_once
        if self.workload.overlap != "inflight":
            waves = max(1.0, waves)
        prompts = num_sequences / load.samples * load.prompt
        return float(waves * load.answer * step + prompts * self.token_seconds)

    def in_refit(self, policy: Training) -> Parts:
        """Return what is on the device while it gets the policy's weights."""
        merged = 0.0
        bucket = self.workload.bucket_bytes
        if policy.model.adapters:
            # The adapters, the shards of a bucket, and the largest weight while it is merged, or
            # the embedding, which only is copied.
            sizes = [2 * m.numel for m, _ in policy.model.matrices if m.rank]
            largest = max(policy.model.vocabulary * policy.model.hidden, *sizes) * policy.element
            merged = costs.WIDE * policy.model.adapters + bucket * self.ranks + largest
            merged /= policy.shards * policy.tensor
        return {
            "engine's weights": self.weights,
            "engine's graphs": self.graphs,
            costs.PARAMETERS: policy.parameters - policy.sleeping_base,
            # Two buckets, each with one to send and one to receive.
            "buffers": 4.0 * bucket if self.workload.world_size > 1 else 0.0,
            "merged adapters": merged,
        }


# --------------------------------------------------------------------------------------------------
# the plan


@lru_cache(256)  # What sleeps changes nothing here: the same is asked for again.
def count_training(
    workload: Workload, card: Card, gpus_per_node: int, checkpointing: Checkpointing, liger: bool
) -> dict[str, Training]:
    """Return what each model costs by its name, whatever sleeps. The arguments are those of `Plan`.

    Ranks that only generate have none.
    """
    cfg = workload.cfg
    trained: dict[str, Training] = {}
    losses: dict[str, costs.LossName] = {"policy": "policy", "critic": "value"}
    if isinstance(cfg, RMConfig):
        losses["policy"] = "reward"
    models = {} if workload.only_generates else workload.models
    for name, model in models.items():
        critic = cfg.critic if isinstance(cfg, RLConfig) and name == "critic" else None
        policy = critic or cfg.policy
        trained[name] = Training(
            model=model,
            card=card,
            gpus_per_node=gpus_per_node,
            world_size=workload.world_size,
            policy=policy,
            parallel=cfg.parallel,
            load=workload.load,
            loss=losses.get(name, "frozen"),
            shares_base=critic is not None and critic.share_base,
            fused=liger if policy.kernels == "auto" else policy.kernels != "torch",
            checkpointing=checkpointing,
        )
    return trained


class Plan:
    """What a run takes on its fullest GPU, or on that of the ranks that its workload is of.

    Args:
        workload: what the run does.
        card: the GPUs.
        gpus_per_node: how many of them are linked.
        checkpointing: of the policy: off, selective or full.
        sleep: what sleeps in turn, if there is an engine. Of ranks that only train: all: a model is
            in host memory while another one computes; or none.
        liger: liger-kernel is installed where it runs, for `policy.kernels` auto.
    """

    def __init__(
        self,
        workload: Workload,
        card: Card,
        gpus_per_node: int,
        checkpointing: Checkpointing,
        sleep: Sleep = "all",
        *,
        liger: bool = True,
    ):
        cfg = workload.cfg
        self.sleep = sleep
        self.offloads = sleep == "all"  # Models are in host memory while they do not compute.
        self.workload = workload
        self.card = card
        self.gpus_per_node = gpus_per_node
        self.checkpointing = checkpointing
        self.limit = card.memory_gib * GIB * (1 - FRAGMENTS)  # Bytes that a GPU has for all this.
        self.engine = Engine(workload, workload.engine, card) if workload.engine else None
        self.generators: GeneratorPlan | None = None  # Of ranks that generate for these.
        self.sides: list[Plan] = [self]  # This plan, and that of the generators.
        if workload.only_trains:
            generating = workload.changed(cfg, cfg.parallel.generators, only_generates=True)
            self.generators = GeneratorPlan(generating, card, gpus_per_node, "off", "none")
            self.sides.append(self.generators)
            # Each trainer sends its share of the weights to every engine.
            received = self.generators.engine.weights * generating.world_size
            self.sent = received / workload.world_size
        self.num_gpus = sum(side.workload.world_size for side in self.sides)
        self.trained = count_training(workload, card, gpus_per_node, checkpointing, liger)
        # Bytes in the host's memory for each GPU: what sleeps there, or lives there.
        self.on_host = self.engine.on_host if self.engine else 0.0
        for name, training in self.trained.items():
            self.on_host += training.on_host(sleeps=self._sleeps(name))
        self.alive = self._alive()  # Most bytes at once by phase, and what they are for.
        sums = {phase: sum(parts.values()) for phase, parts in self.alive.items()}
        self.memory = dict(most(sums))
        self.fullest, self.needed = most(self.memory)[0]  # A phase, and its bytes.
        self.peak = max(side.needed for side in self.sides)
        self.used = self.needed / (card.memory_gib * GIB)  # Share of the card.
        self.seconds = self._seconds()  # Of a step, by phase.
        self.busy_seconds = sum(self.seconds.values())  # Of a step, in which these ranks work.

    @property
    def step_seconds(self) -> float:
        """Return the seconds of a step. Trainers and generators work at the same time."""
        if not self.generators:
            return self.busy_seconds
        draw = self.generators.busy_seconds
        refit = self.seconds["refit"]
        train = self.busy_seconds - refit
        if self.workload.overlap == "stream":
            # The last micro-batch waits for the last answers.
            update = self.seconds["optimizer"]
            passes = train - update
            return refit + max(draw + passes / self.workload.load.num_micro, passes) + update
        if self.workload.overlap == "lockstep":  # The next batch comes before weights go.
            return max(train, refit + draw)
        return refit + max(train, draw)

    @property
    def lacks(self) -> str:
        """Return what does not fit, here or on the generators; empty: all does."""
        return next(filter(None, (plan.shortage for plan in self.sides)), "")

    @property
    def shortage(self) -> str:
        """Return what does not fit on these ranks; empty: all does."""
        if self.needed > self.limit:
            part, size = most(self.alive[self.fullest])[0]
            return (
                f"{self.fullest} needs {self.needed / GIB:.1f} GiB of {self.limit / GIB:.1f}; "
                f"{size / GIB:.1f} are {part}"
            )
        on_host = self.on_host / GIB
        room = self.card.host_memory_gib
        if on_host > room:
            return f"{on_host:.1f} GiB in the host's memory for each GPU, which has {room:.1f}"
        if self.engine:
            tokens = max(0, self.engine.kv_tokens - self.engine.state_tokens)
            longest = self.engine.cfg.max_model_len
            if tokens < longest:
                return (
                    f"the KV cache holds {tokens:,} tokens, less than one context of "
                    f"engine.max_model_len = {longest:,}"
                )
        return ""

    @property
    def verdict(self) -> str:
        """Return whether it fits on these ranks, and with which checkpointing."""
        workload = self.workload
        who = ""
        if workload.only_generates or workload.only_trains:
            kind = "generator" if workload.only_generates else "trainer"
            who = f"{workload.world_size} {kind}{'s' * (workload.world_size > 1)}: "
        if self.shortage:
            return f"{who}DOES NOT FIT: {self.shortage}"
        how = f" with activation checkpointing {self.checkpointing}" if self.trained else ""
        room = f"{self.needed / GIB:.1f} of {self.limit / GIB:.1f} GiB"
        return f"{who}fits{how}: at most {room} ({self.fullest})"

    @property
    def asleep(self) -> str:
        """Return what sleeps and why, as the beginning of a line; empty: there is no engine."""
        if not self.engine:
            return ""
        what = {
            "none": "nothing sleeps, because everything fits at once",
            "cache": "the KV cache sleeps while the trainer works",
            "engine": "the engine sleeps while the trainer works",
            "all": "engine and trainer sleep in turn",
        }
        asked = "" if self.engine.cfg.sleep == "auto" else f" (engine.sleep = {self.sleep})"
        return f"{what[self.sleep]}{asked}; "

    @property
    def note(self) -> str:
        """Return with which kernels gated delta nets are counted; empty: there are none."""
        models = self.workload.models.values()
        if not any(layer.delta_net for model in models for layer in model.layers):
            return ""
        return (
            "gated delta nets are counted as the kernels of the extra hybrids compute them "
            "(flash-linear-attention, causal-conv1d); without these they take more memory and time"
        )

    def _alive(self) -> dict[str, Parts]:
        """Return what is on the device in each phase."""
        workload = self.workload
        engine = self.engine
        policy = self.trained["policy"]
        is_alone = workload.world_size == 1 and not workload.only_trains
        always = {"CUDA context": CONTEXT, "NCCL": 0.0 if is_alone else NCCL}
        phases: dict[str, Parts] = {}
        # The optimizer's state sleeps until the first step, if an engine has put it to sleep.
        sleeping: tuple[str, ...] = ()
        if engine and self.offloads:
            sleeping = ("annotate", "forward", "backward")[: 3 if workload.num_updates == 1 else 1]
        if engine:
            phases["refit"] = always | engine.in_refit(policy)
            phases["rollout"] = {"engine": engine.total, "NCCL": always["NCCL"]}
            always |= engine.stays(self.sleep)
            if not self.offloads:
                phases["refit"] |= {costs.PARAMETERS: policy.parameters} | always
                phases["refit"][costs.OPTIMIZER] = policy.optimizer
                phases["rollout"] |= self._kept()
        for name, training in self.trained.items():
            others = self._kept(but=name)
            for phase, parts in training.alive.items():
                if name == "policy" and (phase != "annotate" or workload.num_annotations):
                    phases[phase] = always | others | parts
                    if phase in sleeping:
                        phases[phase].pop(costs.OPTIMIZER)
                elif name != "policy" and (phase in TRAINS or not training.trains):
                    phases[f"{name}, {phase}"] = always | others | parts
        if self.generators:
            receivers_per_sender = self.generators.workload.world_size / workload.world_size
            bucket = workload.bucket_bytes * receivers_per_sender
            buffers = {"send buffers": min(self.sent, MOST_IN_FLIGHT + bucket)}
            phases["refit"] = always | buffers | self._kept()
            if workload.overlap == "lockstep":
                for phase in filter(lambda name: name.endswith("annotate"), phases):
                    phases[phase] |= buffers  # They are still on the wire.
        return phases

    def _kept(self, but: str = "") -> Parts:
        """Return what all models, but for one, keep on the device while they do not compute."""
        kept = {}
        for name, training in self.trained.items():
            stays = name == "policy" or not self.offloads
            if name != but:
                kept[f"{name}'s parameters"] = training.parameters * stays
            if name != but and not (self.engine and self.offloads):
                kept[f"{name}'s optimizer state"] = training.optimizer * stays
        return kept

    def _sleeps(self, name: str) -> bool:
        """Return whether a model is in host memory in a part of each step."""
        return self.offloads and (bool(self.engine) or (bool(self.generators) and name != "policy"))

    def _seconds(self) -> dict[str, float]:
        """Return the seconds of a step's phases: the longer of computing and sending."""
        workload = self.workload
        engine = self.engine
        card = self.card
        policy = self.trained["policy"]
        seconds: dict[str, float] = {}
        moved = 0.0
        for name, training in self.trained.items():
            moved += (training.parameters + training.optimizer) * self._sleeps(name)
        if engine:
            seconds["rollout"] = engine.seconds()
            # A rank has its own shard already, and a node what its ranks have.
            received = engine.weights * (1 - 1 / workload.world_size)
            replica = workload.world_size // policy.parallel.replicate
            from_nodes = engine.weights * (1 - min(1, self.gpus_per_node / replica))
            seconds["refit"] = max(card.sending(received), card.sending(from_nodes, across=True))
            if policy.model.adapters:
                merged = MERGE_BYTES * policy.model.parameters / policy.shards / policy.tensor
                seconds["refit"] += card.moving(merged) + card.to_host(policy.sleeping_base)
            moved += engine.on_host * (self.sleep in ("engine", "all"))
            mapped = 2 * engine.mapped(self.sleep) + self._given_back()
            seconds["sleep_wake"] = MAP_SECONDS * mapped / GIB + card.to_host(2 * moved)
        elif self.generators:
            slower = max(self.sent, self.generators.engine.weights)
            seconds["refit"] = card.sending(slower, across=self.num_gpus > self.gpus_per_node)
            if moved:
                seconds["sleep_wake"] = card.to_host(2 * moved)
        num_micro = workload.load.num_micro * workload.num_updates
        for phase in ("annotate", "forward", "backward", "optimizer"):
            total = 0.0
            for name, training in self.trained.items():
                if phase in training.seconds:
                    is_policy = (name, phase) == ("policy", "annotate")
                    times = workload.num_annotations if is_policy else 1
                    total += times * self._seconds_of(training, phase)
            if total:
                times = num_micro if phase != "optimizer" else workload.num_updates
                seconds[phase] = times * total
        seconds["forward"] += MAP_SECONDS * self._given_back() / GIB
        return seconds

    def _seconds_of(self, training: Training, phase: str) -> float:
        """Return the seconds of a phase for a micro-batch, or of an optimizer step."""
        on_device = training.seconds[phase]
        if phase != "optimizer":
            # The head's kernels are few and long; those of layers wait for the host.
            num_passes = 2 if phase == "backward" and self.checkpointing != "off" else 1
            on_host = num_passes * HOST_SECONDS_PER_LAYER * training.model.num_layers
            in_head = training.head_seconds[phase]
            on_device = in_head + max(on_device - in_head, on_host)
        return max(on_device, training.wire_seconds[phase])

    def _given_back(self) -> float:
        """Return the bytes that torch gives back for the engine, and takes again in forward."""
        if not self.engine or self.sleep == "none":
            return 0.0
        parts = self.alive["backward"]
        used = sum(parts[kind] for kind in costs.OF_BACKWARD)
        both_fit = self.memory["backward"] + self.engine.mapped(self.sleep) <= self.limit
        return used if self.offloads or not both_fit else 0.0


class GeneratorPlan(Plan):
    """What ranks take that only generate: an engine that never sleeps, and a refit's buffers."""

    engine: Engine

    def _alive(self) -> dict[str, Parts]:
        """Return what is on the device. A refit is between two steps of the engine."""
        buffers = 2.0 * self.workload.bucket_bytes
        parts = {"engine": self.engine.total, "NCCL": NCCL, "receive buffers": buffers}
        return {"rollout": parts}

    def _seconds(self) -> dict[str, float]:
        """Return the seconds of a step's phases."""
        seconds = {"rollout": self.engine.seconds()}
        if self.workload.recomputes:
            # What was generated so far is read again, under new weights.
            load = self.workload.load
            tokens = self.engine.at_once() * (load.prompt / load.samples + load.answer / 2)
            seconds["recompute"] = tokens * self.engine.token_seconds
        return seconds


def most(sizes: Mapping[str, float], num: int = 99) -> list[tuple[str, float]]:
    """Return the largest sizes and their names, the largest first."""
    return sorted(sizes.items(), key=lambda item: -item[1])[:num]


def named(sizes: Mapping[str, float], num: int, digits: int = 1) -> str:
    """Return the largest sizes and their names in GiB, without those that would print as 0."""
    least = 0.5 * GIB / 10**digits
    shown = [(name, size / GIB) for name, size in most(sizes, num) if size > least]
    return ", ".join(f"{name} {gib:.{digits}f}" for name, gib in shown)


def make_plan(workload: Workload, card: Card, gpus_per_node: int, *, liger: bool = True) -> Plan:
    """Return the plan of a run, with the fastest of what fits where settings are auto or 0.

    These are what sleeps, activation checkpointing, and the rows of a micro-batch. Of those that
    are about as fast it is the one in which least sleeps, and that takes the least memory. If
    nothing fits, it is the last that was tried. The arguments are those of `Plan`.
    """
    cfg = workload.cfg
    wanted = cfg.policy.activation_checkpointing
    kinds = CHECKPOINTING if wanted == "auto" else (wanted,)
    sleeps = SLEEP
    if not workload.engine or workload.engine.sleep != "auto":
        sleeps = (workload.engine.sleep if workload.engine else "all",)
    if workload.only_trains:  # A policy alone has nobody to make room for.
        sleeps = ("none", "all") if len(workload.models) > 1 else ("none",)
    plan_of = partial(Plan, card=card, gpus_per_node=gpus_per_node, liger=liger)
    choices = list(workload.choices())
    fitting: list[Plan] = []
    for checkpointing in kinds:
        for sleep in sleeps:
            plan = plan_of(workload, checkpointing=checkpointing, sleep=sleep)
            # What the settings ask for may take all of the card.
            if plan.shortage or (sleep != sleeps[-1] and plan.used > MOST_USED):
                continue
            fitting.append(plan)
            fastest = math.inf
            for load in choices:
                plan = plan_of(load, checkpointing=checkpointing, sleep=sleep)
                if plan.shortage or plan.used > MOST_USED:
                    continue
                if plan.busy_seconds * LEAST_GAIN > fastest:
                    break  # And so are smaller micro-batches.
                fastest = min(fastest, plan.busy_seconds)
                fitting.append(plan)
    if not fitting:
        return plan
    longest = min(plan.busy_seconds for plan in fitting) / LEAST_GAIN
    equal = [plan for plan in fitting if plan.busy_seconds <= longest]
    return min(equal, key=lambda plan: (SLEEP.index(plan.sleep), plan.used))


# --------------------------------------------------------------------------------------------------
# what a training program says of it


def announce(
    cfg: TrainingConfig, configs: Mapping[str, Mapping[str, Any]], mesh: "Mesh"
) -> tuple[Plan, list[str]]:
    """Return the plan of a run, and what a training program says of it before it loads anything.

    Nothing is said about time: a step took 1.6 times its roofline when that was measured. On CPU
    nothing sleeps, and the lines compare the tensors of a rank with its share of the memory.
    Generators have a plan of their own, and leave it to the trainers to say something.

    Args:
        cfg: the config of the run.
        configs: as `read_models` takes them.
        mesh: of the run, or of the side that this rank is on.

    Raises:
        UserError: weights, gradients and optimizer state do not fit the ranks' devices.
    """
    import torch  # here, because `python -m minirl.plan` answers without it

    from minirl.model import fused

    is_cuda = mesh.device.type == "cuda"
    if not (is_cuda or cfg.tokens_per_rank):
        cfg = dataclasses.replace(cfg, tokens_per_rank=max(CPU_TOKENS, longest_of(cfg)))
    models = read_models(cfg, configs)
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", mesh.world_size))
    name = "CPU"
    memory = host_memory() // per_node
    if is_cuda:
        properties = torch.cuda.get_device_properties(mesh.device)
        name = properties.name
        memory = properties.total_memory
    # All ranks must come to the same plan: that of the one with the least memory.
    card = of_device(name, -int(mesh.maxima(torch.tensor([-memory]))))
    if mesh.side == "generators":
        workload = Workload(cfg, mesh.world_size, models, only_generates=True)
        return GeneratorPlan(workload, card, per_node, "off", "none"), []
    workload = Workload(cfg, mesh.world_size, models)
    if is_cuda:
        plan = make_plan(workload, card, per_node, liger=fused.has_liger())
        lines = short(plan)
    else:
        wanted = cfg.policy.activation_checkpointing
        checkpointing: Checkpointing = "off" if wanted == "auto" else wanted
        sleep: Sleep = "none" if workload.only_trains else "all"
        plan = Plan(workload, card, per_node, checkpointing, sleep, liger=False)
        parts = plan.alive["backward"] | {costs.OPTIMIZER: plan.alive["optimizer"][costs.OPTIMIZER]}
        for overhead in ("CUDA context", "NCCL", "engine's graphs"):
            parts.pop(overhead, None)
        if plan.engine:
            parts |= _on_cpu(plan.engine)
        needed = sum(parts.values()) / GIB
        largest = named(parts, 5, 2)
        verdict = "may not fit" if needed > card.memory_gib else "fits"
        lines = [
            f"{verdict}: {needed:.2f} GiB of tensors a rank of {card.memory_gib:.1f} GiB, this "
            f"machine's memory over its {per_node} rank{'s' * (per_node > 1)}",
            f"GiB a rank: {largest}" if largest else "",
            "no estimate of time for a CPU (python -m minirl.plan has one for GPUs)",
        ]
        if plan.generators:
            lines.insert(2, f"GiB a generator: {named(_on_cpu(plan.generators.engine), 5, 2)}")
    check_lower_bound(plan)
    return plan, [f"plan: {line}" for line in (*lines, plan.note) if line]


def _on_cpu(engine: Engine) -> Parts:
    """Return what an engine takes on a CPU."""
    cache = (engine.cfg.kv_cache_gb or 1.0) * GIB
    return {"engine's weights": engine.weights, "KV cache": cache}


def host_memory() -> int:
    """Return the memory of this machine in bytes, or its container's (docker run --memory)."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if MEMORY_LIMIT.exists() and (limit := MEMORY_LIMIT.read_text().strip()) != "max":
        memory = min(memory, int(limit))
    return memory


def check_lower_bound(plan: Plan) -> None:
    """Refuse a run whose sharded weights, gradients and optimizer state alone do not fit.

    Raises:
        UserError: it cannot fit, whatever its batches are.
    """
    cfg = plan.workload.cfg
    model = plan.workload.models["policy"]
    at_step = plan.alive["optimizer"]
    state = at_step[costs.PARAMETERS] + at_step[costs.GRADIENTS] + at_step[costs.OPTIMIZER]
    require(
        state + CONTEXT <= plan.card.memory_gib * GIB,
        f"policy.model = {cfg.policy.model}: {model.parameters / 1e9:.1f}B parameters on "
        f"{plan.workload.world_size} ranks of {plan.card.memory_gib:.1f} GiB: weights, gradients "
        f"and the optimizer's state alone are {state / GIB:.1f} GiB a rank "
        f"(policy.optimizer_state = {cfg.policy.optimizer_state}, parallel.replicate = "
        f"{cfg.parallel.replicate}); take more GPUs, policy.optimizer_state = offload or 8bit, "
        "or policy.cpu_offload. `python -m minirl.plan` tries them",
    )


def short(plan: Plan) -> list[str]:
    """Return the lines of a run on GPUs."""
    memory = named(plan.memory, 4)
    engine = plan.sides[-1].engine
    cache = f"; KV cache {max(0, engine.kv_tokens):,} tokens an engine" if engine else ""
    load = plan.workload.load
    lines = [
        plan.verdict,
        f"{plan.asleep}a step in {load.num_micro} micro-batch(es) of at most "
        f"{plan.workload.tokens_per_rank:,} rows a rank (tokens_per_rank)",
        f"GiB a GPU of {plan.card.memory_gib:.1f} GiB: {memory}{cache * (not plan.generators)}",
    ]
    if plan.generators:
        lines.append(plan.generators.verdict + cache)
    lines.append("by formulas; python -m minirl.plan has the roofline of a step's time, and advice")
    return lines
