"""How long a model's training step takes on a rank, and what it sends, by closed formulas.

Numbers such as "10 elements a row and feature" are what the dry run of Qwen3 and Llama layers
moves.
"""

from minirl.plan.adapted import Adapters
from minirl.plan.cards import HOST_ADAMW_GB, REACHED, SHORTEST_KERNEL
from minirl.plan.kept import PerRow, PerStateRow
from minirl.plan.memory import GATED_INPUTS, WIDE, Job, Memory, gathered_trained

# What is read and written between matrix products, in forward, backward and when a layer is
# computed again.
MOVED = {
    ("liger", "forward"): PerRow(4, 6, 2, 2, 17, 17, 3, 11, 11),
    ("liger", "backward"): PerRow(8, 13, 7, 3, 9, 26, 5, 15, 33),
    ("liger", "again"): PerRow(4, 3, 2, 2, 17, 17, 3, 8, 11),
    ("torch", "forward"): PerRow(4, 38, 2, 18, 17, 17, 5, 11, 11),
    ("torch", "backward"): PerRow(8, 120, 7, 46, 9, 26, 23, 15, 33),
    ("torch", "again"): PerRow(4, 35, 2, 18, 17, 17, 5, 8, 11),
}
# The same in gated delta nets: what the dry run of Qwen3.5 and Qwen3-Next moves, on average.
MOVED_STATE = {
    "forward": PerStateRow(0, 12, 16.5, 45, 1.4, 2.5),
    "backward": PerStateRow(3, 18, 47, 126, 0, 4),
    "again": PerStateRow(0, 12, 16.5, 45, 1.4, 2.5),
}
# The keys' gradients are summed over the queries that share them.
MOVED_KEYS_BACKWARD = 5
# Backward's low-rank products, for the gradients of A and B, in multiples of the inputs and of the
# outputs of the linears: products of so few columns take as long as their rows take to be read and
# written.
MOVED_BY_ADAPTER: dict[str, tuple[float, float]] = {"linears": (2, 3), "experts": (4, 5)}
MERGE = 2  # Elements read and written for each weight that an adapter is added to.
DEQUANTISE = 3.4  # Bytes read and written for each weight in four bits, with its scales.
# Bytes read and written for each logit; `again` for those of all chunks but the last, `parts` where
# ranks hold parts of the vocabulary.
LOGITS: dict[str, float] = {"forward": 36, "parts": 8, "backward": 6, "again": 20}
HEAD_GRADIENT = 11  # Bytes read and written for each parameter of the head.
ADAMW = 36  # Bytes read and written for each parameter: it, its gradient, two moments.
QUANTIZE = 172  # The same of two moments to 8 bits and back.
KERNELS_OF_STEP = 22  # Of a step of the optimizer, for each layer.


class Work:
    """What a rank computes and sends."""

    def __init__(self, job: Job, memory: Memory):
        self.job = job
        self.memory = memory
        self.rows = memory.rows
        self.kernels = "liger" if job.liger else "torch"
        of_row = job.shape.vocabulary / memory.tensor * WIDE
        num_chunks = -(-self.rows.in_loss * of_row // max(1.0, memory.chunk()))
        # Share of the logits that backward computes again.
        self.logits_again = 1 - 1 / max(1.0, num_chunks)

    def flops(self) -> float:
        """Return the work of forward and backward that a model of this size needs.

        Frozen matrices have no gradients, so that they are two products of three. They are merged
        with their adapters for each of the two; gradients of A and B take four low-rank products.
        """
        layers = 3 - (self.job.shape.adapters is not None)
        head = 3 - self.job.shape.frozen.head
        return (
            layers * self._layers_flops()
            + head * self._head_flops()
            + 2 * self._merge_flops()
            + 2 * self._adapter_flops()
            + 3.5 * self._attention_flops()
            + 3 * self._rule_flops()
        )

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each phase on the device."""
        forward = self._layers() + self._between("forward") + self._attention(4, "forward")
        forward += self._merging() + self._dequantising()
        forward += self._gathering(of_root=True)
        head = self._head()
        logits = self.rows.in_loss * self.memory.head / self.job.shape.hidden
        moved = LOGITS["forward"]
        if self.memory.tensor > 1:
            moved += LOGITS["parts"]
        forward += head + self._moving(moved * logits)
        seconds = {"annotate": forward}
        if not self.memory.trains:
            return seconds

        backward = self._layers_backward() + self._between("backward")
        backward += self._attention(10, "backward")
        backward += self._adapting() + self._merging_backward() + self._dequantising()
        if self.job.checkpointing != "off":
            backward += self._between("again") + self._merging() + self._dequantising()
        if self.job.checkpointing == "full":
            backward += self._layers() * self._share_again() + self._attention(4, "forward")
        of_head = 1 if self.memory.head_gradient == 0 else 2  # Products: of the logits' gradient.
        backward += (of_head + self.logits_again) * head
        moved = LOGITS["backward"] + LOGITS["again"] * self.logits_again
        backward += self._moving(moved * logits + HEAD_GRADIENT * self.memory.head_gradient)
        if self.job.policy.reshard_after_forward:
            backward += self._gathering(of_root=False)
        backward += self._reducing()
        shard = self.memory.trained / self.memory.shards
        seconds["forward"] = forward
        seconds["backward"] = backward
        seconds["optimizer"] = self._stepping(shard)
        return seconds

    def _stepping(self, shard: float) -> float:
        """Return the seconds of a step of the optimizer, with so many parameters on a rank."""
        policy = self.job.policy
        if policy.cpu_offload:
            return ADAMW * shard / (HOST_ADAMW_GB * 1e9)
        seconds = self._moving(ADAMW * shard)
        seconds += KERNELS_OF_STEP * self.job.shape.num_layers * SHORTEST_KERNEL
        if policy.optimizer_state == "8bit":
            seconds += self._moving(QUANTIZE * shard)
        if policy.optimizer_state == "offload":
            seconds += 2 * 2 * WIDE * shard / (self.job.card.host_gb * 1e9)
        if policy.optimizer == "muon":
            # Five iterations of three products of the smaller side.
            seconds += self._computing(15 * self.job.shape.hidden * shard)
        return seconds

    # ----------------------------------------------------------------------------------------------
    # on the device

    def _layers_flops(self) -> float:
        """Return the work of the layers' matrix products, forward."""
        shape = self.job.shape
        return 2 * self.rows.all * shape.active_in_layers / self.memory.tensor

    def _rule_flops(self) -> float:
        """Return the work of gated delta rules, forward, which grows with rows alone."""
        return self.rows.all * self.job.shape.rule_flops / self.memory.tensor

    def _head_flops(self) -> float:
        return 2 * self.rows.in_loss * self.memory.head

    def _attention_flops(self) -> float:
        """Return the work of attention, forward."""
        load = self.job.load
        answer = load.answer
        # Each answer's tokens see the prompt, and those before them.
        num_answers = self.rows.in_loss * self.job.parallel.context / answer
        pairs = num_answers * (answer * load.prompt + answer**2 / 2)
        pairs += num_answers / load.samples * load.prompt**2 / 2
        pairs /= self.job.parallel.context
        shape = self.job.shape
        return 4 * pairs * shape.queries / self.memory.tensor * shape.attention_layers

    def _layers(self) -> float:
        """Return the seconds of the layers' matrix products, forward."""
        memory = self.memory
        weights = (memory.in_layers - memory.experts * self.job.shape.num_layers) * memory.element
        flops = self._layers_flops() - self._experts_flops()
        return max(self._computing(flops), self._moving(weights)) + self._experts()

    def _experts_flops(self) -> float:
        """Return the work of the experts' matrix products, forward."""
        shape = self.job.shape
        weights = 3 * shape.hidden * shape.expert * shape.experts_of_token
        return 2 * self.rows.all * weights / self.memory.tensor * shape.num_layers

    def _experts(self) -> float:
        """Return the seconds of the experts' matrix products, forward."""
        memory = self.memory
        # Every expert's weights are read, however few rows it has.
        moved = memory.experts * memory.element + memory.of_experts(2, 3)
        moved *= self.job.shape.num_layers
        return max(self._computing(self._experts_flops()), self._moving(moved))

    def _layers_backward(self) -> float:
        """Return the seconds of the layers' matrix products, backward."""
        if self.job.shape.adapters is None:
            return 2 * self._layers()
        return self._layers() * (1 - self._without_gradient())

    def _without_gradient(self) -> float:
        """Return the share of the layers whose inputs have no gradient, as nothing before learns.

        They are the first products of the first layer.
        """
        shape = self.job.shape
        if shape.root_trained_parameters:
            return 0.0
        outputs = shape.queries + 2 * shape.keys
        if shape.delta_nets:
            outputs = shape.delta_nets.mixed + shape.delta_nets.values
        return shape.hidden * outputs / shape.active_in_layers

    def _share_again(self) -> float:
        """Return the share of a layer's products that full checkpointing computes again."""
        shape = self.job.shape
        if shape.adapters and shape.adapters.reads(GATED_INPUTS):
            return 1.0  # What the last product keeps is kept after it.
        # It stops before the last product, whose result nothing needs.
        last = shape.hidden * shape.feed_forward * shape.num_layers
        return 1 - last / shape.active_in_layers

    def _adapter_flops(self) -> float:
        """Return the work of two low-rank products for each adapter, of all rows."""
        shape = self.job.shape
        adapters = shape.adapters
        if adapters is None:
            return 0.0
        of_row = self._of_adapted_row(adapters, {"linears": (1, 1), "experts": (1, 1)})
        return 2 * adapters.rank * of_row * self.rows.all * shape.num_layers

    def _of_adapted_row(self, adapters: Adapters, times: dict[str, tuple[float, float]]) -> float:
        """Return the sum of so many times the inputs and outputs of a layer's adapted matrices."""
        total = 0.0
        for kind, num in (("linears", 1), ("experts", self.job.shape.experts_of_token)):
            widths = adapters.widths(self.memory.tensor, of_experts=kind == "experts")
            total += num * (times[kind][0] * widths[0] + times[kind][1] * widths[1])
        return total

    def _merge_flops(self) -> float:
        """Return the work of merging each weight with its adapter once."""
        shape = self.job.shape
        if shape.adapters is None:
            return 0.0
        return 2 * shape.adapters.rank * self.memory.layer_adapted * shape.num_layers

    def _adapting(self) -> float:
        """Return the seconds of the gradients of A and B."""
        shape = self.job.shape
        adapters = shape.adapters
        if adapters is None:
            return 0.0
        of_row = self._of_adapted_row(adapters, MOVED_BY_ADAPTER)
        # A and B are read for them, and their gradients are written.
        of_layer = of_row * self.rows.all + 2 * self.memory.layer_trained
        return self._moving(of_layer * self.memory.element * shape.num_layers)

    def _merging_backward(self) -> float:
        """Return the seconds of merging again, for the gradients of inputs."""
        return self._merging() * (1 - self._without_gradient())

    def _merging(self) -> float:
        """Return the seconds of merging each weight with its adapter once, for a pass."""
        memory = self.memory
        of_layer = MERGE * memory.layer_adapted + memory.layer_trained
        num_layers = self.job.shape.num_layers
        seconds = self._moving(of_layer * memory.element * num_layers)
        return seconds if self.job.shape.adapters else 0.0

    def _dequantising(self) -> float:
        """Return the seconds of dequantising each matrix once, for a pass."""
        adapters = self.job.shape.adapters
        return self._moving(DEQUANTISE * adapters.packed) if adapters else 0.0

    def _head(self) -> float:
        return self._computing(self._head_flops())

    def _attention(self, factor: int, direction: str) -> float:
        reached = REACHED[f"attention {direction}"]
        return self._attention_flops() * factor / 4 / (self.job.card.tflops * 1e12 * reached)

    def _between(self, direction: str) -> float:
        """Return the seconds of what lies between matrix products."""
        shape = self.job.shape
        of_row = self.memory.row_bytes.of_layers(
            MOVED[self.kernels, direction], MOVED_STATE[direction]
        )
        if direction == "backward":
            keys = MOVED_KEYS_BACKWARD * shape.keys / self.memory.tensor
            of_row += keys * self.memory.element * shape.attention_layers
        return self._moving(of_row * self.rows.all)

    def _gathering(self, *, of_root: bool) -> float:
        """Return the seconds of casting shards, and of copying parameters out of a gathering."""
        shape = self.job.shape
        memory = self.memory
        whole = memory.in_layers
        if of_root:
            whole = shape.parameters / memory.tensor
        if shape.adapters is None:
            return self._moving(whole * 4 + whole / memory.shards * 10)
        # The base is not cast.
        of_base = memory.gathered_bytes(of_root=of_root)
        of_adapters = memory.layer_trained * shape.num_layers
        return self._moving(2 * of_base + (2 * of_base + 6 * of_adapters) / memory.shards)

    def _reducing(self) -> float:
        """Return the seconds of a micro-batch's share of adding up gradients."""
        num_micro = self.job.load.num_micro
        whole = self.memory.trained
        bytes_of_step = 6 * num_micro + 12 * (num_micro - 1) / self.memory.shards
        if self.memory.keeps_whole and num_micro > 1:
            bytes_of_step = 6.0 + 10.0 * (num_micro - 1) + 8.0
        return self._moving(whole * bytes_of_step / num_micro)

    def _computing(self, flops: float) -> float:
        return flops / (self.job.card.tflops * 1e12 * REACHED["matmul"])

    def _moving(self, num_bytes: float) -> float:
        return num_bytes / (self.job.card.bandwidth_gb * 1e9 * REACHED["memory"])

    # ----------------------------------------------------------------------------------------------
    # on the wire

    def wire(self) -> dict[str, float]:
        """Return the bytes that pass this rank's link in each phase."""
        gathers, between = self._wire_of_forward()
        wire = {"annotate": gathers + between}
        if not self.memory.trains:
            return wire
        wire["forward"] = gathers + between
        wire["backward"] = sum(self._wire_of_backward(gathers, between))
        wire["optimizer"] = 0.0
        return wire

    def wire_seconds(self, wire: dict[str, float]) -> dict[str, float]:
        """Return how long that takes where nothing else has to be waited for."""
        nodes = self.job.world_size > self.job.gpus_per_node
        speed = self.job.card.network_gb if nodes else self.job.card.link_gb
        seconds = {name: size / (speed * 1e9 * REACHED["wire"]) for name, size in wire.items()}
        if self.job.policy.cpu_offload:
            # Shards come from the host for each pass, and gradients go there.
            shard = self.job.shape.parameters / self.memory.tensor / self.memory.shards
            passing = shard * WIDE / (self.job.card.host_gb * 1e9)
            for name in seconds:
                seconds[name] += passing * (2 if name == "backward" else 1)
        return seconds

    def _wire_of_forward(self) -> tuple[float, float]:
        """Return the bytes of gathering parameters, and those between ranks of one sequence."""
        shape = self.job.shape
        memory = self.memory
        # The root stays gathered until the backward of a step's last micro-batch.
        root = memory.root * memory.element * (1 - 1 / self.job.load.num_micro)
        gathered = memory.gathered_bytes(of_root=True) - root
        gathers = self._from_others(gathered, memory.layer_expert_bytes)
        hidden = shape.hidden * self.rows.all * memory.element
        # A sum after attention and one after the feed-forward, each there and back.
        between = 4 * hidden * (1 - 1 / memory.tensor) * shape.num_layers
        context = self.job.parallel.context
        keys = 2 * shape.keys / memory.tensor * self.rows.all * memory.element
        between += keys * (context - 1) * shape.attention_layers
        between += self._between_delta_nets()
        between += self._traveling()
        return gathers, between

    def _between_delta_nets(self) -> float:
        """Return the bytes of features that gated delta nets send, in a forward pass."""
        nets = self.job.shape.delta_nets
        if nets is None:
            return 0.0
        memory = self.memory
        context = self.job.parallel.context
        # Ranks of a context exchange their rows for heads, and back.
        features = (nets.mixed + nets.values) / memory.tensor * (1 - 1 / context)
        if nets.gathers_mixed:
            features += nets.mixed * (1 - 1 / memory.tensor)
        return features * self.rows.all * memory.element * nets.num_layers

    def _from_others(self, num_bytes: float, of_experts: float) -> float:
        """Return how many bytes of gathered parameters come from other ranks, experts among them.

        Args:
            num_bytes: of all that is gathered.
            of_experts: those of them that are of a layer's experts.
        """
        memory = self.memory
        own = 1 / memory.shards
        if not memory.elsewhere:
            return num_bytes * (1 - own)
        experts = of_experts * self.job.shape.num_layers
        of_group = self.job.world_size // self.job.parallel.replicate
        own_experts = self.job.parallel.experts / of_group
        return (num_bytes - experts) * (1 - own) + experts * (1 - own_experts)

    def _traveling(self) -> float:
        """Return the bytes of tokens that travel to experts and back, in a forward pass."""
        num_ranks = self.job.parallel.experts
        if num_ranks == 1:
            return 0.0
        shape = self.job.shape
        of_row = 2 * shape.experts_of_token * shape.hidden * self.memory.element
        rows = self.rows.all / self.memory.tensor
        return of_row * rows * (1 - 1 / num_ranks) * shape.num_layers

    def _wire_of_backward(self, gathers: float, between: float) -> tuple[float, float]:
        memory = self.memory
        job = self.job
        again = 0.0
        if job.policy.reshard_after_forward:
            gathered = memory.gathered_bytes(of_root=False)
            again = self._from_others(gathered, memory.layer_expert_bytes)
        times = 1 / job.load.num_micro if memory.keeps_whole else 1.0
        whole = gathered_trained(job.shape, job.parallel)
        reduced = self._from_others(whole * WIDE, memory.experts_trained * WIDE) * times
        replicate = job.parallel.replicate
        shard = memory.trained / memory.shards
        over_replicas = 2 * shard * WIDE * (1 - 1 / replicate) / job.load.num_micro
        if job.checkpointing != "off":
            between = 1.5 * between + 0.5 * self._traveling()  # which is done again as a whole
        return again + reduced + over_replicas, between
