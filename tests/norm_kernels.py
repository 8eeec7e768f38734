"""RMSNorm's kernels beside the formula, case by case: the relative distances of the output and of
both gradients, as JSON.

Without a device `TRITON_INTERPRET=1 python norm_kernels.py` runs the kernels, in numpy. Triton
reads that variable when it is imported, so this is a program of its own."""

import json
import sys
from dataclasses import dataclass

import torch

from minirl.model import fused, norm_kernels


@dataclass
class Case:
    shape: tuple[int, ...]
    offset: float = 0.0
    wide: bool = False
    dtype: torch.dtype = torch.float32
    eps: float = 1e-6


CASES = {
    "rows of a power of two": Case((40, 64)),
    "other rows": Case((7, 96), eps=0.1),
    "heads": Case((1, 333, 4, 32)),
    "a row longer than a tile": Case((5, norm_kernels.TILE + 100)),
    "gemma": Case((50, 96), offset=1.0, wide=True),
    "an offset, narrow": Case((50, 96), offset=1.0),
    "one row": Case((1, 128)),
    "bfloat16": Case((50, 96), dtype=torch.bfloat16),
    "bfloat16, gemma": Case((50, 96), offset=1.0, wide=True, dtype=torch.bfloat16),
}


def distance(got, wanted):
    return ((got.double() - wanted.double()).norm() / wanted.double().norm()).item()


def compare(case, device):
    torch.manual_seed(0)
    x = (torch.randn(case.shape) * 3 + 1).to(device, case.dtype).requires_grad_()
    weight = torch.randn(case.shape[-1]).to(device, case.dtype).requires_grad_()
    # Not contiguous, as a gradient may be.
    grad = torch.randn(*case.shape, 2).to(device, case.dtype)[..., 0]
    rest = case.eps, case.offset, case.wide
    y = norm_kernels.RMSNorm.apply(x, weight, *rest)
    assert y.dtype == case.dtype and y.shape == x.shape
    grads = torch.autograd.grad(y, (x, weight), grad)
    assert [g.dtype for g in grads] == [case.dtype] * 2
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    wanted = fused.rms_norm_formula(*wide, *rest)
    wanted_grads = torch.autograd.grad(wanted, wide, grad.double())
    return [distance(*pair) for pair in zip((y, *grads), (wanted, *wanted_grads), strict=True)]


if __name__ == "__main__":
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    json.dump({name: compare(case, device) for name, case in CASES.items()}, sys.stdout)
