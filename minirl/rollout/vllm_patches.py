"""What is changed in vLLM, and why: each patch is a function.

vLLM is imported late, after the engine has set its environment.
"""

import contextlib
import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from minirl.errors import UserError
from minirl.parallel.mesh import Mesh


@contextlib.contextmanager
def keep_process_state() -> Iterator[None]:
    """Undo what starting vLLM changes in this process.

    It seeds the global generators, and its CPU build sets one thread and disables
    `torch.set_num_threads`. It also would set the precision of float32 products, by a function that
    does nothing meanwhile: which precision it was cannot be read by the same function if the user
    has set it by another.
    """
    with contextlib.ExitStack() as after, torch.random.fork_rng(devices=()):
        after.callback(random.setstate, random.getstate())
        after.callback(np.random.set_state, np.random.get_state())
        after.callback(setattr, torch, "set_num_threads", torch.set_num_threads)
        after.callback(torch.set_num_threads, torch.get_num_threads())
        set_precision = torch.set_float32_matmul_precision
        after.callback(setattr, torch, "set_float32_matmul_precision", set_precision)
        torch.set_float32_matmul_precision = lambda precision: None
        yield


def patch_transformers_base() -> None:
    """Keep vLLM from decorating transformers' classes for its compiler.

    It serves some families (smollm3) by those classes. The trainer's models are of the same
    classes, and once they are decorated they demand a vLLM config.
    """
    from vllm.model_executor.models.transformers.base import Base

    Base._decorate_cls_for_torch_compile = lambda self, *args, **kwargs: None


def patch_cpu(mesh: Mesh) -> None:
    """Make the CPU build fit for refits and for several jobs on one host. Collective."""
    _patch_cpu_linear()
    _patch_cpu_experts()
    _patch_shared_memory(mesh)

    from vllm.model_executor.models import registry
    from vllm.platforms import current_platform

    # To look at a model's class, vLLM starts another Python on every rank, so that no import begins
    # CUDA in this one. There is none here, and those imports take ten seconds.
    registry._run_in_subprocess = lambda inspect: inspect()
    # Otherwise the first generation waits for a C++ compiler.
    type(current_platform).simple_compile_backend = "eager"
    # vLLM looks for kernels in the `__dict__` of everything loaded; of llvmlite's library that
    # would be a function.
    if ffi := sys.modules.get("llvmlite.binding.ffi"):
        ffi.lib._fntab["__dict__"] = {}


def _patch_cpu_linear() -> None:
    """Keep linear layers' weights plain parameters.

    The CPU build repacks every matrix for its kernels after loading, so that a later write to the
    parameter changes nothing (silently, for tied embeddings). Plain `linear` costs about a third
    more per decoded token on a 60M model.
    """
    import vllm.model_executor.layers.utils as layers

    def use_plain_linear(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = linear

    layers.dispatch_cpu_unquantized_gemm = use_plain_linear


def _patch_shared_memory(mesh: Mesh) -> None:
    """Make the CPU build's shared memory private to this job, and leave none behind.

    Under torchrun the segment's name is the same for all jobs of a host, so that a second job, or
    one after a kill, fails.
    """
    from vllm.distributed.device_communicators import cpu_communicator

    shared_memory = cpu_communicator._CPUSHMDistributed
    job = mesh.gather(f"{os.getpid()}-{time.time_ns()}")[0]

    def make_group_name(communicator: Any) -> str:
        ranks = "-".join(map(str, communicator.ranks))
        return f"minirl-{job}-{communicator.unique_name}-{ranks}".replace(":", "_")

    init_shared_memory = shared_memory._init_cpu_shm

    def init_and_unlink(self: Any) -> int:
        handle = init_shared_memory(self)
        # All ranks have mapped it (there is a barrier inside), so that nothing is left behind
        # however the job ends.
        Path(f"/dev/shm/{self.group_name}_{self.communicator.rank}").unlink(missing_ok=True)
        return handle

    shared_memory.make_group_name = staticmethod(make_group_name)
    shared_memory._init_cpu_shm = init_and_unlink


def _patch_cpu_experts() -> None:
    """Keep fused experts' weights plain parameters, as `_patch_cpu_linear` does for matrices."""
    try:
        from vllm.model_executor.layers.fused_moe.experts import cpu_moe
    except ImportError:  # vLLM 0.26
        from vllm.model_executor.layers.fused_moe.cpu_fused_moe import CPUFusedMOE

        def refuse(*_: object) -> None:
            raise UserError(
                "the CPU engine of vLLM 0.26 keeps expert weights where a refit cannot write them; "
                "use vLLM 0.32"
            )

        CPUFusedMOE.__init__ = refuse
        return
    experts = cpu_moe.CPUUnquantizedExperts
    experts.process_weights_after_loading = lambda self, layer: None
    experts._padded_intermediate_size = classmethod(
        lambda cls, config: config.intermediate_size_per_partition
    )
    experts.is_supported_config = staticmethod(lambda *args, **kwargs: (True, None))
    experts.apply = _apply_plain_experts


def _apply_plain_experts(
    self: Any,
    *,
    output: Tensor,
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    **_: object,
) -> None:
    """Write the experts' output, by the weights as they were loaded.

    Args:
        self: vLLM's experts.
        output: [T, H], written.
        hidden_states: [T, H].
        w1: [E, 2I, H], gate and up.
        w2: [E, H, I], down.
        topk_weights: [T, k].
        topk_ids: [T, k].
    """
    total = torch.zeros_like(hidden_states, dtype=torch.float32)
    for expert in topk_ids.unique().tolist():
        rows, slot = (topk_ids == expert).nonzero(as_tuple=True)
        gate, up = linear(hidden_states[rows], w1[expert]).chunk(2, dim=-1)
        down = linear(silu(gate) * up, w2[expert])
        total.index_add_(0, rows, down.float() * topk_weights[rows, slot, None].float())
    output.copy_(total)
