"""Memory and time of a model's training step from closed formulas.

They count what the dry run counts, in under 0.1 s and without a compiler: `tests/test_plan.py`
holds both against each other. Families whose layers differ from those of Qwen3 and Llama by a norm
more or a bias take a little more, and images are not counted.
"""

from dataclasses import dataclass

from minirl.plan.memory import Job, Memory
from minirl.plan.work import Work


@dataclass(kw_only=True)
class Cost:
    """What training a model costs a rank."""

    parameters: float  # Bytes on the device between two steps, like the next.
    optimizer: float
    peaks: dict[str, float]  # Most bytes on the device at once, by phase.
    alive: dict[str, dict[str, float]]  # What these bytes are, by phase.
    # Seconds by phase: of a micro-batch in forward, backward and annotate, of a step in optimizer.
    seconds: dict[str, float]
    wire: dict[str, float]  # Bytes that pass this rank's link, alike.
    wire_seconds: dict[str, float]
    flops: float  # Of forward and backward of a micro-batch, without what is computed again.


def cost(job: Job) -> Cost:
    """Return what a model costs a rank, by the formulas."""
    memory = Memory(job)
    work = Work(job, memory)
    alive = memory.phases()
    wire = work.wire()
    return Cost(
        parameters=memory.parameters,
        optimizer=memory.optimizer,
        peaks={name: sum(parts.values()) for name, parts in alive.items()},
        alive=alive,
        seconds=work.seconds(),
        wire=wire,
        wire_seconds=work.wire_seconds(wire),
        flops=work.flops(),
    )
