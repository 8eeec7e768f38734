"""The two structs that everything exchanges: `Trajectory` on the host, `Packed` on the device.

A worked example. The prompt is `7 8`, the policy sampled `9 2`, and 2 ends a sequence (no sibling
shares the prompt):

    Trajectory.tokens        7    8    9    2
    Trajectory.sampled       F    F    T    T
    Trajectory.logprobs      0.   0.  -.3  -.1

`pack` shifts once, so that row t of every packed tensor describes `targets[t]`:

    Packed.inputs            7    8    9
    Packed.targets           8    9    2
    Packed.positions         0    1    2
    Packed.loss_mask         F    T    T
    Packed.engine_logprobs   0.  -.3  -.1
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor
from torch.distributed import ProcessGroup

UNSET: Any = None  # The value of a field that a later stage of the step fills in.
CHUNK = 64  # Rows of a chunk, as in the kernels of flash-linear-attention.


class ImageSpan(NamedTuple):
    """An image among the tokens of a sequence."""

    start: int  # Number of its first token in the sequence.
    num_tokens: int
    url: str  # A data URL: the image itself.


@dataclass(kw_only=True)
class Trajectory:
    """One token-exact sequence of L tokens: what the engine read and sampled, id by id.

    An episode in which nothing was sampled is one with L = 0: its reward counts, but nothing of it
    is trained on.
    """

    # int32 [L]: the prompt, sampled tokens, and an environment's tokens in between.
    tokens: np.ndarray
    # bool [L]: True where the policy chose the token. The first token is never sampled.
    sampled: np.ndarray
    # float32 [L]: the engine's log-prob of sampled tokens at the sampling temperature, else 0.
    logprobs: np.ndarray
    reward: float = 0.0
    group: int = 0  # Ticket of the prompt, which siblings share.
    episode: int = 0  # Number of the sample within its group.
    # Number within the episode: a new segment begins where history was rewritten. Segments share
    # reward and advantage.
    segment: int = 0
    # Number of optimizer steps that the weights had seen when the oldest token was sampled.
    version: int = 0
    # int32 [L]: the version of each token, -1 where none was sampled. Stays on the sampling rank.
    versions: np.ndarray | None = None
    # float32 [L]: the part of `reward` that was given for single turns, at their last tokens. The
    # rest belongs to the last token. None: no reward was given for single turns.
    turn_rewards: np.ndarray | None = None
    # uint8 or int16 [R, M, k], R < L: the k experts to which the engine's routers sent each of the
    # first R tokens in each of the M mixtures of the model, in the order of layers (R3, arXiv
    # 2510.11370). The last token has no route, for the engine never reads it. None: not asked for.
    routes: np.ndarray | None = None
    images: list[ImageSpan] = field(default_factory=list)  # Images in the sequence, in order.
    # Number of sampled tokens in all trajectories of the group, on all ranks. `exchange` sets it.
    group_tokens: int = 0
    info: dict[str, Any] = field(default_factory=dict)  # For logs. Stays on the sampling rank.


def prompt_length(t: Trajectory) -> int:
    """Return the tokens before the first sampled one; 1 if none is, so that nothing is shared."""
    return max(1, int(t.sampled.argmax()))


# --------------------------------------------------- what kernels are asked: who sees whom, and how


@dataclass(frozen=True)
class RowIndex:
    """Row numbers in a rectangle; at the end of a shorter line its last row repeats."""

    rows: Tensor  # int64 [B, L]
    # The first row number if they count up by one from there, so that a view does instead of a
    # copy; else None.
    first: int | None


@dataclass(frozen=True, kw_only=True)
class Rectangle:
    """B pairs of about the same size, padded to the same."""

    queries: RowIndex
    keys: RowIndex
    filling: Tensor | None  # bool [B, Lq]: queries that only fill; None if there are none.
    # int64 [B, Lq], or [B, 1] of a block that is not causal: the last key that each query sees;
    # None: the key at the query's place, or all keys.
    last: Tensor | None


class Padded(NamedTuple):
    """The pairs of a block, for kernels that take equal lengths."""

    rectangles: tuple[Rectangle, ...]
    # int64 [N]: where each query is in the rectangles laid end to end; None if in order.
    places: Tensor | None


@dataclass(frozen=True, kw_only=True)
class Block:
    """Part of an attention: ragged pairs of some query rows and the key rows that they see.

    A query is in one pair at most. What it sees in several blocks is merged by the log-sum-exp of
    its scores in each.
    """

    # The last query of a pair sees all keys, and each query before it one key less. False: every
    # query sees every key.
    causal: bool
    # int64 [N]: the query rows, pair by pair; None: all rows in order.
    rows: Tensor | None
    # int64 [M]: the key rows, pair by pair, which may repeat between pairs; None: the keys are the
    # query rows, all in order.
    key_rows: Tensor | None
    cu_queries: Tensor  # int32 [pairs + 1]: running sum of the pairs' queries.
    cu_keys: Tensor  # int32 [pairs + 1]: the same of their keys.
    # Most queries and most keys of a pair, on the host so that no layer waits for the device.
    longest: tuple[int, int]
    # Returns the pairs in rectangles, on the device of the rows.
    pad: Callable[[], Padded]

    @cached_property
    def padded(self) -> Padded:
        """Return the same pairs in rectangles.

        They are made when a kernel asks first. FlashAttention takes the running sums, and never
        asks.
        """
        return self.pad()


@dataclass(frozen=True)
class AttentionPlan:
    """Who sees whom in a micro-batch.

    With a context, key rows count in the gathered rows of all ranks, rank by rank (except on a
    ring).
    """

    # Attention without a window, in parts: the rows of each sequence, and the keys that it sees
    # before them. On a context ring: this rank's rows with each other; all rows with the first
    # halves of an earlier rank; second halves with all rows of a later rank.
    blocks: tuple[Block, ...]
    windowed: Block | None  # All of it as one causal block, for layers with a sliding window.
    # Rows of an image see later rows of the same image. None: there are no images, or the model is
    # causal there, too. The second is for layers with a window.
    images: Block | None
    windowed_images: Block | None


@dataclass(frozen=True)
class Options:
    """How a layer attends."""

    scale: float  # Scores are q k' scale.
    # Keys that a query sees, itself included; only for a causal block that has all of them.
    window: int | None = None
    softcap: float | None = None  # Scores s become cap tanh(s / cap); Gemma 2, arXiv 2408.00118.


@dataclass(frozen=True, kw_only=True)
class Chunks:
    """Sequences cut into chunks of `CHUNK` rows, for a recurrence that is parallel inside each.

    Step i has the i-th chunk of every sequence that is long enough. Sequences are sorted, the
    longest first, so that those of a step are the first of those of the step before.
    """

    rows: Tensor  # int64 [C, CHUNK]: row numbers, step by step; the number of rows: none.
    counts: tuple[int, ...]  # Number of chunks of each step, on the host.
    order: Tensor  # int64 [S]: the sequences, the longest first.
    ranks: Tensor  # int64 [S]: where each sequence is in `order`.
    places: Tensor  # int64 [T]: where each row is in the chunks laid end to end.


@dataclass(frozen=True, kw_only=True)
class Span:
    """Sequences that lie end to end, and the states with which a recurrence begins them."""

    start: int  # First row in the micro-batch,
    stop: int  # and the row after the last one.
    cu_rows: Tensor  # int64 [S + 1]: running sum of the sequences' rows.
    # int64 [S]: for each sequence, which of the N sequences of the span before it continues; N:
    # none of them. None: no sequence continues another.
    continued: Tensor | None
    cut: Callable[[], Chunks]  # Returns the sequences in chunks.

    @cached_property
    def chunks(self) -> Chunks:
        """Return the same sequences in chunks; kernels that take running sums never ask."""
        return self.cut()


@dataclass(frozen=True, kw_only=True)
class Recurrence:
    """How layers with a state go through a micro-batch: from the start of each sequence.

    An answer to a shared prompt begins with the state after the prompt. With a context, each rank
    goes through the T rows of all ranks, for some of the heads.
    """

    spans: tuple[Span, ...]  # Shared prompts, if there are any, then all other sequences.
    # int64 [T + S (K - 1)]: for a convolution over K rows, each sequence's K - 1 rows before its
    # first (T where there are none), and its rows.
    history: Tensor
    places: Tensor  # int64 [T]: where each row is in `history`.
    # With a context, int64 [T]: where the rows are in those of all ranks, rank by rank; and back,
    # T for rows that only fill.
    gathered: Tensor | None = None
    back: Tensor | None = None


# ---------------------------------------------------------------------------------- the micro-batch


@dataclass(frozen=True)
class Context:
    """The ranks that hold parts of the same sequences, for context parallelism."""

    group: ProcessGroup
    rank: int
    size: int
    # Keys travel from rank to rank; False: every rank gathers them all, layer by layer.
    ring: bool = False


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """The S sequences of a micro-batch, in the order of their rows."""

    ids: tuple[tuple[int, int, int], ...]  # (group, episode, segment).
    # Number of rows, on the host so that no layer waits for the device.
    lengths: tuple[int, ...]
    # int64 [S]: number of targets in the loss, on all context ranks together.
    loss_tokens: Tensor
    # int64 [S]: number of targets in the loss of all answers to the same prompt, in any micro-batch
    # and on any rank.
    group_tokens: Tensor
    # float64 [S]: reward of the episode. Rewards and ids have a meaning only for sequences with
    # targets in the loss.
    rewards: Tensor


@dataclass(kw_only=True)
class Preference:
    """What a batch of judged answers has for the losses of reward models, DPO and KTO."""

    # int64 [P, 2]: numbers of the chosen and the rejected sequence of each pair; [P, 1] where each
    # answer was judged alone.
    answers: Tensor
    baseline: Tensor = UNSET  # float64 scalar of KTO: what log-ratios are compared with.


@dataclass(kw_only=True)
class ImageBatch:
    """The images of a micro-batch, each once, and the rows that they are in."""

    # float32 [P, D], the patches of all images end to end; or [I, 3, H, W]; or for Gemma 4
    # [I, P, D], where images with fewer patches are padded. On the host until the tower reads them:
    # those of a whole step may be more than a device has room for.
    pixels: Tensor
    # The N rows with an input token that is part of an image, and for each of them the row of the
    # vision tower's output that replaces it.
    rows: Tensor  # int64 [N]
    features: Tensor  # int64 [N]
    # For Qwen's models: int64 [I, 3], how many patches an image has in time, height and width; and
    # int64 [3, T], the rotary positions of every row in these.
    grids: Tensor | None = None
    positions: Tensor | None = None
    # For Gemma 4: int64 [I, P, 2], the column and the row of each patch; -1: it is padding.
    places: Tensor | None = None


@dataclass(kw_only=True)
class Packed:
    """One micro-batch on the device: S sequences end to end on one axis of T rows, no padding.

    Answers to one prompt share its rows. The prompt without its last token is one sequence, outside
    the loss. Each answer's sequence begins with the last prompt token (its target is the answer's
    first token), and attends to the prompt's keys before its own.

    With a context, rows are this rank's part of each sequence: chunk r and chunk 2R - 1 - r of 2R,
    in zigzag so that causal work is even.
    """

    inputs: Tensor  # int64 [T]
    targets: Tensor  # int64 [T]: the next token of the same sequence.
    positions: Tensor  # int64 [T]: position of the input token in its trajectory.
    is_last_row: Tensor  # bool [T]: the row is the last one of a trajectory.
    loss_mask: Tensor  # bool [T]: the target is in the loss.
    # int64 [N]: where `loss_mask` is True. The language-model head runs on these rows only.
    loss_rows: Tensor
    sequences: Sequences
    context: Context | None = None  # Ranks that hold the other parts of the same sequences.

    # For the model.
    attention: AttentionPlan
    recurrence: Recurrence | None = None  # For layers with a state.
    images: ImageBatch | None = None  # For a model that reads images.
    # int16 [T, M, k]: the experts to which the engine sent the input tokens; -1: not known.
    routes: Tensor | None = None
    temperature: float = 1.0  # Log-probs are of logits divided by it.

    # For the loss.
    preference: Preference = UNSET  # Of judged answers.
    # float32 [T]: what the engine said of the targets when it sampled them.
    engine_logprobs: Tensor
    # float32 [T]: the part of the rewards that was given for the answers that end at the targets.
    turn_rewards: Tensor | None = None
    # float [T] each, filled in by `Policy.annotate` where a step needs them: log-probs of the
    # targets under the policy before the step and under the reference, the policy's entropy, and
    # the critic's values of what stands before the targets.
    old_logprobs: Tensor = UNSET
    ref_logprobs: Tensor = UNSET
    old_entropy: Tensor = UNSET
    values: Tensor = UNSET
    # float [T], filled in by `advantages.assign`: `returns` are what the values should have been.
    advantages: Tensor = UNSET
    returns: Tensor = UNSET
    # bool [T]: tokens with a policy gradient (algo.entropy_share). None: all of them.
    high_entropy_mask: Tensor | None = None


class LayerBatch:
    """A micro-batch in the keyword arguments of layers.

    FSDP looks for gradients in the arguments of every layer. From torch 2.13 on it goes through all
    fields of a dataclass for that, and not through this, which holds none.
    """

    __slots__ = ("batch",)

    def __init__(self, batch: Packed):
        self.batch = batch
