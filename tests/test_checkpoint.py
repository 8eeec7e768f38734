"""A checkpoint moves between meshes bit by bit; an export is the model."""

import pytest
import tiny
import torch
from harness import ranks
from test_gradients import exact_norm, trajectories
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from minirl import checkpoint
from minirl.algo import losses
from minirl.config import AlgoConfig, ParallelConfig, PolicyConfig
from minirl.data.packing import exchange, pack
from minirl.policy import Policy


def whole(tree):
    """Nested dicts with every sharded tensor gathered."""
    if isinstance(tree, dict):
        return {k: whole(v) for k, v in tree.items()}
    if not torch.is_tensor(tree):
        return tree
    return (tree.full_tensor() if isinstance(tree, DTensor) else tree).clone()  # on one rank it is the live parameter itself


def differences(a, b, path=""):
    if isinstance(a, dict):
        return [d for k in a.keys() | b.keys() for d in (differences(a[k], b[k], f"{path}/{k}") if k in a and k in b else [f"{path}/{k} on one side"])]
    same = torch.equal(a, b) if torch.is_tensor(a) else a == b
    return [] if same else [path]


def update(policy, mesh):
    (micros,) = exchange(trajectories()[mesh.rank :: mesh.world_size], mesh, 200)
    return policy.step([pack(m, mesh.device, layout=policy.layout) for m in micros], losses.policy(AlgoConfig(), 20), lr=1e-3)["loss"]


def make(mesh, folder, sequence):
    LlamaRMSNorm.forward = exact_norm
    return Policy(PolicyConfig(dtype="float64"), folder, mesh, sequence_parallel=sequence)


def save(mesh, folder, run, sequence):
    policy = make(mesh, folder, sequence)
    for _ in range(2):
        update(policy, mesh)
    checkpoint.save(run, 2, policy, {"note": 7}, mesh, keep=1)
    checkpoint.export(policy, run / "exported", mesh, max_file_gb=1e-4)
    state = whole(checkpoint._state(policy))
    return state, policy.num_updates, update(policy, mesh)


def resume(mesh, folder, run, sequence):
    policy = make(mesh, folder, sequence)
    saved = checkpoint.load(checkpoint.find(run), policy, mesh)
    assert saved["progress"] == {"note": 7} and saved["step"] == 2
    state = whole(checkpoint._state(policy))
    return state, policy.num_updates, update(policy, mesh)


@pytest.mark.parametrize(("world", "parallel", "targets"), [
    (2, ParallelConfig(), [(1, ParallelConfig()), (4, ParallelConfig()), (4, ParallelConfig(tensor=2))]),
    (4, ParallelConfig(tensor=2, sequence=True), [(2, ParallelConfig()), (4, ParallelConfig(replicate=2)), (2, ParallelConfig(tensor=2))]),
])
def test_saved_on_one_mesh_resumed_on_another(tmp_path, world, parallel, targets):
    folder, run = tiny.make(tmp_path / "model", "llama", tied=world == 2, dtype=torch.float64), tmp_path / "run"
    state, num_updates, loss = ranks(world, save, folder, run, parallel.sequence, parallel=parallel)[0]
    for target_world, target in targets:
        resumed, resumed_updates, resumed_loss = ranks(target_world, resume, folder, run, target.sequence, parallel=target)[0]
        assert differences(state, resumed) == [] and resumed_updates == num_updates == 2
        assert resumed_loss == pytest.approx(loss, rel=1e-12)
    exported = run / "exported"
    assert len(list(exported.glob("*.safetensors"))) > 2  # written in parts, by ranks in turn
    model = AutoModelForCausalLM.from_pretrained(exported)
    assert AutoTokenizer.from_pretrained(exported).chat_template and model.dtype == torch.float64
    parameters = dict(model.named_parameters())
    assert parameters.keys() <= state["model"].keys()
    assert all(torch.equal(p, state["model"][n]) for n, p in parameters.items())
