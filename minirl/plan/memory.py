"""How much memory a model's training step takes on a rank, by closed formulas.

T are the rows of a micro-batch on a rank, N those of them that are in the loss, P the model's
parameters, e the bytes of an element in `policy.dtype`.
"""

from dataclasses import dataclass

import torch

from minirl.config.policy import ParallelConfig, PolicyConfig
from minirl.model.adapters import nf4
from minirl.model.logprob import CHUNK_BYTES
from minirl.plan import kinds
from minirl.plan.adapted import PACKED_BYTES, Adapters
from minirl.plan.cards import Card
from minirl.plan.kept import (
    EVERY_STATE,
    IN_BACKWARD,
    IN_FORWARD,
    KEPT,
    KEPT_STATE,
    PerRow,
    PerStateRow,
    RowBytes,
    Rows,
)
from minirl.plan.load import Load, LossName
from minirl.plan.shape import Shape
from minirl.train.policy import WHOLE_GRADIENT_BYTES

WIDE = 4  # Bytes of an element of masters, gradients and logits.
AT_ONCE = 2**28  # Elements of stored state that are restored for a step at once.


# Linears by what they read: a normed hidden state, which each block has, or a gated product.
ATTENTION_INPUTS = ("q_proj", "k_proj", "v_proj", "qkv_proj")
GATE_INPUTS = ("gate_proj", "up_proj", "gate_up_proj")
GATED_INPUTS = ("down_proj",)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A model and what is done with it, as `load.Job`, with its shape and the card at hand."""

    shape: Shape
    card: Card
    gpus_per_node: int
    world_size: int
    policy: PolicyConfig
    parallel: ParallelConfig
    load: Load
    loss: LossName
    shares_base: bool = False  # The frozen weights are another model's, which holds them.
    liger: bool  # Norms, gates and rotary positions are one kernel each.
    checkpointing: str  # off, selective or full.


class Memory:
    """Bytes of what is on a rank's device."""

    def __init__(self, job: Job):
        shape = job.shape
        policy = job.policy
        self.job = job
        self.rows = Rows(job.load, job.parallel.context)
        self.element = getattr(torch, policy.dtype).itemsize
        self.tensor = job.parallel.tensor
        self.shards = max(1, job.world_size // (job.parallel.replicate * self.tensor))
        self.trains = job.loss != "frozen"
        # Of a layer's tensor part, parameters that other ranks have under expert parallelism.
        self.elsewhere = elsewhere(shape, job.parallel)
        self.row_bytes = RowBytes(
            shape,
            self.rows,
            element=self.element,
            parallel=job.parallel,
            # Tensor ranks that share the rows of experts; without it each holds all of them.
            senders=self.tensor if self.elsewhere else 1,
        )

        # Of a rank's tensor part: what it holds of the parameters, and what is made of them.
        master = max(WIDE, self.element) if self.trains else self.element
        on_device = not policy.cpu_offload
        self.trained = shape.trained_on_rank(self.tensor)
        frozen = shape.frozen_bytes(element=self.element, master=master) / self.tensor
        held = self.trained * master + (0.0 if job.shares_base else frozen)
        self.parameters = held / self.shards * on_device
        in_state = {"device": 2.0 * master, "8bit": 2.0 + 2.0 * master / 256, "offload": 0.0}
        self.optimizer = self.trained * in_state[policy.optimizer_state]
        if policy.optimizer == "muon":  # One moment of the layers' matrices, two of the rest.
            self.optimizer *= 0.5 + 0.5 * shape.root_trained_parameters / shape.trained_parameters
        if policy.ema_decay:
            self.optimizer += self.trained * master
        self.optimizer *= on_device * self.trains / self.shards
        self.keeps_whole = accumulates_whole(policy, shape, job.parallel)
        self.gradient = self.trained * master * on_device / self.shards
        if self.keeps_whole and job.load.num_micro > 1:
            self.gradient = gathered_trained(shape, job.parallel) * master

        # Gathered in the dtype of computation, or packed.
        vocabulary = shape.vocabulary * shape.hidden / self.tensor
        self.root = shape.root_parameters / self.tensor
        self.head = vocabulary if job.loss not in ("value", "reward") else 0.0
        self.head_gradient = 0.0 if shape.frozen.head else self.head
        self.root_gradient = shape.root_trained_parameters / self.tensor
        self.layer = shape.layer_parameters / self.tensor - self.elsewhere
        self.in_layers = (shape.parameters - shape.root_parameters) / self.tensor
        self.in_layers -= self.elsewhere * shape.num_layers
        self.layer_bytes = self.layer * self.element
        self.layer_trained = self.layer
        self.experts = shape.expert_parameters / self.tensor - self.elsewhere
        self.experts_trained = self.experts
        self.layer_expert_bytes = self.experts * self.element  # Of `layer_bytes`.
        # Share of the experts of a tensor part.
        away = self.elsewhere / (self.experts + self.elsewhere) if self.elsewhere else 0.0
        self.layer_adapted = 0.0  # Weights that adapters are added to.
        self.merged = 0.0  # Bytes of the largest matrix while it is merged with its adapter,
        self.dequantised = 0.0  # and of the largest one that is dequantised for that.
        if shape.adapters:
            self._add_adapters(shape.adapters, away)

    def _add_adapters(self, adapters: Adapters, away: float) -> None:
        """Count adapters, and a base in four bits, in what a layer gathers and merges."""
        self.layer_trained = sum(adapters.of_layer(self.tensor, away))
        self.experts_trained = adapters.of_experts(self.tensor, away)
        adapted = adapters.weights(self.tensor, away)
        self.layer_adapted = sum(adapted)
        self.merged = max(adapted, default=0.0) * self.element
        self.layer_bytes += self.layer_trained * self.element
        self.layer_expert_bytes += self.experts_trained * self.element
        if adapters.layer_packed:
            packed = adapters.layer_packed - self.elsewhere
            self.layer_bytes -= packed * (self.element - PACKED_BYTES)
            self.layer_expert_bytes -= self.experts * (self.element - PACKED_BYTES)
            largest = adapters.largest * (1 - away)
            self.dequantised = largest * (self.element + WIDE / nf4.BLOCK)

    def gathered_bytes(self, *, of_root: bool) -> float:
        """Return the bytes of the parameters that a pass gathers, of all layers or of the model."""
        shape = self.job.shape
        whole = shape.parameters if of_root else shape.parameters - shape.root_parameters
        num_bytes = (whole / self.tensor - self.elsewhere * shape.num_layers) * self.element
        adapters = shape.adapters
        if adapters:
            if adapters.packed:
                packed = adapters.packed - self.elsewhere * shape.num_layers
                num_bytes -= packed * (self.element - PACKED_BYTES)
            gathered = adapters.on_rank(self.tensor)
            if self.elsewhere:
                gathered = self.layer_trained * shape.num_layers
            num_bytes += gathered * self.element
        return num_bytes

    def phases(self) -> dict[str, dict[str, float]]:
        """Return what is alive at the peak of each phase."""
        phases = {"annotate": _largest(self._forward_moments(keeps=False))}
        if self.trains:
            phases["forward"] = _largest(self._forward_moments(keeps=True))
            phases["backward"] = _largest(self._backward_moments())
            phases["optimizer"] = {
                **self._state(),
                kinds.OPTIMIZER: self.optimizer + self._restored(),
                kinds.GRADIENTS: self._sharded_gradient(),
            }
        return phases

    def _restored(self) -> float:
        """Return the bytes of stored state that is restored for a step at the same time."""
        bytes_of_state = {"device": 0, "offload": 2 * WIDE, "8bit": 5 * WIDE}
        shape = self.job.shape
        if self.job.policy.optimizer == "muon":  # A whole matrix and its products.
            return 3 * WIDE * shape.hidden * max(shape.feed_forward, shape.expert)
        at_once = max(AT_ONCE, shape.vocabulary * shape.hidden)
        on_rank = min(at_once / self.tensor, self.trained) / self.shards
        return on_rank * bytes_of_state[self.job.policy.optimizer_state]

    def _state(self) -> dict[str, float]:
        return {kinds.PARAMETERS: self.parameters, kinds.OPTIMIZER: self.optimizer}

    def _sharded_gradient(self) -> float:
        if self.job.policy.cpu_offload:
            return 0.0
        return self.trained * WIDE / self.shards

    def _kept(self) -> tuple[float, float]:
        """Return the bytes that a layer keeps, and those that it adds while it is recomputed."""
        which = "liger" if self.job.liger else "torch"
        everything = self.row_bytes.of_layer(KEPT[which]) * self.rows.all
        everything -= self._not_kept() * self.rows.all
        if self.job.checkpointing == "off":
            return everything, 0.0
        of_row = KEPT[self.job.checkpointing]
        kept = self.row_bytes.of_layer(of_row) * self.rows.all
        # What was kept of experts is let go of while they are computed again.
        let_go = self.of_experts(of_row.expert_hidden, of_row.expert)
        if self.job.shape.adapters:  # whose products need them
            let_go = 0.0
        return kept, max(0.0, everything - kept - let_go)

    def _kept_in_all(self) -> float:
        """Return the bytes that all layers keep."""
        which = self._keeps()
        of_row = self.row_bytes.of_layers(KEPT[which], KEPT_STATE[which])
        if self.job.checkpointing == "off":
            of_row -= self._not_kept() * self.job.shape.num_layers
        return of_row * self.rows.all

    def _not_kept(self) -> float:
        """Return bytes for each row of a layer's inputs that no gradient of a weight needs."""
        shape = self.job.shape
        if shape.adapters is None or shape.experts:
            return 0.0
        adapted = shape.adapters
        num_inputs = 2 - adapted.reads(ATTENTION_INPUTS) - adapted.reads(GATE_INPUTS)
        of_row = float(num_inputs * shape.hidden)
        if not adapted.reads(GATED_INPUTS):
            of_row += shape.feed_forward / self.tensor
        return self.element * of_row

    def chunk(self) -> float:
        """Return the bytes of a chunk of logits; for a score head, of wide hidden states."""
        if not self.head:
            return self.job.shape.hidden * self.rows.all * WIDE
        of_row = self.job.shape.vocabulary / self.tensor * WIDE
        num_rows = max(16, CHUNK_BYTES["cuda"] // of_row)
        return min(num_rows, self.rows.in_loss) * of_row

    def _gathered_layers(self, fewest: int) -> float:
        num = fewest
        if not self.job.policy.reshard_after_forward:
            num = self.job.shape.num_layers
        return num * self.layer_bytes

    def _forward_moments(self, *, keeps: bool) -> list[dict[str, float]]:
        """Return what is alive at the start of forward, in its layers, and at its end."""
        shape = self.job.shape
        hidden = shape.hidden * self.rows.all * self.element
        base = self._state()
        if keeps and self.job.load.num_micro > 1:
            base[kinds.GRADIENTS] = self.gradient
        activations = self._kept_in_all() if keeps else 0.0
        which = self._keeps() if keeps else "full"
        root = self.root * self.element
        start = {
            **base,
            # The flat result of the all-gather, and the parameters that it is copied to.
            kinds.GATHERED: 2 * root + self._gathered_layers(2),
            kinds.ACTIVATIONS: hidden,
        }
        # A layer computes, and two more are on the way or not yet freed.
        first_layers = {
            **base,
            kinds.GATHERED: root + self._gathered_layers(3),
            kinds.ACTIVATIONS: 2 * hidden + self.merged + self.dequantised,
        }
        # So it is in the last but one, when those before it keep theirs.
        kept, _ = self._kept()
        before_last = {
            **first_layers,
            kinds.ACTIVATIONS: 2 * hidden + max(0.0, activations - kept),
        }
        # If that has a gated delta net, the layer behind it is not there yet when it computes.
        of_delta_net = self._of_delta_net(IN_FORWARD) - self._of_delta_net(KEPT_STATE[which])
        in_delta_net = {
            **before_last,
            kinds.GATHERED: root + self._gathered_layers(2),
            kinds.ACTIVATIONS: before_last[kinds.ACTIVATIONS] + of_delta_net,
        }
        last_layers = {
            **base,
            kinds.GATHERED: root + self._gathered_layers(2),
            kinds.ACTIVATIONS: hidden + activations + self._in_last_layer(keeps=keeps),
        }
        end = {
            **base,
            kinds.GATHERED: root + self._gathered_layers(1),
            kinds.ACTIVATIONS: hidden * (1 + keeps) + activations + self._in_loss(),
            kinds.HEAD: (2 if self.head else 1) * self.chunk(),
        }
        return [start, first_layers, before_last, in_delta_net, last_layers, end]

    def _in_last_layer(self, *, keeps: bool) -> float:
        """Return the bytes that the last layer holds in forward beside what it keeps."""
        merging = self.merged + self.dequantised
        one = self.of_experts(1, 0)
        if not self.job.shape.experts:
            return merging + self._not_kept() * self.rows.all
        combined = 2 * one  # What experts return, masked and in the order of tokens.
        if not merging:
            return combined
        # Rows of experts and their first product, both masked, too, beside the merged weights; and
        # these rows as they have come from other ranks.
        come = one * bool(self.elsewhere)
        widest = come + max(self.of_experts(2, 4) + self.merged, one + merging)
        of_row = KEPT[self._keeps()]
        already = self.of_experts(of_row.expert_hidden, of_row.expert) if keeps else 0.0
        return max(combined, widest - already)

    def of_experts(self, hidden: float, expert: float) -> float:
        """Return the bytes of so many tensors of rows of experts, by their width."""
        return self.row_bytes.of_layer(PerRow(0, 0, 0, 0, 0, 0, 0, hidden, expert)) * self.rows.all

    def _of_delta_net(self, held: PerStateRow) -> float:
        """Return the bytes that a gated delta net holds; 0: there are none."""
        nets = self.job.shape.delta_nets
        return self.row_bytes.of_delta_net(nets, held) * self.rows.all if nets else 0.0

    def _keeps(self) -> str:
        """Return the key in `KEPT`."""
        if self.job.checkpointing == "off":
            return "liger" if self.job.liger else "torch"
        return self.job.checkpointing

    def _in_loss(self) -> float:
        """Return the bytes of the hidden states of rows in the loss."""
        return self.job.shape.hidden * self.rows.in_loss * self.element if self.head else 0.0

    def _backward_moments(self) -> list[dict[str, float]]:
        """Return what is alive in the backward of the head, of the last layers, of the root."""
        shape = self.job.shape
        base = self._state()
        base[kinds.GRADIENTS] = self.gradient if self.job.load.num_micro > 1 else 0.0
        kept, recomputed = self._kept()
        in_all = self._kept_in_all()
        let_go = kept if self.job.checkpointing == "off" else 0.0  # Of the last layer.
        hidden = shape.hidden * self.rows.all * self.element
        root = self.root * self.element
        chunk = self.chunk()
        head = {
            **base,
            kinds.GATHERED: root + self._gathered_layers(1),
            kinds.ACTIVATIONS: hidden + in_all + 2 * self._in_loss(),
            kinds.HEAD: (1.5 if self.head else 2) * chunk + self.head_gradient * WIDE,
        }
        cast = {**head, kinds.HEAD: self.head_gradient * (WIDE + self.element)}
        # The last layer computes, and the one before it is being gathered.
        last_layer = {
            **base,
            kinds.GATHERED: root + self._gathered_layers(2),
            kinds.ACTIVATIONS: hidden + in_all + recomputed + self._gradients(),
            kinds.HEAD: self.head_gradient * self.element,
            kinds.GRADIENTS: base[kinds.GRADIENTS] + self._layer_gradients(),
        }
        # So does the one before it, while the gradients of the last one are reduced.
        reduced = 0.0 if self.keeps_whole and self.job.load.num_micro > 1 else WIDE
        layers = {
            **base,
            kinds.GATHERED: root + self._gathered_layers(2),
            kinds.ACTIVATIONS: hidden + in_all - let_go + recomputed + self._gradients(),
            kinds.HEAD: self.head_gradient * self.element,
            kinds.GRADIENTS: base[kinds.GRADIENTS]
            + self._layer_gradients()
            + self.layer_trained * reduced,
        }
        # The embedding's gradient is dense. All of the root is cast and reduced at once.
        both = self.root_gradient
        if self.head_gradient and self.root_gradient <= 1.5 * self.head:
            both = 2 * self.head  # One matrix, which has two gradients for a moment.
        end = {
            **self._state(),
            kinds.HEAD: self.head_gradient * self.element,
            kinds.GRADIENTS: max(base[kinds.GRADIENTS], self._sharded_gradient())
            + (both - self.head_gradient) * self.element
            + self.root_gradient * WIDE,
        }
        if shape.delta_nets is None:
            return [head, cast, last_layer, layers, end]
        delta_net = {
            **layers,
            kinds.ACTIVATIONS: hidden + in_all - kept + self._in_backward_of_delta_net(),
        }
        return [head, cast, last_layer, layers, delta_net, end]

    def _in_backward_of_delta_net(self) -> float:
        """Return the bytes that a layer holds in its gated norm's backward, beyond what it kept.

        All that lies behind it in the layer has been let go of.
        """
        which = self._keeps()
        had = self.row_bytes.of_layer(KEPT[which].without_attention()) * self.rows.all
        had += self._of_delta_net(KEPT_STATE[which])
        return self._of_delta_net(EVERY_STATE) + self._of_delta_net(IN_BACKWARD) - had

    def _layer_gradients(self) -> float:
        """Return the bytes of gradients of a layer's largest matrices, before they are reduced."""
        shape = self.job.shape
        if shape.adapters:
            return self.layer_trained * self.element
        if shape.experts:
            return self.experts * self.element
        return shape.hidden * shape.feed_forward / self.tensor * self.element

    def _gradients(self) -> float:
        """Return the bytes of gradients of activations, less what is not needed any more."""
        shape = self.job.shape
        row = self.rows.all * self.element
        feed_forward = shape.feed_forward / self.tensor
        if shape.adapters is None:
            if shape.experts:
                return -2.0 * shape.experts_of_token * shape.expert * row
            return (shape.hidden + feed_forward) * row
        if shape.experts:
            # The gradients of A and B of the first product, which is computed for them, beside the
            # merged weights, when what comes behind it is let go of; or before any gradients of
            # the layer, of the second, whose weights are half as large; or weights are dequantised.
            first = self.merged + self.of_experts(1, 2)
            second = self.merged / 2 + self.of_experts(2, 2) - self._layer_gradients()
            merging = self.merged + self.dequantised - self.of_experts(1, 2)
            return max(first, second, merging)
        one = (shape.hidden + feed_forward) * row
        if not shape.adapters.reads(GATED_INPUTS):
            return max(one, self.merged + self.dequantised)
        # So they are of the last product.
        return self.merged + max(one + 2 * shape.hidden * row, self.dequantised)


def elsewhere(shape: Shape, parallel: ParallelConfig) -> float:
    """Return how many parameters of a layer's tensor part other ranks have, by `experts`."""
    if parallel.experts == 1:
        return 0.0
    return shape.expert_parameters * (1 / parallel.tensor - 1 / parallel.experts)


def gathered_trained(shape: Shape, parallel: ParallelConfig) -> float:
    """Return how many trained parameters FSDP gathers on a rank, but for experts elsewhere."""
    trained = shape.trained_on_rank(parallel.tensor)
    if shape.trained_parameters == shape.parameters:
        trained -= elsewhere(shape, parallel) * shape.num_layers
    elif shape.adapters and parallel.experts > 1:
        away = 1 - parallel.tensor / parallel.experts
        without = shape.adapters.of_experts(parallel.tensor, 0.0) * away
        trained -= without * shape.num_layers
    return trained


def accumulates_whole(policy: PolicyConfig, shape: Shape, parallel: ParallelConfig) -> bool:
    """Return whether a rank keeps whole gradients between micro-batches, as `Policy` decides."""
    fits = WIDE * gathered_trained(shape, parallel) <= WHOLE_GRADIENT_BYTES
    return {"whole": True, "sharded": False, "auto": fits}[policy.accumulate]


def _largest(moments: list[dict[str, float]]) -> dict[str, float]:
    return max(moments, key=lambda parts: sum(parts.values()))
