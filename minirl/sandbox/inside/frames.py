"""Texts over a socket: each is a frame, four bytes of length and then the text."""

import socket
import struct

LENGTH = struct.Struct("=I")


def send(peer: socket.socket, text: bytes) -> None:
    """Send a frame."""
    peer.sendall(LENGTH.pack(len(text)) + text)


def receive(peer: socket.socket, longest: int = 2**32, patience: int | None = None) -> bytes:
    """Return the next frame; nothing if the other side has left.

    Args:
        peer: the connection.
        longest: length that a frame may have in bytes.
        patience: how often to wait as long as `peer`'s timeout, or for a part of the frame. None:
            for ever.

    Raises:
        ConnectionError: the frame is longer, or is cut.
        TimeoutError: it takes longer.
    """
    head = _receive_exactly(peer, LENGTH.size, patience)
    if not head:
        return b""
    (length,) = LENGTH.unpack(head)
    if not 0 < length <= longest:
        raise ConnectionError(f"a frame of {length} bytes")
    return _receive_exactly(peer, length, patience)


def _receive_exactly(peer: socket.socket, length: int, patience: int | None) -> bytes:
    """Return so many bytes; nothing if there are none. Raises as `receive`."""
    received = bytearray()
    num_waits = 0
    while len(received) < length:
        num_waits += 1
        if patience is not None and num_waits > patience:
            raise TimeoutError
        try:
            part = peer.recv(min(length - len(received), 2**20))
        except TimeoutError:
            continue
        if not part:
            if received:
                raise ConnectionError("a frame is cut")
            break
        received += part
    return bytes(received)
