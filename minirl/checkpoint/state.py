"""Resumable state of a run, by torch.distributed.checkpoint.

A checkpoint is written under another name, brought to the disk, and renamed when all ranks are
done. Its last file lists the sizes of the others (finding.py).
"""

import contextlib
import json
import math
import random
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from transformers import PretrainedConfig

from minirl.base.errors import require
from minirl.base.files import (
    attempt,
    remove,
    require_written,
    sync_folder,
    write_synced,
    write_whole,
)
from minirl.base.log import say
from minirl.checkpoint.exporting import copy_model, write_files_of_rank
from minirl.checkpoint.finding import (
    Unreadable,
    drop_partial,
    finished,
    read_best,
    sizes_of_rank,
    write_sizes,
)
from minirl.checkpoint.reading import read_state, saved_shapes
from minirl.config.shared import CheckpointConfig
from minirl.train.policy import Policy

LOWER_IS_BETTER = ("loss", "perplexity")
MODEL = "model"  # The Hugging Face folder in a checkpoint.


class Saver(contextlib.AbstractContextManager):
    """The writer of a run's checkpoints, which keeps the newest `keep` and the best.

    All ranks call its methods alike.

    In the background: `save` returns when the state is copied to host memory, so training may
    overwrite it at once. A thread writes the copy and talks to the other ranks through a process
    group that nothing else uses. A write that failed raises UserError, on every rank, at the next
    `wait`. `save`, `score` and a good end of the `with` block begin with one.

    Attributes:
        others: more models that are saved, by name (a critic). They may sleep, and sleep
            afterwards.
        step: the step of the newest checkpoint, finished or under way.
        best: what best.json says; None: nothing.
        more_files: what else this rank writes into a checkpoint, by names that end in `-RANK.json`
            or `-RANK.jsonl`.
        pending: the write in the background.
    """

    def __init__(self, run: Path, cfg: CheckpointConfig, policy: Policy):
        self.run = run
        self.cfg = cfg
        self.policy = policy
        self.mesh = policy.mesh
        self.others: dict[str, Policy] = {}
        self.step = max(finished(run), default=None)
        self.best: dict | None = None
        try:
            best = read_best(run)
            if best and cfg.best_metric in ("", best["metric"]):
                self.best = best
        except ValueError as error:
            if self.mesh.rank == 0:
                say(f"{error}: no checkpoint counts as the best until the next is scored")
        self.more_files: dict[str, bytes] = {}
        self.group = dist.new_group(backend="gloo")
        self.thread = ThreadPoolExecutor(1, "checkpoint")
        self.pending: Future[None] | None = None

    def save(self, step: int, progress: dict) -> Path:
        """Save the state after `step` finished steps.

        Args:
            step: how many steps are finished.
            progress: what else the program needs to resume (JSON).

        Returns:
            The checkpoint's folder, which in the background is not there yet.
        """
        self.wait()
        final = self.run / f"checkpoints/step-{step}"
        partial = final.with_suffix(".partial")
        self.step = step

        description = {"progress": progress, "step": step, **_describe(self.policy)}
        for name, model in self.others.items():
            description[name] = _describe(model)

        def begin() -> None:
            remove(partial)
            (partial / "state").mkdir(parents=True)
            if self.cfg.save_hf:
                (partial / MODEL).mkdir()
            write_synced(partial / "progress.json", json.dumps(description).encode())

        failure = attempt(begin, 0) if self.mesh.rank == 0 else ""
        require_written(final, partial, self.mesh.gather(failure))

        state: dict = {}  # Of models and optimizers.
        models = {"": self.policy}  # By what the names of its entries begin with.
        models |= {f"{name}_": model for name, model in self.others.items()}
        with contextlib.ExitStack() as stack:
            for prefix, model in models.items():
                model.sleeper.wake_parameters()
                stack.enter_context(model.state_awake())
                has_stepped = model.optimizer.stepped
                state |= state_dict_of(model, prefix)
                if not has_stepped:
                    model.forget_optimizer_state()
            write_rest = self._copy_rest(partial)
            where = {
                "storage_writer": dcp.FileSystemWriter(partial / "state"),
                "process_group": self.group,
                # torch keeps the plan in its class. Ranks that would save the same names and
                # regions as last time send nothing, and rank 0 plans again for the others only.
                "planner": DefaultSavePlanner(enable_plan_caching=True),
            }
            if self.cfg.background:
                write = dcp.async_save(state, **where).result  # type: ignore[union-attr]
                self.pending = self.thread.submit(self._publish, write, write_rest, partial, final)
            else:
                self._publish(lambda: dcp.save(state, **where), write_rest, partial, final)
        for model in self.others.values():
            model.sleeper.sleep()
        return final

    def _copy_rest(self, partial: Path) -> Callable[[], None]:
        """Return what writes, later, this rank's random state and files of the model as now."""
        rank = self.mesh.rank
        files = {f"random-{rank}.json": json.dumps(random_states()).encode(), **self.more_files}
        plan, read = copy_model(self.policy) if self.cfg.save_hf else (None, None)

        def write_rest() -> None:
            for name, content in files.items():
                write_synced(partial / name, content)
            # Resuming does not need this folder, so its files are not in the list of sizes: it may
            # be moved away.
            if plan and read:
                write_files_of_rank(plan, partial / MODEL, rank, read)

        return write_rest

    def _publish(
        self,
        write: Callable[[], object],
        write_rest: Callable[[], None],
        partial: Path,
        final: Path,
    ) -> None:
        """Write, and rename when all ranks have."""
        failures = []
        try:
            write()  # ends on each rank when all have written, or one has failed
        except dcp.CheckpointException as error:
            for rank, (cause, _) in error.failures.items():
                failures.append(f"rank {rank}: {type(cause).__name__}: {cause}")
        require_written(final, partial, failures)

        is_first = self.mesh.rank == 0
        failure = attempt(write_rest, self.mesh.rank)
        sizes = sizes_of_rank(partial, self.mesh.rank)
        by_rank: list[tuple[dict[str, int], str]] = [({}, "")] * self.mesh.world_size
        dist.gather_object((sizes, failure), by_rank if is_first else None, group=self.group)

        def publish() -> None:
            all_sizes: dict[str, int] = {}
            for sizes, _ in by_rank:
                all_sizes |= sizes
            sync_folder(partial / "state")
            write_sizes(partial, all_sizes)
            sync_folder(partial)
            if final.exists():  # of an interrupted step that was interrupted again
                final.rename(final.with_name(f"{final.name}.replaced.partial"))
            partial.rename(final)
            sync_folder(final.parent)
            self._rotate()

        failures = ["; ".join(failure for _, failure in by_rank if failure)]
        if is_first and not failures[0]:
            failures = [attempt(publish, 0)]
        dist.broadcast_object_list(failures, group=self.group)
        require_written(final, partial, failures)

    def _rotate(self) -> None:
        """Delete checkpoints beyond the newest and the best, and what was left half written."""
        steps = finished(self.run)
        kept = list(steps)[-self.cfg.keep :]
        if self.best:
            kept.append(self.best["step"])
        for step, path in steps.items():
            if step not in kept:
                path.rename(path.with_name(f"{path.name}.old.partial"))  # removed below
        drop_partial(self.run / "checkpoints")

    def score(self, step: int, scores: dict[str, float]) -> None:
        """Take held-out scores of the weights after `step` steps.

        They count for the checkpoint of that very step, if it is the newest.

        Raises:
            UserError: `checkpoint.best_metric` is none of them.
        """
        metric = self.cfg.best_metric
        if not metric:
            return
        has = ", ".join(scores)
        missing = f"an evaluation has no score {metric!r}; it has {has}"
        require(metric in scores, f"checkpoint.best_metric = {metric}: {missing}")
        if step != self.step:
            return
        self.wait()
        value = scores[metric]
        sign = -1 if metric in LOWER_IS_BETTER else 1
        if math.isfinite(value) and (self.best is None or sign * value > sign * self.best["value"]):
            self.best = {"step": step, "metric": metric, "value": value}
            if self.mesh.rank == 0:
                write_whole(self.run / "checkpoints/best.json", json.dumps(self.best))
                self._rotate()

    def wait(self) -> None:
        """Wait until nothing is being written.

        Raises:
            UserError: the last write failed.
        """
        pending = self.pending
        self.pending = None
        if pending:
            pending.result()

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        """Wait for the checkpoint under way, also when the run fails.

        Then it gets a minute, for the ranks that it needs may be gone.
        """
        if error is None:
            self.wait()
            if self.mesh.rank == 0:  # A run may have been killed at this, after its last save.
                self._rotate()
        elif self.pending:
            with contextlib.suppress(TimeoutError):
                failure = self.pending.exception(60)
                if failure:
                    error.add_note(str(failure))


def load_checkpoint(checkpoint: Path, policy: Policy) -> dict:
    """Restore policy, optimizer and random state. Collective.

    Returns:
        The checkpoint's description, with `progress` as `Saver.save` was given it, and `step`.

    Raises:
        Unreadable: its files do not hold what was written.
        UserError: it is a checkpoint of another model or optimizer.
    """
    description = restore(checkpoint, policy)
    path = checkpoint / f"random-{policy.mesh.rank}.json"
    failed = ""
    if path.exists():  # or else the run has more ranks now: the new ones start from their seed
        try:
            set_random_states(json.loads(path.read_bytes()))
        except (OSError, KeyError, TypeError, ValueError, RuntimeError) as error:
            failed = (
                f"{path} holds no states of random generators ({type(error).__name__}: {error})"
            )
    for failure in policy.mesh.gather(failed):
        if failure:
            raise Unreadable(failure)
    return description


def restore(checkpoint: Path, policy: Policy, name: str = "policy") -> dict:
    """Restore a model and its optimizer.

    Args:
        checkpoint: a finished checkpoint.
        policy: the model to fill.
        name: "policy", or the name that the model had in `Saver.others`.

    Returns:
        The checkpoint's description.

    Raises:
        Unreadable: its files do not hold what was written.
        UserError: the checkpoint has no model of that name, or another one.
    """
    description = read_description(checkpoint)
    saved: Any = description if name == "policy" else description.get(name)
    require(saved, f"resume: {checkpoint} has no {name}; start in another output folder")
    now = _describe(policy)
    require(
        saved["model"] == now["model"],
        f"resume: {checkpoint} is of another model ({saved['model']}) than "
        f"{name}.model = {policy.folder} ({now['model']}); start in another output folder",
    )
    require_same_base(f"resume: {checkpoint}", saved, now["base"], policy.folder)
    optimizer = saved["optimizer"]
    require(
        optimizer == now["optimizer"],
        f"resume: {checkpoint} holds the state of {optimizer}, and {name}.optimizer and "
        f"{name}.ema_decay now ask for {now['optimizer']}; set them as they were, or start in "
        "another output folder",
    )

    prefix = "" if name == "policy" else f"{name}_"
    shapes = saved_shapes(checkpoint, prefix)
    with policy.state_awake():
        state = state_dict_of(policy, prefix)
        weights = state[f"{prefix}model"]
        for key, p in weights.items():
            shape = shapes.get(key)
            require(
                shape == p.shape,
                f"resume: {checkpoint} has {key} of shape {shape and list(shape)}, and "
                f"{name}.model = {policy.folder} {list(p.shape)}; start in another output folder",
            )
        read_state(checkpoint, state)
        groups = [group for part in policy.optimizer.parts for group in part.param_groups]
        settings = [
            {name: value for name, value in group.items() if name not in ("params", "lr")}
            for group in groups
        ]
        set_state_dict(
            policy.model,
            policy.optimizer.parts,
            model_state_dict=weights,
            optim_state_dict=state[f"{prefix}optimizer"],
            options=_state_options(policy),
        )
        # It has put the checkpoint's betas and weight decay in place of the config's.
        groups = [group for part in policy.optimizer.parts for group in part.param_groups]
        for group, of_config in zip(groups, settings, strict=True):
            group.update(of_config)
    if not saved["stepped"]:
        policy.forget_optimizer_state()
    policy.num_updates = saved["num_updates"]
    return description


def state_dict_of(policy: Policy, prefix: str = "") -> dict[str, dict]:
    """Return the state of a model and its optimizer, by `{prefix}model` and `{prefix}optimizer`.

    For an optimizer that has not stepped (while a critic warms up), torch makes a state here, as
    if for a step with gradients of 0. It is saved, so that all checkpoints look alike, and has to
    be forgotten afterwards: AdamW's next step would be its second.
    """
    model, optimizer = get_state_dict(
        policy.model, policy.optimizer.parts, options=_state_options(policy)
    )
    return {f"{prefix}model": model, f"{prefix}optimizer": optimizer}


def _state_options(policy: Policy) -> StateDictOptions:
    """Return what a checkpoint holds of a model: of one with adapters, only what is trained.

    All else is in the model's folder, and never changes.
    """
    is_adapted = policy.adapters is not None
    return StateDictOptions(ignore_frozen_params=is_adapted, strict=not is_adapted)


def read_description(checkpoint: Path) -> dict:
    """Return what a checkpoint says of itself: its step, the progress, what `_describe` returned.

    Raises:
        Unreadable: it cannot be read.
    """
    path = checkpoint / "progress.json"
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise Unreadable(f"{path} cannot be read: {error}") from error


def require_same_base(where: str, saved: dict, base: str, folder: Path) -> None:
    """Refuse adapters on other weights than those that they were trained on.

    Args:
        where: begins the message.
        saved: what `_describe` returned for the checkpoint, which may be older than these hashes.
        base: what stands for the weights of the base now.
        folder: the base's.

    Raises:
        UserError: the weights are others.
    """
    require(
        saved.get("base", "") in ("", base),
        f"{where}: its adapters were trained on other weights than {folder} has now; bring the old "
        "ones back, or train them again",
    )


def _describe(policy: Policy) -> dict:
    """Return the description of a model in a checkpoint.

    `optimizer` is what decides which state there is. Where the state rests between steps does not:
    checkpoints hold it in full precision.
    """
    average = " with a moving average" if policy.cfg.ema_decay else ""
    adapters = f", adapters of rank {policy.adapters.rank}" if policy.adapters else ""
    return {
        "num_updates": policy.num_updates,
        "stepped": policy.optimizer.stepped,
        "optimizer": policy.cfg.optimizer + average,
        "base": policy.adapters.base if policy.adapters else "",
        "model": describe_model(policy.model.config) + adapters,
    }


def describe_model(config: PretrainedConfig) -> str:
    """Return the sizes of a model, by which a checkpoint of another one is known."""
    text = config.get_text_config()
    return (
        f"{config.model_type}, {text.num_hidden_layers} layers of {text.hidden_size}, vocabulary "
        f"{text.vocab_size}"
    )


def random_states() -> dict:
    """Return the state of every generator that a run may draw from, as JSON has it."""
    version, python_state, gauss = random.getstate()
    kind, keys, *rest = np.random.get_state()
    states = {
        "python": [version, list(python_state), gauss],
        "numpy": [kind, np.asarray(keys).tolist(), *rest],
        "torch": torch.get_rng_state().tolist(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state().tolist()
    return states


def set_random_states(states: dict) -> None:
    """Set every generator to its state in a checkpoint."""
    version, python_state, gauss = states["python"]
    random.setstate((version, tuple(python_state), gauss))
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, np.array(keys, np.uint32), *rest))
    torch.set_rng_state(torch.tensor(states["torch"], dtype=torch.uint8))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.tensor(states["cuda"], dtype=torch.uint8))
