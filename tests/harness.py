"""Runs a function on several gloo ranks in this test's process tree, in a fraction of a second.

A forkserver imports torch, transformers and vLLM once per session (tests/preload.py); every rank is
a fork of it. torchrun would pay ten seconds of imports each time.

    def program(mesh, x): ...            # at the top level of a module; runs on every rank
    results = ranks(2, program, x)       # [result of rank 0, result of rank 1]
"""

import contextlib
import ctypes
import faulthandler
import io
import multiprocessing
import os
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import forkserver, popen_forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

import torch

PRELOAD = ["tests.preload"]  # found in the folder where pytest runs


poll = popen_forkserver.Popen.poll
polling = threading.Lock()


def poll_alone(self, flag: int = os.WNOHANG) -> int | None:
    """Ask how a fork has ended, one thread at a time.

    Each start of a process asks of all others, those of other threads, too. Of two that read one's
    exit code at once, the second would find nothing, and note 255 in its place.
    """
    if flag != os.WNOHANG and self.returncode is None:
        wait([self.sentinel])
    with polling:
        return poll(self, flag)


popen_forkserver.Popen.poll = poll_alone


class RankFailed(Exception):
    """A rank raised; the message is its traceback, `kind` the name of the exception's class, `text`
    its message."""

    def __init__(self, rank: int, kind: str, text: str, trace: str):
        super().__init__(f"rank {rank}:\n{trace}")
        self.kind, self.text = kind, text


PR_SET_PDEATHSIG = 1  # prctl(2)


def end_with_the_forkserver() -> None:
    """Let this process, a fork, be killed when pytest is, whose end the forkserver waits for."""
    os.close(forkserver._forkserver._forkserver_alive_fd)  # It waits for who has this, too.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class Streams:
    """Where this process writes: a fork that gets one writes there, too, and not where the
    forkserver does."""

    def __reduce__(self) -> tuple:
        return _write_to, (DupFd(1), DupFd(2))


def _write_to(*streams: Any) -> None:
    for number, stream in enumerate(streams, start=1):
        os.dup2(stream.detach(), number)


def _rank(
    rank: int,
    world: int,
    folder: str,
    function: Callable,
    args: tuple,
    parallel: Any,
    pipe: Any,
    _: Streams,
) -> None:
    end_with_the_forkserver()
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="0",
    )
    import torch.distributed as dist

    from minirl.parallel.machines import arrange, make_world

    torch.set_num_threads(1)
    stacks = open(f"{folder}/stacks-{rank}", "w")  # noqa: SIM115 (open as long as the process is)
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR2, stacks)
    try:
        store = dist.FileStore(f"{folder}/store", world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        value = function(arrange(make_world(torch.device("cpu")), parallel), *args)
        # Bytes, because tensors in a pipe share memory that dies with this process.
        buffer = io.BytesIO()
        torch.save(value, buffer)
        pipe.send((buffer.getvalue(), None))
    except BaseException as error:  # the test gets it, whatever it is
        pipe.send((None, (type(error).__name__, str(error), traceback.format_exc())))
    # Others may still read from this rank. Not a collective: an engine that was freed took the
    # process group with it.
    with contextlib.suppress(EOFError):
        pipe.recv()
    os._exit(0)


def ranks(
    world: int, function: Callable, *args: Any, parallel: Any = None, timeout: float = 240
) -> list:
    """Call function(mesh, *args) on `world` ranks; `parallel` is a ParallelConfig. Raises
    RankFailed with the first failure, TimeoutError if ranks hang or die."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    processes, pipes = [], []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in range(world):
                pipe, end_of_rank = context.Pipe()
                given = (rank, world, folder, function, args, parallel, end_of_rank, Streams())
                process = context.Process(target=_rank, args=given)
                process.start()
                end_of_rank.close()  # Only the rank has it now, and the pipe ends when it dies.
                processes.append(process)
                pipes.append(pipe)
            values = _wait_for_values(pipes, timeout)
            if len(values) < world:
                raise TimeoutError(
                    f"{function.__name__}: only ranks {sorted(values)} of {world} answered\n"
                    + _describe(processes, Path(folder))
                )
            for pipe in pipes:
                pipe.send("all have answered")
            for process in processes:
                process.join(30)
        finally:
            for process in processes:
                process.kill()
            for pipe in pipes:
                pipe.close()
    return [values[rank] for rank in range(world)]


def _wait_for_values(pipes: list[Connection], timeout: float) -> dict[int, Any]:
    """Return what the ranks answer, by rank, without those that die or need more time."""
    end = time.monotonic() + timeout
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    values = {}
    while waiting:
        ready = wait(list(waiting), max(0.0, end - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            rank = waiting.pop(pipe)
            try:
                value, failure = pipe.recv()
            except EOFError:
                continue  # It has died. Those that live may tell more.
            if failure:
                raise RankFailed(rank, *failure)
            values[rank] = torch.load(io.BytesIO(value), weights_only=False)
    return values


def _describe(processes: list, folder: Path) -> str:
    """Return for every rank how it ended, or where its threads stand."""
    alive = [process for process in processes if process.is_alive()]
    for process in alive:
        with contextlib.suppress(ProcessLookupError):  # It has ended, and nobody knows yet.
            os.kill(process.pid, signal.SIGUSR2)
    if alive:
        time.sleep(1)  # They write.
    told = []
    for rank, process in enumerate(processes):
        stacks = folder / f"stacks-{rank}"
        told.append(f"rank {rank}: exit code {process.exitcode} (None: it runs), stacks:")
        told.append(stacks.read_text() if stacks.exists() else "it has not begun")
    return "\n".join(told)


@contextlib.contextmanager
def two_at_once(calls: dict[str, tuple]) -> Iterator[dict[str, Future]]:
    """Call `ranks(*call)` for each, in this order and two at a time; yield their results by name.

    Programs of one rank leave the other core idle."""
    with ThreadPoolExecutor(2) as pool:
        try:
            yield {name: pool.submit(ranks, *call) for name, call in calls.items()}
        finally:
            pool.shutdown(cancel_futures=True)  # those that no test waited for
