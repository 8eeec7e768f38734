"""A checkpoint moves between meshes bit by bit, written in the background or not.

The best one stays; an export is the model.
"""

import json
import os
import shutil
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint import default_planner
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import tiny
from harness import RankFailed, ranks
from minirl.algo import losses
from minirl.base.errors import UserError
from minirl.batch.exchange import exchange
from minirl.checkpoint import exporting, finding
from minirl.checkpoint import state as state_module
from minirl.checkpoint.__main__ import choose, export_checkpoint
from minirl.checkpoint.state import Saver, load_checkpoint, read_best, restore, state_dict_of
from minirl.config.policy import ParallelConfig, PolicyConfig
from minirl.config.rl import AlgoConfig, RLConfig
from minirl.config.shared import CheckpointConfig, ExportConfig
from minirl.train.policy import Policy
from programs import fork
from run_folders import newest_checkpoint, save_config
from sharded import whole
from test_gradients import batches_of, exact_norm, trajectories


def differences(a, b, path=""):
    if isinstance(a, dict):
        return [
            d
            for k in a.keys() | b.keys()
            for d in (
                differences(a[k], b[k], f"{path}/{k}")
                if k in a and k in b
                else [f"{path}/{k} on one side"]
            )
        ]
    same = torch.equal(a, b) if torch.is_tensor(a) else a == b
    return [] if same else [path]


def update(policy, mesh):
    (micros,) = exchange(trajectories()[mesh.rank :: mesh.world_size], mesh, 200)
    return policy.update(batches_of(micros, policy), losses.policy(AlgoConfig(), 20), lr=1e-3)[
        "loss"
    ]


def make(mesh, folder, sequence):
    LlamaRMSNorm.forward = exact_norm
    return Policy(PolicyConfig(dtype="float64"), folder, mesh, sequence_parallel=sequence)


def save(mesh, folder, run, sequence, background):
    policy = make(mesh, folder, sequence)
    for _ in range(2):
        update(policy, mesh)
    saver = Saver(run, CheckpointConfig(background=background), policy)
    begin, write = threading.Event(), dcp.FileSystemWriter.write_data
    if background:
        dcp.FileSystemWriter.write_data = lambda *args: begin.wait() and write(*args)
    saver.save(2, {"note": 7})
    assert (newest_checkpoint(run) is None) == background
    state, num_updates = whole(state_dict_of(policy)), policy.num_updates
    exporting.MAX_FILE_BYTES = 100_000
    exporting.export(policy, run / "exported")
    loss = update(policy, mesh)  # overwrites what is being written
    if background:
        for t in [*policy.shards().values(), *policy.optimizer.tensors()]:
            t.data.fill_(torch.nan)
        begin.set()
    saver.wait()
    return state, num_updates, loss


def resume(mesh, folder, run, sequence):
    policy = make(mesh, folder, sequence)
    saved = load_checkpoint(newest_checkpoint(run), policy)
    assert saved["progress"] == {"note": 7} and saved["step"] == 2
    state = whole(state_dict_of(policy))
    return state, policy.num_updates, update(policy, mesh)


@pytest.mark.parametrize(
    ("world", "parallel", "background", "targets"),
    [
        (
            2,
            ParallelConfig(),
            True,
            [(1, ParallelConfig()), (4, ParallelConfig(tensor=2))],
        ),
        (
            4,
            ParallelConfig(tensor=2, sequence=True),
            False,
            [(4, ParallelConfig(replicate=2)), (4, ParallelConfig(context=2, tensor=2))],
        ),
    ],
)
def test_saved_on_one_mesh_resumed_on_another(tmp_path, world, parallel, background, targets):
    folder, run = (
        tiny.make(tmp_path / "model", "llama", tied=world == 2, dtype=torch.float64),
        tmp_path / "run",
    )
    state, num_updates, loss = ranks(
        world, save, folder, run, parallel.sequence, background, parallel=parallel
    )[0]
    for target_world, target in targets:
        resumed, resumed_updates, resumed_loss = ranks(
            target_world, resume, folder, run, target.sequence, parallel=target
        )[0]
        assert differences(state, resumed) == [] and resumed_updates == num_updates == 2
        assert resumed_loss == pytest.approx(loss, rel=1e-12)
    exported = run / "exported"
    assert len(list(exported.glob("*.safetensors"))) > 2  # written in parts, by ranks in turn
    model = AutoModelForCausalLM.from_pretrained(exported)
    assert AutoTokenizer.from_pretrained(exported).chat_template and model.dtype == torch.float64
    parameters = dict(model.named_parameters())
    assert parameters.keys() <= state["model"].keys()
    assert all(torch.equal(p, state["model"][n]) for n, p in parameters.items())


def resume_with_other_settings(mesh, folder, run):
    cfg = PolicyConfig(dtype="float64", betas=(0.5, 0.6), adam_eps=0.1, weight_decay=3.0)
    policy = Policy(cfg, folder, mesh)
    load_checkpoint(newest_checkpoint(run), policy)
    names = ("betas", "eps", "weight_decay")
    groups = [group for part in policy.optimizer.parts for group in part.param_groups]
    return [[group[name] for name in names] for group in groups]


def test_a_resumed_optimizer_has_the_settings_of_the_config(tmp_path):
    folder = tiny.make(tmp_path / "model", "llama", dtype=torch.float64)
    ranks(1, save, folder, tmp_path / "run", False, False)
    decayed, *others = ranks(1, resume_with_other_settings, folder, tmp_path / "run")[0]
    assert decayed == [(0.5, 0.6), 0.1, 3.0]
    assert all(group[:2] == [(0.5, 0.6), 0.1] for group in others)


def save_before_the_first_update(mesh, folder, run):
    weights = []
    for way in ("never saved", "saved", "resumed"):
        policy = Policy(PolicyConfig(dtype="float64", ema_decay=0.9), folder, mesh)
        if way == "saved":
            saver = Saver(run, CheckpointConfig(), policy)
            saver.save(1, {})
            saver.wait()
        elif way == "resumed":
            load_checkpoint(newest_checkpoint(run), policy)
        for _ in range(2):
            update(policy, mesh)
        weights.append(whole(state_dict_of(policy)))
    return weights


def test_an_optimizer_that_has_not_stepped_takes_its_first_step_after_a_checkpoint(tmp_path):
    """As the policy's while a critic warms up."""
    folder = tiny.make(tmp_path / "model", "llama", dtype=torch.float64)
    never_saved, saved, resumed = ranks(2, save_before_the_first_update, folder, tmp_path / "run")[
        0
    ]
    assert differences(never_saved, saved) == [] and differences(never_saved, resumed) == []


def save_changing_sets(mesh, folder, run):
    """Save a policy three times, with a second model from the second time on."""
    planned = []
    plan = default_planner.create_default_global_save_plan
    default_planner.create_default_global_save_plan = lambda plans: (
        planned.append(len(plans)) or plan(plans)
    )
    policy, critic = make(mesh, folder, False), make(mesh, folder, False)
    saver = Saver(run, CheckpointConfig(keep=9), policy)
    counts, states = [], []
    for step in range(1, 6):
        if step == 3:
            saver.others["critic"] = critic
        update(policy, mesh)
        if step > 3:
            update(critic, mesh)
        saver.save(step, {})
        saver.wait()
        counts.append(len(planned))
        states.append((whole(state_dict_of(policy)), whole(state_dict_of(critic))))
    # The obvious twin: the same state, planned anew.
    state = state_dict_of(policy) | state_dict_of(critic, "critic_")
    dcp.save(state, checkpoint_id=run / "planned")
    return counts, states


def resume_both(mesh, folder, run, steps):
    resumed = []
    for step in steps:
        policy, critic = make(mesh, folder, False), make(mesh, folder, False)
        load_checkpoint(finding.finished(run)[step], policy)
        if step > 2:
            restore(finding.finished(run)[step], critic, "critic")
        resumed.append((whole(state_dict_of(policy)), whole(state_dict_of(critic))))
    return resumed


def entries(folder):
    """What is where, of a folder that torch wrote."""
    metadata = dcp.FileSystemReader(folder).read_metadata()
    return metadata.state_dict_metadata, metadata.planner_data, metadata.storage_data.keys()


def test_a_plan_is_made_again_only_when_what_is_saved_has_changed(tmp_path):
    world, parallel = 2, ParallelConfig(tensor=2)
    folder, run = tiny.make(tmp_path / "model", "llama", dtype=torch.float64), tmp_path / "run"
    counts, states = ranks(world, save_changing_sets, folder, run, parallel=parallel)[0]
    assert counts == [1, 1, 2, 2, 2]
    steps = [1, 2, 3, 5]
    resumed = ranks(world, resume_both, folder, run, steps, parallel=parallel)[0]
    for step, (policy, critic) in zip(steps, resumed, strict=True):
        expected_policy, expected_critic = states[step - 1]
        assert differences(expected_policy, policy) == []
        assert step <= 2 or differences(expected_critic, critic) == []
    assert entries(run / "checkpoints/step-5/state") == entries(run / "planned")


# --------------------------------------------------------------------------------------------------
# which ones stay


def rotate(mesh, folder, run, cfg, scores, first=0):
    """Save at steps 1, 2, ... of which `scores` has one each, as a loop does: a score comes after
    its step was saved."""
    saver = Saver(run, cfg, make(mesh, folder, False))
    there = []
    for step, score in enumerate(scores, start=first + 1):
        saver.save(step, {})
        if score is not None:
            saver.score(step, {cfg.best_metric or "accuracy": score})
        saver.score(
            step - 1, {cfg.best_metric or "accuracy": 1e9}
        )  # of other weights than the newest checkpoint's
        saver.wait()
        there.append(list(finding.finished(run)))
    return there, saver.best


@pytest.mark.parametrize("background", [True, False])
def test_the_newest_and_the_best_stay(tmp_path, background):
    folder = tiny.make(tmp_path / "model", "llama", dtype=torch.float64)
    cfg = CheckpointConfig(keep=2, best_metric="accuracy", background=background)
    scores = [0.5, 0.7, 0.7, None, 0.1, float("nan"), 0.9]
    there, best = ranks(2, rotate, folder, tmp_path / "run", cfg, scores)[0]
    assert there == [
        [1],
        [1, 2],
        [2, 3],
        [2, 3, 4],
        [2, 4, 5],
        [2, 5, 6],
        [6, 7],
    ]  # an equal score later is no better
    assert best == read_best(tmp_path / "run") == {"step": 7, "metric": "accuracy", "value": 0.9}
    (tmp_path / "run" / "checkpoints" / "step-6.partial").mkdir()
    there, best = ranks(1, rotate, folder, tmp_path / "run", cfg, [0.3, 0.2, 0.9], 7)[
        0
    ]  # a resumed run
    assert there == [[7, 8], [7, 8, 9], [7, 9, 10]] and best["step"] == 7
    assert not (tmp_path / "run" / "checkpoints" / "step-6.partial").exists()


def end_well(mesh, folder, run, cfg):
    with Saver(run, cfg, make(mesh, folder, False)):
        pass


def test_a_good_end_removes_what_a_kill_after_the_last_save_has_left(tmp_path):
    folder = tiny.make(tmp_path / "model", "llama", dtype=torch.float64)
    for name in ("step-4.old.partial", "step-6", "step-8", "step-12"):
        (tmp_path / "run" / "checkpoints" / name / "state").mkdir(parents=True)
    ranks(2, end_well, folder, tmp_path / "run", CheckpointConfig(keep=2))
    left = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert left == {"step-8", "step-12"}


def test_of_losses_the_lowest_is_best_and_without_a_metric_none_is(tmp_path):
    folder = tiny.make(tmp_path / "model", "llama", dtype=torch.float64)
    there, best = ranks(
        1,
        rotate,
        folder,
        tmp_path / "loss",
        CheckpointConfig(keep=1, best_metric="loss"),
        [2.0, 1.0, 3.0],
    )[0]
    assert there == [[1], [2], [2, 3]] and best["step"] == 2
    there, best = ranks(
        1, rotate, folder, tmp_path / "none", CheckpointConfig(keep=1), [2.0, 1.0, 3.0]
    )[0]
    assert there == [[1], [2], [3]] and best is None


def score_without_the_best(mesh, folder, run):
    saver = Saver(run, CheckpointConfig(every=500, best_metric="margin"), make(mesh, folder, False))
    saver.score(0, {"loss": 1.0})


def test_a_best_metric_that_is_none_is_refused_by_the_first_evaluation(tmp_path):
    folder = tiny.make(tmp_path / "model", "llama", dtype=torch.float64)
    with pytest.raises(RankFailed, match="an evaluation has no score 'margin'; it has loss"):
        ranks(1, score_without_the_best, folder, tmp_path / "run")


def test_what_is_not_whole_is_not_resumed(tmp_path):
    for name in ("step-3", "step-20", "step-100.partial", "step-4.old"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert newest_checkpoint(tmp_path) == tmp_path / "checkpoints" / "step-20"
    assert list(finding.finished(tmp_path)) == [3, 20]
    (tmp_path / "checkpoints" / "best.json").write_text(
        '{"step": 100, "metric": "accuracy", "value": 1.0}'
    )
    assert read_best(tmp_path) is None


def fail(mesh, folder, run, background, use):
    """Rank 1 cannot write."""
    saver = Saver(run, CheckpointConfig(background=background), make(mesh, folder, False))
    saver.save(1, {})
    saver.wait()
    if mesh.rank == 1:

        def no_room(*args):
            raise OSError(28, "No space left on device")

        dcp.filesystem._write_item = no_room
    if use == "save":
        saver.save(2, {})
        saver.save(3, {})
    if use == "exit":
        with saver:
            saver.save(2, {})
    with saver:
        saver.save(2, {})
        raise ValueError("another failure")


@pytest.mark.parametrize(
    ("background", "use", "kind"),
    [
        (True, "save", "UserError"),
        (True, "exit", "UserError"),
        (False, "save", "UserError"),
        (True, "another", "ValueError"),
    ],
)
def test_a_failed_write_is_reported(tmp_path, background, use, kind):
    folder = tiny.make(tmp_path / "model", "llama", dtype=torch.float64)
    with pytest.raises(RankFailed) as failed:
        ranks(2, fail, folder, tmp_path, background, use)
    assert failed.value.kind == kind
    for text in ("step-2 could not be written", "rank 1", "No space left on device"):
        assert text in str(failed.value)
    assert (
        list(finding.finished(tmp_path)) == [1]
        and (tmp_path / "checkpoints" / "step-2.partial").exists()
    )


def fail_on_one(mesh, folder, run, where):
    """Rank 1 cannot write its small files, or rank 0 cannot rename. Return what each rank says."""
    saver = Saver(run, CheckpointConfig(), make(mesh, folder, False))

    def no_room(*args):
        raise OSError(28, "No space left on device")

    if where == "small files" and mesh.rank == 1:
        state_module.write_synced = no_room
    if where == "rename" and mesh.rank == 0:
        Path.rename = no_room
    try:
        saver.save(1, {})
        saver.wait()
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("where", "rank"), [("small files", 1), ("rename", 0)])
def test_a_failure_beside_the_weights_is_one_error_on_all_ranks(tmp_path, where, rank):
    folder = tiny.make(tmp_path / "model", "llama", dtype=torch.float64)
    said = ranks(2, fail_on_one, folder, tmp_path, where)
    assert said[0] == said[1]
    assert f"step-1 could not be written (rank {rank}: OSError: [Errno 28] No space" in said[0]
    assert list(finding.finished(tmp_path)) == []


def crash(mesh, folder, run):
    saver = Saver(run, CheckpointConfig(), make(mesh, folder, False))
    publish = saver._publish
    saver._publish = lambda *args: (time.sleep(0.5), publish(*args))
    with saver:
        saver.save(1, {})
        raise UserError("the reward function raised")


def test_a_run_that_fails_leaves_the_checkpoint_under_way(tmp_path):
    folder = tiny.make(tmp_path / "model", "llama", dtype=torch.float64)
    with pytest.raises(RankFailed, match="the reward function raised"):
        ranks(2, crash, folder, tmp_path)
    assert list(finding.finished(tmp_path)) == [1]


def die(mesh, folder, run):
    saver = Saver(run, CheckpointConfig(), make(mesh, folder, False))
    saver.save(1, {})
    saver.wait()
    dcp.FileSystemWriter.write_data = lambda *args: os._exit(9)
    saver.save(2, {})
    saver.wait()


def test_killed_while_it_writes(tmp_path):
    folder = tiny.make(tmp_path / "model", "llama", dtype=torch.float64)
    with pytest.raises(TimeoutError, match=r"only ranks \[\] of 2 answered"):
        ranks(2, die, folder, tmp_path)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == [
        "step-1",
        "step-2.partial",
    ]
    assert newest_checkpoint(tmp_path).name == "step-1"


def load_into(mesh, folder, run):
    load_checkpoint(newest_checkpoint(run), make(mesh, folder, False))


def test_another_shape_is_refused_with_both(tmp_path):
    folder = tiny.make(tmp_path / "model", "llama", dtype=torch.float64)
    ranks(1, rotate, folder, tmp_path / "run", CheckpointConfig(), [0.0])
    wide = tiny.make(tmp_path / "wide", "llama", dtype=torch.float64, intermediate_size=160)
    with pytest.raises(RankFailed) as failed:
        ranks(1, load_into, wide, tmp_path / "run")
    assert failed.value.kind == "UserError"
    for text in (
        "step-1 has model.layers.0.mlp.",
        "of shape [96, 128]",
        str(wide),
        "[160, 128]",
        "another output folder",
    ):
        assert text in failed.value.text


# --------------------------------------------------------------------------------------------------
# the program


def train_and_save(mesh, folder, run, tied):
    cfg = RLConfig(output=str(run))
    cfg.policy.model, cfg.policy.dtype = str(folder), "bfloat16"
    policy = Policy(cfg.policy, folder, mesh)
    saver = Saver(run, CheckpointConfig(keep=2, best_metric="accuracy"), policy)
    for step, score in ((1, 0.5), (2, 0.9), (3, 0.1), (4, 0.2)):
        update(policy, mesh)
        saver.save(step, {})
        saver.score(step, {"accuracy": score})
        if step in (2, 4):
            saver.wait()
            exporting.export(policy, run / f"live-{step}")
    if mesh.rank == 0:
        save_config(cfg, run / "config.yaml")


def export_as_told(mesh, *values):
    export_checkpoint(ExportConfig(command="export", **dict(values)), mesh)


def test_export_of_a_checkpoint(tmp_path):
    folder, run = tiny.make(tmp_path / "model", "qwen3", tied=True), tmp_path / "run"
    ranks(2, train_and_save, folder, run, True)
    ended = fork("minirl.checkpoint", ["export", run], tmp_path / "log")
    assert ended.code == 0, ended.err
    assert ended.out.strip() == str(run / "model-step-4") and "warn" not in ended.err.lower()
    ranks(2, export_as_told, ("run", str(run)), ("best", True), ("output", str(tmp_path / "best")))
    for exported, live in (
        (tmp_path / "best", run / "live-2"),
        (run / "model-step-4", run / "live-4"),
    ):
        assert {p.name for p in exported.iterdir()} == {p.name for p in live.iterdir()}
        got, expected = (load_file(f / "model.safetensors") for f in (exported, live))
        assert got.keys() == expected.keys() and all(
            torch.equal(got[n], expected[n]) and got[n].dtype == torch.bfloat16 for n in got
        )
        model = AutoModelForCausalLM.from_pretrained(exported)
        assert (
            all(torch.equal(p, expected[n]) for n, p in model.named_parameters())
            and AutoTokenizer.from_pretrained(exported).chat_template
        )

    # The folder that was trained from has another model meanwhile.
    shutil.rmtree(folder)
    tiny.make(folder, "qwen3_moe")
    again = fork("minirl.checkpoint", ["export", run, "--step", 2], tmp_path / "log")
    assert again.code == 2 and len(again.errors()) == 1, again.err
    assert "is of another model (qwen3, 2 layers of 128" in again.errors()[0]
    assert f"than policy.model = {folder} is now (qwen3_moe," in again.errors()[0]
    assert not (run / "model-step-2").exists()


def test_export_refuses_what_is_not_there(tmp_path):
    with pytest.raises(UserError, match="is not the folder of a run: it has no config.yaml"):
        choose(tmp_path / "none", None, False)
    (tmp_path / "config.yaml").write_text("policy: {model: nowhere}")
    (tmp_path / "checkpoints" / "step-9.partial").mkdir(parents=True)
    with pytest.raises(UserError, match="has no finished checkpoint"):
        choose(tmp_path, None, False)
    for step in (4, 12):
        (tmp_path / "checkpoints" / f"step-{step}").mkdir()
    assert (
        choose(tmp_path, None, False).name == "step-12"
        and choose(tmp_path, 4, False).name == "step-4"
    )
    for step, best, message in (
        (9, False, r"--step 9: .* use one of \[4, 12\]"),
        (None, True, r"--best: no checkpoint .* one of \[4, 12\]"),
        (4, True, "name two"),
    ):
        with pytest.raises(UserError, match=message):
            choose(tmp_path, step, best)
    (tmp_path / "checkpoints" / "best.json").write_text(
        json.dumps({"step": 4, "metric": "loss", "value": 1.0})
    )
    assert choose(tmp_path, None, True).name == "step-4"
    ended = fork(
        "minirl.checkpoint",
        ["export", tmp_path, "--output", tmp_path / "checkpoints"],
        tmp_path / "log",
    )
    assert (
        ended.code == 2
        and len(ended.errors()) == 1
        and "policy.model = 'nowhere' is no folder, and as a hub id" in ended.errors()[0]
    ), ended.err
    (tmp_path / "config.yaml").write_text(f"policy: {{model: {tiny.make(tmp_path / 'model')}}}")
    ended = fork(
        "minirl.checkpoint",
        ["export", tmp_path, "--output", tmp_path / "checkpoints"],
        tmp_path / "log",
    )
    assert ended.code == 2 and f"--output {tmp_path}/checkpoints exists" in ended.errors()[0], (
        ended.err
    )
