"""Adapters as files: exported, merged or not, and refused where they do not fit."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

import tiny
from harness import RankFailed, ranks
from minirl.checkpoint.__main__ import export_checkpoint
from minirl.checkpoint.exporting import export, export_adapter
from minirl.checkpoint.state import Saver, load_checkpoint
from minirl.config.policy import LoraConfig, PolicyConfig
from minirl.config.rl import RLConfig
from minirl.config.shared import CheckpointConfig, ExportConfig
from minirl.model import build
from minirl.model.adapters import files
from minirl.train.policy import Policy
from run_folders import save_config
from sharded import whole
from test_lora import fill, read_back

SIZES = {"hidden_size": 64, "intermediate_size": 192, "head_dim": 16, "moe_intermediate_size": 64}


def write(mesh, run, cfg, score=False):
    """Write a policy with adapters as a model, as an adapter and as a checkpoint."""
    policy = Policy(cfg.policy, Path(cfg.policy.model), mesh, score=score)
    fill(policy)
    export(policy, run / "live")
    export_adapter(policy, run / "adapter")
    with Saver(run, CheckpointConfig(), policy) as saver:
        saver.save(1, {})
    if mesh.rank == 0:
        save_config(cfg, run / "config.yaml")


def run_command(mesh, cfg):
    export_checkpoint(cfg, mesh)


def start_and_export(mesh, cfg, output):
    export(Policy(cfg, Path(cfg.model), mesh), output)


def config_of(folder, run, dtype, **lora):
    cfg = RLConfig(output=str(run))
    cfg.policy = PolicyConfig(
        model=str(folder), dtype=dtype, lora=LoraConfig(**({"rank": 4, "alpha": 8} | lora))
    )
    return cfg


def weights_of(folder):
    return {n: t for f in sorted(folder.glob("*.safetensors")) for n, t in load_file(f).items()}


def assert_same_weights(folder, other):
    ours, theirs = weights_of(folder), weights_of(other)
    assert ours.keys() == theirs.keys()
    for name, t in ours.items():
        assert t.dtype == theirs[name].dtype
        assert torch.equal(t, theirs[name]), name


KINDS = {
    "dense": ("qwen3", {"modules_to_save": ["model.norm.*"]}, False),
    "experts": ("qwen3_moe", {}, False),
    "nf4": ("qwen3", {"quantization": "nf4"}, False),
    "reward_model": ("qwen3", {"use_rslora": True, "targets": ["attention"]}, True),
}


@pytest.mark.parametrize("kind", KINDS)
def test_export_writes_what_the_policy_exports(tmp_path, kind):
    family, lora, score = KINDS[kind]
    folder = tiny.make(tmp_path / "m", family, dtype=torch.bfloat16, **SIZES)
    run = tmp_path / "run"
    run.mkdir()
    ranks(2, write, run, config_of(folder, run, "bfloat16", **lora), score)

    ranks(1, run_command, ExportConfig(command="export", run=str(run)))
    assert_same_weights(run / "model-step-1", run / "live")
    ranks(2, run_command, ExportConfig(command="export", run=str(run), adapter=True))
    assert_same_weights(run / "adapter-step-1", run / "adapter")
    described = [
        json.loads((run / name / "adapter_config.json").read_text())
        for name in ("adapter-step-1", "adapter")
    ]
    assert described[0] == described[1]


def load_again(mesh, run, cfg):
    load_checkpoint(run / "checkpoints/step-1", Policy(cfg.policy, Path(cfg.policy.model), mesh))


def test_adapters_stay_on_the_weights_that_they_were_trained_on(tmp_path):
    folder = tiny.make(tmp_path / "m", "qwen3", **SIZES)
    cfg = config_of(folder, tmp_path, "float32")
    ranks(1, write, tmp_path, cfg)
    ranks(1, load_again, tmp_path, cfg)
    # Whoever trains the base again in the same folder replaces it.
    shutil.rmtree(folder)
    tiny.make(folder, "qwen3", seed=1, **SIZES)
    for body, given in (
        (load_again, (tmp_path, cfg)),
        (run_command, (ExportConfig(command="export", run=str(tmp_path)),)),
    ):
        with pytest.raises(RankFailed, match="were trained on other weights than .* has now"):
            ranks(1, body, *given)


def test_peft_reads_a_tied_embedding_that_is_trained_whole(tmp_path):
    """As the head, too, which it wraps by itself."""
    folder = tiny.make(tmp_path / "m", "qwen3", dtype=torch.float64, tied=True)
    whole_embedding = {"modules_to_save": ["model.embed_tokens.*"]}
    cfg = config_of(folder, tmp_path, "float64", **whole_embedding)
    ranks(2, write, tmp_path, cfg)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    adapted = PeftModel.from_pretrained(base, tmp_path / "adapter", autocast_adapter_dtype=False)
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "live", dtype=torch.float64)
    tokens = torch.arange(5, 40)[None]
    assert (adapted(tokens).logits - ours(tokens).logits).abs().max() < 1e-12
    again = PolicyConfig(
        model=str(folder),
        dtype="float64",
        lora=LoraConfig(rank=4, alpha=8, adapter=str(tmp_path / "adapter"), **whole_embedding),
    )
    ranks(1, run_command, ExportConfig(command="export", run=str(tmp_path), adapter=True))
    assert_same_weights(tmp_path / "adapter-step-1", tmp_path / "adapter")
    name = "model.embed_tokens.weight"
    read = ranks(1, read_back, folder, again)[0]
    assert torch.equal(read[name], weights_of(tmp_path / "live")[name])

    # As PEFT has them without ensure_weight_tying: the head as it was, or trained apart.
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    head = tensors.pop("base_model.model.lm_head.weight")
    for changed in (tensors, tensors | {"base_model.model.lm_head.weight": head + 1}):
        save_file(changed, file)
        with pytest.raises(RankFailed, match="embedding and head were trained apart"):
            ranks(1, read_back, folder, again)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_an_adapter_of_peft_is_trained_on_and_merged_as_peft_does(tmp_path, dtype):
    folder = tiny.make(tmp_path / "m", "qwen3", dtype=dtype)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    settings = PeftConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"])
    wide = dtype == torch.bfloat16  # PEFT keeps adapters of narrow models in float32
    made = get_peft_model(base, settings, autocast_adapter_dtype=wide)
    torch.manual_seed(0)
    for name, p in made.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(p, std=0.1)
    made.save_pretrained(tmp_path / "adapter")

    lora = LoraConfig(
        rank=4, alpha=8, targets=["q_proj", "down_proj"], adapter=str(tmp_path / "adapter")
    )
    cfg = PolicyConfig(model=str(folder), dtype=str(dtype).removeprefix("torch."), lora=lora)
    ranks(1, start_and_export, cfg, tmp_path / "merged")
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=dtype)
    fresh = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    adapted = PeftModel.from_pretrained(
        fresh, tmp_path / "adapter", autocast_adapter_dtype=wide
    ).merge_and_unload()
    theirs = adapted.state_dict()
    for name, weight in ours.state_dict().items():
        if dtype == torch.float64:
            assert torch.equal(weight, theirs[name]), name
        else:  # one rounding: PEFT rounds B A before it adds it, too
            torch.testing.assert_close(weight, theirs[name], rtol=2**-7, atol=2**-10)

    start = PolicyConfig(model=str(folder), dtype="float64", lora=lora)
    in_file = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    read = ranks(2, read_back, folder, start)[0]
    assert len(read) == len(in_file)
    for name, p in read.items():
        assert torch.equal(p, in_file[f"base_model.model.{name}.weight"].double())


# --------------------------------------------------------------------------------------------------
# a tower for images


def train_tower(mesh, folder, pattern):
    """Return which parameters of a model that reads images are trained."""
    cfg = config_of(folder, folder, "float64", targets=[pattern, "attention"]).policy
    policy = Policy(cfg, folder, mesh)
    fill(policy)
    merged = policy.merged()
    base = whole(policy.shards())
    whole_merged = whole({n: merged[n] for n in merged})
    changed = [n for n, t in whole_merged.items() if not torch.equal(t, base[n])]
    return [n for n, p in policy.model.named_parameters() if p.requires_grad], changed


@pytest.mark.parametrize(
    ("family", "tower", "target"),
    [
        ("qwen2_vl", "visual", "qkv"),
        ("gemma3", "vision_tower", "q_proj"),
        ("gemma4", "vision_tower", "linear"),
    ],
)
def test_a_tower_gets_adapters_by_a_pattern(tmp_path, family, tower, target):
    folder = tiny.make(tmp_path / "m", family, dtype=torch.float64)
    trained, changed = ranks(2, train_tower, folder, f"model.{tower}.*.{target}")[0]
    assert any(tower in name for name in trained)
    assert all("lora_" in name for name in trained)
    assert len(changed) == len(trained) / 2
    in_tower = [name for name in changed if tower in name]
    assert in_tower
    assert all(name.endswith(f"{target}.weight") for name in in_tower)
    assert any("self_attn" in name for name in changed)


# --------------------------------------------------------------------------------------------------
# what does not fit


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Return a folder with a model `m` and its `adapter`."""
    folder = tmp_path_factory.mktemp("files")
    tiny.make(folder / "m", "qwen3")
    ranks(1, write, folder, config_of(folder / "m", folder, "float32"))
    return folder


def start(mesh, model, lora):
    Policy(PolicyConfig(model=str(model), dtype="float32", lora=lora), model, mesh)


@pytest.mark.parametrize(
    "lora, says",
    [
        ({"targets": ["q_proj", "lm_head"]}, "the head lm_head gets no adapter; train it whole by"),
        ({"targets": ["q_porj"]}, "policy.lora.targets: 'q_porj' matches no linear layer"),
        ({"modules_to_save": ["lm_haed.*"]}, "policy.lora.modules_to_save: 'lm_haed.*' matches no"),
        ({"adapter": "ADAPTER", "rank": 8}, "has rank 4, and policy.lora.rank is 8; set"),
        ({"adapter": "ADAPTER", "alpha": 9.0}, "has alpha 8, and policy.lora.alpha is 9"),
        ({"adapter": "ADAPTER", "targets": ["q_proj"]}, "of other targets: it lacks .*has besides"),
        ({"adapter": "MODEL"}, "has no adapter_config.json; give the folder of an adapter"),
        (
            {"quantization": "nf4"},
            r"layers.0.mlp.down_proj.weight has 96 columns, which is no multiple of the 64",
        ),
    ],
)
def test_settings_that_do_not_fit_the_model_are_refused(written, lora, says):
    settings = {"rank": 4, "alpha": 8} | lora
    if "adapter" in lora:
        settings["adapter"] = str(written / ("m" if lora["adapter"] == "MODEL" else "adapter"))
    with pytest.raises(RankFailed, match=says):
        ranks(1, start, written / "m", LoraConfig(**settings))


def test_a_linear_is_adapted_or_trained_whole(tmp_path):
    """Of biases alone, PEFT's files have no form."""
    folder = tiny.make(tmp_path / "m", "qwen2")
    whole = LoraConfig(rank=4, targets=["q_proj"], modules_to_save=["*.q_proj.bias"])
    says = (
        r"modules_to_save = .* names a part of model.layers.0.self_attn.q_proj, which policy.lora"
    )
    with pytest.raises(RankFailed, match=says):
        ranks(1, start, folder, whole)
    others = LoraConfig(rank=4, targets=["o_proj"], modules_to_save=["*.q_proj.bias"])
    ranks(1, start, folder, others)


def test_a_base_is_named_as_others_find_it(written):
    """A model of the hub by its id, whoever has downloaded it where; a folder by its whole path."""
    model = build.make_meta_model(
        AutoConfig.from_pretrained(written / "m"), torch.float32, score=False
    )
    downloaded = Path("cache/models--Qwen--Qwen3-8B/snapshots/12")
    for name, folder, wanted in (
        ("Qwen/Qwen3-8B", downloaded, "Qwen/Qwen3-8B"),
        ("models/mine", Path("models/mine"), str(Path.cwd() / "models/mine")),
        ("scratch", Path("run/scratch"), str(Path.cwd() / "run/scratch")),
    ):
        described = files.describe(model, PolicyConfig(model=name), folder)
        assert described["base_model_name_or_path"] == wanted


def damage(written, copy, *, config=None, weights=None):
    """Return a copy of the adapter with other lines in its config, or other tensors."""
    shutil.copytree(written / "adapter", copy)
    path = copy / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | (config or {})))
    tensors = load_file(copy / "adapter_model.safetensors")
    save_file(tensors | (weights or {}), copy / "adapter_model.safetensors")
    return copy


NAME = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    "change, says",
    [
        ({"config": {"use_dora": True}}, "use_dora is True in its adapter_config.json, and minirl"),
        ({"config": {"bias": "all"}}, "bias is 'all' in its adapter_config.json, and minirl has"),
        ({"config": {"init_lora_weights": "pissa"}}, "init_lora_weights is 'pissa' in its"),
        ({"config": {"alora_invocation_tokens": [5]}}, r"alora_invocation_tokens is \[5\] in its"),
        ({"config": {"peft_type": "IA3"}}, "peft_type is 'IA3' in its"),
        (
            {"config": {"base_model_name_or_path": "OTHER"}},
            "and policy.model has other weights; set",
        ),
        ({"weights": {NAME: torch.zeros(4, 9)}}, r"of another base: .* is \[4, 9\], and the model"),
        ({"weights": {NAME: torch.full((4, 128), torch.nan)}}, "has NaN or infinity; take another"),
        ({"weights": {"base_model.model.x.lora_A.weight": torch.zeros(1)}}, "has besides"),
    ],
)
def test_adapters_that_do_not_fit_the_model_are_refused(written, tmp_path, change, says):
    if change.get("config", {}).get("base_model_name_or_path"):
        other = tiny.make(tmp_path / "other", seed=7)
        change = {"config": {"base_model_name_or_path": str(other)}}
    copy = damage(written, tmp_path / "copy", **change)
    with pytest.raises(RankFailed, match=says):
        ranks(1, start, written / "m", LoraConfig(rank=4, alpha=8, adapter=str(copy)))


def test_a_base_that_cannot_be_read_is_not_compared(tmp_path):
    base = tiny.make(tmp_path / "base")
    assert files.hash_if_here(str(base))
    index = {"weight_map": {"a": "gone.safetensors"}}
    (base / "model.safetensors.index.json").write_text(json.dumps(index))
    for named in (str(base), str(tmp_path / "none"), "Qwen/Qwen3-0.6B", "x" * 300, "", None, 5):
        assert files.hash_if_here(named) == ""


def test_folders_that_are_not_what_they_should_be_are_refused(written, tmp_path):
    there = ExportConfig(command="export", run=str(written), output=str(written / "m"))
    with pytest.raises(RankFailed, match=r"--output .* exists; name another folder"):
        ranks(1, run_command, there)
    torn = shutil.copytree(written / "adapter", tmp_path / "torn")
    file = torn / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(RankFailed, match="adapter_model.safetensors cannot be read"):
        ranks(1, start, written / "m", LoraConfig(rank=4, alpha=8, adapter=str(torn)))
    with pytest.raises(RankFailed, match=re.escape("--adapter: ") + ".*has trained all weights"):
        ranks(1, run_command, whole_run(written, tmp_path / "run"))


def whole_run(written, run):
    """Return what exports an adapter of a run without one."""
    cfg = config_of(written / "m", run, "float32", rank=0, alpha=32.0)
    (run / "checkpoints" / "step-1").mkdir(parents=True)
    save_config(cfg, run / "config.yaml")
    return ExportConfig(command="export", run=str(run), adapter=True)
