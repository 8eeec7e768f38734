"""A run's folder: what is damaged is found, what is half written is never read, nothing in it runs
code, one run at a time is in it, and it is resumed by the settings that it was begun with."""

import contextlib
import dataclasses
import fcntl
import io
import json
import os
import pickle
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata

import tiny
from harness import RankFailed, ranks, two_at_once
from minirl.base.errors import UserError
from minirl.base.files import partial_of, publish_folder, write_whole
from minirl.checkpoint import finding, reading, run_folder, state
from minirl.checkpoint.__main__ import export_checkpoint
from minirl.checkpoint.state import Saver, load_checkpoint
from minirl.config.parse import flatten
from minirl.config.policy import PolicyConfig
from minirl.config.rl import RLConfig
from minirl.config.shared import CheckpointConfig, ExportConfig
from minirl.config.supervised import DPOConfig, RMConfig, SFTConfig
from minirl.model import scratch
from minirl.rollout import records
from minirl.run import inputs, log
from minirl.run.metrics import Progress
from minirl.run.results import truncate
from minirl.run.trainer import TrainingRun
from minirl.supervise.lifecycle import explain
from minirl.supervise.watch import Watch
from minirl.types.packed import Trajectory
from programs import ROOT, fork
from run_folders import newest_checkpoint, save_config
from sharded import whole
from test_checkpoint import differences, make, update

# --------------------------------------------------------------------------------------------------
# damaged checkpoints


class Change:
    """A change of a file, with what it needs. It can be sent to a rank."""

    def __init__(self, change, *arguments):
        self.change = change
        self.arguments = arguments

    def __call__(self, path):
        self.change(path, *self.arguments)


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def flip_many(path):
    content = bytearray(path.read_bytes())
    for place in range(1000, len(content), 1000):
        content[place] ^= 1
    path.write_bytes(content)


def flip_begin(path):
    content = path.read_bytes()
    path.write_bytes(bytes([content[0] ^ 1]) + content[1:])


def empty(path):
    path.write_bytes(b"")


def remove(path):
    path.unlink()


def replace(content):
    return Change(Path.write_text, content)


def as_folder(path):
    path.unlink()
    path.mkdir()


def leave_out(path, name):
    """Take a file out of the list."""
    listed = json.loads(path.read_text())
    del listed[name]
    path.write_text(json.dumps(listed))


def without(name):
    return Change(leave_out, name)


FILES = (
    "progress.json",
    "state/.metadata",
    "state/__0_0.distcp",
    "state/__1_0.distcp",
    "random-0.json",
    "random-1.json",
    "sizes.json",
)
# (file, damage, what the line says of it)
DAMAGES = [
    *((file, cut, file) for file in FILES),
    *((file, empty, file) for file in FILES),
    *((file, remove, f"{file} is missing") for file in FILES),
    # What has its size is noticed when it is read.
    ("state/.metadata", flip_begin, "state/.metadata cannot be read"),
    ("state/__0_0.distcp", flip, "state cannot be read (rank "),
    ("state/__1_0.distcp", flip, "state cannot be read (rank "),
    ("progress.json", flip_begin, "progress.json cannot be read"),
    ("random-0.json", flip_begin, "random-0.json holds no states"),
    ("random-1.json", flip_begin, "random-1.json holds no states"),
    ("progress.json", replace('{"other": "keys"}'), "progress.json has 17 bytes and not"),
    ("state/.metadata", replace("garbage"), "state/.metadata has 7 bytes and not"),
    ("random-0.json", as_folder, "random-0.json"),
    ("sizes.json", replace("[1, 2]"), "does not list progress.json"),
    ("sizes.json", replace("[" * 100_000), "sizes.json is damaged: RecursionError"),
    ("sizes.json", without("progress.json"), "does not list progress.json"),
    ("sizes.json", without("state/.metadata"), "does not list state/.metadata"),
]


def save_two(mesh, folder, run):
    """Save after one and two updates. Return the state after the first."""
    policy = make(mesh, folder, False)
    saver = Saver(run, CheckpointConfig(keep=9), policy)
    states = []
    for step in (1, 2):
        update(policy, mesh)
        saver.save(step, {"step": step})
        saver.wait()
        states.append(whole(state.state_dict_of(policy)))
    return states[0]


def resume(mesh, folder, run):
    """Load the newest checkpoint that is whole."""
    policy = make(mesh, folder, False)
    found, saved = finding.resume(run, mesh, lambda path: load_checkpoint(path, policy))
    return found.name, saved["progress"], policy


def find_after(mesh, folder, run, damages):
    """For each damage what is found, what is said, and which folders are there then."""
    results = []
    policy = make(mesh, folder, False)
    said = []
    finding.say = said.append
    for number, (file, damage, _) in enumerate(damages):
        copy = run.with_name(f"copy-{number}")
        if mesh.rank == 0:
            shutil.copytree(run, copy)
            damage(copy / "checkpoints/step-2" / file)
        mesh.barrier()
        found, _ = finding.resume(copy, mesh, lambda path: load_checkpoint(path, policy))
        names = sorted(path.name for path in (copy / "checkpoints").iterdir())
        results.append((found.name, list(said), names))
        said.clear()
    return results


def other_newest(mesh, folder, run):
    """Newer names that are no checkpoints; all damaged; resume from the one before."""
    said = []
    finding.say = said.append
    checkpoints = run / "checkpoints"
    if mesh.rank == 0:
        (checkpoints / "step-99").mkdir()
        (checkpoints / "step-100").write_text("a file")
        (checkpoints / "step-101.partial").mkdir()
        flip(checkpoints / "step-2/state/__1_0.distcp")
    mesh.barrier()
    found, progress, policy = resume(mesh, folder, run)
    loaded = whole(state.state_dict_of(policy))

    saver = Saver(run, CheckpointConfig(), policy)
    with saver:  # the step of the damaged one is written again
        saver.save(2, {})
    again, _, _ = resume(mesh, folder, run)
    mesh.barrier()

    if mesh.rank == 0:
        for path in finding.finished(run).values():
            cut(path / "progress.json")
    mesh.barrier()
    refused = ""
    try:
        resume(mesh, folder, run)
    except UserError as error:
        refused = str(error)
    left = sorted(path.name for path in checkpoints.iterdir())
    return found, said, progress, loaded, again, refused, left


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A model, a run of two ranks with checkpoints 1 and 2, and the state of the first."""
    folder = tmp_path_factory.mktemp("saved")
    model = tiny.make(folder / "model", "llama", dtype=torch.float64)
    first = ranks(2, save_two, model, folder / "run")[0]
    return model, folder / "run", first


def test_a_damaged_checkpoint_is_left_out_with_one_line_that_names_the_file(saved, tmp_path):
    model, run, first = saved
    shutil.copytree(run, tmp_path / "run")
    of_ranks = ranks(2, find_after, model, tmp_path / "run", DAMAGES)
    for (file, damage, says), (found, said, names), (_, other, _) in zip(
        DAMAGES, *of_ranks, strict=True
    ):
        assert found == "step-1", (file, damage)
        assert len(said) == 1 and says in said[0] and "step-2 is damaged" in said[0], said
        assert "resuming from step-1" in said[0] and other == []
        assert names == ["step-1", "step-2.damaged"]

    found, said, progress, loaded, again, refused, left = ranks(
        2, other_newest, model, tmp_path / "run"
    )[0]
    assert found == "step-1" and progress == {"step": 1}
    assert differences(first, loaded) == []
    assert len(said) == 2 and "sizes.json is missing" in said[0] and "step-99" in said[0]
    assert "state cannot be read (rank " in said[1]
    assert again == "step-2"
    assert "no checkpoint" in refused and "step-1: progress.json has" in refused
    assert "step-2: progress.json has" in refused and "to begin again" in refused
    assert left == ["step-1", "step-100", "step-2", "step-2.damaged", "step-99.damaged"]


def test_the_list_has_every_file_with_its_size(saved):
    _, run, _ = saved
    folder = run / "checkpoints/step-2"
    listed = json.loads((folder / "sizes.json").read_text())
    there = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}
    assert set(listed) == there - {"sizes.json"} == set(FILES) - {"sizes.json"}
    for name, size in listed.items():
        assert (folder / name).stat().st_size == size


def export_with(mesh, run, damage, flags):
    if damage:
        file, change = damage
        change(run / "checkpoints/step-2" / file)
    export_checkpoint(
        ExportConfig(command="export", run=str(run), output=str(run / "out"), **flags), mesh
    )
    return sorted(path.name for path in (run / "out").iterdir())


def test_export_takes_no_damaged_checkpoint(saved, tmp_path):
    model, run, _ = saved
    cfg = RLConfig(output=str(run))
    cfg.policy.model = str(model)
    cfg.policy.dtype = "float32"  # a run's config.yaml says what auto stood for
    damage = ("state/__1_0.distcp", cut)
    for number, (best, flags, says) in enumerate(
        (
            (None, {"step": 1}, None),
            (None, {}, "step-2 is damaged .state/__1_0.distcp has"),
            ('{"step": 2, "metric": "x", "value": 1.0}', {"best": True}, "step-2 is damaged"),
            ("{garbage", {"best": True}, "best.json is damaged"),
            ('{"step": "2", "metric": "x", "value": 1.0}', {"best": True}, "best.json is damaged"),
        )
    ):
        copy = tmp_path / str(number)
        shutil.copytree(run, copy)
        save_config(cfg, copy / "config.yaml")
        if best:
            (copy / "checkpoints/best.json").write_text(best)
        if says:
            with pytest.raises(RankFailed, match=says) as failed:
                ranks(1, export_with, copy, damage, flags)
            assert failed.value.kind == "UserError" and not (copy / "out").exists()
        else:
            assert "model.safetensors" in ranks(1, export_with, copy, damage, flags)[0]


def test_an_export_that_cannot_read_its_checkpoint_leaves_nothing(saved, tmp_path):
    model, run, _ = saved
    cfg = RLConfig(output=str(run))
    cfg.policy.model = str(model)
    cfg.policy.dtype = "float32"
    shutil.copytree(run, tmp_path / "run")
    save_config(cfg, tmp_path / "run/config.yaml")
    says = r"state cannot be read .* is damaged, or the run has removed it .* by --step$"
    for rank in range(2):
        flip_many(tmp_path / f"run/checkpoints/step-2/state/__{rank}_0.distcp")
    with pytest.raises(RankFailed) as failed:
        ranks(2, export_with, tmp_path / "run", None, {})
    assert failed.value.kind == "Unreadable" and re.search(says, failed.value.text, re.M | re.S)
    assert not list((tmp_path / "run").glob("out*"))


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"step": 2}', '{"step": 2, "metric": 1, "value": null}', "\0" * 9]
)
def test_a_damaged_best_json_is_told_and_no_checkpoint_is_the_best(tmp_path, content):
    (tmp_path / "checkpoints/step-2").mkdir(parents=True)
    (tmp_path / "checkpoints/best.json").write_text(content)
    with pytest.raises(ValueError, match=r"best.json is damaged"):
        finding.read_best(tmp_path)


def test_where_checkpoints_belong_is_something_else(tmp_path):
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(UserError, match="checkpoints is not a folder"):
        newest_checkpoint(tmp_path)
    with pytest.raises(RankFailed, match="checkpoints is not a folder"):
        ranks(2, find_only, tmp_path)


def find_only(mesh, run):
    return finding.resume(run, mesh, str)


# --------------------------------------------------------------------------------------------------
# killed at each moment of a save


def die(mesh, folder, run, moment):
    policy = make(mesh, folder, False)
    saver = Saver(run, CheckpointConfig(keep=1, best_metric="reward"), policy)
    saver.save(1, {"step": 1})
    saver.wait()
    if moment == "best":
        saver.score(1, {"reward": 0.5})
    rotate = saver._rotate

    def killed(*args):
        os.kill(os.getpid(), signal.SIGKILL)

    if moment == "small files" and mesh.rank == 1:
        state.write_synced = killed
    if moment == "state" and mesh.rank == 1:
        dcp.FileSystemWriter.write_data = killed
    if moment == "metadata":
        dcp.FileSystemWriter.finish = killed
    if moment == "sizes":
        state.write_sizes = killed
    if moment == "rename":
        Path.rename = killed
    if moment == "rotate":
        saver._rotate = killed
    if moment == "in rotate":

        def kill_in_it():
            shutil.rmtree = killed
            rotate()

        saver._rotate = kill_in_it
    saver.save(2, {"step": 2})
    saver.wait()
    if moment == "best":
        Path.replace = killed
    saver.score(2, {"reward": 0.9})
    os._exit(9)


MOMENTS = {
    "small files": "step-1",
    "state": "step-1",
    "metadata": "step-1",
    "sizes": "step-1",
    "rename": "step-1",
    "rotate": "step-2",
    "in rotate": "step-2",
    "best": "step-2",
}


def go_on(mesh, folder, run):
    found, progress, _ = resume(mesh, folder, run)
    return found, progress, finding.read_best(run)


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_at_any_moment_the_newest_checkpoint_is_whole(saved, tmp_path, moment):
    with contextlib.suppress(TimeoutError, RankFailed):  # of the rank that lives
        ranks(2, die, saved[0], tmp_path, moment)
    found, progress, best = ranks(1, go_on, saved[0], tmp_path)[0]
    assert found == MOMENTS[moment] and progress == {"step": int(found[-1])}
    assert best is None or best["step"] in finding.finished(tmp_path)


def make_scratch(mesh, output, moment, resume, seed=0):
    cfg = RLConfig(output=str(output), resume=resume, seed=seed)
    cfg.policy.model = "scratch"
    cfg.policy.scratch.hidden_size = 32
    cfg.engine.max_model_len = 64

    def killed(*args):
        os._exit(9)

    if moment == "in the middle":
        scratch.disable_progress_bar = killed
    if moment == "before the tokenizer":
        scratch.make_tokenizer("").__class__.save_pretrained = killed
    if moment == "before the rename":
        Path.rename = killed
    inputs.make_scratch(cfg, mesh)
    return {path.name: path.read_bytes() for path in (output / "scratch").iterdir()}


def test_killed_while_the_scratch_model_is_written_it_is_made_again(tmp_path):
    resume = True
    expected = ranks(1, make_scratch, tmp_path / "whole", "", False)[0]
    assert "model.safetensors" in expected
    output = tmp_path / "run"
    for moment in ("in the middle", "before the tokenizer", "before the rename"):
        with pytest.raises(TimeoutError):
            ranks(1, make_scratch, output, moment, resume)
        assert not (output / "scratch").exists()
    assert ranks(2, make_scratch, output, "", resume) == [expected] * 2
    # Before the run has begun, another seed makes another model; then it is kept.
    other = ranks(1, make_scratch, output, "", resume, 1)[0]
    assert other["model.safetensors"] != expected["model.safetensors"]
    (output / "config.yaml").write_text("")
    assert ranks(1, make_scratch, output, "", True, 2)[0] == other
    assert sorted(path.name for path in output.iterdir()) == ["config.yaml", "lock", "scratch"]


def test_a_folder_is_replaced_as_a_whole(tmp_path):
    folder = tmp_path / "model"
    for content in ("old", "new"):
        partial_of(folder).mkdir()
        (partial_of(folder) / "file").write_text(content)
        publish_folder(folder)
    assert (folder / "file").read_text() == "new" and list(tmp_path.iterdir()) == [folder]


# --------------------------------------------------------------------------------------------------
# nothing that is read runs code


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def write_evil(mesh, folder, run, mark, place):
    """Put code into a checkpoint, with the sizes that belong to it."""
    newest = newest_checkpoint(run)
    if place == ".metadata":
        (newest / "state/.metadata").write_bytes(pickle.dumps(Evil(mark)))
    elif place == "inside .metadata":
        metadata = dcp.FileSystemReader(newest / "state").read_metadata()
        metadata.planner_data = Evil(mark)
        (newest / "state/.metadata").write_bytes(pickle.dumps(metadata))
    elif place == "elsewhere":
        metadata = dcp.FileSystemReader(newest / "state").read_metadata()
        for info in metadata.storage_data.values():
            info.relative_path = "../../../other"
        (newest / "state/.metadata").write_bytes(pickle.dumps(metadata))
    elif place == "settings of the optimizer":
        policy = make(mesh, folder, False)
        saved = state.state_dict_of(policy)
        saved["optimizer"]["param_groups"][0]["betas"] = Evil(mark)
        shutil.rmtree(newest / "state")
        dcp.save(saved, checkpoint_id=newest / "state")
    else:
        (newest / place).write_bytes(pickle.dumps(Evil(mark)))
    finding.write_sizes(newest, finding.sizes_of_rank(newest, 0))
    return finding.find_damage(newest)


def read_evil(mesh, folder, run):
    load_checkpoint(newest_checkpoint(run), make(mesh, folder, False))


@pytest.mark.parametrize(
    ("place", "says", "exported"),
    [
        (
            ".metadata",
            r"cannot be read: UnpicklingError: it names posix.mkdir, which no checkpoint needs",
            False,
        ),
        ("inside .metadata", r"it names posix.mkdir, which no checkpoint needs", False),
        ("elsewhere", r"it names ../../../other, outside the folder", False),
        ("settings of the optimizer", "cannot be read .*UnpicklingError.*posix.mkdir", True),
        ("random-0.json", "random-0.json holds no states of random generators", True),
    ],
)
def test_what_somebody_put_into_a_checkpoint_does_not_run(saved, tmp_path, place, says, exported):
    model, run, _ = saved
    copy, mark = tmp_path / "run", tmp_path / "it ran"
    shutil.copytree(run, copy)
    assert ranks(1, write_evil, model, copy, mark, place) == [""]
    with pytest.raises(RankFailed, match=f"(?s){says}") as failed:
        ranks(1, read_evil, model, copy)
    assert failed.value.kind == "Unreadable" and not mark.exists()
    cfg = RLConfig(output=str(copy))
    cfg.policy.model = str(model)
    cfg.policy.dtype = "bfloat16"  # as a run writes it
    save_config(cfg, copy / "config.yaml")
    if exported:  # the weights are good, and nothing else is read
        ranks(1, export_with, copy, None, {})
    else:
        with pytest.raises(RankFailed, match=f"(?s){says}") as failed:
            ranks(1, export_with, copy, None, {})
        assert failed.value.kind == "Unreadable"
    assert not mark.exists()


@pytest.mark.parametrize(
    "content", [b"", b"garbage", b"\x80\x04.", b"\x80\x04N.", pickle.dumps([1]), b"\x80\x04}(." * 9]
)
def test_metadata_that_is_none_is_one_error(tmp_path, content):
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(UserError, match=r"\.metadata cannot be read"):
        reading.read_metadata(tmp_path)


class Attribute:
    """Pickled as a call of getattr, which Python 3.11.2 writes for members of enums."""

    def __init__(self, *call):
        self.call = call

    def __reduce__(self):
        return getattr, self.call


@pytest.mark.parametrize(
    ("of", "name"), [(Metadata, "__init__"), (_MEM_FORMAT_ENCODING, "__class__")]
)
def test_metadata_gets_attributes_of_no_other_class(tmp_path, of, name):
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Attribute(of, name)))
    with pytest.raises(UserError, match=f"it names {name} of .*which no checkpoint needs"):
        reading.read_metadata(tmp_path)


def random_states(mesh):
    """Draw, save, draw, restore, draw again."""
    import random

    def draw():
        return random.gauss(0, 1), np.random.standard_normal(), torch.rand(3).tolist()

    draw()
    saved = json.loads(json.dumps(state.random_states()))
    first = draw()
    state.set_random_states(saved)
    return first, draw()


def test_random_states_come_back(tmp_path):
    for first, again in ranks(1, random_states):
        assert first == again


# --------------------------------------------------------------------------------------------------
# one run at a time

HOLD = """
import os, sys, time
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from minirl.checkpoint import run_folder
run_folder.hold(Path(sys.argv[1]))
if os.fork() == 0:  # a worker, which outlives the run
    time.sleep(60)
    os._exit(0)
print("held", flush=True)
time.sleep(600)
"""


def test_a_second_run_is_kept_out_until_the_first_is_gone(tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder, "SECONDS_TO_WAIT", 0.2)
    first = subprocess.Popen(
        [sys.executable, "-c", HOLD, tmp_path, ROOT],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert first.stdout.readline() == "held\n"
        message = rf"output = {tmp_path} is in use by another run \(process {first.pid} on "
        with pytest.raises(UserError, match=message):
            run_folder.hold(tmp_path)
        with pytest.raises(UserError, match=message):
            run_folder.require_free(tmp_path)
        monkeypatch.setattr(run_folder, "SECONDS_TO_WAIT", 60.0)
        first.kill()
        with run_folder.released(tmp_path):
            run_folder.hold(tmp_path)
            run_folder.hold(tmp_path)  # it is this process's already
            with (tmp_path / "lock").open() as file, pytest.raises(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            (tmp_path / "config.yaml").write_text("")  # The run begins.
        with (tmp_path / "lock").open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.killpg(first.pid, signal.SIGKILL)
        first.wait()


def test_a_run_that_is_refused_leaves_no_lock(tmp_path):
    there, new = tmp_path / "there", tmp_path / "deep" / "new"
    there.mkdir()
    for folder in (there, new):
        with pytest.raises(UserError, match="refused"), run_folder.released(folder):
            run_folder.hold(folder)
            assert (folder / "lock").exists()
            raise UserError("refused")
    assert not list(there.iterdir()) and not new.exists()


def test_a_lock_that_its_holder_has_removed_is_none(tmp_path, monkeypatch):
    """Whoever waits for it takes the next file of its name."""
    (tmp_path / "lock").touch()
    flock = fcntl.flock
    times = []

    def removed_meanwhile(*arguments):
        if not times:
            (tmp_path / "lock").unlink()
        times.append(1)
        flock(*arguments)

    monkeypatch.setattr(fcntl, "flock", removed_meanwhile)
    with run_folder.released(tmp_path):
        run_folder.hold(tmp_path)
        assert len(times) == 2
        with (tmp_path / "lock").open() as file, pytest.raises(BlockingIOError):
            flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_look_for_a_lock_leaves_nothing(tmp_path):
    run_folder.require_free(tmp_path)
    run_folder.require_free(tmp_path / "none")
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_locks_is_told(tmp_path, monkeypatch):
    said = []

    def unsupported(*args):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(run_folder, "say", said.append)
    monkeypatch.setattr(fcntl, "flock", unsupported)
    with run_folder.released(tmp_path):
        run_folder.hold(tmp_path)
    assert len(said) == 1 and "cannot be locked" in said[0]


def test_a_lock_that_is_a_link_is_refused(tmp_path):
    outside = tmp_path / "outside"
    outside.write_text("precious")
    for target in (outside, tmp_path / "nothing"):
        folder = tmp_path / target.name.upper()
        folder.mkdir()
        (folder / "lock").symlink_to(target)
        with pytest.raises(UserError, match=r"lock is a symbolic link, .*; remove it"):
            run_folder.hold(folder)
    with pytest.raises(UserError, match="lock is a symbolic link"):
        run_folder.require_free(tmp_path / "OUTSIDE")
    assert outside.read_text() == "precious" and not (tmp_path / "nothing").exists()


# Where a run writes a file or a folder before it has its name; and files that it appends to.
PARTIAL_FILES = (
    "config.yaml.partial",
    "summary.json.partial",
    "curves.png.partial",
    "checkpoints/best.json.partial",
)
PARTIAL_FOLDERS = (
    "scratch.partial",
    "model.partial",
    "model.replaced",
    "checkpoints/step-1.partial",
    "checkpoints/step-7.partial",
)
APPENDED = ("metrics.jsonl", "answers.jsonl")


def test_links_in_a_run_folder_do_not_lead_outside(tmp_path):
    """Whatever is a link there, the run writes beside it or in its place."""
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    outside = tmp_path / "outside"
    (outside / "folder/state").mkdir(parents=True)
    (outside / "folder/model").mkdir()
    for name in ("file", "folder/config.json", "folder/progress.json", "folder/state/.metadata"):
        (outside / name).write_text("precious")
    for name in PARTIAL_FILES:
        (run / name).symlink_to(outside / "file")
    for name in PARTIAL_FOLDERS:
        (run / name).symlink_to(outside / "folder")
    for name in APPENDED:
        (run / name).symlink_to(outside / "new")
    before = {path: path.is_file() and path.read_text() for path in outside.rglob("*")}
    rows = [{"prompt": f"word {i}", "chosen": "a", "rejected": "b"} for i in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = "--policy.model scratch --policy.scratch.hidden-size 32 --policy.scratch.num-layers 1 "
    flags += "--data.max-tokens 64 --num-steps 2 --batch-size 2 --checkpoint.every 1 --resume "
    flags += "--checkpoint.save-hf --checkpoint.keep 1 --checkpoint.best-metric loss "
    flags += "--data.held-out 2 --eval.every 1 --policy.dtype float32"
    files = ["--data.train", tmp_path / "rows.jsonl", "--output", run]
    ended = fork("minirl.dpo", [*flags.split(), *files], tmp_path / "log")
    assert ended.code == 0, ended.err
    assert {path: path.is_file() and path.read_text() for path in outside.rglob("*")} == before
    assert [path for path in run.rglob("*") if path.is_symlink()] == []
    assert (run / "model/model.safetensors").exists()


def start(mesh, output):
    """Return why it is refused. A run that is not goes on until another one is."""
    run_folder.SECONDS_TO_WAIT = 0.3
    refused = output / "refused"
    try:
        policy = PolicyConfig(model="scratch")
        cfg = RLConfig(output=str(output), policy=policy)
        cfg.engine.max_model_len = 64
        inputs.make_scratch(cfg, mesh)
    except UserError as error:
        refused.touch()
        return str(error)
    while not refused.exists():
        time.sleep(0.01)
    return ""


def test_of_two_starts_at_once_one_is_refused(tmp_path):
    output = tmp_path / "run"
    with two_at_once({"one": (1, start, output), "other": (1, start, output)}) as results:
        said = sorted(future.result()[0] for future in results.values())
    assert said[0] == "" and "is in use by another run (process" in said[1]
    assert (output / "scratch/model.safetensors").exists()


def test_a_folder_that_another_run_makes_at_the_same_moment_is_locked(tmp_path, monkeypatch):
    output = tmp_path / "run"
    make = Path.mkdir

    def make_second(path, **options):
        make(path, **options)
        make(path, **options)

    monkeypatch.setattr(Path, "mkdir", make_second)
    with run_folder.released(output):
        run_folder.hold(output)
        assert (output / run_folder.LOCK).exists()
    assert list(output.iterdir()) == []  # The folder is the other run's.


# --------------------------------------------------------------------------------------------------
# settings of a resumed run


def begun(folder, cls, **settings):
    """Write config.yaml as a run does."""
    cfg = cls(output=str(folder), **settings)
    save_config(cfg, folder / "config.yaml")
    path = folder / "config.yaml"
    path.write_text(run_folder.head_of(cls) + path.read_text())
    return cfg


def changed(cfg, name, value):
    *sections, last = name.split(".")
    part = cfg
    for section in sections:
        part = vars(part)[section]
    vars(part)[last] = value
    return dataclasses.replace(cfg, resume=True)


@pytest.mark.parametrize(
    ("cls", "name", "value"),
    [
        (RLConfig, "seed", 7),
        (RLConfig, "data.train", "other.jsonl"),
        (RLConfig, "data.train", ["a.jsonl", "b.jsonl"]),
        (RLConfig, "data.held_out", 3),
        (RLConfig, "data.max_prompt_tokens", 7),
        (RLConfig, "data.system_prompt", "Be brief."),
        (RLConfig, "rollout.prompts_per_step", 3),
        (RLConfig, "rollout.replay", "elsewhere"),
        (RLConfig, "policy.model", "other"),
        (RLConfig, "policy.scratch.hidden_size", 64),
        (RLConfig, "policy.scratch.phrases", ["a phrase"]),
        (RLConfig, "ref.model", "other"),
        (RLConfig, "critic.model", "other"),
        (RLConfig, "policy.optimizer", "muon"),
        (RLConfig, "policy.ema_decay", 0.9),
        (RLConfig, "reward.model", "other"),
        (RLConfig, "sft.num_steps", 3),
        (RLConfig, "algo.advantage", "gae"),
        (SFTConfig, "batch_size", 3),
        (SFTConfig, "data.max_tokens", 30),
        (SFTConfig, "data.train_on", "last_turn"),
        (RMConfig, "data.margin_key", "other"),
        (DPOConfig, "reference", "other"),
    ],
)
def test_what_makes_another_run_is_refused_by_its_name(tmp_path, cls, name, value):
    cfg = begun(tmp_path, cls)
    assert run_folder.compare_settings(dataclasses.replace(cfg, resume=True)) == []
    old = flatten(dataclasses.asdict(cfg))[name]
    with pytest.raises(UserError) as refused:
        run_folder.compare_settings(changed(cfg, name, value))
    message = str(refused.value)
    assert message.startswith(f"resume: {name} = {value!r}, and the run was begun with {old!r}")
    assert "set it as it was, or start in another output folder" in message


def test_what_may_change_is_listed(tmp_path):
    cfg = begun(tmp_path, RLConfig)
    changed(cfg, "num_steps", 200)
    changed(cfg, "policy.lr", 1e-4)
    changed(cfg, "rollout.keep_inside", (0.1, 0.9))
    assert run_folder.compare_settings(dataclasses.replace(cfg, output=f"{tmp_path}/.")) == [
        "num_steps 100 -> 200",
        "rollout.keep_inside (0.0, 1.0) -> (0.1, 0.9)",
        "policy.lr None -> 0.0001",
    ] or set(run_folder.compare_settings(cfg)) == {
        "num_steps 100 -> 200",
        "rollout.keep_inside (0.0, 1.0) -> (0.1, 0.9)",
        "policy.lr None -> 0.0001",
    }


@pytest.mark.parametrize(
    ("cls", "name", "value", "stays"),
    [
        (RLConfig, "reward.function", "new.py:other", False),
        (RLConfig, "reward.function", "elsewhere.py:exact", True),
        (RLConfig, "reward.model_weight", 0.5, False),
        (RLConfig, "env.max_turns", 2, False),
        (RLConfig, "eval.max_tokens", 7, False),
        (RLConfig, "eval.every", 7, True),
        (RLConfig, "reward.threads", 7, True),
        (RLConfig, "algo.loss", "gspo", True),
        (DPOConfig, "algo.loss", "ipo", False),
        (DPOConfig, "policy.lr", 1e-4, True),
    ],
)
def test_the_best_checkpoint_is_of_one_measure(tmp_path, capsys, cls, name, value, stays):
    cfg = begun(tmp_path, cls)
    best = tmp_path / "checkpoints/best.json"
    best.parent.mkdir()
    best.write_text("{}")
    run_folder.forget_best(changed(cfg, name, value))
    assert best.exists() == stays
    said = "" if stays else f"{name} decides the scores of evaluations and has changed: no check"
    err = capsys.readouterr().err
    assert (err == "") == stays and said in err


def test_the_best_checkpoint_is_of_the_same_held_out_rows(tmp_path, capsys):
    cfg = begun(tmp_path, SFTConfig)
    best = tmp_path / "checkpoints/best.json"
    best.parent.mkdir()
    best.write_text("{}")
    assert not run_folder.forget_best(cfg) and best.exists()
    assert run_folder.forget_best(cfg, other_rows=True) and not best.exists()
    assert "what is held out decides the scores of evaluations" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "value", "stay"), [("reward.function", "new", False), ("policy.lr", 1e-4, True)]
)
def test_what_is_known_of_other_rewards_is_forgotten(name, value, stay):
    cfg = RLConfig()
    progress = Progress(reward_stats=[3.0, 1.0, 2.0], outcomes="of rows")
    run = SimpleNamespace(cfg=cfg, progress=progress, mesh=SimpleNamespace(rank=0))
    for _ in range(2):  # A checkpoint of earlier code does not know what decided them.
        TrainingRun.forget_other_rewards(run)
        assert progress.reward_stats == [3.0, 1.0, 2.0] and progress.outcomes == "of rows"
    run.cfg = changed(cfg, name, value)
    TrainingRun.forget_other_rewards(run)
    assert (progress.reward_stats == [3.0, 1.0, 2.0]) == (progress.outcomes == "of rows") == stay


@pytest.mark.parametrize(
    ("newest", "expected"), [("{", True), ('{"critic": {}}', True), ('{"step": 2}', False)]
)
def test_the_newest_checkpoint_that_can_be_read_says_whether_it_has_a_critic(
    tmp_path, newest, expected
):
    (tmp_path / "config.yaml").write_text("")
    for step, text in ((1, '{"critic": {}}'), (2, newest)):
        (tmp_path / f"checkpoints/step-{step}").mkdir(parents=True)
        (tmp_path / f"checkpoints/step-{step}/progress.json").write_text(text)
    assert inputs._has_critic(tmp_path) == expected


def test_a_critic_of_the_checkpoint_may_be_trained_again(tmp_path):
    cfg = changed(begun(tmp_path, RLConfig), "algo.advantage", "gae")
    assert run_folder.compare_settings(cfg, has_critic=True) == ["algo.advantage 'grpo' -> 'gae'"]


@pytest.mark.parametrize("cls", [SFTConfig, RMConfig, DPOConfig])
def test_another_program_does_not_resume(tmp_path, cls):
    begun(tmp_path, RLConfig)
    with pytest.raises(UserError, match=r"is a run of minirl.rl, and this is minirl.(sft|rm|dpo)"):
        run_folder.compare_settings(cls(output=str(tmp_path), resume=True))


def test_checkpoints_without_settings_are_not_resumed(tmp_path):
    cfg = SFTConfig(output=str(tmp_path), resume=True)
    inputs.check_steps_left(cfg, 4)
    (tmp_path / "checkpoints/step-2").mkdir(parents=True)
    with pytest.raises(UserError, match="holds checkpoints and no config.yaml"):
        inputs.check_steps_left(cfg, 4)
    (tmp_path / "config.yaml").write_text("")
    inputs.check_steps_left(cfg, 4)


def test_a_link_to_a_disk_that_is_gone_is_no_empty_folder(tmp_path):
    (tmp_path / "checkpoints").symlink_to(tmp_path / "gone")
    with pytest.raises(UserError, match="checkpoints is not a folder, and checkpoints belong"):
        finding.finished(tmp_path)


def test_a_finished_run_without_checkpoints_does_not_begin_again(tmp_path):
    summary = tmp_path / "summary.json"
    for ended, is_refused in (("running", False), ("stopped", False), ("finished", True)):
        summary.write_text(json.dumps({"state": ended}))
        if is_refused:
            with pytest.raises(UserError, match="has ended and left no checkpoint"):
                inputs._refuse_other_run(tmp_path, resume=True)
        else:
            inputs._refuse_other_run(tmp_path, resume=True)
    (tmp_path / "checkpoints/step-2").mkdir(parents=True)
    inputs._refuse_other_run(tmp_path, resume=True)


@pytest.mark.parametrize("content", [b"seed: [", b"unknown: 1", b"- 1", b"seed: seven"])
def test_a_damaged_config_is_one_error(tmp_path, content):
    (tmp_path / "config.yaml").write_bytes(content)
    cfg = RLConfig(output=str(tmp_path), resume=True)
    with pytest.raises(UserError, match="resume: .*config.yaml"):
        run_folder.compare_settings(cfg)


# --------------------------------------------------------------------------------------------------
# metrics, rollouts, a full disk


@pytest.mark.parametrize(
    "torn",
    [b'{"phase": "rl", "st', b"\0\0\0\0", b'{"phase": "rl"}', b"[]", b"\xff", b"7", b"[" * 10_000],
)
def test_lines_that_are_torn_are_left_out_of_the_metrics(tmp_path, torn, capfd):
    path = tmp_path / "metrics.jsonl"
    rows = [{"phase": "sft", "step": 0}, *({"phase": "rl", "step": n} for n in range(4))]
    lines = [json.dumps(row).encode() + b"\n" for row in rows]
    path.write_bytes(b"".join(lines) + torn)
    truncate(path, keep_before=2, keep_sft=True)
    assert path.read_bytes() == b"".join(lines[:3])
    assert "1 lines that are no rows" in capfd.readouterr().err
    truncate(path, keep_before=0, keep_sft=False)
    assert path.read_bytes() == b"" and capfd.readouterr().err == ""


def trajectory(group, episode=0):
    two = np.zeros(2, np.int32)
    return Trajectory(
        tokens=two,
        sampled=two.astype(bool),
        logprobs=two.astype(np.float32),
        turn_rewards=two.astype(np.float32),
        versions=two,
        group=group,
        episode=episode,
    )


def test_a_step_that_fewer_ranks_write_again_has_no_episode_twice(tmp_path):
    place = [SimpleNamespace(rank=rank, world_size=2) for rank in range(2)]
    one = SimpleNamespace(rank=0, world_size=1)
    for mesh in place:
        for step in (0, 1, 2):
            records.write_step([trajectory(mesh.rank)], tmp_path, step, mesh)
    records.drop_steps(tmp_path, 1)
    records.write_step([trajectory(0), trajectory(1)], tmp_path, 1, one)
    for step in (0, 1):
        assert [t.group for t in records.load_step(tmp_path, step, one)] == [0, 1]
    (tmp_path / "notes.txt").write_text("")
    names = ["notes.txt", "step-0-rank-0.jsonl", "step-0-rank-1.jsonl", "step-1-rank-0.jsonl"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names

    shutil.copy(tmp_path / "step-0-rank-1.jsonl", tmp_path / "step-1-rank-1.jsonl")
    with pytest.raises(UserError, match=r"group 1, episode 0, segment 0 is in .*remove the file"):
        records.load_step(tmp_path, 1, one)


def test_a_step_does_not_list_the_files_of_all_others(tmp_path):
    """They become more with each step."""
    one = SimpleNamespace(rank=0, world_size=1)
    with mock.patch.object(Path, "glob", side_effect=AssertionError):
        records.write_step([trajectory(0)], tmp_path, 0, one)
        records.check_steps(tmp_path, 1, resume=False)
        assert len(records.load_step(tmp_path, 0, one)) == 1


def log_until_full(mesh, folder):
    """Log until no file may grow, as on a full disk; then, with room, go on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    said = ""
    values = {f"metric {n}": 1.0 for n in range(9)}
    resource.setrlimit(resource.RLIMIT_FSIZE, (6_000, hard))
    console = io.StringIO()
    try:
        first = log.Log(folder, rank=0, first_step=0)
        sys.stderr = console
        for step in range(2_000):
            first.scalars("rl", step, values)
            time.sleep(0.001)
    except OSError as error:
        said = explain(error, Watch(), 30, str(folder)) or ""
    sys.stderr = sys.__stderr__
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    size = (folder / "metrics.jsonl").stat().st_size
    truncate(folder / "metrics.jsonl", keep_before=20, keep_sft=True)
    second = log.Log(folder, rank=0, first_step=20)
    second.scalars("rl", 20, values)
    second.close()
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return said, size, [row["step"] for row in rows], console.getvalue()


def log_until_gone(mesh, folder):
    """Log until the folder of the run is removed."""
    console = io.StringIO()
    board = log.Log(folder, rank=0, first_step=0)
    sys.stderr = console
    shutil.rmtree(folder)
    error = None
    try:
        for step in range(2_000):
            board.scalars("rl", step, {"reward": 1.0})
            time.sleep(0.001)
    except OSError as gone:
        error = gone
    sys.stderr = sys.__stderr__
    where = os.path.relpath(folder)  # as a setting may give it
    return explain(error, Watch(), 30, where), explain(error, Watch(), 30, ""), console.getvalue()


def test_a_full_disk_is_one_message_and_the_run_goes_on_with_room(tmp_path):
    said, size, steps, console = ranks(1, log_until_full, tmp_path)[0]
    assert "rank 0 in phase start: a file cannot be written: [Errno 27]" in said
    assert f"Make room (output = {str(tmp_path)!r})" in said and "continues with --resume" in said
    assert size <= 6_000 and steps == [*range(len(steps) - 1), 20] and len(steps) > 15
    assert "Traceback" not in console


def test_a_folder_that_is_gone_is_one_message(tmp_path):
    said, elsewhere, console = ranks(1, log_until_gone, tmp_path / "run")[0]
    assert "rank 0 in phase start: a file cannot be written: [Errno 2] No such file" in said
    assert "bring the folder back if it was removed" in said and "Traceback" not in console
    assert elsewhere is None  # not of the run's folder: a bug, with its traceback


def test_a_file_that_cannot_be_written_whole_stays_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "summary.json"
    write_whole(path, "old")

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device: '.*summary.json.partial'"):
        write_whole(path, "new")
    assert path.read_text() == "old"
