"""Frozen weights: no gradient, no state, bitwise as they were; the others are trained as one
process trains them, on any mesh and with everything that optimizers do with their state."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import tiny
from harness import RankFailed, ranks
from minirl.algo import losses
from minirl.base.errors import UserError
from minirl.batch.exchange import exchange
from minirl.checkpoint import exporting, run_folder
from minirl.config.parse import parse_flags
from minirl.config.policy import ParallelConfig, PolicyConfig
from minirl.config.rl import AlgoConfig, CriticConfig, RLConfig
from minirl.config.supervised import SFTConfig
from minirl.model import build
from minirl.model.trained import frozen_names
from minirl.run import supervised
from minirl.train.policy import Policy
from run_folders import save_config
from sharded import whole
from test_checkpoint import differences
from test_gradients import batches_of, exact_norm, rows_of_micro, trajectories, worst
from test_optimizer import resume, save, state

# Some of a layer and of the root; the model's begin, through which no gradient goes; its end.
SOME = ["*.mlp.down_proj.weight", "model.embed_tokens.weight", "model.layers.1.input_layernorm.*"]
BEGIN = ["model.embed_tokens.*", "model.layers.0.*"]
END = ["lm_head.weight", "model.norm.weight", "model.layers.1.*"]
CASES = {
    "some": {"freeze": SOME, "accumulate": "sharded"},
    "begin": {"freeze": BEGIN, "accumulate": "whole"},
    "begin, recomputed": {"freeze": BEGIN, "activation_checkpointing": "full"},
    "end": {"freeze": END, "accumulate": "sharded", "reshard_after_forward": False},
    "muon": {"freeze": SOME, "optimizer": "muon"},
    "muon, all its matrices": {"freeze": ["model.layers.*_proj.weight"], "optimizer": "muon"},
    "muon alone": {
        "freeze": ["model.embed_tokens.*", "lm_head.*", "*norm.weight"],
        "optimizer": "muon",
        "ema_decay": 0.9,
    },
    "offload": {"freeze": SOME, "optimizer_state": "offload", "ema_decay": 0.9},
    "on the host": {"freeze": BEGIN, "cpu_offload": True},
}
# By name: ranks, their axes, and what is trained on them.
MESHES = {
    "dp 2": (2, ParallelConfig(), tuple(CASES)),
    "tp 2": (2, ParallelConfig(tensor=2), ("some", "end", "muon, all its matrices")),
    "hsdp 2 x 2": (4, ParallelConfig(replicate=2), ("begin", "muon", "offload")),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.make(
        tmp_path_factory.mktemp("model") / "model",
        "llama",
        dtype=torch.float64,
        intermediate_size=90,
    )


def train(mesh, folder, settings):
    """Three updates; the gradients of the first."""
    LlamaRMSNorm.forward = exact_norm
    policy = Policy(PolicyConfig(dtype="float64", max_grad_norm=0.0, **settings), folder, mesh)
    policy.optimizer.elements_at_once = 30_000  # some matrices at a time
    before = whole(policy.shards())
    grads = {}
    step = policy.optimizer.step

    def keep_gradients():
        if policy.num_updates == 0:
            of_all = {name: p.grad for name, p in policy.shards().items()}
            grads.update(whole({name: g for name, g in of_all.items() if g is not None}))
        step()

    policy.optimizer.step = keep_gradients
    own = trajectories()[mesh.rank :: mesh.world_size]
    (micros,) = exchange(own, mesh, rows_of_micro(mesh.data_size))
    batches = batches_of(micros, policy)
    metrics = [policy.update(batches, losses.policy(AlgoConfig(), 20), lr=1e-2) for _ in range(3)]
    with policy.state_awake():
        averages = policy.averages() if policy.cfg.ema_decay else {}
        averages = whole({name: averages[name] for name in averages})
    return {
        "before": before,
        "after": whole(policy.shards()),
        "grads": grads,
        "averages": averages,
        "state": set(state(policy)["optimizer"]["state"]),
        "metrics": metrics,
        "num_micro": len(batches),
    }


def train_all(mesh, folder, cases):
    return [train(mesh, folder, settings) for settings in cases]


@pytest.fixture(scope="module")
def one_process(folder):
    """All cases, and before them training without any that is frozen."""
    (results,) = ranks(1, train_all, folder, [{}, *CASES.values()])
    return dict(zip(["nothing", *CASES], results, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_what_is_frozen_stays_bitwise_and_has_no_gradient_and_no_state(folder, one_process, name):
    everything = one_process["nothing"]["grads"]
    result = one_process[name]
    model = build.make_meta_model(build.read_config(folder), torch.float32, score=False)
    frozen = frozen_names(model, CASES[name]["freeze"], "policy.freeze")
    assert 0 < len(frozen) < len(everything)
    assert result["grads"].keys() == result["state"] == everything.keys() - frozen
    for weight, before in result["before"].items():
        assert torch.equal(result["after"][weight], before) == (weight in frozen), weight
        if weight in result["averages"]:
            assert torch.equal(result["averages"][weight], before) == (weight in frozen), weight
    # The gradients of the others are those of a model that is trained as a whole.
    wanted = {weight: everything[weight] for weight in result["grads"]}
    assert worst(result["grads"], wanted) < 1e-12
    norm = torch.stack([grad.norm() for grad in wanted.values()]).norm().item()
    assert result["metrics"][0]["grad_norm"] == pytest.approx(norm, rel=1e-12)


@pytest.mark.parametrize("mesh", MESHES)
def test_every_mesh_is_one_process(folder, one_process, mesh):
    world, parallel, names = MESHES[mesh]
    cases = [CASES[name] for name in names]
    for results in ranks(world, train_all, folder, cases, parallel=parallel):
        for name, result in zip(names, results, strict=True):
            wanted = one_process[name]
            assert result["num_micro"] >= 2
            assert result["grads"].keys() == wanted["grads"].keys(), name
            assert result["state"] == wanted["state"], name
            assert worst(result["grads"], wanted["grads"]) < 1e-12, name
            assert worst(result["after"], wanted["after"]) < 1e-9, name
            for step, expected in zip(result["metrics"], wanted["metrics"], strict=True):
                assert step["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-9), name


def train_in_8_bits(mesh, folder):
    return train(mesh, folder, {"freeze": SOME, "optimizer_state": "8bit"})


def test_state_of_8_bits(folder, one_process):
    for result in ranks(2, train_in_8_bits, folder):
        wanted = one_process["some"]
        assert result["state"] == wanted["state"]
        for name, before in result["before"].items():
            is_frozen = name not in wanted["grads"]
            assert torch.equal(result["after"][name], before) == is_frozen


@pytest.mark.parametrize("rest", [{"optimizer_state": "8bit"}, {"optimizer": "muon"}])
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(folder, tmp_path, rest):
    settings = {"freeze": SOME, "ema_decay": 0.9, **rest}
    saved, loss, weights = ranks(2, save, folder, tmp_path, settings)[0]
    resumed, resumed_loss, same = ranks(2, resume, folder, tmp_path, settings)[0]
    assert differences(saved, resumed) == []
    assert resumed_loss == loss
    assert differences(weights, same) == []


def test_another_choice_of_frozen_weights_does_not_resume(tmp_path):
    cfg = RLConfig(output=str(tmp_path), resume=True)
    save_config(RLConfig(output=str(tmp_path)), tmp_path / "config.yaml")
    for section in (cfg.policy, cfg.critic):
        section.freeze = SOME
        with pytest.raises(UserError, match=r"freeze = \[.*it decides which weights"):
            run_folder.compare_settings(cfg)
        section.freeze = []


# --------------------------------------------------------------------------------------------------
# exports


def export_after_updates(mesh, folder, output):
    cfg = PolicyConfig(dtype="bfloat16", freeze=SOME, kernels="torch")
    policy = Policy(cfg, folder, mesh)
    batches = batches_of([trajectories()[mesh.rank :: mesh.world_size]], policy)
    for _ in range(2):
        policy.update(batches, losses.policy(AlgoConfig(), 20), lr=1e-1)
    exporting.export(policy, output)


def test_an_export_has_the_very_bytes_of_what_is_frozen(tmp_path):
    folder = tiny.make(tmp_path / "model", "llama", dtype=torch.bfloat16)
    ranks(2, export_after_updates, folder, tmp_path / "exported")
    before = load_file(folder / "model.safetensors")
    after = load_file(tmp_path / "exported/model.safetensors")
    assert before.keys() == after.keys()
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert same == {
        "model.embed_tokens.weight",
        "model.layers.0.mlp.down_proj.weight",
        "model.layers.1.mlp.down_proj.weight",
        "model.layers.1.input_layernorm.weight",
    }


# --------------------------------------------------------------------------------------------------
# patterns


def names_of(folder, patterns):
    model = build.make_meta_model(build.read_config(folder), torch.float32, score=False)
    return frozen_names(model, patterns, "policy.freeze")


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_a_tower_for_images_is_one_pattern(tmp_path, family):
    folder = tiny.make(tmp_path / "model", family)
    in_file = load_file(folder / "model.safetensors")
    tower = {name for name in in_file if ".visual." in f".{name}"}
    frozen = names_of(folder, ["*visual.*"])
    assert len(frozen) == len(tower) > 10


def test_experts_are_frozen_by_the_names_of_their_matrices(tmp_path):
    folder = tiny.make(tmp_path / "model", "qwen3_moe")
    assert names_of(folder, ["model.layers.0.mlp.experts.*"]) == {
        "model.layers.0.mlp.experts.gate_up_proj",
        "model.layers.0.mlp.experts.down_proj",
    }
    assert len(names_of(folder, ["*.mlp.gate.weight"])) == 2  # routers
    with pytest.raises(UserError, match=r"matches 2 of the 8 matrices of experts that are trained"):
        names_of(folder, ["model.layers.0.mlp.experts.1.*"])


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (["*"], r"policy.freeze = \['\*'\] matches all 21 weights of the model, and nothing"),
        (["model.layer.0.*"], r"'model.layer.0.\*' matches no weight .* model.layers.0[, ]"),
        (["lm_heads.weight"], r"close names are lm_head.weight"),
        (["*", "vision_tower.*"], r"'vision_tower.\*' matches no weight of the model"),
        (["MODEL.norm.weight"], r"matches no weight of the model; close names are .*model.norm"),
    ],
)
def test_a_pattern_of_nothing_or_everything_is_refused(folder, patterns, message):
    with pytest.raises(UserError, match=message):
        names_of(folder, patterns)


def make(mesh, folder, cfg, score):
    Policy(cfg, folder, mesh, score=score)


def test_the_critic_has_patterns_of_its_own(folder):
    """They may name its score head, which is in no file of a language model."""
    cfg = CriticConfig(dtype="float64", freeze=["model.*"])
    ranks(1, make, folder, cfg, True)
    cfg.freeze = ["lm_head.weight"]
    with pytest.raises(RankFailed, match=r"critic.freeze: 'lm_head.weight' matches no weight"):
        ranks(1, make, folder, cfg, True)


# --------------------------------------------------------------------------------------------------
# a program


def run(mesh, given):
    flags = [str(x) for x in given]
    supervised.SupervisedTrainer.main(parse_flags(SFTConfig, flags), mesh)


def test_a_program_says_it_before_it_loads_or_writes_and_trains_the_rest(tmp_path):
    rows = "".join(json.dumps({"text": f"number {n} is {n}"}) + "\n" for n in range(20))
    (tmp_path / "rows.jsonl").write_text(rows)
    folder = tiny.make(tmp_path / "model")
    given = [
        *("--output", tmp_path / "run"),
        *("--policy.model", folder),
        *("--policy.dtype", "float32"),
        *("--policy.lr", 1e-2),
        *("--data.train", tmp_path / "rows.jsonl"),
        *("--data.held-out", 4),
        *("--data.max-tokens", 48),
        *("--tokens-per-rank", 128),
        *("--batch-size", 8),
        *("--num-steps", 2),
    ]
    with pytest.raises(RankFailed, match="policy.freeze: 'model.layer.0.*' matches no") as failed:
        ranks(2, run, [*given, "--policy.freeze", "model.layer.0.*"])
    assert failed.value.kind == "UserError"
    assert not (tmp_path / "run").exists()
    ranks(2, run, [*given, "--policy.freeze", "model.layers.0.*", "model.embed_tokens.weight"])
    before = load_file(folder / "model.safetensors")
    after = load_file(tmp_path / "run/model/model.safetensors")
    for name in before:
        is_frozen = name.startswith(("model.layers.0.", "model.embed_tokens"))
        assert torch.equal(before[name], after[name]) == is_frozen, name
