"""Trajectories to balanced micro-batches: plan by lengths, move arrays between ranks, lay sequences end to end."""

import heapq
import zlib
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from minirl.data.blocks import Span, build
from minirl.parallel import context as cp
from minirl.parallel.mesh import Mesh
from minirl.types import Layout, Packed, Trajectory, UserError

_HEADER = np.dtype([("group", "i8"), ("episode", "i8"), ("segment", "i8"), ("version", "i8"), ("reward", "f8")])
_TOKEN = np.dtype([("token", "i4"), ("logprob", "f4"), ("advantage", "f4"), ("reward", "f4"), ("sampled", "?")])


def pieces(table: np.ndarray, num_ranks: int, budget: int, *, groups: np.ndarray | None = None) -> tuple[list[list[int]], list[int]]:
    """Cut groups into pieces that stay together and share their prompt's rows. `table` int64 [N, 3]: hash of the prompt, its
    tokens, all tokens; in the order of groups. Returns the sequences of each piece, and its rows.

    A piece is at most a quarter of a rank's share, so that ranks can be balanced, and within the budget. With `groups`, int64 [N], it is
    a whole group, whatever its size.
    """
    unshared = int((table[:, 2] - 1).sum())
    limit = max(min(budget, unshared // (4 * num_ranks)), int(table[:, 2].max(initial=1)) - 1)
    members: list[list[int]] = []
    rows: list[int] = []
    shared = None
    for i, (prompt, num_prompt, length) in enumerate(table.tolist()):
        extra = length - num_prompt  # the branch from the last prompt token on
        if (prompt == shared and rows[-1] + extra <= limit) if groups is None else (i > 0 and groups[i] == groups[i - 1]):
            members[-1].append(i)
            rows[-1] += extra if prompt == shared else length - 1
        else:
            shared = prompt
            members.append([i])
            rows.append(length - 1)
    return members, rows


def partition(lengths: list[int], num_ranks: int, budget: int) -> list[list[list[int]]]:
    """[micro-batch][rank] -> indices of pieces: as few micro-batches as the token budget allows, all about equally long.

    Longest first into the emptiest bin (Graham 1969: at most 4/3 of the optimum). Every rank gets the same number of
    micro-batches, because FSDP's collectives are in each forward; some may be empty. Raises UserError if one exceeds the budget.
    """
    if lengths and max(lengths) > budget:
        raise UserError(f"tokens_per_rank (times parallel.context) = {budget} cannot hold a sequence of {max(lengths)} tokens; raise it")
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


def exchange(trajectories: list[Trajectory], mesh: Mesh, budget: int, num_minibatches: int = 1, *,
             whole_groups: bool = False) -> list[list[list[Trajectory]]]:
    """Spread the trajectories of all ranks evenly: [minibatch][micro-batch] -> the trajectories that this rank trains on.

    Every rank learns all lengths (a few integers each), plans the same partition, and sends each sequence straight to its place
    by one all-to-all of bytes. The plan sorts by (group, episode), so who sampled what does not matter; minibatches split the
    groups evenly. `whole_groups`: siblings stay in one micro-batch, for losses that compare them.
    """
    keys = mesh.gather(np.array([(t.group, t.episode, zlib.crc32(_shared(t)), _prompt_length(t), len(t.tokens), t.sampled.sum(), t.segment) for t in trajectories],
                                dtype=np.int64).reshape(-1, 7))
    table = np.concatenate([np.column_stack([np.full(len(k), rank), np.arange(len(k)), k]) for rank, k in enumerate(keys)])
    copies, budget = mesh.num_copies, budget * mesh.context_size
    table = table[np.lexsort((table[:, 8], table[:, 3], table[:, 2]))]  # rank, index there, group, episode, prompt hash, prompt tokens, tokens, sampled, segment
    send: list[list[int]] = [[] for _ in range(mesh.world_size)]
    plan: list[list[list[tuple[int, int]]]] = []  # of this rank: [minibatch][micro-batch] -> (source rank, place in its message)
    sent = np.zeros((mesh.world_size, mesh.world_size), dtype=np.int64)  # sequences from -> to, so far
    size = np.zeros_like(sent)  # the same in bytes
    groups, which = np.unique(table[:, 2], return_inverse=True)
    group_tokens = dict(zip(groups.tolist(), np.bincount(which, table[:, 7], len(groups)).astype(int).tolist(), strict=True))
    for chosen in np.array_split(groups, num_minibatches):
        part = table[np.isin(table[:, 2], chosen)]
        plan.append([])
        members, rows = pieces(part[:, 4:7], mesh.data_size, budget, groups=part[:, 2] if whole_groups else None)
        for micro in partition(rows, mesh.data_size, budget):
            plan[-1].append([])
            for to, chosen_pieces in ((data_rank * copies + i, own) for data_rank, own in enumerate(micro) for i in range(copies)):
                for source, index, *_, length, _, _ in part[[i for piece in chosen_pieces for i in members[piece]]].tolist():
                    if to == mesh.rank:
                        plan[-1][-1].append((source, int(sent[source, to])))
                    if source == mesh.rank:
                        send[to].append(index)
                    sent[source, to] += 1
                    size[source, to] += 8 + _HEADER.itemsize + length * _TOKEN.itemsize
    messages = _all_to_all([b"".join(_to_bytes(trajectories[i]) for i in chosen) for chosen in send], size[:, mesh.rank].tolist(), mesh)
    received = [_from_bytes(m) for m in messages]
    for t in (t for message in received for t in message):
        t.group_tokens = group_tokens[t.group]
    return [[[received[source][place] for source, place in micro] for micro in minibatch] for minibatch in plan]


def _all_to_all(messages: list[bytes], sizes: list[int], mesh: Mesh) -> list[bytes]:
    out = torch.frombuffer(bytearray(b"".join(messages)) or bytearray(1), dtype=torch.uint8)[: sum(map(len, messages))]
    into = torch.empty(sum(sizes), dtype=torch.uint8)
    dist.all_to_all_single(into, out, sizes, [len(m) for m in messages], group=mesh.host_group)
    return [part.numpy().tobytes() for part in into.split(sizes)]


def _to_bytes(t: Trajectory) -> bytes:
    rows = np.zeros(len(t.tokens), dtype=_TOKEN)
    rows["token"], rows["logprob"], rows["sampled"] = t.tokens, t.logprobs, t.sampled
    rows["advantage"] = 0.0 if t.advantages is None else t.advantages
    rows["reward"] = 0.0 if t.rewards is None else t.rewards
    header = np.array([(t.group, t.episode, t.segment, t.version, t.reward)], dtype=_HEADER)
    return np.int64(len(rows)).tobytes() + header.tobytes() + rows.tobytes()


def _from_bytes(message: bytes) -> list[Trajectory]:
    out, at = [], 0
    while at < len(message):
        length = int(np.frombuffer(message, np.int64, 1, at)[0])
        header = np.frombuffer(message, _HEADER, 1, at + 8)[0]
        rows = np.frombuffer(message, _TOKEN, length, at + 8 + _HEADER.itemsize)
        out.append(Trajectory(tokens=rows["token"].copy(), sampled=rows["sampled"].copy(), logprobs=rows["logprob"].copy(),
                              advantages=rows["advantage"].copy(), rewards=rows["reward"].copy(), reward=float(header["reward"]), group=int(header["group"]),
                              episode=int(header["episode"]), segment=int(header["segment"]), version=int(header["version"])))
        at += 8 + _HEADER.itemsize + rows.nbytes
    return out


def _prompt_length(t: Trajectory) -> int:
    """Tokens before the first sampled one; 1 if none is, so that nothing is shared."""
    return int(t.sampled.argmax()) if t.sampled.any() else 1


def _shared(t: Trajectory) -> bytes:
    """Equal where siblings may share rows: those of the prompt but its last token."""
    return t.tokens[: max(0, _prompt_length(t) - 1)].tobytes()


def _filler(rows: int) -> Trajectory:
    zeros = np.zeros(rows + 1, np.float32)
    return Trajectory(tokens=zeros.astype(np.int32), sampled=zeros.astype(bool), logprobs=zeros, advantages=zeros, rewards=zeros)


@dataclass(frozen=True)
class _Sequence:
    """Rows start .. stop of a trajectory (row t: token t in, token t + 1 out), after `prefix` rows of another sequence."""

    trajectory: Trajectory
    start: int
    stop: int
    shared: int | None = None
    """Number of the sequence that holds the rows before `start`."""

    @property
    def num_rows(self) -> int:
        return self.stop - self.start

    @property
    def is_answer(self) -> bool:
        """It holds the trajectory's last row, and tokens in the loss."""
        return self.stop == len(self.trajectory.tokens) - 1 and bool(self.trajectory.sampled.any())


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


def pack(trajectories: list[Trajectory], device: torch.device, temperature: float = 1.0, *, layout: Layout = Layout(), pairs: bool = False) -> Packed:
    """Lay sequences end to end and shift once: a trajectory of L tokens becomes L - 1 rows, of which siblings share the prompt's.

    Nothing to pack gives one row outside the loss, so that a rank without work still takes part in every collective. A sequence
    outside the loss fills the rows up to `layout.multiple`. With a context, rows are this rank's part of each sequence.
    `pairs`: every group is a pair, episode 0 the chosen answer and 1 the rejected one.
    """
    context = layout.context
    sequences = _sequences(trajectories or [_filler(1)], share=not (context and context.ring))  # on a ring no rank has all keys of a prompt
    size = context.size if context else 1
    if missing := -sum(cp.padded(q.num_rows, context) // size for q in sequences) % layout.multiple:
        missing += layout.multiple * (missing % 2 and size > 1)  # two equal chunks on a rank
        sequences.append(_Sequence(_filler(missing * size), 0, missing * size))
    lengths = [cp.padded(q.num_rows, context) // size for q in sequences]
    own = [np.concatenate(cp.chunks(q.num_rows, context)) for q in sequences]
    starts = np.cumsum([0, *lengths])
    blocks, joined = build([Span(int(start), q.num_rows, q.shared) for start, q in zip(starts, sequences, strict=False)], int(starts[-1]), layout, device)
    def tensor(values: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(values).to(device, dtype, non_blocking=True)
    def column(name: str, shift: int = 0) -> np.ndarray:
        """Of the row's own token, or of the one after it; 0 in rows that only fill."""
        whole = [getattr(q.trajectory, name)[q.start + shift : q.stop + shift] for q in sequences]
        if context:
            whole = [np.pad(values, (0, cp.padded(len(values), context) - len(values)))[rows] for values, rows in zip(whole, own, strict=True)]
        return np.concatenate(whole)
    answers = sorted((q.trajectory.group, q.trajectory.episode, i) for i, q in enumerate(sequences) if q.is_answer) if pairs else []
    numbers = np.array([i for *_, i in answers], np.int64).reshape(-1, 2)
    last = [q.start + rows == len(q.trajectory.tokens) - 2 for q, rows in zip(sequences, own, strict=True)]
    mask = column("sampled", 1)
    return Packed(
        inputs=tensor(column("tokens"), torch.int64),
        targets=tensor(column("tokens", 1), torch.int64),
        positions=tensor(np.concatenate([q.start + rows for q, rows in zip(sequences, own, strict=True)]), torch.int64),
        mask=tensor(mask, torch.bool),
        rows=tensor(np.flatnonzero(mask), torch.int64),
        lengths=tuple(lengths),
        loss_tokens=tensor(np.array([int(q.trajectory.sampled[q.start + 1 : q.stop + 1].sum()) for q in sequences]), torch.int64),
        group_tokens=tensor(np.array([q.trajectory.group_tokens for q in sequences]), torch.int64),
        rewards=tensor(np.array([q.trajectory.reward for q in sequences]), torch.float64),
        names=tuple((q.trajectory.group, q.trajectory.episode, q.trajectory.segment) for q in sequences),
        blocks=blocks,
        joined=joined,
        context=context,
        temperature=temperature,
        engine_logprobs=tensor(column("logprobs", 1), torch.float32),
        turn_rewards=tensor(column("rewards", 1), torch.float32) if all(q.trajectory.rewards is not None for q in sequences) else None,
        ends=tensor(np.concatenate(last), torch.bool),
        pairs=tensor(numbers, torch.int64) if pairs else None,
        advantages=tensor(column("advantages", 1), torch.float32) if all(q.trajectory.advantages is not None for q in sequences) else None,
    )


def unpack(values: torch.Tensor, trajectories: list[Trajectory], layout: Layout) -> list[np.ndarray]:
    """The way back: [T] of `pack(trajectories, layout=layout)` -> [L] of each trajectory, a row's value at its target; 0 where a token has no
    row of its own. Collective over the context."""
    context = layout.context
    lengths = [len(t.tokens) for t in trajectories]
    begins = dict(zip(map(id, trajectories), np.cumsum([0, *lengths]).tolist(), strict=False))
    first, rows, places = 0, [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for q in _sequences(trajectories, share=not (context and context.ring)):
        own = np.concatenate(cp.chunks(q.num_rows, context))
        if q.is_answer:
            kept = np.flatnonzero(own < q.num_rows)
            rows.append(first + kept)
            places.append(begins[id(q.trajectory)] + q.start + 1 + own[kept])
        first += len(own)
    into, outof = (torch.from_numpy(np.concatenate(numbers)).to(values.device) for numbers in (places, rows))
    whole = values.new_zeros(sum(lengths)).index_copy(0, into, values.index_select(0, outof))
    if context:
        dist.all_reduce(whole, group=context.group)
    return [part.numpy() for part in whole.cpu().split(lengths)]
