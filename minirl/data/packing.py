"""Trajectories to balanced micro-batches.

Plan by lengths, move arrays between ranks, lay sequences end to end.
"""

import heapq
import itertools
import pickle
import zlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from minirl.data.blocks import Layout, Sequence, build, on_device
from minirl.errors import UserError
from minirl.parallel import context as cp
from minirl.parallel.mesh import Mesh
from minirl.types import Packed, Trajectory

_PLAIN_LAYOUT = Layout()


class _Header(NamedTuple):
    """What all ranks know of a trajectory; sorts by group, episode and segment."""

    group: int
    episode: int
    segment: int
    rank: int  # Where it was sampled,
    number: int  # and which one it is there.
    prompt: int  # Hash of what siblings share.
    num_prompt: int  # Tokens.
    num_tokens: int
    num_sampled: int


_Destinations = dict[_Header, int]  # Trajectories of a micro-batch -> their data-parallel ranks.


def pieces(
    headers: list[_Header], num_ranks: int, budget: int, *, whole_groups: bool = False
) -> tuple[list[list[_Header]], list[int]]:
    """Cut groups into pieces that stay together and share their prompt's rows.

    A piece is at most a quarter of a rank's share, so that ranks can be balanced, and within the
    budget.

    Args:
        headers: of the sequences, in the order of groups.
        num_ranks: how many ranks share the work.
        budget: most rows of a micro-batch.
        whole_groups: a piece is a whole group, whatever its size.

    Returns:
        The sequences of each piece, and its rows.
    """
    lengths = [h.num_tokens - 1 for h in headers]
    share = sum(lengths) // (4 * num_ranks)
    limit = max(min(budget, share), max(lengths, default=0))
    members: list[list[_Header]] = []
    rows: list[int] = []
    first: _Header | None = None  # Of the last piece, which has the rows of its prompt.
    for h, length in zip(headers, lengths, strict=True):
        branch = h.num_tokens - h.num_prompt  # rows from the last prompt token on
        shares = first and h.prompt == first.prompt
        if whole_groups:
            joins = first and h.group == first.group
        else:
            joins = shares and rows[-1] + branch <= limit
        if joins:
            members[-1].append(h)
            rows[-1] += branch if shares else length
        else:
            first = h
            members.append([h])
            rows.append(length)
    return members, rows


def partition(lengths: list[int], num_ranks: int, budget: int) -> list[list[list[int]]]:
    """Return as few micro-batches as the token budget allows, all about equally long.

    Longest first into the emptiest bin (Graham 1969: at most 4/3 of the optimum). Every rank gets
    the same number of micro-batches, because FSDP's collectives are in each forward; some may be
    empty.

    Args:
        lengths: rows of each piece.
        num_ranks: how many ranks share the work.
        budget: most rows of a rank's micro-batch.

    Returns:
        [micro-batch][rank] -> numbers of pieces.

    Raises:
        UserError: a piece exceeds the budget.
    """
    if lengths and max(lengths) > budget:
        raise UserError(
            f"tokens_per_rank (times parallel.context) = {budget} cannot hold a sequence of "
            f"{max(lengths)} tokens; raise it"
        )
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    num_micro = max(1, -(-sum(lengths) // (num_ranks * budget)))
    while True:
        bins: list[list[int]] = [[] for _ in range(num_micro * num_ranks)]
        heap = [(0, b) for b in range(len(bins))]
        for i in order:
            load, b = heap[0]
            heapq.heapreplace(heap, (load + lengths[i], b))
            bins[b].append(i)
        if max(heap)[0] <= budget:
            return [bins[i : i + num_ranks] for i in range(0, len(bins), num_ranks)]
        num_micro += 1


def exchange(
    trajectories: list[Trajectory],
    mesh: Mesh,
    budget: int,
    num_minibatches: int = 1,
    *,
    whole_groups: bool = False,
) -> list[list[list[Trajectory]]]:
    """Spread the trajectories of all ranks evenly. Collective.

    Every rank learns all headers, plans the same partition, and sends each sequence's tokens
    straight to their places by one all-to-all. The plan sorts by (group, episode), so who sampled
    what does not matter; minibatches split the groups evenly.

    Args:
        trajectories: of this rank, any number.
        mesh: the ranks.
        budget: most rows of a micro-batch on a rank.
        num_minibatches: how many optimizer steps they are for.
        whole_groups: siblings stay in one micro-batch, for losses that compare them.

    Returns:
        [minibatch][micro-batch] -> the trajectories that this rank trains on.
    """
    # 1. All ranks make the same plan: minibatches of micro-batches.
    headers_here = [
        _Header(
            t.group,
            t.episode,
            t.segment,
            mesh.rank,
            i,
            zlib.crc32(_shared(t)),
            _prompt_length(t),
            len(t.tokens),
            int(t.sampled.sum()),
        )
        for i, t in enumerate(trajectories)
    ]
    headers = sorted(itertools.chain.from_iterable(mesh.gather(headers_here)))
    groups = np.unique([h.group for h in headers])
    plan = []
    for chosen in map(set, np.array_split(groups, num_minibatches)):
        members = [h for h in headers if h.group in chosen]
        plan.append(_micro_batches(members, mesh, budget, whole_groups))

    # 2. Trajectories go where they are trained on.
    received = _send(trajectories, itertools.chain.from_iterable(plan), mesh)
    group_tokens: Counter[int] = Counter()
    for h in headers:
        group_tokens[h.group] += h.num_sampled
    for t in received.values():
        t.group_tokens = group_tokens[t.group]

    # 3. This rank's part of the plan.
    batches = []
    for minibatch in plan:
        batch = []
        for micro_batch in minibatch:
            batch.append([received[h] for h in micro_batch if h in received])
        batches.append(batch)
    return batches


def _micro_batches(
    headers: list[_Header], mesh: Mesh, budget: int, whole_groups: bool
) -> list[_Destinations]:
    """Return the micro-batches of a minibatch, on all ranks."""
    budget *= mesh.context_size
    members, lengths = pieces(headers, mesh.data_size, budget, whole_groups=whole_groups)
    micro_batches = []
    for bins in partition(lengths, mesh.data_size, budget):
        destinations: _Destinations = {}
        for data_rank, numbers in enumerate(bins):
            for piece in numbers:
                destinations |= dict.fromkeys(members[piece], data_rank)
        micro_batches.append(destinations)
    return micro_batches


def _send(
    trajectories: list[Trajectory], micro_batches: Iterable[_Destinations], mesh: Mesh
) -> dict[_Header, Trajectory]:
    """Send each trajectory to its data-parallel rank; return those that arrive here.

    What is of use only where it was sampled stays there.
    """
    outgoing: list[dict[_Header, Trajectory]] = [{} for _ in range(mesh.world_size)]
    for destinations in micro_batches:
        for header, data_rank in destinations.items():
            if header.rank == mesh.rank:
                t = replace(trajectories[header.number], versions=None, info={})
                first = data_rank * mesh.num_copies
                for to_rank in outgoing[first : first + mesh.num_copies]:
                    to_rank[header] = t
    received: dict = {}
    for message in mesh.all_to_all([pickle.dumps(to_rank) for to_rank in outgoing]):
        received |= pickle.loads(message)
    return received


def _prompt_length(t: Trajectory) -> int:
    """Return the tokens before the first sampled one; 1 if none is, so that nothing is shared."""
    return max(1, int(t.sampled.argmax()))


def _shared(t: Trajectory) -> bytes:
    """Return what is equal where siblings may share rows: the prompt but its last token."""
    num = _prompt_length(t) - 1
    urls = [image.url for image in t.images if image.start < num]
    return t.tokens[:num].tobytes() + "".join(urls).encode()


def _sequences(trajectories: list[Trajectory], *, share: bool) -> list[Sequence]:
    """Return prompts that siblings share, then everything with rows of its own.

    Siblings are side by side.
    """
    groups: dict[bytes, list[Trajectory]] = {}
    for t in sorted(trajectories, key=_prompt_length):
        groups.setdefault(_shared(t), []).append(t)
    prompts: list[Sequence] = []
    branches: list[Sequence] = []
    for siblings in groups.values():
        start = _prompt_length(siblings[0]) - 1
        shared = None
        if share and len(siblings) > 1 and start > 0:
            shared = len(prompts)
            prompts.append(Sequence(siblings[0], 0, start))
        else:
            start = 0
        branches += [Sequence(t, start, len(t.tokens) - 1, shared) for t in siblings]
    return prompts + branches


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


def _lay_out(trajectories: list[Trajectory], layout: Layout) -> list[Sequence]:
    """Return the sequences of a micro-batch, with one that fills the rows up if it has to."""
    context = layout.context
    on_ring = context and context.ring  # where no rank has all keys of a prompt
    sequences = _sequences(trajectories, share=not on_ring) or [_filler(1)]
    num_ranks = context.size if context else 1
    rows_on_rank = sum(cp.padded(q.num_rows, context) for q in sequences) // num_ranks
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
) -> np.ndarray:
    """Return the values of this rank's rows, end to end.

    Args:
        sequences: of the micro-batch.
        positions: of each sequence, those of its rows on this rank.
        arrays: [L] of each sequence's trajectory.
        shift: 0: the value of the row's own token; 1: that of the token after it.

    Returns:
        [T], 0 in rows that only fill.
    """
    columns = []
    for q, places, values in zip(sequences, positions, arrays, strict=True):
        column = values.take(places + shift, mode="clip")
        column[places >= q.stop] = 0
        columns.append(column)
    return np.concatenate(columns)


def pack(
    trajectories: list[Trajectory],
    device: torch.device,
    temperature: float = 1.0,
    *,
    layout: Layout = _PLAIN_LAYOUT,
    pairs: bool = False,
) -> Packed:
    """Lay sequences end to end and shift once, as the example in types.py shows.

    A trajectory of L tokens becomes L - 1 rows, of which siblings share the prompt's. Nothing to
    pack gives one row outside the loss, so that a rank without work still takes part in every
    collective. A sequence outside the loss fills the rows up to `layout.multiple`. With a context,
    rows are this rank's part of each sequence.

    Args:
        trajectories: of one micro-batch.
        device: where it goes.
        temperature: at which log-probs are computed.
        layout: what the model asks for.
        pairs: every group is a pair, episode 0 the chosen answer and 1 the rejected one.
    """
    sequences = _lay_out(trajectories, layout)
    owners = [q.trajectory for q in sequences]
    positions = [q.start + np.concatenate(cp.chunks(q.num_rows, layout.context)) for q in sequences]
    is_last = [p == len(t.tokens) - 2 for t, p in zip(owners, positions, strict=True)]
    tokens = [t.tokens for t in owners]
    loss_mask = _column(sequences, positions, [t.sampled for t in owners])
    logprobs = _column(sequences, positions, [t.logprobs for t in owners])
    turn_rewards = [t.turn_rewards for t in owners if t.turn_rewards is not None]
    loss_tokens = [q.trajectory.sampled[q.start + 1 : q.stop + 1].sum() for q in sequences]
    blocks, windowed_block = build(sequences, layout, device)
    batch = Packed(
        inputs=on_device(_column(sequences, positions, tokens, shift=0), device),
        targets=on_device(_column(sequences, positions, tokens), device),
        positions=on_device(np.concatenate(positions), device),
        loss_mask=on_device(loss_mask, device, torch.bool),
        loss_rows=on_device(np.flatnonzero(loss_mask), device),
        lengths=tuple(map(len, positions)),
        loss_tokens=on_device(np.array(loss_tokens), device),
        group_tokens=on_device(np.array([t.group_tokens for t in owners]), device),
        rewards=on_device(np.array([t.reward for t in owners]), device, torch.float64),
        sequence_ids=tuple((t.group, t.episode, t.segment) for t in owners),
        blocks=blocks,
        windowed_block=windowed_block,
        context=layout.context,
        temperature=temperature,
        engine_logprobs=on_device(logprobs, device, torch.float32),
        is_last_row=on_device(np.concatenate(is_last), device, torch.bool),
    )
    if len(turn_rewards) == len(owners):
        column = _column(sequences, positions, turn_rewards)
        batch.turn_rewards = on_device(column, device, torch.float32)
    if layout.vision:
        spans = [(t.images, p) for t, p in zip(owners, positions, strict=True)]
        batch.images = layout.vision.batch(spans, device)
    if pairs:  # all that is in the loss is an answer
        answers = sorted(np.flatnonzero(loss_tokens), key=batch.sequence_ids.__getitem__)
        batch.pairs = on_device(np.array(answers, np.int64).reshape(-1, 2), device)
    return batch


def unpack(values: Tensor, trajectories: list[Trajectory], batch: Packed) -> list[np.ndarray]:
    """Bring values of rows back to the tokens of the trajectories. Collective over the context.

    Args:
        values: [T].
        trajectories: those that the batch was packed of, in any order.
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
    start_of_sequence = [start_of.get(ids, 0) for ids in batch.sequence_ids]
    start_of_row = on_device(np.repeat(start_of_sequence, batch.lengths), values.device)
    places = start_of_row + batch.positions + 1
    whole = values.new_zeros(sum(lengths))
    whole = whole.index_copy(0, places[batch.loss_rows], values[batch.loss_rows])
    if batch.context:
        dist.all_reduce(whole, group=batch.context.group)
    return [part.numpy() for part in whole.cpu().split(lengths)]
