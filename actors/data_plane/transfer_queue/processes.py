"""TransferQueue's two actors as this project runs them. Classes of its own, so that a process that unpickles one comes by `lean` first."""

from __future__ import annotations

from typing import Any

from transfer_queue.controller import TransferQueueController
from transfer_queue.storage.simple_storage import SimpleStorageUnit

from actors.data_plane.transfer_queue.sampler import FirstWrittenSampler
from actors.data_plane.transfer_queue.storage import BlockData


class _OnLoopback:
    """Metrics are for this machine, unless a person forwards them; the library serves them on the node's address."""

    _node_ip: str

    def serve_metrics(self, port: int) -> Any:
        """Start the Prometheus exporter (0: on any free port). Returns "host:port"."""
        node, self._node_ip = self._node_ip, "127.0.0.1"
        try:
            return self.start_metrics(port=port)  # type: ignore[attr-defined]
        finally:
            self._node_ip = node


class Controller(_OnLoopback, TransferQueueController.__ray_actor_class__):  # type: ignore[misc]
    """Keys, columns and tags. In polling mode: else a claim that must wait would put the controller itself to sleep."""

    def __init__(self) -> None:
        super().__init__(sampler=FirstWrittenSampler, polling_mode=True)


class StorageUnit(_OnLoopback, SimpleStorageUnit.__ray_actor_class__):  # type: ignore[misc]
    """Values, in blocks. Not bounded as a whole: `register_partition` bounds each partition."""

    def __init__(self, units: int) -> None:
        super().__init__({"num_data_storage_units": units, "total_storage_size": None})
        self.storage_data: BlockData = BlockData(None)
