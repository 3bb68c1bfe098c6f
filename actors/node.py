"""The node of this process: its address in the cluster, and a place for files and sockets that are no other user's business."""

from __future__ import annotations

import ipaddress
import os
import shutil
import stat
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from configs import settings

_ANSWER_S = 60.0  # of nvidia-smi
_LONGEST = 65  # characters: a unix socket's path has at most 107, and vLLM calls its sockets by 36


def address() -> str:
    """This node's IP address, as the cluster knows it, without brackets. Loopback in a process of no cluster."""
    if not ray.is_initialized():
        return "127.0.0.1"
    found: str = ray.util.get_node_ip_address()
    return found.strip("[]")


def own_id() -> str:
    """Ray's id of this node."""
    return str(ray.get_runtime_context().get_node_id())


def pinned(node_id: str) -> dict[str, Any]:
    """Ray's options of a task or an actor on the node of this id, and on no other."""
    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=False)}


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


def gpus() -> list[str]:
    """The GPUs that Ray gave this actor: UUIDs; without NVIDIA's library, the node and Ray's number. Makes no CUDA context."""
    context = ray.get_runtime_context()
    given = context.get_accelerator_ids()["GPU"]
    uuids: list[str] = []
    if given:
        import torch

        with suppress(OSError):  # there is no such library
            uuids = torch.cuda._raw_device_uuid_nvml() or []  # of all that the machine has, whichever this process may use
    by_number = dict(enumerate(uuids))
    return [one if not one.isdecimal() else by_number.get(int(one), f"{context.get_node_id()}/{one}") for one in given]


def query_gpus(*fields: str, only: str | None = None) -> list[list[str]]:
    """What nvidia-smi says of each GPU of this machine, field by field, numbers without units; none where it says nothing.

    Makes no CUDA context, which would take memory of the GPU.

    Args:
        fields: of `nvidia-smi --help-query-gpu`. only: indices or UUIDs, with commas between; None: all.
    """
    if (program := shutil.which("nvidia-smi")) is None:
        return []
    command = [program, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits", *([f"--id={only}"] if only else [])]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [[part.strip() for part in line.split(",")] for line in said.splitlines() if line.strip()]


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
