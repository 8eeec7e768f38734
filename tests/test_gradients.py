"""One optimizer step on several ranks is the step of one process: float64, real model files, uneven
everything."""

import numpy as np
import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import MistralRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

import tiny
from harness import ranks
from minirl.algo import advantages, losses, shaping
from minirl.batch import attention_plan
from minirl.batch.exchange import exchange
from minirl.batch.packing import pack
from minirl.config.policy import ParallelConfig, PolicyConfig
from minirl.config.rl import AlgoConfig, CorrectionConfig
from minirl.parallel import fsdp
from minirl.train.policy import Policy
from minirl.types.packed import Trajectory
from sharded import whole


def trajectories(num: int = 14) -> list[Trajectory]:
    """Groups of two; in every second group they share a prompt of another length."""
    rng = np.random.default_rng(3)
    out = []
    for i in range(num):
        length = int(rng.integers(12, 40))
        num_prompt = 1 + i // 2 if i // 2 % 2 else int(rng.integers(1, length))
        sampled = np.arange(length) >= num_prompt
        tokens = rng.integers(5, 250, length).astype(np.int32)
        if i // 2 % 2:
            tokens[:num_prompt] = i // 2 + np.arange(num_prompt)
        out.append(
            Trajectory(
                tokens=tokens,
                sampled=sampled,
                group=i // 2,
                episode=i % 2,
                logprobs=(rng.normal(-3, 0.3, length) * sampled).astype(np.float32),
                turn_rewards=(rng.normal(size=length) * sampled).astype(np.float32),
            )
        )
    return out


def batches_of(micros, policy, temperature=1.0):
    """Packed, with what `trajectories` has for rewards of tokens as advantages."""
    batches = [pack(m, policy.mesh.device, temperature, layout=policy.layout) for m in micros]
    for b in batches:
        b.advantages = b.turn_rewards
    return batches


def rows_of_micro(data_size: int) -> int:
    """Return the rows of a micro-batch of which every rank with data has two to four."""
    return max(60, 120 // data_size)


def exact_norm(self, x):
    """Llama's norm rounds to float32 inside, even in a float64 model; a difference of 1e-16 in
    front of it can flip that rounding."""
    return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))


def step(mesh, folder, algo, budget, checkpointing, reshard, sequence=False):
    attention_plan.SHORT_PROMPT = 2  # most of the shared prompts here are a block of their own
    for norm in (LlamaRMSNorm, MistralRMSNorm, Qwen2RMSNorm, Qwen3RMSNorm):
        norm.forward = exact_norm
    cfg = PolicyConfig(
        model=str(folder),
        dtype="float64",
        activation_checkpointing="full" if checkpointing else "off",
        reshard_after_forward=reshard,
        max_grad_norm=0.0,
    )
    policy = Policy(cfg, folder, mesh, sequence_parallel=sequence)
    grads = {}

    def keep_gradients():
        grads.update(whole({n: p.grad for n, p in policy.shards().items()}))

    policy.optimizer.step = keep_gradients
    own = trajectories()[mesh.rank :: mesh.world_size]
    if mesh.world_size == 2:
        own = trajectories()[: 3 + 11 * mesh.rank][3 * mesh.rank :]
    micros = [[t] for t in own]  # the oracle: each sequence alone, nothing shared
    if budget:
        (micros,) = exchange(own, mesh, budget)
    batches = batches_of(micros, policy, 0.7)
    metrics = policy.update(batches, losses.policy(algo, 20), lr=1e-3)
    return {"grads": grads, "metrics": metrics, "num_micro": len(batches)}


def worst(a: dict, b: dict) -> float:
    return max(((a[n] - b[n]).abs().max() / b[n].abs().max().clamp(min=1e-30)).item() for n in b)


@pytest.mark.parametrize(
    ("world", "budget", "checkpointing", "reshard", "aggregation", "tied"),
    [
        (2, 60, False, True, "token", True),
        (4, 40, True, False, "fixed", False),
        (1, 100, False, True, "sequence", True),
    ],
)
def test_step_equals_one_process(
    tmp_path, world, budget, checkpointing, reshard, aggregation, tied
):
    folder = tiny.make(tmp_path / "model", "llama", tied=tied, dtype=torch.float64)
    algo = AlgoConfig(aggregation=aggregation, entropy_coef=0.01)
    (expected,) = ranks(1, step, folder, algo, 0, False, True)
    results = ranks(world, step, folder, algo, budget, checkpointing, reshard)
    assert results[0]["num_micro"] >= 3
    for result in results:
        assert worst(result["grads"], expected["grads"]) < 1e-12
        for name in ("loss", "grad_norm", "entropy", "mismatch", "mismatch_max"):
            assert result["metrics"][name] == pytest.approx(expected["metrics"][name], rel=1e-11)


# --------------------------------------------------------------------------------------------------
# every mesh

MESHES = {
    "dp 2": (2, ParallelConfig()),
    "tp 2": (2, ParallelConfig(tensor=2)),
    "tp 4": (4, ParallelConfig(tensor=4)),  # more ranks than key-value heads
    "cp 2, all-gather": (2, ParallelConfig(context=2)),
    "cp 2, ring": (2, ParallelConfig(context=2, context_engine="ring")),
    "cp 4, all-gather": (4, ParallelConfig(context=4)),
    "cp 4, ring": (4, ParallelConfig(context=4, context_engine="ring")),
    "dp 2 x tp 2": (4, ParallelConfig(tensor=2)),
    "dp 2 x cp 2": (4, ParallelConfig(context=2)),
    "cp 2 x tp 2": (4, ParallelConfig(context=2, tensor=2)),
    "hsdp 2 x 2": (4, ParallelConfig(replicate=2)),
    "hsdp 2 x cp 2, ring": (4, ParallelConfig(replicate=2, context=2, context_engine="ring")),
    "hsdp 2 x 2 x tp 2": (8, ParallelConfig(replicate=2, tensor=2)),
    "hsdp 2 x cp 2 x tp 2": (8, ParallelConfig(replicate=2, context=2, tensor=2)),
    # The ring with tensor parallelism, and all three axes; with all_gather, each two of them.
    "dp 2 x cp 2 x tp 2, ring": (8, ParallelConfig(context=2, context_engine="ring", tensor=2)),
}
MODELS = {  # name: family, tied
    "qwen2, untied": ("qwen2", False),  # has biases
    "qwen3, tied": ("qwen3", True),  # has query and key norms
    "mistral, window": ("mistral", False),
}
CASES = [  # model, checkpointing, sequence parallelism: each of the two is on and off
    ("qwen2, untied", True, True),
    ("qwen3, tied", True, False),
    ("mistral, window", False, True),
]
# Without tensor parallelism there is no sequence parallelism.
WITHOUT_TENSOR = [
    ("qwen2, untied", False, False),
    ("qwen3, tied", True, False),
    ("mistral, window", False, False),
]


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """Folder of each model, and the step of one process that runs each sequence alone."""
    folders = {
        name: tiny.make(
            tmp_path_factory.mktemp("models") / family, family, tied=tied, dtype=torch.float64
        )
        for name, (family, tied) in MODELS.items()
    }
    (values,) = ranks(1, steps, [(folder, 0, False, False) for folder in folders.values()])
    return dict(zip(MODELS, zip(folders.values(), values, strict=True), strict=True))


def steps(mesh, cases):
    return [
        step(
            mesh,
            folder,
            AlgoConfig(aggregation="sequence", entropy_coef=0.01),
            budget,
            checkpointing,
            True,
            sequence,
        )
        for folder, budget, checkpointing, sequence in cases
    ]


@pytest.mark.parametrize("mesh", MESHES)
def test_every_mesh_is_one_process(expected, mesh):
    """With sequence parallelism on and off, checkpointing on and off, at least 2 accumulation
    steps. Two ranks train every model, more ranks one of them, in turn."""
    world, parallel = MESHES[mesh]
    data_size = world // (parallel.tensor * parallel.context)
    chosen = CASES if parallel.tensor > 1 else WITHOUT_TENSOR
    if world > 2:
        turn = list(MESHES).index(mesh) % len(chosen)
        chosen = chosen[turn : turn + 1]
    budget = rows_of_micro(data_size) // parallel.context
    names = [name for name, *_ in chosen]
    cases = [(expected[name][0], budget, *options) for name, *options in chosen]
    for results in ranks(world, steps, cases, parallel=parallel):
        for name, result in zip(names, results, strict=True):
            wanted = expected[name][1]
            assert result["num_micro"] >= 2
            assert worst(result["grads"], wanted["grads"]) < 1e-12
            for metric in ("loss", "grad_norm", "entropy", "mismatch", "mismatch_max"):
                assert result["metrics"][metric] == pytest.approx(
                    wanted["metrics"][metric], rel=1e-11
                )


# --------------------------------------------------------------------------------------------------
# what is kept between micro-batches


def whole_gradients(model) -> int:
    """Return the number of elements of the gradients that this rank keeps whole."""
    num = 0
    for module in model.modules():
        group = (
            module._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None
        )
        for p in group.fsdp_params if group else ():
            gathered = getattr(p, "_unsharded_param", None)
            for kept in (p.unsharded_accumulated_grad, getattr(gathered, "grad", None)):
                num += 0 if kept is None else fsdp.local(kept).numel()
    return num


def accumulate(mesh, folder, mode):
    """One step; also what is kept whole before the last micro-batch."""
    LlamaRMSNorm.forward = exact_norm
    cfg = PolicyConfig(dtype="float64", max_grad_norm=0.0, accumulate=mode)
    policy = Policy(cfg, folder, mesh)
    grads = {}

    def keep_gradients():
        grads.update(whole({n: p.grad for n, p in policy.shards().items()}))

    kept = []
    synchronise = policy.model.set_requires_all_reduce

    def note_what_is_kept(is_last):
        kept.append(whole_gradients(policy.model))
        synchronise(is_last)

    policy.optimizer.step = keep_gradients
    policy.model.set_requires_all_reduce = note_what_is_kept
    own = trajectories()[mesh.rank :: mesh.world_size]
    micros = [[t] for t in own]
    if mesh.world_size > 1:
        (micros,) = exchange(own, mesh, max(40, 80 // mesh.data_size) // mesh.context_size)
    policy.update(batches_of(micros, policy), losses.policy(AlgoConfig(), 20), lr=1e-3)
    num_parameters = sum(p.numel() for p in policy.model.parameters())
    return {"grads": grads, "kept": kept, "num_parameters": num_parameters}


def accumulate_by_modes(mesh, folder, modes):
    return {mode: accumulate(mesh, folder, mode) for mode in modes}


@pytest.fixture(scope="module")
def accumulated(tmp_path_factory):
    """Folder of a model, and the gradients of one process."""
    folder = tmp_path_factory.mktemp("accumulated") / "model"
    tiny.make(folder, "llama", dtype=torch.float64)
    (found,) = ranks(1, accumulate, folder, "whole")
    return folder, found["grads"]


@pytest.mark.parametrize(
    ("mesh", "modes"),
    [
        ("dp 2", ("sharded", "whole", "auto")),
        ("cp 2, ring", ("sharded", "whole")),
        ("hsdp 2 x 2 x tp 2", ("sharded", "whole")),
    ],
)
def test_gradients_reduced_after_every_micro_batch_are_those_reduced_once(accumulated, mesh, modes):
    folder, expected = accumulated
    world, parallel = MESHES[mesh]
    for results in ranks(world, accumulate_by_modes, folder, modes, parallel=parallel):
        for mode, result in results.items():
            assert len(result["kept"]) >= 3
            assert worst(result["grads"], expected) < 1e-12
            if mode == "sharded":
                assert result["kept"] == [0] * len(result["kept"])
            else:  # as much as there is; this model is far below the size that auto shards
                assert result["kept"][-1] >= result["num_parameters"] // parallel.tensor


# --------------------------------------------------------------------------------------------------
# three steps of GRPO


def recorded(num_step: int) -> list[list[Trajectory]]:
    """Groups of four answers with their rewards, as a rollout would leave them; groups are whole on
    a rank."""
    rng = np.random.default_rng([7, num_step])
    groups = []
    for group in range(8):
        prompt = rng.integers(5, 250, rng.integers(1, 20))
        groups.append([])
        for episode in range(4):
            tokens = np.concatenate([prompt, rng.integers(5, 250, rng.integers(2, 25))]).astype(
                np.int32
            )
            sampled = np.arange(len(tokens)) >= len(prompt)
            groups[-1].append(
                Trajectory(
                    tokens=tokens,
                    sampled=sampled,
                    group=group,
                    episode=episode,
                    reward=float(rng.integers(0, 2)),
                    logprobs=(rng.normal(-5, 0.3, len(tokens)) * sampled).astype(np.float32),
                )
            )
    return groups


def grpo(mesh, folder, sequence):
    """The verbs of rl.py's loop from where the rollout ends: advantages, exchange, pack, reference,
    two updates a step."""
    for norm in (LlamaRMSNorm, Qwen3RMSNorm):
        norm.forward = exact_norm
    algo = AlgoConfig(kl_coef=0.1, updates_per_step=2, clip_high=0.28)
    policy, ref = (
        Policy(
            PolicyConfig(dtype="float64", max_grad_norm=0.05),
            folder,
            mesh,
            trainable=trainable,
            sequence_parallel=sequence,
        )
        for trainable in (True, False)
    )
    history = []
    for num_step in range(3):
        own = [t for group in recorded(num_step)[mesh.rank :: mesh.world_size] for t in group]
        minibatches = [
            [pack(m, mesh.device, 0.9, layout=policy.layout) for m in micros]
            for micros in exchange(own, mesh, 120, algo.updates_per_step)
        ]
        policy.annotate(minibatches, "old_logprobs")
        ref.annotate(minibatches, "ref_logprobs")
        advantages.assign(
            [b for m in minibatches for b in m],
            advantages.find("grpo"),
            algo,
            dtype=policy.output_dtype,
            sum_over_ranks=mesh.data_sums,
            max_over_ranks=mesh.maxima,
            gather_rows=mesh.gather_rows,
        )
        history += [
            policy.update(minibatch, losses.policy(algo, 30), lr=1e-3) for minibatch in minibatches
        ]
    return history, whole(policy.shards())


def test_three_steps_of_grpo_from_recorded_trajectories(tmp_path):
    folder = tiny.make(tmp_path / "model", "qwen3", tied=True, dtype=torch.float64)
    ((history, params),) = ranks(1, grpo, folder, False)
    assert (
        history[1]["clip_fraction"] > 0 and history[1]["ref_kl"] > 0
    )  # clipping and reference play a part
    for world, parallel in (
        (2, ParallelConfig(context=2)),
        (4, ParallelConfig(tensor=2, sequence=True)),
    ):
        for got, got_params in ranks(world, grpo, folder, parallel.sequence, parallel=parallel):
            assert worst(got_params, params) < 1e-10
            for step_, wanted in zip(got, history, strict=True):
                for name in ("loss", "grad_norm", "ref_kl", "entropy", "clip_fraction"):
                    assert step_[name] == pytest.approx(wanted[name], rel=1e-10, abs=1e-14)


# --------------------------------------------------------------------------------------------------
# the other methods

METHODS = {
    "gspo, sequence mean": AlgoConfig(
        loss="gspo", aggregation="sequence", clip_low=0.004, clip_high=0.005
    ),
    "cispo, prompt mean": AlgoConfig(
        loss="cispo",
        aggregation="prompt",
        clip_low=1.0,
        clip_high=0.02,
        entropy_coef=0.01,
        entropy_share=0.3,
    ),
    "reinforce++, KL in the reward": AlgoConfig(
        advantage="reinforce_pp", gamma=0.95, kl_coef=0.2, kl_in="reward", kl_estimator="k1"
    ),
    "rloo, KL in the reward, dppo": AlgoConfig(
        advantage="rloo",
        kl_coef=0.2,
        kl_in="reward",
        kl_estimator="k3",
        aggregation="fixed",
        correction=CorrectionConfig(preset="dppo-tv", divergence=0.001),
    ),
    "distillation, dropped sequences": AlgoConfig(
        advantage="on_policy_distill",
        correction=CorrectionConfig(preset="seq-mask-tis", low=0.85, high=1.15),
    ),
    "unbiased KL, prompt mean": AlgoConfig(
        kl_coef=0.2,
        kl_estimator="unbiased",
        aggregation="prompt",
        correction=CorrectionConfig(level="sequence", mode="clip", low=0.5),
    ),
}


def method_gradients(mesh, folder, budget):
    """Gradients and loss of each method where policy, old policy, reference and engine all differ,
    in ways that depend on the token alone."""
    LlamaRMSNorm.forward = exact_norm
    policy = Policy(PolicyConfig(dtype="float64", max_grad_norm=0.0), folder, mesh)
    out = {}
    for name, algo in METHODS.items():
        own = [t for group in recorded(0)[mesh.rank :: mesh.world_size] for t in group]
        (micros,) = exchange(own, mesh, budget)
        batches = [pack(m, mesh.device, layout=policy.layout) for m in micros]
        policy.annotate([batches], "old_logprobs")
        for b in batches:
            b.ref_logprobs = b.old_logprobs + 0.3 * torch.cos(b.targets.double()) * b.loss_mask
            b.old_logprobs = b.old_logprobs + 0.05 * torch.sin(b.targets.double()) * b.loss_mask
            b.engine_logprobs = (
                b.old_logprobs + 0.8 * torch.sin(3 * b.targets.double()) * b.loss_mask
            )
        advantages.assign(
            batches,
            advantages.find(algo.advantage),
            algo,
            dtype=policy.output_dtype,
            sum_over_ranks=mesh.data_sums,
            max_over_ranks=mesh.maxima,
            gather_rows=mesh.gather_rows,
        )
        if algo.entropy_share:
            shaping.mark_high_entropy(batches, algo.entropy_share, mesh.sums)
        grads = {}
        # Nothing is changed, so that the next method finds the same weights.
        policy.optimizer.step = lambda grads=grads: grads.update(
            whole({n: p.grad for n, p in policy.shards().items()})
        )
        metrics = policy.update(batches, losses.policy(algo, 30), lr=0.0)
        out[name] = {"grads": grads, "metrics": metrics, "num_micro": len(batches)}
    return out


def test_every_method_has_the_gradient_of_one_process(tmp_path):
    folder = tiny.make(tmp_path / "model", "llama", dtype=torch.float64)
    (expected,) = ranks(1, method_gradients, folder, 10000)
    for name in METHODS:
        assert expected[name]["num_micro"] == 1 and expected[name]["metrics"]["grad_norm"] > 0
    for name in ("distillation, dropped sequences", "rloo, KL in the reward, dppo"):
        assert 0 < expected[name]["metrics"]["correction_outside"] < 1
    assert 0 < expected["gspo, sequence mean"]["metrics"]["clip_fraction"] < 1
    for world, parallel, budget in (
        (1, ParallelConfig(), 120),
        (2, ParallelConfig(), 60),
        (2, ParallelConfig(context=2, context_engine="ring"), 60),
    ):
        for result in ranks(world, method_gradients, folder, budget, parallel=parallel):
            for name, wanted in expected.items():
                assert result[name]["num_micro"] >= 3
                assert worst(result[name]["grads"], wanted["grads"]) < 1e-12, (parallel, name)
                for metric in (
                    "loss",
                    "grad_norm",
                    "clip_fraction",
                    "correction_outside",
                    "correction_weight",
                ):
                    assert result[name]["metrics"][metric] == pytest.approx(
                        wanted["metrics"][metric], rel=1e-10, abs=1e-13
                    ), (parallel, name)
