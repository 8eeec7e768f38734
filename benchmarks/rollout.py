"""What a rollout costs beside the generation itself: environments that take time, answers of
unequal length, the machinery of episodes.

    torchrun --nproc-per-node 2 benchmarks/rollout.py
    torchrun --nproc-per-node 2 benchmarks/rollout.py --figures machinery --hidden-size 512
    --repeats 5 --check

The model is a Qwen3 with random weights, 4.2M parameters unless told otherwise, in float32. Nothing
stops an answer, so its length is a function of ticket and turn, and runs compare.

environments  64 episodes of 4 answers (72 tokens, then 48 to 96), each answered after 0.25 s: wall
time over the larger of generation alone (the same
              answers, an environment that takes no time) and environment time / concurrency (4 *
              0.25 s * episodes of a rank / those whose environments run at once).
pull          96 prompts with 8 samples, 8 at a time on a rank, answers of log-normal length (median
16, at most 256; the same for all samples of a
              prompt): idle time of the rank that is ready first with rollout.tickets pull over that
              with round_robin, sums over draws of lengths.
machinery     32 prompts with 8 samples, one answer of 100 tokens, rewards and all: tokens a second
over those of `LLM.generate` on the same prompts with
              the same seeds in one batch. By CPU time too, which says more on a noisy machine.

Runs to be compared take turns; figures are medians over --repeats. With --check a broken bound is
exit code 1.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch.distributed as dist

from minirl.config.shared import (
    EngineConfig,
    EnvConfig,
    EvaluateConfig,
    RewardConfig,
    RolloutConfig,
    ScratchConfig,
)
from minirl.data.prompts import Prompts
from minirl.envs.base import Env, Result, State
from minirl.envs.single_turn import SingleTurn
from minirl.model import scratch
from minirl.parallel.mesh import Mesh, join_world
from minirl.rewards.functions import Rewards
from minirl.rollout.engine import RolloutEngine, Sampling
from minirl.rollout.episode import sample_seed
from minirl.rollout.sampler import Sampler
from minirl.types import Trajectory

SECONDS, TURNS = 0.25, 4


class Slow(Env):
    """Replies after a while, in a thread; each answer has the length that the row says."""

    def __init__(self, seconds: float):
        self.seconds = seconds

    def reset(self, row: dict) -> str:
        return row["prompt"]

    def step(self, state: State) -> Result:
        time.sleep(self.seconds)
        return self.reply(state)

    def reply(self, state: State) -> Result:
        lengths = state.row["lengths"]
        if state.turn == len(lengths):
            return Result(done=True)
        return Result(observation="Go on.", sampling={"max_tokens": lengths[state.turn]})


class SlowAsync(Slow):
    async def reset(self, row: dict) -> str:
        return row["prompt"]

    async def step(self, state: State) -> Result:
        await asyncio.sleep(self.seconds)
        return self.reply(state)


class Bench:
    """An engine and what is run on it."""

    def __init__(self, args: argparse.Namespace, mesh: Mesh, folder: Path):
        self.mesh, self.num_samplers = mesh, 0
        cfg = ScratchConfig(
            hidden_size=args.hidden_size,
            num_layers=args.num_layers,
            num_heads=args.hidden_size // 32,
            num_kv_heads=args.hidden_size // 64,
        )
        if mesh.rank == 0:
            scratch.make_model(cfg, folder, max_len=1024, seed=0)
            for path in folder.glob("*config.json"):  # vLLM would end answers by itself
                path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": None}))
        mesh.barrier()
        self.tokenizer = scratch.make_tokenizer([])
        self.engine = RolloutEngine(
            EngineConfig(max_model_len=1024, kv_cache_gb=1.0),
            folder,
            mesh,
            dtype="float32",
            load_weights=True,
        )

    def collect(
        self,
        make_env: Callable[[], Env],
        lengths: list[list[int]],
        num_samples: int,
        *,
        tickets: str,
        threads: int = 64,
        lanes: int = 256,
        first: int = 1,
    ) -> tuple[list[Trajectory], dict[str, float]]:
        """Play a prompt for each of `lengths`, which are of the answers after a first one of
        `first` tokens. This rank's trajectories, and of all ranks: wall time, that for which the
        first to be ready waited, CPU time of the slower one.
        """
        rows = [
            {"prompt": f"Say something about the number {n:4d}.", "lengths": part}
            for n, part in enumerate(lengths)
        ]
        env = EnvConfig(
            name="bench",
            max_turns=1 + max(map(len, lengths)),
            max_tokens=1024,
            threads=threads,
            on_error="raise",
        )
        cfg = EvaluateConfig(rollout=RolloutConfig(tickets=tickets), env=env, reward=RewardConfig())
        self.engine.cfg = replace(self.engine.cfg, max_num_seqs=lanes)
        self.num_samplers += 1  # their counters on the store must not meet
        prompts = Prompts(rows, self.tokenizer, cfg.data, seed=0, shuffle=False)
        sampler = Sampler(
            self.engine,
            make_env,
            Rewards((1.0, lambda prompt, completion, row: float(len(completion)), "length")),
            prompts,
            cfg,
        )
        sampler.mesh = replace(
            self.mesh, store=dist.PrefixStore(f"sampler-{self.num_samplers}", self.mesh.store)
        )
        result, times = self.timed(
            lambda: sampler.collect(
                prompts,
                range(len(rows)),
                num_samples,
                Sampling(max_tokens=first, stop_token_ids=()),
            )
        )
        sampler.close()
        return result, times

    def timed(self, function: Callable) -> tuple[object, dict[str, float]]:
        self.mesh.barrier()
        began = time.perf_counter(), time.process_time()
        result = function()
        own = time.perf_counter() - began[0], time.process_time() - began[1]
        wall, cpu = zip(*self.mesh.gather(own), strict=True)
        return result, {"wall": max(wall), "idle": max(wall) - min(wall), "cpu": max(cpu)}

    def static_batch(self, trajectories: list[Trajectory], max_tokens: int) -> dict[str, float]:
        """The same answers by vLLM's own loop over one batch."""
        from vllm import SamplingParams

        prompts = [
            {"prompt_token_ids": t.tokens[: int(t.sampled.argmax())].tolist()} for t in trajectories
        ]
        params = [
            SamplingParams(
                max_tokens=max_tokens,
                temperature=1.0,
                seed=sample_seed(0, t.group, t.episode, 0),
                logprobs=0,
                detokenize=False,
            )
            for t in trajectories
        ]
        self.engine.llm.reset_prefix_cache()
        outputs, times = self.timed(
            lambda: self.engine.llm.generate(prompts, params, use_tqdm=False)
        )
        same = [
            list(o.outputs[0].token_ids) == t.tokens[t.sampled].tolist()
            for o, t in zip(outputs, trajectories, strict=True)
        ]
        return times | {
            "tokens": sum(len(o.outputs[0].token_ids) for o in outputs),
            "same": sum(same) / len(same),
        }


def environments(bench: Bench, repeats: int) -> list[tuple[str, str, float, float]]:
    rng, num, world = np.random.default_rng(0), 64, bench.mesh.world_size
    lengths = rng.integers(
        48, 97, (num, TURNS - 1)
    ).tolist()  # an environment sets the length of the answers after the first
    per_rank = num // world
    cases = {"in 64 threads": (Slow, 64), "in 8 threads": (Slow, 8), "async": (SlowAsync, per_rank)}
    play = partial(bench.collect, lengths=lengths, num_samples=1, tickets="pull", first=72)
    alone, slow = [], {name: [] for name in cases}
    for _ in range(repeats):
        alone.append(play(partial(SlowAsync, 0.0))[1])
        for name, (env, threads) in cases.items():
            slow[name].append(play(partial(env, SECONDS), threads=threads)[1])
    found = []
    for name, (_, threads) in cases.items():
        waiting = SECONDS * TURNS * per_rank / min(threads, per_rank)
        ratio = statistics.median(
            times["wall"] / max(generation["wall"], waiting)
            for times, generation in zip(slow[name], alone, strict=True)
        )
        wall, cpu = (
            [statistics.median(times[clock] for times in runs) for runs in (slow[name], alone)]
            for clock in ("wall", "cpu")
        )
        found.append(
            (
                f"environments {name}",
                f"{wall[0]:.2f} s, {cpu[0]:.2f} CPU-s; generation alone {wall[1]:.2f} s, {cpu[1]:.2f} CPU-s; "
                f"environments {waiting:.2f} s",
                ratio,
                1.3,
            )
        )
    return found


def pull(bench: Bench, repeats: int) -> list[tuple[str, str, float, float]]:
    idle, wall = ({"pull": 0.0, "round_robin": 0.0} for _ in range(2))
    draws = repeats + 1
    for draw in range(draws):
        lengths = (
            np.random.default_rng(draw)
            .lognormal(np.log(16), 1.0, (96, 1))
            .clip(1, 256)
            .astype(int)
            .tolist()
        )
        for tickets in idle:
            times = bench.collect(partial(SlowAsync, 0.0), lengths, 8, tickets=tickets, lanes=8)[1]
            idle[tickets] += times["idle"] / draws
            wall[tickets] += times["wall"] / draws
    shown = ", ".join(
        f"{tickets} {idle[tickets]:.2f} s of {wall[tickets]:.2f} s" for tickets in idle
    )
    return [
        (
            "pull queue, idle time",
            f"{shown}, means of {draws} draws",
            idle["pull"] / idle["round_robin"],
            0.5,
        )
    ]


def machinery(bench: Bench, repeats: int) -> list[tuple[str, str, float, float]]:
    rates: dict[str, list[tuple[float, float]]] = {"episodes": [], "batch": []}
    for _ in range(repeats + 1):
        bench.engine.llm.reset_prefix_cache()
        trajectories, times = bench.collect(
            SingleTurn, [[]] * 32, 8, tickets="round_robin", first=100
        )
        static = bench.static_batch(trajectories, 100)
        tokens = sum(bench.mesh.gather(static["tokens"]))
        for name, found in (("episodes", times), ("batch", static)):
            rates[name].append((tokens / found["wall"], tokens / found["cpu"]))
    if static["same"] < 1:
        print(f"rank {bench.mesh.rank}: only {static['same']:.2f} of the answers are the same")
    found = []
    for i, clock in enumerate(("wall", "CPU")):
        own, static = ([rate[i] for rate in rates[name][1:]] for name in ("episodes", "batch"))
        ratio = statistics.median(a / b for a, b in zip(own, static, strict=True))
        found.append(
            (
                f"machinery, {clock} time",
                f"{statistics.median(own):,.0f} tokens/s; one static batch {statistics.median(static):,.0f}",
                ratio,
                0.95,
            )
        )
    return found


FIGURES = {"environments": environments, "pull": pull, "machinery": machinery}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--figures", nargs="+", choices=FIGURES, default=list(FIGURES))
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--num-layers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    mesh = join_world()
    with tempfile.TemporaryDirectory() as temporary:
        bench = Bench(args, mesh, Path(mesh.gather(temporary)[0]))
        bench.collect(
            SingleTurn, [[]] * 8, 1, tickets="round_robin", first=8
        )  # what is slow only once
        broken = False
        for name in args.figures:
            for figure, shown, value, bound in FIGURES[name](bench, args.repeats):
                least = name == "machinery"
                broken |= value < bound if least else value > bound
                if mesh.rank == 0:
                    print(
                        f"{figure:<28} {value:5.2f}, {'at least' if least else 'at most'} {bound}   ({shown})",
                        flush=True,
                    )
        bench.engine.close()
    sys.exit(int(args.check and broken))


if __name__ == "__main__":
    main()
