"""What the stages share: where they compute, checks and figures, and the device's clock.

A stage prints a line for each check and figure, and adds it to the file $STAGE_JSON, if there is
one, so that a stage that is cut short loses nothing.
"""

import contextlib
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

GIB = 2**30
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
# Tiny shapes: all calls are made, and the figures mean nothing.
SMALL = not ON_GPU or bool(os.environ.get("GPU_RUN_SMALL"))
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
FAILED: list[str] = []  # Checks of this process.


def _write(row: dict[str, Any]) -> None:
    path = os.environ.get("STAGE_JSON")
    if path:
        with Path(path).open("a") as file:
            file.write(json.dumps(row) + "\n")


def check(name: str, ok: bool, note: str = "") -> None:
    """Report whether something holds; the stage fails at its end if anything does not.

    Args:
        name: of what should hold.
        ok: whether it does.
        note: figures that say how well.
    """
    print(f"{'ok  ' if ok else 'FAIL'} {name}  {note}", flush=True)
    _write({"check": name, "ok": bool(ok), "note": note[:400]})
    if not ok:
        FAILED.append(name)


def value(name: str, number: float | str, unit: str = "") -> None:
    """Report a figure."""
    shown = f"{number:.6g}" if isinstance(number, float) else number
    print(f"     {name}: {shown} {unit}", flush=True)
    _write({"value": name, "number": number, "unit": unit})


@contextlib.contextmanager
def part(name: str) -> Iterator[None]:
    """Run a part of a stage: its failure is a failed check, and the next part runs."""
    began = time.perf_counter()
    try:
        yield
    except Exception as error:  # Whatever it is: what the other parts show is wanted, too.
        traceback.print_exc()
        check(name, False, f"{type(error).__name__}: {error}")
        if "CUDA error" in str(error) or "illegal memory access" in str(error):
            print("the CUDA context is lost: this stage ends here", flush=True)
            leave()
    if ON_GPU:
        torch.cuda.synchronize()
    value(f"seconds of {name}", time.perf_counter() - began, "s")


def near(name: str, got: Tensor, wanted: Tensor, limit: float) -> None:
    """Check that ||got - wanted|| / ||wanted||, in float64, is within a limit."""
    got = got.detach().double()
    wanted = wanted.detach().double()
    distance = float((got - wanted).norm() / wanted.norm().clamp(min=1e-30))
    # NaN is not within it.
    check(name, distance <= limit, f"relative distance {distance:.3g} (limit {limit:g})")


def used_gib() -> float:
    """Return what is used of the whole device, by this process and all others, in GiB."""
    if not ON_GPU:
        return 0.0
    free, total = torch.cuda.mem_get_info()
    return (total - free) / GIB


def synchronize() -> None:
    """Wait for the device."""
    if ON_GPU:
        torch.cuda.synchronize()


def wall_seconds(function: Callable[[], object]) -> float:
    """Return the seconds of one call, until the device is done."""
    synchronize()
    began = time.perf_counter()
    function()
    synchronize()
    return time.perf_counter() - began


def seconds(function: Callable[[], object], repeats: int = 10) -> float:
    """Return the median seconds of a call after a warm-up, on CUDA those of the device."""
    for _ in range(3 if ON_GPU else 1):
        function()
    if not ON_GPU:
        return wall_seconds(function)
    return statistics.median(device_seconds(function) for _ in range(repeats))


def device_seconds(function: Callable[[], object]) -> float:
    """Return the seconds of one call on the CUDA device."""
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    # The device waits (20 million cycles are 10 ms) while the host launches the call: a host that
    # runs ahead is what there is in training, too.
    torch.cuda._sleep(20_000_000)
    start.record()
    function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def side_environment(**changes: str) -> dict[str, str]:
    """Return the environment of a process that runs one side of a comparison.

    It imports this checkout, and its tests/tiny.py, which makes models of each family.
    """
    paths = [os.getcwd(), str(Path.cwd() / "tests"), os.environ.get("PYTHONPATH", "")]
    return dict(os.environ, PYTHONPATH=os.pathsep.join(paths), **changes)


def read_results(file: Path) -> dict[str, list[list[float]]]:
    """Return what a side has written, by case; nothing if it failed before."""
    return json.loads(file.read_text()) if file.exists() else {}


def largest_difference(rows: list[list[float]], others: list[list[float]]) -> float:
    """Return the largest relative difference of two tables of figures, of which some are near 0."""
    differences = []
    for row, other in zip(rows, others, strict=True):
        for x, y in zip(row, other, strict=True):
            differences.append(abs(x - y) / (abs(y) + 1e-3))
    return max(differences)


def leave() -> NoReturn:
    """End without the interpreter's own end, at which vLLM and NCCL may abort."""
    print("failed: " + ", ".join(FAILED) if FAILED else "all checks passed", flush=True)
    sys.stderr.flush()
    os._exit(1 if FAILED else 0)
