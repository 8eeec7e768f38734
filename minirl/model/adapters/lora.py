"""Low-rank adapters: parameters of the linears that they are added to.

Hu et al. 2021 (arXiv 2106.09685): y = W x + scale B A x. A [rank, in] and B [out, rank] are
parameters of the linear itself, so tensor parallelism, FSDP, the optimizer and checkpoints treat
them like any others. Of the experts of a layer, which are fused tensors [experts, out, in], each
has A and B of its own: [experts, rank, in] and [experts, out, rank].

The engine and the files of a model get merged weights, W + scale B A (`Merged`).
"""

import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from minirl.base.errors import require
from minirl.config.policy import LoraConfig
from minirl.model import selective
from minirl.model.adapters import nf4
from minirl.model.adapters.nf4 import FourBits, Multiply
from minirl.model.families import FUSED
from minirl.model.trained import frozen_names, target_names
from minirl.parallel.fsdp import local
from minirl.parallel.regions import local_region, view_of
from minirl.parallel.tensor import LORA_A, LORA_B

RANKS = 8  # The grouped kernel of CUDA takes rows of a multiple of 16 bytes.


def is_adapter(name: str) -> bool:
    """Return whether a parameter is of an adapter, by its name."""
    return name.endswith((LORA_A, LORA_B))


@dataclass
class Adapters:
    """All adapters of a model."""

    rank: int
    scale: float  # Of what they add.
    on: bool = True  # False: the model computes as its base does.
    # Weights that are held in four bits, by name.
    packed: dict[str, FourBits] = field(default_factory=dict)
    base: str = ""  # What stands for the files with the base's weights.


# --------------------------------------------------------------------------------------------------
# to attach them


def attach(
    model: PreTrainedModel,
    cfg: LoraConfig,
    dtype: torch.dtype,
    setting: str,
    *,
    new: frozenset[str] = frozenset(),
) -> Adapters:
    """Give the linears that are targets adapters, and freeze all else.

    Args:
        model: whole, on the meta device, with its forward not yet replaced.
        cfg: which, and of what rank.
        dtype: of the adapters and of what is trained whole.
        setting: the section that holds `cfg`, for messages.
        new: names of parameters that are trained whole because the base may lack them.

    Raises:
        UserError: a target matches nothing, or a part of it is trained whole.
    """
    trained_whole = set(new)
    if cfg.modules_to_save:
        trained_whole |= frozen_names(model, cfg.modules_to_save, f"{setting}.modules_to_save")
    for name, p in model.named_parameters():
        p.requires_grad_(name in trained_whole)
        if name in trained_whole:
            p.data = p.data.to(dtype)
    adapters = Adapters(cfg.rank, cfg.alpha / (cfg.rank**0.5 if cfg.use_rslora else cfg.rank))
    adapted = []
    for name in target_names(model, cfg.targets, f"{setting}.targets"):
        parts = [p.requires_grad for p in model.get_submodule(name).parameters()]
        require(
            all(parts) or not any(parts),
            f"{setting}.modules_to_save = {cfg.modules_to_save} names a part of {name}, which "
            f"{setting}.targets gives an adapter; name all of it, {name}.*, or none",
        )
        if not any(parts):
            adapted.append(name)  # Else it is trained whole.
    packed: list[str] = []
    if cfg.quantization == "nf4":
        packed = target_names(model, ["all-linear"], f"{setting}.quantization")
    for module_name in dict.fromkeys([*adapted, *packed]):
        module: Any = model.get_submodule(module_name)
        module.adapters = adapters
        module.packed = {}
        weights: tuple[str, ...] = ("weight",)
        if isinstance(module, nn.Linear):
            module.forward = partial(_forward, module)  # type: ignore[method-assign]
        else:
            weights = FUSED
            require(
                not module.is_transposed,
                f"{setting}: the experts {module_name} are [experts, in, out] (gpt_oss), to which "
                "adapters and four bits do not apply; give targets attention, and leave "
                "quantization at none",
            )
        for name in weights:
            if module_name in adapted:
                _register(module, name, adapters, dtype)
            whole_name = f"{module_name}.{name}"
            if module_name in packed and whole_name not in trained_whole:
                module.packed[name] = nf4.pack(module, name, whole_name)
                adapters.packed[whole_name] = module.packed[name]
    return adapters


def _register(module: nn.Module, name: str, adapters: Adapters, dtype: torch.dtype) -> None:
    """Give a module A and B for a weight [..., out, in], not filled."""
    weight = module.get_parameter(name)
    *experts, num_out, num_in = weight.shape
    shapes = {LORA_A: (adapters.rank, num_in), LORA_B: (num_out, adapters.rank)}
    for which, shape in shapes.items():
        values = torch.empty(*experts, *shape, dtype=dtype, device=weight.device)
        module.register_parameter(adapter_of(name, which), nn.Parameter(values))


def adapter_of(weight: str, which: str) -> str:
    """Return the name of A or B of a module's weight, as `which` (LORA_A, LORA_B) says."""
    return which if weight == "weight" else f"{weight}_{which}"


def _forward(module: nn.Linear, x: Tensor) -> Tensor:
    """Stand in for the forward of a linear that has an adapter, or is held in four bits."""
    return multiply(module, "weight", x, F.linear, bias=module.bias)


def multiply(
    module: Any, name: str, x: Tensor, function: Multiply, bias: Tensor | None = None
) -> Tensor:
    """Multiply by a weight of a module, whichever it is held in, with its adapter if it has one.

    Args:
        module: a linear, or the experts of a layer; with an adapter or four bits as `attach` left
            it.
        name: the weight's name in the module.
        x: [.., in].
        function: multiplies x by the weight.
        bias: [out], of a linear; `function` is `F.linear` then.
    """
    parameters = module._parameters
    base = [parameters[name]]
    packed = None
    if base[0].dtype == torch.uint8:  # in four bits
        base.append(parameters[f"{name}_{nf4.SCALES}"])
        packed = module.packed[name]
    a = parameters.get(adapter_of(name, LORA_A))
    if a is not None and module.adapters.on:
        factors = a, parameters[adapter_of(name, LORA_B)]
        scale = module.adapters.scale
        return _Product.apply(x, *factors, bias, scale, function, packed, *base)
    if packed:
        y = _Product.apply(x, None, None, None, 1.0, function, packed, *base)
        return y if bias is None else y + bias
    return function(x, base[0]) if bias is None else F.linear(x, base[0], bias)


@torch.no_grad()
def start(model: nn.Module) -> None:
    """Fill this rank's shards of the adapters: A as PEFT draws it, B with 0.

    A is uniform within 1 / sqrt(in). It is drawn from its name, so that it does not depend on the
    mesh.
    """
    for name, p in model.named_parameters():
        if name.endswith(LORA_B):
            local(p).zero_()
        elif name.endswith(LORA_A):
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            bound = 1 / math.sqrt(p.shape[-1])
            whole = torch.empty(p.shape, dtype=torch.float32)
            whole.uniform_(-bound, bound, generator=generator)
            local(p).copy_(view_of(whole, local_region(p)))


# --------------------------------------------------------------------------------------------------
# merged weights


def merge(weight: Tensor, b: Tensor, a: Tensor, scale: float) -> Tensor:
    """Return weight + scale B A, rounded once, in the dtype of the weight.

    The factors are rounded to that dtype first, as FSDP gathers them.

    Args:
        weight: [.., out, in].
        b: [.., out, rank].
        a: [.., rank, in].
        scale: `Adapters.scale`.
    """
    stacked = weight.view(-1, *weight.shape[-2:])
    b = b.to(weight.dtype).view(len(stacked), *b.shape[-2:])
    a = a.to(weight.dtype).view(len(stacked), *a.shape[-2:])
    if weight.dtype in (torch.bfloat16, torch.float16):
        return torch.baddbmm(stacked, b, a, alpha=scale).view(weight.shape)
    return (stacked + torch.baddbmm(stacked, b, a, beta=0) * scale).view(weight.shape)


def _whole_weight(
    packed: FourBits | None, a: Tensor | None, b: Tensor | None, scale: float, *base: Tensor
) -> Tensor:
    """Return the weight that a module computes with, as `_Product` gets its parts."""
    weight = nf4.dequantise(packed, *base) if packed else base[0]
    return weight if a is None or b is None else merge(weight, b, a, scale)


class _Product(torch.autograd.Function):
    """x times a weight that is dequantised, or merged with an adapter, or both, for each use.

    The weight is merged before it is multiplied by, and rounded as `Merged` rounds it, so that the
    engine computes with the same weights bit by bit. A sum of two products, W x and B A x, would
    differ from them by a rounding of bfloat16 for each weight, which is as large as what adapters
    change: the log-probs of engine and trainer would be twice as far apart as in full training.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        a: Tensor | None,
        b: Tensor | None,
        bias: Tensor | None,
        scale: float,
        multiply: Multiply,
        packed: FourBits | None,
        *base: Tensor,
    ) -> Tensor:
        """Multiply by the weight, and keep what it was made of.

        Args:
            ctx: for backward.
            x: [.., in].
            a: [.., rank, in]; None: there is no adapter, and b is None, too.
            b: [.., out, rank].
            bias: [out], of a linear with an adapter.
            scale: `Adapters.scale`.
            multiply: its gradient for x must be multiply(gradient, weight.mT).
            packed: of a base that is held in four bits; None: it is not.
            base: the frozen weight [.., out, in]; or, in four bits, its bytes and its scales.
        """
        ctx.save_for_backward(None if a is None else x, a, b, *base)
        ctx.scale = scale
        ctx.multiply = multiply
        ctx.packed = packed

        def compute() -> tuple[Tensor]:
            weight = _whole_weight(packed, a, b, scale, *base)
            return (multiply(x, weight) if bias is None else F.linear(x, weight, bias),)

        return selective.keep(compute)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        """Make the weight again for the gradient of x. Those of A and B are those of B A x."""
        x, a, b, *base = ctx.saved_tensors
        grads: list[Tensor | None] = [None] * (len(base) + 7)
        if ctx.needs_input_grad[0]:
            weight = _whole_weight(ctx.packed, a, b, ctx.scale, *base)
            grads[0] = ctx.multiply(grad, weight.mT)
        if a is None:
            return tuple(grads)
        with torch.enable_grad():
            factors = [a.detach().requires_grad_(), b.detach().requires_grad_()]
            padded_a, padded_b = factors
            if b.ndim == 3:  # Factors of experts get a rank that the grouped kernel takes.
                missing = -b.shape[-1] % RANKS
                padded_a = F.pad(padded_a, (0, 0, 0, missing))
                padded_b = F.pad(padded_b, (0, missing))
            low = ctx.multiply(x.detach(), padded_a) * ctx.scale  # here it has the fewest columns
            added = ctx.multiply(low, padded_b)
            grads[1:3] = torch.autograd.grad(added, factors, grad)
        if ctx.needs_input_grad[3]:
            grads[3] = grad.flatten(0, -2).sum(0)
        return tuple(grads)


class Merged(Mapping[str, Tensor]):
    """This rank's part of W + scale B A, computed when it is asked for.

    Only A and B are gathered, about a hundredth of the model, and of them a rank keeps what its
    shards need. So the engine can be filled bucket by bucket without a second copy of the model.
    """

    def __init__(
        self,
        shards: dict[str, Tensor],
        parameters: dict[str, Tensor],
        adapters: Adapters,
        read: Callable[[Tensor], Tensor],
    ):
        """Gather the adapters as they are now. Collective.

        Args:
            shards: this rank's part of the weights that files hold, by name. Those in four bits
                have no values.
            parameters: this rank's part of the model's parameters, by the model's names.
            adapters: of the model.
            read: returns this rank's tensor of a parameter, or if it is offloaded, a copy.
        """
        self.shards = shards
        self.parameters = parameters
        self.adapters = adapters
        self.read = read
        self.factors: dict[str, tuple[Tensor, Tensor]] = {}  # By weight: B and A.
        for name, b in parameters.items():
            if name.endswith(LORA_B):
                weight = weight_of(name)
                a = parameters[name.removesuffix(LORA_B) + LORA_A]
                # Those rows of B and columns of A that this rank's shard needs.
                (*experts, row, column), (*num, rows, columns) = local_region(shards[weight])
                whole_b, whole_a = _whole(b), _whole(a)
                if experts:
                    here = slice(experts[0], experts[0] + num[0])
                    whole_b, whole_a = whole_b[here], whole_a[here]
                self.factors[weight] = (
                    whole_b[..., row : row + rows, :].clone(),
                    whole_a[..., column : column + columns].clone(),
                )

    @torch.no_grad()
    def __getitem__(self, name: str) -> Tensor:
        """Return a shard, merged, in the dtype of the base."""
        shard = self.shards[name]
        packed = self.adapters.packed.get(name)
        if packed:
            scales = self.parameters[f"{name}_{nf4.SCALES}"]
            values = nf4.shard(packed, self.parameters[name], scales, self.read)
        else:
            values = self.read(local(shard))
        if name in self.factors:
            values = merge(values, *self.factors[name], self.adapters.scale)
        if not isinstance(shard, DTensor):
            return values
        return nf4.like(shard, values, shard.shape)

    def __iter__(self) -> Iterator[str]:
        """Yield the names of the weights."""
        return iter(self.shards)

    def __len__(self) -> int:
        """Return how many weights there are."""
        return len(self.shards)


def _whole(p: Tensor) -> Tensor:
    """Return a parameter from all ranks. Collective."""
    return p.full_tensor().detach() if isinstance(p, DTensor) else p.detach()


def weight_of(name: str) -> str:
    """Return the name of the weight that an adapter's parameter belongs to."""
    module, _, last = name.rpartition(".")
    fused = last.removesuffix(LORA_A).removesuffix(LORA_B)
    return f"{module}.{fused.removesuffix('_') or 'weight'}"
