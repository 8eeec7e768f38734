"""Log-probs and entropy on CUDA: one kernel reads a chunk of logits, one makes its gradient.

Beside matrix products the formulas of `logprob.py`, with which these kernels are tested, read and
write each float32 logit many times over. Here forward reads it once, and backward reads it once and
writes its gradient in the dtype of the products.
"""

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

from minirl.model import logprob

SUM_BLOCK = 1024  # Columns that a program of forward reads at once; powers of two.
GRADIENT_BLOCK = 4096
# Less than any logit. What is twice as low adds exp(-inf) = 0 to every sum, and 0 times a number.
LOWEST = tl.constexpr(-1e30)


# --------------------------------------------------------------------------------------------------
# kernels


@triton.jit
def _scaled(product, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """Return z = c tanh(product / c) scale."""
    if HAS_SOFTCAP:
        product = softcap * (2 * tl.sigmoid(2 * product / softcap) - 1)
    return product * scale


# Slices of rows begin anywhere: one compiled kernel is for all of them.
@triton.jit(do_not_specialize_on_alignment=["targets", "target_z", "log_sum", "mean"])
def _sum_row(
    logits,
    targets,
    target_z,
    log_sum,
    mean,
    num_columns,
    scale,
    softcap,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Read a row of logits and write what `sums` returns of it.

    Each of BLOCK lanes goes through its own columns with the largest z so far, the sum of
    exp(z - largest) and that of exp(z - largest) (z - largest); the lanes meet at the end.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * num_columns
    lanes = tl.arange(0, BLOCK)
    largest = tl.full([BLOCK], LOWEST, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    weighted = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, num_columns, BLOCK, num_stages=3):
        columns = start + lanes
        is_inside = columns < num_columns
        x = tl.load(logits + columns, mask=is_inside, other=0.0)
        z = tl.where(is_inside, _scaled(x, scale, softcap, HAS_SOFTCAP), 2 * LOWEST)
        above = z - largest
        smaller = tl.exp(-tl.abs(above))  # Of the old sums over the new one, or the other way.
        is_new = above > 0
        weighted = tl.where(
            is_new, smaller * (weighted - above * total), weighted + smaller * above
        )
        total = tl.where(is_new, smaller * total + 1, total + smaller)
        largest = tl.maximum(largest, z)

    of_all = tl.max(largest, 0)
    below = largest - of_all
    share = tl.exp(below)
    weighted_of_all = tl.sum(share * (weighted + below * total), 0)
    total_of_all = tl.sum(share * total, 0)
    tl.store(log_sum + row, of_all + tl.log(total_of_all))
    tl.store(mean + row, of_all + weighted_of_all / total_of_all)
    target = tl.load(targets + row)
    is_here = (target >= 0) & (target < num_columns)
    x = tl.load(logits + target, mask=is_here, other=0.0)
    tl.store(target_z + row, tl.where(is_here, _scaled(x, scale, softcap, HAS_SOFTCAP), 0.0))


@triton.jit(
    do_not_specialize_on_alignment=["targets", "log_sum", "mean", "by_logprob", "by_entropy"]
)
def _gradient_block(
    logits,
    gradient,
    targets,
    log_sum,
    mean,
    by_logprob,
    by_entropy,
    num_columns,
    scale,
    softcap,
    HAS_SOFTCAP: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Read some columns of a row of logits and write what `gradient` returns of them."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = columns < num_columns
    places = row * num_columns + columns
    x = tl.load(logits + places, mask=is_inside, other=0.0)
    z = _scaled(x, scale, softcap, HAS_SOFTCAP)
    p = tl.exp(z - tl.load(log_sum + row))
    factor = tl.load(by_logprob + row)
    # The difference at a target is taken before it is rounded: p may be almost 1 there.
    slope = tl.where(columns == tl.load(targets + row), factor, 0.0) - p * factor
    if HAS_ENTROPY:
        slope -= p * (z - tl.load(mean + row)) * tl.load(by_entropy + row)
    if HAS_SOFTCAP:
        tanh = z / (softcap * scale)
        slope *= 1 - tanh * tanh
    tl.store(gradient + places, slope.to(gradient.dtype.element_ty), mask=is_inside)


# --------------------------------------------------------------------------------------------------
# their calls


def sums(logits: Tensor, targets: Tensor, temperature: float, softcap: float | None) -> Tensor:
    """Return the sums of a softmax, with z = softcap(logits) / temperature and p = softmax(z).

    Args:
        logits: float32 [N, V], hidden @ weight.T.
        targets: int64 [N]; one outside of [0, V) is a column of another rank.
        temperature: what logits are divided by.
        softcap: c of c tanh(logits / c).

    Returns:
        float32 [3, N]: z of the target (0 if it is elsewhere), log(sum(exp(z))) and sum(p z).
    """
    num_rows, num_columns = logits.shape
    found = logits.new_empty((3, num_rows))
    target_z, log_sum, mean = found
    _sum_row[(num_rows,)](
        logits,
        targets,
        target_z,
        log_sum,
        mean,
        num_columns,
        1 / temperature,
        float(softcap or 1),
        HAS_SOFTCAP=softcap is not None,
        BLOCK=SUM_BLOCK,
        num_warps=4,
    )
    return found


def gradient(
    logits: Tensor,
    targets: Tensor,
    log_sum: Tensor,
    mean: Tensor,
    by_logprob: Tensor,
    by_entropy: Tensor | None,
    temperature: float,
    softcap: float | None,
    dtype: torch.dtype,
) -> Tensor:
    """Return the gradient of logits.

    Args:
        logits: float32 [N, V]; its memory is taken for a float32 gradient.
        targets: as in `sums`.
        log_sum: float32 [N], over the columns of all ranks.
        mean: float32 [N], sum(p z) over the columns of all ranks.
        by_logprob: float32 [N], the gradient of log-probs over the temperature.
        by_entropy: the same of entropies; None: they have none.
        temperature: as in `sums`.
        softcap: as in `sums`.
        dtype: of what is returned.

    Returns:
        [N, V].
    """
    num_rows, num_columns = logits.shape
    out = logits if dtype == logits.dtype else torch.empty_like(logits, dtype=dtype)
    _gradient_block[(num_rows, triton.cdiv(num_columns, GRADIENT_BLOCK))](
        logits,
        out,
        targets,
        log_sum,
        mean,
        by_logprob,
        by_logprob if by_entropy is None else by_entropy,
        num_columns,
        1 / temperature,
        float(softcap or 1),
        HAS_SOFTCAP=softcap is not None,
        HAS_ENTROPY=by_entropy is not None,
        BLOCK=GRADIENT_BLOCK,
        num_warps=8,
    )
    return out


def over_ranks(parts: Tensor) -> Tensor:
    """Return what `sums` would of all columns, float32 [3, N].

    Args:
        parts: float32 [ranks, 3, N], what it returns of each rank's.
    """
    target_z, log_sum, mean = parts.unbind(1)
    log_sum_of_all = log_sum.logsumexp(0)
    share = (log_sum - log_sum_of_all).exp()
    return torch.stack([target_z.sum(0), log_sum_of_all, (share * mean).sum(0)])


# --------------------------------------------------------------------------------------------------
# both in one function


class OnePass(torch.autograd.Function):
    """What `logprob.LogprobEntropy` computes, chunk by chunk."""

    @staticmethod
    def forward(
        ctx,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        softcap: float | None,
        entropy_gradient: bool,
        group: dist.ProcessGroup | None,
    ) -> tuple[Tensor, Tensor]:
        """Return log-probs and entropies, [N] each."""
        ctx.settings = temperature, softcap, entropy_gradient, group
        if group is not None:
            targets = targets - group.rank() * weight.shape[0]
        ctx.chunk = logprob.rows_of_chunk(weight, torch.float32)
        found = hidden.new_empty((3, len(hidden)), dtype=torch.float32)
        logits = None
        for start in range(0, len(hidden), ctx.chunk):
            rows = slice(start, start + ctx.chunk)
            logits = None  # frees one chunk before the next is computed
            logits = logprob.matrix_product(hidden[rows], weight)
            found[:, rows] = sums(logits, targets[rows], temperature, softcap)
        ctx.last_chunk = logits
        if group is not None:
            parts = [torch.empty_like(found) for _ in range(group.size())]
            dist.all_gather(parts, found, group)
            found = over_ranks(torch.stack(parts))
        target_z, log_sum, mean = found
        ctx.save_for_backward(hidden, weight, targets, log_sum, mean)
        entropy = log_sum - mean
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return target_z - log_sum, entropy

    @staticmethod
    def backward(ctx, grad_logprobs: Tensor, grad_entropy: Tensor) -> tuple:
        """Return the gradients of hidden states and weight."""
        hidden, weight, targets, log_sum, mean = ctx.saved_tensors
        temperature, softcap, entropy_gradient, _ = ctx.settings
        by_logprob = grad_logprobs / temperature
        by_entropy = grad_entropy / temperature

        def gradient_of_logits(rows: slice) -> Tensor:
            logits = ctx.last_chunk
            ctx.last_chunk = None  # a second backward computes all
            if logits is None:
                logits = logprob.matrix_product(hidden[rows], weight)
            return gradient(
                logits,
                targets[rows],
                log_sum[rows],
                mean[rows],
                by_logprob[rows],
                by_entropy[rows] if entropy_gradient else None,
                temperature,
                softcap,
                hidden.dtype,
            )

        return logprob.gradients(ctx, gradient_of_logits)
