"""What only a CUDA device can show: `launch/test.sh -m gpu`. Skipped elsewhere."""

import numpy as np
import pytest
import torch

import tiny
from minirl.data.blocks import Layout
from minirl.data.packing import pack
from minirl.model import experts, kernels
from minirl.model.attention import Attention, attend, packed_attention
from minirl.model.kernels import Options
from minirl.parallel.mesh import Context
from minirl.types import Trajectory
from test_families import mixture_inputs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def siblings(seed=0):
    rng, out = np.random.default_rng(seed), []
    for group, num_prompt in enumerate((240, 40, 7)):
        prompt = rng.integers(5, 200, num_prompt)
        for _ in range(4):
            tokens = np.concatenate([prompt, rng.integers(5, 200, rng.integers(3, 60))]).astype(
                np.int32
            )
            out.append(
                Trajectory(
                    tokens=tokens,
                    sampled=np.arange(len(tokens)) >= num_prompt,
                    logprobs=np.zeros(len(tokens), np.float32),
                    group=group,
                )
            )
    return out


@pytest.mark.parametrize("window", [None, 24])
def test_flash_attention_over_shared_prompts_equals_the_formula_in_float32(window):
    device = torch.device("cuda")
    batch = pack(siblings(), device, layout=Layout(windowed=window is not None))
    torch.manual_seed(0)
    inputs = [torch.randn(1, heads, len(batch.inputs), 64, device=device) for heads in (8, 2, 2)]
    grad = torch.randn(1, len(batch.inputs), 8, 64, device=device)

    def run(dtype):  # float32 is what no kernel there takes
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        out, _ = packed_attention(
            torch.nn.Identity(), *leaves, None, pack=batch, scaling=0.125, sliding_window=window
        )
        return out, *torch.autograd.grad(out, leaves, grad.to(dtype))

    for flash, exact in zip(run(torch.bfloat16), run(torch.float32), strict=True):
        assert (flash.float() - exact).abs().max() < 0.02 * exact.abs().max()


@pytest.mark.parametrize("size", [2, 4])
def test_ring_emulated_on_one_device_equals_one_rank(size):
    """What every rank of a ring would compute, hop by hop, with keys handed over by indexing
    instead of a network."""
    device = torch.device("cuda")
    packs = [
        pack(siblings()[::4], device, layout=Layout(context=Context(None, rank, size, ring=True)))
        for rank in range(size)
    ]
    rows = len(packs[0].inputs)
    torch.manual_seed(0)
    shape = {"q": 8, "k": 2, "v": 2, "dout": 8}
    whole = {
        name: torch.randn(size * rows, heads, 64, device=device) for name, heads in shape.items()
    }  # rank by rank
    flash = {name: x.to(torch.bfloat16).split(rows) for name, x in whole.items()}
    options = Options(0.125)
    outs = []
    gradients = []  # of q, k and v, rank by rank
    for name in ("q", "k", "v"):
        gradients.append([torch.zeros_like(x, dtype=torch.float32) for x in flash[name]])
    for rank, batch in enumerate(packs):
        q = flash["q"][rank]
        own, earlier, later = batch.blocks
        hops = [(own, rank)]
        for hop in range(1, size):
            hops.append((earlier if hop <= rank else later, (rank - hop) % size))
        steps = ((block, flash["k"][source], flash["v"][source]) for block, source in hops)
        out, lse = attend(q, steps, options)
        for block, source in hops:
            into = [gradients[0][rank], gradients[1][source], gradients[2][source]]
            kernels.backward(
                into,
                flash["dout"][rank],
                q,
                flash["k"][source],
                flash["v"][source],
                out,
                lse,
                block,
                options,
            )
        outs.append(out)
    # the oracle in float32: gathered keys, one block, all ranks' rows
    leaves = [whole[name].clone().requires_grad_() for name in ("q", "k", "v")]
    gathered = [
        pack(
            siblings()[::4], device, layout=Layout(context=Context(None, rank, size), windowed=True)
        ).windowed_block
        for rank in range(size)
    ]
    exact = torch.cat(
        [
            Attention.apply(part, *leaves[1:], (block,), options, None)
            for part, block in zip(leaves[0].split(rows), gathered, strict=True)
        ]
    )
    wanted = torch.autograd.grad(exact, leaves, whole["dout"])
    for got, expected in zip(
        (torch.cat(outs), *(torch.cat(g) for g in gradients)), (exact, *wanted), strict=True
    ):
        assert (got.float() - expected).abs().max() < 0.02 * expected.abs().max()


def test_sleep_refit_and_logprobs(tmp_path):
    """Engine asleep at level 2 between two refits: weights gone and written anew, log-probs still
    the trainer's."""
    from minirl.config.rl import RefitConfig
    from minirl.config.shared import (
        DataConfig,
        EngineConfig,
        EnvConfig,
        EvaluateConfig,
        PolicyConfig,
        RewardConfig,
    )
    from minirl.data import chat
    from minirl.data.prompts import Prompts
    from minirl.envs.registry import make_env
    from minirl.parallel.mesh import join_world
    from minirl.policy import Policy
    from minirl.rewards.functions import make_rewards
    from minirl.rollout.engine import RolloutEngine, Sampling
    from minirl.rollout.refit import Refit
    from minirl.rollout.sampler import Sampler

    folder = tiny.make(tmp_path / "model", hidden_size=256, head_dim=64, dtype=torch.bfloat16)
    mesh = join_world()
    policy = Policy(PolicyConfig(dtype="bfloat16"), folder, mesh)
    cfg = EngineConfig(max_model_len=128, gpu_memory_utilization=0.3)
    engine = RolloutEngine(cfg, folder, mesh, dtype="bfloat16")
    refit = Refit(RefitConfig(), policy.shards(), policy.parts(), engine, check=True)
    tokenizer = chat.load_tokenizer(folder)
    prompts = Prompts(
        [{"prompt": "x" * n, "answer": ""} for n in range(1, 9)], tokenizer, DataConfig(), seed=0
    )
    sampler = Sampler(
        engine,
        make_env("single_turn"),
        make_rewards(RewardConfig(function="exact")),
        prompts,
        EvaluateConfig(engine=engine.cfg, env=EnvConfig(max_tokens=32)),
    )
    for _ in range(2):
        with engine.awake(refit, policy.sleeper):
            trajectories = sampler.collect(
                prompts,
                range(8),
                4,
                Sampling(
                    max_tokens=32, stop_token_ids=tuple(chat.stop_token_ids(tokenizer, folder))
                ),
            )
        batch = pack(trajectories, mesh.device)
        policy.annotate([[batch]], "old_logprobs")
        difference = (
            (batch.old_logprobs - batch.engine_logprobs).abs() * batch.loss_mask
        ).sum() / batch.loss_mask.sum()
        assert difference < 0.03
    engine.close()


@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": "muon"},
        {"optimizer_state": "offload"},
        {"optimizer_state": "8bit"},
        {"cpu_offload": True},
        {"cpu_offload": True, "optimizer": "muon", "optimizer_state": "8bit"},
    ],
    ids=str,
)
def test_state_at_rest_sleep_and_offload_train_alike(tmp_path, settings):
    """Three steps with everything asleep between them, against the same optimizer on the device and
    awake."""
    from minirl import checkpoint
    from minirl.algo import losses
    from minirl.config.shared import CheckpointConfig, PolicyConfig
    from minirl.parallel.mesh import join_world, make_mesh
    from minirl.policy import Policy

    folder = tiny.make(tmp_path / "model", hidden_size=256, head_dim=64)
    device = torch.device("cuda", 0)
    mesh = make_mesh(device) if torch.distributed.is_initialized() else join_world()
    tokens = np.random.default_rng(0).integers(5, 200, 100).astype(np.int32)
    batch = pack(
        [
            Trajectory(
                tokens=tokens,
                sampled=np.arange(100) >= 10,
                logprobs=np.zeros(100, np.float32),
                group=0,
            )
        ],
        device,
    )
    history = []
    for given in ({"optimizer": settings.get("optimizer", "adamw")}, settings):
        policy = Policy(PolicyConfig(dtype="float32", ema_decay=0.9, **given), folder, mesh)
        history.append([])
        for _ in range(3):
            history[-1].append(policy.update([batch], losses.sft(), lr=1e-3)["loss"])
            if given is settings:
                policy.sleeper.sleep_optimizer()
                policy.sleeper.sleep_parameters()
                policy.sleeper.wake_parameters()
        with checkpoint.Saver(tmp_path / str(len(history)), CheckpointConfig(), policy) as saver:
            saver.save(3, {})
        checkpoint.load_checkpoint(checkpoint.find(tmp_path / str(len(history))), policy)
        with policy.state_awake():
            checkpoint.export(policy, tmp_path / "ema", weights=policy.averages())
    assert history[0][2] < history[0][0] and history[1] == pytest.approx(history[0], rel=0.02)


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
