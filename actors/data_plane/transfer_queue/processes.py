"""TransferQueue's two actors as this project runs them. Classes of its own, so that a process that unpickles one comes by `lean` first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transfer_queue.controller import TransferQueueController
from transfer_queue.sampler import BaseSampler
from transfer_queue.storage.simple_storage import SimpleStorageUnit

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


class FirstWrittenSampler(BaseSampler):  # type: ignore[misc]
    """Samples of a claim: in the order in which their keys were first written, each once per consumer.

    Runs inside the controller, whose one request thread makes every claim atomic.
    TransferQueue's own SequentialSampler goes by index, and indexes of cleared samples are used again.
    """

    def sample(
        self, ready_indexes: Sequence[int], batch_size: int, *, partition: Any, consumer: str = "", give_back: Sequence[str] = (), **_: Any
    ) -> tuple[list[int], list[int]]:
        """The indexes to hand out, and the same to mark as taken; none when fewer than `batch_size` are ready.

        Args:
            partition: the controller's own record; its keys stand in order of creation.
            give_back: keys that `consumer` has taken and not received; they become ready again.
        """
        for key in give_back:
            if key in partition.keys_mapping:
                partition.consumption_status[consumer][partition.keys_mapping[key]] = 0
        ready = set(ready_indexes)
        chosen = [index for index in partition.keys_mapping.values() if index in ready][:batch_size]
        return (chosen, chosen) if len(chosen) == batch_size else ([], [])


class Controller(_OnLoopback, TransferQueueController.__ray_actor_class__):  # type: ignore[misc]
    """Keys, columns and tags. In polling mode: else a claim that must wait would put the controller itself to sleep."""

    def __init__(self) -> None:
        super().__init__(sampler=FirstWrittenSampler, polling_mode=True)


class StorageUnit(_OnLoopback, SimpleStorageUnit.__ray_actor_class__):  # type: ignore[misc]
    """Values, in blocks. Not bounded as a whole: `register_partition` bounds each partition."""

    def __init__(self, units: int) -> None:
        super().__init__({"num_data_storage_units": units, "total_storage_size": None})
        self.storage_data: BlockData = BlockData(None)
