"""How much a step computes, and what share of the GPUs' peak that is.

The model FLOPs utilisation counts the work that forward and backward of a model of this size need,
without what is computed again: 6 for each parameter that a token passes, and 12 for each pair of
query and key and each feature of the queries (Chowdhery et al. 2022, PaLM, appendix B).
"""

import resource
from dataclasses import dataclass
from pathlib import Path

import torch

from minirl.model import build
from minirl.parallel.mesh import Mesh
from minirl.plan import cards
from minirl.plan.shape import Shape, read_shape
from minirl.train.policy import Minibatch
from minirl.types.packed import Trajectory


@dataclass(frozen=True, kw_only=True)
class Work:
    """What an optimizer step, or those of an RL step, read on all ranks."""

    rows: int  # Of packed batches: tokens that are read.
    loss_rows: int  # Of these, those whose target is in the loss.
    pairs: int  # Of a query and a key that it may see.


def count_work(minibatches: list[Minibatch], mesh: Mesh) -> Work:
    """Return what all ranks read once in the micro-batches. Collective."""
    counts = torch.zeros(3, dtype=torch.int64)
    for batch in sum(minibatches, []):
        num_rows = len(batch.inputs)
        counts += torch.tensor(
            [num_rows, len(batch.loss_rows), int(batch.positions.sum()) + num_rows]
        )
    # Tensor-parallel ranks have the same rows.
    rows, loss_rows, pairs = (mesh.sums(counts) // mesh.tensor.size()).tolist()
    return Work(rows=rows, loss_rows=loss_rows, pairs=pairs)


def count_sampled(trajectories: list[Trajectory], mesh: Mesh) -> int:
    """Return how many tokens all ranks have sampled. Collective."""
    num = sum(int(t.sampled.sum()) for t in trajectories)
    return int(mesh.sums(torch.tensor([num])).item())


def flops(shape: Shape, work: Work) -> float:
    """Return the floating-point operations of forward and backward over the work."""
    in_layers = shape.active_in_layers * work.rows
    in_head = shape.hidden * shape.vocabulary * work.loss_rows
    attention = work.pairs * shape.queries * shape.attention_layers
    return 6 * (in_layers + in_head) + 12 * attention + 3 * shape.rule_flops * work.rows


class Utilisation:
    """The share of the GPUs' peak at which models are trained."""

    def __init__(self, mesh: Mesh):
        """Without CUDA, or on a GPU that the planner does not know, there is no peak."""
        self.peak = 0.0  # Operations a second, of all ranks.
        self.shapes: list[Shape] = []  # Of the models that are trained.
        if mesh.device.type == "cuda":
            name = torch.cuda.get_device_name(mesh.device)
            self.peak = cards.peak_tflops(name) * 1e12 * mesh.world_size

    def add(self, folder: Path, *, score: bool) -> None:
        """Count a model's work, too. Arguments as `Policy` has them."""
        if self.peak:
            self.shapes.append(read_shape(build.read_config(folder), score=score))

    def metrics(self, work: Work | None, seconds: float) -> dict[str, float]:
        """Return `mfu`, if there is a peak.

        Args:
            work: of the step.
            seconds: of forward and backward, of the rank that took longest.
        """
        if not self.shapes or work is None or seconds <= 0:
            return {}
        total = sum(flops(shape, work) for shape in self.shapes)
        return {"mfu": total / seconds / self.peak}


def host_memory() -> dict[str, float]:
    """Return the host memory in use now, in GiB: of this process, and of the whole machine."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    kib = {words[0].rstrip(":"): int(words[1]) for words in lines}
    used = kib["MemTotal"] - kib["MemAvailable"]
    own = pages * resource.getpagesize()
    return {"host_gib/rank": own / 2**30, "host_gib/machine": used / 2**20}
