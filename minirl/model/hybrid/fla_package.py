"""The door to the kernels of layers with a state, on CUDA: flash-linear-attention, causal-conv1d.

Both are of the extra `hybrids`. Without them, and in dtypes that they do not know, the formulas of
delta_net.py compute the same.
"""

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_DTYPES = (torch.bfloat16, torch.float16)


@functools.cache
def _function(module: str, name: str) -> Any:
    """Return a package's function, None without the package."""
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        return None
    return vars(importlib.import_module(module))[name]


def convolution(x: Tensor) -> Callable[..., Tensor] | None:
    """Return causal-conv1d's function if it can take such features, else None.

    It is called with features [1, C, T], weights [C, K] and `activation`.
    """
    if not x.is_cuda or x.dtype not in (*_DTYPES, torch.float32):
        return None
    return _function("causal_conv1d", "causal_conv1d_fn")


def delta_rule(q: Tensor) -> Callable[..., tuple[Tensor, Tensor]] | None:
    """Return flash-linear-attention's gated delta rule if it can take such queries, else None.

    It is called with queries, keys, values, decays and rates as `delta_net.delta_rule` has them,
    initial states [S, H, Dk, Dv] or None, and the running sum [S + 1] of the sequences' rows.
    """
    if not q.is_cuda or q.dtype not in _DTYPES:
        return None
    kernel = _function("fla.ops.gated_delta_rule", "chunk_gated_delta_rule")
    return functools.partial(_delta_rule, kernel) if kernel else None


def _delta_rule(
    kernel: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    rate: Tensor,
    initial: Tensor | None,
    cu_rows: Tensor,
) -> tuple[Tensor, Tensor]:
    out, states = kernel(
        *(x[None].contiguous() for x in (q, k, v, log_decay, rate)),
        initial_state=initial,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=cu_rows,
    )
    return out[0], states
