"""Muon over sharded matrices: momentum stays in shards, each matrix is whole on one rank only."""

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minirl.parallel.fsdp import local, local_region
from minirl.parallel.mesh import Mesh
from minirl.parallel.regions import view_of

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
        # Of each parameter the region of each rank. Ranks with equal ones hold copies.
        regions = zip(*mesh.gather([local_region(p) for p in params]), strict=True)
        self._regions = dict(zip(params, regions, strict=True))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closure
        """Update all parameters that have a gradient. Collective."""
        for group in self.param_groups:
            matrices = [p for p in group["params"] if p.grad is not None]
            matrices.sort(key=lambda p: p.numel() * min(p.shape[-2:]), reverse=True)
            for first in range(0, len(matrices), self.mesh.world_size):
                self._round(matrices[first : first + self.mesh.world_size], group)

    def _round(self, matrices: list[nn.Parameter], group: dict) -> None:
        """Update at most one matrix for each rank."""
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
        whole = self._collect(matrices, shards)
        if whole is None:
            sent = [shards[0].new_empty(0)]
        else:
            whole = orthogonalize(whole)
            sent = [view_of(whole, region) for region in self._regions[matrices[self.mesh.rank]]]
        updates = self._exchange(sent, [shard.shape for shard in shards])

        # 3. The step.
        for p, update in zip(matrices, updates, strict=True):
            rate = group["lr"] * MATCH_ADAM * math.sqrt(max(p.shape[-2:]))
            shard = local(p)
            shard.mul_(1 - group["lr"] * group["weight_decay"])
            shard.add_(update.to(shard), alpha=-rate)

    def _collect(self, matrices: list[nn.Parameter], shards: list[Tensor]) -> Tensor | None:
        """Return this rank's whole matrix out of all ranks' shards, None if there is none for it.

        Of the ranks that hold copies of a shard the first one sends it.
        """
        rank = self.mesh.rank
        sent = []
        for p, shard in zip(matrices, shards, strict=True):
            regions = self._regions[p]
            is_first = regions.index(regions[rank]) == rank
            sent.append(shard if is_first else shard.new_empty(0))
        if rank >= len(matrices):
            self._exchange(sent, [])
            return None
        regions = self._regions[matrices[rank]]
        shapes = []
        for source, region in enumerate(regions):
            is_first = regions.index(region) == source
            shapes.append(region.size if is_first else (0,))
        whole = shards[0].new_empty(matrices[rank].shape)
        for part, region in zip(self._exchange(sent, shapes), regions, strict=True):
            if part.numel():
                view_of(whole, region).copy_(part)
        return whole

    def _exchange(self, sent: list[Tensor], shapes: list[tuple[int, ...]]) -> list[Tensor]:
        """Send `sent[r]` to rank r, and return a tensor of `shapes[r]` from each rank r.

        Ranks behind the end of a list get nothing, or send nothing.
        """
        num_sent = [0] * self.mesh.world_size
        num_sent[: len(sent)] = [t.numel() for t in sent]
        num_received = [0] * self.mesh.world_size
        num_received[: len(shapes)] = map(math.prod, shapes)
        received = sent[0].new_empty(sum(num_received))
        flat = torch.cat([t.flatten() for t in sent])
        dist.all_to_all_single(received, flat, num_received, num_sent)
        parts = received.split(num_received)
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=False)]
