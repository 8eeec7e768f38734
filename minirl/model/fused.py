"""One kernel where the library's layers launch many: RMSNorm, gated activations, rotary positions.

Between two matrix products these do little but read and write their inputs, ten times over if each
operation is its own kernel. `install` puts functions in their place that read and write once:
liger-kernel's Triton kernels (Hsu et al. 2024, arXiv 2410.10989), which run on CUDA alone, or what
torch.compile makes of the formulas.

Each of liger's kernels is an operator of torch here, so that checkpointing and tensors without
values know it. The formulas are what they are tested against.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import GELUTanh, SiLUActivation

from minirl.base.errors import require
from minirl.model import families
from minirl.model.families import Fused

Choice = Literal["auto", "torch", "liger", "compile"]

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


# --------------------------------------------------------------------------------------------------
# operators: liger's kernels


def _liger(name: str) -> ModuleType:
    return importlib.import_module(f"liger_kernel.ops.{name}")


@torch.library.custom_op("minirl::rms_norm", mutates_args=())
def _rms_norm(
    x: Tensor, weight: Tensor, eps: float, offset: float, wide: bool
) -> tuple[Tensor, Tensor]:
    """Return the norm of rows [N, D], and 1 / sqrt(mean(x^2) + eps) [N]."""
    mode = "gemma" if wide else "llama"
    out, _, scale, *_ = _liger("rms_norm").rms_norm_forward(x, weight, eps, offset, mode, None)
    return out, scale


@_rms_norm.register_fake
def _(x: Tensor, weight: Tensor, eps: float, offset: float, wide: bool) -> tuple[Tensor, Tensor]:
    scale_dtype = torch.promote_types(x.dtype, torch.float32)
    return torch.empty_like(x), x.new_empty(len(x), dtype=scale_dtype)


@torch.library.custom_op("minirl::rms_norm_backward", mutates_args=())
def _rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor, offset: float, wide: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and weight."""
    kernels = _liger("rms_norm")
    mode = kernels._str_to_casting_mode["gemma" if wide else "llama"]
    block, warps = _liger("utils").calculate_settings(x.shape[1])
    settings = (offset, mode, block, warps, False, None)
    return kernels.rms_norm_backward(grad, x, weight, scale, *settings)


@_rms_norm_backward.register_fake
def _(
    grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor, offset: float, wide: bool
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


@torch.library.custom_op("minirl::gated", mutates_args=())
def _gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """Return activation(gate) * up."""
    if activation == "silu":
        return _liger("swiglu").swiglu_forward(gate, up)[2]
    return _liger("geglu").geglu_forward(gate, up)[2]


@_gated.register_fake
def _(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    return torch.empty_like(gate)


@torch.library.custom_op("minirl::gated_backward", mutates_args=("gate", "up"))
def _gated_backward(grad: Tensor, gate: Tensor, up: Tensor, activation: str) -> None:
    """Write the gradients of gate and up in their place."""
    if activation == "silu":
        _liger("swiglu").swiglu_backward(gate, up, grad)
    else:
        _liger("geglu").geglu_backward(gate, up, grad)


@_gated_backward.register_fake
def _(grad: Tensor, gate: Tensor, up: Tensor, activation: str) -> None:
    return None


@torch.library.custom_op("minirl::rotate", mutates_args=())
def _rotate(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, back: bool
) -> tuple[Tensor, Tensor]:
    """Return both rotated, or turned back, which is the gradient: a rotation is orthogonal.

    Args:
        query: [B, T, H, D].
        key: [B, T, Hkv, D].
        cos: the cosine of the angle that each place turns by, [B, T, D].
        sin: its sine, [B, T, D].
        back: turn by the opposite angles.
    """
    kernels = _liger("rope")
    turn = kernels.rope_backward if back else kernels.rope_forward
    # The kernel turns contiguous tensors in place.
    q = query.clone(memory_format=torch.contiguous_format)
    k = key.clone(memory_format=torch.contiguous_format)
    turned = turn(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
    return turned[0].transpose(1, 2), turned[1].transpose(1, 2)


@_rotate.register_fake
def _(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, back: bool) -> tuple[Tensor, Tensor]:
    return (
        torch.empty_like(query, memory_format=torch.contiguous_format),
        torch.empty_like(key, memory_format=torch.contiguous_format),
    )


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float, offset: float, wide: bool) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        out, scale = _rms_norm(rows, weight, eps, offset, wide)
        ctx.save_for_backward(rows, weight, scale)
        ctx.offset = offset
        ctx.wide = wide
        return out.view(x.shape)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple:
        rows, weight, scale = ctx.saved_tensors
        dx, dweight = _rms_norm_backward(
            grad.reshape(rows.shape).contiguous(), rows, weight, scale, ctx.offset, ctx.wide
        )
        return dx.view(grad.shape), dweight, None, None, None


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor, activation: str) -> Tensor:
        gate = gate.contiguous()
        up = up.contiguous()
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return _gated(gate, up, activation)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple:
        gate, up = ctx.saved_tensors
        _gated_backward(grad.contiguous(), gate, up, ctx.activation)
        return gate, up, None


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        q, k = _rotate(query.transpose(1, 2), key.transpose(1, 2), cos, sin, False)
        return q.transpose(1, 2), k.transpose(1, 2)

    @staticmethod
    def backward(ctx, dquery: Tensor, dkey: Tensor) -> tuple:
        cos, sin = ctx.saved_tensors
        q, k = _rotate(dquery.transpose(1, 2), dkey.transpose(1, 2), cos, sin, True)
        return q.transpose(1, 2), k.transpose(1, 2), None, None


LIGER = Kernels(_RMSNorm.apply, _Gated.apply, _Rotate.apply)


FORMULAS = Kernels(rms_norm_formula, gated_formula, rotate_formula)


# --------------------------------------------------------------------------------------------------
# choice and wiring


def has_liger() -> bool:
    """Return whether liger-kernel is installed."""
    return importlib.util.find_spec("liger_kernel") is not None


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
    return LIGER


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
