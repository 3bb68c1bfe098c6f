"""What all transports of weights have in common. One class is one transport, with both its ends:

policy group ──offer──► policy workers ──send──► (memory, GPU, network) ──receive──► engine ──► vLLM's weight transfer engine

Each process has its own instance and uses the methods of its end. A new transport is one file, and its name in transports.py.
"""

from __future__ import annotations

import queue
import threading
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch

from actors.refit.manifest import Manifest, WeightLayout
from actors.waiting import wait_all

TransportName = Literal["host", "ipc", "nccl"]  # host memory; memory of a GPU that policy and engine share; broadcast between GPUs
Weights = Iterator[tuple[str, torch.Tensor]]  # Hugging Face names and full tensors, on the GPU of the rank that gathered them
UpdateInfo = dict[str, Any]  # vLLM's update_info of one piece; "names" lists its weights


class NotDeliveredError(RuntimeError):
    """Rank 0 could not deliver the weights. Raised by the other ranks; rank 0 raises the cause."""


@dataclass(frozen=True)
class RefitPlan:
    """How weights travel from the policy to the engines of a run.

    Attributes:
        buffer_bytes: size of one piece on its way (ipc, nccl).
        ranks_per_engine: vLLM workers of one engine (tensor_parallel_size).
        engine_timeout_s: seconds within which an engine takes the weights, or says why not.
        engines_sleep: whether engines give their GPU's memory to the policy between rollout and refit.
    """

    transport: TransportName = "host"
    buffer_bytes: int = 2**30
    ranks_per_engine: int = 1
    engine_timeout_s: float = 0.0
    engines_sleep: bool = False


@dataclass(frozen=True)
class Transfer:
    """One update on its way, as both ends know it: small and picklable, without the tensors.

    Attributes:
        buffer_bytes: size of a piece; `Ipc` and `Nccl` say where a piece ends.
    """

    manifest: Manifest
    buffer_bytes: int
    id: str = field(default_factory=lambda: uuid.uuid4().hex)


class Transport(ABC):
    """Args:
    timeout_s: longest wait of this end for the other.
    """

    backend: ClassVar[str]  # vLLM's name for it: WeightTransferConfig.backend
    engines_may_fail: ClassVar[bool] = False  # whether the others still get their weights when one engine fails

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._manifest: Manifest | None = None

    @abstractmethod
    def offer(self, plan: RefitPlan, workers: Mapping[str, Any], namespace: str, engines: Mapping[str, str]) -> tuple[Any, dict[str, Any]]:
        """In the policy group: start to send the present weights.

        Args:
            workers: handles of all policy workers by name, rank 0 first. engines: names of the living engine actors, and
                their incarnations: one that was started again has another, and knows nothing of what was before.

        Returns:
            What `receive` of each engine gets, and the references of the workers that are sending, by name.

        Raises:
            ActorGoneError, ActorTimeoutError: a worker or an engine is lost; named.
        """

    def prepare(self) -> None:  # noqa: B027  (most have nothing to do)
        """In rank 0 of the policy, at its start: do what would take long in the first update."""

    @abstractmethod
    def receive(self, offered: Any, layout: WeightLayout, in_process: bool) -> AbstractContextManager[tuple[Iterable[UpdateInfo], int]]:
        """In the engine: what vLLM's update_weights gets, piece by piece, valid inside the block; and the bytes of all weights.

        Args:
            in_process: whether vLLM's worker lives in this process.

        Raises:
            WeightMismatchError: the weights do not fit the layout; nothing was loaded.
        """

    def incoming(self, transfer_id: str) -> Incoming:
        """In the engine: the pieces that the policy's end brings by calls of the actor, which may come before `receive`."""
        raise NotImplementedError(f"{type(self).__name__} sends no pieces by calls")

    @classmethod
    def vllm_engine(cls) -> type | None:
        """In a worker of vLLM: the WeightTransferEngine of `backend`; None if vLLM brings it."""
        return None

    def _transfer(self, plan: RefitPlan, workers: Mapping[str, Any]) -> Transfer:
        """A new transfer of the policy's weights, whose manifest is made once."""
        if self._manifest is None:
            refs = {name: worker.call.remote("manifest") for name, worker in workers.items()}
            manifests = wait_all(refs, what="refit: list the weights", timeout_s=self._timeout_s)
            self._manifest = next(iter(manifests.values()))
        assert self._manifest is not None
        return Transfer(self._manifest, plan.buffer_bytes)


class Incoming:
    """Pieces on their way from the calls that bring them to the thread that loads them. No vLLM, no Ray.

    feed ──► [ one piece at a time ] ──pieces──► vLLM's update_weights
     ▲                                               │
     └──────────── returns when it is loaded ◄───────┘

    One producer, one consumer. Every wait ends after `timeout_s` seconds at the latest.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._offered: queue.Queue[tuple[UpdateInfo, Future[None]] | None] = queue.Queue()  # None: closed
        self._lock = threading.Lock()
        self._closed: str | None = None
        self._loading: Future[None] | None = None

    def feed(self, info: UpdateInfo) -> None:
        """Hand a piece over. Returns when it is loaded: its memory may then be overwritten.

        Raises:
            RuntimeError: the stream is closed; with the reason. TimeoutError: nobody loaded the piece.
        """
        loaded: Future[None] = Future()
        with self._lock:
            if self._closed is not None:
                raise RuntimeError(self._closed)
            self._offered.put((info, loaded))
        try:
            loaded.result(self._timeout_s)
        except TimeoutError:
            raise TimeoutError(f"a piece of the weights was not loaded within {self._timeout_s:.0f} s") from None

    def pieces(self, weights: int) -> Iterator[UpdateInfo]:
        """Pieces in the order of `feed`, until so many weights have come. Asking for the next piece says that the last one is loaded.

        Raises:
            TimeoutError: the next piece did not come. RuntimeError: the stream was closed.
        """
        left = weights
        while left > 0:
            try:
                offered = self._offered.get(timeout=self._timeout_s)
            except queue.Empty:
                raise TimeoutError(
                    f"the policy sent nothing for {self._timeout_s:.0f} s; {left} of {weights} weights are missing"
                ) from None
            if offered is None:
                raise RuntimeError(self._closed)
            info, self._loading = offered
            yield info
            with self._lock:
                if self._closed is None:
                    self._loading.set_result(None)
                self._loading = None
            left -= len(info["names"])

    def close(self, reason: str) -> None:
        """End the stream: whoever waits, and every later `feed`, raises the reason. Idempotent; the first reason stays."""
        with self._lock:
            if self._closed is not None:
                return
            self._closed = reason
            waiting = [self._loading] if self._loading is not None else []
            while not self._offered.empty():
                if (offered := self._offered.get_nowait()) is not None:
                    waiting.append(offered[1])
            self._offered.put(None)
            for future in waiting:
                future.set_exception(RuntimeError(reason))


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes: uint8, [nbytes]."""
    return tensor.contiguous().view(torch.uint8).view(-1)
