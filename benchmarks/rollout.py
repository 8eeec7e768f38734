r"""What a rollout costs beside the generation itself.

    torchrun --nproc-per-node 2 benchmarks/rollout.py
    torchrun --nproc-per-node 2 benchmarks/rollout.py --figures machinery --hidden-size 512 \
        --repeats 5 --check

The model is a Qwen3 with random weights, 4.2M parameters if no flag says otherwise, in float32.
Nothing stops an answer, so its length is a function of ticket and turn, and runs compare. Prints a
ratio for each figure, the bound that it should keep, and the seconds and rates behind it:

environments  64 episodes of 4 answers (72 tokens, then 48 to 96), each answered after --seconds:
              wall time over the larger of generation alone (the same answers, an environment that
              takes no time) and environment time / concurrency (4 * seconds * episodes of a rank /
              those whose environments run at once).
pull          96 prompts with 8 samples, 8 at a time on a rank, answers of log-normal length (median
              16, at most 256; the same for all samples of a prompt): idle time of the rank that is
              ready first with rollout.tickets pull over that with round_robin, sums over draws of
              lengths.
machinery     32 prompts with 8 samples, one answer of 100 tokens, rewards and all: tokens a second
              over those of `LLM.generate` on the same prompts with the same seeds in one batch. By
              CPU time too, which says more on a noisy machine.
host          16 prompts with 8 samples, one answer of 256 tokens, all at once, without a model:
              microseconds of CPU for a token, the rest of the rollout included.

--share makes the prompts of each figure fewer. Runs to be compared take turns; figures are medians
over --repeats. With --check a broken bound is exit code 1.
"""

import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar
from unittest import mock

import numpy as np
import torch.distributed as dist
import tyro

from minirl.config.policy import ScratchConfig
from minirl.config.shared import (
    EngineConfig,
    EnvConfig,
    EvaluateConfig,
    RewardConfig,
    RolloutConfig,
)
from minirl.data.prompts import Prompts
from minirl.endpoint import open_endpoint
from minirl.engine.engine import RolloutEngine, Sampling
from minirl.envs import Env, EnvMaker, Result, SingleTurn, State
from minirl.model import scratch
from minirl.parallel.machines import join_world
from minirl.parallel.mesh import Mesh
from minirl.rewards.scoring import Rewards
from minirl.rollout.episode import sample_seed
from minirl.rollout.sampler import Sampler
from minirl.types.packed import Trajectory

T = TypeVar("T")
Tickets = Literal["pull", "round_robin"]
TURNS = 4
NUM_SAMPLES = 8  # of a prompt, in pull and machinery
NUM_TOKENS = 100  # of an answer, in machinery
NUM_HOST_TOKENS = 256  # of an answer, in host


@dataclass(kw_only=True)
class Load:
    figures: tuple[Literal["environments", "pull", "machinery", "host"], ...] = (
        "environments",
        "pull",
        "machinery",
        "host",
    )
    hidden_size: int = 256
    num_layers: int = 4
    repeats: int = 3
    share: float = 1.0
    """Of the prompts of each figure."""
    seconds: float = 0.25
    """That a slow environment takes for a reply."""
    small: bool = False
    """Answers of a sixteenth of the tokens: everything is called, and the figures mean nothing."""
    check: bool = False


@dataclass
class Times:
    """Seconds of a call, of all ranks."""

    wall: float  # of the slowest
    idle: float  # for which the first to be ready waited
    cpu: float  # of the one that used most


@dataclass
class Figure:
    name: str
    text: str
    ratio: float
    bound: float
    at_least: bool = False

    @property
    def broken(self) -> bool:
        return self.ratio < self.bound if self.at_least else self.ratio > self.bound

    def __str__(self) -> str:
        side = "at least" if self.at_least else "at most"
        return f"{self.name:<28} {self.ratio:5.2f}, {side} {self.bound}   ({self.text})"


class Slow(Env):
    """Replies after a while, in a thread; each answer has the length that the row says."""

    def __init__(self, seconds: float):
        self.seconds = seconds

    def reset(self, row: dict) -> str:
        return row["prompt"]

    def step(self, state: State) -> Result:
        time.sleep(self.seconds)
        return reply(state)


class SlowAsync(Env):
    """The same on the event loop."""

    def __init__(self, seconds: float):
        self.seconds = seconds

    async def reset(self, row: dict) -> str:
        return row["prompt"]

    async def step(self, state: State) -> Result:
        await asyncio.sleep(self.seconds)
        return reply(state)


def reply(state: State) -> Result:
    """Ask for another answer, as long as the row says."""
    lengths = state.row["lengths"]
    if state.turn == len(lengths):
        return Result(done=True)
    return Result(observation="Go on.", sampling={"max_tokens": lengths[state.turn]})


def count_characters(prompt: str | list[dict], completion: str, row: dict) -> float:
    """Return the reward: any will do."""
    return float(len(completion))


class Bench:
    """An engine and what is run on it."""

    def __init__(self, load: Load, mesh: Mesh, folder: Path):
        self.load = load
        self.mesh = mesh
        self.num_samplers = 0
        self.shorter = 16 if load.small else 1  # times, of each answer
        self.num_tokens = NUM_TOKENS // self.shorter
        cfg = ScratchConfig(
            hidden_size=load.hidden_size,
            num_layers=load.num_layers,
            num_heads=load.hidden_size // 32,
            num_kv_heads=load.hidden_size // 64,
        )
        if mesh.rank == 0:
            scratch.make_model(cfg, folder, max_len=1024, seed=0)
            for path in folder.glob("*config.json"):  # vLLM would end answers by itself
                values = json.loads(path.read_text()) | {"eos_token_id": None}
                path.write_text(json.dumps(values))
        mesh.barrier()
        self.tokenizer = scratch.make_tokenizer([])
        self.engine = RolloutEngine(
            EngineConfig(max_model_len=1024, kv_cache_gb=1.0),
            folder,
            mesh,
            dtype="float32",
            load_weights=True,
        )

    def num_prompts(self, num: int) -> int:
        """Return the share of `num` that the flags ask for, at least one for each rank."""
        return max(self.mesh.world_size, round(num * self.load.share))

    def make_config(
        self, lengths: list[list[int]], tickets: Tickets, threads: int
    ) -> EvaluateConfig:
        longest = max(len(later) for later in lengths)
        env = EnvConfig(
            name="bench",
            max_turns=1 + longest,
            max_tokens=1024,
            threads=threads,
            on_error="raise",
        )
        return EvaluateConfig(
            rollout=RolloutConfig(tickets=tickets), env=env, reward=RewardConfig()
        )

    def collect(
        self,
        make_env: Callable[[], Env],
        lengths: list[list[int]],
        num_samples: int,
        *,
        tickets: Tickets,
        threads: int = 64,
        max_num_seqs: int = 256,
        first: int = 1,
    ) -> tuple[list[Trajectory], Times]:
        """Run a prompt for each of `lengths`; return this rank's trajectories, and the times.

        Args:
            make_env: makes the environment of an episode.
            lengths: of each prompt, the tokens of the answers after the first.
            num_samples: episodes of each prompt.
            tickets: how prompts are dealt to engines.
            threads: calls of environments that run at once.
            max_num_seqs: sequences that an engine generates at once.
            first: tokens of the first answer.
        """
        rows = []
        for n, later in enumerate(lengths):
            rows.append({"prompt": f"Say something about the number {n:4d}.", "lengths": later})
        cfg = self.make_config(lengths, tickets, threads)
        self.engine.cfg = replace(self.engine.cfg, max_num_seqs=max_num_seqs)
        self.num_samplers += 1  # their counters on the store must not meet
        prompts = Prompts(rows, self.tokenizer, cfg.data, seed=0, shuffle=False)
        rewards = Rewards((1.0, count_characters, "length"))
        sampler = Sampler(
            self.engine, EnvMaker(make_env, make_env()), rewards, prompts, cfg, open_endpoint
        )
        store = dist.PrefixStore(f"sampler-{self.num_samplers}", self.mesh.store)
        sampler.mesh = replace(self.mesh, store=store)
        sampling = Sampling(max_tokens=first, stop_token_ids=())
        tickets_of_all = range(len(rows))
        result, times = self.timed(
            lambda: sampler.collect(prompts, tickets_of_all, num_samples, sampling)
        )
        assert result is not None  # no signal interrupts a benchmark
        sampler.close()
        return result, times

    def timed(self, function: Callable[[], T]) -> tuple[T, Times]:
        """Return what the function returns, and its times on all ranks."""
        self.mesh.barrier()
        wall_start = time.perf_counter()
        cpu_start = time.process_time()
        result = function()
        wall = self.mesh.gather(time.perf_counter() - wall_start)
        cpu = self.mesh.gather(time.process_time() - cpu_start)
        return result, Times(wall=max(wall), idle=max(wall) - min(wall), cpu=max(cpu))

    def static_batch(self, trajectories: list[Trajectory]) -> tuple[int, float, Times]:
        """Sample the same answers by vLLM's own loop over one batch.

        Returns:
            Their tokens on this rank, the share of them that is the same, and the times.
        """
        from vllm import SamplingParams, TokensPrompt

        prompts, params = [], []
        for t in trajectories:
            prompt = t.tokens[: int(t.sampled.argmax())].tolist()
            prompts.append(TokensPrompt(prompt_token_ids=prompt))
            one = SamplingParams(
                max_tokens=self.num_tokens,
                temperature=1.0,
                seed=sample_seed(0, t.group, t.episode, 0),
                logprobs=0,
                detokenize=False,
            )
            params.append(one)
        llm = self.engine.llm
        llm.reset_prefix_cache()
        outputs, times = self.timed(lambda: llm.generate(prompts, params, use_tqdm=False))
        answers = [list(output.outputs[0].token_ids) for output in outputs]
        same = []
        for answer, t in zip(answers, trajectories, strict=True):
            same.append(answer == t.tokens[t.sampled].tolist())
        return sum(len(answer) for answer in answers), statistics.mean(same), times


def environments(bench: Bench) -> list[Figure]:
    """Compare slow environments with what they would cost if nothing else took time."""
    rng = np.random.default_rng(0)
    num = bench.num_prompts(64)
    lengths = rng.integers(48, 97, (num, TURNS - 1)) // bench.shorter
    per_rank = num // bench.mesh.world_size
    seconds = bench.load.seconds
    in_thread, on_loop = partial(Slow, seconds), partial(SlowAsync, seconds)
    cases: dict[str, tuple[Callable[[], Env], int]] = {
        "in 64 threads": (in_thread, 64),
        "in 8 threads": (in_thread, 8),
        "async": (on_loop, per_rank),
    }
    play = partial(
        bench.collect,
        lengths=lengths.tolist(),
        num_samples=1,
        tickets="pull",
        first=72 // bench.shorter,
    )
    alone: list[Times] = []
    slow: dict[str, list[Times]] = {name: [] for name in cases}
    for _ in range(bench.load.repeats):
        alone.append(play(partial(SlowAsync, 0.0))[1])
        for name, (make_env, threads) in cases.items():
            slow[name].append(play(make_env, threads=threads)[1])

    def describe(runs: list[Times]) -> str:
        wall = statistics.median(times.wall for times in runs)
        cpu = statistics.median(times.cpu for times in runs)
        return f"{wall:.2f} s, {cpu:.2f} CPU-s"

    figures = []
    for name, (_, threads) in cases.items():
        waiting = seconds * TURNS * per_rank / min(threads, per_rank)
        ratios = []
        for times, generation in zip(slow[name], alone, strict=True):
            ratios.append(times.wall / max(generation.wall, waiting))
        text = f"{describe(slow[name])}; generation alone {describe(alone)}; "
        text += f"environments {waiting:.2f} s"
        figures.append(Figure(f"environments {name}", text, statistics.median(ratios), 1.3))
    return figures


def pull(bench: Bench) -> list[Figure]:
    """Compare the idle times of the two ways to deal tickets."""
    kinds: tuple[Tickets, ...] = ("pull", "round_robin")
    idle = dict.fromkeys(kinds, 0.0)
    wall = dict.fromkeys(kinds, 0.0)
    num = bench.num_prompts(96)
    draws = bench.load.repeats + 1
    for draw in range(draws):
        samples = np.random.default_rng(draw).lognormal(np.log(16), 1.0, (num, 1))
        lengths = samples.clip(1, 256 // bench.shorter).astype(int).tolist()
        for tickets in kinds:
            _, times = bench.collect(
                partial(SlowAsync, 0.0), lengths, NUM_SAMPLES, tickets=tickets, max_num_seqs=8
            )
            idle[tickets] += times.idle / draws
            wall[tickets] += times.wall / draws
    parts = [f"{tickets} {idle[tickets]:.2f} s of {wall[tickets]:.2f} s" for tickets in kinds]
    text = f"{', '.join(parts)}, means of {draws} draws"
    # With one rank nothing is ever idle.
    ratio = idle["pull"] / idle["round_robin"] if idle["round_robin"] else 0.0
    return [Figure("pull queue, idle time", text, ratio, 0.5)]


def machinery(bench: Bench) -> list[Figure]:
    """Compare episodes with vLLM's loop over a static batch."""
    no_more: list[list[int]] = [[] for _ in range(bench.num_prompts(32))]
    wall: dict[str, list[float]] = {"episodes": [], "batch": []}  # tokens a second
    cpu: dict[str, list[float]] = {"episodes": [], "batch": []}
    for _ in range(bench.load.repeats + 1):
        bench.engine.llm.reset_prefix_cache()
        trajectories, episodes = bench.collect(
            SingleTurn, no_more, NUM_SAMPLES, tickets="round_robin", first=bench.num_tokens
        )
        num_tokens, same, batch = bench.static_batch(trajectories)
        total = sum(bench.mesh.gather(num_tokens))
        for name, times in (("episodes", episodes), ("batch", batch)):
            wall[name].append(total / times.wall)
            cpu[name].append(total / times.cpu)
    if same < 1:
        print(f"rank {bench.mesh.rank}: only {same:.2f} of the answers are the same")
    figures = []
    for clock, rates in (("wall", wall), ("CPU", cpu)):
        ours, static = rates["episodes"][1:], rates["batch"][1:]
        ratio = statistics.median(a / b for a, b in zip(ours, static, strict=True))
        text = f"{statistics.median(ours):,.0f} tokens/s; "
        text += f"one static batch {statistics.median(static):,.0f}"
        figures.append(Figure(f"machinery, {clock} time", text, ratio, 0.95, at_least=True))
    return figures


class NoModel:
    """Answers the steps of an engine at once, with the same token for every request."""

    def __init__(self) -> None:
        self.scheduled: Any = None  # By the step that is under way.

    def execute_model(self, scheduled: Any, non_block: bool = False) -> Any:
        """Compute a step; its tokens are asked for by the next call, if there are any."""
        from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT

        self.scheduled = scheduled
        has_tokens = scheduled.total_num_scheduled_tokens > 0
        return answer(None if has_tokens else EMPTY_MODEL_RUNNER_OUTPUT, non_block)

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        """Return the tokens of the step."""
        from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

        ids = list(self.scheduled.num_scheduled_tokens)
        tokens = np.full((len(ids), 1), 7)
        logprobs = np.full((len(ids), 1), -1.5, np.float32)
        output = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: row for row, request_id in enumerate(ids)},
            sampled_token_ids=tokens.tolist(),
            logprobs=LogprobsLists(tokens, logprobs, np.ones(len(ids), np.int64)),
        )
        return answer(output, non_block)


def answer(value: Any, non_block: bool) -> Any:
    """Return a value as vLLM's executor does: in a future, unless the caller waits."""
    if not non_block:
        return value
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def host(bench: Bench) -> list[Figure]:
    """Measure what a token costs the host, without a model."""
    model = NoModel()
    executor = bench.engine.llm.llm_engine.model_executor
    no_more: list[list[int]] = [[] for _ in range(bench.num_prompts(16))]
    costs = []
    with (
        mock.patch.object(executor, "execute_model", model.execute_model),
        mock.patch.object(executor, "sample_tokens", model.sample_tokens),
    ):
        for _ in range(bench.load.repeats + 1):
            bench.engine.llm.reset_prefix_cache()
            trajectories, times = bench.collect(
                SingleTurn,
                no_more,
                NUM_SAMPLES,
                tickets="round_robin",
                first=NUM_HOST_TOKENS // bench.shorter,
            )
            num_tokens = sum(int(t.sampled.sum()) for t in trajectories)
            costs.append(1e6 * times.cpu / num_tokens)
    bench.engine.llm.reset_prefix_cache()
    text = f"microseconds of CPU a token, {len(trajectories)} sequences at once"
    return [Figure("host", text, statistics.median(costs[1:]), 6.0)]


FIGURES = {"environments": environments, "pull": pull, "machinery": machinery, "host": host}


def main(load: Load) -> None:
    mesh = join_world()
    with tempfile.TemporaryDirectory() as temporary:
        bench = Bench(load, mesh, Path(mesh.gather(temporary)[0]))
        # What is slow only once.
        warmup: list[list[int]] = [[] for _ in range(8)]
        bench.collect(SingleTurn, warmup, 1, tickets="round_robin", first=8)
        broken = False
        for name in load.figures:
            for figure in FIGURES[name](bench):
                broken |= figure.broken
                if mesh.rank == 0:
                    print(figure, flush=True)
        bench.engine.close()
    sys.exit(int(load.check and broken))


if __name__ == "__main__":
    main(tyro.cli(Load, description=__doc__))
