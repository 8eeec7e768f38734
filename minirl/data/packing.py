"""Trajectories to balanced micro-batches: plan by lengths, move arrays between ranks, lay sequences end to end."""

import heapq

import numpy as np
import torch
import torch.distributed as dist

from minirl.parallel.mesh import Mesh
from minirl.types import Packed, Trajectory, UserError

_HEADER = np.dtype([("group", "i8"), ("episode", "i8"), ("version", "i8"), ("reward", "f8")])
_TOKEN = np.dtype([("token", "i4"), ("logprob", "f4"), ("advantage", "f4"), ("sampled", "?")])


def partition(lengths: list[int], num_ranks: int, budget: int) -> list[list[list[int]]]:
    """[micro-batch][rank] -> indices of sequences: as few micro-batches as the token budget allows, all about equally long.

    Longest first into the emptiest bin (Graham 1969: at most 4/3 of the optimum). Every rank gets the same number of
    micro-batches, because FSDP's collectives are in each forward; some may be empty. Raises UserError if one sequence exceeds
    the budget.
    """
    if lengths and max(lengths) > budget:
        raise UserError(f"tokens_per_rank = {budget} cannot hold a sequence of {max(lengths)} tokens; raise it")
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


def exchange(trajectories: list[Trajectory], mesh: Mesh, budget: int, num_minibatches: int = 1) -> list[list[list[Trajectory]]]:
    """Spread the trajectories of all ranks evenly: [minibatch][micro-batch] -> the trajectories that this rank trains on.

    Every rank learns all lengths (three integers each), plans the same partition, and sends each sequence straight to its place
    by one all-to-all of bytes. The plan sorts by (group, episode), so who sampled what does not matter; minibatches split the
    groups evenly.
    """
    keys = mesh.gather(np.array([(t.group, t.episode, len(t.tokens)) for t in trajectories], dtype=np.int64).reshape(-1, 3))
    table = np.concatenate([np.column_stack([np.full(len(k), rank), np.arange(len(k)), k]) for rank, k in enumerate(keys)])
    table = table[np.lexsort((table[:, 3], table[:, 2]))]  # columns: rank, index there, group, episode, length
    send: list[list[int]] = [[] for _ in range(mesh.world_size)]
    plan: list[list[list[tuple[int, int]]]] = []  # of this rank: [minibatch][micro-batch] -> (source rank, place in its message)
    sent = np.zeros((mesh.world_size, mesh.world_size), dtype=np.int64)  # sequences from -> to, so far
    size = np.zeros_like(sent)  # the same in bytes
    for chosen in np.array_split(np.unique(table[:, 2]), num_minibatches):
        part = table[np.isin(table[:, 2], chosen)]
        plan.append([])
        for micro in partition([int(n) - 1 for n in part[:, 4]], mesh.world_size, budget):
            plan[-1].append([])
            for to, indices in enumerate(micro):
                for source, index, _, _, length in part[indices].tolist():
                    if to == mesh.rank:
                        plan[-1][-1].append((source, int(sent[source, to])))
                    if source == mesh.rank:
                        send[to].append(index)
                    sent[source, to] += 1
                    size[source, to] += 8 + _HEADER.itemsize + length * _TOKEN.itemsize
    messages = _all_to_all([b"".join(_to_bytes(trajectories[i]) for i in chosen) for chosen in send], size[:, mesh.rank].tolist(), mesh)
    received = [_from_bytes(m) for m in messages]
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
    header = np.array([(t.group, t.episode, t.version, t.reward)], dtype=_HEADER)
    return np.int64(len(rows)).tobytes() + header.tobytes() + rows.tobytes()


def _from_bytes(message: bytes) -> list[Trajectory]:
    out, at = [], 0
    while at < len(message):
        length = int(np.frombuffer(message, np.int64, 1, at)[0])
        header = np.frombuffer(message, _HEADER, 1, at + 8)[0]
        rows = np.frombuffer(message, _TOKEN, length, at + 8 + _HEADER.itemsize)
        out.append(Trajectory(tokens=rows["token"].copy(), sampled=rows["sampled"].copy(), logprobs=rows["logprob"].copy(),
                              advantages=rows["advantage"].copy(), reward=float(header["reward"]), group=int(header["group"]),
                              episode=int(header["episode"]), version=int(header["version"])))
        at += 8 + _HEADER.itemsize + rows.nbytes
    return out


_FILLER = Trajectory(tokens=np.zeros(2, np.int32), sampled=np.zeros(2, bool), logprobs=np.zeros(2, np.float32))


def pack(trajectories: list[Trajectory], device: torch.device, temperature: float = 1.0) -> Packed:
    """Lay sequences end to end and shift once: a trajectory of L tokens becomes L - 1 rows.

    Nothing to pack gives one row outside the loss, so that a rank without work still takes part in every collective.
    Sequences are laid by length, so that those of like length lie together for attention's rectangles.
    """
    chosen = sorted(trajectories or [_FILLER], key=lambda t: len(t.tokens))
    lengths = np.array([len(t.tokens) - 1 for t in chosen])
    starts = np.concatenate([[0], lengths.cumsum()])
    def tensor(parts: list[np.ndarray], dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(parts)).to(device, dtype, non_blocking=True)
    mask = np.concatenate([t.sampled[1:] for t in chosen])
    buckets, unbucket = _rectangles(lengths, starts)
    return Packed(
        inputs=tensor([t.tokens[:-1] for t in chosen], torch.int64),
        targets=tensor([t.tokens[1:] for t in chosen], torch.int64),
        positions=tensor([np.arange(n) for n in lengths], torch.int64),
        mask=tensor([mask], torch.bool),
        rows=tensor([np.flatnonzero(mask)], torch.int64),
        lengths=tuple(lengths.tolist()),
        cu_seqlens=tensor([starts], torch.int32),
        buckets=tuple(tensor([b.ravel()], torch.int64).view(b.shape) for b in buckets),
        unbucket=tensor([unbucket], torch.int64),
        temperature=temperature,
        engine_logprobs=tensor([t.logprobs[1:] for t in chosen], torch.float32),
        advantages=tensor([np.zeros(n) if t.advantages is None else t.advantages[1:] for t, n in zip(chosen, lengths, strict=True)], torch.float32),
    )


def _rectangles(lengths: np.ndarray, starts: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
    """Cut ascending lengths where padding would exceed a fifth and 8 rows. Returns [B, L] row numbers, and each row's place."""
    buckets, places, first, filled = [], [], 0, 0
    for last in range(1, len(lengths) + 1):
        if last < len(lengths) and lengths[last] <= max(1.2 * lengths[first], lengths[first] + 8):
            continue
        column, longest = np.arange(lengths[last - 1]), lengths[last - 1]
        buckets.append(starts[first:last, None] + np.minimum(column[None], lengths[first:last, None] - 1))
        places += [filled + b * longest + np.arange(n) for b, n in enumerate(lengths[first:last])]
        first, filled = last, filled + buckets[-1].size
    return buckets, np.concatenate(places)
