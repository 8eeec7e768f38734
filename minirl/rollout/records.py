"""Trajectories on disk: a folder with a file `step-N-rank-R.jsonl` for each step and rank, one JSON
object a line:

    group, episode, segment, version   integers, as in types.Trajectory
    reward      number: of the whole episode, as the environment and the reward functions gave it
    (before reward.* shapes it) tokens      list of L integers sampled, logprobs, rewards, versions
    lists of L values, as in types.Trajectory images      list of [place of the first token, number
    of tokens, data URL] info        object for people and metrics: prompt (the row's), completion
    (the answer, or all that was said in an environment), source, stopped,
                error, score, rewards of each function, env, ...

`rollout.dump` writes them, `rollout.replay` trains on them again, `python -m minirl.rollout.show
FILE` prints them.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from minirl.data.images import ImageSpan
from minirl.errors import UserError
from minirl.parallel.mesh import Mesh
from minirl.types import Trajectory

NUMBERS = ("group", "episode", "segment", "version", "reward")


def write_step(trajectories: list[Trajectory], folder: Path, step: int, mesh: Mesh) -> None:
    """Write this rank's file of a step."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"step-{step}-rank-{mesh.rank}.jsonl").open("w") as file:
        for t in trajectories:
            file.write(
                json.dumps(
                    {
                        **{name: vars(t)[name] for name in NUMBERS},
                        "images": t.images,
                        "info": t.info,
                        "tokens": t.tokens.tolist(),
                        "sampled": t.sampled.tolist(),
                        "logprobs": t.logprobs.tolist(),
                        "rewards": t.turn_rewards.tolist(),
                        "versions": t.versions.tolist(),
                    }
                )
                + "\n"
            )


def read_file(path: Path) -> Iterator[Trajectory]:
    """Raises UserError for what is no such file."""
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            row = json.loads(line)
            yield Trajectory(
                **{name: row[name] for name in NUMBERS},
                images=[ImageSpan(*image) for image in row["images"]],
                info=row["info"],
                tokens=np.array(row["tokens"], np.int32),
                sampled=np.array(row["sampled"], np.bool_),
                logprobs=np.array(row["logprobs"], np.float32),
                turn_rewards=np.array(row["rewards"], np.float32),
                versions=np.array(row["versions"], np.int32),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"{path}: line {number} is not a trajectory (rollout/records.py has the form): {type(error).__name__}: {error}"
            ) from error


def load_step(folder: Path, step: int, mesh: Mesh) -> list[Trajectory]:
    """This rank's part of a step, whole groups, whatever ranks wrote it. Raises UserError if there
    is none.
    """
    files = sorted(folder.glob(f"step-{step}-rank-*.jsonl"))
    if not files:
        raise UserError(
            f"rollout.replay = {folder} has no step-{step}-rank-*.jsonl; lower num_steps, or dump more steps by rollout.dump"
        )
    everything = [t for path in files for t in read_file(path)]
    own = sorted({t.group for t in everything})[mesh.rank :: mesh.world_size]
    return sorted(
        (t for t in everything if t.group in own), key=lambda t: (t.group, t.episode, t.segment)
    )
