"""Products by packed copies of weights beside plain ones, and what the copies cost."""

import psutil
import pytest
import torch
from torch.nn.functional import linear

from harness import ranks
from minirl.engine.cpu import cpu_build, packed

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="copies of the CPU engine")


def products(mesh):
    """The largest differences to `linear` by number of rows, shape and bias."""
    torch.manual_seed(0)
    differences = {}
    for size in ((48, 24), (7, 33), (130, 64)):
        whole = torch.randn(3, *size)
        weight = whole[1]  # As one expert of several.
        for num_rows in (0, 1, 4, 5, 63, 64, 65, 80, 255, 256, 257):
            for bias in (None, torch.randn(size[0])):
                x = torch.randn(num_rows, size[1])
                result = packed.packed_linear(x, weight, bias)
                expected = linear(x, weight, bias)
                assert result.shape == expected.shape and result.is_contiguous()
                difference = (result - expected).abs().max() if num_rows else torch.zeros(())
                differences[size, num_rows, bias is None] = difference.item()
        assert torch.equal(
            packed.packed_linear(x[:6].view(2, 3, -1), weight),
            packed.packed_linear(x[:6], weight).view(2, 3, -1),
        )
        columns = torch.randn(9, 2 * size[1])[:, size[1] :]  # Not contiguous.
        assert torch.allclose(
            packed.packed_linear(columns, weight), linear(columns, weight), atol=1e-4
        )
    return differences, len(packed._copies)


def test_a_product_by_a_copy_is_that_by_the_weight():
    ((differences, num_copies),) = ranks(1, products)
    assert max(differences.values()) < 1e-4
    assert any(differences.values()), "all by plain weights: nothing was tested"
    assert num_copies == 3


def stale_and_fresh(mesh):
    weight = torch.randn(32, 16)
    x = torch.randn(8, 16)
    before = packed.packed_linear(x, weight)
    tied = packed.packed_linear(x, weight.view(32, 16))
    weight.mul_(2)
    stale = packed.packed_linear(x, weight)
    packed.forget()
    fresh = packed.packed_linear(x, weight)
    half = weight.bfloat16()
    plain = packed.packed_linear(x.bfloat16(), half)
    assert torch.equal(plain, linear(x.bfloat16(), half))
    return before, tied, stale, fresh, len(packed._copies)


def test_copies_are_of_the_time_of_the_last_forget():
    ((before, tied, stale, fresh, num_copies),) = ranks(1, stale_and_fresh)
    assert torch.equal(before, tied) and torch.equal(before, stale)
    assert torch.equal(fresh, 2 * before)
    assert num_copies == 1  # None of bfloat16.


def logits_by_a_copy(mesh):
    """Errors of logits by number of rows, and how many copies there are before and after."""
    torch.manual_seed(0)
    weight = torch.randn(70, 32).bfloat16()
    bias = torch.randn(70).bfloat16()
    errors = {}
    for num_rows in (0, 1, 5, 256, 257, 600):
        hidden = torch.randn(num_rows, 32).bfloat16()
        logits = cpu_build.wide_logits(hidden, weight, bias)
        exact = hidden.double() @ weight.double().T + bias.double()
        assert logits.dtype == torch.float32 and logits.shape == exact.shape
        errors[num_rows] = (logits - exact).abs().max().item() if num_rows else 0.0
    num_copies = len(packed._copies)
    packed.forget()
    return errors, num_copies, len(packed._copies)


def test_logits_of_a_head_in_bfloat16_are_in_float32():
    """By one copy of the head, however many rows there are."""
    ((errors, num_copies, num_left),) = ranks(1, logits_by_a_copy)
    assert max(errors.values()) < 1e-4
    assert (num_copies, num_left) == (1, 0)


def memory_of_refits(mesh):
    """MiB of the process after each of several refits of 16 MiB."""
    weight = torch.randn(2048, 2048)
    used = []
    for _ in range(12):
        packed.packed_linear(torch.randn(8, 2048), weight)
        used.append(psutil.Process().memory_info().rss / 2**20)
        packed.forget()
    return used


def test_old_copies_are_freed():
    (used,) = ranks(1, memory_of_refits)
    assert used[-1] - used[1] < 2 * 16  # 10 more would be 160.
