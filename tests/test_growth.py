"""Costs grow with the work and the ranks no faster than the bounds of benchmarks/growth.py."""

import itertools
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest

from benchmarks import growth
from benchmarks.growth_law import Bound, Point, powers
from harness import PRELOAD
from minirl.parallel.machines import keep_freed_memory

# Sizes and worlds in which a power too many is seen by a clock, and which take few seconds. They
# lie so far apart that what leaves the caches in between, and takes 2.5 times as long, is no power.
SMALL = {
    "refit": ([1, 4], [8, 64]),
    "step": ([24, 192], [32, 128]),
    "rows": ([4000, 32000], [8, 32]),
    "save": ([1, 4], [8, 32]),
    "load": ([2, 8], [8, 64]),
}


def measure(name: str) -> dict[str, list[Point]]:
    """Measure a part in a process that keeps freed memory, as a rank does.

    New pages cost six times as much as the copy into them, and malloc takes them for the same call
    at one time and not at another: it depends on what was freed before.
    """
    keep_freed_memory()
    return growth.measure(growth.PARTS[name], *SMALL[name])


@pytest.fixture
def process() -> Iterator[ProcessPoolExecutor]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with ProcessPoolExecutor(1, context) as pool:
        yield pool


# A machine may be slower while one point is measured than while another is, so a law whose seconds
# break its bound is measured again, and each point has the least that it took. Bytes and pieces do
# not depend on the machine: they keep the bound in every measurement.
NUM_TIMES = 3


@pytest.mark.parametrize("name", growth.PARTS)
def test_laws_keep_their_bounds(process, name):
    part = growth.PARTS[name]
    least = {}
    for _ in range(NUM_TIMES):
        found = process.submit(measure, name).result()
        assert set(found) == set(part.bounds)
        for law, points in found.items():
            assert all(point.cpu_seconds > 0 or point.num_bytes > 0 for point in points), law
            without_seconds = powers([point._replace(cpu_seconds=0.0) for point in points])
            assert without_seconds.keep(part.bounds[law]), (law, without_seconds, points)
            least[law] = [
                min(pair, key=lambda point: point.cpu_seconds)
                for pair in zip(points, least.get(law, points), strict=True)
            ]
        broken = [law for law in least if not powers(least[law]).keep(part.bounds[law])]
        if not broken:
            break
    assert not broken, [(law, powers(least[law]), least[law]) for law in broken]


def points(seconds, num_bytes=lambda size, ranks: 0, num_pieces=lambda size, ranks: 0):
    return [
        Point("a", n, s, seconds(s, n), num_bytes(s, n), num_pieces(s, n))
        for s, n in itertools.product([10, 20], [8, 64])
    ]


def test_what_grows_too_fast_breaks_its_bound():
    fine = points(lambda size, ranks: 0.01 * size)
    assert powers(fine) == pytest.approx((1, 0, 0, 0, 0, 0))
    assert powers(fine).keep(Bound(size=1, ranks=0))
    assert not powers(fine).keep(Bound(size=0, ranks=0))
    assert not powers(points(lambda size, ranks: 0.01 * size**2)).keep(Bound(size=1, ranks=0))
    assert not powers(points(lambda size, ranks: 0.01 * ranks)).keep(Bound(size=1, ranks=0))
    large = points(lambda size, ranks: 0.01, lambda size, ranks: 10**6 * ranks**2)
    assert not powers(large).keep(Bound(size=0, ranks=1))
    many = points(lambda size, ranks: 0.01, num_pieces=lambda size, ranks: size * ranks)
    assert not powers(many).keep(Bound(size=1, ranks=0))


def test_costs_that_no_clock_sees_have_not_grown():
    assert powers(points(lambda size, ranks: 1e-8 * size**2 * ranks)) == (0,) * 6


def test_a_broken_law_ends_the_benchmark_with_an_error(monkeypatch, capsys):
    def square(size, ranks):
        return [Point("square", ranks, size, size**2 / 10, 0)]

    part = growth.PARTS["step"]._replace(bounds={"square": Bound(1, 0)}, measure=square)
    monkeypatch.setitem(growth.PARTS, "step", part)
    with pytest.raises(SystemExit, match="1"):
        growth.main(growth.Load(parts=["step"]))
    printed = capsys.readouterr().out
    assert "| square | 1,024 | 8, 32, 128 | 6,400.0, 102,400.0, 1,638,400.0 |" in printed
    assert "| square | 2.00, 0.00, 0.00 | 1 | 0.00, 0.00, 0.00 | 0 | BROKEN |" in printed
