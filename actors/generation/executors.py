"""The two ways to run vLLM behind one interface.

    InProcess   engine actor [ LLMEngine: scheduler, worker, model ]                       add all requests, step until done
    Async       engine actor [ AsyncLLM on a loop thread ] ──zmq──► engine core process    requests join a running batch

Imports vLLM (15 s): import it only in the engine's process, after `engine.prepare_process`.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from vllm.config import WeightTransferConfig
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.inputs.engine import tokens_input
from vllm.model_executor.models import ModelRegistry
from vllm.outputs import RequestOutput
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.llm_engine import LLMEngine

from actors.generation import weight_transfer
from actors.generation.types import GenerationTimeoutError
from actors.generation.weights import SharedWeights
from configs.rollout import GenerationConfig

Job = tuple[str, list[int], SamplingParams]  # request id, prompt, parameters


class Executor(Protocol):
    """What `Engine` needs of vLLM. Calls come one at a time."""

    max_model_len: int
    vocab_size: int

    def generate(self, jobs: Sequence[Job], timeout_s: float) -> dict[str, RequestOutput]:
        """Finished outputs by request id.

        Raises:
            GenerationTimeoutError: the rest was aborted.
        """

    def load(self, weights: Mapping[str, torch.Tensor], timeout_s: float) -> None:
        """Load a complete, checked set of weights and forget the prefix cache."""

    def died(self) -> bool:
        """Whether a process that vLLM started is gone. Does not wait."""

    def shutdown(self) -> None:
        """End vLLM and its processes."""


def engine_arguments(config: GenerationConfig, model_path: str, seed: int) -> dict[str, Any]:
    """Keyword arguments of vLLM's EngineArgs."""
    return {
        "model": model_path,
        "seed": seed,
        "dtype": config.dtype,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "tensor_parallel_size": config.tensor_parallel_size,
        "distributed_executor_backend": "uni" if config.tensor_parallel_size == 1 else "mp",
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "kv_cache_memory_bytes": int(config.kv_cache_gib * 2**30),  # read on a CPU too; VLLM_CPU_KVCACHE_SPACE takes whole GiB only
        "enforce_eager": config.enforce_eager,
        "enable_prefix_caching": config.enable_prefix_caching,
        # A prompt cut in two rewinds its request's random generator, which only CUDA generators can (vLLM's gpu_model_runner).
        "enable_chunked_prefill": False if current_platform.is_cpu() else None,
        "skip_tokenizer_init": True,  # tokens in, tokens out
        "generation_config": "vllm",  # not the directory's generation_config.json: the requests say all
        "logprobs_mode": "processed_logprobs",  # after temperature and top_p
        "weight_transfer_config": WeightTransferConfig(backend=weight_transfer.BACKEND),
        "worker_extension_cls": f"{weight_transfer.__name__}.{weight_transfer.HostWorkerExtension.__name__}",
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }


class InProcess:
    """`LLMEngine` in this process. A fixed list of requests gives the same batches, hence the same bits, each time."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        _register_architecture(arguments["model"])
        self._llm = LLMEngine.from_engine_args(EngineArgs(**arguments))
        self.max_model_len = int(self._llm.model_config.max_model_len)
        self.vocab_size = int(self._llm.model_config.get_vocab_size())
        self._llm.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": {}})

    def generate(self, jobs: Sequence[Job], timeout_s: float) -> dict[str, RequestOutput]:
        deadline = time.monotonic() + timeout_s
        added: list[str] = []
        outputs: dict[str, RequestOutput] = {}
        try:
            for request_id, prompt, params in jobs:
                added.append(self._llm.add_request(request_id, tokens_input(prompt), params))
            while self._llm.has_unfinished_requests():
                if time.monotonic() > deadline:
                    raise GenerationTimeoutError(f"{len(jobs) - len(outputs)} of {len(jobs)} responses unfinished after {timeout_s:.0f} s")
                for output in self._llm.step():
                    outputs[output.request_id] = cast(RequestOutput, output)  # pooling models are not served here
        except BaseException:
            self._llm.abort_request(added, internal=True)
            raise
        return outputs

    def load(self, weights: Mapping[str, torch.Tensor], timeout_s: float) -> None:
        for method, kwargs in (
            ("start_weight_update", {}),
            ("update_weights", {"update_info": {"weights": weights}}),
            ("finish_weight_update", {}),
        ):
            self._llm.collective_rpc(method, timeout=timeout_s, kwargs=kwargs)
        _must_reset(self._llm.reset_prefix_cache())

    def died(self) -> bool:
        return False  # it lives and dies with this process

    def shutdown(self) -> None:
        self._llm.engine_core.shutdown()


class Async:
    """`AsyncLLM` driven from a thread with an event loop; the model lives in the engine core's process."""

    def __init__(self, arguments: dict[str, Any], timeout_s: float) -> None:
        self._loop = asyncio.new_event_loop()
        # vLLM's core process is a child of this thread, which lives as long as the actor does.
        threading.Thread(target=self._loop.run_forever, name="vllm-loop", daemon=True).start()
        self._llm: AsyncLLM = self._wait(self._start(arguments), timeout_s, "the engine core to start")
        self.max_model_len = int(self._llm.model_config.max_model_len)
        self.vocab_size = int(self._llm.model_config.get_vocab_size())

    def generate(self, jobs: Sequence[Job], timeout_s: float) -> dict[str, RequestOutput]:
        return self._wait(self._generate(jobs), timeout_s, f"{len(jobs)} responses")

    def load(self, weights: Mapping[str, torch.Tensor], timeout_s: float) -> None:
        shared = SharedWeights(weights)
        try:
            self._wait(self._load(shared.address()), timeout_s, "the engine core to load the weights")
        finally:
            shared.close()

    def died(self) -> bool:
        return bool(self._llm.errored)

    def shutdown(self) -> None:
        self._llm.shutdown(timeout=10)
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _wait[T](self, work: Coroutine[Any, Any, T], timeout_s: float, what: str) -> T:
        # The deadline is set inside the loop: there it cancels the work, and vLLM aborts a cancelled request.
        async def bounded() -> T:
            try:
                async with asyncio.timeout(timeout_s):
                    return await work
            except TimeoutError:
                raise GenerationTimeoutError(f"waited {timeout_s:.0f} s for {what}") from None

        return asyncio.run_coroutine_threadsafe(bounded(), self._loop).result()

    async def _start(self, arguments: dict[str, Any]) -> AsyncLLM:
        llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        await llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info={}))
        return llm

    async def _generate(self, jobs: Sequence[Job]) -> dict[str, RequestOutput]:
        outputs = await asyncio.gather(*(self._one(job) for job in jobs))
        return {output.request_id: output for output in outputs}

    async def _one(self, job: Job) -> RequestOutput:
        request_id, prompt, params = job
        final: RequestOutput | None = None
        async for output in self._llm.generate(tokens_input(prompt), params, request_id):
            final = output
        if final is None:
            raise RuntimeError(f"request {request_id!r} ended without an output")
        return final

    async def _load(self, address: dict[str, Any]) -> None:
        await self._llm.start_weight_update()
        await self._llm.update_weights(WeightTransferUpdateRequest(update_info={"shared": address}))
        await self._llm.finish_weight_update()
        _must_reset(await self._llm.reset_prefix_cache())


def _must_reset(done: bool) -> None:
    if not done:
        raise RuntimeError("vLLM did not reset its prefix cache after a weight update: requests still hold blocks")


def _register_architecture(model_path: str) -> None:
    # Else vLLM starts a second Python (17 s on two cores) just to look at the model class that this process is about to import.
    for name in json.loads((Path(model_path) / "config.json").read_text()).get("architectures", []):
        if name in ModelRegistry.get_supported_archs():
            ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())
