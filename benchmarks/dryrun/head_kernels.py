"""What the head's kernels do, on tensors that have no values: they read logits and write."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from minirl.model import logprob_kernels

KERNEL = "dryrun::head_kernel"


@torch.library.custom_op(KERNEL, mutates_args=("written",))
def _launch(read: Sequence[Tensor], written: Sequence[Tensor]) -> None:
    """Stand for a kernel that reads tensors and writes others."""
    raise NotImplementedError("there are no values on a pretended device")


@_launch.register_fake
def _(read: Sequence[Tensor], written: Sequence[Tensor]) -> None:
    return None


def pretend() -> None:
    """Let heads of this process compute without Triton."""
    module: Any = logprob_kernels
    module.sums = _sums
    module.gradient = _gradient


def _sums(logits: Tensor, targets: Tensor, temperature: float, softcap: float | None) -> Tensor:
    found = logits.new_empty((3, len(logits)))
    _launch([logits, targets], [found])
    return found


def _gradient(
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
    out = logits if dtype == logits.dtype else torch.empty_like(logits, dtype=dtype)
    _launch([logits, targets, log_sum, mean, by_logprob], [out])
    return out
