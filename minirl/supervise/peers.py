"""The processes of other ranks on this machine, as /proc shows them."""

from typing import NamedTuple

from minirl.supervise import guard


class Peer(NamedTuple):
    """Another rank: where its process is, and when it began, in ticks of its machine's clock."""

    rank: int
    host: str
    pid: int
    began: str
    guard: int  # Its process id; 0: there is none.
    secret: str  # What it signs with in the store, which anybody can reach. Only ranks know it.


def stat_of(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on; none if the process is gone."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def is_alive(peer: Peer) -> bool:
    """Whether the process of a rank runs on this machine."""
    stat = stat_of(peer.pid)
    return bool(stat) and stat[0] not in "ZX" and stat[19] == peer.began


def runs(peer: Peer) -> bool:
    """Whether the process of a rank runs on this machine, and nobody has stopped it."""
    return is_alive(peer) and not guard.is_stopped(peer.pid)
