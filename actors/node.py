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

_LONGEST = 65  # characters: a unix socket's path has at most 107, and vLLM calls its sockets by 36


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
    """A new folder of this machine that only this user enters, in the temporary directory if that will do, else in /tmp.

    Its path is short enough for sockets in it. Its maker removes it.

    Raises:
        OSError: another user could put a folder of his own in its place.
    """
    for above in (tempfile.gettempdir(), "/tmp"):
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=above))
        if is_private(folder) and len(str(folder)) <= _LONGEST:
            return folder
        folder.rmdir()
    raise PermissionError(f"{above}: other users may rename what lies there: set its sticky bit (chmod +t)")


def is_private(path: Path) -> bool:
    """Whether no other user (but root) can reach what is in the folder `path`, or put another in its place."""
    for folder in (*reversed(path.parents), path):
        found = folder.stat()
        mine, movable = found.st_uid == os.getuid(), found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX
        if movable or not (mine or found.st_uid == 0):
            return False
        if mine and not found.st_mode & 0o077:
            return True
    return False
