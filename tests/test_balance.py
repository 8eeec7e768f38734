"""What keeps the experts of a mixture in balance, against plain formulas in one process."""

import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import (
    Qwen3MoeRMSNorm,
    Qwen3MoeTopKRouter,
    load_balancing_loss_func,
)

import tiny
from harness import ranks
from minirl.algo import losses
from minirl.base.errors import UserError
from minirl.batch.exchange import exchange
from minirl.config.policy import LoraConfig, ParallelConfig, PolicyConfig, RouterConfig
from minirl.config.rl import AlgoConfig, CriticConfig
from minirl.config.validate import validate_model
from minirl.model import build, checks
from minirl.train.policy import Policy
from test_gradients import batches_of, exact_norm, trajectories, worst
from test_routes import EXPERTS, TOP_K, exact_router

AUX, Z = 0.3, 0.2
MESHES = {
    "one": (1, ParallelConfig()),
    "dp 2": (2, ParallelConfig()),
    "tp 2": (2, ParallelConfig(tensor=2)),
    "cp 2": (2, ParallelConfig(context=2)),
}


def exact() -> None:
    Qwen3MoeRMSNorm.forward = exact_norm
    Qwen3MoeTopKRouter.forward = exact_router


def plain_logits(model, given) -> list[torch.Tensor]:
    """Of each layer's router at all tokens in the loss, [N, E], each sequence alone."""
    layers = [[] for _ in range(model.config.num_hidden_layers)]
    for t in given:
        tokens = torch.from_numpy(t.tokens[None, :-1].astype(np.int64))
        found = model(input_ids=tokens, output_router_logits=True).router_logits
        for layer, logits in zip(layers, found, strict=True):
            layer.append(logits[torch.from_numpy(t.sampled[1:])])
    return [torch.cat(parts) for parts in layers]


def plain_losses(logits: np.ndarray) -> tuple[float, float]:
    """The two losses of a layer, in numpy."""
    exponentials = np.exp(logits - logits.max(1, keepdims=True))
    p = exponentials / exponentials.sum(1, keepdims=True)
    chosen = np.argsort(-logits, axis=1)[:, :TOP_K]
    f = np.bincount(chosen.ravel(), minlength=EXPERTS) / len(logits)
    z = np.log(exponentials.sum(1)) + logits.max(1)
    return EXPERTS * float((f * p.mean(0)).sum()), float((z**2).mean())


def in_plain_torch(mesh, folder):
    """The gradient of the losses alone, by torch's own autograd, and their values."""
    exact()
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, experts_implementation="eager"
    )
    layers = plain_logits(model, trajectories())
    total = 0.0
    for logits in layers:
        p = logits.softmax(-1)
        counts = torch.bincount(logits.topk(TOP_K).indices.flatten(), minlength=EXPERTS).double()
        aux = EXPERTS * (counts / len(logits) * p.mean(0)).sum()
        z = logits.logsumexp(-1).square().mean()
        total = total + (AUX * aux + Z * z) / len(layers)
        (ours, _) = plain_losses(logits.detach().numpy())
        theirs = load_balancing_loss_func((logits,), EXPERTS, TOP_K).item()
        assert ours == pytest.approx(theirs, rel=1e-5) and aux.item() == pytest.approx(ours)
    total.backward()
    values = np.mean([plain_losses(logits.detach().numpy()) for logits in layers], axis=0)
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return grads, values


def update(mesh, folder, budget, checkpointing):
    """The same by `Policy.update`, with a loss of the policy that is 0."""
    exact()
    cfg = PolicyConfig(
        dtype="float64",
        activation_checkpointing=checkpointing,
        max_grad_norm=0.0,
        router=RouterConfig(aux_loss_coef=AUX, z_loss_coef=Z),
    )
    policy = Policy(cfg, folder, mesh, sequence_parallel=mesh.tensor.size() > 1)
    own = trajectories()[mesh.rank :: mesh.world_size]
    (micros,) = exchange(own, mesh, budget)
    batches = batches_of(micros, policy)
    for batch in batches:
        batch.advantages = torch.zeros_like(batch.advantages)
    grads = {}

    def keep_gradients():
        for name, p in policy.parameters().items():
            if p.grad is not None:
                grads[name] = p.grad.full_tensor().clone()

    policy.optimizer.step = keep_gradients
    loss = losses.policy(AlgoConfig(), 20)
    before = policy.measure(batches, loss)  # which counts nothing
    policy.annotate([batches], "old_logprobs")  # nor does this
    metrics = policy.update(batches, loss, lr=0.0)
    assert not any("router" in name for name in before)
    return grads, metrics, len(batches)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tiny.make(
        tmp_path_factory.mktemp("balance") / "model", "qwen3_moe", dtype=torch.float64
    )
    ((grads, values),) = ranks(1, in_plain_torch, folder)
    return folder, grads, values


@pytest.mark.parametrize("mesh", MESHES)
def test_losses_are_the_formulas_over_all_tokens_of_the_step(plain, mesh):
    folder, grads, (aux, z) = plain
    world, parallel = MESHES[mesh]
    checkpointing = "off" if mesh == "one" else "full"
    for found, metrics, num_micro in ranks(
        world, update, folder, 60 // parallel.context, checkpointing, parallel=parallel
    ):
        assert num_micro >= 3
        assert metrics["router_aux_loss"] == pytest.approx(aux, rel=1e-12)
        assert metrics["router_z_loss"] == pytest.approx(z, rel=1e-12)
        assert metrics["loss"] == 0
        reached = {name for name, grad in found.items() if grad.any()}
        assert any("gate" in name for name in reached) and len(reached) > 10
        # Names of plain experts and fused ones are the same in the library's model.
        assert reached <= grads.keys()
        expected = {name: grads[name] for name in reached}
        assert worst({name: found[name] for name in reached}, expected) < 1e-12
        beyond = [name for name, grad in grads.items() if grad.any() and name not in reached]
        assert not beyond


def test_a_single_mixture_is_counted_alike_on_two_ranks(tmp_path):
    """The loads of its experts are contiguous in the sums of a step, which stay this rank's."""
    folder = tiny.make(tmp_path / "model", "glm4_moe", dtype=torch.float64)
    ((_, alone, _),) = ranks(1, update, folder, 60, "off")
    for _, metrics, _ in ranks(2, update, folder, 60, "off"):
        for name in ("expert_load_max", "router_entropy", "router_aux_loss", "router_z_loss"):
            assert metrics[name] == pytest.approx(alone[name], rel=1e-6), name


def counted(mesh, folder, settings, family_steps=1):
    """Metrics of updates, biases before and behind, and the loads by hand."""
    policy = Policy(PolicyConfig(**settings), folder, mesh)
    (batch,) = batches_of([trajectories()], policy)
    biases = [{n: b.clone() for n, b in policy.shards().items() if n.endswith("correction_bias")}]
    loads = []
    count = policy.model.routing.count

    def counting(number, logits, experts, rows, *others):
        loads.append(torch.bincount(experts[rows].flatten(), minlength=EXPERTS))
        count(number, logits, experts, rows, *others)

    policy.model.routing.count = counting
    metrics = []
    for _ in range(family_steps):
        metrics.append(policy.update([batch], losses.policy(AlgoConfig(), 20), lr=0.0))
        found = policy.shards().items()
        biases.append({n: b.clone() for n, b in found if n.endswith("correction_bias")})
    return metrics, biases, torch.stack(loads), int(batch.loss_mask.sum())


@pytest.mark.parametrize("family", ["glm4_moe", "dots1", "minimax_m2"])
def test_biases_move_by_the_sign_of_the_load_once_a_step(tmp_path, family):
    """Also where layers are computed again in the backward."""
    folder = tiny.make(tmp_path / "model", family)
    settings = {
        "dtype": "float32",
        "activation_checkpointing": "full",
        "router": RouterConfig(bias_update_rate=0.01),
    }
    ((metrics, biases, loads, num_tokens),) = ranks(1, counted, folder, settings, 2)
    assert len(biases[0]) * 2 == len(loads)  # each layer once in each step
    assert (loads.sum(1) == TOP_K * num_tokens).all()
    for number in range(2):
        of_step = loads.view(2, -1, EXPERTS)[number]
        shares = of_step / of_step.sum(1, keepdim=True) * EXPERTS
        assert metrics[number]["expert_load_max"] == pytest.approx(shares.max().item())
        for name, load in zip(biases[0], of_step, strict=True):
            expected = biases[number][name] + 0.01 * torch.sign(load.double().mean() - load)
            assert torch.allclose(biases[number + 1][name], expected.float(), rtol=0, atol=1e-7)
            assert not torch.equal(biases[number + 1][name], biases[number][name])


@pytest.mark.parametrize("family", ["glm4_moe", "minimax_m2"])
def test_biases_of_frozen_routers_stay(tmp_path, family):
    folder = tiny.make(tmp_path / "model", family)
    router = RouterConfig(bias_update_rate=0.01)
    settings = {"dtype": "float32", "router": router, "freeze": ("*gate.weight",)}
    ((_, biases, *_),) = ranks(1, counted, folder, settings)
    assert biases[0] and all(torch.equal(biases[0][name], biases[1][name]) for name in biases[0])


def test_nothing_moves_where_all_is_off(tmp_path):
    folder = tiny.make(tmp_path / "model", "glm4_moe")
    settings = {"dtype": "float32", "activation_checkpointing": "off"}
    ((metrics, biases, *_),) = ranks(1, counted, folder, settings)
    assert all(torch.equal(biases[0][name], biases[1][name]) for name in biases[0])
    assert 0 < metrics[0]["router_entropy"] <= np.log(EXPERTS)
    assert 1 <= metrics[0]["expert_load_max"] <= EXPERTS / TOP_K
    assert not {"router_aux_loss", "router_z_loss", "router_replayed"} & metrics[0].keys()


def sigmoid_gradient(mesh, folder):
    """Of the losses of sigmoid routers by a difference quotient."""
    cfg = PolicyConfig(dtype="float64", router=RouterConfig(aux_loss_coef=AUX, z_loss_coef=Z))
    routing = Policy(cfg, folder, mesh).model.routing
    routing.begin_step(7, [], lambda batch: None)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(7, EXPERTS, dtype=torch.float64, generator=generator)
    rows = torch.arange(7)
    experts = logits.topk(TOP_K).indices
    num_layers = len(routing._biased)
    for number in range(num_layers):
        routing.count(number, logits, experts, rows, None, None)
    routing.share(mesh)
    f = torch.bincount(experts.flatten(), minlength=EXPERTS).double() / 7

    def value(x):
        s = x.sigmoid()
        p = (s / s.sum(1, keepdim=True)).mean(0)
        return (AUX * EXPERTS * (f * p).sum() + Z * x.logsumexp(1).square().mean()) / num_layers

    found = routing.gradient(0, logits, rows)
    for i in range(7):
        for j in range(EXPERTS):
            moved = F.one_hot(torch.tensor(i * EXPERTS + j), logits.numel()).view(7, -1) * 1e-6
            slope = (value(logits + moved) - value(logits - moved)) / 2e-6
            assert found[i, j].item() == pytest.approx(slope.item(), abs=1e-8)
    metrics = routing.finish(mesh)
    total = AUX * metrics["router_aux_loss"] + Z * metrics["router_z_loss"]
    assert total / num_layers == pytest.approx(value(logits).item())


def test_losses_of_sigmoid_routers(tmp_path):
    ranks(1, sigmoid_gradient, tiny.make(tmp_path / "model", "glm4_moe"))


@pytest.mark.parametrize(
    ("family", "settings", "words"),
    [
        ("qwen3", {"aux_loss_coef": 0.1}, "policy.router.aux_loss_coef = 0.1"),
        ("qwen3", {"z_loss_coef": 0.1}, "policy.router.z_loss_coef = 0.1"),
        ("qwen3_moe", {"bias_update_rate": 0.1}, "there is one in glm4_moe, dots1"),
    ],
)
def test_settings_that_a_model_has_no_routers_for_are_refused(tmp_path, family, settings, words):
    config = build.read_config(tiny.make(tmp_path / "model", family))
    with pytest.raises(UserError, match=words):
        checks.check_routers(config, PolicyConfig(router=RouterConfig(**settings)))
    critic = CriticConfig(router=RouterConfig(**settings))
    with pytest.raises(UserError, match=r"critic\.router"):
        checks.check_routers(config, critic)
    checks.check_routers(config, PolicyConfig())


def test_adapters_leave_biases_as_they_are():
    cfg = PolicyConfig(lora=LoraConfig(rank=4), router=RouterConfig(bias_update_rate=0.1))
    with pytest.raises(UserError, match="bias_update_rate = 0.1, .*moves weights of the base"):
        validate_model(cfg, "policy", 1)
    validate_model(dataclasses.replace(cfg, router=RouterConfig(aux_loss_coef=0.1)), "policy", 1)
