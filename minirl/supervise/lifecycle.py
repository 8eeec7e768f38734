"""How a program with a config joins the other ranks and how it ends.

For what the user can correct there is one message, and for each kind of end one exit code. Wrong
flags have been refused before (cli.py), because the imports of this file take seconds.

torchrun has an agent on each machine, which starts its ranks. When ranks fail, or a lost agent is
replaced, all agents start their ranks again, at most --max-restarts times. They leave two things to
the ranks: to end with their agent, and not to read what ranks of an earlier attempt have stored.
"""

import contextlib
import ctypes
import dataclasses
import faulthandler
import gc
import os
import random
import shutil
import signal
import time
import traceback
import uuid
from collections.abc import Callable
from datetime import timedelta
from pkgutil import resolve_name
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist

from minirl.base.errors import BAD_INPUT, CRASH, DONE, UserError
from minirl.base.files import DISK_FAILURES
from minirl.base.log import say
from minirl.config.parse import flatten
from minirl.config.shared import TrainingConfig
from minirl.config.validate import check_named, digests_of_named
from minirl.parallel.machines import arrange, check_gpus, check_same, errors_of_all, open_world
from minirl.parallel.mesh import Mesh, World
from minirl.supervise.watch import NUM_FRAMES, Watch, leave, this_process

JOIN_MINUTES = 5.0  # To wait for the other ranks without a config that sets it.
# Settings that may differ between machines: the address of a rank.
LOCAL_SETTINGS = ("endpoint.host",)
PR_SET_PDEATHSIG = 1  # Of prctl, from Linux's prctl.h.
RETRY = timedelta(seconds=1)  # A rank that waits for rank 0's answer looks again after this.


def run(
    config: type,
    cfg: Any,
    mistake: UserError | None,
    program: str | Callable[[Any, Mesh], object],
) -> NoReturn:
    """Join the other ranks, run the program and leave.

    Args:
        config: the class of the config.
        cfg: the config; None: something is wrong with it.
        mistake: what is wrong with it on this machine. Ranks with a mistake join the others, too,
            which may see none and would wait.
        program: what is called with the config and the mesh, or the name of that.
    """
    faulthandler.enable()
    end_with_agent()
    watch = Watch()
    watch.can_resume = issubclass(config, TrainingConfig)
    minutes = cfg.timeout_minutes if cfg else JOIN_MINUTES
    timeout = timedelta(minutes=minutes)
    try:
        watch.listen()
        warning = describe_idle_gpu()
        if warning and watch.rank == 0:
            say(warning)
        called = resolve_name(program) if isinstance(program, str) else program
        gc.freeze()  # No collection looks at what is imported by now.
        gc.enable()
        world = open_world(minutes, watch, open_attempt_store(timeout))
        watch.join(world.store, world.rank, world.gather(this_process()))
        with errors_of_all(world, same_everywhere=True):
            if mistake:
                raise mistake
            check_gpus()
        check_same(settings(cfg), world)
        check_files(cfg, world)
        seed_generators(settings(cfg).get("seed", 0), world.rank)
        parallel = cfg.parallel if isinstance(cfg, TrainingConfig) else None
        called(cfg, arrange(world, parallel, timeout))
        watch.end()
    except UserError as error:
        # All ranks usually find the same mistake, and one message is enough.
        notes = vars(error).get("__notes__", [])
        watch.end_all("\n".join([f"error: {error}", *notes]), BAD_INPUT)
    except BaseException as error:  # the last handler of the program: this rank ends now
        output = str(settings(cfg).get("output", "")) if cfg else ""
        meaning = explain(error, watch, minutes, output)
        crashed = f"rank {watch.rank} crashed\n{traceback.format_exc()}"
        watch.end_all(f"error: {meaning}" if meaning else crashed, CRASH)
    leave(DONE)


def settings(cfg: Any) -> dict[str, object]:
    """Return the settings that all machines must have alike, by `section.name`."""
    settings = flatten(dataclasses.asdict(cfg))
    return {name: value for name, value in settings.items() if name not in LOCAL_SETTINGS}


def seed_generators(seed: Any, rank: int) -> None:
    """Seed all generators that a user's code may draw from, on each rank by another number."""
    numbers = np.random.SeedSequence([seed, rank]).generate_state(3).tolist()
    random.seed(numbers[0])
    np.random.seed(numbers[1])
    torch.manual_seed(numbers[2])


def check_files(cfg: Any, world: World) -> None:
    """Refuse files of functions and templates that are not the same everywhere. Collective.

    Those of one machine have been looked at before (cli.py).
    """
    with errors_of_all(world, same_everywhere=True):
        check_named(cfg)
        digests = digests_of_named(cfg)
    check_same(digests, world)


def describe_idle_gpu() -> str:
    """Return what keeps this machine's GPU from being used; empty: nothing, or there is none."""
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    has_gpu = os.path.exists("/dev/nvidia0") or shutil.which("nvidia-smi") is not None
    if torch.cuda.is_available() or is_hidden or not has_gpu:
        return ""
    return (
        f"this machine has an NVIDIA GPU, and torch {torch.__version__} cannot use it: all ranks "
        "run on the CPU. `bash launch/install.sh --cuda` installs the build that can, in place of "
        f"the CPU build; or the driver (nvidia-smi) may be too old for CUDA {torch.version.cuda}"
    )


def end_with_agent() -> None:
    """Let the kernel kill this process when the torchrun that started it is gone.

    A torchrun that is killed cannot end its ranks, and they would continue to train, at the same
    time as the ranks of the torchrun that replaces it.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1 and not is_this_python(1):  # it was gone before the line above
        os.kill(os.getpid(), signal.SIGKILL)


def is_this_python(pid: int) -> bool:
    """Return whether a process runs this Python, as a torchrun that is a container's first does."""
    try:
        return os.path.samefile(f"/proc/{pid}/exe", "/proc/self/exe")
    except OSError:  # another user's
        return False


def open_attempt_store(timeout: timedelta) -> dist.Store | None:
    """Return a store of this attempt's ranks only; None: there is no agent with a store.

    The ranks of all attempts share the agents' store. There those of a second attempt would find
    the addresses of ranks that are dead. So all keys of an attempt begin with a name that rank 0
    makes up. The number of restarts cannot be that name: it differs on a machine that joined later.

    Args:
        timeout: how long the store, and this rank for the others, waits.

    Raises:
        dist.DistError: not all ranks are there in time.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        timeout=timeout,
    )
    rank = int(os.environ["RANK"])
    name = agree_on_name(store, rank, int(os.environ["WORLD_SIZE"]), timeout)
    return dist.PrefixStore(f"minirl/attempt/{name}", store)


def agree_on_name(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> str:
    """Return a name that the living ranks agree on, whatever dead ones left in the store.

    Rank 0 announces a new name. Each other rank answers with a name that it makes up, and rank 0
    lists the answers. A rank that finds its answer in the list knows that this rank 0 is alive.

    Raises:
        dist.DistError: not all ranks are there in time.
    """
    made_up = uuid.uuid4().hex[:12]
    if rank == 0:
        store.set("minirl/newest", made_up)
        answers = [f"minirl/answer/{made_up}/{other}" for other in range(1, world_size)]
        store.wait(answers, timeout)
        names = [store.get(answer).decode() for answer in answers]
        store.set(f"minirl/answers/{made_up}", " ".join(names))
        return made_up

    end = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < end:
        newest = store.get("minirl/newest").decode()
        store.set(f"minirl/answer/{newest}/{rank}", made_up)
        answers_to_newest = f"minirl/answers/{newest}"
        with contextlib.suppress(dist.DistStoreError):  # nothing came within this time
            store.wait([answers_to_newest], RETRY)
            if made_up in store.get(answers_to_newest).decode().split():
                return newest
        time.sleep(0.01)
    raise dist.DistStoreError(f"rank {rank} waited {timeout} for rank 0 and the others")


# --------------------------------------------------------------------------------------------------
# what the failure of a rank means; launch/README.md has the table of them

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
    # Of vLLM, which maps its memory again.
    engine_woke_in_vain = "CUDA Error: out of memory" in text
    if isinstance(error, torch.OutOfMemoryError) or engine_woke_in_vain:
        free, total = (num / 2**30 for num in torch.cuda.mem_get_info())
        unmapped = watch.unmapped_bytes() / 2**30
        tensors = torch.cuda.memory_allocated() / 2**30 - unmapped
        reserved = torch.cuda.memory_reserved() / 2**30 - unmapped
        return (
            f"{where}: the GPU's memory is used up: {error}\nOf {total:.1f} GiB, {free:.1f} are "
            f"free; this rank's tensors have {tensors:.1f}, what torch keeps for them "
            f"{reserved - tensors:.1f}, and engine, CUDA and other processes "
            f"{total - free - reserved:.1f}. Lower tokens_per_rank, set "
            "policy.activation_checkpointing full, in RL engine.sleep all, or (if it was the "
            "engine) lower engine.gpu_memory_utilization or engine.kv_cache_gb; `python -m "
            "minirl.plan` shows what takes what"
        )
    if isinstance(error, MemoryError) or "DefaultCPUAllocator: can't allocate" in text:
        return (
            f"{where}: the host's memory is used up: {text}\nLower tokens_per_rank, "
            "engine.kv_cache_gb or engine.max_model_len, or start fewer ranks on a machine; "
            "`python -m minirl.plan` shows what takes what"
        )
    is_lost = False  # The folder of the run, or one in it.
    if isinstance(error, FileNotFoundError | PermissionError) and error.filename and output:
        folder = os.path.dirname(os.path.abspath(os.fsdecode(error.filename)))
        is_gone = isinstance(error, PermissionError) or not os.path.isdir(folder)
        is_lost = is_gone and folder.startswith(os.path.abspath(output))
    if is_lost or (isinstance(error, OSError) and error.errno in DISK_FAILURES):
        return (
            f"{where}: a file cannot be written: {error}\nMake room (output = {output!r}), make it "
            "writable, repair the file system, or bring the folder back if it was removed or "
            "unmounted; a training run then continues with --resume from its newest checkpoint"
        )
    if isinstance(error, BrokenPipeError):
        return (
            f"{where}: nobody reads what it prints any more ({text}): the program to which its "
            "output was piped has ended; let that one live, or print to a file. A training run "
            "then continues with --resume from its newest checkpoint"
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
