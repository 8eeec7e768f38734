"""The outer side of the talk about tests; minirl/confine/program.py has the inner one."""

import contextlib
import json
import secrets
import selectors
import socket

from minirl.confine.program import READY


class Judge:
    """Gives a program its tests when it has run, and hears whether they have passed.

    It never waits: `talk` is called when the selector says that there is something to do.

    Args:
        tests: Python statements.
    """

    def __init__(self, tests: str):
        self.passed = False
        self.own, self.inner = socket.socketpair()
        self.own.setblocking(False)
        nonce = secrets.token_hex(16)
        self._verdict = nonce.encode()
        self._unsent = json.dumps({"source": tests, "nonce": nonce}).encode()
        self._heard = b""

    def talk(self, selector: selectors.BaseSelector) -> None:
        """Say or hear the next bytes. A program that says anything unexpected is left alone."""
        with contextlib.suppress(ConnectionError):  # the program has left
            if self._heard == READY and self._unsent:
                self._send(selector)
                return
            heard = self.own.recv(4096)
            self._heard += heard
            if self._heard == READY and self._unsent:
                selector.modify(self.own, selectors.EVENT_WRITE, self.talk)
                return
            self.passed = not self._unsent and self._heard == READY + self._verdict
            if heard and (READY + self._verdict).startswith(self._heard) and not self.passed:
                return
        selector.unregister(self.own)

    def _send(self, selector: selectors.BaseSelector) -> None:
        num_sent = self.own.send(self._unsent)
        self._unsent = self._unsent[num_sent:]
        if not self._unsent:
            self.own.shutdown(socket.SHUT_WR)
            selector.modify(self.own, selectors.EVENT_READ, self.talk)

    def close(self) -> None:
        """Close both ends."""
        self.own.close()
        self.inner.close()
