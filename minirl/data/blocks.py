"""Who sees whom in a packed micro-batch, as blocks of row numbers that attention kernels take."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from minirl.data.images import ImageBatch, ImageSpan
from minirl.model.attention_blocks import Block, Rectangle, RowIndex
from minirl.parallel import context as cp
from minirl.parallel.mesh import Context

# A shared prompt of at most so many keys is repeated before each answer's own keys: one call of a
# kernel instead of two and a merge (15 % faster at
# 59 keys, even at 200, on CPU).
SHORT_PROMPT = 128
# Lengths up to the same of these share a rectangle, so that padding stays below a fifth or 8 rows.
EDGES = list(
    itertools.accumulate(range(64), lambda edge, _: max(edge + 8, edge * 6 // 5), initial=8)
)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What a model on its mesh asks of the rows of a micro-batch."""

    multiple: int = (
        1  # Their number on a rank is a multiple of this (sequence parallelism cuts them evenly).
    )
    context: Context | None = None
    windowed: bool = False  # Some layers see a sliding window, and want `Packed.windowed_block`.
    # `Vision.batch` (data/images.py) of a model that reads images.
    images: (
        Callable[[list[tuple[list[ImageSpan], np.ndarray]], torch.device], ImageBatch] | None
    ) = None


@dataclass(frozen=True)
class _Chunk:
    """Rows of a sequence that lie side by side on this rank."""

    rows: np.ndarray  # On this rank.
    keys: np.ndarray  # The same in the gathered keys.
    earlier: np.ndarray  # Keys of the sequence's rows before them.
    prompt: np.ndarray  # Keys of the shared prompt.


def on_device(
    values: np.ndarray, device: torch.device, dtype: torch.dtype | None = None
) -> torch.Tensor:
    return torch.from_numpy(values).to(device, dtype, non_blocking=True)


def build(
    sequences: list[tuple[int, int | None]], layout: Layout, device: torch.device
) -> tuple[tuple[Block, ...], Block | None]:
    """(blocks, joined) of `Packed`, for sequences end to end: how many rows each has on all ranks
    together, and the number of the one whose rows come before them, if there is one.
    """
    chunks = _chunks(sequences, layout.context)
    joined = None
    if layout.windowed:
        joined = _block(
            [(c.rows, np.concatenate([c.prompt, c.earlier, c.keys])) for c in chunks], True, device
        )
    if layout.context and layout.context.ring:
        return _ring(sequences, layout.context, device), joined
    short = [len(c.prompt) <= SHORT_PROMPT for c in chunks]
    alike = layout.context is None and not any(
        len(c.prompt) and s for c, s in zip(chunks, short, strict=True)
    )  # each query is the key at its place
    blocks = [
        _block(
            [
                (c.rows, np.concatenate([c.prompt, c.keys]) if s else c.keys)
                for c, s in zip(chunks, short, strict=True)
            ],
            True,
            device,
            squares=alike,
        )
    ]
    if earlier := [(c.rows, c.earlier) for c in chunks if len(c.earlier)]:
        blocks.append(_block(earlier, False, device))
    siblings = itertools.groupby(
        (c for c, s in zip(chunks, short, strict=True) if not s), key=lambda c: c.prompt[0]
    )  # they see the same keys: one pair
    prompts = [
        (np.concatenate([c.rows for c in group]), group[0].prompt)
        for group in (list(g) for _, g in siblings)
    ]
    return tuple(blocks + ([_block(prompts, False, device)] if prompts else [])), joined


def _chunks(sequences: list[tuple[int, int | None]], context: Context | None) -> list[_Chunk]:
    own = [cp.chunks(num_rows, context) for num_rows, _ in sequences]
    starts = np.cumsum([0, *(sum(map(len, pieces)) for pieces in own)])
    homes = [
        cp.gathered_positions(num_rows, start, starts[-1], context)
        for (num_rows, _), start in zip(sequences, starts, strict=False)
    ]
    out, row = [], 0
    for (_, shared), home, pieces in zip(sequences, homes, own, strict=True):
        prompt = home[:0] if shared is None else homes[shared][: sequences[shared][0]]
        for rows in pieces:
            out.append(_Chunk(row + np.arange(len(rows)), home[rows], home[: rows[0]], prompt))
            row += len(rows)
    return out


def _ring(
    sequences: list[tuple[int, int | None]], context: Context, device: torch.device
) -> tuple[Block, ...]:
    """A rank's own rows are in order, so plain causal; of an earlier rank all rows see the first
    halves, its second halves come later than all; of a later one only the second halves see
    anything, and that is everything.
    """
    lengths = [cp.padded(num_rows, context) // context.size for num_rows, _ in sequences]
    rows = np.split(np.arange(sum(lengths)), np.cumsum(lengths)[:-1])
    first, second = [r[: len(r) // 2] for r in rows], [r[len(r) // 2 :] for r in rows]
    return (
        _block([(r, r) for r in rows], True, device, squares=True),
        _block(list(zip(rows, first, strict=True)), False, device),
        _block(list(zip(second, rows, strict=True)), False, device),
    )


def _block(
    pairs: list[tuple[np.ndarray, np.ndarray]],
    causal: bool,
    device: torch.device,
    *,
    squares: bool = False,
) -> Block:
    queries, keys = [q for q, _ in pairs], [k for _, k in pairs]
    rows = np.concatenate(queries)
    rectangles, places = _rectangles(queries, keys, causal, device)

    def running(parts: list[np.ndarray]) -> torch.Tensor:
        return on_device(np.cumsum([0, *map(len, parts)]), device, torch.int32)

    return Block(
        causal=causal,
        rows=None if causal and _counts_up(rows) else on_device(rows, device),
        key_rows=None if squares else on_device(np.concatenate(keys), device),
        cu_queries=running(queries),
        cu_keys=running(keys),
        longest=(max(map(len, queries)), max(map(len, keys))),
        rectangles=rectangles,
        places=places,
    )


def _counts_up(rows: np.ndarray, first: int = 0) -> bool:
    return bool((rows == np.arange(first, first + len(rows))).all())


def _run(parts: list[np.ndarray], device: torch.device) -> tuple[RowIndex, np.ndarray]:
    """With the padding: bool [B, L]."""
    lengths = np.array([len(p) for p in parts])
    place = np.arange(lengths.max())
    starts = np.cumsum(lengths) - lengths
    rows = np.concatenate(parts)[starts[:, None] + np.minimum(place, lengths[:, None] - 1)]
    first = int(rows[0, 0])
    return RowIndex(
        on_device(rows, device), first if _counts_up(rows.reshape(-1), first) else None
    ), place >= lengths[:, None]


def _rectangles(
    queries: list[np.ndarray], keys: list[np.ndarray], causal: bool, device: torch.device
) -> tuple[tuple[Rectangle, ...], torch.Tensor | None]:
    """`Block.rectangles` of pairs of like size, and `Block.places`."""
    num_queries, num_keys = np.array([len(q) for q in queries]), np.array([len(k) for k in keys])
    like = np.stack(
        [
            num_keys > num_queries,
            np.searchsorted(EDGES, num_queries),
            np.searchsorted(EDGES, num_keys),
        ],
        axis=1,
    )
    out, places, filled = [], [np.empty(0, np.int64)] * len(queries), 0
    for size in np.unique(like, axis=0):
        members = np.flatnonzero((like == size).all(1))
        (query_run, filling), (key_run, hidden) = (
            _run([side[i] for i in members], device) for side in (queries, keys)
        )
        before = (num_keys - num_queries)[members]
        last = (
            before[:, None] + np.arange(filling.shape[1]) if causal else num_keys[members, None] - 1
        )
        out.append(
            Rectangle(
                queries=query_run,
                keys=key_run,
                filling=on_device(filling, device) if filling.any() else None,
                last=on_device(last, device) if (before if causal else hidden).any() else None,
            )
        )
        for n, i in enumerate(members):
            places[i] = filled + n * filling.shape[1] + np.arange(num_queries[i])
        filled += filling.size
    order = np.concatenate(places)
    return tuple(out), None if len(order) == filled and _counts_up(order) else on_device(
        order, device
    )
