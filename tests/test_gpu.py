"""What only a CUDA device can show: `launch/test.sh -m gpu`.

Where there is none, the ordinary suite runs the same bodies on the CPU, so that they call what
there is. What CUDA alone has is left out then, or a stand-in (`DeviceMemory`).
"""

import contextlib
import functools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint
from vllm.device_allocator import cumem

import reweighted
import test_fused
import tiny
from benchmarks.dryrun import pretend
from harness import RankFailed, ranks
from in_memory import SeesAhead, with_images
from minirl.algo import losses
from minirl.base.errors import UserError
from minirl.base.log import Timer
from minirl.batch.attention_plan import RowLayout
from minirl.batch.packing import pack
from minirl.config.policy import LoraConfig, PolicyConfig
from minirl.config.rl import AlgoConfig
from minirl.config.shared import EngineConfig
from minirl.endpoint import open_endpoint
from minirl.engine import compat, patches
from minirl.engine.engine import RolloutEngine
from minirl.engine.start import memory_remedy
from minirl.model import attention, experts, flash, fused, selective
from minirl.model.attention import Attention, attend, packed_attention
from minirl.parallel.machines import arrange, join_world, make_world
from minirl.parallel.offload import Sleeper
from minirl.parallel.storage import HostMemory
from minirl.run.user_algorithms import check_loss
from minirl.train.frozen import Reference, copy_trained
from minirl.train.policy import Policy
from minirl.types.packed import Context, Options, Trajectory
from run_folders import newest_checkpoint
from test_families import mixture_inputs
from test_packing import groups

needs_flash2 = pytest.mark.skipif(
    torch.cuda.is_available() and flash.flash2() is None, reason="no flash-attn"
)
needs_liger = pytest.mark.skipif(
    not torch.cuda.is_available() or not fused.has_liger(), reason="no GPU or no liger-kernel"
)
CPU = pytest.param(
    "cpu",
    marks=pytest.mark.skipif(torch.cuda.is_available(), reason="a device runs the same"),
)
CUDA = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    ],
)


@pytest.fixture(params=[CPU, CUDA])
def device(request):
    return torch.device(request.param)


def on(device, body, *args):
    """What `body(mesh, *args)` returns: in a process of its own on the CPU, in this one on CUDA."""
    if device.type == "cpu":
        return ranks(1, body, *args)[0]
    return body(own_mesh(), *args)


def assert_close(got, wanted, share):
    """No element differs by more than this share of the largest."""
    for x, y in zip(tree_leaves(got), tree_leaves(wanted), strict=True):
        assert x.shape == y.shape
        assert (x.float() - y).abs().max() < share * y.abs().max()


def own_mesh():
    if torch.distributed.is_initialized():
        return arrange(make_world(torch.device("cuda", 0)))
    return join_world()


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


def attend_and_back(
    device, dtype, window=None, softcap=None, head_dim=64, sinks=False, images=False
):
    """The output of a layer and the gradients; in float32, which no kernel of CUDA takes, by the
    formula."""
    layout = RowLayout(windowed=window is not None, vision=SeesAhead() if images else None)
    batch = pack(with_images(siblings()) if images else siblings(), device, layout=layout)
    assert bool(batch.attention.images) == images
    torch.manual_seed(0)
    shapes = [(1, heads, len(batch.inputs), head_dim) for heads in (8, 2, 2)]
    leaves = [torch.randn(shape, device=device).to(dtype).requires_grad_() for shape in shapes]
    grad = torch.randn(1, len(batch.inputs), 8, head_dim, device=device).to(dtype)
    options = {"pack": batch, "scaling": 0.125, "sliding_window": window, "softcap": softcap}
    q, k, v = leaves
    if sinks:
        options["s_aux"] = torch.randn(8, device=device).add(2).to(dtype).requires_grad_()
        leaves.append(options["s_aux"])
    out, _ = packed_attention(torch.nn.Identity(), q, k, v, None, **options)
    gradients = torch.autograd.grad(out, leaves, grad)
    by_formula = any("padded" in vars(block) for block in batch.attention.blocks)
    assert by_formula == (dtype == torch.float32 or device.type == "cpu") or window
    return out, *gradients


@pytest.mark.parametrize("window", [None, 24])
def test_flash_attention_over_shared_prompts_equals_the_formula_in_float32(device, window):
    """On Hopper that is FlashAttention-3, if it is installed."""
    exact = attend_and_back(device, torch.float32, window)
    assert_close(attend_and_back(device, torch.bfloat16, window), exact, 0.02)


@pytest.mark.parametrize("window", [None, 24])
def test_attention_sinks_equal_the_formula_in_float32(device, window):
    exact = attend_and_back(device, torch.float32, window, sinks=True)
    assert_close(attend_and_back(device, torch.bfloat16, window, sinks=True), exact, 0.02)


@pytest.mark.parametrize("window", [None, 24])
def test_images_whose_tokens_see_later_ones_equal_the_formula_in_float32(device, window):
    exact = attend_and_back(device, torch.float32, window, images=True)
    assert_close(attend_and_back(device, torch.bfloat16, window, images=True), exact, 0.02)


@needs_flash2
@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize("window", [None, 24])
def test_softcaps_by_flash_attn_equal_the_formula_in_float32(device, window, head_dim):
    exact = attend_and_back(device, torch.float32, window, 2.0, head_dim)
    assert_close(attend_and_back(device, torch.bfloat16, window, 2.0, head_dim), exact, 0.02)


@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize("softcap", [None, pytest.param(2.0, marks=needs_flash2)])
def test_deterministic_gradients_are_the_same_each_time(device, softcap, head_dim):
    torch.use_deterministic_algorithms(True)
    try:
        first = attend_and_back(device, torch.bfloat16, None, softcap, head_dim)
        for _ in range(5):
            again = attend_and_back(device, torch.bfloat16, None, softcap, head_dim)
            assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("context", [Context(None, 0, 2, ring=True), Context(None, 1, 2)])
def test_pairs_of_one_query_equal_the_formula_in_float32(device, context):
    """Where FlashAttention-2 has a path for decoding (`flash._lengths`)."""
    blocks = pack(
        groups([(2, [2]), (1, [3])]), device, layout=RowLayout(context=context)
    ).attention.blocks
    singles = [b for b in blocks if b.longest[0] == 1 and not b.causal]
    assert singles
    torch.manual_seed(0)
    for block in singles:
        inputs = [torch.randn(20, heads, 64, device=device) for heads in (8, 2, 2)]
        dout, out, lse = (torch.randn(20, 8, *rest, device=device) for rest in ((64,), (64,), ()))

        def run(dtype, block=block, inputs=inputs, whole=(dout, out, lse)):
            q, k, v = (x.to(dtype) for x in inputs)
            gradients = [torch.zeros_like(x) for x in inputs]
            results = attention.block_forward(q, k, v, block, Options(0.125))
            dout, out = (x.to(dtype) for x in whole[:2])
            attention.block_backward(gradients, dout, q, k, v, out, whole[2], block, Options(0.125))
            return results, gradients

        assert attention.can_flash(inputs[0].bfloat16(), Options(0.125)) == (device.type == "cuda")
        assert_close(run(torch.bfloat16), run(torch.float32), 0.02)


@pytest.mark.parametrize("size", [2, 4])
def test_ring_emulated_on_one_device_equals_one_rank(device, size):
    """What every rank of a ring would compute, hop by hop, with keys handed over by indexing
    instead of a network."""
    packs = [
        pack(
            siblings()[::4], device, layout=RowLayout(context=Context(None, rank, size, ring=True))
        )
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
        own, earlier, later = batch.attention.blocks
        hops = [(own, rank)]
        for hop in range(1, size):
            hops.append((earlier if hop <= rank else later, (rank - hop) % size))
        steps = ((block, flash["k"][source], flash["v"][source]) for block, source in hops)
        out, lse = attend(q, steps, options)
        for block, source in hops:
            into = [gradients[0][rank], gradients[1][source], gradients[2][source]]
            attention.block_backward(
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
            siblings()[::4],
            device,
            layout=RowLayout(context=Context(None, rank, size), windowed=True),
        ).attention.windowed
        for rank in range(size)
    ]
    exact = torch.cat(
        [
            Attention.apply(part, *leaves[1:], None, (block,), options, None)
            for part, block in zip(leaves[0].split(rows), gathered, strict=True)
        ]
    )
    wanted = torch.autograd.grad(exact, leaves, whole["dout"])
    for got, expected in zip(
        (torch.cat(outs), *(torch.cat(g) for g in gradients)), (exact, *wanted), strict=True
    ):
        assert (got.float() - expected).abs().max() < 0.02 * expected.abs().max()


def refit_and_sample(mesh, folder):
    """The mean difference of log-probs of two rollouts, and GiB while the engine sleeps."""
    from minirl.config.rl import RefitConfig
    from minirl.config.shared import (
        DataConfig,
        EnvConfig,
        EvaluateConfig,
        RewardConfig,
    )
    from minirl.data.prompts import Prompts
    from minirl.data.tokenizer import load_tokenizer, stop_token_ids
    from minirl.engine.engine import Sampling
    from minirl.envs.registry import make_env
    from minirl.refit.refit import Refit
    from minirl.rewards.loading import make_rewards
    from minirl.rollout.sampler import Sampler

    policy = Policy(PolicyConfig(dtype="bfloat16"), folder, mesh)
    on_cpu = mesh.device.type == "cpu"
    cfg = EngineConfig(
        max_model_len=128,
        gpu_memory_utilization=0.3,
        kv_cache_gb=0.05 if on_cpu else 0.0,
    )
    timer = Timer(mesh.device)
    engine = RolloutEngine(cfg, folder, mesh, dtype="bfloat16", timer=timer)
    assert timer.unmapped_bytes == engine.unmapped_bytes
    refit = Refit(RefitConfig(), policy.shards(), policy.parts(), engine, check=True)
    tokenizer = load_tokenizer(folder)
    prompts = Prompts(
        [{"prompt": "x" * n, "answer": ""} for n in range(1, 9)], tokenizer, DataConfig(), seed=0
    )
    sampler = Sampler(
        engine,
        make_env("single_turn"),
        make_rewards(RewardConfig(function="exact")),
        prompts,
        EvaluateConfig(engine=engine.cfg, env=EnvConfig(max_tokens=32)),
        open_endpoint,
    )
    stop = tuple(stop_token_ids(tokenizer, folder))
    differences = []
    for sleeps in ("cache", "all"):
        with engine.awake(refit, policy.sleeper):
            trajectories = sampler.collect(
                prompts, range(8), 4, Sampling(max_tokens=32, stop_token_ids=stop)
            )
            if not on_cpu:  # Where nothing sleeps.
                engine.sleeps = sleeps
                policy.sleeper.active = sleeps == "all"
        batch = pack(trajectories, mesh.device)
        with timer.phase("asleep"):
            policy.annotate([[batch]], "old_logprobs")
        difference = ((batch.old_logprobs - batch.engine_logprobs).abs() * batch.loss_mask).sum()
        differences.append((difference / batch.loss_mask.sum()).item())
    memory = timer.take_memory()
    engine.close()
    return differences, memory


def test_sleep_refit_and_logprobs(device, tmp_path):
    """Engine asleep between two refits: what sleeps is gone and written anew, log-probs still the
    trainer's; and its memory is not counted then."""
    sizes = {"hidden_size": 256, "head_dim": 64} if device.type == "cuda" else {}
    folder = tiny.make(tmp_path / "model", dtype=torch.bfloat16, **sizes)
    differences, memory = on(device, refit_and_sample, folder)
    assert 0 < max(differences) < 0.03
    if device.type == "cuda":
        total = torch.cuda.mem_get_info()[1] / 2**30
        assert 0 < memory["asleep_allocated"] < memory["asleep_reserved"] < 0.1 * total
        assert 0.2 * total < memory["sleep_wake_reserved"] < total


@pytest.mark.parametrize("device", [CUDA], indirect=True)
def test_weights_change_under_running_answers(device, tmp_path):
    """vLLM schedules ahead on CUDA: the steps on their way are the old weights'."""
    sizes = {"hidden_size": 256, "head_dim": 64, "tied": False}
    folders = [
        tiny.make(tmp_path / str(n), dtype=torch.bfloat16, seed=n, **sizes) for n in range(2)
    ]
    found = on(device, reweighted.differences, folders, 5, False, "bfloat16")
    assert found.mean() < 0.03
    found = on(device, reweighted.differences, folders, 5, True, "bfloat16")
    assert found.mean() > 0.03


def three_steps_each(mesh, folder, settings):
    """Losses of the optimizer alone, awake, and of `settings`, with all asleep between steps."""
    from minirl.checkpoint import exporting
    from minirl.checkpoint.state import Saver, load_checkpoint
    from minirl.config.shared import CheckpointConfig

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
        mesh.device,
    )
    history = []
    for given in ({"optimizer": settings.get("optimizer", "adamw")}, settings):
        policy = Policy(PolicyConfig(dtype="float32", ema_decay=0.9, **given), folder, mesh)
        policy.sleeper.active = True  # As it is on CUDA.
        history.append([])
        for _ in range(3):
            history[-1].append(policy.update([batch], losses.sft(), lr=1e-3)["loss"])
            if given is settings:
                policy.sleeper.sleep_optimizer()
                policy.sleeper.sleep_parameters()
                policy.sleeper.wake_parameters()
        run = folder.parent / str(len(history))
        with Saver(run, CheckpointConfig(), policy) as saver:
            saver.save(3, {})
        load_checkpoint(newest_checkpoint(run), policy)
        with policy.state_awake():
            exporting.export(policy, folder.parent / "ema", weights=policy.averages())
    return history


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
def test_state_at_rest_sleep_and_offload_train_alike(device, tmp_path, settings):
    """Three steps with everything asleep between them, against the same optimizer on the device and
    awake."""
    sizes = {"hidden_size": 256, "head_dim": 64} if device.type == "cuda" else {}
    folder = tiny.make(tmp_path / "model", **sizes)
    history = on(device, three_steps_each, folder, settings)
    assert history[0][2] < history[0][0] and history[1] == pytest.approx(history[0], rel=0.02)


def reference_log_probs(mesh, folder):
    """Those of the adapters that a policy began with; its weights on the device, or on the host."""
    found = []
    for on_host in (False, True):
        cfg = PolicyConfig(dtype="float32", cpu_offload=on_host, lora=LoraConfig(rank=4))
        policy = Policy(cfg, folder, mesh)
        reference = Reference(policy, None, copy_trained(policy))
        batches = [pack(siblings(seed), mesh.device) for seed in range(8)]
        policy.update(batches, losses.sft(), lr=0.1)
        policy.annotate([batches], "old_logprobs")
        reference.annotate([batches])
        found.append([torch.stack([b.old_logprobs, b.ref_logprobs]).cpu() for b in batches])
    return found


def test_a_reference_of_adapters_is_the_same_with_weights_on_the_host(device, tmp_path):
    """The host writes weights that the device copies from it."""
    sizes = {"hidden_size": 1024, "head_dim": 64} if device.type == "cuda" else {}
    folder = tiny.make(tmp_path / "model", **sizes)
    on_device, on_host = on(device, reference_log_probs, folder)
    for expected, got in zip(on_device, on_host, strict=True):
        assert (expected[0] - expected[1]).abs().max() > 0.1
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("place", "fails"),
    [
        ("device=logprobs.device", False),
        pytest.param('device="cpu"', True, marks=CUDA.marks),
    ],
)
def test_a_user_s_loss_is_tried_where_steps_run(tmp_path, place, fails):
    file = tmp_path / "own.py"
    file.write_text(
        "import torch\n"
        "def loss(batch, logprobs, entropy, cfg):\n"
        f"    factor = torch.full((len(logprobs),), 0.5, {place})\n"
        "    return -factor * batch.advantages * logprobs, {}\n"
    )
    told = pytest.raises(UserError, match="same device") if fails else contextlib.nullcontext()
    with told:
        check_loss(AlgoConfig(loss=f"{file}:loss"))


@pytest.mark.parametrize("like_gpt_oss", [False, True])
def test_grouped_experts_equal_one_at_a_time_in_float32(device, like_gpt_oss):
    """Forward and gradients, with tokens of no expert, whose rows the kernel leaves unwritten."""
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        module, hidden, indices, weights = mixture_inputs(dtype, device, like_gpt_oss)
        inputs = (hidden, weights, *module.parameters())
        out = experts.mixture(module, hidden, indices, weights)
        results.append((out, *torch.autograd.grad(out.float().square().sum(), inputs)))
    for grouped, exact in zip(*results, strict=True):
        assert (grouped.float() - exact).abs().max() < 0.04 * exact.abs().max()


# --------------------------------------------------------------------------------------------------
# fused kernels


def fused_inputs(device, name):
    """(function, formula, inputs in bfloat16, other arguments) of one of liger's kernels."""
    torch.manual_seed(0)
    if name == "rotation":
        angles = torch.randn(1, 70, 32, device=device).repeat(1, 1, 2)
        query, key = (torch.randn(1, 70, heads, 64, device=device) for heads in (8, 2))
        inputs = [query.transpose(1, 2), key.transpose(1, 2)]  # as the library lays them out
        return fused.liger().rotate, fused.rotate_formula, inputs, (angles.cos(), angles.sin())
    kind, shapes, rest = test_fused.CASES[name]
    inputs = [torch.randn((*shape[:-1], 384), device=device) for shape in shapes]
    return getattr(fused.liger(), kind), getattr(fused.FORMULAS, kind), inputs, rest


@needs_liger
@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("name", [*test_fused.CASES, "rotation"])
def test_liger_kernels_equal_the_formulas_in_float32(device, name, twice):
    """Selective checkpointing computes them a second time in backward."""
    function, formula, inputs, rest = fused_inputs(device, name)
    inputs = [x.bfloat16() for x in inputs]
    rest = tree_map(lambda x: x.bfloat16() if isinstance(x, torch.Tensor) else x, rest)
    exact_rest = tree_map(lambda x: x.float() if isinstance(x, torch.Tensor) else x, rest)
    leaves = [x.float().requires_grad_() for x in inputs]
    exact = tree_leaves(formula(*leaves, *exact_rest))
    directions = [torch.randn_like(x).bfloat16() for x in exact]
    wanted = torch.autograd.grad(exact, leaves, [x.float() for x in directions])

    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    # From a product and into one, as in a model: a gate's backward writes over its inputs.
    if twice:
        call = functools.partial(checkpoint, use_reentrant=False, context_fn=selective.contexts)
        outs = tree_leaves(call(lambda *x: function(*(t * 1 for t in x), *rest), *leaves))
    else:
        outs = tree_leaves(function(*(x * 1 for x in leaves), *rest))
    assert all(x.dtype == torch.bfloat16 for x in outs)
    assert_close(outs, exact, 0.02)
    assert_close(torch.autograd.grad(outs, leaves, directions), wanted, 0.03)


def three_steps_by(mesh, folder, kernels, checkpointing):
    """Losses with kernels of the library or of liger."""
    from minirl.algo import losses

    cfg = PolicyConfig(kernels=kernels, activation_checkpointing=checkpointing)
    policy = Policy(cfg, folder, mesh)
    batch = pack(siblings(), mesh.device, layout=policy.layout)
    return [policy.update([batch], losses.sft(), lr=1e-3)["loss"] for _ in range(3)]


@needs_liger
@pytest.mark.parametrize("checkpointing", ["off", "selective", "full"])
@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_a_model_trains_alike_by_liger_and_by_the_library(device, tmp_path, family, checkpointing):
    folder = tiny.make(tmp_path / "model", family)
    history = [
        on(device, three_steps_by, folder, kernels, checkpointing) for kernels in ("torch", "liger")
    ]
    assert history[0][2] < history[0][0] and history[1] == pytest.approx(history[0], rel=0.02)


# --------------------------------------------------------------------------------------------------
# the head's kernels


@pytest.fixture(scope="module", params=[CPU, CUDA])
def head_found(request):
    """What head_kernels.py finds, by Triton's interpreter on the CPU."""
    if request.param == "cuda":
        import head_kernels

        return head_kernels.all_cases(torch.device("cuda"))
    file = Path(__file__).with_name("head_kernels.py")
    environment = dict(os.environ, TRITON_INTERPRET="1", PYTHONPATH=str(file.parent.parent))
    done = subprocess.run(
        [sys.executable, str(file)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_heads_kernels_are_the_formulas(head_found):
    assert len(head_found["cases"]) == 16
    for name, differences in head_found["cases"].items():
        limit = 0.01 if "bfloat16" in name else 1e-3
        if name == "the largest is the target":
            # Where p is almost 1, the gradient is what float32 leaves of 1 - p, for logits of
            # thousands: an H100 finds 2e-3.
            limit = 4e-3
        assert differences["logprob"] < 1e-5, name
        assert differences["entropy"] < 1e-5, name
        assert differences["hidden"] < limit, name
        assert differences["weight"] < limit, name


def test_the_heads_kernels_have_the_columns_of_their_rank(head_found):
    assert head_found["over_ranks"] < 1e-4


def test_the_heads_kernels_pass_on_what_is_not_finite(head_found):
    assert head_found["not_finite"]


# --------------------------------------------------------------------------------------------------
# memory and time


def stored(tensors):
    """Bytes of tensors' storages."""
    return sum(t.untyped_storage().nbytes() for t in tensors)


def allocated(device, tensors):
    """Bytes that these tensors and others have on CUDA; on the CPU these alone."""
    if device.type == "cpu":
        return stored(tensors)
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated(device)


def test_host_memory_is_pinned_and_gives_back_what_it_got(device):
    memory = HostMemory()
    tensors = [torch.randn(size, device=device) for size in (3, 2**20 + 5, 77)]
    tensors.append(torch.arange(9, device=device, dtype=torch.uint8))
    wanted = [t.clone() for t in tensors]
    for _ in range(2):
        before = allocated(device, tensors)
        for name, t in enumerate(tensors):
            memory.keep(name, t)
        num_bytes = memory.num_bytes
        if device.type == "cuda":
            torch.cuda.synchronize()
        for t in tensors:
            t.untyped_storage().resize_(0)
        assert allocated(device, tensors) <= before - 4 * 2**20
        for name, t in enumerate(tensors):
            memory.bring_back(name, t)
        assert allocated(device, tensors) == before
        assert all(torch.equal(x, y) for x, y in zip(tensors, wanted, strict=True))
    assert memory.num_bytes == num_bytes  # The second time it makes none.
    assert all(chunk.is_pinned() == (device.type == "cuda") for chunk in memory._chunks)


def test_what_sleeps_leaves_the_device(device):
    size = 2048 if device.type == "cuda" else 512
    model = torch.nn.Linear(size, size, device=device)
    state = [torch.randn(size, size, device=device)]
    tensors = [*model.parameters(), *state]
    view = model.weight.view(-1)
    wanted = model.weight.detach().clone(), state[0].clone()
    sleeper = Sleeper(model, set(), lambda: state)
    sleeper.active = True  # As it is on CUDA.
    awake = allocated(device, tensors)
    sleeper.sleep()
    assert allocated(device, tensors) <= awake - 2 * size * size * 4
    on_host = sleeper._state.memory.num_bytes + sleeper._parameters.memory.num_bytes
    assert on_host >= 2 * size * size * 4
    sleeper.wake_parameters()
    sleeper.wake_optimizer()
    sleeper.wake_optimizer()  # which is awake
    assert torch.equal(model.weight, wanted[0]) and torch.equal(state[0], wanted[1])
    assert torch.equal(view, wanted[0].view(-1))


def keep_busy(device, tenths):
    """Give the device work for some tenths of a second, about; the CPU's are hundredths."""
    if device.type == "cpu":
        time.sleep(0.01 * tenths)
    else:
        torch.cuda._sleep(200_000_000 * tenths)


def test_the_timer_counts_the_device_without_waiting_for_it(device):
    timer = Timer(device)
    if device.type == "cuda":
        torch.cuda._sleep(1000)
        torch.cuda.synchronize()
    began = time.perf_counter()
    with timer.phase("outer"):
        keep_busy(device, 1)
        with timer.phase("inner"):
            keep_busy(device, 3)
    on_host = time.perf_counter() - began
    seconds = timer.take()
    if device.type == "cuda":
        assert seconds["inner"] == pytest.approx(3 * seconds["outer"], rel=0.2)
        assert on_host < 0.2 * seconds["outer"]
    else:
        assert seconds["inner"] >= 0.03 and seconds["outer"] >= 0.01
        assert sum(seconds.values()) <= on_host
    assert timer.take().keys() <= {"outer", "inner"} and not sum(timer.take().values())


class DeviceMemory:
    """Stands in for torch's counters of a device of 80 GiB. What is freed stays reserved."""

    def __init__(self, monkeypatch):
        self.used = self.peak = self.reserved = 0
        monkeypatch.setattr(torch.cuda, "Event", pretend.Event)
        functions = {
            "synchronize": lambda: None,
            "memory_allocated": lambda: self.used,
            "max_memory_allocated": lambda: self.peak,
            "max_memory_reserved": lambda: self.reserved,
            "mem_get_info": lambda: (80 * 2**30 - self.reserved, 80 * 2**30),
            "reset_peak_memory_stats": self.reset,
        }
        for name, function in functions.items():
            monkeypatch.setattr(torch.cuda, name, lambda device=None, call=function: call())

    def reset(self):
        self.peak = self.used

    def take(self, num_bytes):
        """Allocate, or free what is negative."""
        self.used += num_bytes
        self.peak = max(self.peak, self.used)
        self.reserved = max(self.reserved, self.used)


@pytest.fixture
def take(device, monkeypatch):
    """take(bytes): allocate on the device, and free it."""
    if device.type == "cuda":
        return lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    memory = DeviceMemory(monkeypatch)
    memory.take(12345)

    def take_and_free(num_bytes):
        memory.take(num_bytes)
        memory.take(-num_bytes)

    return take_and_free


def test_the_memory_of_each_phase_is_noted(take):
    timer = Timer(torch.device("cuda"))
    start = torch.cuda.memory_allocated()
    gib = 2**30
    with timer.phase("large"):
        take(gib)
    with timer.phase("small"):
        take(gib // 4)
    timer.note_device("now")
    memory = timer.take_memory()
    assert memory["large_allocated"] == pytest.approx(start / gib + 1, abs=0.01)
    assert memory["small_allocated"] == pytest.approx(start / gib + 0.25, abs=0.01)
    assert memory["large_reserved"] >= memory["large_allocated"]
    assert memory["now"] >= memory["small_reserved"]
    assert timer.take_memory() == {}


class SleepingLLM:
    """Stands in for vLLM on a device: the records of its memory are vLLM's own."""

    def __init__(self, monkeypatch, sizes):
        self.blocks = {
            tag: cumem.AllocationData((0, size, number, 0), tag)
            for number, (tag, size) in enumerate(sizes.items())
        }
        allocator = SimpleNamespace(pointer_to_data=self.blocks)
        monkeypatch.setattr(cumem.CuMemAllocator, "get_instance", lambda: allocator)

    def sleep(self, level):
        for block in self.blocks.values():
            block.is_asleep = True

    def wake_up(self, tags):
        for tag in tags:
            self.blocks[tag].is_asleep = False

    def collective_rpc(self, name, args):
        """What a worker is asked for directly."""
        if name == "wake_up":
            self.wake_up(*args)
        else:
            assert name == "discard"
            for tag in args[0]:
                self.blocks[tag].is_asleep = True

    def reset_prefix_cache(self):
        return True


def engine_of(llm, timer):
    """An engine on a device that is not there."""
    engine = object.__new__(RolloutEngine)
    engine.llm = llm
    llm.llm_engine = SimpleNamespace(model_executor=llm)
    engine.timer = timer
    engine.on_cuda = True
    engine.vision = None
    engine.cfg = EngineConfig()
    engine.sleeps = "all"
    engine.mesh = SimpleNamespace(barrier=lambda: None)
    engine.latent = {}
    engine._asleep = ()
    timer.unmapped_bytes = engine.unmapped_bytes
    return engine


# What is asleep of the engine while the trainer works, and of the trainer while the engine works.
ASLEEP = {
    "none": ([], []),
    "cache": (["kv_cache"], []),
    "engine": (["weights", "kv_cache"], []),
    "all": (["weights", "kv_cache"], ["parameters", "state"]),
}


@pytest.mark.parametrize("is_old", [False, True])
@pytest.mark.parametrize("sleeps", ASLEEP)
def test_what_sleeps_in_each_mode(device, monkeypatch, sleeps, is_old):
    """Twice: also what woke sleeps again. What stays makes torch free nothing that it keeps."""
    DeviceMemory(monkeypatch)
    emptied = []
    barriers = []
    unmapped = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(1))
    monkeypatch.setattr(compat, "is_old", lambda: is_old)
    monkeypatch.setattr(cumem, "unmap_and_release", unmapped.append)
    llm = SleepingLLM(monkeypatch, {"weights": 3 * 2**30, "kv_cache": 60 * 2**30})
    engine = engine_of(llm, Timer(torch.device("cpu")))
    engine.sleeps = sleeps
    engine.mesh = SimpleNamespace(barrier=lambda: barriers.append(1))
    model = torch.nn.Linear(3, 5, bias=False, device=device)
    state = torch.randn(7, device=device)
    sleeper = Sleeper(model, set(), lambda: [state], active=sleeps == "all")
    sleeper.active = sleeps == "all"  # As it is on CUDA.
    wanted = [t.detach().clone() for t in (model.weight, state)]

    def asleep():
        of_engine = [tag for tag, block in llm.blocks.items() if block.is_asleep]
        tensors = {"parameters": model.weight, "state": state}
        return of_engine, [name for name, t in tensors.items() if not stored([t])]

    of_engine, of_trainer = ASLEEP[sleeps]
    for number in range(2):
        with engine.awake(lambda: None, sleeper):
            assert asleep() == ([], of_trainer)
        assert asleep() == (of_engine, [name for name in of_trainer if name == "state"])
        assert engine.unmapped_bytes() == sum(llm.blocks[tag].handle[1] for tag in of_engine)
        # A first engine is awake already.
        assert len(barriers) == number * bool(of_engine)
        assert bool(emptied) == (sleeps == "all")
        sleeper.wake_optimizer()
        assert all(torch.equal(t, w) for t, w in zip((model.weight, state), wanted, strict=True))
    assert len(unmapped) == 2 * (sleeps == "cache" and is_old)


def test_what_torch_keeps_of_the_trainer_goes_where_the_cache_needs_it(monkeypatch):
    memory = DeviceMemory(monkeypatch)
    emptied = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(1))
    monkeypatch.setattr(compat, "is_old", lambda: False)
    llm = SleepingLLM(monkeypatch, {"weights": 3 * 2**30, "kv_cache": 20 * 2**30})
    engine = engine_of(llm, Timer(torch.device("cpu")))
    engine.sleeps = "cache"
    sleeper = Sleeper(torch.nn.Linear(3, 5), set(), list, active=False)
    for reserved, times in ((50, 0), (70, 1)):  # GiB of 80.
        engine.sleep()
        memory.reserved = reserved * 2**30
        with engine.awake(lambda: None, sleeper):
            assert len(emptied) == times


def test_memory_that_a_sleeping_engine_has_given_back_is_not_counted(monkeypatch):
    """torch's counters go on counting it. The engine has weights of 3 GiB and a cache of 60, the
    trainer 10, and 25 more in forward: together more than the device has."""
    gib = 2**30
    memory = DeviceMemory(monkeypatch)
    timer = Timer(torch.device("cuda"))
    engine = engine_of(SleepingLLM(monkeypatch, {"weights": 3 * gib, "kv_cache": 60 * gib}), timer)
    sleeper = SimpleNamespace(
        sleep_optimizer=lambda: None,
        sleep_base=lambda: None,
        sleep_parameters=lambda: memory.take(-10 * gib),
        wake_parameters=lambda: memory.take(10 * gib),
    )
    memory.take(73 * gib)
    for _ in range(2):
        timer.take_memory()
        with engine.awake(lambda: None, sleeper), timer.phase("rollout"):
            pass
        with timer.phase("forward"):
            memory.take(25 * gib)
            memory.take(-25 * gib)
    found = timer.take_memory()
    allocated = {name: gib for name, gib in found.items() if name.endswith("_allocated")}
    assert allocated == {
        "sleep_wake_allocated": 63,
        "refit_allocated": 13,
        "rollout_allocated": 63,
        "forward_allocated": 35,
    }
    assert found["forward_reserved"] == 35


def test_a_sleep_in_which_others_take_memory_is_a_message(monkeypatch):
    llm = SleepingLLM(monkeypatch, {})
    DeviceMemory(monkeypatch)
    engine = engine_of(llm, Timer(torch.device("cuda")))
    said = {
        "Memory usage increased after sleeping.": UserError,
        "a bug of vLLM": AssertionError,
    }
    for text, kind in said.items():

        def sleep(level, text=text):
            raise AssertionError(text)

        llm.sleep = sleep
        with pytest.raises(kind, match=text) as raised:
            engine.sleep()
        if kind is UserError:
            assert "Another process took or freed memory of this GPU meanwhile" in str(raised.value)


def start_and_fail(mesh, folder, text):
    """Start an engine whose vLLM asserts something."""
    import vllm

    def assert_it(**arguments):
        raise AssertionError(text)

    vllm.LLM = assert_it
    RolloutEngine(EngineConfig(), folder, mesh, dtype="float32")


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("Error in memory profiling. Initial free memory 70 GiB", "UserError"),
        ("a bug of vLLM", "AssertionError"),
    ],
)
def test_a_start_in_which_others_free_memory_is_a_message(tmp_path, text, kind):
    folder = tiny.make(tmp_path / "model")
    with pytest.raises(RankFailed) as failed:
        ranks(1, start_and_fail, folder, text)
    assert failed.value.kind == kind and text in failed.value.text
    assert ("Another process took or freed memory" in failed.value.text) == (kind == "UserError")


def test_a_cache_that_is_too_small_is_a_message():
    """vLLM's own words name gpu_memory_utilization, which has no effect where the size is given."""
    error = ValueError("3 GiB are needed, which is larger than the available KV cache memory (1)")
    assert memory_remedy(error).startswith(" Here raise engine.kv_cache_gb (on CUDA if it is set)")
    none = ValueError("No available memory for the cache blocks. Try increasing")
    assert memory_remedy(none) == memory_remedy(error)


def test_vllm_leaves_the_generators_as_they_are(device, monkeypatch):
    """It seeds them when it starts, with the same seed in every run."""
    generator = torch.Generator()
    if device.type == "cpu":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: generator.get_state())
        monkeypatch.setattr(
            torch.cuda, "set_rng_state", lambda state, device: generator.set_state(state)
        )
        monkeypatch.setattr(torch.cuda, "manual_seed_all", generator.manual_seed)
    torch.manual_seed(5)
    torch.cuda.manual_seed_all(5)
    before = torch.get_rng_state(), torch.cuda.get_rng_state(0)
    with patches.keep_process_state():
        torch.manual_seed(0)
        torch.cuda.manual_seed_all(0)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.equal(torch.cuda.get_rng_state(0), before[1])
