"""An engine whose weights change while it answers, and the trainer's log-probs of what it says."""

import asyncio
from pathlib import Path

import numpy as np
import torch

from minirl.batch.packing import pack
from minirl.config.policy import PolicyConfig
from minirl.config.rl import RefitConfig
from minirl.config.shared import EngineConfig
from minirl.engine.engine import RolloutEngine, Sampling
from minirl.engine.loop import EngineLoop, Request
from minirl.parallel.mesh import Mesh
from minirl.refit.refit import Refit
from minirl.train.policy import Policy
from minirl.types.packed import Trajectory

LENGTH = 24


def differences(
    mesh: Mesh, folders: list[Path], clock: int, keeps: bool, dtype: str = "float32"
) -> np.ndarray:
    """Answer requests while the models of the folders take turns in the engine, one each `clock`
    steps. |engine's log-prob - the trainer's at the token's version|, [requests, LENGTH]."""
    policies = [Policy(PolicyConfig(model=str(f), dtype=dtype), f, mesh) for f in folders]
    on_cpu = mesh.device.type == "cpu"
    cfg = EngineConfig(
        max_model_len=64,
        max_num_seqs=16,
        sleep="none",
        gpu_memory_utilization=0.3,
        kv_cache_gb=0.02 if on_cpu else 0.0,
    )
    engine = RolloutEngine(cfg, folders[0], mesh, dtype=dtype)
    refits = [Refit(RefitConfig(), p.shards(), p.parts(), engine) for p in policies]
    loop = EngineLoop(engine, repeatable=True)
    sampling = Sampling(max_tokens=LENGTH, stop_token_ids=(), temperature=1.0)
    requests = [
        Request(tokens=[5 + i, 60 + i, 100], sampling=sampling, seed=i, images=(), name=(i,))
        for i in range(5)
    ]
    tasks: list[asyncio.Task] = []

    async def go_on() -> None:
        """Until the engine has made `clock` steps, or all is done."""
        if not tasks:
            tasks.extend(asyncio.ensure_future(loop.generate(request)) for request in requests)
        before = engine._num_steps
        while engine._num_steps - before < clock and not all(task.done() for task in tasks):
            await asyncio.sleep(0)

    version = 0
    while not tasks or not all(task.done() for task in tasks):
        loop.change_weights(refits[version % len(refits)], version, keeps_cache=keeps)
        loop.run(go_on(), pauses=False)
        version += 1
    found = np.zeros((len(requests), LENGTH))
    for row, request in zip(found, requests, strict=True):
        done = request.done
        assert len(done.tokens) == len(done.logprobs) == len(done.versions) == LENGTH
        assert done.versions == sorted(done.versions) and len(set(done.versions)) > 3
        t = Trajectory(
            tokens=np.array(request.tokens + done.tokens, np.int32),
            sampled=np.arange(3 + LENGTH) >= 3,
            logprobs=np.zeros(3 + LENGTH, np.float32),
        )
        batch = pack([t], mesh.device, layout=policies[0].layout)
        by_policy = []
        for policy in policies:
            with policy.inference():
                by_policy.append(policy.model(batch)[0][2:].double().cpu())
        wanted = torch.stack(by_policy)[torch.tensor(done.versions) % len(policies), range(LENGTH)]
        row[:] = np.abs(np.array(done.logprobs) - wanted.numpy())
    loop.close()
    engine.close()
    return found
