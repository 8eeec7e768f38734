"""What the failures of a rank mean, and what to do about them.

`launch/README.md` has the table of them.
"""

import os
import time
import traceback

import torch
import torch.distributed as dist

from minirl.base.files import DISK_FAILURES
from minirl.supervise.watch import NUM_FRAMES, Watch

# What gloo, NCCL and the store say of other ranks.
LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process")
LATE = ("Timed out waiting", "timed out after", "Timeout waiting", "wait timeout after")

SECONDS_OF_A_CAUSE = 2.0  # For the watch to see which rank ends the run.


def explain(error: BaseException, watch: Watch, minutes: float, output: str) -> str | None:
    """Return what an error means, in place of its traceback. None: it is a bug.

    If it is the consequence of another rank's failure, the watch ends this process meanwhile, and
    the other rank says why.

    Args:
        error: what ended the program on this rank.
        watch: the supervisor of this rank.
        minutes: how long a collective waits.
        output: folder or file that the program writes; empty: none.
    """
    text = f"{type(error).__name__}: {error}"
    first_line = text.splitlines()[0]
    where = f"rank {watch.rank} in phase {watch.phase()}"
    if isinstance(error, torch.OutOfMemoryError):
        return f"{where}: the GPU's memory is used up: {error}\n{_gpu_memory(watch)}"
    if isinstance(error, MemoryError) or "DefaultCPUAllocator: can't allocate" in text:
        return (
            f"{where}: the host's memory is used up: {text}\nLower tokens_per_rank, "
            "engine.kv_cache_gb or engine.max_model_len, or start fewer ranks on a machine; "
            "`python -m minirl.plan` shows what takes what"
        )
    if isinstance(error, OSError) and error.errno in DISK_FAILURES:
        return (
            f"{where}: a file cannot be written: {error}\nMake room (output = {output!r}), or "
            "repair the file system; a training run then continues with --resume from its newest "
            "checkpoint"
        )
    if isinstance(error, FileNotFoundError) and _is_below(error.filename, output):
        return (
            f"{where}: a file cannot be written: {error}\nThe folder of the run (output = "
            f"{output!r}) is gone, or a part of it: it was removed, moved or unmounted. Start "
            "again, and leave it where it is"
        )
    if isinstance(error, RuntimeError) and any(said in text for said in LATE):
        time.sleep(SECONDS_OF_A_CAUSE)
        stack = "".join(traceback.format_tb(error.__traceback__)[-NUM_FRAMES:])
        return (
            f"{where} has waited longer than timeout_minutes = {minutes:g} for the other ranks "
            f"({first_line}). One of them is stuck or stopped, or needs longer than the others "
            f"(then raise timeout_minutes). It waited here:\n{stack.rstrip()}"
        )
    if isinstance(error, dist.DistError) or any(said in text for said in LOST):
        time.sleep(SECONDS_OF_A_CAUSE)
        return (
            f"{where} has lost another rank, which has not said why ({first_line}); look for what "
            "ended first in the logs of the other machines"
        )
    return None


def _is_below(file: str | bytes | int | None, output: str) -> bool:
    """Return whether a file belongs into a folder of the run that is not there."""
    if not output or not isinstance(file, str | bytes):
        return False
    folder = os.path.abspath(os.path.dirname(os.fsdecode(file)))
    root = os.path.abspath(output)
    return os.path.commonpath([folder, root]) == root and not os.path.isdir(folder)


def _gpu_memory(watch: Watch) -> str:
    """Return who has the GPU's memory, and what to change."""
    free, total = (num / 2**30 for num in torch.cuda.mem_get_info())
    unmapped = watch.unmapped_bytes() / 2**30
    tensors = torch.cuda.memory_allocated() / 2**30 - unmapped
    reserved = torch.cuda.memory_reserved() / 2**30 - unmapped
    return (
        f"Of {total:.1f} GiB, {free:.1f} are free; this rank's tensors have {tensors:.1f}, what "
        f"torch keeps for them {reserved - tensors:.1f}, and engine, CUDA and other processes "
        f"{total - free - reserved:.1f}. Lower tokens_per_rank, set "
        "policy.activation_checkpointing full, or (if it was the engine) lower "
        "engine.gpu_memory_utilization; `python -m minirl.plan` shows what takes what"
    )
