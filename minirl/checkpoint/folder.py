"""A Hugging Face folder: what its files hold, which rank writes them, and what lies beside them."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoTokenizer

from minirl.data import chat
from minirl.model import build, families, loading
from minirl.parallel.regions import CheckpointSlice

# By names of the model's tensors: these tensors, whole and in host memory.
Reader = Callable[[list[str]], dict[str, Tensor]]


@dataclass(frozen=True)
class FolderPlan:
    """The files of a folder, and the rank that writes each of them."""

    source: Path  # The folder whose config and tokenizer are taken.
    dtype: torch.dtype  # Of the files' weights.
    shapes: dict[str, torch.Size]  # Of the model's tensors, by name.
    slices: dict[str, list[CheckpointSlice]]  # By name the weights that a tensor becomes.
    files: dict[str, list[str]]  # By safetensors file the tensors in it.
    writers: dict[str, int]  # By safetensors file the rank that writes it.
    # What model.safetensors.index.json says; None: there is one file, which needs none.
    index: dict | None

    def files_of(self, rank: int) -> list[str]:
        """Return the safetensors files that a rank writes."""
        return [file for file, writer in self.writers.items() if writer == rank]

    def dtype_in_file(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which a tensor of some dtype is written."""
        # A router's correction is float32 in any file: rounded it would choose other experts.
        return dtype if name.endswith("e_score_correction_bias") else self.dtype


def plan_folder(
    source: Path,
    shapes: dict[str, torch.Size],
    dtype: torch.dtype,
    world_size: int,
    max_file_gb: float = 4.0,
) -> FolderPlan:
    """Return what is written where. Every rank finds the same.

    Args:
        source: the folder whose config and tokenizer are taken.
        shapes: of the model's tensors, by name.
        dtype: of the files' weights.
        world_size: number of ranks, which share the files evenly by bytes.
        max_file_gb: size of a safetensors file, in GiB.
    """
    config = build.read_config(source)
    slices = {}
    sizes = {}
    for name, shape in shapes.items():
        slices[name] = families.checkpoint_slices(config, name, shape)
        sizes[name] = torch.empty(shape, dtype=dtype, device="meta")
    split = split_torch_state_dict_into_shards(sizes, max_shard_size=int(max_file_gb * 2**30))

    bytes_of_file = {}
    for file, names in split.filename_to_tensors.items():
        bytes_of_file[file] = sum(sizes[name].nbytes for name in names)
    index = None
    if split.is_sharded:
        file_of_weight = {}
        for name, file in split.tensor_to_filename.items():
            for part in slices[name]:
                file_of_weight[part.name] = file
        index = {"metadata": split.metadata, "weight_map": file_of_weight}
    return FolderPlan(
        source,
        dtype,
        shapes,
        slices,
        split.filename_to_tensors,
        spread(bytes_of_file, world_size),
        index,
    )


def spread(sizes: dict[str, int], world_size: int) -> dict[str, int]:
    """Give each file to a rank: the largest first, each to the rank that has fewest bytes."""
    totals = [0] * world_size
    writers = {}
    for file in sorted(sizes, key=lambda file: -sizes[file]):
        rank = totals.index(min(totals))
        writers[file] = rank
        totals[rank] += sizes[file]
    return writers


def write_files(plan: FolderPlan, folder: Path, rank: int, read: Reader) -> None:
    """Write the safetensors files of a rank, one after the other.

    Args:
        plan: of the folder.
        folder: where to.
        rank: whose files.
        read: returns the tensors of a file, in any dtype.
    """
    for file in plan.files_of(rank):
        weights = {}
        for name, t in read(plan.files[file]).items():
            in_file = t.to(plan.dtype_in_file(name, t.dtype))
            for part in plan.slices[name]:
                weights[part.name] = part.of(in_file).contiguous()
        save_file(weights, folder / file, metadata={"format": "pt"})


def write_companions(plan: FolderPlan, folder: Path) -> None:
    """Write index, config, tokenizer, generation config and image processor."""
    source = plan.source
    if plan.index:
        text = json.dumps(plan.index, indent=2)
        (folder / "model.safetensors.index.json").write_text(text)
    config = build.read_config(source)
    config.dtype = plan.dtype
    tokenizer = AutoTokenizer.from_pretrained(source)
    if loading.SCORE in plan.shapes:
        config.architectures = [families.score_class(config, str(source))]
        config.num_labels = 1
        stops = chat.stop_token_ids(tokenizer, source)
        config.pad_token_id = chat.filling_token_id(tokenizer, stops, str(source))
        tokenizer.pad_token_id = config.pad_token_id
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # The library would refuse to write some generation configs that it reads.
    for file in [*source.glob("generation_config.json"), *source.glob("*processor_config.json")]:
        shutil.copy(file, folder)
