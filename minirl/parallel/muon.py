"""Muon over sharded matrices: momentum stays in shards, each matrix is whole on one rank only."""

import math

import torch
from torch import Tensor, nn

from minirl.parallel.fsdp import local
from minirl.parallel.mesh import Mesh
from minirl.parallel.regions import (
    ShardedTensor,
    collect,
    exchange_parts,
    regions_of_ranks,
    view_of,
)

# RMS of an AdamW update, which an orthogonal [m, n] matrix (RMS 1 / sqrt(max(m, n))) is scaled to,
# so that one learning rate serves both optimizers
# (Liu et al. 2025, "Muon is Scalable for LLM Training", arXiv 2502.16982, equation 4).
MATCH_ADAM = 0.2


def orthogonalize(x: Tensor) -> Tensor:
    """Replace the singular values of matrices [..., m, n] by values near 1 (about 0.7 to 1.2).

    A Newton-Schulz iteration with the quintic polynomial of Jordan et al. 2024, "Muon: An optimizer
    for hidden layers in neural networks". It is steepest at 0 so that five steps are enough, at the
    price of not converging to 1 exactly.
    """
    tall = x.size(-2) > x.size(-1)
    x = x.mT if tall else x  # the smaller Gram matrix
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalized (Jordan et al. 2024), with decoupled weight decay.

    Takes matrices [m, n] and stacks of them [E, m, n], as tensors or DTensors of any placement
    without partial sums. All ranks must step together. Matrices are sorted by work
    (multiplications, up to a factor) and taken `world_size` at a time: in each round rank r
    receives the shards of the r-th matrix, orthogonalizes it once, and sends every rank its part.
    So ranks wait little for each other, and hold one whole matrix at most. Matrices travel and are
    orthogonalized in bfloat16 on CUDA (but float64 ones in float64), and in the parameters' dtype
    on CPU.
    """

    def __init__(
        self,
        params: list[nn.Parameter],
        mesh: Mesh,
        *,
        lr: float,
        weight_decay: float,
    ):
        super().__init__(params, {"lr": lr, "momentum": 0.95, "weight_decay": weight_decay})
        self.mesh = mesh
        # Of each parameter the region of each rank.
        self._regions = dict(zip(params, regions_of_ranks(list(params), mesh), strict=True))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closure
        """Update all parameters that have a gradient. Collective."""
        rounds = []
        for group in self.param_groups:
            matrices = [p for p in group["params"] if p.grad is not None]
            matrices.sort(key=lambda p: p.numel() * min(p.shape[-2:]), reverse=True)
            for first in range(0, len(matrices), self.mesh.world_size):
                rounds.append((group, matrices[first : first + self.mesh.world_size]))
        for group, matrices in rounds:
            dtype = matrices[0].dtype
            if self.mesh.device.type == "cuda" and dtype == torch.float32:
                dtype = torch.bfloat16
            # 1. This rank's gradients go into its momentum; the shards are Nesterov's directions.
            shards = []
            for p in matrices:
                assert p.grad is not None  # `step` takes no others
                state = self.state[p]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(p)
                grad = local(p.grad)
                buffer = local(state["momentum_buffer"])
                buffer.lerp_(grad, 1 - group["momentum"])
                shards.append(grad.lerp(buffer, group["momentum"]).to(self.mesh.device, dtype))

            # 2. This rank orthogonalizes one whole matrix, and sends every rank its part.
            wanted = {}
            for rank, (p, shard) in enumerate(zip(matrices, shards, strict=True)):
                wanted[rank] = ShardedTensor(p.shape, shard, self._regions[p])
            whole = collect(wanted, self.mesh)
            if whole is None:
                sent = [shards[0].new_empty(0)]
            else:
                whole = orthogonalize(whole)
                sent = [view_of(whole, region) for region in wanted[self.mesh.rank].regions]
            updates = exchange_parts(sent, [shard.shape for shard in shards], self.mesh)

            # 3. The step.
            for p, update in zip(matrices, updates, strict=True):
                rate = group["lr"] * MATCH_ADAM * math.sqrt(max(p.shape[-2:]))
                shard = local(p)
                shard.mul_(1 - group["lr"] * group["weight_decay"])
                shard.add_(update.to(shard), alpha=-rate)
