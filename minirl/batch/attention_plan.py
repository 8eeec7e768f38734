"""Who sees whom in a packed micro-batch, as blocks of row numbers that attention kernels take.

For context parallelism a sequence is cut into 2R chunks for R ranks, and rank r holds the chunks r
and 2R - 1 - r (a zigzag; Llama 3, arXiv 2407.21783, sec. 3.3.2), so that causal attention costs
every rank the same. Only attention looks beyond a rank's rows; everything else in a model works
token by token. Losses are sums over a rank's rows. FSDP's shards run over the context ranks too, so
FSDP adds their gradients.
"""

import itertools
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from minirl.data.vision import Vision
from minirl.types.packed import (
    AttentionPlan,
    Block,
    Context,
    Padded,
    Rectangle,
    RowIndex,
    Trajectory,
)

# A shared prompt of at most so many keys is repeated before the keys of each answer: one call of a
# kernel instead of two and a merge (15 % faster at 59 keys, even at 200, on CPU).
SHORT_PROMPT = 128
SHORT_ANSWER = 512  # Rows. For a longer one the mask that it takes grows too large.
# On CUDA longer ones are, too, up to so many keys for each row of the answer. A merge moves about
# 35 times the bytes of the answer's queries, in forward and backward together; to repeat moves 8
# times those of the keys and values, of which there are fewer heads.
REPEATED_PER_ROW = 2
# Lengths are rounded up to one of these before they share a rectangle: padding stays below a fifth,
# or 8 rows.
EDGES = [8]
for _ in range(64):
    EDGES.append(max(EDGES[-1] + 8, EDGES[-1] * 6 // 5))

Ragged = list[np.ndarray]  # Row numbers, int64, of each pair or sequence.


@dataclass(frozen=True)
class Sequence:
    """Rows start .. stop of a trajectory. Row t reads token t and predicts token t + 1."""

    trajectory: Trajectory
    start: int
    stop: int
    shared: int | None = None  # Number of the earlier sequence that holds the rows before `start`.

    @property
    def num_rows(self) -> int:
        """Return the number of rows, on all context ranks together."""
        return self.stop - self.start


@dataclass(frozen=True, kw_only=True)
class RowLayout:
    """What a model on its mesh asks of the rows of a micro-batch."""

    # The number of rows on a rank is a multiple of this (sequence parallelism divides them evenly).
    multiple: int = 1
    context: Context | None = None
    windowed: bool = False  # Some layers see a sliding window: make `AttentionPlan.windowed`.
    vision: Vision | None = None  # How the model reads images.
    # Rows that the convolution of a layer with a state sees, the current one included: make
    # `Packed.recurrence`. 0: no layer has a state.
    convolution: int = 0

    def joined(self, others: list["RowLayout"]) -> "RowLayout":
        """Return the layout of batches that other models of the mesh read, too."""
        layouts = [self, *others]
        windowed = any(layout.windowed for layout in layouts)
        return replace(self, windowed=windowed, convolution=max(o.convolution for o in layouts))


@dataclass(frozen=True)
class _Chunk:
    """Rows of a sequence that are neighbours in the sequence and on this rank."""

    rows: np.ndarray  # Their numbers on this rank,
    numbers: np.ndarray  # in their sequence,
    keys: np.ndarray  # and in the gathered keys.
    earlier: np.ndarray  # Keys of the sequence's rows before them.
    prompt: np.ndarray  # Keys of the shared prompt.
    all_keys: np.ndarray  # Keys of all rows of the sequence.
    sequence: Sequence


def on_device(values: np.ndarray, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Copy an array to a device, without waiting for the copy."""
    return torch.from_numpy(values).to(device, dtype, non_blocking=True)


def padded(num_rows: int, context: Context | None) -> int:
    """Return the number of rows of a sequence after padding to whole chunks."""
    if context is None:
        return num_rows
    return num_rows + -num_rows % (2 * context.size)


def rows_of_rank(
    num_rows: int, context: Context | None, rank: int | None = None
) -> list[np.ndarray]:
    """Return the rows of a sequence that a rank holds, as one array or two.

    Args:
        num_rows: rows of the sequence, before padding.
        context: the ranks that share it; None: all rows are on this rank.
        rank: the rank that holds them; None: this one.
    """
    if context is None:
        return [np.arange(num_rows)]
    if rank is None:
        rank = context.rank
    rows = np.split(np.arange(padded(num_rows, context)), 2 * context.size)
    return [rows[rank], rows[-1 - rank]]


def gathered_positions(sequences: list[Sequence], context: Context | None) -> Ragged:
    """Return where the rows of each sequence are in the gathered rows of all ranks.

    Args:
        sequences: sequences that lie end to end.
        context: the ranks that share them.

    Returns:
        For each sequence, int64 [rows after padding].
    """
    num_ranks = context.size if context else 1
    rows_per_rank = sum(padded(q.num_rows, context) for q in sequences) // num_ranks
    out = []
    start = 0  # The row of a rank at which a sequence begins, the same on every rank.
    for q in sequences:
        positions = np.empty(padded(q.num_rows, context), np.int64)
        for rank in range(num_ranks):
            rows = np.concatenate(rows_of_rank(q.num_rows, context, rank))
            positions[rows] = rank * rows_per_rank + start + np.arange(len(rows))
        out.append(positions)
        start += len(positions) // num_ranks
    return out


def build(sequences: list[Sequence], layout: RowLayout, device: torch.device) -> AttentionPlan:
    """Return who sees whom, for sequences that lie end to end.

    Args:
        sequences: sequences of the micro-batch, in order.
        layout: what the model asks of the rows.
        device: device of the blocks.
    """
    chunks = _chunks(sequences, layout.context)
    rows = [c.rows for c in chunks]
    windowed_block = None
    if layout.windowed:
        seen = [np.concatenate([c.prompt, c.earlier, c.keys]) for c in chunks]
        windowed_block = _block(rows, seen, True, device)
    image_block = _image_block(chunks, layout, device)
    sees_in_windows_only = layout.vision and layout.vision.sees_ahead == "windowed"
    for_layers = (windowed_block, None if sees_in_windows_only else image_block, image_block)
    if layout.context and layout.context.ring:
        # A rank's rows are in order, so among them attention is plain causal. All rows see the
        # first halves of an earlier rank, and none sees its second halves, which come later. Only
        # the second halves see rows of a later rank, and they see all of them.
        first_halves, second_halves = rows[::2], rows[1::2]
        local = [np.concatenate(both) for both in zip(first_halves, second_halves, strict=True)]
        ring = (
            _block(local, local, True, device, queries_are_keys=True),
            _block(local, first_halves, False, device),
            _block(second_halves, local, False, device),
        )
        return AttentionPlan(ring, *for_layers)

    # Block 1, causal: each chunk's keys, after the prompt's keys if it is short enough to repeat.
    keys = []
    with_long_prompt = []
    for c in chunks:
        if repeats_prompt(len(c.prompt), len(c.keys), device):
            keys.append(np.concatenate([c.prompt, c.keys]))
        else:
            keys.append(c.keys)
            with_long_prompt.append(c)
    nothing_repeats = sum(map(len, keys)) == sum(map(len, rows))
    blocks = [_block(rows, keys, True, device, layout.context is None and nothing_repeats)]

    # Block 2, with a context: a chunk in the middle of its sequence sees all rows before it.
    late = [c for c in chunks if len(c.earlier)]
    if late:
        blocks.append(_block([c.rows for c in late], [c.earlier for c in late], False, device))

    # Block 3: long shared prompts. Siblings see the same keys, so their queries are one pair.
    queries = []
    prompts = []
    for _, group in itertools.groupby(with_long_prompt, key=lambda c: c.prompt[0]):
        siblings = list(group)
        queries.append(np.concatenate([c.rows for c in siblings]))
        prompts.append(siblings[0].prompt)
    if prompts:
        blocks.append(_block(queries, prompts, False, device))
    return AttentionPlan(tuple(blocks), *for_layers)


def repeats_prompt(num_keys: int, num_rows: int, device: torch.device) -> bool:
    """Return whether the keys of a shared prompt are repeated before those of an answer.

    Args:
        num_keys: of the prompt; 0: there is none.
        num_rows: of the answer, on this rank.
        device: that computes.
    """
    is_cheap = device.type == "cuda" and num_keys <= REPEATED_PER_ROW * num_rows
    is_short = num_keys <= SHORT_PROMPT and num_rows <= SHORT_ANSWER
    return num_keys == 0 or is_cheap or is_short


def _image_block(chunks: list[_Chunk], layout: RowLayout, device: torch.device) -> Block | None:
    """Return the block in which the rows of an image see the later ones of the same image.

    In reverse order of queries and keys it is causal: the last key that a row sees is then that of
    the next row. None: there is no image, or the model is causal there, too.

    Raises:
        UserError: the later rows are on other ranks of a ring.
        NotImplementedError: a shared prompt ends within an image.
    """
    if layout.vision is None or layout.vision.sees_ahead == "never":
        return None
    layout.vision.check_ring(bool(layout.context and layout.context.ring))
    queries = []
    keys = []
    for c in chunks:
        q = c.sequence
        num_rows_left = len(q.trajectory.tokens) - 1 - q.start
        for span in q.trajectory.images:
            first = span.start - q.start
            end = min(first + span.num_tokens, num_rows_left)
            if first < q.num_rows < end:
                raise NotImplementedError("a shared prompt ends within an image")
            last = min(end, q.num_rows) - 1
            sees = (c.numbers >= first) & (c.numbers < last)  # the last row sees none
            if sees.any():
                queries.append(c.rows[sees][::-1])
                keys.append(c.all_keys[c.numbers[sees][0] + 1 : last + 1][::-1])
    return _block(queries, keys, True, device, in_order=False) if queries else None


def _chunks(sequences: list[Sequence], context: Context | None) -> list[_Chunk]:
    """Return the chunks of this rank, sequence by sequence."""
    gathered = gathered_positions(sequences, context)
    out = []
    row = 0
    for q, keys in zip(sequences, gathered, strict=True):
        # A prompt's keys without the padding of its last chunks.
        prompt = keys[:0]
        if q.shared is not None:
            prompt = gathered[q.shared][: sequences[q.shared].num_rows]
        for rows in rows_of_rank(q.num_rows, context):
            out.append(
                _Chunk(
                    rows=np.arange(row, row + len(rows)),
                    numbers=rows,
                    keys=keys[rows],
                    earlier=keys[: rows[0]],
                    prompt=prompt,
                    all_keys=keys,
                    sequence=q,
                )
            )
            row += len(rows)
    return out


def _block(
    queries: Ragged,
    keys: Ragged,
    causal: bool,
    device: torch.device,
    queries_are_keys: bool = False,
    in_order: bool | None = None,
) -> Block:
    """Return the block of pairs of query rows and the key rows that they see.

    Args:
        queries: query rows of each pair.
        keys: key rows of each pair.
        causal: each query of a pair sees one key more than the query before it.
        device: device of the block.
        queries_are_keys: query i is the key i.
        in_order: the queries are all rows in order; None: as `causal` says.
    """
    if in_order is None:
        in_order = causal

    def pad() -> Padded:
        """Return `Block.padded`: rectangles of pairs of about the same size."""
        num_queries = np.array([[len(q)] for q in queries])
        num_keys = np.array([[len(k)] for k in keys])
        edges = np.searchsorted(EDGES, np.hstack([num_queries, num_keys]))
        sizes = np.hstack([num_keys > num_queries, edges])
        rectangles = []
        places = [np.empty(0, np.int64)] * len(queries)
        num_places = 0  # In the rectangles so far.
        for size in np.unique(sizes, axis=0):
            members = np.flatnonzero((sizes == size).all(1))
            query_index, filling = _row_index([queries[i] for i in members], device)
            key_index, hidden = _row_index([keys[i] for i in members], device)
            if causal:
                num_before = (num_keys - num_queries)[members]  # Keys that the first query sees.
                last = num_before + np.arange(filling.shape[1])
                needs_last = num_before.any()
            else:
                last = num_keys[members] - 1
                needs_last = hidden.any()
            rectangles.append(
                Rectangle(
                    queries=query_index,
                    keys=key_index,
                    filling=on_device(filling, device, torch.bool) if filling.any() else None,
                    last=on_device(last, device) if needs_last else None,
                )
            )
            for i in members:
                places[i] = num_places + np.arange(len(queries[i]))
                num_places += filling.shape[1]
        order = np.concatenate(places)
        is_in_order = np.array_equal(order, np.arange(num_places))
        return Padded(tuple(rectangles), None if is_in_order else on_device(order, device))

    return Block(
        causal=causal,
        rows=None if in_order else on_device(np.concatenate(queries), device),
        key_rows=None if queries_are_keys else on_device(np.concatenate(keys), device),
        cu_queries=_running_sum(queries, device),
        cu_keys=_running_sum(keys, device),
        longest=(max(map(len, queries)), max(map(len, keys))),
        pad=pad,
    )


def _running_sum(parts: Ragged, device: torch.device) -> Tensor:
    return on_device(np.cumsum([0, *map(len, parts)]), device, torch.int32)


def _row_index(parts: Ragged, device: torch.device) -> tuple[RowIndex, np.ndarray]:
    """Return row numbers as a rectangle [B, L], and which places are padding, bool [B, L]."""
    lengths = np.array([[len(part)] for part in parts])
    starts = np.cumsum(lengths, axis=0) - lengths
    place = np.arange(lengths.max())
    ends_repeated = np.minimum(place, lengths - 1)
    rows = np.concatenate(parts)[starts + ends_repeated]
    counts_up = (np.diff(rows.ravel()) == 1).all()
    index = RowIndex(on_device(rows, device), int(rows[0, 0]) if counts_up else None)
    return index, place >= lengths
