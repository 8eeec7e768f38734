"""Low-rank adapters: on every mesh as in one process, merged as PEFT merges them."""

import pytest
import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

import tiny
from harness import ranks
from minirl.algo import losses
from minirl.checkpoint import export
from minirl.checkpoint.reading import saved_shapes
from minirl.checkpoint.state import Saver, load_checkpoint
from minirl.config.lora import LoraConfig
from minirl.config.policy import ParallelConfig, PolicyConfig
from minirl.config.rl import AlgoConfig
from minirl.config.shared import CheckpointConfig
from minirl.data.exchange import exchange
from minirl.model import lora
from minirl.policy import Policy
from test_gradients import batches_of, exact_norm, trajectories, worst


def whole(t):
    return (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().clone()


def two_steps(mesh, folder, sequence, targets):
    """Return second gradients, adapters and merged shards after two updates."""
    Qwen3RMSNorm.forward = exact_norm
    cfg = PolicyConfig(
        model=str(folder),
        dtype="float64",
        max_grad_norm=0.0,
        lora=LoraConfig(rank=4, alpha=8, targets=targets),
    )
    policy = Policy(cfg, folder, mesh, sequence_parallel=sequence)
    grads = {}
    take = policy.optimizer.step

    def keep_gradients():
        for name, p in policy.model.named_parameters():
            if p.requires_grad:
                grads[name] = whole(p.grad)
        take()

    policy.optimizer.step = keep_gradients
    for _ in range(2):
        own = trajectories()[mesh.rank :: mesh.world_size]
        (micros,) = exchange(own, mesh, 60) if mesh.world_size > 1 else [[[t] for t in own]]
        policy.update(batches_of(micros, policy, 0.7), losses.policy(AlgoConfig(), 20), lr=1e-2)
    shards = policy.shards()
    merged = lora.Merged(shards, policy.model, cfg.lora.scale)
    return {
        "grads": grads,
        "adapters": {n: whole(p) for n, p in policy.model.named_parameters() if lora.is_adapter(n)},
        "merged": {n: whole(merged[n]) for n in shards},
        "base": {n: whole(t) for n, t in shards.items()},
        "moments": len(policy.optimizer.parts[0].state),
    }


MESHES = {
    "dp2": (2, None, False),
    "tp2": (2, ParallelConfig(tensor=2), False),
    "tp2_sequence": (2, ParallelConfig(tensor=2, sequence=True), True),
    "dp2_tp2": (4, ParallelConfig(tensor=2), False),
    "cp2": (2, ParallelConfig(context=2), False),
    "ring2": (2, ParallelConfig(context=2, context_engine="ring"), False),
    "hsdp": (4, ParallelConfig(replicate=2), False),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.make(tmp_path_factory.mktemp("lora") / "m", "qwen3", dtype=torch.float64)


@pytest.fixture(scope="module")
def alone(folder):
    (one,) = ranks(1, two_steps, folder, False, ["all-linear"])
    return one


@pytest.mark.parametrize("name", MESHES)
def test_every_mesh_trains_adapters_as_one_process(name, folder, alone):
    world, parallel, sequence = MESHES[name]
    got = ranks(world, two_steps, folder, sequence, ["all-linear"], parallel=parallel)[0]
    for what in ("grads", "adapters", "merged"):
        assert got[what].keys() == alone[what].keys()
        assert worst(got[what], alone[what]) < 1e-10, what
    assert got["moments"] == len(got["adapters"])


def save_and_go_on(mesh, folder, run, resume):
    """Make two updates, with a checkpoint between them; or resume from it and make the second."""
    Qwen3RMSNorm.forward = exact_norm
    cfg = PolicyConfig(
        model=str(folder),
        dtype="float64",
        max_grad_norm=0.0,
        lora=LoraConfig(rank=4, alpha=8, modules_to_save=["model.norm.weight"]),
    )
    policy = Policy(cfg, folder, mesh)
    checkpoints = CheckpointConfig(every=1)

    def update():
        own = trajectories()[mesh.rank :: mesh.world_size]
        (micros,) = exchange(own, mesh, 60)
        policy.update(batches_of(micros, policy, 0.7), losses.policy(AlgoConfig(), 20), lr=1e-2)

    if resume:
        load_checkpoint(run / "checkpoints/step-1", policy)
    else:
        update()
        with Saver(run, checkpoints, policy) as saver:
            saver.save(1, {})
    update()
    export(policy, run / f"model{resume:d}")
    return {n: whole(p) for n, p in policy.model.named_parameters() if p.requires_grad}


def test_checkpoints_hold_adapters_and_move_between_meshes(tmp_path, folder):
    after = ranks(2, save_and_go_on, folder, tmp_path, False)[0]
    assert "model.norm.weight" in after
    again = ranks(2, save_and_go_on, folder, tmp_path, True)[0]
    assert all(torch.equal(after[n], again[n]) for n in after)
    parallel = ParallelConfig(tensor=2)
    other = ranks(2, save_and_go_on, folder, tmp_path, True, parallel=parallel)[0]
    assert worst(other, after) < 1e-12
    saved = saved_shapes(tmp_path / "checkpoints/step-1", "")
    assert {n for n in saved if not n.startswith("optimizer")} == set(after)
