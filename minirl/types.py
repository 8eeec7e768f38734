"""The two structs that everything exchanges: `Trajectory` on the host, `Packed` on the device.

A worked example. The prompt is `7 8`, the policy sampled `9 2` and 2 ends a sequence (no sibling shares the prompt):

    Trajectory.tokens    7    8    9    2
    Trajectory.sampled   F    F    T    T
    Trajectory.logprobs  0.  0.  -.3  -.1

`pack` shifts once, so that row t of every packed tensor speaks about `targets[t]`:

    Packed.inputs        7    8    9
    Packed.targets       8    9    2
    Packed.positions     0    1    2
    Packed.mask          F    T    T
    Packed.engine_logprobs 0. -.3  -.1
"""

from dataclasses import dataclass, field

import numpy as np
from torch import Tensor


class UserError(Exception):
    """Something that the user can mend; printed as one message without a traceback, exit code 2."""


@dataclass(kw_only=True)
class Trajectory:
    """One token-exact sequence: what the engine saw and sampled, id by id."""

    tokens: np.ndarray
    """int32 [L]: prompt and sampled tokens."""
    sampled: np.ndarray
    """bool [L]: True where the policy chose the token. The first token is never sampled."""
    logprobs: np.ndarray
    """float32 [L]: the engine's log-prob of sampled tokens at the sampling temperature, else 0."""
    reward: float = 0.0
    group: int = 0
    """Ticket of the prompt; siblings share it (the group baseline)."""
    episode: int = 0
    """Number of the sample within its group."""
    version: int = 0
    """Optimizer steps that the weights had seen when the oldest token was sampled."""
    advantages: np.ndarray | None = None
    """float32 [L], or None until assigned."""
    info: dict = field(default_factory=dict)
    """For logs only; stays on the rank that sampled it."""


@dataclass(frozen=True)
class Bucket:
    """B sequences of like length as rectangles of row numbers; ends repeat the last row."""

    queries: Tensor
    """int64 [B, Lq]"""
    keys: Tensor
    """int64 [B, Lk]"""
    prefix: Tensor | None
    """int64 [B]: keys before a sequence's own first row; None if all are 0."""


@dataclass(kw_only=True)
class Packed:
    """One micro-batch on the device: sequences laid end to end on one token axis of T rows, no padding.

    Answers to one prompt share its rows. The prompt but its last token is a sequence of its own, outside the loss; each answer's
    sequence begins with the last prompt token (whose target is the answer's first) and sees the prompt's keys before its own.
    """

    inputs: Tensor
    """int64 [T]"""
    targets: Tensor
    """int64 [T]: the next token of the same sequence."""
    positions: Tensor
    """int64 [T]: of the input token in its trajectory."""
    mask: Tensor
    """bool [T]: the target is in the loss."""
    rows: Tensor
    """int64 [N]: where `mask` is True; the language-model head runs on these rows only."""
    lengths: tuple[int, ...]
    """Rows of each of the S sequences, on the host so that no layer waits for the device."""
    cu_seqlens: Tensor
    """int32 [S+1]: running sum of `lengths`."""
    key_lengths: tuple[int, ...]
    """Keys that each sequence's last row sees: its own rows and those of a prompt shared with siblings."""
    cu_key_seqlens: Tensor
    """int32 [S+1]: running sum of `key_lengths`."""
    key_rows: Tensor | None
    """int64 [sum(key_lengths)]: the row of each key, sequence by sequence; None if no prompt is shared (keys are the rows)."""
    buckets: tuple["Bucket", ...]
    """The sequences in rectangles, for kernels that want them."""
    unbucket: Tensor
    """int64 [T]: where each row is in the rectangles' queries laid end to end."""
    temperature: float = 1.0
    """Log-probs are of logits divided by it."""
    engine_logprobs: Tensor | None = None
    """float32 [T], as the three below."""
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    advantages: Tensor | None = None
