"""TransferQueue's two actors as this project runs them. Classes of its own, so that a process that unpickles one comes by `lean` first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import zmq
from transfer_queue.controller import TransferQueueController
from transfer_queue.sampler import BaseSampler
from transfer_queue.storage.simple_storage import TQ_STORAGE_ZMQ_BACKLOG, SimpleStorageUnit
from transfer_queue.utils.enum_utils import Role
from transfer_queue.utils.zmq_utils import ZMQServerInfo, create_zmq_socket

from actors.data_plane.transfer_queue.locks import Locks
from actors.data_plane.transfer_queue.storage import BlockData


class _Guarded:
    """What both do: their sockets have locks. The library's would listen to everyone who reaches the node."""

    _locks: Locks
    _node_ip: str

    def _listen(self, context: Any, number: int, **options: int) -> tuple[Any, int]:
        server = create_zmq_socket(context, zmq.ROUTER, self._locks.host)
        for name, value in options.items():
            setattr(server, name, value)
        return server, self._locks.bind(server, number)

    def _server_info(self, role: Role, server_id: str, **ports: int) -> ZMQServerInfo:
        return ZMQServerInfo(role=role, id=server_id, ip=self._locks.host, ports=ports)

    def serve_metrics(self, port: int) -> Any:
        """Start the Prometheus exporter (0: on any free port) for this machine, unless a person forwards it. Returns "host:port"."""
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


class Controller(_Guarded, TransferQueueController.__ray_actor_class__):  # type: ignore[misc]
    """Keys, columns and tags. In polling mode: else a claim that must wait would put the controller itself to sleep."""

    def __init__(self, locks: Locks) -> None:
        self._locks = locks
        super().__init__(sampler=FirstWrittenSampler, polling_mode=True)

    def _init_zmq_socket(self) -> None:
        self._node_ip, self.zmq_context = self._locks.host, self._locks.context()
        self.handshake_socket, handshake = self._listen(self.zmq_context, 0)
        self.request_handle_socket, requests = self._listen(self.zmq_context, 1)
        ports = {"handshake_socket": handshake, "request_handle_socket": requests}
        self.zmq_server_info = self._server_info(Role.CONTROLLER, self.controller_id, **ports)


class StorageUnit(_Guarded, SimpleStorageUnit.__ray_actor_class__):  # type: ignore[misc]
    """Values, in blocks. Not bounded as a whole: `register_partition` bounds each partition."""

    def __init__(self, locks: Locks, unit: int, units: int) -> None:
        self._locks, self._unit = locks, unit
        super().__init__({"num_data_storage_units": units, "total_storage_size": None})
        self.storage_data: BlockData = BlockData(None)

    def _init_zmq_socket(self) -> None:
        self._node_ip, self.zmq_context = self._locks.host, self._locks.context()
        self.put_get_socket, port = self._listen(self.zmq_context, 2 + self._unit, backlog=TQ_STORAGE_ZMQ_BACKLOG)
        self.worker_socket = create_zmq_socket(self.zmq_context, zmq.DEALER, self._node_ip)
        self.worker_socket.bind(self._inproc_addr)
        self.zmq_server_info = self._server_info(Role.STORAGE, str(self.storage_unit_id), put_get_socket=port)
