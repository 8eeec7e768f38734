"""Muon over sharded matrices: the momentum stays in shards, each matrix is whole on one rank
only.
"""

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


def orthogonalize(x: Tensor, steps: int = 5) -> Tensor:
    """Replace the singular values of matrices [..., m, n] by values near 1 (about 0.7 to 1.2) with
    a Newton-Schulz iteration.

    Its quintic polynomial is of Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural
    networks": steepest at 0 so that five steps are enough, at the price of not converging to 1
    exactly.
    """
    tall = x.size(-2) > x.size(-1)
    x = x.mT if tall else x  # the smaller Gram matrix
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Momentum, Nesterov, orthogonalized (Jordan et al. 2024), with decoupled weight decay.

    Takes matrices [m, n] and stacks of them [E, m, n], as tensors or DTensors of any placement
    without partial sums. All ranks must step together. Matrices are sorted by work
    (multiplications, but for a factor) and taken `world_size` at a time: in each round rank r is
    sent the shards of the r-th, orthogonalizes it once, and sends every rank its part; so ranks
    wait for each other little, and hold one matrix at most. bfloat16 on CUDA (but for float64
    parameters), the parameters' dtype on CPU.
    """

    def __init__(
        self,
        params: list[nn.Parameter],
        mesh: Mesh,
        *,
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
    ):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self.mesh = mesh
        boxes_of_ranks = mesh.gather([local_region(p) for p in params])
        self._boxes = {p: [boxes[i] for boxes in boxes_of_ranks] for i, p in enumerate(params)}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            matrices = sorted(
                (p for p in group["params"] if p.grad is not None),
                key=lambda p: p.numel() * min(p.shape[-2:]),
                reverse=True,
            )
            for first in range(0, len(matrices), self.mesh.world_size):
                self._round(matrices[first : first + self.mesh.world_size], group)

    def _round(self, matrices: list[nn.Parameter], group: dict) -> None:
        device, shards = self.mesh.device, []
        dtype = (
            torch.bfloat16
            if device.type == "cuda" and matrices[0].dtype == torch.float32
            else matrices[0].dtype
        )
        for p in matrices:
            if not self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
            grad, buffer = local(p.grad), local(self.state[p]["momentum_buffer"])
            buffer.lerp_(grad, 1 - group["momentum"])
            shards.append(grad.lerp(buffer, group["momentum"]).to(device, dtype))
        whole = self._collect(matrices, shards)
        shards = self._distribute(matrices, shards, None if whole is None else orthogonalize(whole))
        for p, shard in zip(matrices, shards, strict=True):
            rate = group["lr"] * MATCH_ADAM * math.sqrt(max(p.shape[-2:]))
            local(p).mul_(1 - group["lr"] * group["weight_decay"]).add_(
                shard.to(local(p)), alpha=-rate
            )

    def _collect(self, matrices: list[nn.Parameter], shards: list[Tensor]) -> Tensor | None:
        """The matrix of this rank, if there is one for it, out of its shards; of replicas the first
        is sent.
        """
        rank = self.mesh.rank
        sent = [
            shard if self._boxes[p].index(self._boxes[p][rank]) == rank else shard.new_empty(0)
            for p, shard in zip(matrices, shards, strict=True)
        ]
        boxes = self._boxes[matrices[rank]] if rank < len(matrices) else []
        parts = self._exchange(
            sent,
            [box[1] if boxes.index(box) == source else (0,) for source, box in enumerate(boxes)],
        )
        whole = shards[0].new_empty(matrices[rank].shape) if boxes else None
        for part, box in zip(parts, boxes, strict=True):
            if part.numel():
                view_of(whole, box).copy_(part)
        return whole

    def _distribute(
        self, matrices: list[nn.Parameter], shards: list[Tensor], whole: Tensor | None
    ) -> list[Tensor]:
        sent = (
            [shards[0].new_empty(0)]
            if whole is None
            else [view_of(whole, box) for box in self._boxes[matrices[self.mesh.rank]]]
        )
        return self._exchange(sent, [shard.shape for shard in shards])

    def _exchange(self, sent: list[Tensor], shapes: list[tuple[int, ...]]) -> list[Tensor]:
        """`sent[r]` to rank r; returns a tensor of `shapes[r]` from each rank r. Nothing to and
        from those behind the last.
        """
        num_sent, sizes = (
            [*map(math.prod, of_all), *[0] * (self.mesh.world_size - len(of_all))]
            for of_all in ([t.shape for t in sent], shapes)
        )
        into = sent[0].new_empty(sum(sizes))
        dist.all_to_all_single(into, torch.cat([t.flatten() for t in sent]), sizes, num_sent)
        return [part.view(shape) for part, shape in zip(into.split(sizes), shapes, strict=False)]
