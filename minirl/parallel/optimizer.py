"""Several torch optimizers as one, and where their state rests between steps."""

import contextlib
import math
from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor, nn

from minirl.parallel.fsdp import local
from minirl.parallel.regions import split_by_size

BLOCK = 256  # Elements that share a scale.
# Parameters below this many elements (norms, biases) keep a full state: nothing to save there.
SMALL = 4096


class Optimizer:
    """Steps `parts`, optimizers of disjoint parameters, one after the other.

    `rest`: where their state is between two steps. device: stays as it is. offload: in host memory.
    8bit: on the device in one byte an element (see `quantize`). From the latter two it comes back
    in full precision for the step, `elements_at_once` parameters at a time, and all at once for a
    checkpoint. So a checkpoint knows no `rest`; one of 8-bit state resumes bitwise on the same
    mesh, and on another, whose blocks are others, to within a level. `average`: keep an exponential
    moving average of the parameters as one more entry of the state, `ema`, in their dtype and
    shards. It begins as the weights after the first update; set `ema_decay` before each further
    one.
    """

    def __init__(
        self,
        parts: list[torch.optim.Optimizer],
        *,
        rest: str = "device",
        average: bool = False,
        elements_at_once: int = 2**28,
    ):
        self.parts, self.rest, self.elements_at_once = parts, rest, elements_at_once
        self.ema_decay = 0.0
        self._resting: dict[tuple[nn.Parameter, str], tuple[Tensor, ...]] = {}
        if average:
            for part in parts:
                part.register_step_post_hook(self._average)

    @property
    def stepped(self) -> bool:
        return any(part.state for part in self.parts)

    def step(self) -> None:
        limit = math.inf if self.rest == "device" else self.elements_at_once
        for part in self.parts:
            groups = part.param_groups
            for group, params in (
                (group, params)
                for group in groups
                for params in split_by_size(group["params"], Tensor.numel, limit)
            ):
                part.param_groups = [
                    {**group, "params": params}
                ]  # a torch optimizer steps what is in its groups
                self._wake(part, params)
                part.step()
                self._sleep(part, params)
            part.param_groups = groups

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """Inside, all state is on the device in full precision: what a checkpoint reads and
        writes.
        """
        for part in self.parts:
            self._wake(part, list(part.state))
        yield
        for part in self.parts:
            self._sleep(part, list(part.state))

    def tensors(self) -> list[Tensor]:
        """The local tensors of all state, also of that at rest."""
        full = [
            local(value)
            for part in self.parts
            for state in part.state.values()
            for value in state.values()
        ]
        return [t for t in full if t.ndim] + [t for kept in self._resting.values() for t in kept]

    def averages(self) -> dict[nn.Parameter, Tensor]:
        """Of every parameter that has been updated. Only with `average`, and inside `awake`."""
        return {p: state["ema"] for part in self.parts for p, state in part.state.items()}

    @torch.no_grad()
    def _sleep(self, part: torch.optim.Optimizer, params: list[nn.Parameter]) -> None:
        """Free the storages of their state and nothing else, so that every tensor object stays what
        others know it as.
        """
        for p, key in ((p, key) for p in params if p in part.state for key in part.state[p]):
            t = local(part.state[p][key])
            if self.rest == "offload" and t.ndim:
                kept = (
                    torch.empty(t.shape, dtype=t.dtype, pin_memory=t.is_cuda).copy_(
                        t, non_blocking=True
                    ),
                )
            elif self.rest == "8bit" and key in SIGNED and p.numel() >= SMALL:
                kept = quantize(t, signed=SIGNED[key])
            else:
                continue
            self._resting[p, key] = kept
            t.untyped_storage().resize_(0)

    @torch.no_grad()
    def _wake(self, part: torch.optim.Optimizer, params: list[nn.Parameter]) -> None:
        for p, key in ((p, key) for p in params if p in part.state for key in part.state[p]):
            if (p, key) in self._resting:
                t, kept = local(part.state[p][key]), self._resting.pop((p, key))
                t.untyped_storage().resize_(t.nbytes)
                t.copy_(
                    kept[0] if self.rest == "offload" else dequantize(*kept, t, signed=SIGNED[key]),
                    non_blocking=True,
                )

    @torch.no_grad()
    def _average(self, part: torch.optim.Optimizer, *_: object) -> None:
        for p in (p for group in part.param_groups for p in group["params"] if p.grad is not None):
            if "ema" in part.state[p]:
                local(part.state[p]["ema"]).lerp_(local(p), 1 - self.ema_decay)
            else:
                part.state[p]["ema"] = p.detach().clone()


# ----------------------------------------------------------------------------------------------------
# 8 bits

# What of an optimizer's state may rest in 8 bits. The unsigned one is kept as its square root,
# which is what the step divides by: half the decades
# to cover, so that no small second moment becomes 0 under a first moment that does not.
SIGNED = {"exp_avg": True, "momentum_buffer": True, "exp_avg_sq": False}


@cache
def dynamic_code(signed: bool, device: torch.device, dtype: torch.dtype) -> Tensor:
    """255 levels in [-1, 1] or [0, 1], ascending: seven decades, each with twice the levels of the
    one below, in its middle of equal parts. Dynamic quantization of Dettmers et al. 2022, "8-bit
    Optimizers via Block-wise Quantization", arXiv 2110.02861, scaled so that the extremes are
    exactly 1: a block's largest element then keeps its value, and quantizing twice is quantizing
    once.
    """
    decades = []
    for i in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (i if signed else i + 1) + 1, dtype=torch.float64)
        decades.append((edges[1:] + edges[:-1]) / 2 * 10.0 ** (i - 6))
    levels = torch.cat(decades) / decades[-1][-1]
    return torch.cat([-levels.flip(0) if signed else levels[:0], levels.new_zeros(1), levels]).to(
        device, dtype
    )


def quantize(t: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """A float tensor of any shape -> (uint8 [blocks, 256] nearest levels, [blocks] largest absolute
    values, in t's dtype).
    """
    flat = t.flatten() if signed else t.flatten().sqrt()
    blocks = nn.functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(1)
    levels = dynamic_code(signed, t.device, t.dtype)
    nearest = torch.bucketize(
        blocks / scales.clamp(min=torch.finfo(t.dtype).tiny)[:, None],
        (levels[1:] + levels[:-1]) / 2,
        out_int32=True,
    )
    return nearest.to(torch.uint8), scales


def dequantize(codes: Tensor, scales: Tensor, like: Tensor, *, signed: bool) -> Tensor:
    flat = (
        (dynamic_code(signed, like.device, like.dtype)[codes.int()] * scales[:, None])
        .flatten()[: like.numel()]
        .view(like.shape)
    )
    return flat if signed else flat.square()
