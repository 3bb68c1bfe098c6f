"""The Ray side of a policy worker: a plain `PolicyWorker`, one call at a time.

Stages come in through `execute` (a compiled graph's node, or an actor call), other methods of the `PolicyWorker` through `call`. A compiled
graph runs `execute` on a background thread beside ordinary calls: the group makes one call at a time, and a second one is refused here.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from actors import node, rendezvous
from actors.data_plane.address import DataPlaneAddress
from actors.data_plane.connect import connect
from actors.data_plane.usage import OperationUsage
from actors.files import Files, at_this_node
from actors.heap import freeze_heap
from actors.policy.executors import Request
from actors.refit.transport import TransportName
from actors.refit.transports import TRANSPORTS
from actors.rendezvous import Place
from configs.policy import PolicyConfig


class OverlapError(RuntimeError):
    """Two calls on one worker at the same time. The group serialises them, so this is a bug of the caller."""


class PolicyWorkerActor:
    """Rank `rank` of the policy as an actor; `ray.remote` is applied when the group is built. Arguments as of `PolicyWorker`."""

    def __init__(
        self,
        config: PolicyConfig,
        model: str | Files,
        rank: int,
        address: DataPlaneAddress,
        timeout_s: float,
        seed: int,
        temperature: float,
        transport: TransportName = "host",
        teachers: Mapping[str, str | Files] = MappingProxyType({}),
    ) -> None:
        """As `PolicyWorker`; and how its weights will go to engines."""
        from actors.policy.worker import PolicyWorker  # Megatron: imported in the worker's process only

        self._leads, self._transport = rank == 0, TRANSPORTS[transport](config.timeout_s)
        self._plane = connect(address, timeout_s=timeout_s)
        taught_by = {source: at_this_node(teacher) for source, teacher in teachers.items()}
        self._worker = PolicyWorker(config, at_this_node(model), rank, self._plane, seed, temperature, taught_by)
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

    def setup(self, place: Place) -> dict[str, Any]:
        """`PolicyWorker.setup`, and what the transport of weights needs before the first refit."""
        info: dict[str, Any] = self.call("setup", place)
        if self._leads:
            self._transport.prepare()
        return info

    def is_saving(self) -> bool:
        """`PolicyWorker.is_saving`; a stage may be running."""
        return self._worker.is_saving()

    def save_results(self) -> tuple[list[Any], float]:
        """`PolicyWorker.save_results`; a stage may be running."""
        return self._worker.save_results()

    def finish_save(self, directory: str, results: list[list[Any]], weight_version: int) -> None:
        """`PolicyWorker.finish_save`; a stage may be running."""
        self._worker.finish_save(directory, results, weight_version)

    def release_memory(self) -> None:
        """Give what passes left in torch's cache back to the GPU, where engines want it."""
        from actors.policy.device import release_memory

        with self._alone("release_memory"):
            self._worker.call_on_device(release_memory)

    def ready(self) -> None:
        """To be called after the warm-up."""
        freeze_heap()

    def node_id(self) -> str:
        """Ray's id of this worker's node."""
        return node.own_id()

    def announce(self) -> str:
        """As `rendezvous.announce`."""
        return rendezvous.announce()

    def transport(self, method: str, *arguments: Any) -> Any:
        """A method of the policy's end of the transport, which gets the `PolicyWorker` as its first argument.

        Raises:
            OverlapError, or what the method raises.
        """
        with self._alone(f"{self._transport.backend}.{method}"):
            return getattr(self._transport, method)(self._worker, *arguments)

    @contextmanager
    def _alone(self, method: str) -> Iterator[None]:
        if not self._busy.acquire(blocking=False):
            raise OverlapError(f"{method} was called while {self._running} runs on this worker")
        self._running = method
        try:
            yield
        finally:
            self._busy.release()
