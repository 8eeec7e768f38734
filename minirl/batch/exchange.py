"""Trajectories from the ranks that sampled them to the ranks that train on them, evenly.

All ranks gather a header of each trajectory, and make the same plan from them. Then the
trajectories travel in one all-to-all; their order follows from the plan.
"""

import heapq
import io
import itertools
import pickle
import zlib
from dataclasses import dataclass, replace
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from minirl.base.errors import UserError
from minirl.batch.packing import shared_part
from minirl.parallel.mesh import Mesh
from minirl.types.packed import Trajectory, prompt_length

Number = TypeVar("Number", int, np.ndarray)


class _Header(NamedTuple, Generic[Number]):
    """What all ranks know of a trajectory; or of N trajectories, each field an int64 [N]."""

    group: Number
    episode: Number
    segment: Number
    rank: Number  # The rank that sampled it,
    number: Number  # and its number there.
    prompt: Number  # Hash of what siblings share.
    num_prompt: Number  # Tokens.
    num_tokens: Number
    num_sampled: Number


_Headers = _Header[np.ndarray]


def _take(headers: _Headers, places: np.ndarray | slice) -> _Headers:
    """Return the headers at these places, in their order."""
    return _Header(*(column[places] for column in headers))


@dataclass(frozen=True)
class _Plan:
    """Where each trajectory goes.

    Arrays are int64 [N], in the order of minibatches, micro-batches, data-parallel ranks, and then
    of the sequences that the micro-batch has there.
    """

    header: np.ndarray  # Number of its header.
    micro_batch: np.ndarray  # Number of its micro-batch, over all minibatches.
    data_rank: np.ndarray
    num_micro: list[int]  # Micro-batches of each minibatch.


def pieces(
    headers: _Headers, num_ranks: int, budget: int, *, whole_groups: bool = False
) -> tuple[list[int], list[int]]:
    """Cut groups into pieces that stay together and share their prompt's rows.

    A piece is at most a quarter of a rank's share, so that ranks can be balanced, and within the
    budget.

    Args:
        headers: headers of the sequences, in the order of groups.
        num_ranks: how many ranks share the work.
        budget: most rows of a micro-batch.
        whole_groups: a piece is a whole group, whatever its size.

    Returns:
        The number of sequences of each piece, which are neighbours, and the number of its rows.
    """
    all_rows = headers.num_tokens - 1
    unshared_rows = headers.num_tokens - headers.num_prompt  # From the last prompt token on.
    share = int(all_rows.sum()) // (4 * num_ranks)
    limit = max(min(budget, share), int(all_rows.max(initial=0)))
    num_members: list[int] = []
    rows: list[int] = []
    last_group, last_prompt = -1, -1  # Of the last piece, which has the rows of its prompt.
    columns = (headers.group, headers.prompt, all_rows, unshared_rows)
    for group, prompt, length, branch in zip(*(c.tolist() for c in columns), strict=True):
        shares = prompt == last_prompt
        joins = group == last_group if whole_groups else shares and rows[-1] + branch <= limit
        if joins:
            num_members[-1] += 1
            rows[-1] += branch if shares else length
        else:
            last_group, last_prompt = group, prompt
            num_members.append(1)
            rows.append(length)
    return num_members, rows


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

    The plan sorts by (group, episode), so that it does not depend on who sampled what; minibatches
    split the groups evenly. `versions` and `info` stay where they are, and so do trajectories
    without tokens.

    Args:
        trajectories: what this rank has sampled, any number.
        mesh: the ranks.
        budget: most rows of a micro-batch on a rank.
        num_minibatches: number of optimizer steps that the trajectories are for.
        whole_groups: siblings stay in one micro-batch, for losses that compare them.

    Returns:
        [minibatch][micro-batch] -> the trajectories that this rank trains on.

    Raises:
        UserError: a trajectory exceeds the budget.
    """
    # 1. Headers of all ranks' trajectories, sorted.
    trajectories = [t for t in trajectories if len(t.tokens)]
    rows = []
    for number, t in enumerate(trajectories):
        header = _Header(
            group=t.group,
            episode=t.episode,
            segment=t.segment,
            rank=mesh.rank,
            number=number,
            prompt=zlib.crc32(shared_part(t)),
            num_prompt=prompt_length(t),
            num_tokens=len(t.tokens),
            num_sampled=int(t.sampled.sum()),
        )
        rows.append(header)
    tables = mesh.gather_rows(np.array(rows, np.int64).reshape(-1, len(_Header._fields)))
    h: _Headers = _Header(*np.concatenate(tables).T)
    # lexsort takes the last key first.
    headers = _take(h, np.lexsort((h.number, h.rank, h.segment, h.episode, h.group)))
    _, groups = np.unique(headers.group, return_inverse=True)
    totals = np.bincount(groups, weights=headers.num_sampled)  # Exact up to 2^53.
    group_tokens = totals.astype(np.int64)[groups]

    # 2. Where each trajectory goes.
    plan = _make_plan(headers, mesh, budget, num_minibatches, whole_groups)
    headers = _take(headers, plan.header)
    group_tokens = group_tokens[plan.header]

    # 3. What this rank has, by destination. Ranks that hold parts of a sequence get it all.
    records: list[list[bytes]] = [[] for _ in range(mesh.data_size)]
    for place in np.flatnonzero(headers.rank == mesh.rank).tolist():
        t = trajectories[headers.number[place]]
        sent = replace(t, versions=None, info={}, group_tokens=int(group_tokens[place]))
        records[plan.data_rank[place]].append(pickle.dumps(sent, pickle.HIGHEST_PROTOCOL))
    messages: list[bytes] = []
    for part in records:
        messages += [b"".join(part)] * mesh.num_copies

    # 4. What arrives: from each rank, its trajectories in the order of the plan.
    streams = [io.BytesIO(message) for message in mesh.all_to_all(messages)]
    micro_batches: list[list[Trajectory]] = [[] for _ in range(sum(plan.num_micro))]
    for place in np.flatnonzero(plan.data_rank == mesh.rank // mesh.num_copies).tolist():
        trajectory: Trajectory = pickle.load(streams[headers.rank[place]])
        micro_batches[plan.micro_batch[place]].append(trajectory)
    batches = iter(micro_batches)
    return [list(itertools.islice(batches, num_micro)) for num_micro in plan.num_micro]


def _make_plan(
    headers: _Headers, mesh: Mesh, budget: int, num_minibatches: int, whole_groups: bool
) -> _Plan:
    """Return the plan that all ranks make of the same headers."""
    budget *= mesh.context_size
    groups = headers.group
    places: list[int] = []
    numbers: list[int] = []  # Of micro-batches.
    data_ranks: list[int] = []
    num_micro: list[int] = []
    for chosen in np.array_split(np.unique(groups), num_minibatches):
        first, last = 0, 0
        if len(chosen):
            first, last = np.searchsorted(groups, [chosen[0], chosen[-1] + 1]).tolist()
        num_members, lengths = pieces(
            _take(headers, slice(first, last)), mesh.data_size, budget, whole_groups=whole_groups
        )
        ends = list(itertools.accumulate(num_members, initial=first))
        micro_batches = partition(lengths, mesh.data_size, budget)
        for number, bins in enumerate(micro_batches, start=sum(num_micro)):
            for data_rank, members in enumerate(bins):
                for piece in members:
                    places += range(ends[piece], ends[piece + 1])
                    numbers += [number] * num_members[piece]
                    data_ranks += [data_rank] * num_members[piece]
        num_micro.append(len(micro_batches))
    return _Plan(
        header=np.array(places, np.int64),
        micro_batch=np.array(numbers, np.int64),
        data_rank=np.array(data_ranks, np.int64),
        num_micro=num_micro,
    )
