"""The rollout engine: vLLM inside this process. The only file that imports vLLM.

Versions 0.26 (torch 2.11) and 0.32 (torch 2.13) run through the calls used here; where they differ,
the difference is here.
"""

import contextlib
import gc
import logging
import os
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from minirl.config.shared import EngineConfig
from minirl.data.images import rgb
from minirl.errors import UserError
from minirl.log import Timer
from minirl.parallel.fsdp import Sleeper
from minirl.parallel.mesh import Mesh

# Read when vLLM is imported or builds its engine. The engine core must live in this process, or its
# weights are out of reach.
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}


@dataclass(frozen=True, kw_only=True)
class Sampling:
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0


class RolloutEngine:
    """One vLLM engine in this rank, or one shared by `tensor_parallel_size` consecutive ranks.

    Its weights are random until the first refit (load_weights=False), so it reads no checkpoint
    unless it `reads_images`. Building one is collective over all ranks, because vLLM agrees on the
    size of the KV cache over the whole world. Raises UserError where vLLM refuses the model or the
    memory.
    """

    def __init__(
        self,
        cfg: EngineConfig,
        folder: Path,
        mesh: Mesh,
        *,
        dtype: str,
        load_weights: bool = False,
        reads_images: bool = False,
        timer: Timer | None = None,
    ):
        self.cfg, self.mesh, self.timer, self.reads_images = (
            cfg,
            mesh,
            timer or Timer(mesh.device),
            reads_images,
        )
        os.environ.update({k: os.environ.get(k, v) for k, v in _ENVIRONMENT.items()})
        self.on_cuda = mesh.device.type == "cuda"
        with _keep_random_state_and_threads(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of vLLM's imports, which no setting of ours can mend
            logging.getLogger("vllm").setLevel(logging.ERROR)
            import vllm

            # vLLM serves some families (smollm3) by transformers' own classes and decorates those
            # for its compiler; the trainer's
            # models are of the same classes, and would then demand a vLLM config.
            from vllm.model_executor.models.transformers.base import Base

            Base._decorate_cls_for_torch_compile = lambda self, *args, **kwargs: None
            if not self.on_cuda:
                _patch_cpu(mesh)
            try:
                self.llm = vllm.LLM(**self._arguments(folder, dtype, load_weights))
            except (ValueError, RuntimeError) as error:
                raise UserError(
                    f"the vLLM engine did not start with engine.* = {cfg} for {folder}: {error}"
                ) from error
        self.vllm, self.model = (
            vllm,
            self.llm.llm_engine.model_executor.driver_worker.worker.model_runner.get_model(),
        )
        self.tp_size = cfg.tensor_parallel_size
        self.num_replicas, self.replica = mesh.world_size // self.tp_size, mesh.rank // self.tp_size
        self.is_leader = mesh.rank % self.tp_size == 0
        self._asleep = False

    def _arguments(self, folder: Path, dtype: str, load_weights: bool) -> dict:
        cfg = self.cfg
        common = {
            "model": str(folder),
            "dtype": dtype,
            "load_format": "auto" if load_weights or self.reads_images else "dummy",
            "skip_tokenizer_init": not self.reads_images,
            "distributed_executor_backend": "external_launcher",
            "tensor_parallel_size": cfg.tensor_parallel_size,
            "max_model_len": cfg.max_model_len,
            "max_num_seqs": cfg.max_num_seqs,
            "seed": 0,
            "disable_log_stats": True,
            # Raw log-probs ignore the temperature; the ratio to the trainer's needs those of the
            # sampling distribution.
            "logprobs_mode": "processed_logprobs",
        }
        if (
            self.reads_images
        ):  # Its tower keeps how pixels are scaled in a buffer, which `dummy` fills with noise.
            common |= {
                "limit_mm_per_prompt": {"image": cfg.max_images, "video": 0},
                "skip_mm_profiling": not self.on_cuda,
                "mm_processor_cache_gb": 1.0,
            }
        if cfg.kv_cache_gb or not self.on_cuda:
            common["kv_cache_memory_bytes"] = int((cfg.kv_cache_gb or 1.0) * 2**30)
        if self.on_cuda:
            return common | {
                "enable_sleep_mode": cfg.sleep_level > 0,
                "gpu_memory_utilization": cfg.gpu_memory_utilization,
                "enforce_eager": cfg.enforce_eager,
                "disable_custom_all_reduce": True,
                "moe_backend": "triton",
            }  # others shuffle expert weights after loading, where a refit would not find them
        # A prompt prefilled in parts makes the CPU runner rewind the request's random generator,
        # which CPU generators cannot do.
        return common | {
            "enforce_eager": True,
            "enable_chunked_prefill": False,
            "async_scheduling": False,
            "block_size": 32,
            "max_num_batched_tokens": max(8192, cfg.max_model_len),
        }

    # ------------------------------------------------------------------------------------------------
    # weights

    def load_weights(self, named: Iterator[tuple[str, Tensor]]) -> None:
        """vLLM's own loader for this model: checkpoint names and whole tensors in, fused and split
        parameters out.
        """
        with (
            torch.no_grad(),
            self.vllm.config.set_current_vllm_config(self.llm.llm_engine.vllm_config),
        ):
            self.model.load_weights(named)

    def parameters(self) -> dict[str, Tensor]:
        return {name: p.data for name, p in self.model.named_parameters()}

    def padding(self) -> dict[str, int]:
        """Elements of vocabulary parameters that no checkpoint fills: rows added to make the
        vocabulary divisible.
        """
        found = [
            (name, m, m.shard_indices)
            for name, m in self.model.named_modules()
            if hasattr(m, "shard_indices")
        ]
        return {
            f"{name}.weight": (rows.num_elements_padded - rows.num_org_elements) * m.embedding_dim
            for name, m, rows in found
        }

    @contextlib.contextmanager
    def awake(self, refit: Callable[[], None], sleeper: Sleeper) -> Iterator[None]:
        """Inside, the engine has the policy's weights and may generate. `sleeper`: of the policy.

        The order keeps the peak low on a device: the optimizer leaves before the engine's weights
        return, and the shards (needed by the refit) leave before the KV cache returns. Afterwards
        the shards are back; the optimizer's state returns when it steps. On CPU nothing moves:
        there is no other memory to move to.
        """
        with self.timer.phase("sleep_wake"):
            sleeper.sleep_optimizer()
            if self._asleep:
                self.llm.wake_up(["weights"])
        with self.timer.phase("refit"):
            refit()
        with self.timer.phase("sleep_wake"):
            sleeper.sleep_parameters()
            if self.on_cuda:
                # a rank that is still behind would run out of memory beside a neighbour's KV cache
                self.mesh.barrier()
            if self._asleep:
                self.llm.wake_up(["kv_cache"])
        self._asleep = False
        self.llm.reset_prefix_cache()  # cached keys and values are of the old weights
        if self.reads_images:
            self.llm.llm_engine.reset_encoder_cache()  # so is what the tower made of images
        yield
        with self.timer.phase("sleep_wake"):
            if self.on_cuda and self.cfg.sleep_level:
                self.llm.sleep(level=self.cfg.sleep_level)
                self._asleep = True
            sleeper.wake_parameters()

    # ------------------------------------------------------------------------------------------------
    # generation

    def add(
        self,
        request_id: str,
        prompt: list[int],
        sampling: Sampling,
        seed: int,
        images: Sequence[str] = (),
        stream: bool = False,
    ) -> None:
        """Queue one sample; of each of its `images`, data URLs, the prompt has one token. With
        tensor parallelism every rank of the engine must add the same requests in the same order.

        The seed must differ between samples: unseeded ones draw from the process's generator, which
        the trainer moves and which would differ between ranks of one engine. `stream`: `step` tells
        each token at once, which costs vLLM an object for it.
        """
        kinds = self.vllm.sampling_params.RequestOutputKind
        params = self.vllm.SamplingParams(
            **vars(sampling) | {"stop_token_ids": list(sampling.stop_token_ids)},
            seed=seed,
            logprobs=0,
            detokenize=False,
            output_kind=kinds.DELTA if stream else kinds.FINAL_ONLY,
        )
        shown = {"multi_modal_data": {"image": list(map(rgb, images))}} if images else {}
        self.llm.llm_engine.add_request(request_id, {"prompt_token_ids": prompt, **shown}, params)

    def abort(self, request_ids: list[str]) -> None:
        self.llm.llm_engine.abort_request(request_ids)

    def step(self) -> list[tuple[str, list[int], list[float], str | None]]:
        """One step of every running request. Of those that are streamed or have ended: id, tokens
        that are news, their log-probs under the distribution they were drawn from (temperature
        applied), and at the end `stop` (by a stop token, which is the last one) or `length`.
        """
        outputs = (
            self.llm.llm_engine.step() if self.llm.llm_engine.has_unfinished_requests() else ()
        )
        return [
            (
                output.request_id,
                list(s.token_ids),
                _logprobs(s.token_ids, s.logprobs),
                s.finish_reason,
            )
            for output in outputs
            for s in output.outputs
        ]

    def unfinished(self) -> list[tuple[str, list[int], list[float], None]]:
        """What there is of requests that have not ended and are not streamed, in the form of
        `step`.
        """
        states = self.llm.llm_engine.output_processor.request_states.values()
        found = [
            s
            for s in states
            if s.output_kind == self.vllm.sampling_params.RequestOutputKind.FINAL_ONLY
        ]
        return [
            (
                s.external_req_id,
                list(s.detokenizer.output_token_ids),
                _logprobs(s.detokenizer.output_token_ids, s.logprobs_processor.logprobs),
                None,
            )
            for s in found
        ]

    def tensor_parallel_broadcast(self, value: object) -> object:
        """The leader's value, on all ranks of this engine."""
        if self.tp_size == 1:
            return value
        values, group = [value], self.vllm.distributed.parallel_state.get_tp_group()
        dist.broadcast_object_list(values, src=group.ranks[0], group=group.cpu_group)
        return values[0]

    def close(self) -> None:
        """Release vLLM in the order that leaves torchrun an exit code of 0. Collective."""
        self.mesh.barrier()
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm, self.model
        gc.collect()
        self.vllm.distributed.destroy_model_parallel()


def _logprobs(tokens: list[int], entries: list[dict] | None) -> list[float]:
    return [entry[token].logprob for entry, token in zip(entries or (), tokens, strict=True)]


@contextlib.contextmanager
def _keep_random_state_and_threads() -> Iterator[None]:
    """vLLM seeds the global generators, and its CPU build sets one thread and disables
    `torch.set_num_threads`.
    """
    with contextlib.ExitStack() as after, torch.random.fork_rng(devices=()):
        after.callback(random.setstate, random.getstate())
        after.callback(np.random.set_state, np.random.get_state())
        after.callback(setattr, torch, "set_num_threads", torch.set_num_threads)
        after.callback(torch.set_num_threads, torch.get_num_threads())
        yield


def _patch_cpu(mesh: Mesh) -> None:
    """Make the CPU build's weights plain parameters, and its shared memory private to this job.

    As shipped it repacks every matrix for its kernels after loading, so that a later write to the
    parameter changes nothing (silently, for tied embeddings). Plain `F.linear` costs about a third
    more per decoded token on a 60M model.
    """
    import vllm.distributed.device_communicators.cpu_communicator as shm
    import vllm.model_executor.layers.utils as layers
    from vllm.platforms import current_platform

    _patch_cpu_experts()
    if numba := sys.modules.get("llvmlite.binding.ffi"):
        numba.lib._fntab[
            "__dict__"
            # vLLM looks for kernels in the __dict__ of all that is loaded, and this one's is a
            # function
            # else
        ] = {}
    type(
        current_platform
    ).simple_compile_backend = "eager"  # else the first generation waits for a C++ compiler
    layers.dispatch_cpu_unquantized_gemm = lambda layer, remove_weight: setattr(
        layer, "cpu_linear", torch.nn.functional.linear
    )

    # Under torchrun the segment's name is the same for all jobs of a host, so a second job, or one
    # after a kill, fails.
    job = mesh.gather(f"{os.getpid()}-{time.time_ns()}")[0]
    shm._CPUSHMDistributed.make_group_name = staticmethod(
        lambda communicator: (
            f"minirl-{job}-{communicator.unique_name}-{'-'.join(map(str, communicator.ranks))}".replace(
                ":", "_"
            )
        )
    )
    init = shm._CPUSHMDistributed._init_cpu_shm

    def init_and_unlink(self) -> int:  # noqa: ANN001 - a vLLM class
        handle = init(self)
        # All ranks have mapped it (a barrier inside), so nothing is left behind however the job
        # ends.
        Path(f"/dev/shm/{self.group_name}_{self.communicator.rank}").unlink(missing_ok=True)
        return handle

    shm._CPUSHMDistributed._init_cpu_shm = init_and_unlink


def _patch_cpu_experts() -> None:
    """The same of fused experts, which would be repacked, too."""
    try:
        from vllm.model_executor.layers.fused_moe.experts.cpu_moe import (
            CPUUnquantizedExperts as Experts,
        )
    except ImportError:  # vLLM 0.26
        from vllm.model_executor.layers.fused_moe.cpu_fused_moe import CPUFusedMOE

        def refuse(*_: object) -> None:
            raise UserError(
                "the CPU engine of vLLM 0.26 keeps expert weights where a refit cannot write them; use vLLM 0.32"
            )

        CPUFusedMOE.__init__ = refuse
        return
    Experts.process_weights_after_loading = lambda self, layer: None
    Experts._padded_intermediate_size = classmethod(
        lambda cls, config: config.intermediate_size_per_partition
    )
    Experts.is_supported_config = staticmethod(lambda *args, **kwargs: (True, None))
    Experts.apply = _plain_experts


def _plain_experts(
    self,
    *,
    output: Tensor,
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,  # noqa: ANN001
    **_: object,
) -> None:
    """hidden_states [T, H], w1 [E, 2I, H], w2 [E, H, I], topk_* [T, k] -> output [T, H], by the
    weights as they were loaded.
    """
    total = torch.zeros(hidden_states.shape, dtype=torch.float32)
    for expert in topk_ids.unique().tolist():
        rows, slot = (topk_ids == expert).nonzero(as_tuple=True)
        gate, up = torch.nn.functional.linear(hidden_states[rows], w1[expert]).chunk(2, dim=-1)
        y = torch.nn.functional.linear(torch.nn.functional.silu(gate) * up, w2[expert])
        total.index_add_(0, rows, y.float() * topk_weights[rows, slot, None].float())
    output.copy_(total)
