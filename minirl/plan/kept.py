"""How many elements layers keep and hold for each row, and how many rows there are.

Those of layers with attention are what the dry run of Qwen3 and Llama layers counts, those of gated
delta nets what it counts of Qwen3.5.
"""

from typing import NamedTuple

from minirl.config.policy import ParallelConfig
from minirl.plan.delta_nets import DeltaNets
from minirl.plan.load import Load
from minirl.plan.shape import Shape
from minirl.types.blocks import CHUNK


class PerRow(NamedTuple):
    """Elements for each row of a layer, in multiples of its widths."""

    hidden: float  # Of the hidden size.
    between: float  # Of the hidden size, between blocks: sequence parallelism splits them.
    heads: float  # Of the widths of queries and keys.
    head_norms: float  # Of the same, where queries and keys are normed.
    merged: float  # Of the queries' width, in rows that see a prompt which others see, too.
    output_gate: float  # Of the queries' width, where attention has a gate behind it.
    gate: float  # Of the width of the gated product.
    expert_hidden: float  # Of the hidden size, for each expert of a token.
    expert: float  # Of the width of an expert, for each of a token.

    def without_attention(self) -> "PerRow":
        """Return those of a layer that has no attention, but for what it reads and returns."""
        return self._replace(heads=0, head_norms=0, merged=0, output_gate=0)


# What a layer keeps from forward to backward, by activation checkpointing; without any, by kernels.
KEPT = {
    "liger": PerRow(2, 2, 2, 1, 0, 2, 3, 2, 4),
    "torch": PerRow(2, 6, 2, 3, 0, 2, 4, 2, 4),
    "selective": PerRow(2, 1, 2, 0, 1, 1, 2, 1, 2),
    "full": PerRow(0, 1, 0, 0, 0, 0, 0, 0, 0),
}


class PerStateRow(NamedTuple):
    """Elements for each row of a gated delta net, in multiples of its widths.

    They are those of the kernels of flash-linear-attention and causal-conv1d.
    """

    hidden: float  # Of the hidden size, beyond those of `PerRow`.
    mixed: float  # Of queries, keys and values as they are convolved.
    keys: float  # Of the keys of all heads of values.
    values: float  # Of the width of values.
    in_chunk: float  # Of the rows of a chunk, for each head.
    states: float  # Of the states of a chunk, over its rows.
    initial: float = 0.0  # Of the states that an answer begins with, over its rows.


# What a gated delta net keeps. Its gated norm is torch's: float32 copies of output and gate.
EVERY_STATE = PerStateRow(0, 1, 2, 10, 1.1, 0, 2)
KEPT_STATE = {
    "liger": EVERY_STATE,
    "torch": EVERY_STATE,
    "selective": PerStateRow(0, 1, 0, 1, 0, 0),
    "full": PerStateRow(0, 0, 0, 0, 0, 0),
}
# What it holds while the kernels of the rule compute, and what it adds to what it has kept in the
# backward of its gated norm.
IN_FORWARD = PerStateRow(0, 2, 5, 5, 1, 1, 4)
IN_BACKWARD = PerStateRow(5, 0, 0, 12, 0, 0)


class Rows:
    """How many rows a micro-batch has on a rank.

    Attributes:
        all: T.
        in_loss: N.
        merged: share of T whose attention is merged of two blocks of keys: rows that see a prompt
            which others see, too.
        behind_prompt: answers for each of T that begin with the state behind such a prompt.
    """

    def __init__(self, load: Load, context: int):
        num_rows = load.rows(load.num_answers)
        num_in_loss = load.num_answers * load.answer
        self.all = num_rows / context
        self.in_loss = num_in_loss / context
        self.merged = num_in_loss / num_rows if load.samples > 1 else 0.0
        self.behind_prompt = load.num_answers / num_rows if load.samples > 1 else 0.0
        if context > 1:  # What other ranks hold is merged, too.
            self.merged = 1.5


class RowBytes:
    """Bytes of what layers keep, hold or move for each row on a rank."""

    def __init__(
        self, shape: Shape, rows: Rows, *, element: int, parallel: ParallelConfig, senders: int
    ):
        """Know the sizes.

        Args:
            shape: of the model.
            rows: of a micro-batch.
            element: bytes of an element.
            parallel: axes of the mesh.
            senders: how many ranks share the rows of experts.
        """
        self.shape = shape
        self.rows = rows
        self.element = element
        self.parallel = parallel
        self.senders = senders

    def of_layers(self, kept: PerRow, kept_state: PerStateRow) -> float:
        """Return bytes for each row of all layers: those with attention, and gated delta nets."""
        shape = self.shape
        of_attention = self.of_layer(kept)
        if shape.delta_nets is None:
            return shape.num_layers * of_attention
        of_delta_net = self.of_layer(kept.without_attention())
        of_delta_net += self.of_delta_net(shape.delta_nets, kept_state)
        num_delta_nets = shape.delta_nets.num_layers
        return shape.attention_layers * of_attention + num_delta_nets * of_delta_net

    def of_delta_net(self, nets: DeltaNets, kept: PerStateRow) -> float:
        """Return bytes for each row of a gated delta net."""
        split = (
            kept.mixed * nets.mixed
            + kept.keys * nets.keys
            + kept.values * nets.values
            + kept.in_chunk * nets.heads * CHUNK
            + kept.states * nets.states / CHUNK
            + kept.initial * nets.states * self.rows.behind_prompt
        )
        return self.element * (kept.hidden * self.shape.hidden + split / self.parallel.tensor)

    def of_layer(self, kept: PerRow) -> float:
        """Return bytes for each row of a layer with attention."""
        shape = self.shape
        heads = shape.queries + shape.keys
        between = self.parallel.tensor if self.parallel.sequence else 1
        split = (
            kept.heads * heads
            + kept.head_norms * heads * shape.head_norms
            + kept.merged * shape.queries * self.rows.merged
            + kept.output_gate * shape.queries * shape.output_gate
            + kept.gate * shape.feed_forward
        )
        for_experts = kept.expert_hidden * shape.hidden + kept.expert * shape.expert
        return self.element * (
            kept.hidden * shape.hidden
            + kept.between * shape.hidden / between
            + split / self.parallel.tensor
            + for_experts * shape.experts_of_token / self.senders
        )
