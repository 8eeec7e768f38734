"""Where layers with a state begin in a packed micro-batch, as row numbers that they take."""

import numpy as np
import torch

from minirl.batch.attention_plan import RowLayout, Sequence, gathered_positions, on_device
from minirl.types.packed import CHUNK, Chunks, Recurrence, Span


def build_recurrence(
    sequences: list[Sequence], layout: RowLayout, device: torch.device
) -> Recurrence:
    """Return how layers with a state go through sequences that lie end to end.

    Args:
        sequences: sequences of the micro-batch, in order; shared prompts come first.
        layout: what the model asks of the rows.
        device: device of the row numbers.
    """
    lengths = np.array([q.num_rows for q in sequences])
    stops = np.cumsum(lengths)
    starts = stops - lengths
    num_rows = int(stops[-1])

    # 1. Each sequence's rows, after the rows that its convolution sees before them.
    num_before = layout.convolution - 1
    history = []
    places = []
    for number, q in enumerate(sequences):
        rows = np.arange(starts[number], stops[number])
        before = np.full(num_before, num_rows)
        if q.shared is not None:
            prompt = np.arange(starts[q.shared], stops[q.shared])[-num_before:]
            before[num_before - len(prompt) :] = prompt
        places.append(rows + (number + 1) * num_before)
        history += [before, rows]

    # 2. Shared prompts, and then sequences that may continue one of them.
    num_prompts = len({q.shared for q in sequences if q.shared is not None})
    rest = sequences[num_prompts:]
    spans = []
    continued = None
    if num_prompts:
        spans.append(span_of(lengths[:num_prompts], 0, None, device))
        continued = np.array([num_prompts if q.shared is None else q.shared for q in rest])
    spans.append(span_of(lengths[num_prompts:], int(starts[num_prompts]), continued, device))

    gathered = None
    back = None
    context = layout.context
    if context:
        positions = gathered_positions(sequences, context)
        without_padding = zip(positions, lengths, strict=True)
        order = np.concatenate([found[:length] for found, length in without_padding])
        in_gathered = np.full(sum(map(len, positions)), num_rows)
        in_gathered[order] = np.arange(num_rows)
        gathered = on_device(order, device)
        back = on_device(in_gathered, device)
    return Recurrence(
        spans=tuple(spans),
        history=on_device(np.concatenate(history), device),
        places=on_device(np.concatenate(places), device),
        gathered=gathered,
        back=back,
    )


def span_of(
    lengths: np.ndarray, start: int, continued: np.ndarray | None, device: torch.device
) -> Span:
    """Return sequences of these lengths as a recurrence goes through them.

    Args:
        lengths: number of rows of each sequence, [S].
        start: the first row of the first sequence, in the micro-batch.
        continued: `Span.continued`.
        device: device of the row numbers.
    """

    def cut() -> Chunks:
        """Return `Span.chunks`."""
        starts = np.cumsum(lengths) - lengths
        num_rows = int(lengths.sum())
        num_chunks = np.maximum(1, -(-lengths // CHUNK))
        order = np.argsort(-num_chunks, kind="stable")
        ranks = np.argsort(order)
        counts: list[int] = []
        rows = []
        places = np.empty(num_rows, np.int64)
        for step in range(num_chunks.max()):
            members = order[num_chunks[order] > step]
            within = step * CHUNK + np.arange(CHUNK)
            here = starts[members, None] + within
            filled = within < lengths[members, None]
            first_place = sum(counts) * CHUNK
            places[here[filled]] = first_place + np.flatnonzero(filled)
            rows.append(np.where(filled, here, num_rows))
            counts.append(len(members))
        return Chunks(
            rows=on_device(np.concatenate(rows), device),
            counts=tuple(counts),
            order=on_device(order, device),
            ranks=on_device(ranks, device),
            places=on_device(places, device),
        )

    cu_rows = np.cumsum(np.concatenate([[0], lengths]))
    return Span(
        start=start,
        stop=start + int(cu_rows[-1]),
        cu_rows=on_device(cu_rows, device),
        continued=None if continued is None else on_device(continued, device),
        cut=cut,
    )
