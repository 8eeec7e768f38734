"""The plan of a refit beside the obvious one, in imagined worlds of many ranks in one process.

The obvious plan is a full scan: every rank's shard against everything that every engine wants. That
the copies then bring the right bits is shown by carrying them out for all ranks at once; the real
engine is in test_rollout.py."""

import importlib.metadata
import itertools
import os
import subprocess
import sys
from collections import defaultdict

import numpy as np
import pytest
import torch

from benchmarks import growth_refit
from benchmarks.dryrun.pretend import compiler
from minirl.parallel.regions import CheckpointSlice, Region, intersect, view_of
from minirl.refit.plan import Grid, Planner, cut, find_sender
from minirl.refit.record import Recorder, join, wanted_by_name
from minirl.refit.refit import in_buffer, in_tensor
from programs import ROOT

EXPERTS = 4
# Widths that 8 engine ranks divide and shards do not.
SHAPES = {
    "embed": (37, 24),
    "a.norm": (24,),
    "a.rows": (40, 24),
    "a.columns": (24, 40),
    "a.experts.gate_up": (EXPERTS, 32, 24),
    "a.experts.down": (EXPERTS, 24, 16),
    "b.norm": (24,),
    "b.rows": (40, 24),
    "b.columns": (24, 40),
    "b.experts.gate_up": (EXPERTS, 32, 24),
    "b.experts.down": (EXPERTS, 24, 16),
    "b.correction": (EXPERTS,),
}
# What an engine cuts: the dimension of the weight in a file.
CUTS = {"rows": 0, "columns": 1, "gate_up": 0, "down": 1}


def slices_of(name, shape):
    if "experts" not in name:
        return [CheckpointSlice(name, Region((0,) * len(shape), shape))]
    halves = 2 if "gate_up" in name else 1
    rows = shape[1] // halves
    return [
        CheckpointSlice(
            f"{name}.{e}.{half}", Region((e, half * rows, 0), (1, rows, shape[2])), fused=True
        )
        for e in range(EXPERTS)
        for half in range(halves)
    ]


SLICES = {name: slices_of(name, shape) for name, shape in SHAPES.items()}


class Engine:
    """Whole weights, or a part of each matrix; gate above up as vLLM keeps them."""

    def __init__(self, tp, rank):
        self.tp = tp
        self.rank = rank
        self.parameters = {}
        for name, shape in SHAPES.items():
            size = list(shape)
            kind = name.split(".")[-1]
            if kind in CUTS:
                size[CUTS[kind] + len(shape) - 2] //= tp
            dtype = torch.float32 if kind == "correction" else torch.bfloat16
            self.parameters[name] = torch.full(size, torch.nan, dtype=dtype)

    def load(self, named):
        for in_file, weight in named:
            if in_file in SHAPES:
                name, target = in_file, self.parameters[in_file]
            else:
                name, number, half = in_file.rsplit(".", 2)
                target = self.parameters[name][int(number)]
                if "gate_up" in name:
                    target = target.chunk(2)[int(half)]
            kind = name.split(".")[-1]
            if kind in CUTS:
                axis = CUTS[kind]
                length = weight.shape[axis] // self.tp
                weight = weight.narrow(axis, self.rank * length, length)
            target.copy_(weight)


def in_files(weights):
    return [(part.name, part.of(w)) for name, w in weights.items() for part in SLICES[name]]


def record(engine):
    weights = {name: torch.empty(shape, device="meta") for name, shape in SHAPES.items()}
    offered = in_files(weights)
    recorder = Recorder(weights)
    with recorder:
        engine.load(offered)
    return recorder.parts, join(recorder.parts)


def chunk(length, num, i):
    """(start, size) of the i-th chunk, as torch cuts them: the last ones may be short or empty."""
    rows = -(-length // num)
    start = min(i * rows, length)
    return start, min(rows, length - start)


def shard_region(name, world, replicas, tp, rank):
    """As FSDP2 shards what tensor parallelism has cut, replicated or not."""
    shape = SHAPES[name]
    kind = name.split(".")[-1]
    offset, size = [0] * len(shape), list(shape)
    if kind == "correction":  # a buffer, whole on every rank
        return Region(tuple(offset), tuple(size))
    num_shards = world // replicas // tp
    shard, tp_rank = rank // tp % num_shards, rank % tp
    if kind in CUTS and tp > 1:
        axis = CUTS[kind] + len(shape) - 2
        offset[axis], size[axis] = chunk(shape[axis], tp, tp_rank)
    by_rows = len(shape) == 3 and size[0] < num_shards and shape[1] % num_shards == 0
    axis = 1 if by_rows else 0
    start, size[axis] = chunk(size[axis], num_shards, shard)
    offset[axis] += start
    return Region(tuple(offset), tuple(size))


class World:
    """All ranks of a world, each with its plan. The last `generators` only generate, and the others
    only train; 0: all do both."""

    def __init__(self, size, replicas, tp, engine_tp, generators=0, bucket_bytes=700):
        self.size = size
        num_trainers = size - generators
        self.first_receiver = num_trainers if generators else 0
        self.engines = [
            Engine(engine_tp, (rank - self.first_receiver) % engine_tp)
            for rank in range(self.first_receiver, size)
        ]
        self.parts = [[] for _ in range(self.first_receiver)]
        self.single = [[] for _ in range(self.first_receiver)]  # Expert by expert.
        for engine in self.engines:
            single, joined = record(engine)
            self.single.append(single)
            self.parts.append(joined)
        self.regions = [
            {name: shard_region(name, num_trainers, replicas, tp, rank) for name in SHAPES}
            for rank in range(num_trainers)
        ]
        found = {}
        grids = {}
        for name in SHAPES:
            regions = [by_name[name] for by_name in self.regions]
            grids[name] = found.setdefault(tuple(regions), Grid(regions))
        parts_of_classes = self.parts[self.first_receiver :][:engine_tp]
        wanted = [wanted_by_name(parts) for parts in [*parts_of_classes, []]]
        class_of = [engine_tp] * self.first_receiver
        class_of += [rank % engine_tp for rank in range(len(self.engines))]
        self.planners = []
        for rank in range(size):
            given = (rank, grids, wanted, class_of, bucket_bytes, self.first_receiver)
            self.planners.append(Planner(*given))

    def targets(self, rank, name):
        """The parts of a rank's engine that a weight fills."""
        return [part.target for part in self.parts[rank] if part.name == name]


def scanned(world):
    """The obvious plan: the elements that each pair of ranks moves, by a full scan of all ranks.

    A receiver takes its own shard first, then of the ranks that hold a region the one that stands
    where the receiver stands among all."""
    moved = defaultdict(set)
    for receiver in range(world.size):
        for part in world.single[receiver]:
            holders = defaultdict(list)
            for rank, regions in enumerate(world.regions):
                holders[regions[part.name]].append(rank)
            for held, ranks in holders.items():
                region = intersect(part.region, held)
                if not region:
                    continue
                place = receiver - world.first_receiver
                sender = ranks[place * len(ranks) // len(world.engines)]
                if receiver in ranks:
                    sender = receiver
                moved[sender, receiver] |= elements(part.name, region)
    return moved


def elements(name, region):
    """The flat indices of a region, with the weight's name."""
    ranges = [range(start, start + size) for start, size in zip(*region, strict=True)]
    flat = np.ravel_multi_index(np.meshgrid(*ranges, indexing="ij"), SHAPES[name]).ravel()
    return set(zip(itertools.repeat(name), flat.tolist()))


WORLDS = {
    "8": (8, 1, 1, 1),
    "8, engine 2": (8, 1, 1, 2),
    "8, engine 4": (8, 1, 1, 4),
    "8 = 2 replicas of 4, engine 4": (8, 2, 1, 4),
    "8 = 4 x tensor 2, engine 8": (8, 1, 2, 8),
    "16 = 2 replicas of 4 x tensor 2, engine 2": (16, 2, 2, 2),
    "24 = 3 replicas of 8, engine 8": (24, 3, 1, 8),  # experts by rows
    "32, engine 4": (32, 1, 1, 4),
    "64, engine 8": (64, 1, 1, 8),  # more ranks than rows
    "6 + 2": (8, 1, 1, 1, 2),
    "2 + 6, tensor 2, engine 2": (8, 1, 2, 2, 6),
    "3 + 4, engine 4": (7, 1, 1, 4, 4),
    "48 = 2 replicas of 12 x tensor 2 + 16, engine 8": (64, 2, 2, 8, 16),
}


@pytest.mark.parametrize("name", WORLDS)
def test_pieces_are_those_of_a_full_scan(name):
    """And both ends derive them in the same order."""
    world = World(*WORLDS[name])
    moved = defaultdict(set)
    sent = defaultdict(list)
    received = defaultdict(list)
    for rank, planner in enumerate(world.planners):
        if not world.first_receiver:
            own = world.regions[rank]
            for part in world.parts[rank]:
                region = intersect(part.region, own[part.name])
                if region:
                    moved[rank, rank] |= elements(part.name, region)
        for name, kind, window in windows(planner):
            for piece in planner.received(kind, window):
                new = elements(name, piece.region)
                assert not new & moved[piece.peer, rank], "twice"
                moved[piece.peer, rank] |= new
                received[piece.peer, rank].append((name, piece.region))
            for piece in planner.sent(kind, window):
                sent[rank, piece.peer].append((name, piece.region))
    assert sent == received
    assert moved == scanned(world)


def windows(planner):
    """Each window of each weight: its name, its kind and the region."""
    for kind in planner.kinds:
        for window in cut(kind, planner.bucket_bytes // kind.dtype.itemsize)[0]:
            for name in kind.names:
                yield name, kind, window


def carry_out(world, shards):
    """Do what all plans say, bucket by bucket."""
    plans = [planner.plan() for planner in world.planners]
    assert len({len(plan) for plan in plans}) == 1
    for buckets in zip(*plans, strict=True):
        buffers = []
        for rank, bucket in enumerate(buckets):
            buffer = torch.full((sum(bucket.num_out),), torch.nan, dtype=bucket.dtype)
            for i, name in enumerate(bucket.names if rank < len(shards) else ()):
                shard = shards[rank][name]
                targets = world.targets(rank, name)
                for copy in bucket.local:
                    in_tensor(copy, targets[copy.part]).copy_(in_buffer(copy, shard))
                for copy in bucket.pack:
                    in_buffer(copy, buffer, i).copy_(in_tensor(copy, shard))
            buffers.append(buffer.split(bucket.num_out))
        for rank, bucket in enumerate(buckets):
            rows = [buffer[rank] for buffer in buffers]
            assert [len(row) for row in rows] == bucket.num_in
            incoming = torch.cat(rows)
            for i, name in enumerate(bucket.names):
                targets = world.targets(rank, name)
                for copy in bucket.unpack:
                    in_tensor(copy, targets[copy.part]).copy_(in_buffer(copy, incoming, i))


@pytest.mark.parametrize("bucket_bytes", [700, 10**6])
@pytest.mark.parametrize("name", WORLDS)
def test_every_engine_gets_the_bits_that_its_loader_would_give_it(name, bucket_bytes):
    world = World(*WORLDS[name], bucket_bytes=bucket_bytes)
    torch.manual_seed(0)
    whole = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    shards = []
    for regions in world.regions:
        by_name = {}
        for weight, region in regions.items():
            by_name[weight] = view_of(whole[weight], region).contiguous()
        shards.append(by_name)
    carry_out(world, shards)
    for engine in world.engines:
        expected = Engine(engine.tp, engine.rank)
        expected.load(in_files(whole))
        for weight, p in expected.parameters.items():
            assert torch.equal(p, engine.parameters[weight]), weight


def test_a_bucket_is_as_large_as_it_may_be():
    """A weight that does not fit is cut where neither shards nor engines cut it, if there is such a
    dimension: shards cut both of the columns' weights by rows."""
    world = World(*WORLDS["8, engine 2"])
    for bucket in world.planners[3].plan():
        num_bytes = sum(bucket.num_in) * bucket.dtype.itemsize
        assert num_bytes <= 700 or [name.split(".")[1] for name in bucket.names] == ["columns"]
    found = [window for name, _, window in windows(world.planners[0]) if name == "a.rows"]
    assert found == [Region((0, 0), (40, 12)), Region((0, 12), (40, 12))]


def test_all_experts_of_a_weight_are_one_part():
    single, joined = record(Engine(1, 0))
    assert len(single) == len(SHAPES) - 4 + 2 * 3 * EXPERTS
    assert len(joined) == len(SHAPES)  # gate and up are neighbours, too
    assert len(record(Engine(2, 1))[1]) == len(SHAPES) + 2  # here they are not


def test_a_sender_is_oneself_or_of_the_own_replica():
    replicas = [find_sender((1, 5, 9), receiver, 12) for receiver in (0, 1, 3, 4, 5, 7, 8, 11)]
    assert replicas == [1, 1, 1, 5, 5, 5, 9, 9]
    neighbours = [find_sender((2, 3), receiver, 8) for receiver in range(8)]
    assert neighbours == [2, 2, 2, 3, 3, 3, 3, 3]


def test_shards_that_are_no_grid_are_refused():
    regions = [Region((0, 0), (1, 2)), Region((1, 0), (1, 1)), Region((1, 1), (1, 1))]
    with pytest.raises(NotImplementedError, match="do not form a grid"):
        Grid(regions)


# --------------------------------------------------------------------------------------------------
# growth


@pytest.mark.parametrize("is_split", [False, True])
def test_copies_of_a_call_do_not_grow_with_the_number_of_ranks(is_split):
    """Nor if three quarters of them only generate, on one that only trains."""

    def measured(world):
        generators = world * 3 // 4 if is_split else 0
        return growth_refit.measure_plan("30B-A3B", 8, world, 1, 1, generators)[1]

    few, many = measured(8), measured(64)
    assert few.num_copies / 8 < 60  # a layer; 440 if experts and peers were apart
    assert many.num_copies < 1.2 * few.num_copies
    assert many.num_bytes < 120_000  # what it sends to and receives from each of 64 ranks


# --------------------------------------------------------------------------------------------------
# models of vLLM's CUDA platform

CUDA_FAMILIES = ["qwen3", "gemma2", "qwen3_moe", "mixtral", "gpt_oss", "phi3"]


def why_no_cuda_models() -> str:
    """Why this environment cannot build them; empty: it can."""
    try:
        version = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        version = "that for CPUs"
    if "cpu" in version.lower():
        return f"the CUDA build of vLLM is not installed (here is {version})"
    return "" if compiler() else "a stand-in for the driver needs g++, which is not installed"


@pytest.mark.skipif(bool(why_no_cuda_models()), reason=why_no_cuda_models())
def test_models_of_the_cuda_platform_are_refitted_bitwise(tmp_path):
    """In host memory: layouts differ from those of vLLM's CPU build, which all other tests have."""
    paths = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    ended = subprocess.run(
        [sys.executable, "tests/cuda_models.py", tmp_path, *CUDA_FAMILIES],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    done = [line.split() for line in ended.stdout.splitlines()]
    refitted = {line[0] for line in done if len(line) == 2 and line[1].isdigit()}
    assert refitted >= set(CUDA_FAMILIES)
