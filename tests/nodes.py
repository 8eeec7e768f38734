"""Several machines on one: torchrun's agents, each in a network of its own.

Where the system allows it, a node has its own network namespace, joined to the other by a pair of
virtual devices, and its own host name. Elsewhere nodes are loopback addresses of this machine. A
node's working folder is its own, so a relative path names another file on each.

The agents are torch's, made by torchrun's own flags. But they and their ranks are forks of a
process that has imported everything (tests/preload.py): an agent of two ranks starts in half a
second of CPU, where imports would take twenty.
"""

import contextlib
import ctypes
import multiprocessing
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from harness import PRELOAD
from programs import Ended, hold_port

RANKS_PER_NODE = 2
CLONE_NEWNET, CLONE_NEWUTS = 0x40000000, 0x04000000
DEVICE = "node0"  # of each namespace, the end of the pair


@dataclass
class Node:
    """A machine: its address, its own folder, and the namespaces that make it one."""

    address: str
    folder: Path
    namespaces: dict[str, int] = field(default_factory=dict)  # file -> kind; empty: this machine's
    environment: dict[str, str] = field(default_factory=dict)  # of its agent and ranks

    def enter(self) -> None:
        """Make this process one of the node."""
        libc = ctypes.CDLL(None, use_errno=True)
        for path, kind in self.namespaces.items():
            with open(path) as namespace:
                if libc.setns(namespace.fileno(), kind):
                    raise OSError(ctypes.get_errno(), f"setns to {path}")
        if self.namespaces:
            os.environ["GLOO_SOCKET_IFNAME"] = DEVICE
        os.environ.update(self.environment)
        os.chdir(self.folder)


@contextlib.contextmanager
def two_nodes(folder: Path) -> Iterator[list[Node]]:
    """Yield two nodes that reach each other; their folders are below `folder`."""
    folders = [folder / "node-0", folder / "node-1"]
    for path in folders:
        path.mkdir(parents=True)
    # A process holds the namespaces of a node, for as long as this one keeps its stdin open.
    holders = [
        subprocess.Popen(
            ["unshare", "--net", "--uts", "sh", "-c", f"hostname {path.name} && echo up && cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        for path in folders
        if can_make_networks()
    ]
    try:
        nodes = []
        for i, holder in enumerate(holders):
            assert holder.stdout.readline() == b"up\n"
            kinds = {"net": CLONE_NEWNET, "uts": CLONE_NEWUTS}
            namespaces = {f"/proc/{holder.pid}/ns/{name}": kind for name, kind in kinds.items()}
            nodes.append(Node(f"10.77.0.{i + 1}", folders[i], namespaces))
        if nodes:
            _join(*(holder.pid for holder in holders))
        yield nodes or [Node(f"127.0.0.{i + 1}", path) for i, path in enumerate(folders)]
    finally:
        for holder in holders:
            holder.kill()
            holder.communicate()


def can_make_networks() -> bool:
    """Whether this user may make network namespaces and virtual devices, and has the tools."""
    script = "ip link add mine type veth peer name other"
    try:
        return subprocess.run(["unshare", "--net", "--uts", "sh", "-c", script]).returncode == 0
    except FileNotFoundError:
        return False


def _join(first: int, second: int) -> None:
    """Put a pair of devices between the networks of two processes."""
    ends = ["name", DEVICE, "netns"]
    subprocess.run(
        ["ip", "link", "add", *ends, str(first), "type", "veth", "peer", *ends, str(second)],
        check=True,
    )
    for i, pid in enumerate((first, second), start=1):
        script = (
            f"ip address add 10.77.0.{i}/24 dev {DEVICE}; ip link set {DEVICE} up; "
            "ip link set lo up"
        )
        subprocess.run(["nsenter", "-t", str(pid), "--net", "sh", "-ec", script], check=True)


class Agent:
    """A torchrun under way on a node. Its streams, and those of its ranks, go to a file."""

    def __init__(
        self, node: Node, launch: list[str], module: str, flags: list[str], log: Path
    ) -> None:
        self.log = log
        log.write_text("")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self.process = context.Process(
            target=_agent, args=(node, launch, module, [str(f) for f in flags], str(log))
        )
        self.process.start()

    def ranks(self) -> dict[int, psutil.Process]:
        """The processes that it started, by rank."""
        with contextlib.suppress(psutil.NoSuchProcess):
            children = psutil.Process(self.process.pid).children()
            return {int(p.name().removeprefix("rank-")): p for p in children if "rank-" in p.name()}
        return {}

    def kill(self) -> None:
        """Kill the agent, and it alone."""
        self.process.kill()
        self.process.join()


def _agent(node: Node, launch: list[str], module: str, flags: list[str], log: str) -> None:
    node.enter()
    for stream in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND), stream)
    from benchmarks.preempt_job import be_agent  # here, where its imports have been made

    be_agent(launch, module, flags)


class Job:
    """A program on all ranks of some nodes, under an agent on each of them."""

    def __init__(
        self,
        nodes: list[Node],
        module: str,
        flags: list[list[Any]],
        log: Path,
        *,
        max_restarts: int = 0,
    ) -> None:
        """`flags`: those of each node's agent."""
        self.nodes = nodes
        self.module = module
        self.flags = flags
        self.folder = log
        log.mkdir(parents=True, exist_ok=True)
        self.held, self.port = hold_port("" if nodes[0].namespaces else nodes[0].address)
        self.max_restarts = max_restarts
        self.agents: dict[int, Agent] = {}
        for i in range(len(nodes)):
            self.start(i)

    def start(self, i: int) -> None:
        """Start the agent of a node, or another one in its place."""
        node = self.nodes[i]
        is_host = str(i == 0).lower()
        launch = {
            "nnodes": len(self.nodes),
            "nproc-per-node": RANKS_PER_NODE,
            "local-addr": node.address,
            "rdzv-backend": "c10d",
            "rdzv-endpoint": f"{self.nodes[0].address}:{self.port}",
            "rdzv-id": "job",
            # An agent counts as dead when it was silent for ten seconds: a busy machine is slow.
            "rdzv-conf": f"is_host={is_host},keep_alive_interval=1,keep_alive_max_attempt=10",
            "max-restarts": self.max_restarts,
        }
        arguments = [f"--{name}={value}" for name, value in launch.items()]
        log = self.folder / f"agent-{i}-{time.monotonic_ns()}.txt"
        self.agents[i] = Agent(node, arguments, self.module, self.flags[i], log)

    def wait_for(self, happened: Callable[[], bool], seconds: float = 240) -> None:
        """Wait; raise AssertionError if an agent ends or the time is over before."""
        end = time.monotonic() + seconds
        while True:
            # Looked up first: an agent may end as soon as it has happened.
            is_over = time.monotonic() > end or not all(
                agent.process.is_alive() for agent in self.agents.values()
            )
            if happened():
                return
            if is_over:
                raise AssertionError(f"it did not come to that:\n{self.end(0).err}")
            time.sleep(0.01)

    def end(self, seconds: float = 240) -> Ended:
        """Wait for all agents; those that take longer are killed with their ranks.

        The exit code is that of the first agent that failed; all that was printed is in `err`.
        """
        end = time.monotonic() + seconds
        for agent in self.agents.values():
            agent.process.join(max(0.0, end - time.monotonic()))
        late = [agent for agent in self.agents.values() if agent.process.is_alive()]
        for agent in late:
            ranks = agent.ranks().values()
            agent.kill()
            for p in ranks:
                with contextlib.suppress(psutil.NoSuchProcess):
                    p.kill()
        self.held.close()
        codes = [agent.process.exitcode for agent in self.agents.values()]
        text = "".join(path.read_text() for path in sorted(self.folder.glob("agent-*.txt")))
        return Ended(next(filter(None, codes), 0), "", text)
