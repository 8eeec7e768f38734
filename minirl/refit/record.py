"""What the engine's loader copies: which region of which weight lands where in the engine.

vLLM's own loader runs on meta tensors, and only its `copy_` calls are intercepted. Each copies from
a view that says which region of which checkpoint weight lands in which part of which engine
parameter, so that no table per architecture is needed.
"""

import math
from collections import defaultdict
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from minirl.parallel.regions import Region


class Arrival(NamedTuple):
    """A region of a weight that this rank's engine wants."""

    name: str
    region: Region
    target: Tensor  # The part of the engine that it fills, with the dimensions of the weight.

    def numel(self) -> int:
        """Return the number of its elements."""
        return math.prod(self.region.size)


class Recorder(TorchDispatchMode):
    """Records every copy from a meta tensor instead of carrying it out."""

    def __init__(self, weights: dict[str, Tensor]):
        """Remember the meta tensors, by name, from whose views the loader copies."""
        super().__init__()
        self.weights = weights
        self.name_of = {t.untyped_storage()._cdata: name for name, t in weights.items()}
        self.arrivals: list[Arrival] = []
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
        self.arrivals.append(_to_arrival(name, self.weights[name], source, target.detach()))
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


def _to_arrival(name: str, weight: Tensor, view: Tensor, target: Tensor) -> Arrival:
    """Read a strided view of a contiguous weight as a region of it.

    Args:
        name: of the weight.
        weight: any tensor of its shape.
        view: without the dimensions that the loader indexed away (one expert of many), in any
            order.
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
    return Arrival(name, region, target.as_strided(size, target_strides))


def join(arrivals: list[Arrival]) -> list[Arrival]:
    """Join neighbouring regions whose places in the engine are neighbours, too.

    A loader copies the experts of a layer one by one, though they lie side by side both in the
    trainer's fused weight and in the engine's: they become one arrival.
    """
    num_dims = max((len(arrival.region.size) for arrival in arrivals), default=0)
    for axis in range(num_dims):
        groups: dict[tuple, list[Arrival]] = defaultdict(list)
        for i, arrival in enumerate(arrivals):
            groups[_alike_but_for(axis, arrival, i)].append(arrival)
        arrivals = []
        for group in groups.values():
            arrivals += _join_along(axis, group)
    return arrivals


def _alike_but_for(axis: int, arrival: Arrival, index: int) -> tuple:
    """Return a key that is equal for arrivals that differ in their place along one axis alone."""
    offset, size = arrival.region
    if axis >= len(size):
        return (index,)
    target = arrival.target
    other_strides = target.stride()[:axis] + target.stride()[axis + 1 :]
    storage = target.untyped_storage()._cdata
    return arrival.name, offset[:axis], offset[axis + 1 :], size, other_strides, storage


def _join_along(axis: int, group: list[Arrival]) -> list[Arrival]:
    """Join arrivals that differ in their place along an axis alone, as far as they are neighbours.

    Each has the same distance to the next, in the weight (the length of one) and in the engine.
    """
    if len(group) == 1:
        return group
    group = sorted(group, key=lambda arrival: arrival.region.offset[axis])
    length = group[0].region.size[axis]
    joined = []
    run = [group[0]]
    step = 0  # Between two of the run, in the engine.
    for arrival in group[1:]:
        last = run[-1]
        distance = int(arrival.target.storage_offset()) - int(last.target.storage_offset())
        fits = arrival.region.offset[axis] - last.region.offset[axis] == length
        fits &= length == 1 or distance == length * last.target.stride(axis)
        if fits and distance > 0 and (len(run) == 1 or distance == step):
            run.append(arrival)
            step = distance
            continue
        joined.append(_as_one(axis, run, step))
        run = [arrival]
    joined.append(_as_one(axis, run, step))
    return joined


def _as_one(axis: int, run: list[Arrival], step: int) -> Arrival:
    """Return one arrival for a run of neighbours, which are `step` elements apart in the engine."""
    first = run[0]
    if len(run) == 1:
        return first
    size = list(first.region.size)
    strides = list(first.target.stride())
    strides[axis] = step // size[axis]
    size[axis] *= len(run)
    target = first.target.as_strided(size, strides)
    return Arrival(first.name, Region(first.region.offset, tuple(size)), target)
