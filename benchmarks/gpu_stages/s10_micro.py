"""What a plan of a step's time rests on, each measured alone.

    python -m benchmarks.gpu_stages.s10_micro FOLDER

Allocating, freeing and pinning a GiB; an update by the rows of its one
micro-batch; the device's and the host's time of a decoding step by the number of sequences. The
folder is that of s5_model.py.
"""

import cProfile
import functools
import gc
import io
import pstats
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu_stages import lib
from benchmarks.gpu_stages.lib import GIB, ON_GPU, SMALL, part, value
from minirl.algo import losses
from minirl.batch.packing import pack
from minirl.config.policy import PolicyConfig
from minirl.config.rl import RefitConfig
from minirl.config.shared import EngineConfig
from minirl.engine.engine import RolloutEngine, Sampling
from minirl.parallel.machines import join_world
from minirl.parallel.mesh import Mesh
from minirl.refit.refit import Refit
from minirl.train.policy import Policy
from minirl.types.packed import Packed, Trajectory

ROWS = (256,) if SMALL else (256, 4096, 8192, 16384, 32768)
SEQUENCES = (2, 4) if SMALL else (4, 32, 128, 256)
LENGTH = 6 if SMALL else 96  # Of answers whose steps are timed.
PROFILED = 48  # Of those that are profiled.
PROMPT = 16


def measure_memory() -> None:
    """Measure what torch's memory and garbage cost. The stage engine maps vLLM's."""
    # Before vLLM unmaps anything, it collects garbage.
    value("collecting garbage", 1e3 * min(lib.wall_seconds(gc.collect) for _ in range(3)), "ms")
    blocks: list[torch.Tensor] = []

    def allocate() -> None:
        for _ in range(256):
            blocks.append(torch.empty(2**26, dtype=torch.uint8, device="cuda"))

    torch.cuda.empty_cache()
    value("allocating 16 GiB in 256 blocks", 1e3 * lib.wall_seconds(allocate) / 16, "ms a GiB")
    blocks.clear()
    freed = lib.wall_seconds(torch.cuda.empty_cache)
    value("freeing 16 GiB in 256 blocks", 1e3 * freed / 16, "ms a GiB")
    pinned = lib.wall_seconds(lambda: torch.empty(2 * GIB, dtype=torch.uint8, pin_memory=True))
    value("pinning", pinned / 2, "s a GiB")


def make_batch(num_rows: int, policy: Policy, mesh: Mesh) -> Packed:
    """Return a micro-batch of answers of 256 tokens."""
    rng = np.random.default_rng(0)
    length = min(256, num_rows)
    trajectories = []
    for group in range(num_rows // length):
        trajectories.append(
            Trajectory(
                tokens=rng.integers(5, 250, length).astype(np.int32),
                sampled=np.arange(length) >= PROMPT,
                logprobs=np.zeros(length, np.float32),
                group=group,
            )
        )
    return pack(trajectories, mesh.device, layout=policy.layout)


def measure_updates(policy: Policy, mesh: Mesh) -> None:
    for num_rows in ROWS:
        batch = make_batch(num_rows, policy, mesh)
        update = updater(policy, batch)
        for _ in range(2):
            update()
        policy.timer.take()
        times = [lib.wall_seconds(update) for _ in range(3)]
        value(f"{num_rows} rows: update", 1e3 * min(times), "ms")
        for phase, seconds in policy.timer.take().items():
            value(f"{num_rows} rows: {phase}", 1e3 * seconds / len(times), "ms, mean")
    if ON_GPU:
        profile_device("8192 rows", updater(policy, make_batch(8192, policy, mesh)), 1)


def updater(policy: Policy, batch: Packed) -> Callable[[], object]:
    return lambda: policy.update([batch], losses.sft(), lr=0.0)


def profile_device(name: str, function: Callable[[], object], num_steps: int) -> None:
    """Report how long the device is busy with a call, a step, and with which kernels."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        function()
        lib.synchronize()
    rows = sorted(profiler.key_averages(), key=lambda row: -row.self_device_time_total)
    busy = sum(row.self_device_time_total for row in rows)
    num_kernels = sum(row.count for row in rows) // num_steps
    value(
        f"{name}: the device is busy", busy / 1e3 / num_steps, f"ms a step, {num_kernels} kernels"
    )
    for row in rows[:8]:
        milliseconds = row.self_device_time_total / 1e3 / num_steps
        value(f"{name}: {row.key[:60]}", milliseconds, "ms a step")


def start_engine(policy: Policy, folder: Path, mesh: Mesh) -> RolloutEngine:
    cfg = EngineConfig(
        max_model_len=512,
        max_num_seqs=max(SEQUENCES),
        kv_cache_gb=12.0 if ON_GPU else 0.05,
    )
    dtype = "bfloat16" if ON_GPU else "float32"
    return RolloutEngine(cfg, folder, mesh, dtype=dtype, timer=policy.timer)


def decode(engine: RolloutEngine, name: str, num: int, length: int) -> list[float]:
    """Return the seconds of each step of the engine while it answers."""
    rng = np.random.default_rng(0)
    sampling = Sampling(max_tokens=length, stop_token_ids=())
    for number in range(num):
        prompt = rng.integers(5, 250, PROMPT).tolist()
        engine.add(f"{name} {number}", prompt, sampling, seed=number)
    num_done = 0
    times = []
    while num_done < num:
        began = time.perf_counter()
        num_done += sum(bool(output.finish_reason) for output in engine.step())
        times.append(time.perf_counter() - began)
    return times


def measure_decoding(engine: RolloutEngine) -> None:
    decode(engine, "warm-up", min(SEQUENCES), LENGTH)
    for num in SEQUENCES:
        times = decode(engine, f"{num} timed", num, LENGTH)
        middle = times[len(times) // 4 : 3 * len(times) // 4]
        value(f"{num} sequences: a decoding step", 1e3 * statistics.median(middle), "ms")
        if ON_GPU:
            answer = functools.partial(decode, engine, f"{num} profiled", num, PROFILED)
            profile_device(f"{num} sequences", answer, PROFILED)
    profile_host(engine, SEQUENCES[-2])


def profile_host(engine: RolloutEngine, num: int) -> None:
    """Print the functions of the host that take most of a decoding step."""
    profiler = cProfile.Profile()
    profiler.enable()
    times = decode(engine, "host", num, LENGTH)
    profiler.disable()
    text = io.StringIO()
    for order in ("tottime", "cumulative"):
        pstats.Stats(profiler, stream=text).sort_stats(order).print_stats(40)
    print(f"functions of the host in {len(times)} steps of {num} sequences\n{text.getvalue()}")


def main(folder: Path) -> None:
    if ON_GPU:
        with part("memory"):
            measure_memory()
    mesh = join_world()
    policy = Policy(PolicyConfig(dtype="bfloat16" if ON_GPU else "float32"), folder, mesh)
    with part("updates"):
        measure_updates(policy, mesh)
    policy.sleeper.sleep()
    engine = start_engine(policy, folder, mesh)
    engine.sleep()
    policy.sleeper.wake_parameters()
    refit = Refit(RefitConfig(), policy.shards(), policy.parts(), engine)
    with part("decoding steps"), engine.awake(refit, policy.sleeper):
        measure_decoding(engine)
    engine.close()
    lib.leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]) / "model")
