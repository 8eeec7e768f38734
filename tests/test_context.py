"""ring-flash-attn's zigzag function, given the very tensors that our ring gets, returns the same.

flash-attn runs on CUDA only; here the formula stands in for its two functions, so what is shown is
the package's layout, hops and merging."""

import itertools
import sys
import types

import numpy as np
import pytest
import torch

from harness import ranks
from minirl.batch.attention_plan import RowLayout
from minirl.batch.packing import pack
from minirl.config.policy import ParallelConfig
from minirl.model import flash
from minirl.model.attention import Attention
from minirl.types.packed import Options
from test_packing import groups


def _parts(q, k, cu_q, cu_k):
    pairs = zip(itertools.pairwise(cu_q.tolist()), itertools.pairwise(cu_k.tolist()), strict=True)
    for (q_start, q_end), (k_start, k_end) in pairs:
        yield slice(q_start, q_end), slice(k_start, k_end)


def _heads(x, part):
    return x[part].transpose(0, 1)[None]


def _bias(q, causal):
    later = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
    return q.new_zeros(later.shape).masked_fill(later, -torch.inf)[None, None] if causal else None


# The signatures of these two are flash-attn 2.8's.
def _flash_attn_varlen_forward(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p,
    softmax_scale,
    causal,
    window_size_left=-1,
    window_size_right=-1,
    softcap=0.0,
    alibi_slopes=None,
    return_softmax=False,
    block_table=None,
    leftpad_k=None,
    seqused_k=None,
    zero_tensors=False,
):
    out, lse = torch.empty_like(q), torch.empty(q.shape[1], q.shape[0])
    for a, b in _parts(q, k, cu_seqlens_q, cu_seqlens_k):
        part, part_lse = flash.eager_forward(
            _heads(q, a), _heads(k, b), _heads(v, b), _bias(q[a], causal), Options(softmax_scale)
        )
        out[a] = part[0].transpose(0, 1)
        lse[:, a] = part_lse[0]
    return out, lse, None, None


def _flash_attn_varlen_backward(
    dout,
    q,
    k,
    v,
    out,
    softmax_lse,
    dq,
    dk,
    dv,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p,
    softmax_scale,
    causal,
    window_size_left=-1,
    window_size_right=-1,
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    rng_state=None,
    zero_tensors=False,
):
    for a, b in _parts(q, k, cu_seqlens_q, cu_seqlens_k):
        grads = flash.eager_backward(
            _heads(dout, a),
            _heads(q, a),
            _heads(k, b),
            _heads(v, b),
            _heads(out, a),
            softmax_lse[None, :, a],
            _bias(q[a], causal),
            Options(softmax_scale),
        )
        for into, part, grad in zip((dq, dk, dv), (a, b, b), grads, strict=True):
            into[part] = grad[0].transpose(0, 1)


def both_rings(mesh):
    interface = types.ModuleType("flash_attn.flash_attn_interface")
    interface._flash_attn_varlen_forward = _flash_attn_varlen_forward
    interface._flash_attn_varlen_backward = _flash_attn_varlen_backward
    package = types.ModuleType("flash_attn")
    package.__spec__ = types.SimpleNamespace()
    package.flash_attn_interface = interface
    sys.modules |= {"flash_attn": package, "flash_attn.flash_attn_interface": interface}
    batch = pack(
        groups([(n, [m]) for n, m in ((6, 3), (2, 30), (1, 7), (9, 12))]),
        mesh.device,
        layout=RowLayout(context=mesh.context),
    )
    rng = np.random.default_rng(mesh.rank)
    inputs = [
        torch.tensor(rng.normal(size=(len(batch.inputs), heads, 16)), dtype=torch.bfloat16)
        for heads in (4, 2, 2, 4)
    ]
    results = []
    for ring in (
        lambda q, k, v: Attention.apply(
            q, k, v, None, batch.attention.blocks, Options(0.25), mesh.context
        ),
        lambda q, k, v: flash.ring_attention(
            q, k, v, batch.attention.blocks[0], 0.25, mesh.context
        ),
    ):
        leaves = [x.clone().requires_grad_() for x in inputs[:3]]
        out = ring(*leaves)
        results.append((out, *torch.autograd.grad(out, leaves, inputs[3])))
    return results


@pytest.mark.parametrize("size", [2, 4])
def test_our_ring_equals_ring_flash_attn(size):
    parallel = ParallelConfig(context=size, context_engine="ring")
    for ours, theirs in ranks(size, both_rings, parallel=parallel):
        for x, y in zip(ours, theirs, strict=True):
            assert x.shape == y.shape
            assert (x.float() - y.float()).abs().max() <= 0.01 * y.float().abs().max()
