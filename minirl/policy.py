"""A sharded model and its optimizer: `annotate` adds log-probs to batches, `step` makes one
optimizer step of any loss.
"""

import contextlib
import math
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from minirl.algo import normalize
from minirl.algo.losses import Loss
from minirl.config.shared import PolicyConfig
from minirl.data.blocks import Layout
from minirl.data.images import Vision
from minirl.data.packing import exchange, pack, unpack
from minirl.log import Timer
from minirl.model import build, families
from minirl.parallel import fsdp
from minirl.parallel.mesh import Mesh
from minirl.parallel.muon import Muon
from minirl.parallel.optimizer import Optimizer
from minirl.parallel.regions import CheckpointSlice
from minirl.types import Packed, Trajectory


def learning_rate(cfg: PolicyConfig, step: int, num_steps: int) -> float:
    """Of optimizer step `step` (from 0): linear warm-up from 0, then constant, or half a cosine
    down to lr * lr_min_ratio.
    """
    if step < cfg.lr_warmup_steps:
        return cfg.lr * (step + 1) / cfg.lr_warmup_steps
    if cfg.lr_schedule == "constant":
        return cfg.lr
    done = (step - cfg.lr_warmup_steps) / max(1, num_steps - cfg.lr_warmup_steps)
    return cfg.lr * (
        cfg.lr_min_ratio + (1 - cfg.lr_min_ratio) * (1 + math.cos(math.pi * min(1.0, done))) / 2
    )


class Policy:
    """A causal language model over all ranks.

    trainable=False: a frozen copy (the KL reference), in the compute dtype, without optimizer.
    score=True: with a score head instead of the language model's (reward models, critics); where
    others give log-probs, it gives scores.
    """

    def __init__(
        self,
        cfg: PolicyConfig,
        folder: Path,
        mesh: Mesh,
        *,
        trainable: bool = True,
        score: bool = False,
        sequence_parallel: bool = False,
        timer: Timer | None = None,
    ):
        self.cfg, self.folder, self.mesh, self.timer = (
            cfg,
            folder,
            mesh,
            timer or Timer(mesh.device),
        )
        self.model = build.build_model(
            cfg, folder, mesh, trainable=trainable, score=score, sequence_parallel=sequence_parallel
        )
        self.vision = Vision(folder) if families.reads_images(self.model.config) else None
        # What `pack` must make of micro-batches for this model.
        self.layout = Layout(
            multiple=mesh.tensor.size() if sequence_parallel else 1,
            context=mesh.context,
            windowed=families.windowed(self.model.config),
            images=self.vision and self.vision.batch,
        )
        self.optimizer = self._make_optimizer() if trainable else None
        self.num_updates = 0
        self.sleeper = fsdp.Sleeper(
            self.model, lambda: self.optimizer.tensors() if self.optimizer else []
        )

    def _make_optimizer(self) -> Optimizer:
        cfg, parameters = self.cfg, list(self.model.parameters())
        hidden = (
            {p for layer in build.layers(self.model) for p in layer.parameters() if p.ndim >= 2}
            if cfg.optimizer == "muon"
            else set()
        )
        groups = [
            {
                "params": [p for p in parameters if p.ndim >= 2 and p not in hidden],
                "weight_decay": cfg.weight_decay,
            },
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        parts = [
            torch.optim.AdamW(
                [g for g in groups if g["params"]], lr=cfg.lr, betas=cfg.betas, fused=True
            )
        ]
        if hidden:
            parts.append(
                Muon(
                    [p for p in parameters if p in hidden],
                    self.mesh,
                    lr=cfg.lr,
                    weight_decay=cfg.weight_decay,
                )
            )
        return Optimizer(parts, rest=cfg.optimizer_state, average=cfg.ema_decay > 0)

    def start_phase(self, cfg: PolicyConfig) -> None:
        """Forget the optimizer's state and take the settings of another phase (after SFT: those of
        RL).
        """
        self.cfg, self.num_updates = cfg, 0
        self.forget_optimizer_state()

    def forget_optimizer_state(self) -> None:
        """As if it had never stepped; weights and `num_updates` stay."""
        self.sleeper.wake_optimizer()  # or it would bring back later what is gone now
        self.optimizer = self._make_optimizer()

    @contextlib.contextmanager
    def state_awake(self) -> Iterator[None]:
        """Inside, the optimizer's state is on the device, whatever slept before: for checkpoints
        and `averages`.
        """
        self.sleeper.wake_optimizer()
        with self.optimizer.awake():
            yield

    @torch.no_grad()
    def annotate(self, minibatches: list[list[Packed]], field: str) -> None:
        """Set `field` (old_logprobs, ref_logprobs or values) of every batch to this model's
        log-probs of the targets, or scores; with old_logprobs also old_entropy.
        """
        training = self.model.training
        self.model.eval()  # nothing to recompute, so no checkpointing
        for minibatch in minibatches:
            for batch in minibatch:
                logprobs, entropy = self.model(batch)
                setattr(batch, field, logprobs)
                batch.old_entropy = entropy if field == "old_logprobs" else batch.old_entropy
        self.model.train(training)

    def update(self, minibatch: list[Packed], loss: Loss, lr: float) -> dict[str, float]:
        """One optimizer step over the micro-batches of all ranks. Returns means over the tokens (or
        pairs) in the loss.

        Every rank must bring the same number of micro-batches.
        """
        out = self._accumulate(minibatch, loss)
        with self.timer.phase("sleep_wake"):
            self.sleeper.wake_optimizer()
        with self.timer.phase("optimizer"):
            grad_norm = fsdp.clip_grad_norm(list(self.model.parameters()), self.cfg.max_grad_norm)
            for group in (group for part in self.optimizer.parts for group in part.param_groups):
                group["lr"] = lr
            self.optimizer.ema_decay = min(
                self.cfg.ema_decay, (1 + self.num_updates) / (10 + self.num_updates)
            )
            if math.isfinite(grad_norm):
                self.optimizer.step()
            self.model.zero_grad()
            self.num_updates += 1
        return out | {
            "grad_norm": grad_norm,
            "lr": lr,
            "skipped_updates": float(not math.isfinite(grad_norm)),
        }

    @torch.no_grad()
    def measure(self, minibatch: list[Packed], loss: Loss) -> dict[str, float]:
        """The loss and metrics that `step` would return, without a step."""
        self.model.eval()
        out = self._accumulate(minibatch, loss, backward=False)
        self.model.train()
        return out

    def _accumulate(
        self, minibatch: list[Packed], loss: Loss, *, backward: bool = True
    ) -> dict[str, float]:
        pairs = loss.aggregation == "pair"  # what metrics are means over; tokens, if not
        counts = torch.stack(
            [
                torch.stack(
                    [
                        normalize.count(b, a)
                        for a in (loss.aggregation, "pair" if pairs else "token")
                    ]
                )
                for b in minibatch
            ]
        ).sum(0)
        denominator, num = (
            max(1.0, round(n)) for n in self.mesh.data_sums(counts.cpu()).tolist()
        )  # sequences come in shares of context ranks
        found: dict[str, list[Tensor]] = defaultdict(
            list
        )  # of each micro-batch, on the device, so that none waits for the host
        for i, batch in enumerate(minibatch):
            self.model.set_requires_gradient_sync(i == len(minibatch) - 1)
            with self.timer.phase("forward"):
                logprobs, entropy = self.model(batch, loss.entropy_gradient)
                token_loss, metrics = loss.token_loss(batch, logprobs, entropy)
                weights = normalize.weights(batch, loss.aggregation, loss.fixed_length).to(
                    token_loss.dtype
                )
                value = (token_loss * weights).sum() / denominator
            if backward:
                with self.timer.phase("backward"):
                    value.backward()
            found["loss"].append(value.detach().double())
            for name, values in metrics.items():
                kept = (
                    values * normalize.weights(batch, "pair")
                    if pairs
                    else values.index_select(0, batch.loss_rows)
                ).double()
                found[name].append(
                    kept.amax() if name.endswith("_max") and len(kept) else kept.sum()
                )
        sums = self.mesh.data_sums(
            torch.stack([sum(values) for values in found.values()]).cpu()
        ).tolist()
        means = {
            name: total if name == "loss" else total / num
            for name, total in zip(found, sums, strict=True)
        }
        if most := [name for name in found if name.endswith("_max")]:
            means |= zip(
                most,
                self.mesh.maxima(
                    torch.stack([torch.stack(found[name]).amax() for name in most]).cpu()
                ).tolist(),
                strict=True,
            )
        return means

    def shards(self) -> dict[str, Tensor]:
        """All that a checkpoint holds, by the model's names; a tied head appears once, under the
        embedding's.
        """
        return build.tensors(self.model)

    def parts(self) -> dict[str, list[CheckpointSlice]]:
        """The weights of a checkpoint's files that each of `shards` is made of."""
        return {
            name: families.checkpoint_slices(self.model.config, name, t.shape)
            for name, t in self.shards().items()
        }

    def averages(self) -> dict[str, Tensor]:
        """The same of their moving averages; before the first update, the parameters themselves.
        Only inside `state_awake`.
        """
        averages = self.optimizer.averages()
        return {name: averages[p] if p in averages else p for name, p in self.shards().items()}


def make_minibatch(
    examples: list[Trajectory],
    policy: Policy,
    mesh: Mesh,
    tokens_per_rank: int,
    *,
    pairs: bool = False,
) -> list[Packed]:
    """The micro-batches of one optimizer step on this rank, from whatever examples each rank
    brings.
    """
    (minibatch,) = exchange(examples, mesh, tokens_per_rank, whole_groups=pairs)
    return [pack(micro, mesh.device, layout=policy.layout, pairs=pairs) for micro in minibatch]


def annotate_examples(
    model: Policy, examples: list[Trajectory], tokens_per_rank: int, field: str
) -> list[tuple[Trajectory, np.ndarray]]:
    """What `model.annotate` says of the examples of all ranks, as [L] of each (the model's float
    dtype), on the ranks that computed it. Collective.
    """
    out = []
    for micro in exchange(examples, model.mesh, tokens_per_rank)[0]:
        batch = pack(micro, model.mesh.device, layout=model.layout)
        model.annotate([[batch]], field)
        out += zip(micro, unpack(vars(batch)[field], micro, batch), strict=True)
    return out
