"""How FlashAttention is called, shown on CPU: an obvious stand-in takes the place of its kernels.

They run on CUDA only (test_gpu.py). The stand-in has the operators' own schemas, so torch checks
the arguments' types, and their mask: with more keys than queries it lies at the bottom right.
"""

import dataclasses
import functools
import importlib.machinery
import importlib.metadata
import itertools
import sys
import types

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from in_memory import SeesAhead, with_images
from minirl.base.errors import UserError
from minirl.batch.attention_plan import RowLayout
from minirl.batch.packing import pack
from minirl.model import attention, flash, selective
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


# --------------------------------------------------------------------------------------------------
# flash-attn


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
    assert dropout_p == 0 and alibi_slopes is None and not return_softmax
    assert block_table is leftpad_k is seqused_k is None and not zero_tensors
    sums = cu_seqlens_q, cu_seqlens_k
    window = window_size_left, window_size_right
    check(q, k, v, *sums, max_seqlen_q, max_seqlen_k, causal, *window)
    out, lse = formula(q, k, v, *sums, causal, softmax_scale, *window, softcap)
    return out, lse, torch.empty(0), torch.zeros(2, dtype=torch.int64)


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
    window_size_left,
    window_size_right,
    softcap,
    alibi_slopes,
    deterministic,
    rng_state=None,
    zero_tensors=False,
):
    assert dropout_p == 0 and alibi_slopes is rng_state is None and not zero_tensors
    assert deterministic == torch.are_deterministic_algorithms_enabled()
    assert softmax_lse.shape == (q.shape[1], len(q)) and softmax_lse.is_contiguous()
    sums = cu_seqlens_q, cu_seqlens_k
    window = window_size_left, window_size_right
    check(q, k, v, *sums, max_seqlen_q, max_seqlen_k, causal, *window)
    whole = dout, out, softmax_lse
    found = formula(q, k, v, *sums, causal, softmax_scale, *window, softcap, whole)
    for into, gradient in zip((dq, dk, dv), found, strict=True):
        into.copy_(gradient)
    return torch.empty(0)


def fake_flash2(version):
    """Modules like the package's."""
    package = types.ModuleType("flash_attn")
    package.__version__ = version
    package.__path__ = []
    interface = types.ModuleType("flash_attn.flash_attn_interface")
    interface._flash_attn_varlen_forward = _flash_attn_varlen_forward
    interface._flash_attn_varlen_backward = _flash_attn_varlen_backward
    for module in (package, interface):
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
    return {module.__name__: module for module in (package, interface)}


# The schemas are those of flash-attn 2.8.3 and of its branch main in August 2026.
FORWARD = """fwd(
    Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new = None, Tensor(v_new!)? v_new = None,
    Tensor? q_v = None, Tensor(out!)? out = None, Tensor? cu_seqlens_q = None,
    Tensor? cu_seqlens_k = None, Tensor? cu_seqlens_k_new = None, Tensor? seqused_q = None,
    Tensor? seqused_k = None, int? max_seqlen_q = None, int? max_seqlen_k = None,
    Tensor? page_table = None, Tensor? kv_batch_idx = None, Tensor? leftpad_k = None,
    Tensor? rotary_cos = None, Tensor? rotary_sin = None, Tensor? seqlens_rotary = None,
    Tensor? q_descale = None, Tensor? k_descale = None, Tensor? v_descale = None,
    float? softmax_scale = None, bool is_causal = False, int window_size_left = -1,
    int window_size_right = -1, int attention_chunk = 0, float softcap = 0.0,
    bool is_rotary_interleaved = False, Tensor? scheduler_metadata = None, int num_splits = 0,
    bool? pack_gqa = None, int sm_margin = 0) -> (Tensor(out!), Tensor, Tensor, Tensor)"""
BACKWARD = """bwd(
    Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse,
    Tensor(dq!)? dq = None, Tensor(dk!)? dk = None, Tensor(dv!)? dv = None,
    Tensor? cu_seqlens_q = None, Tensor? cu_seqlens_k = None, Tensor? seqused_q = None,
    Tensor? seqused_k = None, int? max_seqlen_q = None, int? max_seqlen_k = None,
    float? softmax_scale = None, bool is_causal = False, int window_size_left = -1,
    int window_size_right = -1, float softcap = 0.0, bool deterministic = False,
    int sm_margin = 0) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"""


def flash3_forward(*args):
    """Without the last arguments, where they are the schema's defaults."""
    q, k, v, *unused = args[:7]
    sums = args[7:9]
    bounds = args[12:14]
    assert not any(x is not None for x in (*unused, *args[9:12], *args[14:23]))
    scale, causal, *window, chunk, softcap, _, metadata, num_splits = args[23:]
    assert (chunk, metadata, num_splits) == (0, None, 1)
    check(q, k, v, *sums, *bounds, causal, *window)
    out, lse = formula(q, k, v, *sums, causal, scale, *window, softcap)
    return out, lse, torch.empty(0), torch.empty(0)


def flash3_backward(dout, q, k, v, out, lse, dq, dk, dv, *rest):
    """`rest` as in BACKWARD from cu_seqlens_q on, without the last ones that are defaults."""
    defaults = (False, -1, -1, 0.0, False, 0)
    *sums, used_q, used_k, max_q, max_k, scale = rest[:7]
    causal, left, right, softcap, deterministic, margin = (*rest[7:], *defaults[len(rest) - 7 :])
    assert used_q is used_k is None and margin == 0
    assert deterministic == torch.are_deterministic_algorithms_enabled()
    assert lse.shape == (q.shape[1], len(q)) and lse.is_contiguous()
    check(q, k, v, *sums, max_q, max_k, causal, left, right)
    found = formula(q, k, v, *sums, causal, scale, left, right, softcap, (dout, out, lse))
    for into, gradient in zip((dq, dk, dv), found, strict=True):
        into.copy_(gradient)
    return (torch.empty(0),) * 5


@pytest.fixture(scope="module")
def flash3_operators():
    library = torch.library.Library("flash_attn_3", "DEF")
    library.define(FORWARD)
    library.define(BACKWARD)
    library.impl("fwd", flash3_forward, "CPU")
    library.impl("bwd", flash3_backward, "CPU")
    yield
    library._destroy()


def version_in(packages, name):
    """The version of a package, if it is among these."""
    if name not in packages:
        raise importlib.metadata.PackageNotFoundError(name)
    return "4.0.0"


@pytest.fixture
def install(monkeypatch):
    """install(modules): as if they were installed; install({}): as if no flash-attn were."""

    def put(modules):
        for name in [name for name in sys.modules if name.startswith("flash_attn")]:
            monkeypatch.delitem(sys.modules, name, raising=False)
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)
        packages = ["flash-attn-4"] if "flash_attn.cute" in modules else []
        monkeypatch.setattr(importlib.metadata, "version", functools.partial(version_in, packages))
        flash.flash2.cache_clear()
        flash.flash3.cache_clear()
        flash.flash4.cache_clear()

    yield put
    monkeypatch.undo()
    flash.flash2.cache_clear()
    flash.flash3.cache_clear()
    flash.flash4.cache_clear()


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


def fake_flash3():
    modules = [types.ModuleType("flash_attn_3"), types.ModuleType("flash_attn_3._C")]
    for module in modules:
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
    return {module.__name__: module for module in modules}


@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize("which", ["long and short prompts", "single sequences"])
def test_softcaps_by_flash_attn_2_equal_the_formula(choose, install, which, window):
    install(fake_flash2("2.8.3.post2"))
    batch = pack(SHARED[which], CPU, layout=RowLayout(windowed=window is not None))
    choose(True)
    by_flash = attend_and_back(batch, window, softcap=2.0)
    choose(False)
    assert_same(by_flash, attend_and_back(batch, window, softcap=2.0))


@pytest.mark.usefixtures("flash3_operators", "hopper")
@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize("which", ["long and short prompts", "single sequences"])
def test_flash_attention_3_equals_the_formula(choose, install, which, window):
    install(fake_flash3())
    batch = pack(SHARED[which], CPU, layout=RowLayout(windowed=window is not None))
    choose(True)
    by_flash = attend_and_back(batch, window)
    choose(False)
    assert_same(by_flash, attend_and_back(batch, window))


# The names of these arguments are flash-attn-4's.
def flash4_forward(
    q,
    k,
    v,
    *,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    softmax_scale,
    causal,
    window_size_left,
    window_size_right,
    return_lse,
):
    assert return_lse
    sums = cu_seqlens_q, cu_seqlens_k
    window = [-1 if size is None else size for size in (window_size_left, window_size_right)]
    check(q, k, v, *sums, max_seqlen_q, max_seqlen_k, causal, *window)
    return formula(q, k, v, *sums, causal, softmax_scale, *window, 0.0)


def flash4_backward(
    q,
    k,
    v,
    out,
    dout,
    lse,
    *,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    softmax_scale,
    causal,
    window_size_left,
    window_size_right,
):
    assert lse.shape == (q.shape[1], len(q)) and lse.is_contiguous()
    sums = cu_seqlens_q, cu_seqlens_k
    window = [-1 if size is None else size for size in (window_size_left, window_size_right)]
    check(q, k, v, *sums, max_seqlen_q, max_seqlen_k, causal, *window)
    return tuple(formula(q, k, v, *sums, causal, softmax_scale, *window, 0.0, (dout, out, lse)))


def fake_flash4():
    names = ("flash_attn", "flash_attn.cute", "flash_attn.cute.interface")
    modules = {name: types.ModuleType(name) for name in names}
    for module in modules.values():
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
        module.__path__ = []
    modules[names[-1]]._flash_attn_fwd = flash4_forward
    modules[names[-1]]._flash_attn_bwd = flash4_backward
    return modules


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize("which", ["long and short prompts", "single sequences"])
def test_flash_attention_4_equals_the_formula(choose, install, which, window):
    install(fake_flash4())
    batch = pack(SHARED[which], CPU, layout=RowLayout(windowed=window is not None))
    choose(True)
    by_flash = attend_and_back(batch, window)
    choose(False)
    assert_same(by_flash, attend_and_back(batch, window))


@pytest.mark.usefixtures("deterministic", "flash3_operators", "hopper")
@pytest.mark.parametrize(
    ("modules", "softcap"), [(fake_flash2("2.8.0"), 2.0), (fake_flash3(), None)]
)
def test_a_wish_for_determinism_reaches_the_packages(choose, install, modules, softcap):
    """The stand-ins compare."""
    install(modules)
    choose(True)
    attend_and_back(pack(SHARED["single sequences"], CPU), softcap=softcap)


def test_which_package_is_chosen(install, monkeypatch, flash3_operators):
    narrow = torch.empty(1, 1, 128)
    wide = torch.empty(1, 1, 256)
    install({})
    assert flash.choose(narrow, None) is flash.choose(narrow, 50.0) is None
    install(fake_flash2("2.8.3") | fake_flash3())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert flash.choose(narrow, None) is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert flash.choose(narrow, None) == flash.choose(wide, None) == 3
    assert flash.choose(narrow, 50.0) == 2
    install(fake_flash4())
    assert flash.choose(narrow, None) == 4
    assert flash.choose(wide, None) is flash.choose(narrow, 50.0) is None
    install(fake_flash4() | fake_flash3())
    assert flash.choose(narrow, None) == 3
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert flash.choose(narrow, None) == 4


@pytest.mark.usefixtures("deterministic", "flash3_operators", "hopper")
def test_flash_attention_3_is_not_asked_for_the_determinism_it_lacks(install):
    install(fake_flash3())
    assert flash.choose(torch.empty(1, 1, 192), None) == 3
    assert flash.choose(torch.empty(1, 1, 256), None) is None
    install(fake_flash4())
    assert flash.choose(torch.empty(1, 1, 128), None) is None


def test_an_old_package_is_refused(install):
    install(fake_flash2("2.6.3"))
    with pytest.raises(UserError, match=r"flash-attn 2\.6\.3 is installed, .*'flash-attn>=2.8'"):
        flash.flash2()


@pytest.mark.parametrize(
    ("dtype", "head_dim", "softcap", "can"),
    [
        (torch.bfloat16, 128, None, True),
        (torch.float16, 256, None, True),
        (torch.float32, 128, None, False),
        (torch.bfloat16, 257, None, False),
        (torch.bfloat16, 36, None, False),  # not a multiple of 8
        (torch.bfloat16, 128, 50.0, False),  # without a package
    ],
)
def test_what_flash_attention_can(install, dtype, head_dim, softcap, can):
    q = types.SimpleNamespace(is_cuda=True, dtype=dtype, shape=(1, 1, head_dim))
    install({})
    assert attention.can_flash(q, Options(1.0, softcap=softcap)) == can
    install(fake_flash2("2.8.3"))
    assert attention.can_flash(q, Options(1.0, softcap=softcap)) == (can or softcap is not None)


def test_kernels_of_packages_are_known_to_tensors_without_values():
    with torch.device("meta"):
        q = torch.empty(7, 8, 16, dtype=torch.bfloat16)
        k = torch.empty(9, 2, 16, dtype=torch.bfloat16)
        sums = torch.empty(3, dtype=torch.int32)
    rest = sums, sums, 4, 5, 0.0, True
    options = {"version": 3, "scale": 1.0, "window_size_left": -1, "window_size_right": 0}
    out, lse = flash.package_forward(q, k, k, *rest, **options)
    assert out.shape == q.shape and out.dtype == q.dtype
    assert lse.shape == (8, 7) and lse.dtype == torch.float32
    gradients = flash.package_backward(out, q, k, k, out, lse, *rest, **options)
    assert [x.shape for x in gradients] == [q.shape, k.shape, k.shape]


@pytest.mark.usefixtures("aten")
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_selective_checkpointing_keeps_the_results(choose, install, monkeypatch, softcap):
    calls = []
    forward = formula

    def counted(*args):
        calls.append(len(args))
        return forward(*args)

    monkeypatch.setitem(globals(), "formula", counted)
    install(fake_flash2("2.8.3"))
    choose(True)
    batch = pack(SHARED["single sequences"], CPU)
    q, k = (torch.randn(1, heads, len(batch.inputs), 16, requires_grad=True) for heads in (8, 2))
    out = checkpoint(
        lambda q, k: packed_attention(
            torch.nn.Identity(), q, k, k, None, pack=batch, softcap=softcap
        )[0].sin(),
        q,
        k,
        use_reentrant=False,
        context_fn=selective.contexts,
    )
    out.sum().backward()
    assert calls == [10, 11]  # one forward, one backward


def test_a_ring_with_a_softcap_is_not_for_ring_flash_attn(choose, monkeypatch):
    """It takes none."""
    choose(True)
    monkeypatch.setattr(flash, "ring_kernel", lambda: pytest.fail("asked for its kernel"))
    monkeypatch.setattr(attention.Attention, "apply", lambda q, *rest: q)
    batch = pack([], CPU, layout=RowLayout(context=Context(None, 0, 2, ring=True)))
    q = torch.randn(1, 8, len(batch.inputs), 16)
    packed_attention(torch.nn.Identity(), q, q, q, None, pack=batch, softcap=2.0)
