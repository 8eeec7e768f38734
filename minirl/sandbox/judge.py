"""The outer side of a trial; minirl/sandbox/inside/trial.py has the inner one."""

import contextlib
import selectors
import socket

from minirl.sandbox.inside.trial import PASSED


class Judge:
    """Sends tests into the sandbox and hears whether they have passed.

    It never waits: `send` and `hear` are called when the selector says that they can.

    Args:
        tests: Python statements.
    """

    def __init__(self, tests: str):
        self.passed = False
        self.own, self.inner = socket.socketpair()
        self.own.setblocking(False)
        self._unsent = tests.encode(errors="replace")
        self._heard = b""

    def send(self, selector: selectors.BaseSelector) -> None:
        """Send what fits into the connection; then listen."""
        with contextlib.suppress(ConnectionError):  # the process has ended
            num_sent = self.own.send(self._unsent)
            self._unsent = self._unsent[num_sent:]
            if self._unsent:
                return
            self.own.shutdown(socket.SHUT_WR)
            selector.modify(self.own, selectors.EVENT_READ, self.hear)
            return
        selector.unregister(self.own)

    def hear(self, selector: selectors.BaseSelector) -> None:
        """Take the verdict, or notice that there will be none."""
        with contextlib.suppress(ConnectionError):
            self.passed = self.own.recv(len(PASSED)) == PASSED
        selector.unregister(self.own)

    def close(self) -> None:
        """Close both ends."""
        self.own.close()
        self.inner.close()
