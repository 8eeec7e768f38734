"""What a model's files hold, and how each rank reads its own part of it."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from minirl.base.errors import require
from minirl.model import families
from minirl.model.adapters import lora, nf4
from minirl.model.weight_files import check_floats, file_of, open_weights
from minirl.parallel import fsdp
from minirl.parallel.regions import CheckpointSlice, intersect, view_of

SCORE = "score.weight"


def buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the few buffers that are no function of the config: a router's correction."""
    persistent = {}
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                persistent[f"{prefix}.{name}"] = buffer
    return persistent


def parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of a model, and the buffers that its files hold, by name."""
    return dict(model.named_parameters()) | buffers(model)


def tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return all that a model's files hold. A tied head appears once, under the embedding's name.

    Adapters are not among it. A weight that is held in four bits is on the meta device.
    """
    packed = packed_weights(model)
    weights = {}
    for name, t in parameters(model).items():
        if name in packed:
            weights[name] = nf4.layout(packed[name], t)
        elif not lora.is_adapter(name) and not name.endswith(nf4.SCALES):
            weights[name] = t
    return weights


def packed_weights(model: Any) -> dict[str, nf4.Packed]:
    """Return what is known of the weights that are held in four bits, by name."""
    return model.adapters.packed if model.adapters else {}


def share_base(model: Any, base: Any) -> None:
    """Let the frozen parameters of a model be those of another one, which has the same base.

    `model.shared` gets their names. They are not copied, but for shards that are uneven, which
    FSDP pads. What either of the two trains is not shared.

    Args:
        model: on the meta device, sharded as the other.
        base: filled.
    """
    fsdp.reshard(base)
    of_base = dict(base.named_parameters())
    for module_name, module in model.named_modules():
        for name, p in module.named_parameters(recurse=False):
            whole_name = f"{module_name}.{name}"
            theirs = of_base.get(whole_name)
            if theirs is None or theirs.requires_grad or p.requires_grad:
                continue
            module.register_parameter(name, nn.Parameter(theirs.detach(), requires_grad=False))
            model.shared.add(whole_name)
    for name, packed in packed_weights(model).items():
        if name in model.shared:
            packed.take(packed_weights(base)[name])


@torch.no_grad()
def load_weights(
    model: Any, folder: Path, device: torch.device, *, cpu_offload: bool = False
) -> None:
    """Materialise a sharded meta model and fill this rank's shards.

    A score head that the folder lacks, because it holds a language model, starts at 0.

    Args:
        model: on the meta device, but for what it shares with another.
        folder: a Hugging Face folder.
        device: where the model computes.
        cpu_offload: parameters are kept on the host (buffers are not).

    Raises:
        UserError: the files hold other names or shapes than the model, numbers that are no floats,
            or, where this rank reads them, NaN or infinity.
    """
    # 1. The files hold the model's weights, all of them and nothing else.
    weights = open_weights(folder)
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
    pattern = "|".join([r"^(language_model\.)?lm_head\.weight$", r"rotary_emb\.inv_freq$", *unused])
    extra = [name for name in weights.keys() - in_model if not re.search(pattern, name)]
    require(
        not wrong and not extra,
        f"policy.model = {folder}: the weights do not fit its config.json; missing or of another "
        f"shape: {wrong[:3]}, not of the model: {sorted(extra)[:3]}",
    )

    check_floats(in_model, weights, folder)

    # 2. Each rank fills its shards.
    allocate(model, device, cpu_offload=cpu_offload)
    packed = packed_weights(model)
    for name, t in tensors(model).items():
        if name in model.shared:
            continue
        if name in packed:
            whole = torch.empty(t.shape, dtype=t.dtype)
            fill_shard(whole, slices[name], weights)
            _check_finite(whole, slices[name], folder)
            bits, scales = (model.get_parameter(p) for p in (name, f"{name}_{nf4.SCALES}"))
            nf4.fill(packed[name], whole.to(device), bits, scales)
        elif name in slices:
            fill_shard(t, slices[name], weights)
            _check_finite(t, slices[name], folder)
        else:
            t.zero_()


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


def _check_finite(t: Tensor, slices: list[CheckpointSlice], folder: Path) -> None:
    """Raise UserError if this rank has read NaN or infinity, naming the weight and its file.

    Args:
        t: a parameter, filled.
        slices: what it is made of in files.
        folder: that was read.
    """
    read = fsdp.local(t)
    if is_finite(read):
        return
    shard = fsdp.local_region(t)
    for part in slices:
        common = intersect(part.region, shard)
        if common is None:
            continue
        values = view_of(read, common, shard.offset)
        num_wrong = int((~values.isfinite()).sum())
        require(
            not num_wrong,
            f"policy.model = {folder}: {part.name} in {file_of(part.name, folder)} has NaN or "
            f"infinity at {num_wrong} of {values.numel()} places; nothing can be learnt from "
            "there, so take another checkpoint",
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
    _init_buffers(model, device)


def fill_shard(t: Tensor, slices: list[CheckpointSlice], weights: dict[str, Any]) -> None:
    """Read this rank's shard of a parameter, in place, and only its bytes of the files."""
    shard = fsdp.local_region(t)
    for part in slices:
        common = intersect(part.region, shard)
        if common is None:  # a small tensor may leave a rank with nothing
            continue
        target = view_of(fsdp.local(t), common, shard.offset)
        values = view_of(weights[part.name], part.to_file(common))
        target.copy_(part.from_file(values))


def _init_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Compute rotary frequencies and the like, which are in no checkpoint."""
    for p in model.parameters():
        p._is_hf_initialized = True  # type: ignore[attr-defined]  # or they would be drawn anew
    # A tower is a model of its own, with its own rules. It comes behind the one that it is in.
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            for module in part.modules():
                if module._buffers:
                    part._init_weights(module)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)
