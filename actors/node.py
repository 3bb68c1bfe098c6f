"""The node of this process: its address in the cluster, and a place for files and sockets that are no other user's business."""

from __future__ import annotations

import ipaddress
import os
import stat
import tempfile
from pathlib import Path

import psutil
import ray

from configs import settings


def address() -> str:
    """This node's IP address, as the cluster knows it, without brackets. Loopback in a process of no cluster."""
    if not ray.is_initialized():
        return "127.0.0.1"
    found: str = ray.util.get_node_ip_address()
    return found.strip("[]")


def is_loopback() -> bool:
    """Whether the cluster is this machine alone: no other can join it."""
    return ipaddress.ip_address(address()).is_loopback


def bind_collectives() -> None:
    """Let gloo and NCCL of this process listen on the cluster's interface only, where the user has named none.

    By themselves gloo takes that of the host's name, and NCCL any but loopback. Both read this when the first group is made.
    """
    here = address()
    name = next((name for name, places in psutil.net_if_addrs().items() if any(place.address == here for place in places)), None)
    if name is not None:
        settings.set_for_process(**{key: settings.get(key) or name for key in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")})


def private_folder(prefix: str) -> Path:
    """A new folder of this machine that only this user enters. Its path is short: unix sockets take 107 bytes.

    It goes with the files of Ray's session, if these are private. Otherwise every user of the machine can rename Ray's folders, and
    the new one is in the temporary directory, where its maker removes it.
    """
    above: Path | None = None
    if ray.is_initialized():
        here = ray.get_runtime_context().get_node_id()
        socket = next(node["ObjectStoreSocketName"] for node in ray.nodes() if node["NodeID"] == here)
        above = closed_above(Path(socket))
    return Path(tempfile.mkdtemp(prefix=prefix, dir=above))


def closed_above(path: Path) -> Path | None:
    """The first folder above `path` that no other user (but root) can enter, or put something else in the place of. None: there is none."""
    for folder in reversed(path.parents):
        found = folder.stat()
        mine, movable = found.st_uid == os.getuid(), found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX
        if movable or not (mine or found.st_uid == 0):
            return None
        if mine and not found.st_mode & 0o077:
            return folder
    return None
