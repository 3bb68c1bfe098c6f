"""Weights through host memory: rank 0 exports them into Ray's object store, engines map them from there. Works on any device.

export_weights ──► object store ──► engine ── in_process: the same tensors            ──► vLLM loads
                                          └── async: shared_memory (a file) ──► engine core maps it, vLLM loads
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import ray
import torch

from actors.refit.manifest import WeightLayout
from actors.refit.transport import RefitPlan, Transport, UpdateInfo
from actors.waiting import wait_all

_ALIGNMENT = 64  # bytes; a view of any dtype starts at a multiple of its item size


class Host(Transport):
    """Full tensors in host memory, offered as a reference of Ray's."""

    backend = "host"

    def offer(self, plan: RefitPlan, workers: Mapping[str, Any], namespace: str, engines: Mapping[str, str]) -> tuple[Any, dict[str, Any]]:
        """As `Transport.offer`. The weights are in the object store when it returns, so no worker is still sending."""
        refs = {name: worker.call.remote("export_weights") for name, worker in workers.items()}
        # Only readiness is awaited: the tensors stay in the object store, and each engine maps them there.
        ray.wait(list(refs.values()), num_returns=len(refs), timeout=self._timeout_s)
        weights = refs.pop(next(iter(refs)))
        wait_all(refs, what="refit: export", timeout_s=self._timeout_s)
        return weights, {}

    @contextmanager
    def receive(
        self, offered: Mapping[str, torch.Tensor], layout: WeightLayout, in_process: bool
    ) -> Iterator[tuple[Iterable[UpdateInfo], int]]:
        """As `Transport.receive`; Ray has put the tensors in place of their reference."""
        weights = layout.checked(offered)
        size = sum(tensor.nbytes for tensor in weights.values())
        if in_process:
            yield [{"weights": weights}], size
            return
        with shared_memory(weights) as address:  # copied before requests are paused
            yield [{"shared": address}], size

    @classmethod
    def vllm_engine(cls) -> type:
        """As `Transport.vllm_engine`. Sibling of vLLM's own engines: vllm/distributed/weight_transfer/ipc_engine.py."""
        from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        @dataclass
        class HostUpdateInfo(WeightTransferUpdateInfo):
            weights: Mapping[str, torch.Tensor] | None = None  # tensors of this process
            shared: Mapping[str, Any] | None = None  # or the address of a `shared_memory`

        class HostWeightTransferEngine(WeightTransferEngine[WeightTransferInitInfo, HostUpdateInfo]):
            """Loads by vLLM's layerwise reload, which packs again what the CPU kernels keep packed."""

            init_info_cls = WeightTransferInitInfo
            update_info_cls = HostUpdateInfo
            model: Any

            def init_transfer_engine(self, init_info: WeightTransferInitInfo) -> None:
                pass

            def start_weight_update(self) -> None:
                initialize_layerwise_reload(self.model)

            def receive_weights(self, update_info: HostUpdateInfo) -> None:
                weights = update_info.weights if update_info.weights is not None else open_shared(update_info.shared or {})
                self.model.load_weights(weights.items())

            def finish_weight_update(self) -> None:
                finalize_layerwise_reload(self.model, self.model_config)
                # A tied lm_head that is a module of its own (Llama) receives no tensors, so the reload skips it, and on a CPU it
                # would keep its packed copy of the old embedding.
                for module in self.model.modules():
                    if isinstance(module, ParallelLMHead) and self.model.config.tie_word_embeddings:
                        module.quant_method.process_weights_after_loading(module)

            def shutdown(self) -> None:
                pass

            @staticmethod
            def trainer_send_weights(iterator: Iterator[Any], trainer_args: Any) -> None:
                raise NotImplementedError("weights travel through Ray's object store")

        return HostWeightTransferEngine


@contextmanager
def shared_memory(weights: Mapping[str, torch.Tensor]) -> Iterator[dict[str, Any]]:
    """The address, for `open_shared`, of a copy in an anonymous memory file (memfd) that other processes of this host and user can map.

    The file has no name in any file system and vanishes with the processes that hold it, however they end.

    Raises:
        OSError: not enough memory.
    """
    entries: list[tuple[str, str, list[int], int]] = []
    size = 0
    for name, tensor in weights.items():
        entries.append((name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), size))
        size += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    file = os.memfd_create("grpo-flows-weights")
    try:
        os.posix_fallocate(file, 0, size)  # an error here, not a SIGBUS in the copy below
        address = {"path": f"/proc/{os.getpid()}/fd/{file}", "size": size, "entries": entries}
        for name, view in open_shared(address).items():
            view.copy_(weights[name])
        yield address
    finally:
        os.close(file)


def open_shared(address: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Views of the tensors in the `shared_memory` of this or another process. The mapping lives as long as a view does."""
    flat = torch.from_file(address["path"], shared=True, size=address["size"], dtype=torch.uint8)
    views = {}
    for name, dtype_name, shape, offset in address["entries"]:
        dtype = getattr(torch, dtype_name)
        views[name] = flat[offset : offset + prod(shape) * dtype.itemsize].view(dtype).view(shape)
    return views
