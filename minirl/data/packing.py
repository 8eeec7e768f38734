"""Trajectories to balanced micro-batches: plan by lengths, move arrays between ranks, lay sequences
end to end.
"""

import heapq
import pickle
import zlib
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist

from minirl.data.blocks import Layout, build, on_device
from minirl.errors import UserError
from minirl.parallel import context as cp
from minirl.parallel.mesh import Mesh
from minirl.types import Packed, Trajectory

# What all ranks know of each trajectory: its rank and number there, and of its tokens a hash of the
# prompt and how many.
_HEADER = np.dtype(
    [
        (name, "i8")
        for name in (
            "rank",
            "index",
            "group",
            "episode",
            "segment",
            "prompt",
            "prompt_tokens",
            "tokens",
            "sampled",
        )
    ]
)


def pieces(
    table: np.ndarray, num_ranks: int, budget: int, *, groups: np.ndarray | None = None
) -> tuple[list[list[int]], list[int]]:
    """Cut groups into pieces that stay together and share their prompt's rows. `table` int64 [N,
    3]: hash of the prompt, its tokens, all tokens; in the order of groups. Returns the sequences of
    each piece, and its rows.

    A piece is at most a quarter of a rank's share, so that ranks can be balanced, and within the
    budget. With `groups`, int64 [N], it is a whole group, whatever its size.
    """
    unshared = int((table[:, 2] - 1).sum())
    limit = max(min(budget, unshared // (4 * num_ranks)), int(table[:, 2].max(initial=1)) - 1)
    members: list[list[int]] = []
    rows: list[int] = []
    shared = None
    for i, (prompt, num_prompt, length) in enumerate(table.tolist()):
        extra = length - num_prompt  # the branch from the last prompt token on
        if (
            (prompt == shared and rows[-1] + extra <= limit)
            if groups is None
            else (i > 0 and groups[i] == groups[i - 1])
        ):
            members[-1].append(i)
            rows[-1] += extra if prompt == shared else length - 1
        else:
            shared = prompt
            members.append([i])
            rows.append(length - 1)
    return members, rows


def partition(lengths: list[int], num_ranks: int, budget: int) -> list[list[list[int]]]:
    """[micro-batch][rank] -> indices of pieces: as few micro-batches as the token budget allows,
    all about equally long.

    Longest first into the emptiest bin (Graham 1969: at most 4/3 of the optimum). Every rank gets
    the same number of micro-batches, because FSDP's collectives are in each forward; some may be
    empty. Raises UserError if one exceeds the budget.
    """
    if lengths and max(lengths) > budget:
        raise UserError(
            f"tokens_per_rank (times parallel.context) = {budget} cannot hold a sequence of {max(lengths)} tokens; raise it"
        )
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    num_micro = max(1, -(-sum(lengths) // (num_ranks * budget)))
    while True:
        heap = [(0, b) for b in range(num_micro * num_ranks)]
        bins: list[list[int]] = [[] for _ in heap]
        for i in order:
            load, b = heap[0]
            heapq.heapreplace(heap, (load + lengths[i], b))
            bins[b].append(i)
        if max(load for load, _ in heap) <= budget:
            return [bins[m * num_ranks : (m + 1) * num_ranks] for m in range(num_micro)]
        num_micro += 1


def exchange(
    trajectories: list[Trajectory],
    mesh: Mesh,
    budget: int,
    num_minibatches: int = 1,
    *,
    whole_groups: bool = False,
) -> list[list[list[Trajectory]]]:
    """Spread the trajectories of all ranks evenly: [minibatch][micro-batch] -> the trajectories
    that this rank trains on.

    Every rank learns all headers, plans the same partition, and sends each sequence's tokens
    straight to their places by one all-to-all. The plan sorts by (group, episode), so who sampled
    what does not matter; minibatches split the groups evenly. `whole_groups`: siblings stay in one
    micro-batch, for losses that compare them.
    """
    own = [
        (
            mesh.rank,
            i,
            t.group,
            t.episode,
            t.segment,
            zlib.crc32(_shared(t)),
            _prompt_length(t),
            len(t.tokens),
            t.sampled.sum(),
        )
        for i, t in enumerate(trajectories)
    ]
    table = np.concatenate(mesh.gather(np.array(own, _HEADER)))
    table = table[np.lexsort((table["segment"], table["episode"], table["group"]))]
    home = np.empty(len(table), np.int64)  # the part of the mesh that trains on it
    plan: list[list[list[int]]] = []  # of this rank: [minibatch][micro-batch] -> rows of the table
    groups, which = np.unique(table["group"], return_inverse=True)
    for chosen in np.array_split(np.arange(len(groups)), num_minibatches):
        numbers = np.flatnonzero(np.isin(which, chosen))
        shapes = np.stack(
            [table[name][numbers] for name in ("prompt", "prompt_tokens", "tokens")], axis=1
        )
        members, rows = pieces(
            shapes,
            mesh.data_size,
            budget * mesh.context_size,
            groups=which[numbers] if whole_groups else None,
        )
        plan.append([])
        for micro in partition(rows, mesh.data_size, budget * mesh.context_size):
            places = [
                [int(numbers[i]) for piece in own_pieces for i in members[piece]]
                for own_pieces in micro
            ]
            for part, place in enumerate(places):
                home[place] = part
            plan[-1].append(places[mesh.rank // mesh.num_copies])
    received = _send(trajectories, table, home, mesh)
    group_tokens = np.bincount(which, table["sampled"], len(groups))
    for number, t in received.items():
        t.group_tokens = int(group_tokens[which[number]])
    return [[[received[number] for number in micro] for micro in minibatch] for minibatch in plan]


def _send(
    trajectories: list[Trajectory], table: np.ndarray, home: np.ndarray, mesh: Mesh
) -> dict[int, Trajectory]:
    """Each to its home, without what is of use only where it was sampled. Returns those that arrive
    here by their row of the table.
    """

    def moving(source: int, to: int) -> np.ndarray:
        return np.flatnonzero((table["rank"] == source) & (home == to // mesh.num_copies))

    boxes = mesh.all_to_all(
        [
            pickle.dumps(
                [
                    replace(trajectories[i], versions=None, info={})
                    for i in table["index"][moving(mesh.rank, to)]
                ]
            )
            for to in range(mesh.world_size)
        ]
    )
    return {
        int(n): t
        for source, box in enumerate(boxes)
        for n, t in zip(moving(source, mesh.rank), pickle.loads(box), strict=True)
    }


def _prompt_length(t: Trajectory) -> int:
    """Tokens before the first sampled one; 1 if none is, so that nothing is shared."""
    return int(t.sampled.argmax()) if t.sampled.any() else 1


def _shared(t: Trajectory) -> bytes:
    """Equal where siblings may share rows: those of the prompt but its last token."""
    num = max(0, _prompt_length(t) - 1)
    return t.tokens[:num].tobytes() + "".join(p.url for p in t.images if p.start < num).encode()


def _filler(rows: int) -> Trajectory:
    zeros = np.zeros(rows + 1, np.float32)
    return Trajectory(
        tokens=zeros.astype(np.int32),
        sampled=zeros.astype(bool),
        logprobs=zeros,
        turn_rewards=zeros,
    )


@dataclass(frozen=True)
class _Sequence:
    """Rows start .. stop of a trajectory (row t: token t in, token t + 1 out), after `prefix` rows
    of another sequence.
    """

    trajectory: Trajectory
    start: int
    stop: int
    shared: int | None = None  # Number of the sequence that holds the rows before `start`.

    @property
    def num_rows(self) -> int:
        return self.stop - self.start


def _sequences(trajectories: list[Trajectory], *, share: bool) -> list[_Sequence]:
    """Prompts that siblings share, then everything with rows of its own, siblings side by side."""
    groups: dict[bytes, list[Trajectory]] = {}
    for t in sorted(trajectories, key=_prompt_length):
        groups.setdefault(_shared(t), []).append(t)
    shared, own = [], []
    for siblings in groups.values():
        start = max(0, _prompt_length(siblings[0]) - 1)
        if share and len(siblings) > 1 and start > 0:
            shared.append(_Sequence(siblings[0], 0, start))
            own += [_Sequence(t, start, len(t.tokens) - 1, len(shared) - 1) for t in siblings]
        else:
            own += [_Sequence(t, 0, len(t.tokens) - 1) for t in siblings]
    return shared + own


def pack(
    trajectories: list[Trajectory],
    device: torch.device,
    temperature: float = 1.0,
    *,
    layout: Layout = Layout(),
    pairs: bool = False,
) -> Packed:
    """Lay sequences end to end and shift once: a trajectory of L tokens becomes L - 1 rows, of
    which siblings share the prompt's.

    Nothing to pack gives one row outside the loss, so that a rank without work still takes part in
    every collective. A sequence outside the loss fills the rows up to `layout.multiple`. With a
    context, rows are this rank's part of each sequence. `pairs`: every group is a pair, episode 0
    the chosen answer and 1 the rejected one.
    """
    context = layout.context
    sequences = _sequences(
        trajectories or [_filler(1)], share=not (context and context.ring)
    )  # on a ring no rank has all keys of a prompt
    size = context.size if context else 1
    if missing := -sum(cp.padded(q.num_rows, context) // size for q in sequences) % layout.multiple:
        missing += layout.multiple * (missing % 2 and size > 1)  # two equal chunks on a rank
        sequences.append(_Sequence(_filler(missing * size), 0, missing * size))
    own = [np.concatenate(cp.chunks(q.num_rows, context)) for q in sequences]
    blocks, joined = build([(q.num_rows, q.shared) for q in sequences], layout, device)

    def column(name: str, shift: int = 0) -> np.ndarray:
        """Of the row's own token, or of the one after it; 0 in rows that only fill."""
        whole = [getattr(q.trajectory, name)[q.start + shift : q.stop + shift] for q in sequences]
        if context:
            whole = [
                np.pad(values, (0, cp.padded(len(values), context) - len(values)))[rows]
                for values, rows in zip(whole, own, strict=True)
            ]
        return np.concatenate(whole)

    last = [
        q.start + rows == len(q.trajectory.tokens) - 2
        for q, rows in zip(sequences, own, strict=True)
    ]
    mask = column("sampled", 1)
    answers = sorted(
        (q.trajectory.group, q.trajectory.episode, i)
        for i, q in enumerate(sequences)
        if q.stop == len(q.trajectory.tokens) - 1 and q.trajectory.sampled.any()
    )  # those that are no prompt and do not fill
    return Packed(
        inputs=on_device(column("tokens"), device, torch.int64),
        targets=on_device(column("tokens", 1), device, torch.int64),
        positions=on_device(
            np.concatenate([q.start + rows for q, rows in zip(sequences, own, strict=True)]),
            device,
            torch.int64,
        ),
        loss_mask=on_device(mask, device, torch.bool),
        loss_rows=on_device(np.flatnonzero(mask), device, torch.int64),
        lengths=tuple(map(len, own)),
        loss_tokens=on_device(
            np.array(
                [int(q.trajectory.sampled[q.start + 1 : q.stop + 1].sum()) for q in sequences]
            ),
            device,
            torch.int64,
        ),
        group_tokens=on_device(
            np.array([q.trajectory.group_tokens for q in sequences]), device, torch.int64
        ),
        rewards=on_device(
            np.array([q.trajectory.reward for q in sequences]), device, torch.float64
        ),
        sequence_ids=tuple(
            (q.trajectory.group, q.trajectory.episode, q.trajectory.segment) for q in sequences
        ),
        blocks=blocks,
        windowed_block=joined,
        images=layout.images(
            [(q.trajectory.images, q.start + rows) for q, rows in zip(sequences, own, strict=True)],
            device,
        )
        if layout.images
        else None,
        context=context,
        temperature=temperature,
        engine_logprobs=on_device(column("logprobs", 1), device, torch.float32),
        turn_rewards=on_device(column("turn_rewards", 1), device, torch.float32)
        if all(q.trajectory.turn_rewards is not None for q in sequences)
        else None,
        is_last_row=on_device(np.concatenate(last), device, torch.bool),
        pairs=on_device(
            np.array([i for *_, i in answers], np.int64).reshape(-1, 2), device, torch.int64
        )
        if pairs
        else None,
    )


def unpack(values: torch.Tensor, trajectories: list[Trajectory], batch: Packed) -> list[np.ndarray]:
    """The way back: [T] of a batch packed of the trajectories -> [L] of each, a row's value at its
    target; 0 where that is not in the loss. Collective over the context.
    """
    lengths = [len(t.tokens) for t in trajectories]
    begins = dict(
        zip(
            ((t.group, t.episode, t.segment) for t in trajectories),
            np.cumsum([0, *lengths]).tolist(),
            strict=False,
        )
    )
    starts = torch.tensor(
        [begins.get(name, 0) for name in batch.sequence_ids], device=values.device
    )
    places = (
        starts.repeat_interleave(torch.tensor(batch.lengths, device=values.device))
        + batch.positions
        + 1
    )
    whole = values.new_zeros(sum(lengths)).index_copy(
        0, places[batch.loss_rows], values[batch.loss_rows]
    )
    if batch.context:
        dist.all_reduce(whole, group=batch.context.group)
    return [part.numpy() for part in whole.cpu().split(lengths)]
