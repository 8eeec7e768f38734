"""What adapters add to a model, and how its base is held beside them."""

import contextlib
import dataclasses
import math
import re
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PretrainedConfig

from minirl.base.errors import UserError
from minirl.config.policy import LoraConfig, PolicyConfig
from minirl.config.rl import section_of
from minirl.model import build, loading
from minirl.model.adapters import lora, nf4
from minirl.model.freeze import patterns_of
from minirl.parallel.tensor import LORA_A, LORA_B

# Bytes of a weight in four bits, with the 8-bit scale of its block.
PACKED_BYTES = 0.5 + 1 / nf4.BLOCK
# Linears whose columns are split over tensor-parallel ranks; of the others it is the rows.
SPLIT_COLUMNS = ("o_proj", "down_proj")


@dataclass(frozen=True, kw_only=True)
class Linear:
    """A linear that has an adapter; or those of all experts of a layer."""

    name: str  # In its block.
    inputs: int
    outputs: int
    experts: int  # 0: none.
    splits_columns: bool

    def widths(self, tensor: int) -> tuple[float, float]:
        """Return its inputs and outputs on a tensor-parallel rank, which has whole experts."""
        if self.experts:
            return self.inputs, self.outputs
        if self.splits_columns:
            return self.inputs / tensor, self.outputs
        return self.inputs, self.outputs / tensor

    def numel(self, rank: int, tensor: int, away: float = 0.0) -> tuple[float, float]:
        """Return the elements of A and B that are gathered; arguments as `Adapters` has them."""
        num_in, num_out = self.widths(tensor)
        times = rank * (self.experts * (1 - away) / tensor if self.experts else 1)
        return num_in * times, num_out * times


@dataclass(frozen=True, kw_only=True)
class Adapters:
    """All adapters of a model; "of a layer" is of the last one."""

    rank: int
    linears: tuple[Linear, ...]  # Of a layer.
    parameters: int  # A and B of all layers.
    packed: int  # Weights of the base that are held in four bits.
    layer_packed: int
    largest: int  # Weights of the layer's largest matrix that is adapted or held in four bits.

    @property
    def is_packed(self) -> bool:
        """Return whether matrices of the base are held in four bits."""
        return self.packed > 0

    def of_layer(self, tensor: int, away: float = 0.0) -> tuple[float, float]:
        """Return the elements of a layer's A and B on a tensor-parallel rank.

        Args:
            tensor: how many tensor-parallel ranks there are.
            away: share of the experts on a tensor-parallel rank that expert parallelism leaves to
                other ranks.
        """
        pairs = [linear.numel(self.rank, tensor, away) for linear in self.linears]
        return sum(a for a, _ in pairs), sum(b for _, b in pairs)

    def of_experts(self, tensor: int, away: float) -> float:
        """Return those elements that are of experts."""
        pairs = [linear.numel(self.rank, tensor, away) for linear in self.linears if linear.experts]
        return sum(a + b for a, b in pairs)

    def weights(self, tensor: int, away: float) -> list[float]:
        """Return the weights of each of a layer's adapted matrices, as `of_layer` does."""
        numel = []
        for linear in self.linears:
            of_all = linear.experts * (1 - away) if linear.experts else 1
            numel.append(linear.inputs * linear.outputs * of_all / tensor)
        return numel

    def on_rank(self, tensor: int) -> float:
        """Return the elements of all layers' A and B on a tensor-parallel rank."""
        if not self.linears:  # patterns that leave out the last layer
            return self.parameters / tensor
        return self.parameters * sum(self.of_layer(tensor)) / sum(self.of_layer(1))

    def widths(self, tensor: int, *, of_experts: bool) -> tuple[float, float]:
        """Return the inputs and the outputs of a layer's adapted linears, added up."""
        pairs = [
            linear.widths(tensor) for linear in self.linears if bool(linear.experts) == of_experts
        ]
        return sum(a for a, _ in pairs), sum(b for _, b in pairs)

    def reads(self, names: tuple[str, ...]) -> bool:
        """Return whether one of the linears with these names is adapted."""
        return any(linear.name in names for linear in self.linears)


class AdapterCounts:
    """What is counted of a model with so many layers."""

    def __init__(self, config: PretrainedConfig, policy: PolicyConfig, *, score: bool):
        model = build.make_meta_model(config, torch.bfloat16, score=score)
        new = frozenset({loading.SCORE} if score else ())
        setting = f"{section_of(policy)}.lora"
        attached = lora.attach(model, policy.lora, torch.float32, setting, new=new)
        in_layers = set(nn.ModuleList(build.layers(model)).parameters())
        head = model.get_output_embeddings()
        of_head = set(head.parameters()) if head is not None else set()
        last = _name_of(build.layers(model)[-1], model)
        self.parameters = 0
        self.packed = sum(packed.shape.numel() for packed in attached.packed.values())
        self.layer_packed = 0
        self.trained = 0  # Weights that are trained whole, as the next.
        self.trained_of_root = 0
        self.trains_head = False
        self.largest = 0
        linears = []
        for name, packed in attached.packed.items():
            if name.startswith(last):
                self.layer_packed += packed.shape.numel()
                self.largest = max(self.largest, packed.shape.numel())
        for name, p in model.named_parameters():
            if lora.is_adapter(name):
                self.parameters += p.numel()
            elif p.requires_grad:
                self.trained += p.numel()
                self.trained_of_root += p.numel() if p not in in_layers else 0
                self.trains_head |= p in of_head
            if name.endswith(LORA_B) and name.startswith(last):
                a = model.get_parameter(name.removesuffix(LORA_B) + LORA_A)
                linears.append(_linear(name, a.shape, p.shape))
        self.linears = tuple(linears)
        for linear in linears:
            numel = linear.inputs * linear.outputs * max(1, linear.experts)
            self.largest = max(self.largest, numel)


def _linear(name: str, a: torch.Size, b: torch.Size) -> Linear:
    weight = lora.weight_of(name)
    module = weight.rpartition(".")[0] if weight.endswith(".weight") else weight
    return Linear(
        name=module.rpartition(".")[2],
        inputs=a[-1],
        outputs=b[-2],
        experts=math.prod(b[:-2]) if len(b) > 2 else 0,
        splits_columns=module.endswith(SPLIT_COLUMNS),
    )


def names_layers(cfg: LoraConfig) -> bool:
    """Return whether patterns may mean some of the layers only, so that all must be counted."""
    return any(re.search(r"[0-9?\[]", pattern) for pattern in (*cfg.targets, *cfg.modules_to_save))


def fitting_to(config: PretrainedConfig, score: bool, cfg: LoraConfig) -> LoraConfig:
    """Return the settings with those patterns that match something of a model with few layers."""
    if not cfg.rank or not names_layers(cfg):
        return cfg
    model = build.make_meta_model(config, torch.bfloat16, score=score)
    targets = [target for target in cfg.targets if _has_target(model, target)]
    whole = patterns_of(model, cfg.modules_to_save)
    return dataclasses.replace(cfg, targets=targets or ["all-linear"], modules_to_save=whole)


def _has_target(model: build.CausalModel, target: str) -> bool:
    with contextlib.suppress(UserError):
        return bool(lora.target_names(model, [target], "lora.targets"))
    return False


def _name_of(layer: nn.Module, model: nn.Module) -> str:
    """Return the beginning of the names of a layer's parameters."""
    return next(f"{name}." for name, module in model.named_modules() if module is layer)
