"""Reward models and DPO: losses are their formulas, every mesh is one process, exports score alike, programs resume and learn."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
import tiny
import torch
from harness import RankFailed, ranks
from programs import ROOT, fork, torchrun
from test_gradients import exact_norm, worst
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from minirl import checkpoint, sft
from minirl.algo import preference
from minirl.config import DPOLossConfig, PairsConfig, ParallelConfig, PolicyConfig, RewardModelLossConfig
from minirl.data import chat
from minirl.data.packing import exchange, pack, unpack
from minirl.data.pairs import Pairs, load_pairs
from minirl.model.scratch import make_tokenizer
from minirl.policy import Policy
from minirl.types import Layout, Trajectory, UserError

# ---------------------------------------------------------------------------------------------------- formulas


def log_sigmoid(x):
    return -np.log1p(np.exp(-x))


def value_and_gradient(function, *inputs):
    """Of the sum over pairs, by the tensor function; float64."""
    leaves = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in inputs]
    out = function(*leaves)
    return out.detach().numpy(), [g.numpy() for g in torch.autograd.grad(out.sum(), leaves)]


def by_difference(function, *inputs, h=1e-5):
    """The same by the numpy formula; its gradient by central differences of fourth order."""
    grads = []
    for i, x in enumerate(inputs):
        def at(d, i=i, x=x):
            return function(*inputs[:i], x + d, *inputs[i + 1 :])
        grads.append((8 * (at(h) - at(-h)) - (at(2 * h) - at(-2 * h))) / (12 * h))
    return function(*inputs), grads


def same(tensors, arrays):
    np.testing.assert_allclose(tensors[0], arrays[0], rtol=1e-12, atol=1e-12)
    for got, wanted in zip(tensors[1], arrays[1], strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-9, atol=1e-10)


def random(*shape, seed=0, scale=2.0):
    return np.random.default_rng(seed).normal(size=shape) * scale


def test_reward_model_losses_are_their_formulas():
    chosen, rejected, margins = random(3, 40)
    for loss, center in (("sigmoid", 0.0), ("sigmoid", 0.1), ("logexp", 0.0), ("logexp", 0.3)):
        cfg = RewardModelLossConfig(loss=loss, center_coef=center)
        def formula(c, r, loss=loss, center=center):
            first = -log_sigmoid(c - r - margins) if loss == "sigmoid" else np.log(1 + np.exp(r - c))
            return first + center * (c + r) ** 2
        same(value_and_gradient(lambda c, r, cfg=cfg: preference.reward_pair(c, r, torch.tensor(margins), cfg), chosen, rejected),
             by_difference(formula, chosen, rejected))
    far = preference.reward_pair(torch.tensor([-800.0, 800.0]), torch.tensor([800.0, -800.0]), torch.zeros(2), RewardModelLossConfig(loss="logexp"))
    assert far.tolist() == [1600.0, 0.0]  # stable


@pytest.mark.parametrize(("loss", "smoothing"), [("sigmoid", 0.0), ("sigmoid", 0.2), ("ipo", 0.0), ("hinge", 0.0)])
def test_dpo_losses_are_their_formulas(loss, smoothing):
    z, beta = random(40, scale=4.0), 0.3
    formula = {"sigmoid": lambda z: -(1 - smoothing) * log_sigmoid(beta * z) - smoothing * log_sigmoid(-beta * z),
               "ipo": lambda z: (z - 1 / (2 * beta)) ** 2, "hinge": lambda z: np.maximum(0, 1 - beta * z)}[loss]
    cfg = DPOLossConfig(loss=loss, beta=beta, label_smoothing=smoothing)
    same(value_and_gradient(lambda z: preference.dpo_pair(z, cfg), z), by_difference(formula, z))


def pairs_of(num: int, *, score: bool) -> list[Trajectory]:
    """Ragged pairs, as `Pairs.examples` makes them; prompts of one token to 20."""
    rng, out = np.random.default_rng(5), []
    for group in range(num):
        prompt = rng.integers(5, 250, 1 + group * 3 % 20)
        for episode in range(2):
            tokens = np.concatenate([prompt, rng.integers(5, 250, rng.integers(1, 15) + score)]).astype(np.int32)
            out.append(Trajectory(tokens=tokens, sampled=np.arange(len(tokens)) >= len(prompt), logprobs=np.zeros(len(tokens), np.float32), group=group,
                                  episode=episode, reward=0.0 if episode else group / 7))
    return out


@pytest.mark.parametrize("normalized", [False, True])
def test_dpo_of_a_packed_batch_is_the_formula_on_its_sequences(normalized):
    rows = pairs_of(5, score=False)
    batch = pack(rows, torch.device("cpu"), pairs=True)
    num = len(batch.inputs)
    logprobs, ref = random(num, seed=1) * batch.mask.numpy(), random(num, seed=2) * batch.mask.numpy()
    batch.ref_logprobs = torch.tensor(ref)
    cfg = DPOLossConfig(beta=0.2, nll_coef=0.5, length_normalized=normalized)
    leaf = torch.tensor(logprobs, requires_grad=True)
    loss, metrics = preference.dpo(cfg).token_loss(batch, leaf, None)
    policy, reference = ([v.sum() / (len(v) if normalized else 1) for v in (u[t.sampled] for u, t in zip(unpack(torch.tensor(x), rows, Layout()), rows, strict=True))]
                         for x in (logprobs, ref))
    mean = [v[t.sampled].mean() for v, t in zip(unpack(torch.tensor(logprobs), rows, Layout()), rows, strict=True)]
    z = np.array([policy[i] - reference[i] - policy[i + 1] + reference[i + 1] for i in range(0, 10, 2)])
    np.testing.assert_allclose(loss.detach().numpy(), -log_sigmoid(0.2 * z) - 0.5 * np.array(mean[::2]), atol=1e-12)
    np.testing.assert_allclose(metrics["margin"].numpy(), 0.2 * z, atol=1e-12)
    loss.sum().backward()
    slope = -0.2 * (1 - 1 / (1 + np.exp(-0.2 * z)))  # d loss / d z of a pair
    for i, (t, got) in enumerate(zip(rows, unpack(leaf.grad, rows, Layout()), strict=True)):
        length = t.sampled.sum()
        wanted = slope[i // 2] * (1 - 2 * (i % 2)) / (length if normalized else 1) - (0 if i % 2 else 0.5 / length)
        np.testing.assert_allclose(got, wanted * t.sampled, atol=1e-12)


# ---------------------------------------------------------------------------------------------------- every mesh


def step(mesh, folder, budget, sequence, score):
    Qwen3RMSNorm.forward = exact_norm
    cfg = PolicyConfig(dtype="float64", max_grad_norm=0.0)
    policy = Policy(cfg, folder, mesh, score=score, sequence_parallel=sequence)
    if score:  # it starts at 0, which gives the body no gradient
        with torch.no_grad():
            for p in (p for n, p in policy.shards().items() if n == "score.weight"):
                assert not p.full_tensor().any()
                whole = torch.linspace(-1, 1, p.numel(), dtype=p.dtype).reshape(p.shape)
                p.copy_(torch.distributed.tensor.distribute_tensor(whole, p.device_mesh, p.placements))
        loss = preference.reward_model(RewardModelLossConfig(center_coef=0.1))
    else:
        ref = Policy(cfg, folder.parent / "ref", mesh, trainable=False, sequence_parallel=sequence)
        loss = preference.dpo(DPOLossConfig(nll_coef=0.3, length_normalized=True, beta=2.0))
    grads, take = {}, policy.optimizer.step
    policy.optimizer.step = lambda: (grads.update({n: p.grad.full_tensor() for n, p in policy.shards().items()}), take())
    rows = pairs_of(9, score=score)
    own = rows[: 3 + 15 * mesh.rank][3 * mesh.rank :] if mesh.world_size == 2 else rows[mesh.rank :: mesh.world_size]
    if budget:
        (micros,) = exchange(own, mesh, budget, whole_groups=True)
    else:
        micros = [rows[i : i + 2] for i in range(0, len(rows), 2)]
    batches = [pack(m, mesh.device, layout=policy.layout, pairs=True) for m in micros]
    if not budget:  # the oracle: a pair at a time, and nothing shared
        for batch, m in zip(batches, micros, strict=True):
            batch.__dict__.update(vars(pack_apart(m, mesh.device)))
    if not score:
        ref.annotate([batches], "ref_logprobs")
    measured = policy.measure(batches, loss)
    metrics = policy.step(batches, loss, lr=1e-3)
    assert all(measured[name] == metrics[name] for name in measured)
    return {"grads": grads, "metrics": metrics, "micros": [[(t.group, t.episode) for t in m] for m in micros]}


def pack_apart(pair, device):
    from minirl.data import packing
    share = packing._sequences
    packing._sequences = lambda rows, share: [packing._Sequence(t, 0, len(t.tokens) - 1) for t in rows]
    try:
        return pack(pair, device, pairs=True)
    finally:
        packing._sequences = share


MESHES = {"dp 2": (2, ParallelConfig(), False), "tp 2": (2, ParallelConfig(tensor=2), False), "tp 2, sequence": (2, ParallelConfig(tensor=2, sequence=True), True),
          "cp 2": (2, ParallelConfig(context=2), False), "cp 2, ring": (2, ParallelConfig(context=2, context_engine="ring"), False),
          "hsdp 2 x cp 2": (4, ParallelConfig(replicate=2, context=2), False)}


@pytest.fixture(scope="module", params=[True, False], ids=["reward model", "DPO"])
def one_process(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    tiny.make(folder / "ref", dtype=torch.float64, seed=1)
    tiny.make(folder / "model", dtype=torch.float64, tied=True)
    (wanted,) = ranks(1, step, folder / "model", 0, False, request.param)
    return folder / "model", request.param, wanted


@pytest.mark.parametrize("mesh", MESHES)
def test_every_mesh_is_one_process(one_process, mesh):
    folder, score, wanted = one_process
    world, parallel, sequence = MESHES[mesh]
    results = ranks(world, step, folder, 80 // parallel.context, sequence, score, parallel=parallel)
    for result in results:
        assert len(result["micros"]) >= 2 and wanted["metrics"]["grad_norm"] > 0
        for micro in result["micros"]:  # pairs are whole
            assert len(micro) % 2 == 0 and sorted(micro) == sorted((g, e) for g in {g for g, _ in micro} for e in range(2))
        assert worst(result["grads"], wanted["grads"]) < 1e-12
        for name, value in wanted["metrics"].items():
            assert result["metrics"][name] == pytest.approx(value, rel=1e-11, abs=1e-13), name
