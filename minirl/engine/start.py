"""How vLLM is started in this process: environment, patches, arguments, and what its errors mean.

What it sees of the process when it is imported, or when it builds its engine, is set here.
"""

import dataclasses
import gc
import logging
import math
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from minirl.base.errors import UserError
from minirl.config.shared import FEWEST_SEQS, MOST_SEQS, EngineConfig
from minirl.data.vision import GemmaVision
from minirl.engine import compat, patches
from minirl.engine.cpu import cpu_build
from minirl.engine.grammars import patch_masks
from minirl.parallel.mesh import Mesh

if TYPE_CHECKING:
    from minirl.engine.engine import RolloutEngine

# Read when vLLM is imported or builds its engine. The engine core must live in this process, or its
# weights are out of reach.
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}

# What vLLM asserts of the device's memory, as if nobody else used it.
_MEMORY_ASSERTIONS = ("Error in memory profiling", "Memory usage increased after sleeping")


def start_vllm(
    engine: "RolloutEngine", folder: Path, dtype: str, *, load_weights: bool, routes: bool
) -> Any:
    """Return an instance of `vllm.LLM`. Collective.

    Args:
        engine: the engine that gets it, with its settings.
        folder: folder of the model.
        dtype: dtype of the weights.
        load_weights: read the weights from the folder.
        routes: report which experts the routers of a mixture have chosen.

    Raises:
        UserError: vLLM refuses the model, or there is not enough memory.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    quiet = warnings.catch_warnings(action="ignore")  # vLLM's imports warn in any case.
    with patches.keep_process_state(), quiet:
        logging.getLogger("vllm").setLevel(logging.ERROR)
        gc.disable()  # As in supervise/cli.py.
        import vllm
        import vllm.entrypoints.llm  # which `vllm.LLM` would import later

        gc.enable()

        compat.check_version()
        compat.check_family(folder)
        patches.patch_transformers_base()
        patches.keep_groups()
        if not engine.on_cuda:
            cpu_build.patch_cpu(engine.mesh)
        if engine.vision:
            patches.keep_pixels()
        if isinstance(engine.vision, GemmaVision):
            patches.patch_newlines(engine.vision)
        if engine.vision and engine.vision.sees_ahead != "never" and not engine.on_cuda:
            cpu_build.patch_images(engine.vision)
        if engine.masses:
            patch_masks(engine.masses)
        given = arguments(engine, folder, dtype, load_weights)
        if routes and engine.on_cuda:
            compat.check_routes()
            given["enable_return_routed_experts"] = True
        if not routes:  # They come with each token, from vLLM's own scheduler.
            given["scheduler_cls"] = "minirl.engine.scheduler.make_scheduler"
        try:
            llm = vllm.LLM(**given)
            # vLLM would add end tokens of the model's files to those of each request.
            llm.llm_engine.input_processor.generation_config_fields = {}
            return llm
        except (ValueError, RuntimeError, AssertionError) as error:
            remedy = compat.remedy(error) + memory_remedy(error)
            if isinstance(error, AssertionError) and not remedy:
                raise
            if engine.on_cuda:
                reserved = torch.cuda.memory_reserved() / 2**30
                remedy += (
                    f"\nThis process's tensors have {reserved:.1f} GiB of the GPU. Lower "
                    "engine.gpu_memory_utilization, or end other processes; if the weights do "
                    "not fit, raise engine.tensor_parallel_size; if the KV cache does not, "
                    "lower engine.max_model_len. `python -m minirl.plan` shows what takes what"
                )
            raise UserError(
                f"the vLLM engine did not start with engine.* = {engine.cfg} for {folder}: "
                f"{error}{remedy}"
            ) from error


def arguments(
    engine: "RolloutEngine", folder: Path, dtype: str, load_weights: bool
) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM`; `start_vllm` says what they are made of."""
    cfg = engine.cfg
    change = patches.config_of_files if load_weights else patches.config_of_policy
    found: dict[str, Any] = {
        "model": str(folder),
        "dtype": dtype,
        "hf_overrides": change,
        "load_format": "auto" if load_weights or engine.vision else "dummy",
        "skip_tokenizer_init": not (engine.vision or engine.masses),
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
    if engine.vision:
        found |= {
            "limit_mm_per_prompt": {"image": cfg.max_images, "video": 0, "audio": 0},
            "skip_mm_profiling": not engine.on_cuda,
            "mm_processor_cache_gb": 1.0,
        }
    if engine.masses:
        found["structured_outputs_config"] = {"backend": "xgrammar"}
    if cfg.kv_cache_gb or not engine.on_cuda:
        found["kv_cache_memory_bytes"] = int((cfg.kv_cache_gb or 1.0) * 2**30)
    if not engine.on_cuda:
        return found | cpu_build.arguments(cfg, folder, dtype)
    if not cfg.enforce_eager:
        # A CUDA graph for every number of running sequences. By itself vLLM makes them for up to
        # twice as many tokens, but for 512 at most. Its sizes are multiples of 16 (up to 256, of
        # 8), and a limit between two of them would leave out the largest numbers.
        largest = 16 * math.ceil(cfg.max_num_seqs / 16)
        found["compilation_config"] = {"max_cudagraph_capture_size": largest}
    return found | {
        "enable_sleep_mode": engine.sleeps != "none",
        "gpu_memory_utilization": cfg.gpu_memory_utilization,
        "enforce_eager": cfg.enforce_eager,
        "disable_custom_all_reduce": True,
        # Other backends shuffle expert weights after loading; a refit would miss them.
        "moe_backend": "triton",
    }


def resolve_num_seqs(cfg: EngineConfig, mesh: Mesh, num_answers: int) -> EngineConfig:
    """Replace max_num_seqs = 0 by what it stands for.

    Args:
        cfg: the engine's settings.
        mesh: all ranks.
        num_answers: answers that all engines together are asked for at once.
    """
    if cfg.max_num_seqs:
        return cfg
    share = 0
    if mesh.device.type == "cuda":
        num_engines = mesh.world_size // cfg.tensor_parallel_size
        share = math.ceil(num_answers / num_engines)
    num_seqs = min(max(share, FEWEST_SEQS), MOST_SEQS)
    return dataclasses.replace(cfg, max_num_seqs=num_seqs)


# How vLLM says that the cache has no room for one sequence, or for one block.
_CACHE_TOO_SMALL = ("available KV cache memory", "No available memory for the cache blocks")


def memory_remedy(error: Exception) -> str:
    """Return what to do about memory that vLLM misses, as the end of a message; else nothing."""
    if any(text in str(error) for text in _CACHE_TOO_SMALL):
        return (
            " Here raise engine.kv_cache_gb (on CUDA if it is set), or lower engine.max_model_len"
        )
    # vLLM saw the device's free memory change by another process.
    if not (isinstance(error, AssertionError) and str(error).startswith(_MEMORY_ASSERTIONS)):
        return ""
    return " Another process took or freed memory of this GPU meanwhile: end it, or let it wait"
