"""An export in the background is, byte by byte, what gathering and writing on one rank would be."""

import json
import os
import resource
import shutil
import signal
import threading
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoTokenizer

import tiny
from benchmarks import growth_save
from harness import RankFailed, ranks
from minirl.base.errors import UserError
from minirl.base.files import attempt
from minirl.checkpoint import exporting
from minirl.checkpoint.exporting import (
    Exporter,
    name_special_tokens,
    plan_folder,
    write_companions,
    write_rope_alike,
)
from minirl.config.policy import ParallelConfig, PolicyConfig
from minirl.model import build, families
from minirl.train.policy import Policy

SMALL_FILE_BYTES = 100_000


def export_plainly(policy, folder, max_bytes):
    """The obvious twin: gather every weight on every rank, and write all files on rank 0."""
    dtype = getattr(torch, policy.cfg.dtype)
    whole = {}
    for name, t in policy.shards().items():
        t = t.detach().full_tensor() if isinstance(t, DTensor) else t.detach()
        whole[name] = t if name.endswith("e_score_correction_bias") else t.to(dtype)
    if policy.mesh.rank > 0:
        return
    sizes = {name: t.to(dtype) for name, t in whole.items()}
    split = split_torch_state_dict_into_shards(sizes, max_shard_size=max_bytes)
    folder.mkdir()
    weight_map = {}
    for file, names in split.filename_to_tensors.items():
        weights = {}
        for name in names:
            config = policy.model.config
            for part in families.checkpoint_slices(config, name, whole[name].shape):
                weights[part.name] = part.of(whole[name]).clone()
                weight_map[part.name] = file
        save_file(weights, folder / file, metadata={"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    shapes = {name: t.shape for name, t in whole.items()}
    write_companions(plan_folder(policy.folder, shapes, dtype, 1), folder)


def count_received(mesh):
    """[bytes of weights that this rank receives from now on]"""
    received = [0]
    exchange = dist.all_to_all_single

    def counted(output, sent, *args):
        received[0] += output.nbytes
        return exchange(output, sent, *args)

    dist.all_to_all_single = counted
    return received


def export_in_the_background(mesh, folder, run, dtype):
    policy = Policy(PolicyConfig(dtype=dtype), folder, mesh)
    export_plainly(policy, run / "plain", SMALL_FILE_BYTES)
    export_plainly(policy, run / "plain whole", exporting.MAX_FILE_BYTES)
    exporter = Exporter(mesh)
    begin, write = threading.Event(), exporting.write_files_of_rank
    exporting.write_files_of_rank = lambda *args: begin.wait() and write(*args)
    received = count_received(mesh)

    with mock.patch.object(exporting, "MAX_FILE_BYTES", SMALL_FILE_BYTES):
        exporter.start(policy, run / "exported")
    for t in policy.shards().values():
        t.data.fill_(torch.nan)  # as later steps would
    assert not (run / "exported").exists()
    begin.set()
    exporter.wait()
    assert (run / "exported").exists()

    policy = Policy(PolicyConfig(dtype=dtype), folder, mesh)
    exporting.export(policy, run / "whole")
    return received[0]


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("family", "world", "parallel", "dtype"),
    [
        ("llama", 1, ParallelConfig(), "float64"),
        ("qwen3_moe", 1, ParallelConfig(), "bfloat16"),
        ("qwen3", 2, ParallelConfig(), "bfloat16"),
        ("glm4_moe", 2, ParallelConfig(tensor=2), "bfloat16"),
        ("qwen3_moe", 4, ParallelConfig(replicate=2), "bfloat16"),
        ("glm4_moe", 4, ParallelConfig(tensor=2), "bfloat16"),
        ("gemma", 4, ParallelConfig(), "float32"),
    ],
)
def test_every_byte_is_that_of_a_plain_export(tmp_path, family, world, parallel, dtype):
    folder = tiny.make(tmp_path / "model", family)
    received = ranks(world, export_in_the_background, folder, tmp_path, dtype, parallel=parallel)
    plain = content(tmp_path / "plain")
    files = [name for name in plain if name.endswith(".safetensors")]
    assert len(files) > 4 and "model.safetensors.index.json" in plain
    assert content(tmp_path / "exported") == plain
    assert content(tmp_path / "whole") == content(tmp_path / "plain whole")

    # Ranks received what they wrote, and nothing else: their files, and rank 0 the single one.
    num_bytes = 0
    for path in [
        *(tmp_path / "plain").glob("*.safetensors"),
        tmp_path / "plain whole" / "model.safetensors",
    ]:
        num_bytes += sum(t.nbytes for t in load_file(path).values())
    assert sum(received) == num_bytes
    sizes = [len(plain[file]) for file in files]
    received[0] -= num_bytes // 2
    assert max(received) - min(received) <= max(sizes)


def export_between(mesh, folder, run):
    """Exports wait for each other, and so does what follows."""
    policy = Policy(PolicyConfig(), folder, mesh)
    exporter = Exporter(mesh)
    for name in ("first", "second"):
        exporter.start(policy, run / name)
    assert (run / "first").exists()
    exporter.wait()
    exporter.wait()
    with policy.inference():  # gathers the root
        policy.model.unshard()
        exporting.export(policy, run / "second")  # replaced
    return content(run / "first") == content(run / "second")


def test_exports_one_after_the_other(tmp_path):
    folder = tiny.make(tmp_path / "model", "llama", tied=True)
    assert ranks(2, export_between, folder, tmp_path) == [True, True]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "model", "second"]


def export_without_room(mesh, folder, output):
    """The disk of rank 1 is full after 20 kB."""
    exporting.MAX_FILE_BYTES = SMALL_FILE_BYTES
    policy = Policy(PolicyConfig(), folder, mesh)
    exporting.export(policy, output)
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    if mesh.rank == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, unlimited[1]))
    exporter = Exporter(mesh)
    exporter.start(policy, output)
    mesh.barrier()  # training goes on
    try:
        exporter.wait()
    except UserError as error:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        return str(error)
    return ""


def test_without_room_every_rank_says_so_once_and_the_old_folder_stays(tmp_path):
    folder = tiny.make(tmp_path / "model", "llama")
    output = tmp_path / "out"
    said = ranks(2, export_without_room, folder, output)
    assert said[0] == said[1]
    for text in (f"{output} could not be written (rank 1: ", "File too large", "make room there"):
        assert text in said[0]
    assert "rank 0" not in said[0] and f"{output}.partial is not whole" in said[0]
    assert len(list(output.glob("*.safetensors"))) > 4 and (output / "config.json").exists()


def write_a_tokenizer_without_room(mesh, folder):
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    tokenizer = AutoTokenizer.from_pretrained(folder).backend_tokenizer
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, unlimited[1]))
    said = attempt(lambda: tokenizer.save(str(folder / "other.json")), 0)
    resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    return said


def test_a_full_disk_is_told_of_a_tokenizer_too(tmp_path):
    folder = tiny.make(tmp_path / "model", "llama")
    (said,) = ranks(1, write_a_tokenizer_without_room, folder)
    assert said == "rank 0: OSError: File too large (os error 27)"


def export_with_a_bug(mesh, folder, output):
    """The thread of rank 1 fails as no disk does."""
    exporting.MAX_FILE_BYTES = SMALL_FILE_BYTES
    if mesh.rank == 1:

        def divide(*args, **_):
            raise ZeroDivisionError("a bug")

        exporting.save_file = divide
    try:
        policy = Policy(PolicyConfig(), folder, mesh)
        exporting.export(policy, output)
    except UserError as error:
        return str(error)
    return ""


def test_a_bug_in_the_thread_of_one_rank_is_one_error_on_all_with_its_traceback(tmp_path):
    folder = tiny.make(tmp_path / "model", "llama")
    said = ranks(2, export_with_a_bug, folder, tmp_path / "out")
    assert said[0] == said[1]
    for text in ("(rank 1: Traceback", "in divide", "ZeroDivisionError: a bug"):
        assert text in said[0]
    assert not (tmp_path / "out").exists()


def export_until_killed(mesh, folder, output, when):
    """Export twice; in the second time all ranks are killed."""
    exporting.MAX_FILE_BYTES = SMALL_FILE_BYTES
    policy = Policy(PolicyConfig(), folder, mesh)
    exporting.export(policy, output)
    for t in policy.shards().values():
        t.data.zero_()

    def die_half_way(weights, path, **_):
        path.write_bytes(b"half")
        os._exit(9)

    def die(path, **_):
        if str(path).endswith(".replaced") and path.exists():
            os._exit(9)

    if when == "writing":
        exporting.save_file = die_half_way
    else:
        shutil.rmtree = die
    exporting.export(policy, output)
    mesh.barrier()


@pytest.mark.parametrize(("when", "is_new"), [("writing", False), ("removing", True)])
def test_killed_at_any_time_what_has_the_name_is_whole(tmp_path, when, is_new):
    folder, output = tiny.make(tmp_path / "model", "llama"), tmp_path / "out"
    with pytest.raises((TimeoutError, RankFailed)):  # rank 1 loses rank 0
        ranks(2, export_until_killed, folder, output, when)
    num_weights = 0
    for path in output.glob("*.safetensors"):
        for t in load_file(path).values():
            assert bool((t == 0).all()) == is_new
            num_weights += 1
    index = json.loads((output / "model.safetensors.index.json").read_text())
    assert num_weights == len(index["weight_map"])
    assert (tmp_path / "out.partial").exists() != is_new


def export_to(mesh, folder, output):
    exporting.export(Policy(PolicyConfig(), folder, mesh), output)


def test_where_no_folder_can_be_made(tmp_path):
    folder = tiny.make(tmp_path / "model", "llama")
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(RankFailed) as failed:
        ranks(2, export_to, folder, tmp_path / "file" / "out")
    assert failed.value.kind == "UserError"
    assert "file/out could not be written (rank 0: NotADirectoryError" in failed.value.text


def test_companions_are_read_by_transformers_4_too():
    """Its names: `rope_theta` and `rope_scaling` of positions, a list of additional tokens."""
    config = {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}
    write_rope_alike(config)
    assert config["rope_theta"] == 1e6 and "rope_scaling" not in config
    yarn = {"rope_theta": 1e6, "rope_type": "yarn", "factor": 4.0}
    config = {"text_config": {"rope_parameters": yarn}}
    write_rope_alike(config)
    assert config["text_config"]["rope_theta"] == 1e6
    assert config["text_config"]["rope_scaling"] == {"rope_type": "yarn", "factor": 4.0}
    by_kind = {"rope_parameters": {"full_attention": {"rope_theta": 1e6, "rope_type": "default"}}}
    config = dict(by_kind)
    write_rope_alike(config)
    assert config == by_kind
    tokens = {"extra_special_tokens": ["<a>"], "eos_token": "<b>"}
    name_special_tokens(tokens)
    assert tokens == {"additional_special_tokens": ["<a>"], "eos_token": "<b>"}
    tokens = {"tokenizer_class": "TokenizersBackend"}
    name_special_tokens(tokens)
    assert tokens == {"tokenizer_class": "PreTrainedTokenizerFast"}


def test_an_export_is_the_config_that_it_was_for_transformers_5(tmp_path):
    folder = tiny.make(tmp_path / "model", "qwen3")
    made = json.loads((folder / "config.json").read_bytes())
    made["rope_parameters"] = {"rope_theta": 1e6, "rope_type": "yarn", "factor": 2.0}
    made["rope_parameters"]["original_max_position_embeddings"] = 64
    (folder / "config.json").write_text(json.dumps(made))
    out = tmp_path / "out"
    out.mkdir()
    write_companions(plan_folder(folder, {}, torch.float32, 1), out)
    written = json.loads((out / "config.json").read_bytes())
    assert written["rope_theta"] == 1e6 and written["rope_scaling"]["factor"] == 2.0
    rope = AutoConfig.from_pretrained(out).rope_parameters
    assert rope == AutoConfig.from_pretrained(folder).rope_parameters
    assert build.read_config(out).rope_parameters == rope


def test_later_saves_send_no_plan_and_a_writer_receives_a_file_of_the_model():
    of_law = {}
    for point in [*growth_save.measure(1, 8), *growth_save.measure(8, 8)]:
        of_law.setdefault(point.law, []).append(point.num_bytes)
    assert of_law[growth_save.LATER][0] == of_law[growth_save.LATER][1] < 1000
    assert of_law[growth_save.FIRST][1] > 7 * of_law[growth_save.FIRST][0] > 10**5
    assert max(of_law[growth_save.EXPORT]) < 4 * 2**30 + 2**28  # of 11 GB
