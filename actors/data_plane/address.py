"""Where one run's data plane is: plain values, picklable."""

from __future__ import annotations

from dataclasses import dataclass


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
    """Holds no handles: passing it around keeps nothing alive.

    Attributes:
        metrics: "host:port" of the Prometheus endpoint, when `data_plane.prometheus_port` is set.
    """

    namespace: str
    controller: Endpoint
    storage: tuple[Endpoint, ...]
    metrics: str | None = None
