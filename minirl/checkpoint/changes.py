"""What a resumed run may change: its settings are compared with those that it was begun with."""

import dataclasses
import re
from fnmatch import fnmatch
from pathlib import Path

from minirl.base.errors import UserError, require
from minirl.base.reading import is_file
from minirl.config.parse import flatten, load_config
from minirl.config.shared import TrainingConfig

# Settings that make another run -> what they decide. Steps, examples and tickets are counted from
# the begin of the run, so settings of how many belong to a step decide which rows come next.
FIXED = {
    "seed": "the order of the rows and all samples",
    "data.*": "what the run trains on",
    "rollout.replay": "what the run trains on",
    "rollout.prompts_per_step": "which rows the next step takes",
    "batch_size": "which rows the next step takes",
    "policy.model": "the model",
    "policy.scratch.*": "the model",
    "policy.freeze": "which weights the optimizer's state is of",
    "critic.freeze": "which weights the optimizer's state is of",
    "policy.lora.*": "which weights are trained",
    "critic.lora.*": "which weights are trained",
    "critic.share_base": "another model of the run",
    "ref.model": "another model of the run",
    "sft.num_steps": "the model that RL begins with",
    "critic.model": "another model of the run",
    "reward.model": "another model of the run",
    "reference": "another model of the run",
}
# Where a run is and how it is started is no setting of it.
IGNORED = ("output", "resume")


def program_of(cls: type) -> str:
    """Return the program of a config class, as its docstring names it."""
    return re.findall(r"-m (minirl\.\w+)", cls.__doc__ or "")[0]


def head_of(cls: type) -> str:
    """Return the line that begins the config.yaml of a run."""
    return f"# Settings of a run of {program_of(cls)}.\n"


def compare_settings(cfg: TrainingConfig) -> list[str]:
    """Compare a resumed run's settings with those in its folder.

    Returns:
        What has changed and may: `name old -> new`.

    Raises:
        UserError: the folder is that of another program, or a setting has changed that makes
            another run; or the folder's config.yaml cannot be read.
    """
    path = Path(cfg.output) / "config.yaml"
    if not is_file(path):
        return []  # it ended before it began
    try:
        begin = path.read_bytes()[:200].decode(errors="replace")
    except OSError as error:
        raise UserError(f"resume: {path} cannot be read: {error}") from error
    begun_by = re.match(r"# Settings of a run of (minirl\.\w+)\.", begin)
    program = program_of(type(cfg))
    require(
        begun_by is None or begun_by[1] == program,
        f"resume: {cfg.output} is a run of {begun_by and begun_by[1]}, and this is {program}; name "
        "another folder with --output",
    )
    try:
        saved = load_config(type(cfg), str(path))
    except UserError as error:
        raise UserError(
            f"resume: {cfg.output} holds no settings of {program} of this version: {error}; start "
            "in another output folder"
        ) from error

    old = flatten(dataclasses.asdict(saved))
    changed = []
    new = flatten(dataclasses.asdict(cfg))
    for name in new | old:  # a mapping's names may be on one side only
        before = old.get(name)
        now = new.get(name)
        if name in IGNORED or before == now:
            continue
        for pattern, decided in FIXED.items():
            require(
                not fnmatch(name, pattern),
                f"resume: {name} = {now!r}, and the run was begun with {before!r}: it decides "
                f"{decided}; set it as it was, or start in another output folder (if it is the "
                f"same thing at another place, change {path}, too)",
            )
        changed.append(f"{name} {before!r} -> {now!r}")
    return changed
