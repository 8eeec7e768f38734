"""Packing and exchange.

Nothing is lost, doubled or split, prompts are shared without changing what any token sees, and the
plan depends on the trajectories alone.
"""

import collections
import dataclasses
import itertools
import zlib

import numpy as np
import pytest
import torch

from harness import RankFailed, ranks
from minirl.algo import normalize
from minirl.base.errors import UserError
from minirl.batch import attention_plan
from minirl.batch.attention_plan import RowLayout
from minirl.batch.exchange import HEADER, by_attention, exchange, partition, pieces
from minirl.batch.packing import pack
from minirl.config.policy import ParallelConfig
from minirl.types.packed import Context, ImageSpan, Trajectory

flat = itertools.chain.from_iterable
CPU = torch.device("cpu")


def trajectory(tokens, num_prompt, seed=0, **fields):
    rng = np.random.default_rng([seed, len(tokens)])
    sampled = np.arange(len(tokens)) >= num_prompt
    values = {
        "logprobs": (rng.normal(-2, 1, len(tokens)) * sampled).astype(np.float32),
        "turn_rewards": (rng.normal(size=len(tokens)) * sampled).astype(np.float32),
    } | fields
    return Trajectory(tokens=np.array(tokens, dtype=np.int32), sampled=sampled, **values)


def groups(spec, seed=0):
    """spec: (length of the prompt, lengths of the answers) of each group. Every token differs, but
    for the prompts of siblings."""
    rng, fresh, out = np.random.default_rng(seed), itertools.count(5), []
    for group, (num_prompt, answers) in enumerate(spec):
        prompt = list(itertools.islice(fresh, num_prompt))
        for episode, num_answer in enumerate(answers):
            tokens = prompt + list(itertools.islice(fresh, num_answer))
            out.append(
                trajectory(
                    tokens,
                    num_prompt,
                    seed,
                    group=group,
                    episode=episode,
                    reward=float(rng.normal()),
                    version=group % 3,
                )
            )
    return out


SPEC = [(6, [3, 9, 1, 4]), (2, [5, 2]), (1, [7, 3]), (30, [2, 40]), (9, [12]), (3, [1, 1, 1, 25])]

# --------------------------------------------------------------------------------------------------
# pack


def test_pack_gives_the_worked_example_of_types():
    t = Trajectory(
        tokens=np.array([7, 8, 9, 2], np.int32),
        sampled=np.array([False, False, True, True]),
        logprobs=np.array([0, 0, -0.3, -0.1], np.float32),
    )
    batch = pack([t], CPU)
    assert batch.inputs.tolist() == [7, 8, 9]
    assert batch.targets.tolist() == [8, 9, 2]
    assert batch.positions.tolist() == [0, 1, 2]
    assert batch.loss_mask.tolist() == [False, True, True]
    assert batch.engine_logprobs.tolist() == pytest.approx([0, -0.3, -0.1])
    assert batch.loss_rows.tolist() == [1, 2]
    assert batch.sequences.lengths == (3,)
    assert batch.sequences.loss_tokens.tolist() == [2]
    (block,) = batch.attention.blocks
    assert block.causal and block.rows is None and block.key_rows is None
    assert block.cu_queries.tolist() == block.cu_keys.tolist() == [0, 3]
    assert block.longest == (3, 3)


def test_siblings_share_the_prompt_but_its_last_token(monkeypatch):
    """The prompt 7 8 9 with the answers `1` and `2 3`: 7 8 once, then 9 at the head of each
    answer."""
    (block,) = pack(
        [trajectory([7, 8, 9, 1], 3), trajectory([7, 8, 9, 2, 3], 3)], CPU
    ).attention.blocks  # a short prompt goes with each answer's keys
    assert block.rows is None and block.key_rows.tolist() == [0, 1, 0, 1, 2, 0, 1, 3, 4]
    assert block.cu_queries.tolist() == [0, 2, 3, 5] and block.cu_keys.tolist() == [0, 2, 5, 9]
    monkeypatch.setattr(attention_plan, "SHORT_PROMPT", 1)
    batch = pack(
        [trajectory([7, 8, 9, 1], 3), trajectory([7, 8, 9, 2, 3], 3)], CPU, temperature=0.7
    )
    assert batch.inputs.tolist() == [7, 8, 9, 9, 2]
    assert batch.targets.tolist() == [8, 9, 1, 2, 3]
    assert batch.positions.tolist() == [0, 1, 2, 2, 3]
    assert batch.loss_mask.tolist() == [False, False, True, True, True]
    assert batch.loss_rows.tolist() == [2, 3, 4]
    assert batch.sequences.lengths == (2, 1, 2)
    assert batch.sequences.loss_tokens.tolist() == [0, 1, 2]
    own, prompt = batch.attention.blocks
    assert own.causal and own.cu_queries.tolist() == own.cu_keys.tolist() == [0, 2, 3, 5]
    assert (
        not prompt.causal
        and prompt.rows.tolist() == [2, 3, 4]
        and prompt.key_rows.tolist() == [0, 1]
    )  # both answers as one pair
    assert prompt.cu_queries.tolist() == [0, 3] and prompt.cu_keys.tolist() == [0, 2]
    assert (
        batch.attention.windowed is None
        and pack(
            [trajectory([7, 8], 1)], CPU, layout=RowLayout(windowed=True)
        ).attention.windowed.causal
    )
    assert batch.temperature == 0.7
    dtypes = {
        "inputs": torch.int64,
        "targets": torch.int64,
        "positions": torch.int64,
        "loss_mask": torch.bool,
        "loss_rows": torch.int64,
        "engine_logprobs": torch.float32,
        "turn_rewards": torch.float32,
    }
    assert {name: getattr(batch, name).dtype for name in dtypes} == dtypes
    assert {prompt.rows.dtype, prompt.key_rows.dtype} == {torch.int64}
    assert {getattr(prompt, name).dtype for name in ("cu_queries", "cu_keys")} == {torch.int32}


def pairs(block, num_rows):
    """(query rows, key rows) of each pair of a block."""
    rows = torch.arange(num_rows) if block.rows is None else block.rows
    key_rows = torch.arange(num_rows) if block.key_rows is None else block.key_rows
    for queries, keys in zip(
        itertools.pairwise(block.cu_queries.tolist()),
        itertools.pairwise(block.cu_keys.tolist()),
        strict=True,
    ):
        yield rows[slice(*queries)].tolist(), key_rows[slice(*keys)].tolist()


def seen(batch, parts=None, positions=None):
    """(row, key rows that it sees, in the order of their `positions`) of every row."""
    keys_of = {row: [] for row in range(len(batch.inputs))}
    for block in parts or batch.attention.blocks:
        for rows, keys in pairs(block, len(batch.inputs)):
            for i, row in enumerate(rows):
                keys_of[row] += keys[: len(keys) - len(rows) + i + 1] if block.causal else keys
    positions = batch.positions if positions is None else positions
    return [(row, sorted(keys, key=lambda k: positions[k].item())) for row, keys in keys_of.items()]


def in_the_loss(batch, parts=None, everywhere=None):
    """(tokens seen, their positions, target, engine log-prob, reward) of every row in the loss.
    `everywhere`: tokens and positions of all ranks' rows, if keys count in those."""
    tokens, positions = everywhere or (batch.inputs, batch.positions)
    return sorted(
        (
            tuple(tokens[keys].tolist()),
            tuple(positions[keys].tolist()),
            batch.targets[row].item(),
            batch.engine_logprobs[row].item(),
            batch.turn_rewards[row].item(),
        )
        for row, keys in seen(batch, parts, positions)
        if batch.loss_mask[row]
    )


def expected_in_the_loss(trajectories):
    found = []
    for t in trajectories:
        for i in np.flatnonzero(t.sampled):
            past = (tuple(t.tokens[:i].tolist()), tuple(range(i)))
            values = (int(t.tokens[i]), float(t.logprobs[i]), float(t.turn_rewards[i]))
            found.append(past + values)
    return sorted(found)


@pytest.fixture(params=[128, 4], ids=["short prompts", "long prompts"])
def _prompts(request, monkeypatch):
    """Prompts of SPEC are all short, or most are long."""
    monkeypatch.setattr(attention_plan, "SHORT_PROMPT", request.param)


@pytest.mark.usefixtures("_prompts")
@pytest.mark.parametrize("order", ["as sampled", "shuffled"])
def test_every_sampled_token_is_in_the_loss_once_and_sees_its_own_past(order):
    whole = groups(SPEC)
    if order == "shuffled":
        whole = [whole[i] for i in np.random.default_rng(5).permutation(len(whole))]
    batch = pack(whole, CPU, layout=RowLayout(windowed=True))
    assert (
        in_the_loss(batch)
        == in_the_loss(batch, [batch.attention.windowed])
        == expected_in_the_loss(whole)
    )
    assert all(keys[-1] == row for row, keys in seen(batch))
    # each prompt of n >= 2 tokens and several answers takes n - 1 rows once, and an answer of m
    # tokens m rows
    assert len(batch.inputs) == 5 + 17 + 1 + 7 + 10 + 29 + 42 + 20 + 2 + 28
    assert batch.loss_rows.tolist() == batch.loss_mask.nonzero()[:, 0].tolist()


def test_an_observation_between_two_actions_stays_out_of_the_loss():
    whole = groups([(4, [6, 6])])
    whole[0].sampled[6:8] = False
    batch = pack(whole, CPU)
    assert in_the_loss(batch) == expected_in_the_loss(whole)
    assert batch.loss_mask.sum() == 4 + 6


def test_one_token_prompt_is_not_taken_for_the_shared_part_of_a_longer_one():
    """Prompts `7` and `7 8` begin alike, but the second shares a row and the first has none to
    share."""
    whole = [trajectory([7, 8, 2], 2), trajectory([7, 9, 3], 1)]
    assert in_the_loss(pack(whole, CPU)) == expected_in_the_loss(whole)
    assert in_the_loss(pack(whole[::-1], CPU)) == expected_in_the_loss(whole)


def test_siblings_without_a_sampled_token_pack_to_rows_outside_the_loss():
    batch = pack([trajectory([5, 6, 7], 3), trajectory([5, 6, 7], 3)], CPU)
    assert not batch.loss_mask.any()


def test_nothing_packs_to_one_row_outside_the_loss():
    batch = pack([], CPU)
    assert (
        batch.inputs.shape,
        batch.sequences.lengths,
        batch.loss_mask.tolist(),
        batch.loss_rows.tolist(),
    ) == ((1,), (1,), [False], [])


@pytest.mark.usefixtures("_prompts")
@pytest.mark.parametrize(
    "layout",
    [RowLayout(windowed=True), RowLayout(windowed=True, context=Context(None, 1, 2))],
    ids=["whole", "context"],
)
@pytest.mark.parametrize(
    "whole",
    [groups(SPEC), groups([(5, [n]) for n in range(1, 60, 3)]), groups([(2, [20]), (2, [19])]), []],
    ids=["shared", "alone", "shorter last", "nothing"],
)
def test_rectangles_hold_the_pairs_of_their_block(whole, layout):
    batch = pack(whole, CPU, layout=layout)
    for block in (*batch.attention.blocks, batch.attention.windowed):
        expected = sorted(pairs(block, len(batch.inputs)))
        flat = torch.cat([r.queries.rows.flatten() for r in block.padded.rectangles])
        places = block.padded.places
        assert (flat if places is None else flat[places]).tolist() == (
            list(range(len(batch.inputs))) if block.rows is None else block.rows.tolist()
        )
        got = []
        for r in block.padded.rectangles:
            everything = (
                torch.arange(r.queries.rows.shape[1])[None]
                if block.causal
                else torch.tensor([[r.keys.rows.shape[1] - 1]])
            )
            last = everything.expand(len(r.queries.rows), -1) if r.last is None else r.last
            filling = (
                torch.zeros(r.queries.rows.shape, dtype=torch.bool)
                if r.filling is None
                else r.filling
            )
            for run in (r.queries, r.keys):
                flat = run.rows.flatten().tolist()
                assert (run.first is not None) == (
                    flat == list(range(flat[0], flat[0] + len(flat)))
                )
                assert run.first in (None, flat[0])
            for queries, keys, ends, fills in zip(
                r.queries.rows.tolist(), r.keys.rows.tolist(), last.tolist(), filling, strict=True
            ):
                num = len(set(queries))
                assert fills.tolist() == [False] * num + [True] * (len(queries) - num)
                assert queries[num:] == [queries[num - 1]] * (
                    len(queries) - num
                )  # ends repeat the last row
                assert ends == list(range(ends[0], ends[0] + len(ends))) and len(ends) == (
                    len(queries) if block.causal else 1
                )
                got.append((queries[:num], keys[: ends[num - 1 if block.causal else 0] + 1]))
                assert len(queries) - num <= max(0.2 * num, 8)
        assert sorted(got) == expected


@pytest.mark.usefixtures("_prompts")
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("multiple", [1, 3, 4])
def test_context_ranks_hold_every_row_once_and_see_what_one_rank_would(size, multiple):
    whole = groups(SPEC)
    batches = []
    for rank in range(size):
        context = Context(None, rank, size)
        layout = RowLayout(multiple=multiple, windowed=True, context=context)
        batches.append(pack(whole, CPU, layout=layout))
    tokens = torch.cat([b.inputs for b in batches])
    everywhere = tokens, torch.cat([b.positions for b in batches])
    single = pack(whole, CPU)
    loss_tokens = single.sequences.loss_tokens.tolist()
    found = []
    found_by_windows = []
    for b in batches:
        assert b.sequences.lengths == batches[0].sequences.lengths
        assert len(b.inputs) % multiple == 0
        # A last sequence may fill rows up to the multiple.
        filled = len(b.sequences.loss_tokens) - len(loss_tokens)
        assert b.sequences.loss_tokens.tolist() == loss_tokens + [0] * filled
        found += in_the_loss(b, None, everywhere)
        found_by_windows += in_the_loss(b, [b.attention.windowed], everywhere)
    assert sorted(found) == sorted(found_by_windows) == expected_in_the_loss(whole)
    for aggregation in ("token", "sequence", "fixed"):
        assert sum(normalize.count(b, aggregation) for b in batches).item() == pytest.approx(
            normalize.count(single, aggregation).item(), rel=1e-12
        )
        assert sum(
            normalize.weights(b, aggregation, 16).sum() for b in batches
        ).item() == pytest.approx(
            normalize.weights(single, aggregation, 16).sum().item(), rel=1e-12
        )


def test_work_is_even_over_context_ranks():
    """One sequence of 64 rows: 64 * 65 / 2 = 2080 pairs of query and key, in zigzag 520 for each of
    4 ranks but for the diagonal."""
    num_pairs = []
    for rank in range(4):
        layout = RowLayout(context=Context(None, rank, 4))
        batch = pack(groups([(1, [64])]), CPU, layout=layout)
        num_pairs.append(sum(len(keys) for _, keys in seen(batch, positions=torch.arange(64))))
    assert num_pairs == [520] * 4


# --------------------------------------------------------------------------------------------------
# partition


def optimum(lengths, num_bins):
    """Smallest possible load of the fullest bin, by trying every assignment."""
    best = sum(lengths)
    # the first goes to bin 0, by symmetry
    for choice in itertools.product(range(num_bins), repeat=len(lengths) - 1):
        best = min(best, np.bincount((0, *choice), weights=lengths).max())
    return best


@pytest.mark.parametrize("seed", range(6))
def test_partition_is_within_four_thirds_of_the_best(seed):
    lengths = np.random.default_rng(seed).integers(1, 40, 8).tolist()
    for num_ranks in (2, 3):
        (micro,) = partition(lengths, num_ranks, sum(lengths))
        loads = [sum(map(lengths.__getitem__, members)) for members in micro]
        assert max(loads) <= (4 / 3 - 1 / (3 * num_ranks)) * optimum(lengths, num_ranks)


@pytest.mark.parametrize(("num_ranks", "budget"), [(1, 64), (2, 64), (4, 100), (4, 4000), (3, 40)])
def test_partition_places_each_once_within_budget_on_equally_many_micro_batches(num_ranks, budget):
    lengths = np.random.default_rng(7).integers(1, 41, 60).clip(max=budget).tolist()
    plan = partition(lengths, num_ranks, budget)
    assert all(len(micro) == num_ranks for micro in plan)
    bins = list(flat(plan))
    assert sorted(flat(bins)) == list(range(60))
    loads = np.array([sum(map(lengths.__getitem__, members)) for members in bins])
    assert loads.max() <= budget
    least = -(-sum(lengths) // (num_ranks * budget))
    # No more micro-batches than the bound of the balancing costs.
    assert least <= len(plan) <= 4 / 3 * least + 1
    assert loads.max() - loads.min() <= max(lengths)


def test_partition_leaves_ranks_without_work_a_micro_batch_of_nothing():
    assert partition([], 2, 100) == [[[], []]]
    assert sorted(partition([5], 3, 100)[0]) == [[], [], [0]]


def test_partition_refuses_what_the_budget_cannot_hold():
    assert partition([100], 2, 100)
    with pytest.raises(UserError, match=r"= 100 cannot hold a sequence of 101 tokens"):
        partition([3, 101], 2, 100)


# --------------------------------------------------------------------------------------------------
# pieces


def table_of(rows):
    return np.array(rows, dtype=np.int64).reshape(-1, 3)


def cut(table, num_ranks, budget):
    """Return the pieces of the sequences of a table, by their numbers, and the pieces' rows."""
    headers = [(0, 0, 0, 0, i, *row, 0) for i, row in enumerate(table.tolist())]
    num_members, sizes = pieces(np.array(headers, HEADER), num_ranks, budget)
    numbers = iter(range(len(table)))
    return [list(itertools.islice(numbers, num)) for num in num_members], sizes


def rows_when_packed(table, members):
    """Distinct rows: a prompt of P tokens has P - 1 rows in common, an answer L - P of its own."""
    prompts = {int(table[i, 0]): int(table[i, 1]) - 1 for i in members}
    return sum(prompts.values()) + sum(int(table[i, 2] - table[i, 1]) for i in members)


def test_a_group_that_fits_is_one_piece_with_the_prompt_counted_once():
    group = [[11, 10, 15], [11, 10, 13], [11, 10, 16]]
    others = [[100 + i, 2, 16] for i in range(20)]
    table = table_of(group + others)
    members, sizes = cut(table, 1, 1000)
    assert (members[0], sizes[0]) == ([0, 1, 2], 9 + 5 + 3 + 6)
    # the budget holds 17 rows, not 23
    assert cut(table, 1, 18)[0][:2] == [[0, 1], [2]]
    # nor does a sixteenth of the 341 rows in all
    assert cut(table, 4, 1000)[0][:2] == [[0, 1], [2]]


@pytest.mark.parametrize(("num_ranks", "budget"), [(1, 10_000), (2, 300), (4, 10_000), (8, 90)])
def test_pieces_hold_each_sequence_once_never_mix_prompts_and_keep_the_limits(num_ranks, budget):
    rng = np.random.default_rng(8)
    rows = []
    for g in range(12):
        p = int(rng.integers(1, 40))
        rows += [[1000 + g, p, p + int(n)] for n in rng.integers(1, 50, rng.integers(1, 9))]
    table = table_of(rows)
    members, sizes = cut(table, num_ranks, budget)
    assert list(flat(members)) == list(range(len(table)))
    share = (table[:, 2] - 1).sum() / num_ranks
    for piece, size in zip(members, sizes, strict=True):
        assert len({int(table[i, 0]) for i in piece}) == 1
        assert size == rows_when_packed(table, piece)
        assert size <= max(min(budget, share / 4), table[:, 2].max() - 1)


def test_another_prompt_in_the_same_group_is_a_piece_of_its_own():
    """An environment may rewrite the prompt of an episode; nothing is shared then."""
    prompts = [[1, 8, 12], [1, 8, 13], [2, 8, 12], [2, 8, 14], [1, 8, 20]]
    members, _ = cut(table_of(prompts + [[3, 2, 400]]), 1, 1000)
    assert members == [[0, 1], [2, 3], [4], [5]]


def test_nothing_makes_no_pieces():
    assert pieces(np.empty(0, HEADER), 2, 100) == ([], [])


# --------------------------------------------------------------------------------------------------
# exchange


def whole_batch():
    rng = np.random.default_rng(9)
    out = groups([(int(rng.integers(1, 12)), rng.integers(1, 30, 4).tolist()) for _ in range(10)])
    for t in out:
        t.group += 2**40  # a header field that is too narrow would show
        t.version = int(rng.integers(2**33))
    out[3].logprobs[-1] = np.nan  # bits, not numbers, must arrive
    out[4].logprobs[-1] = -0.0
    out[5].reward = float(np.nextafter(0.3, 1))
    return out


def fields(t):
    arrays = (t.tokens, t.sampled, t.logprobs, t.turn_rewards)
    return (
        t.group,
        t.episode,
        t.version,
        np.float64(t.reward).tobytes(),
        *((a.dtype.str, a.tobytes()) for a in arrays),
    )


BY_RANK = {
    "in turn": lambda i, world: i % world,
    "by group": lambda i, world: i // 4 % world,
    "last rank has all": lambda i, world: world - 1,
    "first rank has none": lambda i, world: min(1 + i % 3, world - 1),
}


def on_each(function, plan):
    """[minibatch][micro-batch] -> the function's result for each trajectory."""
    return [[list(map(function, micro)) for micro in minibatch] for minibatch in plan]


def exchange_all(mesh, budget, num_minibatches):
    """{scheme: [minibatch][micro-batch] -> fields}: the same trajectories, brought by different
    ranks in different order."""
    out = {}
    for name, owner in BY_RANK.items():
        own = [t for i, t in enumerate(whole_batch()) if owner(i, mesh.world_size) == mesh.rank]
        plan = exchange(own[:: 1 if name == "in turn" else -1], mesh, budget, num_minibatches)
        out[name] = on_each(fields, plan)
        assert all(len(pack(micro, CPU).inputs) <= budget for micro in flat(plan))
    out["nothing"] = exchange([], mesh, budget, num_minibatches)
    return out


@pytest.mark.parametrize(
    ("world", "budget", "num_minibatches"), [(1, 200, 1), (2, 100, 1), (2, 5000, 3), (4, 60, 2)]
)
def test_exchange_delivers_each_trajectory_once_and_whole_from_any_rank(
    world, budget, num_minibatches
):
    results = ranks(world, exchange_all, budget, num_minibatches)
    expected = sorted(fields(t) for t in whole_batch())
    for result in results:
        # The plan is one of the trajectories alone.
        assert all(result[name] == result["in turn"] for name in BY_RANK)
        assert result["nothing"] == [[[]]] * num_minibatches
    plans = [r["in turn"] for r in results]
    assert sorted(flat(flat(flat(plans)))) == expected
    groups_of = []
    for minibatch in zip(*plans, strict=True):
        # FSDP's collectives are in each forward.
        assert len({len(micros) for micros in minibatch}) == 1
        groups_of.append({t[0] for t in flat(flat(minibatch))})
        tokens = []
        for micros in minibatch:
            tokens.append(sum(len(t[4][1]) // 4 for t in flat(micros)))
        assert min(tokens) > 0.5 * max(tokens)
    assert len(groups_of) == num_minibatches
    # No group is in two minibatches.
    assert sum(map(len, groups_of)) == len(set().union(*groups_of)) == 10
    assert max(map(len, groups_of)) - min(map(len, groups_of)) <= 1


def twin(trajectories, mesh, budget, num_minibatches, *, whole_groups):
    """What `exchange` does, obviously: every rank gets everything, and takes its part."""
    everything = []
    for rank, of_rank in enumerate(mesh.gather(trajectories)):
        everything += [(t.group, t.episode, t.segment, rank, i, t) for i, t in enumerate(of_rank)]
    everything = [entry[-1] for entry in sorted(everything, key=lambda entry: entry[:-1])]
    totals = collections.Counter()
    for t in everything:
        totals[t.group] += int(t.sampled.sum())

    batches = []
    every_group = sorted({t.group for t in everything})
    for chosen in np.array_split(np.array(every_group, np.int64), num_minibatches):
        members = [t for t in everything if t.group in chosen]
        headers = []
        for i, t in enumerate(members):
            prompt = max(1, int(t.sampled.argmax()))
            urls = [image.url for image in t.images if image.start < prompt - 1]
            shared = zlib.crc32(t.tokens[: prompt - 1].tobytes() + "".join(urls).encode())
            header = (t.group, 0, 0, 0, i, shared, prompt, len(t.tokens))
            headers.append((*header, 0))
        rows = budget * mesh.context_size
        table = np.array(headers, HEADER)
        sizes, lengths = pieces(table, mesh.data_size, rows, whole_groups=whole_groups)
        numbers = iter(range(len(members)))
        parts = [list(itertools.islice(numbers, size)) for size in sizes]
        batch = []
        for bins in partition(lengths, mesh.data_size, rows):
            local = bins[mesh.rank // mesh.num_copies]
            micro_batch = []
            for number in flat(map(parts.__getitem__, local)):
                t = members[number]
                micro_batch.append(
                    dataclasses.replace(t, versions=None, info={}, group_tokens=totals[t.group])
                )
            batch.append(micro_batch)
        batches.append(batch)
    return batches


def varied_trajectories(rank):
    """Of one rank: segments, images, turns without rewards, groups on several ranks."""
    rng = np.random.default_rng(rank)
    out = []
    for number in range(0 if rank == 1 else 9 + 4 * rank):
        group = 3 * (number % 4) + rank % 2
        num_prompt = 2 + group
        tokens = [*range(10 + group, 10 + group + num_prompt), *rng.integers(99, 200, 1 + number)]
        spans = [ImageSpan(i, 1, f"data:{group},{i}\u00e9") for i in range(number % 3)]
        out.append(
            trajectory(
                tokens,
                num_prompt,
                seed=rank,
                group=group,
                episode=100 * rank + number // 2,
                segment=number % 2,
                reward=float(rng.normal()),
                version=int(rng.integers(2**40)),
                versions=np.zeros(len(tokens), np.int32),
                images=spans,
                info={"prompt": "stays"},
                routes=rng.integers(256, size=(len(tokens) - number % 3, 2, 3)).astype(np.uint8)
                if number % 4
                else None,
                **({"turn_rewards": None} if number % 5 == 0 else {}),
            )
        )
    return out


def every_field(t):
    """(name, type, bits) of each field; a new one is in, too."""
    values = {f.name: getattr(t, f.name) for f in dataclasses.fields(Trajectory)}
    return {
        name: (value.dtype.str, value.tobytes())
        if isinstance(value, np.ndarray)
        else (type(value), repr(value))
        for name, value in values.items()
    }


def exchange_and_twin(mesh):
    own = varied_trajectories(mesh.rank)
    for budget, num_minibatches, whole_groups in ((60, 1, False), (400, 3, False), (900, 2, True)):
        found, expected = (
            on_each(every_field, how(own, mesh, budget, num_minibatches, whole_groups=whole_groups))
            for how in (exchange, twin)
        )
        assert found == expected and len(found) == num_minibatches
    return len(list(flat(flat(found))))


@pytest.mark.parametrize(
    ("world", "parallel"),
    [
        (1, None),
        (2, None),
        (4, None),
        (4, ParallelConfig(context=2)),
        (4, ParallelConfig(tensor=2)),
    ],
)
def test_exchange_is_its_obvious_twin_to_the_bit(world, parallel):
    num_received = ranks(world, exchange_and_twin, parallel=parallel)
    copies = 2 if parallel else 1
    assert sum(num_received) == copies * sum(len(varied_trajectories(r)) for r in range(world))


def exchange_without_rewards(mesh):
    own = [trajectory([5, 6, 7], 2, turn_rewards=None)] if mesh.rank == 0 else []
    try:
        exchange(own, mesh, budget=1)
    except UserError as error:
        refused = str(error)
    received = flat(flat(exchange(own, mesh, budget=2)))
    return refused, [t.turn_rewards for t in received]


def test_all_ranks_refuse_a_sequence_above_the_budget_and_unset_rewards_stay_unset():
    (refusal, first), (also, second) = ranks(2, exchange_without_rewards)
    assert "= 1 cannot hold a sequence of 2 tokens" in refusal
    assert also == refusal
    assert sorted([first, second], key=len) == [[], [None]]


def rows_of_siblings(mesh, budget):
    """Rows of each micro-batch on this rank: eight answers of 10 tokens to each of two prompts."""
    tokens = [[*range(5 + group, 55 + group), *range(10)] for group in range(2)]
    siblings = [
        trajectory(tokens[number % 2], 50, group=number % 2, episode=number) for number in range(16)
    ]
    (micros,) = exchange(siblings[mesh.rank :: mesh.world_size], mesh, budget)
    layout = RowLayout(context=mesh.context)
    return [len(pack(micro, mesh.device, layout=layout).inputs) for micro in micros]


@pytest.mark.parametrize("engine", ["all_gather", "ring"])
def test_micro_batches_keep_the_budget_also_where_siblings_share_no_rows(engine):
    parallel = ParallelConfig(context=2, context_engine=engine)
    for rows in ranks(2, rows_of_siblings, 65, parallel=parallel):
        assert max(rows) < 1.2 * 65  # Contexts fill up what does not divide evenly.


def fail_on_rank_one(mesh):
    assert mesh.rank == 0, "as it should"


def test_the_harness_reports_a_failing_rank():
    """Every test above would pass on ranks that never ran."""
    with pytest.raises(RankFailed, match="as it should"):
        ranks(2, fail_on_rank_one)


def test_cuda_repeats_longer_prompts_where_answers_are_long():
    cuda = torch.device("cuda")
    repeats = attention_plan.repeats_prompt
    assert repeats(128, 1, CPU) and repeats(128, 1, cuda)
    assert not repeats(129, 1000, CPU) and repeats(129, 1000, cuda)
    assert repeats(2000, 1000, cuda) and not repeats(2001, 1000, cuda)


def test_no_mask_of_a_long_answer_is_made():
    """A dense mask of 4,000 rows would take 200 MB in each layer."""
    assert attention_plan.repeats_prompt(128, 512, CPU)
    batch = pack(groups([(100, [4000, 4000])]), CPU)
    assert all(r.last is None for block in batch.attention.blocks for r in block.padded.rectangles)


# --------------------------------------------------------------------------------------------------
# micro-batches that take the same time on all ranks


def test_parts_that_attend_about_as_much_share_a_micro_batch():
    """Eight parts of as many rows on two ranks: of one long sequence, or of many short ones."""
    long, short = [32_000**2 // 2], [1_000**2 // 2] * 32
    pairs = [*short, *long, *short, *long, *long, *short, *short, *long]
    parts, number = [], 0
    for part in (short, long, short, long, long, short, short, long):
        parts.append(list(range(number, number + len(part))))
        number += len(part)
    plan = [parts[i : i + 2] for i in range(0, 8, 2)]
    found = by_attention(plan, pairs, 32_000)
    assert sorted(map(tuple, sum(found, []))) == sorted(map(tuple, parts))
    lengths = [[len(part) for part in micro_batch] for micro_batch in found]
    assert lengths == [[32, 32], [32, 32], [1, 1], [1, 1]]


def test_short_sequences_stay_in_their_order():
    """Their attention is too little to matter, and runs are the same to the bit as before."""
    plan = [[[0], [1]], [[2], [3]]]
    assert by_attention(plan, [64**2, 1, 30**2, 60**2], 1024) == plan
