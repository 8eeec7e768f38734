"""The two structs that everything exchanges: `Trajectory` on the host, `Packed` on the device.

A worked example. The prompt is `7 8`, the policy sampled `9 2` and 2 ends a sequence (no sibling
shares the prompt):

    Trajectory.tokens    7    8    9    2
    Trajectory.sampled   F    F    T    T
    Trajectory.logprobs  0.  0.  -.3  -.1

`pack` shifts once, so that row t of every packed tensor speaks about `targets[t]`:

    Packed.inputs        7    8    9
    Packed.targets       8    9    2
    Packed.positions     0    1    2
    Packed.loss_mask     F    T    T
    Packed.engine_logprobs 0. -.3  -.1
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

if TYPE_CHECKING:  # names for annotations only: at run time this file knows nothing of the house
    from minirl.data.images import ImageBatch, ImageSpan
    from minirl.model.attention_blocks import Block
    from minirl.parallel.mesh import Context


@dataclass(kw_only=True)
class Trajectory:
    """One token-exact sequence: what the engine saw and sampled, id by id."""

    tokens: (
        np.ndarray
    )  # int32 [L]: prompt, sampled tokens, and what an environment said in between.
    sampled: (
        np.ndarray
    )  # bool [L]: True where the policy chose the token. The first token is never sampled.
    logprobs: (
        np.ndarray
    )  # float32 [L]: the engine's log-prob of sampled tokens at the sampling temperature, else 0.
    reward: float = 0.0
    group: int = 0  # Ticket of the prompt; siblings share it (the group baseline).
    episode: int = 0  # Number of the sample within its group.
    # Number within its episode: a new one begins where history was rewritten. Segments share reward
    # and advantage.
    segment: int = 0
    version: int = 0  # Optimizer steps that the weights had seen when the oldest token was sampled.
    versions: np.ndarray | None = (
        # int32 [L]: the same of each token, -1 where none was sampled; stays on the rank that
        # sampled it.
        None
    )
    # float32 [L]: the part of `reward` that was given for single answers, at their last tokens;
    # None: there is none. The rest is the last token's.
    turn_rewards: np.ndarray | None = None
    images: list[ImageSpan] = field(
        default_factory=list
    )  # Those that an environment showed, in their order.
    # Sampled tokens of all trajectories of the group; `exchange` counts them, on whatever ranks
    # they are.
    group_tokens: int = 0
    info: dict = field(default_factory=dict)  # For logs only; stays on the rank that sampled it.


@dataclass(kw_only=True)
class Packed:
    """One micro-batch on the device: sequences laid end to end on one token axis of T rows, no
    padding.

    Answers to one prompt share its rows. The prompt but its last token is a sequence of its own,
    outside the loss; each answer's sequence begins with the last prompt token (whose target is the
    answer's first) and sees the prompt's keys before its own.
    """

    inputs: Tensor  # int64 [T]
    targets: Tensor  # int64 [T]: the next token of the same sequence.
    positions: Tensor  # int64 [T]: of the input token in its trajectory.
    loss_mask: Tensor  # bool [T]: the target is in the loss.
    # int64 [N]: where `loss_mask` is True; the language-model head runs on these rows only.
    loss_rows: Tensor
    lengths: tuple[
        int, ...
    ]  # Rows of each of the S sequences, on the host so that no layer waits for the device.
    loss_tokens: (
        Tensor  # int64 [S]: targets in the loss of each sequence, on all context ranks together.
    )
    # int64 [S]: targets in the loss of all sequences of its prompt, in whatever batches and on
    # whatever ranks.
    group_tokens: Tensor
    # float64 [S]: of the episode. This and `sequence_ids` mean something where a sequence has
    # targets in the loss.
    rewards: Tensor
    sequence_ids: tuple[
        tuple[int, int, int], ...
    ]  # (group, episode, segment) of each of the S sequences.
    # Attention without a window, in parts: each sequence's own rows, and what it sees before them.
    # On a context ring: that of a rank's own rows, of
    # all rows with the first halves of an earlier rank, of the second halves with all rows of a
    # later one.
    blocks: tuple[Block, ...]
    windowed_block: Block | None = (
        None  # The same as one causal block, for layers that see a sliding window only.
    )
    images: ImageBatch | None = None  # Of a model that reads them.
    is_last_row: Tensor | None = None  # bool [T]: the row is the last of a trajectory.
    pairs: Tensor | None = (
        # int64 [P, 2], if asked for: numbers of the sequences of each pair's chosen and rejected
        # answer.
        None
    )
    # Rows are this rank's part of each sequence: chunk r and chunk 2R - 1 - r of 2R, in zigzag so
    # that causal work is even. Key rows of the blocks
    # count in the gathered rows of all ranks, rank by rank (but for those of a ring).
    context: Context | None = None
    temperature: float = 1.0  # Log-probs are of logits divided by it.
    engine_logprobs: Tensor | None = None  # float32 [T], as all below.
    turn_rewards: Tensor | None = (
        None  # Part of `rewards` that was given for the answers which end with the targets.
    )
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    old_entropy: Tensor | None = None
    advantages: Tensor | None = None
    values: Tensor | None = None  # A critic's, of what stood before the target.
    returns: Tensor | None = None  # What it should have said.
    high_entropy_mask: Tensor | None = (
        None  # bool [T]: tokens whose policy gradient counts; None: all do.
    )
