"""What differs in the older pair, vLLM 0.26 with torch 2.11; all of it goes with that pair.

vLLM is imported late, after the engine has set its environment.
"""

import json
from pathlib import Path
from typing import Any

import torch
from transformers.integrations.heterogeneity.configuration_utils import (
    AmbiguousGlobalPerLayerAttributeError,
)

from minirl.base.errors import UserError, require

# Versions of vLLM with whose parts minirl works.
VERSIONS = ("0.26.", "0.32.")

# Families that vLLM 0.26 cannot hold, or of which it computes other log-probs.
NOT_IN_0_26 = (
    "hunyuan_v1_dense",
    "hunyuan_v1_moe",
    "mellum",
    "ministral3",
    "qwen3_5_moe_text",
    "qwen3_5_text",
)


def is_old() -> bool:
    """Return whether vLLM is of version 0.26."""
    import vllm

    return vllm.__version__.startswith("0.26.")


def check_version() -> None:
    """Refuse a vLLM whose scheduler engine/scheduler.py does not know.

    Raises:
        UserError: its version is another one.
    """
    import vllm

    require(
        vllm.__version__.startswith(VERSIONS),
        f"vLLM {vllm.__version__} is not a version that minirl knows from within; install vLLM "
        "0.32, or 0.26 for torch 2.11",
    )


def check_family(folder: Path) -> None:
    """Refuse a model that an old vLLM cannot serve as its files mean it.

    Args:
        folder: folder of the model.

    Raises:
        UserError: vLLM is old, and the model is of such a family.
    """
    family = json.loads((folder / "config.json").read_text())["model_type"]
    require(
        not is_old() or family not in NOT_IN_0_26,
        f"vLLM 0.26 cannot serve {family} as its files mean it; install vLLM 0.32",
    )


def remedy(error: Exception) -> str:
    """Return what to do about an error of vLLM, as the end of a message; mostly nothing.

    Old versions ask the config of gemma4_text, in which layers differ, for one size of all of them,
    and transformers raises. On CPU they have no latent attention.
    """
    if "CPU_MLA" in str(error):
        return ". This version of vLLM has no such backend; install vLLM 0.32"
    if isinstance(error, AmbiguousGlobalPerLayerAttributeError):
        return ". This version of vLLM knows layers of one size only; install vLLM 0.32"
    return ""


def check_routes() -> None:
    """Refuse router replay on CUDA where vLLM does not return its routers' choices."""
    require(
        not is_old(),
        "algo.router_replay needs a vLLM that returns the experts of its routers; install vLLM "
        "0.32, or set algo.router_replay to false",
    )


def refuse_cpu_experts() -> None:
    """Refuse mixtures of experts in the CPU build, which keeps their weights out of reach."""
    from vllm.model_executor.layers.fused_moe.cpu_fused_moe import CPUFusedMOE

    def refuse(*_: object) -> None:
        raise UserError(
            "the CPU engine of vLLM 0.26 keeps expert weights where a refit cannot write them; "
            "use vLLM 0.32"
        )

    CPUFusedMOE.__init__ = refuse


def causal_dtype() -> torch.dtype:
    """Return the dtype in which the CPU build's attention is given what is causal."""
    return torch.bool if is_old() else torch.int32


def client_errors() -> tuple[type[Exception], ...]:
    """Return what vLLM raises for a request that it refuses, besides ValueError."""
    if is_old():
        return ()
    from vllm.exceptions import VLLMClientError

    return (VLLMClientError,)


def tag_options() -> dict[str, Any]:
    """Return the options with which a parser's grammar holds arguments to their schemas."""
    if is_old():
        return {}  # It does so by itself.
    from vllm.tool_parsers.tool_strict_level import ToolStrictLevel

    return {"strict_level": ToolStrictLevel.PARAMETER}


def discard_cache(executor: Any) -> None:
    """Give back the memory of the KV cache alone, whose addresses stay.

    Args:
        executor: vLLM's.
    """
    torch.cuda.synchronize()  # Or kernels that still read it would fail.
    if not is_old():
        executor.collective_rpc("discard", args=(("kv_cache",),))
        return
    from vllm.device_allocator import cumem

    for block in cumem.CuMemAllocator.get_instance().pointer_to_data.values():
        if block.tag == "kv_cache" and not block.is_asleep:
            cumem.unmap_and_release(block.handle)
            block.is_asleep = True
