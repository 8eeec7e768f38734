"""Log-probs and entropy straight from hidden states, chunk by chunk.

There is never a whole [T, vocabulary] tensor.
"""

import torch
import torch.distributed as dist
from torch import Tensor

# Logits of a chunk, by kind of device. Each chunk adds to the gradient of the whole head, which is
# read and written for it; chunks that are too small would spend their time on that.
CHUNK_BYTES = {"cpu": 2**26, "cuda": 2**29}


def logprob_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    *,
    softcap: float | None = None,
    entropy_gradient: bool = False,
    group: dist.ProcessGroup | None = None,
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

    Returns:
        Log-probs [N] and entropies [N], float32 (float64 for float64 inputs).
    """
    return _LogprobEntropy.apply(
        hidden, weight, targets, temperature, softcap, entropy_gradient, group
    )


def _logits(hidden: Tensor, weight: Tensor, temperature: float, softcap: float | None) -> Tensor:
    if hidden.is_cuda and hidden.dtype in (torch.bfloat16, torch.float16):
        # Rounding logits to bfloat16 would cost 3 digits of log-prob.
        logits = torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    else:
        logits = torch.mm(hidden, weight.t())
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if softcap is not None:
        logits = logits.div_(softcap).tanh_().mul_(softcap)
    return logits.div_(temperature) if temperature != 1.0 else logits


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to `total`, which is float32 where `a` and `b` may be bfloat16."""
    if a.is_cuda and a.dtype in (torch.bfloat16, torch.float16):
        # In the matmul itself: the product is neither rounded nor written out before the sum.
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += torch.mm(a, b)


class _LogprobEntropy(torch.autograd.Function):
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
        if group is not None:
            targets = targets - group.rank() * weight.shape[0]
        ctx.elsewhere = (targets < 0) | (targets >= weight.shape[0])  # all False without a group
        targets = targets.masked_fill(ctx.elsewhere, 0)
        logprobs = hidden.new_empty(
            len(hidden), dtype=torch.promote_types(hidden.dtype, torch.float32)
        )
        bytes_per_row = weight.shape[0] * logprobs.itemsize
        ctx.chunk = max(16, CHUNK_BYTES[hidden.device.type] // bytes_per_row)
        log_sum = torch.empty_like(logprobs)
        mean = torch.empty_like(logprobs)  # sum(p z)
        ctx.last_chunk = None
        for start in range(0, len(hidden), ctx.chunk):
            rows = slice(start, start + ctx.chunk)
            z = p = ctx.last_chunk = None  # frees one chunk before the next is computed
            z = _logits(hidden[rows], weight, temperature, softcap)
            log_sum[rows] = z.logsumexp(1)
            if group is not None:  # over the columns of all ranks
                parts = [torch.empty_like(log_sum[rows]) for _ in range(group.size())]
                dist.all_gather(parts, log_sum[rows], group)
                log_sum[rows] = torch.stack(parts).logsumexp(0)
            target_z = z.gather(1, targets[rows, None])[:, 0].masked_fill(ctx.elsewhere[rows], 0)
            p = (z - log_sum[rows, None]).exp_()
            ctx.last_chunk = z, p
            sums = torch.stack([target_z, torch.linalg.vecdot(p, z)])
            if group is not None:
                dist.all_reduce(sums, group=group)
            logprobs[rows] = sums[0] - log_sum[rows]
            mean[rows] = sums[1]
        ctx.save_for_backward(hidden, weight, targets, log_sum, mean)
        ctx.temperature = temperature
        ctx.softcap = softcap
        ctx.entropy_gradient = entropy_gradient
        ctx.group = group
        entropy = log_sum - mean
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad_logprobs: Tensor, grad_entropy: Tensor) -> tuple:
        hidden, weight, targets, log_sum, mean = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        # Summed over chunks, so never in bfloat16.
        grad_weight = torch.zeros_like(weight, dtype=log_sum.dtype)
        for start in reversed(range(0, len(hidden), ctx.chunk)):
            rows = slice(start, start + ctx.chunk)
            z = p = grad = None  # frees one chunk before the next is computed
            if ctx.last_chunk is None:
                z = _logits(hidden[rows], weight, ctx.temperature, ctx.softcap)
                p = (z - log_sum[rows, None]).exp_()
            else:
                z, p = ctx.last_chunk
                ctx.last_chunk = None  # a second backward computes all
            grad = torch.mul(p, -grad_logprobs[rows, None], out=None if ctx.entropy_gradient else p)
            grad_targets = grad_logprobs[rows].masked_fill(ctx.elsewhere[rows], 0)
            grad.scatter_add_(1, targets[rows, None], grad_targets[:, None])
            if ctx.entropy_gradient:
                grad.addcmul_(p * (z - mean[rows, None]), grad_entropy[rows, None], value=-1)
            if ctx.softcap is not None:
                grad.mul_(1 - (z * (ctx.temperature / ctx.softcap)).square_())
            grad = grad.div_(ctx.temperature).to(hidden.dtype)
            torch.mm(grad, weight, out=grad_hidden[rows])
            _add_product(grad_weight, grad.t(), hidden[rows])
        z = p = grad = None
        if ctx.group is not None:
            dist.all_reduce(grad_hidden, group=ctx.group)
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None, None
