"""What a model's files hold, and how each rank reads its part of it."""

import hashlib
import math
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from minirl.base.errors import UserError, require
from minirl.base.reading import read_json
from minirl.model import families
from minirl.model.adapters import nf4
from minirl.model.causal import SCORE, packed_weights, tensors
from minirl.parallel import fsdp
from minirl.parallel.regions import CheckpointSlice, intersect, local_region, view_of

# gpt-oss is published in MXFP4 and read as bfloat16. A weight is one of 16 values times a power of
# two that 32 neighbours share (OCP Microscaling Formats (MX) Specification 1.0, sec. 5), so that
# nothing is rounded.
MXFP4_BLOCKS = "_blocks"  # Ends the name of the values, two in a byte.
MXFP4_SCALES = "_scales"  # Ends the name of the exponents.
BLOCK = 32  # Weights that share an exponent.
# What weights may be, by the names of safetensors.
FLOATS = ("F16", "BF16", "F32", "F64")
SAMPLES = 4  # Of a file's bytes, for `hash_of_weights`.
SAMPLE_BYTES = 2**14
HEAD = r"^(language_model\.)?lm_head\.weight$"


class Mxfp4Weight:
    """The matrices of all experts in a file, [E, in, out], which stores them as [E, out, in]."""

    def __init__(self, blocks: Any, scales: Any):
        """Read nothing yet.

        Args:
            blocks: slices like a tensor [E, out, in / 32, 16].
            scales: slices like a tensor [E, out, in / 32].
        """
        self.blocks = blocks
        self.scales = scales

    def get_shape(self) -> list[int]:
        """Return the shape, as safetensors do."""
        num_experts, rows, num_blocks, _ = self.blocks.get_shape()
        return [num_experts, num_blocks * BLOCK, rows]

    def get_dtype(self) -> str:
        """Return what the values become, by safetensors' name."""
        return "BF16"

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor:
        """Read a region, and what else is in its blocks. `index`: slices with start and stop."""
        experts, columns, rows = index
        first = columns.start // BLOCK
        place = (experts, rows, slice(first, math.ceil(columns.stop / BLOCK)))
        values = convert_moe_packed_tensors(self.blocks[place], self.scales[place])
        return values[:, columns.start - first * BLOCK : columns.stop - first * BLOCK]


def open_weights(folder: Path, setting: str = "policy.model") -> dict[str, Any]:
    """Open the safetensors files of a model's folder, and read none of their weights yet.

    Args:
        folder: a Hugging Face folder.
        setting: the setting that names the model, for errors.

    Returns:
        Name of a weight -> what has its shape (`get_shape`) and reads what an index asks for.

    Raises:
        UserError: a file cannot be read.
    """
    weights = {}
    for path in weight_files(folder, setting):
        try:
            file = safe_open(path, framework="pt", device="cpu")
        except (SafetensorError, OSError) as error:
            raise UserError(f"{setting}: cannot read {path}: {error}") from error
        names = file.keys()
        for name in names:
            weights[name] = file.get_slice(name)
    for blocks in [name for name in weights if name.endswith(MXFP4_BLOCKS)]:
        name = blocks.removesuffix(MXFP4_BLOCKS)
        scales = name + MXFP4_SCALES
        if scales in weights:
            weights[name] = Mxfp4Weight(weights.pop(blocks), weights.pop(scales))
    return weights


def hash_of_weights(folder: Path) -> str:
    """Return what stands for a model's weights: a hash of its files' sizes and samples of bytes.

    Raises:
        UserError: the index of the files is not one.
    """
    digest = hashlib.sha256()
    for path in weight_files(folder):
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            for number in range(SAMPLES):
                file.seek(number * size // SAMPLES)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def weight_files(folder: Path, setting: str = "policy.model") -> list[Path]:
    """Return the files that an index names, or else the single file, or else all there are.

    Raises:
        UserError: the index is not one.
    """
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    if index.exists():
        read = read_json(index, f"{setting}:")
        file_of_weight: Any = read.get("weight_map") if isinstance(read, dict) else None
        if not isinstance(file_of_weight, dict):
            raise UserError(
                f"{setting}: {index} has no weight_map of names and files; write it as "
                "save_pretrained does, or remove it"
            )
        return sorted({folder / str(file) for file in file_of_weight.values()})
    return [single] if single.exists() else sorted(folder.glob("*.safetensors"))


def share_base(model: Any, base: Any) -> None:
    """Let the frozen parameters of a model be those of another one, which has the same base.

    `model.shared` gets their names. They are not copied, but for shards that are uneven, which
    FSDP pads. What either of the two trains is not shared.

    Args:
        model: on the meta device, sharded as the other.
        base: filled.
    """
    fsdp.reshard(base)
    base_parameters = dict(base.named_parameters())
    for module_name, module in model.named_modules():
        for name, p in module.named_parameters(recurse=False):
            whole_name = f"{module_name}.{name}"
            theirs = base_parameters.get(whole_name)
            if theirs is None or theirs.requires_grad or p.requires_grad:
                continue
            module.register_parameter(name, nn.Parameter(theirs.detach(), requires_grad=False))
            model.shared.add(whole_name)
    for name, packed in packed_weights(model).items():
        if name in model.shared:
            packed.take(packed_weights(base)[name])


@torch.no_grad()
def load_weights(
    model: Any,
    folder: Path,
    device: torch.device,
    *,
    cpu_offload: bool = False,
    setting: str = "policy.model",
) -> None:
    """Materialise a sharded meta model and fill this rank's shards.

    A score head that the folder lacks, because it holds a language model, starts at 0.

    Args:
        model: on the meta device, but for what it shares with another.
        folder: a Hugging Face folder.
        device: where the model computes.
        cpu_offload: parameters are kept on the host (buffers are not).
        setting: the setting that names the model, for errors.

    Raises:
        UserError: the files hold other names or shapes than the model, numbers that are no floats,
            or, where this rank reads them, NaN or infinity.
    """
    # 1. The files hold the model's weights, all of them and nothing else.
    where = f"{setting} = {folder}"
    weights = open_weights(folder, setting)
    slices = {}
    in_model = {}
    for name, t in tensors(model).items():
        if name != SCORE or SCORE in weights:
            expected = families.checkpoint_slices(model.config, name, t.shape)
            slices[name] = [_as_in_file(part, weights, model.config) for part in expected]
            for part in slices[name]:
                in_model[part.name] = list(part.to_file(part.region).size)
    wrong = [
        name
        for name, shape in in_model.items()
        if name not in weights or weights[name].get_shape() != shape
    ]
    # Some old files keep buffers that are a function of the config, some new ones layers that only
    # a speculating engine uses, and a tied head may be there as well.
    unused = model._keys_to_ignore_on_load_unexpected or []
    pattern = "|".join([HEAD, r"rotary_emb\.inv_freq$", *unused])
    others = weights.keys() - in_model
    extra = [name for name in others if not re.search(pattern, name)]
    require(
        not wrong and not extra,
        f"{where}: the weights do not fit its config.json; missing or of another "
        f"shape: {wrong[:3]}, not of the model: {sorted(extra)[:3]}",
    )
    if "lm_head" in model._modules:
        check_tied([name for name in others if re.search(HEAD, name)], in_model, weights, where)
    for name in in_model:  # Integers without their scales would be copied as they are.
        dtype = weights[name].get_dtype()
        require(
            dtype in FLOATS,
            f"{where}: {name} is of dtype {dtype}; take a model that is not "
            f"quantized, with weights of {', '.join(FLOATS)}",
        )

    # 2. Each rank fills its shards.
    if model.adapters:
        model.adapters.base = hash_of_weights(folder)
    allocate(model, device, cpu_offload=cpu_offload)
    packed = packed_weights(model)
    for name, t in tensors(model).items():
        if name in model.shared:
            continue
        if name in packed:
            whole = torch.empty(t.shape, dtype=t.dtype)
            fill_shard(whole, slices[name], weights)
            check_finite(name, whole, where)
            bits, scales = (model.get_parameter(p) for p in (name, f"{name}_{nf4.SCALES}"))
            nf4.fill(packed[name], whole.to(device), bits, scales)
        elif name in slices:
            fill_shard(t, slices[name], weights)
            check_finite(name, t, where)
        else:
            t.zero_()


def check_tied(
    heads: Iterable[str], in_model: Iterable[str], weights: dict[str, Any], where: str
) -> None:
    """Refuse a head in the files that a model ties to an embedding of other values.

    The library would then not tie them. The first rows tell.

    Args:
        heads: names of heads in the files that the model does not read.
        in_model: names that it reads.
        weights: of the files, by name.
        where: the setting and the folder, for the error.

    Raises:
        UserError: they differ.
    """
    for head in heads:
        embedding = next(name for name in in_model if name.endswith("embed_tokens.weight"))
        shape = weights[head].get_shape()
        rows = (slice(0, min(256, shape[0])), slice(0, shape[1]))
        require(
            weights[embedding].get_shape() == shape
            and torch.equal(weights[embedding][rows], weights[head][rows]),
            f"{where}: its config.json ties {head} to {embedding}, and the files "
            "have other values for it; set tie_word_embeddings to what the weights are",
        )


def _as_in_file(
    part: CheckpointSlice, weights: dict[str, Any], config: PretrainedConfig
) -> CheckpointSlice:
    """Return a slice as the files have it, which the library writes in another form.

    Some names are shorter there. Transposed slices are the other way round, which it tells by their
    shapes, too.
    """
    if part.name not in weights:
        for name, newer in families.FAMILIES[config.model_type].newer_files.items():
            part = replace(part, name=part.name.replace(name, newer))
    if not part.transposed or part.name not in weights:
        return part
    plain = replace(part, transposed=False)
    is_plain = weights[part.name].get_shape() == list(plain.to_file(part.region).size)
    return plain if is_plain else part


def is_finite(t: Tensor) -> bool:
    """Return whether a weight is free of NaN and infinity.

    Single numbers are bounds, which are infinite where nothing is bounded.
    """
    return bool(t.isfinite().all()) or (t.ndim == 0 and not t.isnan())


def check_finite(name: str, t: Tensor, where: str) -> None:
    """Refuse a parameter of which this rank has read NaN or infinity.

    Args:
        name: the parameter's name.
        t: the parameter, filled.
        where: the setting and the folder, for the error.

    Raises:
        UserError: so it is.
    """
    require(
        is_finite(fsdp.local(t)),
        f"{where}: {name} has NaN or infinity; nothing can be learnt from there, "
        "so take another checkpoint",
    )


def allocate(model: PreTrainedModel, device: torch.device, *, cpu_offload: bool) -> None:
    """Give a sharded meta model memory, which is not filled, and its buffers their values.

    Args:
        model: on the meta device, but for what it shares with another.
        device: where the model computes.
        cpu_offload: parameters are kept on the host (buffers are not).
    """
    own = torch.device("cpu") if cpu_offload else device
    model._apply(lambda t: torch.empty_like(t, device=own) if t.is_meta else t)
    # Rotary frequencies and the like are in no checkpoint.
    for p in model.parameters():
        p._is_hf_initialized = True  # or they would be drawn again
    # A tower is a model with its own rules. It comes after the model that it is in.
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            for module in part.modules():
                if module._buffers:
                    part._init_weights(module)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)


def fill_shard(t: Tensor, slices: list[CheckpointSlice], weights: dict[str, Any]) -> None:
    """Read this rank's shard of a parameter, in place, and only its bytes of the files."""
    shard = local_region(t)
    for part in slices:
        common = intersect(part.region, shard)
        if common is None:  # a small tensor may leave a rank with nothing
            continue
        target = view_of(fsdp.local(t), common, shard.offset)
        values = view_of(weights[part.name], part.to_file(common))
        target.copy_(part.from_file(values))
