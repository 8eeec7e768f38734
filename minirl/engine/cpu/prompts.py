"""The rows of a prompt that several requests have in common are computed once, in the CPU build.

All answers to a prompt begin in the same step of the engine, and each brings the prompt's rows, but
for whole blocks that are in the cache. These rows are equal in every layer. So the layers get one
copy of them, and attention gets all: it writes each request's keys and values to its own blocks.
"""

import itertools
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from minirl.engine.cpu import packed


class DistinctRows(NamedTuple):
    """Which rows of a step are computed."""

    kept: Tensor  # int64 [K], of the step's T rows.
    place: Tensor  # int64 [T]: which of the kept rows equals each row of the step.


class SharedPrompts:
    """Computes equal rows of prompts once, for one model of the engine."""

    def __init__(self, model: Any, block_size: int):
        """Stand between the model and its attention, if attention is all that connects its rows.

        Args:
            model: the engine's model.
            block_size: tokens of a block of the KV cache.
        """
        from vllm.model_executor.layers.attention.attention import Attention
        from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

        self.block_size = block_size
        self.rows: DistinctRows | None = None  # Of the step that is being computed.
        layers = [module for module in model.modules() if isinstance(module, AttentionLayerBase)]
        # Latent attention, delta nets; and vLLM 0.26 keeps that of transformers' classes elsewhere.
        if not layers or any(type(layer) is not Attention for layer in layers):
            return
        self.forward = model.forward
        model.forward = self.forward_kept
        for layer in layers:
            layer.forward = self._attention(layer.forward)

    def forward_kept(self, input_ids: Tensor | None, positions: Tensor, **others: Any) -> Any:
        """Compute the model's last hidden states [T, H] from one copy of equal rows."""
        rows = None
        if input_ids is not None and positions.ndim == 1:
            rows = self.find(input_ids)
        if input_ids is None or rows is None:
            return self.forward(input_ids=input_ids, positions=positions, **others)
        self.rows = rows
        try:
            with packed.plain_products():  # A packed copy would round other sums for fewer rows.
                hidden = self.forward(
                    input_ids=input_ids[rows.kept], positions=positions[rows.kept], **others
                )
        finally:
            self.rows = None
        return hidden[rows.place]

    def find(self, input_ids: Tensor) -> DistinctRows | None:
        """Return the rows to compute of the step that vLLM is about to compute; None: all.

        Args:
            input_ids: int [T], the tokens of the step's rows.
        """
        from vllm.forward_context import get_forward_context

        batches = get_forward_context().attn_metadata
        if not isinstance(batches, dict):  # a trial run, before there is a cache
            return None
        batch = next(iter(batches.values()))
        is_one = all(other is batch for other in batches.values())
        if not is_one or batch.max_query_len == 1 or len(input_ids) != batch.num_actual_tokens:
            return None
        return distinct_rows(
            input_ids.numpy(),
            batch.query_start_loc.tolist(),
            batch.seq_lens.tolist(),
            batch.block_table.numpy(),
            self.block_size,
        )

    def _attention(self, forward: Any) -> Any:
        """Return a layer's attention, of all rows of the step, as a function of the kept ones."""

        def attend(query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Tensor:
            rows = self.rows
            if rows is None:
                return forward(query, key, value, *args, **options)
            whole = (query[rows.place], key[rows.place], value[rows.place])
            return forward(*whole, *args, **options)[rows.kept]

        return attend


def distinct_rows(
    tokens: np.ndarray, starts: list[int], ends: list[int], blocks: np.ndarray, block_size: int
) -> DistinctRows | None:
    """Return which rows of a step to compute, None if no two requests have equal rows.

    Requests have equal rows if these have the same tokens and follow the same cached blocks.

    Args:
        tokens: int [T].
        starts: where the rows of each request begin; and T.
        ends: tokens of each request's sequence, with these rows.
        blocks: int [requests, blocks], where its keys are in the cache.
        block_size: tokens of a block.
    """
    first: dict[tuple[bytes, bytes], int] = {}  # Begin of the kept rows.
    kept = []
    place = []
    num_kept = 0
    for request, (begin, stop) in enumerate(itertools.pairwise(starts)):
        num_rows = stop - begin
        num_blocks = -(-(ends[request] - num_rows) // block_size)
        key = blocks[request, :num_blocks].tobytes(), tokens[begin:stop].tobytes()
        if key not in first:
            first[key] = num_kept
            kept.append(np.arange(begin, stop))
            num_kept += num_rows
        place.append(np.arange(first[key], first[key] + num_rows))
    if num_kept == len(tokens):
        return None
    return DistinctRows(
        torch.from_numpy(np.concatenate(kept)), torch.from_numpy(np.concatenate(place))
    )
