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


@dataclass(frozen=True)
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
    # GiB, TFLOP/s, GB/s of memory, of the link, of the host; GiB of the host.
    "h200": Card("h200", 139.8, 989, 4800, 450, 55, 240),
    "h100": Card("h100", 79.2, 989, 3350, 450, 55, 240),
    "b200": Card("b200", 178.3, 2250, 8000, 900, 55, 240),
    "h20": Card("h20", 95.0, 148, 4000, 450, 55, 240),
    "mi300x": Card("mi300x", 191.5, 1307, 5300, 448, 55, 240),
    "a100-80": Card("a100-80", 79.2, 312, 2039, 300, 25, 120),
    "l40s": Card("l40s", 44.5, 362, 864, 25, 25, 120),
    "rtx4090": Card("rtx4090", 23.5, 165, 1008, 12, 25, 60),
    "rtx5090": Card("rtx5090", 31.3, 209, 1792, 25, 55, 60),
    "a10g": Card("a10g", 22.0, 70, 600, 12, 25, 60),
    "l4": Card("l4", 22.0, 121, 300, 12, 25, 60),
}
# What people call some of them.
ALIASES = {"a100": "a100-80", "4090": "rtx4090", "5090": "rtx5090"}


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
