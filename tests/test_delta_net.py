"""Gated delta nets on packed sequences: the rule against one row at a time, states that siblings
fork, borders, and what cannot be divided.

That whole models equal the library's is in `test_families.py`."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig

import tiny
from harness import ranks
from minirl.base.errors import UserError
from minirl.batch.packing import pack
from minirl.batch.recurrence import build_recurrence
from minirl.config.policy import ParallelConfig, PolicyConfig
from minirl.model import checks, delta_net
from minirl.train.policy import Policy
from minirl.types.packed import LayerBatch
from test_model import CPU, model_batch

# Rows of each sequence, and the earlier one that it begins behind: chunks of 64 that are full,
# begun, and several.
SEQUENCES = [(70, None), (2, None), (130, 0), (3, 0), (66, 1), (1, None), (64, None), (0, None)]
HEADS, KEY_DIM, VALUE_DIM, FEATURES, WIDTH = 3, 8, 6, 5, 4


def recurrence_of(sequences):
    return build_recurrence(
        [SimpleNamespace(num_rows=num, shared=shared) for num, shared in sequences],
        SimpleNamespace(convolution=WIDTH, context=None),
        CPU,
    )


def inputs(num_rows):
    torch.manual_seed(0)
    q, k = torch.randn(2, num_rows, HEADS, KEY_DIM, dtype=torch.float64)
    v = torch.randn(num_rows, HEADS, VALUE_DIM, dtype=torch.float64)
    decay, rate = torch.rand(2, num_rows, HEADS, dtype=torch.float64)
    return [t.clone().requires_grad_() for t in (q, k, v, -3 * decay, rate)]


def row_by_row(q, k, v, log_decay, rate):
    """The rule as the paper writes it."""
    q, k = (F.normalize(x, dim=-1) for x in (q, k))
    out, states, row = [], [], 0
    for num, shared in SEQUENCES:
        empty = torch.zeros(HEADS, KEY_DIM, VALUE_DIM, dtype=torch.float64)
        state = empty if shared is None else states[shared]
        for t in range(row, row + num):
            state = log_decay[t].exp()[:, None, None] * state
            error = v[t] - torch.einsum("hkv,hk->hv", state, k[t])
            state = state + torch.einsum("h,hk,hv->hkv", rate[t], k[t], error)
            out.append(torch.einsum("hkv,hk->hv", state, q[t]) * KEY_DIM**-0.5)
        states.append(state)
        row += num
    return torch.stack(out)


def test_the_rule_in_chunks_is_the_rule_row_by_row(monkeypatch):
    monkeypatch.setattr(delta_net, "EPSILON", 0.0)  # F.normalize has none
    given = inputs(sum(num for num, _ in SEQUENCES))
    got = delta_net.delta_rule(*given, recurrence_of(SEQUENCES))
    wanted = row_by_row(*given)
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-14)
    direction = torch.randn_like(wanted)
    for x, y in zip(
        *(torch.autograd.grad((out * direction).sum(), given) for out in (got, wanted)), strict=True
    ):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-13)


def test_one_row_further_is_the_next_row(monkeypatch):
    """As an engine goes on, in each of some sequences at once."""
    monkeypatch.setattr(delta_net, "EPSILON", 0.0)
    num_sequences, num_rows = 3, 5
    sequences = [(num_rows, None)] * num_sequences
    given = [t.detach() for t in inputs(num_sequences * num_rows)]
    wanted = delta_net.delta_rule(*given, recurrence_of(sequences))
    rows = [t.unflatten(0, (num_sequences, num_rows)) for t in given]
    states = torch.zeros(num_sequences, HEADS, KEY_DIM, VALUE_DIM)
    for i in range(num_rows):
        got, states = delta_net.delta_step(*(t[:, i] for t in rows), states)
        torch.testing.assert_close(got, wanted[i::num_rows], rtol=0, atol=1e-14)


def test_the_convolution_is_torchs_of_each_sequence_behind_its_prompt():
    module = torch.nn.Conv1d(
        FEATURES, FEATURES, WIDTH, groups=FEATURES, bias=False, dtype=torch.float64
    )
    x = torch.randn(sum(num for num, _ in SEQUENCES), FEATURES, dtype=torch.float64)
    every_head = SimpleNamespace(local=lambda weight, parts: weight, parts=None)
    got = delta_net.convolve(module, x, recurrence_of(SEQUENCES), every_head)
    parts = x.split([num for num, _ in SEQUENCES])
    for (num, shared), own, y in zip(
        SEQUENCES, parts, got.split([n for n, _ in SEQUENCES]), strict=True
    ):
        if not num:
            continue
        whole = own if shared is None else torch.cat([parts[shared], own])
        wanted = F.silu(module(F.pad(whole, (0, 0, WIDTH - 1, 0)).T[None]))[0].T
        torch.testing.assert_close(y, wanted[len(whole) - num :], rtol=0, atol=1e-15)


def changed_rows(mesh, folder):
    """{number of a sequence: the sequences whose log-probs or entropies change with its tokens}"""
    policy = Policy(PolicyConfig(dtype="bfloat16"), folder, mesh, trainable=False)

    def values(change=None):
        trajectories = model_batch(False)
        if change is not None:
            tokens = trajectories[change].tokens
            tokens[:] = (tokens + 1) % 250 + 5
        batch = pack(trajectories, CPU, layout=policy.layout)
        assert batch.recurrence is not None
        with policy.inference():
            both = torch.stack(policy.model(batch))
        return dict(
            zip(batch.sequences.ids, both.split(batch.sequences.lengths, dim=1), strict=True)
        )

    trajectories = model_batch(False)
    before = values()
    changed = {}
    for change, t in enumerate(trajectories):
        after = values(change)
        changed[t.group, t.episode, t.segment] = {
            ids for ids in before if not torch.equal(before[ids], after[ids])
        }
    return changed


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text"])
def test_one_sequence_changes_no_bit_of_another(tmp_path, family):
    (changed,) = ranks(1, changed_rows, tiny.make(tmp_path / family, family))
    assert len(changed) > 3
    assert all(others == {own} for own, others in changed.items()), changed


def test_a_batch_that_was_packed_for_another_model_is_refused():
    batch = SimpleNamespace(recurrence=None)
    with pytest.raises(NotImplementedError, match="a layer has a state"):
        delta_net.forward(None, torch.zeros(1, 1, 1), pack=LayerBatch(batch))


def test_a_mesh_that_does_not_divide_the_heads_is_refused():
    config = AutoConfig.for_model("qwen3_next", linear_num_key_heads=4)
    checks.check_heads(config, tensor=2, context=2)
    with pytest.raises(
        UserError,
        match=r"parallel.tensor \* parallel.context = 2 \* 4 = 8 does not divide "
        "linear_num_key_heads = 4 of family 'qwen3_next'",
    ):
        checks.check_heads(config, tensor=2, context=4)
    checks.check_heads(AutoConfig.for_model("qwen3"), tensor=2, context=4)


def test_kernels_are_for_cuda_and_their_dtypes_alone():
    x = torch.zeros(2, 3, 4, dtype=torch.bfloat16)
    assert delta_net.delta_rule_kernel(x) is None and delta_net.convolution_kernel(x) is None


def muon_and_adamw(mesh, folder):
    policy = Policy(PolicyConfig(dtype="float32", optimizer="muon"), folder, mesh)
    names = {p: name for name, p in policy.model.named_parameters()}
    return [
        {names[p] for group in part.param_groups for p in group["params"]}
        for part in policy.optimizer.parts
    ]


def test_muon_leaves_the_convolution_to_adamw(tmp_path):
    """It is no matrix: each feature has weights of its own."""
    ((adamw, muon),) = ranks(1, muon_and_adamw, tiny.make(tmp_path / "m", "qwen3_5_text"))
    name = "model.layers.0.linear_attn.conv1d.weight"
    assert name in adamw and name not in muon
    assert "model.layers.0.linear_attn.in_proj_qkv.weight" in muon


def gradients(mesh, folder, checkpointing):
    policy = Policy(
        PolicyConfig(dtype="float64", activation_checkpointing=checkpointing), folder, mesh
    )
    batch = pack(model_batch(True), CPU, layout=policy.layout)
    torch.stack(policy.model(batch, True)).sum().div(mesh.data_size).backward()
    return {n: p.grad.full_tensor() for n, p in policy.model.named_parameters()}


def test_data_ranks_and_recomputation_change_no_gradient(tmp_path):
    folder = tiny.make(tmp_path / "model", "qwen3_next")
    (alone,) = ranks(1, gradients, folder, "off")
    (full,) = ranks(1, gradients, folder, "full")
    two = ranks(2, gradients, folder, "selective", parallel=ParallelConfig())[0]
    for name, g in alone.items():
        torch.testing.assert_close(full[name], g, rtol=0, atol=0)
        torch.testing.assert_close(two[name], g, rtol=1e-12, atol=1e-12)
