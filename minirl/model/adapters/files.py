"""Adapters in PEFT's files: `adapter_model.safetensors` and `adapter_config.json`.

PEFT keeps A and B of a linear as `base_model.model.{module}.lora_A.weight`. For the fused tensors
of experts it has a wrapper each (`target_parameters`), one around the other: A of all experts is
[experts * rank, in], B is [out, rank * experts], with the expert as the last of its two dimensions.
"""

import contextlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from minirl.base.errors import UserError, require
from minirl.base.files import write_synced
from minirl.base.reading import is_file, library_reads
from minirl.config.policy import LoraConfig, PolicyConfig
from minirl.model.adapters.lora import FUSED, is_adapter, weight_of
from minirl.model.causal import trained
from minirl.model.loading import hash_of_weights, weight_files
from minirl.parallel.fsdp import local
from minirl.parallel.regions import local_region, view_of
from minirl.parallel.tensor import LORA_A, LORA_B

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
PREFIX = "base_model.model."
HEAD = "lm_head.weight"
PLAIN_STARTS = ("gaussian", "orthogonal", "eva")  # Starts of A and B that leave the base as it is.


def is_adapter_folder(folder: Path) -> bool:
    """Return whether a folder holds an adapter in PEFT's format."""
    return is_file(folder / CONFIG)


# --------------------------------------------------------------------------------------------------
# to write


@torch.no_grad()
def gather_adapter(model: nn.Module, *, is_writer: bool) -> dict[str, Tensor]:
    """Return what is trained as PEFT's file has it, in host memory of the writer. Collective.

    Args:
        model: with adapters, resharded.
        is_writer: whether this rank gets the tensors. The others only help to gather.
    """
    tensors = {}
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        whole = p.full_tensor() if isinstance(p, DTensor) else p
        if is_writer:
            tensors[name_in_file(name)] = to_file(name, whole.detach()).cpu().contiguous()
    if is_writer:
        add_tied_head(model, tensors)
    return tensors


def add_tied_head(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Add the head to tensors of PEFT's file where it is an embedding that is trained whole."""
    if embedding := tied_embedding(model):
        tensors[PREFIX + HEAD] = tensors[name_in_file(embedding)].clone()


def tied_embedding(model: nn.Module) -> str:
    """Return the name of an embedding that is trained whole and is the head, too; "": none is.

    PEFT wraps a module that is trained whole, and would leave the head as the base has it. So the
    files have the weight under both names.
    """
    weights = dict(model.named_parameters(remove_duplicate=False))
    head = weights.get(HEAD)
    if head is None or not head.requires_grad:
        return ""
    return next((name for name, p in weights.items() if p is head and name != HEAD), "")


def write_adapter(tensors: dict[str, Tensor], described: dict[str, Any], folder: Path) -> None:
    """Write an adapter.

    Args:
        tensors: as `gather_adapter` returns them.
        described: as `describe` returns it.
        folder: where to, which exists.
    """
    write_synced(folder / WEIGHTS, save(tensors, {"format": "pt"}))
    text = json.dumps(described, indent=2)
    write_synced(folder / CONFIG, f"{text}\n".encode())


def name_in_file(name: str) -> str:
    """Return the name of a trained parameter in PEFT's file."""
    if not is_adapter(name):
        return PREFIX + name
    module, _, last = weight_of(name).rpartition(".")
    which = LORA_A if name.endswith(LORA_A) else LORA_B
    inner = ".base_layer" if last == FUSED[0] else ""
    return f"{PREFIX}{module}{inner}.{which}.weight"


def to_file(name: str, t: Tensor) -> Tensor:
    """Return a trained parameter as PEFT's file has it."""
    if not is_adapter(name) or t.ndim == 2:
        return t
    if name.endswith(LORA_A):
        return t.flatten(0, 1)
    return t.permute(1, 2, 0).flatten(1, 2)


def from_file(name: str, t: Tensor, shape: torch.Size) -> Tensor:
    """Return what `to_file` made the tensor of. `shape`: of the parameter."""
    if not is_adapter(name) or len(shape) == 2:
        return t
    num_experts, num_out, rank = shape
    if name.endswith(LORA_A):
        return t.view(shape)
    return t.view(num_out, rank, num_experts).permute(2, 0, 1)


def describe(model: nn.Module, cfg: PolicyConfig, folder: Path) -> dict[str, Any]:
    """Return what PEFT's config file says of the adapters of a model.

    Args:
        model: has the adapters.
        cfg: settings of the model.
        folder: of the base, from where it was loaded.
    """
    is_of_hub = cfg.model not in ("", "scratch") and Path(cfg.model) != folder
    lora = cfg.lora
    modules = []
    parameters = []
    whole = set()
    for name, p in model.named_parameters():
        if name.endswith(LORA_B):
            weight = weight_of(name)
            module, _, last = weight.rpartition(".")
            if last in FUSED:
                parameters.append(weight)
            else:
                modules.append(module)
        elif p.requires_grad and not is_adapter(name):
            whole.add(name.rpartition(".")[0])
    if tied_embedding(model):
        whole.add(HEAD.removesuffix(".weight"))
    if parameters:
        # PEFT takes modules of these names for experts that a model has one by one.
        for module in list(modules):
            if module.rpartition(".")[2] in ("gate_proj", "up_proj", "down_proj"):
                modules.remove(module)
                parameters.append(f"{module}.weight")
    is_score = any(name == "score" for name, _ in model.named_children())
    described = {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if is_score else "CAUSAL_LM",
        "base_model_name_or_path": cfg.model if is_of_hub else str(folder.absolute()),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "use_rslora": lora.use_rslora,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "target_modules": modules,
        "modules_to_save": sorted(whole) or None,
    }
    if parameters:  # an older PEFT does not know them
        described["target_parameters"] = parameters
    return described


# --------------------------------------------------------------------------------------------------
# to read


def read_settings(folder: Path, setting: str) -> LoraConfig:
    """Return the settings that an adapter in PEFT's format was made by, with exact targets.

    Args:
        folder: of the adapter.
        setting: what names it, for messages.

    Raises:
        UserError: there is none, or it is of a kind that minirl does not have.
    """
    require(
        is_adapter_folder(folder),
        f"{setting} = {folder} has no {CONFIG}; give the folder of an adapter in PEFT's format",
    )
    with library_reads(f"{setting} = {folder}/{CONFIG}"):
        described = json.loads((folder / CONFIG).read_text())
    for name, plain in (
        ("peft_type", "LORA"),
        ("use_dora", False),
        ("bias", "none"),
        ("fan_in_fan_out", False),
        ("rank_pattern", {}),
        ("alpha_pattern", {}),
        ("alora_invocation_tokens", None),
    ):
        value = described.get(name, plain)
        require(
            value == plain,
            f"{setting} = {folder}: {name} is {value!r} in its {CONFIG}, and minirl has only "
            f"{plain!r}",
        )
    start = described.get("init_lora_weights", True)
    require(
        isinstance(start, bool) or start in PLAIN_STARTS,
        f"{setting} = {folder}: init_lora_weights is {start!r} in its {CONFIG}, by which PEFT "
        "changes the base whenever it loads the adapter; let PEFT convert it, by "
        "save_pretrained(..., path_initial_model_for_weight_conversion=...)",
    )
    for name in ("r", "lora_alpha"):
        require(name in described, f"{setting} = {folder}: its {CONFIG} says no {name}")
    return LoraConfig(
        rank=described["r"],
        alpha=described["lora_alpha"],
        use_rslora=described.get("use_rslora", False),
    )


def hash_if_here(base: Any) -> str:
    """Return what stands for the weights of a folder; empty: it is none, or cannot be read."""
    with contextlib.suppress(OSError, UserError):
        if isinstance(base, str) and base and weight_files(Path(base)):
            return hash_of_weights(Path(base))
    return ""


@torch.no_grad()
def read_adapter(model: nn.Module, cfg: LoraConfig, setting: str) -> None:
    """Fill this rank's shards of the adapters, and of what is trained whole, from PEFT's file.

    Args:
        model: with adapters, sharded, with memory.
        cfg: its settings; `cfg.adapter` is the folder.
        setting: of the folder, for messages.

    Raises:
        UserError: the adapter is of another rank, scale, base or set of targets than the model's,
            or cannot be read.
    """
    folder = Path(cfg.adapter)
    found = read_settings(folder, setting)
    section = setting.rpartition(".")[0]
    for name in ("rank", "alpha", "use_rslora"):
        there, here = vars(found)[name], vars(cfg)[name]
        require(
            there == here,
            f"{setting} = {folder} has {name} {there}, and {section}.{name} is {here}; set "
            f"{section}.{name} {there}",
        )
    parts = trained(model)
    place = f"{setting} = {folder}"
    base = json.loads((folder / CONFIG).read_text()).get("base_model_name_or_path")
    model_setting = f"{setting.partition('.')[0]}.model"
    adapters: Any = model.adapters
    require(
        hash_if_here(base) in ("", adapters.base),
        f"{place} was trained on {base}, and {model_setting} has other weights; set it to that (if "
        f"it is the same in another form, change base_model_name_or_path in its {CONFIG})",
    )
    with library_reads(f"{place}: {WEIGHTS}"):
        file = safe_open(folder / WEIGHTS, "pt")
    there = set(file.keys())
    wanted = {name_in_file(name) for name in parts}
    missing = sorted(wanted - there)
    head = PREFIX + HEAD
    embedding = tied_embedding(model)
    extra = sorted(there - wanted - ({head} if embedding else set()))
    require(
        not missing and not extra,
        f"{place} is an adapter of another base, or of other targets: it lacks {missing[:2]} "
        f"({len(missing)} in all) and has besides {extra[:2]} ({len(extra)} in all); set "
        f"{model_setting}, {section}.targets and {section}.modules_to_save as it was trained",
    )
    if embedding:
        whole = file.get_tensor(name_in_file(embedding))
        require(
            head in there and torch.equal(file.get_tensor(head), whole),
            f"{place}: embedding and head were trained apart, and {model_setting} has one weight "
            "for both; train the adapter with PEFT's ensure_weight_tying",
        )
    for name, p in parts.items():
        t = file.get_tensor(name_in_file(name))
        expected = list(to_file(name, torch.empty(p.shape, device="meta")).shape)
        require(
            list(t.shape) == expected,
            f"{place} is an adapter of another base: {name_in_file(name)} is {list(t.shape)}, "
            f"and the model needs {expected}; set {model_setting} to its base",
        )
        require(
            bool(t.isfinite().all()),
            f"{place}: {name_in_file(name)} has NaN or infinity; take another adapter",
        )
        local(p).copy_(view_of(from_file(name, t, p.shape), local_region(p)))
