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
from transformers import AutoTokenizer, GenerationConfig, PretrainedConfig

from minirl.checkpoint.state import find_best, finished, saved_shapes
from minirl.config.parse import load_config
from minirl.config.shared import ExportConfig, PolicyConfig
from minirl.data import chat
from minirl.errors import UserError, require
from minirl.model import build, families
from minirl.parallel.mesh import Mesh
from minirl.policy import Policy


def export(
    policy: Policy,
    folder: Path,
    *,
    weights: dict[str, Tensor] | None = None,
    max_file_gb: float = 4.0,
) -> None:
    """Write a Hugging Face folder that `transformers` and vLLM load. Collective.

    Args:
        policy: the model; weights are written in the dtype of its forward.
        folder: replaced if it exists.
        weights: others than the policy's, by the same names.
        max_file_gb: size of a safetensors file, in GiB.
    """
    shards = weights or policy.shards()

    def gather(names: list[str], is_writer: bool) -> dict[str, Tensor]:
        whole = {}
        for name in names:
            shard = shards[name].detach()
            t = shard.full_tensor() if isinstance(shard, DTensor) else shard
            if is_writer:
                whole[name] = t.to("cpu")
        return whole

    shapes = {name: shard.shape for name, shard in shards.items()}
    dtype = getattr(torch, policy.cfg.dtype)
    _write_folder(folder, shapes, gather, policy.folder, dtype, policy.mesh, max_file_gb)


def _write_folder(
    folder: Path,
    shapes: dict[str, torch.Size],
    read: Callable[[list[str], bool], dict[str, Tensor]],
    source: Path,
    dtype: torch.dtype,
    mesh: Mesh,
    max_file_gb: float = 4.0,
) -> None:
    """Write a Hugging Face folder beside its final name, and rename it. Collective.

    Files are written by ranks in turn, so that one weight is whole at a time, and one file on one
    rank only.

    Args:
        folder: replaced if it exists.
        shapes: of the model's tensors, by name.
        read: (names, is_writer) -> these tensors in host memory on the rank that writes them, and
            nothing on others. Collective.
        source: the folder whose config and tokenizer are taken.
        dtype: of the files' weights.
        mesh: the ranks.
        max_file_gb: size of a safetensors file, in GiB.
    """
    config = build.read_config(source)
    slices = {
        name: families.checkpoint_slices(config, name, shape) for name, shape in shapes.items()
    }
    sizes = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()}
    plan = split_torch_state_dict_into_shards(sizes, max_shard_size=int(max_file_gb * 2**30))

    partial = Path(f"{folder}.partial")
    if mesh.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    mesh.barrier()
    for i, (file, names) in enumerate(plan.filename_to_tensors.items()):
        is_writer = i % mesh.world_size == mesh.rank
        weights = {}
        for name, t in read(names, is_writer).items():
            # A router's correction is float32 in any file: rounded it would choose other experts.
            if not name.endswith("e_score_correction_bias"):
                t = t.to(dtype)
            for part in slices[name]:
                weights[part.name] = part.of(t).clone(memory_format=torch.contiguous_format)
        if is_writer:
            save_file(weights, partial / file, metadata={"format": "pt"})
    mesh.barrier()
    if mesh.rank == 0:
        if plan.is_sharded:
            file_of_weight = {}
            for name, file in plan.tensor_to_filename.items():
                for part in slices[name]:
                    file_of_weight[part.name] = file
            index = {"metadata": plan.metadata, "weight_map": file_of_weight}
            (partial / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
        config.dtype = dtype
        _write_companions(config, source, partial, score=build.SCORE in shapes)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    mesh.barrier()


def _write_companions(config: PretrainedConfig, source: Path, folder: Path, *, score: bool) -> None:
    """Write config, tokenizer, generation config and image processor."""
    tokenizer = AutoTokenizer.from_pretrained(source)
    if score:
        config.architectures = [families.score_class(config, str(source))]
        config.num_labels = 1
        stops = chat.stop_token_ids(tokenizer, source)
        config.pad_token_id = chat.filling_token_id(tokenizer, stops, str(source))
        tokenizer.pad_token_id = config.pad_token_id
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if (source / "generation_config.json").exists():
        GenerationConfig.from_pretrained(source).save_pretrained(folder)
    for file in source.glob("*processor_config.json"):  # for images
        shutil.copy(file, folder)


def choose(run: Path, step: int | None, best: bool) -> Path:
    """Return the checkpoint that flags name; by default the newest.

    Args:
        run: the folder of a run.
        step: the flag --step.
        best: the flag --best.

    Raises:
        UserError: there is no such checkpoint.
    """
    require(
        (run / "config.yaml").is_file(),
        f"run = {run} is not the folder of a run: it has no config.yaml",
    )
    steps = finished(run)
    require(
        steps,
        f"run = {run} has no finished checkpoint; checkpoint.every of the run says when there is "
        "one",
    )
    require(
        step is None or not best, f"--step {step} and --best name two checkpoints; give one of them"
    )
    if best:
        scored = find_best(run)
        if scored is None:
            raise UserError(
                f"--best: no checkpoint of {run} is marked as the best, which "
                f"checkpoint.best_metric asks for; use --step, one of {list(steps)}"
            )
        step = scored["step"]
    elif step is None:
        step = max(steps)
    require(step in steps, f"--step {step}: {run} has no such checkpoint; use one of {list(steps)}")
    return steps[step]


def export_checkpoint(cfg: ExportConfig, mesh: Mesh) -> None:
    """Export a checkpoint of a run.

    Each rank reads the weights of its own files and nothing else: no model is built, no optimizer
    state is read.

    Raises:
        UserError: there is no such checkpoint, or the output folder exists.
    """
    run = Path(cfg.run)
    checkpoint = choose(run, cfg.step, cfg.best)
    policy = load_config(PolicyConfig, str(run / "config.yaml"), section="policy")
    if policy.model == "scratch":
        source = run / "scratch"
    else:
        source = build.find_folder(policy.model, "policy.model")
    output = Path(cfg.output or run / f"model-{checkpoint.name}")
    require(not output.exists(), f"--output {output} exists; name another folder or remove it")
    mesh.barrier()  # all ranks have looked

    shapes = saved_shapes(checkpoint)
    if build.read_config(source).tie_word_embeddings:
        shapes.pop("lm_head.weight", None)
    dtype = getattr(torch, policy.dtype)
    master_dtype = torch.promote_types(dtype, torch.float32)

    def read(names: list[str], is_writer: bool) -> dict[str, Tensor]:
        if not is_writer:
            return {}
        whole = {name: torch.empty(shapes[name], dtype=master_dtype) for name in names}
        with warnings.catch_warnings():
            # On purpose: each rank reads on its own.
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            dcp.load({"model": whole}, checkpoint_id=checkpoint / "state", no_dist=True)
        return whole

    _write_folder(output, shapes, read, source, dtype, mesh)
    if mesh.rank == 0:
        print(output)
