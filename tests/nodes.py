"""A Ray cluster of several nodes on this machine: each has an address, and files, of its own. Gone with the block.

    switch    a network namespace with a bridge
    ├── nodes[0]  10.77.0.1    ray start --head         sees the directory `private` as it is; the run's command starts here
    ├── nodes[1]  10.77.0.2    ray start --address ..   has an empty disk in its place
    └── nodes[2]  10.77.0.3    likewise

Every other path is that of the machine, as on nodes that share a file system. Each node's Ray has a fork server, as that of `make up` has:
else its workers would import torch, vLLM and Megatron a dozen times.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from configs import settings
from tests.conftest import ROOT
from tests.patience import WAIT_S

_NETWORK, _PORT = "10.77.0", 6379
_STARTED = "Ray runtime started."
_GONE_S = 10.0


@dataclass(frozen=True)
class Node:
    """Attributes:
    holder: pid of the process that keeps its namespaces. port: its link's name at the switch.
    """

    holder: int
    switch: int
    port: str
    address: str

    def command(self, command: Sequence[str]) -> list[str]:
        """The command, to be run on this node, in the repository."""
        return ["nsenter", f"--target={self.holder}", "--net", "--mount", f"--wdns={ROOT}", "--", *command]

    def processes(self) -> list[psutil.Process]:
        """Those that run on it, but for the holder."""
        here, found = Path(f"/proc/{self.holder}/ns/net").stat().st_ino, []
        for process in psutil.process_iter():
            with suppress(OSError):
                if process.pid != self.holder and Path(f"/proc/{process.pid}/ns/net").stat().st_ino == here:
                    found.append(process)
        return found

    def cut_off(self) -> None:
        """As when its power goes: nobody hears of it, not even that its connections end."""
        _run(["nsenter", f"--target={self.switch}", "--net", "ip", "link", "set", self.port, "down"])
        self.end()

    def end(self) -> None:
        """Kill all that runs on it."""
        deadline = time.monotonic() + _GONE_S
        while left := self.processes():
            assert time.monotonic() < deadline, left
            for process in left:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(left, timeout=1)


@contextmanager
def cluster(private: Path, cpus: Sequence[int], **variables: str) -> Iterator[tuple[str, list[Node]]]:
    """A cluster with so many nodes, and their logical CPUs. Yields its address, and the nodes.

    Args:
        variables: of the environment of the head's Ray.

    The test is skipped where the kernel gives no namespaces.
    """
    with ExitStack() as stack:
        places = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="f", dir="/tmp")))  # a socket's path must be short
        switch = stack.enter_context(_holder("--net", script="ip link add hub type bridge && ip link set hub up"))
        _run(["nsenter", f"--target={switch}", "--net", "ip", "address", "add", f"{_NETWORK}.254/24", "dev", "hub"])
        hosts = private / "hosts"
        hosts.write_text("127.0.0.1 localhost\n" + "".join(f"{_address(number)} node-{number}\n" for number in range(len(cpus))))
        nodes = [stack.enter_context(_node(switch, number, hosts, hides=number > 0)) for number in range(len(cpus))]
        address = f"{nodes[0].address}:{_PORT}"
        head = ["--head", f"--port={_PORT}", "--include-dashboard=false", f"--temp-dir={private / 'r'}"]
        first = stack.enter_context(_ray(nodes[0], places / nodes[0].address, cpus[0], *head, **variables))
        _await_started([first])
        others = [
            stack.enter_context(_ray(node, places / node.address, count, f"--address={address}"))
            for node, count in zip(nodes[1:], cpus[1:], strict=True)
        ]
        _await_started([first, *others])
        yield address, nodes


def _await_started(rays: Sequence[Callable[[], str]]) -> None:
    """Until all say so. One that ends fails the test at once, with its words; so does a head that ends after its start."""
    deadline = time.monotonic() + WAIT_S
    while waited_for := [text for said in rays if _STARTED not in (text := said())]:
        assert time.monotonic() < deadline, waited_for[0]
        time.sleep(0.1)


@contextmanager
def _ray(node: Node, place: Path, cpus: int, *options: str, **variables: str) -> Iterator[Callable[[], str]]:
    """Yields what reads its log, while it runs. Args: place: directory for the fork server's socket; it is made."""
    place.mkdir()
    own = [f"--node-ip-address={node.address}", f"--num-cpus={cpus}", f"--object-store-memory={128 * 2**20}", "--disable-usage-stats"]
    command = [sys.executable, "-m", "flows.service.ray_head", str(place), "start", "--block", *own, *options]
    # Nobody who starts a cluster by hand has this project's "0".
    environment = settings.child_environment(
        PYTHONPATH=settings.python_path(ROOT), RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="1", GRPO_FLOWS_FORKS="", **variables
    )
    log = place / "log"
    with log.open("w") as output:
        process = subprocess.Popen(node.command(command), stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment)

    def said() -> str:
        assert process.poll() is None, log.read_text()
        return log.read_text()

    try:
        yield said
    finally:
        node.end()
        process.wait()


@contextmanager
def _node(switch: int, number: int, hosts: Path, *, hides: bool) -> Iterator[Node]:
    """Args: hosts: names of all nodes, as there is nobody to ask: torch looks for them when ranks meet. hides: the directory it is in."""
    script = f"ip link set lo up && mount --bind {hosts} /etc/hosts" + (f" && mount -t tmpfs none {hosts.parent}" if hides else "")
    with _holder("--net", "--mount", script=script) as holder:
        node = Node(holder, switch, f"port{number}", _address(number))
        outside = ["nsenter", f"--target={switch}", "--net", "ip", "link"]
        inside = ["nsenter", f"--target={holder}", "--net", "ip"]
        _run([*outside, "add", node.port, "type", "veth", "peer", "name", "eth0", "netns", str(holder)])
        _run([*outside, "set", node.port, "master", "hub", "up"])
        _run([*inside, "address", "add", f"{node.address}/24", "dev", "eth0"])
        _run([*inside, "link", "set", "eth0", "up"])
        _run([*inside, "route", "add", "default", "via", f"{_NETWORK}.254"])  # Ray asks for the way out to know its own address
        yield node


def _address(number: int) -> str:
    return f"{_NETWORK}.{number + 1}"


@contextmanager
def _holder(*namespaces: str, script: str) -> Iterator[int]:
    """A process in new namespaces, which ends with the block or with this process. Yields its pid."""
    command = ["unshare", *namespaces, "sh", "-c", f"{script} && echo ready && exec cat"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        if process.stdout.readline() != b"ready\n":
            pytest.skip(f"the kernel gives no namespaces with a network: {process.stderr.read().decode().strip()}")
        yield process.pid
        process.stdin.close()


def _run(command: Sequence[str], **variables: str) -> None:
    done = subprocess.run(
        command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=settings.child_environment(**variables)
    )
    assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}"
