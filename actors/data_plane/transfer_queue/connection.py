"""Connection: one process's link to one run's queue. Sockets, an event loop thread, deadlines, and a watch on the actors.

plane ── run(request, seconds) ──► answer
           │ once a second without one: is an actor dead?  ──► DataPlaneGoneError that names it
           └ interrupted, or out of time                   ──► the request is cancelled, or its answer undone
"""

from __future__ import annotations

import asyncio
import atexit
import threading
import time
from uuid import uuid4

import ray
from ray.exceptions import RayActorError
from transfer_queue.client import AsyncTransferQueueClient
from transfer_queue.storage.simple_storage import StorageKeyNotFoundError
from transfer_queue.utils.enum_utils import Role
from transfer_queue.utils.zmq_utils import ZMQServerInfo

from actors.data_plane.address import DataPlaneAddress, Endpoint
from actors.data_plane.interface import DataPlaneError, DataPlaneGoneError, UnknownKeyError
from actors.data_plane.transfer_queue.locks import unlock
from actors.data_plane.transfer_queue.loop import LoopStoppedError, LoopThread, Request, Undo
from actors.data_plane.transfer_queue.records import Record
from actors.data_plane.transfer_queue.requests import Requests
from actors.waiting import ActorGoneError, find

CONTROLLER = "data_plane_controller"
_PROBE_EVERY_S = 1.0  # a call that takes longer has the actors' health looked at this often

_connections: dict[DataPlaneAddress, Connection] = {}
_lock = threading.Lock()


def connection(address: DataPlaneAddress, timeout_s: float) -> Connection:
    """This process's link to the run's queue, made on first use.

    Raises:
        DataPlaneGoneError: the queue has ended, or does not answer. DataPlaneError: no Ray cluster attached.
    """
    with _lock:
        if address not in _connections:
            _connections[address] = Connection(address, timeout_s)
        return _connections[address]


def disconnect(address: DataPlaneAddress) -> None:
    """End this process's link, if there is one."""
    with _lock:
        if link := _connections.pop(address, None):
            link.close()


class Connection:
    """Made by `connection`.

    Attributes:
        loop: where every coroutine of the plane runs; the sockets belong to it.
        requests: what can be asked.
        records: what is known of partitions.
    """

    def __init__(self, address: DataPlaneAddress, timeout_s: float) -> None:
        require_ray()
        try:
            self._actors = {end.actor: find(end.actor, address.namespace) for end in (address.controller, *address.storage)}
        except ActorGoneError as error:
            raise DataPlaneGoneError(str(error)) from error
        self.records: dict[str, Record] = {}
        self._closing = False
        controller = _server(address.controller, Role.CONTROLLER)
        self._client = AsyncTransferQueueClient(f"data_plane_client_{uuid4().hex[:8]}", controller, zmq_io_threads=2)
        if address.keys:
            unlock(self._client.zmq_context, address.keys)
        storage = {"zmq_info": {end.actor: _server(end, Role.STORAGE) for end in address.storage}}
        end = time.monotonic() + timeout_s
        while True:
            try:
                self._client.initialize_storage_manager("Locked", storage)
                break
            except TimeoutError as error:  # after 4 s: a busy machine may need longer, a dead controller never answers
                late = f"{CONTROLLER} did not answer within {timeout_s:g} s" if time.monotonic() >= end else None
                if reason := self._look()[0] or late:
                    self._client.close()
                    raise DataPlaneGoneError(f"connect: {reason}") from error
        self.requests = Requests(self._client)
        self.loop = LoopThread("data-plane")

    def run[T](self, request: Request[T], what: str, seconds: float, undo: Undo[T] | None = None) -> T:
        """What a request returns. When the caller is interrupted or the time is over, the request is cancelled.

        Args:
            undo: gets the answer of a request that ended all the same.

        Raises:
            DataPlaneGoneError: an actor died, none answered in time, or the run's data plane was stopped.
            UnknownKeyError: a sample was cleared meanwhile. DataPlaneError: TransferQueue's own errors.
        """
        end = time.monotonic() + seconds
        try:
            call = self.loop.submit(request)
        except LoopStoppedError as error:
            raise DataPlaneGoneError(f"{what}: the run's data plane was stopped") from error
        try:
            while not call.wait(min(_PROBE_EVERY_S, max(0.0, end - time.monotonic()))):
                self._check(what, end, seconds)
        except BaseException:
            call.abandon(undo)
            raise
        try:
            return call.result()
        except DataPlaneError:
            raise
        except StorageKeyNotFoundError as error:
            raise UnknownKeyError(f"{what}: a sample was cleared meanwhile ({error})") from error
        except (Exception, asyncio.CancelledError) as error:
            if dead := self._look()[0]:
                raise DataPlaneGoneError(f"{what}: {dead}") from error
            raise DataPlaneError(f"{what}: TransferQueue failed: {type(error).__name__}: {error}") from error

    def close(self) -> None:
        """Stop the loop, then release the sockets (in this order: the loop's thread uses them)."""
        if not self.loop.stopped:
            self._closing = True
            self.loop.stop()
            if self.loop.stopped:
                self._client.close()

    def _check(self, what: str, end: float, seconds: float) -> None:
        dead, silent = self._look()
        if dead:
            raise DataPlaneGoneError(f"{what}: {dead}")
        if time.monotonic() >= end:
            raise DataPlaneGoneError(f"{what}: no answer from {', '.join(silent or self._actors)} within {seconds:g} s")

    def _look(self) -> tuple[str | None, list[str]]:
        """Why no answer will come, if so; and which actors do not answer Ray (that may be a busy machine)."""
        if self._closing:
            return "the run's data plane was stopped", []
        if not ray.is_initialized():
            return "this process has left the Ray cluster", []
        refs = {handle.get_zmq_server_info.remote(): name for name, handle in self._actors.items()}
        done, silent = ray.wait(list(refs), num_returns=len(refs), timeout=_PROBE_EVERY_S)
        for ref in done:
            try:
                ray.get(ref, timeout=_PROBE_EVERY_S)
            except RayActorError:
                return f"{refs[ref]} died", []
        return None, [refs[ref] for ref in silent]


def require_ray() -> None:
    """Raises: DataPlaneError (no Ray cluster attached)."""
    # Without this, looking up an actor would start a cluster of its own.
    if not ray.is_initialized():
        raise DataPlaneError("this process is not attached to a Ray cluster: call ray.init(address=...) first")


def _server(end: Endpoint, role: Role) -> ZMQServerInfo:
    return ZMQServerInfo(role=role, id=end.server_id, ip=end.host, ports=dict(end.ports))


@atexit.register
def _close_connections() -> None:
    for link in _connections.values():
        link.close()
