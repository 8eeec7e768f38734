"""Trajectories of a micro-batch laid end to end, and values of rows back to their tokens."""

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from minirl.batch.attention_plan import RowLayout, Sequence, build, on_device, padded, rows_of_rank
from minirl.batch.recurrence import build_recurrence
from minirl.types.packed import Packed, Preference, Sequences, Trajectory, prompt_length

LIVE = -1  # In place of the number of an expert: the trainer's own router chooses.
_PLAIN_LAYOUT = RowLayout()


def shared_part(t: Trajectory) -> bytes:
    """Return what is equal where siblings may share rows: the prompt but its last token."""
    num = prompt_length(t) - 1
    urls = [image.url for image in t.images if image.start < num]
    return t.tokens[:num].tobytes() + "".join(urls).encode()


def _filler(num_rows: int) -> Sequence:
    """Return a sequence outside the loss."""
    zeros = np.zeros(num_rows + 1, np.float32)
    trajectory = Trajectory(
        tokens=zeros.astype(np.int32),
        sampled=zeros.astype(bool),
        logprobs=zeros,
        turn_rewards=zeros,
    )
    return Sequence(trajectory, 0, num_rows)


def _lay_out(trajectories: list[Trajectory], layout: RowLayout) -> list[Sequence]:
    """Return the sequences of a micro-batch in the order of their rows.

    First the prompts that siblings share, then the rest of each trajectory, siblings next to each
    other; at the end a sequence that fills the rows up, if `layout` asks for that.
    """
    # 1. Siblings with one prompt.
    groups: dict[bytes, list[Trajectory]] = {}
    for t in sorted(trajectories, key=prompt_length):
        groups.setdefault(shared_part(t), []).append(t)
    context = layout.context
    can_share = not (context and context.ring)  # On a ring no rank has all keys of a prompt.
    prompts: list[Sequence] = []
    branches: list[Sequence] = []
    for siblings in groups.values():
        start = prompt_length(siblings[0]) - 1
        shared = None
        if can_share and len(siblings) > 1 and start > 0:
            shared = len(prompts)
            prompts.append(Sequence(siblings[0], 0, start))
        else:
            start = 0
        branches += [Sequence(t, start, len(t.tokens) - 1, shared) for t in siblings]
    sequences = prompts + branches or [_filler(1)]

    # 2. As many rows as the ranks can divide.
    num_ranks = context.size if context else 1
    rows_on_rank = sum(padded(q.num_rows, context) for q in sequences) // num_ranks
    missing = -rows_on_rank % layout.multiple
    if missing % 2 and num_ranks > 1:  # a rank has two equal chunks
        missing += layout.multiple
    if missing:
        sequences.append(_filler(missing * num_ranks))
    return sequences


def _column(
    sequences: list[Sequence],
    positions: list[np.ndarray],
    arrays: list[np.ndarray],
    shift: int = 1,
    fill: int = 0,
) -> np.ndarray:
    """Return the values of this rank's rows, end to end.

    Args:
        sequences: sequences of the micro-batch.
        positions: for each sequence, the positions of its rows on this rank.
        arrays: for each sequence, values of its trajectory's first tokens, [R, ...].
        shift: 0: take the value of the row's input token; 1: of its target.
        fill: the value of rows that only fill, and of tokens without one.

    Returns:
        [T, ...].
    """
    columns = []
    for q, places, values in zip(sequences, positions, arrays, strict=True):
        column = values.take(places + shift, axis=0, mode="clip")
        column[places >= min(q.stop, len(values) - shift)] = fill
        columns.append(column)
    return np.concatenate(columns)


def pack(
    trajectories: list[Trajectory],
    device: torch.device,
    temperature: float = 1.0,
    *,
    layout: RowLayout = _PLAIN_LAYOUT,
    pairs: bool = False,
    single: bool = False,
) -> Packed:
    """Lay sequences end to end and shift once, as the example in types/packed.py shows.

    A trajectory of L tokens becomes L - 1 rows, of which siblings share the prompt's. Nothing to
    pack gives one row outside the loss, so that each rank takes part in collectives. A sequence
    outside the loss fills up to `layout.multiple`. With a context, rows are this rank's part.

    Args:
        trajectories: trajectories of one micro-batch.
        device: device of the batch.
        temperature: log-probs are of logits divided by it.
        layout: what the model asks of the rows.
        pairs: every group is a pair, episode 0 the chosen answer and 1 the rejected one.
        single: every answer was judged alone.
    """
    sequences = _lay_out(trajectories, layout)
    owners = [q.trajectory for q in sequences]
    positions = [
        q.start + np.concatenate(rows_of_rank(q.num_rows, layout.context)) for q in sequences
    ]
    is_last = [p == len(t.tokens) - 2 for t, p in zip(owners, positions, strict=True)]
    tokens = [t.tokens for t in owners]
    loss_mask = _column(sequences, positions, [t.sampled for t in owners])
    logprobs = _column(sequences, positions, [t.logprobs for t in owners])
    loss_tokens = [q.trajectory.sampled[q.start + 1 : q.stop + 1].sum() for q in sequences]
    batch = Packed(
        inputs=on_device(_column(sequences, positions, tokens, shift=0), device),
        targets=on_device(_column(sequences, positions, tokens), device),
        positions=on_device(np.concatenate(positions), device),
        loss_mask=on_device(loss_mask, device, torch.bool),
        loss_rows=on_device(np.flatnonzero(loss_mask), device),
        is_last_row=on_device(np.concatenate(is_last), device, torch.bool),
        sequences=Sequences(
            ids=tuple((t.group, t.episode, t.segment) for t in owners),
            lengths=tuple(map(len, positions)),
            loss_tokens=on_device(np.array(loss_tokens), device),
            group_tokens=on_device(np.array([t.group_tokens for t in owners]), device),
            rewards=on_device(np.array([t.reward for t in owners]), device, torch.float64),
        ),
        attention=build(sequences, layout, device),
        context=layout.context,
        temperature=temperature,
        engine_logprobs=on_device(logprobs, device, torch.float32),
    )
    if layout.convolution:
        batch.recurrence = build_recurrence(sequences, layout, device)
    routed = [t.routes for t in owners if t.routes is not None]
    if routed:
        # Shared rows get those of one sibling: the engine computed the same prompt for all.
        unknown = np.full((1, *routed[0].shape[1:]), LIVE)
        routes = [unknown if t.routes is None else t.routes.astype(np.int16) for t in owners]
        column = _column(sequences, positions, routes, shift=0, fill=LIVE)
        batch.routes = on_device(column, device, torch.int16)
    turn_rewards = [t.turn_rewards for t in owners if t.turn_rewards is not None]
    if len(turn_rewards) == len(owners):
        rewards = _column(sequences, positions, turn_rewards)
        batch.turn_rewards = on_device(rewards, device, torch.float32)
    if layout.vision:
        spans = [(t.images, p) for t, p in zip(owners, positions, strict=True)]
        batch.images = layout.vision.batch(spans, device)
    if pairs or single:
        answers = sorted(np.flatnonzero(loss_tokens), key=batch.sequences.ids.__getitem__)
        units = np.array(answers, np.int64).reshape(-1, 2 if pairs else 1)
        batch.preference = Preference(answers=on_device(units, device))
    return batch


def unpack(values: Tensor, trajectories: list[Trajectory], batch: Packed) -> list[np.ndarray]:
    """Bring values of rows back to the tokens of the trajectories. Collective over the context.

    Args:
        values: [T].
        trajectories: the trajectories that were packed, in any order.
        batch: T packed rows.

    Returns:
        [L] for each trajectory: a row's value at its target; 0 where that is not in the loss.
    """
    lengths = [len(t.tokens) for t in trajectories]
    starts = np.cumsum(lengths) - lengths
    start_of = {
        (t.group, t.episode, t.segment): start
        for t, start in zip(trajectories, starts, strict=True)
    }
    # A sequence that only fills rows has no start, and no rows in the loss.
    start_of_sequence = [start_of.get(ids, 0) for ids in batch.sequences.ids]
    start_of_row = on_device(np.repeat(start_of_sequence, batch.sequences.lengths), values.device)
    places = start_of_row + batch.positions + 1
    whole = values.new_zeros(sum(lengths))
    whole = whole.index_copy(0, places[batch.loss_rows], values[batch.loss_rows])
    if batch.context:
        dist.all_reduce(whole, group=batch.context.group)
    return [part.numpy() for part in whole.cpu().split(lengths)]
