"""The planner: what it counts, says, advises and refuses.

`test_costs.py` holds its formulas to what minirl's own code takes on pretended GPUs."""

import contextlib
import dataclasses
import math
import os
import re
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoConfig,
    Gemma2Config,
    Gemma4TextConfig,
    Glm4MoeConfig,
    HunYuanMoEV1Config,
    Qwen2_5_VLConfig,
    Qwen2MoeConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)

import tiny
from benchmarks import fits
from benchmarks.dryrun.compare import HYBRID, LATENT, Case
from benchmarks.dryrun.jobs import trajectories
from harness import ranks
from minirl.base.errors import UserError
from minirl.batch.packing import pack
from minirl.config.parse import load_config, with_settings
from minirl.config.policy import LoraConfig, PolicyConfig
from minirl.config.rl import RLConfig
from minirl.config.shared import RolloutConfig
from minirl.config.validate import resolve_lengths
from minirl.model import build
from minirl.model.families import FAMILIES
from minirl.plan import __main__ as program
from minirl.plan import cards, costs, overlap, simulation
from minirl.plan import plan as plans
from minirl.plan.__main__ import advise
from minirl.plan.cards import GIB
from minirl.plan.costs import Load
from minirl.plan.plan import Workload, check_lower_bound, make_plan, read_models
from minirl.plan.sizes import read_config, read_sizes
from minirl.train.policy import Policy
from minirl.types.packed import CHUNK

BIG = fits.MODELS["Qwen3-8B"]
QLORA = LoraConfig(rank=32, quantization="nf4")


# --------------------------------------------------------------------------------------------------
# sizes


def sizes_of(config, **settings):
    return read_sizes(config.to_dict(), **settings)


@pytest.mark.parametrize(
    "config",
    [
        BIG,
        fits.MODELS["Llama-3.3-70B"],
        fits.MODELS["Qwen3-30B-A3B"],
        Gemma2Config(),
        Gemma4TextConfig(hidden_size_per_layer_input=0),
        Glm4MoeConfig(),  # whose first layers are dense
        Qwen2MoeConfig(),  # with a shared expert
        LATENT,
        Qwen3_5TextConfig(),  # with gated delta nets
        Qwen3NextConfig(),
        Qwen2_5_VLConfig(),  # with a tower for images
    ],
    ids=lambda config: config.model_type,
)
def test_parameters_are_those_of_the_library(config):
    """Norms and biases are left out; a tower's MLP is counted with two matrices."""
    model = build.make_meta_model(config, torch.float32, score=False)
    real = sum(p.numel() for p in model.parameters())
    reads_images = "vision_config" in config.to_dict()
    assert sizes_of(config).parameters == pytest.approx(real, rel=0.01 if reads_images else 0.0005)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in tiny.READ_IMAGES])
def test_parameters_of_every_family_are_counted(tmp_path, family):
    """All matrices; only Cohere's norms have some, too."""
    values = read_config(str(tiny.make(tmp_path, family)), "policy.model")
    model = build.make_meta_model(AutoConfig.from_pretrained(tmp_path), torch.float32, score=False)
    real = sum(p.numel() for p in model.parameters() if p.ndim > 1)
    assert read_sizes(values).parameters == pytest.approx(real, rel=0.01)


def test_numbers_that_a_config_lists_for_each_layer_are_read():
    """As Hunyuan-A13B's does."""
    one, each = HunYuanMoEV1Config(num_experts=8, moe_topk=2, head_dim=32), {}
    for name in ("intermediate_size", "moe_topk"):
        each[name] = [getattr(one, name)] * one.num_hidden_layers
    each["moe_intermediate_size"] = each["intermediate_size"]
    assert read_sizes(one.to_dict() | each).layers == sizes_of(one).layers


def test_a_config_that_leaves_out_its_defaults_is_read_by_the_library(tmp_path):
    """As those of Gemma 3 on the hub do."""
    (tmp_path / "config.json").write_text('{"model_type": "gemma2", "num_hidden_layers": 2}')
    values = read_config(str(tmp_path), "policy.model")
    assert read_sizes(values).hidden == Gemma2Config().hidden_size
    (tmp_path / "config.json").write_text('{"model_type": "no_family"}')
    with pytest.raises(UserError, match="config.json"):
        read_config(str(tmp_path), "policy.model")


def test_a_chunk_is_as_long_as_that_of_the_kernels():
    assert costs.CHUNK == CHUNK


def test_experts_next_to_an_mlp_are_counted():
    config = Gemma4TextConfig(
        hidden_size=64,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        hidden_size_per_layer_input=0,
        intermediate_size=96,
        enable_moe_block=True,
        num_experts=4,
        top_k_experts=2,
        moe_intermediate_size=32,
        vocab_size=256,
    )
    for layer in sizes_of(config).layers:
        assert (layer.experts, layer.experts_of_token, layer.expert) == (4, 2, 32)
        assert sum(m.numel for m in layer.matrices if m.experts) == 4 * 3 * 32 * 64
        assert layer.feed_forward == 96


def workload_of(name="Qwen3-8B", num_gpus=8, **settings):
    cfg = fits.job(name)
    for setting, value in settings.items():
        cfg = with_settings(cfg, {setting.replace("__", "."): value})
    return workload_on(cfg, num_gpus, fits.MODELS[name])


def workload_on(cfg, num_gpus, config):
    return Workload(cfg, num_gpus, read_models(cfg, {"policy": config.to_dict()}))


def plan_of(workload, card="h200"):
    return make_plan(workload, cards.CARDS[card], 8)


def test_formulas_take_less_than_a_tenth_of_a_second():
    workload = workload_of("Qwen3-32B")
    plan_of(workload)  # imports
    began = time.process_time()
    plan_of(workload)
    assert time.process_time() - began < 0.1


def test_auto_is_the_fastest_that_fits():
    plan = plan_of(workload_of(), "h100")
    others = [
        plan_of(workload_of(policy__activation_checkpointing=kind, engine__sleep=sleep), "h100")
        for kind in ("off", "selective", "full")
        for sleep in plans.SLEEP
    ]
    room = plans.MOST_USED * plan.card.memory_gib * GIB
    fitting = [o.step_seconds for o in others if not o.lacks and max(o.memory.values()) <= room]
    assert plan.step_seconds <= min(fitting) / plans.LEAST_GAIN and len(fitting) < len(others)
    wide = workload_of(policy__activation_checkpointing="off", tokens_per_rank=16384)
    assert "backward needs" in plan_of(wide, "h100").lacks


# A step of GRPO with 16 prompts of 64 tokens and 8 answers to each.
SHORT = {
    "data__max_prompt_tokens": 64,
    "rollout__prompts_per_step": 16,
    "rollout__samples_per_prompt": 8,
    "tokens_per_rank": 0,
}


@pytest.mark.parametrize(
    ("name", "num_gpus", "card", "answer", "settings", "sleep"),
    [
        ("Qwen3-0.6B", 1, "h100", 256, SHORT, "none"),
        ("Qwen3-1.7B", 1, "h200", 512, SHORT, "none"),
        ("Qwen3-1.7B", 1, "h100", 512, SHORT, "cache"),
        ("Qwen3-8B", 8, "h100", 2048, {}, "engine"),
        ("Qwen3-8B", 1, "rtx4090", 512, {"policy__lora": QLORA}, "all"),
    ],
)
def test_nothing_sleeps_that_need_not(name, num_gpus, card, answer, settings, sleep):
    lengths = {"env__max_tokens": answer, "rollout__max_tokens": answer, "engine__max_model_len": 0}
    cfg = fits.job(name)
    for setting, value in {**lengths, **settings}.items():
        cfg = with_settings(cfg, {setting.replace("__", "."): value})
    resolve_lengths(cfg)
    workload = workload_on(cfg, num_gpus, fits.MODELS[name])
    plan = plan_of(workload, card)
    assert not plan.lacks
    assert plan.sleep == sleep
    # One mode less would take more memory, and one more would take longer.
    before = plans.SLEEP[: plans.SLEEP.index(sleep)]
    for other in before:
        forced = plan_of(
            workload_on(with_settings(cfg, {"engine.sleep": other}), num_gpus, fits.MODELS[name]),
            card,
        )
        assert forced.lacks or forced.step_seconds * plans.LEAST_GAIN >= plan.step_seconds
    engine = plan.engine.config(sleep)
    assert engine.sleep == sleep
    if plan.engine.fills_its_share:
        assert engine.kv_cache_gb == 0  # vLLM measures it.
    else:
        assert engine.kv_cache_gb * GIB >= longest_cache(plan)


# Seconds of minirl at 4ae2b3f: `SHORT` on one H100, answers of 256 tokens to prompts of 14.
MEASURED = {"rollout": 1.447, "sleep_wake": 0.711, "forward": 0.447, "backward": 0.387}
MEASURED_STEP = 3.141  # With 0.15 s of rewards, preparation and what no phase has.
MEASURED_CACHE = 614_416  # Tokens.


def test_a_step_takes_as_long_as_one_was_measured(monkeypatch):
    """Everything slept then, vLLM's own scheduler and a head in many kernels were slower."""
    monkeypatch.setattr(plans, "HOST_SECONDS_PER_STEP", 2.1e-3)
    monkeypatch.setattr(plans, "HOST_SECONDS_PER_ANSWER", 2.6e-5)
    monkeypatch.setattr(costs, "LOGIT_BYTES", (36, 26))
    cfg = fits.job("Qwen3-0.6B")
    old = {
        **SHORT,
        "tokens_per_rank": 16384,
        "engine__sleep": "all",
        "engine__kv_cache_gb": MEASURED_CACHE * 28 * 2 * 8 * 128 * 2 / GIB,
        "policy__activation_checkpointing": "off",
    }
    for setting, value in old.items():
        cfg = with_settings(cfg, {setting.replace("__", "."): value})
    models = read_models(cfg, {"policy": fits.MODELS["Qwen3-0.6B"].to_dict()})
    plan = plan_of(Workload(cfg, 1, models, prompt=14, answer=256), "h100")
    assert plan.workload.load.num_micro == 3
    assert plan.engine.kv_tokens == MEASURED_CACHE
    found = {phase: plan.seconds[phase] for phase in MEASURED}
    assert found == pytest.approx(MEASURED, rel=0.15)
    assert plan.step_seconds == pytest.approx(MEASURED_STEP, rel=0.15)


def longest_cache(plan):
    """Bytes of the cache for the step's sequences at their longest, or one of them."""
    workload = plan.workload
    at_once = workload.num_in_flight / workload.world_size if plan.sleep == "none" else 1
    return at_once * plan.engine.cfg.max_model_len * plan.engine.kv_bytes


def test_rows_that_fit():
    """As many as fit in few micro-batches of equal size; less memory makes more of them."""
    found = []
    for memory in (79.2, 40.0, 24.0):
        cfg = fits.job("Qwen3-0.6B")
        for setting, value in {**SHORT, "policy__activation_checkpointing": "off"}.items():
            cfg = with_settings(cfg, {setting.replace("__", "."): value})
        card = dataclasses.replace(cards.CARDS["h100"], memory_gib=memory)
        plan = make_plan(workload_on(cfg, 1, fits.MODELS["Qwen3-0.6B"]), card, 1)
        assert not plan.lacks and plan.memory["backward"] <= plan.limit
        rows = plan.workload.tokens_per_rank
        assert rows >= plans.longest_of(cfg)
        found.append((plan.workload.load.num_micro, rows))
    assert found == sorted(found, key=lambda pair: (pair[0], -pair[1]))
    assert found[0][0] < found[-1][0]


@pytest.mark.parametrize(("name", "card"), [("Qwen3-32B", "h100"), ("Qwen3-1.7B", "rtx4090")])
def test_advice_makes_it_fit_when_it_is_followed(name, card):
    workload = workload_of(name, 1 if card == "rtx4090" else 8)
    assert plan_of(workload, card).lacks
    advised = advise(workload, cards.CARDS[card], 8)
    assert advised
    for advice in advised:
        cfg = workload.cfg
        for setting, value in advice.changes:
            cfg = with_settings(cfg, {setting: value})
        followed = Workload(cfg, workload.world_size, workload.models)
        plan = plan_of(followed, card)
        assert not plan.lacks
        assert plan.step_seconds == advice.plan.step_seconds


def test_answers_that_do_not_fill_a_micro_batch_make_more_of_them():
    load = workload_of(tokens_per_rank=4096).load  # 511 rows of a prompt, answers of 2,048
    assert (load.num_answers, load.num_micro) == (1, 64)
    load = workload_of(tokens_per_rank=16384).load
    assert (load.num_answers, load.num_micro) == (7, 10)


def test_the_lower_bound_refuses_what_no_batch_size_helps():
    workload = workload_of("Qwen3-32B", 4)
    with pytest.raises(UserError, match=r"32\.8B parameters on 4 ranks .* 122\.0 GiB a rank"):
        check_lower_bound(plan_of(workload, "h100"))
    check_lower_bound(plan_of(workload, "h200"))
    offload = workload_of("Qwen3-32B", 4, policy__optimizer_state="offload")
    check_lower_bound(plan_of(offload, "h100"))


def mesh_of(world_size, side):
    """On CPU, as far as a plan looks at it."""
    device = torch.device("cpu")
    return SimpleNamespace(device=device, world_size=world_size, side=side, maxima=lambda n: n)


def test_a_program_on_cpu_says_what_its_tensors_take(monkeypatch):
    """And refuses what cannot fit the host, before it loads anything."""
    mesh = mesh_of(2, "both")
    monkeypatch.setattr(plans, "host_memory", lambda: 2 * 64 * GIB)

    def announce(name):
        return plans.announce(fits.job(name), {"policy": fits.MODELS[name].to_dict()}, mesh)

    plan, lines = announce("Qwen3-0.6B")
    assert plan.checkpointing == "off"
    assert len(lines) == 3
    assert re.match(r"plan: (fits|may not fit): \d+\.\d\d GiB of tensors a rank of 64\.0", lines[0])
    assert lines[0].endswith("this machine's memory over its 2 ranks")
    assert lines[1].startswith("plan: GiB a rank: activations")
    with pytest.raises(UserError, match=r"Qwen3-32B: 32\.8B parameters on 2 ranks of 64\.0 GiB"):
        announce("Qwen3-32B")


@pytest.mark.parametrize("limit", ["max", None])
def test_a_container_without_a_limit_has_the_memory_of_its_machine(limit, tmp_path, monkeypatch):
    file = tmp_path / "memory.max"
    monkeypatch.setattr(plans, "MEMORY_LIMIT", file)
    if limit:
        file.write_text(f"{limit}\n")
    assert plans.host_memory() == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_a_container_has_the_memory_of_its_limit(tmp_path, monkeypatch):
    file = tmp_path / "memory.max"
    monkeypatch.setattr(plans, "MEMORY_LIMIT", file)
    file.write_text(f"{GIB}\n")
    assert plans.host_memory() == GIB


def test_a_program_on_a_gpu_says_memory_and_no_time():
    """A roofline is no promise: 1.95 s were announced for a step of 3.14."""
    plan = plan_of(workload_of(), "h100")
    verdict, choice, memory_line, last_line = plans.short(plan)
    assert verdict.startswith("fits with activation checkpointing ")
    assert re.match(r".* sleep.*; a step in \d+ micro-batch\(es\) of at most [\d,]+ rows", choice)
    assert "of 79.2 GiB: " in memory_line and "KV cache" in memory_line
    assert "python -m minirl.plan has the roofline" in last_line
    assert not re.search(r"\d s\b|seconds", " ".join([verdict, choice, memory_line, last_line]))
    short_of_memory = plan_of(workload_of("Qwen3-32B"), "h100")
    assert plans.short(short_of_memory)[0].startswith("DOES NOT FIT: refit needs")


# --------------------------------------------------------------------------------------------------
# several nodes


def test_shards_of_several_nodes_come_once_to_a_node():
    """By hand: each rank gets its part of what its node lacks, and hands it on meanwhile."""
    card = cards.CARDS["h100"]
    size = 7e9
    assert card.gathering(size, 8, 8) == card.sending(size)
    # Six of eight shards are in other nodes; a half of them comes to each of two ranks.
    assert card.gathering(size, 8, 2) == card.sending(6e9 / 2, across=True)
    # Over eight ranks' network cards they come faster than the link hands them on.
    assert card.gathering(size, 32, 8) == card.sending(size)
    # With one rank a node, all of it comes from other nodes.
    assert card.gathering(size, 4, 1) == card.sending(size, across=True)


def test_ranks_of_a_tensor_send_in_their_node_and_a_refit_across_nodes():
    node = plan_of(workload_of("Qwen3-32B", 8, parallel__tensor=4))
    nodes = plan_of(workload_of("Qwen3-32B", 32, parallel__tensor=4))
    card = nodes.card
    training = nodes.trained["policy"]
    between = card.sending(training.sent["annotate"].to_sequence)
    gathered = card.gathering(training.sent["annotate"].to_shards, 8, 2)
    assert training.wire_seconds["annotate"] == between + gathered
    # Three quarters of the weights are in the other three nodes.
    weights = nodes.engine.weights
    assert nodes.seconds["refit"] == card.sending(weights * 3 / 4, across=True)
    assert node.seconds["refit"] == card.sending(weights * 7 / 8)
    replicas = plan_of(workload_of("Qwen3-32B", 32, parallel__tensor=4, parallel__replicate=4))
    assert replicas.seconds["refit"] == card.sending(weights * 31 / 32)


# --------------------------------------------------------------------------------------------------
# generators and trainers


def split_of(name="Qwen3-8B", num_trainers=6, num_generators=2, **settings):
    generators = {"parallel__generators": num_generators}
    return workload_of(name, num_trainers, **generators | settings)


def test_trainers_have_no_engine_and_generators_nothing_else():
    """By hand, for 6 + 2 ranks: what each kind holds, and what a refit moves."""
    plan = plan_of(split_of(), "h100")
    generators = plan.generators
    weights = 2 * sizes_of(BIG).parameters
    assert (plan.engine, plan.lacks, plan.offloads) == (None, "", False)
    assert plan.seconds["refit"] == cards.CARDS["h100"].sending(weights)
    # Of what a trainer sends, 2 / 6 of the weights, 4 GiB are on their way, and a bucket.
    most = 4 * GIB + 256 * 2**20 * 2 / 6
    assert plan.alive["refit"]["send buffers"] == most < weights * 2 / 6
    few = plan_of(split_of(num_trainers=7, num_generators=1), "h100")
    assert few.alive["refit"]["send buffers"] == weights / 7
    # In lockstep they are still on their way when the log-probs of the next batch are computed.
    for way, size in (("lockstep", most), ("inflight", None)):
        also = plan_of(split_of(algo__updates_per_step=2, rollout__overlap=way), "h100")
        assert also.alive["annotate"].get("send buffers") == size
        assert "send buffers" not in also.alive["forward"]
    assert plan.alive["optimizer"]["parameters"] == 4 * sizes_of(BIG).parameters / 6
    assert list(generators.memory) == ["rollout"]
    assert generators.alive["rollout"]["receive buffers"] == 2 * 256 * 2**20
    engine = generators.engine.config(generators.sleep)
    assert (engine.sleep, engine.kv_cache_gb) == ("none", 0)  # vLLM takes all that is left.
    assert engine.gpu_memory_utilization == 0.85
    # Trainers are planned as a run of so many ranks that samples nothing.
    alone = plan_of(workload_of(num_gpus=6, rollout__replay="rollouts"), "h100")
    for phase, size in alone.memory.items():
        assert plan.memory[phase] == size
        assert plan.seconds.get(phase) == alone.seconds.get(phase)


@pytest.mark.parametrize(
    ("overlap", "num_groups"), [("lockstep", 64), ("stream", 64), ("inflight", 64 * 3)]
)
def test_a_step_takes_as_long_as_the_slower_kind(overlap, num_groups):
    plan = plan_of(split_of(rollout__overlap=overlap))
    generators = plan.generators
    assert generators.workload.num_in_flight == num_groups * 8
    draw = sum(generators.seconds.values())
    assert ("recompute" in generators.seconds) == (overlap == "inflight")
    seconds = plan.seconds
    passes = seconds["forward"] + seconds["backward"]
    if overlap == "stream":
        last = passes / plan.workload.load.num_micro
        assert plan.step_seconds == pytest.approx(
            seconds["refit"] + draw + last + seconds["optimizer"]
        )
    else:
        assert draw > passes + seconds["optimizer"]
        assert plan.step_seconds == seconds["refit"] + draw
        # With one generator for each trainer these are the slower ones. In lockstep weights travel
        # while they go on.
        even = plan_of(split_of(num_trainers=1, num_generators=7, rollout__overlap=overlap))
        hidden = even.seconds["refit"] * (overlap == "lockstep")
        assert hidden < even.busy_seconds
        assert even.step_seconds == pytest.approx(even.busy_seconds - hidden)
    kept = plan_of(split_of(rollout__overlap=overlap, rollout__kv="keep")).generators.seconds
    assert list(kept) == ["rollout"]


def test_a_reference_next_to_a_policy_that_only_trains_moves_only_where_it_must():
    settings = {"algo__kl_coef": 0.1, "algo__kl_in": "reward"}
    roomy = plan_of(split_of("Qwen3-4B", **settings), "h200")
    assert not roomy.offloads and "sleep_wake" not in roomy.seconds
    tight = plan_of(split_of("Qwen3-32B", policy__optimizer_state="8bit", **settings), "h100")
    assert tight.offloads and tight.seconds["sleep_wake"] > 0
    assert tight.on_host > roomy.on_host


def test_both_kinds_of_ranks_settle_what_they_need(monkeypatch):
    """On CPU; the trainers say it for both, and refuse what cannot fit."""
    monkeypatch.setattr(plans, "host_memory", lambda: 2 * 64 * GIB)
    cfg = with_settings(fits.job("Qwen3-0.6B"), {"parallel.generators": 1})
    configs = {"policy": fits.MODELS["Qwen3-0.6B"].to_dict()}
    plan, lines = plans.announce(cfg, configs, mesh_of(1, "trainers"))
    assert (plan.checkpointing, plan.engine, plan.offloads) == ("off", None, False)
    assert len(lines) == 4
    assert lines[2] == "plan: GiB a generator: engine's weights 1.11, KV cache 1.00"
    plan, lines = plans.announce(cfg, configs, mesh_of(1, "generators"))
    assert plan.engine.config(plan.sleep).sleep == "none" and lines == []


def test_a_split_program_says_a_line_for_each_kind():
    lines = plans.short(plan_of(split_of(), "h100"))
    assert lines[0].startswith("6 trainers: fits with activation checkpointing ")
    assert "KV cache" not in lines[2]
    assert re.match(r"2 generators: fits: at most .* \(rollout\); KV cache [\d,]+ tokens", lines[3])
    lines = plans.short(plan_of(split_of("Llama-3.3-70B"), "h100"))
    assert "6 trainers: DOES NOT FIT: " in lines[0]
    assert "2 generators: DOES NOT FIT: the KV cache holds 0 tokens" in lines[3]


# --------------------------------------------------------------------------------------------------
# gated delta nets


def counted_flops(mesh, folder, load):
    """What torch counts of a forward pass on CPU, by operator, and the head's part."""
    policy = Policy(PolicyConfig(dtype="float32"), folder, mesh, trainable=False)
    batch = pack(trajectories(load), mesh.device, layout=policy.layout)
    with policy.inference(), FlopCounterMode(display=False) as counter:
        policy.model(batch)
    counts = counter.get_flop_counts()["Global"]
    aten = torch.ops.aten
    in_head = 2 * len(batch.loss_rows) * policy.model.get_output_embeddings().weight.numel()
    return len(batch.inputs), counts[aten.mm] - in_head, counts[aten.bmm]


def test_work_of_a_hybrid_is_what_torch_counts(tmp_path):
    """Of its matrix products: two sequences of two full chunks, which share nothing."""
    folder = tiny.make(tmp_path / "model", "qwen3_5_text")
    load = Load(tokens=4 * CHUNK, sequence=2 * CHUNK + 1, prompt=1, samples=1)
    rows, of_matrices, of_rule = ranks(1, counted_flops, folder, load)[0]
    model = sizes_of(AutoConfig.from_pretrained(folder))
    assert rows == 4 * CHUNK
    assert 2 * rows * model.active_in_layers == of_matrices
    # torch does not count how triangular systems are solved for keys and values.
    (net,) = (layer.delta_net for layer in model.layers if layer.delta_net)
    solving = 2 * net.heads * CHUNK * (net.key_dim + net.value_dim)
    of_rules = costs.forward_flops(model, rows, loss_rows=0, pairs=0) - of_matrices
    assert of_rules - rows * solving == of_rule


def test_only_attention_is_more_work_in_longer_sequences():
    """By hand: 16 of 64 layers have it; pairs are those of a prompt, a quarter, and an answer."""

    def flops_of_row(sequence):
        load = Load(tokens=8 * sequence, sequence=sequence, prompt=sequence // 4, samples=1)
        training = Case(model=HYBRID, load=load).training()
        flops = costs.forward_flops(training.model, training.rows, 0, training.pairs)
        return flops / training.rows

    more = flops_of_row(8192) - flops_of_row(4096)
    assert more == pytest.approx(16 * 4 * 24 * 256 * 4096 / 2, rel=0.01)


def test_an_engine_holds_keys_of_attention_and_a_state_of_each_delta_net():
    """By hand, for Qwen3-Next-80B-A3B: 12 layers of the one kind, 36 of the other."""
    cfg = with_settings(fits.job("Qwen3-8B"), {"engine.tensor_parallel_size": 2})
    of_token = 12 * 2 * 256 * 2  # One of its two heads, in bfloat16.
    for state_dtype, state_bytes in ((None, 2), ("float32", 4)):
        model = Qwen3NextConfig(mamba_ssm_dtype=state_dtype)
        plan = plan_of(workload_on(cfg, 32, model))
        of_sequence = 36 * 32 * 128 * 128 * state_bytes / 2
        assert plan.engine.state_tokens == math.ceil(of_sequence / of_token)
    weights = 2 * sizes_of(model).parameters / 2
    beside = weights + (0.6 + 1.0 + 1.5) * GIB
    assert plan.engine.kv_tokens == (plan.alive["rollout"]["engine"] - beside) // of_token
    page = program.page(plan, [])
    assert f"the states of each sequence take as much as {plan.engine.state_tokens:,} of" in page
    assert plan.note.startswith("gated delta nets are counted as the kernels of")
    assert page.endswith(plan.note)


def test_an_engine_holds_the_latent_vector_of_a_token_on_each_rank():
    """By hand, for DeepSeek-V3's attention in a model of 27 layers, as Moonlight-16B-A3B has."""
    assert sizes_of(LATENT).parameters == pytest.approx(16e9, rel=0.01)
    cfg = with_settings(fits.job("Qwen3-8B"), {"engine.tensor_parallel_size": 2})
    plan = plan_of(workload_on(cfg, 8, LATENT))
    of_token = 27 * (512 + 64) * 2  # In bfloat16.
    beside = 2 * sizes_of(LATENT).parameters / 2 + (0.6 + 1.0 + 1.5) * GIB
    assert plan.engine.kv_tokens == (plan.alive["rollout"]["engine"] - beside) // of_token


# --------------------------------------------------------------------------------------------------
# adapters


def test_adapters_and_their_base_are_counted_exactly():
    """By hand, for Qwen3-8B: seven linears a layer, of 36 layers."""
    model = sizes_of(BIG, policy=PolicyConfig(lora=QLORA))
    layer = 4096 * (2 * 4096 + 2 * 1024 + 3 * 12288)
    a = 6 * 4096 + 12288
    b = 4096 + 2 * 1024 + 4096 + 2 * 12288 + 4096
    assert sum(num * m.numel for m, num in model.matrices if m.packed) == 36 * layer
    assert model.trained == 36 * 32 * (a + b)
    frozen = 2 * (model.parameters - 36 * layer) + 36 * layer * (1 / 2 + 1 / 64)
    assert frozen == pytest.approx(6.07e9, rel=0.01)
    case = Case(model=BIG, policy={"lora": {"rank": 32, "quantization": "nf4"}})
    training = case.training()
    assert training.parameters == (frozen + 4 * model.trained) / 8
    assert training.optimizer == 8 * model.trained / 8


def test_layers_that_patterns_name_are_counted_one_by_one():
    def trained(*targets, **more):
        lora = LoraConfig(rank=32, targets=list(targets), **more)
        return sizes_of(BIG, policy=PolicyConfig(lora=lora)).trained

    every = trained("attention")
    assert trained("model.layers.[0-2].self_attn.*_proj") == 3 / 36 * every
    assert trained("q_proj", "k_proj", "v_proj", "o_proj") == every
    whole = trained("attention", modules_to_save=["lm_head.*"])
    assert whole == every + BIG.vocab_size * 4096
    assert trained("all-linear") == every + trained("mlp")


def test_frozen_weights_have_neither_gradients_nor_state():
    patterns = ["lm_head.weight", "model.layers.[12].*"]
    frozen = sizes_of(BIG, policy=PolicyConfig(freeze=patterns))
    layer = 4096 * (2 * 4096 + 2 * 1024 + 3 * 12288)
    assert frozen.trained == frozen.parameters - BIG.vocab_size * 4096 - 2 * layer
    some = Case(model=BIG, policy={"freeze": patterns}).training()
    every = Case(model=BIG).training()
    assert some.optimizer / every.optimizer == frozen.trained / frozen.parameters
    assert some.parameters == every.parameters


def test_a_reference_that_is_the_base_is_no_second_model():
    """But a pass of the policy more, until it is another model."""
    known = {"algo__kl_coef": 0.1, "policy__lora": LoraConfig(rank=32)}
    workload = workload_of(**known)
    assert list(workload.models) == ["policy"]
    without = workload_of(**known | {"algo__kl_coef": 0.0})
    assert workload.num_annotations == without.num_annotations + 1
    assert plan_of(workload).seconds["annotate"] > plan_of(without).seconds.get("annotate", 0.0)
    whole = {"policy__lora": LoraConfig(rank=32, modules_to_save=["lm_head.*"])}
    assert list(workload_of(**known | whole).models) == ["policy"]  # With copies of the modules.
    for other in (
        {"policy__lora": LoraConfig()},
        whole | {"ref__model": fits.job("Qwen3-8B").policy.model},
        {"ref__model": "another"},
        {"sft__num_steps": 3},
    ):
        names = list(workload_of(**known | other).models)
        assert names == ["policy", "reference"], other


def test_a_critic_on_the_policy_s_base_saves_it():
    settings = {"algo__advantage": "gae"}
    for section in ("policy", "critic"):
        settings[f"{section}__lora"] = LoraConfig(rank=32)
    settings["critic__lora"] = LoraConfig(rank=16)
    settings |= {"engine__sleep": "all", "tokens_per_rank": 16384}
    apart = plan_of(workload_of(**settings), "h100")
    shared_workload = workload_of(**settings, critic__share_base=True)
    shared = plan_of(shared_workload, "h100")
    base = 2 * (sizes_of(BIG).parameters - BIG.vocab_size * 4096) / 8
    for plan in (apart, shared):
        assert plan.memory["critic, optimizer"] < plan.memory["critic, backward"]
    less = apart.memory["critic, backward"] - shared.memory["critic, backward"]
    assert less == pytest.approx(base, rel=1e-3)
    assert apart.on_host - shared.on_host == pytest.approx(base, rel=1e-3)

    # As advice, on cards that are a GiB too small without it.
    settings |= {
        "engine__tensor_parallel_size": 8,
        "policy__activation_checkpointing": "full",
    }
    large = workload_of("Qwen3-32B", **settings)
    needed = plan_of(large, "h100").memory["critic, backward"] / GIB
    card = dataclasses.replace(cards.CARDS["h100"], memory_gib=(needed - 1) / 0.97)
    advised = advise(large, card, 8)
    sharing = [advice for advice in advised if ("critic.share_base", True) in advice.changes]
    assert sharing
    assert "--critic.share-base" in sharing[0].flags


def test_8b_in_four_bits_fits_24_gb_because_its_base_sleeps_in_a_refit():
    plan = plan_of(workload_of(num_gpus=1, policy__lora=QLORA), "rtx4090")
    assert plan.lacks == ""
    refit = plan.alive["refit"]
    assert refit["parameters"] < 0.4 * GIB < 5 * GIB < plan.alive["optimizer"]["parameters"]
    assert refit["buffers"] == 0
    assert refit["engine's weights"] == 2 * sizes_of(BIG).parameters
    eager = plan_of(
        workload_of(num_gpus=1, policy__lora=QLORA, engine__enforce_eager=True), "rtx4090"
    )
    assert (
        eager.engine.kv_tokens > plan.engine.kv_tokens
        and eager.memory["refit"] < plan.memory["refit"]
    )
    whole = plan_of(workload_of(num_gpus=1), "rtx4090")
    assert "optimizer needs" in whole.lacks


def test_what_cannot_be_with_four_bits_is_no_advice():
    workload = workload_of(policy__lora=QLORA)
    tight = dataclasses.replace(cards.CARDS["h100"], memory_gib=14.0)
    for card in (cards.CARDS["h100"], tight):
        for advice in advise(workload, card, 8):
            assert "parallel.tensor" not in advice.flags and "cpu-offload" not in advice.flags


def test_the_lower_bound_knows_adapters():
    one_gpu = {"num_gpus": 1, "policy__lora": LoraConfig(rank=32)}
    for name, card, settings, fits_it in (
        ("Qwen3-32B", "h100", {}, True),
        ("Qwen3-8B", "rtx4090", {}, True),
        ("Qwen3-32B", "rtx4090", {"policy__lora": QLORA}, True),
        ("Qwen3-32B", "rtx4090", {}, False),
    ):
        workload = workload_of(name, **one_gpu | settings)
        with contextlib.nullcontext() if fits_it else pytest.raises(UserError, match="32.8B"):
            check_lower_bound(plan_of(workload, card))


# --------------------------------------------------------------------------------------------------
# the program


@pytest.fixture
def config_file(tmp_path):
    """A config of a run whose model's folder holds nothing but config.json."""
    BIG.save_pretrained(tmp_path / "model")
    path = tmp_path / "run.yaml"
    path.write_text(
        f"policy: {{model: {tmp_path / 'model'}}}\n"
        "data: {train: rows.jsonl, max_prompt_tokens: 512}\n"
        "rollout: {max_tokens: 1024}\n"
    )
    return path


def run(capsys, monkeypatch, *flags):
    monkeypatch.setattr(sys, "argv", ["plan", *map(str, flags)])
    code = program.main()
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_a_plan_without_weights(capsys, monkeypatch, config_file):
    code, out, err = run(capsys, monkeypatch, "--config", config_file, "--tokens-per-rank", 8192)
    assert (code, err) == (0, "")
    for part in (
        "fits with activation checkpointing off",
        "KV cache of an engine",
        "time of a step",
        "  sleep_wake ",
    ):
        assert part in out


def test_lengths_that_a_run_refuses_are_not_planned(capsys, monkeypatch, config_file):
    code, out, err = run(capsys, monkeypatch, "--config", config_file, "--tokens-per-rank", 10)
    assert (code, out) == (2, "") and "tokens_per_rank = 10" in err
    code, out, err = run(capsys, monkeypatch, "--config", config_file, "--engine.max-model-len", 20)
    assert (code, out) == (2, "") and "engine.max_model_len = 20" in err


def test_a_plan_of_both_kinds_of_ranks(capsys, monkeypatch, config_file):
    split = ["--parallel.generators", 2, "--rollout.overlap", "inflight"]
    code, out, err = run(capsys, monkeypatch, "--config", config_file, *split)
    assert (code, err) == (0, "")
    assert re.search(r"on 8 x h200\n6 trainers: fits .*\n2 generators: fits: .* \(rollout\)\n", out)
    for part in (
        "FSDP over 6",
        "send buffers",
        "KV cache of an engine",
        "that its answers may need",
        "  generators, rollout ",
        "  generators, recompute ",
    ):
        assert part in out
    small = ["--gpu", "h100", "--memory-gb", 17]
    code, out, err = run(capsys, monkeypatch, "--config", config_file, *split, *small)
    assert code == 2 and "2 generators: DOES NOT FIT: " in out


def test_generators_are_compared_with_ranks_that_do_both(capsys, monkeypatch, config_file):
    flags = ["--config", config_file, "--gpus", 4, "--overlap", "--answer-tokens", 300]
    flags += ["--memory-gb", 125]
    code, out, err = run(capsys, monkeypatch, *flags)
    assert (code, err) == (0, "")
    rows = re.findall(r"^ +(\d)((?: +[\d.]+){5})$", out, re.MULTILINE)
    assert [int(generators) for generators, _ in rows] == [1, 2]  # Of 4, 3 leave too few to train.
    best = re.findall(r"^ +([\d.]+) .*  (--\S.*|\(all ranks do both\))$", out, re.MULTILINE)
    assert len(best) == 1 + 3 + 2 + 3
    fastest = min(best, key=lambda row: float(row[0]))
    assert f"\nfastest: {fastest[1]}; the fastest of " in out
    assert "mean 30" in out and "a step: 128 sequences of 512 + 300 tokens" in out
    # Nor is a way compared that the method does not go with.
    code, out, _ = run(capsys, monkeypatch, *flags, "--algo.entropy-share", 0.2)
    assert (
        code == 0 and "  no stream: rollout.overlap = 'stream', algo.entropy_share = 0.2: " in out
    )
    assert not re.search(r"overlap stream", out)


def test_a_simulated_run_has_the_seconds_of_its_plan():
    workload = workload_of(parallel__generators=2, num_gpus=6)
    plan = plan_of(workload)
    job = overlap.job_of(plan, simulation.LogNormal.of_mean(2048, 0.0, 2048), turn_seconds=0.5)
    training = sum(plan.seconds[phase] for phase in ("forward", "backward"))
    assert job.train_seconds == training and job.refit_seconds == plan.seconds["refit"]
    assert (job.num_engines, job.environment_seconds) == (2, 0.5)
    engine = plan.generators.engine
    assert job.slots == int(engine.slots(512 + 1024))
    # Without a tail, and with room for all, a rollout takes what the plan says.
    assert job.slots >= 256
    drawn = simulation.SimulatedRun(dataclasses.replace(job, environment_seconds=0.0))
    assert drawn.wait(drawn.issue(0)) == pytest.approx(engine.seconds(), rel=0.02)


def test_a_lone_token_of_a_mixture_reads_its_own_experts_only():
    cfg = fits.job("Qwen3-30B-A3B")
    engine = plan_of(workload_on(cfg, 8, fits.MODELS["Qwen3-30B-A3B"])).engine
    alone, many = (float(engine.step_seconds(n, 0.0)) for n in (1, 256))
    card = cards.CARDS["h200"]
    assert many == pytest.approx(card.moving(engine.weights), rel=0.01)
    experts = 48 * 3 * 2048 * 768 * 128 * 2
    assert engine.expert_weights == experts
    read = engine.weights - experts * 120 / 128
    assert alone == max(card.moving(read), plans.HOST_SECONDS_PER_STEP + 3.5e-6)


def test_what_does_not_fit_ends_with_2_and_what_to_change(capsys, monkeypatch, config_file):
    flags = ["--config", config_file, "--gpus", 1, "--gpu", "h100"]
    code, out, _ = run(capsys, monkeypatch, *flags)
    assert code == 2
    assert re.search(r"DOES NOT FIT: optimizer needs .* GiB of 76\.8; .* are optimizer\n", out)
    assert "--policy.optimizer-state offload" in out
    assert "time of a step" not in out
    assert "mesh: replicate 1, FSDP over 1, context 1, tensor 1;" in out
    code, out, _ = run(capsys, monkeypatch, *flags, "--memory-gb", 12, "--host-memory-gb", 30)
    assert code == 2
    assert re.search(r"tried make it fit \(.* alone takes .* GiB of 10\.8\): take more GPUs", out)


def test_it_says_that_images_are_left_out(capsys, monkeypatch, config_file, tmp_path):
    folder = tiny.make(tmp_path / "reader", "qwen2_vl")
    flags = ["--config", config_file, "--policy.model", folder]
    code, out, _ = run(capsys, monkeypatch, *flags)
    assert code == 0 and "images are left out" in out
    code, out, _ = run(capsys, monkeypatch, "--config", config_file)
    assert "images are left out" not in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--gpu", "v100"], "--gpu 'v100' is not a known card; choose one of h200, h100"),
        (["--policy.model", "scratch"], "policy.model = scratch is made from the rows"),
        (["--policy.model", ""], "policy.model: name the folder or hub id of the model"),
        (["--policy.model", "/no/such/folder"], "/no/such/folder"),
        (["--gpus", "6", "--parallel.tensor", "4"], "does not divide the 6 ranks"),
        (["--gpus", "3", "--parallel.tensor", "3"], "divide num_attention_heads = 32"),
        (["--parallel.experts", "2"], "does not divide the 0 experts of the policy"),
        (["--gpus", "0"], "--gpus 0 must be at least 1"),
        (["--gpus", "1000000"], "--gpus 1000000 must be at most 100000"),
        (["--lengths", "/no/such"], "--lengths is read by --overlap; give that, too"),
        (["--gpus-per-node", "0"], "--gpus-per-node 0 must be at least 1"),
        (["--tflops", "nan"], "--tflops nan must be a number from 0 on"),
        (["--memory-gb", "-5"], "--memory-gb -5.0 must be a number from 0 on"),
        (["--answer-tokens", "-5"], "--answer-tokens -5 must be a number from 0 on"),
        (["--answer-tokens", "10000000"], "--answer-tokens 10000000: env.max_tokens ="),
        (["--prompt-tokens", "10000000"], "--prompt-tokens 10000000: data.max_prompt_tokens ="),
        (["--overlap", "--lengths", "/no/such"], "--lengths /no/such has no dumped rollouts"),
        (["--rollout.overlap", "inflight"], "set parallel.generators"),
        (["--gpus", "3", "--engine.tensor-parallel-size", "2"], "does not divide --gpus 3"),
        (["--parallel.generators", "8"], "parallel.generators = 8: of --gpus 8 some must train"),
        (["--rollout.overlap", "inflight"], "overlap = 'inflight', parallel.generators = 0: it is"),
        (["--parallel.generators", "2", "--parallel.tensor", "4"], "does not divide the 6 ranks"),
        (
            ["--parallel.generators", "2", "--engine.tensor-parallel-size", "4"],
            "does not divide parallel.generators = 2",
        ),
        (["--config", "no.yaml"], "no such file"),
        # What the program would refuse.
        (["--algo.updates-per-step", "3"], "the first does not divide the second"),
        (["--rollout.top-p", "0.9"], "cannot reproduce log-probs of a truncated distribution"),
        (["--overlap", "--answer-sigma", "40"], "--answer-sigma 40 must be at most 5"),
    ],
)
def test_mistakes_get_one_message(capsys, monkeypatch, config_file, flags, message):
    code, out, err = run(capsys, monkeypatch, "--config", config_file, *flags)
    assert (code, out) == (2, "")
    assert err.startswith("minirl: error: ") and message in err and "Traceback" not in err


def test_averages_of_supervised_rows_fit_them(capsys, monkeypatch, config_file):
    model = load_config(RLConfig, str(config_file)).policy.model
    flags = ["--program", "sft", "--policy.model", model, "--data.max-tokens", "2048"]
    for averages, code in ((["--prompt-tokens", "2048"], 2), (["--prompt-tokens", "2047"], 0)):
        found, _, err = run(capsys, monkeypatch, *flags, *averages)
        assert found == code
        assert ("data.max_tokens = 2048 is the longest" in err) == (code == 2)


@pytest.mark.parametrize(
    ("rollout", "case", "flags"),
    [
        (
            {"ahead": 16},
            overlap.Case("lockstep", 2),
            "--rollout.overlap lockstep --rollout.ahead 0",
        ),
        (
            {"ahead": 16},
            overlap.Case("ahead", 0, 1, 8),
            "--rollout.ahead 8 --rollout.max-staleness 1",
        ),
        ({"kv": "keep"}, overlap.Case("stream", 2), "stream --rollout.kv recompute"),
        ({"kv": "keep"}, overlap.Case("inflight", 2, 1), "inflight --rollout.max-staleness 1"),
        ({}, overlap.Case("stream", 2), "stream --engine.sleep auto"),
        ({}, overlap.Case("colocated"), "(all ranks do both)"),
    ],
)
def test_flags_of_a_case_take_back_what_it_refuses(rollout, case, flags):
    cfg = RLConfig(rollout=RolloutConfig(**rollout))
    cfg.engine.sleep = "all" if not rollout else "auto"
    assert overlap.flags_of(case, cfg).endswith(flags)


@pytest.mark.parametrize(
    ("text", "named", "program_name"),
    [
        ("rollout: {max_tokens: 8}", "a.yaml", "rl"),
        ("data: {messages_key: m}", "a.yaml", "sft"),
        ("algo: {beta: 0.1}", "my_dpo.yaml", "dpo"),
        ("algo: {beta: 0.1}", "my_kto.yaml", "kto"),
        ("algo: {label_smoothing: 0.1}", "a.yaml", "dpo"),
        ("data: {label_key: good}", "a.yaml", "kto"),
        ("algo: {center_coef: 0.1}", "a.yaml", "rm"),
        ("num_steps: 3", "my_sft.yaml", "sft"),
        ("num_steps: 3", "a.yaml", "rl"),
    ],
)
def test_the_program_is_the_one_that_has_the_settings(tmp_path, text, named, program_name):
    path = tmp_path / named
    path.write_text(text)
    assert program.guess_program(str(path)) == program_name


def test_a_device_is_found_by_its_name():
    card = cards.of_device("NVIDIA H100 80GB HBM3", 79 * GIB)
    assert (card.name, card.memory_gib, card.bandwidth_gb) == ("h100", 79.0, 3350)
    assert cards.of_device("NVIDIA GeForce RTX 4090", 23 * GIB).name == "rtx4090"
    assert "taken for" in cards.of_device("NVIDIA B300", 270 * GIB).name
    for device, name in (
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA H20", "h20"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA GeForce RTX 5090", "rtx5090"),
        ("AMD Instinct MI300X", "mi300x"),
    ):
        assert cards.of_device(device, 20 * GIB).name == name
        assert cards.find_card(name) == cards.named(device)
    for alias, name in (("a100", "a100-80"), ("4090", "rtx4090"), ("5090", "rtx5090")):
        assert cards.find_card(alias).name == name
    assert cards.find_card("H100").name == "h100"
