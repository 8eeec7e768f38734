"""What the engine's loader copies: which region of which weight lands where in the engine.

vLLM's own loader runs on meta tensors, and only its `copy_` calls are intercepted. Each copies from
a view that says which region of which checkpoint weight lands in which part of which engine
parameter, so that no table per architecture is needed.
"""

import itertools
import math
from collections import defaultdict
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from minirl.parallel.regions import Region


class Wanted(NamedTuple):
    """A region of a weight that an engine wants, as the ranks tell each other."""

    region: Region
    dtype: torch.dtype  # In the engine.
    strides: tuple[int, ...]  # In the engine.


class EnginePart(NamedTuple):
    """A part of this rank's engine, and the region of a weight that fills it."""

    name: str
    region: Region
    target: Tensor  # The part of the engine, with the dimensions of the weight.

    def numel(self) -> int:
        """Return the number of its elements."""
        return math.prod(self.region.size)


def wanted_by_name(parts: list[EnginePart]) -> dict[str, list[Wanted]]:
    """Return what an engine with such parts wants of each weight."""
    wanted = defaultdict(list)
    for name, region, target in parts:
        wanted[name].append(Wanted(region, target.dtype, target.stride()))
    return dict(wanted)


class Recorder(TorchDispatchMode):
    """Records every copy from a meta tensor instead of carrying it out."""

    def __init__(self, weights: dict[str, Tensor]):
        """Take the meta tensors, by name; the loader copies from views of them."""
        super().__init__()
        self.weights = weights
        self.name_of = {t.untyped_storage()._cdata: name for name, t in weights.items()}
        self.parts: list[EnginePart] = []
        self.zeroed: set[str] = set()  # Weights that the loader has set to 0.
        self.zeros: list[Tensor] = []  # Parts of the engine that it copies such weights to.

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.clone.default and self._name(args[0]):
            # A copy, such as a transposed view made contiguous, has the same elements.
            return torch.ops.aten.alias.default(args[0])
        if func is torch.ops.aten.zero_.default and self._name(args[0]):
            return self._set_to_zero(args[0])
        if func is not torch.ops.aten.copy_.default or args[1].device.type != "meta":
            return func(*args, **(kwargs or {}))
        target = args[0]
        source = args[1]
        name = self._name(source)
        if name in self.zeroed:
            self.zeros.append(target.detach())
            return target
        if name is None or source.shape != target.shape:
            raise NotImplementedError(
                "the engine's loader computes with a weight instead of slicing it, "
                "which a refit cannot plan"
            )
        self.parts.append(_to_part(name, self.weights[name], source, target.detach()))
        return target

    def _name(self, t: Tensor) -> str | None:
        """Return the name of the weight that a tensor is a view of."""
        return self.name_of.get(t.untyped_storage()._cdata) if t.is_meta else None

    def _set_to_zero(self, t: Tensor) -> Tensor:
        """Remember that a weight, whole, is 0 from here on.

        A bias that is added on one tensor-parallel rank is set to 0 by the loaders of the others.
        """
        name = self.name_of[t.untyped_storage()._cdata]
        if t.numel() != self.weights[name].numel():
            raise NotImplementedError(
                f"the engine's loader sets a part of {name} to 0, which a refit cannot plan"
            )
        self.zeroed.add(name)
        return t


def _to_part(name: str, weight: Tensor, view: Tensor, target: Tensor) -> EnginePart:
    """Read a strided view of a contiguous weight as a region of it.

    Args:
        name: name of the weight.
        weight: a tensor of its shape.
        view: the view, without the dimensions that the loader indexed away (one expert of many), in
            any order.
        target: what the view is copied to, of the same shape.
    """
    shape = tuple(weight.shape)
    strides = weight.stride()
    size = [1] * len(shape)
    target_strides = [0] * len(shape)
    # A dimension of size 1 fits whatever the stride is, so that these come last.
    free = sorted(range(len(shape)), key=lambda d: shape[d] == 1)
    for i, length in enumerate(view.shape):
        stride = view.stride(i)
        fitting = [d for d in free if strides[d] == stride or length == shape[d] == 1]
        if not fitting:
            raise NotImplementedError(
                f"{name}: the engine's loader takes a view that is not a region of the weight"
            )
        axis = fitting[0]
        free.remove(axis)
        size[axis] = length
        target_strides[axis] = target.stride(i)
    offset = []
    rest = int(view.storage_offset())
    for stride in strides:
        index, rest = divmod(rest, stride)
        offset.append(index)
    region = Region(tuple(offset), tuple(size))
    return EnginePart(name, region, target.as_strided(size, target_strides))


def join(parts: list[EnginePart]) -> list[EnginePart]:
    """Join parts that are neighbours both in the engine and in the weight.

    A loader copies the experts of a layer one by one, though they lie next to each other both in
    the trainer's fused weight and in the engine's: they become one part.
    """
    num_dims = max((len(part.region.size) for part in parts), default=0)
    for axis in range(num_dims):
        groups: dict[tuple, list[EnginePart]] = defaultdict(list)
        for number, part in enumerate(parts):
            groups[_alike_but_for(axis, part, number)].append(part)
        parts = []
        for group in groups.values():
            if len(group) > 1:
                group.sort(key=lambda part: part.region.offset[axis])
            while group:
                length = _num_neighbours(axis, group)
                parts.append(_as_one(axis, group[:length]))
                group = group[length:]
    return parts


def _alike_but_for(axis: int, part: EnginePart, number: int) -> tuple:
    """Return a key that is equal for parts that differ in their place along one axis alone."""
    offset, size = part.region
    if axis >= len(size):
        return (number,)
    target = part.target
    other_strides = target.stride()[:axis] + target.stride()[axis + 1 :]
    storage = target.untyped_storage()._cdata
    return part.name, offset[:axis], offset[axis + 1 :], size, other_strides, storage


def _num_neighbours(axis: int, group: list[EnginePart]) -> int:
    """Return how many of the first parts are neighbours along an axis.

    Each has the same distance to the next, in the weight (the length of one) and in the engine.
    """
    step = 0
    for number, (a, b) in enumerate(itertools.pairwise(group), start=1):
        length = a.region.size[axis]
        distance = int(b.target.storage_offset()) - int(a.target.storage_offset())
        fits = b.region.offset[axis] - a.region.offset[axis] == length and distance > 0
        fits &= length == 1 or distance == length * a.target.stride(axis)
        if not fits or (number > 1 and distance != step):
            return number
        step = distance
    return len(group)


def _as_one(axis: int, run: list[EnginePart]) -> EnginePart:
    """Return one part for a run of neighbours."""
    first = run[0]
    if len(run) == 1:
        return first
    step = int(run[1].target.storage_offset()) - int(first.target.storage_offset())
    size = list(first.region.size)
    strides = list(first.target.stride())
    strides[axis] = step // size[axis]
    size[axis] *= len(run)
    target = first.target.as_strided(size, strides)
    return EnginePart(first.name, Region(first.region.offset, tuple(size)), target)
