"""How FlashAttention is called, shown on CPU: an obvious stand-in takes the place of its kernels.

They run on CUDA only (test_gpu.py). The stand-in has the operators' own schemas, so torch checks
the arguments' types, and their mask: with more keys than queries it lies at the bottom right.
"""

import dataclasses
import functools
import itertools
import types

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from in_memory import SeesAhead, with_images
from minirl.batch.attention_plan import RowLayout
from minirl.batch.packing import pack
from minirl.model import attention, build, flash
from minirl.model.attention import attend, packed_attention
from minirl.types.packed import Context, Options
from test_packing import groups

CPU = torch.device("cpu")
HEADS = (8, 2, 2)  # of queries, keys and values
SHARED = {
    "long and short prompts": groups([(240, [3, 50, 9]), (40, [20, 1, 30]), (7, [12, 5])]),
    "prompts about as long as is repeated": groups([(300, [8, 8]), (129, [9, 4]), (128, [9, 4])]),
    "single sequences": groups([(5, [n]) for n in (1, 30, 4, 61)]),
    "one query after a prompt": groups([(200, [6, 1]), (2, [4, 1])]),
    "nothing": [],
}

# --------------------------------------------------------------------------------------------------
# the stand-in


def sees(num_queries, num_keys, causal, left, right):
    """bool [queries, keys]: FlashAttention-2's mask."""
    ahead = torch.arange(num_keys) - (torch.arange(num_queries)[:, None] + num_keys - num_queries)
    seen = torch.ones(num_queries, num_keys, dtype=torch.bool)
    if causal:
        right = 0
    if right >= 0:
        seen &= ahead <= right
    if left >= 0:
        seen &= ahead >= -left
    return seen


def check(q, k, v, cu_q, cu_k, max_q, max_k, causal, left, right):
    """What the kernels take for granted."""
    assert q.is_contiguous() and k.is_contiguous() and v.is_contiguous()
    assert cu_q.dtype == cu_k.dtype == torch.int32
    assert cu_q[0] == cu_k[0] == 0 and cu_q[-1] == len(q) and cu_k[-1] == len(k) == len(v)
    assert cu_q.diff().min() > 0 and cu_k.diff().min() > 0
    assert max_q == max(cu_q.diff().max(), 2) and max_k == cu_k.diff().max()
    # Its path for decoding, which ignores the running sum of queries.
    assert not (max_q == 1 and not causal and left < 0 and right < 0 and q.shape[1] > k.shape[1])


def formula(q, k, v, cu_q, cu_k, causal, scale, left, right, softcap, backward=None):
    """(out, lse [H, N]), or with (dout, out, lse) the gradients of q, k and v; pair by pair."""
    results = [torch.full_like(x, torch.nan) for x in (q, k, v)]
    lse = q.new_full((q.shape[1], len(q)), torch.nan)
    share = q.shape[1] // k.shape[1]
    for (a, b), (c, d) in zip(
        itertools.pairwise(cu_q.tolist()), itertools.pairwise(cu_k.tolist()), strict=True
    ):
        pair_q = q[a:b].transpose(0, 1)
        pair_k = k[c:d].transpose(0, 1).repeat_interleave(share, 0)
        pair_v = v[c:d].transpose(0, 1).repeat_interleave(share, 0)
        scores = pair_q @ pair_k.mT * scale
        slope = 1
        if softcap:
            slope = 1 - (scores / softcap).tanh() ** 2
            scores = (scores / softcap).tanh() * softcap
        scores = scores.masked_fill(~sees(b - a, d - c, causal, left, right), -torch.inf)
        if backward is None:
            lse[:, a:b] = scores.logsumexp(-1)
            results[0][a:b] = (scores.softmax(-1) @ pair_v).transpose(0, 1)
            continue
        dout, out, whole_lse = backward
        p = (scores - whole_lse[:, a:b, None]).exp()
        do = dout[a:b].transpose(0, 1)
        dp = do @ pair_v.mT - (do * out[a:b].transpose(0, 1)).sum(-1, keepdim=True)
        ds = p * dp * slope * scale
        results[0][a:b] = (ds @ pair_k).transpose(0, 1)
        results[1][c:d] = (ds.mT @ pair_q).unflatten(0, (-1, share)).sum(1).transpose(0, 1)
        results[2][c:d] = (p.mT @ do).unflatten(0, (-1, share)).sum(1).transpose(0, 1)
    return results if backward else (results[0], lse)


def aten_forward(
    q,
    k,
    v,
    cum_seq_q,
    cum_seq_k,
    max_q,
    max_k,
    dropout_p,
    is_causal,
    return_debug_mask,
    *,
    scale,
    window_size_left,
    window_size_right,
):
    assert dropout_p == 0 and not return_debug_mask
    window = window_size_left, window_size_right
    check(q, k, v, cum_seq_q, cum_seq_k, max_q, max_k, is_causal, *window)
    out, lse = formula(q, k, v, cum_seq_q, cum_seq_k, is_causal, scale, *window, 0.0)
    unused = torch.zeros(2, dtype=torch.uint64)
    return out, lse, unused, unused.clone(), torch.empty(0)


def aten_backward(
    dout,
    q,
    k,
    v,
    out,
    lse,
    cum_seq_q,
    cum_seq_k,
    max_q,
    max_k,
    dropout_p,
    is_causal,
    rng_state,
    unused,
    *,
    scale,
    window_size_left,
    window_size_right,
):
    assert dropout_p == 0
    assert rng_state.dtype == torch.uint64 and rng_state.shape == (2,)
    assert dout.is_contiguous() and out.is_contiguous() and lse.is_contiguous()
    assert lse.shape == (q.shape[1], len(q))
    window = window_size_left, window_size_right
    check(q, k, v, cum_seq_q, cum_seq_k, max_q, max_k, is_causal, *window)
    sums = cum_seq_q, cum_seq_k
    return tuple(formula(q, k, v, *sums, is_causal, scale, *window, 0.0, (dout, out, lse)))


@pytest.fixture(scope="module")
def aten():
    """Kernels for CPU of torch's own operators, which have none."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", aten_forward, "CPU")
    library.impl("_flash_attention_backward", aten_backward, "CPU")
    yield
    library._destroy()


@pytest.fixture
def choose(monkeypatch):
    """choose(True): everything by FlashAttention; choose(False): by the formula."""

    def set_to(by_flash):
        monkeypatch.setattr(attention, "can_flash", lambda q, options: by_flash)
        monkeypatch.setattr(attention, "_cpu_can", lambda q, options: False)

    return set_to


# --------------------------------------------------------------------------------------------------
# torch's own operators


def attend_and_back(batch, window=None, softcap=None):
    """The output of one layer, and the gradients of its queries, keys and values."""
    rng = np.random.default_rng(0)
    num_rows = len(batch.inputs)
    leaves = [
        torch.tensor(rng.normal(size=(1, heads, num_rows, 16)), requires_grad=True)
        for heads in HEADS
    ]
    out, _ = packed_attention(
        torch.nn.Identity(),
        *leaves,
        None,
        pack=batch,
        scaling=0.3,
        sliding_window=window,
        softcap=softcap,
    )
    dout = torch.tensor(rng.normal(size=out.shape))
    return out, *torch.autograd.grad(out, leaves, dout)


def assert_same(got, wanted):
    for x, y in zip(got, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-12)


@pytest.mark.usefixtures("aten")
@pytest.mark.parametrize("window", [None, 1, 24, 200, 1000])
@pytest.mark.parametrize("which", SHARED)
def test_shared_prompts_and_windows_equal_the_formula(choose, which, window):
    batch = pack(SHARED[which], CPU, layout=RowLayout(windowed=window is not None))
    choose(True)
    by_flash = attend_and_back(batch, window)
    blocks = [*batch.attention.blocks, *([batch.attention.windowed] if window else [])]
    assert not any("padded" in vars(block) for block in blocks)  # nothing asked for rectangles
    choose(False)
    assert_same(by_flash, attend_and_back(batch, window))


@pytest.mark.usefixtures("aten")
@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize("which", list(SHARED)[:3])
def test_images_whose_tokens_see_later_ones_equal_the_formula(choose, which, window):
    layout = RowLayout(windowed=window is not None, vision=SeesAhead())
    batch = pack(with_images(SHARED[which]), CPU, layout=layout)
    choose(True)
    by_flash = attend_and_back(batch, window)
    assert "padded" not in vars(batch.attention.images)
    choose(False)
    assert_same(by_flash, attend_and_back(batch, window))
    batch.attention = dataclasses.replace(batch.attention, images=None, windowed_images=None)
    causal = attend_and_back(batch, window)
    assert (causal[0] - by_flash[0]).abs().max() > 0.1


def on_all_ranks(packs):
    """The outputs and gradients of all context ranks, whose keys are handed over by indexing."""
    num_rows = len(packs[0].inputs)
    size = len(packs)
    rng = np.random.default_rng(0)
    q, k, v, dout = (
        torch.tensor(rng.normal(size=(size * num_rows, heads, 16))) for heads in (*HEADS, HEADS[0])
    )
    gradients = [torch.zeros_like(x) for x in (q, k, v)]
    outs = []
    for rank, batch in enumerate(packs):
        here = slice(rank * num_rows, (rank + 1) * num_rows)
        steps = []  # blocks, each with the rows whose keys it sees
        if batch.context.ring:
            own, earlier, later = batch.attention.blocks
            for hop in range(size):
                source = (rank - hop) % size
                block = own if hop == 0 else earlier if hop <= rank else later
                steps.append((block, slice(source * num_rows, (source + 1) * num_rows)))
        else:
            steps = [(block, slice(None)) for block in batch.attention.blocks]
        options = Options(0.3)
        out, lse = attend(q[here], ((b, k[keys], v[keys]) for b, keys in steps), options)
        for block, keys in steps:
            into = [gradients[0][here], gradients[1][keys], gradients[2][keys]]
            given = dout[here], q[here], k[keys], v[keys], out, lse
            attention.block_backward(into, *given, block, options)
        outs.append(out)
    return torch.cat(outs), *gradients


@pytest.mark.usefixtures("aten")
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("ring", [True, False], ids=["ring", "gathered"])
def test_context_ranks_equal_the_formula(choose, ring, size):
    # One sequence of so few rows that a chunk has only one.
    whole = groups([(240, [20]), (3, [2]), (7, [30])])
    packs = [
        pack(whole, CPU, layout=RowLayout(context=Context(None, rank, size, ring=ring)))
        for rank in range(size)
    ]
    choose(True)
    by_flash = on_all_ranks(packs)
    choose(False)
    assert_same(by_flash, on_all_ranks(packs))


@pytest.mark.usefixtures("aten")
@pytest.mark.parametrize(
    "context", [Context(None, 0, 2, ring=True), Context(None, 1, 2)], ids=["ring", "gathered"]
)
def test_pairs_of_one_query_stay_out_of_the_path_for_decoding(choose, context):
    """The stand-in refuses it; here such blocks are shown to be there."""
    blocks = pack(
        groups([(2, [2]), (1, [3])]), CPU, layout=RowLayout(context=context)
    ).attention.blocks
    singles = [b for b in blocks if b.longest[0] == 1 and not b.causal]
    assert singles
    choose(True)
    for block in singles:
        q = torch.randn(20, 8, 16)
        k = torch.randn(500, 2, 16)
        out, lse = attention.block_forward(q, k, k, block, Options(0.3))
        assert out.shape == (len(block.rows), 8, 16) and lse.shape == (len(block.rows), 8)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "softcap", "can"),
    [
        (torch.bfloat16, 128, None, True),
        (torch.float16, 256, None, True),
        (torch.float32, 128, None, False),
        (torch.bfloat16, 257, None, False),
        (torch.bfloat16, 36, None, False),  # not a multiple of 8
        (torch.bfloat16, 128, 50.0, False),
    ],
)
def test_what_flash_attention_can(dtype, head_dim, softcap, can):
    q = types.SimpleNamespace(is_cuda=True, dtype=dtype, shape=(1, 1, head_dim))
    assert attention.can_flash(q, Options(1.0, softcap=softcap)) == can


@pytest.mark.parametrize(
    ("installed", "major", "deterministic", "is_used"),
    [
        (True, 9, False, True),
        (False, 9, False, False),
        (True, 10, False, False),
        (True, 9, True, False),
    ],
)
def test_torch_takes_flash_attention_3_where_it_can(
    monkeypatch, installed, major, deterministic, is_used
):
    used = []
    is_deterministic = "are_deterministic_algorithms_enabled"
    monkeypatch.setattr(flash.importlib.util, "find_spec", lambda name: installed or None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (major, 0))
    monkeypatch.setattr(torch, is_deterministic, lambda: deterministic)
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", used.append)
    flash.use_flash3.__wrapped__()
    assert used == ["FA3"] * is_used


@pytest.mark.usefixtures("aten")
def test_selective_checkpointing_keeps_the_results(choose, monkeypatch):
    calls = []
    forward = formula

    def counted(*args):
        calls.append(len(args))
        return forward(*args)

    monkeypatch.setitem(globals(), "formula", counted)
    choose(True)
    batch = pack(SHARED["single sequences"], CPU)
    q, k = (torch.randn(1, heads, len(batch.inputs), 16, requires_grad=True) for heads in (8, 2))
    out = checkpoint(
        lambda q, k: packed_attention(torch.nn.Identity(), q, k, k, None, pack=batch)[0].sin(),
        q,
        k,
        use_reentrant=False,
        context_fn=functools.partial(create_selective_checkpoint_contexts, build.KEPT),
    )
    out.sum().backward()
    assert calls == [10, 11]  # one forward, one backward
