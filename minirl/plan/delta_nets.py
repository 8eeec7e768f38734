"""Sizes and work of gated delta nets, the layers with a state of model/hybrid/delta_net.py."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PretrainedConfig

from minirl.types.blocks import CHUNK


@dataclass(frozen=True, kw_only=True)
class DeltaNets:
    """Sizes of the gated delta nets that some layers have in place of attention."""

    num_layers: int  # That have one.
    layer_parameters: int  # Of such a layer as a whole.
    key_heads: int
    heads: int  # Of values, each of which has a state [key_dim, value_dim].
    key_dim: int
    value_dim: int
    convolution: int  # Rows that are convolved.
    # One matrix makes queries, keys and values end to end: tensor-parallel ranks have parts of it
    # that are not their heads'.
    gathers_mixed: bool
    state_bytes: int  # Of an element of the states in the engine; 0: as the engine's dtype.

    @property
    def mixed(self) -> int:
        """Return the width of a token's queries, keys and values, which are convolved."""
        return 2 * self.key_heads * self.key_dim + self.values

    @property
    def keys(self) -> int:
        """Return the width of a token's keys once each head of values has its own."""
        return self.heads * self.key_dim

    @property
    def values(self) -> int:
        """Return the width of a token's values, and of the gate of the output."""
        return self.heads * self.value_dim

    @property
    def states(self) -> int:
        """Return the elements of a layer's states, of all heads."""
        return self.heads * self.key_dim * self.value_dim

    @property
    def rule_flops(self) -> int:
        """Return the forward work of the gated delta rule of a layer for a token."""
        return self.heads * delta_rule_flops(self.key_dim, self.value_dim)


def read_delta_nets(config: PretrainedConfig, layers: Sequence[nn.Module]) -> DeltaNets | None:
    """Return the sizes of a model's gated delta nets; None: it has none.

    Args:
        config: of the model.
        layers: its own, or those of the same model with fewer.
    """
    with_state = [layer for layer in layers if _has_state(layer)]
    if not with_state:
        return None
    values = config.get_text_config().to_dict()
    # Of Qwen3.5's configs, which vLLM follows; those of Qwen3-Next have none.
    state_dtype = values.get("mamba_ssm_dtype")
    return DeltaNets(
        num_layers=values["layer_types"].count("linear_attention"),
        layer_parameters=sum(p.numel() for p in with_state[-1].parameters()),
        key_heads=values["linear_num_key_heads"],
        heads=values["linear_num_value_heads"],
        key_dim=values["linear_key_head_dim"],
        value_dim=values["linear_value_head_dim"],
        convolution=values["linear_conv_kernel_dim"],
        gathers_mixed=any("in_proj_qkv" in part._modules for part in with_state[-1].modules()),
        state_bytes=getattr(torch, state_dtype).itemsize if state_dtype else 0,
    )


def _has_state(layer: nn.Module) -> bool:
    return any(type(part).__name__.endswith("GatedDeltaNet") for part in layer.modules())


def delta_rule_flops(key_dim: int, value_dim: int) -> int:
    """Return the multiplications and additions of the gated delta rule for a row of a head.

    They are those of kernels that go through sequences chunk by chunk (Yang et al. 2024, sec. 3.3),
    but for the inverse of a chunk's triangular system, which is 2 % of them.

    Args:
        key_dim: features of a key.
        value_dim: features of a value.
    """
    # Keys with keys, queries with keys, and what these products are multiplied with.
    in_chunk = CHUNK * (3 * key_dim + 2 * value_dim)
    # The state is read for keys, corrected, and read for queries.
    with_state = 3 * key_dim * value_dim
    return 2 * (in_chunk + with_state)
