"""Expert parallelism: each rank has some experts of a mixture, and tokens travel to theirs.

Experts are DTensors over the axis `ep`, and FSDP shards them over the rest of the ranks. A layer
sends the hidden state of each token to the ranks of its experts by an all-to-all, and brings the
results home by a second one; backward does the same with gradients (GShard, Lepikhin et al. 2020,
arXiv 2006.16668, without a capacity: no token is dropped). FSDP then gathers 1 / ep of the experts.

The host waits for the device once in each forward of a layer, because `all_to_all_single` takes the
numbers of rows from the host. Recomputation for activation checkpointing is one more forward.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from minirl.parallel.mesh import Mesh
from minirl.parallel.placements import Forward, Layout, shard_all


@dataclass(frozen=True)
class ExpertParallel:
    """The axis that divides experts, and which tokens this rank sends to them."""

    mesh: DeviceMesh  # 1-D (ep).
    # Tensor-parallel ranks see the same tokens, and each sends its share of them.
    share: int
    num_shares: int

    @classmethod
    def of(cls, mesh: Mesh) -> "ExpertParallel | None":
        """Return the axis of a mesh, None if it has none."""
        if mesh.experts is None:
            return None
        tensor = mesh.tensor
        return cls(mesh.experts.experts, tensor.get_local_rank(), tensor.size())

    @property
    def group(self) -> dist.ProcessGroup:
        """Return the ranks that divide the experts."""
        return self.mesh.get_group()

    def local_rows(self, num_rows: int) -> slice:
        """Return which of the rows that tensor-parallel ranks have in common this one sends."""
        first = num_rows * self.share // self.num_shares
        return slice(first, num_rows * (self.share + 1) // self.num_shares)


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


class _Exchange(torch.autograd.Function):
    """Send rows to where they belong; in backward their gradients come back the same way."""

    @staticmethod
    def forward(ctx, rows, sent, received, group):
        ctx.arguments = received, sent, group
        return _exchange(rows, sent, received, group)

    @staticmethod
    def backward(ctx, grad):
        return _exchange(grad, *ctx.arguments), None, None, None


def _exchange(
    rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
) -> Tensor:
    """Send the first of the rows [N, H] to the first rank, and so on; return what comes.

    Args:
        rows: sorted by the rank that they go to.
        sent: how many go to each rank of the group.
        received: how many come from each.
        group: the ranks.
    """
    out = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
    return out


def _to_host(by_rank: Tensor, num_rows: int) -> list[list[int]]:
    """Return [2, ranks] numbers of rows, sent and received: here the host waits for the device.

    Args:
        by_rank: the same, int64 on the device.
        num_rows: how many are sent.
    """
    sent, received = by_rank.tolist()
    assert sum(sent) == num_rows, "a token has an expert number above the number of experts"
    return [sent, received]


def divide_experts(module: Any, ep: ExpertParallel) -> Forward:
    """Keep some of the experts of fused tensors [experts, ...], and return the forward.

    Args:
        module: the library's experts. Their forward takes hidden states [T, H], indices [T, k] and
            weights [T, k]; with indices [N, 1] and None it returns the rows of experts as they are.
        ep: the axis.

    Returns:
        A forward that takes indices of all experts. Under tensor parallelism it returns the results
        of this rank's share of the tokens, and 0 for the others: the block sums over ranks.
    """
    num_experts = module.num_experts
    module.num_experts = num_experts // ep.mesh.size()
    compute = shard_all(module, ep.mesh, Layout(Shard(0)))

    def forward(hidden: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        share = ep.local_rows(len(hidden))
        rows = SortedRows(indices[share], num_experts)
        results = _visit(compute, rows.gather(hidden[share]), rows.ends, ep)
        out = rows.combine(results, weights[share]).to(hidden.dtype)
        return F.pad(out, (0, 0, share.start, len(hidden) - share.stop))

    return forward


def _visit(compute: Forward, rows: Tensor, ends: Tensor, ep: ExpertParallel) -> Tensor:
    """Return what the experts of all ranks make of rows.

    Args:
        compute: the forward of this rank's experts.
        rows: [N, H], sorted by expert.
        ends: int64 [all experts]: where the rows of each expert end.
        ep: the axis.
    """
    num_ranks = ep.mesh.size()
    counts = ends.diff(prepend=ends.new_zeros(1))
    arriving = torch.empty_like(counts)  # For [rank, expert of this one].
    dist.all_to_all_single(arriving, counts, group=ep.group)
    by_rank = torch.stack([counts, arriving]).view(2, num_ranks, -1).sum(2)
    sent, received = _to_host(by_rank, len(rows))

    rows = _Exchange.apply(rows, sent, received, ep.group)
    numbers = torch.arange(len(ends) // num_ranks, device=rows.device)
    experts = numbers.repeat(num_ranks).repeat_interleave(arriving, output_size=len(rows))
    results = compute(rows, experts[:, None], None)
    return _Exchange.apply(results, received, sent, ep.group)
