"""Weights within the memory of a GPU that policy and engines share (CUDA IPC).

export ──(name, tensor)──► SharedBuffer of each rank ──pieces──► Delivery (rank 0) ──feed──► Incoming (engine) ──► vLLM copies them

vLLM's receiver is used as it is; `SharedBuffer` says why its sender is not.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import ray
import torch
from torch import distributed
from torch.multiprocessing.reductions import reduce_tensor

from actors.refit.manifest import Manifest, WeightLayout
from actors.refit.transport import Incoming, NotDeliveredError, RefitPlan, Transfer, Transport, UpdateInfo, Weights, bytes_of
from actors.waiting import ActorGoneError, find, wait


class Ipc(Transport):
    """A piece is at most `buffer_bytes` long; a larger weight is a piece of its own."""

    backend = "ipc"
    engines_may_fail = True

    def __init__(self, timeout_s: float) -> None:
        super().__init__(timeout_s)
        self._buffer: SharedBuffer | None = None  # in a policy worker
        self._lock = threading.Lock()
        self._incoming: tuple[str, Incoming] = "", Incoming(timeout_s)  # in an engine: of the transfer that either end named last

    def offer(self, plan: RefitPlan, workers: Mapping[str, Any], namespace: str, engines: Mapping[str, str]) -> tuple[Any, dict[str, Any]]:
        """As `Transport.offer`."""
        transfer = self._transfer(plan, workers)
        sending = {name: worker.transport.remote("send", transfer, namespace, list(engines)) for name, worker in workers.items()}
        return transfer, sending

    def send(self, worker: Any, transfer: Transfer, namespace: str, engines: Sequence[str]) -> None:
        """In every rank, together: gather all weights into the rank's buffer; rank 0 tells the engines of each piece.

        Raises:
            What the last engine raised, when none is left. PeerLostError: another rank did not take part.
        """
        delivery = Delivery(namespace, engines, transfer, self._timeout_s)
        try:
            if self._buffer is None:
                self._buffer = worker.call_on_device(lambda: SharedBuffer(buffer_bytes(transfer)))
            worker.send_weights(functools.partial(self._buffer.share, deliver=delivery))
        except Exception as error:
            delivery.abandon(f"the policy could not send its weights: {type(error).__name__}: {error}")
            raise

    @contextmanager
    def receive(self, offered: Transfer, layout: WeightLayout, in_process: bool) -> Iterator[tuple[Iterable[UpdateInfo], int]]:
        """As `Transport.receive`. Calls of `Incoming.feed` that wait, and later ones, fail when the block ends."""
        incoming, why = self.incoming(offered.id), "the update has ended"
        try:
            layout.check(offered.manifest)
            yield incoming.pieces(len(offered.manifest.names)), offered.manifest.bytes
        except BaseException as error:
            why = f"{type(error).__name__}: {error}"
            raise
        finally:
            incoming.close(why)

    def incoming(self, transfer_id: str) -> Incoming:
        """As `Transport.incoming`; whichever end names the transfer first opens it."""
        with self._lock:
            if self._incoming[0] != transfer_id:
                self._incoming[1].close("another transfer has begun")
                self._incoming = transfer_id, Incoming(self._timeout_s)
            return self._incoming[1]


def buffer_bytes(transfer: Transfer) -> int:
    """Bytes of the buffer that holds every piece: no larger than all weights, no smaller than the largest of them."""
    return max(transfer.manifest.largest, min(transfer.manifest.bytes, transfer.buffer_bytes))


class SharedBuffer:
    """Memory of this GPU from which engines on it copy the weights, piece by piece. Allocated and exported once, then kept.

    vLLM's `IPCWeightTransferEngine.trainer_send_weights` allocates a new buffer for each update. torch frees exported memory when its
    export was released exactly once, but vLLM 0.26's engines release it after each piece, each engine of the GPU does so, and one
    that died does not: each update leaves its buffer behind (vLLM issue 51258). A buffer that is kept needs no such count.
    """

    def __init__(self, size: int) -> None:
        """A collective of all policy ranks.

        Args:
            size: bytes, at least the largest weight's.
        """
        self._memory = torch.empty(size, dtype=torch.uint8, device="cuda")
        _, exported = reduce_tensor(self._memory)
        ranks: list[Any] = [None] * distributed.get_world_size()
        distributed.all_gather_object(ranks, (str(torch.cuda.get_device_properties(self._memory.device).uuid), exported))
        self._handles = dict(ranks)

    def share(self, weights: Weights, deliver: Callable[[dict[str, Any]], None]) -> None:
        """Copy the weights into the buffer, piece by piece. A collective; rank 0 delivers each piece (vLLM's update_info), and the
        buffer is filled again once `deliver` returns.

        Raises:
            What `deliver` raises, on rank 0; NotDeliveredError on the others, at the same time.
        """
        for piece in pieces(weights, self._memory):
            torch.cuda.synchronize()
            distributed.barrier()
            _together(functools.partial(deliver, piece | {"ipc_handles": self._handles}), self._memory.device)


def pieces(weights: Weights, buffer: torch.Tensor) -> Iterator[dict[str, Any]]:
    """Copy the weights one after the other into `buffer` (uint8), from its start again when the next does not fit.

    Yields what vLLM needs to read them (update_info without handles), each time before they are overwritten.

    Raises:
        ValueError: a weight is larger than the buffer.
    """
    laid: list[tuple[str, torch.Tensor]] = []
    end = 0
    for name, tensor in weights:
        if tensor.nbytes > len(buffer):
            raise ValueError(f"weight {name!r} has {tensor.nbytes} bytes, the buffer {len(buffer)}")
        if end + tensor.nbytes > len(buffer):
            yield _update_info(laid)
            laid, end = [], 0
        buffer[end : end + tensor.nbytes].copy_(bytes_of(tensor))
        laid.append((name, tensor.to("meta")))
        end += tensor.nbytes
    if laid:
        yield _update_info(laid)


def _update_info(laid: list[tuple[str, torch.Tensor]]) -> dict[str, Any]:
    manifest = Manifest.of(laid)
    return manifest.info() | {"tensor_sizes": manifest.sizes, "packed": True}


def _together(work: Callable[[], None], device: torch.device) -> None:
    """Rank 0 works, the others wait for it. They fail when it fails: a rank that went on waiting would refuse the next call."""
    failure: Exception | None = None
    if distributed.get_rank() == 0:
        try:
            work()
        except Exception as error:  # noqa: BLE001  (raised below, when the others know)
            failure = error
    failed = torch.tensor([failure is not None], device=device)
    distributed.broadcast(failed, src=0)
    if failure is not None:
        raise failure
    if failed.item():
        raise NotDeliveredError("rank 0 could not deliver a piece of the weights, and says why")


class Delivery:
    """Brings pieces to engine actors. One that dies, fails or refuses is left out from then on; whoever waits for its update hears why."""

    def __init__(self, namespace: str, engines: Sequence[str], transfer: Transfer, timeout_s: float) -> None:
        """Raises: ActorGoneError (none of the engines is there)."""
        self._handles: dict[str, Any] = {}
        self._id, self._deadline = transfer.id, time.monotonic() + timeout_s
        for name in engines:
            try:
                self._handles[name] = find(name, namespace)
            except ActorGoneError:
                if name == engines[-1] and not self._handles:
                    raise

    def __call__(self, info: dict[str, Any]) -> None:
        """Return when every engine that is left has loaded the piece.

        Raises:
            The last engine's error, when none is left.
        """
        info_ref = ray.put(info)
        refs = {name: handle.feed.remote(self._id, info_ref) for name, handle in self._handles.items()}
        for name, ref in refs.items():
            left = max(0.0, self._deadline - time.monotonic())
            try:
                wait(ref, who=name, what="refit: load a piece of the weights", timeout_s=left)
            except (RuntimeError, TimeoutError):  # gone, failed or refusing; silent
                del self._handles[name]
                if not self._handles:
                    raise

    def abandon(self, reason: str) -> None:
        """Tell the engines that nothing more comes. Does not wait."""
        for handle in self._handles.values():
            handle.abandon_transfer.remote(self._id, reason)
