"""The one experts function that all Hugging Face mixtures here call, on fused weights: any dtype,
tokens sorted by expert, none dropped.

Registered as "minirl". The library's own differ between its versions in what an index of no expert
does, and some know no float64.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

NAME = "minirl"


def mixture(module: torch.nn.Module, hidden: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    """hidden [T, H], indices int64 [T, k], weights [T, k] -> sum over k of weight * expert(hidden),
    [T, H].

    An index of `module.num_experts` is no expert, and adds 0: under tensor parallelism another rank
    has it.
    """
    multiply = _grouped if hidden.is_cuda and hidden.dtype == torch.bfloat16 else _one_by_one
    chosen = indices.flatten()
    order = chosen.argsort(stable=True)
    counts = chosen.bincount(minlength=module.num_experts + 1)[: module.num_experts]
    x = hidden.index_select(0, order // indices.shape[1])
    y = multiply(
        module._apply_gate(multiply(x, module.gate_up_proj, counts)), module.down_proj, counts
    )
    y = y.index_select(0, order.argsort()).view(
        *indices.shape, -1
    )  # not index_add, whose order of summation varies on CUDA
    return (y * weights[..., None]).sum(1).to(hidden.dtype)


def _one_by_one(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """x [N, in] sorted by expert, weight [E, out, in], counts int64 [E] -> [N, out], 0 in rows of
    no expert.
    """
    sizes = counts.tolist()
    outs = [
        rows @ matrix.t()
        for rows, matrix in zip(x[: sum(sizes)].split(sizes), weight.unbind(0), strict=True)
    ]
    return torch.cat([*outs, x.new_zeros(len(x) - sum(sizes), weight.shape[1])])


def _grouped(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """The same in one kernel, without waiting for the counts. It leaves rows of no expert
    unwritten, forward and backward.
    """
    ends = counts.cumsum(0)
    nowhere = torch.arange(len(x), device=x.device)[:, None] >= ends[-1]
    return F.grouped_mm(
        x.masked_fill(nowhere, 0), weight.transpose(1, 2), offs=ends.to(torch.int32)
    ).masked_fill(nowhere, 0)


ALL_EXPERTS_FUNCTIONS.register(NAME, mixture)
