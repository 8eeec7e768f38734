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
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from minirl.base.errors import UserError, require
from minirl.config.policy import LoraConfig
from minirl.model.adapters import nf4
from minirl.model.adapters.merge import merge, product
from minirl.model.adapters.nf4 import Packed
from minirl.model.freeze import frozen_names
from minirl.model.mixture.experts import FUSED
from minirl.parallel.fsdp import local, local_region
from minirl.parallel.tensor import LORA_A, LORA_B

# Groups of targets, by the block that a linear is in.
ATTENTION = ("*attn*", "*attention*")
MLP = ("*mlp*", "*feed_forward*", "*experts*")
GROUPS = {"all-linear": (*ATTENTION, *MLP), "attention": ATTENTION, "mlp": MLP}
LAYERS = "*layers.*"  # Of the language model.
TOWERS = ("*visual*", "*vision_tower*", "*audio_tower*")  # Get adapters by patterns only.
# Linears that are in no group: a router, the gate of a shared expert, which has one output, and the
# gates of a delta net's heads, of which there are about as many as a rank.
GATES = ("wg", "shared_expert_gate", "in_proj_ba", "in_proj_a", "in_proj_b")


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that are trained, by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


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
    packed: dict[str, Packed] = field(default_factory=dict)


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
        UserError: a target matches nothing.
    """
    trained_whole = set(new)
    if cfg.modules_to_save:
        trained_whole |= frozen_names(model, cfg.modules_to_save, f"{setting}.modules_to_save")
    for name, p in model.named_parameters():
        p.requires_grad_(name in trained_whole)
        if name in trained_whole:
            p.data = p.data.to(dtype)
    adapters = Adapters(cfg.rank, cfg.scale)
    for name in target_names(model, cfg.targets, f"{setting}.targets"):
        module = model.get_submodule(name)
        if any(p.requires_grad for p in module.parameters()):
            continue  # It is trained whole.
        if isinstance(module, nn.Linear):
            _attach_to_linear(module, adapters, dtype)
        else:
            _attach_to_experts(module, name, adapters, dtype, setting)
    if cfg.quantization == "nf4":
        _pack_layers(model, adapters, trained_whole, f"{setting}.quantization")
    return adapters


def _pack_layers(
    model: PreTrainedModel, adapters: Adapters, trained_whole: set[str], setting: str
) -> None:
    """Let the matrices of the language model's layers be held in four bits."""
    for module_name in target_names(model, ["all-linear"], setting):
        module: Any = model.get_submodule(module_name)
        is_linear = isinstance(module, nn.Linear)
        here: dict[str, Packed] = {}
        for name in ("weight",) if is_linear else FUSED:
            whole_name = f"{module_name}.{name}"
            if whole_name in trained_whole:
                continue
            if not is_linear:
                _check_layout(module, module_name, setting)
            here[name] = nf4.pack(module, name, whole_name)
            adapters.packed[whole_name] = here[name]
        if not is_linear:  # for model/mixture/experts.py
            module.adapters = adapters
            module.packed = here
        elif here:
            module.forward = partial(_packed_forward, module, adapters, here["weight"])


def target_names(model: PreTrainedModel, targets: list[str], setting: str) -> list[str]:
    """Return the names of the modules that get adapters, in the model's order.

    Args:
        model: whole.
        targets: as `LoraConfig.targets` has them.
        setting: what holds them, for messages.

    Raises:
        UserError: one of them matches nothing.
    """
    can_be = {}
    for name, module in model.named_modules():
        is_experts = set(FUSED) <= set(module._parameters)
        if isinstance(module, nn.Linear) or is_experts:
            can_be[name] = module
    matched: set[str] = set()
    for target in targets:
        found = [name for name in can_be if _matches(name, target)]
        if not found:
            last = sorted({name.rpartition(".")[2] for name in can_be})
            raise UserError(
                f"{setting}: {target!r} matches no linear layer of the model; give all-linear, "
                f"attention, mlp, a name ({', '.join(last)}) or a pattern of whole names such as "
                f"{next(iter(can_be))}"
            )
        matched.update(found)
    return [name for name in can_be if name in matched]


def _matches(name: str, target: str) -> bool:
    """Return whether a target of the config means a module."""
    block, _, last = name.rpartition(".")
    in_tower = any(fnmatchcase(name, pattern) for pattern in TOWERS)
    if target in GROUPS:
        in_layers = fnmatchcase(name, LAYERS) and not in_tower
        in_group = any(fnmatchcase(name, pattern) for pattern in GROUPS[target])
        return in_layers and in_group and last not in GATES
    if "." in target or "*" in target:
        return fnmatchcase(name, target)
    return last == target and not in_tower


def _attach_to_linear(module: nn.Linear, adapters: Adapters, dtype: torch.dtype) -> None:
    _register(module, "", module.weight, adapters, dtype)
    module.forward = partial(_forward, module, adapters)  # type: ignore[method-assign]


def _attach_to_experts(
    module: nn.Module, name: str, adapters: Adapters, dtype: torch.dtype, setting: str
) -> None:
    _check_layout(module, name, f"{setting}.targets")
    for fused in FUSED:
        weight = module.get_parameter(fused)
        _register(module, f"{fused}_", weight, adapters, dtype)
    module.adapters = adapters  # type: ignore[assignment]  # for model/mixture/experts.py


def _check_layout(module: Any, name: str, setting: str) -> None:
    require(
        not module.is_transposed,
        f"{setting}: the experts {name} are [experts, in, out] (gpt_oss), to which adapters and "
        "four bits do not apply; give attention, and leave quantization at none",
    )


def _register(
    module: nn.Module, prefix: str, weight: Tensor, adapters: Adapters, dtype: torch.dtype
) -> None:
    """Give a module A and B for a weight [..., out, in], not filled."""
    *experts, num_out, num_in = weight.shape
    shapes = {LORA_A: (adapters.rank, num_in), LORA_B: (num_out, adapters.rank)}
    for name, shape in shapes.items():
        values = torch.empty(*experts, *shape, dtype=dtype, device=weight.device)
        module.register_parameter(prefix + name, nn.Parameter(values))


def _forward(module: nn.Linear, adapters: Adapters, x: Tensor) -> Tensor:
    """Stand in for the forward of a linear that has an adapter."""
    if not adapters.on:
        return F.linear(x, module.weight, module.bias)
    return _adapted(module, adapters, x, None, module.weight)


def _packed_forward(module: nn.Linear, adapters: Adapters, packed: Packed, x: Tensor) -> Tensor:
    """Stand in for the forward of a linear that is held in four bits."""
    scales = module._parameters[f"weight_{nf4.SCALES}"]
    assert scales is not None
    if adapters.on and LORA_A in module._parameters:
        return _adapted(module, adapters, x, packed, module.weight, scales)
    y = nf4.product(x, module.weight, scales, packed, F.linear)
    return y if module.bias is None else y + module.bias


def _adapted(
    module: nn.Linear, adapters: Adapters, x: Tensor, packed: Packed | None, *base: Tensor
) -> Tensor:
    """Return what a linear with an adapter makes of x. `packed`, `base`: as `product` has them."""
    parameters: dict = module._parameters
    a, b = parameters[LORA_A], parameters[LORA_B]
    return product(x, a, b, adapters.scale, F.linear, packed, *base, bias=module.bias)


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
            offset, size = local_region(p)
            part = [slice(first, first + num) for first, num in zip(offset, size, strict=True)]
            local(p).copy_(whole[tuple(part)])


# --------------------------------------------------------------------------------------------------
# merged weights


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
                self.factors[weight] = self._needed(shards[weight], b, a)

    def _needed(self, shard: Tensor, b: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        """Return those rows of B and columns of A that a shard needs. Collective."""
        (*experts, row, column), (*num_experts, num_rows, num_columns) = local_region(shard)
        whole_b, whole_a = _whole(b), _whole(a)
        if experts:
            own = slice(experts[0], experts[0] + num_experts[0])
            whole_b, whole_a = whole_b[own], whole_a[own]
        rows = whole_b[..., row : row + num_rows, :].clone()
        columns = whole_a[..., column : column + num_columns].clone()
        return rows, columns

    @torch.no_grad()
    def __getitem__(self, name: str) -> Tensor:
        """Return a shard, merged, in the dtype of the base."""
        shard = self.shards[name]
        values = self._base(name)
        if name in self.factors:
            values = merge(values, *self.factors[name], self.adapters.scale)
        if not isinstance(shard, DTensor):
            return values
        return nf4.like(shard, values, shard.shape)

    def _base(self, name: str) -> Tensor:
        """Return this rank's part of a weight without its adapter."""
        if name not in self.adapters.packed:
            return self.read(local(self.shards[name]))
        bits = self.parameters[name]
        scales = self.parameters[f"{name}_{nf4.SCALES}"]
        return nf4.shard(self.adapters.packed[name], bits, scales, self.read)

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
