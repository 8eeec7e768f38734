"""A Hugging Face folder in each checkpoint: the weights of its step, with it or not at all."""

import contextlib
import os
import shutil
import signal

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import tiny
from harness import RankFailed, ranks
from minirl.checkpoint import exporting, finding, state
from minirl.checkpoint.state import Saver
from minirl.config.shared import CheckpointConfig
from test_checkpoint import make, resume, rotate, update


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.make(tmp_path_factory.mktemp("model") / "model", "llama", dtype=torch.float64)


def save(mesh, folder, run, background):
    """Two updates, a checkpoint, an export as others make it; then the weights are overwritten."""
    policy = make(mesh, folder, False)
    for _ in range(2):
        update(policy, mesh)
    with Saver(run, CheckpointConfig(save_hf=True, background=background), policy) as saver:
        exporting.export(policy, run / "exported")
        saver.save(2, {"note": 7})
        for t in policy.shards().values():
            t.data.fill_(torch.nan)


@pytest.mark.parametrize("background", [True, False])
def test_it_is_the_model_of_its_step(folder, tmp_path, background):
    ranks(2, save, folder, tmp_path, background)
    step = tmp_path / "checkpoints/step-2"
    names = sorted(path.name for path in (tmp_path / "exported").iterdir())
    assert sorted(path.name for path in (step / "model").iterdir()) == names
    assert "model.safetensors" in names and "tokenizer.json" in names
    for name in names:
        assert (step / "model" / name).read_bytes() == (tmp_path / "exported" / name).read_bytes()
    model = AutoModelForCausalLM.from_pretrained(step / "model")
    assert all(p.isfinite().all() for p in model.parameters())
    # Resuming does not need it.
    shutil.move(step / "model", tmp_path / "moved")
    assert ranks(1, find_whole, tmp_path) == [step]
    assert ranks(1, resume, folder, tmp_path, False)[0][1] == 2


def find_whole(mesh, run):
    return finding.resume(run, mesh, str)[0]


def test_it_stays_and_goes_with_its_checkpoint(folder, tmp_path):
    cfg = CheckpointConfig(keep=1, best_metric="accuracy", save_hf=True)
    there, _ = ranks(2, rotate, folder, tmp_path, cfg, [0.5, 0.7, 0.1])[0]
    assert there[-1] == [2, 3]
    models = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.safetensors"))
    assert models == [
        "checkpoints/step-2/model/model.safetensors",
        "checkpoints/step-3/model/model.safetensors",
    ]


def interrupt(mesh, folder, run, how):
    """A whole checkpoint, and another one that is killed or fails while its model is written."""
    policy = make(mesh, folder, False)
    saver = Saver(run, CheckpointConfig(keep=1, save_hf=True), policy)
    saver.save(1, {"note": 7})
    saver.wait()

    def stop(*args):
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError(28, "No space left on device")

    if mesh.rank == 0:  # which writes the only file
        state.write_files_of_rank = stop
    saver.save(2, {"note": 7})
    saver.wait()


def test_killed_while_it_is_written_the_checkpoint_before_is_whole(folder, tmp_path):
    with contextlib.suppress(TimeoutError, RankFailed):  # of the rank that lives
        ranks(2, interrupt, folder, tmp_path, "kill")
    assert list(finding.finished(tmp_path)) == [1]
    step = tmp_path / "checkpoints/step-1"
    assert ranks(1, find_whole, tmp_path) == [step]
    assert load_file(step / "model/model.safetensors")


def test_without_room_it_is_one_error_on_all_ranks(folder, tmp_path):
    with pytest.raises(RankFailed) as failed:
        ranks(2, interrupt, folder, tmp_path, "fail")
    assert failed.value.kind == "UserError"
    assert "step-2 could not be written (rank 0: OSError" in failed.value.text
    assert list(finding.finished(tmp_path)) == [1]


def test_without_the_setting_there_is_none(folder, tmp_path):
    ranks(1, rotate, folder, tmp_path, CheckpointConfig(), [0.5])
    assert not list(tmp_path.rglob("*.safetensors"))
