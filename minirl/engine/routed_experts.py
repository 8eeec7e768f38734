"""The experts that vLLM's routers choose, by request (R3, arXiv 2510.11370).

On CUDA vLLM itself returns them (`enable_return_routed_experts`). Its CPU build refuses that, and
`SlotRoutes` records them there.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minirl.base.errors import require


def narrow(experts: np.ndarray, num_experts: int) -> np.ndarray:
    """Return numbers of experts in the smallest dtype that holds those of all `num_experts`."""
    return experts.astype(np.uint8 if num_experts <= 256 else np.int16)


class Routers:
    """The mixtures of experts of vLLM's model, in the order of layers."""

    def __init__(self, model: Any):
        """Find them.

        Args:
            model: the engine's model.

        Raises:
            UserError: the model has no mixture of experts.
        """
        from vllm.model_executor.layers.fused_moe.layer import MoERunner

        runners = [module for module in model.modules() if isinstance(module, MoERunner)]
        self.runners = sorted(runners, key=lambda runner: runner.layer_id)
        self.layers = [runner.layer_id for runner in self.runners]
        require(
            self.layers,
            "algo.router_replay replays the routers of a mixture of experts, and policy.model is "
            "none; set it to false",
        )
        config = self.runners[0].moe_config
        self.num_experts: int = config.num_logical_experts
        self.top_k: int = config.experts_per_token


class ReturnedRoutes(Routers):
    """Routes as vLLM returns them with its outputs."""

    def add(self, request_id: str, internal_id: str) -> None:
        """Note a request that was added."""

    def of_finished(self, output: Any) -> np.ndarray | None:
        """Return the routes of a request with its last output; None if there are none."""
        return self._of_mixtures(output.outputs[0].routed_experts)

    def of_unfinished(self, state: Any) -> np.ndarray | None:
        """Return the routes so far of a request in vLLM's output processor."""
        chunks = state.routed_experts_chunks
        return self._of_mixtures(np.concatenate(chunks) if chunks else None)

    def end(self, request_ids: Iterable[str]) -> None:
        """Forget requests."""

    def _of_mixtures(self, experts: np.ndarray | None) -> np.ndarray | None:
        """Return the mixtures' part of [R, layers, k]."""
        if experts is None:
            return None
        return narrow(experts[:, self.layers], self.num_experts)


class SlotRoutes(Routers):
    """Routes by slots of the KV cache, in the CPU build.

    Each router's choice is written where the key of the token goes. So tokens that requests share
    by the prefix cache, that a preempted request computes again, or that are prefilled in parts
    have their routes in the slots of the request like all others.
    """

    def __init__(self, llm: Any, model: Any):
        """Record the choice of every router from now on.

        Args:
            llm: the instance of `vllm.LLM`.
            model: its model.

        Raises:
            UserError: the model has no mixture of experts, or not the attention that routes need.
        """
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        super().__init__(model)
        engine = llm.llm_engine
        self._runner = engine.model_executor.driver_worker.worker.model_runner
        self._scheduler = engine.engine_core.engine_core.scheduler
        cache = self._runner.kv_cache_config
        specs = [group.kv_cache_spec for group in cache.kv_cache_groups]
        # Blocks that a sliding window has left are freed while the request runs.
        whole = [i for i, spec in enumerate(specs) if isinstance(spec, FullAttentionSpec)]
        require(
            whole,
            "algo.router_replay: no layer of policy.model sees the whole sequence, and the CPU "
            "engine keeps routes with the keys of such layers; set it to false, or use a GPU",
        )
        self._group = whole[0]
        self._block_size = specs[self._group].block_size
        shape = (cache.num_blocks, self._block_size, len(self.layers), self.top_k)
        self._slots = torch.zeros(shape, dtype=torch.int16)
        self._internal_ids: dict[str, str] = {}
        for number, runner in enumerate(self.runners):
            runner.router.set_capture_fn(partial(self._write, number))
        self._execute = self._runner.execute_model
        self._runner.execute_model = self._execute_model

    def _execute_model(self, scheduled: Any, *others: Any, **options: Any) -> Any:
        """Copy what vLLM copies within its cache, and compute the step."""
        for copy in scheduled.kv_cache_block_copies or ():
            self._slots[copy.dst_block_id] = self._slots[copy.src_block_id]
        return self._execute(scheduled, *others, **options)

    def _write(self, number: int, experts: Tensor) -> None:
        """Keep the choice of a mixture's router, int [T, k], of the tokens of a step."""
        table = self._runner.input_batch.block_table[self._group]
        # vLLM's name of the device's copy. Where tables were made again, as for layers with a
        # state, it is not the host's.
        slots = table.slot_mapping.gpu[: len(experts)].long()
        is_token = slots >= 0  # The others fill the batch up.
        rows = self._slots.flatten(0, 1)
        rows[slots[is_token], number] = experts[is_token].to(torch.int16)

    def add(self, request_id: str, internal_id: str) -> None:
        """Note a request that was added."""
        self._internal_ids[request_id] = internal_id

    def of_finished(self, output: Any) -> np.ndarray | None:
        """Return the routes of a request with its last output, before the engine's next step."""
        request = self._runner.requests[self._internal_ids.pop(output.request_id)]
        num_tokens = request.num_prompt_tokens + len(request.output_token_ids) - 1
        return self._read(request.block_ids, num_tokens)

    def of_unfinished(self, state: Any) -> np.ndarray | None:
        """Return the routes so far of a request in vLLM's output processor."""
        request_id = self._internal_ids[state.external_req_id]
        # 0 of a request that waits, or was preempted and has lost its blocks.
        num_tokens = self._scheduler.requests[request_id].num_computed_tokens
        if not num_tokens:
            return None
        return self._read(self._scheduler.kv_cache_manager.get_block_ids(request_id), num_tokens)

    def end(self, request_ids: Iterable[str]) -> None:
        """Forget requests."""
        for request_id in request_ids:
            self._internal_ids.pop(request_id, None)

    def _read(self, block_ids: tuple[list[int], ...], num_tokens: int) -> np.ndarray:
        """Return the routes of the first tokens of a request with these blocks."""
        blocks = torch.tensor(block_ids[self._group])
        routes = self._slots[blocks].flatten(0, 1)[:num_tokens]
        assert len(routes) == num_tokens, (len(routes), num_tokens)
        return narrow(routes.numpy(), self.num_experts)
