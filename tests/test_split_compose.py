"""What works where some ranks train and others generate: refits from any mesh of trainers to any
engine, and features of whole programs. In test_split.py is when the two sides meet."""

from types import SimpleNamespace

import pytest
import torch

import tiny
from harness import ranks
from minirl.base.errors import UserError
from minirl.config.policy import LoraConfig, ParallelConfig, PolicyConfig
from minirl.config.rl import RefitConfig
from minirl.config.shared import EngineConfig
from minirl.engine.engine import RolloutEngine
from minirl.parallel.machines import check_on_one_machine
from minirl.refit.refit import Refit
from minirl.train.policy import Policy
from test_rollout import ENGINE, greedy, overwrite

# --------------------------------------------------------------------------------------------------
# refits


def make_policy(folder, mesh, rank):
    cfg = PolicyConfig(model=str(folder), dtype="float32", lora=LoraConfig(rank=rank))
    return Policy(cfg, folder, mesh)


def change_adapters(policy):
    """Change the adapters in place, as an optimizer would."""
    with torch.no_grad():
        for p in policy.parameters().values():
            if p.requires_grad:
                p.add_(0.05)


def refit_program(mesh, a, b, tp, dtype, lora_rank):
    """Send two checkpoints' weights to the engines, each three times, or adapters that change."""
    settings = RefitConfig(bucket_mb=1)
    if mesh.side == "trainers":
        policy = make_policy(a, mesh, lora_rank)
        refit = Refit(
            settings,
            policy.shards(),
            policy.parts(),
            None,
            mesh=mesh,
            read=policy.merged,
            check=True,
        )
        refit()  # It raises if one element differs from a full gather.
        for folder in (b, a, b):
            if lora_rank:
                change_adapters(policy)
            else:
                overwrite(policy, folder)
            refit()
        refit.wait()
        return {"peak": refit.peak_bytes}
    cfg = EngineConfig(**ENGINE | {"tensor_parallel_size": tp})
    engine = RolloutEngine(cfg, a, mesh, dtype=dtype)
    refit = Refit(settings, {}, {}, engine, check=True)
    for p in engine.parameters().values():
        p.fill_(torch.nan)
    found = []
    for _ in range(4):
        engine.change_weights(refit, keeps_cache=False)
        found.append(greedy(engine))
    fresh = RolloutEngine(cfg, b, mesh, dtype=dtype, load_weights=True)
    num_padding = sum(engine.padding().values())
    itemsize = getattr(torch, dtype).itemsize
    return {
        "found": found,
        "fresh": greedy(fresh),
        "received": refit.bytes_received,
        "engine": sum(p.nbytes for p in engine.parameters().values()) - num_padding * itemsize,
    }


REFITS = {
    "1 + 1": (1, 1, 1, "qwen2", {}, "bfloat16"),
    "2 + 1, experts": (2, 1, 1, "qwen3_moe", {"experts": 2}, "float32"),
    "2 + 1, tensor": (2, 1, 1, "qwen3", {"tensor": 2}, "float32"),
    "1 + 2, an engine, adapters": (1, 2, 2, "qwen3", {}, "float32"),
    "2 + 2, an engine, copies": (2, 2, 2, "qwen3_moe", {"replicate": 2}, "float32"),
}


@pytest.mark.parametrize("name", REFITS)
def test_a_refit_across_sides_equals_a_full_gather(tmp_path, name):
    num_trainers, generators, tp, family, mesh, dtype = REFITS[name]
    lora_rank = 4 if "adapters" in name else 0
    a, b = (tiny.make(tmp_path / f"{seed}", family, seed=seed) for seed in (0, 1))
    results = ranks(
        num_trainers + generators,
        refit_program,
        a,
        b,
        tp,
        dtype,
        lora_rank,
        parallel=ParallelConfig(generators=generators, **mesh),
    )
    for engine in results[num_trainers:]:
        before, second, third, fourth = engine["found"]
        if lora_rank:
            assert before != second != third != fourth
        else:
            assert [second, third, fourth] == [engine["fresh"], before, engine["fresh"]]
        assert engine["fresh"] != before
        assert engine["received"] == engine["engine"]


def test_engines_of_ranks_that_only_generate_begin_behind_the_trainers():
    """Of 5 trainers and an engine of 2 ranks, as of which machine each rank is."""

    def check(hosts):
        world = SimpleNamespace(world_size=7, gather=lambda _: hosts)
        check_on_one_machine(2, "engine.tensor_parallel_size", world, 5)

    check(["a"] * 5 + ["b"] * 2)
    with pytest.raises(UserError, match=r"puts ranks of a \(rank 5\), b \(rank 6\) together"):
        check(["a"] * 6 + ["b"])
