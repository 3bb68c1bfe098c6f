"""One queue for the session; tests keep apart by partition."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from actors.data_plane.address import DataPlaneAddress
from configs.run import DataPlaneConfig
from tests.stores import url

__all__ = ["url"]

StartQueue = Callable[[str, DataPlaneConfig], DataPlaneAddress]


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
