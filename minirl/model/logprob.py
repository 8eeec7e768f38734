"""Log-probs and entropy straight from hidden states, chunk by chunk.

There is never a whole [T, vocabulary] tensor. Here are the formulas; on CUDA the kernels of
`logprob_kernels.py` compute them.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from minirl.config.policy import CHUNK_BYTES


def logprob_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    *,
    softcap: float | None = None,
    entropy_gradient: bool = False,
    group: dist.ProcessGroup | None = None,
    kernels: type[torch.autograd.Function] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return log-probs of `targets` and entropies of softmax(hidden @ weight.T / temperature).

    Backward computes the logits again instead of keeping them, except those of the last chunk, with
    which it begins: they are alive then in any case.

    Args:
        hidden: [N, H]; equal on all ranks of a `group`, as its gradient then is.
        weight: [V, H]; with a `group` this rank's part of the vocabulary, V / ranks rows in rank
            order. Logits are never gathered.
        targets: int64 [N].
        temperature: what logits are divided by.
        softcap: c of logits c * tanh(hidden @ weight.T / c), before the temperature (Gemma 2, arXiv
            2408.00118, section 2).
        entropy_gradient: whether the entropies carry a gradient.
        group: the ranks that hold parts of the vocabulary.
        kernels: what computes it on CUDA, `logprob_kernels.OnePass`; None: the formulas here.

    Returns:
        Log-probs [N] and entropies [N], float32 (float64 for float64 inputs).
    """
    function: Any = kernels or LogprobEntropy
    return function.apply(hidden, weight, targets, temperature, softcap, entropy_gradient, group)


def rows_of_chunk(weight: Tensor, dtype: torch.dtype) -> int:
    """Return how many rows of logits in a dtype are computed at once."""
    return max(16, CHUNK_BYTES[weight.device.type] // (weight.shape[0] * dtype.itemsize))


def matrix_product(hidden: Tensor, weight: Tensor) -> Tensor:
    """Return hidden @ weight.T, in float32 if their dtype is not wider."""
    if hidden.is_cuda and hidden.dtype in (torch.bfloat16, torch.float16):
        # Rounding logits to bfloat16 would cost 3 digits of log-prob.
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    logits = torch.mm(hidden, weight.t())
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _logits(hidden: Tensor, weight: Tensor, temperature: float, softcap: float | None) -> Tensor:
    logits = matrix_product(hidden, weight)
    if softcap is not None:
        logits = logits.div_(softcap).tanh_().mul_(softcap)
    return logits.div_(temperature) if temperature != 1.0 else logits


def _add_product(total: Tensor, a: Tensor, b: Tensor, *, adds: bool) -> None:
    """Add a @ b to `total`, which is float32 where `a` and `b` may be bfloat16, or make it that."""
    # On CUDA in the matmul itself: the product is neither rounded nor written out before the sum.
    is_fused = a.is_cuda and a.dtype in (torch.bfloat16, torch.float16)
    if is_fused and adds:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    elif is_fused:
        torch.mm(a, b, out_dtype=total.dtype, out=total)
    elif adds:
        total += torch.mm(a, b)
    else:
        total.copy_(torch.mm(a, b))


def gradients(ctx: Any, gradient_of_logits: Callable[[slice], Tensor]) -> tuple:
    """Return the gradients of what `forward` got, chunk by chunk, the last one first.

    Args:
        ctx: with the rows of a `chunk`, the `settings` that `forward` got after its tensors, and
            hidden states and weight as its first saved tensors.
        gradient_of_logits: returns the gradient of the logits of some rows.
    """
    hidden, weight = ctx.saved_tensors[:2]
    grad_hidden = torch.empty_like(hidden)
    grad_weight = None  # Of a frozen head.
    if ctx.needs_input_grad[1]:
        # Summed over chunks, so never in bfloat16.
        wide = torch.promote_types(weight.dtype, torch.float32)
        grad_weight = torch.empty_like(weight, dtype=wide)
        if not len(hidden):
            grad_weight.zero_()
    grad = None
    for start in reversed(range(0, len(hidden), ctx.chunk)):
        rows = slice(start, start + ctx.chunk)
        grad = None  # frees one chunk before the next is computed
        grad = gradient_of_logits(rows)
        torch.mm(grad, weight, out=grad_hidden[rows])
        is_first = rows.stop >= len(hidden)
        if grad_weight is not None:
            _add_product(grad_weight, grad.t(), hidden[rows], adds=not is_first)
    grad = None
    *_, group = ctx.settings
    if group is not None:
        dist.all_reduce(grad_hidden, group=group)
    if grad_weight is not None:
        grad_weight = grad_weight.to(weight.dtype)
    return grad_hidden, grad_weight, None, None, None, None, None


class LogprobEntropy(torch.autograd.Function):
    """Log-probs and entropies with their gradients.

    With z the logits over temperature and p = softmax(z):

        d logp_y / dz = onehot_y - p;  dH / dz = -p (z - sum(p z)).

    A softcap c multiplies the gradient by 1 - tanh^2 = 1 - (z temperature / c)^2.
    """

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
        ctx.elsewhere = (targets < 0) | (targets >= weight.shape[0])  # all False without a group
        targets = targets.masked_fill(ctx.elsewhere, 0)
        logprobs = hidden.new_empty(
            len(hidden), dtype=torch.promote_types(hidden.dtype, torch.float32)
        )
        ctx.chunk = rows_of_chunk(weight, logprobs.dtype)
        log_sum = torch.empty_like(logprobs)
        mean = torch.empty_like(logprobs)  # sum(p z)
        ctx.last_chunk = None
        ctx.keeps_logits = entropy_gradient or softcap is not None  # for the gradient
        for start in range(0, len(hidden), ctx.chunk):
            rows = slice(start, start + ctx.chunk)
            z = p = ctx.last_chunk = None  # frees one chunk before the next is computed
            z = _logits(hidden[rows], weight, temperature, softcap)
            # One kernel, where logsumexp would be six; p = exp(z - log_sum), also of the largest z.
            p = z.softmax(1)
            largest = z.max(1, keepdim=True)
            log_sum[rows] = (largest.values - p.gather(1, largest.indices).log_())[:, 0]
            if group is not None:  # over the columns of all ranks
                of_rank = log_sum[rows].clone()
                parts = [torch.empty_like(of_rank) for _ in range(group.size())]
                dist.all_gather(parts, of_rank, group)
                log_sum[rows] = torch.stack(parts).logsumexp(0)
                p.mul_((of_rank - log_sum[rows]).exp_()[:, None])
            target_z = z.gather(1, targets[rows, None])[:, 0].masked_fill(ctx.elsewhere[rows], 0)
            mean_z = torch.mul(p, z, out=None if ctx.keeps_logits else z).sum(1)
            ctx.last_chunk = (z if ctx.keeps_logits else None), p
            sums = torch.stack([target_z, mean_z])
            if group is not None:
                dist.all_reduce(sums, group=group)
            logprobs[rows] = sums[0] - log_sum[rows]
            mean[rows] = sums[1]
        ctx.save_for_backward(hidden, weight, targets, log_sum, mean)
        entropy = log_sum - mean
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad_logprobs: Tensor, grad_entropy: Tensor) -> tuple:
        """Return the gradients of hidden states and weight."""
        hidden, weight, targets, log_sum, mean = ctx.saved_tensors
        temperature, softcap, entropy_gradient, _ = ctx.settings
        by_logprob = (grad_logprobs / temperature)[:, None]
        by_entropy = (grad_entropy / temperature)[:, None]
        by_target = by_logprob.masked_fill(ctx.elsewhere[:, None], 0)

        def gradient_of_logits(rows: slice) -> Tensor:
            if ctx.last_chunk is None:
                z = _logits(hidden[rows], weight, temperature, softcap)
                p = torch.sub(z, log_sum[rows, None], out=None if ctx.keeps_logits else z).exp_()
            else:
                z, p = ctx.last_chunk
                ctx.last_chunk = None  # a second backward computes all
            # (onehot - p) by_logprob. The difference at a target is taken before it is rounded: p
            # may be almost 1 there.
            places = targets[rows, None]
            at_target = by_target[rows] - p.gather(1, places) * by_logprob[rows]
            dtype = p.dtype if ctx.keeps_logits else hidden.dtype
            in_place = dtype == p.dtype and not entropy_gradient
            grad = p if in_place else torch.empty_like(p, dtype=dtype)
            torch.mul(p, -by_logprob[rows], out=grad)
            grad.scatter_(1, places, at_target.to(dtype))
            if entropy_gradient:
                grad.addcmul_(p * (z - mean[rows, None]), by_entropy[rows], value=-1)
            if softcap is not None:
                grad.mul_(1 - (z * (temperature / softcap)).square_())
            return grad.to(hidden.dtype)

        return gradients(ctx, gradient_of_logits)
