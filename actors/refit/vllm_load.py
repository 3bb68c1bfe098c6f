"""Backends of vLLM's weight transfer that vLLM does not bring: how weights come into a running engine's workers.

    start_weight_update ──► update_weights(...) ──► finish_weight_update      (vLLM's own protocol)
     layers to meta          load_weights            layers left over, tied lm_head

    host        full tensors in host memory; works on any device
    lean-nccl   vLLM's nccl, which gives its buffers back

Importing this module registers them; vLLM imports it in every worker, as the module of `WorkerExtension`. Sibling of vLLM's, used as it
is: vllm/distributed/weight_transfer/ipc_engine.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from actors.refit.handover import open_shared

HOST, NCCL = "host", "lean-nccl"
BACKENDS = {"auto": HOST, "host": HOST, "ipc": "ipc", "nccl": NCCL}  # what vLLM is told, by GenerationConfig.refit


class WorkerExtension:
    """Makes vLLM import this module in its workers (EngineArgs.worker_extension_cls). Adds nothing to them."""


@dataclass
class HostInitInfo(WeightTransferInitInfo):
    """Nothing to agree on beforehand."""


@dataclass
class HostUpdateInfo(WeightTransferUpdateInfo):
    """Exactly one of the two: tensors of this process, or the address of a `SharedWeights`."""

    weights: Mapping[str, torch.Tensor] | None = None
    shared: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if (self.weights is None) == (self.shared is None):
            raise ValueError("give either `weights` or `shared`")


class HostWeightTransferEngine(WeightTransferEngine[HostInitInfo, HostUpdateInfo]):
    """Loads checkpoint-format tensors by vLLM's layerwise reload, which re-packs what the CPU kernels keep packed."""

    init_info_cls = HostInitInfo
    update_info_cls = HostUpdateInfo

    def init_transfer_engine(self, init_info: HostInitInfo) -> None:
        """Nothing to set up."""

    def start_weight_update(self) -> None:
        """Put the layers on the meta device, ready to receive."""
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: HostUpdateInfo) -> None:
        """Load the tensors; each layer is processed once it is complete."""
        weights = update_info.weights if update_info.weights is not None else open_shared(update_info.shared or {})
        model: Any = self.model
        model.load_weights(weights.items())

    def finish_weight_update(self) -> None:
        """Restore layers that received nothing, then re-pack a tied lm_head."""
        finalize_layerwise_reload(self.model, self.model_config)
        model: Any = self.model
        # A tied lm_head that is a module of its own (Llama) receives no tensors, so the reload skips it, and on a CPU it would go
        # on with its packed copy of the old embedding.
        for module in model.modules():
            if isinstance(module, ParallelLMHead) and model.config.tie_word_embeddings:
                module.quant_method.process_weights_after_loading(module)

    def shutdown(self) -> None:
        """Nothing is held between updates."""

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: dict[str, Any] | Any) -> None:
        """Not used: the trainer's tensors travel through Ray's object store to `Engine.update_weights`."""
        raise NotImplementedError("the host backend has no trainer side: pass the tensors to Engine.update_weights")


class LeanNCCLWeightTransferEngine(NCCLWeightTransferEngine):
    """vLLM's, whose buffers do not stay.

    Each packed broadcast of vLLM 0.26 makes new streams, and torch keeps freed memory for the stream that it was allocated on: the engine
    would come to hold buffers for all of torch's 32 streams (vLLM issue 52950).
    """

    def finish_weight_update(self) -> None:
        """Load what is left over, and give the memory of the update back to the driver."""
        super().finish_weight_update()
        torch.cuda.empty_cache()


WeightTransferEngineFactory.register_engine(HOST, HostWeightTransferEngine)
WeightTransferEngineFactory.register_engine(NCCL, LeanNCCLWeightTransferEngine)
