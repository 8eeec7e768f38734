"""Resumable state (torch.distributed.checkpoint) and Hugging Face export.

A checkpoint is written beside its final name and renamed when all ranks are done, so what `find`
returns is always whole.
"""

import contextlib
import json
import math
import random
import re
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from minirl.config.shared import CheckpointConfig
from minirl.errors import UserError, require
from minirl.parallel.mesh import Mesh
from minirl.policy import Policy

LOWER_IS_BETTER = ("loss", "perplexity")


def finished(run: Path, kind: str = "checkpoints") -> dict[int, Path]:
    """The whole checkpoints (or references) of a run folder by step, oldest first."""
    steps = {
        int(p.name.removeprefix("step-")): p
        for p in run.glob(f"{kind}/step-*")
        if re.fullmatch(r"step-\d+", p.name)
    }
    return dict(sorted(steps.items()))


def find(run: Path) -> Path | None:
    """The newest finished checkpoint of a run folder."""
    return next(reversed(finished(run).values()), None)


def drop_references(run: Path, step: int) -> None:
    """Those before the one that the oldest checkpoint of the run would resume with; if none is
    finished, before that of `step`.
    """
    oldest, references = min(finished(run), default=step), finished(run, "references")
    for n, path in references.items():
        if n < max((m for m in references if m <= oldest), default=0):
            shutil.rmtree(path)


def find_best(run: Path) -> dict | None:
    """{"step", "metric", "value"} of the checkpoint that scored best, if one did and is still
    there.
    """
    path = run / "checkpoints" / "best.json"
    best = json.loads(path.read_text()) if path.exists() else None
    return best if best and best["step"] in finished(run) else None


class Saver(contextlib.AbstractContextManager):
    """Writes the checkpoints of a run, and keeps the newest `keep` and the best. All ranks call its
    methods alike.

    In the background: `save` returns when the state is copied to host memory, so training may
    overwrite it at once; a thread writes the copy and talks to the other ranks through a group of
    its own. A write that failed raises UserError, on every rank, at the next `wait`, which `save`,
    `score` and a good end of the `with` block begin with.
    """

    def __init__(self, run: Path, cfg: CheckpointConfig, policy: Policy, mesh: Mesh):
        self.run, self.cfg, self.policy, self.mesh = run, cfg, policy, mesh
        self.others: dict[
            str, Policy
            # More models whose state is saved, by name (a critic). They may sleep, and sleep
            # afterwards.
        ] = {}
        self.step = max(
            finished(run), default=None
        )  # Of the newest checkpoint, finished or under way.
        self.rollouts: Callable[[], list[bytes]] = list  # This rank's unfinished episodes.
        best = find_best(run)
        self.best = best if best and cfg.best_metric in ("", best["metric"]) else None
        self.group = dist.new_group(backend="gloo")
        self.thread = ThreadPoolExecutor(1, "checkpoint")
        self.pending: Future | None = None

    def save(self, step: int, progress: dict) -> Path:
        """State after `step` finished steps. `progress` is what else the program needs to go on
        (JSON).
        """
        self.wait()
        final = self.run / "checkpoints" / f"step-{step}"
        partial = final.with_name(final.name + ".partial")
        about = {
            "progress": progress,
            "step": step,
            **_about(self.policy),
            **{name: _about(model) for name, model in self.others.items()},
        }
        if self.mesh.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            (partial / "progress.json").write_text(json.dumps(about))
        self.mesh.barrier()
        torch.save(
            {name: get() for name, (get, _) in _random_states().items()},
            partial / f"random-{self.mesh.rank}.pt",
        )
        torch.save(self.rollouts(), partial / f"rollouts-{self.mesh.rank}.pt")
        self.step, options = step, {"checkpoint_id": partial / "state", "process_group": self.group}
        with contextlib.ExitStack() as stack:
            state = {}
            for prefix, model in (
                ("", self.policy),
                *((f"{name}_", other) for name, other in self.others.items()),
            ):
                model.sleeper.wake_parameters()
                stack.enter_context(model.state_awake())
                stepped = model.optimizer.stepped
                state |= state_dict_of(model, prefix)
                if not stepped:
                    model.forget_optimizer_state()
            if self.cfg.background:
                written = dcp.async_save(state, **options)
                self.pending = self.thread.submit(self._publish, written.result, partial, final)
            else:
                self._publish(lambda: dcp.save(state, **options), partial, final)
        for model in self.others.values():
            model.sleeper.sleep()
        return final

    def _publish(self, write: Callable[[], object], partial: Path, final: Path) -> None:
        """Write, and rename when all ranks have."""
        try:
            write()  # ends on each rank when all have written
        except dcp.CheckpointException as error:
            failed = "; ".join(
                f"rank {rank}: {type(cause).__name__}: {cause}"
                for rank, (cause, _) in error.failures.items()
            )
            raise UserError(
                f"checkpoint {final} could not be written ({failed}); {partial} is not whole and will not be resumed from"
            ) from error
        if self.mesh.rank == 0:
            partial.rename(final)
            self._rotate()
        dist.barrier(group=self.group)

    def _rotate(self) -> None:
        steps = finished(self.run)
        kept = {*list(steps)[-self.cfg.keep :], self.best["step"] if self.best else None}
        for old in [path for step, path in steps.items() if step not in kept] + list(
            self.run.glob("checkpoints/step-*.partial")
        ):
            shutil.rmtree(old)

    def score(self, step: int, scores: dict[str, float]) -> None:
        """Held-out scores of the weights after `step` steps. They are those of the checkpoint of
        that very step, if there is one.
        """
        if not self.cfg.best_metric or step != self.step:
            return
        self.wait()
        value = scores[self.cfg.best_metric]
        sign = -1 if self.cfg.best_metric in LOWER_IS_BETTER else 1
        if math.isfinite(value) and (self.best is None or sign * value > sign * self.best["value"]):
            self.best = {"step": step, "metric": self.cfg.best_metric, "value": value}
            if self.mesh.rank == 0:
                path = self.run / "checkpoints" / "best.json"
                path.with_suffix(".partial").write_text(json.dumps(self.best))
                path.with_suffix(".partial").rename(path)
                self._rotate()

    def wait(self) -> None:
        """Until nothing is being written. Raises UserError if the last write failed."""
        pending, self.pending = self.pending, None
        if pending:
            pending.result()

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        """A run that fails still leaves the checkpoint under way: it gets a minute, for the ranks
        that it needs may be gone.
        """
        if error is None:
            return self.wait()
        if (
            self.pending
            and self.pending in wait_for([self.pending], 60).done
            and self.pending.exception()
        ):
            error.add_note(str(self.pending.exception()))


def load_checkpoint(checkpoint: Path, policy: Policy, mesh: Mesh) -> dict:
    """Restore policy, optimizer and random state; returns what `save` was given as `progress`, and
    `step`. Raises UserError for a checkpoint of another model or optimizer.
    """
    saved = restore(checkpoint, policy)
    own = checkpoint / f"random-{mesh.rank}.pt"
    if (
        own.exists()
    ):  # a run resumed on more ranks than it was saved on starts the new ones from their seed
        state = torch.load(own, weights_only=False)
        for name, (_, set_state) in _random_states().items():
            if name in state:
                set_state(state[name])
    return saved


def load_rollouts(checkpoint: Path) -> list[list[bytes]]:
    """The unfinished episodes, as `Saver.rollouts` gave them on each rank."""
    return [
        torch.load(checkpoint / f"rollouts-{rank}.pt")
        for rank in range(len(list(checkpoint.glob("rollouts-*.pt"))))
    ]


def restore(checkpoint: Path, policy: Policy, name: str = "policy") -> dict:
    """A model and its optimizer: the policy, or what `Saver.others` had by that name. Returns what
    the checkpoint says of itself. Raises UserError if there was none by that name, or another.
    """
    saved = json.loads((checkpoint / "progress.json").read_text())
    prefix, about, now = (
        ("", saved, _about(policy))
        if name == "policy"
        else (f"{name}_", saved.get(name), _about(policy))
    )
    require(about, f"resume: {checkpoint} has no {name}; start in another output folder")
    require(
        about["model"] == now["model"],
        f"resume: {checkpoint} is of another model ({about['model']}) than {name}.model = {policy.folder} "
        f"({now['model']}); start in another output folder",
    )
    optimizer = about.get("optimizer", "adamw")  # the first ones did not say
    require(
        optimizer == now["optimizer"],
        f"resume: {checkpoint} holds the state of {optimizer}, and {name}.optimizer and {name}.ema_decay now ask for "
        f"{now['optimizer']}; set them as they were, or start in another output folder",
    )
    shapes = saved_shapes(checkpoint, prefix)
    with policy.state_awake():
        state = state_dict_of(policy, prefix)
        for key, p in state[f"{prefix}model"].items():
            shape = shapes.get(key)
            require(
                shape == p.shape,
                f"resume: {checkpoint} has {key} of shape {shape and list(shape)}, and {name}.model = {policy.folder} {list(p.shape)}; "
                "start in another output folder",
            )
        dcp.load(state, checkpoint_id=checkpoint / "state")
        set_state_dict(
            policy.model,
            policy.optimizer.parts,
            model_state_dict=state[f"{prefix}model"],
            optim_state_dict=state[f"{prefix}optimizer"],
        )
    if not about.get("stepped", True):
        policy.forget_optimizer_state()
    policy.num_updates = about["num_updates"]
    return saved


def state_dict_of(policy: Policy, prefix: str = "") -> dict:
    """Of an optimizer that has not stepped (a critic warms up first), torch makes a state here, as
    of a step with gradients of 0; such a state is in the checkpoint, so that all look alike, and to
    be forgotten afterwards: AdamW's next step would be its second.
    """
    return dict(
        zip(
            (f"{prefix}model", f"{prefix}optimizer"),
            get_state_dict(policy.model, policy.optimizer.parts),
            strict=True,
        )
    )


def _about(policy: Policy) -> dict:
    """`optimizer` is what decides which state there is. Where it rests does not: checkpoints hold
    it in full precision.
    """
    config, text = policy.model.config, policy.model.config.get_text_config()
    return {
        "num_updates": policy.num_updates,
        "stepped": policy.optimizer.stepped,
        "optimizer": policy.cfg.optimizer
        + (" with a moving average" if policy.cfg.ema_decay else ""),
        "model": f"{config.model_type}, {text.num_hidden_layers} layers of {text.hidden_size}, vocabulary {text.vocab_size}",
    }


def saved_shapes(checkpoint: Path, prefix: str = "") -> dict[str, torch.Size]:
    """Of every weight of a model; a tied head may be there under both names."""
    saved = dcp.FileSystemReader(checkpoint / "state").read_metadata().state_dict_metadata
    start = f"{prefix}model."
    return {
        name.removeprefix(start): about.size
        for name, about in saved.items()
        if name.startswith(start)
    }


def _random_states() -> dict[str, tuple[Callable, Callable]]:
    """Who else draws at random -> how to get and set its state."""
    always = {
        "python": (random.getstate, random.setstate),
        "numpy": (np.random.get_state, np.random.set_state),
        "torch": (torch.get_rng_state, torch.set_rng_state),
    }
    return always | (
        {"cuda": (torch.cuda.get_rng_state, torch.cuda.set_rng_state)}
        if torch.cuda.is_available()
        else {}
    )
