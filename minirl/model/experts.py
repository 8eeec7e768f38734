"""The experts of all Hugging Face mixtures here, on fused weights, and their division over ranks.

`mixture` takes any dtype, sorts tokens by expert, and drops none. Registered as "minirl". The
library's own functions differ between its versions in what an index of no expert does, and some
know no float64.

Expert parallelism: each rank has some experts of a mixture, and tokens travel to theirs. Experts
are DTensors over the axis `ep`, and FSDP shards them over the rest of the ranks. A layer sends the
hidden state of each token to the ranks of its experts by an all-to-all, and brings the results home
by a second one; backward does the same with gradients (GShard, Lepikhin et al. 2020, arXiv
2006.16668, without a capacity: no token is dropped). FSDP then gathers 1 / ep of the experts.

The host waits for the device once in each forward of a layer, because `all_to_all_single` takes the
numbers of rows from the host. Recomputation for activation checkpointing is one more forward.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from minirl.model import selective
from minirl.model.adapters import lora, nf4
from minirl.model.families import FUSED
from minirl.parallel.mesh import Mesh
from minirl.parallel.placements import AllToAll, Forward, Layout, shard_all

NAME = "minirl"
# Multiply(x, weight, ends), as `_one_by_one` has it.
Multiply = Callable[..., Tensor]


class SortedRows:
    """The rows of tokens, a copy for each of their experts, sorted by expert."""

    def __init__(self, indices: Tensor, num_experts: int):
        """Sort, without waiting for the device.

        Args:
            indices: int64 [T, k]: the experts of each token. `num_experts` is no expert.
            num_experts: how many there are.
        """
        self.shape = indices.shape
        experts = indices.flatten()
        self.order = experts.argsort(stable=True)
        numbers = torch.arange(num_experts, device=experts.device)
        # int64 [E]: where the rows of each expert end. Those of no expert come after the last.
        self.ends = torch.searchsorted(experts[self.order], numbers, right=True)

    def gather(self, hidden: Tensor) -> Tensor:
        """Return the rows, [T k, H], of hidden states [T, H]."""
        return hidden.index_select(0, self.order // self.shape[1])

    def combine(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Return for each token the sum of its rows times their weights.

        Args:
            rows: [T k, H], in the order of `gather`.
            weights: [T, k].
        """
        rows = self.restore(rows).view(*self.shape, -1)
        return (rows * weights[..., None]).sum(1)

    def restore(self, rows: Tensor) -> Tensor:
        """Return rows [T k, H] in the order of tokens."""
        # Not index_add: its order of summation varies on CUDA.
        return rows.index_select(0, self.order.argsort())


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
    function = partial(_multiply, ends=ends, multiply=multiply)
    if module.is_transposed:
        y = function(x, module._parameters[name].mT)
    else:
        y = lora.multiply(module, name, x, function)
    if module.has_bias:
        # Of each row's expert, 0 in rows of no expert: by a product, because its backward sums in a
        # fixed order.
        biases = module._parameters[f"{name}_bias"]
        rows = torch.arange(len(x), device=ends.device)[:, None]
        sizes = ends.diff(prepend=ends.new_zeros(1))
        is_of_expert = (rows >= ends - sizes) & (rows < ends)
        y = y + is_of_expert.to(biases.dtype) @ biases
    return y


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
    rows = torch.arange(len(x), device=x.device)[:, None]
    no_expert = rows >= ends[-1]
    x = x.masked_fill(no_expert, 0)
    y = F.grouped_mm(x, weight.mT, offs=ends.int())
    return y.masked_fill(no_expert, 0)


def _multiply(x: Tensor, weight: Tensor, ends: Tensor, multiply: Multiply) -> Tensor:
    """Do as `_one_by_one` or `_grouped`, and let selective checkpointing keep the result."""
    if selective.is_on():
        return _Product.apply(x, weight, ends, multiply)
    return multiply(x, weight, ends)


class _Product(torch.autograd.Function):
    """Rows of each expert times its matrix, of which the result is kept."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, ends: Tensor, multiply: Multiply) -> Tensor:
        """Return multiply(x, weight, ends)."""
        ctx.save_for_backward(x, weight, ends)
        ctx.multiply = multiply
        return selective.keep(lambda: (multiply(x, weight, ends),))[0]

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple:
        """Return the gradients of rows and matrices."""
        x, weight, ends = ctx.saved_tensors
        grad_x = ctx.multiply(grad, weight.mT, ends) if ctx.needs_input_grad[0] else None
        grad_weight = None
        if ctx.needs_input_grad[1]:  # it lies in memory as the weight does
            left, right = (grad, x) if weight.is_contiguous() else (x, grad)
            if ctx.multiply is _grouped:  # One kernel, which leaves out rows of no expert.
                outer = F.grouped_mm(left.t(), right, offs=ends.int())
            else:
                outer = _outer_one_by_one(left, right, ends)
            grad_weight = outer if weight.is_contiguous() else outer.mT
        return grad_x, grad_weight, None, None


def _outer_one_by_one(x: Tensor, y: Tensor, ends: Tensor) -> Tensor:
    """Return x' y of the rows of each expert: [N, A] and [N, B] -> [E, A, B]."""
    sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
    num_rows = sum(sizes)
    pairs = zip(x[:num_rows].split(sizes), y[:num_rows].split(sizes), strict=True)
    return torch.stack([of_x.t() @ of_y for of_x, of_y in pairs])


ALL_EXPERTS_FUNCTIONS.register(NAME, mixture)


# --------------------------------------------------------------------------------------------------
# over ranks


def find_experts(model: nn.Module) -> list[Any]:
    """Return the modules of a model that are the experts of a layer."""
    return [module for module in model.modules() if set(FUSED) <= set(module._parameters)]


def divide(model: nn.Module, mesh: Mesh) -> None:
    """Keep this rank's experts of each layer, and let tokens travel to the others."""
    assert mesh.experts
    axis = mesh.experts.experts
    for module in find_experts(model):
        whole = {name: module._parameters[name] for name in FUSED}
        module.forward = divide_experts(module, mesh)
        for name, weight in whole.items():
            if weight.dtype == torch.uint8:
                num_scales = weight.numel() * 2 // nf4.BLOCK
                module.packed[name].first = num_scales // axis.size() * axis.get_local_rank()


def divide_experts(module: Any, mesh: Mesh) -> Forward:
    """Keep some of the experts of fused tensors [experts, ...], and return the forward.

    Args:
        module: the library's experts. Their forward takes hidden states [T, H], indices [T, k] and
            weights [T, k]; with indices [N, 1] and None it returns the rows of experts as they are.
        mesh: the ranks.

    Returns:
        A forward that takes indices of all experts. Under tensor parallelism it returns the results
        of this rank's share of the tokens, and 0 for the others: the block sums over ranks.
    """
    assert mesh.experts
    axis = mesh.experts.experts
    group = axis.get_group()
    num_experts = module.num_experts
    module.num_experts = num_experts // axis.size()
    compute = shard_all(module, axis, Layout(Shard(0)))

    def forward(hidden: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        # Tensor-parallel ranks see the same tokens, and each sends its share of them.
        number, num_shares = mesh.tensor.get_local_rank(), mesh.tensor.size()
        first = len(hidden) * number // num_shares
        last = len(hidden) * (number + 1) // num_shares
        share = slice(first, last)
        rows = SortedRows(indices[share], num_experts)

        # How many rows leave for each expert of all ranks, and arrive, for [rank, expert here].
        leaving = rows.ends.diff(prepend=rows.ends.new_zeros(1))
        arriving = torch.empty_like(leaving)
        dist.all_to_all_single(arriving, leaving, group=group)
        by_rank = torch.stack([leaving, arriving]).view(2, group.size(), -1).sum(2)
        own = rows.gather(hidden[share])
        sent, received = _to_host(by_rank, len(own))

        arrived = AllToAll.apply(own, group, sent, received)
        experts = torch.arange(module.num_experts, device=arrived.device).repeat(group.size())
        experts = experts.repeat_interleave(arriving, output_size=len(arrived))
        results = compute(arrived, experts[:, None], None)
        results = AllToAll.apply(results, group, received, sent)
        out = rows.combine(results, weights[share]).to(hidden.dtype)
        return F.pad(out, (0, 0, first, len(hidden) - last))

    return forward


def _to_host(by_rank: Tensor, num_rows: int) -> list[list[int]]:
    """Return [2, ranks] numbers of rows, sent and received: here the host waits for the device.

    Args:
        by_rank: the same, int64 on the device.
        num_rows: how many are sent.
    """
    sent, received = by_rank.tolist()
    assert sum(sent) == num_rows, "a token has an expert number above the number of experts"
    return [sent, received]
