"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) in vLLM: weights made of others.

Keys and values of a head are products of a latent vector, which is what the cache holds, with
`kv_b_proj`. vLLM multiplies queries and outputs by parts of it instead, of which it makes copies
once, after loading, where no refit reaches them.
"""

from typing import Any

import torch

COPIES = ("W_UK_T", "W_UV")


class LatentAttention:
    """The layers of an engine's model that have such copies; mostly none."""

    def __init__(self, model: Any):
        """Find the layers.

        Args:
            model: the engine's.
        """
        self._layers: list[Any] = []
        self.names: set[str] = set()  # Of the copies, among the model's parameters.
        for prefix, module in model.named_modules():
            if type(module).__name__ == "MLAAttention":
                self._layers.append(module)
                self.names |= {f"{prefix}.{name}" for name in COPIES}

    @torch.no_grad()
    def renew(self) -> None:
        """Make the copies anew, in place, since CUDA graphs read them there."""
        for layer in self._layers:
            rows = layer.kv_b_proj.weight.unflatten(0, (layer.num_heads, -1))  # [N, P + V, L]
            keys, values = rows.split([layer.qk_nope_head_dim, layer.v_head_dim], dim=1)
            layer.W_UK_T.copy_(keys)
            layer.W_UV.copy_(values.mT)
