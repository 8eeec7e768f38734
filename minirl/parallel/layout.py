"""How parameters lie on an axis of ranks that split modules: tensor or expert parallelism."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from minirl.base.errors import UserError
from minirl.parallel.fsdp import local

# Axes, and the settings of their sizes.
_SETTINGS = {"tp": "parallel.tensor", "ep": "parallel.experts"}
Forward = Callable[..., Any]  # Of a module.


def _shard(module: nn.Module, name: str, mesh: DeviceMesh, placement: Placement) -> None:
    """Make a parameter a DTensor, unless it is one or there is none."""
    parameter = module._parameters.get(name)
    if parameter is None or isinstance(parameter, DTensor):
        return
    size = mesh.size()
    if isinstance(placement, Shard) and parameter.shape[placement.dim] % size:
        assert mesh.mesh_dim_names
        raise UserError(
            f"{_SETTINGS[mesh.mesh_dim_names[0]]} = {size} does not divide dimension "
            f"{placement.dim} of {type(module).__name__}.{name}, {tuple(parameter.shape)}"
        )
    # No broadcast from a source rank: all have the same values, or meta tensors.
    sharded = distribute_tensor(parameter.data, mesh, [placement], src_data_rank=None)
    module._parameters[name] = nn.Parameter(sharded, parameter.requires_grad)


class Layout(NamedTuple):
    """How a parameter lies on an axis, and what the forward uses of it."""

    placement: Placement
    view: Callable[[Tensor], Tensor | None] = local


# Every rank has all of it, and sees a part of the contributions to its gradient.
WHOLE = Layout(Replicate(), partial(local, partial=True))


def shard_all(
    module: nn.Module,
    mesh: DeviceMesh,
    layout: Layout,
    *,
    others: dict[str, Layout] | None = None,
) -> Forward:
    """Shard a module's parameters, and return its forward on this rank's local tensors.

    Args:
        module: with parameters of its own.
        mesh: the axis, 1-D.
        layout: of its parameters.
        others: of parameters, by name, that have another.
    """
    layouts = dict.fromkeys(module._parameters, layout) | (others or {})
    for name in module._parameters:
        _shard(module, name, mesh, layouts[name].placement)
    plain = module.forward

    def forward(*args: object, **kwargs: object) -> Any:
        parameters: dict = module._parameters
        dtensors = {name: p for name, p in parameters.items() if p is not None}
        for name, p in dtensors.items():
            parameters[name] = layouts[name].view(p)
        try:
            return plain(*args, **kwargs)
        finally:
            parameters.update(dtensors)

    return forward
