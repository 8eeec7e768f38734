"""How minirl's work beside the GPUs grows, with the work and with the ranks, in one process.

    python -m benchmarks.growth
    python -m benchmarks.growth --parts rows step --worlds 8 64

One process plays one rank of a world that is imagined: it does all of its own work, what the other
ranks would send is made up, and there is no wire. Prints CPU-seconds and bytes of that rank, as
which powers of size and ranks they grew, and the bound that they must keep. Ends with code 1 if a
law does not keep its bound.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch
import tyro

from benchmarks import growth_load, growth_refit, growth_rows, growth_save, growth_step
from benchmarks.growth_law import Bound, Part, Point, powers

PARTS: dict[str, Part] = {
    "refit": growth_refit.PART,
    "step": growth_step.PART,
    "rows": growth_rows.PART,
    "save": growth_save.PART,
    "load": growth_load.PART,
}


@dataclass
class Load:
    """What to measure."""

    parts: list[Literal["refit", "step", "rows", "save", "load"]] = field(
        default_factory=lambda: ["refit", "step", "rows", "save", "load"]
    )
    sizes: list[int] = field(default_factory=list)  # Of one part's work; empty: the part's own.
    worlds: list[int] = field(default_factory=list)  # Numbers of ranks; empty: the part's own.


def measure(part: Part, sizes: list[int], worlds: list[int]) -> dict[str, list[Point]]:
    """Return the points of each of the part's laws."""
    found: dict[str, list[Point]] = {name: [] for name in part.bounds}
    for ranks in worlds:
        for size in sizes:
            for point in part.measure(size, ranks):
                found[point.law].append(point)
    return found


def lines(name: str, points: list[Point]) -> Iterator[str]:
    """Return a table's lines of one law: what a rank's work cost, in each world."""
    for ranks in dict.fromkeys(point.ranks for point in points):
        of_world = [point for point in points if point.ranks == ranks]
        sizes = ", ".join(f"{point.size:,}" for point in of_world)
        seconds = ", ".join(f"{1e3 * point.cpu_seconds:,.1f}" for point in of_world)
        num_bytes = ", ".join(f"{point.num_bytes / 1e6:,.2f}" for point in of_world)
        pieces = ", ".join(f"{point.num_pieces:,}" for point in of_world if point.num_pieces)
        yield f"| {name} | {ranks:,} | {sizes} | {seconds} | {num_bytes} | {pieces} |"


def verdict(name: str, points: list[Point], bound: Bound) -> str:
    """Return a line of how fast a law grew, and whether it may."""
    grew = powers(points)
    kept = "kept" if grew.keep(bound) else "BROKEN"
    by_size = f"{grew.seconds_by_size:.2f}, {grew.bytes_by_size:.2f}, {grew.pieces_by_size:.2f}"
    by_ranks = f"{grew.seconds_by_ranks:.2f}, {grew.bytes_by_ranks:.2f}, {grew.pieces_by_ranks:.2f}"
    return f"| {name} | {by_size} | {bound.size:g} | {by_ranks} | {bound.ranks:g} | {kept} |"


def main(load: Load) -> None:
    """Print the points of every law, then its powers."""
    torch.set_num_threads(1)
    verdicts = []
    for name in load.parts:
        part = PARTS[name]
        print(f"\n{name}: size in {part.unit}\n")
        print("| law | ranks | sizes | CPU-ms | MB | pieces |\n|---|---|---|---|---|---|")
        found = measure(part, load.sizes or part.sizes, load.worlds or part.worlds)
        for law, points in found.items():
            print("\n".join(lines(law, points)), flush=True)
            verdicts.append(verdict(law, points, part.bounds[law]))
    print("\nPowers of growth: of CPU-seconds, of bytes, of pieces.\n")
    print("| law | of the size | at most | of the ranks | at most | |\n|---|---|---|---|---|---|")
    print("\n".join(verdicts))
    if any("BROKEN" in line for line in verdicts):
        sys.exit(1)


if __name__ == "__main__":
    main(tyro.cli(Load))
