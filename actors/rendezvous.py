"""Where the ranks of a process group meet.

    one machine    file:///proc/PID/fd/N    a file without a name, of rank 0: only this user opens it, and nothing listens
    several        an actor (`Board`)       reached through Ray, so only by those who may use the cluster

    rank 0  announce() ─┬─► place ──► every rank  store(place, world_size, ..) ──► torch's or vLLM's process group
    owner   board() ────┘

torch's TCPStore, the usual place, asks nobody who he is: any peer sets keys, and vLLM unpickles what it finds in one.
"""

from __future__ import annotations

import datetime
import os
import time
from typing import Any
from urllib.parse import urlsplit

import ray
from torch._C._distributed_c10d import FileStore, Store
from torch.distributed import DistStoreError

from actors import node

_LOOK_S = 0.02  # between two looks for a key

Place = Any  # the URL of a file that all ranks see, or the handle of a `Board`


def announce() -> str:
    """A place on one machine, of which this process is rank 0: all ranks see this process in /proc.

    It is there until the process ends: a group looks into its store all its life.
    """
    return f"file:///proc/{os.getpid()}/fd/{os.memfd_create('grpo-flows-rendezvous')}"


def board() -> Any:
    """A place for ranks on several nodes: an actor on this node, which ends with the process that called this."""
    remote: Any = ray.remote  # its types know no affinity to a node
    return remote(num_cpus=0, **node.pinned(node.own_id()))(Board).remote()


def store(place: Place, world_size: int, timeout_s: float) -> Store:
    """What the ranks write into and read from.

    Args:
        timeout_s: longest wait for a key, in seconds.
    """
    found = FileStore(urlsplit(place).path, world_size) if isinstance(place, str) else BoardStore(place)
    found.set_timeout(datetime.timedelta(seconds=timeout_s))
    return found


class Board:
    """Keys and values, bytes. Wrapped by `ray.remote` in `board`."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        """Replace the key's value."""
        self._values[key] = value

    def add(self, key: str, amount: int) -> int:
        """Add to a number. Returns the sum."""
        self._values[key] = str(int(self._values.get(key, b"0")) + amount).encode()
        return int(self._values[key])

    def find(self, keys: list[str]) -> list[bytes] | None:
        """The values of the keys, once all are there."""
        return [self._values[key] for key in keys] if all(key in self._values for key in keys) else None

    def delete(self, key: str) -> bool:
        """Whether the key was there."""
        return self._values.pop(key, None) is not None


_kept: list[BoardStore] = []  # torch's threads call them, and hold no reference that Python counts


class BoardStore(Store):
    """A `Board` as torch's store; gloo and NCCL call it from threads of their own.

    Each method raises DistStoreError when the board is gone, or the key did not come within the timeout.
    """

    def __init__(self, board: Any) -> None:
        super().__init__()
        self._board, self._timeout = board, datetime.timedelta(seconds=300)
        _kept.append(self)

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """Of `get` and `wait`."""
        self._timeout = timeout

    def set(self, key: str, value: str | bytes) -> None:
        """Replace the key's value."""
        self._ask("set", key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        """The key's value, when it is there."""
        return self._wait([key], self._timeout)[0]

    def add(self, key: str, value: int) -> int:
        """Add to a number. Returns the sum."""
        return int(self._ask("add", key, value))

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""
        return self._ask("find", keys) is not None

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        """Return when all keys are there."""
        self._wait(keys, timeout or self._timeout)

    def delete_key(self, key: str) -> bool:
        """Whether the key was there."""
        return bool(self._ask("delete", key))

    def _wait(self, keys: list[str], timeout: datetime.timedelta) -> list[bytes]:
        deadline = time.monotonic() + timeout.total_seconds()
        while (values := self._ask("find", keys)) is None:
            if time.monotonic() > deadline:
                raise DistStoreError(f"{', '.join(keys)}: no rank has written this within {timeout.total_seconds():g} s")
            time.sleep(_LOOK_S)
        found: list[bytes] = values
        return found

    def _ask(self, method: str, *arguments: Any) -> Any:
        try:
            return ray.get(getattr(self._board, method).remote(*arguments), timeout=self._timeout.total_seconds())
        except ray.exceptions.RayError as error:
            raise DistStoreError(f"where the ranks meet: {type(error).__name__}: {error}") from error
