"""How any process of a run reaches the run's data plane. Importing this module does not import transfer_queue.

start (driver) ──► DataPlaneAddress, picklable ──► actors, tasks, Ray workers ── connect ──► DataPlane
"""

from __future__ import annotations

from dataclasses import dataclass

from actors.data_plane.interface import DataPlane


@dataclass(frozen=True)
class Endpoint:
    """One actor of the data plane.

    Attributes:
        actor: its name in the run's Ray namespace.
        server_id: the id under which its ZMQ server answers.
        ip, ports: where that server listens, by socket name.
    """

    actor: str
    server_id: str
    ip: str
    ports: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class DataPlaneAddress:
    """Where one run's data plane is. Holds no handles: passing it around keeps nothing alive.

    Attributes:
        metrics: "host:port" of the Prometheus endpoint, when `data_plane.prometheus_port` is set.
    """

    namespace: str
    controller: Endpoint
    storage: tuple[Endpoint, ...]
    metrics: str | None = None


def connect(address: DataPlaneAddress, timeout_s: float) -> DataPlane:
    """A client in this process, which must be attached to the run's Ray cluster. Clients of one process share a connection.

    Args:
        timeout_s: longest wait for any one call, in seconds.

    Raises:
        DataPlaneGoneError: the run's data plane has ended, or does not answer.
        DataPlaneError: no Ray cluster is attached.
    """
    from actors.data_plane.transfer_queue import TransferQueuePlane

    return TransferQueuePlane(address, timeout_s)
