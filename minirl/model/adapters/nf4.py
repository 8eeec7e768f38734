"""The door to bitsandbytes: frozen weights in four bits.

Dettmers et al. 2023, QLoRA (arXiv 2305.14314): a weight is one of 16 values, which suit normally
distributed numbers (NF4), times the largest of its block of 64. These largest values are in turn 8
bits each, times the largest of their block of 256 (double quantisation). Both are the format of
bitsandbytes, of whole matrices, so that numbers do not depend on the mesh.

What is sharded is the packed bytes, [.., out, in / 2], and the 8-bit values, [.., out, in / 64],
both by rows as the weight would be. A matrix is dequantised when it is used, forward and again
backward, and is not kept in between.
"""

import functools
import importlib
import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from minirl.base.errors import require
from minirl.parallel.fsdp import local
from minirl.parallel.regions import local_region, view_of

BLOCK = 64  # Weights that have one scale.
NESTED = 256  # Scales that have one scale.
SCALES = "nf4_scales"  # Ends the name of a weight's 8-bit parameter, after the weight's name.
# multiply(x, weight) is x @ weight.mT, for x [.., in] and weight [.., out, in].
Multiply = Callable[[Tensor, Tensor], Tensor]


@functools.cache
def _library() -> Any:
    """Return the functions of bitsandbytes. Raises UserError without the package."""
    require(
        importlib.util.find_spec("bitsandbytes") is not None,
        "lora.quantization = nf4 needs the package bitsandbytes: pip install 'bitsandbytes>=0.46', "
        "or leave it at none",
    )
    # It warns on CPUs that it could be faster by kernels from a hub.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    return importlib.import_module("bitsandbytes.functional")


@dataclass
class FourBits:
    """What is known of a weight besides its packed bytes and 8-bit scales."""

    shape: torch.Size  # Of the weight.
    dtype: torch.dtype  # It is dequantised to.
    # The first scale of what is computed with here: of this rank's experts, or 0.
    first: int = 0
    # Set by `fill`; float32 on the model's device.
    nested: Tensor = field(default_factory=lambda: torch.empty(0))  # By block of scales.
    offset: Tensor = field(default_factory=lambda: torch.empty(0))  # A scalar, added to scales.
    code: Tensor = field(default_factory=lambda: torch.empty(0))  # [256], what 8 bits mean.

    def take(self, other: "FourBits") -> None:
        """Become as another of the same weight."""
        self.nested = other.nested
        self.offset = other.offset
        self.code = other.code


def pack(module: nn.Module, name: str, whole_name: str) -> FourBits:
    """Replace a weight on the meta device by the parameters of its packed form, not filled.

    Args:
        module: that has it.
        name: of the weight in the module; `{name}_nf4_scales` is added.
        whole_name: its name in the model, for messages.

    Raises:
        UserError: the weight cannot be cut into blocks, or this torch cannot shard its bytes.
    """
    require(
        not torch.__version__.startswith("2.11."),
        f"lora.quantization = nf4: FSDP of torch {torch.__version__} shards no bytes; use torch "
        "2.13 (and vLLM 0.32), or leave it at none",
    )
    weight = module.get_parameter(name)
    *rows, columns = weight.shape
    require(
        columns % BLOCK == 0,
        f"lora.quantization = nf4: {whole_name} has {columns} columns, which is no multiple of "
        f"the {BLOCK} of a block; leave it at none for this model",
    )
    shapes = {name: (*rows, columns // 2), f"{name}_{SCALES}": (*rows, columns // BLOCK)}
    for new_name, shape in shapes.items():
        values = torch.empty(shape, dtype=torch.uint8, device=weight.device)
        module.register_parameter(new_name, nn.Parameter(values, requires_grad=False))
    return FourBits(weight.shape, weight.dtype)


@torch.no_grad()
def fill(packed: FourBits, weight: Tensor, bits: Tensor, scales: Tensor) -> None:
    """Quantise a whole weight, and keep this rank's part.

    Args:
        packed: of the weight.
        weight: on the device that computes.
        bits: the parameter of the packed bytes.
        scales: the parameter of the 8-bit scales.
    """
    library = _library()
    if weight.dtype == torch.float64:  # which the library does not know
        weight = torch.empty_like(weight, dtype=torch.float32).copy_(weight)
    all_bits, state = library.quantize_4bit(
        weight.contiguous(), blocksize=BLOCK, quant_type="nf4", compress_statistics=True
    )
    packed.nested = state.state2.absmax
    packed.code = state.state2.code
    packed.offset = state.offset
    for p, values in ((bits, all_bits), (scales, state.absmax)):
        local(p).copy_(view_of(values.view(p.shape), local_region(p)))


def dequantise(
    packed: FourBits, bits: Tensor, scales: Tensor, block: Tensor | None = None
) -> Tensor:
    """Return a weight, or some of its rows.

    Args:
        packed: of the weight.
        bits: uint8 [.., rows, in / 2].
        scales: uint8 [.., rows, in / 64].
        block: int64 like `scales`: which block of scales each of them is of. None: `bits` is all
            that is computed with here.

    Returns:
        [.., rows, in] in the dtype that the weight had.
    """
    library = _library()
    nested = packed.nested
    if block is None:
        of_each = nested.repeat_interleave(NESTED)[packed.first :]
        nested_of_each = of_each[: scales.numel()].view(scales.shape)
    else:
        nested_of_each = nested[block]
    absmax = packed.code[scales.int()] * nested_of_each + packed.offset
    shape = torch.Size((*bits.shape[:-1], bits.shape[-1] * 2))
    narrow = torch.float32 if packed.dtype == torch.float64 else packed.dtype
    state = library.QuantState(
        absmax.view(-1),
        shape=shape,
        dtype=narrow,
        blocksize=BLOCK,
        quant_type="nf4",
        code=library.get_4bit_type("nf4", device=bits.device),
    )
    weight = library.dequantize_4bit(bits.reshape(-1, 1), state)
    return weight.view(shape).to(packed.dtype)


def rounded(weight: Tensor) -> Tensor:
    """Return a weight [.., out, in] as it is computed with when it is held in four bits."""
    *rows, columns = weight.shape
    packed = FourBits(weight.shape, weight.dtype)
    bits = torch.empty(*rows, columns // 2, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(*rows, columns // BLOCK, dtype=torch.uint8, device=weight.device)
    fill(packed, weight, bits, scales)
    return dequantise(packed, bits, scales)


def layout(packed: FourBits, bits: Tensor) -> Tensor:
    """Return a tensor without values that lies on the ranks as the weight would.

    Args:
        packed: of the weight.
        bits: this rank's part of the packed bytes, sharded by rows.
    """
    shape = packed.shape
    _, size = local_region(bits)
    here = torch.empty((*size[:-1], shape[-1]), dtype=packed.dtype, device="meta")
    if not isinstance(bits, DTensor):
        return here
    return like(bits, here, shape)


def like(spread: DTensor, here: Tensor, shape: torch.Size) -> DTensor:
    """Return this rank's part as a tensor [shape] that lies on the ranks as another does."""
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        here, spread.device_mesh, spread.placements, run_check=False, shape=shape, stride=stride
    )


def shard(
    packed: FourBits, bits: Tensor, scales: Tensor, read: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return this rank's part of a weight, dequantised.

    Args:
        packed: of the weight.
        bits: this rank's part of the packed bytes.
        scales: this rank's part of the 8-bit scales.
        read: returns this rank's tensor of either, or if it is offloaded, a copy.
    """
    numbers = torch.arange(scales.numel(), device=local(scales).device).view(scales.shape)
    block = view_of(numbers, local_region(scales)) // NESTED
    return dequantise(packed, read(local(bits)), read(local(scales)), block)
