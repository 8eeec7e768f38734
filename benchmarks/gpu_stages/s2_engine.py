"""minirl's engine: start, sleep, wake and refit; log-probs beside the trainer's.

    python -m benchmarks.gpu_stages.s2_engine dense

A refit is compared, bitwise, with a full gather; memory is noted at each stop.
"""

import dataclasses
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal
from unittest import mock

import numpy as np
import torch
import tyro
from safetensors.torch import save_file
from transformers import PretrainedConfig, PreTrainedTokenizerBase, Qwen3Config, Qwen3MoeConfig

from benchmarks import gpu_bench
from benchmarks.gpu_stages import lib
from benchmarks.gpu_stages.lib import GIB, ON_GPU, SMALL, check, part, used_gib, value
from minirl.algo import losses
from minirl.batch.packing import pack
from minirl.config.policy import PolicyConfig
from minirl.config.rl import RefitConfig
from minirl.config.shared import EngineConfig, Sleep
from minirl.engine import patches
from minirl.engine.engine import EngineOutput, RolloutEngine, Sampling
from minirl.model import scratch
from minirl.parallel.machines import join_world
from minirl.parallel.mesh import Mesh
from minirl.refit.refit import Refit
from minirl.train.policy import Policy
from minirl.types.packed import Packed, Trajectory

Kind = Literal["dense", "moe"]
# What sleeps after each rollout, and vLLM's level.
ROLLOUTS: list[tuple[Sleep, int]] = [
    ("all", 2),
    ("all", 2),
    ("all", 1),
    ("engine", 2),
    ("cache", 2),
    ("cache", 2),
]
MODES: tuple[Sleep, ...] = ("cache", "engine", "all")  # Without sleep an engine is another one.
LIMITS = {"bfloat16": 0.05, "float32": 5e-3}  # Of the mean difference of log-probs, in nats.


@dataclass(kw_only=True)
class Arguments:
    kind: Annotated[Kind, tyro.conf.Positional]
    eager: bool = False
    """The engine runs without CUDA graphs."""
    model_head: bool = False
    """The engine's logits are in the model's dtype, not in float32."""
    utilization: float = 0.15
    """Share of the device: other stages use it meanwhile."""


def make_config(kind: Kind) -> PretrainedConfig:
    sizes: dict[str, Any] = {
        "vocab_size": 151936,
        "hidden_size": 1024,
        "num_hidden_layers": 6,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": kind == "dense",
    }
    mixture = {
        "intermediate_size": 128,
        "moe_intermediate_size": 384,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
    }
    if SMALL:
        sizes |= {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "head_dim": 32}
        sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128}
        mixture |= {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}
    if kind == "dense":
        return Qwen3Config(architectures=["Qwen3ForCausalLM"], **sizes)
    return Qwen3MoeConfig(architectures=["Qwen3MoeForCausalLM"], **(sizes | mixture))


class Stage:
    """A policy and an engine in one process, as in a rank of a run.

    Args:
        args: of the program.
        folder: for the model.
    """

    def __init__(self, args: Arguments, folder: Path):
        self.args = args
        self.folder = folder
        self.dtype: gpu_bench.Dtype = "bfloat16" if ON_GPU else "float32"
        self.tokenizer: PreTrainedTokenizerBase = scratch.make_tokenizer([])
        make_config(args.kind).save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        save_file({}, folder / "model.safetensors")
        value("device before", used_gib(), "GiB")
        self.mesh: Mesh = join_world()
        torch.manual_seed(0)
        with gpu_bench.random_weights():
            self.policy = Policy(PolicyConfig(dtype=self.dtype), folder, self.mesh)
        value("device with the policy", used_gib(), "GiB")
        self.policy.sleeper.sleep()
        value("device with the policy asleep", used_gib(), "GiB")
        began = time.perf_counter()
        self.engine = self._start_engine()
        value("starting the engine", time.perf_counter() - began, "s")
        value("device with the engine", used_gib(), "GiB")
        # With its check it compares every element with a full gather.
        shards = self.policy.shards()
        self.refit = Refit(RefitConfig(), shards, self.policy.parts(), self.engine, check=True)

    def _start_engine(self) -> RolloutEngine:
        cfg = EngineConfig(
            max_model_len=512,
            max_num_seqs=64,
            kv_cache_gb=2.0 if ON_GPU else 0.05,
            gpu_memory_utilization=self.args.utilization,
            enforce_eager=self.args.eager,
        )
        dtype = "model" if self.args.model_head else patches.HEAD_DTYPE
        with mock.patch.object(patches, "HEAD_DTYPE", dtype):
            return RolloutEngine(
                cfg, self.folder, self.mesh, dtype=self.dtype, timer=self.policy.timer
            )

    def describe_engine(self) -> None:
        cfg = self.engine.llm.llm_engine.vllm_config
        graphs = cfg.compilation_config
        value("asynchronous scheduling", str(cfg.scheduler_config.async_scheduling))
        value(
            "graphs", f"{graphs.cudagraph_mode} up to {graphs.max_cudagraph_capture_size} sequences"
        )
        value("dtype of the head", str(cfg.model_config.head_dtype))
        kinds = {type(m.impl).__name__ for m in self.engine.model.modules() if hasattr(m, "impl")}
        value("attention", ", ".join(sorted(kinds)))
        value("tokens of the KV cache", self.engine.kv_cache_tokens)

    def generate(self, name: str, num: int, sampling: Sampling) -> list[Trajectory]:
        """Return answers to as many prompts; a name stands for the same prompts."""
        rng = np.random.default_rng(len(name))
        prompts: dict[str, list[int]] = {}
        for number in range(num):
            length = int(rng.integers(4, 40))
            prompts[f"{name} {number}"] = rng.integers(5, 250, length).tolist()
        began = time.perf_counter()
        for number, (request, prompt) in enumerate(prompts.items()):
            self.engine.add(request, prompt, sampling, seed=number)
        done: dict[str, EngineOutput] = {}
        while len(done) < num:
            for output in self.engine.step():
                if output.finish_reason:
                    done[output.request_id] = output
        num_tokens = sum(len(output.tokens) for output in done.values())
        rate = num_tokens / (time.perf_counter() - began)
        value(f"{name}: tokens a second", rate, f"of {num_tokens} tokens")
        trajectories = []
        for number, (request, prompt) in enumerate(prompts.items()):
            trajectories.append(trajectory(prompt, done[request], number))
        return trajectories

    def sampling(self, max_tokens: int, **settings: Any) -> Sampling:
        stops = (self.tokenizer.eos_token_id,)
        return Sampling(max_tokens=max_tokens, stop_token_ids=stops, **settings)

    def annotate(self, trajectories: list[Trajectory]) -> Packed:
        """Return a batch with the trainer's log-probs beside the engine's."""
        batch = pack(trajectories, self.mesh.device, layout=self.policy.layout)
        self.policy.annotate([[batch]], "old_logprobs")
        return batch

    def set_sleep(self, sleeps: Sleep, level: int = 2) -> None:
        """Choose what sleeps from now on. The engine must be awake."""
        if ON_GPU:
            self.engine.sleeps = sleeps
            self.engine.cfg = dataclasses.replace(self.engine.cfg, sleep_level=level)
            self.policy.sleeper.active = sleeps == "all"

    # ----------------------------------------------------------------------------------------------

    def sleep_first(self) -> None:
        before = used_gib()
        self.engine.sleep()
        value("sleep freed", before - used_gib(), "GiB")
        value("device asleep", used_gib(), "GiB")
        self.policy.sleeper.wake_parameters()

    def roll_out_and_train(self, number: int, sleeps: Sleep, level: int) -> None:
        """Make an RL step by hand, from whose middle on something else sleeps."""
        name = f"rollout {number}"
        self.policy.timer.take()
        with self.engine.awake(self.refit, self.policy.sleeper):
            check(f"{name}: refit is bitwise a full gather", True)
            value(f"{name}: device, engine awake", used_gib(), "GiB")
            num, length = (4, 6) if SMALL else (32, 64)
            trajectories = self.generate(name, num, self.sampling(length))
            self.set_sleep(sleeps, level)
        value(f"{name}: device, engine asleep", used_gib(), "GiB")
        for phase, seconds in self.policy.timer.take().items():
            value(f"{name}: {phase}", 1e3 * seconds, "ms, of the refit with its check")
        batch = self.annotate(trajectories)
        self.check_mismatch(name, batch)
        metrics = self.policy.update([batch], losses.sft(), lr=1e-2)
        value(f"{name}: loss", metrics["loss"], f"gradient norm {metrics['grad_norm']:.3g}")

    def check_mismatch(self, name: str, batch: Packed) -> None:
        assert batch.old_logprobs is not None
        distance = (batch.old_logprobs - batch.engine_logprobs).abs() * batch.loss_mask
        mean = float(distance.sum() / batch.loss_mask.sum())
        limit = LIMITS[self.dtype]
        note = f"mean {mean:.3g}, worst {float(distance.max()):.3g}, limit {limit}"
        check(f"{name}: engine's log-probs are the trainer's", mean < limit, note)

    def time_refits(self, sleeps: Sleep) -> None:
        """Measure refits without their check, and what sleeps around them."""
        self.refit.check = False
        with self.engine.awake(self.refit, self.policy.sleeper):
            self.set_sleep(sleeps)
        self.policy.timer.take()
        times = []
        for _ in range(4):
            with self.engine.awake(self.refit, self.policy.sleeper):
                pass
            times.append(self.policy.timer.take())
        num_bytes = 0
        for name, p in self.policy.shards().items():
            num_bytes += p.numel() * (p.element_size() + self.refit.dtypes[name].itemsize)
        for phase in times[-1]:
            seconds = statistics.median(time[phase] for time in times[1:])
            value(f"{sleeps} sleeps: {phase}", 1e3 * seconds, "ms")
            if phase == "refit":
                value("refit, read and written", num_bytes / seconds / 1e9, "GB/s")

    def sleep_often(self, sleeps: Sleep) -> None:
        """Check that the allocator loses nothing (vLLM's issue 36651)."""
        num = 2 if SMALL else 20
        used = []
        for _ in range(num):
            with self.engine.awake(self.refit, self.policy.sleeper):
                pass
            used.append(used_gib())
        note = f"{used[0]:.2f} GiB asleep, then {used[-1]:.2f}"
        is_same = used[-1] - used[0] < 0.1
        check(f"{num} times {sleeps} sleeps and wakes, and keeps the memory", is_same, note)
        if ON_GPU:
            reserved = torch.cuda.memory_reserved() / GIB
            value("asleep: torch says reserved", reserved, "GiB; it counts what vLLM has unmapped")

    def compare_schedulers(self) -> None:
        """Compare the short way of engine/scheduler.py with vLLM's own."""
        num, length = (4, 12) if SMALL else (64, 256)
        scheduler = self.engine.llm.llm_engine.engine_core.engine_core.scheduler
        value("scheduler", type(scheduler).__name__)
        answers = []
        with self.engine.awake(self.refit, self.policy.sleeper):
            for name in ("short 0", "plain 0", "short 1"):  # The first one caches the prompts.
                states = scheduler.states
                if name.startswith("plain"):
                    scheduler.states = {}  # Unknown requests go vLLM's own way.
                self.engine.take_counts()
                began = time.perf_counter()
                answers.append(self.generate(name, num, self.sampling(length)))
                seconds = time.perf_counter() - began
                num_steps, waiting = self.engine.take_counts()
                note = f"ms, of which {1e3 * waiting / num_steps:.2f} wait for the device"
                value(f"{name}: a step", 1e3 * seconds / num_steps, note)
                scheduler.states = states
        pairs = zip(answers[1], answers[2], strict=True)
        num_same = sum(np.array_equal(a.tokens, b.tokens) for a, b in pairs)
        enough = num_same >= (num - 2 if ON_GPU else num)
        check("steps that only decode sample vLLM's tokens", enough, f"{num_same} of {num}")

    def sample_again(self) -> None:
        with self.engine.awake(self.refit, self.policy.sleeper):
            num = 2 if SMALL else 8
            length = 6 if SMALL else 64
            first = self.generate("same", num, self.sampling(length))
            second = self.generate("same", num, self.sampling(length))
            pairs = zip(first, second, strict=True)
            num_same = sum(np.array_equal(a.tokens, b.tokens) for a, b in pairs)
            # The second time prompts are cached, and on CUDA rounded otherwise.
            enough = num_same >= (num - 2 if ON_GPU else num)
            check("same seeds give the same tokens", enough, f"{num_same} of {num}")
            sampling = self.sampling(6, temperature=0.7, top_p=0.9, top_k=20)
            cold = self.generate("cold", num, sampling)
            is_finite = all(np.isfinite(t.logprobs).all() for t in cold)
            check("log-probs of top-p and top-k are finite", is_finite)


def trajectory(prompt: list[int], output: EngineOutput, group: int) -> Trajectory:
    tokens = np.array(prompt + output.tokens, np.int32)
    logprobs = np.concatenate([np.zeros(len(prompt)), output.logprobs])
    return Trajectory(
        tokens=tokens,
        sampled=np.arange(len(tokens)) >= len(prompt),
        logprobs=logprobs.astype(np.float32),
        group=group,
    )


def refuses_mixtures() -> bool:
    """Return whether this is vLLM 0.26 on a CPU, where minirl starts no mixture."""
    import vllm

    return not ON_GPU and vllm.__version__.startswith("0.26")


def main(args: Arguments) -> None:
    if args.kind == "moe" and refuses_mixtures():
        print("a mixture needs vLLM 0.32 on a CPU: left out")
        lib.leave()
    stage = None
    with tempfile.TemporaryDirectory() as folder:
        with part("start"):
            stage = Stage(args, Path(folder))
        if stage is None:
            lib.leave()
        with part("engine"):
            stage.describe_engine()
        with part("first sleep of the engine"):
            stage.sleep_first()
        for number, (sleeps, level) in enumerate(ROLLOUTS[: 2 if SMALL else None]):
            with part(f"rollout {number}, then {sleeps} sleeps at level {level}"):
                stage.roll_out_and_train(number, sleeps, level)
        for sleeps in MODES:
            with part(f"refits while {sleeps} sleeps"):
                stage.time_refits(sleeps)
            with part(f"many times {sleeps} sleeps"):
                stage.sleep_often(sleeps)
        with part("seeds and sampling"):
            stage.sample_again()
        with part("schedulers"):
            stage.compare_schedulers()
        with part("close"):
            stage.engine.close()
            value("device after close", used_gib(), "GiB")
    lib.leave()


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
