"""What a user can do when vLLM does not start, or would start with another model."""

import json
from pathlib import Path

import torch
from transformers.integrations.heterogeneity.configuration_utils import (
    AmbiguousGlobalPerLayerAttributeError,
)

from minirl.base.errors import require
from minirl.config.shared import EngineConfig

# Families that vLLM 0.26 cannot hold, or of which it computes other log-probs.
NOT_IN_0_26 = (
    "hunyuan_v1_dense",
    "hunyuan_v1_moe",
    "mellum",
    "ministral3",
    "qwen3_5_moe_text",
    "qwen3_5_text",
)
# What vLLM asserts of the device's memory, as if nobody else used it.
MEMORY_ASSERTIONS = ("Error in memory profiling", "Memory usage increased after sleeping")


def check_family(folder: Path, version: str) -> None:
    """Refuse a model that an old vLLM cannot serve as its files mean it.

    Args:
        folder: of the model.
        version: of vLLM.

    Raises:
        UserError: so it is.
    """
    if not version.startswith("0.26."):
        return
    family = json.loads((folder / "config.json").read_text())["model_type"]
    require(
        family not in NOT_IN_0_26,
        f"vLLM {version} cannot serve {family} as its files mean it; install vLLM 0.32",
    )


def remedy(error: Exception) -> str:
    """Return what to do about an error of vLLM, as the end of a message; mostly nothing.

    Old versions ask a config whose layers differ (gemma4_text) for one size of all of them, which
    transformers refuses to tell.
    """
    if isinstance(error, AmbiguousGlobalPerLayerAttributeError):
        return ". This version of vLLM knows layers of one size only; install vLLM 0.32"
    if is_about_memory(error):
        return " Another process took or freed memory of this GPU meanwhile: end it, or let it wait"
    return ""


def is_about_memory(error: Exception) -> bool:
    """Return whether vLLM saw the device's free memory change by another process."""
    return isinstance(error, AssertionError) and str(error).startswith(MEMORY_ASSERTIONS)


def memory_report(cfg: EngineConfig) -> str:
    """Return who has the device's memory, and what to change, as the end of a message.

    Args:
        cfg: of an engine that did not start.
    """
    free, total = (num / 2**30 for num in torch.cuda.mem_get_info())
    trainer = torch.cuda.memory_reserved() / 2**30
    others = total - free - trainer
    share = cfg.gpu_memory_utilization
    return (
        f"\n{free:.1f} of the device's {total:.1f} GiB are free: this process's tensors have "
        f"{trainer:.1f}, CUDA's contexts and other processes {others:.1f}. "
        f"engine.gpu_memory_utilization = {share} asks for {share * total:.1f}: lower it, or "
        "end the other processes; if the engine's weights do not fit, raise "
        "engine.tensor_parallel_size; if the KV cache does not, lower engine.max_model_len. "
        "`python -m minirl.plan` shows what takes what"
    )
