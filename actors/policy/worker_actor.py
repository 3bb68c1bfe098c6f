"""The Ray side of a policy worker: a plain `PolicyWorker`, one call at a time.

Stages come in through `execute` (a compiled graph's node, or an actor call), other methods of the `PolicyWorker` through `call`, and what
an actor adds to it through methods of its own. A compiled graph runs `execute` on a background thread beside ordinary calls: the group
lets only one call out at a time, and a second one is refused here.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import ray

from actors.data_plane.connect import DataPlaneAddress, connect
from actors.data_plane.usage import OperationUsage
from actors.heap import freeze_heap
from actors.policy.executors import Request
from actors.refit.transport import TransportName
from actors.refit.transports import TRANSPORTS
from configs.policy import OptimizerConfig, PolicyConfig

Objective = Literal["sft", "grpo"]
# Stages and their arguments.
_STAGES = {
    "train_steps": ("plans", "objective"),
    "logprob": ("plan", "column", "reference"),
    "evaluate": ("plan",),
    "warm_up": ("plan", "objective"),
}


class MalformedRequestError(TypeError):
    """A request that names no stage method, or has other arguments than it takes; the message has both."""


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
        transport: TransportName = "host",
    ) -> None:
        """As `PolicyWorker`; and how its weights will go to engines."""
        from actors.policy.worker import PolicyWorker  # Megatron: imported in the worker's process only

        self._leads, self._transport = rank == 0, TRANSPORTS[transport](config.timeout_s)
        self._plane = connect(address, timeout_s=timeout_s)
        self._worker = PolicyWorker(config, model_path, rank, init_method, self._plane, seed, temperature)
        self._busy, self._running = threading.Lock(), ""

    def ping(self) -> None:
        """Return at once: the actor lives."""

    def data_plane_usage(self) -> dict[str, OperationUsage]:
        """What this worker's data-plane client did so far."""
        return self._plane.usage()

    def execute(self, packed: bytes) -> bytes:
        """Run a stage's method: a packed `Request` comes in, its packed result goes out.

        Raises:
            MalformedRequestError, OverlapError, or what the method raises.
        """
        return Request.answer(packed, self._stage)

    def call(self, method: str, *arguments: Any) -> Any:
        """Any other method of the `PolicyWorker`.

        Raises:
            OverlapError, or what the method raises.
        """
        with self._alone(method):
            return getattr(self._worker, method)(*arguments)

    def _stage(self, request: Request) -> Any:
        wanted = _STAGES.get(request.method)
        if wanted is None:
            raise MalformedRequestError(f"wanted one of {', '.join(_STAGES)}, got {request.method!r}")
        got = [type(argument).__name__ for argument in request.arguments]
        if len(wanted) != len(got):
            raise MalformedRequestError(f"{request.method}: wanted {', '.join(wanted)}; got {len(got)} argument(s): {', '.join(got)}")
        if request.method != "train_steps":
            return self.call(request.method, *request.arguments)
        plans, objective = request.arguments  # up to the first that fails: the worker does not wait for the group between two
        with self._alone(request.method):
            return [self._worker.train(plan, objective) for plan in plans]

    def setup(self) -> dict[str, Any]:
        """`PolicyWorker.setup`."""
        info: dict[str, Any] = self.call("setup")
        if self._leads:
            self._transport.prepare()
        return info

    def ready(self) -> None:
        """After the warm-up."""
        freeze_heap()

    def reset_optimizer(self, optimizer: OptimizerConfig) -> None:
        """`PolicyWorker.reset_optimizer`."""
        self.call("reset_optimizer", optimizer)
        freeze_heap()  # frees the optimizer that was there

    def rendezvous(self) -> tuple[str, int]:
        """Address and free port of this worker's host, at which a broadcast's ranks can meet."""
        address = ray.util.get_node_ip_address()
        return address, free_port(address)

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


def free_port(address: str) -> int:
    """A port of this host's address that nobody listens at now."""
    with socket.socket() as sock:
        sock.bind((address, 0))
        return int(sock.getsockname()[1])
