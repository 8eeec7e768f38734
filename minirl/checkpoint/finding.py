"""Find the checkpoints of a run, and the one to go on from."""

import json
import math
import re
from pathlib import Path

from minirl.base.errors import require
from minirl.base.files import remove
from minirl.base.log import say
from minirl.checkpoint.checksums import find_damage
from minirl.parallel.machines import errors_of_all
from minirl.parallel.mesh import World


def finished(run: Path, kind: str = "checkpoints") -> dict[int, Path]:
    """Return the finished checkpoints (or `references`) of a run folder by step, oldest first.

    Raises:
        UserError: where they should be is something else.
    """
    folder = run / kind
    require(
        folder.is_dir() or not folder.exists(),
        f"{folder} is not a folder, and {kind} belong there; remove it, or name another output "
        "folder",
    )
    steps = {}
    for path in folder.glob("step-*"):
        match = re.fullmatch(r"step-(\d+)", path.name)
        if match and path.is_dir():
            steps[int(match[1])] = path
    return dict(sorted(steps.items()))


def find(run: Path) -> Path | None:
    """Return the newest finished checkpoint of a run folder, whole or damaged."""
    return next(reversed(finished(run).values()), None)


def newest_whole(run: Path, world: World) -> tuple[Path | None, dict[Path, str]]:
    """Look for the newest checkpoint that is whole. Collective.

    Returns:
        (the checkpoint, what is damaged of each newer one); (None, ...) if none is whole.
    """
    candidates: list[Path] = []
    with errors_of_all(world):
        if world.rank == 0:  # another machine may see a new checkpoint later
            candidates = list(finished(run).values())
    damages: dict[Path, str] = {}
    for path in reversed(world.broadcast(candidates, 0)):
        damage = find_damage(path, world)
        if not damage:
            return path, damages
        damages[path] = damage
    return None, damages


def find_whole(run: Path, world: World) -> Path | None:
    """Return the newest checkpoint to go on from; None: there is none. Collective.

    A damaged one is told in one line and renamed to `step-N.damaged`, out of the way of the one
    that will be written for the same step.

    Raises:
        UserError: there are some, and all are damaged; they are left as they are.
    """
    chosen, damages = newest_whole(run, world)
    require(
        chosen or not damages,
        f"resume: no checkpoint of {run} is whole ({describe_damages(damages)}); remove "
        f"{run / 'checkpoints'} to begin anew, or name another output folder",
    )
    if chosen and world.rank == 0:
        _set_aside(damages, chosen)
    world.barrier()
    return chosen


def describe_damages(damages: dict[Path, str]) -> str:
    """Return one text about some checkpoints."""
    return "; ".join(f"{path.name}: {damage}" for path, damage in damages.items())


def _set_aside(damages: dict[Path, str], chosen: Path) -> None:
    """Say which checkpoints are damaged and rename them."""
    for path, damage in damages.items():
        aside = path.with_name(f"{path.name}.damaged")
        remove(aside)
        path.rename(aside)
        say(
            f"{path} is damaged ({damage}): going on from {chosen.name}, the one before; it is "
            f"{aside.name} now"
        )


def drop_references(run: Path, step: int) -> None:
    """Delete references that no checkpoint of the run would resume with.

    A checkpoint resumes with the newest reference that is not newer than itself, so those before
    the one of the oldest checkpoint go.

    Args:
        run: the folder of the run.
        step: stands for the oldest checkpoint if none is finished.
    """
    oldest = min(finished(run), default=step)
    references = finished(run, "references")
    oldest_in_use = max((n for n in references if n <= oldest), default=0)
    for n, path in references.items():
        if n < oldest_in_use:
            remove(path)


def read_best(run: Path) -> dict | None:
    """Return {"step", "metric", "value"} of best.json, of a checkpoint that may be gone.

    None if there is no such file.

    Raises:
        ValueError: it holds something else; the text says what.
    """
    path = run / "checkpoints/best.json"
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    try:
        best = json.loads(text)
        known = {"step": int, "metric": str, "value": float}
        # A whole number is written without a point.
        if {name: type(best[name]) for name in known} != known or not math.isfinite(best["value"]):
            raise TypeError("step, metric and value are not what they should be")
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({type(error).__name__}: {error})") from error
    return best


def find_best(run: Path) -> dict | None:
    """Return {"step", "metric", "value"} of the checkpoint that scored best.

    None if there is none, if it is gone, or if best.json is damaged.
    """
    try:
        best = read_best(run)
    except ValueError:
        return None
    return best if best and best["step"] in finished(run) else None
