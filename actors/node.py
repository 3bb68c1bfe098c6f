"""The node of this process: its address in the cluster, and a place for files and sockets that are no other user's business."""

from __future__ import annotations

import ipaddress
import os
import stat
import tempfile
from pathlib import Path

import ray


def address() -> str:
    """This node's IP address, as the cluster knows it, without brackets."""
    found: str = ray.util.get_node_ip_address()
    return found.strip("[]")


def is_loopback() -> bool:
    """Whether the cluster is this machine alone: no other can join it."""
    return ipaddress.ip_address(address()).is_loopback


def private_folder(prefix: str) -> Path:
    """A new folder of this machine that only this user enters. Its path is short enough for unix sockets, which take 107 bytes.

    It goes with the files of Ray's session, if these are private themselves. Ray lets every user of the machine rename its folders,
    unless something above them is closed; then the folder is one of the temporary directory, and its maker removes it.
    """
    here = ray.get_runtime_context().get_node_id()
    socket = next(node["ObjectStoreSocketName"] for node in ray.nodes() if node["NodeID"] == here)
    session = Path(socket).parent
    return Path(tempfile.mkdtemp(prefix=prefix, dir=session if is_private(session) else None))


def is_private(path: Path) -> bool:
    """Whether no other user (but root) can reach what is at `path`, or put something else in its place."""
    closed = False
    for folder in (*reversed(path.parents), path):
        found = folder.stat()
        mine, movable = found.st_uid == os.getuid(), found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX
        if not closed and (movable or not (mine or found.st_uid == 0)):
            return False
        closed = closed or (mine and not found.st_mode & 0o077)
    return closed
