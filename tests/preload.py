"""The forkserver's imports, before it forks ranks: everything that an engine or a program imports
late, which would take seconds in each of them.

All objects are then frozen. Garbage collections, of which vLLM makes several when an engine starts
and ends, walk through a rank's own objects only, and copy no memory of the forkserver's."""

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import importlib.metadata
import json
import os
import sys
import tempfile
from pathlib import Path
from traceback import format_list
from types import SimpleNamespace

import torch
import tyro
from PIL import Image
from torch._subclasses import fake_tensor
from torch.distributed.elastic import events
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from transformers import PretrainedConfig
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from minirl.config.parse import parse_flags
from minirl.config.rl import RLConfig
from minirl.config.shared import EvaluateConfig
from minirl.config.supervised import DPOConfig, KTOConfig, RMConfig, SFTConfig
from minirl.run.results import write_curves

# Nothing of what imports leave is garbage. To look for some takes a tenth of their time.
gc.disable()
MODULES = [
    "minirl.rl",
    "minirl.sft",
    "minirl.rm",
    "minirl.dpo",
    "minirl.kto",
    "minirl.evaluate",
    "minirl.endpoint.server",
    "datasets",
    "reasoning_gym.factory",
    "peft",
    "bitsandbytes",
    "minirl.checkpoint.state",
    "openai",
    "anthropic",
    "pytest",
    "torch.distributed.run",
    "torch.utils.tensorboard",
    "matplotlib.backends.backend_agg",
    *(
        f"transformers.models.{family}.modeling_{family}"
        for family in ("qwen3", "llama", "qwen2", "mistral", "smollm3", "qwen3_moe")
    ),
    "transformers.integrations.mistral.tokenizer",
    "transformers.tokenization_mistral_common",
    "torch.profiler._cupti_monitor",
    "torch.utils.serialization",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.tensor.experimental",
    "vllm.entrypoints.llm",
    "vllm.entrypoints.launchers.cli_args",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.utils.cpu_triton_utils",
    "vllm.distributed.device_communicators.cpu_communicator",
    "vllm.distributed.elastic_ep.elastic_execute",
    "vllm.model_executor.layers.fused_moe.experts.cpu_moe",
    "vllm.model_executor.layers.mamba.ops.cpu.gdn_attention",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.model_executor.model_loader.dummy_loader",
    "vllm.model_executor.models.transformers",
    "vllm.model_executor.models.qwen3",
    "vllm.model_executor.models.llama",
    "vllm.plugins.lora_resolvers.filesystem_resolver",
    "vllm.plugins.lora_resolvers.hf_hub_resolver",
    "vllm.v1.pool.flash_maxsim",
    # What most tests of ranks import, each rank again.
    "test_checkpoint",
    "test_families",
]
MADV_COLLAPSE = 25  # madvise(2)


# What libraries say when they are imported would be on the screen between pytest's lines.
stderr = os.dup(2)
os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
sys.path.insert(0, str(Path(__file__).parent))
current_platform = importlib.import_module("vllm.platforms").current_platform
on_cpu = current_platform.is_cpu()
for name in MODULES:
    # A module of another version of vLLM or of another device is imported where it is needed, or
    # not at all.
    with contextlib.suppress(Exception):
        importlib.import_module(name)
if on_cpu:
    # imports dynamo's parts; on a GPU it would start CUDA, which no fork survives
    torch.compile(torch.sin, backend="eager")(torch.ones(1))
    # looks through all modules, most of an engine's start; a fork finds it done. vLLM 0.26 has none
    if hasattr(type(current_platform), "register_triton_kernel_overrides"):
        current_platform.register_triton_kernel_overrides()
        type(current_platform).register_triton_kernel_overrides = classmethod(lambda cls: None)
    # vLLM sets all loggers up when an engine starts, unless they are.
    with contextlib.suppress(ImportError):
        from vllm.config.logging import LoggingConfig
        from vllm.logger import configure_logging

        configure_logging(LoggingConfig())
# What is made once: transformers' table of how weights of files are renamed; docstrings of the
# settings, the formats of images, the fonts of curves.
get_checkpoint_conversion_mapping("qwen3")
docstrings = tyro._docstrings._ClassTokenization
docstrings.make = staticmethod(functools.cache(docstrings.make))
for config in (RLConfig, SFTConfig, RMConfig, DPOConfig, KTOConfig, EvaluateConfig):
    parse_flags(config, [])
Image.init()
with tempfile.TemporaryDirectory() as folder:
    row = {"phase": "rl", "step": 0, "reward": 0.0}
    (Path(folder) / "metrics.jsonl").write_text(json.dumps(row))
    write_curves(Path(folder))
# An engine looks for plugins in the entry points of all packages, several times.
importlib.metadata.entry_points = functools.cache(importlib.metadata.entry_points)
for group in ("vllm.general_plugins", "vllm.logits_processors"):
    importlib.metadata.entry_points(group=group)
# A fake tensor mode, of which DTensor makes one for every operation and shape that is new to it,
# remembers where it was made, for a message that no test reads.
fake_tensor.traceback = SimpleNamespace(extract_stack=list, format_list=format_list)


def callers() -> list[SimpleNamespace]:
    """Return what torchrun's agent asks of `inspect.stack()` at each of its steps. That looks
    through all modules for lines of source, which is most of what an agent in a fork computes."""
    found = []
    frame = sys._getframe(1)
    while frame:
        code = frame.f_code
        place = {"filename": code.co_filename, "lineno": frame.f_lineno}
        found.append(SimpleNamespace(function=code.co_name, **place))
        frame = frame.f_back
    return found


for module in (events, dynamic_rendezvous):
    module.inspect = SimpleNamespace(stack=callers)
# transformers puts the whole of every configuration that it reads into a line for its log, which
# takes longer than to read it.
PretrainedConfig.__repr__ = object.__repr__
os.dup2(stderr, 2)
# In pages of 2 MiB: to fork and to end takes half as long where there are not 150,000 of them. An
# older kernel refuses, and nothing changes.
libc = ctypes.CDLL(None)
for line in Path("/proc/self/maps").read_text().splitlines():
    place, permissions, _, _, inode, *_ = line.split()
    if permissions == "rw-p" and inode == "0":
        begin, end = (int(address, 16) for address in place.split("-"))
        libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), MADV_COLLAPSE)
gc.freeze()
gc.enable()
# For good: an engine that ends would thaw them, and look through all of them twice.
gc.unfreeze = lambda: None
# In the forkserver alone: the libraries that find what it leaks would fill the screen.
atexit.register(os._exit, 0)
