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
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from minirl.model.adapters import nf4
from minirl.model.adapters.lora import product
from minirl.model.families import FUSED
from minirl.parallel.experts import ExpertParallel, SortedRows, divide_experts
from minirl.parallel.tensor import LORA_A, LORA_B

NAME = "minirl"
# Multiply(x, weight, ends), as `_one_by_one` has it.
Multiply = Callable[..., Tensor]


def mixture(module: Any, hidden: Tensor, indices: Tensor, weights: Tensor | None) -> Tensor:
    """Return the sum over k of weight * expert(hidden), [T, H].

    With `_grouped` nothing waits for the device.

    Args:
        module: the library's experts: `num_experts`, `gate_up_proj` [E, 2 I, H], `down_proj`
            [E, H, I] and `_apply_gate`. With `is_transposed` the matrices are [E, in, out]; with
            `has_bias` each has a bias [E, out], named `{matrix}_bias`.
        hidden: [T, H].
        indices: int64 [T, k]: the experts of each token. `module.num_experts` is no expert, and
            adds 0: under tensor parallelism another rank has it.
        weights: [T, k]. None: k is 1, and so is every weight: tokens that other ranks send to the
            experts of this one under expert parallelism.
    """
    multiply = _one_by_one
    # A kernel of CUDA takes no empty matrix, which expert parallelism can bring.
    if hidden.is_cuda and hidden.dtype == torch.bfloat16 and len(hidden):
        multiply = _grouped
    rows = SortedRows(indices, module.num_experts)
    x = rows.gather(hidden)
    x = module._apply_gate(_project(module, "gate_up_proj", x, rows.ends, multiply))
    y = _project(module, "down_proj", x, rows.ends, multiply)
    y = rows.restore(y) if weights is None else rows.combine(y, weights)
    return y.to(hidden.dtype)


def _project(module: Any, name: str, x: Tensor, ends: Tensor, multiply: Multiply) -> Tensor:
    """Multiply the rows of each expert by its matrix, with its adapter; add its bias.

    Args:
        module: the experts.
        name: the name of the matrix.
        x: [N, in], sorted by expert.
        ends: where the rows of each expert end, int64 [E].
        multiply: multiplies x by the matrices of all experts.
    """
    multiply = partial(multiply, ends=ends)
    parameters = module._parameters
    base = [parameters[name]]
    packed = None
    if base[0].dtype == torch.uint8:  # in four bits
        base.append(parameters[f"{name}_{nf4.SCALES}"])
        packed = module.packed[name]
    elif module.is_transposed:
        base = [base[0].mT]
    a = parameters.get(f"{name}_{LORA_A}")
    if a is not None and module.adapters.on:
        b = parameters[f"{name}_{LORA_B}"]
        y = product(x, a, b, module.adapters.scale, multiply, packed, *base)
    elif packed:
        y = nf4.product(x, base[0], base[1], packed, multiply)
    else:
        y = multiply(x, base[0])
    if module.has_bias:
        y = y + _biases(parameters[f"{name}_bias"], ends, len(x))
    return y


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
        ends: int64 [E]: where the rows of each expert end. Rows after the last one's have none.

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


def find_experts(model: nn.Module) -> list[Any]:
    """Return the modules of a model that are the experts of a layer."""
    return [module for module in model.modules() if set(FUSED) <= set(module._parameters)]


def divide(model: nn.Module, ep: ExpertParallel) -> None:
    """Keep this rank's experts of each layer, and let tokens travel to the others."""
    for module in find_experts(model):
        whole = {name: module._parameters[name] for name in FUSED}
        module.forward = divide_experts(module, ep)
        for name, weight in whole.items():
            if weight.dtype == torch.uint8:
                num_scales = weight.numel() * 2 // nf4.BLOCK
                share = num_scales // ep.mesh.size()
                module.packed[name].first = share * ep.mesh.get_local_rank()


ALL_EXPERTS_FUNCTIONS.register(NAME, mixture)
