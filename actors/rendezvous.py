"""Where the ranks of a process group meet. Rank 0 says it, so no port is guessed; a place is a URL.

    rank 0  announce() ──► place ──► every rank  store(place, rank, ..) ──► torch's or vLLM's process group

    one machine    file:///proc/PID/fd/N    a file without a name, of rank 0: only this user opens it, and nothing listens
    several        tcp://NODE:PORT          torch's TCPStore, on the cluster's address of rank 0's node only

By itself a TCPStore listens on every address of the machine. It asks nobody who he is, and vLLM unpickles what it finds in one.
"""

from __future__ import annotations

import datetime
import os
import socket
from urllib.parse import urlsplit

from torch._C._distributed_c10d import FileStore, Store, TCPStore

from actors import node

_bound: dict[str, socket.socket] = {}  # sockets of this process on which a TCPStore will listen, by place


def announce(one_machine: bool = True) -> str:
    """A place of which this process is rank 0. It is there until the process ends: a group looks into its store all its life.

    Args:
        one_machine: all ranks see this process in /proc.
    """
    if one_machine:
        return f"file:///proc/{os.getpid()}/fd/{os.memfd_create('grpo-flows-rendezvous')}"
    host = node.address()
    bound = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    place = f"tcp://[{host}]:{bound.getsockname()[1]}" if ":" in host else f"tcp://{host}:{bound.getsockname()[1]}"
    _bound[place] = bound
    return place


def store(place: str, rank: int, world_size: int, timeout_s: float) -> Store:
    """What the ranks write into and read from.

    Args:
        place: of `announce`, or the URL of a file that all ranks see. Of a tcp:// URL rank 0 is the process that announced it, once.
        timeout_s: longest wait for a key, in seconds.

    Raises:
        KeyError: rank 0 has not announced the place. RuntimeError (torch's): rank 0 is not there.
    """
    url, timeout = urlsplit(place), datetime.timedelta(seconds=timeout_s)
    if url.scheme == "file":
        found: Store = FileStore(url.path, world_size)
    else:
        assert url.hostname is not None
        assert url.port is not None
        bound = _bound.pop(place).detach() if rank == 0 else None
        found = TCPStore(url.hostname, url.port, world_size, rank == 0, timeout, wait_for_workers=False, master_listen_fd=bound)
    found.set_timeout(timeout)
    return found
