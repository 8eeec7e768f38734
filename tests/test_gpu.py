"""What only a CUDA device can show: `launch/test.sh -m gpu`. Left out elsewhere."""

import numpy as np
import pytest
import tiny
import torch
from test_families import mixture_inputs

from minirl.data.packing import pack
from minirl.model import experts
from minirl.model.attention import VarlenFlash, bucketed
from minirl.types import Trajectory

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("window", [None, 24])
def test_flash_attention_over_shared_prompts_equals_rectangles_in_float32(window):
    rng, device = np.random.default_rng(0), torch.device("cuda")
    siblings = []
    for group, num_prompt in enumerate((40, 7)):
        prompt = rng.integers(5, 200, num_prompt)
        for _ in range(4):
            tokens = np.concatenate([prompt, rng.integers(5, 200, rng.integers(3, 60))]).astype(np.int32)
            siblings.append(Trajectory(tokens=tokens, sampled=np.arange(len(tokens)) >= num_prompt, logprobs=np.zeros(len(tokens), np.float32), group=group))
    batch = pack(siblings, device)
    torch.manual_seed(0)
    q, k, v = (torch.randn(len(batch.inputs), heads, 64, device=device) for heads in (8, 2, 2))
    grad = torch.randn_like(q)
    def run(dtype, flash):
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        if flash:
            keys = [x.index_select(0, batch.key_rows) for x in leaves[1:]]
            out = VarlenFlash.apply(leaves[0], *keys, batch, 0.125, window)
        else:
            out = bucketed(*leaves, batch, 0.125, window)
        return out, *torch.autograd.grad(out, leaves, grad.to(dtype))
    for flash, exact in zip(run(torch.bfloat16, True), run(torch.float32, False), strict=True):
        assert (flash.float() - exact).abs().max() < 0.02 * exact.abs().max()


def test_sleep_refit_and_logprobs(tmp_path):
    """Engine asleep at level 2 between two refits: weights gone and written anew, log-probs still the trainer's."""
    from minirl.config import DataConfig, EngineConfig, PolicyConfig, RefitConfig
    from minirl.data import chat
    from minirl.data.datasets import Prompts
    from minirl.parallel.mesh import join_world
    from minirl.policy import Policy
    from minirl.rollout.engine import RolloutEngine, Sampling
    from minirl.rollout.env import make_env
    from minirl.rollout.refit import Refit
    from minirl.rollout.sampler import Sampler

    folder = tiny.make(tmp_path / "model", hidden_size=256, head_dim=64, dtype=torch.bfloat16)
    mesh = join_world()
    policy = Policy(PolicyConfig(dtype="bfloat16"), folder, mesh)
    cfg = EngineConfig(max_model_len=128, gpu_memory_utilization=0.3)
    engine = RolloutEngine(cfg, folder, mesh, dtype="bfloat16")
    refit = Refit(RefitConfig(), policy.shards(), policy.parts(), engine, mesh, check=True)
    tokenizer = chat.load_tokenizer(folder)
    sampler = Sampler(engine, make_env("exact"), tokenizer, mesh, seed=0, tickets="auto", threads=1)
    prompts = Prompts([{"prompt": "x" * n, "answer": ""} for n in range(1, 9)], tokenizer, DataConfig(), seed=0)
    for _ in range(2):
        with engine.awake(refit, [policy.sleeper]):
            trajectories = sampler.collect(prompts, range(8), 4, Sampling(max_tokens=32, stop_token_ids=tuple(chat.stop_token_ids(tokenizer, folder))))
        batch = pack(trajectories, mesh.device)
        policy.annotate([[batch]], "old_logprobs")
        difference = ((batch.old_logprobs - batch.engine_logprobs).abs() * batch.mask).sum() / batch.mask.sum()
        assert difference < 0.03
    engine.close()


def test_grouped_experts_equal_one_at_a_time_in_float32():
    """Forward and gradients, with tokens of no expert, whose rows the kernel leaves unwritten."""
    device, results = torch.device("cuda"), []
    for dtype in (torch.bfloat16, torch.float32):
        module, hidden, indices, weights = mixture_inputs(dtype, device)
        inputs = (hidden, weights, module.gate_up_proj, module.down_proj)
        out = experts.mixture(module, hidden, indices, weights)
        results.append((out, *torch.autograd.grad(out.float().square().sum(), inputs)))
    for grouped, exact in zip(*results, strict=True):
        assert (grouped.float() - exact).abs().max() < 0.04 * exact.abs().max()
