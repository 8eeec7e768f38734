"""Graders of other packages, in processes with limits.

What a policy writes can keep math-verify or reasoning-gym busy for ever, or take all memory
(`$9^{9^{9^9}}$`). So they run in workers (sandbox/inside/grading.py): a process for each package,
started once in a rank, imports it and forks the workers, which grade one answer after the other.
A worker that reaches a limit is killed and replaced, and the answer earns 0.

Workers have only what they need: no device, no connection of the run, no right to files but
Python's own. They end with the rank.
"""

import functools
import importlib.util
import json
import math
import os
import pickle
import queue
import signal
import socket
import struct
import subprocess
import sys
import threading
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from minirl.base.errors import UserError, require
from minirl.parallel.machines import num_cores, ranks_of_node
from minirl.sandbox import runner
from minirl.sandbox.inside import grading
from minirl.sandbox.inside.grading import GRADERS

__all__ = ["GRADERS", "GraderLimits", "GraderPool", "StoppedGrade", "pool"]

START = "from minirl.sandbox.inside.grading import main; main()"
MAX_REPLY = 2**16  # Bytes.


@dataclass(frozen=True, kw_only=True)
class GraderLimits:
    """What the grading of one answer may use."""

    seconds: float = 5.0  # CPU time, so that a busy machine changes no reward.
    wall_seconds: int = 60  # For what waits instead of computing.
    memory_mb: int = 1024  # Address space beyond that of the packages, in MiB.


class StoppedGrade(float):
    """The 0 that an answer earns which no grader could grade, and why."""

    why: str

    def __new__(cls, why: str) -> "StoppedGrade":
        """Return 0 with a reason."""
        grade = super().__new__(cls, 0.0)
        grade.why = why
        return grade


@dataclass(frozen=True, eq=False)
class Worker:
    """A process that grades."""

    pid: int
    connection: Connection


class GraderPool:
    """A process that imports a package and forks workers, which threads may use at once.

    Args:
        package: one of minirl.sandbox.inside.grading.GRADERS.
        num_workers: at most; they are forked when they are needed.
        limits: of each answer.

    Raises:
        UserError: the package does not import, or the kernel cannot keep workers in.
    """

    def __init__(self, package: str, num_workers: int, limits: GraderLimits):
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            raise UserError(f"reward.function = {package}: the package {package} is not installed")
        self.package = package
        self.limits = limits
        self._free: queue.LifoQueue[Worker | None] = queue.LifoQueue()  # None: to be forked.
        for _ in range(num_workers):
            self._free.put(None)
        self._lock = threading.Lock()  # One order to the process at a time.
        self._control, inner = socket.socketpair()
        settings = {
            "package": package,
            "control": inner.fileno(),
            "parent": os.getpid(),
            "readable": [*runner.READABLE, str(Path(spec.origin).parents[1])],
            "seconds": limits.seconds,
            "memory": limits.memory_mb * 2**20,
        }
        self.process = subprocess.Popen(
            [sys.executable, "-B", "-P", "-c", START, json.dumps(settings)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=[inner.fileno()],
            start_new_session=True,
            env={
                "PYTHONPATH": os.pathsep.join([str(runner.ROOT), *filter(None, sys.path)]),
                "PYTHONHASHSEED": "0",  # The order of sets can decide what sympy finds.
                "LANG": "C.UTF-8",
                "OMP_NUM_THREADS": "1",
                "OPENBLAS_NUM_THREADS": "1",
                "CUDA_VISIBLE_DEVICES": "",
            },
        )
        inner.close()
        ready = self._control.recv(len(grading.READY), socket.MSG_WAITALL)
        assert self.process.stderr
        with self.process.stderr as errors:
            said = errors.read().decode(errors="replace")  # To its end, which comes with READY.
        require(
            ready == grading.READY,
            f"reward.function = {package}: its grader did not start: {said[-500:]}",
        )

    def grade(self, *arguments: object) -> float:
        """Return the grade of an answer; a StoppedGrade if it reached a limit or the grader failed.

        Args:
            arguments: of the package's grader in minirl/sandbox/inside/grading.py.

        Raises:
            UserError: the row is wrong, or the process that forks workers has ended.
        """
        worker = self._free.get()
        kept = None
        try:
            if worker is None:
                own, inner = socket.socketpair()
                # A worker that an answer has taken over may stop within a message.
                for side in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                    seconds = struct.pack("@ll", self.limits.wall_seconds, 0)
                    own.setsockopt(socket.SOL_SOCKET, side, seconds)
                with inner:
                    pid = self._order(grading.FORK, 0, [inner.fileno()])
                worker = Worker(pid, Connection(own.detach()))
            reply = self._ask(worker.connection, pickle.dumps(arguments))
            if "value" in reply:
                kept = worker
            else:
                worker.connection.close()
                status = self._order(grading.KILL, worker.pid, [])
                reply = {"stopped": self._why(status), **reply}
        except ConnectionError as error:
            raise UserError(
                f"reward.function = {self.package}: the process of its graders was killed; is the "
                "memory of the machine used up?"
            ) from error
        finally:
            self._free.put(kept)
        if "mistake" in reply:
            raise UserError(f"reward.function = {self.package}: {reply['mistake']}")
        value = reply.get("value")
        if isinstance(value, float) and math.isfinite(value):
            return value
        return StoppedGrade(str(reply.get("stopped", f"it returned {value!r}"))[:200])

    def _order(self, kind: bytes, pid: int, descriptors: list[int]) -> int:
        """Return what the process that forks replies to an order. Raises ConnectionError."""
        with self._lock:
            socket.send_fds(self._control, [grading.ORDER.pack(kind, pid)], descriptors)
            reply = self._control.recv(grading.NUMBER.size, socket.MSG_WAITALL)
        if len(reply) < grading.NUMBER.size:
            raise ConnectionError("the process that forks graders has ended")
        return grading.NUMBER.unpack(reply)[0]

    def _ask(self, worker: Connection, request: bytes) -> dict[str, object]:
        """Return a worker's reply, or why there is none; {} if it has ended or speaks nonsense."""
        patience = self.limits.wall_seconds
        try:
            worker.send_bytes(request)
            # Waits are counted, not read from a clock, so that the seconds in which all processes
            # of a run are stopped do not count.
            if not any(worker.poll(1.0) for _ in range(patience)):
                return {"stopped": f"it took more than {patience} seconds"}
            reply = json.loads(worker.recv_bytes(MAX_REPLY))
        except (EOFError, OSError, ValueError):
            return {}
        return reply if isinstance(reply, dict) else {}

    def _why(self, status: int) -> str:
        """Return why a worker has ended, of what os.waitpid says."""
        if not os.WIFSIGNALED(status):
            return "its process has left"
        if os.WTERMSIG(status) == signal.SIGPROF:
            return f"it took more than {self.limits.seconds:g} seconds of CPU time"
        return f"its process was ended by {signal.Signals(os.WTERMSIG(status)).name}"

    def close(self) -> None:
        """End the process and its workers."""
        self._control.close()
        self.process.kill()
        self.process.wait()


def pool(package: str) -> GraderPool:
    """Return this process's workers for a package. The first call starts them (seconds)."""
    with _STARTING:  # Several threads score the first answers.
        return _start_pool(package)


_STARTING = threading.Lock()


@functools.cache
def _start_pool(package: str) -> GraderPool:
    # Two at least: an answer that takes its time must not stop all others.
    return GraderPool(package, min(16, max(2, num_cores() // ranks_of_node())), GraderLimits())


# A process that is forked from this one must not speak with its workers.
os.register_at_fork(after_in_child=_start_pool.cache_clear)
