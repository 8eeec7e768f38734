"""What a training step of a model costs a rank: bytes of memory, seconds, bytes on the wire.

Everything is counted from sizes. T are the rows of a micro-batch on a rank, N those of them that
are in the loss, and an element has 2 bytes in bfloat16. `benchmarks/dryrun` counts the same by
running minirl's own code on a pretended GPU; `tests/test_dryrun_costs.py` holds both together.

Time is a roofline: operations over a stated share of the card's peak, and bytes over a stated share
of its bandwidth.
"""

from dataclasses import dataclass

from minirl.config.policy import CHUNK_BYTES, WHOLE_GRADIENT_BYTES, ParallelConfig, PolicyConfig
from minirl.plan.cards import Card
from minirl.plan.sizes import PACKED_BYTES, DeltaNet, Layer, Matrix, ModelSizes
from minirl.plan.workload import Load, LossName

BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}
WIDE = 4  # Bytes of an element of master weights, gradients and logits.
CHUNK = 64  # Rows of a chunk of a gated delta net.

# What memory is for, in the words of users.
PARAMETERS = "parameters"
OPTIMIZER = "optimizer"
GRADIENTS = "gradients"
GATHERED = "gathered parameters"
ACTIVATIONS = "activations"
LOGITS = "logits"

# Shares of the card's peaks that good kernels reach. FlashAttention-2 was written for the A100; on
# Hopper it computes at 350 (forward) and 300 TFLOP/s.
REACHED = {
    "matmul": 0.70,
    "attention forward": 0.36,
    "attention backward": 0.30,
    "memory": 0.80,
    "wire": 0.75,
}
# Elements that kernels between matrix products read and write for each element that the layer keeps
# without checkpointing, in forward and in backward. Norms and sums of hidden states read more than
# they keep; rows of experts are sorted, masked and summed up; a delta net has many small kernels.
MOVED = {
    "hidden": (2.5, 5.2),
    "split": (1.1, 2.2),
    "experts": (4.3, 7.8),
    "delta net": (6.2, 15.0),
}
# The same for each feature of the queries, where attention over two blocks of keys is merged, or
# multiplied by a gate.
MERGED = (17.0, 9.0)
GATED = (17.0, 26.0)
UNFUSED = (2.0, 3.2)  # So many times as much by the modules of the library, operator by operator.
CAST_BYTES = 10  # Read and written for each weight of a shard, for a pass: float32 to its dtype.
TRAVELLING = 1.4  # So many times as much by rows that are sent to experts on other ranks.
# The same for each input and output of a matrix with an adapter, by the gradients of A and B:
# products of so few columns take as long as their rows take to be read and written.
MOVED_BY_ADAPTER = (2, 3)
LOGIT_BYTES = {"forward": 36, "backward": 26}  # Read and written for each logit.
ADAMW_BYTES = 36  # For each parameter: it, its gradient and two moments.
QUANTIZE_BYTES = 172  # For each parameter: two moments to 8 bits and back.
HOST_ADAMW_GB = 10.0  # GB/s that a rank's cores move in AdamW on the host.
RESTORED_AT_ONCE = 2**28  # Elements of stored state that are restored for a step at once.

Parts = dict[str, float]  # Bytes by what they are for.


@dataclass(frozen=True, kw_only=True)
class Training:
    """A model, and how it is trained."""

    model: ModelSizes
    card: Card
    gpus_per_node: int
    world_size: int
    policy: PolicyConfig
    parallel: ParallelConfig
    load: Load
    loss: LossName
    shares_base: bool = False  # Its frozen weights are another model's, which holds them.
    fused: bool  # Norms, gates and rotary positions are one kernel each (liger).
    checkpointing: str  # off, selective or full.


@dataclass(kw_only=True)
class Cost:
    """What training a model costs a rank."""

    parameters: float  # Bytes on the device between two steps, as the next.
    optimizer: float
    alive: dict[str, Parts]  # At the peak of each phase.
    # Seconds by phase: of a micro-batch in forward, backward and annotate, of a step in optimizer.
    seconds: dict[str, float]
    wire: dict[str, float]  # Bytes that pass the link of the rank, alike.
    wire_seconds: dict[str, float]
    flops: float  # Of forward and backward of a micro-batch, without what is computed again.


def kept_elements(layer: Layer, hidden: int, checkpointing: str, *, fused: bool) -> Parts:
    """Return how many elements a layer keeps for each row from forward to backward.

    Args:
        layer: its widths.
        hidden: width of the model.
        checkpointing: off, selective (results of matrix products and of attention) or full.
        fused: norms, gates and rotary positions are one kernel each, which keeps its input alone.

    Returns:
        By who divides them: "whole" is on every rank, "between" is divided by sequence
        parallelism, "split" by tensor parallelism, "experts" by expert parallelism.
    """
    if checkpointing == "full":
        return {"between": hidden, "whole": 0, "split": 0, "experts": 0}
    heads = layer.queries + layer.keys
    feed_forward = layer.feed_forward
    net = layer.delta_net
    if checkpointing == "selective":
        return {
            "between": hidden,  # The input.
            "whole": 2 * hidden,  # What attention and the MLP return.
            "split": 2 * heads  # Queries, keys, values, and what attention returns.
            + layer.gates_output * layer.queries
            + (net.mixed + net.values if net else 0)
            + 2 * feed_forward,  # Gate and up.
            "experts": hidden + 2 * layer.expert,  # The same of each expert's rows.
        }
    wide = 0 if fused else 2  # Modules of the library keep float32 copies: of two bfloat16 each.
    return {
        "between": (2 + 2 * wide) * hidden,  # The inputs of two norms.
        "whole": 2 * hidden,  # Their outputs.
        # Queries and keys before and after their norms, values, what attention returns.
        "split": (3 + wide) * heads
        + 2 * layer.gates_output * layer.queries
        + (_kept_by_delta_net(net) if net else 0)
        + (3 + wide / 2) * feed_forward,  # Gate, up and their product.
        "experts": 2 * hidden + 4 * layer.expert,  # Rows there and back; both products, masked.
    }


def _kept_by_delta_net(net: DeltaNet) -> float:
    """Return what a gated delta net keeps for each row, as flash-linear-attention computes it."""
    # What is convolved; keys and queries of each head of values; values, their gate and the gated
    # norm's float32 copies; the inverse of a chunk's triangular system.
    return net.mixed + 2 * net.heads * net.key_dim + 10 * net.values + net.heads * CHUNK


class CostModel:
    """What a rank holds, computes and sends."""

    def __init__(self, training: Training):
        self.training = training
        model = training.model
        policy = training.policy
        parallel = training.parallel
        load = training.load
        self.model = model
        self.element = BYTES[policy.dtype]
        self.tensor = parallel.tensor
        self.shards = max(1, training.world_size // (parallel.replicate * self.tensor))
        self.experts_over = max(self.tensor, parallel.experts)  # Ranks that divide the experts.
        self.trains = training.loss != "frozen"

        # Rows of a micro-batch on a rank.
        self.rows = load.rows(load.num_answers) / parallel.context
        self.loss_rows = load.num_answers * load.answer / parallel.context
        # Share of the rows whose attention is merged: of a prompt that several answers share and of
        # the answer itself; or of what several ranks of a context hold.
        self.merged = self.loss_rows / self.rows if load.samples > 1 else 0.0
        if parallel.context > 1:
            self.merged = 1.5

        # What lasts.
        master = max(WIDE, self.element) if self.trains else self.element
        adapters = sum(num * m.adapter for m, num in model.all_matrices())
        # A column-split matrix has the whole A, a row-split one the whole B.
        of_adapters = adapters * (1 + 1 / self.tensor) / 2
        self.trained = (model.trained - adapters) / self.tensor + of_adapters
        frozen = 0.0 if training.shares_base else model.frozen_bytes(self.element, master)
        on_device = not policy.cpu_offload
        held = self.trained * master + frozen / self.tensor
        self.parameters = held / self.shards * on_device
        self.sharded_gradient = self.trained * master / self.shards * on_device
        # Of AdamW: two moments. Of Muon: one of the layers' matrices.
        state = {"device": 2.0 * master, "8bit": 2.0 + 2.0 * master / 256, "offload": 0.0}
        of_state = state[policy.optimizer_state] * self.trained
        if policy.optimizer == "muon":
            of_root = sum(m.numel for m in model.root if m.trained) / max(1, model.trained)
            of_state *= 0.5 + 0.5 * of_root
        if policy.ema_decay:
            of_state += self.trained * master
        self.optimizer = of_state / self.shards * on_device * self.trains

        # What FSDP gathers: of the largest layer, and of the root.
        self.of_layer = {layer: self._gathered(layer.matrices) for layer in model.layers}
        self.layer_bytes = max(self.of_layer.values())
        language = [m for m in model.root if m.name != "visual.vision_tower"]
        self.root_bytes = self._gathered(language)
        has_head = training.loss not in ("value", "reward")
        self.head = model.vocabulary * model.hidden / self.tensor * has_head
        of_embedding = [m for m in language if m.trained]
        self.root_trained = sum(m.numel for m in of_embedding) / self.tensor
        self.head_trained = self.head if of_embedding and of_embedding[-1] is language[-1] else 0.0
        self.trained_gathered = self.trained
        if not model.is_adapted:
            self.trained_gathered -= self._expert_weights() * (
                1 / self.tensor - 1 / self.experts_over
            )
        whole_fits = WIDE * self.trained_gathered <= WHOLE_GRADIENT_BYTES
        self.keeps_whole = {"whole": True, "sharded": False, "auto": whole_fits}[policy.accumulate]
        self.gradient = 0.0  # Between micro-batches.
        if load.num_micro > 1:
            whole = self.trained_gathered * master
            self.gradient = whole if self.keeps_whole else self.sharded_gradient

        # Bytes of a chunk of logits; of a score head, of its wide hidden states.
        of_row = model.vocabulary / self.tensor * WIDE
        num_rows = max(16, CHUNK_BYTES["cuda"] // of_row)
        self.chunk = min(num_rows, self.loss_rows) * of_row
        if not has_head:
            self.chunk = model.hidden * self.rows * WIDE

    def cost(self) -> Cost:
        """Return all that training the model costs."""
        wire = self.wire()
        return Cost(
            parameters=self.parameters,
            optimizer=self.optimizer,
            alive=self.alive(),
            seconds=self.seconds(),
            wire=wire,
            wire_seconds=self.wire_seconds(wire),
            flops=self.flops(),
        )

    def _gathered(self, matrices: tuple[Matrix, ...] | list[Matrix]) -> float:
        """Return the bytes of matrices and their adapters once they are gathered on a rank."""
        total = 0.0
        for m in matrices:
            over = self.experts_over if m.experts else self.tensor
            of_weight = PACKED_BYTES if m.packed else self.element
            total += (m.numel * of_weight + m.adapter * self.element) / over
        return total

    def _expert_weights(self) -> int:
        """Return the number of weights of all experts."""
        return sum(num * m.numel for m, num in self.model.all_matrices() if m.experts)

    # ----------------------------------------------------------------------------------------------
    # memory

    def kept(self, layer: Layer, checkpointing: str) -> float:
        """Return the bytes that a layer keeps from forward to backward."""
        training = self.training
        parts = kept_elements(layer, self.model.hidden, checkpointing, fused=training.fused)
        of_row = parts["whole"] + parts["split"] / self.tensor
        of_row += parts["between"] / (self.tensor if training.parallel.sequence else 1)
        senders = self.tensor if training.parallel.experts > 1 else 1
        of_row += parts["experts"] * layer.experts_of_token / senders
        if checkpointing == "selective":
            of_row += layer.queries / self.tensor * self.merged
        if checkpointing == "off" and layer.delta_net and training.load.samples > 1:
            # The states after a prompt, with which each answer begins.
            answers = self.loss_rows / training.load.answer / self.rows
            of_row += 2 * layer.delta_net.state * answers / self.tensor
        return of_row * self.rows * self.element

    def alive(self) -> dict[str, Parts]:
        """Return what is alive at the peak of each phase."""
        phases = {"annotate": _largest(self._forward(keeps=False))}
        if self.trains:
            phases["forward"] = _largest(self._forward(keeps=True))
            phases["backward"] = _largest(self._backward())
            phases["optimizer"] = {
                PARAMETERS: self.parameters,
                OPTIMIZER: self.optimizer + self._restored(),
                GRADIENTS: self.sharded_gradient,
            }
        return phases

    def _restored(self) -> float:
        """Return the bytes of stored state that is restored for a step at the same time."""
        model = self.model
        policy = self.training.policy
        if policy.optimizer == "muon":  # A whole matrix and its products.
            widest = max(max(layer.feed_forward, layer.expert) for layer in model.layers)
            return 3.0 * WIDE * model.hidden * widest
        of_element = {"device": 0, "offload": 2 * WIDE, "8bit": 5 * WIDE}[policy.optimizer_state]
        at_once = max(RESTORED_AT_ONCE, model.vocabulary * model.hidden) / self.tensor
        return min(at_once, self.trained) / self.shards * of_element

    def _forward(self, *, keeps: bool) -> list[Parts]:
        """Return what is alive at three moments: the embedding, the last layer, the head."""
        checkpointing = self.training.checkpointing
        hidden = self.model.hidden * self.rows * self.element
        base = {PARAMETERS: self.parameters, OPTIMIZER: self.optimizer}
        kept = 0.0
        if keeps:
            base[GRADIENTS] = self.gradient
            for layer, num in self.model.layers.items():
                kept += num * self.kept(layer, checkpointing)
        in_layer = max(self._in_layer(layer, keeps=keeps) for layer in self.model.layers)
        in_loss = self.model.hidden * self.loss_rows * self.element * bool(self.head)
        ahead = self._ahead()
        return [
            # The root is gathered to a flat tensor, and copied to its parameters.
            {**base, GATHERED: 2 * self.root_bytes + ahead, ACTIVATIONS: hidden},
            {
                **base,
                GATHERED: self.root_bytes + ahead,
                ACTIVATIONS: 2 * hidden + kept + in_layer,
            },
            {
                **base,
                GATHERED: self.root_bytes + ahead - self.layer_bytes,
                ACTIVATIONS: hidden * (1 + keeps) + kept + in_loss,
                LOGITS: (2 if self.head else 1) * self.chunk,
            },
        ]

    def _ahead(self) -> float:
        """Return the bytes of gathered layers: one computes, and the next one is gathered."""
        if self.training.policy.reshard_after_forward:
            return 2 * self.layer_bytes
        return sum(num * self.of_layer[layer] for layer, num in self.model.layers.items())

    def _in_layer(self, layer: Layer, *, keeps: bool) -> float:
        """Return the bytes that a layer needs in forward beyond what it keeps."""
        rows = self.rows * self.element
        merged = self._merged(layer)
        senders = self.tensor if self.training.parallel.experts > 1 else 1
        of_experts = layer.experts_of_token * rows / senders
        # What experts return, masked, and in the order of tokens.
        needed = merged + 2 * self.model.hidden * of_experts
        if merged and layer.experts:
            needed += 2 * (self.model.hidden + 2 * layer.expert) * of_experts
        if layer.delta_net:
            net = layer.delta_net
            of_row: float = 2 * net.mixed + 5 * net.heads * net.key_dim + 5 * net.values
            of_row += net.heads * CHUNK + net.state / CHUNK
            needed += of_row * rows / self.tensor
        if keeps and self.training.checkpointing != "full":
            needed -= 0.5 * (needed - merged)  # Some of it is what it keeps.
        return needed

    def _merged(self, layer: Layer) -> float:
        """Return the bytes of the largest matrix while its adapter is added to it."""
        largest = 0.0
        for m in layer.matrices:
            if m.rank or m.packed:
                over = self.experts_over if m.experts else self.tensor
                copies = 2 if m.packed else 1  # It is dequantised, too.
                largest = max(largest, m.numel / over * self.element * copies)
        return largest

    def _backward(self) -> list[Parts]:
        """Return what is alive at three moments: the head, a layer, the embedding."""
        model = self.model
        checkpointing = self.training.checkpointing
        base = {PARAMETERS: self.parameters, OPTIMIZER: self.optimizer, GRADIENTS: self.gradient}
        hidden = model.hidden * self.rows * self.element
        in_loss = model.hidden * self.loss_rows * self.element * bool(self.head)
        kept = 0.0
        in_layer = 0.0
        of_weights = 0.0
        for layer, num in model.layers.items():
            of_layer = self.kept(layer, checkpointing)
            kept += num * of_layer
            # All that it keeps without checkpointing, and gradients of the widest product.
            needed = self.kept(layer, "off") - of_layer
            width = model.hidden + layer.feed_forward / self.tensor
            needed += width * self.rows * self.element * (not layer.experts)
            if layer.delta_net:
                needed += 12 * layer.delta_net.values / self.tensor * self.rows * self.element
            in_layer = max(in_layer, needed + self._merged(layer))
            trained = sum(self._trained(m) for m in layer.matrices)
            of_weights = max(of_weights, trained)
        in_bulk = not (self.keeps_whole and self.gradient)  # Float32 gradients to be reduced.
        root = self.root_bytes
        gathered = root + self._ahead()
        return [
            {
                **base,
                GATHERED: gathered - self.layer_bytes,
                ACTIVATIONS: hidden + kept + 2 * in_loss,
                LOGITS: (1.5 if self.head else 2) * self.chunk + self.head_trained * WIDE,
            },
            {
                **base,
                GATHERED: gathered,
                ACTIVATIONS: hidden + kept + in_layer,
                LOGITS: self.head_trained * self.element,
                GRADIENTS: self.gradient + of_weights * (self.element + WIDE * in_bulk) / 2,
            },
            # The embedding's gradient is dense. All of the root is cast and reduced at once.
            {
                **base,
                LOGITS: self.head_trained * self.element,
                GRADIENTS: max(self.gradient, self.sharded_gradient)
                + self.root_trained * (self.element + WIDE),
            },
        ]

    def _trained(self, m: Matrix) -> float:
        """Return how many trained elements of a matrix and its adapter a rank gathers."""
        over = self.experts_over if m.experts else self.tensor
        return (m.numel * m.trained + m.adapter) / over

    # ----------------------------------------------------------------------------------------------
    # time

    def flops(self) -> float:
        """Return the operations of forward and backward that a model of this size needs.

        Frozen matrices have no gradients, so that they are two products of three.
        """
        products = 2 if self.model.is_adapted else 3
        head = 3 if self.head_trained else 2
        return (
            products * self._layer_flops()
            + head * self._head_flops()
            + 3.5 * self._attention_flops()
            + 3 * self._rule_flops()
        )

    def _layer_flops(self) -> float:
        """Return the operations of the layers' matrix products, forward."""
        return 2 * self.rows * self.model.active_in_layers / self.tensor

    def _head_flops(self) -> float:
        return 2 * self.loss_rows * self.head

    def _attention_flops(self) -> float:
        """Return the operations of attention, forward: 4 for each pair and feature."""
        load = self.training.load
        num_answers = self.loss_rows / load.answer
        # Each answer's tokens see the prompt, and those before them.
        pairs = num_answers * (load.answer * load.prompt + load.answer**2 / 2)
        pairs += num_answers / load.samples * load.prompt**2 / 2
        queries = sum(num * layer.queries for layer, num in self.model.layers.items())
        return 4 * pairs * queries / self.tensor

    def _rule_flops(self) -> float:
        """Return the operations of gated delta rules, forward."""
        return self.rows * rule_flops(self.model) / self.tensor

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each phase on the device."""
        training = self.training
        peak = training.card.tflops * 1e12
        attention = self._attention_flops() / peak
        forward_attention = attention / REACHED["attention forward"]
        logits = self.loss_rows * self.head / self.model.hidden
        head = self._computing(self._head_flops())
        between = self._between(0)
        layers = self._layers()
        # Copies of what is gathered, and casts of the rank's shard of it.
        gathering = 2 * self._all_gathered() + CAST_BYTES * self.trained / self.shards
        merging = self._merging()

        forward = layers + forward_attention + between + merging + head
        forward += self._moving(gathering + LOGIT_BYTES["forward"] * logits)
        seconds = {"annotate": forward}
        if not self.trains:
            return seconds
        seconds["forward"] = forward
        backward = layers * (1 if self.model.is_adapted else 2) + self._between(1) + merging
        backward += 2.5 * attention / REACHED["attention backward"]
        backward += (3 if self.head_trained else 2) * head
        backward += self._moving(gathering + LOGIT_BYTES["backward"] * logits)
        # Gradients are cast and added up; by FSDP's reduce-scatter, or whole.
        backward += self._moving(self.trained_gathered * (16 if self.keeps_whole else 6))
        backward += self._adapting()
        if training.checkpointing != "off":
            backward += between + merging
        if training.checkpointing == "full":
            backward += self._layers(again=True) + forward_attention
        seconds["backward"] = backward
        seconds["optimizer"] = self._stepping()
        return seconds

    def _layers(self, *, again: bool = False) -> float:
        """Return the seconds of the layers' matrix products, forward.

        Args:
            again: without the last product of each layer, which full checkpointing leaves out when
                it computes the others again: nothing needs its result but its adapter.
        """
        total = 0.0
        for layer, num in self.model.layers.items():
            active = layer.active
            if again and not self.model.is_adapted:
                active -= self.model.hidden * layer.feed_forward
            flops = 2 * self.rows * active / self.tensor
            # Every expert's weights are read, however few rows it has.
            total += num * max(self._computing(flops), self._moving(self.of_layer[layer]))
        return total

    def _between(self, direction: int) -> float:
        """Return the seconds of what lies between matrix products: 0: forward, 1: backward."""
        times = 1.0 if self.training.fused else UNFUSED[direction]
        moved = 0.0
        for layer, num in self.model.layers.items():
            parts = kept_elements(layer, self.model.hidden, "off", fused=self.training.fused)
            net = _kept_by_delta_net(layer.delta_net) if layer.delta_net else 0.0
            of_row = MOVED["hidden"][direction] * (parts["whole"] + parts["between"]) * times
            of_row += MOVED["split"][direction] * (parts["split"] - net) / self.tensor * times
            of_row += MOVED["delta net"][direction] * net / self.tensor
            of_queries = MERGED[direction] * self.merged + GATED[direction] * layer.gates_output
            of_row += of_queries * layer.queries / self.tensor
            of_experts = MOVED["experts"][direction] * parts["experts"] * layer.experts_of_token
            of_row += of_experts * (TRAVELLING if self.training.parallel.experts > 1 else 1)
            moved += num * of_row
        return self._moving(moved * self.rows * self.element)

    def _merging(self) -> float:
        """Return the seconds of adding each adapter to its matrix for a pass."""
        moved = 0.0
        for m, num in self.model.all_matrices():
            over = self.experts_over if m.experts else self.tensor
            of_weight = (2 * self.element if m.rank else 0) + (3.4 if m.packed else 0)
            moved += num * m.numel / over * of_weight
        return self._moving(moved)

    def _adapting(self) -> float:
        """Return the seconds of the gradients of A and B."""
        moved = 0.0
        for layer, num in self.model.layers.items():
            for m in layer.matrices:
                # Rows of experts are sorted for them, too.
                times = 2 * layer.experts_of_token if m.experts else 1 / self.tensor
                by_width = MOVED_BY_ADAPTER[0] * m.inputs + MOVED_BY_ADAPTER[1] * m.outputs
                moved += num * times * by_width * bool(m.rank)
        return self._moving(moved * self.rows * self.element)

    def _all_gathered(self) -> float:
        """Return the bytes of all that a pass gathers."""
        in_layers = sum(num * self.of_layer[layer] for layer, num in self.model.layers.items())
        return in_layers + self.root_bytes

    def _stepping(self) -> float:
        """Return the seconds of a step of the optimizer."""
        policy = self.training.policy
        shard = self.trained / self.shards
        if policy.cpu_offload:
            return ADAMW_BYTES * shard / (HOST_ADAMW_GB * 1e9)
        of_parameter = float(ADAMW_BYTES)
        if policy.optimizer_state == "8bit":
            of_parameter += QUANTIZE_BYTES
        seconds = self._moving(of_parameter * shard)
        if policy.optimizer_state == "offload":  # Two moments, there and back.
            seconds += 2 * 2 * WIDE * shard / (self.training.card.host_gb * 1e9)
        if policy.optimizer == "muon":  # Five iterations of three products of the smaller side.
            seconds += self._computing(15 * self.model.hidden * shard)
        return seconds

    def _computing(self, flops: float) -> float:
        return flops / (self.training.card.tflops * 1e12 * REACHED["matmul"])

    def _moving(self, num_bytes: float) -> float:
        return num_bytes / (self.training.card.bandwidth_gb * 1e9 * REACHED["memory"])

    # ----------------------------------------------------------------------------------------------
    # on the wire

    def wire(self) -> dict[str, float]:
        """Return the bytes that pass the link of the rank in each phase."""
        training = self.training
        num_micro = training.load.num_micro
        others = 1 - 1 / self.shards
        received = (self._all_gathered() - self.root_bytes) * others
        if training.parallel.experts > 1:  # FSDP has fewer shards of them.
            shards = training.world_size // (
                training.parallel.replicate * training.parallel.experts
            )
            of_experts = self._expert_weights() / self.experts_over * self.element
            received -= of_experts * (1 / shards - 1 / self.shards)
        # The root stays gathered until the backward of a step's last micro-batch.
        forward = received + self.root_bytes / num_micro * others
        between = self._between_ranks()
        wire = {"annotate": forward + between}
        if not self.trains:
            return wire
        wire["forward"] = forward + between
        again = received * training.policy.reshard_after_forward
        reduced = self.trained_gathered * WIDE * others / (num_micro if self.keeps_whole else 1)
        recomputed = 1.5 if training.checkpointing != "off" else 1.0
        wire["backward"] = again + reduced + self._over_replicas() + recomputed * between
        wire["optimizer"] = 0.0
        return wire

    def _over_replicas(self) -> float:
        """Return the bytes of summing up gradients over replicas: a micro-batch's share of it."""
        others = 1 - 1 / self.training.parallel.replicate
        return 2 * WIDE * self.trained / self.shards * others / self.training.load.num_micro

    def _between_ranks(self) -> float:
        """Return the bytes that the ranks of the same sequences send one another, forward."""
        parallel = self.training.parallel
        context = parallel.context
        of_row = 0.0
        for layer, num in self.model.layers.items():
            # A sum after attention and one after the MLP, each there and back.
            sent = 4 * self.model.hidden * (1 - 1 / self.tensor)
            sent += 2 * layer.keys / self.tensor * (context - 1)
            if layer.delta_net:
                net = layer.delta_net
                # Rows for heads, and back; queries, keys and values that one matrix makes.
                sent += (net.mixed + net.values) / self.tensor * (1 - 1 / context)
                sent += net.mixed * (1 - 1 / self.tensor)
            # Tokens travel to their experts and back.
            travel = 2 * layer.experts_of_token * self.model.hidden / self.tensor
            sent += travel * (1 - 1 / parallel.experts)
            of_row += num * sent
        return of_row * self.rows * self.element

    def wire_seconds(self, wire: dict[str, float]) -> dict[str, float]:
        """Return how long that takes where nothing else has to be waited for."""
        training = self.training
        card = training.card
        per_node = training.gpus_per_node
        of_replica = training.world_size // training.parallel.replicate
        speed = (
            1e9 * REACHED["wire"] * (card.link_gb if of_replica <= per_node else card.network_gb)
        )
        seconds = {name: size / speed for name, size in wire.items()}
        if "backward" in wire and training.world_size > per_node >= of_replica:
            over_replicas = self._over_replicas()
            of_network = over_replicas / (1e9 * REACHED["wire"] * card.network_gb)
            seconds["backward"] += of_network - over_replicas / speed
        if training.policy.cpu_offload:
            # Shards come from the host for each pass, and gradients go there.
            shard = self.model.parameters / self.tensor / self.shards
            for name in seconds:
                passes = 2 if name == "backward" else 1
                seconds[name] += passes * shard * WIDE / (card.host_gb * 1e9)
        return seconds


def rule_flops(model: ModelSizes) -> int:
    """Return the operations of all gated delta rules of a model for a row, forward."""
    total = 0
    for layer, num in model.layers.items():
        if layer.delta_net:
            net = layer.delta_net
            total += num * net.heads * delta_rule_flops(net.key_dim, net.value_dim)
    return total


def delta_rule_flops(key_dim: int, value_dim: int) -> int:
    """Return the operations of the gated delta rule for a row of a head, forward.

    They are those of kernels that go through sequences chunk by chunk (Yang et al. 2024, sec. 3.3),
    but for the inverse of a chunk's triangular system, which is 2 % of them.

    Args:
        key_dim: features of a key.
        value_dim: features of a value.
    """
    # Keys with keys, queries with keys, and what these products are multiplied with.
    in_chunk = CHUNK * (3 * key_dim + 2 * value_dim)
    # The state is read for keys, corrected, and read for queries.
    return 2 * (in_chunk + 3 * key_dim * value_dim)


def _largest(moments: list[Parts]) -> Parts:
    return max(moments, key=lambda parts: sum(parts.values()))
