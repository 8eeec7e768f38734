"""Log-probs and entropy straight from hidden states: chunk by chunk, never a whole [T, vocabulary]
tensor.
"""

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK_ELEMENTS = 2**24  # Logits alive at once (64 MB in float32).


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
    """Log-prob of `targets` and entropy of the distribution softmax(hidden @ weight.T /
    temperature).

    With a softcap c (Gemma 2, arXiv 2408.00118, section 2) the logits are c * tanh(hidden @
    weight.T / c) before the temperature.

    hidden [N, H], weight [V, H], targets int64 [N] -> two tensors [N], float32 (float64 for float64
    inputs). The entropy carries a gradient only if asked. Backward computes the logits again
    instead of keeping them, but for the last chunk's, with which it begins: they are alive then in
    any case.

    With a `group`, `weight` is this rank's part of the vocabulary (V / ranks rows, in rank order)
    and `hidden` is equal on all ranks, as is then its gradient; logits are never gathered.
    """
    return _LogprobEntropy.apply(
        hidden, weight, targets, temperature, softcap, entropy_gradient, group
    )


def _logits(hidden: Tensor, weight: Tensor, temperature: float, softcap: float | None) -> Tensor:
    if hidden.is_cuda and hidden.dtype in (torch.bfloat16, torch.float16):
        logits = torch.mm(
            hidden, weight.t(), out_dtype=torch.float32
        )  # rounding logits to bf16 costs 3 digits of log-prob
    else:
        logits = torch.mm(hidden, weight.t())
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if softcap is not None:
        logits = logits.div_(softcap).tanh_().mul_(softcap)
    return logits.div_(temperature) if temperature != 1.0 else logits


def _logsumexp(z: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Over all columns on all ranks, [N]."""
    own = torch.logsumexp(z, dim=1)
    if group is None:
        return own
    of_ranks = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(of_ranks, own, group=group)
    return torch.stack(of_ranks).logsumexp(0)


class _LogprobEntropy(torch.autograd.Function):
    """With z the logits over temperature, p = softmax(z): d logp_y / dz = onehot_y - p;  dH / dz =
    -p (z - sum(p z)).

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
            targets = targets - dist.get_rank(group) * weight.shape[0]
        ctx.elsewhere = (targets < 0) | (targets >= weight.shape[0])  # all False without a group
        targets = targets.masked_fill(ctx.elsewhere, 0)
        ctx.chunk = max(16, CHUNK_ELEMENTS // weight.shape[0])
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        ctx.kept = None
        logprobs, log_sum, mean = (hidden.new_empty(len(hidden), dtype=wide) for _ in range(3))
        for start in range(0, len(hidden), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            z = p = ctx.kept = None  # their memory first
            z = _logits(hidden[part], weight, temperature, softcap)
            log_sum[part] = _logsumexp(z, group)
            picked = z.gather(1, targets[part, None])[:, 0].masked_fill(ctx.elsewhere[part], 0)
            p = (z - log_sum[part, None]).exp_()
            ctx.kept = z, p
            sums = torch.stack([picked, torch.linalg.vecdot(p, z)])
            if group is not None:
                dist.all_reduce(sums, group=group)
            logprobs[part], mean[part] = sums[0] - log_sum[part], sums[1]
        ctx.save_for_backward(hidden, weight, targets, log_sum, mean)
        ctx.temperature, ctx.softcap, ctx.entropy_gradient, ctx.group = (
            temperature,
            softcap,
            entropy_gradient,
            group,
        )
        entropy = log_sum - mean
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad_logprobs: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, log_sum, mean = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(
            weight, dtype=log_sum.dtype
        )  # summed over chunks, so never in bf16
        kept, ctx.kept = ctx.kept, None  # a second backward computes all
        for start in reversed(range(0, len(hidden), ctx.chunk)):
            part = slice(start, start + ctx.chunk)
            if kept is None:
                z = _logits(hidden[part], weight, ctx.temperature, ctx.softcap)
                kept = z, (z - log_sum[part, None]).exp_()
            (z, p), kept = kept, None
            grad = torch.mul(p, -grad_logprobs[part, None], out=None if ctx.entropy_gradient else p)
            grad.scatter_add_(
                1,
                targets[part, None],
                grad_logprobs[part].masked_fill(ctx.elsewhere[part], 0)[:, None],
            )
            if ctx.entropy_gradient:
                grad.addcmul_(p * (z - mean[part, None]), grad_entropy[part, None], value=-1)
            if ctx.softcap is not None:
                grad.mul_(1 - (z * (ctx.temperature / ctx.softcap)).square_())
            grad = grad.div_(ctx.temperature).to(hidden.dtype)
            torch.mm(grad, weight, out=grad_hidden[part])
            grad_weight += torch.mm(grad.t(), hidden[part])
        if ctx.group is not None:
            dist.all_reduce(grad_hidden, group=ctx.group)
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None, None
