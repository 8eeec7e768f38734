"""A sharded model with its optimizer.

`annotate` adds log-probs to batches, `update` makes one optimizer step of any loss.
"""

import contextlib
import dataclasses
import functools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minirl.algo import normalize
from minirl.algo.losses import Loss
from minirl.base.log import Timer
from minirl.batch.attention_plan import RowLayout
from minirl.config.policy import WHOLE_GRADIENT_BYTES, PolicyConfig
from minirl.data.vision import read_vision
from minirl.model import build, causal, families
from minirl.model.adapters import lora
from minirl.parallel import fsdp, sharding
from minirl.parallel.mesh import Mesh
from minirl.parallel.offload import Sleeper
from minirl.parallel.regions import CheckpointSlice
from minirl.train.skipped import report_skipped
from minirl.types.packed import Packed

Metrics = dict[str, float]
Minibatch = list[Packed]  # This rank's micro-batches of one optimizer step.


class Sums(NamedTuple):
    """What the micro-batches of an optimizer step, or of a part of one, add up to."""

    # The loss and its metrics on this rank (`_max`: maxima), as scalars on the device.
    values: dict[str, Tensor]
    denominator: float  # Of the loss, over all ranks.
    num_units: float  # Tokens (or pairs) in the loss on all ranks.


class Policy:
    """A causal language model over all ranks, with its optimizer.

    Args:
        cfg: model, dtype, memory and optimizer.
        folder: the Hugging Face folder that weights are read from.
        mesh: the ranks.
        trainable: False: a frozen copy (the KL reference) in the compute dtype; its optimizer has
            no parameters.
        score: with a score head instead of the language model's (reward models, critics). Such a
            model returns scores instead of log-probs.
        sequence_parallel: between tensor-parallel blocks each rank keeps its part of the tokens.
        base: a policy with adapters and the same folder; this one shares its frozen weights. None:
            it has separate weights.
        timer: gets the seconds of forward, backward and optimizer.
        offloads: whether its `sleeper` moves anything to host memory.
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
        base: "Policy | None" = None,
        timer: Timer | None = None,
        offloads: bool = True,
    ):
        if cfg.dtype == "auto":
            cfg = dataclasses.replace(cfg, dtype=mesh.default_dtype())
        if cfg.lr is None:
            cfg = dataclasses.replace(cfg, lr=cfg.learning_rate)
        self.cfg = cfg
        self.folder = folder
        self.mesh = mesh
        self.timer = timer or Timer(mesh.device)
        self.score = score
        self.model: causal.CausalModel = build.build_model(
            cfg,
            folder,
            mesh,
            trainable=trainable,
            score=score,
            sequence_parallel=sequence_parallel,
            base=base.model if base else None,
        )
        # None: all weights are trained.
        self.adapters = self.model.adapters
        # Whether gradients stay whole on every rank until the last micro-batch of a step.
        trained = [p for p in self.model.parameters() if p.requires_grad]
        whole_bytes = sum(map(sharding.gathered_bytes, trained))
        fits = whole_bytes <= WHOLE_GRADIENT_BYTES
        self.accumulates_whole = {"whole": True, "sharded": False, "auto": fits}[cfg.accumulate]
        self.vision = read_vision(folder) if families.reads_images(self.model.config) else None
        # How `pack` lays out micro-batches for this model.
        self.layout = RowLayout(
            multiple=mesh.tensor.size() if sequence_parallel else 1,
            context=mesh.context,
            windowed=families.windowed(self.model.config),
            vision=self.vision,
            convolution=families.convolution(self.model.config),
        )
        self.optimizer = build.make_optimizer(self.model, self.cfg, mesh)
        self.num_updates = 0
        self.num_skipped = 0  # Updates in a row with a gradient that was not finite.
        frozen = [name for name, p in self.model.named_parameters() if not p.requires_grad]
        self.sleeper = Sleeper(
            self.model,
            self.model.shared,
            lambda: self.optimizer.tensors(),
            base=frozenset(frozen if self.adapters else ()),
            active=offloads,
        )

    def start_phase(self, cfg: PolicyConfig) -> None:
        """Forget the optimizer's state and take the settings of another phase (RL after SFT)."""
        self.cfg = cfg
        self.num_updates = 0
        self.forget_optimizer_state()

    def forget_optimizer_state(self) -> None:
        """Make the optimizer as if it had never stepped; weights and `num_updates` stay."""
        self.sleeper.wake_optimizer()  # or a later wake would bring back what is gone now
        self.optimizer = build.make_optimizer(self.model, self.cfg, self.mesh)

    def state_awake(self) -> contextlib.AbstractContextManager[None]:
        """Keep the optimizer's state on the device inside the block, even if it slept before.

        Checkpoints and `averages` need it.
        """
        self.sleeper.wake_optimizer()
        return self.optimizer.awake()

    @contextlib.contextmanager
    def inference(self) -> Iterator[None]:
        """Compute without gradients inside the block, and so without activation checkpointing."""
        was_training = self.model.training
        self.model.eval()
        with torch.no_grad():
            yield
        self.model.train(was_training)

    @property
    def output_dtype(self) -> torch.dtype:
        """Return the dtype of log-probs, entropies and scores: float32 at least."""
        return torch.promote_types(getattr(torch, self.cfg.dtype), torch.float32)

    def annotate(
        self,
        minibatches: list[Minibatch],
        field: Literal["old_logprobs", "ref_logprobs", "values"],
    ) -> None:
        """Set a field of every micro-batch to this model's log-probs of the targets, or scores.

        With old_logprobs, `old_entropy` is set too.
        """
        with self.inference():
            for batch in sum(minibatches, []):
                outputs, entropy = self.model(batch)
                if field == "old_logprobs":
                    batch.old_logprobs = outputs
                    batch.old_entropy = entropy
                elif field == "ref_logprobs":
                    batch.ref_logprobs = outputs
                else:
                    batch.values = outputs

    def update(self, minibatch: Minibatch, loss: Loss, lr: float) -> Metrics:
        """Make one optimizer step over the micro-batches of all ranks. Collective.

        If the gradient is not finite, the step is skipped, which the console says and
        `skipped_updates` counts. Where no rank has a token in the loss there is nothing to learn,
        and no step is made either.

        Args:
            minibatch: this rank's micro-batches, as many as on every other rank.
            loss: what to minimise.
            lr: the learning rate of this step.

        Returns:
            The loss, means of its metrics over the tokens (or pairs) in the loss, grad_norm, lr;
            nothing if there are none of these.

        Raises:
            UserError: five steps in a row were skipped, or the weights are not finite themselves.
        """
        return self._step(self._accumulate(minibatch, loss), lr)

    def sum_gradients(self, part: Minibatch, loss: Loss, *, is_last: bool) -> Sums:
        """Add the gradients of a part of a minibatch to those of its other parts. Collective.

        A loss is a sum over all of its tokens (or sequences) divided by their number, which is
        known when the last part is here: `update_by_sums` divides then.

        Args:
            part: this rank's micro-batches, as many as on every other rank.
            loss: what to minimise.
            is_last: no other part follows.
        """
        return self._accumulate(part, loss, divides=False, is_last=is_last)

    def update_by_sums(self, parts: Sequence[Sums], lr: float) -> Metrics:
        """Make the optimizer step for which `sum_gradients` has summed gradients. Collective.

        Args:
            parts: what it has returned.
            lr: the learning rate.

        Returns:
            As `update`.
        """
        denominator = max(1.0, sum(part.denominator for part in parts))
        collected = defaultdict(list)
        for part in parts:
            for name, value in part.values.items():
                collected[name].append(value)
        values = {name: _combined(name, found) for name, found in collected.items()}
        values["loss"] = values["loss"] / denominator
        fsdp.scale_gradients(self.model.parameters(), 1 / denominator)
        num_units = sum(part.num_units for part in parts)
        return self._step(Sums(values, denominator, num_units), lr)

    def _step(self, summed: Sums, lr: float) -> Metrics:
        """Make an optimizer step by the gradients that are there."""
        with self.timer.phase("sleep_wake"):
            self.sleeper.wake_optimizer()
        with self.timer.phase("optimizer"):
            sums = summed.values
            # With policy.cpu_offload gradients are on the host; all other sums are on the device.
            sums["grad_norm"] = fsdp.grad_norm(self.model.parameters()).to(self.mesh.device)
            metrics = self._reduce_metrics(sums, summed.num_units)
            if self.model.routing:
                metrics |= self.model.routing.finish(self.mesh)
            for part in self.optimizer.parts:
                for group in part.param_groups:
                    group["lr"] = lr
            warmed_up = (1 + self.num_updates) / (10 + self.num_updates)
            self.optimizer.ema_decay = min(self.cfg.ema_decay, warmed_up)

            grad_norm = metrics["grad_norm"]
            is_finite = math.isfinite(grad_norm)
            has_tokens = summed.num_units > 0
            if has_tokens and is_finite:
                self.num_skipped = 0
                max_norm = self.cfg.max_grad_norm
                if max_norm and grad_norm > max_norm:
                    fsdp.scale_gradients(self.model.parameters(), max_norm / grad_norm)
                self.optimizer.step()
                if self.model.routing:
                    self.model.routing.move_bias()
            elif has_tokens:
                report_skipped(self, metrics["loss"], lr)
                self.num_skipped += 1
            self.model.zero_grad()
            self.num_updates += 1
        metrics |= {"lr": lr, "skipped_updates": float(not is_finite)}
        return metrics if has_tokens else {}

    def measure(self, minibatch: Minibatch, loss: Loss) -> Metrics:
        """Return the loss and metrics that `update` would return, without a step. Collective."""
        with self.inference():
            sums = self._accumulate(minibatch, loss, backward=False)
            return self._reduce_metrics(sums.values, sums.num_units)

    def _accumulate(
        self,
        minibatch: Minibatch,
        loss: Loss,
        *,
        backward: bool = True,
        divides: bool = True,
        is_last: bool = True,
    ) -> Sums:
        """Sum gradients over the micro-batches.

        Args:
            minibatch: the micro-batches.
            loss: what to minimise.
            backward: False: only its value is wanted.
            divides: divide by the number of tokens (or sequences) in the loss.
            is_last: no more gradients are summed for this optimizer step.
        """
        unit = "pair" if loss.aggregation == "pair" else "token"  # what metrics are means over

        # The denominators of the loss, of its metrics and of routers, over all ranks.
        counts = []
        for batch in minibatch:
            counts += [normalize.count(batch, of) for of in (loss.aggregation, unit, "token")]
        totals = self.mesh.data_sums(torch.stack(counts).view(-1, 3).sum(0).cpu())
        # Context ranks count shares; their sum is an integer but for rounding.
        denominator, num_units, num_tokens = totals.round().tolist()
        routing = self.model.routing if backward else None
        if routing:
            with self.inference(), self.timer.phase("forward"):
                routing.begin_step(num_tokens, minibatch, self.model)

        # Values of each micro-batch stay on the device, so that none waits for the host.
        collected = defaultdict(list)
        for i, batch in enumerate(minibatch):
            ends = is_last and i == len(minibatch) - 1
            self.model.set_requires_gradient_sync(ends or not self.accumulates_whole)
            self.model.set_requires_all_reduce(ends)  # over replicas: once a step either way
            with self.timer.phase("forward"):
                with routing.counting(self.mesh) if routing else contextlib.nullcontext():
                    logprobs, entropy = self.model(batch, loss.entropy_gradient)
                token_loss, metrics = loss.token_loss(batch, logprobs, entropy)
                weights = normalize.weights(batch, loss.aggregation, loss.fixed_length)
                value = (token_loss * weights.to(token_loss.dtype)).sum()
                if divides:
                    value = value / max(1.0, denominator)
            if backward:
                with self.timer.phase("backward"):
                    value.backward()
            collected["loss"].append(value.detach().double())
            for name, values in metrics.items():
                if unit == "pair":
                    in_loss = (values * normalize.weights(batch, "pair")).double()
                else:
                    in_loss = values.index_select(0, batch.loss_rows).double()
                if name.endswith("_max"):
                    collected[name].append(F.pad(in_loss, (0, 1), value=-math.inf).amax())
                else:
                    collected[name].append(in_loss.sum())
        # All ranks add them up in one order, whatever order a user's loss has them in.
        sums = {name: _combined(name, collected[name]) for name in sorted(collected)}
        return Sums(sums, denominator, num_units)

    def _reduce_metrics(self, sums: dict[str, Tensor], num_units: float) -> Metrics:
        """Return means over all ranks of what `_accumulate` returned (`_max`: maxima)."""
        # All at once: the host waits for the device here, and nowhere else in a step.
        local_values = torch.stack([value.double() for value in sums.values()]).cpu()
        totals = self.mesh.data_sums(local_values).tolist()
        maxima = self.mesh.maxima(local_values).tolist()
        metrics = {}
        for name, total, maximum in zip(sums, totals, maxima, strict=True):
            is_maximum = name == "grad_norm" or name.endswith("_max")  # Each rank has the norm.
            divisor = 1.0 if name == "loss" else max(1.0, num_units)  # The loss is divided already.
            metrics[name] = maximum if is_maximum else total / divisor
        return metrics

    def shards(self) -> dict[str, Tensor]:
        """Return this rank's part of all that a checkpoint holds, by the model's names.

        A tied head appears once, under the embedding's name. Call it between two steps: it
        reshards the model, so that its parameters are those that the optimizer knows. Weights that
        are held in four bits are on the meta device: `merged` has their values.
        """
        fsdp.reshard(self.model)
        return causal.tensors(self.model)

    def parameters(self) -> dict[str, Tensor]:
        """Return this rank's part of the model's parameters, and of the buffers of its files."""
        fsdp.reshard(self.model)
        return causal.parameters(self.model)

    def merged(self) -> Mapping[str, Tensor]:
        """Return what the engine and the files of a model get: `shards`, with adapters merged.

        Collective. With adapters a shard is computed when it is asked for, from the adapters as
        they are now; the base may be offloaded (`Sleeper.sleep_base`).
        """
        return self._merge(self.shards(), self.parameters())

    def _merge(
        self, shards: dict[str, Tensor], parameters: dict[str, Tensor]
    ) -> Mapping[str, Tensor]:
        if self.adapters is None:
            return shards
        return lora.Merged(shards, parameters, self.adapters, self.sleeper.values)

    @contextlib.contextmanager
    def without_adapters(self) -> Iterator[None]:
        """Compute as the base does inside the block, which has no backward."""
        assert self.adapters
        self.adapters.on = False
        replays = self.replays_routes
        self.replays_routes = False  # They were chosen with the adapters.
        try:
            yield
        finally:
            self.adapters.on = True
            self.replays_routes = replays

    @property
    def replays_routes(self) -> bool:
        """Whether routers take the experts that the engine took (`Packed.routes`)."""
        return self.model.routing is not None and self.model.routing.replays

    @replays_routes.setter
    def replays_routes(self, value: bool) -> None:
        if self.model.routing:
            self.model.routing.replays = value

    def parts(self) -> dict[str, list[CheckpointSlice]]:
        """Return, by name of `shards`, the weights of a checkpoint's files that it is made of."""
        return {
            name: families.checkpoint_slices(self.model.config, name, shard.shape)
            for name, shard in self.shards().items()
        }

    def averages(self) -> Mapping[str, Tensor]:
        """Return the moving averages of `shards`, by name; only inside `state_awake`.

        Collective. The average of a tensor that was never updated (buffers, frozen weights, and
        everything before the first update) is the tensor. A and B of adapters are averaged, then
        merged.
        """
        averages = self.optimizer.averages()

        def averaged(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            return {
                name: averages[t] if isinstance(t, nn.Parameter) and t in averages else t
                for name, t in tensors.items()
            }

        return self._merge(averaged(self.shards()), averaged(self.parameters()))


def _combined(name: str, values: list[Tensor]) -> Tensor:
    """Return the sum of a metric's values in parts of a batch, or their maximum (`_max`)."""
    if name.endswith("_max"):
        return torch.stack(values).amax()
    return functools.reduce(torch.add, values)
