"""The policy's side of vLLM's weight transfer engines: all weights, one after the other, out of a worker's process.

    export ──(name, tensor)──► SharedBuffer (ipc): pieces on this GPU ──deliver(handle)──► engines on the same GPU copy them out
                          └──► broadcast (nccl): pieces to every vLLM worker ────────────► engines receive

Every policy rank calls the same sender with the same tensors: gathering them is a collective. Calls for a broadcast import vLLM (10 s).
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import ray
import torch
from torch import distributed
from torch.multiprocessing.reductions import reduce_tensor

from actors.generation.weights import Manifest
from actors.waiting import ActorGoneError, find, wait

Weights = Iterator[tuple[str, torch.Tensor]]  # Hugging Face names and full tensors on this rank's GPU


@dataclass(frozen=True)
class Transfer:
    """One update on its way. Small and picklable: both sides get it, the tensors take the other road.

    Attributes:
        transport: "ipc" or "nccl".
        buffer_bytes: of a piece; a larger tensor is a piece of its own.
    """

    transport: str
    manifest: Manifest
    buffer_bytes: int
    id: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def ipc_bytes(self) -> int:
        """Of the buffer that holds every piece: no larger than the weights, no smaller than the largest of them."""
        return max(self.manifest.largest, min(self.manifest.bytes, self.buffer_bytes))


def prepare_broadcast() -> None:
    """Import what `broadcast` needs, which takes seconds, before the first update waits for it."""
    from vllm.distributed.weight_transfer import nccl_engine  # noqa: F401


def join_broadcast(address: str, port: int, world_size: int) -> Any:
    """vLLM's communicator with this process as rank 0. Returns when all others have joined."""
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    with _own_stream():
        return NCCLWeightTransferEngine.trainer_init({"master_address": address, "master_port": port, "world_size": world_size})


def broadcast(weights: Weights, transfer: Transfer, communicator: Any) -> None:
    """Send all weights to every vLLM worker of the communicator. Returns when they have left."""
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    # The broadcast makes new streams, and torch keeps freed memory for the stream that it was allocated on (vLLM issue 52950): memory of a
    # pool of its own goes back to the driver with the pool.
    pool = torch.cuda.MemPool()
    with _own_stream(), torch.cuda.use_mem_pool(pool):
        NCCLWeightTransferEngine.trainer_send_weights(
            weights, {"group": communicator, "packed": True, "packed_buffer_size_bytes": transfer.buffer_bytes}
        )
        torch.cuda.synchronize()


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
        once that returns."""
        for piece in pieces(weights, self._memory):
            torch.cuda.synchronize()
            distributed.barrier()
            if distributed.get_rank() == 0:
                deliver(piece | {"ipc_handles": self._handles})
            distributed.barrier()


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
        buffer[end : end + tensor.nbytes].copy_(tensor.contiguous().view(torch.uint8).view(-1))
        laid.append((name, tensor.to("meta")))
        end += tensor.nbytes
    if laid:
        yield _update_info(laid)


def _update_info(laid: list[tuple[str, torch.Tensor]]) -> dict[str, Any]:
    manifest = Manifest.of(laid)
    return manifest.info() | {"tensor_sizes": manifest.sizes, "packed": True}


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
        self._id, self._timeout_s = transfer.id, timeout_s
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
            try:
                wait(ref, who=name, what="refit: load a piece of the weights", timeout_s=self._timeout_s)
            except (RuntimeError, TimeoutError):  # gone, failed or refusing; silent
                del self._handles[name]
                if not self._handles:
                    raise

    def abandon(self, reason: str) -> None:
        """Tell the engines that nothing more comes. Does not wait."""
        for handle in self._handles.values():
            handle.abandon_transfer.remote(self._id, reason)
