"""What a training program says of its memory and time before it loads anything."""

import os

import torch

from minirl.model import fused
from minirl.parallel.mesh import Mesh
from minirl.plan import page
from minirl.plan.cards import of_device
from minirl.plan.estimate import Models, by_formulas
from minirl.plan.planner import Plan, check_lower_bound
from minirl.plan.workload import Workload


def announce(workload: Workload, mesh: Mesh) -> tuple[Plan, list[str]]:
    """Return the plan of a run by closed formulas, and the three lines that say it.

    On CPU, where nothing sleeps and no roofline holds, the lines say less.

    Args:
        workload: what the run does.
        mesh: of the run.

    Raises:
        UserError: weights, gradients and optimizer state do not fit the ranks' devices.
    """
    models = Models(workload, liger=fused.has_liger() and mesh.device.type == "cuda")
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", mesh.world_size))
    shape = models.shapes["policy"]
    if mesh.device.type == "cuda":
        properties = torch.cuda.get_device_properties(mesh.device)
        card = of_device(properties.name, _least(properties.total_memory, mesh))
        check_lower_bound(workload, shape, card)
        plan = by_formulas(workload, models, card, per_node)
        return plan, page.short(plan)
    card = of_device("CPU", _least(_share_of_host(per_node), mesh))
    check_lower_bound(workload, shape, card)
    plan = by_formulas(workload, models, card, per_node, ("off",))
    return plan, page.short_on_cpu(plan, per_node)


def _share_of_host(num_ranks: int) -> int:
    """Return the host's memory in bytes, divided by the ranks on it."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // num_ranks


def _least(num_bytes: int, mesh: Mesh) -> int:
    """Return the memory of the rank with the least: all ranks must come to the same plan."""
    return -int(mesh.maxima(torch.tensor([-num_bytes])))
