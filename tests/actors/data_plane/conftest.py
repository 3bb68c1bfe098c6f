"""One Ray and one queue for the session; each test has a partition of its own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch

from actors.data_plane.connect import DataPlaneAddress, connect
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
        made = Plane(plane, plane.with_timeout)
    else:
        address: DataPlaneAddress = request.getfixturevalue("address")
        made = Plane(connect(address, timeout_s=TIMEOUT_S), lambda timeout_s: connect(address, timeout_s=timeout_s))
    yield made
    made.plane.close()


@pytest.fixture
def plane(made: Plane) -> DataPlane:
    return made.plane


@pytest.fixture
def partition() -> str:
    return new_partition()


def new_partition() -> str:
    return f"partition-{next(_numbers)}"
