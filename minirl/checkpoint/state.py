"""Resumable state of a run, by torch.distributed.checkpoint.

A checkpoint is written beside its final name, brought to the disk, and renamed when all ranks are
done. Its last file lists sizes and checksums of the others (checksums.py).
"""

import contextlib
import json
import math
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from minirl.base.errors import UserError, require
from minirl.base.files import Checksum, remove, sync_folder, write_synced, write_whole
from minirl.base.log import say
from minirl.checkpoint.checksums import StateWriter, write_checksums
from minirl.checkpoint.exporting import copy_model, write_own
from minirl.checkpoint.failures import attempt, require_written
from minirl.checkpoint.finding import find_best, finished, read_best
from minirl.checkpoint.random_states import random_states, set_random_states
from minirl.checkpoint.reading import read_state, saved_shapes
from minirl.config.shared import CheckpointConfig
from minirl.train.policy import Policy

LOWER_IS_BETTER = ("loss", "perplexity")
MODEL = "model"  # The Hugging Face folder in a checkpoint.


class Saver(contextlib.AbstractContextManager):
    """The writer of a run's checkpoints, which keeps the newest `keep` and the best.

    All ranks call its methods alike.

    In the background: `save` returns when the state is copied to host memory, so training may
    overwrite it at once. A thread writes the copy and talks to the other ranks through a group of
    its own. A write that failed raises UserError, on every rank, at the next `wait`. `save`,
    `score` and a good end of the `with` block begin with one.
    """

    def __init__(self, run: Path, cfg: CheckpointConfig, policy: Policy):
        self.run = run
        self.cfg = cfg
        self.policy = policy
        self.mesh = policy.mesh
        # More models whose state is saved, by name (a critic). They may sleep, and sleep
        # afterwards.
        self.others: dict[str, Policy] = {}
        # Of the newest checkpoint, finished or under way.
        self.step = max(finished(run), default=None)
        best = self._find_best()
        self.best = best if best and cfg.best_metric in ("", best["metric"]) else None
        self.group = dist.new_group(backend="gloo")
        self.thread = ThreadPoolExecutor(1, "checkpoint")
        self.pending: Future[float] | None = None  # The write in the background.
        self.background_seconds = 0.0  # That writes have taken there, of those waited for.

    def _find_best(self) -> dict | None:
        """Return what `find_best` does, and say if it is damaged."""
        try:
            read_best(self.run)
        except ValueError as error:
            if self.mesh.rank == 0:
                say(f"{error}: no checkpoint counts as the best until the next is scored")
        return find_best(self.run)

    def save(self, step: int, progress: dict) -> Path:
        """Save the state after `step` finished steps.

        Args:
            step: how many steps are finished.
            progress: what else the program needs to go on (JSON).

        Returns:
            The checkpoint's folder, which in the background is not there yet.
        """
        self.wait()
        final = self.run / f"checkpoints/step-{step}"
        partial = final.with_suffix(".partial")
        self.step = step

        small_files = self._write_small_files(step, progress, partial, final)
        writer = StateWriter(partial / "state")
        state: dict = {}  # Of models and optimizers.
        with contextlib.ExitStack() as stack:
            for name, model in ({"policy": self.policy} | self.others).items():
                model.sleeper.wake_parameters()
                stack.enter_context(model.state_awake())
                has_stepped = model.optimizer.stepped
                state |= state_dict_of(model, _prefix(name))
                if not has_stepped:
                    model.forget_optimizer_state()
            write_model = self._copy_model(partial)
            where = {
                "storage_writer": writer,
                "process_group": self.group,
                # torch keeps the plan in its class. Ranks that would save the same names and
                # regions as last time send nothing, and rank 0 plans again for the others only.
                "planner": DefaultSavePlanner(enable_plan_caching=True),
            }
            if self.cfg.background:
                write = dcp.async_save(state, **where).result  # type: ignore[union-attr]
                self.pending = self.thread.submit(
                    self._publish, write, writer, write_model, small_files, partial, final
                )
            else:
                self._publish(
                    lambda: dcp.save(state, **where),
                    writer,
                    write_model,
                    small_files,
                    partial,
                    final,
                )
        for model in self.others.values():
            model.sleeper.sleep()
        return final

    def _copy_model(self, partial: Path) -> Callable[[], object]:
        """Copy the model for its Hugging Face folder, if one is asked for. Collective.

        Resuming does not need that folder, so its files are not among those with checksums: it may
        be moved away.

        Returns:
            What writes this rank's files; a thread calls it.
        """
        if not self.cfg.save_hf:
            return lambda: None
        plan, read = copy_model(self.policy)
        return lambda: write_own(plan, partial / MODEL, self.mesh.rank, read)

    def _write_small_files(
        self, step: int, progress: dict, partial: Path, final: Path
    ) -> dict[str, Checksum]:
        """Write a description and random states. Collective.

        Returns:
            The checksums of what this rank has written.
        """
        rank = self.mesh.rank
        description = {"progress": progress, "step": step, **_describe(self.policy)}
        for name, model in self.others.items():
            description[name] = _describe(model)
        written: dict[str, Checksum] = {}

        def write(name: str, text: str) -> None:
            written[name] = write_synced(partial / name, text.encode())

        def make_folder() -> None:
            remove(partial)
            (partial / "state").mkdir(parents=True)
            if self.cfg.save_hf:
                (partial / MODEL).mkdir()
            write("progress.json", json.dumps(description))

        failure = attempt(make_folder, rank) if rank == 0 else ""
        require_written(final, partial, self.mesh.gather(failure))

        def write_own() -> None:
            write(f"random-{rank}.json", json.dumps(random_states()))

        require_written(final, partial, self.mesh.gather(attempt(write_own, rank)))
        return written

    def _publish(
        self,
        write: Callable[[], object],
        writer: StateWriter,
        write_model: Callable[[], object],
        small_files: dict[str, Checksum],
        partial: Path,
        final: Path,
    ) -> float:
        """Write, and rename when all ranks have. Return the seconds that it took."""
        began = time.perf_counter()
        failures = []
        try:
            write()  # ends on each rank when all have written, or one has failed
        except dcp.CheckpointException as error:
            for rank, (cause, _) in error.failures.items():
                failures.append(f"rank {rank}: {type(cause).__name__}: {cause}")
        require_written(final, partial, failures)

        own = small_files | {f"state/{name}": sum_ for name, sum_ in writer.checksums.items()}
        failure = attempt(write_model, self.mesh.rank)
        of_ranks: list[tuple[dict[str, Checksum], str]] = [({}, "")] * self.mesh.world_size
        is_first = self.mesh.rank == 0
        dist.gather_object((own, failure), of_ranks if is_first else None, group=self.group)

        def publish() -> None:
            files: dict[str, Checksum] = {}
            for of_rank, _ in of_ranks:
                files |= of_rank
            sync_folder(partial / "state")
            write_checksums(partial, files)
            sync_folder(partial)
            if final.exists():  # of an interrupted step that was interrupted again
                final.rename(final.with_name(f"{final.name}.replaced.partial"))
            partial.rename(final)
            sync_folder(final.parent)
            self._rotate()

        failures = ["; ".join(failure for _, failure in of_ranks if failure)]
        if is_first and not failures[0]:
            failures = [attempt(publish, 0)]
        dist.broadcast_object_list(failures, group=self.group)
        require_written(final, partial, failures)
        return time.perf_counter() - began

    def _rotate(self) -> None:
        """Delete checkpoints beyond the newest and the best, and what was left half written."""
        steps = finished(self.run)
        kept = list(steps)[-self.cfg.keep :]
        if self.best:
            kept.append(self.best["step"])
        for step, path in steps.items():
            if step not in kept:
                path.rename(path.with_name(f"{path.name}.old.partial"))  # removed below
        for path in self.run.glob("checkpoints/step-*.partial"):
            remove(path)

    def score(self, step: int, scores: dict[str, float]) -> None:
        """Take held-out scores of the weights after `step` steps.

        They count for the checkpoint of that very step, if it is the newest.
        """
        metric = self.cfg.best_metric
        if not metric or step != self.step:
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
            self.background_seconds += pending.result()

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        """Wait for the checkpoint under way, also when the run fails.

        Then it gets a minute, for the ranks that it needs may be gone.
        """
        if error is None:
            self.wait()
        elif self.pending:
            with contextlib.suppress(TimeoutError):
                failure = self.pending.exception(60)
                if failure:
                    error.add_note(str(failure))


def load_checkpoint(checkpoint: Path, policy: Policy) -> dict:
    """Restore policy, optimizer and random state.

    Returns:
        The checkpoint's description, with `progress` as `Saver.save` was given it, and `step`.

    Raises:
        UserError: it is a checkpoint of another model or optimizer, or cannot be read.
    """
    description = restore(checkpoint, policy)
    path = checkpoint / f"random-{policy.mesh.rank}.json"
    if path.exists():  # or else the run has more ranks now: the new ones start from their seed
        try:
            set_random_states(json.loads(path.read_bytes()))
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise UserError(
                f"resume: {path} holds no states of random generators ({type(error).__name__}: "
                f"{error}); go on from another checkpoint"
            ) from error
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
        UserError: the checkpoint has no model of that name, or another one.
    """
    description = json.loads((checkpoint / "progress.json").read_text())
    saved = description if name == "policy" else description.get(name)
    require(saved, f"resume: {checkpoint} has no {name}; start in another output folder")
    now = _describe(policy)
    require(
        saved["model"] == now["model"],
        f"resume: {checkpoint} is of another model ({saved['model']}) than "
        f"{name}.model = {policy.folder} ({now['model']}); start in another output folder",
    )
    optimizer = saved["optimizer"]
    require(
        optimizer == now["optimizer"],
        f"resume: {checkpoint} holds the state of {optimizer}, and {name}.optimizer and "
        f"{name}.ema_decay now ask for {now['optimizer']}; set them as they were, or start in "
        "another output folder",
    )

    prefix = _prefix(name)
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
        set_state_dict(
            policy.model,
            policy.optimizer.parts,
            model_state_dict=weights,
            optim_state_dict=state[f"{prefix}optimizer"],
            options=_state_options(policy),
        )
    if not saved["stepped"]:
        policy.forget_optimizer_state()
    policy.num_updates = saved["num_updates"]
    return description


def _prefix(name: str) -> str:
    """Return what the names of a model's entries in a checkpoint begin with."""
    return "" if name == "policy" else f"{name}_"


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


def _describe(policy: Policy) -> dict:
    """Return what a checkpoint says of a model.

    `optimizer` is what decides which state there is. Where the state rests between steps does not:
    checkpoints hold it in full precision.
    """
    config = policy.model.config
    text = config.get_text_config()
    average = " with a moving average" if policy.cfg.ema_decay else ""
    adapters = f", adapters of rank {policy.adapters.rank}" if policy.adapters else ""
    return {
        "num_updates": policy.num_updates,
        "stepped": policy.optimizer.stepped,
        "optimizer": policy.cfg.optimizer + average,
        "model": f"{config.model_type}, {text.num_hidden_layers} layers of {text.hidden_size}, "
        f"vocabulary {text.vocab_size}{adapters}",
    }
