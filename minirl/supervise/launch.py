"""What torchrun's agents leave open: a store that no earlier attempt wrote in, and orphans.

An agent runs on each machine and starts its ranks. When ranks fail (or a lost agent is replaced),
all agents start their ranks again, at most --max-restarts times.
"""

import contextlib
import ctypes
import os
import signal
import time
import uuid
from datetime import timedelta

import torch.distributed as dist

PR_SET_PDEATHSIG = 1  # Of prctl, from Linux's prctl.h.
AGAIN = timedelta(seconds=1)  # A rank that waits for rank 0's answer looks again after this.


def end_with_agent() -> None:
    """Let the kernel kill this process when the torchrun that started it is gone.

    A torchrun that is killed cannot end its ranks, and they would train on beside the ranks of
    whatever is started in its place.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1 and not is_this_python(1):  # it was gone before the line above
        os.kill(os.getpid(), signal.SIGKILL)


def is_this_python(pid: int) -> bool:
    """Whether a process runs this Python, as the torchrun that a container starts first does."""
    try:
        return os.path.samefile(f"/proc/{pid}/exe", "/proc/self/exe")
    except OSError:  # another user's
        return False


def open_attempt_store(timeout: timedelta) -> dist.Store | None:
    """Return a store of this attempt's ranks only; None: there is no agent with a store.

    The ranks of all attempts share the agents' store. There those of a second attempt would find
    the addresses of ranks that are dead. So they put a name in front of their keys that rank 0
    makes up. Restarts are not counted alike on all machines, and cannot serve as that name. What an
    attempt put there stays until the agents end; nobody asks for it again.

    Args:
        timeout: of the store, and of the wait for the other ranks.

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

    Rank 0 announces a new name. Each other rank answers with a name of its own, and rank 0 lists
    those that it got. A rank that finds itself in the list knows that it heard a living rank 0.

    Raises:
        dist.DistError: not all ranks are there in time.
    """
    own = uuid.uuid4().hex[:12]
    if rank == 0:
        store.set("minirl/newest", own)
        answers = [f"minirl/answer/{own}/{other}" for other in range(1, world_size)]
        store.wait(answers, timeout)
        names = [store.get(answer).decode() for answer in answers]
        store.set(f"minirl/heard/{own}", " ".join(names))
        return own

    end = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < end:
        newest = store.get("minirl/newest").decode()
        store.set(f"minirl/answer/{newest}/{rank}", own)
        heard = f"minirl/heard/{newest}"
        with contextlib.suppress(dist.DistStoreError):  # nothing came within this time
            store.wait([heard], AGAIN)
            if own in store.get(heard).decode().split():
                return newest
        time.sleep(0.01)
    raise dist.DistStoreError(f"rank {rank} waited {timeout} for rank 0 and the others")
