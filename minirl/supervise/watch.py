"""What ends a rank besides its work: signals, other ranks that end, and time limits.

One thread waits for signals and for the ends of other ranks, because the main thread may be in a
collective for minutes. Another looks at time limits. The first rank that has a reason to end the
run says it; the others read in the store that the run ends, and leave silently.

Signals ask a training program to save and to leave:

* The first SIGTERM, SIGUSR1, SIGINT or SIGHUP, on any rank, is a request. All ranks agree on it at
  the end of a step, where they meet anyway.
* A SIGINT after it ends all ranks at once. So does any signal after a SIGINT: torchrun sends SIGINT
  for the first Ctrl-C and SIGTERM for the second.
* A SIGTERM that comes because another rank has failed is no request: so torchrun ends the others.
"""

import contextlib
import faulthandler
import math
import os
import secrets
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch.distributed as dist

from minirl.base.errors import BAD_INPUT, BY_SIGNAL, CRASH, DONE
from minirl.base.log import printable, restore_streams, say
from minirl.base.oversight import BEAT, TICK_SECONDS, Limit, Oversight
from minirl.supervise import write_error_file

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)

LOOK_SECONDS = 1.0  # The store is looked at so often.
SECONDS_TO_RECORD = 10.0  # For summary and curves of a run that fails.
SECONDS_TO_LEAVE = 20.0  # For the other ranks to see that the run ends.
SECONDS_TO_END = 180.0  # For all that this rank does from a limit that is over to its exit.
NUM_FRAMES = 8  # Of a stack, the innermost ones.

_exit = os._exit  # Python's. From `Watch.listen` on `os._exit` is `Watch._refuse_exit`.

# Keys of the store.
STOP = "minirl/stop"  # The rank that got a signal first, which asks for a checkpoint.
REASON = "minirl/reason"  # Why the run ends: rank, exit code, `_launcher` and text, in lines.
OVER = "minirl/over"  # Set: all ranks leave.
ENDED = "minirl/ended"  # Counts the ranks that have done all their work.
LEFT = "minirl/left"  # /RANK is set: the rank has left before that.


BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # Of the kernel that runs.


class Process(NamedTuple):
    """The process of a rank, as other processes of its machine find it."""

    host: str
    # Of process ids, and the boot of its machine: containers and machines may share a host name.
    namespace: str
    pid: int
    secret: str  # Signs what the rank writes into the store, which takes whatever anybody writes.


def this_process() -> Process:
    """Return this process, with a new secret."""
    namespace = os.readlink("/proc/self/ns/pid") + BOOT_ID.read_text()
    return Process(socket.gethostname(), namespace, os.getpid(), secrets.token_hex(16))


class Watch(Oversight):
    """Supervises a rank, from `listen` on.

    Attributes:
        can_resume: a program that ends at once can be started again with --resume.
        rank: this one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.can_resume = False
        self.rank = int(os.environ.get("RANK", 0))
        self.world_size = 1
        self._store: dist.Store | None = None
        self._secrets = [""]  # Of all ranks, in rank order.
        self._has_store = False  # The store is in this process and ends with it.
        self._sources = selectors.DefaultSelector()  # Of signals, and of the ends of other ranks.
        self._was_asked = False  # By a signal to this rank.
        self._had_interrupt = False  # A SIGINT is the request.
        self._has_ended = False  # All ranks have done their work; nothing is a failure any more.
        self._ending = threading.Lock()  # Kept by the one thread that ends this process.

    # ----------------------------------------------------------------------------------------------
    # beginning and end

    def listen(self) -> None:
        """Take signals and start the threads. Only the main thread may call it."""
        faulthandler.register(signal.SIGUSR2, chain=False)  # Prints the stacks of all threads.
        signals, wakeup = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        for number in SIGNALS:
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # nohup: the run outlives its terminal
            signal.signal(number, lambda number, frame: None)  # The wakeup descriptor has it.
            signal.siginterrupt(number, False)
        self._sources.register(signals, selectors.EVENT_READ)
        vars(os)["_exit"] = partial(self._refuse_exit, os.getpid())
        self.armed_until = math.inf  # The first limit may begin before the thread looks at any.
        threading.Thread(target=self._run, args=(signals,), name="watch", daemon=True).start()
        threading.Thread(target=self._look_at_limits, name="limits", daemon=True).start()

    def join(self, store: dist.Store, rank: int, processes: list[Process]) -> None:
        """Watch the other ranks, too.

        Args:
            store: the store of all ranks. The watch makes a connection of its own, because the main
                thread may wait in this one.
            rank: the rank of this process.
            processes: all ranks, in rank order. The ends of those on this machine are seen.
        """
        self.rank = rank
        self.world_size = len(processes)
        this = processes[rank]
        self._secrets = [process.secret for process in processes]
        for other, process in enumerate(processes):
            if other != rank and process[:2] == this[:2]:
                self._sources.register(
                    os.pidfd_open(process.pid), selectors.EVENT_READ, (other, process)
                )
        clone = store.clone()  # type: ignore[attr-defined]  # not in torch's stubs
        clone.set_timeout(timedelta(seconds=30))
        self._store = clone
        agents_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self._has_store = rank == 0 and not agents_store

    def end(self) -> None:
        """Wait until all ranks have done their work. From then on no end of a rank is a failure."""
        self._has_ended = True
        store = self._store
        if store is None:
            return
        with contextlib.suppress(dist.DistError):  # The rank that had the store has left.
            store.add(ENDED, 1)
            while store.add(ENDED, 0) < self.world_size:
                self._leave_if_over(store)
                gone = self._gone()
                if gone and store.add(ENDED, 0) < self.world_size:
                    self._end_without(*gone[0])
                time.sleep(0.01)

    def _look_at_limits(self) -> None:
        """Look at the limits until one is over, and end the run then."""
        before = time.monotonic()
        over: list[Limit] = []
        while not over:
            time.sleep(TICK_SECONDS)
            now = time.monotonic()
            self.clock += min(now - before, 2 * TICK_SECONDS)  # More: the process was stopped.
            before = now
            with self.arming:
                limits = self.limits.copy()
                over = [limit for limit in limits if self.clock > limit.deadline]
                if over:
                    self.armed_until = -math.inf  # No other limit ends the end.
                    faulthandler.dump_traceback_later(SECONDS_TO_END, exit=True, file=2)
                else:
                    self.arm(limits)
        frame = sys._current_frames().get(over[0].thread)
        stack = traceback.format_stack(frame)[-NUM_FRAMES:] if frame else ["  (it has ended)"]
        self.end_all(
            f"error: rank {self.rank}: {over[0].describe()}\nIt stands in phase {self.phase()}, "
            f"stack:\n{''.join(stack).rstrip()}",
            BAD_INPUT,
        )

    # ----------------------------------------------------------------------------------------------
    # the end of all ranks

    def end_all(self, message: str, code: int, *, is_at_once: bool = False) -> NoReturn:
        """Say why the run ends, unless another rank has, and end this rank and all others.

        It can be called in any thread, and does not return. A thread that comes while another one
        ends this rank waits for that end: its failure may be a consequence.

        Args:
            message: the reason.
            code: the exit code.
            is_at_once: a signal wants the end, without waiting for a checkpoint.
        """
        self._ending.acquire()
        text = f"minirl: {printable(message)}"
        reason = f"{self.rank}\n{code}\n{_launcher()}\n{text}"
        is_first = self._set_first(REASON, reason) == reason
        if is_first:
            write_error_file(text)
            restore_streams()
            with contextlib.suppress(OSError, ValueError):  # A closed pipe, or a closed stream.
                print(f"\n{text}", file=sys.stderr, flush=True)
            self._record("stopped" if is_at_once else "failed", printable(message))
            if threading.current_thread() is not threading.main_thread() and not is_at_once:
                self.finish_writing()  # while the other ranks, which it needs, are there
        self._leave_all(code, is_first=is_first)

    def _refuse_exit(self, pid: int, code: int) -> NoReturn:
        """End all ranks for a call of os._exit; with code 0 the run would look finished.

        Args:
            pid: process id of this rank. Its forks leave as they want.
            code: exit code that the caller wants.
        """
        if os.getpid() != pid or self._has_ended:
            _exit(code)
        caller = traceback.extract_stack(sys._getframe(1), limit=1)[0]
        self.end_all(
            f"error: rank {self.rank}: {caller.name} in {caller.filename}, line {caller.lineno}, "
            f"called os._exit({code}), which ends a run without a checkpoint; let it return, or "
            "raise an error",
            code or CRASH,
        )

    def _record(self, state: str, reason: str) -> None:
        """Note how the run ends, if the file system lets us in time."""
        _in_time(lambda: self.record_end(state, reason))

    def _set_first(self, key: str, value: str) -> str:
        """Return what the first rank has set a key to; without a store, `value`."""
        store = self._store
        if store is not None:
            with contextlib.suppress(dist.DistError):  # Who had the store could not say why.
                signed = f"{self._secrets[self.rank]}\n{value}"
                store.compare_set(key, "", signed)
                first = self._read(store, key)
                if first is not None:
                    return first
                store.set(key, signed)  # Somebody else wrote there.
        return value

    def _read(self, store: dist.Store, key: str) -> str | None:
        """Return what a rank has set a key to; None: nothing, or it was no rank."""
        if not store.check([key]):
            return None
        secret, _, value = store.get(key).decode(errors="replace").partition("\n")
        return value if secret in self._secrets else None

    def _leave_all(self, code: int, *, is_first: bool) -> NoReturn:
        """Let all ranks leave, or wait until another rank lets them, and leave.

        torchrun's report lists every rank that fails, and one is enough. So of the ranks that the
        same torchrun started as the one that said why, the others leave with 0. Of another
        torchrun, mostly on another machine, the first rank has the exit code of the run, and
        repeats the reason for the report there.

        Args:
            code: the exit code of this rank. Another rank's reason has another one.
            is_first: this rank has said why the run ends.
        """
        _in_time(self.close_logs)
        store = self._store
        if store is None:
            leave(code)
        with contextlib.suppress(dist.DistError):  # The store is gone, too.
            if is_first:
                store.set(OVER, f"{self._secrets[self.rank]}\n")
            else:
                _wait_until(lambda: self._read(store, OVER) is not None)
                reason = self._read(store, REASON)
                code = CRASH if reason is None else DONE
                if reason is not None and os.environ.get("LOCAL_RANK") == "0":
                    _, number, launcher, text = reason.split("\n", 3)
                    if int(number) and launcher != _launcher():
                        write_error_file(text)
                        code = int(number)
            store.set(f"{LEFT}/{self.rank}", "")
            if self._has_store:
                # A rank that finds the store gone would not know why the run ends.
                gone = [rank for rank, _ in self._gone()]
                others = [rank for rank in range(self.world_size) if rank not in gone]
                _wait_until(lambda: store.check([f"{LEFT}/{rank}" for rank in others]))
        leave(code)

    def _leave_if_over(self, store: dist.Store) -> None:
        """Leave if another rank has let all ranks leave and no thread of this one is ending it."""
        is_over = self._read(store, OVER) is not None
        if is_over and self._ending.acquire(blocking=False):
            self._leave_all(CRASH, is_first=False)

    # ----------------------------------------------------------------------------------------------
    # the thread that waits for signals and for other ranks

    def _run(self, signals: int) -> None:
        """Wait, until all ranks have done their work. Bytes of `signals` are signals' numbers."""
        looked = time.monotonic()
        while not self._has_ended:
            ready = [key for key, _ in self._sources.select(LOOK_SECONDS)]
            gone = self._gone()
            if gone and not self._has_ended:
                self._end_without(*gone[0])
            if any(key.fd == signals for key in ready):
                for number in os.read(signals, 64):
                    if number in SIGNALS:
                        self._take(signal.Signals(number))
            if self._store is not None and time.monotonic() - looked >= LOOK_SECONDS:
                looked = time.monotonic()
                try:
                    self._leave_if_over(self._store)
                    if self.beats:
                        self._store.add(f"{BEAT}/{self.rank}", 1)
                    if self._read(self._store, STOP) is not None:
                        self.requested = True
                except dist.DistError:  # The main thread will notice, and knows more.
                    self._store = None

    def _gone(self) -> list[tuple[int, Process]]:
        """Return the ranks of this machine that have ended, with their processes."""
        return [key.data for key, _ in self._sources.select(0) if key.data]

    def _end_without(self, rank: int, process: Process) -> NoReturn:
        """End all ranks because one has ended, unless it left because another lets all leave."""
        with contextlib.suppress(dist.DistError):
            if self._store is not None:
                self._leave_if_over(self._store)
        self.end_all(
            f"error: rank {rank} (process {process.pid} on {process.host}) is gone without a "
            "word: it was killed, by hand or by the kernel for its memory (see dmesg), or it "
            "crashed; what it printed last, or its log, may say why",
            CRASH,
        )

    def _take(self, number: signal.Signals) -> None:
        """Take a signal: it is the request, or ends all ranks."""
        if self._has_ended or (self._ending.locked() and number == signal.SIGTERM):
            return
        if self._store is not None and number == signal.SIGTERM:
            try:
                self._leave_if_over(self._store)  # another rank has failed
            except dist.DistError:
                leave(CRASH)  # torchrun ends the other ranks when that with the store has failed
        # Of this rank: what asked another one may be the same Ctrl-C, a moment earlier.
        is_second = self._was_asked and (number == signal.SIGINT or self._had_interrupt)
        if is_second or not self.can_save:
            nothing = "nothing is saved" if self.requested else "there is nothing to save yet"
            hint = "; continue with --resume" if self.can_resume else ""
            # torchrun would let the others wait for a rank that left with 0 before it joined them.
            # (WORLD_SIZE may be that of a side later.)
            has_joined = self.world_size >= int(os.environ.get("WORLD_SIZE", 1))
            can_resume = self.can_resume and not self.requested and has_joined
            code = DONE if can_resume else BY_SIGNAL + number
            text = f"{number.name}: ended at once, {nothing}{hint}"
            self.end_all(text, code, is_at_once=True)
        self._was_asked = True
        if number == signal.SIGINT:
            self._had_interrupt = True
        if not self.requested:
            self.requested = True
            if self._set_first(STOP, str(self.rank)) == str(self.rank):
                with contextlib.suppress(OSError, ValueError):
                    say(f"{number.name}: the run ends after this step")


def _launcher() -> str:
    """Return a name of the torchrun that started this rank, in a line; a host may have several."""
    return f"{socket.gethostname()} {os.environ.get('GROUP_RANK', '')}"


def _end_children() -> None:
    """Kill what this process has started, and what that has: no `finally` of users runs any more.

    A process with a session of its own is meant to stay, as a tracker's that still sends rows.
    """
    found = [os.getpid()]
    for process in found:
        for children in Path(f"/proc/{process}/task").glob("*/children"):
            with contextlib.suppress(OSError):  # The thread has ended.
                found += [int(child) for child in children.read_text().split()]
    for process in found[1:]:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getsid(process) == os.getsid(0):
                os.kill(process, signal.SIGKILL)


def _in_time(act: Callable[[], None]) -> None:
    """Do something, and wait for it as long as the record of an end may take."""
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    thread.join(SECONDS_TO_RECORD)


def _wait_until(happened: Callable[[], bool]) -> None:
    """Wait for it, not longer than ranks may take to leave."""
    end = time.monotonic() + SECONDS_TO_LEAVE
    while not happened() and time.monotonic() < end:
        time.sleep(0.02)


def leave(code: int) -> NoReturn:
    """End this process at once, without destructors and without waiting for threads.

    Destructors would wait for ranks that still wait for this one, and a thread of a user's code may
    never end. What this process has started ends with it.
    """
    _end_children()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # A closed pipe, or a closed stream.
            stream.flush()
    _exit(code)
