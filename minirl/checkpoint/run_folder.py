"""The folder of a run: one writes there at a time, and a resumed one has the settings of the first.

Rank 0 holds `lock` in the folder from the first thing that the run writes to its end. The kernel
frees it however the process ends. The file stays in the folder of a run that has begun; one that is
refused before it writes anything else removes it.

Across machines it is as good as the file system: NFS (version 4, or 3 with its lock daemon) keeps
such a lock on the server, which frees that of a dead machine when its lease has run out. If a file
system has no locks, one line says so.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import re
import socket
import time
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from minirl.base.errors import UserError, require
from minirl.base.log import say
from minirl.base.reading import is_file, read_text
from minirl.config.parse import flatten, load_config, program_of
from minirl.config.rl import RLConfig
from minirl.config.shared import TrainingConfig

LOCK = "lock"
# A killed process frees its memory before its locks.
SECONDS_TO_WAIT = 5.0
_held: dict[Path, int] = {}  # File descriptors by folder, of this process.
_made: set[Path] = set()  # Of these folders, those that were not there before.

# Settings that make another run -> what they decide. Steps, examples and tickets are counted from
# the begin of the run, so settings of how many belong to a step decide which rows come next.
FIXED = {
    "seed": "the order of the rows and all samples",
    "data.*": "what the run trains on",
    "rollout.replay": "what the run trains on",
    "rollout.prompts_per_step": "which rows the next step takes",
    "batch_size": "which rows the next step takes",
    "*.model": "a model of the run",
    "policy.scratch.*": "a model of the run",
    "reference": "a model of the run",
    "critic.share_base": "a model of the run",
    "sft.num_steps": "the model that RL begins with",
    "*.freeze": "which weights the optimizer's state is of",
    "*.lora.*": "which weights are trained",
    "*.optimizer": "what the optimizer's state is",
}
# Settings of what an episode earns: rewards of before and after a change do not compare.
REWARDS = (
    "env.name",
    "env.max_*",
    "env.*error*",
    "eval.threshold",
    "reward.function",
    "reward.weights",
    "reward.model_weight",
    "reward.unstopped*",
    "reward.overlong*",
)
# Settings of what an evaluation measures.
EVALUATIONS = (
    *REWARDS,
    "eval.samples",
    "eval.temperature",
    "eval.top_*",
    "eval.max_tokens",
    "rollout.max_tokens",
)
# Settings of the answers that a step trains on.
ANSWERS = (
    *REWARDS,
    "engine.max_model_len",
    "rollout.samples_per_prompt",
    "rollout.max_tokens",
    "rollout.temperature",
    "rollout.top_*",
    "rollout.min_p",
    "rollout.extra_prompts",
    "rollout.keep_inside",
    "rollout.curriculum_floor",
    "algo.router_replay",
)
# Where a run is and how it is started is no setting of it.
IGNORED = ("output", "resume")


def hold(output: Path) -> None:
    """Lock the folder of a run, which is made if it is missing. Nothing if this process has it.

    Raises:
        UserError: another run holds it, or it cannot be written to.
    """
    if output in _held:
        return
    path = output / LOCK
    try:
        while output not in _held:
            # Another run may make it at the same moment, or remove it when it is refused.
            with contextlib.suppress(FileExistsError):
                output.mkdir(parents=True)
                _made.add(output)
            require(
                not path.is_symlink(),
                f"{path} is a symbolic link, and the run would overwrite what it points to; "
                "remove it",
            )
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
            if not _lock(descriptor, output):
                holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
                os.close(descriptor)
                raise UserError(
                    f"output = {output} is in use by another run "
                    f"({holder or 'it does not say which'}); wait for its end or end it, or name "
                    "another folder with --output"
                )
            if not path.exists() or path.stat().st_ino != os.fstat(descriptor).st_ino:
                os.close(descriptor)
                continue  # who had the lock has removed the file meanwhile
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
            _held[output] = descriptor
    except OSError as error:
        raise UserError(
            f"output = {output} cannot be written to: {error}; make room there, or choose another "
            "folder"
        ) from error


def _lock(descriptor: int, output: Path) -> bool:
    """Return whether nobody else has the lock; wait a little for a run that is ending."""
    end = time.monotonic() + SECONDS_TO_WAIT
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                return False
            time.sleep(0.05)
        except OSError as error:
            say(
                f"output = {output} cannot be locked ({error}): see that no second run writes there"
            )
            return True
        else:
            return True


def require_free(output: Path) -> None:
    """Raise UserError if another run holds the folder. Writes nothing where there is no lock."""
    if output not in _held and is_file(output / LOCK):
        hold(output)


@contextlib.contextmanager
def released(output: Path) -> Iterator[None]:
    """Release the lock of a folder, if this process holds it, at the end of the block.

    If nothing else has been written there, the file is removed, and a folder that was made for it.
    """
    try:
        yield
    finally:
        descriptor = _held.pop(output, None)
        if descriptor is not None:
            # The disk may be why the run ends.
            with contextlib.suppress(OSError):
                if os.listdir(output) == [LOCK]:
                    os.unlink(output / LOCK)
                    if output in _made:
                        os.rmdir(output)
            os.close(descriptor)


def _forget() -> None:
    """Close the locks in a fork of this process, which would hold them beyond its end."""
    for descriptor in _held.values():
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_forget)


def head_of(cls: type) -> str:
    """Return the line that begins the config.yaml of a run."""
    return f"# Settings of a run of {program_of(cls)}.\n"


def forget_best(cfg: TrainingConfig, *, other_rows: bool = False) -> bool:
    """Let no checkpoint be the best of a resumed run, if something else decided the scores.

    Args:
        cfg: the settings of the resumed run.
        other_rows: other rows are held out than before.

    Returns:
        Whether it did, so that scores of before compare with no later ones.
    """
    changed = ["what is held out"] if other_rows else []
    config = Path(cfg.output) / "config.yaml"
    if config.exists():
        patterns = EVALUATIONS if isinstance(cfg, RLConfig) else ("algo.*",)
        before = _chosen(load_config(type(cfg), str(config)), patterns)
        now = _chosen(cfg, patterns)
        changed += [name for name, value in now.items() if before.get(name) != value]
    best = Path(cfg.output) / "checkpoints/best.json"
    if changed and best.exists():
        best.unlink()
        say(
            f"{', '.join(changed)} decides the scores of evaluations and has changed: no "
            "checkpoint counts as the best until the next is scored"
        )
    return bool(changed)


def fingerprint(cfg: TrainingConfig, patterns: Iterable[str]) -> str:
    """Return what stands for the values of those settings that match one of the patterns."""
    text = json.dumps(_chosen(cfg, patterns), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _chosen(cfg: TrainingConfig, patterns: Iterable[str]) -> dict[str, Any]:
    """Return the settings that match a pattern. `file.py:name` is the name: files move."""
    chosen = {}
    for name, value in flatten(dataclasses.asdict(cfg)).items():
        if any(fnmatch(name, pattern) for pattern in patterns):
            texts = value if isinstance(value, list) else [value]
            chosen[name] = [str(text).rpartition(":")[2] for text in texts]
    return chosen


def compare_settings(cfg: TrainingConfig, *, has_critic: bool = False) -> list[str]:
    """Compare a resumed run's settings with those in its folder.

    Args:
        cfg: the settings of the resumed run.
        has_critic: whether the newest checkpoint has one, whatever the settings say.

    Returns:
        What has changed and may: `name old -> new`.

    Raises:
        UserError: the folder is that of another program, or a setting has changed that makes
            another run; or the folder's config.yaml cannot be read.
    """
    path = Path(cfg.output) / "config.yaml"
    if not is_file(path):
        return []  # it ended before it began
    begun_by = re.match(r"# Settings of a run of (minirl\.\w+)\.", read_text(path, "resume:"))
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
        require(
            name != "algo.advantage" or now != "gae" or has_critic,
            f"resume: {name} = {now!r}, and the run was begun with {before!r}: it has no critic; "
            "set it as it was, or start in another output folder",
        )
        require(
            not name.endswith(".ema_decay") or bool(before) == bool(now),
            f"resume: {name} = {now!r}, and the run was begun with {before!r}: averages of weights "
            "are kept from the first step on or never; set it as it was, or start in another "
            "output folder",
        )
        changed.append(f"{name} {before!r} -> {now!r}")
    return changed
