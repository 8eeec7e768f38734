"""The head's kernels beside the formulas, case by case: worst differences, as JSON.

Without a device `TRITON_INTERPRET=1 python head_kernels.py` runs the kernels, in numpy. Triton
reads that variable when it is imported, so this is a program of its own."""

import json
import sys
from dataclasses import dataclass

import torch

from minirl.model import logprob, logprob_kernels


@dataclass
class Case:
    rows: int = 7
    columns: int = 300
    temperature: float = 1.0
    softcap: float | None = None
    entropy: bool = False  # It has a gradient.
    dtype: torch.dtype = torch.float32
    scale: float = 1.0  # Of logits.
    chunk: int = 2**20  # Rows.
    targets: str = "random"


CASES = {
    "plain": Case(),
    "a part of a block": Case(columns=2 * logprob_kernels.GRADIENT_BLOCK + 77, temperature=0.7),
    "a column more than a block": Case(columns=logprob_kernels.SUM_BLOCK + 1, entropy=True),
    "entropy": Case(entropy=True, temperature=1.7),
    "softcap": Case(softcap=2.5, scale=3.0),
    "softcap, entropy, temperature": Case(softcap=2.5, entropy=True, temperature=0.6, scale=3.0),
    "bfloat16": Case(dtype=torch.bfloat16, temperature=0.7),
    "bfloat16, softcap, entropy": Case(dtype=torch.bfloat16, softcap=30.0, entropy=True),
    "chunks": Case(rows=53, chunk=20, entropy=True),
    "bfloat16, chunks": Case(rows=53, chunk=20, dtype=torch.bfloat16),
    "one row": Case(rows=1, entropy=True),
    "no row": Case(rows=0, entropy=True),
    "large logits": Case(scale=1e3, entropy=True),
    "large logits under a softcap": Case(scale=300.0, softcap=30.0, entropy=True),
    "the largest is the target": Case(scale=1e3, targets="largest", entropy=True),
    "equal logits": Case(scale=0.0, columns=2000, entropy=True),
}
NAMES = ("logprob", "entropy", "hidden", "weight")


def compare(case, device):
    """The largest difference of log-probs and entropies, for each unit of the largest logit, and of
    each gradient by its norm."""
    rng = torch.Generator().manual_seed(case.rows)
    hidden = torch.randn(case.rows, 16, generator=rng) * case.scale / 4
    weight = torch.randn(case.columns, 16, generator=rng)
    targets = torch.randint(case.columns, (case.rows,), generator=rng)
    if case.targets == "largest":
        targets = (hidden @ weight.t()).argmax(1)
    grads = torch.randn(2, case.rows, generator=rng)
    grads[:, 1::3] = 0.0
    leaves = [x.to(device, case.dtype).requires_grad_() for x in (hidden, weight)]
    targets = targets.to(device)
    before = dict(logprob.CHUNK_BYTES)
    logprob.CHUNK_BYTES[device.type] = case.chunk * 4 * case.columns
    found = []
    for function in (logprob_kernels.OnePass, logprob.LogprobEntropy):
        rest = (targets, case.temperature, case.softcap, case.entropy, None)
        logprobs, entropy = function.apply(*leaves, *rest)
        assert entropy.requires_grad == case.entropy
        loss = (logprobs * grads[0].to(device)).sum() + (entropy * grads[1].to(device)).sum()
        found.append([logprobs, entropy, *torch.autograd.grad(loss, leaves)])
    logprob.CHUNK_BYTES.update(before)

    kernels, formulas = found
    unit = 1 + case.scale if case.softcap is None else 1 + case.softcap
    differences = {}
    for name, x, y in zip(NAMES, kernels, formulas, strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        distance = (x - y).detach().double().abs().flatten()
        if name in ("hidden", "weight"):
            differences[name] = float(distance.norm() / y.detach().double().norm().clamp(min=1e-3))
        else:
            differences[name] = float(distance.max()) / unit if len(x) else 0.0
    return differences


def over_ranks(device):
    """The largest difference of sums whose columns two ranks have from those of one."""
    logits = torch.randn(5, 600, device=device) * 4
    targets = torch.tensor([0, 299, 300, 599, 42], device=device)
    parts = []
    for rank in range(2):
        columns = logits[:, 300 * rank : 300 * rank + 300].contiguous()
        parts.append(logprob_kernels.sums(columns, targets - 300 * rank, 0.7, None))
    whole = logprob_kernels.sums(logits, targets, 0.7, None)
    return float((logprob_kernels.over_ranks(torch.stack(parts)) - whole).abs().max())


def not_finite(device):
    """Whether the sums of a row with a logit that is NaN are NaN, and those of another are not."""
    logits = torch.randn(2, 300, device=device)
    logits[0, 7] = float("nan")
    _, log_sum, mean = logprob_kernels.sums(logits, torch.tensor([5, 5], device=device), 1.0, None)
    return log_sum.isnan().tolist() == mean.isnan().tolist() == [True, False]


def all_cases(device):
    found = {name: compare(case, device) for name, case in CASES.items()}
    return {"cases": found, "over_ranks": over_ranks(device), "not_finite": not_finite(device)}


if __name__ == "__main__":
    json.dump(all_cases(torch.device("cpu")), sys.stdout)
