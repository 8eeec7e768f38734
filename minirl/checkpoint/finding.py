"""Find the checkpoints of a run, and the newest that is whole.

The last file of a checkpoint lists the sizes of the others, so that files that were cut or lost
later are noticed before anything is read. Other damage is noticed by who reads it (reading.py).
"""

import json
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from minirl.base.errors import UserError, require
from minirl.base.files import remove, write_synced
from minirl.base.log import say
from minirl.parallel.machines import errors_of_all
from minirl.parallel.mesh import World

SIZES = "sizes.json"
# Without these there is no checkpoint, whatever the list says.
NEEDED = ("progress.json", "state/.metadata")

T = TypeVar("T")


class Unreadable(UserError):
    """A checkpoint's files do not hold what was written. All ranks raise it alike."""


def finished(run: Path, kind: str = "checkpoints") -> dict[int, Path]:
    """Return the finished checkpoints (or `references`) of a run folder by step, oldest first.

    Raises:
        UserError: where they should be is something else.
    """
    folder = run / kind
    require(
        folder.is_dir() or not os.path.lexists(folder),
        f"{folder} is not a folder, and {kind} belong there; remove it, or name another output "
        "folder",
    )
    steps = {}
    for path in folder.glob("step-*"):
        match = re.fullmatch(r"step-(\d+)", path.name)
        if match and path.is_dir():
            steps[int(match[1])] = path
    return dict(sorted(steps.items()))


def sizes_of_rank(checkpoint: Path, rank: int) -> dict[str, int]:
    """Return the sizes in bytes of the files that a rank has written, by paths in the folder."""
    patterns = [f"state/__{rank}_*.distcp", f"*-{rank}.json*"]
    if rank == 0:
        patterns += NEEDED
    sizes = {}
    for pattern in patterns:
        for path in checkpoint.glob(pattern):
            sizes[str(path.relative_to(checkpoint))] = path.stat().st_size
    return sizes


def write_sizes(checkpoint: Path, sizes: dict[str, int]) -> None:
    """Write the list of a checkpoint's files."""
    write_synced(checkpoint / SIZES, json.dumps(sizes, sort_keys=True, indent=1).encode())


def find_damage(checkpoint: Path) -> str:
    """Return which file of a checkpoint is damaged and how; empty: all have their sizes."""
    try:
        sizes = json.loads((checkpoint / SIZES).read_bytes())
        missing = [name for name in NEEDED if name not in sizes]
        if missing:
            return f"{SIZES} does not list {missing[0]}"
        for name, size in sizes.items():
            path = checkpoint / name
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != size:
                return f"{name} has {path.stat().st_size} bytes and not {size}"
    except FileNotFoundError:
        return f"{SIZES} is missing: it is not whole, or of an earlier version of minirl"
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        return f"{SIZES} is damaged: {type(error).__name__}: {error}"
    return ""


def resume(run: Path, world: World, read: Callable[[Path], T]) -> tuple[Path, T] | None:
    """Read the newest checkpoint that is whole; None: there is none. Collective.

    Damaged ones are renamed to `step-N.damaged`, with a message: the run will write a checkpoint of
    the same step again.

    Args:
        run: the folder of a run.
        world: the ranks.
        read: reads a checkpoint, on all ranks. If it raises Unreadable, the one before is read.

    Returns:
        The checkpoint and what `read` returned.

    Raises:
        UserError: there are some, and all are damaged; they are left as they are.
    """
    candidates: list[Path] = []
    with errors_of_all(world):
        if world.rank == 0:  # another machine may see a new checkpoint later
            candidates = list(finished(run).values())
    damages: dict[Path, str] = {}
    found = None
    for path in reversed(world.broadcast(candidates, 0)):
        damage = world.broadcast(find_damage(path) if world.rank == 0 else "", 0)
        if not damage:
            try:
                found = path, read(path)
                break
            except Unreadable as error:
                damage = str(error)
        damages[path] = damage
    described = "; ".join(f"{path.name}: {damage}" for path, damage in damages.items())
    require(
        found or not damages,
        f"resume: no checkpoint of {run} is whole ({described}); remove {run / 'checkpoints'} to "
        "begin again, or name another output folder",
    )
    if found and world.rank == 0:
        for path, damage in damages.items():
            aside = path.with_name(f"{path.name}.damaged")
            remove(aside)
            path.rename(aside)
            say(
                f"{path} is damaged ({damage}): resuming from {found[0].name}, the one before; it "
                f"is {aside.name} now"
            )
    world.barrier()
    return found


def drop_references(run: Path, step: int) -> None:
    """Delete references that no checkpoint of the run would resume with.

    A checkpoint resumes with the newest reference that is not newer than itself. Those after the
    newest checkpoint's stay, too: the next checkpoint may resume with them.

    Args:
        run: the folder of the run.
        step: stands for a checkpoint if none is finished.
    """
    references = finished(run, "references")
    in_use = set()
    for checkpoint in finished(run) or [step]:
        in_use.add(max((n for n in references if n <= checkpoint), default=0))
    for n, path in references.items():
        if n < max(in_use) and n not in in_use:
            remove(path)


def drop_partial(folder: Path) -> None:
    """Delete what was left half written of checkpoints or references. It may have filled the disk.

    Args:
        folder: their folder, in which nothing is being written.
    """
    for path in folder.glob("step-*.partial"):
        remove(path)


def drop_later_references(run: Path, step: int) -> None:
    """Delete references of later steps, before a run resumes at `step`: it takes its own."""
    for n, path in finished(run, "references").items():
        if n > step:
            remove(path)


def newest_reference(run: Path, step: int, known: int = 0) -> Path | None:
    """Return the newest reference that is not newer than a step, if there is one.

    Args:
        run: the folder of a run.
        step: the step that begins.
        known: step of the reference that was the newest when a checkpoint was written; 0: none was.

    Raises:
        UserError: that one, or what has come in its place, is not there.
    """
    references = finished(run, "references")
    newest = max((number for number in references if number <= step), default=0)
    require(
        newest >= known,
        f"resume: {run}/references/step-{known}, to which the KL was taken, is missing; put it "
        "back, or begin again in another output folder",
    )
    return references[newest] if newest else None


def read_best(run: Path) -> dict | None:
    """Return {"step", "metric", "value"} of the checkpoint that scored best.

    None if there is none, or it is gone.

    Raises:
        ValueError: it holds something else; the text says what.
    """
    path = run / "checkpoints/best.json"
    try:
        best = json.loads(path.read_bytes())
        known = {"step": int, "metric": str, "value": float}
        # A whole number is written without a point.
        if {name: type(best[name]) for name in known} != known or not math.isfinite(best["value"]):
            raise TypeError("step, metric and value are not what they should be")
    except FileNotFoundError:
        return None
    except (OSError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({type(error).__name__}: {error})") from error
    return best if best["step"] in finished(run) else None
