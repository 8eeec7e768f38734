"""The plan of a packed attention: which query rows see which key rows, in the form that kernels
take.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class RowIndex:
    """Row numbers in a rectangle; its ends repeat the last row."""

    rows: Tensor  # int64 [B, L]
    first: int | None  # If they count up by one, the first of them: a view does instead of a copy.


@dataclass(frozen=True, kw_only=True)
class Rectangle:
    """B pairs of like size."""

    queries: RowIndex
    keys: RowIndex
    filling: Tensor | None  # bool [B, Lq]: queries that only fill; None if there are none.
    # int64 [B, Lq], or [B, 1] of a block that is not causal: the last key that each query sees;
    # None if that is the one at its own place, or all.
    last: Tensor | None


@dataclass(frozen=True, kw_only=True)
class Block:
    """Part of an attention: ragged pairs of some query rows and the key rows that they see. A query
    is in one pair at most; what it sees in several blocks is merged by the log-sum-exp of its
    scores in each.
    """

    # The last query of a pair sees all its keys, and each one before it one key less. False: every
    # query sees every key.
    causal: bool
    rows: Tensor | None  # int64 [N]: the query rows, pair by pair; None: all rows in order.
    key_rows: (
        Tensor | None
        # int64 [M]: the same of the keys, which may repeat between pairs; None: the keys are the
        # query
        # rows, all in order.
    )
    cu_queries: Tensor  # int32 [pairs + 1]: running sum of the pairs' queries.
    cu_keys: Tensor
    longest: tuple[
        int, int
    ]  # Most queries and most keys of a pair, on the host so that no layer waits for the device.
    rectangles: tuple[Rectangle, ...]  # The same pairs for kernels that want equal lengths.
    places: (
        Tensor | None
    )  # int64 [N]: where each query is in the rectangles laid end to end; None if in order.
