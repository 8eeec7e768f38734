"""What GPUs have, from their data sheets, and what share of it kernels reach.

Sources: NVIDIA's data sheets of H100 and H200, A100, L40S, L4, H20, A10G (of Amazon's G5) and DGX
B200 (figures of eight, without sparsity), its white papers of Ada and Blackwell for RTX 4090 and
5090 (products that add up in float32), and AMD's data sheet of MI300X. GPUs without NVLink send
through the host. Memory is what torch reports as a device's total.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

from minirl.base.errors import require


@dataclass(frozen=True, kw_only=True)
class Card:
    """A GPU and what connects it. Speeds are the peaks of the data sheets."""

    name: str
    memory_gib: float  # As the driver reports it.
    tflops: float  # bfloat16 matrix products without sparsity.
    bandwidth_gb: float  # GB/s of its memory.
    link_gb: float  # GB/s in one direction to the other GPUs of a node.
    host_gb: float  # GB/s to the memory of the host.
    host_memory_gib: float  # Of the host, for each of its GPUs.
    network_gb: float = 50.0  # GB/s in one direction to other nodes: 400 Gb/s for each GPU.


CARDS = {
    card.name: card
    for card in (
        Card(
            name="h200",
            memory_gib=139.8,
            tflops=989,
            bandwidth_gb=4800,
            link_gb=450,
            host_gb=55,
            host_memory_gib=240,
        ),
        Card(
            name="h100",
            memory_gib=79.2,
            tflops=989,
            bandwidth_gb=3350,
            link_gb=450,
            host_gb=55,
            host_memory_gib=240,
        ),
        Card(
            name="b200",
            memory_gib=178.3,
            tflops=2250,
            bandwidth_gb=8000,
            link_gb=900,
            host_gb=55,
            host_memory_gib=240,
        ),
        Card(
            name="h20",
            memory_gib=95.0,
            tflops=148,
            bandwidth_gb=4000,
            link_gb=450,
            host_gb=55,
            host_memory_gib=240,
        ),
        Card(
            name="mi300x",
            memory_gib=191.5,
            tflops=1307,
            bandwidth_gb=5300,
            link_gb=448,
            host_gb=55,
            host_memory_gib=240,
        ),
        Card(
            name="a100-80",
            memory_gib=79.2,
            tflops=312,
            bandwidth_gb=2039,
            link_gb=300,
            host_gb=25,
            host_memory_gib=120,
        ),
        Card(
            name="l40s",
            memory_gib=44.5,
            tflops=362,
            bandwidth_gb=864,
            link_gb=25,
            host_gb=25,
            host_memory_gib=120,
        ),
        Card(
            name="rtx4090",
            memory_gib=23.5,
            tflops=165,
            bandwidth_gb=1008,
            link_gb=12,
            host_gb=25,
            host_memory_gib=60,
        ),
        Card(
            name="rtx5090",
            memory_gib=31.3,
            tflops=209,
            bandwidth_gb=1792,
            link_gb=25,
            host_gb=55,
            host_memory_gib=60,
        ),
        Card(
            name="a10g",
            memory_gib=22.0,
            tflops=70,
            bandwidth_gb=600,
            link_gb=12,
            host_gb=25,
            host_memory_gib=60,
        ),
        Card(
            name="l4",
            memory_gib=22.0,
            tflops=121,
            bandwidth_gb=300,
            link_gb=12,
            host_gb=25,
            host_memory_gib=60,
        ),
    )
}
# What people call some of them.
ALIASES = {"a100": "a100-80", "4090": "rtx4090", "5090": "rtx5090"}

# Shares of the peaks that good kernels reach. FlashAttention-2 was written for the A100; on Hopper
# it computes at 350 (forward) and 300 TFLOP/s.
REACHED = {
    "matmul": 0.70,
    "attention forward": 0.36,
    "attention backward": 0.30,
    "memory": 0.80,
    "wire": 0.75,
}
SHORTEST_KERNEL = 2e-6  # Seconds from one kernel to the next, however little there is to do.
SHORTEST_COLLECTIVE = 2e-5
# That the engine's scheduler takes beside the device for a token of each answer, and for each.
HOST_SECONDS_PER_STEP = 2e-3
HOST_SECONDS_PER_ANSWER = 1e-5
EAGER_SECONDS_PER_LAYER = 2e-4  # That the host takes for the kernels of a layer, without graphs.
HOST_ADAMW_GB = 10.0  # GB/s that a rank's cores move in AdamW on the host.


def find_card(
    name: str,
    memory_gb: float = 0.0,
    tflops: float = 0.0,
    bandwidth_gb: float = 0.0,
    host_memory_gb: float = 0.0,
) -> Card:
    """Return a card of the table, with other figures where they are given.

    Args:
        name: of the table, in any case, or one of `ALIASES`.
        memory_gb: memory in GB of 10^9 bytes, as it is sold; 0: that of the table.
        tflops: as `Card` has it; 0: that of the table.
        bandwidth_gb: as `Card` has it; 0: that of the table.
        host_memory_gb: memory of the host for each GPU, in GB of 10^9 bytes; 0: that of the table.

    Raises:
        UserError: the table has no such card.
    """
    known = ALIASES.get(name.lower(), name.lower())
    require(
        known in CARDS,
        f"--gpu {name!r} is not a known card; choose one of {', '.join(CARDS)} (another card: the "
        "most similar one, with --memory-gb, --tflops and --bandwidth-gb of its data sheet)",
    )
    given: dict[str, Any] = {}
    if memory_gb:
        given["memory_gib"] = memory_gb * 1e9 / 2**30
    if host_memory_gb:
        given["host_memory_gib"] = host_memory_gb * 1e9 / 2**30
    if tflops:
        given["tflops"] = tflops
    if bandwidth_gb:
        given["bandwidth_gb"] = bandwidth_gb
    return dataclasses.replace(CARDS[known], **given)


def of_device(name: str, memory_bytes: int) -> Card:
    """Return the card of the table that a device is, or the first one with the device's name.

    Args:
        name: as the driver gives it, such as "NVIDIA H200".
        memory_bytes: of the device.
    """
    memory_gib = memory_bytes / 2**30
    card = _named(name)
    if card:
        return dataclasses.replace(card, memory_gib=memory_gib)
    unknown = next(iter(CARDS.values()))
    return dataclasses.replace(
        unknown, name=f"{name} (taken for {unknown.name})", memory_gib=memory_gib
    )


def peak_tflops(name: str) -> float:
    """Return the peak of a device by the driver's name of it; 0: the table has no such card."""
    card = _named(name)
    return card.tflops if card else 0.0


def _named(name: str) -> Card | None:
    """Return the first card of the table that has the driver's name of a device, if any."""
    words = name.lower().replace("rtx ", "rtx").replace("-", " ").split()
    for card in CARDS.values():
        if card.name.partition("-")[0] in words:
            return card
    return None
