"""One kernel where the library's layers launch many: RMSNorm, gated activations, rotary positions.

Between two matrix products these do little but read and write their inputs, ten times over if each
operation is its own kernel. `install` puts functions in their place that read and write once:
liger-kernel's Triton kernels (Hsu et al. 2024, arXiv 2410.10989) and those of norm_kernels.py, that
run on CUDA alone, or what torch.compile makes of the formulas, which all are tested against.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import GELUTanh, SiLUActivation

from minirl.base.errors import require
from minirl.model import families, selective
from minirl.model.families import Fused

Choice = Literal["auto", "torch", "liger", "compile"]
MOST_VARIANTS = 64  # Of a compiled function.

# The library's module of an activation -> its name here.
ACTIVATIONS = {nn.SiLU: "silu", SiLUActivation: "silu", GELUTanh: "gelu"}


class Kernels(NamedTuple):
    """The functions that `install` puts in place."""

    # (x [..., D], weight [D], eps, offset, wide) -> [..., D]; see `rms_norm_formula`.
    rms_norm: Callable[[Tensor, Tensor, float, float, bool], Tensor]
    # (gate [..., I], up [..., I], activation) -> [..., I].
    gated: Callable[[Tensor, Tensor, str], Tensor]
    # (query [B, H, T, D], key [B, Hkv, T, D], cos [B, T, D], sin [B, T, D]) -> both, rotated.
    rotate: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


# --------------------------------------------------------------------------------------------------
# formulas


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rms_norm_formula(x: Tensor, weight: Tensor, eps: float, offset: float, wide: bool) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) (weight + offset).

    Args:
        x: [..., D].
        weight: [D].
        eps: a small number.
        offset: 1 in Gemma, which has weights near 0.
        wide: the product is rounded to x's dtype, and its first factor is not.
    """
    normed = _wide(x) * torch.rsqrt(_wide(x).square().mean(-1, keepdim=True) + eps)
    if wide:
        return (normed * (_wide(weight) + offset)).to(x.dtype)
    return (weight + offset) * normed.to(x.dtype)


def gated_formula(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """Return activation(gate) * up."""
    activated = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    return activated * up


def rotate_formula(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Return x cos + (-x2, x1) sin of both, with x1 and x2 the halves of x."""
    cos = cos.unsqueeze(1)
    sin = sin.unsqueeze(1)
    return query * cos + _turned(query) * sin, key * cos + _turned(key) * sin


def _turned(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


FORMULAS = Kernels(rms_norm_formula, gated_formula, rotate_formula)


# --------------------------------------------------------------------------------------------------
# choice and wiring


def has_liger() -> bool:
    """Return whether liger-kernel is installed."""
    return importlib.util.find_spec("liger_kernel") is not None


def liger() -> Kernels:
    """Return liger-kernel's functions, and RMSNorm, which have gradients."""
    from minirl.model.norm_kernels import RMSNorm  # It needs Triton, as liger-kernel does.

    def functions(module: str) -> Any:
        return importlib.import_module(f"liger_kernel.ops.{module}")

    def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
        if activation == "silu":
            return functions("swiglu").LigerSiLUMulFunction.apply(gate, up)
        return functions("geglu").LigerGELUMulFunction.apply(gate, up)

    def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        # The kernel turns its inputs in place, which selective checkpointing may keep.
        if selective.is_on():
            query, key = query.clone(), key.clone()
        q, k, *_ = functions("rope").LigerRopeFunction.apply(query, key, cos, sin)
        return q, k

    return Kernels(RMSNorm.apply, gated, rotate)


def choose(wanted: Choice, device: torch.device) -> Kernels | None:
    """Return the functions for a model, None for the library's own.

    Args:
        wanted: `policy.kernels`.
        device: where the model computes.

    Raises:
        UserError: liger is asked for where it cannot run.
    """
    can_liger = device.type == "cuda" and has_liger()
    if wanted == "compile":
        # A function has a variant for each number of dimensions, order of strides, need of a
        # gradient, and mode that it meets. Those beyond torch's limit of 8 would run uncompiled,
        # and which ones depends on the order in which a run, or a resumed one, meets them.
        torch.compiler.config.recompile_limit = MOST_VARIANTS
        return Kernels(
            torch.compile(rms_norm_formula, dynamic=True),
            torch.compile(gated_formula, dynamic=True),
            torch.compile(rotate_formula, dynamic=True),
        )
    if wanted == "torch" or (wanted == "auto" and not can_liger):
        return None
    require(
        can_liger,
        f"policy.kernels = {wanted} needs a GPU and the package liger-kernel (here the device is "
        f"{device.type}, and the package is {'' if has_liger() else 'not '}installed); take auto, "
        "torch or compile",
    )
    return liger()


def install(model: Any, kernels: Kernels) -> None:
    """Let a model's norms, gated MLPs and rotary positions be computed by these functions.

    Call it before parameters are split. The function for rotary positions is shared by all models
    of the family in this process, as the library has it.

    Args:
        model: of the library, of a family in `FAMILIES`.
        kernels: the functions.
    """
    fused = families.FAMILIES[model.config.model_type].fused
    for module in model.modules():
        kind = type(module).__name__
        if kind.endswith("RMSNorm") and "weight" in module._parameters:
            module.forward = _norm(module, kernels, fused)
        elif kind.endswith("MLP") and "gate_proj" in module._modules:
            activation = ACTIVATIONS.get(type(module.act_fn))
            if activation:
                module.forward = _mlp(module, kernels, activation)
    if fused.rotary:
        source: Any = sys.modules[type(model).__module__]
        source.apply_rotary_pos_emb = kernels.rotate


def _norm(module: Any, kernels: Kernels, fused: Fused) -> Callable[[Tensor], Tensor]:
    eps: float = vars(module).get("variance_epsilon") or module.eps
    return lambda x: kernels.rms_norm(x, module.weight, eps, fused.norm_offset, fused.norm_wide)


def _mlp(module: Any, kernels: Kernels, activation: str) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        return module.down_proj(kernels.gated(module.gate_proj(x), module.up_proj(x), activation))

    return forward
