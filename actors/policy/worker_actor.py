"""The Ray side of a policy worker: a plain `PolicyWorker`, one call at a time.

Stages come in through `execute` (a compiled graph's node, or an actor call), other methods of the `PolicyWorker` through `call`; what only
an actor can do has methods of its own. A compiled graph runs `execute` on a background thread beside ordinary calls: the group
makes one call at a time, and a second one is refused here.
"""

from __future__ import annotations

import functools
import socket
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ray

from actors.data_plane.address import DataPlaneAddress
from actors.data_plane.connect import connect
from actors.data_plane.usage import OperationUsage
from actors.generation.types import Transport
from actors.heap import freeze_heap
from actors.policy.executors import Request
from actors.refit import transports
from actors.refit.transports import SharedBuffer, Transfer
from configs.policy import PolicyConfig


class OverlapError(RuntimeError):
    """Two calls on one worker at the same time. The group serialises them, so this is a bug of the caller."""


class PolicyWorkerActor:
    """Rank `rank` of the policy as an actor; `ray.remote` is applied when the group is built. Arguments as of `PolicyWorker`."""

    def __init__(
        self,
        config: PolicyConfig,
        model_path: str,
        rank: int,
        init_method: str,
        address: DataPlaneAddress,
        timeout_s: float,
        seed: int,
        temperature: float,
        transport: Transport = "host",
    ) -> None:
        """As `PolicyWorker`; and how its weights will go to engines."""
        from actors.policy.worker import PolicyWorker  # Megatron: imported in the worker's process only

        self._leads, self._transport, self._communicator = rank == 0, transport, None
        self._buffer: SharedBuffer | None = None
        self._plane = connect(address, timeout_s=timeout_s)
        self._worker = PolicyWorker(config, model_path, rank, init_method, self._plane, seed, temperature)
        self._busy, self._running = threading.Lock(), ""

    def ping(self) -> None:
        """Return at once: the actor lives."""

    def data_plane_usage(self) -> dict[str, OperationUsage]:
        """What this worker's data-plane client did so far."""
        return self._plane.usage()

    def execute(self, packed: bytes) -> bytes:
        """`call` with a packed `Request`; returns the packed result."""
        return Request.answer(packed, lambda request: self.call(request.method, *request.arguments))

    def call(self, method: str, *arguments: Any) -> Any:
        """A method of the `PolicyWorker`.

        Raises:
            OverlapError, or what the method raises.
        """
        with self._alone(method):
            return getattr(self._worker, method)(*arguments)

    def setup(self) -> dict[str, Any]:
        """`PolicyWorker.setup`, and what the transport of weights needs before the first refit."""
        info: dict[str, Any] = self.call("setup")
        if self._leads and self._transport == "nccl":
            transports.prepare_broadcast()
        return info

    def ready(self) -> None:
        """To be called after the warm-up."""
        freeze_heap()

    def rendezvous(self) -> tuple[str, int]:
        """Address and free port of this worker's host, at which a broadcast's ranks can meet."""
        address = ray.util.get_node_ip_address()
        return address, free_port(address)

    def join_broadcast(self, address: str, port: int, world_size: int) -> None:
        """Be rank 0 of a communicator with all vLLM workers. Returns when they have joined."""
        with self._alone("join_broadcast"):
            self._communicator = self._worker.on_device(lambda: transports.join_broadcast(address, port, world_size))

    def send_weights(self, transfer: Transfer, namespace: str, engines: Sequence[str], timeout_s: float) -> None:
        """Send this policy's weights to the engines, which wait for them in `Engine.update_weights`. All ranks together.

        Raises:
            What the last engine raised, when none is left (ipc). PeerLostError: another rank did not take part.
        """
        with self._alone("send_weights"):
            if transfer.transport == "nccl":
                self._worker.send_weights(
                    lambda weights: transports.broadcast(weights, transfer, self._communicator) if self._leads else deque(weights, 0)
                )
                return
            delivery = transports.Delivery(namespace, engines, transfer, timeout_s)
            try:
                if self._buffer is None:
                    self._buffer = self._worker.on_device(lambda: SharedBuffer(transfer.ipc_bytes))
                self._worker.send_weights(functools.partial(self._buffer.share, deliver=delivery))
            except Exception as error:
                delivery.abandon(f"the policy could not send its weights: {type(error).__name__}: {error}")
                raise

    @contextmanager
    def _alone(self, method: str) -> Iterator[None]:
        if not self._busy.acquire(blocking=False):
            raise OverlapError(f"{method} was called while {self._running} runs on this worker")
        self._running = method
        try:
            yield
        finally:
            self._busy.release()


def free_port(address: str) -> int:
    """A port of this host's address that nobody listens at now."""
    with socket.socket() as sock:
        sock.bind((address, 0))
        return int(sock.getsockname()[1])
