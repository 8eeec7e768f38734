"""Weights in MXFP4, as gpt-oss is published: they are read as bfloat16.

A weight is one of 16 values times a power of two that 32 neighbours share: OCP Microscaling Formats
(MX) Specification 1.0, sec. 5. Every such number is one of bfloat16's, so that nothing is rounded.
They are trained, exported and given to the engine in bfloat16.
"""

import math
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

METHOD = "mxfp4"  # What a config calls the format.
BLOCKS = "_blocks"  # Ends the name of the values, two in a byte.
SCALES = "_scales"  # Ends the name of the exponents.
SIZE = 32  # Of a block that shares an exponent.
BIAS = 127  # Of the exponents.
# By the four bits of a value, its sign first.
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = (*_POSITIVE, *(-value for value in _POSITIVE))


def forget(config: PretrainedConfig) -> PretrainedConfig:
    """Remove from a config, in place, that its files are in MXFP4, and return it."""
    quantization = vars(config).get("quantization_config")
    if isinstance(quantization, dict) and quantization.get("quant_method") == METHOD:
        del config.quantization_config
    return config


def dequantise(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the values of blocks.

    Args:
        blocks: uint8 [.., B, 16]: 32 values each; of a byte, the lower four bits come first.
        scales: uint8 [.., B].

    Returns:
        bfloat16 [.., 32 B].
    """
    table = torch.tensor(VALUES)
    pairs = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2)
    exponents = scales.int()[..., None] - BIAS
    return torch.ldexp(table[pairs.int()], exponents).flatten(-2).bfloat16()


class Mxfp4Weight:
    """The matrices of all experts in a file, [E, in, out], which stores them as [E, out, in]."""

    def __init__(self, blocks: Any, scales: Any):
        """Read nothing yet.

        Args:
            blocks: slices like a tensor [E, out, in / 32, 16].
            scales: slices like a tensor [E, out, in / 32].
        """
        self.blocks = blocks
        self.scales = scales

    def get_shape(self) -> list[int]:
        """Return the shape, as safetensors do."""
        num_experts, rows, num_blocks, _ = self.blocks.get_shape()
        return [num_experts, num_blocks * SIZE, rows]

    def get_dtype(self) -> str:
        """Return what the values become, by safetensors' name."""
        return "BF16"

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor:
        """Read a region, and what else is in its blocks. `index`: slices with start and stop."""
        experts, columns, rows = index
        first = columns.start // SIZE
        place = (experts, rows, slice(first, math.ceil(columns.stop / SIZE)))
        values = dequantise(self.blocks[place], self.scales[place])
        return values[..., columns.start - first * SIZE : columns.stop - first * SIZE].mT


def join(weights: dict[str, Any]) -> dict[str, Any]:
    """Return the weights of files with each pair of blocks and scales as one weight."""
    joined = {}
    for name, weight in weights.items():
        if name.endswith(BLOCKS) and name.removesuffix(BLOCKS) + SCALES in weights:
            base = name.removesuffix(BLOCKS)
            joined[base] = Mxfp4Weight(weight, weights[base + SCALES])
        elif not (name.endswith(SCALES) and name.removesuffix(SCALES) + BLOCKS in weights):
            joined[name] = weight
    return joined
