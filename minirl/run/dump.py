"""The trajectories of each step on disk, with what training made of them.

What the sampling rank knows (turns, versions, rewards by function) is written when a step is
sampled. What the training rank knows (advantages, its log-probs, entropies) is written when the
step is done. No rank sends anything: the reader of the files joins the two (rollout/index.py).
"""

import dataclasses
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from minirl.algo.losses import Loss
from minirl.algo.losses import Metrics as TokenMetrics
from minirl.base.files import write_whole
from minirl.batch.packing import unpack
from minirl.rollout import index, records
from minirl.train.policy import Minibatch, Policy
from minirl.types.packed import Packed, Trajectory


class Dump:
    """Writes the trajectories of a run, step by step; `begin`, `add` and `finish` make a step.

    Where a step comes in parts, each part after the first is appended.

    Args:
        output: the run's folder.
        policy: the model that is trained; its timer gets the seconds as phase `dump`.
        tokenizer: the policy's tokenizer. Rank 0 writes it to the folder, for readers of tokens.
    """

    def __init__(self, output: Path, policy: Policy, tokenizer: PreTrainedTokenizerBase):
        self.folder = output / "rollouts"
        self.policy = policy
        self.mesh = policy.mesh
        self.timer = policy.timer
        self.tokenizer = tokenizer
        self.step = 0
        self.num_updates = 0  # Optimizer steps before this one.
        self.trajectories: list[Trajectory] = []  # Sampled by this rank.
        self.places: list[tuple[int, int]] = []  # Places of their lines.
        self.trained: list[tuple[list[Trajectory], Packed]] = []  # Micro-batches of this rank.

    def begin(self, step: int, trajectories: list[Trajectory]) -> None:
        """Write what this rank has sampled."""
        self.step = step
        self.num_updates = self.policy.num_updates
        self.trajectories = []
        self.places = []
        self.append(trajectories)
        if self.mesh.rank == 0 and not (self.folder / index.TOKENIZER).exists():
            write_whole(self.folder / index.TOKENIZER, self.tokenizer.backend_tokenizer.to_str())

    def append(self, trajectories: list[Trajectory]) -> None:
        """Write more of what this rank has sampled in the step that has begun."""
        appends = bool(self.places)
        with self.timer.phase("dump"):
            self.places += records.write_step(
                trajectories, self.folder, self.step, self.mesh, appends=appends
            )
        self.trajectories += trajectories

    def add(self, micro_batches: list[list[Trajectory]], minibatch: Minibatch) -> None:
        """Remember micro-batches and the trajectories that were packed into them."""
        self.trained += zip(micro_batches, minibatch, strict=True)

    def noting(self, loss: Loss) -> Loss:
        """Return the same loss, which also puts the log-probs into a batch without any."""

        def token_loss(
            batch: Packed, logprobs: Tensor, entropy: Tensor
        ) -> tuple[Tensor, TokenMetrics]:
            values, metrics = loss.token_loss(batch, logprobs, entropy)
            if batch.old_logprobs is None:
                batch.old_logprobs = logprobs.detach()
                batch.old_entropy = entropy.detach()
            return values, metrics

        return dataclasses.replace(loss, token_loss=token_loss)

    def finish(self) -> None:
        """Write the tables of the step. Collective over the ranks that share sequences."""
        with self.timer.phase("dump"):
            sampled = []
            for t, place in zip(self.trajectories, self.places, strict=True):
                row: tuple = (t.group, t.episode, t.segment, *place, len(t.tokens), t.sampled.sum())
                staleness = self.num_updates - t.version
                row += (t.info["score"], t.reward, staleness, t.info["stopped"])
                sampled.append((*row, bool(t.info["error"])))

            trained: list[tuple] = []
            values = [np.zeros((0, len(index.VALUES)), np.float32)]
            num_rows = 0
            for trajectories, batch in self.trained:
                columns = []
                for column in (batch.advantages, batch.old_logprobs, batch.old_entropy):
                    if column is None:  # a critic's warm-up makes no log-probs
                        column = torch.full_like(batch.engine_logprobs, torch.nan)
                    columns.append(unpack(column.detach().float(), trajectories, batch))
                for t, *parts in zip(trajectories, *columns, strict=True):
                    values.append(np.stack(parts, axis=1))
                    advantages, logprobs, entropies = values[-1][t.sampled].T
                    mismatch = np.abs(logprobs - t.logprobs[t.sampled])
                    row = (t.group, t.episode, t.segment, num_rows, len(t.tokens))
                    row += (mismatch.max(), mismatch.mean(), entropies.mean(), advantages.mean())
                    trained.append(row)
                    num_rows += len(t.tokens)
            if self.mesh.rank % self.mesh.num_copies:
                # The first of the ranks that hold the same sequences writes them.
                trained, values = [], values[:1]
            index.write_tables(
                index.part_of(self.folder, self.step, self.mesh.rank),
                np.array(sampled, index.SAMPLED),
                np.array(trained, index.TRAINED),
                np.concatenate(values),
            )
            self.trained.clear()
