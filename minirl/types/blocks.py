"""What a kernel is asked: which query rows see which key rows, and how scores are made."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from torch import Tensor

CHUNK = 64  # Rows of a chunk, as in the kernels of flash-linear-attention.


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
