"""What the engine's loader copies: which region of which weight lands where in the engine.

vLLM's own loader runs on meta tensors, and only its `copy_` calls are intercepted. Each copies from
a view that says which region of which checkpoint weight lands in which part of which engine
parameter, so that no table per architecture is needed.

By the same loader `full_gather` refits the obvious way, with which every refit can be compared.
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from minirl.base.errors import UserError, require
from minirl.engine.engine import NamedTensors, RolloutEngine
from minirl.parallel.regions import CheckpointSlice, Region

if TYPE_CHECKING:
    from minirl.refit.refit import Refit

Item = TypeVar("Item")


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
        if func is torch.ops.aten.zero_.default and (name := self._name(args[0])):
            # A bias that is added on one tensor-parallel rank is set to 0 by the loaders of others.
            if args[0].numel() != self.weights[name].numel():
                raise NotImplementedError(
                    f"the engine's loader sets a part of {name} to 0, which a refit cannot plan"
                )
            self.zeroed.add(name)
            return args[0]
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


def record_loader(
    engine: RolloutEngine, shapes: dict[str, torch.Size], slices: dict[str, list[CheckpointSlice]]
) -> tuple[list[EnginePart], list[Tensor]]:
    """Record what the engine's loader does with the trainer's weights.

    It gets the weights of the checkpoint's files, each a view of one of the trainer's: one expert's
    matrix is a region of the fused tensor. Rows of the engine that only make the vocabulary
    divisible are set to 0 here.

    Args:
        engine: the engine to fill.
        shapes: of the trainer's weights, by its names.
        slices: what each of them is in a checkpoint's files.

    Returns:
        The parts of this engine that weights fill, and those that are 0, because another rank of
        the engine has the values.

    Raises:
        UserError: the loader refuses the weights, or a part of the engine would keep its random
            start, because none fills it.
        NotImplementedError: the loader does something that cannot be planned.
    """
    weights = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    offered = list(in_files(slices, weights.items()))
    recorder = Recorder(weights)
    try:
        with recorder:
            engine.load_weights(offered)
    except (KeyError, ValueError) as error:  # what vLLM's loaders raise for an unknown name
        raise UserError(
            f"policy.model: the loader of the engine, {engine.model_class}, refuses the "
            f"trained weights: {error}; take a model that vLLM knows, or another version of it"
        ) from error
    covered: Counter[int] = Counter()
    for target in [*recorder.zeros, *(part.target for part in recorder.parts)]:
        covered[target.untyped_storage()._cdata] += target.numel()
    padding = engine.padding()
    for name, parameter in engine.parameters().items():
        filled = covered[parameter.untyped_storage()._cdata]
        num_padding = padding.get(name, 0)
        require(
            filled == parameter.numel() - num_padding,
            f"policy.model: a refit would fill {filled} of the {parameter.numel()} elements of the "
            f"engine's {name} ({num_padding} are padding): {engine.model_class} has weights that "
            "the trained model has not; take another model or version of vLLM",
        )
        if num_padding:
            parameter[-num_padding // parameter.shape[1] :].zero_()
    return join(recorder.parts), recorder.zeros


def in_files(slices: dict[str, list[CheckpointSlice]], weights: NamedTensors) -> NamedTensors:
    """Yield the weights of a checkpoint's files: names there, and views of whole weights."""
    for name, weight in weights:
        for part in slices[name]:
            yield part.name, part.of(weight)


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
    by_name: dict[str, list[EnginePart]] = defaultdict(list)
    for part in parts:
        by_name[part.name].append(part)
    joined = []
    for group in by_name.values():
        for axis in range(len(group[0].region.size)):
            group = _join_along(axis, group)
        joined += group
    return joined


def _join_along(axis: int, parts: list[EnginePart]) -> list[EnginePart]:
    """Join parts of one weight that are neighbours along an axis."""

    def alike(part: EnginePart) -> Hashable:
        offset, size = part.region
        strides = part.target.stride()
        storage = part.target.untyped_storage()._cdata
        others = offset[:axis], offset[axis + 1 :], strides[:axis], strides[axis + 1 :]
        return size, storage, others

    def touch(part: EnginePart, distance: tuple[int, int]) -> bool:
        in_weight, in_engine = distance
        length = part.region.size[axis]
        is_next = in_weight == length and in_engine > 0
        return is_next and (length == 1 or in_engine == length * part.target.stride(axis))

    joined = []
    for run in runs(
        parts,
        alike,
        place=lambda part: (part.region.offset[axis], int(part.target.storage_offset())),
        may_begin=touch,
    ):
        name, region, target = run[0]
        if len(run) > 1:
            size = list(region.size)
            strides = list(target.stride())
            distance = int(run[1].target.storage_offset()) - int(target.storage_offset())
            strides[axis] = distance // size[axis]
            size[axis] *= len(run)
            region = Region(region.offset, tuple(size))
            target = target.as_strided(size, strides)
        joined.append(EnginePart(name, region, target))
    return joined


def runs(
    items: Iterable[Item],
    alike: Callable[[Item], Hashable],
    place: Callable[[Item], tuple[int, int]],
    may_begin: Callable[[Item, tuple[int, int]], bool],
) -> Iterator[list[Item]]:
    """Divide items into runs of alike ones that are equally far apart, and yield each run.

    Args:
        items: items that lie in two spaces, such as a weight and the engine.
        alike: returns what is equal for items that may be in one run.
        place: returns the place of an item in either space.
        may_begin: returns whether a run may begin with an item, and the next one so far from it.
    """
    groups: dict[Hashable, list[Item]] = defaultdict(list)
    for item in items:
        groups[alike(item)].append(item)
    for group in groups.values():
        group.sort(key=place)
        run = group[:1]
        step = None  # From one item of the run to the next.
        for a, b in itertools.pairwise(group):
            begin, end = place(a), place(b)
            distance = (end[0] - begin[0], end[1] - begin[1])
            fits = distance == step if step else may_begin(a, distance)
            if not fits:
                yield run
                run = []
            step = distance if fits else None
            run.append(b)
        yield run


# --------------------------------------------------------------------------------------------------
# the loader itself, as an oracle


def full_gather(refit: "Refit") -> None:
    """Refit the obvious way: gather each weight whole on every rank, for the engine's loader.

    It is the oracle of a refit. Collective.
    """
    weights = refit.read()

    def whole_weights() -> NamedTensors:
        for name, dtype in refit.dtypes.items():
            if name in weights:
                shard = weights[name]
                whole = shard.full_tensor() if isinstance(shard, DTensor) else shard
                whole = whole.to(refit.world.device, dtype).contiguous()
            else:
                shape = refit.weights.shapes[name]
                whole = torch.empty(shape, dtype=dtype, device=refit.world.device)
            if refit.first_receiver:  # The first rank only trains.
                dist.broadcast(whole, 0, group=refit.world.device_group)
            yield name, whole

    if refit.engine:
        refit.engine.load_weights(in_files(refit.weights.slices, whole_weights()))
    else:
        for _ in whole_weights():
            pass


def compare_with_oracle(refit: "Refit") -> None:
    """Compare the engine's parameters bitwise with those of a full gather. Collective.

    Raises:
        UserError: on all ranks, if an engine's differ.
    """
    engine = refit.engine.parameters() if refit.engine else {}
    padding = refit.engine.padding() if refit.engine else {}
    refitted = {name: p.clone() for name, p in engine.items()}
    for p in engine.values():
        p.fill_(torch.nan)
    full_gather(refit)
    wrong = []
    for name, p in engine.items():
        filled = p.numel() - padding.get(name, 0)
        if not torch.equal(p.flatten()[:filled], refitted[name].flatten()[:filled]):
            wrong.append(name)
        p.copy_(refitted[name])
    by_rank = refit.world.gather(wrong)
    bad_ranks = [rank for rank, names in enumerate(by_rank) if names]
    named = sorted(set(itertools.chain(*by_rank)))
    require(
        not bad_ranks,
        f"debug.check_refit: the engines of ranks {bad_ranks} differ from a full gather of the "
        f"policy's weights in {len(named)} parameters, {', '.join(named[:5])}. This is a fault "
        "of the refit for this model; please report it",
    )
