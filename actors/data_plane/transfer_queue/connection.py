"""Connection: one process's link to one run's queue. Sockets, an event loop thread, deadlines, and a watch on the actors.

plane's coroutine ── ask(request, deadline) ──► answer
                        │ once a second without one: is an actor dead?  ──► DataPlaneGoneError that names it
                        └ abandoned with a request in flight            ──► undo(its answer), when it comes
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import threading
import time
from collections.abc import Coroutine
from typing import Any
from uuid import uuid4

import ray
from ray.exceptions import RayActorError
from transfer_queue.client import AsyncTransferQueueClient
from transfer_queue.storage.simple_storage import StorageKeyNotFoundError
from transfer_queue.utils.enum_utils import Role
from transfer_queue.utils.zmq_utils import ZMQServerInfo

from actors.data_plane.connect import DataPlaneAddress, Endpoint
from actors.data_plane.interface import DataPlaneError, DataPlaneGoneError, UnknownKeyError
from actors.data_plane.loop import LoopThread, Undo
from actors.data_plane.transfer_queue.records import Record
from actors.data_plane.transfer_queue.requests import Requests

CONTROLLER = "data_plane_controller"
_PROBE_EVERY_S = 1.0  # a call that takes longer has the actors' health looked at this often

_connections: dict[DataPlaneAddress, Connection] = {}
_lock = threading.Lock()


class Deadline:
    """A point in time, and how long it was away when it was set."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._at = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds until then, at least 0."""
        return max(0.0, self._at - time.monotonic())


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
        undoing: work that gives back what abandoned requests took.
    """

    def __init__(self, address: DataPlaneAddress, timeout_s: float) -> None:
        require_ray()
        ends = (address.controller, *address.storage)
        self._actors = {end.actor: find(address.namespace, end.actor) for end in ends}
        if missing := [name for name, handle in self._actors.items() if handle is None]:
            raise DataPlaneGoneError(f"{missing[0]} is not in Ray namespace {address.namespace!r}: it died, or the run has ended")
        self.records: dict[str, Record] = {}
        self.undoing: set[asyncio.Task[None]] = set()
        controller = _server(address.controller, Role.CONTROLLER)
        self._client = AsyncTransferQueueClient(f"data_plane_client_{uuid4().hex[:8]}", controller, zmq_io_threads=2)
        storage = {"zmq_info": {end.actor: _server(end, Role.STORAGE) for end in address.storage}}
        deadline = Deadline(timeout_s)
        while True:
            try:
                self._client.initialize_storage_manager("SimpleStorage", storage)
                break
            except TimeoutError as error:  # after 4 s: a busy machine may need longer, a dead controller never answers
                late = f"{CONTROLLER} did not answer within {timeout_s:g} s" if not deadline.left else None
                if reason := self._look()[0] or late:
                    self._client.close()
                    raise DataPlaneGoneError(f"connect: {reason}") from error
        self.requests = Requests(self._client)
        self.loop = LoopThread("data-plane")

    async def ask[T](self, request: Coroutine[Any, Any, T], what: str, deadline: Deadline, undo: Undo[T] | None = None) -> T:
        """The answer to a request.

        Args:
            undo: gets the answer that came after this call was cancelled or past its deadline.

        Raises:
            DataPlaneGoneError: an actor died, or none answered in time. UnknownKeyError: a sample was cleared meanwhile.
            DataPlaneError: TransferQueue's own errors.
        """
        task = asyncio.ensure_future(request)
        try:
            while not (await asyncio.wait({task}, timeout=min(_PROBE_EVERY_S, deadline.left)))[0]:
                await self._check(what, deadline)
        except BaseException:
            if undo is None:
                task.cancel()
            else:
                self.give_back(_undo_late(task, undo))
            raise
        try:
            return task.result()
        except DataPlaneError:
            raise
        except StorageKeyNotFoundError as error:
            raise UnknownKeyError(f"{what}: a sample was cleared meanwhile ({error})") from error
        except (Exception, asyncio.CancelledError) as error:
            dead, _ = await asyncio.to_thread(self._look)
            if dead:
                raise DataPlaneGoneError(f"{what}: {dead}") from error
            raise DataPlaneError(f"{what}: TransferQueue failed: {type(error).__name__}: {error}") from error

    async def pause(self, seconds: float, what: str, since: float) -> float:
        """Sleep, while waiting for other clients. Looks at the actors when the last look (`since`) is a second old.

        Returns:
            When the actors were looked at last (time.monotonic).

        Raises:
            DataPlaneGoneError: an actor died.
        """
        await asyncio.sleep(seconds)
        if time.monotonic() - since < _PROBE_EVERY_S:
            return since
        dead, _ = await asyncio.to_thread(self._look)
        if dead:
            raise DataPlaneGoneError(f"{what}: {dead}")
        return time.monotonic()

    def give_back(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run clean-up that outlives the request it cleans up after. Later puts wait for it."""
        task = self.loop.start(_quietly(work))
        self.undoing.add(task)
        task.add_done_callback(self.undoing.discard)
        return task

    def close(self) -> None:
        """Stop the loop, then release the sockets (in this order: the loop's thread uses them)."""
        if not self.loop.stopped:
            self.loop.stop()
            if self.loop.stopped:
                self._client.close()

    async def _check(self, what: str, deadline: Deadline) -> None:
        dead, silent = await asyncio.to_thread(self._look)
        if dead:
            raise DataPlaneGoneError(f"{what}: {dead}")
        if not deadline.left:
            raise DataPlaneGoneError(f"{what}: no answer from {', '.join(silent or self._actors)} within {deadline.seconds:g} s")

    def _look(self) -> tuple[str | None, list[str]]:
        """Which actor died, if one did; and which do not answer Ray (that may be a busy machine)."""
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


async def _undo_late[T](task: asyncio.Future[T], undo: Undo[T]) -> None:
    try:
        answer = await task
    except Exception:  # noqa: BLE001  (it took nothing, and its caller has gone)
        return
    await undo(answer)


async def _quietly(work: Coroutine[Any, Any, None]) -> None:
    with contextlib.suppress(DataPlaneError):  # the queue has gone, and with it what was to be cleaned up
        await work


def require_ray() -> None:
    """Raises: DataPlaneError (no Ray cluster attached)."""
    # Without this, looking up an actor would start a cluster of its own.
    if not ray.is_initialized():
        raise DataPlaneError("this process is not attached to a Ray cluster: call ray.init(address=...) first")


def find(namespace: str, name: str) -> Any:
    """A named actor, or None."""
    try:
        return ray.get_actor(name, namespace=namespace)
    except ValueError:
        return None


def _server(end: Endpoint, role: Role) -> ZMQServerInfo:
    return ZMQServerInfo(role=role, id=end.server_id, ip=end.ip, ports=dict(end.ports))


@atexit.register
def _close_connections() -> None:
    for link in _connections.values():
        link.close()
