"""What is changed in vLLM wherever it runs, and why: each patch is a function or a class.

What is changed in its CPU build alone is in cpu/. vLLM is imported late, after the engine has set
its environment.
"""

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from minirl.data.vision import GemmaVision


@contextlib.contextmanager
def keep_process_state() -> Iterator[None]:
    """Undo what starting vLLM changes in this process.

    It seeds the global generators (on CUDA, those of the devices), and its CPU build sets one
    thread and disables `torch.set_num_threads`. It also would set the precision of float32
    products, by a function that does nothing meanwhile: which precision it was cannot be read by
    the same function if the user has set it by another.
    """
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with contextlib.ExitStack() as after, torch.random.fork_rng(devices, device_type="cuda"):
        after.callback(random.setstate, random.getstate())
        after.callback(np.random.set_state, np.random.get_state())
        after.callback(setattr, torch, "set_num_threads", torch.set_num_threads)
        after.callback(torch.set_num_threads, torch.get_num_threads())
        set_precision = torch.set_float32_matmul_precision
        after.callback(setattr, torch, "set_float32_matmul_precision", set_precision)
        torch.set_float32_matmul_precision = lambda precision: None
        yield


# The dtype of vLLM's logits. By itself it rounds them to the weights' dtype, and samples and
# reports from these: 3 digits of log-prob, which the trainer's have.
HEAD_DTYPE = "float32"


def config_of_files(config: Any) -> Any:
    """Return a model's config with what vLLM asks it for and the library takes for granted."""
    if "quantization_config" not in vars(config):  # vLLM has no such logits of a quantized head.
        config.head_dtype = HEAD_DTYPE
    if config.model_type == "deepseek_v3":
        config.topk_method = "noaux_tc"  # There is a correction of routers' scores,
        config.scoring_func = "sigmoid"  # which are these.
    return config


def config_of_policy(config: Any) -> Any:
    """Return the same without the format of the model's files: a refit brings plain weights."""
    vars(config).pop("quantization_config", None)
    return config_of_files(config)


def patch_transformers_base() -> None:
    """Keep vLLM from decorating transformers' classes for its compiler.

    It serves some families (smollm3) by those classes. The trainer's models are of the same
    classes, and once they are decorated they demand a vLLM config.
    """
    from vllm.model_executor.models.transformers.base import Base

    Base._decorate_cls_for_torch_compile = lambda self, *args, **kwargs: None


def patch_newlines(vision: GemmaVision) -> None:
    """Let vLLM join the newlines next to an image, and no others, and find its images again.

    It joins all neighbouring ones in a prompt with images, as the tokenizer would have. But the
    policy may have sampled two tokens, and continues after those. And of three newlines that are
    one token it takes the first for the text's and the others for the image's, also behind an
    image, where the first two are the image's.
    """
    from vllm.model_executor.models import gemma3_mm

    def join_beside_images(tokens: list[int], pair: list[int], both: list[int]) -> list[int]:
        out = list(tokens)
        vision.join(out, list(tokens), (pair[0], pair[1]), both[0])
        return out

    gemma3_mm.replace_token_matches = join_beside_images
    processor = gemma3_mm.Gemma3MultiModalProcessor
    find = processor._find_mm_placeholders

    def find_placeholders(self: Any, tokens: list[int], updates: Any) -> dict[str, list[Any]]:
        split, origins = vision.split_behind_images(tokens)
        return {
            modality: [replace(place, start_idx=origins[place.start_idx]) for place in places]
            for modality, places in find(self, split, updates).items()
        }

    processor._find_mm_placeholders = find_placeholders


def keep_groups() -> None:
    """Leave torch's process group as it is when an engine ends.

    vLLM would end it, with all groups of all ranks. But a program may train once more.
    """
    from vllm.distributed import parallel_state

    parallel_state.destroy_distributed_environment = lambda: None


def keep_pixels() -> None:
    """Let the worker have the images of all prompts.

    From version 0.32 on vLLM leaves out those with cached keys. But a change of weights under
    running answers drops these keys, and the images are looked at again.
    """
    from vllm.v1.core.sched import output

    vars(output)["strip_covered_mm_data"] = lambda images, *args, **options: images


def remove_sockets() -> None:
    """Remove the files of the sockets by which ranks of one engine would send each other objects.

    They are in the folder for temporary files, and only the end of the interpreter removes them:
    vLLM keeps what has made them. Programs that ran vLLM leave without that end.
    """
    from vllm.distributed import parallel_state

    queue = parallel_state.get_tp_group().mq_broadcaster
    addresses = vars(queue.handle).values() if queue else ()
    for address in addresses:
        if isinstance(address, str) and address.startswith("ipc://"):
            Path(address.removeprefix("ipc://")).unlink(missing_ok=True)


class TimedFuture:
    """What vLLM's loop asks of the future of a step's tokens; the answer is timed."""

    def __init__(self, future: Future[Any], note: Callable[[float], None]):
        self._future = future
        self._note = note

    def result(self) -> Any:
        """Wait for the tokens, and return them."""
        begin = time.perf_counter()
        tokens = self._future.result()
        self._note(time.perf_counter() - begin)
        return tokens


def time_waiting(executor: Any, note: Callable[[float], None]) -> None:
    """Time how long each step that was scheduled ahead waits for the device.

    Args:
        executor: vLLM's, in this process.
        note: is called with the seconds of a step.
    """
    sample = executor.sample_tokens

    def sample_tokens(grammar_output: Any, non_block: bool = False) -> Any:
        future = sample(grammar_output, non_block=non_block)
        return TimedFuture(future, note) if non_block else future

    executor.sample_tokens = sample_tokens


# Copies that vLLM makes of weights of multi-head latent attention (arXiv 2405.04434).
COPIES = ("W_UK_T", "W_UV")


def latent_layers(model: Any) -> dict[str, Any]:
    """Return the layers of vLLM's model that have such copies, by name; most models have none.

    Keys and values of a head are products of a latent vector, which is what the cache holds, with
    `kv_b_proj`. vLLM multiplies queries and outputs by parts of it instead, of which it makes
    copies once, after loading, where no refit reaches them.
    """
    modules = model.named_modules()
    return {name: module for name, module in modules if type(module).__name__ == "MLAAttention"}


@torch.no_grad()
def renew_copies(layers: dict[str, Any]) -> None:
    """Make the copies of `latent_layers` again, in place, because CUDA graphs read them there."""
    for layer in layers.values():
        rows = layer.kv_b_proj.weight.unflatten(0, (layer.num_heads, -1))  # [N, P + V, L]
        keys, values = rows.split([layer.qk_nope_head_dim, layer.v_head_dim], dim=1)
        layer.W_UK_T.copy_(keys)
        layer.W_UV.copy_(values.mT)
