"""One Ray and one queue for the session; each test has a partition of its own."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from unittest.mock import patch

import pytest
import torch

from actors.data_plane.address import DataPlaneAddress
from actors.data_plane.connect import connect
from actors.data_plane.in_memory import MemoryPlane
from actors.data_plane.interface import DataPlane

TIMEOUT_S = 30.0
_numbers = itertools.count()


@dataclass(frozen=True)
class Plane:
    """A plane of either kind, and how to make one more client of the same partitions with its own timeout."""

    plane: DataPlane
    with_timeout: Callable[[float], DataPlane]


@pytest.fixture(params=["memory", "transfer_queue"])
def made(request: pytest.FixtureRequest) -> Iterator[Plane]:
    torch.set_num_threads(1)
    if request.param == "memory":
        plane = MemoryPlane(TIMEOUT_S)
        made = Plane(plane, lambda timeout_s: another_client(plane, timeout_s))
    else:
        address: DataPlaneAddress = request.getfixturevalue("address")
        made = Plane(connect(address, timeout_s=TIMEOUT_S), lambda timeout_s: connect(address, timeout_s=timeout_s))
    yield made
    made.plane.close()


def another_client(plane: MemoryPlane, timeout_s: float) -> MemoryPlane:
    """Of the same partitions."""
    other = MemoryPlane(timeout_s)
    other._partitions, other._changed = plane._partitions, plane._changed
    return other


@pytest.fixture
def plane(made: Plane) -> DataPlane:
    return made.plane


@pytest.fixture
def partition() -> str:
    return new_partition()


def new_partition() -> str:
    return f"partition-{next(_numbers)}"


class Interrupted(BaseException):
    """What `interrupted_after` raises, as a KeyboardInterrupt would."""


@contextlib.contextmanager
def interrupted_after(seconds: float) -> Iterator[None]:
    """Interrupts a call of this thread that has not ended after this time."""
    from actors.data_plane.transfer_queue import connection

    thread, real = threading.current_thread(), connection.Connection._check

    def check(link: connection.Connection, what: str, end: float, limit_s: float) -> None:
        if threading.current_thread() is thread:
            raise Interrupted
        real(link, what, end, limit_s)

    with patch.object(connection, "_PROBE_EVERY_S", seconds), patch.object(connection.Connection, "_check", check):
        yield
