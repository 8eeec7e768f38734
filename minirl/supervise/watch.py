"""What a rank hears beside its work: signals, the ends of other ranks, and time limits.

A thread of its own hears them, because the main thread may stand in a collective for minutes. It
ends the process where the main thread cannot. Time limits have another thread (limits.py), and a
process beside this one is there for code that stops all threads (guard.py). One rank says why the
run ends; the others hear that from the store and leave in silence.

Signals ask a training program to save and to leave:

* The first SIGTERM, SIGUSR1, SIGINT or SIGHUP, on any rank, is a request. All ranks agree on it
  where they meet anyway, at the end of a step.
* A SIGINT after it ends all ranks at once. So does any signal after a SIGINT: torchrun sends SIGINT
  for the first Ctrl-C and SIGTERM for the second.
* A SIGTERM that comes because another rank has failed is no request: torchrun ends the others so.
"""

import contextlib
import os
import secrets
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import NoReturn

import torch.distributed as dist

from minirl.base.errors import BAD_INPUT, BY_SIGNAL, CRASH, DONE
from minirl.base.log import printable, restore_streams, say
from minirl.base.oversight import Oversight
from minirl.supervise import agent, guard
from minirl.supervise.limits import Limit, Limits
from minirl.supervise.peers import Peer, is_alive, runs, stat_of

_exit = os._exit  # Python's own. While a rank listens, `os._exit` is `Watch._refuse_exit`.

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)

LOOK_SECONDS = 1.0  # The store and the other ranks are looked at so often.
SECONDS_TO_RECORD = 10.0  # For summary and curves of a run that fails.
SECONDS_TO_LEAVE = 20.0  # For ranks that run to hear that all leave; a loaded machine is slow.
NUM_FRAMES = 8  # Of a stack, the innermost ones.

# Keys of the store.
NEWS = "minirl/news"  # Counts what was written to the keys below.
TOLD = "minirl/told"  # Counts who wanted to say why the run ends; the first one does.
TELLER = "minirl/teller"  # The machine of the rank that says why the run ends, and what it says.
OVER = "minirl/over"  # The exit code with which the run ends.
STOP = "minirl/stop"  # The name of the signal that asked for a checkpoint.
ASKED = "minirl/asked"  # Somebody wants to know what all ranks are doing.
DOING = "minirl/doing"  # /RANK: the reply.
ENDED = "minirl/ended"  # Counts the ranks that have done all their work.
LEFT = "minirl/left"  # Counts the ranks that have left before that.


class Watch(Oversight):
    """The watch of a rank; it hears nothing before `listen`.

    Attributes:
        goes_on: a program that ends at once can be started again with --resume.
    """

    def __init__(self) -> None:
        super().__init__()
        self.goes_on = False
        self.rank = int(os.environ.get("RANK", 0))
        self.world_size = 1
        self._store: dist.Store | None = None
        self._has_store = False  # The store is in this process and ends with it.
        self._peers: list[Peer] = []
        self._secret = secrets.token_hex(16)
        self._secrets: list[str] = []  # Of all ranks.
        self._limits = Limits(self.rank, self._end_over_limit)
        self._had_interrupt = False  # A SIGINT is the request.
        self._has_ended = False  # All ranks have done their work; nothing is a failure any more.
        self._has_replied = False
        self._ending = threading.Lock()  # Kept by the one thread that ends this process.

    # ----------------------------------------------------------------------------------------------
    # beginning and end

    def listen(self) -> None:
        """Take signals and os._exit, and start the threads. Only the main thread may call it."""
        vars(os)["_exit"] = partial(self._refuse_exit, os.getpid())
        heard, wakeup = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        for number in SIGNALS:
            signal.signal(number, _ignore)
            signal.siginterrupt(number, False)
        self._limits.start()
        threading.Thread(target=self._run, args=(heard,), name="watch", daemon=True).start()

    def join(self, store: dist.Store, rank: int, peers: list[Peer]) -> None:
        """Hear from the other ranks, too.

        Args:
            store: of all ranks. The watch talks to it over a connection of its own, because the
                main thread may wait in it.
            rank: of this process.
            peers: all ranks, in rank order. Of those on this machine it sees when they end.
        """
        self.rank = rank
        self.world_size = len(peers)
        self._secrets = [peer.secret for peer in peers]
        here = peers[rank].host
        self._peers = [p for p in peers if p.rank != rank and p.host == here and is_alive(p)]
        own_store = store.clone()  # type: ignore[attr-defined]  # not in torch's stubs
        own_store.set_timeout(timedelta(seconds=30))
        self._store = own_store
        agents_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self._has_store = rank == 0 and not agents_store

    def end(self) -> None:
        """Wait until all ranks have done their work. From then on no end of a rank is a failure."""
        self._has_ended = True
        store = self._store
        if store is None:
            return
        with contextlib.suppress(dist.DistError):  # The rank that had the store has left.
            num_ended = store.add(ENDED, 1)
            while num_ended < self.world_size:
                time.sleep(0.01)
                self._leave_if_over(store)
                num_ended = store.add(ENDED, 0)

    def this_process(self, rank: int) -> Peer:
        """Return this process, as the other ranks know it."""
        pid = os.getpid()
        began = stat_of(pid)[19]
        return Peer(rank, socket.gethostname(), pid, began, self._limits.guard, self._secret)

    # ----------------------------------------------------------------------------------------------
    # time limits

    def limit(
        self, seconds: float, what: Callable[[], str]
    ) -> contextlib.AbstractContextManager[Limit]:
        """End the run if the block takes longer, as `Oversight.limit` says."""
        return self._limits.limit(seconds, what)

    def renew(self, limit: Limit) -> None:
        """Let the time of a limit begin now."""
        self._limits.renew(limit)

    def pause(self, limit: Limit) -> None:
        """Let a limit wait for `renew`."""
        self._limits.pause(limit)

    def _end_over_limit(self, limit: Limit) -> NoReturn:
        where = f"phase {self.phase()}, stack:\n{stack_of(limit.thread)}"
        self.end_all(f"error: rank {self.rank}: {limit.what()}\nIt stands in {where}", BAD_INPUT)

    # ----------------------------------------------------------------------------------------------
    # the end of all ranks

    def end_all(self, message: str, code: int) -> NoReturn:
        """Say why the run ends, unless another rank has, and end this rank and all others.

        It can be called in any thread, and does not return. A thread that comes while another one
        ends this rank waits for that end: its failure may be a consequence, and its exit code would
        not be that of the reason.
        """
        self._ending.acquire()
        store = self._store
        is_first = True  # If the store is gone, whoever had it could not say why.
        with contextlib.suppress(dist.DistError):
            is_first = store is None or store.add(TOLD, 1) == 1
        if not is_first:
            self._leave_with_the_first(code)
        message = printable(message)
        self._tell_why(f"minirl: {message}")
        restore_streams()
        with contextlib.suppress(OSError, ValueError):  # A closed pipe, or a closed stream.
            print(f"\nminirl: {message}", file=sys.stderr, flush=True)
        self._record("failed", message)
        if threading.current_thread() is not threading.main_thread():
            self.finish_writing()  # while the other ranks, which it needs, are there
        self._leave_all(code)

    def _refuse_exit(self, pid: int, code: int) -> NoReturn:
        """Say who calls os._exit and end all ranks; with code 0 the run would look finished.

        Args:
            pid: of this rank. Its forks leave as they want.
            code: that the caller wants to leave with.
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

    def _tell_why(self, text: str) -> None:
        """Tell torchrun, and the ranks of other machines for theirs, why the run ends."""
        agent.tell_agent(text)
        with contextlib.suppress(dist.DistError):
            if self._store is not None:
                self._store.set(TELLER, f"{socket.gethostname()}\n{text}")

    def _leave_with_the_first(self, code: int) -> NoReturn:
        """Leave as the rank that says why the run ends lets all ranks leave.

        This one has failed because that one leaves, or for a reason of its own, which nobody needs.

        Args:
            code: of this rank, if the other one does not come to say its code.
        """
        store = self._store
        end = time.monotonic() + SECONDS_TO_LEAVE
        with contextlib.suppress(dist.DistError):  # The store is gone, too.
            while store is not None and time.monotonic() < end:
                over = self._read(store, OVER)
                if over is not None:
                    code = int(over)
                    break
                time.sleep(0.02)
        self._leave_all(code, is_silent=True)

    def _leave_all(self, code: int, *, is_silent: bool = False) -> NoReturn:
        """Let all ranks leave. `is_silent`: another rank says why."""
        store = self._store
        own_code = code
        with contextlib.suppress(dist.DistError):
            if store is not None:
                self._announce(store, OVER, str(code))
                if is_silent:
                    own_code = self._code_beside_teller(store, code)
                store.add(LEFT, 1)
                if self._has_store:
                    self._wait_for_the_others(store)
        leave(own_code)

    def _code_beside_teller(self, store: dist.Store, code: int) -> int:
        """Return the exit code of a rank that leaves because another one says why the run ends.

        torchrun's report lists every rank that fails, and one is enough. So on the machine of the
        rank that says why, the others leave with 0. On another machine the first rank has the exit
        code of the run, and repeats the reason for the report of torchrun there.
        """
        if not code or not store.check([TELLER]):
            return code
        host, _, text = store.get(TELLER).decode().partition("\n")
        if host != socket.gethostname() and os.environ.get("LOCAL_RANK") == "0":
            agent.tell_agent(text)
            return code
        return DONE

    def _wait_for_the_others(self, store: dist.Store) -> None:
        """Keep the store until the other ranks have read in it that all leave.

        A rank that finds the store gone does not know why the run ends. Ranks of this machine that
        are stopped or gone are not waited for.
        """
        num_elsewhere = self.world_size - 1 - len(self._peers)
        end = time.monotonic() + SECONDS_TO_LEAVE
        while store.add(LEFT, 0) < self.world_size and time.monotonic() < end:
            if num_elsewhere == 0 and not any(runs(peer) for peer in self._peers):
                return
            time.sleep(0.02)

    def wait_for_cause(self, seconds: float) -> None:
        """Leave if another rank is, or comes to be, the reason why this one fails.

        Call it when something has failed that depends on other ranks.
        """
        end = time.monotonic() + seconds
        with contextlib.suppress(dist.DistError):  # The store is gone, too.
            while self._store is not None and time.monotonic() < end:
                self._look(self._store)
                time.sleep(0.05)

    def describe_all(self, seconds: float, error: BaseException) -> str:
        """Return what all ranks are doing, as far as they reply in time.

        Args:
            seconds: to wait for the replies.
            error: what has ended the work of this rank.
        """
        store = self._store
        own = self._describe("".join(traceback.format_tb(error.__traceback__)[-NUM_FRAMES:]))
        if store is None:
            return own
        replies = []
        with contextlib.suppress(dist.DistError):
            self._announce(store, ASKED, "1")
            end = time.monotonic() + seconds
            for rank in range(self.world_size):
                key = f"{DOING}/{rank}"
                if rank == self.rank:
                    replies.append(own)
                    continue
                while not store.check([key]) and time.monotonic() < end:
                    time.sleep(0.05)
                silent = f"rank {rank} does not reply: it is stopped, or its machine is gone"
                replies.append(store.get(key).decode() if store.check([key]) else silent)
        return "\n".join(replies)

    def _describe(self, stack: str) -> str:
        """Return what this rank is doing: its phase, and where its main thread stands."""
        return f"rank {self.rank} is in phase {self.phase()}, stack:\n{stack.rstrip()}"

    # ----------------------------------------------------------------------------------------------
    # the thread

    def _run(self, heard: int) -> None:
        """Hear. Bytes of `heard` are the numbers of signals."""
        looked = time.monotonic()
        while True:
            ready, _, _ = select.select([heard], [], [], LOOK_SECONDS)
            now = time.monotonic()
            store = self._store
            for number in os.read(heard, 64) if ready else b"":
                if number in SIGNALS:
                    self._take(signal.Signals(number))
            if store is not None and not self._has_ended and now - looked >= LOOK_SECONDS:
                looked = now
                try:
                    self._look(store)
                except dist.DistError:  # The main thread will notice, and knows more.
                    self._store = None

    def _take(self, number: signal.Signals) -> None:
        """Take a signal: it is the request, or ends all ranks."""
        if self._has_ended or (self._ending.locked() and number == signal.SIGTERM):
            return
        store = self._store
        if store is not None and number == signal.SIGTERM:
            try:
                self._look(store)  # leaves if another rank has failed
            except dist.DistError:
                leave(CRASH)  # torchrun ends the ranks beside one that had the store
        is_second = self.requested and (number == signal.SIGINT or self._had_interrupt)
        if is_second or not self.can_save:
            self._end_at_once(number)
        if number == signal.SIGINT:
            self._had_interrupt = True
        if not self.requested:
            self.requested = True
            text = f"{number.name}: the run ends after this step, with a checkpoint"
            self._say_once(text, key=f"{STOP}/told")
            with contextlib.suppress(dist.DistError):
                if store is not None:
                    self._announce(store, STOP, number.name)

    def _end_at_once(self, number: signal.Signals) -> NoReturn:
        """End all ranks without a checkpoint, as the signal asks for."""
        self._ending.acquire()
        hint = "; go on with --resume" if self.goes_on else ""
        nothing = "nothing is saved" if self.requested else "there is nothing to save yet"
        code = DONE if self.goes_on and not self.requested else BY_SIGNAL + number
        text = f"{number.name}: ended at once, {nothing}{hint}"
        if self._say_once(text, key=TOLD):
            agent.tell_agent(f"minirl: {text}")
            self._record("stopped", text)
            self._leave_all(code)
        self._leave_with_the_first(code)

    def _record(self, state: str, reason: str) -> None:
        """Note how the run ends, if the file system lets us in time."""
        recorder = threading.Thread(target=self.record_end, args=(state, reason), daemon=True)
        recorder.start()
        recorder.join(SECONDS_TO_RECORD)

    def _say_once(self, message: str, key: str) -> bool:
        """Print a line, unless another rank has; return whether this one was the first.

        `key` of the store counts who wanted to.
        """
        store = self._store
        is_first = True
        with contextlib.suppress(dist.DistError):
            is_first = store is None or store.add(key, 1) == 1
        if is_first:
            with contextlib.suppress(OSError, ValueError):
                say(message)
        return is_first

    def _look(self, store: dist.Store) -> None:
        """Look at what others have written, and whether those of this machine are alive."""
        dead = [peer for peer in self._peers if not is_alive(peer)]
        if store.add(NEWS, 0):
            self._leave_if_over(store)
            if self._read(store, STOP):
                self.requested = True
            if not self._has_replied and self._read(store, ASKED):
                self._has_replied = True
                main = threading.main_thread().ident
                assert main is not None
                store.set(f"{DOING}/{self.rank}", self._describe(stack_of(main)))
        if dead and not self._has_ended:
            peer = dead[0]
            if guard.has_told(peer.guard):
                self._ending.acquire()
                self._leave_all(BAD_INPUT)
            self.end_all(
                f"error: rank {peer.rank} (process {peer.pid} on {peer.host}) is gone without a "
                "word: it was killed, by hand or by the kernel for its memory (see dmesg), or it "
                "crashed; what it printed last, or its log, may say why",
                CRASH,
            )

    def _leave_if_over(self, store: dist.Store) -> None:
        """Leave if another rank has let all ranks leave and no thread of this one is ending it."""
        over = self._read(store, OVER)
        if over is None or not self._ending.acquire(blocking=False):
            return
        code = CRASH
        with contextlib.suppress(dist.DistError):  # The rank that had the store has left.
            code = self._code_beside_teller(store, int(over))
            store.add(LEFT, 1)
        leave(code)

    def _announce(self, store: dist.Store, key: str, value: str) -> None:
        """Set a key for the other ranks, signed, and let them know."""
        store.set(key, f"{self.rank} {self._secret} {value}")
        store.add(NEWS, 1)

    def _read(self, store: dist.Store, key: str) -> str | None:
        """Return what a rank has announced; None: nothing, or it was somebody else.

        The store listens on all interfaces, and takes whatever anybody writes there.
        """
        if not store.check([key]):
            return None
        announced = store.get(key).decode(errors="replace")
        for rank, secret in enumerate(self._secrets):
            signature = f"{rank} {secret} "
            if announced.startswith(signature):
                return announced.removeprefix(signature)
        return None


def _ignore(number: int, frame: object) -> None:
    """Do nothing: the watch has read the signal from the wakeup descriptor."""


def stack_of(thread: int) -> str:
    """Return the innermost frames of a thread's Python stack."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return "  (the thread has ended)"
    return "".join(traceback.format_stack(frame)[-NUM_FRAMES:]).rstrip()


def leave(code: int) -> NoReturn:
    """End this process at once, without destructors and without waiting for threads.

    Destructors would wait for ranks that still wait for this one, and a thread of a user's code may
    never end.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # A closed pipe, or a closed stream.
            stream.flush()
    _exit(code)
