"""What a training step of a model costs a rank: bytes of memory, seconds, bytes on the wire.

Everything is counted from sizes. Rows are the tokens of a micro-batch on a rank, and an element has
2 bytes in bfloat16. `benchmarks/dryrun` counts the same by running minirl's own code on a pretended
GPU; `tests/test_costs.py` holds both together.

Time is a roofline: operations over a stated share of the card's peak, and bytes over a stated share
of its bandwidth.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from minirl.config.policy import CHUNK_BYTES, WHOLE_GRADIENT_BYTES, ParallelConfig, PolicyConfig
from minirl.plan.cards import REACHED, Card
from minirl.plan.sizes import PACKED_BYTES, Layer, Matrix, ModelSizes

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
OF_BACKWARD = (GRADIENTS, GATHERED, ACTIVATIONS, LOGITS)  # These end with it.

# Elements that kernels between matrix products read and write in forward and in backward, for each
# one that a layer keeps without checkpointing. Modules of the library work operator by operator;
# rows of experts are sorted, masked and summed up; a delta net has many small kernels.
MOVED = {
    "layer": (2.7, 3.4),
    "modules": (4.0, 10.2),
    "experts": (6.4, 10.6),
    "delta net": (6.4, 14.7),
}
LOGIT_BYTES = (4, 6)  # Read and written for each logit, in forward and in backward.
CAST_BYTES = 10  # Read and written for each weight of a shard, for a pass: float32 to its dtype.
# Read and written for each input and output of a matrix with an adapter, by the gradients of A and
# B: products of so few columns take as long as their rows take to be read and written.
ADAPTED = (2, 3)
ADAMW_BYTES = 36  # For each parameter: it, its gradient and two moments.
QUANTIZE_BYTES = 172  # For each parameter: two moments to 8 bits and back.
HOST_ADAMW_GB = 10.0  # GB/s that a rank's cores move in AdamW on the host.
RESTORED_AT_ONCE = 2**28  # Elements of stored state that are restored for a step at once.

Parts = dict[str, float]  # Bytes by what they are for.
# What is minimised. frozen: nothing; the model computes log-probs.
LossName = Literal["policy", "value", "sft", "reward", "dpo", "kto", "frozen"]


@dataclass(kw_only=True)
class Load:
    """What a rank trains on in an optimizer step.

    With context parallelism, it is what the ranks of a context share.
    """

    tokens: int  # Rows of a micro-batch, at most.
    num_micro: int = 2  # Micro-batches.
    sequence: int = 1024  # Tokens of a sequence, prompt and answer.
    prompt: int = 256  # Of these, tokens that are not in the loss.
    samples: int = 8  # Answers to a prompt, which share its rows.
    whole_groups: bool = False  # And are never in two micro-batches: pairs.

    @property
    def answer(self) -> int:
        """Return the tokens of a sequence that are in the loss."""
        return self.sequence - self.prompt

    @property
    def num_answers(self) -> int:
        """Return how many answers a micro-batch holds; one at least."""
        groups, rest = divmod(self.tokens, self.rows(self.samples))
        if self.whole_groups:
            return max(1, groups) * self.samples
        more = max(0, rest - self.rows(0)) // self.answer
        return max(1, groups * self.samples + more)

    def rows(self, num_answers: int) -> int:
        """Return the rows of so many answers: theirs, and those of prompts but their last."""
        num_prompts = max(1, -(-num_answers // self.samples))
        return num_answers * self.answer + num_prompts * (self.prompt - 1)


@dataclass(kw_only=True)
class Training:
    """A model, and how it is trained: what a rank holds, computes and sends in a step.

    Seconds and bytes on the wire are by phase: of a micro-batch in forward, backward and annotate,
    of a step in optimizer.
    """

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

    def __post_init__(self) -> None:
        """Count rows, what lasts, and what FSDP gathers."""
        model = self.model
        policy = self.policy
        load = self.load
        self.element = BYTES[policy.dtype]
        self.tensor = self.parallel.tensor
        self.shards = max(1, self.world_size // (self.parallel.replicate * self.tensor))
        self.experts_over = max(self.tensor, self.parallel.experts)  # Ranks that divide experts.
        self.trains = self.loss != "frozen"
        has_head = self.loss not in ("value", "reward")

        # Rows of a micro-batch on a rank, those in the loss, and pairs of tokens in attention: each
        # answer's tokens see the prompt, and those before them.
        self.rows = load.rows(load.num_answers) / self.parallel.context
        self.loss_rows = load.num_answers * load.answer / self.parallel.context
        pairs = load.answer * load.prompt + load.answer**2 / 2 + load.prompt**2 / 2 / load.samples
        self.pairs = self.loss_rows / load.answer * pairs

        # What lasts. A column-split matrix has the whole A of its adapter, a row-split one the B.
        master = max(WIDE, self.element) if self.trains else self.element
        self.trained = (model.trained - model.adapters / 2) / self.tensor + model.adapters / 2
        frozen = 0.0
        for m, num in model.matrices:
            of_weight: float = self.element if model.adapters else master
            of_weight = PACKED_BYTES if m.packed else of_weight
            frozen += num * m.numel * of_weight * (not m.trained) / self.tensor
        on_device = not policy.cpu_offload
        self.frozen = 0.0 if self.shares_base else frozen / self.shards
        self.sharded_gradient = self.trained * master / self.shards * on_device
        self.parameters = self.sharded_gradient + self.frozen * on_device
        # In a refit the base of adapters sleeps, which reads copies of it.
        self.sleeping_base = self.frozen * on_device * (model.adapters > 0)
        # Of AdamW: two moments. Of Muon: one of the layers' matrices.
        state = {"device": 2.0 * master, "8bit": 2.0 + 2.0 * master / 256, "offload": 0.0}
        of_state = state[policy.optimizer_state]
        if policy.optimizer == "muon":
            of_root = sum(m.numel for m in model.root if m.trained) / max(1, model.trained)
            of_state *= 0.5 + 0.5 * of_root
        of_state += master * (policy.ema_decay > 0)
        self.optimizer = of_state * self.trained / self.shards * on_device * self.trains

        # What FSDP gathers: of the largest layer, and of the root.
        self.of_layer = {layer: self._gathered(layer.matrices) for layer in model.layers}
        self.layer_bytes = max(self.of_layer.values())
        self.root_bytes = self._gathered(model.root)
        in_layers = sum(num * self.of_layer[layer] for layer, num in model.layers.items())
        self.all_gathered = self.root_bytes + in_layers
        self.head = model.vocabulary * model.hidden / self.tensor * has_head
        self.head_trained = self.head * model.root[-1].trained
        self.trained_gathered = self.trained
        if not model.adapters:
            self.trained_gathered += model.in_experts * (1 / self.experts_over - 1 / self.tensor)
        whole_fits = WIDE * self.trained_gathered <= WHOLE_GRADIENT_BYTES
        self.keeps_whole = {"whole": True, "sharded": False, "auto": whole_fits}[policy.accumulate]
        whole = self.trained_gathered * master
        gradient = whole if self.keeps_whole else self.sharded_gradient
        # A micro-batch's share of summing up gradients over replicas.
        others = 1 - 1 / self.parallel.replicate
        self.over_replicas = 2 * WIDE * self.trained / self.shards * others / load.num_micro
        self.gradient = gradient if load.num_micro > 1 else 0.0  # Between micro-batches.

    def _over(self, m: Matrix) -> int:
        """Return how many ranks divide a matrix, but for FSDP."""
        return self.experts_over if m.experts else self.tensor

    def _gathered(self, matrices: Iterable[Matrix]) -> float:
        """Return the bytes of matrices and their adapters once they are gathered on a rank."""
        total = 0.0
        for m in matrices:
            of_weight = PACKED_BYTES if m.packed else self.element
            total += (m.numel * of_weight + m.adapter * self.element) / self._over(m)
        return total

    # ----------------------------------------------------------------------------------------------
    # memory

    def kept(self, layer: Layer, checkpointing: str) -> dict[str, float]:
        """Return how many elements a layer keeps for each row from forward to backward.

        Args:
            layer: its widths.
            checkpointing: off, selective (results of matrix products and of attention) or full.

        Returns:
            By what makes them, as `MOVED`.
        """
        hidden = self.model.hidden
        between = hidden / (self.tensor if self.parallel.sequence else 1)
        if checkpointing == "full":
            return {"layer": between}  # The input.
        heads = layer.queries + layer.keys
        net = layer.delta_net
        of_experts = layer.experts_of_token / (self.tensor if self.parallel.experts > 1 else 1)
        if checkpointing == "selective":
            # Queries, keys and values; what attention returns; gate and up.
            split: float = 2 * heads + 2 * layer.feed_forward
            split += net.mixed + net.values if net else 0
            # The input, and what attention and the MLP return; the same of each expert's rows.
            whole = between + 2 * hidden
            of_experts *= hidden + 2 * layer.expert
            return {"layer": whole + split / self.tensor, "experts": of_experts}
        # Norms, gates and rotary positions that are one kernel each keep their input alone. Modules
        # of the library keep float32 copies: of two bfloat16 each.
        wide = 0 if self.fused else 2
        # Queries and keys before and after their norms, values, what attention returns; gate, up
        # and their product.
        split = (3 + wide) * heads + (3 + wide / 2) * layer.feed_forward
        of_net = 0.0
        if net:  # As flash-linear-attention computes it.
            # What is convolved; keys and queries of each head of values; values, their gate and the
            # gated norm's float32 copies; the inverse of a chunk's triangular system.
            of_net = net.mixed + 2 * net.heads * net.key_dim + 10 * net.values + net.heads * CHUNK
        # The inputs of two norms and their outputs.
        whole = (2 + 2 * wide) * between + 2 * hidden
        # Rows there and back; both products, masked.
        of_experts *= 2 * hidden + 4 * layer.expert
        kind = "layer" if self.fused else "modules"
        of_layer = whole + split / self.tensor
        return {kind: of_layer, "experts": of_experts, "delta net": of_net / self.tensor}

    def _inside(self, layer: Layer) -> tuple[float, float]:
        """Return the bytes alive inside a layer in forward and in backward, but for what it keeps.

        In both its largest matrix is among them, while its adapter is added to it.
        """
        off = self.kept(layer, "off")
        merged = 0.0
        for m in layer.matrices:
            copies = 2 if m.packed else m.rank > 0  # If packed, it is restored, too.
            merged = max(merged, copies * m.numel / self._over(m) * self.element)
        # What experts return, masked, and in the order of tokens; what a delta net makes.
        made = 2 * self.model.hidden * layer.experts_of_token / self.experts_over
        made += 1.5 * off["delta net"]
        # All that it keeps without checkpointing, and gradients of the widest product.
        again = sum(off.values()) + 0.5 * off["delta net"]
        again -= sum(self.kept(layer, self.checkpointing).values())
        if not layer.experts:
            again += self.model.hidden + layer.feed_forward / self.tensor
        rows = self.rows * self.element
        return made * rows + merged, again * rows + merged

    def _restored(self) -> float:
        """Return the bytes that the optimizer makes: stored state, or Muon's products."""
        model = self.model
        if self.policy.optimizer == "muon":
            widest = max(max(layer.feed_forward, layer.expert) for layer in model.layers)
            return 3.0 * WIDE * model.hidden * widest
        stored = {"device": 0, "offload": 2 * WIDE, "8bit": 5 * WIDE}[self.policy.optimizer_state]
        at_once = max(RESTORED_AT_ONCE, model.vocabulary * model.hidden) / self.tensor
        return min(at_once, self.trained) / self.shards * stored

    @cached_property
    def alive(self) -> dict[str, Parts]:
        """Return what is alive at the peak of each phase: in a layer, in the head, or after both.

        That is gathered parameters, activations, logits and gradients.
        """
        model = self.model
        element = self.element
        rows = self.rows * element
        kept = 0.0
        trained = 0.0  # Elements of a gathered layer that have gradients, at most.
        in_forward = 0.0
        in_backward = 0.0
        for layer, num in model.layers.items():
            kept += num * sum(self.kept(layer, self.checkpointing).values()) * rows
            forward, backward = self._inside(layer)
            in_forward = max(in_forward, forward)
            in_backward = max(in_backward, backward)
            here = sum((m.numel * m.trained + m.adapter) / self._over(m) for m in layer.matrices)
            trained = max(trained, here)
        chunk = model.hidden * self.rows * WIDE  # Of a score head: its wide hidden states.
        if self.head:  # A chunk of logits.
            of_row = model.vocabulary / self.tensor * WIDE
            chunk = min(max(16, CHUNK_BYTES["cuda"] // of_row), self.loss_rows) * of_row
        hidden = model.hidden * rows
        in_loss = model.hidden * self.loss_rows * element * (self.head > 0)
        # One layer computes, and the next one is gathered.
        gathered = self.root_bytes + 2 * self.layer_bytes
        if not self.policy.reshard_after_forward:
            gathered = self.all_gathered
        rest = gathered - self.layer_bytes
        state = {PARAMETERS: self.parameters, OPTIMIZER: self.optimizer}

        def peak(*moments: tuple[float, float, float, float]) -> Parts:
            names = (GATHERED, ACTIVATIONS, LOGITS, GRADIENTS)
            return state | dict(zip(names, max(moments, key=sum), strict=True))

        held = 2 * hidden
        in_layer = (gathered, held + in_forward, 0.0, 0.0)
        phases = {"annotate": peak(in_layer, (rest, held + in_loss, chunk, 0.0))}
        if not self.trains:
            return phases
        gradient = self.gradient
        of_head = self.head_trained
        held += kept
        in_layer = (gathered, held + in_forward, 0.0, gradient)
        phases["forward"] = peak(in_layer, (rest, held + in_loss, chunk, gradient))
        held -= hidden
        # Gradients to be reduced are float32. That of the embedding is dense.
        wide = 0 if self.keeps_whole and gradient else WIDE
        root = sum(m.numel for m in model.root if m.trained) / self.tensor
        of_layer = gradient + trained * (element + wide) / 2
        of_root = max(gradient, self.sharded_gradient) + root * (element + WIDE)
        phases["backward"] = peak(
            (rest, held + 2 * in_loss, 1.5 * chunk + of_head * WIDE, gradient),
            (gathered, held + in_backward, of_head * element, of_layer),
            (0.0, 0.0, of_head * element, of_root),
        )
        phases["optimizer"] = state | {GRADIENTS: self.sharded_gradient}
        phases["optimizer"][OPTIMIZER] += self._restored()
        return phases

    def on_host(self, *, sleeps: bool) -> float:
        """Return the bytes that live in the host's memory, or sleep there while an engine works."""
        policy = self.policy
        shard = self.trained / self.shards
        state = {"device": 8, "8bit": 2, "offload": 8}[policy.optimizer_state]
        if not self.trains:
            return self.element * shard
        if policy.cpu_offload:
            return self.frozen + (4 + 4 + state) * shard  # Gradients, too.
        if sleeps:
            return self.frozen + (4 + state) * shard
        return state * shard * (policy.optimizer_state == "offload")

    # ----------------------------------------------------------------------------------------------
    # time

    @cached_property
    def head_seconds(self) -> dict[str, float]:
        """Return what the head takes of the seconds of a forward or backward pass."""
        product = self.card.computing(2 * self.loss_rows * self.head)
        logits = self.loss_rows * self.head / self.model.hidden
        in_forward, in_backward = (self.card.moving(size * logits) for size in LOGIT_BYTES)
        num_products = 3 if self.head_trained else 2  # Logits are computed again.
        forward = product + in_forward
        backward = num_products * product + in_backward
        return {"annotate": forward, "forward": forward, "backward": backward}

    def _between(self, index: int, *, again: bool = False) -> float:
        """Return the bytes that kernels between matrix products move.

        Args:
            index: of `MOVED`: 0: in forward; 1: in backward.
            again: in the forward of checkpointing, within backward.
        """
        total = 0.0
        for layer, num in self.model.layers.items():
            for kind, of_row in self.kept(layer, "off").items():
                # A second forward leaves out the masks around products whose results are kept.
                is_kept = again and kind == "experts" and self.checkpointing == "selective"
                total += num * of_row * MOVED[kind][index] * (0.5 if is_kept else 1.0)
        return total * self.rows * self.element

    def _optimizer_seconds(self) -> float:
        """Return the seconds of an optimizer's step."""
        card = self.card
        policy = self.policy
        shard = self.trained / self.shards
        of_parameter = ADAMW_BYTES + QUANTIZE_BYTES * (policy.optimizer_state == "8bit")
        step = card.moving(of_parameter * shard)
        if policy.cpu_offload:
            step = ADAMW_BYTES * shard / (HOST_ADAMW_GB * 1e9)
        elif policy.optimizer_state == "offload":  # Two moments, there and back.
            step += card.to_host(2 * 2 * WIDE * shard)
        if policy.optimizer == "muon":  # Five iterations of three products of the smaller side.
            step += card.computing(15 * self.model.hidden * shard)
        return step

    @cached_property
    def seconds(self) -> dict[str, float]:
        """Return the seconds of each phase on the device."""
        card = self.card
        products = 0.0  # Seconds of the matrix products of layers, in forward.
        # Bytes that a pass moves, however few its rows are: copies and casts of what is gathered,
        # and merged adapters.
        passed = 2 * self.all_gathered + CAST_BYTES * self.trained / self.shards
        adapting = 0.0  # Elements that the gradients of A and B of adapters move, for each row.
        for layer, num in self.model.layers.items():
            # Every expert's weights are read, however few rows it has.
            computing = card.computing(2 * self.rows * layer.active / self.tensor)
            products += num * max(computing, card.moving(self.of_layer[layer]))
            for m in layer.matrices:
                of_weight = 2 * self.element * (m.rank > 0) + 3.4 * m.packed
                passed += num * m.numel / self._over(m) * of_weight
                # Rows of experts are sorted for them, too.
                times = 2 * layer.experts_of_token if m.experts else 1 / self.tensor
                of_row = ADAPTED[0] * m.inputs + ADAPTED[1] * m.outputs
                adapting += num * times * of_row * (m.rank > 0)
        attention = 4 * self.pairs * self.model.queries / self.tensor / (card.tflops * 1e12)
        forward_attention = attention / REACHED["attention forward"]
        forward = products + forward_attention + card.moving(self._between(0) + passed)
        forward += self.head_seconds["forward"]
        if not self.trains:
            return {"annotate": forward}

        backward = products * (1 if self.model.adapters else 2)
        backward += 2.5 * attention / REACHED["attention backward"]
        backward += self.head_seconds["backward"]
        # Gradients are cast and added up; by FSDP's reduce-scatter, or whole.
        moved = self.trained_gathered * (16 if self.keeps_whole else 6)
        moved += self._between(1) + adapting * self.rows * self.element + passed
        if self.checkpointing != "off":
            moved += self._between(0, again=True)
        if self.checkpointing == "full":
            backward += products + forward_attention
        backward += card.moving(moved)
        step = self._optimizer_seconds()
        return {"annotate": forward, "forward": forward, "backward": backward, "optimizer": step}

    # ----------------------------------------------------------------------------------------------
    # on the wire

    @cached_property
    def sent(self) -> dict[str, "Sent"]:
        """Return the bytes that pass the link of the rank in each phase, by whom they go to."""
        parallel = self.parallel
        num_micro = self.load.num_micro
        others = 1 - 1 / self.shards
        received = (self.all_gathered - self.root_bytes) * others
        if parallel.experts > 1:  # FSDP has fewer shards of them.
            shards = self.world_size // (parallel.replicate * parallel.experts)
            of_experts = self.model.in_experts / self.experts_over * self.element
            received -= of_experts * (1 / shards - 1 / self.shards)
        # What the ranks of the same sequences send one another, forward.
        of_row = 0.0
        for layer, num in self.model.layers.items():
            # A sum after attention and one after the MLP, each there and back.
            sent = 4 * self.model.hidden * (1 - 1 / self.tensor)
            sent += 2 * layer.keys / self.tensor * (parallel.context - 1)
            if layer.delta_net:
                net = layer.delta_net
                # Rows for heads, and back; queries, keys and values that one matrix makes.
                sent += (net.mixed + net.values) / self.tensor * (1 - 1 / parallel.context)
                sent += net.mixed * (1 - 1 / self.tensor)
            # Tokens travel to their experts and back.
            travel = 2 * layer.experts_of_token * self.model.hidden / self.tensor
            of_row += num * (sent + travel * (1 - 1 / parallel.experts))
        between = of_row * self.rows * self.element
        # The root stays gathered until the backward of a step's last micro-batch.
        forward = Sent(received + self.root_bytes / num_micro * others, between)
        if not self.trains:
            return {"annotate": forward}
        reduced = self.trained_gathered * WIDE * others / (num_micro if self.keeps_whole else 1)
        again = 1.5 if self.checkpointing != "off" else 1.0
        backward = Sent(
            received * self.policy.reshard_after_forward + reduced,
            again * between,
            self.over_replicas,
        )
        return {"annotate": forward, "forward": forward, "backward": backward, "optimizer": Sent()}

    @cached_property
    def wire_seconds(self) -> dict[str, float]:
        """Return how long that takes where nothing else has to be waited for."""
        card = self.card
        parallel = self.parallel
        per_node = self.gpus_per_node
        # Ranks of a tensor, then of a context, are neighbours, as those are that divide experts.
        of_sequence = max(self.tensor * parallel.context, parallel.experts)
        shards_in_node = min(self.shards, max(1, per_node // self.tensor))
        seconds = {}
        for name, sent in self.sent.items():
            seconds[name] = card.gathering(sent.to_shards, self.shards, shards_in_node)
            seconds[name] += card.sending(sent.to_sequence, across=of_sequence > per_node)
            seconds[name] += card.sending(sent.to_replicas, across=self.world_size > per_node)
        if self.policy.cpu_offload:
            # Shards come from the host for each pass, and gradients go there.
            shard = self.model.parameters / self.tensor / self.shards
            for name in seconds:
                seconds[name] += card.to_host(WIDE * shard * (2 if name == "backward" else 1))
        return seconds


class Sent(NamedTuple):
    """Bytes that pass the link of a rank, by whom they come from and go to."""

    to_shards: float = 0.0  # Ranks among which FSDP divides weights.
    to_sequence: float = 0.0  # Ranks that share sequences: of a tensor, a context, experts.
    to_replicas: float = 0.0


def forward_flops(model: ModelSizes, rows: float, loss_rows: float, pairs: float) -> float:
    """Return the operations of a forward pass: 2 a weight and row, 4 a pair and feature of queries.

    Args:
        model: its sizes.
        rows: tokens.
        loss_rows: those of them for which the head computes logits.
        pairs: queries and the keys that each of them sees.
    """
    products = 2 * (model.active_in_layers * rows + model.hidden * model.vocabulary * loss_rows)
    rules = 0
    for layer, num in model.layers.items():
        net = layer.delta_net
        rules += num * net.heads * delta_rule_flops(net.key_dim, net.value_dim) if net else 0
    return products + 4 * pairs * model.queries + rules * rows


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
