"""Low-rank adapters: on every mesh as in one process, merged as PEFT merges them."""

import pytest
import torch
from peft import PeftModel
from torch import nn
from transformers import AutoModelForCausalLM

import tiny
from harness import ranks
from minirl.algo import losses
from minirl.batch.exchange import exchange
from minirl.checkpoint.exporting import export, export_adapter
from minirl.checkpoint.reading import saved_shapes
from minirl.checkpoint.state import Saver, load_checkpoint
from minirl.config.policy import LoraConfig, ParallelConfig, PolicyConfig
from minirl.config.rl import AlgoConfig
from minirl.config.shared import CheckpointConfig
from minirl.model import build, trained
from minirl.model.adapters import lora
from minirl.parallel.fsdp import local
from minirl.parallel.regions import local_region
from minirl.train.policy import Policy
from sharded import whole
from test_families import stay_float64
from test_gradients import batches_of, rows_of_micro, trajectories, worst


def fill(policy):
    """Give what is trained numbers that do not depend on the mesh."""
    for name, p in policy.model.named_parameters():
        if p.requires_grad:
            offset, size = local_region(p)
            values = torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name)))
            part = tuple(slice(o, o + s) for o, s in zip(offset, size, strict=True))
            local(p.detach()).copy_(values[part] / 10)


def exact(folder, **settings):
    """Return the config of adapters whose updates two meshes can be compared by."""
    stay_float64()
    return PolicyConfig(
        model=str(folder),
        dtype="float64",
        max_grad_norm=0.0,
        adam_eps=1e-3,  # A smaller one blows up the rounding of small gradients.
        **({"lora": LoraConfig(rank=4, alpha=8)} | settings),
    )


def two_steps(mesh, folder, sequence, settings):
    """Return second gradients, adapters, and merged shards and averages after two updates."""
    cfg = exact(folder, ema_decay=0.5, **settings)
    policy = Policy(cfg, folder, mesh, sequence_parallel=sequence)
    grads = {}
    take = policy.optimizer.step

    def keep_gradients():
        trained = {n: p.grad for n, p in policy.model.named_parameters() if p.requires_grad}
        grads.update(whole(trained))
        take()

    policy.optimizer.step = keep_gradients
    for _ in range(2):
        own = trajectories()[mesh.rank :: mesh.world_size]
        (micros,) = (
            exchange(own, mesh, rows_of_micro(mesh.data_size))
            if mesh.world_size > 1
            else [[[t] for t in own]]
        )
        policy.update(batches_of(micros, policy, 0.7), losses.policy(AlgoConfig(), 20), lr=1e-2)
    merged = policy.merged()
    with policy.state_awake():
        averages = policy.averages()
        averages = whole({n: averages[n] for n in averages})
    return {
        "grads": grads,
        "adapters": whole({n: p for n, p in policy.model.named_parameters() if lora.is_adapter(n)}),
        "merged": whole({n: merged[n] for n in merged}),
        "averages": averages,
        "moments": sum(len(part.state) for part in policy.optimizer.parts),
    }


TWO = ParallelConfig(tensor=2)
MESHES = {
    "dp2": (2, None, False),
    "tp2_sequence": (2, ParallelConfig(tensor=2, sequence=True), True),
    "dp2_tp2": (4, TWO, False),
    "ring2": (2, ParallelConfig(context=2, context_engine="ring"), False),
    "cp2_tp2": (4, ParallelConfig(context=2, tensor=2), False),
    "hsdp": (4, ParallelConfig(replicate=2), False),
    "tp4": (4, ParallelConfig(tensor=4), False),
}
# By name: a mesh, and settings that change nothing, or that one process has too.
SAME = {
    "checkpointing": ("tp2_sequence", {"activation_checkpointing": "full"}),
    "selective": ("dp2", {"activation_checkpointing": "selective"}),
    "offload": ("dp2", {"optimizer_state": "offload"}),
    "offload_all": ("dp2", {"cpu_offload": True}),
}
MUON_MESHES = ("dp2_tp2", "hsdp")
WHAT = ("grads", "adapters", "merged", "averages")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.make(tmp_path_factory.mktemp("lora") / "m", "qwen3", dtype=torch.float64)


@pytest.fixture(scope="module")
def alone(folder):
    (one,) = ranks(1, two_steps, folder, False, {})
    return one


def compare(got, alone):
    for what in WHAT:
        assert got[what].keys() == alone[what].keys()
        assert worst(got[what], alone[what]) < 1e-12, what
    assert got["moments"] == len(got["adapters"])
    # The average lags behind just where there are adapters.
    lags = {n for n in got["merged"] if not torch.equal(got["merged"][n], got["averages"][n])}
    assert lags == {lora.weight_of(n) for n in got["adapters"]}


@pytest.mark.parametrize("name", MESHES)
def test_every_mesh_trains_adapters_as_one_process(name, folder, alone):
    world, parallel, sequence = MESHES[name]
    got = ranks(world, two_steps, folder, sequence, {}, parallel=parallel)[0]
    compare(got, alone)


def test_adapters_of_a_hybrid_are_those_of_one_process(tmp_path):
    """Of gated delta nets, gated attention and experts."""
    hybrid = tiny.make(tmp_path / "model", "qwen3_next", dtype=torch.float64)
    (one,) = ranks(1, two_steps, hybrid, False, {})
    assert any("linear_attn" in adapter for adapter in one["adapters"])
    world, parallel, sequence = MESHES["tp2_sequence"]
    compare(ranks(world, two_steps, hybrid, sequence, {}, parallel=parallel)[0], one)


@pytest.mark.parametrize("name", SAME)
def test_settings_of_memory_train_adapters_alike(name, folder, alone):
    mesh, settings = SAME[name]
    world, parallel, sequence = MESHES[mesh]
    got = ranks(world, two_steps, folder, sequence, settings, parallel=parallel)[0]
    compare(got, alone)


def test_muon_trains_adapters_on_meshes_as_in_one_process(folder):
    settings = {"optimizer": "muon"}
    (alone,) = ranks(1, two_steps, folder, False, settings)
    for name in MUON_MESHES:
        world, parallel, sequence = MESHES[name]
        got = ranks(world, two_steps, folder, sequence, settings, parallel=parallel)[0]
        compare(got, alone)


def save_and_go_on(mesh, folder, run, resume):
    """Make two updates, with a checkpoint between them; or resume from it and make the second."""
    lora_and_norm = LoraConfig(rank=4, alpha=8, modules_to_save=["model.norm.weight"])
    policy = Policy(exact(folder, lora=lora_and_norm), folder, mesh)
    checkpoints = CheckpointConfig(every=1)

    def update():
        own = trajectories()[mesh.rank :: mesh.world_size]
        (micros,) = exchange(own, mesh, rows_of_micro(mesh.data_size))
        policy.update(batches_of(micros, policy, 0.7), losses.policy(AlgoConfig(), 20), lr=1e-2)

    if resume:
        load_checkpoint(run / "checkpoints/step-1", policy)
    else:
        update()
        with Saver(run, checkpoints, policy) as saver:
            saver.save(1, {})
    update()
    export(policy, run / f"model{resume:d}")
    return whole({n: p for n, p in policy.model.named_parameters() if p.requires_grad})


def test_checkpoints_hold_adapters_and_move_between_meshes(tmp_path, folder):
    after = ranks(2, save_and_go_on, folder, tmp_path, False)[0]
    assert "model.norm.weight" in after
    again = ranks(2, save_and_go_on, folder, tmp_path, True)[0]
    assert all(torch.equal(after[n], again[n]) for n in after)
    parallel = ParallelConfig(tensor=2)
    other = ranks(2, save_and_go_on, folder, tmp_path, True, parallel=parallel)[0]
    assert worst(other, after) < 1e-12
    saved = saved_shapes(tmp_path / "checkpoints/step-1", "")
    assert {n for n in saved if not n.startswith("optimizer")} == set(after)


@pytest.mark.parametrize("name", ["tp2_sequence", "dp2_tp2"])
def test_every_mesh_trains_adapters_of_experts_as_one_process(name, mixture):
    folder, alone = mixture
    world, parallel, sequence = MESHES[name]
    got = ranks(world, two_steps, folder, sequence, {}, parallel=parallel)[0]
    assert any("experts" in name for name in got["adapters"])
    compare(got, alone)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    folder = tiny.make(tmp_path_factory.mktemp("moe") / "m", "qwen3_moe", dtype=torch.float64)
    (one,) = ranks(1, two_steps, folder, False, {})
    return folder, one


# --------------------------------------------------------------------------------------------------
# PEFT's files


def write_trained(mesh, folder, run, cfg):
    """Fill the adapters with numbers, write them, and the merged model."""
    policy = Policy(cfg, folder, mesh)
    fill(policy)
    export_adapter(policy, run / "adapter")
    export(policy, run / "model")
    logprobs = {}
    batches = batches_of([[t] for t in trajectories()[:3]], policy, 1.0)
    policy.annotate([batches], "old_logprobs")
    logprobs["merged"] = [batch.old_logprobs for batch in batches]
    with policy.without_adapters():
        policy.annotate([batches], "old_logprobs")
    logprobs["base"] = [batch.old_logprobs for batch in batches]
    return logprobs


def config_of(folder, **lora_settings):
    settings = {"rank": 4, "alpha": 8} | lora_settings
    return PolicyConfig(model=str(folder), dtype="float64", lora=LoraConfig(**settings))


def plain_logprobs(mesh, folder):
    """Return the log-probs of a model without adapters."""
    cfg = PolicyConfig(model=str(folder), dtype="float64")
    policy = Policy(cfg, folder, mesh, trainable=False)
    batches = batches_of([[t] for t in trajectories()[:3]], policy, 1.0)
    policy.annotate([batches], "old_logprobs")
    return [batch.old_logprobs for batch in batches]


def read_back(mesh, folder, cfg):
    policy = Policy(cfg, folder, mesh)
    return whole({n: p for n, p in policy.model.named_parameters() if p.requires_grad})


@pytest.mark.parametrize(
    "family, rank",
    [
        *(("qwen3", 4), ("qwen3_moe", 4), ("gemma4_text", 4)),
        # With a shared expert; with layers that are no mixtures.
        *(("hunyuan_v1_moe", 4), ("deepseek_v3", 4)),
        ("qwen3", 80),  # More than the 64 columns of most of its matrices.
    ],
)
def test_peft_reads_the_adapter_and_merges_it_alike(tmp_path, family, rank):
    folder = tiny.make(tmp_path / "m", family, dtype=torch.float64)
    cfg = config_of(folder, rank=rank)
    logprobs = ranks(2, write_trained, folder, tmp_path, cfg)[0]

    # 1. PEFT's merge is ours.
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    adapted = PeftModel.from_pretrained(base, tmp_path / "adapter", autocast_adapter_dtype=False)
    theirs = adapted.merge_and_unload().state_dict()
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float64)
    for name, weight in ours.state_dict().items():
        assert (theirs[name] - weight).abs().max() <= 1e-15, name

    # 2. So are the log-probs: with adapters those of the merged model, without them the base's.
    for kind, path in (("merged", tmp_path / "model"), ("base", folder)):
        (expected,) = ranks(1, plain_logprobs, path)
        for a, b in zip(logprobs[kind], expected, strict=True):
            assert (a - b).abs().max() < 1e-12

    # 3. What was written is read, on another mesh.
    again = config_of(folder, rank=rank, adapter=str(tmp_path / "adapter"))
    mesh = ParallelConfig(tensor=2)
    for name, p in ranks(2, read_back, folder, again, parallel=mesh)[0].items():
        values = torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name)))
        assert torch.equal(p, (values / 10).double()), name


@pytest.mark.parametrize(
    "family", ["qwen2_moe", "hunyuan_v1_moe", "qwen3_next", "qwen3_5_moe_text"]
)
def test_routers_and_gates_of_few_outputs_get_no_adapter_by_themselves(tmp_path, family):
    config = build.read_config(tiny.make(tmp_path / family, family))
    model = build.make_meta_model(config, torch.float32, score=False)
    names = trained.target_names(model, ["all-linear"], "policy.lora.targets")
    last = {name.rpartition(".")[2] for name in names}
    assert last >= {"q_proj", "experts"} and not last & set(trained.GATES)
    linears = {n.rpartition(".")[2] for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    assert linears - last - {"lm_head"} <= set(trained.GATES) and linears & set(trained.GATES)
