"""The experts that vLLM's routers choose, by request (R3, arXiv 2510.11370).

On CUDA vLLM itself returns them (`enable_return_routed_experts`). Its CPU build refuses that:
cpu/routes.py records them there.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np

from minirl.base.errors import UserError
from minirl.batch.routes import narrow


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
        if not self.layers:
            raise UserError(
                "algo.router_replay replays the routers of a mixture of experts, and policy.model "
                "is none; set it to false"
            )
        config = self.runners[0].moe_config
        self.num_experts: int = config.num_logical_experts
        self.top_k: int = config.experts_per_token


class ReturnedRoutes:
    """Routes as vLLM returns them with its outputs."""

    def __init__(self, model: Any):
        """Take the engine's model, which has a mixture of experts."""
        self._mixtures = Routers(model)

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
        return narrow(experts[:, self._mixtures.layers], self._mixtures.num_experts)
