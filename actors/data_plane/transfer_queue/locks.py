"""Who reaches the queue's sockets. TransferQueue unpickles what it receives, so that whoever can send it two frames runs code in it.

    a cluster on loopback    ipc://FOLDER/0, 1, ..    unix sockets in a folder that only this user enters
    any other cluster        tcp://NODE:PORT          CURVE: encrypted, and both ends know each other by the run's keys

    start (driver) ── choose ──► Folder | Keys ──► servers    of `Keys` they let in only who has the clients' key (ZAP)
                                 └─ ClientKeys ──► clients    talk only to who has the servers' key

Ray carries the keys, as arguments of actors. CURVE alone would do for both, at a third of the speed (`benchmarks.data_plane`: 4,096 samples
are put at 0.22 GB/s, through unix sockets at 0.79, through TCP without a lock at 0.70).
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from threading import Thread
from typing import Any

import zmq
from transfer_queue.controller import TQ_CONTROLLER_ZMQ_MAX_SOCKETS
from transfer_queue.storage.managers import AsyncSimpleStorageManager, StorageManagerFactory
from transfer_queue.utils import zmq_utils
from zmq.utils import z85

from actors import node
from actors.data_plane.address import ClientKeys

type Context = zmq.Context[zmq.Socket[bytes]]

_REQUIRED = b"run"  # a ZAP domain: connections are refused if the authenticator is gone


@dataclass(frozen=True)
class Folder:
    """Unix sockets in `path`, whose mode is 0700. Paths of sockets hold 107 bytes at most, so names in it are numbers."""

    path: str

    @property
    def host(self) -> str:
        """As `Endpoint.host`."""
        return self.path

    def context(self) -> Context:
        """For the sockets of one server."""
        return _context()

    def bind(self, server: zmq.Socket[bytes], number: int) -> int:
        """Listen. Returns the port, as of `Endpoint.ports`: `number`, which no other socket of the run may have."""
        server.bind(_place(self.path, number))
        return number


@dataclass(frozen=True)
class Keys:
    """CURVE pairs of the servers and of the clients of one run, public and secret, Z85."""

    servers: tuple[bytes, bytes] = field(default_factory=zmq.curve_keypair, repr=False)
    clients: tuple[bytes, bytes] = field(default_factory=zmq.curve_keypair, repr=False)

    @property
    def host(self) -> str:
        """As `Endpoint.host`; of the node of this process."""
        return node.address()

    @property
    def of_clients(self) -> ClientKeys:
        """What clients get."""
        return ClientKeys(*self.clients, self.servers[0])

    def context(self) -> Context:
        """For the sockets of one server, which lets in the run's clients only. Its other sockets are a client's."""
        context = _context()
        unlock(context, self.of_clients)
        questions = context.socket(zmq.REP)
        questions.bind("inproc://zeromq.zap.01")
        Thread(target=_answer, args=(questions, z85.decode(self.clients[0])), name="zap", daemon=True).start()
        return context

    def bind(self, server: zmq.Socket[bytes], number: int) -> int:
        """Listen on this node's address. Returns the port."""
        server.curve_server, server.curve_secretkey = True, self.servers[1]
        server.zap_domain, server.zap_enforce_domain = _REQUIRED, True
        host = self.host
        return server.bind_to_random_port(f"tcp://[{host}]" if ":" in host else f"tcp://{host}")


type Locks = Folder | Keys


def choose() -> Locks:
    """Unix sockets where no other machine can join the cluster, else keys. In the driver."""
    if node.is_loopback():
        return Folder(str(node.private_folder("queue-")))
    return Keys()


def remove(host: str) -> None:
    """What is kept for the sockets of an `Endpoint.host`, when the run has ended."""
    if host.startswith("/"):
        shutil.rmtree(host, ignore_errors=True)


def unlock(context: zmq.Context[Any], keys: ClientKeys) -> None:
    """Sockets that are made of this context from now on are a client's."""
    context.curve_publickey, context.curve_secretkey, context.curve_serverkey = keys.public, keys.secret, keys.server


@StorageManagerFactory.register("Locked")
class LockedStorageManager(AsyncSimpleStorageManager):  # type: ignore[misc]
    """Its base, but that it shakes hands by a socket of its client's context: the base's own context has no keys."""

    def _connect_to_controller(self) -> None:
        with self.zmq_context.socket(zmq.DEALER, socket_class=zmq.Socket) as self.controller_handshake_socket:
            self.controller_handshake_socket.linger = 0
            self._do_handshake_with_controller()
        self.controller_handshake_socket = None


def _answer(questions: zmq.Socket[bytes], allowed: bytes) -> None:
    """libzmq asks who may come in (ZeroMQ RFC 27). Until the context ends: pyzmq's ThreadAuthenticator would have to be stopped before."""
    with questions:
        while True:
            try:
                version, request, _domain, _address, _identity, mechanism, *credentials = questions.recv_multipart()
            except zmq.ContextTerminated:
                return
            status = b"200" if mechanism == b"CURVE" and credentials == [allowed] else b"400"
            questions.send_multipart([version, request, status, b"", b"", b""])


def _context() -> Context:
    context: Context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, min(TQ_CONTROLLER_ZMQ_MAX_SOCKETS, context.get(zmq.SOCKET_LIMIT)))  # before the first socket
    return context


def _place(host: str, port: int, of_node: Any = zmq_utils.format_zmq_address) -> str:
    """An address for ZMQ."""
    return f"ipc://{host}/{port}" if host.startswith("/") else of_node(host, port)


zmq_utils.format_zmq_address = _place  # every client's socket asks it where to connect to
