"""Hugging Face folders of models in training, and of checkpoints."""

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from minirl.checkpoint.state import find_best, finished, saved_shapes
from minirl.config.parse import load_config
from minirl.config.shared import ExportConfig, PolicyConfig
from minirl.data import chat
from minirl.errors import require
from minirl.model import build, families
from minirl.parallel.mesh import Mesh
from minirl.policy import Policy


def export(
    policy: Policy,
    folder: Path,
    mesh: Mesh,
    *,
    weights: dict[str, Tensor] | None = None,
    max_file_gb: float = 4.0,
) -> None:
    """Write a Hugging Face folder that `transformers` and vLLM load, in the dtype of the forward.
    `weights`: others than the policy's, by the same names.
    """
    shards = weights or policy.shards()

    def gather(names: list[str], mine: bool) -> dict[str, Tensor]:
        whole = (
            (name, p.full_tensor() if isinstance(p, DTensor) else p)
            for name, p in ((name, shards[name].detach()) for name in names)
        )
        return {name: t.to("cpu") for name, t in whole if mine}

    _write_folder(
        folder,
        {name: p.shape for name, p in shards.items()},
        gather,
        policy.folder,
        getattr(torch, policy.cfg.dtype),
        mesh,
        max_file_gb,
    )


def _write_folder(
    folder: Path,
    shapes: dict[str, torch.Size],
    read: Callable[[list[str], bool], dict[str, Tensor]],
    source: Path,
    dtype: torch.dtype,
    mesh: Mesh,
    max_file_gb: float,
) -> None:
    """read(names, mine) -> those of the model's tensors in host memory where `mine`. Collective:
    one weight is whole at a time, and one file on one rank only: files are owned by ranks in turn.
    Config and tokenizer are those of `source`. Written beside and renamed.
    """
    config = build.read_config(source)
    parts = {name: families.parts(config, name, shape) for name, shape in shapes.items()}
    sizes = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()}
    files = split_torch_state_dict_into_shards(sizes, max_shard_size=int(max_file_gb * 2**30))
    partial = folder.with_name(folder.name + ".partial")
    if mesh.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    mesh.barrier()
    for i, (file, members) in enumerate(files.filename_to_tensors.items()):
        mine = i % mesh.world_size == mesh.rank
        tensors = {
            name: t if families.keeps_precision(name) else t.to(dtype)
            for name, t in read(members, mine).items()
        }
        if mine:
            save_file(
                {
                    part.name: part.of(t).clone(memory_format=torch.contiguous_format)
                    for name, t in tensors.items()
                    for part in parts[name]
                },
                partial / file,
                metadata={"format": "pt"},
            )
    mesh.barrier()
    if mesh.rank == 0:
        if files.is_sharded:
            index = {
                "metadata": files.metadata,
                "weight_map": {
                    part.name: file
                    for name, file in files.tensor_to_filename.items()
                    for part in parts[name]
                },
            }
            (partial / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
        _write_companions(source, partial, dtype, score=build.SCORE in shapes)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    mesh.barrier()


def _write_companions(source: Path, folder: Path, dtype: torch.dtype, *, score: bool) -> None:
    config, tokenizer = AutoConfig.from_pretrained(source), AutoTokenizer.from_pretrained(source)
    config.dtype = dtype
    if score:
        config.architectures, config.num_labels = [families.score_class(config, str(source))], 1
        config.pad_token_id = tokenizer.pad_token_id = chat.filling_token_id(
            tokenizer, chat.stop_token_ids(tokenizer, source), str(source)
        )
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if (source / "generation_config.json").exists():
        GenerationConfig.from_pretrained(source).save_pretrained(folder)
    for file in source.glob("*processor_config.json"):  # of what makes patches of images
        shutil.copy(file, folder)


def choose(run: Path, step: int | None, best: bool) -> Path:
    """The checkpoint that flags name; by default the newest. Raises UserError."""
    require(
        (run / "config.yaml").is_file(),
        f"run = {run} is not the folder of a run: it has no config.yaml",
    )
    steps, found = finished(run), find_best(run)
    require(
        steps,
        f"run = {run} has no finished checkpoint; checkpoint.every of the run says when there is one",
    )
    require(
        step is None or not best, f"--step {step} and --best name two checkpoints; give one of them"
    )
    require(
        found or not best,
        f"--best: no checkpoint of {run} is marked as the best, which checkpoint.best_metric asks for; use --step, one of {list(steps)}",
    )
    step = found["step"] if best else max(steps) if step is None else step
    require(step in steps, f"--step {step}: {run} has no such checkpoint; use one of {list(steps)}")
    return steps[step]


def export_checkpoint(cfg: ExportConfig, mesh: Mesh) -> None:
    """Each rank reads the weights of its own files and nothing else: no model is built, no
    optimizer state is read.
    """
    run = Path(cfg.run)
    checkpoint = choose(run, cfg.step, cfg.best)
    policy = load_config(PolicyConfig, str(run / "config.yaml"), section="policy")
    source = (
        run / "scratch"
        if policy.model == "scratch"
        else build.find_folder(policy.model, "policy.model")
    )
    output = Path(cfg.output) if cfg.output else run / f"model-{checkpoint.name}"
    require(not output.exists(), f"--output {output} exists; name another folder or remove it")
    mesh.barrier()  # all ranks have looked
    shapes = saved_shapes(checkpoint)
    if build.read_config(source).tie_word_embeddings:
        shapes.pop("lm_head.weight", None)
    master = torch.float64 if policy.dtype == "float64" else torch.float32

    def read(names: list[str], mine: bool) -> dict[str, Tensor]:
        tensors = {name: torch.empty(shapes[name], dtype=master) for name in names} if mine else {}
        if mine:
            with warnings.catch_warnings():
                warnings.filterwarnings(
                    "ignore", "torch.distributed is disabled"
                )  # meant so: each rank reads on its own
                dcp.load({"model": tensors}, checkpoint_id=checkpoint / "state", no_dist=True)
        return tensors

    _write_folder(output, shapes, read, source, getattr(torch, policy.dtype), mesh, max_file_gb=4.0)
    if mesh.rank == 0:
        print(output)
