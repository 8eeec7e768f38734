"""What GPUs have, from their data sheets, and what share of it kernels reach.

Sources: NVIDIA's data sheets of H100 and H200, A100, L40S, L4, H20, A10G (of Amazon's G5) and DGX
B200 (figures of eight, without sparsity), its white papers of Ada and Blackwell for RTX 4090 and
5090 (products that add up in float32), and AMD's data sheet of MI300X. GPUs without NVLink send
through the host. Memory is what torch reports as a device's total.
"""

from dataclasses import dataclass, replace
from typing import Any

from minirl.base.errors import require

GIB = 2**30
# Shares of the card's peaks that good kernels reach. FlashAttention-2 was written for the A100; on
# Hopper it computes at 350 (forward) and 300 TFLOP/s.
REACHED = {
    "matmul": 0.70,
    "attention forward": 0.36,
    "attention backward": 0.30,
    "memory": 0.80,
    "wire": 0.75,
}


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

    def computing(self, flops: float) -> float:
        """Return the seconds of matrix products."""
        return flops / (self.tflops * 1e12 * REACHED["matmul"])

    def moving(self, size: float) -> float:
        """Return the seconds of reading and writing bytes of its memory."""
        return size / (self.bandwidth_gb * 1e9 * REACHED["memory"])

    def sending(self, size: float, *, across: bool = False) -> float:
        """Return the seconds of sending bytes to GPUs of the node, or across nodes."""
        return size / ((self.network_gb if across else self.link_gb) * 1e9 * REACHED["wire"])

    def gathering(self, size: float, ranks: int, in_node: int) -> float:
        """Return the seconds in which ranks gather what they have shards of, or sum up and divide.

        What comes from other nodes comes once to a node, to each of its ranks a part, which it
        hands on by the link meanwhile (NCCL's rings: 340 GB/s on 32 nodes of 8 H100, nccl#1218).

        Args:
            size: bytes that a rank gets from the others.
            ranks: how many share.
            in_node: how many of them are in a node.
        """
        if ranks == in_node:
            return self.sending(size)
        from_nodes = size * (ranks - in_node) / (ranks - 1) / in_node
        return max(self.sending(size), self.sending(from_nodes, across=True))

    def to_host(self, size: float) -> float:
        """Return the seconds of copying bytes to the host or back."""
        return size / (self.host_gb * 1e9)


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


def find_card(name: str, **given: Any) -> Card:
    """Return a card of the table, with other figures where they are given.

    Args:
        name: of the table, in any case, or one of `ALIASES`.
        given: figures of `Card`; 0: that of the table.

    Raises:
        UserError: the table has no such card.
    """
    known = ALIASES.get(name.lower(), name.lower())
    require(
        known in CARDS,
        f"--gpu {name!r} is not a known card; choose one of {', '.join(CARDS)} (another card: the "
        "most similar one, with --memory-gb, --tflops and --bandwidth-gb of its data sheet)",
    )
    return replace(CARDS[known], **{key: value for key, value in given.items() if value})


def of_device(name: str, memory_bytes: int) -> Card:
    """Return the card of the table that a device is, or the first one with the device's name.

    Args:
        name: as the driver gives it, such as "NVIDIA H200".
        memory_bytes: of the device.
    """
    card = named(name) or replace(CARDS["h200"], name=f"{name} (taken for h200)")
    return replace(card, memory_gib=memory_bytes / GIB)


def named(device: str) -> Card | None:
    """Return the first card of the table that has the driver's name of a device, if any."""
    words = device.lower().replace("rtx ", "rtx").replace("-", " ").split()
    for card in CARDS.values():
        if card.name.partition("-")[0] in words:
            return card
    return None
