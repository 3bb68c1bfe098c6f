"""Makes our transports known to vLLM: vLLM imports this module in each of its workers, as that of `WorkerExtension`."""

from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from actors.refit.transports import TRANSPORTS

for _transport in TRANSPORTS.values():
    if (_engine := _transport.vllm_engine()) is not None:
        WeightTransferEngineFactory.register_engine(_transport.backend, _engine)


class WorkerExtension:
    """The reason for vLLM to import this module (EngineArgs.worker_extension_cls). Adds nothing to the workers."""
