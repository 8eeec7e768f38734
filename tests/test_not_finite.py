"""Numbers that are none, and an engine that computes another model: each ends with one message that
names the cause."""

import json
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny
from harness import RankFailed, ranks
from minirl.algo import losses
from minirl.base.errors import UserError
from minirl.config.parse import parse_flags
from minirl.config.policy import PolicyConfig
from minirl.config.rl import AlgoConfig, CriticConfig, RefitConfig, RLConfig
from minirl.config.shared import EngineConfig
from minirl.engine.engine import RolloutEngine
from minirl.model import loading
from minirl.parallel.fsdp import local
from minirl.refit.refit import Refit
from minirl.rl import Trainer
from minirl.run.metrics import LIMITS, MismatchWatch
from minirl.train import skipped
from minirl.train.policy import Policy
from programs import QUICKSTART, WORDS, fork
from test_gradients import batches_of, trajectories

WEIGHT = "model.layers.1.mlp.up_proj.weight"
IS_OLD = torch.__version__.startswith("2.11.")  # the older pair


def spoiled(folder, name, change):
    """A model whose weight is changed."""
    path = tiny.make(folder, "qwen3") / "model.safetensors"
    weights = load_file(path)
    weights[name] = change(weights[name])
    save_file(weights, path, metadata={"format": "pt"})
    return folder


def set_last(value):
    def change(t):
        t.view(-1)[-1] = value  # which only the last rank reads
        return t

    return change


def load(mesh, folder):
    Policy(PolicyConfig(dtype="float32"), folder, mesh)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_last(torch.nan), "has NaN or infinity"),
        (set_last(-torch.inf), "has NaN or infinity"),
        (lambda t: t.to(torch.int8), "is of dtype I8; take a model that is not quantized"),
        (lambda t: t.to(torch.int64), "is of dtype I64"),
        (lambda t: t > 0, "is of dtype BOOL"),
        (lambda t: t.to(torch.float8_e4m3fn), "is of dtype F8_E4M3"),
        (lambda t: t.double() * 1e200, "has NaN or infinity"),
    ],
    ids=["nan", "inf", "int8", "int64", "bool", "float8", "beyond float32"],
)
def test_weights_that_are_no_numbers_are_refused_by_name(tmp_path, change, message):
    folder = spoiled(tmp_path / "model", WEIGHT, change)
    with pytest.raises(RankFailed, match=message) as error:
        ranks(2, load, folder)
    assert error.value.kind == "UserError"
    assert error.value.text.startswith(f"policy.model = {folder}: {WEIGHT} {message[:6]}")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_of_other_float_dtypes_are_read(tmp_path, dtype):
    ranks(1, load, spoiled(tmp_path / "model", WEIGHT, lambda t: t.to(dtype)))


def count_openings(mesh, folder):
    with mock.patch.object(loading, "safe_open", wraps=loading.safe_open) as opened:
        load(mesh, folder)
    return opened.call_count


def test_a_file_is_opened_once_however_many_weights_are_checked(tmp_path):
    folder = tiny.make(tmp_path / "model", "qwen3")
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    file_of_weight = {name: f"{number}.safetensors" for number, name in enumerate(weights)}
    for name, file in file_of_weight.items():
        save_file({name: weights[name]}, folder / file)
    index = json.dumps({"weight_map": file_of_weight})
    (folder / "model.safetensors.index.json").write_text(index)
    assert ranks(1, count_openings, folder) == [len(weights)]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_an_evaluated_model_without_finite_weights_is_refused(tmp_path, value):
    folder = spoiled(tmp_path / "model", WEIGHT, set_last(value))
    rows = "".join(json.dumps({"prompt": f"{n}", "answer": "1"}) + "\n" for n in range(4))
    (tmp_path / "rows.jsonl").write_text(rows)
    flags = {
        "--model": folder,
        "--data.eval": tmp_path / "rows.jsonl",
        "--data.max-prompt-tokens": 32,
        "--rollout.max-tokens": 4,
        "--engine.dtype": "float32",
        "--engine.kv-cache-gb": 0.02,
    }
    ended = fork("minirl.evaluate", [x for item in flags.items() for x in item], tmp_path / "log")
    assert ended.code == 2, ended.err
    (message,) = ended.errors()
    assert f"model = {folder} has NaN or infinity in 1 of the engine's weights" in message
    assert "model.layers.1.mlp.gate_up_proj.weight" in message


# --------------------------------------------------------------------------------------------------
# skipped updates


def train(mesh, folder, spoil, critic):
    """Nine updates, of which those in `spoil` have a NaN or infinite advantage on the last rank."""
    said = []
    skipped.say = said.append
    cfg = (CriticConfig if critic else PolicyConfig)(dtype="float32")
    policy = Policy(cfg, folder, mesh)
    out = []
    for n in range(9):
        batches = batches_of([trajectories()[mesh.rank :: mesh.world_size]], policy)
        if n in spoil and mesh.rank == mesh.world_size - 1:
            batches[0].advantages[batches[0].loss_mask] = spoil[n]
        before = local(policy.shards()[WEIGHT]).clone()
        metrics = policy.update(batches, losses.policy(AlgoConfig(), 20), lr=1e-3)
        moved = not torch.equal(before, local(policy.shards()[WEIGHT]))
        out.append((metrics["skipped_updates"], moved, policy.num_skipped))
    return out, said


def test_a_skipped_update_is_said_with_its_cause(tmp_path):
    folder = tiny.make(tmp_path / "model")
    results = ranks(2, train, folder, {1: torch.nan, 3: 3e38, 4: -torch.inf}, False)
    for found, _ in results:
        skipped = [n for n, (is_skipped, moved, _) in enumerate(found) if is_skipped]
        assert skipped == [1, 3, 4]
        assert [moved for _, moved, _ in found] == [n not in skipped for n in range(9)]
        assert [num for _, _, num in found] == [0, 1, 0, 1, 2, 0, 0, 0, 0]
    lines = results[0][1]
    assert len(lines) == 3 and results[1][1] == []
    for line, number in zip(lines, (2, 4, 5), strict=True):
        assert line.startswith(f"the gradient of update {number} of the policy is not finite: the ")
        assert line.endswith("; the update is skipped")
    where = "in 25 of 25 weights model.embed_tokens.weight, model.la"
    assert f"the loss is nan, and the gradient is NaN or infinite {where}" in lines[0]


@pytest.mark.parametrize("critic", [False, True])
def test_five_skipped_updates_in_a_row_end_the_run(tmp_path, critic):
    folder = tiny.make(tmp_path / "model")
    spoil = dict.fromkeys(range(2, 9), torch.nan)
    section = "critic" if critic else "policy"
    with pytest.raises(RankFailed, match="5 updates in a row were skipped") as error:
        ranks(2, train, folder, spoil, critic)
    assert error.value.kind == "UserError"
    assert f"the gradient of update 7 of the {section} is not finite" in error.value.text
    assert f"lower {section}.lr" in error.value.text


def ruin(mesh, folder):
    policy = Policy(PolicyConfig(dtype="float32"), folder, mesh)
    batches = batches_of([trajectories()[mesh.rank :: mesh.world_size]], policy)
    policy.update(batches, losses.policy(AlgoConfig(), 20), lr=1e39)
    policy.update(batches, losses.policy(AlgoConfig(), 20), lr=1e39)


def test_weights_that_an_update_has_ruined_end_the_run_at_once(tmp_path):
    with pytest.raises(RankFailed, match=r"after 1 updates \d+ weights of .* not finite") as error:
        ranks(2, ruin, tiny.make(tmp_path / "model"))
    assert error.value.kind == "UserError"
    assert "resume from an earlier checkpoint with policy.lr below 1e+39" in error.value.text


def test_a_model_that_the_last_update_has_ruined_is_not_exported(tmp_path):
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"text": f"say {n}"}) + "\n" for n in range(20))
    )
    given = {
        "--output": tmp_path / "run",
        "--policy.model": tiny.make(tmp_path / "model"),
        "--policy.dtype": "float32",
        "--policy.lr": 1e39,
        "--data.train": tmp_path / "rows.jsonl",
        "--data.held-out": 2,
        "--data.max-tokens": 32,
        "--tokens-per-rank": 64,
        "--batch-size": 4,
        "--num-steps": 1,
    }
    ended = fork("minirl.sft", [x for item in given.items() for x in item], tmp_path, world=2)
    assert ended.code == 2, ended.err
    (message,) = ended.errors()
    assert "after 1 updates" in message and "there is nothing to export" in message
    assert not (tmp_path / "run" / "model").exists()


# --------------------------------------------------------------------------------------------------
# an engine that computes another model


def watch(values, dtypes=("float32", "float32"), temperature=1.0):
    """The step at which it ends the run."""
    cfg = RLConfig()
    cfg.policy.dtype, cfg.engine.dtype = dtypes
    cfg.rollout.temperature = temperature
    watched = MismatchWatch(cfg)
    for step, value in enumerate(values):
        try:
            watched.check(step, {"mismatch": value, "staleness": 0.0})
        except UserError as error:
            return step, str(error)
    return None, ""


def test_a_mismatch_that_the_dtype_does_not_explain_ends_the_run():
    low, high = LIMITS["float32"] / 2, LIMITS["float32"] * 2
    assert watch([low] * 9) == (None, "")
    step, message = watch([high])
    assert step == 0 and "by 0.04 nats on average; float32 explains no more than 0.02" in message
    assert watch([low, high, high, low, high, high, low])[0] is None  # for a while
    assert watch([low, high, high, high])[0] == 3
    assert watch([high], ("bfloat16", "float32"))[0] is None
    assert watch([high], ("float32", "bfloat16"))[0] is None
    assert watch([2 * LIMITS["bfloat16"]], ("bfloat16", "bfloat16"))[0] == 0
    assert watch([high], temperature=0.25)[0] is None
    assert watch([high], temperature=4.0)[0] == 0
    for value in (float("nan"), float("inf")):
        step, message = watch([low, value])
        assert step == 1 and "log-probs of the sampled tokens are not finite" in message


def test_a_mismatch_of_older_tokens_and_a_step_without_an_update_are_no_matter():
    watched = MismatchWatch(RLConfig())
    for step in range(5):
        watched.check(step, {"mismatch": 9.0, "staleness": 0.5})
        watched.check(step, {"staleness": 0.0})


def run_without_refit(mesh, given):
    """Train with an engine whose weights stay those that vLLM has drawn."""
    Refit.__call__ = lambda self: None
    Trainer.main(parse_flags(RLConfig, [str(x) for x in given]), mesh)


def test_a_run_whose_engine_has_other_weights_ends(tmp_path):
    given = {
        "--config": QUICKSTART,
        "--output": tmp_path / "run",
        "--num-steps": 2,
        "--sft.num-steps": 2,
        "--eval.every": 0,
        "--data.train": WORDS,
        "--data.held-out": 4,
        "--rollout.prompts-per-step": 2,
        "--rollout.samples-per-prompt": 2,
    }
    flags = [x for item in given.items() for x in item]
    with pytest.raises(RankFailed, match="step 0: the engine's log-probs of what it") as error:
        ranks(2, run_without_refit, flags)
    assert error.value.kind == "UserError"


def refit_of(mesh, folder, tp):
    policy = Policy(PolicyConfig(dtype="float32"), folder, mesh)
    engine = RolloutEngine(
        EngineConfig(max_model_len=64, max_num_seqs=4, kv_cache_gb=0.02, tensor_parallel_size=tp),
        folder,
        mesh,
        dtype="float32",
    )
    Refit(RefitConfig(), policy.shards(), policy.parts(), engine)


@pytest.mark.parametrize(("world", "tp"), [(1, 1), (2, 1), (2, 2)])
def test_a_trained_weight_that_the_engine_drops_is_told_by_name(tmp_path, world, tp):
    """vLLM's Qwen3 has no bias behind its attention, and its loader passes over the file's."""
    folder = tiny.make(tmp_path / "model", "qwen3", attention_bias=True)
    with pytest.raises(RankFailed, match="has no place for 2 trained weights") as error:
        ranks(world, refit_of, folder, tp)
    assert error.value.kind == "UserError"
    for layer in range(2):
        name = f"model.layers.{layer}.self_attn.o_proj.bias (128 of 128 elements)"
        assert name in error.value.text
    assert "policy.model: the engine, Qwen3ForCausalLM" in error.value.text


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("qwen3", {}),
        ("qwen2", {}),
        ("smollm3", {"attention_bias": True, "mlp_bias": True}),
        ("granite", {"attention_bias": True, "mlp_bias": True}),
        pytest.param(
            "seed_oss",
            {"attention_bias": True, "attention_out_bias": True},
            marks=pytest.mark.skipif(IS_OLD, reason="vLLM 0.26 has no bias behind its attention"),
        ),
        ("olmo2", {"attention_bias": True}),
    ],
)
def test_an_engine_that_has_every_weight_is_not_refused(tmp_path, family, config):
    for tied in (False, True):
        folder = tiny.make(tmp_path / str(tied), family, tied=tied, **config)
        ranks(2, refit_of, folder, 2)
