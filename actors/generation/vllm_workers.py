"""What vLLM imports in each of its workers, as the module of `WorkerExtension`: our transports, and what its sampler is warmed up with."""

from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.sampling_params import SamplingParams

from actors.refit.transports import TRANSPORTS

for _transport in TRANSPORTS.values():
    if (_engine := _transport.vllm_engine()) is not None:
        WeightTransferEngineFactory.register_engine(_transport.backend, _engine)


def _as_requested() -> SamplingParams:
    """As our requests (sampling.py). vLLM's own uses every option there is: kernels that nobody needs, and not the one for logprobs=0."""
    return SamplingParams(temperature=1.0, seed=0, logprobs=0)


SamplingParams.for_sampler_warmup = staticmethod(_as_requested)  # type: ignore[method-assign]


class WorkerExtension:
    """The reason for vLLM to import this module (EngineArgs.worker_extension_cls). Adds nothing to the workers."""
