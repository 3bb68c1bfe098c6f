"""Weights by NCCL broadcast, from rank 0 of the policy to all workers of vLLM on GPUs of their own.

    export ──(name, tensor)──► one buffer ──pieces──► every worker of vLLM

vLLM's receiver is used as it is; its own sender leaves memory behind with each update (vLLM issue 52950): torch keeps freed memory for
the stream that it was allocated on, and each packed broadcast of vLLM 0.26 makes new streams, up to buffers for all of torch's 32.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch._C._distributed_c10d import HashStore

from actors.refit.manifest import WeightLayout
from actors.refit.transport import RefitPlan, Transfer, Transport, UpdateInfo, Weights, bytes_of
from actors.waiting import find, wait, wait_all


class Nccl(Transport):
    """A piece ends with the weight that goes beyond `buffer_bytes`: so vLLM's `packed_nccl_broadcast_consumer` expects it."""

    backend = "lean-nccl"

    def __init__(self, timeout_s: float) -> None:
        super().__init__(timeout_s)
        self._joined: dict[str, str] = {}  # engines of the communicator, and their incarnations, in the policy group
        self._communicator: Any = None  # in rank 0

    def offer(self, plan: RefitPlan, workers: Mapping[str, Any], namespace: str, engines: Mapping[str, str]) -> tuple[Any, dict[str, Any]]:
        """As `Transport.offer`; builds the communicator when there is none, or engines have died or come since."""
        transfer = self._transfer(plan, workers)
        if self._joined != dict(engines):
            self._connect(plan.ranks_per_engine, workers, namespace, engines)
        return transfer, {name: worker.transport.remote("send", transfer) for name, worker in workers.items()}

    def _connect(self, ranks: int, workers: Mapping[str, Any], namespace: str, engines: Mapping[str, str]) -> None:
        name, first = next(iter(workers.items()))
        invited = first.transport.remote("invite")
        invitation = wait(invited, who=name, what="refit: begin a communicator", timeout_s=self._timeout_s)
        group = {"invitation": invitation, "world_size": 1 + len(engines) * ranks}
        handles = {engine: find(engine, namespace) for engine in engines}
        refs = {
            engine: handle.join_transfer.remote(group | {"rank_offset": 1 + index * ranks})
            for index, (engine, handle) in enumerate(handles.items())
        }
        refs[name] = first.transport.remote("join", group)
        wait_all(refs, what="refit: join the broadcast", timeout_s=self._timeout_s)
        self._joined = dict(engines)

    def prepare(self) -> None:
        """Import what `join` needs, which takes 10 s."""
        from vllm.distributed.weight_transfer import nccl_engine  # noqa: F401

    def invite(self, worker: Any) -> bytes:
        """In rank 0: the id by which NCCL's ranks know each other. NCCL turns away whoever does not have it; Ray carries it."""
        from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

        return worker.call_on_device(lambda: bytes(NCCLLibrary().ncclGetUniqueId().internal))  # type: ignore[no-any-return]

    def join(self, worker: Any, group: dict[str, Any]) -> None:
        """In rank 0: be rank 0 of vLLM's communicator. Returns when all others have joined."""

        def join() -> Any:
            # vLLM's communicator would give this thread a new stream for good (vllm.utils current_stream), on which the worker's
            # later calls ran unordered with those of its other threads.
            with torch.cuda.stream(torch.cuda.current_stream()):
                return communicator(0, **group)

        self._communicator = worker.call_on_device(join)

    def send(self, worker: Any, transfer: Transfer) -> None:
        """In every rank, together: gather all weights; rank 0 broadcasts them."""
        worker.send_weights(lambda weights: self._broadcast(weights, transfer) if self._communicator else deque(weights, 0))

    def _broadcast(self, weights: Weights, transfer: Transfer) -> None:
        """From one buffer, on this thread's stream. Returns when the weights have left."""
        buffer = torch.empty(broadcast_bytes(transfer), dtype=torch.uint8, device="cuda")
        for piece in broadcast_pieces(weights, buffer, transfer.buffer_bytes):
            self._communicator.broadcast(piece, src=0, stream=torch.cuda.current_stream())
        torch.cuda.synchronize()

    @contextmanager
    def receive(self, offered: Transfer, layout: WeightLayout, in_process: bool) -> Iterator[tuple[Iterable[UpdateInfo], int]]:
        """As `Transport.receive`: a single piece for us, which vLLM takes apart."""
        layout.check(offered.manifest)
        info = offered.manifest.info() | {"packed": True, "packed_buffer_size_bytes": offered.buffer_bytes}
        yield [info], offered.manifest.bytes

    @classmethod
    def vllm_engine(cls) -> type:
        """As `Transport.vllm_engine`: vLLM's nccl engine, which gives the memory of each update back (vLLM issue 52950).

        It joins by the policy's invitation: vLLM's own rendezvous unpickles what anybody who reaches it has written there.
        """
        from vllm.distributed.weight_transfer.base import WeightTransferInitInfo
        from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

        @dataclass
        class Group(WeightTransferInitInfo):
            invitation: bytes
            world_size: int
            rank_offset: int  # of this engine's first worker

        class LeanNCCLWeightTransferEngine(NCCLWeightTransferEngine):
            init_info_cls: Any = Group

            def init_transfer_engine(self, init_info: Any) -> None:
                rank = init_info.rank_offset + self.parallel_config.rank
                self.model_update_group = communicator(rank, init_info.invitation, init_info.world_size)

            def finish_weight_update(self) -> None:
                super().finish_weight_update()
                torch.cuda.empty_cache()

        return LeanNCCLWeightTransferEngine


def communicator(rank: int, invitation: bytes, world_size: int) -> Any:
    """vLLM's PyNcclCommunicator on this thread's device. Returns when all ranks have joined.

    Args:
        invitation: NCCL's id, of `Nccl.invite` in rank 0.
    """
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary
    from vllm.distributed.utils import StatelessProcessGroup

    invited = NCCLLibrary().unique_id_from_bytes(invitation)

    class Invited(StatelessProcessGroup):
        """Knows the id already: nothing goes through the store, which is this process's own."""

        def broadcast_obj(self, obj: Any, src: int) -> Any:
            return invited

    # Rank 0 would make another id, for which NCCL would wait in vain.
    with patch.object(NCCLLibrary, "ncclGetUniqueId", lambda _: invited):
        return PyNcclCommunicator(Invited(rank, world_size, HashStore()), device=torch.accelerator.current_device_index())


def broadcast_bytes(transfer: Transfer) -> int:
    """Bytes of the buffer that holds every piece of the broadcast."""
    return min(transfer.manifest.bytes, transfer.buffer_bytes + transfer.manifest.largest)


def broadcast_pieces(weights: Weights, buffer: torch.Tensor, piece_bytes: int) -> Iterator[torch.Tensor]:
    """Copy the weights one after the other into `buffer` (uint8), and from its start again once they are more than `piece_bytes`.

    Yields the filled part of the buffer, each time before it is overwritten.
    """
    end = 0
    for _, tensor in weights:
        buffer[end : end + tensor.nbytes].copy_(bytes_of(tensor))
        end += tensor.nbytes
        if end > piece_bytes:
            yield buffer[:end]
            end = 0
    if end:
        yield buffer[:end]
