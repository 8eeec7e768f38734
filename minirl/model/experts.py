"""The one experts function of all Hugging Face mixtures here, on fused weights.

It takes any dtype, sorts tokens by expert, and drops none. Registered as "minirl". The library's
own functions differ between its versions in what an index of no expert does, and some know no
float64.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from minirl.model import nf4
from minirl.parallel.tensor import LORA_A, LORA_B

NAME = "minirl"
# Multiply(x, weight, ends), as `_one_by_one` has it.
Multiply = Callable[..., Tensor]


def mixture(module: Any, hidden: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    """Return the sum over k of weight * expert(hidden), [T, H].

    With `_grouped` nothing waits for the device.

    Args:
        module: the library's experts: `num_experts`, `gate_up_proj` [E, 2 I, H], `down_proj`
            [E, H, I] and `_apply_gate`. With `is_transposed` the matrices are [E, in, out]; with
            `has_bias` each has a bias [E, out], named `{matrix}_bias`.
        hidden: [T, H].
        indices: int64 [T, k]: the experts of each token. `module.num_experts` is no expert, and
            adds 0: under tensor parallelism another rank has it.
        weights: [T, k].
    """
    multiply = _one_by_one
    if hidden.is_cuda and hidden.dtype == torch.bfloat16:
        multiply = _grouped
    experts = indices.flatten()
    order = experts.argsort(stable=True)
    numbers = torch.arange(module.num_experts, device=experts.device)
    ends = torch.searchsorted(experts[order], numbers, right=True)
    x = hidden.index_select(0, order // indices.shape[1])
    x = module._apply_gate(_project(module, "gate_up_proj", x, ends, multiply))
    y = _project(module, "down_proj", x, ends, multiply)
    # Not index_add, whose order of summation varies on CUDA.
    y = y.index_select(0, order.argsort()).view(*indices.shape, -1)
    return (y * weights[..., None]).sum(1).to(hidden.dtype)


def _project(module: Any, name: str, x: Tensor, ends: Tensor, multiply: Multiply) -> Tensor:
    """Multiply the rows of each expert by its matrix of a name; add its bias and its adapter's."""
    parameters = module._parameters
    weight = parameters[name]
    if module.is_transposed:
        weight = weight.mT
    if weight.dtype == torch.uint8:  # in four bits
        scales = parameters[f"{name}_{nf4.SCALES}"]
        y = nf4.product(x, weight, scales, module.packed[name], partial(multiply, ends=ends))
    else:
        y = multiply(x, weight, ends)
    if module.has_bias:
        y = y + _biases(parameters[f"{name}_bias"], ends, len(x))
    a = parameters.get(f"{name}_{LORA_A}")
    if a is None or not module.adapters.on:
        return y
    b = parameters[f"{name}_{LORA_B}"]
    return y + multiply(multiply(x, a, ends), b, ends) * module.adapters.scale


def _biases(biases: Tensor, ends: Tensor, num_rows: int) -> Tensor:
    """Return the bias of each row's expert, [N, out], 0 in rows of no expert.

    Args:
        biases: [E, out].
        ends: as in `_one_by_one`.
        num_rows: N.
    """
    rows = torch.arange(num_rows, device=ends.device)[:, None]
    is_of_expert = (rows < ends) & (rows >= ends - ends.diff(prepend=ends.new_zeros(1)))
    # A product, because its backward sums in a fixed order.
    return is_of_expert.to(biases.dtype) @ biases


def _one_by_one(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiply the rows of each expert by its matrix.

    Args:
        x: [N, in], sorted by expert.
        weight: [E, out, in].
        ends: int64 [E]: where the rows of each expert end. Rows behind the last one's have none.

    Returns:
        [N, out], 0 in rows of no expert.
    """
    sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
    num_rows = sum(sizes)
    outs = [
        rows @ matrix.t() for rows, matrix in zip(x[:num_rows].split(sizes), weight, strict=True)
    ]
    outs.append(x.new_zeros(len(x) - num_rows, weight.shape[1]))
    return torch.cat(outs)


def _grouped(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Do as `_one_by_one` in one kernel, which reads the ends on the device.

    The kernel leaves rows of no expert unwritten, forward and backward; here they are 0.
    """
    no_expert = torch.arange(len(x), device=x.device)[:, None] >= ends[-1]
    x = x.masked_fill(no_expert, 0)
    y = F.grouped_mm(x, weight.mT, offs=ends.int())
    return y.masked_fill(no_expert, 0)


ALL_EXPERTS_FUNCTIONS.register(NAME, mixture)
