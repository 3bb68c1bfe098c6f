"""Where one run's data plane is, and what opens it: plain values, picklable."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Endpoint:
    """One actor of the data plane.

    Attributes:
        actor: its name in the run's Ray namespace.
        server_id: the id under which its ZMQ server answers.
        host: its node's address; a path is the folder of its unix sockets.
        ports: where in `host` that server listens, by socket name.
    """

    actor: str
    server_id: str
    host: str
    ports: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class ClientKeys:
    """What a client needs where servers listen on a network. Whoever has it can run code in the run: for Ray to carry, and nobody to print.

    Attributes:
        public, secret: one CURVE pair of all clients, Z85.
        server: the servers' public key, Z85.
    """

    public: bytes
    secret: bytes = field(repr=False)
    server: bytes


@dataclass(frozen=True)
class DataPlaneAddress:
    """Holds no handles: passing it around keeps nothing alive.

    Attributes:
        metrics: "host:port" of the Prometheus endpoint, when `data_plane.prometheus_port` is set.
        keys: None where the sockets are unix sockets.
    """

    namespace: str
    controller: Endpoint
    storage: tuple[Endpoint, ...]
    metrics: str | None = None
    keys: ClientKeys | None = field(default=None, repr=False)
