"""One queue for the session; tests keep apart by partition."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from actors.data_plane.connect import DataPlaneAddress
from configs.run import DataPlaneConfig


@pytest.fixture(scope="session")
def start_queue(ray_session: None) -> Iterator[Callable[[str, int], DataPlaneAddress]]:
    """Starts the queue of one run; all are stopped at the end."""
    from actors.data_plane import transfer_queue as queue

    started: list[DataPlaneAddress] = []

    def start(namespace: str, storage_units: int) -> DataPlaneAddress:
        started.append(queue.start(namespace, DataPlaneConfig(num_storage_units=storage_units)))
        return started[-1]

    yield start
    for address in started:
        queue.stop(address)


@pytest.fixture(scope="session")
def address(start_queue: Callable[[str, int], DataPlaneAddress]) -> DataPlaneAddress:
    return start_queue("test-data-plane", 2)
