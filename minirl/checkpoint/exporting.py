"""Hugging Face folders: what their files hold, which rank writes them, and the writers.

Models in training are exported in the background; checkpoints of runs and merged adapters by
`python -m minirl.checkpoint`.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoTokenizer

from minirl.base.files import (
    attempt,
    describe_failure,
    library_writes,
    partial_of,
    publish_folder,
    remove,
    require_written,
    sync_files,
)
from minirl.checkpoint.finding import Unreadable
from minirl.data.tokenizer import filling_token_id, stop_token_ids
from minirl.model import build, causal, families
from minirl.model.adapters import files
from minirl.parallel.fsdp import local
from minirl.parallel.mesh import Mesh
from minirl.parallel.regions import CheckpointSlice, ShardedTensor, collect, regions_of_ranks
from minirl.train.policy import Policy

MAX_FILE_BYTES = 4 * 2**30  # Of a safetensors file.
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

    def dtype_in_file(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which a tensor of some dtype is written."""
        # A router's correction is float32 in any file: rounded it would choose other experts.
        return dtype if name.endswith("e_score_correction_bias") else self.dtype


def plan_folder(
    source: Path,
    shapes: dict[str, torch.Size],
    dtype: torch.dtype,
    world_size: int,
) -> FolderPlan:
    """Return what is written where. Every rank finds the same.

    Args:
        source: the folder whose config and tokenizer are taken.
        shapes: the shapes of the model's tensors, by name.
        dtype: the dtype of the files' weights.
        world_size: number of ranks, which take turns.
    """
    config = build.read_config(source)
    slices = {}
    sizes = {}
    for name, shape in shapes.items():
        slices[name] = families.checkpoint_slices(config, name, shape)
        sizes[name] = torch.empty(shape, dtype=dtype, device="meta")
    split = split_torch_state_dict_into_shards(sizes, max_shard_size=MAX_FILE_BYTES)

    files = split.filename_to_tensors
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
        files,
        {file: number % world_size for number, file in enumerate(files)},  # Of about equal size.
        index,
    )


def write_files_of_rank(plan: FolderPlan, folder: Path, rank: int, read: Reader) -> None:
    """Write what falls to a rank of a folder, one file after the other, and bring it to the disk.

    Args:
        plan: what belongs into the folder.
        folder: where to; it exists.
        rank: the rank that writes.
        read: returns the tensors of a file, in any dtype.

    Raises:
        OSError: a file cannot be written.
    """
    for file, writer in plan.writers.items():
        if writer != rank:
            continue
        weights = {}
        for name, t in read(plan.files[file]).items():
            in_file = t.to(plan.dtype_in_file(name, t.dtype))
            for part in plan.slices[name]:
                weights[part.name] = part.of(in_file).contiguous()
        with library_writes():
            save_file(weights, folder / file, metadata={"format": "pt"})
        # The library lets nobody else read it.
        (folder / file).chmod(folder.stat().st_mode & 0o666)
        sync_files([folder / file])
    if rank == 0:
        with library_writes():
            write_companions(plan, folder)
        sync_files(folder.iterdir())


def write_companions(plan: FolderPlan, folder: Path) -> None:
    """Write index, config, tokenizer, generation config and image processor."""
    source = plan.source
    if plan.index:
        text = json.dumps(plan.index, indent=2)
        (folder / "model.safetensors.index.json").write_text(text)
    config = build.read_config(source)
    config.dtype = plan.dtype
    tokenizer = AutoTokenizer.from_pretrained(source)
    if causal.SCORE in plan.shapes:
        config.architectures = [families.score_class(config, str(source))]
        config.num_labels = 1
        stops = stop_token_ids(tokenizer, source)
        config.pad_token_id = filling_token_id(tokenizer, stops, str(source))
        config.get_text_config().pad_token_id = config.pad_token_id
        tokenizer.pad_token_id = config.pad_token_id
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    rewrite_json(folder / "config.json", write_rope_alike)
    rewrite_json(folder / "tokenizer_config.json", name_special_tokens)
    # The library would refuse to write some generation configs that it reads.
    for file in [*source.glob("generation_config.json"), *source.glob("*processor_config.json")]:
        shutil.copy(file, folder)


def rewrite_json(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the values of a JSON file."""
    values = json.loads(path.read_bytes())
    change(values)
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n")


def write_rope_alike(config: dict[str, Any]) -> None:
    """Give the rotary positions of a config.json their former names, too.

    transformers 4 and vLLM with it read `rope_theta` and `rope_scaling`, and would take the base
    10,000 where only transformers 5's `rope_parameters` is.
    """
    for values in (config, config.get("text_config", {})):
        rope = values.get("rope_parameters") or {}
        if "rope_theta" not in rope:  # Or by kinds of layers, for which there is no former name.
            continue
        values["rope_theta"] = rope["rope_theta"]
        if rope["rope_type"] != "default":
            scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
            values["rope_scaling"] = scaling


def name_special_tokens(config: dict[str, Any]) -> None:
    """Give class and special tokens in a tokenizer_config.json the names that transformers 4 reads.

    There, `extra_special_tokens` is a dictionary, and a list of that name an error.
    """
    if config.get("tokenizer_class") == "TokenizersBackend":
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(config.get("extra_special_tokens"), list):
        config["additional_special_tokens"] = config.pop("extra_special_tokens")


def export(policy: Policy, folder: Path, *, weights: Mapping[str, Tensor] | None = None) -> None:
    """Write a Hugging Face folder that `transformers` and vLLM load. Collective.

    Args and errors are those of `Exporter.start`.
    """
    exporter = Exporter(policy.mesh)
    exporter.start(policy, folder, weights=weights)
    exporter.wait()


class Exporter:
    """The writer of Hugging Face folders: training continues while threads write.

    All ranks call its methods alike. Each rank writes other files, from a copy in host memory. The
    folder is written under another name, and `wait` renames it when all ranks are done.
    """

    def __init__(self, mesh: Mesh):
        self.mesh = mesh
        self.thread = ThreadPoolExecutor(1, "export")
        self.folder = Path()  # Of the export under way.
        self.pending: Future[None] | None = None

    def start(
        self,
        policy: Policy,
        folder: Path,
        *,
        weights: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Copy a model to its writers and begin to write it, after any export under way.

        On return the weights may change, and each rank has those of its files in host memory.

        Args:
            policy: the model; weights are written in the dtype of its forward.
            folder: replaced if it exists.
            weights: weights in place of the policy's, by the same names.

        Raises:
            UserError: this or the last folder could not be written.
        """
        self.wait()
        plan, read = copy_model(policy, weights=weights)
        rank = self.mesh.rank
        self.write(folder, lambda partial: write_files_of_rank(plan, partial, rank, read))

    def write(self, folder: Path, write: Callable[[Path], None]) -> None:
        """Begin to write a folder, after any export under way.

        Args:
            folder: replaced if it exists.
            write: writes what falls to this rank into a folder; a thread calls it.

        Raises:
            UserError: this or the last folder could not be written.
        """
        self.wait()
        self.folder = folder
        partial = partial_of(folder)

        def make_folder() -> None:
            remove(partial)
            partial.mkdir(parents=True)

        self._on_rank_0(make_folder)
        self.pending = self.thread.submit(write, partial)

    def wait(self) -> None:
        """Wait for the export under way, and give its folder its name. Collective.

        Raises:
            Unreadable: what should be written comes from a checkpoint that cannot be read.
            UserError: a rank could not write.
        """
        pending = self.pending
        self.pending = None
        if pending is None:
            return
        error = pending.exception()  # when the thread has ended
        failures = self.mesh.gather(describe_failure(error, self.mesh.rank))
        if any(self.mesh.gather(isinstance(error, Unreadable))):
            self._on_rank_0(lambda: remove(partial_of(self.folder)))
            raise Unreadable(
                "; ".join(filter(None, failures)) + ": the checkpoint is damaged, or the run has "
                "removed it meanwhile (checkpoint.keep); export another one by --step"
            )
        require_written(self.folder, partial_of(self.folder), failures)
        self._on_rank_0(lambda: publish_folder(self.folder))

    def _on_rank_0(self, change: Callable[[], None]) -> None:
        """Change folders on rank 0 while the others wait. UserError everywhere if it fails."""
        failure = attempt(change, 0) if self.mesh.rank == 0 else ""
        require_written(self.folder, partial_of(self.folder), self.mesh.gather(failure))


def export_adapter(policy: Policy, folder: Path) -> None:
    """Write the adapters of a policy in PEFT's format. Collective.

    Args:
        policy: has adapters.
        folder: is there whole or not at all; one that is there is replaced.

    Raises:
        UserError: it cannot be written.
    """
    policy.shards()  # which reshards the model
    tensors = files.gather_adapter(policy.model, is_writer=policy.mesh.rank == 0)
    described = files.describe(policy.model, policy.cfg, policy.folder)
    publish_adapter(tensors, described, folder, policy.mesh)


def publish_adapter(
    tensors: dict[str, Tensor], described: dict[str, Any], folder: Path, mesh: Mesh
) -> None:
    """Write an adapter. Collective; rank 0 writes.

    Args:
        tensors: tensors of adapter_model.safetensors, by PEFT's names.
        described: what adapter_config.json says.
        folder: is there whole or not at all; one that is there is replaced.
        mesh: the ranks.

    Raises:
        UserError: it cannot be written.
    """

    def write(partial: Path) -> None:
        if mesh.rank == 0:
            files.write_adapter(tensors, described, partial)

    exporter = Exporter(mesh)
    exporter.write(folder, write)
    exporter.wait()


def copy_model(
    policy: Policy, *, weights: Mapping[str, Tensor] | None = None
) -> tuple[FolderPlan, Reader]:
    """Copy to host memory what each rank will write of a model's folder. Collective.

    On return the weights may change. Args as of `Exporter.start`.

    Returns:
        The plan of the folder, and what returns the tensors of this rank's files, each once.
    """
    mesh = policy.mesh
    tensors = weights or policy.merged()
    shards = policy.shards()
    shapes = {name: t.shape for name, t in shards.items()}
    dtype = getattr(torch, policy.cfg.dtype)
    plan = plan_folder(policy.folder, shapes, dtype, mesh.world_size)
    waiting = collect_files_of_rank(plan, shards, tensors, mesh)

    def read(names: list[str]) -> dict[str, Tensor]:
        return {name: waiting.pop(name) for name in names}  # freed when its file is written

    return plan, read


def collect_files_of_rank(
    plan: FolderPlan, shards: dict[str, Tensor], values: Mapping[str, Tensor], mesh: Mesh
) -> dict[str, Tensor]:
    """Return a copy of the tensors that this rank writes, whole and in host memory. Collective.

    A rank receives these and no others. On the device one of them is whole at a time.

    Args:
        plan: which rank writes which tensor.
        shards: this rank's parts of all of them, by name, for their shapes and dtypes.
        values: the same with the values that are written.
        mesh: the ranks.
    """
    # Who receives which tensor in each round: the largest first, of one dtype.
    queues: dict[torch.dtype, dict[int, list[str]]] = {}
    for file, rank in plan.writers.items():
        for name in plan.files[file]:
            dtype = plan.dtype_in_file(name, shards[name].dtype)
            queues.setdefault(dtype, {}).setdefault(rank, []).append(name)
    regions = dict(zip(shards, regions_of_ranks(list(shards.values()), mesh), strict=True))
    collected = {}
    for dtype, names_of_rank in queues.items():
        for names in names_of_rank.values():
            names.sort(key=lambda name: -shards[name].numel())
        for number in range(max(map(len, names_of_rank.values()))):
            wanted = {}
            for rank, names in names_of_rank.items():
                if number < len(names):
                    t = values[names[number]]
                    shard = local(t.detach()).to(mesh.device, dtype)
                    wanted[rank] = ShardedTensor(t.shape, shard, regions[names[number]])
            whole = collect(wanted, mesh)
            if whole is not None:
                collected[names_of_rank[mesh.rank][number]] = whole.to("cpu")
    return collected
