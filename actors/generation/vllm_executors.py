"""What the two ways to run vLLM have in common: interface, arguments, and the record of each token's weight version.

    Engine ──start, abort, load──► InProcess   LLMEngine stepped by a thread of this process        (in_process.py)
       ▲                           Async       AsyncLLM on a loop, engine core in its own process   (streaming.py)
       └──────finished, failed─────────┘

Imports vLLM (15 s): import it only in the engine's process, after `engine.prepare_process`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from pydantic import ValidationError
from vllm.config import CompilationConfig, ModelConfig, WeightTransferConfig
from vllm.inputs.engine import TokensInput, tokens_input
from vllm.model_executor.models import ModelRegistry
from vllm.outputs import RequestOutput
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.output_processor import OutputProcessor

from actors.generation.types import GenerationTimeoutError, UpdateOptions
from actors.generation.versions import Segments, TokenVersions
from actors.models.hf import check_model_dir
from actors.models.memory_parts import ModelShape, share_of_gpu
from actors.refit.transport import UpdateInfo
from configs.base import ConfigError
from configs.rollout import GenerationConfig

_MEETING = "actors.generation.vllm_meeting"  # vLLM's "uni" and "mp"


class Job(NamedTuple):
    """One request for vLLM; `key` is unique among those that run."""

    key: str
    prompt: list[int]
    params: SamplingParams


class Sink(Protocol):
    """Where an executor reports, from its thread: the engine."""

    def finished(self, key: str, output: RequestOutput, segments: Segments) -> None: ...

    def failed(self, doing: str, error: BaseException) -> None: ...


class Executor(ABC):
    """What `Engine` needs of vLLM. Calls may come from several threads; `load`, `sleep` and `wake_up` one at a time."""

    def __init__(self, sink: Sink) -> None:
        self.versions = TokenVersions()
        self.updating = ""  # what `load` is doing; empty outside it
        self.asleep = False
        self._sink = sink

    def _read_limits(self, config: ModelConfig) -> None:
        self.max_model_len, self.vocab_size = int(config.max_model_len), int(config.get_vocab_size())

    @abstractmethod
    def start(self, jobs: Sequence[Job]) -> None:
        """Let them join the running requests, all between the same two steps. Does not wait."""

    @abstractmethod
    def abort(self, keys: Sequence[str]) -> None:
        """Stop those that still run. Does not wait; one that ends meanwhile is reported."""

    @abstractmethod
    def join_transfer(self, init_info: dict[str, Any], timeout_s: float) -> None:
        """vLLM's init_weight_transfer_engine."""

    @abstractmethod
    def load(self, infos: Iterable[UpdateInfo], version: int, options: UpdateOptions, timeout_s: float) -> float:
        """Load complete, checked weights; wake up for it. Returns the seconds for which running requests stood still.

        Requests that are started meanwhile begin under the new weights. Asking `infos` for the next piece may wait for it.

        Raises:
            GenerationTimeoutError: mode "wait", and requests still ran at the deadline. Nothing was loaded; they go on.
        """

    @abstractmethod
    def sleep(self, level: int, timeout_s: float) -> None:
        """Free the GPU memory of the KV cache and the weights (`GenerationConfig.sleep_level`). Nothing may run."""

    @abstractmethod
    def wake_up(self, timeout_s: float) -> None:
        """Take the memory again, with the weights that were kept."""

    def died(self) -> bool:
        """Whether a process that vLLM started is gone. Does not wait."""
        return False

    @abstractmethod
    def shutdown(self) -> None:
        """End vLLM and its processes."""


def engine_arguments(config: GenerationConfig, model_path: str, seed: int, transfers: str) -> dict[str, Any]:
    """Keyword arguments of vLLM's EngineArgs. `transfers` is `Transport.backend`.

    Raises:
        ConfigError: vLLM knows no such `compilation_config`.
    """
    return _memory(config, model_path) | {
        "model": model_path,
        "seed": seed,
        "dtype": config.dtype,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "tensor_parallel_size": config.tensor_parallel_size,
        "distributed_executor_backend": f"{_MEETING}.{'OneWorker' if config.tensor_parallel_size == 1 else 'SeveralWorkers'}",
        "enforce_eager": config.enforce_eager,
        "compilation_config": _compilation(config),
        "enable_prefix_caching": config.enable_prefix_caching,
        # A prompt cut in two rewinds its request's random generator, which only CUDA generators can (vLLM's gpu_model_runner).
        "enable_chunked_prefill": False if current_platform.is_cpu() else None,
        "skip_tokenizer_init": True,  # tokens in, tokens out
        "load_format": "hf",  # not "auto", which takes a file consolidated*.safetensors for the weights
        "generation_config": "vllm",  # not the directory's generation_config.json: the requests say all
        "logprobs_mode": "processed_logprobs",  # after temperature and top_p
        "enable_sleep_mode": config.sleep_level > 0,
        "weight_transfer_config": WeightTransferConfig(backend=transfers),
        "worker_extension_cls": "actors.generation.vllm_workers.WorkerExtension",
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }


def _compilation(config: GenerationConfig) -> CompilationConfig:
    try:
        return CompilationConfig(**config.compilation_config)
    except ValidationError as error:
        wrong = "; ".join(".".join(["generation.compilation_config", *map(str, one["loc"])]) + f": {one['msg']}" for one in error.errors())
        raise ConfigError(f"{wrong} (vLLM's CompilationConfig says what there is)") from error


def look_at_class(model_path: str) -> None:
    """See here what vLLM's class of the model can do. vLLM asks a process, which imports vLLM once more, when it sees the class first."""
    for architecture in check_model_dir(model_path).architectures or ():
        if architecture in ModelRegistry.models:
            ModelRegistry.register_model(architecture, ModelRegistry.models[architecture].load_model_cls())


def _memory(config: GenerationConfig, model_path: str) -> dict[str, Any]:
    # Read on a CPU too, where VLLM_CPU_KVCACHE_SPACE takes whole GiB only.
    arguments: dict[str, Any] = {"kv_cache_memory_bytes": int(config.kv_cache_gib * 2**30)}
    if not current_platform.is_cpu():
        # With the cache's bytes given, vLLM only checks that this share of the GPU is free: what this engine needs, beside a trainer.
        total = current_platform.get_device_total_memory()
        arguments["gpu_memory_utilization"] = share_of_gpu(ModelShape.of(check_model_dir(model_path)), config, total)
    return arguments


def prompt_input(job: Job, version: int) -> TokensInput:
    """The prompt for vLLM. Its blocks in the prefix cache are found again only by requests that start under the same weights.

    An update in flight cannot clear the prefix cache while requests hold blocks; the salt keeps the stale ones from later requests.
    """
    return tokens_input(job.prompt, cache_salt=f"weights-{version}")


def record_versions(processor: OutputProcessor, versions: TokenVersions) -> None:
    """Make `versions` see each step's tokens, with the step's time, before `processor` does: both ways to run vLLM pass here."""
    process: Any = processor.process_outputs

    def recorded(outputs: list[EngineCoreOutput], engine_core_timestamp: float | None = None, iteration_stats: Any = None) -> Any:
        for output in outputs:
            state = processor.request_states.get(output.request_id)  # vLLM's own id; none once the request is aborted
            if state is not None and engine_core_timestamp is not None:
                versions.sampled(state.external_req_id, len(output.new_token_ids), engine_core_timestamp)
        return process(outputs, engine_core_timestamp, iteration_stats)

    processor.process_outputs = recorded  # type: ignore[method-assign,assignment]


def overdue(version: int, running: int) -> GenerationTimeoutError:
    """What an update raises that waited in vain for running requests to end."""
    return GenerationTimeoutError(f"weight version {version} waited for {running} running requests, which did not end in time")


def must_reset(done: bool) -> None:
    """Raises: RuntimeError (vLLM says that it did not reset its prefix cache)."""
    if not done:
        raise RuntimeError("vLLM did not reset its prefix cache after a weight update: requests still hold blocks")
