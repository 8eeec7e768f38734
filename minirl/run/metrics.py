"""What a training step is measured by: means over its episodes, speed, memory, and health.

The model FLOPs utilisation counts the work that forward and backward of a model of this size need,
without what is computed again: 6 for each parameter that a token passes, and 12 for each pair of
query and key and each feature of the queries (Chowdhery et al. 2022, PaLM, appendix B).
"""

import math
import resource
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from minirl.base.errors import UserError, require
from minirl.config.rl import DebugConfig, RLConfig
from minirl.model import build
from minirl.parallel.mesh import Mesh
from minirl.plan import cards
from minirl.plan.costs import forward_flops
from minirl.plan.sizes import ModelSizes, read_sizes
from minirl.train.policy import Metrics, Minibatch, Policy
from minirl.types.packed import Trajectory

# By kind of token: the phases that generate or train on it.
PHASES_OF_TOKENS = {"generated": ("rollout",), "trained": ("forward", "backward")}
# Phases that are not part of the RL steps.
OUTSIDE_STEPS = ("start", "sft", "evaluate", "export", "checkpoint")
# Metrics of an episode: the prefix of their names, and their key in its info.
INFO_METRICS = (
    ("reward", "rewards"),
    ("reward", "reward_metrics"),
    ("graders", "graders"),
    ("env", "env"),
    ("endpoint", "endpoint"),
)
# Shares of answers, and entropies in nats a token, beyond which a step counts as unhealthy.
FEWEST_STOPPED = 0.02
LEAST_ENTROPY = 1e-3
MOST_ENTROPY = 5.0  # About that of 150 equally likely tokens.


def breakdown(
    episodes: list[Trajectory],
    threshold: float,
    mesh: Mesh,
    more: Iterable[tuple[str, float]] = (),
) -> dict[str, float]:
    """Return means over the episodes of all ranks, sorted by name. Collective.

    The means are the same to the bit for every way to spread the episodes over the ranks.

    Args:
        episodes: one trajectory of each episode of this rank.
        threshold: the score at which an answer counts as correct.
        mesh: the ranks.
        more: further names and values to take means of.

    Returns:
        The means of `more`, and those that METRICS.md explains: `source/NAME/*` of each data
        source, `reward/NAME` of each reward function, `graders/*` and `env/*`. For agents also
        `endpoint/refused`, requests that the endpoint refused; `endpoint/unguided`, answers that it
        could not hold to a format; `endpoint/outside_loss`, the share of tokens that guided
        decoding put outside the loss.
    """
    gathered = _gather_sorted([*more, *_of_episodes(episodes, threshold)], mesh)
    return {name: _mean(in_order) for name, in_order in gathered.items()}


def _of_episodes(episodes: list[Trajectory], threshold: float) -> list[tuple[str, float]]:
    """Return the names and values that `breakdown` takes the means of."""
    values = []
    for t in episodes:
        for kind, key in INFO_METRICS:
            for name, value in t.info.get(key, {}).items():
                values.append((f"{kind}/{name}", float(value)))
        source = t.info["source"]
        if source:
            score = t.info.get("score", t.reward)  # in training, the reward before it was shaped
            values.append((f"source/{source}/accuracy", score >= threshold))
            values.append((f"source/{source}/reward", score))
    return values


def _gather_sorted(values: list[tuple[str, float]], mesh: Mesh) -> dict[str, list[float]]:
    """Return the values of all ranks by name, sorted, names and values. Collective."""
    by_rank = mesh.gather_named(values)
    gathered = {}
    for name in sorted(set().union(*by_rank)):
        parts = [on_rank[name] for on_rank in by_rank if name in on_rank]
        gathered[name] = np.sort(np.concatenate(parts)).tolist()
    return gathered


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _deviation(values: list[float]) -> float:
    """Return the root of the mean square about the mean, 0 if all values are equal."""
    mean = _mean(values)
    squares = [(value - mean) ** 2 for value in values]
    return _mean(squares) ** 0.5 if min(values) != max(values) else 0.0


def means_of_step(trajectories: list[Trajectory], threshold: float, mesh: Mesh) -> dict[str, float]:
    """Return means over the episodes of a training step on all ranks. Collective.

    In addition to the means of `breakdown`: `answer_tokens`, and `longest_answer`, their maximum;
    `stopped`, the share of answers that ended by themselves; `staleness`, optimizer steps since the
    oldest token was sampled; `reward`, the score; `shaped_reward`, and its deviation over all
    episodes (`reward_deviation/all`) and the mean of those within the groups
    (`reward_deviation/group`); and `equal_groups`, the share of groups with equal rewards.
    """
    episodes = [t for t in trajectories if t.segment == 0]
    values = _of_episodes(episodes, threshold)
    rewards_of_group: dict[int, list[float]] = defaultdict(list)
    for t in episodes:
        rewards_of_group[t.group].append(t.reward)
        for name in ("answer_tokens", "stopped", "staleness"):
            values.append((name, t.info[name]))
        values += [("reward", t.info["score"]), ("shaped_reward", t.reward)]
    for rewards in rewards_of_group.values():
        values.append(("equal_groups", min(rewards) == max(rewards)))
        values.append(("reward_deviation/group", _deviation(sorted(rewards))))
    gathered = _gather_sorted(values, mesh)
    require(gathered, "the step has no episodes; a Trainer.take of yours must leave some")
    means = {name: _mean(in_order) for name, in_order in gathered.items()}
    require(math.isfinite(means["shaped_reward"]), "your Trainer.shape made a reward not finite")
    means["longest_answer"] = gathered["answer_tokens"][-1]
    means["reward_deviation/all"] = _deviation(gathered["shaped_reward"])
    return means


@dataclass(kw_only=True)
class Progress:
    """What a checkpoint and the summary need besides weights."""

    # Name (before_sft, before_rl, after_rl, before, after) -> result of that evaluation.
    evaluations: dict[str, dict] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)  # Of each phase.
    tokens: dict[str, int] = field(default_factory=dict)  # Generated, trained, ...
    # Prompts that dynamic sampling took beyond rollout.prompts_per_step, in all steps.
    extra_tickets: int = 0
    # Prompts whose groups earlier steps began and no step has trained on (rollout.ahead), and the
    # tokens that were sampled for them. A resumed run begins them again, before new prompts.
    unfinished_tickets: list[int] = field(default_factory=list)
    unfinished_tokens: int = 0
    gpu_memory: dict[str, float] = field(default_factory=dict)  # Most GiB of a rank, by phase.
    kl_coef: float | None = None  # As adapted for algo.kl_target; None: it was not adapted.
    # Count, mean and squares about the mean of all rewards, for reward.normalize.
    reward_stats: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    rewards: str = ""  # What stands for the settings that decide rewards (run_folder.REWARDS).
    outcomes: str = ""  # Outcomes of prompts in past steps, as a curriculum saves them.
    data: str = ""  # The data in a few words.
    rows: str = ""  # What stands for the rows to train on and, after a space, the held-out ones.
    reference: int = 0  # The step of the newest refreshed reference; 0: there was none.

    def add(self, seconds: dict[str, float], **tokens: int) -> None:
        """Add seconds by phase, and tokens by kind."""
        for name, value in seconds.items():
            self.seconds[name] = self.seconds.get(name, 0) + value
        for name, num in tokens.items():
            self.tokens[name] = self.tokens.get(name, 0) + num


class StepWork(NamedTuple):
    """What the optimizer steps of a training step read on all ranks."""

    rows: int  # Rows of packed batches: tokens that are read.
    loss_rows: int  # Rows with a target in the loss.
    pairs: int  # Pairs of a query and a key that it may see.


def count_work(minibatches: list[Minibatch], mesh: Mesh) -> StepWork:
    """Return what all ranks read in the micro-batches. Collective."""
    counts = torch.zeros(3, dtype=torch.int64)
    for batch in sum(minibatches, []):
        num_rows = len(batch.inputs)
        pairs = int(batch.positions.sum()) + num_rows
        counts += torch.tensor([num_rows, len(batch.loss_rows), pairs])
    # Tensor-parallel ranks have the same rows.
    return StepWork(*(mesh.sums(counts) // mesh.tensor.size()).tolist())


def flops(model: ModelSizes, work: StepWork, num_passes: int = 3) -> float:
    """Return the floating-point operations of forward and backward over the work.

    `num_passes` is 2 for a model with adapters: its frozen weights have no gradients.
    """
    return num_passes * forward_flops(model, work.rows, work.loss_rows, work.pairs)


def speeds(tokens: dict[str, int], seconds: dict[str, float]) -> dict[str, float]:
    """Return tokens per second by kind, over the phases that generate or train on them."""
    per_second = {}
    for kind, phases in PHASES_OF_TOKENS.items():
        total = sum(seconds.get(phase, 0.0) for phase in phases)
        if kind in tokens and total:  # A resumed step may have begun with answers that were there.
            per_second[kind] = tokens[kind] / total
    return per_second


def outside_steps(seconds: dict[str, float]) -> float:
    """Return the seconds of the phases that are not part of steps."""
    return sum(seconds.get(name, 0.0) for name in OUTSIDE_STEPS)


class Meter:
    """Measures what steps take: seconds, memory, and the share of the GPUs' peak.

    Args:
        policy: the trained model; its timer has the seconds.
        progress: gets seconds, tokens and memory of the whole run.
    """

    def __init__(self, policy: Policy, progress: Progress):
        self.timer = policy.timer
        self.mesh = policy.mesh
        self.progress = progress
        self.began = time.perf_counter()  # Since when the current step is timed.
        # Those that are trained, and the passes of their work, see `flops`.
        self.models: list[tuple[ModelSizes, int]] = []
        # Seconds of phases that ranks of the other side have spent in the current step.
        self.elsewhere: dict[str, float] = {}
        self._device_allocations = 0  # Of this process, until the current step began.
        self.peak = 0.0  # Operations a second, of all ranks; 0: no GPU that the planner knows.
        if self.mesh.device.type == "cuda":
            card = cards.named(torch.cuda.get_device_name(self.mesh.device))
            self.peak = card.tflops * 1e12 * self.mesh.world_size if card else 0.0
        self.add(policy)

    def add(self, model: Policy) -> None:
        """Count the work of a trained model."""
        if self.peak:
            values = build.read_config(model.folder).to_dict()
            self.models.append((read_sizes(values, score=model.score), 2 if model.adapters else 3))

    def begin(self) -> None:
        """Begin the first step: what took time before it is not part of it."""
        self.progress.add(self.timer.take())
        self.began = time.perf_counter()
        if self.mesh.device.type == "cuda":
            self._device_allocations = device_allocations(self.mesh.device)

    def end_step(self, work: StepWork | None, **tokens: int) -> Metrics:
        """Return the metrics of a step's time, work and memory, and begin the next. Collective.

        Args:
            work: what the models were trained on, on all ranks.
            tokens: numbers of tokens on all ranks, by the keys of PHASES_OF_TOKENS.

        Returns:
            The most of any rank: "time/PHASE", "host_gib/*", "gpu_gib/*",
            "memory/device_allocations". "time/idle" are the seconds in which a rank waited for the
            others; for these also minimum, median and the rank of the maximum.
            "tokens_per_second/KIND", "total/KIND", and "mfu" on a known GPU.
        """
        seconds = self.timer.take() | self.elsewhere
        self.elsewhere = {}
        now = time.perf_counter()
        in_step = now - self.began - outside_steps(seconds)
        self.began = now
        self.progress.add(seconds, **tokens)
        by_rank = self.mesh.gather(seconds | {"step": in_step})
        times = _highest(by_rank)
        row = {f"time/{name}": value for name, value in times.items()}
        if "idle" in times:
            idle = [on_rank.get("idle", 0.0) for on_rank in by_rank]
            row["time/idle_min"] = min(idle)
            row["time/idle_median"] = statistics.median(idle)
            row["time/idle_max_rank"] = idle.index(max(idle))
        per_second = speeds(tokens, times)
        row |= {f"tokens_per_second/{kind}": speed for kind, speed in per_second.items()}
        in_training = times.get("forward", 0.0) + times.get("backward", 0.0)
        if self.models and work and in_training:
            total = sum(flops(model, work, num_passes) for model, num_passes in self.models)
            row["mfu"] = total / in_training / self.peak
        row |= {f"total/{kind}": float(self.progress.tokens[kind]) for kind in tokens}

        gpu_memory = self.timer.take_memory()
        memory = {f"gpu_gib/{name}": value for name, value in gpu_memory.items()}
        if self.mesh.device.type == "cuda":
            before = self._device_allocations
            self._device_allocations = device_allocations(self.mesh.device)
            memory["memory/device_allocations"] = float(self._device_allocations - before)
        memory = _highest(self.mesh.gather(host_memory() | memory))
        in_run = self.progress.gpu_memory
        for name in gpu_memory:
            in_run[name] = max(in_run.get(name, 0.0), memory[f"gpu_gib/{name}"])
        return row | memory


def _highest(by_rank: list[dict[str, float]]) -> dict[str, float]:
    """Return the highest number of any rank, by name."""
    names = sorted(set().union(*by_rank))
    return {name: max(on_rank.get(name, 0.0) for on_rank in by_rank) for name in names}


def device_allocations(device: torch.device) -> int:
    """Return how often torch has asked CUDA for memory so far, which is slow."""
    return int(torch.cuda.memory_stats(device)["num_device_alloc"])


def host_memory() -> dict[str, float]:
    """Return the host memory in use now, in GiB: of this process, and of the whole machine."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    kib = {words[0].rstrip(":"): int(words[1]) for words in lines}
    used = kib["MemTotal"] - kib["MemAvailable"]
    in_process = pages * resource.getpagesize()
    return {"host_gib/rank": in_process / 2**30, "host_gib/machine": used / 2**20}


@dataclass
class Health:
    """Counts the steps in a row with each symptom. All ranks see the same metrics."""

    cfg: DebugConfig
    compares_answers: bool = True  # The estimator does, and learns nothing from equal rewards.
    num_steps: dict[str, int] = field(default_factory=dict)  # In a row, by symptom.

    def check(self, step: int, metrics: Metrics) -> list[str]:
        """Return messages about symptoms that have now lasted for debug.collapse_steps.

        Raises:
            UserError: there is one, and debug.end_on_collapse is set.
        """
        entropy = metrics.get("entropy", 1.0)
        symptoms = (
            (
                "equal rewards",
                metrics.get("equal_groups") == 1.0 and self.compares_answers,
                "all answers to each prompt earn the same, and nothing is learned from comparing "
                "them; look at the answers (--rollout.dump) and at the reward function, or take "
                "other prompts",
            ),
            (
                "runaway length",
                metrics.get("stopped", 1.0) < FEWEST_STOPPED,
                "no answer ends by itself; raise rollout.max_tokens, or set "
                "reward.overlong_tokens or reward.unstopped",
            ),
            (
                "no entropy",
                entropy < LEAST_ENTROPY,
                f"{entropy:.2g} nats a token: the policy gives one answer to a prompt; lower "
                "policy.lr, or set algo.entropy_coef or algo.kl_coef",
            ),
            (
                "runaway entropy",
                entropy > MOST_ENTROPY,
                f"{entropy:.2g} nats a token: the policy writes noise; lower policy.lr, or set "
                "algo.kl_coef",
            ),
        )
        said = []
        for name, is_there, meaning in symptoms:
            self.num_steps[name] = self.num_steps.get(name, 0) + 1 if is_there else 0
            if is_there and self.num_steps[name] == self.cfg.collapse_steps:
                said.append(f"step {step}: {name} for {self.num_steps[name]} steps: {meaning}")
        if said and self.cfg.end_on_collapse:
            raise UserError(f"{said[0]}. debug.end_on_collapse is set")
        return said


# Nats, the mean over a step's tokens, by the coarser dtype of trainer and engine. A rounding error
# of a logit of 30 is 2^-8 of it in bfloat16, 0.1 at most, and 0.03 in TF32, in which a GPU may
# multiply float32 matrices; the mean over tokens is a fraction of it. (On CPU float32 makes 1e-6.)
# A bias that one of the two lacks makes 0.1 to 0.2, stale weights 0.6 to 6.
LIMITS = {"float32": 0.02, "bfloat16": 0.3}
PATIENCE = 3  # Steps in a row, after the first.


class MismatchWatch:
    """Ends a run in which the engine samples from another model than the one that is trained."""

    def __init__(self, cfg: RLConfig):
        """Take the limit for the dtypes of trainer and engine.

        A temperature below 1 magnifies the differences of logits, and the limit with them.
        """
        engine_dtype = cfg.policy.dtype if cfg.engine.dtype == "auto" else cfg.engine.dtype
        self.dtype = "bfloat16" if "bfloat16" in (cfg.policy.dtype, engine_dtype) else "float32"
        self.limit = LIMITS[self.dtype] / min(1.0, cfg.rollout.temperature)
        self.num_high = 0  # Steps in a row.
        self.patience = 1  # So many end the run; the first step alone does.

    def check(self, step: int, metrics: dict[str, float]) -> None:
        """Look at the mean |trainer - engine| of a step, if its tokens are of the trained weights.

        The first step must be below the limit, for nothing has changed the weights yet but a
        refit. Later on single steps may be above it. Older tokens differ for good reasons.

        Args:
            step: number of the step.
            metrics: the step's metrics: `staleness`, and `mismatch` if the policy was updated.

        Raises:
            UserError: it is not finite, or too high at the first step or three times in a row.
        """
        if "mismatch" not in metrics or metrics["staleness"] > 0:
            return
        mismatch = metrics["mismatch"]
        require(
            math.isfinite(mismatch),
            f"step {step}: log-probs of the sampled tokens are not finite (mismatch {mismatch}): "
            "the policy's weights or activations have overflowed; resume from an earlier "
            "checkpoint with a lower policy.lr",
        )
        self.num_high = self.num_high + 1 if mismatch > self.limit else 0
        require(
            self.num_high < self.patience,
            f"step {step}: the engine's log-probs of what it sampled differ from the trainer's at "
            f"the same weights by {mismatch:.3g} nats on average; {self.dtype} explains no more "
            f"than {self.limit:.3g}. The engine does not compute the model that is trained: its "
            "weights are stale or lost (--debug.check-refit compares them), or vLLM and "
            "transformers differ for this config.json; try --policy.dtype float32, and another "
            "version of vLLM",
        )
        self.patience = PATIENCE
