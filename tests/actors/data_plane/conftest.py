"""One Ray and one queue for the session; each test has a partition of its own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch

from actors.data_plane.connect import DataPlaneAddress, connect
from actors.data_plane.interface import DataPlane
from actors.data_plane.memory import MemoryPlane
from configs.run import DataPlaneConfig

TIMEOUT_S = 30.0
StartQueue = Callable[[str, DataPlaneConfig], DataPlaneAddress]
_numbers = itertools.count()


@pytest.fixture(scope="session")
def start_queue(ray_session: None) -> Iterator[StartQueue]:
    """Starts the queue of one run; all are stopped at the end."""
    from actors.data_plane import transfer_queue as queue

    started: list[DataPlaneAddress] = []

    def start(namespace: str, config: DataPlaneConfig) -> DataPlaneAddress:
        started.append(queue.start(namespace, config))
        return started[-1]

    yield start
    for address in started:
        queue.stop(address)


@pytest.fixture(scope="session")
def address(start_queue: StartQueue) -> DataPlaneAddress:
    return start_queue("test-data-plane", DataPlaneConfig(num_storage_units=2))


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
