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


def start(
    mesh: Mesh, folders: list[Path], dtype: str
) -> tuple[EngineLoop, list[Policy], list[Refit]]:
    """An engine, a policy a folder, and what gives its weights to the engine."""
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
    return EngineLoop(engine, repeatable=True), policies, refits


def log_probs(policy: Policy, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """What the trainer says of an answer's tokens."""
    t = Trajectory(
        tokens=np.array(prompt + answer, np.int32),
        sampled=np.arange(len(prompt) + len(answer)) >= len(prompt),
        logprobs=np.zeros(len(prompt) + len(answer), np.float32),
    )
    batch = pack([t], policy.mesh.device, layout=policy.layout)
    with policy.inference():
        return policy.model(batch)[0][len(prompt) - 1 :].double().cpu()


def differences(
    mesh: Mesh, folders: list[Path], clock: int, keeps: bool, dtype: str = "float32"
) -> np.ndarray:
    """Answer requests while the models of the folders take turns in the engine, one each `clock`
    steps. |engine's log-prob - the trainer's at the token's version|, [requests, LENGTH]."""
    loop, policies, refits = start(mesh, folders, dtype)
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
        before = loop.engine._num_steps
        while loop.engine._num_steps - before < clock and not all(task.done() for task in tasks):
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
        by_policy = [log_probs(policy, request.tokens, done.tokens) for policy in policies]
        wanted = torch.stack(by_policy)[torch.tensor(done.versions) % len(policies), range(LENGTH)]
        row[:] = np.abs(np.array(done.logprobs) - wanted.numpy())
    loop.close()
    loop.engine.close()
    return found


def differences_of_prompts_again(mesh: Mesh, folders: list[Path]) -> list[float]:
    """Answer one long prompt with the model of each folder, as weights of one version: after a warm
    start optimizer steps are counted from 0 again. As `differences`, the largest of each answer."""
    loop, policies, refits = start(mesh, folders, "float32")
    sampling = Sampling(max_tokens=4, stop_token_ids=(), temperature=1.0)
    prompt = list(range(5, 53))  # More than a block of cached keys.
    found = []
    for name, (refit, policy) in enumerate(zip(refits, policies, strict=True)):
        loop.change_weights(refit, 0, keeps_cache=True)
        request = Request(tokens=prompt, sampling=sampling, seed=0, images=(), name=(name,))
        loop.run(loop.generate(request))
        wanted = log_probs(policy, prompt, request.done.tokens).numpy()
        found.append(np.abs(np.array(request.done.logprobs) - wanted).max())
    loop.close()
    loop.engine.close()
    return found
