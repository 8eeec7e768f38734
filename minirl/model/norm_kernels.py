"""RMSNorm on CUDA: a kernel for forward, one for backward.

They compute `fused.rms_norm_formula`, with which they are tested. liger-kernel's backward has one
program for each multiprocessor, which goes through its rows one by one: for the narrow rows of
small models and of heads it waits for memory most of the time. Here there are as many programs as
a device can hold, and a program reads several narrow rows at once.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 2048  # Elements that a program reads at once, unless a row has more.
PROGRAMS = 8  # Of backward, for each multiprocessor.

# --------------------------------------------------------------------------------------------------
# kernels


@triton.jit
def _normed(x, scale, x_pointer, WIDE: tl.constexpr):
    """Return x scale, rounded to the dtype of x unless WIDE."""
    normed = x * scale[:, None]
    if not WIDE:
        normed = normed.to(x_pointer.dtype.element_ty).to(tl.float32)
    return normed


# One compiled kernel is for any number of rows.
@triton.jit(do_not_specialize=["num_rows"])
def _forward(
    x_pointer,
    weight_pointer,
    y_pointer,
    scale_pointer,
    num_rows,
    num_columns,
    eps,
    offset,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Write y of ROWS rows, and 1 / sqrt(mean(x^2) + eps) of each."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    is_column = columns < num_columns
    is_inside = (rows < num_rows)[:, None] & is_column[None, :]
    places = rows[:, None] * num_columns + columns[None, :]
    x = tl.load(x_pointer + places, mask=is_inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_pointer + columns, mask=is_column, other=0.0).to(tl.float32) + offset
    scale = tl.rsqrt(tl.sum(x * x, 1) / num_columns + eps)
    y = _normed(x, scale, x_pointer, WIDE) * weight[None, :]
    tl.store(y_pointer + places, y.to(y_pointer.dtype.element_ty), mask=is_inside)
    tl.store(scale_pointer + rows, scale, mask=rows < num_rows)


@triton.jit(do_not_specialize=["num_rows"])
def _backward(
    grad_pointer,
    x_pointer,
    weight_pointer,
    scale_pointer,
    grad_x_pointer,
    grad_weight_pointer,
    num_rows,
    num_columns,
    offset,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Write the gradient of x in every so many tiles of rows, and what they add to the weight's."""
    program = tl.program_id(0).to(tl.int64)
    step = tl.num_programs(0).to(tl.int64) * ROWS
    columns = tl.arange(0, COLUMNS)
    is_column = columns < num_columns
    weight = tl.load(weight_pointer + columns, mask=is_column, other=0.0).to(tl.float32) + offset
    grad_weight = tl.zeros([COLUMNS], tl.float32)
    for first in range(program * ROWS, num_rows, step):
        rows = first + tl.arange(0, ROWS)
        is_inside = (rows < num_rows)[:, None] & is_column[None, :]
        places = rows[:, None] * num_columns + columns[None, :]
        x = tl.load(x_pointer + places, mask=is_inside, other=0.0).to(tl.float32)
        grad = tl.load(grad_pointer + places, mask=is_inside, other=0.0).to(tl.float32)
        scale = tl.load(scale_pointer + rows, mask=rows < num_rows, other=0.0)
        grad_weight += tl.sum(grad * _normed(x, scale, x_pointer, WIDE), 0)
        normed = x * scale[:, None]
        of_normed = grad * weight[None, :]
        along = tl.sum(of_normed * normed, 1) / num_columns
        grad_x = (of_normed - normed * along[:, None]) * scale[:, None]
        tl.store(grad_x_pointer + places, grad_x.to(x_pointer.dtype.element_ty), mask=is_inside)
    tl.store(grad_weight_pointer + program * num_columns + columns, grad_weight, mask=is_column)


# --------------------------------------------------------------------------------------------------
# their autograd function


@cache
def _max_programs(device: torch.device) -> int:
    if device.type != "cuda":
        return 3  # Of the interpreter, in which tests run.
    return PROGRAMS * torch.cuda.get_device_properties(device).multi_processor_count


class RMSNorm(torch.autograd.Function):
    """`fused.rms_norm_formula`, in float32."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float, offset: float, wide: bool) -> Tensor:
        """Return the normed rows of x [..., D]."""
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        num_rows, num_columns = rows.shape
        # The tile of a program, both powers of two, and its warps.
        columns_of_tile = triton.next_power_of_2(num_columns)
        rows_of_tile = max(1, TILE // columns_of_tile)
        num_warps = min(16, max(4, columns_of_tile * rows_of_tile // 512))
        ctx.sizes = {"ROWS": rows_of_tile, "COLUMNS": columns_of_tile, "num_warps": num_warps}
        ctx.rest = offset, wide
        y = torch.empty_like(rows)
        scale = torch.empty(num_rows, dtype=torch.float32, device=x.device)
        _forward[(triton.cdiv(num_rows, ctx.sizes["ROWS"]),)](
            *(rows, weight, y, scale),
            *(num_rows, num_columns, eps, offset),
            WIDE=wide,
            **ctx.sizes,
        )
        ctx.save_for_backward(rows, weight, scale)
        return y.view(x.shape)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple:
        """Return the gradients of x and of the weight."""
        rows, weight, scale = ctx.saved_tensors
        num_rows, num_columns = rows.shape
        offset, wide = ctx.rest
        num_tiles = triton.cdiv(num_rows, ctx.sizes["ROWS"])
        num_programs = min(num_tiles, _max_programs(rows.device))
        grad_x = torch.empty_like(rows)
        parts = torch.empty(num_programs, num_columns, dtype=torch.float32, device=rows.device)
        _backward[(num_programs,)](
            *(grad.reshape(rows.shape).contiguous(), rows, weight, scale, grad_x, parts),
            *(num_rows, num_columns, offset),
            WIDE=wide,
            **ctx.sizes,
        )
        return grad_x.view(grad.shape), parts.sum(0).to(weight.dtype), None, None, None
