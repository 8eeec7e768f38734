"""Trajectories from the ranks that sampled them to the ranks that train on them, evenly.

All ranks gather a header of each trajectory, and make the same plan from them. Then the
trajectories travel in one all-to-all; their order follows from the plan.
"""

import heapq
import itertools
import pickle
import zlib
from dataclasses import replace

import numpy as np

from minirl.base.errors import UserError
from minirl.batch.packing import shared_part
from minirl.parallel.mesh import Mesh
from minirl.types.packed import Trajectory, prompt_length

# What all ranks know of a trajectory. They are sorted by the fields in this order.
HEADER = np.dtype(
    [
        ("group", np.int64),
        ("episode", np.int64),
        ("segment", np.int64),
        ("rank", np.int64),  # The rank that sampled it,
        ("number", np.int64),  # and its number there.
        ("prompt", np.int64),  # Hash of what siblings share.
        ("num_prompt", np.int64),  # Tokens.
        ("num_tokens", np.int64),
        ("num_sampled", np.int64),
    ]
)
# Pairs of a query and a key that cost as much as all else for a row: 15,000 in Qwen3-1.7B's shape
# (2 x 1.7e9 operations a row, 4 x 2,048 x 28 a pair), 27,000 in 8B's.
PAIRS_OF_A_ROW = 20_000
Plan = list[list[list[int]]]  # [micro-batch][data-parallel rank] -> numbers.


def pieces(
    headers: np.ndarray, num_ranks: int, budget: int, *, whole_groups: bool = False
) -> tuple[list[int], list[int]]:
    """Cut groups into pieces that stay together and share their prompt's rows.

    A piece is at most a quarter of a rank's share, so that ranks can be balanced, and within the
    budget.

    Args:
        headers: headers of the sequences, HEADER [N], in the order of groups.
        num_ranks: how many ranks share the work.
        budget: most rows of a micro-batch.
        whole_groups: a piece is a whole group, whatever its size.

    Returns:
        The number of sequences of each piece, which are neighbours, and the number of its rows.
    """
    all_rows = headers["num_tokens"] - 1
    # From the last prompt token on.
    unshared_rows = headers["num_tokens"] - headers["num_prompt"]
    share = int(all_rows.sum()) // (4 * num_ranks)
    limit = max(min(budget, share), int(all_rows.max(initial=0)))
    num_members: list[int] = []
    rows: list[int] = []
    last_group, last_prompt = -1, -1  # Of the last piece, which has the rows of its prompt.
    columns = (headers["group"], headers["prompt"], all_rows, unshared_rows)
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


def partition(lengths: list[int], num_ranks: int, budget: int) -> Plan:
    """Return few micro-batches within the token budget, all about equally long.

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


def by_attention(micro_batches: Plan, pairs: list[int], budget: int) -> Plan:
    """Put parts that attend about as much into the same micro-batch.

    All parts are about equally long, and so take the same time if their sequences are short. Of
    long ones attention takes much of the time, and in each micro-batch all ranks wait for the last.

    Args:
        micro_batches: what `partition` returns.
        pairs: queries and the keys that each of them sees, of each piece.
        budget: most rows of a rank's micro-batch.
    """
    num_ranks = len(micro_batches[0])
    parts = sum(micro_batches, [])
    # Parts with a difference below a fiftieth of the work of their rows stay in order.
    unit = max(1, PAIRS_OF_A_ROW * budget // 50)
    parts.sort(key=lambda part: sum(pairs[piece] for piece in part) // unit)
    return [parts[i : i + num_ranks] for i in range(0, len(parts), num_ranks)]


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
        name = (t.group, t.episode, t.segment, mesh.rank, number)
        prompt = zlib.crc32(shared_part(t))
        # On a ring each sequence has its prompt's rows; siblings share none.
        num_prompt = 1 if mesh.context and mesh.context.ring else prompt_length(t)
        rows.append((*name, prompt, num_prompt, len(t.tokens), int(t.sampled.sum())))
    headers = np.sort(np.concatenate(mesh.gather_rows(np.array(rows, HEADER))))
    _, groups = np.unique(headers["group"], return_inverse=True)
    totals = np.bincount(groups, weights=headers["num_sampled"])  # Exact up to 2^53.
    group_tokens = totals.astype(np.int64)[groups]
    pairs_of = (headers["num_tokens"] ** 2 - headers["num_prompt"] ** 2) // 2

    # 2. Where each trajectory goes: all ranks make the same plan of the same headers.
    plan: list[Plan] = []  # Of each minibatch; the numbers are those of headers.
    rows_of_micro = budget * mesh.context_size
    for chosen in np.array_split(np.unique(headers["group"]), num_minibatches):
        numbers = np.flatnonzero(np.isin(headers["group"], chosen))
        num_members, lengths = pieces(
            headers[numbers], mesh.data_size, rows_of_micro, whole_groups=whole_groups
        )
        in_order = iter(numbers.tolist())
        members = [list(itertools.islice(in_order, num)) for num in num_members]
        pairs = [int(pairs_of[piece].sum()) for piece in members]
        plan.append([])
        micro_batches = partition(lengths, mesh.data_size, rows_of_micro)
        for bins in by_attention(micro_batches, pairs, rows_of_micro):
            plan[-1].append([sum((members[piece] for piece in b), []) for b in bins])

    # 3. What this rank has, by destination. Ranks that hold parts of a sequence get it all.
    rank_of = headers["rank"].tolist()
    parts: list[list[Trajectory]] = [[] for _ in range(mesh.data_size)]
    for bins in itertools.chain.from_iterable(plan):
        for data_rank, places in enumerate(bins):
            for place in places:
                if rank_of[place] == mesh.rank:
                    t = trajectories[headers["number"][place]]
                    sent = replace(t, versions=None, info={}, group_tokens=int(group_tokens[place]))
                    parts[data_rank].append(sent)
    # At once, so that an image that siblings read travels once.
    pickled = [pickle.dumps(part, pickle.HIGHEST_PROTOCOL) for part in parts]
    messages = [message for message in pickled for _ in range(mesh.num_copies)]

    # 4. What arrives: from each rank, its trajectories in the order of the plan.
    arrived = [iter(pickle.loads(message)) for message in mesh.all_to_all(messages)]
    minibatches = []
    for micro_batches in plan:
        minibatch = []
        for bins in micro_batches:
            places = bins[mesh.rank // mesh.num_copies]
            minibatch.append([next(arrived[rank_of[place]]) for place in places])
        minibatches.append(minibatch)
    return minibatches
