"""The Ray side of a policy worker: methods that Ray can inspect, around a plain `PolicyWorker`.

Stage calls come in through `execute` (a compiled graph's node, or an actor call), everything else through methods of its own.
A compiled graph runs `execute` on a background thread beside ordinary calls, so a lock refuses two calls at once.
"""

from __future__ import annotations

import functools
import socket
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import ray

from actors.data_plane.connect import DataPlaneAddress, connect
from actors.data_plane.metrics import OperationUsage
from actors.data_plane.sharding import ShardPlan
from actors.generation import senders
from actors.generation.senders import SharedBuffer, Transfer
from actors.generation.types import Transport
from actors.generation.weights import Manifest
from actors.heap import freeze_heap
from actors.policy.executors import Request
from configs.policy import OptimizerConfig, PolicyConfig

Objective = Literal["sft", "grpo"]
# Stage methods and their arguments (Ray wraps the methods, so their signatures cannot be asked).
_STAGES = {
    "train_steps": ("plans", "objective"),
    "logprob_step": ("plan", "column", "reference"),
    "evaluate_step": ("plan",),
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
        """Run a stage's method: a packed `Request` comes in, its packed result goes out.

        Raises:
            MalformedRequestError, OverlapError, or what the method raises.
        """
        return Request.answer(packed, self._run)

    def _run(self, request: Request) -> Any:
        wanted = _STAGES.get(request.method)
        if wanted is None:
            raise MalformedRequestError(f"wanted one of {', '.join(_STAGES)}, got {request.method!r}")
        got = [type(argument).__name__ for argument in request.arguments]
        if len(wanted) != len(got):
            raise MalformedRequestError(f"{request.method}: wanted {', '.join(wanted)}; got {len(got)} argument(s): {', '.join(got)}")
        return getattr(self, request.method)(*request.arguments)

    def train_steps(self, plans: Sequence[ShardPlan], objective: Objective) -> list[dict[str, float]]:
        """`PolicyWorker.train` of each, up to the first that fails. One call: the worker does not wait for the group between two."""
        with self._alone("train_steps"):
            return [self._worker.train(plan, objective) for plan in plans]

    def logprob_step(self, plan: ShardPlan, column: str, reference: bool) -> dict[str, float]:
        """`PolicyWorker.logprob`."""
        with self._alone("logprob_step"):
            return self._worker.logprob(plan, column, reference)

    def evaluate_step(self, plan: ShardPlan) -> dict[str, float]:
        """`PolicyWorker.evaluate`."""
        with self._alone("evaluate_step"):
            return self._worker.evaluate(plan)

    def warm_up(self, plan: ShardPlan, objective: Objective) -> None:
        """`PolicyWorker.warm_up`."""
        with self._alone("warm_up"):
            self._worker.warm_up(plan, objective)

    def setup(self) -> dict[str, Any]:
        """`PolicyWorker.setup`."""
        with self._alone("setup"):
            info = self._worker.setup()
            if self._leads and self._transport == "nccl":
                senders.prepare_broadcast()
            return info

    def ready(self) -> None:
        """After the warm-up."""
        freeze_heap()

    def snapshot_reference(self) -> None:
        """`PolicyWorker.snapshot_reference`."""
        with self._alone("snapshot_reference"):
            self._worker.snapshot_reference()

    def reset_optimizer(self, optimizer: OptimizerConfig) -> None:
        """`PolicyWorker.reset_optimizer`."""
        with self._alone("reset_optimizer"):
            self._worker.reset_optimizer(optimizer)
            freeze_heap()  # frees the optimizer that was there

    def export_weights(self) -> Any:
        """`PolicyWorker.export_weights`."""
        with self._alone("export_weights"):
            return self._worker.export_weights()

    def manifest(self) -> Manifest:
        """`PolicyWorker.manifest`."""
        with self._alone("manifest"):
            return self._worker.manifest()

    def rendezvous(self) -> tuple[str, int]:
        """Address and free port of this worker's host, at which a broadcast's ranks can meet."""
        address = ray.util.get_node_ip_address()
        return address, free_port(address)

    def join_broadcast(self, address: str, port: int, world_size: int) -> None:
        """Be rank 0 of a communicator with all vLLM workers. Returns when they have joined."""
        with self._alone("join_broadcast"):
            self._communicator = self._worker.on_device(lambda: senders.join_broadcast(address, port, world_size))

    def send_weights(self, transfer: Transfer, namespace: str, engines: Sequence[str], timeout_s: float) -> None:
        """Send this policy's weights to the engines, which wait for them in `Engine.update_weights`. All ranks together.

        Raises:
            What the last engine raised, when none is left (ipc). PeerLostError: another rank did not take part.
        """
        with self._alone("send_weights"):
            if transfer.transport == "nccl":
                self._worker.send_weights(
                    lambda weights: senders.broadcast(weights, transfer, self._communicator) if self._leads else deque(weights, 0)
                )
                return
            delivery = senders.Delivery(namespace, engines, transfer, timeout_s)
            try:
                if self._buffer is None:
                    self._buffer = self._worker.on_device(lambda: SharedBuffer(transfer.ipc_bytes))
                self._worker.send_weights(functools.partial(self._buffer.share, deliver=delivery))
            except Exception as error:
                delivery.abandon(f"the policy could not send its weights: {type(error).__name__}: {error}")
                raise

    def save_hf(self, path: str) -> None:
        """`PolicyWorker.save_hf`."""
        with self._alone("save_hf"):
            self._worker.save_hf(path)

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
