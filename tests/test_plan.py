"""The planner: its formulas against dry runs of real sizes, what it says, advises and refuses.

What the dry run counts is tested in `test_dryrun.py`."""

import contextlib
import dataclasses
import math
import re
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoConfig,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    Glm4MoeConfig,
    LlamaConfig,
    PretrainedConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

import tiny
from benchmarks import fits
from harness import ranks
from minirl.base.errors import UserError
from minirl.batch.packing import pack
from minirl.config.parse import fill_config
from minirl.config.policy import LoraConfig, ParallelConfig, PolicyConfig
from minirl.model import build
from minirl.plan import __main__ as program
from minirl.plan import (
    announce,
    cards,
    command,
    estimate,
    formulas,
    kinds,
    memory,
    page,
    pretend,
)
from minirl.plan.advice import advise, with_setting
from minirl.plan.dryrun import trajectories
from minirl.plan.flags import _guess_program, read_flags
from minirl.plan.load import Load
from minirl.plan.planner import GIB, check_lower_bound
from minirl.plan.shape import cut, layer_counts, read_shape
from minirl.plan.workload import Lengths, rl_workload, with_settings
from minirl.train.policy import Policy
from minirl.types.blocks import CHUNK

NUM_LAYERS = 3
LOAD = Load(tokens=8192)
LLAMA = LlamaConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=NUM_LAYERS,
    num_attention_heads=32,
    num_key_value_heads=8,
)
BIG = fits.MODELS["Qwen3-8B"]
SMALL = fits.MODELS["Qwen3-0.6B"]
MIXTURE = fits.MODELS["Qwen3-30B-A3B"]
HYBRID = Qwen3_5TextConfig(  # As Qwen3.5-27B, but for its vocabulary.
    vocab_size=151936,
    hidden_size=5120,
    intermediate_size=17408,
    num_hidden_layers=64,
    num_attention_heads=24,
    num_key_value_heads=4,
    head_dim=256,
    linear_num_key_heads=16,
    linear_num_value_heads=48,
)
HYBRID_MIXTURE = Qwen3NextConfig()  # Whose values are those of Qwen3-Next-80B-A3B.


@dataclasses.dataclass
class Case:
    """A model with few layers, and what is done with it."""

    model: object
    policy: dict = dataclasses.field(default_factory=dict)
    parallel: dict = dataclasses.field(default_factory=dict)
    load: Load = dataclasses.field(default_factory=lambda: LOAD)
    loss: str = "policy"
    share_base: bool = False
    times: bool = True  # Seconds are compared, too.
    num_layers: int = NUM_LAYERS

    def config(self):
        """Return the config of the model with few layers."""
        return cut(self.model, self.num_layers)


def checkpointing(which, **settings):
    return {"activation_checkpointing": which, "accumulate": "sharded", **settings}


LORA = {"rank": 32}
BFLOAT16 = {"dtype": "bfloat16"}
NF4 = {"quantization": "nf4"}
ATTENTION = {"targets": ["attention"]}
CASES = {
    "off": Case(BIG, checkpointing("off")),
    "selective": Case(BIG, checkpointing("selective")),
    "full": Case(BIG, checkpointing("full")),
    "the library's modules": Case(LLAMA, checkpointing("off", kernels="torch")),
    "whole gradients": Case(BIG, checkpointing("off", accumulate="whole")),
    "one micro-batch, tied head": Case(
        SMALL, checkpointing("off"), load=dataclasses.replace(LOAD, num_micro=1)
    ),
    "mixture": Case(MIXTURE, checkpointing("selective")),
    "experts over four ranks": Case(MIXTURE, checkpointing("selective"), {"experts": 4}),
    "two tensor-parallel ranks": Case(BIG, checkpointing("selective"), {"tensor": 2}),
    # The library's merging of blocks over a context is counted generously.
    "two context ranks": Case(
        BIG,
        checkpointing("selective"),
        {"context": 2},
        Load(tokens=16384, sequence=4096),
        times=False,
    ),
    "8 bits": Case(BIG, checkpointing("off", optimizer_state="8bit")),
    "score head": Case(BIG, checkpointing("off"), loss="value", times=False),
    "pairs": Case(
        BIG,
        checkpointing("off"),
        load=dataclasses.replace(LOAD, samples=2, whole_groups=True),
        loss="dpo",
    ),
    "adapters": Case(BIG, checkpointing("full", lora=LORA)),
    "adapters of experts": Case(MIXTURE, checkpointing("selective", lora=LORA)),
    "four bits": Case(BIG, checkpointing("off", lora=LORA | NF4)),
    # Not all copies of tokens that travel are counted.
    "mixture in four bits over four ranks": Case(
        MIXTURE,
        checkpointing("full", lora=LORA | NF4),
        {"experts": 4},
        times=False,
        num_layers=4,
    ),
    "mixture in four bits": Case(MIXTURE, checkpointing("full", lora=LORA | NF4)),
    "critic on a shared base": Case(
        BIG, checkpointing("off", lora=LORA | ATTENTION), loss="value", share_base=True
    ),
    # Of four layers the last one has attention.
    "hybrid": Case(HYBRID, checkpointing("off"), num_layers=4),
    "hybrid, full checkpointing": Case(HYBRID, checkpointing("full"), num_layers=4),
    "hybrid mixture": Case(HYBRID_MIXTURE, checkpointing("selective"), num_layers=4),
    # Copies around the gathering of queries, keys and values are not counted.
    "hybrid, two tensor-parallel ranks": Case(
        HYBRID, checkpointing("selective"), {"tensor": 2}, times=False, num_layers=4
    ),
}


FROZEN = {
    "frozen": Case(
        BIG,
        checkpointing("off", freeze=["lm_head.weight", "model.layers.[12].*"]),
        num_layers=4,
    ),
    "frozen, whole gradients": Case(
        BIG,
        checkpointing("off", freeze=["model.embed_tokens.weight"]) | {"accumulate": "whole"},
    ),
}


@pytest.fixture(scope="module")
def dry_runs(tmp_path_factory):
    """The results of all cases, from one process."""
    if not pretend.compiler():
        pytest.skip("a dry run needs g++, which is not installed")
    jobs = []
    for case in (CASES | FROZEN).values():
        folder = tmp_path_factory.mktemp("model")
        case.config().save_pretrained(folder)
        jobs.append(
            {
                "folder": str(folder),
                "load": dataclasses.asdict(case.load),
                "policy": case.policy | BFLOAT16,
                "parallel": case.parallel,
                "loss": case.loss,
                "share_base": case.share_base,
            }
        )
    return dict(zip(CASES | FROZEN, estimate.run_dry(jobs), strict=True))


def cost_of(case):
    policy = fill_config(PolicyConfig, case.policy | BFLOAT16)
    return formulas.cost(
        memory.Job(
            shape=read_shape(case.config(), score=case.loss == "value", policy=policy),
            card=cards.CARDS["h200"],
            gpus_per_node=8,
            world_size=8,
            policy=policy,
            parallel=fill_config(ParallelConfig, case.parallel),
            load=case.load,
            loss=case.loss,
            shares_base=case.share_base,
            liger=policy.kernels != "torch",
            checkpointing=policy.activation_checkpointing,
        )
    )


@pytest.mark.parametrize("name", CASES)
def test_formulas_are_the_dry_run_within_3_percent(dry_runs, name):
    case = CASES[name]
    result = dry_runs[name]
    cost = cost_of(case)
    near = {"rel": 0.03}
    assert cost.parameters == pytest.approx(result["parameter_bytes"], **near)
    if cost.optimizer:
        assert cost.optimizer == pytest.approx(result["optimizer_bytes"], **near)
    for phase in ("forward", "backward", "optimizer"):
        found = result["phases"][phase]
        peak = found["peak"] - found["kinds"].get(kinds.BASE, 0)  # What the policy holds.
        assert cost.peaks[phase] == pytest.approx(peak, rel=0.03, abs=2**20), phase
    if case.times:
        device = 0.0
        for phase in ("forward", "backward"):
            work = result["phases"][phase]["work"]
            device += sum(w["seconds"] for kind, w in work.items() if kind not in ("NCCL", "PCIe"))
        seconds = cost.seconds["forward"] + cost.seconds["backward"]
        assert seconds * result["num_micro"] == pytest.approx(device, **near)
        sent = result["phases"]["backward"]["work"]["NCCL"]["bytes"]
        assert cost.wire["backward"] * result["num_micro"] == pytest.approx(sent, **near)


@pytest.mark.parametrize("name", FROZEN)
def test_frozen_weights_have_neither_gradients_nor_state(dry_runs, name):
    """What rests is exact; the peaks of a step count the largest matrices as if they were trained,
    so they are bounds."""
    case = FROZEN[name]
    result = dry_runs[name]
    cost = cost_of(case)
    trained = cost_of(dataclasses.replace(case, policy=case.policy | {"freeze": []}))
    assert cost.parameters == pytest.approx(result["parameter_bytes"], rel=0.03)
    assert cost.optimizer == pytest.approx(result["optimizer_bytes"], rel=0.03)
    assert cost.optimizer < 0.95 * trained.optimizer
    assert cost.peaks["optimizer"] == pytest.approx(result["phases"]["optimizer"]["peak"], rel=0.03)
    for phase in ("forward", "backward"):
        peak = result["phases"][phase]["peak"]
        assert 0.97 * peak < cost.peaks[phase] < 1.2 * peak, phase
        assert cost.peaks[phase] < trained.peaks[phase]


SHORT = {
    "hidden_size": 64,
    "num_hidden_layers": 13,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}
LIKE_31B = {
    "num_hidden_layers": 18,
    "hidden_size_per_layer_input": 0,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
}
EXPERTS = {
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
}


@pytest.mark.parametrize(
    ("config", "few_and_more"),
    [
        (Qwen3Config(**SHORT), (2, 4)),
        (Gemma2Config(**SHORT), (3, 5)),  # every second layer a window
        (Gemma3TextConfig(**SHORT), (7, 13)),  # every sixth layer none
        (Gemma4TextConfig(**SHORT, num_kv_shared_layers=6, use_double_wide_mlp=True), (13, 13)),
        (Gemma4TextConfig(**SHORT | LIKE_31B), (6, 12)),  # heads of two sizes
        (Gemma4TextConfig(**SHORT | LIKE_31B | EXPERTS), (6, 12)),
        (Qwen3MoeConfig(**SHORT, decoder_sparse_step=2), (3, 5)),
        (Glm4MoeConfig(**SHORT, first_k_dense_replace=3), (5, 7)),
        (Qwen3_5TextConfig(**SHORT), (5, 9)),  # every fourth layer has attention
    ],
    ids=lambda value: value.model_type if isinstance(value, PretrainedConfig) else "",
)
def test_parameters_are_counted_from_a_few_layers(config, few_and_more):
    model = build.make_meta_model(config, torch.float32, score=False)
    assert read_shape(config).parameters == sum(p.numel() for p in model.parameters())
    assert layer_counts(config) == few_and_more


def test_experts_beside_an_mlp_are_counted():
    shape = read_shape(Gemma4TextConfig(**SHORT | LIKE_31B | EXPERTS, intermediate_size=96))
    assert (shape.experts, shape.experts_of_token, shape.expert) == (4, 2, 32)
    assert shape.expert_parameters == 4 * 3 * 32 * SHORT["hidden_size"]
    assert shape.feed_forward == 96


def workload_of(name="Qwen3-8B", num_gpus=8, **settings):
    cfg = fits.job(name)
    for setting, value in settings.items():
        cfg = with_setting(cfg, setting.replace("__", "."), value)
    return rl_workload(cfg, num_gpus, {"policy": fits.MODELS[name]})


def plan_of(workload, card="h200"):
    models = estimate.Models(workload)
    return estimate.by_formulas(workload, models, cards.CARDS[card], 8)


def test_formulas_take_less_than_a_tenth_of_a_second():
    workload = workload_of("Qwen3-32B")
    plan_of(workload)  # imports
    began = time.process_time()
    plan_of(workload)
    assert time.process_time() - began < 0.1


def test_auto_is_the_first_checkpointing_that_fits():
    chosen = [plan_of(workload_of(), card).checkpointing for card in ("h200", "h100")]
    assert chosen == ["off", "selective"]
    wide = workload_of(policy__activation_checkpointing="off")
    assert "backward needs" in plan_of(wide, "h100").lacks


@pytest.mark.parametrize(("name", "card"), [("Qwen3-32B", "h100"), ("Qwen3-1.7B", "rtx4090")])
def test_advice_makes_it_fit_when_it_is_followed(name, card):
    workload = workload_of(name, 1 if card == "rtx4090" else 8)
    models = estimate.Models(workload)
    assert plan_of(workload, card).lacks
    advised = advise(workload, models, cards.CARDS[card], 8, Lengths())
    assert advised
    for advice in advised:
        cfg = workload.cfg
        for setting, value in advice.changes:
            cfg = with_setting(cfg, setting, value)
        followed = with_settings(workload, cfg, Lengths())
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
    shape = read_shape(fits.MODELS["Qwen3-32B"])
    with pytest.raises(UserError, match=r"32\.8B parameters on 4 ranks .* 122\.0 GiB a rank"):
        check_lower_bound(workload, shape, cards.CARDS["h100"])
    check_lower_bound(workload, shape, cards.CARDS["h200"])
    offload = workload_of("Qwen3-32B", 4, policy__optimizer_state="offload")
    check_lower_bound(offload, shape, cards.CARDS["h100"])


def test_a_program_on_cpu_says_what_its_tensors_take(monkeypatch):
    """And refuses what cannot fit the host, before it loads anything."""
    mesh = SimpleNamespace(device=torch.device("cpu"), world_size=2, maxima=lambda values: values)
    monkeypatch.setattr(announce, "_share_of_host", lambda _: 64 * GIB)
    plan, lines = announce.announce(workload_of("Qwen3-0.6B", 2), mesh)
    assert plan.checkpointing == "off"
    assert len(lines) == 3
    assert re.match(r"plan: (fits|may not fit): \d+\.\d\d GiB of tensors a rank of 64\.0", lines[0])
    assert lines[1].startswith("plan: GiB a rank: activations")
    with pytest.raises(UserError, match=r"Qwen3-32B: 32\.8B parameters on 2 ranks of 64\.0 GiB"):
        announce.announce(workload_of("Qwen3-32B", 2), mesh)


def test_a_program_on_a_gpu_says_memory_and_no_time():
    """A roofline is no promise: 1.95 s were announced for a step of 3.14."""
    plan = plan_of(workload_of(), "h100")
    verdict, memory_line, last_line = page.short(plan)
    assert verdict.startswith("plan: fits with activation checkpointing selective: at most")
    assert "of 79.2 GiB: rollout 68.8" in memory_line and "KV cache" in memory_line
    assert "python -m minirl.plan rehearses it" in last_line
    assert not re.search(r"\d s\b|seconds", " ".join([verdict, memory_line, last_line]))
    short_of_memory = plan_of(workload_of("Qwen3-32B"), "h100")
    assert page.short(short_of_memory)[0].startswith("plan: DOES NOT FIT: refit needs")


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
    shape = read_shape(AutoConfig.from_pretrained(folder))
    assert rows == 4 * CHUNK
    # Norms and the convolution are no matrices.
    assert 2 * rows * shape.active_in_layers == pytest.approx(of_matrices, rel=0.01)
    # It does not count how triangular systems are solved for keys and values.
    nets = shape.delta_nets
    solving = 2 * nets.heads * CHUNK * (nets.key_dim + nets.value_dim)
    assert rows * (shape.rule_flops - solving) == of_rule


def test_only_attention_is_more_work_in_longer_sequences():
    """By hand: one of four layers has it; pairs are those of a prompt, a quarter, and an answer."""

    def flops_of_row(sequence):
        load = Load(tokens=8 * sequence, sequence=sequence, prompt=sequence // 4, samples=1)
        case = Case(HYBRID, checkpointing("full"), load=load, loss="value", num_layers=4)
        cost = cost_of(case)
        return cost.flops / load.rows(load.num_answers)

    more = flops_of_row(8192) - flops_of_row(4096)
    assert more == pytest.approx(3.5 * 4 * 24 * 256 * 4096 / 2, rel=0.01)


def test_an_engine_holds_keys_of_attention_and_a_state_of_each_delta_net():
    """By hand, for Qwen3-Next-80B-A3B: 12 layers of the one kind, 36 of the other."""
    cfg = with_setting(fits.job("Qwen3-8B"), "engine.tensor_parallel_size", 2)
    of_token = 12 * 2 * 256 * 2  # One of its two heads, in bfloat16.
    for state_dtype, state_bytes in ((None, 2), ("float32", 4)):
        model = Qwen3NextConfig(mamba_ssm_dtype=state_dtype)
        workload = rl_workload(cfg, 32, {"policy": model})
        plan = plan_of(workload)
        of_sequence = 36 * (8192 * 3 * 2 + 32 * 128 * 128 * state_bytes) / 2
        assert plan.state_tokens == math.ceil(of_sequence / of_token)
    weights = 2 * read_shape(model).parameters / 2
    beside = weights + (0.6 + 1.0 + 1.5) * GIB
    assert plan.kv_tokens == (plan.alive["rollout"]["engine"] - beside) // of_token
    memory_of_page = page._memory(plan)
    assert f"the states of each sequence take as much as {plan.state_tokens:,} of" in memory_of_page
    lines = page.short(plan)
    assert len(lines) == 4
    assert lines[3].startswith("plan: gated delta nets are counted as the kernels of")
    assert page.full(plan, [], "").endswith(lines[3].removeprefix("plan: "))


def test_an_engine_holds_the_latent_vector_of_a_token_on_each_rank():
    """By hand, for DeepSeek-V3's attention in a model of 27 layers, as Moonlight-16B-A3B has."""
    model = DeepseekV3Config(
        vocab_size=163840,
        hidden_size=2048,
        intermediate_size=11264,
        moe_intermediate_size=1408,
        num_hidden_layers=27,
        num_attention_heads=16,
        num_key_value_heads=16,
        n_shared_experts=2,
        n_routed_experts=64,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=6,
        q_lora_rank=None,
        first_k_dense_replace=1,
    )
    assert read_shape(model).parameters == pytest.approx(16e9, rel=0.01)
    cfg = with_setting(fits.job("Qwen3-8B"), "engine.tensor_parallel_size", 2)
    plan = plan_of(rl_workload(cfg, 8, {"policy": model}))
    of_token = 27 * (512 + 64) * 2  # In bfloat16.
    beside = 2 * read_shape(model).parameters / 2 + (0.6 + 1.0 + 1.5) * GIB
    assert plan.kv_tokens == (plan.alive["rollout"]["engine"] - beside) // of_token


# --------------------------------------------------------------------------------------------------
# adapters

QLORA = LoraConfig(rank=32, quantization="nf4")


def test_adapters_and_their_base_are_counted_exactly():
    """By hand, for Qwen3-8B: seven linears a layer, of 36 layers."""
    policy = PolicyConfig(lora=QLORA)
    shape = read_shape(BIG, policy=policy)
    layer = 4096 * (2 * 4096 + 2 * 1024 + 3 * 12288)
    a = 6 * 4096 + 12288
    b = 4096 + 2 * 1024 + 4096 + 2 * 12288 + 4096
    assert shape.adapters.packed == 36 * layer
    assert shape.trained_parameters == shape.adapters.parameters == 36 * 32 * (a + b)
    rest = 2 * (shape.parameters - 36 * layer)
    frozen = shape.frozen_bytes(element=2, master=4)
    assert frozen == rest + 36 * layer * (1 / 2 + 1 / 64)
    assert frozen == pytest.approx(6.07e9, rel=0.01)
    cost = cost_of(Case(BIG, checkpointing("off", lora=LORA | NF4)))
    cut_to = read_shape(cut(BIG, NUM_LAYERS), policy=policy)
    of_cut = cut_to.frozen_bytes(element=2, master=4) + 4 * cut_to.trained_parameters
    assert cost.parameters == of_cut / 8
    assert cost.optimizer == 8 * cut_to.trained_parameters / 8


def test_layers_that_patterns_name_are_counted_one_by_one():
    def adapters(*targets, **more):
        lora = LoraConfig(rank=32, targets=list(targets), **more)
        return read_shape(cut(BIG, 8), policy=PolicyConfig(lora=lora))

    some = adapters("model.layers.[0-2].self_attn.*_proj")
    every = adapters("attention")
    assert some.adapters.parameters == 3 / 8 * every.adapters.parameters
    whole = adapters("attention", modules_to_save=["lm_head.*"])
    assert whole.trained_parameters == every.trained_parameters + BIG.vocab_size * 4096
    assert every.frozen.head and not whole.frozen.head


def test_a_reference_that_is_the_base_is_no_second_model():
    """But a pass of the policy more, until it is another model."""
    known = {"algo__kl_coef": 0.1, "policy__lora": LoraConfig(rank=32)}
    workload = workload_of(**known)
    assert [role.name for role in workload.roles] == ["policy"]
    without = workload_of(**known | {"algo__kl_coef": 0.0})
    assert workload.num_annotations == without.num_annotations + 1
    assert plan_of(workload).seconds["annotate"] > plan_of(without).seconds.get("annotate", 0.0)
    whole = LoraConfig(rank=32, modules_to_save=["lm_head.*"])
    for other in (
        {"policy__lora": LoraConfig()},
        {"policy__lora": whole},
        {"ref__model": "another"},
        {"sft__num_steps": 3},
    ):
        names = [role.name for role in workload_of(**known | other).roles]
        assert names == ["policy", "reference"], other


def test_a_critic_on_the_policy_s_base_saves_it():
    settings = {"algo__advantage": "gae"}
    for section in ("policy", "critic"):
        settings[f"{section}__lora"] = LoraConfig(rank=32)
    settings["critic__lora"] = LoraConfig(rank=16)
    apart = plan_of(workload_of(**settings), "h100")
    shared_workload = workload_of(**settings, critic__share_base=True)
    shared = plan_of(shared_workload, "h100")
    base = 2 * (read_shape(BIG).parameters - BIG.vocab_size * 4096) / 8
    saved = apart.of_shared_base
    assert saved == shared.of_shared_base == pytest.approx(base, rel=1e-3)
    for plan in (apart, shared):
        assert plan.memory["critic, optimizer"] < plan.memory["critic, backward"]
    less = apart.memory["critic, backward"] - shared.memory["critic, backward"]
    assert less == pytest.approx(saved)
    assert apart.on_host - shared.on_host == pytest.approx(saved)
    text = f"{saved / GIB:.1f} GiB a GPU"
    assert f"--critic.share-base would hold the base once, and save {text}" in page._memory(apart)
    assert f"the base is held once, which saves {text}" in page._memory(shared)

    # As advice, on cards that are a GiB too small without it.
    settings |= {
        "engine__tensor_parallel_size": 8,
        "policy__activation_checkpointing": "full",
    }
    large = workload_of("Qwen3-32B", **settings)
    needed = plan_of(large, "h100").memory["critic, backward"] / GIB
    card = dataclasses.replace(cards.CARDS["h100"], memory_gib=(needed - 1) / 0.97)
    advised = advise(large, estimate.Models(large), card, 8, Lengths())
    sharing = [advice for advice in advised if ("critic.share_base", True) in advice.changes]
    assert sharing
    assert "--critic.share-base" in sharing[0].flags


def test_8b_in_four_bits_fits_24_gb_because_its_base_sleeps_in_a_refit():
    plan = plan_of(workload_of(num_gpus=1, policy__lora=QLORA), "rtx4090")
    assert plan.lacks == ""
    refit = plan.alive["refit"]
    assert refit["parameters"] < 0.4 * GIB < 5 * GIB < plan.alive["optimizer"]["parameters"]
    assert refit["buffers"] == 0
    assert refit["engine's weights"] == 2 * read_shape(BIG).parameters
    eager = plan_of(
        workload_of(num_gpus=1, policy__lora=QLORA, engine__enforce_eager=True), "rtx4090"
    )
    assert eager.kv_tokens > plan.kv_tokens and eager.memory["refit"] < plan.memory["refit"]
    whole = plan_of(workload_of(num_gpus=1), "rtx4090")
    assert "optimizer needs" in whole.lacks


def test_what_cannot_be_with_four_bits_is_no_advice():
    workload = workload_of(policy__lora=QLORA)
    tight = dataclasses.replace(cards.CARDS["h100"], memory_gib=14.0)
    for card in (cards.CARDS["h100"], tight):
        for advice in advise(workload, estimate.Models(workload), card, 8, Lengths()):
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
        shape = read_shape(fits.MODELS[name], policy=workload.cfg.policy)
        with contextlib.nullcontext() if fits_it else pytest.raises(UserError, match="32.8B"):
            check_lower_bound(workload, shape, cards.CARDS[card])


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
    code, out, err = run(
        capsys, monkeypatch, "--config", config_file, "--formulas", "--tokens-per-rank", 8192
    )
    assert (code, err) == (0, "")
    for part in (
        "fits with activation checkpointing off",
        "KV cache of an engine",
        "time of a step",
        "GB on the wire",
        "from closed formulas (no dry run: as --formulas asks)",
    ):
        assert part in out


def test_a_plan_by_dry_run(capsys, monkeypatch, config_file):
    if not pretend.compiler():
        pytest.skip("a dry run needs g++, which is not installed")
    flags = ["--config", config_file, "--policy.activation-checkpointing", "full"]
    by_dry_run, _ = command.make_plan(*read_flags([str(flag) for flag in flags]))
    by_formulas, _ = command.make_plan(*read_flags([*(str(flag) for flag in flags), "--formulas"]))
    assert by_dry_run.by_dry_run
    assert by_dry_run.memory == pytest.approx(by_formulas.memory, rel=0.03)
    assert by_dry_run.step_seconds == pytest.approx(by_formulas.step_seconds, rel=0.03)


def test_a_plan_by_dry_run_of_a_model_that_reads_images(capsys, monkeypatch, config_file, tmp_path):
    """What it makes of a few layers is what the whole model takes, its tower included."""
    if not pretend.compiler():
        pytest.skip("a dry run needs g++, which is not installed")
    folder = tiny.make(tmp_path / "reader", "qwen3_vl", num_hidden_layers=6)
    run_dry, full_page = estimate.run_dry, page.full
    results, plans = [], []

    def run_whole_too(jobs):
        results.extend(run_dry([*jobs, jobs[0] | {"folder": str(folder)}]))
        return results[:-1]

    def keep_plan(plan, *more):
        plans.append(plan)
        return full_page(plan, *more)

    monkeypatch.setattr(estimate, "run_dry", run_whole_too)
    monkeypatch.setattr(page, "full", keep_plan)
    code, out, _ = run(capsys, monkeypatch, "--config", config_file, "--policy.model", folder)
    assert code == 0
    assert "from a dry run" in out
    few, more, whole = results
    assert few["parameters"] < more["parameters"] < whole["parameters"]
    for phase in ("forward", "backward"):
        expected = whole["phases"][phase]["kinds"]
        for kind in ("parameters", "gradients", "activations"):
            assert plans[0].alive[phase][kind] == expected[kind]

    (folder / "processor_config.json").unlink()
    code, _, err = run(capsys, monkeypatch, "--config", config_file, "--policy.model", folder)
    assert code == 2
    assert f"the image processor of {folder} (see --formulas) cannot be read" in err


def test_what_does_not_fit_ends_with_2_and_what_to_change(capsys, monkeypatch, config_file):
    flags = ["--config", config_file, "--gpus", 1, "--gpu", "h100", "--formulas"]
    code, out, _ = run(capsys, monkeypatch, *flags)
    assert code == 2
    assert re.search(r"DOES NOT FIT: optimizer needs .* GiB of 76\.8; .* are optimizer\n", out)
    assert "--policy.optimizer-state offload" in out
    assert "time of a step" not in out
    assert "mesh: replicate 1, FSDP over 1, context 1, tensor 1;" in out
    code, out, _ = run(capsys, monkeypatch, *flags, "--memory-gb", 12, "--host-memory-gb", 30)
    assert code == 2
    assert re.search(r"tried make it fit \(.* alone takes .* GiB of 10\.8\): take more GPUs", out)


def test_formulas_say_that_images_are_left_out(capsys, monkeypatch, config_file, tmp_path):
    folder = tiny.make(tmp_path / "reader", "qwen2_vl")
    flags = ["--config", config_file, "--policy.model", folder, "--formulas"]
    code, out, _ = run(capsys, monkeypatch, *flags)
    assert code == 0 and "images are left out" in out
    code, out, _ = run(capsys, monkeypatch, "--config", config_file, "--formulas")
    assert "images are left out" not in out


def test_without_a_compiler_it_says_that_these_are_formulas(capsys, monkeypatch, config_file):
    monkeypatch.setattr(pretend, "compiler", lambda: None)
    code, out, _ = run(capsys, monkeypatch, "--config", config_file)
    assert code == 0
    assert "from closed formulas (no dry run: g++ is not installed)" in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--gpu", "v100"], "--gpu 'v100' is not a known card; choose one of h200, h100"),
        (["--policy.model", "scratch"], "policy.model = scratch is made from the rows"),
        (["--policy.model", "/no/such/folder"], "/no/such/folder"),
        (["--gpus", "6", "--parallel.tensor", "4"], "does not divide the 6 ranks"),
        (["--gpus", "0"], "--gpus 0 must be at least 1"),
        (["--gpus", "3", "--engine.tensor-parallel-size", "2"], "does not divide --gpus 3"),
        (["--config", "no.yaml"], "no such file"),
    ],
)
def test_mistakes_get_one_message(capsys, monkeypatch, config_file, flags, message):
    code, out, err = run(capsys, monkeypatch, "--config", config_file, "--formulas", *flags)
    assert (code, out) == (2, "")
    assert err.startswith("minirl: error: ") and message in err and "Traceback" not in err


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
    assert _guess_program(str(path)) == program_name


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
        assert cards.find_card(name).tflops == cards.peak_tflops(device)
    for alias, name in (("a100", "a100-80"), ("4090", "rtx4090"), ("5090", "rtx5090")):
        assert cards.find_card(alias).name == name
    assert cards.find_card("H100").name == "h100"
