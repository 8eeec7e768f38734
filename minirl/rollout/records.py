"""Trajectories on disk: a file `step-N-rank-R.jsonl` for each step and rank, one object a line.

    group, episode, segment, version   integers, as in types.Trajectory
    reward      number: the whole episode's reward, from the environment and the reward functions,
                before reward.* shapes it
    tokens      list of L integers
    sampled, logprobs, rewards, versions
                lists of L values, as in types.Trajectory, where `rewards` is `turn_rewards`;
                L is 0 for an episode in which the policy sampled no token
    images      list of [place of the first token, number of tokens, data URL]
    routes      as in types.Trajectory: {"dtype", "shape", "data" in base 64}; null: none were
                recorded (algo.router_replay)
    info        object for people and metrics: prompt (of the row), completion (the answer, or the
                whole text of an environment's episode), row (its other columns, cut), source,
                stopped, error, refusal, rewards of each function, env, ...

`rollout.dump` writes them with tables (index.py), `rollout.replay` trains on them again, and
`python -m minirl.view RUN` shows them in a browser.
"""

import base64
import bisect
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from minirl.base.errors import UserError, require
from minirl.base.files import replacing
from minirl.base.reading import is_file, parse_json, read_text
from minirl.parallel.mesh import Mesh, World
from minirl.rollout import index
from minirl.types.packed import ImageSpan, Trajectory


def joined(texts: Sequence[str]) -> str:
    """Return the texts of an episode's segments as one, each without what it begins with again.

    A segment begins with the history before it as far as that was not rewritten. To repeat it each
    time would make the text of T turns as long as T squared.
    """
    parts = []
    before = ""
    for text in texts:
        lengths = range(1, min(len(before), len(text)) + 1)
        num_same = bisect.bisect(lengths, False, key=partial(_differ, before, text))
        parts.append(text[num_same:])
        before = text
    return "\n".join(parts)


def _differ(one: str, other: str, num: int) -> bool:
    """Return whether the first `num` characters of two texts differ."""
    return one[:num] != other[:num]


def write_step(
    trajectories: list[Trajectory],
    folder: Path,
    step: int,
    mesh: World,
    *,
    appends: bool = False,
) -> list[tuple[int, int]]:
    """Write this rank's file of a step; make the folder if it is missing.

    Args:
        trajectories: what to write.
        folder: of all steps.
        step: the step.
        mesh: the ranks that write.
        appends: they come after those that this rank has written of the step.

    Returns:
        For each trajectory, where its line begins in the file, and the line's bytes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    part = index.part_of(folder, step, mesh.rank)
    start = 0
    if appends:
        start = part.lines.stat().st_size
    else:
        part.table.unlink(missing_ok=True)  # another run may have left it
    sizes = []
    with part.lines.open("ab") if appends else replacing(part.lines) as file:
        for line in to_lines(trajectories):  # A step may have gigabytes.
            sizes.append(file.write(line) - 1)
    return list(index.places(sizes, start))


def to_lines(trajectories: list[Trajectory]) -> Iterator[bytes]:
    """Yield the lines of a file of trajectories, each with its line feed."""
    for t in trajectories:
        yield f"{json.dumps(to_record(t), default=np.ndarray.tolist)}\n".encode()


def drop_steps(folder: Path, first: int) -> None:
    """Remove the files of the steps from `first` on, which a run writes again.

    An earlier run may have had more ranks; their files hold the same groups.
    """
    for part in index.parts(folder):
        if part.step >= first:
            index.remove(part)


def to_record(t: Trajectory) -> dict:
    """Return a trajectory as an object for JSON, with arrays, which have a `tolist`."""
    routes = None
    if t.routes is not None:  # As lists of numbers they would be ten times as long.
        data = base64.b64encode(np.ascontiguousarray(t.routes).tobytes()).decode()
        routes = {"dtype": t.routes.dtype.name, "shape": list(t.routes.shape), "data": data}
    return {
        "group": t.group,
        "episode": t.episode,
        "segment": t.segment,
        "version": t.version,
        "reward": t.reward,
        "images": t.images,
        "info": t.info,
        "tokens": t.tokens,
        "sampled": t.sampled,
        "logprobs": t.logprobs,
        "rewards": t.turn_rewards,
        "versions": t.versions,
        "routes": routes,
    }


def from_record(record: dict) -> Trajectory:
    """Return the trajectory of a line. It raises the errors that `read_file` catches."""
    arrays: dict[str, Any] = {
        "tokens": np.array(record["tokens"], np.int32),
        "sampled": np.array(record["sampled"], np.bool_),
        "logprobs": np.array(record["logprobs"], np.float32),
        "turn_rewards": np.array(record["rewards"], np.float32),
        "versions": np.array(record["versions"], np.int32),
    }
    shapes = {name: list(array.shape) for name, array in arrays.items()}
    length = len(arrays["tokens"])
    if any(shape != [length] for shape in shapes.values()):
        raise ValueError(f"its lists differ in length: {shapes}")
    routes: np.ndarray | None = None
    if saved := record.get("routes"):  # Older files have none.
        if saved["dtype"] not in ("uint8", "int16") or len(saved["shape"]) != 3:
            raise ValueError(f"routes are {saved['dtype']} of shape {saved['shape']}")
        data = bytearray(base64.b64decode(saved["data"], validate=True))
        routes = np.frombuffer(data, saved["dtype"]).reshape(saved["shape"])
    numbers = [record["reward"], *arrays["logprobs"].tolist(), *arrays["turn_rewards"].tolist()]
    if not all(map(math.isfinite, numbers)):
        raise ValueError("it has a number that is not finite")
    return Trajectory(
        group=record["group"],
        episode=record["episode"],
        segment=record["segment"],
        version=record["version"],
        reward=record["reward"],
        images=[ImageSpan(*image) for image in record["images"]],
        routes=routes,
        info=record["info"],
        **arrays,
    )


def read_file(path: Path) -> Iterator[Trajectory]:
    """Yield the trajectories of a file.

    Raises:
        UserError: a line is not a trajectory.
    """
    for number, line in enumerate(read_text(path, "rollout.replay:").split("\n"), start=1):
        if not line:
            continue  # after the last line feed
        try:
            yield from_record(parse_json(line))
        except (KeyError, OverflowError, TypeError, ValueError) as error:
            raise UserError(
                f"{path}: line {number} is not a trajectory (rollout/records.py has the form): "
                f"{type(error).__name__}: {error}"
            ) from error


def check_steps(folder: Path, num_steps: int, *, resume: bool) -> None:
    """Refuse a folder without the dumped rollouts of a run's steps, before anything is loaded.

    Args:
        folder: the value of rollout.replay.
        num_steps: steps of the run.
        resume: the run may have done its first steps already, and needs only the last one.

    Raises:
        UserError: a step has no file.
    """
    first = max(0, num_steps - 1) if resume else 0
    for step in range(first, num_steps):
        _check_step(folder, step)


def _check_step(folder: Path, step: int) -> None:
    """Raise UserError if a folder has no file of a step. All its files may be too many to list."""
    require(
        is_file(index.part_of(folder, step, rank=0).lines),
        f"rollout.replay = {folder} has no step-{step}-rank-*.jsonl; lower num_steps, or give the "
        "folder `rollouts` of a run that had rollout.dump",
    )


def load_step(folder: Path, step: int, mesh: Mesh) -> list[Trajectory]:
    """Return this rank's part of a step: whole groups, from the files of all ranks.

    Raises:
        UserError: the folder has no file of this step, or one trajectory twice.
    """
    _check_step(folder, step)
    files = (index.part_of(folder, step, rank).lines for rank in itertools.count())
    trajectories: list[Trajectory] = []
    file_of: dict[tuple[int, int, int], Path] = {}
    for path in itertools.takewhile(is_file, files):
        for t in read_file(path):
            key = (t.group, t.episode, t.segment)
            if key in file_of:
                raise UserError(
                    f"rollout.replay: group {t.group}, episode {t.episode}, segment {t.segment} is "
                    f"in {file_of[key]} and in {path}; remove the file of the other run"
                )
            file_of[key] = path
            trajectories.append(t)
    groups = set(sorted({t.group for t in trajectories})[mesh.rank :: mesh.world_size])
    local = [t for t in trajectories if t.group in groups]
    return sorted(local, key=lambda t: (t.group, t.episode, t.segment))
