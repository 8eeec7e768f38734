"""The engine as a refit sees it, on a pretended device where there is no vLLM."""

import hashlib
import re
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from minirl.config.policy import ParallelConfig
from minirl.engine.engine import NamedTensors
from minirl.parallel.mesh import Mesh, World
from minirl.parallel.regions import CheckpointSlice, Region, local_region
from minirl.refit.record import Wanted

# vLLM keeps these matrices as one, end to end.
_FUSED = {
    r"\.[qkv]_proj\.": ".qkv_proj.",
    r"\.(gate|up)_proj\.": ".gate_up_proj.",
}


@dataclass(frozen=True, kw_only=True)
class RefitMesh(Mesh):
    """The mesh of a refit of which only rank 0 is there. All engines want the same."""

    # The region that each rank's shard is, of one weight of each layout.
    regions: list[dict[str, Region]]

    def gather(self, value: object) -> list:
        """Return what all ranks would say: their own regions, or else what this one says."""
        if value == list(self.regions[0].values()):
            return [list(regions.values()) for regions in self.regions]
        return [value] * self.world_size


@dataclass(frozen=True, kw_only=True)
class BothSides(World):
    """All ranks of a refit between trainers and generators, of which only this one is there."""

    num_trainers: int
    wanted: dict[str, list[Wanted]]  # By every engine.
    told: Any = None  # What the first trainer tells the generators.

    def gather(self, value: object) -> list:
        """Return digests of what all ranks want."""
        texts = (repr([wanted]) for wanted in ({}, self.wanted))
        nothing, all_weights = (hashlib.sha256(text.encode()).hexdigest() for text in texts)
        num_generators = self.world_size - self.num_trainers
        return [nothing] * self.num_trainers + [all_weights] * num_generators

    def broadcast(self, value: object, source: int) -> Any:
        """Return what a rank says: what the trainers know, or what it wants."""
        if source == self.rank:
            return value
        if source:
            return self.wanted
        return self.told if value is None else {}


class PretendedEngine:
    """What a refit needs of a `RolloutEngine`: whole weights in few large parameters, and a loader.

    The loader copies each weight of a checkpoint's files to its part of a parameter, as vLLM's own
    loaders do. It is not vLLM: that each of its families can be refitted is tested with it.
    """

    def __init__(
        self,
        mesh: Mesh,
        shards: dict[str, Tensor],
        slices: dict[str, list[CheckpointSlice]],
        dtype: torch.dtype,
    ):
        """Make the parameters.

        Args:
            mesh: of the refit.
            shards: the trainer's weights by its names.
            slices: what each of them is in a checkpoint's files.
            dtype: of the parameters. Buffers, which correct a router, keep their own.
        """
        self.mesh = mesh
        self.vision = None
        self.model_class = type(self).__name__
        self._parameters: dict[str, Tensor] = {}
        self._targets: dict[str, Tensor] = {}  # By name in the files.
        names_of: dict[str, list[str]] = defaultdict(list)
        for name in shards:
            names_of[_fused_name(name)].append(name)
        for fused, names in names_of.items():
            parts = [shards[name] for name in names]
            rows = [part.shape[0] for part in parts]
            parameter = torch.empty(
                (sum(rows), *parts[0].shape[1:]),
                dtype=dtype if isinstance(parts[0], nn.Parameter) else parts[0].dtype,
                device=mesh.device,
            )
            self._parameters[fused] = parameter
            for name, whole in zip(names, parameter.split(rows), strict=True):
                for part in slices[name]:
                    self._targets[part.name] = part.of(whole)

    def parameters(self) -> dict[str, Tensor]:
        """Return the weights by vLLM's names."""
        return self._parameters

    def padding(self) -> dict[str, int]:
        """Return that no parameter has elements that no checkpoint fills."""
        return {}

    def load_weights(self, named: NamedTensors) -> None:
        """Copy whole weights, by their names in a checkpoint, into the parameters."""
        for name, weight in named:
            self._targets[name].copy_(weight)


def _fused_name(name: str) -> str:
    for pattern, fused in _FUSED.items():
        name = re.sub(pattern, fused, name)
    return name


def regions_of_all_ranks(
    shards: dict[str, Tensor], world_size: int, parallel: ParallelConfig
) -> list[dict[str, Region]]:
    """Return the region of each weight that each rank's shard is.

    Args:
        shards: those of rank 0.
        world_size: number of ranks.
        parallel: axes of their mesh, which are numbered [replicate, shard and context, tensor],
            and for experts [replicate, the rest, experts].
    """
    regions = []
    for rank in range(world_size):
        place: dict[str, int] = {}
        for axes, size in (
            (("dp_replicate", "dp_shard_cp", "tp"), parallel.tensor),
            (("dp_replicate", "efsdp", "ep"), parallel.experts),
        ):
            sizes = (parallel.replicate, world_size // (parallel.replicate * size), size)
            place |= dict(zip(axes, map(int, np.unravel_index(rank, sizes)), strict=True))
        regions.append({name: _region(p, place) for name, p in shards.items()})
    return regions


def _region(p: Tensor, place: dict[str, int]) -> Region:
    """Return the region of a weight that a rank's shard is, by its place along each axis."""
    if not isinstance(p, DTensor):
        return local_region(p)
    mesh = p.device_mesh
    assert mesh.mesh_dim_names
    own = mesh._coordinate_on_dim
    mesh._coordinate_on_dim = tuple(place[axis] for axis in mesh.mesh_dim_names)
    region = local_region(p)
    mesh._coordinate_on_dim = own
    return region
