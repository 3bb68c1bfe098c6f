"""The policy's side of vLLM's weight transfer engines: all weights, one after the other, out of a worker's process.

    export ──(name, tensor)──► SharedBuffer (ipc): pieces on this GPU ──deliver(handle)──► engines on the same GPU copy them out
                          └──► broadcast (nccl): pieces to every vLLM worker ────────────► engines receive

Every policy rank calls the same sender with the same tensors: gathering them is a collective. Joining a broadcast imports vLLM (10 s).

vLLM's receivers are used as they are; its own senders leave memory behind with each update (vLLM issues 51258 and 52950).
"""

from __future__ import annotations

import functools
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import ray
import torch
from torch import distributed
from torch.multiprocessing.reductions import reduce_tensor

from actors.refit.handover import Manifest
from actors.waiting import ActorGoneError, find, wait

Weights = Iterator[tuple[str, torch.Tensor]]  # Hugging Face names and full tensors on this rank's GPU


class NotDeliveredError(RuntimeError):
    """Another rank's engines took no more: that rank has the cause."""


@dataclass(frozen=True)
class Transfer:
    """One update on its way. Small and picklable: both sides get it, the tensors take the other road.

    Attributes:
        transport: "ipc" or "nccl".
        buffer_bytes: of a piece. ipc: a larger weight is a piece of its own; nccl: a piece ends with the weight that goes beyond.
    """

    transport: str
    manifest: Manifest
    buffer_bytes: int
    id: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def ipc_bytes(self) -> int:
        """Of the buffer that holds every piece: no larger than the weights, no smaller than the largest of them."""
        return max(self.manifest.largest, min(self.manifest.bytes, self.buffer_bytes))

    @property
    def broadcast_bytes(self) -> int:
        """Likewise, of a broadcast."""
        return min(self.manifest.bytes, self.buffer_bytes + self.manifest.largest)


def prepare_broadcast() -> None:
    """Import what `join_broadcast` needs, which takes seconds, before the first update waits for it."""
    from vllm.distributed.weight_transfer import nccl_engine  # noqa: F401


def join_broadcast(address: str, port: int, world_size: int) -> Any:
    """vLLM's communicator with this process as rank 0. Returns when all others have joined."""
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    with _own_stream():
        return NCCLWeightTransferEngine.trainer_init({"master_address": address, "master_port": port, "world_size": world_size})


def broadcast(weights: Weights, transfer: Transfer, communicator: Any) -> None:
    """Send all weights to every vLLM worker of the communicator. Returns when they have left.

    From one buffer, on this thread's stream. vLLM's sender makes new streams in each call, and torch keeps freed memory for the stream
    that it was allocated on: it comes to hold buffers for all of torch's 32 streams (vLLM issue 52950).
    """
    buffer = torch.empty(transfer.broadcast_bytes, dtype=torch.uint8, device="cuda")
    for piece in broadcast_pieces(weights, buffer, transfer.buffer_bytes):
        communicator.broadcast(piece, src=0, stream=torch.cuda.current_stream())
    torch.cuda.synchronize()


def broadcast_pieces(weights: Weights, buffer: torch.Tensor, piece_bytes: int) -> Iterator[torch.Tensor]:
    """Copy the weights one behind the other into `buffer` (uint8), from its start again once they are more than `piece_bytes`.

    Yields what of the buffer is filled, each time before it is overwritten: the pieces that `packed_nccl_broadcast_consumer` expects.
    """
    end = 0
    for _, tensor in weights:
        buffer[end : end + tensor.nbytes].copy_(_bytes_of(tensor))
        end += tensor.nbytes
        if end > piece_bytes:
            yield buffer[:end]
            end = 0
    if end:
        yield buffer[:end]


class SharedBuffer:
    """Memory of this GPU from which engines on it copy the weights, piece by piece. Taken and exported once, and kept.

    vLLM's `IPCWeightTransferEngine.trainer_send_weights` takes a new buffer for each update. torch gives exported memory back when the
    export was released exactly once, but vLLM 0.26's engines release it after each piece, every engine of the GPU does so, and one
    that died does not: each update left its buffer behind (vLLM issue 51258). One that is never given back asks for no such count.
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
        """Lay the weights into the buffer. A collective; rank 0 delivers each piece (vLLM's update_info), and the buffer is filled again
        once that returns.

        Raises:
            What `deliver` raises, on rank 0; NotDeliveredError on the others, at the same time.
        """
        for piece in pieces(weights, self._memory):
            torch.cuda.synchronize()
            distributed.barrier()
            _together(functools.partial(deliver, piece | {"ipc_handles": self._handles}), self._memory.device)


def pieces(weights: Weights, buffer: torch.Tensor) -> Iterator[dict[str, Any]]:
    """Copy the weights one behind the other into `buffer` (uint8), from its start again when the next does not fit.

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
        buffer[end : end + tensor.nbytes].copy_(_bytes_of(tensor))
        laid.append((name, tensor.to("meta")))
        end += tensor.nbytes
    if laid:
        yield _update_info(laid)


def _update_info(laid: list[tuple[str, torch.Tensor]]) -> dict[str, Any]:
    manifest = Manifest.of(laid)
    return manifest.info() | {"tensor_sizes": manifest.sizes, "packed": True}


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8).view(-1)


def _together(work: Callable[[], None], device: torch.device) -> None:
    """Rank 0 works; the others wait for it, and fail when it does: one that waited on would refuse the next call."""
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


def _own_stream() -> AbstractContextManager[Any]:
    """Keep this thread's current stream. vLLM's communicator would give the thread a new one for good (vllm.utils current_stream), on
    which the worker's later calls ran unordered with those of its other threads."""
    return torch.cuda.stream(torch.cuda.current_stream())


class Delivery:
    """Brings pieces to engine actors. One that dies, fails or refuses is left out from then on: who asked for its update hears why."""

    def __init__(self, namespace: str, engines: Sequence[str], transfer: Transfer, timeout_s: float) -> None:
        """
        Raises:
            ActorGoneError: none of the engines is there.
        """
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
